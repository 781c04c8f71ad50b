"""What a record says of one input."""

from __future__ import annotations


class OnCase:
    """A part of a record about one input.

    Attributes:
        case: the input, as `f32[7, 13] approximate='tanh'`. Records are joined by it, so it has no names of tensors:
            they may change.
        named_case: the same with those names, as `x=f32[7, 13] approximate='tanh'`; "" in older records.
    """

    case: str
    named_case: str

    @property
    def input(self) -> str:
        """The case as people read it."""
        return self.named_case or self.case
