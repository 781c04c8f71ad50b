"""The inputs that follow from a contract, and which of them a reference takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from opwright._torch import tree_map
from opwright.contract.contract import Contract
from opwright.contract.sweep import LONG, Case, Sweep, domain_in
from opwright.errors import ContractError, plural
from opwright.verify.inputs.budget import is_too_large, parts_of, takes_longer
from opwright.verify.oracle import are_finite, few_threads, to_oracle
from opwright.verify.tensors import copy_of, tensors_of

ZEROS = "zeros in"  # how the labels of such cases begin
_FULL_SEEDS = 3
_ROWS = 5
# Of a long axis: the largest tensor that the reference makes, and its time for an eighth of that axis.
_MAX_ELEMENTS, _LONG_SECONDS = 2**22, 0.01
_LARGE_SECONDS, _SHARES = 0.1, (1.0, 1 / 8, 1 / 64)  # of a large case, and how large it is made to keep to them


def sweep_cases(
    contract: Contract,
    reference: Callable[[Sequence[Any]], Any],
    effort: str,
    forward: Any = None,
    inputs: Callable[[Case], Sequence[Any]] = lambda case: copy_of(case.values),
) -> Iterator[Case]:
    """Yields the inputs that follow from a contract.

    Args:
        forward: what a backward is the backward of, as `Sweep` takes it.
        inputs: returns fresh copies of the arguments of a case, where the reference is to compute.
    """
    dtypes = contract.scalar_dtypes
    sweeps = [Sweep(contract, seed, forward, effort) for seed in range(_FULL_SEEDS if effort == "full" else 1)]

    def may_be_long(axis: str) -> bool:
        parts = [sweeps[0].long(dtypes[0], axis, size) for size in parts_of(LONG[effort])]

        def is_slow(part: Case) -> bool:
            return takes_longer(reference, lambda: inputs(part), _LONG_SECONDS)

        return not is_too_large(reference, parts, _MAX_ELEMENTS, is_slow)

    long = [axis for axis in sweeps[0].long_axes() if may_be_long(axis)]
    share = share_of(sweeps[0], reference, inputs)
    for sweep in sweeps:
        sweep.short, sweep.share = frozenset(sweep.long_axes()) - set(long), share
    for dtype in dtypes:
        for sweep in sweeps:
            yield from sweep.cases(dtype)
        if dtype == dtypes[0] or effort == "full":
            yield from (case for case in _far_and_zero(sweeps[0], dtype) if _gives_finite_numbers(reference, case))
            for axis in long:
                yield sweeps[0].long(dtype, axis, LONG[effort])


def share_of(sweep: Sweep, reference: Callable[[Sequence[Any]], Any], inputs: Callable[[Case], Sequence[Any]]) -> float:
    """Returns how large the large cases of a sweep can be: less than 1 where the reference loops in Python, say."""
    dtype, options = sweep.contract.scalar_dtypes[0], sweep.option_sets()[0]

    def is_slow(share: float) -> bool:
        case = sweep.make("large", dtype, *sweep.large_sizes(share=share), options)
        try:
            return takes_longer(reference, lambda: inputs(case), _LARGE_SECONDS)
        except Exception:  # whatever a reference may raise to refuse
            return False

    is_slow(_SHARES[-1])  # the first call may load something
    return next((share for share in _SHARES if not is_slow(share)), _SHARES[-1])


def _far_and_zero(sweep: Sweep, dtype: torch.dtype | None) -> Iterator[Case]:
    """Yields zeros, whose norm may be a divisor, and numbers whose squares are large beside their variance."""
    floats = [p for p in sweep.contract.tensors if p.type.family.has_floats]
    far = {p.name: partial(_far, i) for i, p in enumerate(floats) if domain_in(p, {}) is None}
    zeros = {p.name: lambda shape, dtype: torch.zeros(shape, dtype=dtype) for p in floats}
    for label, filled in ((f"{ZEROS} all tensors", zeros), ("numbers near 100", far)):
        if filled:
            options = sweep.option_sets()[0]
            yield sweep.make(label, dtype, sweep.base_sizes(), (_ROWS,), options, filled=filled)


def _far(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).add(100.0).to(dtype)


def _gives_finite_numbers(reference: Callable[[Sequence[Any]], Any], case: Case) -> bool:
    """Returns whether results are finite, also in float64, and none is an index.

    Indices of equal numbers may come in any order.
    """
    for values in (copy_of(list(case.values)), to_oracle(list(case.values))):
        try:
            with torch.no_grad(), few_threads(values):
                outputs = tensors_of(reference(values))
        except Exception:  # whatever a reference may raise to refuse
            return False
        if not are_finite([outputs, values]) or not all(o.is_floating_point() for o in outputs):
            return False
    return True


def refusal_of(reference: Callable[[Sequence[Any]], Any], case: Case, contract: Contract | None = None) -> str:
    """Returns what a reference raises on a case."""
    try:
        _ask(contract, reference, case)
    except _OtherShapeError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return "nothing"


class _OtherShapeError(Exception):
    """A result for an empty input has another shape than the contract says."""


def _ask(contract: Contract | None, reference: Callable[[Sequence[Any]], Any], case: Case) -> None:
    """Calls a reference.

    Raises:
        _OtherShapeError: a tensor is empty, and a result has another shape than the contract says, as that of F.conv1d
            for zero channels.
    """
    copied = tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, list(case.values))
    with torch.no_grad(), few_threads(copied):
        results = reference(copied)
    if contract is None or contract.data_dependent or all(t.numel() for t in tensors_of(case.values)):
        return
    try:
        bindings = contract.bind(contract.name_arguments(case.values))
        shapes = [list(contract.output_shape(output, bindings)) for output in contract.outputs]
    except (ContractError, ArithmeticError):  # a call of the operator says what is wrong
        return
    for output, shape, result in zip(contract.outputs, shapes, results, strict=False):
        if isinstance(result, torch.Tensor) and list(result.shape) != shape:
            got = f"it returns {list(result.shape)} for `{output.name}`"
            raise _OtherShapeError(f"{got}, where its annotation says {shape}")


def describe_refused(name: str, refused: Sequence[Case], accepted: int, why: str) -> str:
    """Returns on how many inputs nothing is checked, since the reference raises; `why` is its error on the first."""
    count = len(refused)
    return (
        f"the reference of `{name}` refuses {count} of {plural(count + accepted, 'input')}, so nothing is checked on "
        f"{'it' if count == 1 else 'them'} (first: {refused[0]}: {why})"
    )


def accepts(contract: Contract, reference: Callable[[Sequence[Any]], Any], case: Case) -> bool:
    """Returns whether the values of a case are within the domains of a contract, and the reference takes them."""
    try:
        if contract.find_outside(case.values) is not None:
            return False
        _ask(contract, reference, case)
    except Exception:  # whatever a reference may raise to refuse
        return False
    return True
