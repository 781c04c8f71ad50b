"""The values that a reference is made for, where no domain is declared: found by trying.

An integer tensor whose values are refused from the size of an axis on holds indices of that axis. A floating-point
tensor that makes the results NaN unless its values are positive, or a probability, is taken to hold those.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from opwright.contract.axes import Anonymous, Variadic
from opwright.contract.contract import Contract, Parameter
from opwright.contract.domains import Index, NonNegative, Positive, Probability, Range
from opwright.contract.sweep import Case, Sweep, tensors_in

Reference = Callable[[list[Any]], Sequence[Any]]

_SCALES = (1.0, 10.0)
_CANDIDATES = (NonNegative, Range(-1, 1), Probability)  # the wider ones first
_BATCH = (29, 3)


def find_likely(contract: Contract, reference: Reference) -> Contract:
    """Returns the contract with the likely domains of its tensors.

    Args:
        reference: takes the arguments in schema order; may write into mutated ones.
    """
    with torch.no_grad():
        for parameter in contract.tensors:
            own = parameter.type.family.dtypes[0]
            if parameter.kind == "tensor" and not (parameter.domain or own.is_floating_point or own == torch.bool):
                contract = _with_likely(contract, parameter, _find_axis(contract, reference, parameter))
        return _find_numbers(contract, reference)


def remarks_on(contract: Contract) -> list[str]:
    """Returns what an author should declare: one sentence for each likely domain of floating-point numbers."""
    return [
        f"the reference gives NaN for {_outside(p.likely)} `{p.name}`: declare "
        f"`Annotated[{p.type}, {p.likely}]`, or samples"
        for p in contract.tensors
        if isinstance(p.likely, Range)
    ]


def _outside(domain: Range) -> str:
    return (
        "negative"
        if domain.low == 0 and not domain.is_bounded
        else f"values below {domain.low:g} or above {domain.high:g} in"
    )


def _with_likely(contract: Contract, parameter: Parameter, likely: Range | Index | None) -> Contract:
    changed = (p._replace(likely=likely) if p.name == parameter.name else p for p in contract.parameters)
    return contract._replace(parameters=tuple(changed))


def _run(reference: Reference, make: Callable[[], Case]) -> list[torch.Tensor] | None:
    """Returns the outputs and the arguments after a call, None where there is no such case or the reference refuses it."""
    try:
        values = list(make().values)
        outputs = reference(values)
    except Exception:  # whatever a reference may raise to refuse
        return None
    return [t for value in (*outputs, *values) for t in tensors_in(value)]


def _dtype_of(contract: Contract) -> torch.dtype | None:
    family = contract.scalar_family
    return None if family is None else torch.float64 if torch.float64 in family.dtypes else family.dtypes[0]


# --- indices -----------------------------------------------------------------------------------------------


def _find_axis(contract: Contract, reference: Reference, parameter: Parameter) -> Index | None:
    """Returns the axis whose indices a tensor holds: the last one is taken, and its size is refused."""
    maker = Sweep(contract)
    sizes, options = maker.base_sizes(), maker.option_sets()[0]
    wholes = [p.name for p in contract.tensors if not p.type.family.dtypes[0].is_floating_point]

    def takes(value: int) -> bool:
        def one(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            made = torch.zeros(shape, dtype=dtype)
            made.view(-1)[-1:] = value
            return made

        filled = {name: lambda shape, dtype: torch.zeros(shape, dtype=dtype) for name in wholes} | {parameter.name: one}
        made = partial(maker.make, "index", _dtype_of(contract), sizes, _BATCH, options, filled=filled)
        return _run(reference, made) is not None

    if not takes(0):
        return None
    most = torch.iinfo(parameter.type.family.dtypes[0]).max
    axes = dict.fromkeys(axis for p in contract.tensors for axis in p.type.axes)
    for axis in (axis for axis in axes if not isinstance(axis, (Variadic, Anonymous))):
        found = Index(str(axis))
        indices = found.within({**options, **sizes})
        last = most if indices is None else int(indices.high)
        if last < most and takes(last) and not takes(last + 1):
            return found
    return None


# --- numbers -----------------------------------------------------------------------------------------------


def _find_numbers(contract: Contract, reference: Reference) -> Contract:
    """Returns the contract with domains that leave no NaN in the results; as it is, where none do."""
    found, count = contract, _count_nan(contract, reference)
    while count:
        tried = [(_count_nan(each, reference), each) for each in _narrowed(found)]
        less, better = min(
            ((n, each) for n, each in tried if n is not None), key=lambda pair: pair[0], default=(count, found)
        )
        if less >= count:
            return contract
        found, count = better, less
    if count is None:
        return contract
    for parameter in [p for p in found.tensors if p.likely is NonNegative]:
        if not _takes_zeros(found, reference, parameter):
            found = _with_likely(found, parameter, Positive)
    return found


def _takes_zeros(contract: Contract, reference: Reference, parameter: Parameter) -> bool:
    """Returns whether the results are finite where a tensor is zero."""
    maker = Sweep(contract)
    filled = {parameter.name: lambda shape, dtype: torch.zeros(shape, dtype=dtype)}
    options = maker.option_sets()[0]
    results = _run(
        reference, lambda: maker.make("zeros", _dtype_of(contract), maker.base_sizes(), _BATCH, options, filled=filled)
    )
    return results is not None and all(bool(t.isfinite().all()) for t in results)


def _narrowed(contract: Contract) -> Iterator[Contract]:
    """Yields the contract with each domain for each floating-point tensor that has none."""
    free = [p for p in contract.tensors if p.type.family.is_floating and not (p.domain or p.likely)]
    for domain, parameter in itertools.product(_CANDIDATES, free):
        yield _with_likely(contract, parameter, domain)


def _count_nan(contract: Contract, reference: Reference) -> int | None:
    """Returns how many elements of the results are NaN; None where the reference takes no such input."""
    count, is_taken = 0, False
    for seed, scale in itertools.product((0, 1), _SCALES):
        maker = Sweep(contract, seed)
        options = maker.option_sets()[0]
        made = partial(maker.make, "numbers", _dtype_of(contract), maker.base_sizes(), _BATCH, options, scale=scale)
        results = _run(reference, made)
        is_taken = is_taken or results is not None
        count += sum(int(t.isnan().sum()) for t in results or () if t.is_floating_point())
    return count if is_taken else None
