"""Test inputs that an operator's author declares: samples, in every dtype, and those of a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from opwright.contract.contract import MISSING, Contract
from opwright.contract.sweep import Case, tensors_in


def case_from_sample(contract: Contract, sample: Any, label: str) -> Case:
    """Returns the case of one declared sample: a tuple of arguments, or `(args, kwargs)`."""
    args, kwargs = split_sample(sample)
    names = [p.name for p in contract.parameters]
    given = dict(zip(names, args, strict=False)) | kwargs
    values = tuple(given.get(p.name, None if p.default is MISSING else p.default) for p in contract.parameters)
    options = {p.name: v for p, v in zip(contract.parameters, values, strict=True) if not p.is_tensor}
    return Case(label, values, options, tuple(names))


class Labelled(NamedTuple):
    """A sample with a name."""

    label: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def split_sample(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and named arguments of a sample."""
    if isinstance(sample, Labelled):
        return sample.args, sample.kwargs
    if isinstance(sample, (tuple, list)) and len(sample) == 2 and isinstance(sample[1], dict):
        first = sample[0]
        return (tuple(first) if isinstance(first, (tuple, list)) else (first,)), dict(sample[1])
    return (tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)), {}


def declared_cases(contract: Contract, samples: Iterable[Any] | Callable[[], Iterable[Any]]) -> list[Case]:
    """Returns the cases of declared samples: an iterable, or a function that gives one."""
    given = samples() if callable(samples) else samples
    return [case_from_sample(contract, sample, f"sample {i}") for i, sample in enumerate(given)]


def in_every_dtype(contract: Contract, cases: list[Case]) -> list[Case]:
    """Returns the cases of samples that are of one floating-point dtype in the other ones as well.

    Samples of several dtypes are all that there is to be.
    """
    family = contract.scalar_family
    own = [i for i, p in enumerate(contract.parameters) if p.is_tensor and p.type.family == family]
    found = {t.dtype for case in cases for i in own for t in tensors_in(case.values[i])}
    if family is None or len(found) != 1 or not next(iter(found)).is_floating_point:
        return cases
    others = [dtype for dtype in family.dtypes if dtype.is_floating_point and dtype not in found]

    def converted(value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(converted(v, dtype) for v in value)
        return value.to(dtype) if isinstance(value, torch.Tensor) else value

    made = [
        replace(case, values=tuple(converted(v, dtype) if i in own else v for i, v in enumerate(case.values)))
        for dtype in others
        for case in cases
    ]
    return [*cases, *made]


def backward_cases(
    contract: Contract,
    forward: Contract,
    reference: Callable[[Sequence[Any]], Sequence[Any]],
    cases: Iterable[Case],
) -> Iterator[Case]:
    """Yields the cases of a backward: those of its operator, with what it returns and gradients of that.

    Args:
        contract: of the backward.
        forward: the contract of its operator.
        reference: of its operator; takes the arguments in schema order.
        cases: of its operator.
    """
    seen: set[torch.dtype] = set()
    for number, case in enumerate(cases):
        generator = torch.Generator().manual_seed(number)
        known: dict[str, Any] = {}
        gradients: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            results = reference(case.values)
        for output, result in zip(forward.outputs, results, strict=True):
            known[output.name] = result
            if isinstance(result, torch.Tensor) and result.is_floating_point():
                noise = torch.randn(result.shape, generator=generator, dtype=torch.float64)
                gradients[f"grad_{output.name}"] = noise.to(result)
        known |= forward.name_arguments(case.values)
        kinds = {"": gradients}
        if new := {gradient.dtype for gradient in gradients.values() if gradient.numel() >= len(_SIZES)} - seen:
            seen |= new
            kinds[f", {ALL_SIZES}"] = {name: _of_all_sizes(gradient) for name, gradient in gradients.items()}
        for what, given in kinds.items():
            values = known | given
            yield case_from_sample(contract, tuple(values[p.name] for p in contract.parameters), case.label + what)


ALL_SIZES = "gradients of all sizes"  # in the label of a case
_SIZES = tuple(s * 10.0**e for e in (1, 2, 3, 4, 6, 12, 20, 31, -2, -4, -6, -12, -20, -30) for s in (1, -1))


def _of_all_sizes(noise: torch.Tensor) -> torch.Tensor:
    """Returns numbers that start with small and large ones, as a scaled loss may send them; no sum of them overflows."""
    most = torch.finfo(noise.dtype).max ** 0.85
    sizes = torch.tensor([size for size in _SIZES if abs(size) < most], dtype=torch.float64).to(noise)
    changed = noise.flatten().clone()  # what is dense would be a view
    changed[: len(sizes)] = sizes[: changed.numel()]
    return changed.view(noise.shape)
