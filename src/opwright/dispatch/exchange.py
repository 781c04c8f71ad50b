"""Calls on shards of an axis that the operator reduces: the ranks exchange sums and maxima (`@name.exchange`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from opwright.contract.axes import Named
from opwright.dispatch.record import Operator
from opwright.dispatch.sharding_rules import Rule, Signature, names

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


class Ranks(NamedTuple):
    """The ranks that hold the shards of one axis, as the function of `@name.exchange` sees them.

    Every rank calls the same methods in the same order, those with empty shards too.

    Attributes:
        size: that of the whole axis.
        mesh: of the call.
        dims: the dimensions of the mesh along which the axis is sharded.
    """

    size: int
    mesh: Any
    dims: tuple[int, ...]

    @property
    def start(self) -> int:
        """The index in the whole axis of the first element of this rank."""
        size, start = self.size, 0
        place = self.mesh.get_coordinate()
        for dim in self.dims:
            each = -(-size // self.mesh.size(dim))
            skipped = torch.sym_min(place[dim] * each, size)
            start, size = start + skipped, torch.sym_min(each, size - skipped)
        return start

    def sum(self, *numbers: torch.Tensor) -> Any:
        """Returns the sums over the ranks of one or several tensors of one shape and dtype, in one exchange."""
        return self._reduce("sum", numbers)

    def max(self, *numbers: torch.Tensor) -> Any:
        """Returns the maxima over the ranks. Whether NaN spreads depends on the backend."""
        return self._reduce("max", numbers)

    def _reduce(self, how: str, numbers: Sequence[torch.Tensor]) -> Any:
        joined = torch.stack(numbers) if len(numbers) > 1 else numbers[0].contiguous()
        for dim in self.dims:
            if self.mesh.size(dim) > 1:
                joined = names().all_reduce(joined, how, (self.mesh, dim))
        return joined.unbind() if len(numbers) > 1 else joined


def exchange_rule(
    operator: Operator, signature: Signature, placements: Sequence[Placement] | None = None
) -> Rule | None:
    """Returns the rule by which ranks exchange numbers within a call; None where no rows are sharded so.

    Args:
        operator: the operator.
        signature: of the call.
        placements: along one axis of a mesh, the tensors as they are. By default, sharded.
    """
    if operator.exchange_of is None:
        return None
    t, axis = names(), Named(operator.exchange_of[0])
    spans = [[span for each, span in s.parameter.type.spans(s.ndim) if each == axis] for s in signature.slots]
    inputs = tuple(t.Shard(each[0].start) if each else t.Replicate() for each in spans)
    # A sharded weight alone is not a reason to shard the results.
    rows = [i for i, slot in enumerate(signature.slots) if spans[i] and len(slot.parameter.type.axes) > 1]
    if placements is not None and all(placements[i] != inputs[i] for i in rows):
        return None
    outputs = [operator.rules.shard_of(o, axis, 0, signature) or t.Replicate() for o in operator.contract.outputs]
    return Rule(inputs, tuple(outputs), exchanges=True)
