"""The process that knows an autotuned kernel's configurations and measures them: in a Python with Triton and torch.

It has no Opwright: beside the package `worker`, `packs` is imported from its folder. One request is read from a file and
one reply is written to another, so that what a kernel file prints disturbs nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from .choice import make_rows, row_key, runs_on

_WARP_SIZE = 32
_ANY_ARCHITECTURE = 90  # classes do not depend on it


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of every configuration, and the measurements if these are asked for.

    The request has `kernels`: `file function options tune`; `measure`; and `architectures`, one of which the GPU must run.
    The reply has one of `results` for each: `{"keys": [{"args", "options"}], "rows": [...]}` or `{"error": {...}}`; and
    `gpu` and `arch`. If nothing can be measured it is `{"error": {...}}`.
    """
    from worker.errors import WorkerError

    reply: dict[str, Any] = {}
    make_tensor, bench = stand_in, None
    try:
        if request["measure"]:
            machine, make_tensor, bench = _open_gpu(request["architectures"])
            reply.update(machine)
    except WorkerError as error:
        return {"error": error.as_reply()}
    results = []
    for kernel in request["kernels"]:
        try:
            results.append(examine(kernel, make_tensor, bench))
        except WorkerError as error:
            results.append({"error": error.as_reply()})
    return {**reply, "results": results}


def examine(
    asked: dict[str, Any],
    make_tensor: Callable[[list[int], str], Any],
    bench: Callable[[Callable[[], Any]], float | None] | None,
) -> dict[str, Any]:
    """Returns one kernel's keys and rows.

    Args:
        asked: Of the request's `kernels`.
        make_tensor: Makes a tensor of a shape and a dtype.
        bench: Returns the microseconds that a call takes, None if it cannot run; without it nothing is measured.

    Raises:
        WorkerError: The kernel cannot be read, or called with these arguments.
    """
    from worker.errors import WorkerError, first_paragraph
    from worker.kernel import find_kernel
    from worker.values import from_python, write_value

    kernel = find_kernel(asked["file"], asked["function"])
    if kernel.autotuner is None:
        raise kernel.error("function", "is not under `@triton.autotune`: there is nothing to tune. Remove `tune`.")
    module = kernel.kernel_file.module
    keys: dict[str, dict[str, Any]] = {}
    measured = []
    for case in asked["tune"]:
        try:
            arguments = {name: _argument(value, module, make_tensor) for name, value in case["arguments"].items()}
            texts, times = [], []
            for config in kernel.autotuner.configs:
                current = decided(kernel, {**asked["options"], **arguments}, config)
                values, classes, options = bind(kernel, current)
                key = {"args": classes, "options": options}
                keys[json.dumps(key)] = key
                texts = row_key(kernel.autotuner.keys, values, classes, lambda v: write_value(from_python(v, module)))
                if bench is not None:
                    grid = _grid(kernel, case.get("grid"))
                    times.append(bench(_call(kernel, {**asked["options"], **arguments}, config, grid)))
            measured.append((texts, times))
        except WorkerError:
            raise
        except Exception as error:
            message = f"cannot be called with {json.dumps(case['arguments'])}: {first_paragraph(error)}"
            raise kernel.error("argument", message) from error
    try:
        rows = make_rows(measured) if bench is not None else []
    except ValueError as error:
        raise kernel.error("compile", f"{error}.") from error
    return {"keys": list(keys.values()), "rows": rows}


def decided(kernel: Any, current: dict[str, Any], config: Any) -> dict[str, Any]:
    """Returns the arguments and options of a call after its decorators, as they run: from the outermost inwards."""
    from triton.runtime.autotuner import Heuristics

    current = dict(current)
    for layer in _layers(kernel):
        if layer is kernel.autotuner:
            current.update(config.all_kwargs())
        elif isinstance(layer, Heuristics):
            for name, heuristic in layer.values.items():
                current[name] = heuristic(dict(current))
    return current


def bind(kernel: Any, current: dict[str, Any]) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """Returns a call's arguments by name, their classes, and the options that were given, all as Triton's binder has them."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature
    from worker.classes import observed
    from worker.values import from_python

    jit, module = kernel.jit, kernel.kernel_file.module
    backend = make_backend(GPUTarget("cuda", _ANY_ARCHITECTURE, _WARP_SIZE))
    binder = create_function_from_signature(jit.signature, jit.params, backend)
    bound, specialization, _ = binder(**current)
    classes = [
        observed(type_, attribute, value, module, is_constexpr=parameter.is_constexpr)
        for parameter, value, (type_, attribute) in zip(jit.params, bound.values(), specialization)
    ]
    names = {parameter.name for parameter in jit.params}
    options = {name: from_python(value, module) for name, value in current.items() if name not in names}
    return dict(bound), classes, options


def stand_in(shape: list[int], dtype: str) -> Any:
    """Returns what Triton's binder takes for a tensor, where there is no torch."""
    from worker.classes import parse_class, representative

    tensor = representative(parse_class(f"*{dtype}:16"), None)
    tensor.shape = tuple(shape)
    return tensor


def _layers(kernel: Any) -> list[Any]:
    found: Any = kernel.kernel_file.module
    for part in kernel.function.split("."):
        found = getattr(found, part)
    layers = []
    while found is not kernel.jit:
        layers.append(found)
        found = found.fn
    return layers


def _argument(value: Any, module: Any, make_tensor: Callable[[list[int], str], Any]) -> Any:
    from worker.values import parse_value, to_python

    if not isinstance(value, dict):
        return value
    if "value" in value:
        return to_python(parse_value(value["value"]), module)
    return make_tensor(value["shape"], value["dtype"])


def _call(kernel: Any, given: dict[str, Any], config: Any, grid: Any) -> Callable[[], Any]:
    """Returns a call of the kernel with one configuration, its hooks around it, as `Autotuner` makes one."""
    autotuner = kernel.autotuner
    outside = dict(given)
    for layer in _layers(kernel):
        if layer is autotuner:
            break
        for name, heuristic in layer.values.items():
            outside[name] = heuristic(dict(outside))
    current = {**outside, **config.all_kwargs()}

    def call() -> None:
        if config.pre_hook:
            config.pre_hook(dict(current))
        autotuner.pre_hook(dict(current))
        try:
            autotuner.fn.run(grid=grid, warmup=False, **current)
        except Exception as error:
            autotuner.post_hook(dict(current), exception=error)
            raise
        autotuner.post_hook(dict(current), exception=None)

    return call


def _grid(kernel: Any, name: str | None) -> Any:
    """Returns the grid function of a name, or the only one of the kernel's file."""
    from worker.describe import describe

    grids = describe(kernel)["grids"]
    there = [grid for grid in grids if hasattr(kernel.kernel_file.module, grid)]
    if name is None and len(there) == 1:
        name = there[0]
    if name is None or name not in there:
        listed = ", ".join(f"`{grid}`" for grid in there) or "none"
        asked = "`tune` names no `grid`" if name is None else f"there is no grid `{name}`"
        raise kernel.error(
            "function", f'{asked}; functions of one parameter in its file: {listed}. Name one: `"grid": ...`.'
        )
    return getattr(kernel.kernel_file.module, name)


def _open_gpu(
    architectures: list[int],
) -> tuple[dict[str, Any], Callable[[list[int], str], Any], Callable[..., Any]]:
    from worker.errors import WorkerError, first_paragraph
    from worker.kernel import require_triton

    require_triton()
    try:
        import torch
    except Exception as error:
        raise WorkerError("no-torch", f"`{sys.executable}` cannot import torch: {first_paragraph(error)}") from error
    if not torch.cuda.is_available():
        raise WorkerError("no-gpu", f"torch {torch.__version__} of `{sys.executable}` finds no CUDA GPU")
    major, minor = torch.cuda.get_device_capability()
    arch = 10 * major + minor
    name = torch.cuda.get_device_name()
    if not any(runs_on(a, arch) for a in architectures):
        has = ", ".join(f"sm_{a}" for a in architectures)
        raise WorkerError("no-gpu", f"the GPU here is sm_{arch} ({name}), and the pack is for {has}")

    def make_tensor(shape: list[int], dtype: str) -> Any:
        torch_dtype = getattr(torch, stand_in(shape, dtype).dtype.name.removeprefix("torch."))
        # Integers may be indices: zero is one of every tensor.
        if not torch_dtype.is_floating_point:
            return torch.zeros(shape, dtype=torch_dtype, device="cuda")
        return torch.randn(shape, device="cuda").to(torch_dtype)

    def bench(call: Callable[[], Any]) -> float | None:
        from triton.compiler.errors import CompileTimeAssertionFailure
        from triton.runtime.errors import OutOfResources, PTXASError
        from triton.testing import do_bench

        try:
            milliseconds: Any = do_bench(call, quantiles=(0.5, 0.2, 0.8))
        except (OutOfResources, CompileTimeAssertionFailure, PTXASError):
            return None
        return 1000 * float(milliseconds[0])

    return {"gpu": name, "arch": arch}, make_tensor, bench


def main(request: str, reply: str) -> None:
    """Answers the request in one file into another."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "packs"]:
        del sys.modules[name]  # a module of the author's may have the name
    with open(request, encoding="utf-8") as file:
        asked = json.load(file)
    text = json.dumps(answer(asked))
    with open(reply, "w", encoding="utf-8") as file:
        file.write(text)
