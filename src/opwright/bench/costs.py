"""What a measured call moves and computes, and what it cannot do without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opwright.bench.inputs import all_tensors
from opwright.bench.workload import Workload, applier, as_list
from opwright.dispatch.operator import Operator
from opwright.dispatch.reference import outputs_of
from opwright.spec.cost import Cost, default_cost


def cost_of(direction: str, work: Workload, operator: Operator | None, results: Sequence[Any]) -> Cost:
    """Returns what a call moves and computes: as declared, else as the contract says, else all its tensors."""
    outputs = [o for o in results if isinstance(o, torch.Tensor)]
    if operator is None:
        return Cost(sum(size_of(t) for t in [*all_tensors(work.values), *outputs]))
    if direction == "forward":
        return operator.cost_of(work.values, outputs)
    with torch.no_grad():
        forward = outputs_of(operator.contract, applier(operator.function, operator)(work.values))
    gradients = outputs[-len(outputs) + len(as_list(forward)) :] if direction == "step" else outputs
    backward = _backward_cost(work, operator, forward, gradients)
    if direction == "backward":
        return backward
    first = operator.cost_of(work.values, forward)
    flop = None if first.flop is None or backward.flop is None else first.flop + backward.flop
    return Cost(first.bytes_moved + backward.bytes_moved, flop)


def _backward_cost(
    work: Workload, operator: Operator, forward: Sequence[Any], gradients: Sequence[torch.Tensor]
) -> Cost:
    backward, contract = operator.backward_operator, operator.contract
    if backward is None:
        moved = default_cost(contract, work.values, gradients).bytes_moved
        return Cost(moved + sum(size_of(o) for o in forward))
    known = {p.name: v for p, v in zip(contract.parameters, work.values, strict=True)}
    known |= {f"grad_{o.name}": r for o, r in zip(contract.outputs, forward, strict=True)}
    known |= {o.name: r for o, r in zip(contract.outputs, forward, strict=True) if o.name not in known}
    return backward.cost_of([known[p.name] for p in backward.contract.parameters], gradients)


def least_cost(operator: Operator | None, cost: Cost, results: Sequence[Any], values: Sequence[Any]) -> Cost:
    """Returns what a call cannot do without: the declared cost, else writing the results that are not views.

    Which inputs are read in full is not known without a declaration: an index chooses.
    """
    if operator is not None and operator._cost is not None:
        return cost
    given = {t.untyped_storage().data_ptr() for t in all_tensors(values)}
    own = {t.untyped_storage().data_ptr(): t for t in results if isinstance(t, torch.Tensor)}
    return Cost(sum(size_of(t) for address, t in own.items() if address not in given))


def size_of(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
