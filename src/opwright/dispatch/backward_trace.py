"""Derived backwards, written out: the PyTorch operators that a gradient needs, recorded once for a signature.

Differentiating a reference runs all of it again, under autograd. Its gradient often needs little of that: the one of
`x * w + b` nothing at all. So the operators are recorded on tensors without data, those without use are dropped, and
later backwards of the same signature run the rest as a plain function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from opwright import _torch
from opwright._torch import DispatchMode, FakeTensor, FakeTensorMode, OpOverload, tree_iter, tree_leaves
from opwright.dispatch.compiled import compiled
from opwright.dispatch.lock import lock

# A recording takes some milliseconds. So many signatures are recorded when they are first seen, later ones when they
# come again: where every call has other sizes, recording would cost more than it saves.
MAX_RECORDED_AT_ONCE = 16
MAX_KEPT = 256  # signatures of one operator
# The first recording of a process imports torch._dynamo, which takes a second unless an optimizer or torch.compile has
# done so. A program of a few backwards does without.
MIN_BACKWARDS = 16

_REFUSED_TAGS = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)
_aten = torch.ops.aten


class BackwardTrace(NamedTuple):
    """A recorded backward.

    Attributes:
        run: takes the arguments of the forward and the gradients of its outputs in order, returns what autograd wants.
        recomputed: the names of the operators of the forward that it runs again.
        count: how many operators it runs, views left out.
    """

    run: Callable[..., tuple[torch.Tensor | None, ...]]
    recomputed: tuple[str, ...]
    count: int


class _Step(NamedTuple):
    function: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    is_forward: bool


class _NotRecordable(Exception):
    """An operator whose effect depends on more than the signature."""


class BackwardTraces:
    """The recorded backwards of one operator.

    Attributes:
        found: the backwards by their signature; None for one that cannot be recorded.
    """

    _backwards = 0  # of all operators, before anything was recorded

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets all: an operator that one of them calls was declared again."""
        self.found: dict[tuple, BackwardTrace | None] = {}
        self._seen: set[tuple] = set()

    def is_due(self, key: tuple) -> bool:
        """Returns whether the backward of a signature is to be recorded now; makes room for it."""
        if key[-1] is None or key in self.found:
            return False
        if not _torch.is_dynamo_imported():
            BackwardTraces._backwards += 1
            if BackwardTraces._backwards < MIN_BACKWARDS:
                return False
            with lock:  # after a fork amid an import, the child cannot import it
                _torch.import_dynamo()
        if len(self.found) >= MAX_RECORDED_AT_ONCE and key not in self._seen:
            if len(self._seen) >= MAX_KEPT:
                self._seen = set()
            self._seen.add(key)
            return False
        if len(self.found) >= MAX_KEPT:
            self.found.clear()
        return True


def record_backward(
    differentiate: Callable[..., Sequence[Any]],
    values: Sequence[Any],
    gradients: Sequence[torch.Tensor | None],
    name: str,
) -> BackwardTrace | None:
    """Records a backward; returns None for one that must run as it is.

    Args:
        differentiate: `differentiate(values, gradients, end_forward)` returns what autograd wants, and calls
            `end_forward` between forward and backward.
        values: the arguments of the forward, for their sizes, strides, dtypes and devices.
        gradients: the gradients of the outputs, likewise.
        name: what tracebacks call the function.
    """
    try:
        # Below a mode of its own no code of the reference sees data, so none of it can depend on them.
        with FakeTensorMode(), torch.no_grad():
            values, gradients = _without_data(values), _without_data(gradients)
            with _Recorder() as recorder:
                results = differentiate(values, gradients, recorder.end_forward)
            return _write(recorder.steps, [*values, *gradients], results, name)
    except Exception:  # a reference may do anything; run with data, it raises its own errors
        return None


def _without_data(values: Sequence[Any]) -> list[Any]:
    return [
        torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
        if isinstance(v, torch.Tensor)
        else _without_data(v)
        if isinstance(v, (list, tuple))
        else v
        for v in values
    ]


class _Recorder(DispatchMode):
    """Notes every operator that runs below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self._is_forward = True

    def end_forward(self) -> None:
        """Says that what follows belongs to the backward."""
        self._is_forward = False

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        # `as_strided` counts from the start of the memory, which differs between tensors of one signature.
        if (
            not isinstance(func, OpOverload)
            or func is _aten.as_strided.default
            or any(tag in func.tags for tag in _REFUSED_TAGS)
        ):
            raise _NotRecordable(str(func))
        result = func(*args, **kwargs)
        if func.namespace != "prim":  # asks a tensor for its device or the like
            self.steps.append(_Step(func, args, kwargs, result, self._is_forward))
        return result


def _write(steps: Sequence[_Step], given: Sequence[Any], results: Sequence[Any], name: str) -> BackwardTrace:
    """Writes the steps that the results need as a function of what is given."""
    kept = _needed(steps, results)
    names: dict[int, str] = {}  # of tensors
    constants: dict[str, Any] = {}

    def constant_of(value: Any) -> str:
        name = f"c{len(constants)}"
        constants[name] = value
        return name

    def text_of(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            if id(value) not in names:
                raise _NotRecordable("a tensor that is neither an argument nor a result")
            return names[id(value)]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(text_of, value))}]"
        return repr(value) if value is None or type(value) in (int, bool) else constant_of(value)

    def target_of(result: Any) -> str:
        if isinstance(result, (list, tuple)):
            return f"({''.join(target_of(each) + ', ' for each in result)})"
        return names.setdefault(id(result), f"v{len(names)}") if isinstance(result, torch.Tensor) else "_"

    parameters = [f"a{i}" for i in range(len(given))]
    start: list[str] = []
    for parameter, value in zip(parameters, given, strict=True):
        if isinstance(value, torch.Tensor):
            names[id(value)] = parameter
        elif isinstance(value, list) and value:
            start.append(f"{target_of(value)} = {parameter}")
    inputs = set(names.values())

    lines: list[tuple[str, set[str]]] = []  # each with the tensors in it
    for function, args, kwargs, result, _ in kept:
        if function is _aten.detach.default and id(args[0]) in names:
            names[id(result)] = names[id(args[0])]  # there is nothing to detach from
            continue
        if function is _aten.lift_fresh.default and not isinstance(args[0], FakeTensor):
            function, arguments = _aten.clone.default, [constant_of(args[0])]  # `torch.tensor(...)`
        else:
            arguments = [text_of(a) for a in args] + [f"{k}={text_of(v)}" for k, v in kwargs.items()]
            function = _fastest(function, args, kwargs)
        line = f"{target_of(result)} = {constant_of(function)}({', '.join(arguments)})"
        inside = tree_iter((args, kwargs, result))
        lines.append((line, {names[id(t)] for t in inside if isinstance(t, FakeTensor)}))
    returned = [text_of(result) for result in results]

    body: list[str] = []
    finished = {*returned, *inputs}
    for line, inside in reversed(lines):
        if inside - finished:
            body.append(f"del {', '.join(sorted(inside - finished))}")  # as early as PyTorch's own backward frees it
        body.append(line)
        finished |= inside
    source = [
        f"def make({', '.join(constants)}):",
        f"    def run({', '.join(parameters)}):",
        *(f"        {line}" for line in [*start, *reversed(body)]),
        f"        return ({''.join(text + ', ' for text in returned)})",
        "    return run",
    ]
    run = compiled(f"backward of {name}", "\n".join(source), __name__)(*constants.values())
    working = [s for s in kept if s.function is not _aten.detach.default and not s.function.is_view]
    again = (s.function.name().removeprefix("aten::").split(".")[0] for s in working if s.is_forward)
    return BackwardTrace(run, tuple(dict.fromkeys(again)), len(working))


def _needed(steps: Sequence[_Step], results: Sequence[Any]) -> list[_Step]:
    """Returns the steps that the results depend on, and all that write into a tensor."""
    needed = {id(t) for t in results if t is not None}
    kept: list[_Step] = []
    for step in reversed(steps):
        made = (t for t in tree_iter(step.result) if isinstance(t, torch.Tensor))
        if _torch.schema_of(step.function).is_mutable or not needed.isdisjoint(map(id, made)):
            kept.append(step)
            needed.update(id(t) for t in tree_iter((step.args, step.kwargs)) if isinstance(t, torch.Tensor))
    return kept[::-1]


def _fastest(function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Returns PyTorch's Python binding of an operator, where it does the same for these arguments.

    It reads them in half of the time that `torch.ops` takes.
    """
    if function.namespace != "aten":
        return function
    name = _torch.schema_of(function).name.removeprefix("aten::")
    for owner in _torch.BINDINGS:
        binding = getattr(owner, name, None)
        if binding is None:
            continue
        try:
            with _Recorder() as recorder:
                binding(*args, **kwargs)
        except Exception:  # no binding with these parameters
            continue
        if len(recorder.steps) == 1 and recorder.steps[0].function is function:
            _, *passed, _, _ = recorder.steps[0]
            one, other = tree_leaves(passed), tree_leaves([args, kwargs])
            if len(one) == len(other) and all(a is b or a == b for a, b in zip(one, other, strict=True)):
                return binding
    return function
