"""How much less precise than PyTorch the results of an operator may be, as its author declares."""

from __future__ import annotations

from dataclasses import dataclass

from opwright.errors import DeclarationError


@dataclass(frozen=True)
class Factor:
    """Results may err this many times what they otherwise may: `precision=Factor(4, "an approximate exponential")`.

    Attributes:
        factor: at least 1.
        reason: why; it stands in the record and the result of verify.
        of_largest: whether each element may err as much as the element of its output that may err most: the error of
            an FFT, of Winograd's or of Strassen's products is bounded by the norm of the result, not by each element.
            A NaN in an input may then spread over all results.
    """

    factor: float
    reason: str
    of_largest: bool = False

    def __post_init__(self) -> None:
        if not self.factor >= 1:
            raise ValueError(f"Factor: the factor must be 1 or more, got {self.factor}")
        if not self.reason.strip():
            raise ValueError("Factor: give the reason, which verify prints")

    def __str__(self) -> str:
        of_largest = ", and each element as the one that may err most" if self.of_largest else ""
        return f"{self.factor:g} times as much{of_largest}: {self.reason}"


# "tf32": products of float32 matrices in TF32, whose inputs are rounded to 10 bits behind the leading one.
Precision = Factor | str


def check_precision(precision: Precision | None, subject: str) -> None:
    """Raises DeclarationError for an invalid precision."""
    if precision is not None and precision != "tf32" and not isinstance(precision, Factor):
        raise DeclarationError(
            subject,
            f"unknown precision {precision!r}",
            rows=[("expected", "'tf32' | Factor(4, \"the reason\") | None")],
            hint='`from opwright import Factor`, `precision=Factor(4, "an approximate exponential")`',
        )
