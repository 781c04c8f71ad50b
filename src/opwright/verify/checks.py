"""The checks of verify. Each takes a subject and yields one finding for each case it tried."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from opwright.dispatch.vmap import joined_axes
from opwright.errors import ContractError
from opwright.spec.axes import Variadic
from opwright.spec.samples import Case, Sweep
from opwright.verify.oracle import compare, expect, pattern_of
from opwright.verify.subject import Subject


class Skipped(Exception):
    """Raised by a check that does not apply; the text is the reason."""


@dataclass
class Finding:
    """What a check found on one case; `message` is empty when it passes.

    `is_fatal`: further calls may crash the process, so no other check runs.
    """

    case: str
    message: str = ""
    pattern: str = ""
    worst_ulp: float | None = None
    worst_ratio: float | None = None
    is_fatal: bool = False


Check = Callable[[Subject], Iterator[Finding]]


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
        elif isinstance(value, dict):
            found += _tensors(value.values())
    return found


def _clone(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # Keeps strides and offset, so that the copy has the layout of the original.
        base = value.untyped_storage().clone()
        return value.new_empty(0).set_(base, value.storage_offset(), value.shape, value.stride())
    if isinstance(value, (list, tuple)):
        return type(value)(_clone(v) for v in value)
    return {k: _clone(v) for k, v in value.items()} if isinstance(value, dict) else value


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().contiguous()
    if not tensor.is_floating_point():
        return tensor
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _mutated(subject: Subject) -> list[int]:
    return [i for i, p in enumerate(subject.contract.parameters) if p.mutated] if subject.contract else []


# --- numerics --------------------------------------------------------------------------------------------


def numerics(subject: Subject) -> Iterator[Finding]:
    """Every output of every case against the float64 oracle; inputs unchanged; nothing aliased."""
    mutated = _mutated(subject)

    def reference(values: Any) -> list[Any]:
        values = list(values)
        outputs = subject.reference(values)
        return [*outputs, *(values[i] for i in mutated)]

    with torch.no_grad():
        for _, case in subject.cases():
            values = list(_clone(tuple(case.values)))
            expected = expect(reference, case.values)
            try:
                outputs = subject.call(values)
            except Exception as error:
                yield Finding(str(case), f"raised {type(error).__name__}: {_first_line(error)}")
                continue
            yield _judge(subject, case, values, [*outputs, *(values[i] for i in mutated)], expected, mutated)


def _judge(
    subject: Subject,
    case: Case,
    values: list[Any],
    outputs: list[Any],
    expected: list[Any],
    mutated: list[int],
) -> Finding:
    finding = Finding(str(case), worst_ulp=0.0, worst_ratio=0.0)
    if len(outputs) != len(expected):
        finding.message = f"returned {len(outputs)} outputs, expected {len(expected)}"
        return finding
    names = [o.name for o in subject.contract.outputs] if subject.contract else []
    for i, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        name = names[i] if i < len(names) else f"output{i}"
        if wanted is None:
            continue
        shape = wanted.shape if isinstance(wanted, torch.Tensor) else wanted.exact.shape
        dtype = wanted.dtype
        if not isinstance(output, torch.Tensor) or output.shape != shape or output.dtype != dtype:
            got = f"{output.dtype} {list(output.shape)}" if isinstance(output, torch.Tensor) else str(output)
            finding.message = f"`{name}`: got {got}, expected {dtype} {list(shape)}"
            return finding
        difference = compare(output, wanted)
        finding.worst_ulp = max(finding.worst_ulp, difference.worst_ulp)
        finding.worst_ratio = max(finding.worst_ratio, difference.worst_ratio)
        if difference.message and not finding.message:
            finding.message, finding.pattern = f"`{name}`: {difference.message}", pattern_of(difference.wrong)
    if not finding.message:
        finding.message = _side_effects(case, values, outputs[: len(outputs) - len(mutated)], mutated)
    return finding


def _side_effects(case: Case, values: list[Any], outputs: list[Any], mutated: list[int]) -> str:
    for i, (before, after) in enumerate(zip(case.values, values, strict=True)):
        if i not in mutated:
            for a, b in zip(_tensors([before]), _tensors([after]), strict=True):
                if not torch.equal(_storage_bytes(a), _storage_bytes(b)):
                    return f"argument {i} was changed by the call"
    inputs = {t.untyped_storage().data_ptr() for t in _tensors(values) if t.untyped_storage().nbytes()}
    for i, output in enumerate(_tensors(outputs)):
        if output.untyped_storage().nbytes() and output.untyped_storage().data_ptr() in inputs:
            return f"output {i} shares memory with an argument"
    return ""


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


# --- repeatability and memory ----------------------------------------------------------------------------


def determinism(subject: Subject) -> Iterator[Finding]:
    """The same input twice, with another one in between, gives the same bits."""
    cases = [case for _, case in subject.cases()]
    with torch.no_grad():
        for case, other in zip(cases, [*cases[1:], *cases[:1]], strict=True):
            first = _tensors(subject.call(_clone(case.values)))
            first = [_bits(t).clone() for t in first]
            subject.call(_clone(other.values))
            second = [_bits(t) for t in _tensors(subject.call(_clone(case.values)))]
            same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
            yield Finding(str(case), "" if same else "the second call gave other bits than the first")


_GUARD = 64  # elements on either side of an output


def outputs_written(subject: Subject) -> Iterator[Finding]:
    """`out=` tensors filled with garbage, between guard bands: all written, nothing around them.

    This check comes first, because a kernel that writes elsewhere would bring the process down in any other.
    """
    operator = _need_operator(subject)
    if not operator.contract.outputs:
        raise Skipped("no outputs: it only mutates")
    with torch.no_grad():
        for _, case in subject.cases():
            buffers, outs = [], []
            for like in subject.reference(_clone(case.values)):
                like = torch.empty(0) if like is None else like
                buffer = torch.full((like.numel() + 2 * _GUARD,), _poison(like.dtype), dtype=like.dtype)
                buffers.append(buffer)
                outs.append(buffer[_GUARD : _GUARD + like.numel()].view(like.shape))
            operator.call_with_out(_clone(case.values), outs[0] if len(outs) == 1 else tuple(outs))
            for out, buffer in zip(outs, buffers, strict=True):
                edges = torch.cat([buffer[:_GUARD], buffer[_GUARD + out.numel() :]])
                if not _same(edges, torch.full_like(edges, _poison(edges.dtype))):
                    yield Finding(str(case), "the kernel writes outside of its output", is_fatal=True)
                    return
            wanted = subject.call(_clone(case.values))
            same = all(_same(a, b) for a, b in zip(wanted, outs, strict=True))
            yield Finding(
                str(case), "" if same else "the out variant gives other values, or leaves some unwritten"
            )


def _poison(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        return -1234.5
    return True if dtype == torch.bool else 77


def independence(subject: Subject) -> Iterator[Finding]:
    """The promise of a variadic axis: an entry's result does not depend on the other entries."""
    operator = _need_operator(subject)
    contract = operator.contract
    if contract.mutated:
        raise Skipped("it mutates its arguments")
    batched = [
        bool(p.type and p.type.axes and isinstance(p.type.axes[0], Variadic)) for p in contract.parameters
    ]
    if not any(batched) or joined_axes(contract, batched) is None:
        raise Skipped("no variadic axis leads all outputs")
    with torch.no_grad():
        for _, case in subject.cases():
            leading = [
                v.shape[0]
                for v, b in zip(case.values, batched, strict=True)
                if b and v is not None and v.ndim
            ]
            ranks = [
                v.ndim >= p.type.rank
                for p, v, b in zip(contract.parameters, case.values, batched, strict=True)
                if b and v is not None
            ]
            if not leading or not all(ranks) or min(leading) != max(leading) or min(leading) < 2:
                continue
            part = tuple(
                v[1:] if b and v is not None else v for v, b in zip(case.values, batched, strict=True)
            )
            whole = [o[1:] for o in subject.call(_clone(case.values))]
            alone = subject.call(part)
            expected = expect(subject.reference, part)
            message = ""
            for w, a, e in zip(whole, alone, expected, strict=True):
                if isinstance(e, torch.Tensor) or e is None:
                    message = message or ("" if _same(w, a) else "differs")
                else:
                    message = message or compare(w, e).message
            yield Finding(
                str(case), message and f"entries 1.. of the whole differ from the call on them: {message}"
            )


# --- gradients ---------------------------------------------------------------------------------------------


def _differentiable(subject: Subject) -> None:
    contract = _need_operator(subject).contract
    if contract.mutated:
        raise Skipped("it mutates its arguments")
    if subject.operator.declaration.random:
        raise Skipped("it draws random numbers")
    if not any(p.is_differentiable for p in contract.parameters) or not any(
        o.type.family.is_floating for o in contract.outputs
    ):
        raise Skipped("nothing floating-point to differentiate")
    family = contract.scalar_family
    if family is None or torch.float64 not in family.dtypes:
        raise Skipped("float64 is not among its dtypes")


def gradients(subject: Subject) -> Iterator[Finding]:
    """First derivatives in float64 against finite differences."""
    yield from _gradcheck(subject, torch.autograd.gradcheck)


def second_gradients(subject: Subject) -> Iterator[Finding]:
    """Second derivatives in float64 against finite differences."""
    yield from _gradcheck(subject, torch.autograd.gradgradcheck)


def _gradcheck(subject: Subject, check: Callable[..., bool]) -> Iterator[Finding]:
    _differentiable(subject)
    for case in subject.small_cases(torch.float64):
        inputs, call = _as_function_of_tensors(subject, case)
        try:
            check(call, inputs, raise_exception=True, check_batched_grad=False)
            yield Finding(str(case))
        except Exception as error:
            yield Finding(str(case), _first_line(error, 3))


def _as_function_of_tensors(subject: Subject, case: Case) -> tuple[list[torch.Tensor], Callable[..., Any]]:
    """Returns the floating-point tensors of a case, and the call as a function of them alone."""
    inputs = [t.detach().clone().requires_grad_() for t in _tensors(case.values) if t.is_floating_point()]

    def call(*tensors: torch.Tensor) -> Any:
        pending = list(tensors)

        def fill(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return pending.pop(0) if value.is_floating_point() else value
            return [fill(v) for v in value] if isinstance(value, (list, tuple)) else value

        outputs = subject.call([fill(v) for v in case.values])
        return tuple(o for o in outputs if isinstance(o, torch.Tensor) and o.is_floating_point())

    return inputs, call


def gradient_numerics(subject: Subject) -> Iterator[Finding]:
    """Gradients in every dtype against those of the reference in float64."""
    _differentiable(subject)
    for _, case in subject.cases():
        if case.label not in (
            "base",
            "one element",
            "empty batch",
            "transposed",
            "sliced",
            "expanded",
            "large",
        ):
            continue

        def pull(function: Callable[[Any], list[Any]], values: Any) -> list[Any]:
            values = [
                v.detach().requires_grad_()
                if isinstance(v, torch.Tensor) and v.is_floating_point()
                else [i.detach().requires_grad_() for i in v]
                if isinstance(v, (list, tuple))
                else v
                for v in values
            ]
            with torch.enable_grad():
                outputs = [o for o in function(values) if o is not None and o.is_floating_point()]
                inputs = [t for t in _tensors(values) if t.requires_grad]
                # Cotangents that differ from element to element, the same in every dtype.
                seeds = [
                    torch.cos(torch.arange(o.numel(), dtype=torch.float64)).view(o.shape).to(o.dtype)
                    for o in outputs
                ]
                found = torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)
            return [torch.zeros_like(t) if g is None else g for g, t in zip(found, inputs, strict=True)]

        expected = expect(lambda values: pull(subject.reference, values), case.values)
        got = pull(subject.call, _clone(case.values))
        finding = Finding(str(case), worst_ulp=0.0, worst_ratio=0.0)
        for g, e in zip(got, expected, strict=True):
            difference = compare(g, e)
            finding.worst_ulp = max(finding.worst_ulp, difference.worst_ulp)
            finding.worst_ratio = max(finding.worst_ratio, difference.worst_ratio)
            if difference.message and not finding.message:
                finding.message, finding.pattern = difference.message, pattern_of(difference.wrong)
        yield finding


# --- PyTorch's systems ---------------------------------------------------------------------------------------


def opcheck(subject: Subject) -> Iterator[Finding]:
    """torch.library.opcheck: schema, autograd registration, fake kernel, AOT dispatch."""
    operator = _need_operator(subject)
    if operator.contract.data_dependent:
        raise Skipped("sizes depend on data")
    for case in subject.small_cases(torch.float32)[:3]:
        positional = sum(not p.keyword_only for p in operator.contract.parameters)
        values = list(_clone(case.values))
        if not operator.contract.mutated:
            for tensor in _tensors(values):
                tensor.requires_grad_(tensor.is_floating_point())
        named = {
            p.name: v for p, v in zip(operator.contract.parameters, values, strict=True) if p.keyword_only
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = torch.library.opcheck(
                operator.public, tuple(values[:positional]), named, raise_exception=False
            )
        bad = [f"{name}: {_first_line(result)}" for name, result in found.items() if result != "SUCCESS"]
        yield Finding(str(case), "; ".join(bad))


def compiled(subject: Subject) -> Iterator[Finding]:
    """torch.compile(fullgraph, dynamic) gives the same values and gradients, without recompiling."""
    operator = _need_operator(subject)
    contract = operator.contract
    if contract.mutated:
        raise Skipped("it mutates its arguments: see opcheck")
    torch._dynamo.reset()
    graphs: list[int] = []

    def count(module: Any, inputs: Any) -> Any:
        graphs.append(1)
        return module

    sweep = Sweep(contract)
    family = contract.scalar_family
    dtype = None if family is None else torch.float32 if torch.float32 in family.dtypes else family.dtypes[0]
    options = sweep.option_sets()[0]
    if subject._samples is not None or operator._samples is not None:
        cases = subject.small_cases(torch.float32)[:2]
        may_recompile = True
    else:
        first, second = sweep.base_sizes(), sweep.base_sizes((29, 31, 37, 41))
        cases = [
            sweep.make("base", dtype, first, (2, 3), options),
            sweep.make("other sizes", dtype, second, (4, 5), options),
        ]
        may_recompile = False

    def call(values: list[Any]) -> list[Any]:
        return subject.call(values)

    with torch.no_grad():
        compiled_call = torch.compile(call, fullgraph=True, dynamic=True, backend=count)
        for case in cases:
            expected = subject.call(_clone(case.values))
            got = compiled_call(list(_clone(case.values)))
            same = all(_same(a, b) for a, b in zip(_tensors(expected), _tensors(got), strict=True))
            yield Finding(str(case), "" if same else "the compiled call gives other values")
    if not may_recompile:
        extra = f"{len(graphs)} graphs for 2 sizes" if len(graphs) > 1 else ""
        yield Finding("two sizes, dynamic shapes", extra and f"it recompiles for another size: {extra}")
    yield from _compiled_gradients(subject, cases[0])


def _compiled_gradients(subject: Subject, case: Case) -> Iterator[Finding]:
    try:
        _differentiable(subject)
    except Skipped:
        return
    inputs, call = _as_function_of_tensors(subject, case)

    def total(function: Callable[..., Any]) -> torch.Tensor:
        return sum((o * torch.cos(o.detach())).sum() for o in function(*inputs))

    expected = torch.autograd.grad(total(call), inputs, allow_unused=True)
    torch._dynamo.reset()
    compiled_call = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    got = torch.autograd.grad(total(compiled_call), inputs, allow_unused=True)
    message = ""
    for a, b in zip(expected, got, strict=True):
        if (a is None) != (b is None):
            message = "the compiled call loses a gradient"
        elif a is not None and not torch.allclose(a, b, rtol=1e3 * torch.finfo(a.dtype).eps, equal_nan=True):
            message = "the compiled call gives other gradients"
    yield Finding(f"{case}, gradients", message)


def exported(subject: Subject) -> Iterator[Finding]:
    """torch.export keeps the operator in the graph, and the exported program gives the same values."""
    operator = _need_operator(subject)
    if operator.contract.data_dependent:
        raise Skipped("sizes depend on data")
    if operator.contract.mutated:
        raise Skipped("it mutates its arguments: see opcheck")
    for case in subject.small_cases(torch.float32)[:1]:
        fixed = [v for v in case.values if not _tensors([v])]

        class Module(torch.nn.Module):
            def forward(self, *tensors: Any, case: Case = case) -> Any:
                pending = list(tensors)
                return tuple(subject.call([pending.pop(0) if _tensors([v]) else v for v in case.values]))

        inputs = tuple(v for v in case.values if _tensors([v]))
        with torch.no_grad():
            program = torch.export.export(Module(), _clone(inputs))
            names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
            name = subject.name.replace("::", ".") + ".default"
            expected, got = subject.call(_clone(case.values)), program.module()(*_clone(inputs))
        message = (
            "" if name in names else f"the operator is not in the exported graph, which has {sorted(names)}"
        )
        if not all(_same(a, b) for a, b in zip(_tensors(expected), _tensors(got), strict=True)):
            message = "the exported program gives other values"
        yield Finding(f"{case}, {len(fixed)} constants", message)


def vmapped(subject: Subject) -> Iterator[Finding]:
    """torch.vmap over each tensor alone and over all of them, against a loop."""
    operator = _need_operator(subject)
    if operator.contract.mutated or operator.declaration.random or operator.contract.data_dependent:
        raise Skipped("it mutates, draws random numbers, or has sizes that depend on data")
    for case in subject.small_cases(torch.float64)[:2]:
        positions = [i for i, v in enumerate(case.values) if isinstance(v, torch.Tensor)]
        if not positions:
            continue
        for chosen in [positions, *([p] for p in positions if len(positions) > 1)]:
            yield _vmap_one(subject, case, chosen)


def _vmap_one(subject: Subject, case: Case, chosen: list[int]) -> Finding:
    stacked = {
        i: torch.stack(
            [case.values[i], case.values[i].flip(0) if case.values[i].ndim else case.values[i]], -1
        )
        for i in chosen
    }

    def call(*batched: torch.Tensor) -> Any:
        values = list(case.values)
        for i, tensor in zip(chosen, batched, strict=True):
            values[i] = tensor
        return tuple(subject.call(values))

    with torch.no_grad():
        got = torch.vmap(call, in_dims=-1)(*stacked.values())
        rows = [call(*(t.select(-1, k) for t in stacked.values())) for k in range(2)]
    wanted = [torch.stack(column) for column in zip(*rows, strict=True)]
    # The reference may take part (and sum in another order): float64 leaves room for that.
    same = all(
        torch.allclose(a.double(), b.double(), rtol=1e-9, atol=1e-12, equal_nan=True)
        for a, b in zip(got, wanted, strict=True)
    )
    return Finding(f"{case} over arguments {chosen}", "" if same else "vmap differs from a loop")


def autocast(subject: Subject) -> Iterator[Finding]:
    """Mixed precisions under autocast follow the operator's policy."""
    operator = _need_operator(subject)
    contract, policy = operator.contract, operator.declaration.autocast
    if policy is None:
        raise Skipped("the operator has no autocast policy")
    family = contract.scalar_family
    if family is None or torch.bfloat16 not in family.dtypes or torch.float32 not in family.dtypes:
        raise Skipped("bfloat16 and float32 are not both among its dtypes")
    for case in subject.small_cases(torch.float32)[:1]:
        floats = [
            i
            for i, p in enumerate(contract.parameters)
            if p.is_differentiable and isinstance(case.values[i], torch.Tensor)
        ]
        values = list(_clone(case.values))
        values[floats[0]] = values[floats[0]].bfloat16()
        target = {"lower": torch.bfloat16, "float32": torch.float32}.get(policy)
        if target is None:
            target = torch.bfloat16 if len(floats) == 1 else torch.float32
        converted = list(values)
        for i in floats:
            if contract.parameters[i].type.family == family and not contract.parameters[i].mutated:
                converted[i] = values[i].to(target)
        with torch.no_grad():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                got = subject.call(values)
            expected = subject.call(converted)
        same = all(_same(a, b) for a, b in zip(_tensors(expected), _tensors(got), strict=True))
        yield Finding(f"{case}, first tensor bf16", "" if same else f'not what policy "{policy}" gives')


def refusals(subject: Subject) -> Iterator[Finding]:
    """Wrong calls raise the error of the contract that names the argument, through both entries."""
    operator = _need_operator(subject)
    contract = operator.contract
    case = subject.small_cases(torch.float32)[0] if subject.small_cases(torch.float32) else None
    if case is None:
        raise Skipped("no small case")
    for i, parameter in enumerate(contract.parameters):
        if parameter.kind != "tensor" or case.values[i] is None:
            continue
        tensor = case.values[i]
        wrong: dict[str, Any] = {"a number": 3, "complex": tensor.to(torch.complex64)}
        if parameter.type.variadic_at is None:
            wrong["one axis more"] = tensor.unsqueeze(0)
        for what, value in wrong.items():
            values = list(_clone(case.values))
            values[i] = value
            try:
                subject.call(values)
                message = "accepted"
            except ContractError as error:
                message = (
                    ""
                    if f"`{parameter.name}`" in str(error)
                    else f"the error does not name it: {_first_line(error)}"
                )
            except Exception as error:
                message = f"raised {type(error).__name__}: {_first_line(error)}"
            yield Finding(f"`{parameter.name}` is {what}", message)


def survives_copy(subject: Subject) -> Iterator[Finding]:
    """Modules that use the operator can be copied."""
    _need_operator(subject)

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.function = subject.operator.function

    module = copy.deepcopy(Module())
    yield Finding(
        "deepcopy of a module", "" if module.function is subject.operator.function else "it was copied"
    )


def _need_operator(subject: Subject) -> Any:
    if subject.operator is None:
        raise Skipped("a plain callable, not an operator")
    return subject.operator


def _first_line(error: object, lines: int = 1) -> str:
    text = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(text[:lines])[:400] or type(error).__name__


CHECKS: dict[str, Check] = {
    "outputs written": outputs_written,
    "numerics": numerics,
    "determinism": determinism,
    "independence": independence,
    "refusals": refusals,
    "gradients": gradients,
    "second gradients": second_gradients,
    "gradient numerics": gradient_numerics,
    "vmap": vmapped,
    "autocast": autocast,
    "copy": survives_copy,
    "opcheck": opcheck,
    "compile": compiled,
    "export": exported,
}
