"""The values that an argument takes: `Positive`, `Probability`, `Range(0, 10)`, `Index("n")`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from opwright.contract.axes import Computed


@dataclass(frozen=True)
class Range:
    """The finite numbers from `low` to `high`, both included: `Annotated[Float[Tensor, "n"], Range(0, 1)]`.

    An infinite end reaches to the largest number of the dtype. NaN and infinities are in no range.

    Attributes:
        excludes_low: whether `low` itself is outside.
        name: how it is written, where it has a name.
    """

    low: float
    high: float
    excludes_low: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        text = next((end for end in (self.high, self.low) if isinstance(end, str)), None)
        if text is not None:
            raise TypeError(
                f'the ends of `Range` are numbers; `Index("{text}+1")` takes the integers from 0 to `{text}`'
            )
        if not self.low <= self.high:  # so is NaN refused
            raise ValueError(f"`{self}` is empty; the first number is the smallest value, the second the largest")

    def __str__(self) -> str:
        return self.name or f"Range({self.low:g}, {self.high:g})"

    def within(self, sizes: Mapping[str, int]) -> Range:
        """Returns the range itself: it does not depend on the sizes of a call."""
        return self

    @property
    def is_bounded(self) -> bool:
        """Whether it has both ends."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def ends(self, dtype: torch.dtype) -> tuple[float, float]:
        """Returns the smallest and the largest value that a dtype has in it."""
        if not dtype.is_floating_point:
            info = torch.iinfo(dtype)
            low = max(math.floor(self.low) + 1 if self.excludes_low else math.ceil(max(self.low, info.min)), info.min)
            return low, math.floor(min(self.high, info.max))
        limits = torch.finfo(dtype)
        low, high = (
            torch.tensor(max(-limits.max, min(end, limits.max)), dtype=torch.float64) for end in (self.low, self.high)
        )
        least, most = low.to(dtype), high.to(dtype)
        if least.double() < low or (self.excludes_low and least.double() == self.low):
            least = torch.nextafter(least, torch.tensor(math.inf, dtype=dtype))
        if most.double() > high:
            most = torch.nextafter(most, torch.tensor(-math.inf, dtype=dtype))
        return least.item(), most.item()

    def contains(self, value: Any) -> bool:
        """Returns whether a number, or every element of a tensor, is in it.

        Negative zero is not where 0 is the smallest value: its reciprocal is negative.
        """
        if not isinstance(value, (int, float)):
            return bool(self.mask_of(value).all())
        # Without torch: the build of a wheel reads declarations where it is not.
        is_inside = (value > self.low if self.excludes_low else value >= self.low) and value <= self.high
        is_negative_zero = self.low == 0 and isinstance(value, float) and math.copysign(1, value) < 0
        return is_inside and math.isfinite(value) and not is_negative_zero

    def mask_of(self, value: torch.Tensor) -> torch.Tensor:
        """Returns which elements are in it."""
        if not value.is_floating_point():
            return (value > self.low if self.excludes_low else value >= self.low) & (value <= self.high)
        wide = value.double()
        is_inside = (wide > self.low if self.excludes_low else wide >= self.low) & (wide <= self.high)
        if self.low == 0:
            is_inside &= ~value.signbit()
        return is_inside if self.is_bounded else is_inside & wide.isfinite()

    def fold(self, values: torch.Tensor) -> torch.Tensor:
        """Returns floating-point numbers with those outside reflected at the ends; the others stay."""
        is_outside = ~self.mask_of(values)
        outside = values[is_outside]
        if not outside.numel():
            return values
        low, high = self.ends(values.dtype)
        reflected = outside
        if self.is_bounded:
            width = max(high - low, torch.finfo(values.dtype).tiny)
            around = torch.remainder(outside - low, 2 * width)
            reflected = low + torch.minimum(around, 2 * width - around)
        elif math.isfinite(self.low):
            reflected = low + (outside - low).abs()
        elif math.isfinite(self.high):
            reflected = high - (high - outside).abs()
        folded = values.clone()
        folded[is_outside] = reflected.nan_to_num(low).clamp(low, high) + 0.0  # no negative zero
        return folded


@dataclass(frozen=True)
class Index:
    """The indices of an axis, from 0 to its size - 1: `Annotated[Int64[Tensor, "m"], Index("n")]`.

    Attributes:
        axis: its name, or an expression of axes and int arguments as in a tensor's annotation.
    """

    axis: str

    def __post_init__(self) -> None:
        if not isinstance(self.axis, str):
            raise TypeError(
                f"`Index` takes the name of an axis in quotes, got {self.axis!r}; `Range(0, 9)` has fixed ends"
            )

    def __str__(self) -> str:
        return f'Index("{self.axis}")'

    @property
    def names(self) -> tuple[str, ...]:
        """The axes and int arguments that it depends on."""
        return Computed(self.axis).names

    def within(self, sizes: Mapping[str, int]) -> Range | None:
        """Returns the indices in a call with these sizes; None where there are none."""
        size = Computed(self.axis).evaluate(sizes)
        return Range(0, size - 1, name=f"{self}, [0, {size - 1}]") if size > 0 else None


Domain = Range | Index

Positive = Range(0, math.inf, excludes_low=True, name="Positive")
NonNegative = Range(0, math.inf, name="NonNegative")
Probability = Range(0, 1, name="Probability")
