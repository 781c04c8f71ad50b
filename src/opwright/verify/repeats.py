"""Whether two calls on one input gave the same: the same bits, or, where sums may be in any order, what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from opwright.verify.devices import CPU
from opwright.verify.jitter import SCATTERED_SUMS
from opwright.verify.oracle_process import Computation
from opwright.verify.subject import Subject
from opwright.verify.tensors import are_same, copy_of, tensors_of


def agree(
    subject: Subject, got: Any, wanted: Any, computation: Computation, values: Any, of_gradient: bool = False
) -> bool:
    """Returns whether the results of a call are those of another one on the same input.

    Last bits may differ where the operator is declared `deterministic=False`, or where PyTorch computes it and adds
    in any order: such results are held to the allowance of numerics.

    Args:
        got, wanted: results, tensors in lists.
        computation: computes the same from the values, by the reference.
        values: the input.
        of_gradient: whether the results are gradients.
    """
    got, wanted = tensors_of(got), tensors_of(wanted)
    if len(got) != len(wanted):
        return False
    if are_same(got, wanted):
        return True
    if subject.operator is None or any(
        (a.shape, a.dtype) != (b.shape, b.dtype) for a, b in zip(got, wanted, strict=True)
    ):
        return False
    values = copy_of(values, CPU)
    if subject.operator.declaration.deterministic and (
        _is_own(subject, of_gradient) or not _adds_in_any_order(subject, computation, values)
    ):
        return False
    expected = [e for e in subject.expect(computation, values) if e is not None]
    return len(expected) == len(got) and not any(
        subject.compare(g, e).message for g, e in zip(got, expected, strict=True)
    )


def outputs_of_reference(subject: Subject, values: Sequence[Any]) -> list[Any]:
    """Returns the outputs of the reference."""
    return subject.reference(values)


def outputs_and_mutated(subject: Subject, values: Sequence[Any]) -> list[Any]:
    """Returns the outputs of the reference, and behind them the arguments that are written into."""
    values = list(values)
    outputs = subject.reference(values)
    return [*outputs, *(values[i] for i in subject.mutated())]


def _is_own(subject: Subject, of_gradient: bool) -> bool:
    """Returns whether a kernel of the operator's author computes the results, and not PyTorch."""
    behind = subject.operator.backward_operator if of_gradient else subject.operator
    return behind is not None and subject.device.type in behind.declaration.sources


def _adds_in_any_order(subject: Subject, computation: Computation, values: list[Any]) -> bool:
    seen = _Seen()
    with seen:
        computation(subject, copy_of(values))
    return not seen.packets.isdisjoint(SCATTERED_SUMS)


class _Seen(TorchDispatchMode):
    """Notes the operators of PyTorch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.packets: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.packets.add(func.overloadpacket)
        return func(*args, **(kwargs or {}))
