"""Kinds of mutants: ways to make the right call of any operator wrong, and what an operator needs for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opwright.verify.checks.gradients import floats_of
from opwright.verify.checks.numerics import interchangeable
from opwright.verify.oracle import Expected, expect, to_oracle
from opwright.verify.target import Target
from opwright.verify.tensors import copy_of, tensors_of, two_alike

Call = Callable[[Sequence[Any]], list[Any]]


@dataclass(frozen=True)
class Kind:
    """One way to be wrong.

    Attributes:
        name: what the mutant does.
        make: takes the target, returns the mutated call.
        needs: takes the target, returns why it has no such mutant; "" if it has one.
        resource: "memory" or "leaks" for a mutant that this check must see. These checks are not asked about other
            mutants, whose Python code around the operator needs memory of its own.
    """

    name: str
    make: Callable[[Target], Call]
    needs: Callable[[Target], str] = lambda target: ""
    resource: str = ""


class Kinds(list[Kind]):
    """Collects the kinds of one module, in the order of the table."""

    def call(
        self,
        name: str,
        needs: Callable[[Target], str] = lambda target: "",
        resource: str = "",
    ) -> Callable[[Callable[..., list[Any]]], Callable[..., list[Any]]]:
        """Adds a kind: a function of the target, its right call, a state of its own, and the arguments."""

        def add(function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
            def make(target: Target) -> Call:
                state: dict[Any, Any] = {}
                return lambda values: function(target, target.call, state, values)

            self.append(Kind(name, make, needs, resource))
            return function

        return add

    def result(
        self, name: str, needs: Callable[[Target], str] = lambda target: "", resource: str = ""
    ) -> Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]:
        """Adds a kind that changes each floating-point result: a function of it and of the arguments.

        Results are the outputs, and of an operator that writes into its arguments those.
        """

        def add(change: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            @self.call(name, needs, resource=resource)
            def mutated(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
                written = tensors_of(target.written(values))
                given = copy_of(values) if written else values
                outputs = [
                    change(o, given) if isinstance(o, torch.Tensor) and o.is_floating_point() else o
                    for o in call(values)
                ]
                for tensor in written:
                    if tensor.is_floating_point():
                        tensor.copy_(change(tensor.clone(), given))
                return outputs

            return change

        return add


# --- what an operator must have for a mutant ---------------------------------------------------------------


def _base(target: Target) -> list[Any]:
    labels = {case.label: case for case in reversed(target.cases())}
    case = labels.get("base") or target.cases()[0]
    return target.inputs(case)


def needs_equal_input(target: Target) -> str:
    values = _base(target)
    output = next((o for o in target.call(values) if o is not None), None)
    same = output is not None and find_input_like(values, output) is not None
    return "" if same else "no input like an output"


def needs_row(target: Target) -> str:
    return "" if find_row(target) is not None else "no input that is broadcast"


def find_option(target: Target) -> int | None:
    """Returns the position of the first option that takes several values, or could."""
    if target.contract is None:
        return None
    options = [i for i, p in enumerate(target.contract.parameters) if p.kind in ("choice", "bool", "int", "float")]
    varied = [i for i in options if len({case.values[i] for case in target.cases()}) > 1]
    could = [i for i in options if target.contract.parameters[i].kind in ("choice", "bool")]
    return next(iter(varied + could), None)


def needs_option(target: Target) -> str:
    return "" if find_option(target) is not None else "no option"


def needs_dtype(dtype: torch.dtype) -> Callable[[Target], str]:
    def needs(target: Target) -> str:
        return "" if any(case.dtype == dtype for case in target.cases()) else f"no {dtype}".replace("torch.", "")

    return needs


def needs_two_alike(target: Target) -> str:
    return "" if two_alike(_base(target)) is not None else "no two inputs of one shape"


def needs_interchangeable(target: Target) -> str:
    has_any = any(interchangeable(target, case) for case in target.run_cases())
    return "" if has_any else "no two inputs that may be one tensor"


def needs_several(target: Target) -> str:
    return "" if len(floats_of(_base(target))) > 1 else "one floating-point input"


def needs_gpu(target: Target) -> str:
    return "" if target.device.type == "cuda" else "only on a GPU"


def needs_outputs(target: Target) -> str:
    return "no outputs" if target.contract is not None and not target.contract.outputs else ""


def needs_large(target: Target) -> str:
    return "no large sample" if target.has_samples else ""


def needs_output(what: str, condition: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Target], str]:
    """Returns a check of whether the reference gives such an output for a constant in all inputs, or in one of them."""

    def needs(target: Target) -> str:
        values = [to_oracle(v) for v in _base(target)]
        count = len(floats_of(values))
        probes = [0.0, -0.0, 1.0, -1.0, 1e300, -1e300, torch.inf, -torch.inf]
        for number, at in itertools.product(probes, [*range(count), None]):
            pending = itertools.count()

            def put(value: Any, number: float = number, at: Any = at, pending: Any = pending) -> Any:
                if isinstance(value, (list, tuple)):
                    return [put(v, number, at, pending) for v in value]
                if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                    return value
                return torch.full_like(value, number) if at in (None, next(pending)) else value

            with torch.no_grad():
                outputs = target.reference([put(v) for v in values])
            if any(bool(condition(o).any()) for o in floats_of(outputs)):
                return ""
        return f"no output is {what}"

    return needs


def needs_negative_zero(target: Target) -> str:
    """Checks whether the oracle expects a negative zero if one input, or all of them, are negative zeros."""
    values = _base(target)
    free = target.free_tensors(target.cases()[0])
    floats = floats_of([v for i, v in enumerate(values) if i in free])
    for chosen in [*([t] for t in floats), floats]:
        before = [t.clone() for t in chosen]
        for t in chosen:
            t.fill_(-0.0)
        with torch.no_grad():
            expected = expect(target.reference, values)
        for t, old in zip(chosen, before, strict=True):
            t.copy_(old)
        if any(
            isinstance(e, Expected) and e.is_negative_zero is not None and e.is_negative_zero.any() for e in expected
        ):
            return ""
    return "no zero has the sign of an input's"


def find_input_like(values: Sequence[Any], output: torch.Tensor) -> torch.Tensor | None:
    return next((t for t in tensors_of(values) if t.shape == output.shape and t.dtype == output.dtype), None)


def find_row(target: Target) -> int | None:
    """Returns the position of an input without batch axes, if another input has them."""
    parameters = target.contract.parameters if target.contract else ()
    batched = [i for i, p in enumerate(parameters) if p.type is not None and p.type.variadic_at is not None]
    rows = [
        i
        for i, p in enumerate(parameters)
        if p.kind == "tensor" and p.type.variadic_at is None and p.is_differentiable and not p.optional
    ]
    return rows[0] if batched and rows else None


# --- how results are changed ------------------------------------------------------------------------------


def spoil(output: torch.Tensor) -> torch.Tensor:
    return output * 1.01 + 1e-3


def step_ulps(output: torch.Tensor, by: Any) -> torch.Tensor:
    """Moves each number away from zero by a number of units in the last place."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[output.element_size()]
    return (output.contiguous().view(bits) + by).view(output.dtype)
