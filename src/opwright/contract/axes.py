"""Axes of a tensor contract: the text of a jaxtyping annotation, parsed, bound and evaluated."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from opwright.errors import AxisError


class Named(NamedTuple):
    """`n`: any size; every axis of that name has the same."""

    name: str

    def __str__(self) -> str:
        return self.name


class Fixed(NamedTuple):
    """`3`: exactly that size."""

    size: int

    def __str__(self) -> str:
        return str(self.size)


class Variadic(NamedTuple):
    """`*batch` or `...`: any number of axes."""

    name: str | None

    def __str__(self) -> str:
        return f"*{self.name}" if self.name else "..."


class Anonymous(NamedTuple):
    """`_`, or `_name` as jaxtyping has it: any size, bound to nothing."""

    text: str = "_"

    def __str__(self) -> str:
        return self.text


@functools.cache
def _tree_of(text: str) -> ast.expr:
    if text.isidentifier():  # also a keyword of Python, such as `in`
        return ast.Name(text)
    return ast.parse(text, mode="eval").body


@functools.cache
def _names_in(text: str) -> tuple[str, ...]:
    found = [node.id for node in ast.walk(_tree_of(text)) if isinstance(node, ast.Name)]
    return tuple(dict.fromkeys(name for name in found if name not in _CALLS))


class Computed(NamedTuple):
    """`4*h`: the value of an expression of named axes and int arguments."""

    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the expression, in order of appearance."""
        return _names_in(self.text)

    @property
    def _tree(self) -> ast.expr:
        return _tree_of(self.text)

    def evaluate(self, sizes: Mapping[str, Any]) -> Any:
        """Returns the value; `sizes` must hold every name (KeyError otherwise)."""
        return _evaluate(self._tree, sizes)

    def solve(self, size: Any, unknown: str, sizes: Mapping[str, Any]) -> Any | None:
        """Returns the value of `unknown` that makes the expression equal `size`.

        Returns None when there is none, or when the expression is not linear in `unknown`.
        """
        at = [self.evaluate({**sizes, unknown: value}) for value in (0, 1, 2)]
        slope = at[1] - at[0]
        if at[2] - at[1] != slope or slope == 0:
            return None
        value = (size - at[0]) // slope
        return value if value >= 0 and value * slope + at[0] == size else None

    def to_c(self, variable: Callable[[str], str]) -> str:
        """Returns the expression in C, a `Wide` of glue.h, with `variable(name)` for each name.

        Where there is no such number, it sets `*has_none`.
        """
        return _to_c(self._tree, variable)


Axis = Named | Fixed | Variadic | Anonymous | Computed


def names_in(axes: Iterable[Axis]) -> list[str]:
    """Returns each name among axes once, those that computed sizes are made of too; without variadic ones."""
    found = (
        (axis.name,) if isinstance(axis, Named) else axis.names if isinstance(axis, Computed) else () for axis in axes
    )
    return list(dict.fromkeys(name for names in found for name in names))


# What an operator is in Python, and the function of glue.h that computes it.
_OPERATORS: dict[type[ast.operator], tuple[Callable[[Any, Any], Any], str]] = {
    ast.Add: (operator.add, "plus"),
    ast.Sub: (operator.sub, "minus"),
    ast.Mult: (operator.mul, "times"),
    ast.FloorDiv: (operator.floordiv, "floor_divide"),
    ast.Mod: (operator.mod, "floor_modulo"),
}


def _pick(choose: Callable[..., Any], symbolic: str, *sizes: Any) -> Any:
    """Returns the smallest or the largest size; one that torch.compile traces is not compared, which would fix it."""
    if all(type(size) is int for size in sizes):
        return choose(sizes)
    return functools.reduce(getattr(torch, symbolic), sizes)


_CALLS: dict[str, Callable[..., Any]] = {
    "min": functools.partial(_pick, min, "sym_min"),
    "max": functools.partial(_pick, max, "sym_max"),
}


def _evaluate(node: ast.expr, sizes: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return sizes[name]
        case ast.UnaryOp(operand=operand):
            return -_evaluate(operand, sizes)
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)][0](_evaluate(left, sizes), _evaluate(right, sizes))
        case ast.Call(func=ast.Name(id=name), args=args):
            return _CALLS[name](*(_evaluate(arg, sizes) for arg in args))
    raise AssertionError(node)


def _to_c(node: ast.expr, variable: Callable[[str], str]) -> str:
    match node:
        case ast.Constant(value=value):
            return f"{value}LL"
        case ast.Name(id=name):
            return variable(name)
        case ast.UnaryOp(operand=operand):
            return f"minus(0, {_to_c(operand, variable)}, has_none)"
        case ast.BinOp(left=left, op=op, right=right):
            return f"{_OPERATORS[type(op)][1]}({_to_c(left, variable)}, {_to_c(right, variable)}, has_none)"
        case ast.Call(func=ast.Name(id=name), args=args):
            function = "least" if name == "min" else "most"
            text = _to_c(args[0], variable)
            for arg in args[1:]:
                text = f"{function}({text}, {_to_c(arg, variable)})"
            return text
    raise AssertionError(node)


def _is_supported(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int()) | ast.Name():
            return True
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _is_supported(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return type(op) in _OPERATORS and _is_supported(left) and _is_supported(right)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return name in _CALLS and len(args) > 1 and all(map(_is_supported, args))
    return False


def parse_axes(text: str, subject: str, parameter: str) -> tuple[Axis, ...]:
    """Reads the axes of an annotation such as `"*batch n 4*h"`.

    Raises:
        AxisError: an axis is not written in the supported part of jaxtyping's syntax.
    """
    axes = tuple(_parse_axis(token, text, subject, parameter) for token in text.split())
    if sum(isinstance(axis, Variadic) for axis in axes) > 1:
        raise AxisError(
            subject,
            f"`{parameter}` has more than one variadic axis",
            rows=[("got", f'"{text}"')],
            hint="one `*name` takes all the axes that vary in number; name the others one by one",
        )
    return axes


def _parse_axis(token: str, text: str, subject: str, parameter: str) -> Axis:
    def refuse(rule: str, hint: str) -> AxisError:
        rows = [("axis", f"`{token}`"), ("of", f'"{text}"')]
        return AxisError(subject, f"`{parameter}`: {rule}", rows=rows, hint=hint)

    if token == "...":
        return Variadic(None)
    if token.startswith("_") and token.isidentifier():
        return Anonymous(token)
    if token.startswith("#"):
        raise refuse(
            "broadcasting axes are not supported",
            "write the axis without `#`, and expand the tensor before the call",
        )
    if token.startswith("*") and token[1:].isidentifier():
        return Variadic(None if token[1] == "_" else token[1:])
    if "=" in token and "==" not in token:
        token = token.split("=", 1)[1]  # jaxtyping's `name=4` documents a fixed size
    if token.isdigit():
        return Fixed(int(token))
    if token.isidentifier():
        return Named(token)
    try:
        tree = ast.parse(token, mode="eval").body
    except SyntaxError:
        raise refuse("this axis cannot be read", "a name, a number, `*name`, or an expression such as `4*h`") from None
    if not _is_supported(tree):
        raise refuse("this expression is not supported", "use names, whole numbers, + - * // %, min and max")
    return Computed(token)
