"""Grids and heuristics, from Python's lambdas and functions to expressions that C++ evaluates.

An expression is JSON: a number, true, false, null, `["str", text]`, `["arg", name]`, `[operator, a, b]`, `["neg", a]`,
`["not", a]`, `["if", condition, then, else]`, `["call", name, ...]` or `["tuple", ...]`. `and` and `or` give one of
their operands, as in Python.
"""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

Expression = Any  # what json.dumps takes
_Function = ast.FunctionDef | ast.Lambda

_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.And: "and",
    ast.Or: "or",
}
_ARITIES = {"cdiv": 2, "min": 2, "max": 2, "next_power_of_2": 1, "abs": 1, "int": 1}
_MISSING = object()


class NotTranslatable(Exception):
    """A part of a function has no expression; `line` is of its file."""

    def __init__(self, what: str, line: int) -> None:
        super().__init__(what)
        self.what = what
        self.line = line


def translate(function: _Function, names: Mapping[str, Any]) -> Expression:
    """Returns the expression of a lambda or function of one parameter.

    Args:
        function: Its node.
        names: The names that it sees beside its own: those of its module and its closure.

    Raises:
        NotTranslatable: C++ cannot evaluate it.
    """
    parameters = parameters_of(function)
    if len(parameters) != 1:
        raise NotTranslatable(f"takes {len(parameters)} parameters, expected one", function.lineno)
    translator = _Translator(parameters[0], names)
    if isinstance(function, ast.Lambda):
        return translator.expression(function.body, {})
    return translator.block(function.body, {}, function.lineno)


def parameters_of(function: _Function) -> list[str]:
    """Returns the names of a function's parameters; `*args` and `**kwargs` with their stars."""
    a = function.args
    starred = [f"{star}{p.arg}" for star, p in (("*", a.vararg), ("**", a.kwarg)) if p]
    return [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)] + starred


class _Translator:
    def __init__(self, parameter: str, names: Mapping[str, Any]) -> None:
        self._parameter = parameter
        self._names = names

    def block(self, body: Sequence[ast.stmt], locals_: dict[str, Expression], line: int) -> Expression:
        """Translates statements that end in `return`; an assigned name stands for its expression from there on."""
        for index, statement in enumerate(body):
            line = statement.lineno
            if isinstance(statement, ast.Return) and statement.value is not None:
                return self.expression(statement.value, locals_)
            if self._assigns(statement, locals_):
                continue
            if isinstance(statement, ast.If):
                rest = body[index + 1 :]
                condition = self.expression(statement.test, locals_)
                # What follows belongs to whichever branch does not return, so it is read after each.
                then = self.block([*statement.body, *rest], dict(locals_), line)
                return ["if", condition, then, self.block([*statement.orelse, *rest], dict(locals_), line)]
            raise NotTranslatable(f"`{_shown(statement)}` is not an assignment, `if` or `return`", line)
        raise NotTranslatable("there is a way to its end without `return`", line)

    def _assigns(self, statement: ast.stmt, locals_: dict[str, Expression]) -> bool:
        """Translates a statement that assigns one name, those of both branches of an `if`, or none.

        Returns False for others, which leave `locals_` as they are.
        """
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if len(targets) == 1 and isinstance(targets[0], ast.Name):
                locals_[targets[0].id] = self.expression(statement.value, locals_)
                return True
        if isinstance(statement, ast.If):
            condition = self.expression(statement.test, locals_)
            then, other = dict(locals_), dict(locals_)
            branches = (statement.body, then), (statement.orelse, other)
            if not all(self._assigns(inner, found) for body, found in branches for inner in body):
                return False
            if then.keys() != other.keys():
                return False
            for name in then:
                is_same = then[name] is other[name]
                locals_[name] = then[name] if is_same else ["if", condition, then[name], other[name]]
            return True
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        return is_docstring or isinstance(statement, ast.Pass)

    def expression(self, node: ast.expr, locals_: Mapping[str, Expression]) -> Expression:
        def of(part: ast.expr) -> Expression:
            return self.expression(part, locals_)

        if isinstance(node, ast.Constant):
            return _constant(node.value, node)
        if isinstance(node, ast.Tuple | ast.List):
            return ["tuple", *map(of, node.elts)]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return [_OPERATORS[type(node.op)], of(node.left), of(node.right)]
        if isinstance(node, ast.UnaryOp):
            return self._unary(node, of(node.operand))
        if isinstance(node, ast.BoolOp):
            return _chain(_OPERATORS[type(node.op)], [of(value) for value in node.values])
        if isinstance(node, ast.Compare):
            sides = [of(side) for side in (node.left, *node.comparators)]
            pairs = zip(node.ops, sides, sides[1:])
            return _chain("and", [[_comparison(op, a, b, node), a, b] for op, a, b in pairs])
        if isinstance(node, ast.IfExp):
            return ["if", of(node.test), of(node.body), of(node.orelse)]
        if isinstance(node, ast.Call):
            return self._call(node, of, locals_)
        if isinstance(node, ast.Subscript) and self._is_parameter(node.value, locals_):
            if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
                return ["arg", node.slice.value]
            raise NotTranslatable(f"`{_shown(node)}` is not indexed by a name in quotes", node.lineno)
        if isinstance(node, ast.Name) and node.id in locals_:
            return locals_[node.id]
        if isinstance(node, ast.Name | ast.Attribute):
            value = self._object(node, locals_)
            if value is not _MISSING:
                return _constant(value, node)
            raise NotTranslatable(f"`{_shown(node)}` is neither a constant of the module nor an argument", node.lineno)
        raise NotTranslatable(f"`{_shown(node)}` cannot be expressed", node.lineno)

    def _is_parameter(self, node: ast.expr, locals_: Mapping[str, Expression]) -> bool:
        return isinstance(node, ast.Name) and node.id == self._parameter and node.id not in locals_

    def _unary(self, node: ast.UnaryOp, operand: Expression) -> Expression:
        if isinstance(node.op, ast.Not):
            return ["not", operand]
        if isinstance(node.op, ast.USub):
            is_number = isinstance(operand, int | float) and not isinstance(operand, bool)
            return -operand if is_number else ["neg", operand]
        if isinstance(node.op, ast.Invert):
            return ["^", operand, -1]  # which refuses a float, as `~` does
        return ["neg", ["neg", operand]]

    def _call(self, node: ast.Call, of: Any, locals_: Mapping[str, Expression]) -> Expression:
        name = _known_function(self._object(node.func, locals_))
        if name is None:
            raise NotTranslatable(f"`{_shown(node.func)}` is not a function that C++ has", node.lineno)
        count = len(node.args)
        is_folded = name in ("min", "max") and count > 2
        if (
            node.keywords
            or any(isinstance(arg, ast.Starred) for arg in node.args)
            or (count != _ARITIES[name] and not is_folded)
        ):
            raise NotTranslatable(f"`{_shown(node)}` calls `{name}` in a way that C++ has not", node.lineno)
        arguments = [of(arg) for arg in node.args]
        result = ["call", name, *arguments[: _ARITIES[name]]]
        for argument in arguments[_ARITIES[name] :]:
            result = ["call", name, result, argument]
        return result

    def _object(self, node: ast.expr, locals_: Mapping[str, Expression]) -> Any:
        """Returns the object that a name or an attribute of a module stands for."""
        if isinstance(node, ast.Name):
            if node.id in locals_ or node.id == self._parameter:
                return _MISSING
            return self._names.get(node.id, getattr(builtins, node.id, _MISSING))
        if isinstance(node, ast.Attribute):
            owner = self._object(node.value, locals_)
            return getattr(owner, node.attr, _MISSING) if isinstance(owner, ModuleType) else _MISSING
        return _MISSING


def _known_function(found: Any) -> str | None:
    import triton
    import triton.language as tl

    known = {
        "cdiv": (triton.cdiv, tl.cdiv),
        "next_power_of_2": (triton.next_power_of_2,),
        "min": (min,),
        "max": (max,),
        "abs": (abs,),
        "int": (int,),
    }
    return next((name for name, same in known.items() if any(found is f for f in same)), None)


def _constant(value: Any, node: ast.expr) -> Expression:
    import triton.language as tl

    if isinstance(value, tl.constexpr):
        value = value.value
    if value is None or isinstance(value, bool):
        return value
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, str):
        return ["str", value]
    raise NotTranslatable(f"`{_shown(node)}` is a {type(value).__name__} that C++ cannot hold", node.lineno)


def _comparison(op: ast.cmpop, left: Expression, right: Expression, node: ast.Compare) -> str:
    if type(op) in _OPERATORS:
        return _OPERATORS[type(op)]
    if isinstance(op, ast.Is | ast.IsNot) and (left is None or right is None):
        return "==" if isinstance(op, ast.Is) else "!="
    raise NotTranslatable(f"`{_shown(node)}` compares in a way that C++ has not", node.lineno)


def _chain(operator: str, parts: list[Expression]) -> Expression:
    result = parts[0]
    for part in parts[1:]:
        result = [operator, result, part]
    return result


def _shown(node: ast.AST) -> str:
    text = ast.unparse(node).splitlines()[0]
    return text if len(text) <= 60 else f"{text[:57]}..."


def find_function(tree: ast.AST, function: FunctionType) -> _Function | None:
    """Returns the node of a function object in its file, by its line and, of several lambdas in it, by its code."""
    line = function.__code__.co_firstlineno
    found = [node for node in _functions(tree) if _first_line(node) == line]
    if function.__name__ != "<lambda>":
        return next((node for node in found if getattr(node, "name", None) == function.__name__), None)
    lambdas = [node for node in found if isinstance(node, ast.Lambda)]
    if len(lambdas) == 1:
        return lambdas[0]
    return next((node for node in lambdas if _same_code(node, function.__code__)), None)


def _functions(tree: ast.AST) -> Iterator[_Function]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda))


def _first_line(node: _Function) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])


def _same_code(node: ast.Lambda, code: CodeType) -> bool:
    compiled = compile(ast.Expression(node), code.co_filename, "eval").co_consts[0]
    return (compiled.co_code, compiled.co_names, repr(compiled.co_consts)) == (
        code.co_code,
        code.co_names,
        repr(code.co_consts),
    )


def named_functions(tree: ast.AST) -> list[tuple[str, _Function]]:
    """Returns every undecorated function or lambda of one parameter with the name it is given, or "", in order."""
    names: dict[ast.AST, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names[node.value] = node.targets[0].id
        elif isinstance(node, ast.keyword) and node.arg:
            names[node.value] = node.arg
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values)
            names |= {v: k.value for k, v in pairs if isinstance(k, ast.Constant) and isinstance(k.value, str)}
        elif isinstance(node, ast.FunctionDef):
            names[node] = node.name
    found = [f for f in _functions(tree) if not getattr(f, "decorator_list", []) and len(parameters_of(f)) == 1]
    return [(names.get(f, ""), f) for f in sorted(found, key=lambda f: (f.lineno, f.col_offset))]
