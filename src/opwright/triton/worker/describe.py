"""Describes a JIT function: its parameters, its decorators and the grids of its file."""

from __future__ import annotations

import ast
import functools
import inspect
from types import FunctionType
from typing import Any

from .compile_errors import compile_error
from .expressions import NotTranslatable, find_function, named_functions, translate
from .kernel import Kernel
from .values import from_python, write_value

_HINT = "pass a C++ functor instead"


def describe(kernel: Kernel) -> dict[str, Any]:
    """Returns the record of a description."""
    import triton

    try:
        source_key = kernel.jit.cache_key
    except Exception as error:  # Triton follows the calls of a kernel here, and refuses those of plain functions
        raise compile_error(kernel, error) from error
    return {
        "file": kernel.file,
        "function": kernel.function,
        "line": kernel.line,
        "triton": triton.__version__,
        "sources": kernel.kernel_file.digests(kernel.jit),
        "source_key": source_key,
        "params": [_parameter(p, kernel) for p in kernel.jit.params],
        "heuristics": [
            _heuristic(name, function, kernel) for one in kernel.heuristics for name, function in one.values.items()
        ],
        "autotune": None if kernel.autotuner is None else _autotune(kernel.autotuner, kernel),
        "grids": _grids(kernel),
    }


def _parameter(parameter: Any, kernel: Kernel) -> dict[str, Any]:
    record = {
        "name": parameter.name,
        "constexpr": parameter.is_constexpr,
        "const": parameter.is_const,
        "specialize": not parameter.do_not_specialize,
        "align": not parameter.do_not_specialize_on_alignment,
        "type": parameter.annotation_type or None,
    }
    if parameter.has_default:
        default = _text(parameter.default, kernel)
        if default is not None:
            record["default"] = default
    return record


def _text(value: Any, kernel: Kernel) -> str | None:
    try:
        return write_value(from_python(value, kernel.kernel_file.module))
    except ValueError:
        return None


def _autotune(autotuner: Any, kernel: Kernel) -> dict[str, Any]:
    configs = []
    for config in autotuner.configs:
        constexprs = {name: _text(value, kernel) for name, value in config.kwargs.items()}
        unwritten = [name for name, text in constexprs.items() if text is None]
        if unwritten:
            value = config.kwargs[unwritten[0]]
            raise kernel.error(
                "argument",
                f"a configuration of `@triton.autotune` gives `{unwritten[0]}` a {type(value).__name__}, expected a number, "
                "a string, a dtype, a tuple or a JIT function of the module.",
            )
        options = {k: v for k, v in config.all_kwargs().items() if k not in config.kwargs}
        configs.append({"constexprs": constexprs, "options": options})
    return {
        "key": list(autotuner.keys),
        "configs": configs,
        "reset_to_zero": list(autotuner.reset_to_zero),
        "restore_value": list(autotuner.restore_value),
        "hooks": _has_hooks(autotuner),
    }


def _has_hooks(autotuner: Any) -> bool:
    return bool(
        autotuner.user_defined_pre_hook
        or autotuner.user_defined_post_hook
        or autotuner.perf_model
        or autotuner.early_config_prune
        or any(config.pre_hook for config in autotuner.configs)
    )


def _heuristic(name: str, function: Any, kernel: Kernel) -> dict[str, Any]:
    if not isinstance(function, FunctionType):
        kind = f"a {type(function).__name__}"
        return {
            "name": name,
            "line": kernel.line,
            "error": _error(kernel.kernel_file.path, kernel.line, kind),
        }
    path, line = function.__code__.co_filename, function.__code__.co_firstlineno
    text = kernel.kernel_file.text(path)
    tree = _parse(text) if text is not None else None
    node = find_function(tree, function) if tree is not None else None
    if node is None:
        reason = "its file is installed" if text is None else "several lambdas are in this line"
        return {"name": name, "line": line, "error": _error(path, line, reason)}
    closure = inspect.getclosurevars(function).nonlocals
    return {"name": name, "line": line} | _translated(node, {**function.__globals__, **closure}, path)


def _grids(kernel: Kernel) -> dict[str, Any]:
    """Returns the translations by name; of equal names the later ones, and those of no name, end in `:LINE`."""
    kernel_file = kernel.kernel_file
    tree = _parse(kernel_file.text(kernel_file.path) or "")
    names = vars(kernel_file.module)
    grids: dict[str, Any] = {}
    for name, node in named_functions(tree):
        unique = name if name and name not in grids else f"{name}:{node.lineno}"
        grids[unique] = {"line": node.lineno} | _translated(node, names, kernel_file.path)
    return grids


@functools.lru_cache(maxsize=64)
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def _translated(node: Any, names: dict[str, Any], path: str) -> dict[str, Any]:
    try:
        return {"expression": translate(node, names)}
    except NotTranslatable as error:
        return {"error": _error(path, error.line, error.what)}


def _error(path: str, line: int, what: str) -> str:
    return f"{path}:{line}: {what}; {_HINT}"
