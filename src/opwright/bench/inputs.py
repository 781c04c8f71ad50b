"""The inputs of a benchmark: sizes from the sweep, random data, made on the device that is measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from opwright.dispatch.operator import Operator
from opwright.dispatch.reference import tensors_in
from opwright.errors import CheckError
from opwright.spec.contract import Contract
from opwright.spec.declared import declared_cases, split_sample
from opwright.spec.fill import lay_out, shape_of, tensor_dtype
from opwright.spec.likely import find_likely
from opwright.spec.samples import Case, Sweep, domain_in, integers_in
from opwright.verify.target import make_target
from opwright.verify.tensors import copy_of


@dataclass(frozen=True)
class Plan:
    """One input to be measured.

    Attributes:
        make: returns the input; another number gives another set of tensors, with other data where the
            data are ours to choose.
        axes: sizes and options that vary over the sweep.
    """

    make: Callable[[int], Case]
    axes: dict[str, Any]


def plans(
    operator: Operator | None,
    samples: Any,
    sweep: Mapping[str, Sequence[Any]] | None,
    options: Mapping[str, Any] | None,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> list[Plan]:
    """Returns what is to be measured, smallest first within a dtype."""
    if operator is None:
        given = samples() if callable(samples) else samples
        cases = []
        for i, sample in enumerate(given):
            args, kwargs = split_sample(sample)
            cases.append(Case(f"sample {i}", (args, kwargs), kwargs))
        return [_plan_of(case, None) for case in cases]
    if samples is not None:
        return [_plan_of(case, device) for case in declared_cases(operator.contract, samples)]
    return list(_sweep_plans(operator, sweep, options, dtypes, device))


def _plan_of(case: Case, device: torch.device | None) -> Plan:
    """Returns the plan of a given sample, which is moved to the device, and copied for a further set."""

    def make(number: int) -> Case:
        is_there = device is None or all(t.device.type == device.type for t in all_tensors(case.values))
        if number == 0 and is_there:
            return case
        return replace(case, values=copy_of(case.values, None if is_there else device))

    return Plan(make, {"elements": elements_of(case)})


def _sweep_plans(
    operator: Operator,
    sweep: Mapping[str, Sequence[Any]] | None,
    options: Mapping[str, Any] | None,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> Iterator[Plan]:
    contract = _read_contract(operator)
    maker = DeviceSweep(contract, device)
    family = contract.scalar_family
    wanted = [d for d in dtypes if family is None or d in family.dtypes] or [None]
    usual = maker.option_sets()[0]
    given: list[dict[str, Sequence[Any]]] = []
    for declared in operator._sweep or [_default_sweep(maker)]:
        axes = {**declared, **(sweep or {})}
        if axes not in given:
            given.append(axes)
    known = {"batch", *maker.names, *(p.name for p in contract.parameters)}
    for unknown in sorted({name for axes in given for name in axes} - known):
        raise CheckError(
            contract.subject,
            f"it has no axis and no argument `{unknown}` to go through sizes of",
            rows=[("there", ", ".join(sorted(known)))],
        )
    for name, value in [(name, value) for axes in given for name, values in axes.items() for value in values]:
        _check_value(contract, maker, name, value)
    for dtype, axes in itertools.product(wanted, given):
        axes = {"batch": [(256,)] if maker.variadics else [()], **axes}
        for values in itertools.product(*axes.values()):
            point = dict(zip(axes, values, strict=True))
            batch = point.pop("batch")
            shape = (batch,) if isinstance(batch, int) else tuple(batch)
            absent = {name for name, value in point.items() if value is None}
            point = {name: value for name, value in point.items() if name not in absent}
            chosen = usual | {n: v for n, v in point.items() if n in usual} | dict(options or {})
            bound = maker.base_sizes() | point | {n: v for n, v in chosen.items() if n in maker.names}
            present = [p for p in contract.tensors if p.name not in absent]
            largest = max(torch.Size(shape_of(p.type, bound, shape)).numel() for p in present)

            def make(number: int, dtype=dtype, bound=bound, shape=shape, chosen=chosen, absent=absent) -> Case:
                maker = DeviceSweep(contract, device, number)
                return maker.make("bench", dtype, bound, shape, chosen, absent=absent)

            yield Plan(make, {"elements": largest, **point, **chosen})


def _read_contract(operator: Operator) -> Contract:
    """Returns the contract with the values that its inputs are drawn from, where none are declared."""
    if operator.declaration.random:
        return operator.contract
    return find_likely(operator.contract, make_target(operator.function, None, None).reference)


def _check_value(contract: Any, maker: Sweep, name: str, value: Any) -> None:
    """Raises CheckError for a value that an axis or an argument cannot have."""
    parameter = next((p for p in contract.parameters if p.name == name), None)
    if name == "batch":
        sizes = value if isinstance(value, (tuple, list)) else (value,)
        fits, expected = all(map(_is_size, sizes)), "sizes, as batch=512 or batch=8x128"
    elif name in maker.names:
        fits, expected = _is_size(value), f"a size, as {name}=1024"
    elif parameter is not None and parameter.kind == "choice":
        fits, expected = value in parameter.choices, ", ".join(map(str, parameter.choices))
    else:
        return
    if not fits:
        raise CheckError(
            contract.subject,
            f"`{name}` cannot have this value",
            rows=[("got", "nothing" if value is None else str(value)), ("expected", expected)],
        )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class DeviceSweep(Sweep):
    """Makes cases on a device: on a GPU a gigabyte takes a millisecond, where the CPU needs seconds."""

    def __init__(self, contract: Any, device: torch.device, seed: int = 0) -> None:
        super().__init__(contract, seed)
        self.device = device

    def _tensor(self, parameter: Any, dtype: Any, sizes: Any, batch: Any, *args: Any) -> torch.Tensor:
        shape = shape_of(parameter.type, sizes, batch)
        # A matrix of weights keeps what it is multiplied with in its scale: else a recurrence would be timed where all
        # is saturated and gradients are denormal.
        is_weight = len(shape) > 1 and parameter.type.variadic_at is None
        scale = shape[-1] ** -0.5 if is_weight and shape[-1] else 1.0
        if self.device.type == "cpu":
            layout, _, *others = args
            return super()._tensor(parameter, dtype, sizes, batch, layout, scale, *others)
        own = tensor_dtype(self.contract, parameter.type, dtype)
        domain = domain_in(parameter, sizes)
        position = [p.name for p in self.contract.parameters].index(parameter.name)
        generator = torch.Generator(self.device).manual_seed(1000 * self.seed + position)

        def fill(wanted: tuple[int, ...]) -> torch.Tensor:
            if own.is_floating_point:
                noise = torch.randn(wanted, generator=generator, dtype=own, device=self.device).mul_(scale)
                return noise if domain is None else domain.fold(noise)
            low, high = (0, 1) if own == torch.bool else integers_in(domain, shape, own)
            return torch.randint(low, high + 1, wanted, generator=generator, device=self.device).to(own)

        return lay_out(fill, shape, "contiguous")


def _default_sweep(maker: Sweep) -> dict[str, list[Any]]:
    free = [name for name in maker.names if name not in maker._int_sizes()]
    if maker.variadics and not free:
        return {"batch": [(4096,), (65536,), (1 << 20,), (1 << 23,)]}
    if maker.variadics:
        return {"batch": [(4,), (64,), (512,), (4096,)], **{name: [1024] for name in free}}
    return {name: [256, 1024] if i == 0 else [1024] for i, name in enumerate(free)}


def one_element(operator: Operator, device: torch.device) -> Case:
    """Returns the smallest input there is."""
    maker = DeviceSweep(_read_contract(operator), device)
    ints = maker._int_sizes()
    ones = {name: size if name in ints else 1 for name, size in maker.base_sizes().items()}
    absent = {name for axes in operator._sweep for name, values in axes.items() if list(values) == [None]}
    family = operator.contract.scalar_family
    dtype = None if family is None else torch.float32 if torch.float32 in family.dtypes else family.dtypes[0]
    return maker.make("one element", dtype, ones, (1,), maker.option_sets()[0], absent=absent)


def all_tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    """Returns the tensors of a case, those of named arguments included."""
    found = list(tensors_in(values))
    for value in values:
        if isinstance(value, dict):
            found += tensors_in(list(value.values()))
    return found


def elements_of(case: Case) -> int:
    """Returns the elements of the largest tensor."""
    return max((t.numel() for t in all_tensors(case.values)), default=0)
