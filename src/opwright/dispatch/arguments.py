"""The arguments of a call: as it has them, as a tuple in schema order, as kernels get them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from opwright.contract.contract import MISSING, Bindings, Contract
from opwright.dispatch.compiled import compiled


class Arguments:
    """The ways in which the arguments of one operator are passed.

    Attributes:
        normalize: turns the arguments of a call into a tuple in schema order.
        pass_to: `pass_to(function, values, *first, **more)` calls a function with such a tuple, in the form of a call.
    """

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.names = [p.name for p in contract.parameters]
        self._count = sum(not p.keyword_only for p in contract.parameters)
        self._named = self.names[self._count :]
        self.normalize = self._compile_and_normalize
        self.pass_to: Callable[..., Any] = self._pass if self._named else _pass_all_positional

    def _compile_and_normalize(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Only the first call compiles: most operators of a package are never called this way."""
        values = ", ".join(self.names)
        source = f"def make({signature_text(self.contract, out=False)}):\n    return ({values},)\n"
        self.normalize = compiled(f"arguments of {self.contract.subject}", source, __name__)
        return self.normalize(*args, **kwargs)

    def _pass(self, function: Callable[..., Any], values: Sequence[Any], *first: Any, **more: Any) -> Any:
        named = dict(zip(self._named, values[self._count :], strict=True))
        return function(*first, *values[: self._count], **named, **more)

    def encode(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Returns arguments with the numbers of choices in place of their names."""
        pairs = zip(self.contract.parameters, values, strict=True)
        return tuple(p.choices.index(v) if p.kind == "choice" else v for p, v in pairs)

    def decode(self, coded: Sequence[Any]) -> tuple[Any, ...]:
        """Returns arguments with the names of choices in place of their numbers."""
        pairs = zip(self.contract.parameters, coded, strict=True)
        return tuple(p.choices[v] if p.kind == "choice" else v for p, v in pairs)

    def bind(self, values: Sequence[Any]) -> Bindings:
        """Checks arguments against the contract.

        Raises:
            ContractError: the subclass for what is broken.
        """
        return self.contract.bind(dict(zip(self.names, values, strict=True)))

    def mutated(self, values: Sequence[Any]) -> list[Any]:
        """Returns the arguments that the operator writes into."""
        return [v for p, v in zip(self.contract.parameters, values, strict=True) if p.mutated]


def _pass_all_positional(function: Callable[..., Any], values: Sequence[Any], *first: Any, **more: Any) -> Any:
    return function(*first, *values, **more)


def signature_text(contract: Contract, *, out: bool) -> str:
    """Returns the parameters of a function with an operator's signature, as Python text."""
    parts: list[str] = []
    for parameter in contract.parameters:
        if parameter.keyword_only and "*" not in parts:
            parts.append("*")
        default = "" if parameter.default is MISSING else f"={parameter.default!r}"
        parts.append(f"{parameter.name}{default}")
    if out:
        parts += [] if "*" in parts else ["*"]
        parts.append("out=None")
    return ", ".join(parts)
