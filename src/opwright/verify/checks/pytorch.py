"""Checks of what PyTorch expects of an operator: compile, export, vmap, autocast, refusals, copies."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from opwright import _torch
from opwright._torch import tree_map
from opwright.contract.axes import Fixed
from opwright.contract.contract import Contract
from opwright.contract.sweep import Case, Sweep
from opwright.errors import ContractError, plural
from opwright.verify.checks.finding import (
    Finding,
    Skipped,
    agree,
    first_line,
    origin,
    outputs_of_reference,
    tell_difference_from,
)
from opwright.verify.checks.gradients import as_function_of_tensors, has_gradient
from opwright.verify.target import Target
from opwright.verify.tensors import copy_of, is_sorted, tensors_of


def opcheck(target: Target) -> Iterator[Finding]:
    """torch.library.opcheck: schema, autograd registration, fake kernel, AOT dispatch."""
    operator = target.operator
    cases = target.small_cases(torch.float32)
    numbers = [case for case in cases if not _gives_nan(target, case)]  # opcheck takes NaN for unequal to itself
    if cases and not numbers:
        raise Skipped("the reference gives NaN")
    wanted = 3 if target.effort == "full" else 1
    # The check of torch.compile traces the gradient as well, where there is one.
    tests = [name for name in _OPCHECKS if name != _TRACED or not has_gradient(target)]
    _torch.import_optests()  # before opcheck does
    for case in numbers:
        if not wanted:
            return
        values = target.inputs(case)
        if not operator.contract.mutated and not _integers_before_floats(operator.contract):
            for tensor in tensors_of(values):
                tensor.requires_grad_(tensor.is_floating_point())
        args, kwargs = operator.contract.split_arguments(values)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = torch.library.opcheck(operator.public, args, kwargs, test_utils=tests, raise_exception=False)
        bad = {name: first_line(result) for name, result in found.items() if result != "SUCCESS"}
        if (
            bad
            and all(_DATA_DEPENDENT in text for text in bad.values())
            and _DATA_DEPENDENT in _refuses_trace(target, case)
        ):
            continue  # PyTorch cannot trace its reference either: an index without axes, say
        wanted -= 1
        if target.effort != "full" and _TRACED in tests:  # half a second, and hardly ever another answer
            tests.remove(_TRACED)
        yield Finding(str(case), "; ".join(f"{name}: {text}" for name, text in bad.items()))


_TRACED = "test_aot_dispatch_dynamic"
_OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", _TRACED)
_DATA_DEPENDENT = "data-dependent expression"


def _gives_nan(target: Target, case: Case) -> bool:
    values = copy_of(list(case.values))
    with torch.no_grad():
        outputs = target.reference(values)
    return any(t.is_floating_point() and bool(t.isnan().any()) for t in tensors_of([*outputs, *values]))


def _refuses_trace(target: Target, case: Case) -> str:
    """Returns the error of PyTorch where it cannot trace the reference, as opcheck traces the operator; "" if it can."""
    values = copy_of(list(case.values))
    for tensor in tensors_of(values) if not target.mutated() else ():
        tensor.requires_grad_(tensor.is_floating_point())

    def call(*values: Any) -> Any:
        return [output for output in target.reference(list(values)) if output is not None]

    try:
        _torch.import_optests().aot_autograd_check(call, tuple(values), {}, dynamic=True, skip_correctness_check=True)
    except Exception as error:  # whatever tracing may raise
        return str(error)
    return ""


def _integers_before_floats(contract: Contract) -> bool:
    """Whether opcheck cannot differentiate it: it adds the sums of the outputs up in place, in the dtype of the first."""
    floats = [output.type.family.has_floats for output in contract.outputs]
    return any(floats) and not floats[0]


def torch_compile(target: Target) -> Iterator[Finding]:
    """torch.compile(fullgraph, dynamic) gives the same values and gradients, without recompiling."""
    contract = target.operator.contract
    _torch.reset_dynamo()
    graphs: list[int] = []

    def count(module: Any, inputs: Any) -> Any:
        graphs.append(1)
        return module

    sweep = Sweep(target.drawn)
    family = contract.scalar_family
    dtype = None if family is None else torch.float32 if torch.float32 in family.dtypes else family.dtypes[0]
    options = sweep.option_sets()[0]
    if target.has_samples:
        cases = target.small_cases(torch.float32)[:2]
        may_recompile = True
    else:
        cases = _of_two_sizes(target, sweep, lambda *sizes: sweep.make(sizes[0], dtype, *sizes[1:], options))
        may_recompile = len(cases) < 2

    if not cases:
        raise Skipped("the reference refuses the inputs")

    def call(values: list[Any]) -> list[Any]:
        return target.call(values)

    with torch.no_grad():
        compiled_call = torch.compile(call, fullgraph=True, dynamic=True, backend=count)
        for case in cases:
            expected = target.call(target.inputs(case))
            try:
                got = compiled_call(target.inputs(case))
            except Exception as error:
                own = torch.compile(target.reference, fullgraph=True, dynamic=True, backend="eager")
                if _fails_alike(error, own, target.inputs(case)):
                    raise Skipped(f"PyTorch cannot compile the reference: {first_line(error)}") from None
                raise
            same = agree(target, got, expected, outputs_of_reference, case.values)
            yield Finding(str(case), "" if same else "the compiled call gives different values")
    if not may_recompile:
        extra = f"{len(graphs)} graphs for 2 sizes" if len(graphs) > 1 else ""
        yield Finding("two sizes, dynamic shapes", extra and f"it recompiles for another size: {extra}")
    yield from _compiled_gradients(target, cases[0])


def _of_two_sizes(target: Target, sweep: Sweep, make: Callable[..., Case]) -> list[Case]:
    """Returns cases of two sizes that the reference accepts, fewer where there are none.

    The sizes of a case differ: PyTorch takes equal ones for the same axis, and compiles again where they are not.
    """
    fixed = {axis.size for p in sweep.contract.tensors for axis in p.type.axes if isinstance(axis, Fixed)}
    base, other = (
        sweep.base_sizes([size for size in table if size not in fixed])
        for table in ((7, 13, 5, 11, 3, 17, 19, 23), (29, 31, 37, 41, 43, 47))
    )
    larger = {name: size if other[name] == size else 3 * size for name, size in base.items()}  # an int stays
    found: list[Case] = []
    for label, several in (("base", [base]), ("other sizes", [other, larger])):
        for sizes in several:
            batch = [n for n in range(4 if found else 2, 99) if n not in fixed | set(sizes.values())]
            case = make(label, sizes, tuple(batch[:2]))
            if target.accepts(case):
                found.append(case)
                break
    return found


# That of "aot_eager" imports Inductor, for a second, to choose what a backward computes again.
_TRACING = "aot_eager_default_partitioner"


def _compiled_gradients(target: Target, case: Case) -> Iterator[Finding]:
    if target.is_derivative_of_reference or not has_gradient(target):
        return
    inputs, call = as_function_of_tensors(target, case)

    def total(function: Callable[..., Any], *inputs: torch.Tensor) -> torch.Tensor:
        return sum((o * torch.cos(o.detach())).sum() for o in function(*inputs))

    def gradients_of_reference(*inputs: torch.Tensor) -> Any:
        _, function = as_function_of_tensors(replace(target, call=target.reference), case)
        compiled_reference = torch.compile(function, fullgraph=True, dynamic=True, backend=_TRACING)
        return torch.autograd.grad(total(compiled_reference, *inputs), inputs, allow_unused=True)

    expected = torch.autograd.grad(total(call, *inputs), inputs, allow_unused=True)
    _torch.reset_dynamo()
    compiled_call = torch.compile(call, fullgraph=True, dynamic=True, backend=_TRACING)
    try:
        got = torch.autograd.grad(total(compiled_call, *inputs), inputs, allow_unused=True)
    except Exception as error:
        if _fails_alike(error, gradients_of_reference, *inputs):
            return  # nothing that it does is told from what PyTorch cannot
        raise
    message = ""
    for a, b in zip(expected, got, strict=True):
        if (a is None) != (b is None):
            message = "the compiled call loses a gradient"
        elif a is not None and not torch.allclose(a, b, rtol=1e3 * torch.finfo(a.dtype).eps, equal_nan=True):
            message = "the compiled call gives different gradients"
    yield Finding(f"{case}, gradients", message)


def _fails_alike(error: Exception, function: Callable[..., Any], *arguments: Any) -> bool:
    """Returns whether a function that compiles the reference raises the same."""
    _torch.reset_dynamo()
    try:
        function(*arguments)
    except Exception as other:
        return type(other) is type(error) or (_torch.is_of_compiler(other) and _torch.is_of_compiler(error))
    return False


def torch_export(target: Target) -> Iterator[Finding]:
    """torch.export keeps the operator in the graph, and the exported program gives the same values."""
    for case in target.small_cases(torch.float32)[:1]:
        given = target.inputs(case)
        fixed = [v for v in given if not tensors_of([v])]

        class Module(torch.nn.Module):
            def forward(self, *tensors: Any, given: list[Any] = given) -> Any:
                pending = list(tensors)
                return tuple(target.call([pending.pop(0) if tensors_of([v]) else v for v in given]))

        inputs = tuple(v for v in given if tensors_of([v]))
        with torch.no_grad():
            program = torch.export.export(Module(), copy_of(inputs))
            names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
            name = target.name.replace("::", ".") + ".default"
            expected, got = target.call(target.inputs(case)), program.module()(*copy_of(inputs))
        message = "" if name in names else f"the operator is not in the exported graph, which has {sorted(names)}"
        if not agree(target, got, expected, outputs_of_reference, case.values):
            message = "the exported program gives different values"
        yield Finding(f"{case}, {plural(len(fixed), 'constant')}", message)


def torch_vmap(target: Target) -> Iterator[Finding]:
    """torch.vmap over each tensor alone and over all of them, against a loop."""
    for case in target.small_cases(torch.float64)[:2]:
        computed = target.computed
        positions = [i for i, v in enumerate(case.values) if tensors_of([v]) and i not in computed]
        if not positions:
            continue
        for chosen in [positions, *([p] for p in positions if len(positions) > 1)]:
            yield _vmap_one(target, case, chosen)


def _vmap_one(target: Target, case: Case, chosen: list[int]) -> Finding:
    given = target.inputs(case)

    def turn(tensor: torch.Tensor) -> torch.Tensor:
        # Integers of a sample may have an order, as offsets do; other numbers have one if they are sorted.
        is_free = not target.has_samples or (tensor.is_floating_point() and not is_sorted(tensor))
        may_turn = tensor.ndim > 0 and is_free
        return tensor.flip(0) if may_turn else tensor

    other = [tree_map(turn, v) if i in chosen else v for i, v in enumerate(given)]
    if target.computed:
        with torch.no_grad():
            given, other = target.with_computed(given), target.with_computed(other)
        chosen = [*chosen, *(i for i in target.computed if not torch.equal(given[i], other[i]))]
    stacked = {i: tree_map(lambda a, b: torch.stack([a, b], -1), given[i], other[i]) for i in chosen}
    absent = tensors_of(given)[0].new_empty(0)

    def call(*batched: Any) -> Any:
        values = list(given)
        for i, value in zip(chosen, batched, strict=True):
            values[i] = value
        # The gradient of an absent argument is None or empty.
        return tuple(absent if output is None else output for output in target.call(values))

    with torch.no_grad():
        got = torch.vmap(call, in_dims=-1)(*stacked.values())
        rows = [call(*tree_map(lambda t, k=k: t.select(-1, k), list(stacked.values()))) for k in range(2)]
    wanted = [torch.stack(column) for column in zip(*rows, strict=True)]
    # The reference may take part (and sum in another order): float64 leaves room for that.
    room = (1e-9, 1e-12) if not target.casts_to_single else (1e-5, 1e-6)
    same = all(
        torch.allclose(a.double(), b.double(), *room, equal_nan=True)
        if a.dtype == torch.float64
        else torch.allclose(a, b, rtol=4 * _eps(a), atol=4 * _eps(a), equal_nan=True)
        for a, b in zip(got, wanted, strict=True)
    )
    names = target.argument_names(case)
    label = f"{case} over {', '.join(names[i] for i in chosen)}"
    return Finding(label, "" if same else "vmap differs from a loop")


def _eps(tensor: torch.Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0


def autocast(target: Target) -> Iterator[Finding]:
    """Mixed precisions under autocast follow the operator's policy."""
    operator = target.operator
    contract, policy = operator.contract, operator.declaration.autocast
    if policy is None or contract.mutated:
        raise Skipped("the operator has no autocast policy" if policy is None else "it mutates its arguments")
    family = contract.scalar_family
    if family is None or torch.bfloat16 not in family.dtypes or torch.float32 not in family.dtypes:
        raise Skipped("bfloat16 and float32 are not both among its dtypes")
    for case in target.small_cases(torch.float32)[:1]:
        floats = [
            i
            for i, p in enumerate(contract.parameters)
            if p.is_differentiable
            and not p.type.family.is_single
            and any(t.is_floating_point() for t in tensors_of([case.values[i]]))
        ]
        if not floats:  # of `Shaped`, whose reference takes integers alone
            raise Skipped("the reference refuses floating-point numbers")
        values = target.inputs(case)
        for i in floats:
            if contract.parameters[i].type.family == family:
                values[i] = _to(values[i], torch.float32)
        values[floats[0]] = _to(values[floats[0]], torch.bfloat16, 1)
        lower = {"lower": torch.bfloat16, "float32": torch.float32}.get(policy)
        if lower is None:
            lower = torch.bfloat16 if len(tensors_of([values[i] for i in floats])) == 1 else torch.float32
        converted = list(values)
        for i in floats:
            if contract.parameters[i].type.family == family and not contract.parameters[i].mutated:
                converted[i] = _to(values[i], lower)
        label = f"{case}, first tensor bf16"
        with torch.no_grad():
            try:
                with torch.autocast(target.device.type, dtype=torch.bfloat16):
                    got = target.call(values)
            except Exception as error:  # whatever a reference raises for a type that it does not take
                where = origin(error, target)
                if not where or policy == "float32":
                    raise
                hint = 'if it does not take bfloat16, declare `autocast="float32"`'
                yield Finding(label, f"raised {type(error).__name__}: {first_line(error)}{where}; {hint}")
                return
            expected = target.call(converted)
        same = agree(target, got, expected, outputs_of_reference, converted)
        yield Finding(label, "" if same else f'not what policy "{policy}" gives')


def _to(value: Any, dtype: torch.dtype, most: int | None = None) -> Any:
    """Returns a tensor in a dtype, or a list with its first `most` tensors in it."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype)
    return [*(t.to(dtype) for t in value[:most]), *(value[most:] if most else ())]


def refusals(target: Target) -> Iterator[Finding]:
    """Wrong calls raise the error of the contract that names the argument, through both entries."""
    contract = target.operator.contract
    cases = target.small_cases(torch.float32)
    if not cases:
        raise Skipped("no small case")
    case = cases[0]
    for i, parameter in enumerate(contract.parameters):
        if not parameter.is_tensor or not tensors_of([case.values[i]]):
            continue
        tensor = target.inputs(case)[i]
        wrong: dict[str, Any] = {"a number": 3, "complex": _to(tensor, torch.complex64)}
        if parameter.type.variadic_at is None and parameter.kind == "tensor":
            wrong["one axis more"] = tensor.unsqueeze(0)
        for what, value in wrong.items():
            values = target.inputs(case)
            values[i] = value
            try:
                target.run(values)
                message = "accepted"
            except ContractError as error:
                is_named = any(f"`{parameter.name}{end}" in str(error) for end in "`[")
                message = "" if is_named else f"the error does not name it: {first_line(error)}"
            except Exception as error:
                message = f"raised {type(error).__name__}: {first_line(error)}"
            yield Finding(f"`{parameter.name}` is {what}", message)


def survives_copy(target: Target) -> Iterator[Finding]:
    """Modules that use the operator can be copied."""

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.function = target.operator.function

    module = copy.deepcopy(Module())
    yield Finding("deepcopy of a module", "" if module.function is target.operator.function else "it was copied")


def torch_compile_of_callable(target: Target) -> Iterator[Finding]:
    """Called within torch.compile, graph breaks allowed, it gives what the reference gives."""
    _torch.reset_dynamo()
    call = torch.compile(lambda values: target.call(values), backend="eager")
    for case in target.run_cases()[:1]:
        with torch.no_grad(), _torch.hide_graph_breaks():
            alone, outputs = target.run(target.inputs(case)), call(target.inputs(case))
        message, pattern = tell_difference_from(target, case.values, alone, outputs)
        yield Finding(str(case), message and f"within torch.compile: {message}", pattern)
