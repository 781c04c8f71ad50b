"""Reads a `triton.py`: its kernels, launch functions and constants. It is not imported, so Triton need not be there."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from opwright.contract.dtypes import SCALAR_TYPES
from opwright.errors import CompileError

# What PyTorch's dtypes are called in C++ here, for `DTYPES` and comparisons.
CPP_OF_DTYPE = {str(dtype).removeprefix("torch."): cpp for dtype, (_, _, cpp) in SCALAR_TYPES.items()}


@dataclass(frozen=True)
class JitFunction:
    """A kernel of the file: its parameters in order, and which of them are constexpr."""

    name: str
    parameters: tuple[str, ...]
    constexprs: frozenset[str]


@dataclass(frozen=True)
class LaunchFile:
    """A `triton.py`, read but not imported."""

    path: str
    text: str
    functions: Mapping[str, ast.FunctionDef]
    kernels: Mapping[str, JitFunction]
    constants: Mapping[str, int | float | str | bool]
    dtypes: tuple[str, ...] | None


def read_launch_file(subject: str, path: str, text: str) -> LaunchFile:
    """Reads a `triton.py`.

    Raises:
        CompileError: it is not valid Python, or its `DTYPES` is not a tuple of dtype names.
    """
    try:
        tree = ast.parse(text, path)
    except SyntaxError as error:
        raise error_at(subject, path, text, error.lineno or 1, f"it is not valid Python: {error.msg}") from None
    functions, kernels, constants = {}, {}, {}
    dtypes: tuple[str, ...] | None = None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                kernels[node.name] = _read_kernel(node)
            elif not node.decorator_list:
                functions[node.name] = node
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name == "DTYPES":
                dtypes = _read_dtypes(subject, path, text, node)
            elif isinstance(node.value, ast.Constant) and isinstance(node.value.value, (int, float, str, bool)):
                constants[name] = node.value.value
            elif isinstance(node.value, ast.Name) and node.value.id in functions:
                functions[name] = functions[node.value.id]
    return LaunchFile(path, text, functions, kernels, constants, dtypes)


def _read_kernel(node: ast.FunctionDef) -> JitFunction:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    constexprs = {a.arg for a in arguments if a.annotation and "constexpr" in ast.unparse(a.annotation)}
    return JitFunction(node.name, tuple(a.arg for a in arguments), frozenset(constexprs))


def _read_dtypes(subject: str, path: str, text: str, node: ast.Assign) -> tuple[str, ...]:
    try:
        names = tuple(ast.literal_eval(node.value))
        unknown = [name for name in names if name not in CPP_OF_DTYPE]
    except (ValueError, TypeError):
        names, unknown = (), [ast.unparse(node.value)]
    if unknown:
        raise error_at(
            subject, path, text, node.lineno, f"DTYPES holds no dtype: {unknown[0]}", 'DTYPES = ("float32", "float16")'
        )
    return names


def error_at(
    subject: str,
    path: str,
    text: str,
    line: int,
    rule: str,
    hint: str = "`docs/guides/triton.md` lists what is translated",
) -> CompileError:
    """Returns the error of a line of a `triton.py`."""
    lines = text.splitlines()
    source = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return CompileError(subject, rule, rows=[("source", f"{path}:{line}"), ("line", source)], hint=hint)
