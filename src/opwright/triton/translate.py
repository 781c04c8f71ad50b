"""Translates the launch functions of a `triton.py` to C++, so that an operator's call runs no Python.

A launch function is the host code that one writes around a Triton kernel anyway: it has the operator's name, takes its
arguments and then its outputs, and launches kernels of the same file.

    def softmax(input, output):
        rows, n = input.shape
        softmax_kernel[(rows,)](input, output, n, BLOCK=triton.next_power_of_2(n), num_warps=4 if n < 2048 else 8)

It runs in Python as it stands. The subset that is translated: assignments, `if`, `assert`, integers, floats, bools,
`tensor.shape`, `.size(d)`, `.stride(d)`, `.numel()`, `.element_size()`, `tensor is None`, comparisons of options with
strings, and launches `kernel[grid](...)`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from opwright.errors import CompileError
from opwright.spec.contract import Contract
from opwright.spec.dtypes import SCALAR_TYPES

_INTEGERS = {"+": "+", "-": "-", "*": "*", "&": "&", "|": "|", "^": "^", "<<": "<<", ">>": ">>"}
_OPERATORS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.LShift: "<<", ast.RShift: ">>", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^",
}  # fmt: skip
_COMPARISONS = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip
_FUNCTIONS = {"cdiv": 2, "next_power_of_2": 1}
_CPP_TYPES = {"int": "int64_t", "float": "double", "bool": "bool", "text": "std::string_view"}
# What PyTorch's dtypes are called in C++ here, for `DTYPES` and comparisons.
_CPP_OF_DTYPE = {str(dtype).removeprefix("torch."): cpp for dtype, (_, _, cpp) in SCALAR_TYPES.items()}


# Names that a local variable of the C++ cannot have.
_RESERVED = frozenset(
    "alignas alignof and asm auto bool case catch char class const default delete do double enum explicit export extern "
    "false float friend goto inline int long mutable namespace new not operator or private protected public register "
    "short signed sizeof static struct switch template this throw true try typedef typename union unsigned using "
    "virtual void volatile xor opw std stream meta T View half bfloat16".split()
)


class Expression(NamedTuple):
    """A piece of C++ and what it is: int, float, bool, text, tensor, tuple, dtype, none."""

    text: str
    type: str
    items: tuple[Expression, ...] = ()


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
        CompileError: it is no Python, or its `DTYPES` is no tuple of dtype names.
    """
    try:
        tree = ast.parse(text, path)
    except SyntaxError as error:
        raise _error(subject, path, text, error.lineno or 1, f"it is no Python: {error.msg}") from None
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
        unknown = [name for name in names if name not in _CPP_OF_DTYPE]
    except (ValueError, TypeError):
        names, unknown = (), [ast.unparse(node.value)]
    if unknown:
        raise _error(subject, path, text, node.lineno, f"DTYPES holds no dtype: {unknown[0]}", 'DTYPES = ("float32", "float16")')
    return names


def _error(
    subject: str, path: str, text: str, line: int, rule: str, hint: str = "`docs/guides/triton.md` lists what is translated"
) -> CompileError:
    lines = text.splitlines()
    source = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return CompileError(
        subject, rule, rows=[("source", f"{path}:{line}"), ("line", source)], hint=hint
    )


def translate(file: LaunchFile, contracts: Sequence[Contract], signatures: Sequence[str]) -> str:
    """Returns the C++ source of the kernels of these operators.

    Args:
        signatures: the C++ declaration of each operator's kernel, with a `stream` at its end.

    Raises:
        CompileError: a launch function uses what cannot be translated, or none of the operators has one.
    """
    parts = []
    for contract, signature in zip(contracts, signatures, strict=True):
        if contract.subject in file.functions:
            parts.append(_Function(file, contract).translate(signature))
    if not parts:
        names = ", ".join(contract.subject for contract in contracts)
        raise CompileError(
            contracts[0].subject,
            "its triton.py has no launch function",
            rows=[("source", file.path), ("expected", f"a function named {names}"), ("found", ", ".join(file.functions) or "none")],
            hint=f"`def {contracts[0].subject}({', '.join(_names(contracts[0]))}):` that launches the kernel",
        )
    kernels = "\n".join(
        f"const opw::Kernel {name}_{{{_quoted(file.path)}, {_quoted(name)}}};" for name in file.kernels
    )
    return f"""// Generated by Opwright from {file.path}.
#include "opwright/triton/operator.h"

namespace {{
namespace opw = opwright::triton;
using opwright::View;
using opwright::bfloat16;
using opwright::half;
{kernels}
}}  // namespace

{"".join(parts)}
extern "C" __attribute__((visibility("default"))) const char* opwright_triton_setup(
    opw::Compiler compiler, const char* cache_dir) {{
  return opw::set_up(compiler, cache_dir, {_quoted(file.path)});
}}
"""


def _names(contract: Contract) -> list[str]:
    return [p.name for p in contract.parameters] + [o.name for o in contract.outputs]


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@dataclass
class _Function:
    """The translation of one launch function."""

    file: LaunchFile
    contract: Contract
    known: dict[str, Expression] = field(default_factory=dict)
    tensors: dict[str, int] = field(default_factory=dict)  # by name: the rank
    lines: list[str] = field(default_factory=list)
    locals: dict[str, str] = field(default_factory=dict)  # by name in C++: int, float, bool, text
    launches: int = 0

    def translate(self, signature: str) -> str:
        contract, node = self.contract, self.file.functions[self.contract.subject]
        names = _names(contract)
        given = [a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
        if given != names:
            self.fail(
                node,
                f"the launch function takes {', '.join(given) or 'nothing'}",
                f"`def {contract.subject}({', '.join(names)}):`: the operator's arguments, then its outputs",
            )
        for parameter in contract.parameters:
            if parameter.kind == "tensors":
                self.fail(node, f"`{parameter.name}` is a list of tensors, which a Triton kernel cannot take")
            if parameter.kind == "choice":
                self.known[parameter.name] = Expression(f"{parameter.name}_text", "text")
            elif parameter.type is not None:
                self.tensors[parameter.name] = parameter.type.rank
            else:
                self.known[parameter.name] = Expression(parameter.name, parameter.kind)
        for output in contract.outputs:
            self.tensors[output.name] = output.type.rank
        for inner in ast.walk(node):
            if isinstance(inner, (ast.For, ast.While, ast.With, ast.Try, ast.FunctionDef)) and inner is not node:
                self.fail(inner, f"`{type(inner).__name__.lower()}` is not translated")
        for parameter in contract.parameters:
            if parameter.kind == "choice":
                texts = ", ".join(map(_quoted, parameter.choices))
                self.lines += [
                    f"  static constexpr std::string_view {parameter.name}_texts[] = {{{texts}}};",
                    f"  [[maybe_unused]] const std::string_view {parameter.name}_text = "
                    f"{parameter.name}_texts[static_cast<int64_t>({parameter.name})];",
                ]
        self.body(node.body, "  ")
        if self.launches == 0:
            self.fail(node, "the launch function launches nothing", "`some_kernel[grid](...)`")
        declared = [f"  [[maybe_unused]] {_CPP_TYPES[type_]} {name}{{}};" for name, type_ in self.locals.items()]
        body = "\n".join([*declared, *self.lines])
        return f"{signature} {{\n{body}\n}}\n{self._export()}\n"

    def _export(self) -> str:
        family = self.contract.scalar_family
        allowed = [_CPP_OF_DTYPE[str(d).removeprefix("torch.")] for d in family.dtypes] if family else []
        if self.file.dtypes is not None:
            allowed = [cpp for cpp in map(_CPP_OF_DTYPE.__getitem__, self.file.dtypes) if cpp in allowed]
        return f"OPWRIGHT_KERNEL({', '.join([self.contract.subject, *allowed])})"

    def fail(self, node: ast.AST, rule: str, hint: str | None = None) -> None:
        line = getattr(node, "lineno", 1)
        if hint is None:
            raise _error(self.contract.subject, self.file.path, self.file.text, line, rule)
        raise _error(self.contract.subject, self.file.path, self.file.text, line, rule, hint)

    # --- statements

    def body(self, statements: Sequence[ast.stmt], indent: str) -> None:
        for statement in statements:
            self.statement(statement, indent)

    def statement(self, node: ast.stmt, indent: str) -> None:
        match node:
            case ast.Expr(ast.Constant()) | ast.Pass():
                return
            case ast.Return(None) | ast.Return(ast.Constant(None)):
                self.lines.append(f"{indent}return;")
            case ast.Expr(ast.Call(ast.Subscript()) as call):
                self.launch(call, indent)
            case ast.Assign([target], value):
                self.assign(target, value, indent)
            case ast.AnnAssign(ast.Name() as target, _, ast.expr() as value):
                self.assign(target, value, indent)
            case ast.AugAssign(ast.Name(name), operator, value):
                changed = ast.copy_location(ast.BinOp(ast.copy_location(ast.Name(name), node), operator, value), node)
                self.assign(ast.copy_location(ast.Name(name), node), changed, indent)
            case ast.If(test, then, otherwise):
                self.branch(test, then, otherwise, indent)
            case ast.Assert(test, message):
                text = message.value if isinstance(message, ast.Constant) else f"assert {ast.unparse(test)}"
                claim = self.condition(test)
                self.lines.append(
                    f"{indent}if (!({claim})) throw opw::Error(opw::Cause::kArgument, {_quoted(str(text))});"
                )
            case _:
                self.fail(node, f"`{ast.unparse(node).splitlines()[0]}` is not translated")

    def branch(self, test: ast.expr, then: list[ast.stmt], otherwise: list[ast.stmt], indent: str) -> None:
        """Translates an `if`; what only one side assigns is not known behind it."""
        self.lines.append(f"{indent}if ({self.condition(test)}) {{")
        before = dict(self.known)
        self.body(then, indent + "  ")
        after_then, self.known = self.known, before
        if otherwise:
            self.lines.append(f"{indent}}} else {{")
            self.body(otherwise, indent + "  ")
        self.lines.append(f"{indent}}}")
        if isinstance(then[-1], ast.Return):
            return
        if otherwise and isinstance(otherwise[-1], ast.Return):
            self.known = after_then
            return
        self.known = {name: value for name, value in self.known.items() if after_then.get(name) == value}

    def assign(self, target: ast.expr, value: ast.expr, indent: str) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            parts = self.items(value)
            if len(parts) != len(target.elts):
                self.fail(value, f"{len(target.elts)} names, {len(parts)} values")
            names = {name.id for name in target.elts if isinstance(name, ast.Name)}
            for i, part in enumerate(parts):
                # `a, b = b, a`: the right side is evaluated before anything is stored.
                if part.type in _CPP_TYPES and names & set(re.findall(r"\w+", part.text)):
                    held = f"held{len(self.lines)}_{i}"
                    self.lines.append(f"{indent}const {_CPP_TYPES[part.type]} {held} = {part.text};")
                    parts = (*parts[:i], Expression(held, part.type), *parts[i + 1 :])
            for name, part in zip(target.elts, parts, strict=True):
                self.store(name, part, indent)
            return
        self.store(target, self.expression(value), indent)

    def store(self, target: ast.expr, value: Expression, indent: str) -> None:
        if not isinstance(target, ast.Name):
            self.fail(target, f"`{ast.unparse(target)}` is not translated: assign to a name")
        name = target.id
        if name == "_":
            return
        cpp = f"{name}_" if name in _RESERVED else name
        if name in self.tensors:
            self.fail(target, f"`{name}` is a tensor of the operator")
        if value.type in ("tuple", "none", "dtype"):  # no C++ value: kept as what it is
            self.known[name] = value
            return
        if value.type not in _CPP_TYPES:
            self.fail(target, f"`{name}` would be a {value.type}, which is not translated")
        type_ = self.locals.setdefault(cpp, value.type)
        if type_ != value.type and (type_, value.type) != ("float", "int"):
            self.fail(target, f"`{name}` is first {type_}, then {value.type}")
        self.lines.append(f"{indent}{cpp} = {value.text};")
        self.known[name] = Expression(cpp, type_)

    # --- launches

    def launch(self, call: ast.Call, indent: str) -> None:
        assert isinstance(call.func, ast.Subscript)
        kernel = self.file.kernels.get(call.func.value.id) if isinstance(call.func.value, ast.Name) else None
        if kernel is None:
            found = ", ".join(self.file.kernels) or "none"
            self.fail(call, f"`{ast.unparse(call.func.value)}` is no @triton.jit function of this file", f"its kernels: {found}")
        self.launches += 1
        grid = self.grid(call.func.slice)
        positional = dict(zip(kernel.parameters, call.args))
        if len(call.args) > len(kernel.parameters):
            self.fail(call, f"`{kernel.name}` takes {len(kernel.parameters)} arguments, given {len(call.args)}")
        named: dict[str, ast.expr] = {}
        options: dict[str, ast.expr] = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                self.fail(call, "`**` is not translated")
            elif keyword.arg in positional:
                self.fail(call, f"`{keyword.arg}` is given twice")
            elif keyword.arg in kernel.parameters:
                named[keyword.arg] = keyword.value
            else:
                options[keyword.arg] = keyword.value
        # In the signature's order as far as it goes: positions cost nothing at the launch.
        while len(positional) < len(kernel.parameters) and kernel.parameters[len(positional)] in named:
            name = kernel.parameters[len(positional)]
            positional[name] = named.pop(name)
        arguments = [self.argument(kernel, name, value) for name, value in positional.items()]
        arguments += [
            f"opw::named<{_quoted(name)}>({self.argument(kernel, name, value)})" for name, value in named.items()
        ]
        variant = self.variant(kernel, options, indent)
        self.lines.append(f"{indent}{variant}(stream, {', '.join([grid, *arguments])});")

    def variant(self, kernel: JitFunction, options: dict[str, ast.expr], indent: str) -> str:
        if not options:
            return f"{kernel.name}_"
        values = {name: self.expression(value) for name, value in options.items()}
        name = f"{kernel.name}_{self.launches}"
        fixed = {n: v for n, v in values.items() if isinstance(options[n], ast.Constant)}
        free = {n: v for n, v in values.items() if n not in fixed}
        for option, value in free.items():
            if value.type != "int":
                self.fail(options[option], f"the option `{option}` is neither a literal nor an integer")
        if not free:
            pairs = ", ".join(f"{{{_quoted(n)}, {v.text}}}" for n, v in fixed.items())
            self.lines.append(f"{indent}static const opw::Kernel {name} = {kernel.name}_.with({{{pairs}}});")
            return name
        base = f"{kernel.name}_"
        if fixed:
            base += ".with({" + ", ".join(f"{{{_quoted(n)}, {v.text}}}" for n, v in fixed.items()) + "})"
        names = ", ".join(map(_quoted, free))
        self.lines.append(f"{indent}static opw::Variants<{len(free)}> {name}({base}, {{{names}}});")
        return f"{name}.with({{{', '.join(value.text for value in free.values())}}})"

    def argument(self, kernel: JitFunction, name: str, value: ast.expr) -> str:
        is_constexpr = name in kernel.constexprs
        if isinstance(value, ast.Name) and value.id in self.tensors:
            if is_constexpr:
                self.fail(value, f"`{name}` of `{kernel.name}` is a constexpr, and `{value.id}` a tensor")
            return value.id
        found = self.expression(value)
        if found.type == "none":
            return "opw::cx(nullptr)" if is_constexpr else "nullptr"
        if found.type == "tuple":
            items = ", ".join(item.text for item in found.items)
            return f"opw::cx(std::tuple({items}))" if is_constexpr else f"std::tuple({items})"
        if found.type not in _CPP_TYPES:
            self.fail(value, f"`{ast.unparse(value)}` is no argument of a kernel")
        if found.type == "text" and not is_constexpr:
            self.fail(value, f"`{name}` of `{kernel.name}` takes a string, so it must be a `tl.constexpr`")
        return f"opw::cx({found.text})" if is_constexpr else found.text

    def grid(self, node: ast.expr) -> str:
        if isinstance(node, ast.Lambda):
            parameter = node.args.args[0].arg if len(node.args.args) == 1 else ""
            before = dict(self.known)
            self.known[parameter] = Expression("meta", "meta")
            extents = self.extents(node.body)
            self.known = before
            return f"[&]([[maybe_unused]] const opw::Meta& meta) {{ return {extents}; }}"
        return self.extents(node)

    def extents(self, node: ast.expr) -> str:
        found = self.expression(node)
        items = found.items if found.type == "tuple" else (found,)
        if not 1 <= len(items) <= 3 or any(item.type not in ("int", "bool") for item in items):
            self.fail(node, f"`{ast.unparse(node)}` is no grid of one to three integers")
        return "opw::Grid{" + ", ".join(f"int64_t({item.text})" for item in items) + "}"

    # --- expressions

    def items(self, node: ast.expr) -> tuple[Expression, ...]:
        found = self.expression(node)
        if found.type != "tuple":
            self.fail(node, f"`{ast.unparse(node)}` is no tuple")
        return found.items

    def condition(self, node: ast.expr) -> str:
        found = self.expression(node)
        if found.type not in ("bool", "int", "float"):
            self.fail(node, f"`{ast.unparse(node)}` is no condition")
        return found.text

    def expression(self, node: ast.expr) -> Expression:
        match node:
            case ast.Constant(bool() as value):
                return Expression("true" if value else "false", "bool")
            case ast.Constant(int() as value):
                return Expression(f"int64_t{{{value}}}", "int")
            case ast.Constant(float() as value):
                return Expression(repr(value), "float")
            case ast.Constant(str() as value):
                return Expression(f"std::string_view({_quoted(value)})", "text")
            case ast.Constant(None):
                return Expression("nullptr", "none")
            case ast.Name(name):
                return self.name(node, name)
            case ast.Tuple(elements) | ast.List(elements):
                return Expression("", "tuple", tuple(self.expression(element) for element in elements))
            case ast.Attribute(ast.Name(owner), attribute) if owner in self.tensors:
                return self.attribute(node, owner, attribute)
            case ast.Subscript(value, index):
                return self.subscript(node, value, index)
            case ast.Call():
                return self.call(node)
            case ast.BinOp(left, operator, right):
                return self.binary(node, self.expression(left), _OPERATORS.get(type(operator)), self.expression(right))
            case ast.UnaryOp(ast.Not(), operand):
                return Expression(f"!({self.condition(operand)})", "bool")
            case ast.UnaryOp(ast.USub(), operand):
                found = self.number(operand)
                return Expression(f"(-{found.text})", found.type)
            case ast.BoolOp(operator, values):
                sign = " && " if isinstance(operator, ast.And) else " || "
                return Expression("(" + sign.join(self.condition(value) for value in values) + ")", "bool")
            case ast.Compare():
                return self.compare(node)
            case ast.IfExp(test, then, otherwise):
                a, b = self.expression(then), self.expression(otherwise)
                if a.type not in _CPP_TYPES or b.type not in _CPP_TYPES:
                    self.fail(node, f"`{ast.unparse(node)}` is not translated: its sides are no numbers")
                if a.type != b.type and {a.type, b.type} != {"int", "float"}:
                    self.fail(node, f"`{ast.unparse(node)}` is {a.type} or {b.type}")
                type_ = a.type if a.type == b.type else "float"
                cpp = _CPP_TYPES[type_]
                return Expression(f"({self.condition(test)} ? {cpp}({a.text}) : {cpp}({b.text}))", type_)
        return self.unknown(node)

    def unknown(self, node: ast.expr) -> Expression:
        self.fail(node, f"`{ast.unparse(node)}` is not translated")
        raise AssertionError

    def name(self, node: ast.expr, name: str) -> Expression:
        if name in self.known:
            return self.known[name]
        if name in self.tensors:
            return Expression(name, "tensor")
        if name in self.file.constants:
            return self.expression(ast.copy_location(ast.Constant(self.file.constants[name]), node))
        self.fail(node, f"`{name}` is not known here", "arguments, outputs, what was assigned before, and constants of the file are")
        raise AssertionError

    def attribute(self, node: ast.expr, owner: str, attribute: str) -> Expression:
        rank = self.tensors[owner]
        if attribute == "shape":
            sizes = tuple(Expression(f"{owner}.size({d})", "int") for d in range(rank))
            return Expression("", "tuple", sizes)
        if attribute == "ndim":
            return Expression(f"int64_t{{{rank}}}", "int")
        if attribute == "dtype":
            return Expression(f"opw::as_pointer<std::decay_t<decltype({owner})>>::get({owner}).dtype", "dtype")
        return self.unknown(node)

    def subscript(self, node: ast.expr, value: ast.expr, index: ast.expr) -> Expression:
        found = self.expression(value)
        if found.type == "meta" and isinstance(index, ast.Constant) and isinstance(index.value, str):
            return Expression(f"meta[{_quoted(index.value)}]", "int")
        try:
            at = ast.literal_eval(index)
            return found.items[at]
        except (ValueError, TypeError, IndexError):
            self.fail(node, f"`{ast.unparse(node)}` is not translated: the index is no constant within the tuple")
            raise AssertionError from None

    def call(self, node: ast.Call) -> Expression:
        function = node.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            owner, name = function.value.id, function.attr
            if owner in self.tensors:
                return self.method(node, owner, name)
            if name in _FUNCTIONS and len(node.args) == _FUNCTIONS[name]:
                numbers = ", ".join(self.integer(argument).text for argument in node.args)
                return Expression(f"opw::python::{name}({numbers})", "int")
        if isinstance(function, ast.Name) and function.id in ("min", "max") and len(node.args) > 1:
            found = [self.number(argument) for argument in node.args]
            type_ = "float" if any(item.type == "float" for item in found) else "int"
            cpp = _CPP_TYPES[type_]
            return Expression(f"std::{function.id}<{cpp}>({{{', '.join(f'{cpp}({i.text})' for i in found)}}})", type_)
        if isinstance(function, ast.Name) and function.id in ("int", "float", "bool", "abs") and len(node.args) == 1:
            found = self.number(node.args[0])
            if function.id == "abs":
                return Expression(f"std::abs({found.text})", found.type)
            return Expression(f"{_CPP_TYPES[function.id]}({found.text})", function.id)
        if isinstance(function, ast.Name) and function.id == "len" and len(node.args) == 1:
            found = self.expression(node.args[0])
            if found.type == "tuple":
                return Expression(f"int64_t{{{len(found.items)}}}", "int")
        return self.unknown(node)

    def method(self, node: ast.Call, owner: str, name: str) -> Expression:
        rank = self.tensors[owner]
        if name in ("size", "stride") and not node.args:
            return Expression("", "tuple", tuple(Expression(f"{owner}.{name}({d})", "int") for d in range(rank)))
        if name in ("size", "stride") and len(node.args) == 1:
            try:
                dimension = int(ast.literal_eval(node.args[0]))
            except (ValueError, TypeError):
                return self.unknown(node)
            if not -rank <= dimension < rank:
                self.fail(node, f"`{owner}` has {rank} dimensions here: a `*name` of the contract is one")
            return Expression(f"{owner}.{name}({dimension % rank})", "int")
        if name == "numel" and not node.args:
            return Expression(f"{owner}.numel()", "int")
        if name == "element_size" and not node.args:
            return Expression(f"int64_t{{sizeof(*{owner}.data())}}", "int")
        if name == "is_contiguous" and not node.args:
            return Expression(f"{owner}.is_contiguous()", "bool")
        return self.unknown(node)

    def number(self, node: ast.expr) -> Expression:
        found = self.expression(node)
        if found.type == "bool":
            return Expression(f"int64_t{{{found.text}}}", "int")
        if found.type not in ("int", "float"):
            self.fail(node, f"`{ast.unparse(node)}` is no number")
        return found

    def integer(self, node: ast.expr) -> Expression:
        found = self.number(node)
        if found.type != "int":
            self.fail(node, f"`{ast.unparse(node)}` is no integer")
        return found

    def binary(self, node: ast.expr, a: Expression, operator: str | None, b: Expression) -> Expression:
        if operator is None or not {a.type, b.type} <= {"int", "float", "bool"}:
            return self.unknown(node)
        is_float = "float" in (a.type, b.type)
        if operator == "/":
            return Expression(f"(static_cast<double>({a.text}) / static_cast<double>({b.text}))", "float")
        if operator == "//" and not is_float:
            return Expression(f"opw::python::floor_divide({a.text}, {b.text})", "int")
        if operator == "%" and not is_float:
            return Expression(f"opw::python::modulo({a.text}, {b.text})", "int")
        if operator == "**" and not is_float:
            return Expression(f"opw::python::power({a.text}, {b.text})", "int")
        if operator in _INTEGERS and (not is_float or operator in "+-*"):
            return Expression(f"({a.text} {operator} {b.text})", "float" if is_float else "int")
        return self.unknown(node)

    def compare(self, node: ast.Compare) -> Expression:
        left = node.left
        claims = []
        for operator, right in zip(node.ops, node.comparators, strict=True):
            claims.append(self.claim(node, left, operator, right))
            left = right
        return Expression("(" + " && ".join(claims) + ")", "bool")

    def claim(self, node: ast.Compare, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> str:
        if isinstance(operator, (ast.In, ast.NotIn)):
            claims = " || ".join(
                self.claim(node, left, ast.Eq(), item) for item in getattr(right, "elts", ()) or self.fail(node, "`in` needs a tuple")
            )
            return f"({claims})" if isinstance(operator, ast.In) else f"!({claims})"
        if isinstance(operator, (ast.Is, ast.IsNot)):
            if isinstance(left, ast.Name) and left.id in self.tensors and isinstance(right, ast.Constant):
                return f"{'' if isinstance(operator, ast.IsNot) else '!'}{left.id}.defined()"
            return self.unknown(node).text
        sign = _COMPARISONS[type(operator)]
        if (dtype := self.dtype(right)) is not None:
            found = self.expression(left)
            if found.type != "dtype":
                self.fail(node, f"`{ast.unparse(left)}` is no dtype")
            return f"({found.text} {sign} opw::dtype_of<{dtype}>::value)"
        a, b = self.expression(left), self.expression(right)
        both = {a.type, b.type}
        if both <= {"int", "float", "bool"} or both in ({"text"}, {"dtype"}):
            return f"({a.text} {sign} {b.text})"
        return self.unknown(node).text

    def dtype(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("torch", "tl"):
            return _CPP_OF_DTYPE.get(node.attr)
        return None
