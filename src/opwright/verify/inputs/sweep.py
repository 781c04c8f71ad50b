"""The inputs that follow from a contract, and which of them a reference takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from opwright._torch import tree_map
from opwright.contract.contract import Contract
from opwright.contract.sweep import LONG, Case, Sweep
from opwright.errors import plural
from opwright.verify.inputs.budget import is_too_large, parts_of, takes_longer
from opwright.verify.oracle import few_threads
from opwright.verify.tensors import copy_of

_FULL_SEEDS = 3
# Of a long axis: the largest tensor that the reference makes, and its time for an eighth of that axis.
_MAX_ELEMENTS, _LONG_SECONDS = 2**22, 0.01


def sweep_cases(
    contract: Contract,
    reference: Callable[[Sequence[Any]], Any],
    effort: str,
    forward: Any = None,
    inputs: Callable[[Case], Sequence[Any]] = lambda case: copy_of(case.values),
) -> Iterator[tuple[torch.dtype | None, Case]]:
    """Yields the inputs that follow from a contract, with the dtype that each is about.

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
    for sweep in sweeps:
        sweep.short = frozenset(sweep.long_axes()) - set(long)
    for dtype in dtypes:
        for sweep in sweeps:
            for case in sweep.cases(dtype):
                yield dtype, case
        if dtype == dtypes[0] or effort == "full":
            for axis in long:
                yield dtype, sweeps[0].long(dtype, axis, LONG[effort])


def refusal_of(reference: Callable[[Sequence[Any]], Any], case: Case) -> str:
    """Returns what a reference raises on a case."""
    try:
        with torch.no_grad():
            reference(copy_of(case.values))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return "nothing"


def describe_refused(name: str, refused: Sequence[Case], accepted: int, why: str) -> str:
    """Returns on how many inputs nothing is checked, since the reference raises; `why` is its error on the first."""
    count = len(refused)
    return (
        f"the reference of `{name}` refuses {count} of {plural(count + accepted, 'input')}, so nothing is checked on "
        f"{'it' if count == 1 else 'them'} (first: {refused[0]}: {why})"
    )


def accepts(contract: Contract, reference: Callable[[Sequence[Any]], Any], case: Case) -> bool:
    """Returns whether the values of a case are within the domains of a contract, and the reference takes them."""
    copied = tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, list(case.values))
    try:
        if contract.find_outside(case.values) is not None:
            return False
        with torch.no_grad(), few_threads(copied):
            reference(copied)
    except Exception:  # whatever a reference may raise to refuse
        return False
    return True
