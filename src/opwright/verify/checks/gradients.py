"""Checks of gradients against those of the reference: their values, and how they are asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from opwright._torch import tree_map
from opwright.contract.fill import put_in_layout
from opwright.contract.sweep import Case
from opwright.verify.checks.finding import (
    Finding,
    Skipped,
    agree,
    find_difference,
    first_line,
    is_own,
    outputs_of_reference,
)
from opwright.verify.compare import tell_share
from opwright.verify.devices import is_gpu
from opwright.verify.oracle_process import Output
from opwright.verify.target import Target
from opwright.verify.tensors import are_same, copy_of, is_same, storage_bytes, tensors_of

# Labels of the cases of a sweep whose gradients are checked in every dtype.
_WITH_GRADIENTS = ("base", "one element", "empty batch", "transposed", "sliced", "expanded", "mixed layouts", "large")

Seeds = Callable[[torch.Tensor], torch.Tensor]  # makes the gradient of an output


def need_gradient(target: Target) -> None:
    """Raises Skipped where there is no gradient."""
    if target.operator is None:
        _need_gradient_of_callable(target)
        return
    contract = target.operator.contract
    if contract.mutated:
        raise Skipped("it mutates its arguments")
    if target.operator.declaration.random:
        raise Skipped("it draws random numbers")
    if not any(p.is_differentiable for p in contract.parameters) or not any(
        o.type.family.has_floats and not o.is_constant for o in contract.outputs
    ):
        raise Skipped("nothing floating-point to differentiate")
    is_derived = target.operator.backward_operator is None
    if is_derived and (missing := target.remember("derivative", lambda: _tell_missing_derivative(target))):
        raise Skipped(missing)


def _tell_missing_derivative(target: Target) -> str:
    """Returns that PyTorch has no derivative of the reference, as of `torch.unique`; "" if it has."""
    try:
        values = copy_of(target.run_cases()[0].values)
        with torch.enable_grad():
            outputs = differentiable(target, target.reference(as_leaves(values)))
            recorded = [o for o in outputs if o.requires_grad]
            torch.autograd.backward(recorded, [seed_like(o) for o in recorded])
    except NotImplementedError as error:
        return f"the reference has no gradient: {first_line(error)}"
    except Exception:  # what else it raises, the check itself meets
        pass
    return ""


def has_gradient(target: Target) -> bool:
    try:
        need_gradient(target)
    except Skipped:
        return False
    return True


def _need_gradient_of_callable(target: Target) -> None:
    case = target.run_cases()[0]
    leaves = as_leaves(copy_of(case.values))
    if not floats_of(leaves):
        raise Skipped("nothing floating-point to differentiate")
    try:
        with torch.enable_grad():
            outputs = differentiable(target, target.reference(leaves))
            mine = differentiable(target, target.run(as_leaves(target.inputs(case))))
    except Exception as error:  # what it does to tensors that need gradients is its own matter
        raise Skipped(f"it takes no tensors that need gradients: {first_line(error)}") from None
    for whose, found in (("the reference's", outputs), ("its", mine)):
        if not any(o.requires_grad for o in found):
            raise Skipped(f"{whose} outputs have no gradient")
    if missing := _tell_missing_derivative(target):
        raise Skipped(missing)


def as_function_of_tensors(
    target: Target, case: Case, dtype: torch.dtype | None = None
) -> tuple[list[torch.Tensor], Callable[..., Any]]:
    """Returns the floating-point tensors of a case, and the call as a function of them alone.

    The operator's outputs that a backward takes are not arguments of that function: they follow from the others.

    Args:
        dtype: of the tensors that are arguments and results of that function; the others stay as they are.
    """

    def is_argument(tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point() and dtype in (None, tensor.dtype)

    computed = target.computed
    values = [None if i in computed else v for i, v in enumerate(target.inputs(case))]
    inputs = [t.detach().clone().requires_grad_() for t in tensors_of(values) if is_argument(t)]

    def call(*tensors: torch.Tensor) -> Any:
        pending = list(tensors)

        def fill(value: Any) -> Any:
            return pending.pop(0) if isinstance(value, torch.Tensor) and is_argument(value) else value

        filled = tree_map(fill, values)
        if computed:
            filled = target.with_computed(filled)
        return tuple(o for o in differentiable(target, target.call(filled)) if dtype in (None, o.dtype))

    return inputs, call


def differentiable(target: Target, outputs: list[Any]) -> list[torch.Tensor]:
    """Returns the outputs that a gradient may flow through."""
    if target.operator is None:
        return floats_of(outputs)
    found = zip(target.operator.contract.outputs, outputs, strict=True)
    return [o for output, o in found if o is not None and o.is_floating_point() and not output.is_constant]


def seed_like(output: torch.Tensor) -> torch.Tensor:
    """Returns a cotangent whose entries differ, the same on every device and, but for rounding, in every dtype."""
    return torch.cos(torch.arange(output.numel(), dtype=torch.float64)).view(output.shape).to(output)


def _with_gradients(target: Target) -> list[Case]:
    """Returns the cases whose gradients are checked in every dtype.

    Of samples that is all of them, but a few where the gradient is the reference's and only its way to there is ours.
    """
    if target.operator.backward_operator is None and target.has_samples:
        family = target.contract.scalar_family
        dtypes = family.dtypes if family is not None else (torch.float64,)
        return [case for dtype in dtypes for case in target.small_cases(dtype)]
    # A backward of its own has had its large inputs.
    is_own = target.operator.declaration.forward or target.operator.backward_operator is not None
    wanted = _WITH_GRADIENTS[:-1] if target.effort != "full" and is_own else _WITH_GRADIENTS
    if target.effort != "full" and target.is_derivative_of_reference:
        return _small_cases(target)
    return [case for case in target.cases() if case.label in wanted or case.label.startswith("sample")]


def gradient_numerics(target: Target) -> Iterator[Finding]:
    """Gradients in every dtype against those of the reference in float64."""
    need_gradient(target)
    has_some, refused = False, None
    for case in target.within_time(_with_gradients(target)):
        try:
            expected = expected_gradients(target, case)
        except RuntimeError as error:  # PyTorch has none for an empty batch of pixel_shuffle, say
            refused = error
            continue
        got = pull_back(target, target.run, target.inputs(case))
        finding = check_gradients(target, case, str(case), got, expected)
        if finding.message and _are_of_pytorch(target, case, got):
            finding = Finding(str(case))
        finding.message = finding.message or recorded_wrong(target, case, as_leaves(target.inputs(case)))
        has_some = True
        yield finding
    if refused is not None and not has_some:
        raise refused
    if target.operator.backward_operator is not None and not target.has_samples:
        yield from _rows_of_equal_numbers(target)


def _are_of_pytorch(target: Target, case: Case, got: list[torch.Tensor | None]) -> bool:
    """Returns whether PyTorch computes outputs and gradients, as it does for the reference alone on this GPU.

    There it takes others of equal numbers, and adds in any order.
    """
    if not is_gpu(target.device) or is_own(target) or target.operator.backward_operator is not None:
        return False
    alone = pull_back(target, target.reference, target.inputs(case))
    return agree(target, got, alone, gradients_of_reference, case.values, of_gradient=True)


def _rows_of_equal_numbers(target: Target) -> Iterator[Finding]:
    """Gradients at a row of zeros, and of ones, are finite where those of the reference are.

    One that divides by a norm or a standard deviation is not; PyTorch's own are 0 there.
    """
    case = next(iter(_small_cases(target)), None)
    parameters = enumerate(target.contract.parameters if case is not None else ())
    for (i, parameter), number in itertools.product(parameters, (0.0, 1.0)):
        value = case.values[i]
        is_filled = parameter.kind == "tensor" and value is not None and value.is_floating_point()
        if not is_filled or not (parameter.domain is None or parameter.domain.contains(number)):
            continue
        filled = value.detach().clone()
        (filled[:1] if value.ndim > 1 else filled).fill_(number)
        values = [filled if k == i else v for k, v in enumerate(case.values)]
        made = replace(case, label=f"{case.label}, {number:g} in a row of {parameter.name}", values=tuple(values))
        try:
            wanted = gradients_of_reference(target, copy_of(values))
        except Exception:  # whatever a reference may raise to refuse
            continue
        got = pull_back(target, target.run, target.inputs(made))
        finding = Finding(str(made))
        for name, g, w in zip(target.float_names(made), got, wanted, strict=True):
            if g is not None and bool((wrong := w.isfinite() & ~g.cpu().isfinite()).any()):
                share = tell_share(int(wrong.sum()), wrong.numel())
                finding.message = f"gradient of {name}: {share} not finite, where that of the reference is"
        yield finding


def recorded_wrong(target: Target, case: Case, leaves: list[Any]) -> str:
    """Returns how the outputs of a call are wrong that is recorded for a gradient, "" if they are not.

    It may take another path than a call that is not: one that keeps what the backward needs.
    """
    with torch.enable_grad():
        recorded = [o if o is None else o.detach() for o in target.run(leaves)]
    with torch.no_grad():
        plain = target.run(target.inputs(case))
        if [o is None for o in recorded] == [o is None for o in plain] and agree(
            target, recorded, plain, outputs_of_reference, case.values
        ):
            return ""
        expected = target.expect(outputs_of_reference, case.values)
    message, _ = find_difference(target, recorded, expected, target.output_names(len(expected)))
    return message and f"recorded for a gradient, {message}"


def gradients_of_reference(
    target: Target, values: Any, seeds: Seeds = seed_like, asked: set[int] | None = None
) -> list[torch.Tensor]:
    """Returns the gradients of the floating-point tensors among the values; zeros where there is none."""
    with target.formulas_for(values):  # for the backward as well
        found = pull_back(target, target.reference, values, seeds, asked)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, floats_of(values), strict=True)]


def expected_gradients(target: Target, case: Case, seeds: Seeds = seed_like) -> list[Output | None]:
    """Returns what the gradients of all floating-point tensors of a case must be."""

    def ask() -> list[Output | None]:
        room = None if target.operator is not None else 0.0
        return target.expect(gradients_of_reference, case.values, seeds, room=room)

    return target.remember(("gradients", seeds, id(case)), ask)


def pull_back(
    target: Target,
    function: Callable[[Any], list[Any]],
    values: Any,
    seeds: Seeds = seed_like,
    asked: set[int] | None = None,
) -> list[torch.Tensor | None]:
    """Returns the gradient of each floating-point tensor among the arguments; None where there is none.

    Args:
        seeds: makes the gradient of an output.
        asked: which of the floating-point tensors need a gradient; all by default.
    """
    leaves = as_leaves(values, asked)
    inputs = floats_of(leaves)
    wanted = [t for t in inputs if t.requires_grad]
    outputs = call_for_gradient(target, function, leaves)
    found = [None] * len(wanted)
    if outputs:
        found = torch.autograd.grad(outputs, wanted, [seeds(o) for o in outputs], allow_unused=True)
    target.wait(target.device)
    pending = list(found)
    return [pending.pop(0) if t.requires_grad else None for t in inputs]


def call_for_gradient(target: Target, function: Callable[[Any], list[Any]], leaves: list[Any]) -> list[torch.Tensor]:
    """Calls a function, and returns the outputs that a gradient flows through.

    An output that is omitted or empty may have been made without the inputs.
    """
    with torch.enable_grad():
        return [o for o in differentiable(target, function(leaves)) if o.requires_grad]


def as_leaves(values: Any, asked: set[int] | None = None) -> list[Any]:
    """Returns the arguments with floating-point tensors that record what is done to them."""
    count = itertools.count()

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        number = next(count)
        return value.detach().requires_grad_(asked is None or number in asked)

    return tree_map(leaf, list(values))


def floats_of(values: Any) -> list[torch.Tensor]:
    """Returns the floating-point tensors among these values."""
    return [t for t in tensors_of(values) if t.is_floating_point()]


def check_gradients(
    target: Target,
    case: Case,
    label: str,
    got: list[torch.Tensor | None],
    expected: list[Output | None],
    asked: set[int] | None = None,
) -> Finding:
    """Compares gradients with what they must be; one that is missing counts as zero, as autograd has it."""
    finding, names = Finding(label, worst_ulp=0.0, worst_ratio=0.0), target.float_names(case)
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        if asked is not None and i not in asked:
            continue
        g = torch.zeros(e.shape, dtype=e.dtype) if g is None else g
        if g.shape != e.shape or g.dtype != e.dtype:
            form = f"got {g.dtype} {list(g.shape)}, expected {e.dtype} {list(e.shape)}"
            finding.message = f"gradient of {names[i]}: {form}"
            return finding
        difference = target.compare(g, e)
        finding.note_worst(difference)
        if difference.message and not finding.message:
            finding.message = f"gradient of {names[i]}: {difference.message}"
            finding.pattern = difference.pattern
    return finding


def _small_cases(target: Target) -> list[Case]:
    """Returns a small input of each dtype with each combination of options.

    Unless the sweep is full, dtypes other than the first have one input.
    """
    need_gradient(target)
    if target.operator is None or target.has_samples:
        return target.run_cases()
    found = [case for case in target.cases() if case.label == "base"]
    if target.effort != "full":
        first = {id(case) for case in {case.dtype: case for case in reversed(found)}.values()}
        found = [case for case in found if case.dtype == found[0].dtype or id(case) in first]
    return found


def _cases_to_repeat(target: Target) -> list[Case]:
    """Returns the inputs whose gradients are computed in several ways: one, where no kernel computes them."""
    found = _small_cases(target)
    return found[:1] if target.effort != "full" and target.is_derivative_of_reference else found


def gradient_subsets(target: Target) -> Iterator[Finding]:
    """Gradients of some inputs only, every choice of them, against those of the reference in float64."""
    has_some = False
    for case in _cases_to_repeat(target):
        names = target.float_names(case)
        count = len(names)
        expected = expected_gradients(target, case) if count > 1 else []
        for asked in _subsets(count):
            has_some = True
            label = f"{case}, gradients of {', '.join(names[i] for i in sorted(asked))} alone"
            got = pull_back(target, target.run, target.inputs(case, label), asked=asked)
            yield check_gradients(target, case, label, got, expected, asked)
    if not has_some:
        raise Skipped("one floating-point input")


def _subsets(count: int) -> Iterator[set[int]]:
    """Yields every choice of a few tensors; of more than four, each alone and all but each."""
    if count <= 4:
        for size in range(1, count):
            yield from map(set, itertools.combinations(range(count), size))
    else:
        everything = set(range(count))
        for i in range(count):
            yield {i}
            yield everything - {i}


def gradient_layouts(target: Target) -> Iterator[Finding]:
    """Gradients of outputs that are transposed, sliced, offset in memory, or one number expanded."""
    for case in _cases_to_repeat(target):
        expected = expected_gradients(target, case)
        for layout in ("transposed", "sliced", "offset"):

            def laid_out(output: torch.Tensor, layout: str = layout) -> torch.Tensor:
                return put_in_layout(seed_like(output), layout)

            label = f"{case}, gradient {layout}"
            try:
                got = pull_back(target, target.run, target.inputs(case), laid_out)
            except RuntimeError as error:
                if not _refuses_seeds(target, case, laid_out):  # the reference takes it
                    yield Finding(label, f"raised {type(error).__name__}: {first_line(error)}")
                continue
            yield check_gradients(target, case, label, got, expected)

        got = pull_back(target, target.run, target.inputs(case), _seed_expanded)
        expected = expected_gradients(target, case, _seed_expanded)
        yield check_gradients(target, case, f"{case}, gradient expanded", got, expected)


def _seed_expanded(output: torch.Tensor) -> torch.Tensor:
    return torch.full((), 0.75, dtype=output.dtype, device=output.device).expand(output.shape)


def _refuses_seeds(target: Target, case: Case, seeds: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Returns whether the reference refuses such gradients: that of a view of complex numbers wants them in pairs."""
    try:
        pull_back(target, target.reference, copy_of(case.values), seeds)
    except RuntimeError:
        return True
    return False


def repeated_backward(target: Target) -> Iterator[Finding]:
    """The backward twice on a kept graph: the same bits; inputs, outputs and gradients of outputs unchanged."""
    for case in _cases_to_repeat(target):
        leaves = as_leaves(target.inputs(case))
        inputs = floats_of(leaves)
        with torch.enable_grad():
            results = target.run(leaves)
        outputs = [o for o in differentiable(target, results) if o.requires_grad]
        if not outputs:
            continue
        seeds = [seed_like(o) for o in outputs]
        given = copy_of([seeds, [o.detach() for o in tensors_of(results)]])
        kept = {"allow_unused": True, "retain_graph": True}
        first = copy_of(list(torch.autograd.grad(outputs, inputs, seeds, **kept)))
        second = list(torch.autograd.grad(outputs, inputs, seeds, **kept))
        message = ""
        if not agree(target, second, first, _gradients_that_are, case.values, of_gradient=True):
            message = "the second backward on a kept graph gives different values than the first"
        elif not are_same(given, [seeds, tensors_of(results)]):
            message = "the backward writes into its argument or into an output"
        elif not all(
            is_same(storage_bytes(b), storage_bytes(a))
            for a, b in zip(tensors_of(case.values), tensors_of(leaves), strict=True)
        ):
            message = "the backward writes into an input"
        yield Finding(str(case), message)


def _gradients_that_are(target: Target, values: list[Any]) -> list[torch.Tensor]:
    return [g for g in pull_back(target, target.reference, values) if g is not None]


def gradient_numerics_of_callable(target: Target) -> Iterator[Finding]:
    """Gradients of the samples against those of the reference in float64, parameters of modules included."""
    compared, why = False, "nothing to differentiate"
    cases = [c for c in target.cases() if not c.label.partition(", ")[2].removesuffix("values around 1")]
    for case in target.within_time(cases):
        asked = _differentiable_by(target, case)
        if not asked:
            continue
        has_gradient = any(o.requires_grad for o in _record(target, case, asked))
        if not has_gradient and not any(t.requires_grad for t in tensors_of(case.values)):
            continue
        try:
            expected = target.expect(gradients_of_reference, case.values, seed_like, asked, room=0.0)
        except RuntimeError as error:
            why = f"the reference has no gradient: {first_line(error)}"
            continue
        compared = True
        if not has_gradient:
            yield Finding(str(case), "its outputs have no gradient, though the sample requires one")
            continue
        got = pull_back(target, target.run, target.inputs(case), asked=asked)
        finding = check_gradients(target, case, str(case), got, expected, asked)
        finding.message = finding.message or recorded_wrong(target, case, as_leaves(target.inputs(case), asked))
        yield finding
    if not compared:
        raise Skipped(why)


# The tolerance of gradgradcheck. Autograd derives these formulas, a different one for each way to compute the same
# result; terms that cancel in them are not a fault of the candidate.
_SECOND_SHARE = 1e-3
_NO_SECOND = "a backward that has none can say so with `torch.autograd.function.once_differentiable`"


def second_gradients_of_callable(target: Target) -> Iterator[Finding]:
    """The gradient of a gradient, by the arguments and by the gradient of the outputs, against that in float64.

    A backward that cannot be differentiated is not a finding; one whose result lacks a graph is.
    """
    for case in target.run_cases()[:1]:
        asked = _differentiable_by(target, case)
        if not asked or not any(o.requires_grad for o in _record(target, case, asked)):
            raise Skipped("nothing to differentiate")
        try:
            expected = target.expect(_second_gradients_of_reference, case.values, asked, room=_SECOND_SHARE)
        except RuntimeError as error:
            raise Skipped(f"the reference has no second gradient: {first_line(error)}") from None
        try:
            found = _differentiate_twice(target.run, target.inputs(case), asked)
        except RuntimeError as error:
            if not any(text in str(error) for text in ("differentiate", "derivative", "double backward")):
                raise
            raise Skipped(f"its backward refuses to be differentiated: {first_line(error)}") from None
        names = [f"by {name}" for i, name in enumerate(target.float_names(case)) if i in asked]
        names += ["by the gradient of an output"] * (len(expected) - len(names))
        message, pattern = find_difference(target, found, expected, names)
        yield Finding(str(case), message and f"the gradient of its gradient {message}; {_NO_SECOND}", pattern)


def _differentiable_by(target: Target, case: Case) -> set[int]:
    """Returns the tensors by which the reference can be differentiated: the mean of a batch norm is not one."""

    def can(asked: set[int]) -> bool:
        try:
            with torch.enable_grad():
                outputs = tensors_of(target.reference(as_leaves(copy_of(case.values), asked)))
            return any(output.requires_grad for output in outputs)
        except RuntimeError:
            return False

    every = set(range(len(floats_of(case.values[: target.callables.count_differentiable(case)]))))
    return every if can(every) else {i for i in every if can({i})}


def _record(target: Target, case: Case, asked: set[int]) -> list[torch.Tensor]:
    """Returns the outputs of a call that is recorded for a gradient.

    Raises:
        Skipped: it refuses tensors that need gradients, as numpy does, and no sample has such.
    """
    try:
        with torch.enable_grad():
            return tensors_of(target.run(as_leaves(target.inputs(case), asked)))
    except Exception as error:
        if any(t.requires_grad for t in tensors_of(case.values)):
            raise
        raise Skipped(f"it takes no tensors that need gradients: {first_line(error)}") from None


def _second_gradients_of_reference(target: Target, values: Any, asked: set[int]) -> list[torch.Tensor]:
    with target.formulas_for(values):  # for the backward as well
        return _differentiate_twice(target.reference, values, asked)


def _differentiate_twice(function: Callable[[Any], list[Any]], values: Any, asked: set[int]) -> list[torch.Tensor]:
    leaves = as_leaves(values, asked)
    inputs = [t for t in floats_of(leaves) if t.requires_grad]
    with torch.enable_grad():
        outputs = [o for o in tensors_of(function(leaves)) if o.requires_grad]
        seeds = [seed_like(o).requires_grad_() for o in outputs]
        found = torch.autograd.grad(outputs, inputs, seeds, allow_unused=True, create_graph=True)
    firsts = [g for g in found if g is not None and g.requires_grad]
    wanted = [*inputs, *seeds]
    if not firsts:
        return [torch.zeros_like(v) for v in wanted]
    # By all that they were made of: a backward that refuses to be differentiated does so on the way to no input.
    found = torch.autograd.grad(firsts, [*wanted, *_made_of(firsts)], [seed_like(g) for g in firsts], allow_unused=True)
    return [torch.zeros_like(v) if g is None else g for g, v in zip(found, wanted, strict=False)]


def _made_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the leaves of the graph behind some tensors."""
    pending = [t.grad_fn for t in tensors]
    seen, found = set(pending), []
    while pending:
        node = pending.pop()
        if node is None:
            continue
        if (leaf := getattr(node, "variable", None)) is not None:
            found.append(leaf)
        fresh = {behind for behind, _ in node.next_functions} - seen
        seen |= fresh
        pending += fresh
    return found
