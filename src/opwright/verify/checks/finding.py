"""What checks have in common: their findings, and why one does not apply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opwright.contract.declaration import code_of
from opwright.contract.sweep import Case
from opwright.errors import ContractError, plural
from opwright.verify.compare import Difference
from opwright.verify.devices import CPU
from opwright.verify.oracle_process import Computation, Output, frames_of
from opwright.verify.rounding import SCATTERED_SUMS, OperatorWatch
from opwright.verify.target import Target
from opwright.verify.tensors import are_same, copy_of, tensors_of


class Skipped(Exception):
    """Raised by a check that does not apply; the text is the reason."""


@dataclass
class Finding:
    """What a check found on one case; `message` is empty when it passes.

    `undecided`: why the oracle cannot say whether it passes; "" if it can.
    `is_fatal`: further calls may crash the process, so no other check runs; the text says why. `has_ended`: it is
    this process alone that can make no further calls; another one can. `numbers`: those of the case, if it is small.
    """

    case: str
    message: str = ""
    pattern: str = ""
    worst_ulp: float | None = None
    worst_ratio: float | None = None
    is_fatal: str = ""
    has_ended: bool = False
    undecided: str = ""
    numbers: str = ""

    def note_worst(self, difference: Difference) -> None:
        """Keeps the error of the element that is nearest to its allowance."""
        if self.worst_ratio is None or difference.worst_ratio > self.worst_ratio:
            self.worst_ulp, self.worst_ratio = difference.worst_ulp, difference.worst_ratio


def first_line(error: object, lines: int = 1) -> str:
    text = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(text[:lines])[:400] or type(error).__name__


def origin(error: BaseException, target: Target) -> str:
    """Returns words to put behind an exception that comes from the reference of an operator; else ""."""
    if target.operator is None:
        return ""
    code = code_of(target.operator.declaration.reference)
    if (code.co_filename, code.co_firstlineno) not in frames_of(error):
        return ""
    if "does not have a grad_fn" not in str(error):
        return ", in its reference"
    # PyTorch's message for `torch.autograd.grad` within an operator tells nothing of the reason.
    return ", in its reference: operators run below autograd, which records nothing there; write the derivative out"


def agree(
    target: Target,
    got: Any,
    wanted: Any,
    computation: Computation,
    values: Any,
    of_gradient: bool = False,
    may_round: bool = False,
) -> bool:
    """Returns whether the results of a call are those of another one on the same input.

    Last bits may differ where the operator is declared `deterministic=False`: results are held to the allowance of
    numerics then. Where PyTorch computes it and adds in any order, no author has a kernel to correct.

    Args:
        got, wanted: results, tensors in lists.
        computation: computes the same from the values, by the reference.
        values: the input.
        of_gradient: whether the results are gradients.
        may_round: whether last bits of a callable may differ too.
    """
    got, wanted = tensors_of(got), tensors_of(wanted)
    if len(got) != len(wanted):
        return False
    if are_same(got, wanted):
        return True
    if any((a.shape, a.dtype) != (b.shape, b.dtype) for a, b in zip(got, wanted, strict=True)):
        return False
    if target.operator is None and not may_round:
        return False
    values = copy_of(values, None if target.operator is None else CPU)
    if target.operator is not None:
        is_unsteady = not is_own(target, of_gradient) and adds_in_any_order(target, computation, values)
        if is_unsteady and not (of_gradient and target.operator.backward_operator):
            return True
        if not is_unsteady and target.operator.declaration.deterministic:
            return False
    expected = [e for e in target.expect(computation, values) if e is not None]
    return len(expected) == len(got) and not any(
        target.compare(g, e).message for g, e in zip(got, expected, strict=True)
    )


def outputs_of_reference(target: Target, values: Sequence[Any]) -> list[Any]:
    """Returns the outputs of the reference."""
    return target.reference(values)


def outputs_and_mutated(target: Target, values: Sequence[Any]) -> list[Any]:
    """Returns the outputs of the reference, and behind them the arguments that are written into."""
    values = list(values)
    outputs = target.reference(values)
    return [*outputs, *target.written(values)]


def outputs_by_contract(target: Target, case: Case) -> list[tuple[Sequence[int], torch.dtype]]:
    """Returns the shape and dtype of each output: from the contract, or the reference where only the data know it."""
    contract = target.operator.contract
    if contract.data_dependent:
        return [(t.shape, t.dtype) for t in target.reference(copy_of(case.values))]
    bindings = contract.bind(contract.name_arguments(case.values))
    return [(contract.output_shape(o, bindings), contract.output_dtype(o, bindings)) for o in contract.outputs]


def tell_reference(target: Target, case: Case, results: Sequence[Any]) -> str:
    """Returns where the reference does not return what its annotation says.

    Its declaration has tried it with few sizes and one dtype.

    Args:
        results: of the reference: anything with a shape and a dtype.
    """
    if target.operator is None or target.operator.contract.data_dependent:
        return ""
    try:
        promised = outputs_by_contract(target, case)
    except ContractError:  # a call of the operator says what is wrong
        return ""
    for output, result, (shape, dtype) in zip(target.operator.contract.outputs, results, promised, strict=False):
        if result is None:
            continue
        if result.dtype != dtype:
            told = f"returns {result.dtype}, and its annotation says {dtype}; cast it with `.to`"
            return f"`{output.name}`: the reference {told}"
        if list(result.shape) != list(shape):
            told = f"returns the shape {list(result.shape)}, and its annotation `{output.type}` says {list(shape)}"
            return f"`{output.name}`: the reference {told}; correct it, or let it raise an error for such inputs"
    return ""


def is_own(target: Target, of_gradient: bool = False) -> bool:
    """Returns whether a kernel of the operator's author computes the results, and not PyTorch."""
    behind = target.operator.backward_operator if of_gradient else target.operator
    return behind is not None and target.device.type in behind.declaration.sources


def adds_in_any_order(target: Target, computation: Computation, values: Sequence[Any]) -> bool:
    """Returns whether operators of PyTorch that may add in any order are among those of a computation."""
    with OperatorWatch() as watch:
        computation(target, copy_of(values))
    return not SCATTERED_SUMS.isdisjoint(watch.operators)


def tell_difference_from(
    target: Target, values: Sequence[Any], alone: Sequence[Any], outputs: Sequence[Any]
) -> tuple[str, str]:
    """Returns how outputs are wrong that are not, bit for bit, those of a call alone; and the pattern."""
    found, wanted = tensors_of(outputs), tensors_of(alone)
    if len(found) == len(wanted) and are_same(found, wanted):
        return "", ""
    with torch.no_grad():
        expected = target.expect(outputs_of_reference, list(values))
        return find_difference(target, outputs, expected, target.output_names(len(expected)))


def find_difference(
    target: Target, outputs: Sequence[Any], expected: Sequence[Output | None], names: Sequence[str]
) -> tuple[str, str]:
    """Returns the first difference between results and what they must be, with its name, and its pattern."""
    if len(outputs) != len(expected):
        return f"returned {plural(len(outputs), 'output')}, expected {len(expected)}", ""
    for name, output, wanted in zip(names, outputs, expected, strict=True):
        if isinstance(output, torch.Tensor) and wanted is not None:
            found = target.compare(output, wanted)
            if found.message:
                return f"{name}: {found.message}", found.pattern
    return "", ""
