"""Type stubs of a package: what its modules hold, with shapes in the docstrings where types cannot say them."""

from __future__ import annotations

import ast
import copy

_SAYS_MORE = ("samples", "sweep", "cost", "baseline")  # decorators that leave a plain function
_ANY = ast.Name("Any")  # the annotation of names that have none


def stub_of(text: str, is_package: bool = False) -> str:
    """Returns the stub of a module: public signatures and docstrings; arguments of operators as Tensor.

    Args:
        is_package: it is an `__init__.py`, whose imports are there for others.
    """
    tree = ast.parse(text)
    body = _unrepeated([kept for node in tree.body for kept in _kept(node)], set())
    names = {node.id for part in body for node in ast.walk(part) if isinstance(node, ast.Name)}
    if is_package:
        names |= {a.asname or a.name for part in body if isinstance(part, ast.ImportFrom) for a in part.names}
    used = [node for node in body if not _is_unused_import(node, names)]
    if "Any" in names and not any(_imports_any(node) for node in used):
        at = 1 if used and isinstance(used[0], ast.Expr) else 0
        used.insert(at, ast.ImportFrom("typing", [ast.alias("Any")], 0))
    return ast.unparse(ast.fix_missing_locations(ast.Module(used, []))) + "\n"


def _kept(node: ast.stmt) -> list[ast.stmt]:
    """Returns what a stub has of a statement of a module or class."""
    match node:
        case ast.ImportFrom(module="__future__"):
            return []
        case ast.Import() | ast.ImportFrom():
            return [node]
        case ast.Expr(value=ast.Constant(value=str())):
            return [node]
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return [] if _is_private(node.name) else [_function(node)]
        case ast.ClassDef():
            body = [kept for inner in node.body for kept in _kept(inner)]
            body = [*body, *_attributes(node, {name for inner in body for name in _names_of(inner)})] or [_dots()]
            return [ast.ClassDef(node.name, node.bases, node.keywords, body, node.decorator_list)]
        case ast.AnnAssign():
            return [ast.AnnAssign(node.target, _plain(node.annotation), node.value and _dots().value, node.simple)]
        case ast.Assign(targets=[ast.Name(id=name)]):
            if name == "__all__" or _is_type(node.value) or _called(node.value) in ("TypeVar", "ParamSpec"):
                return [node]
            return [] if _is_private(name) else [_any(name)]
        case ast.Assign():
            parts = [part for target in node.targets for part in ast.walk(target)]
            bound = [part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]
            return [_any(name) for name in bound if not _is_private(name)]
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            return [node]
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return []
        case ast.If():
            return _of_branches([node.body, node.orelse])
        case ast.Try():
            return _of_branches([node.body + node.orelse, *(h.body for h in node.handlers), node.finalbody])
        case ast.With():
            return _of_branches([node.body])
    return []


def _of_branches(branches: list[list[ast.stmt]]) -> list[ast.stmt]:
    """Returns what branches declare; the first declaration of a name counts, before imports of it."""
    parts = [[kept for node in branch for kept in _kept(node)] for branch in branches]
    imports = [node for part in parts for node in part if isinstance(node, (ast.Import, ast.ImportFrom))]
    declared, names = [], set[str]()
    for part in parts:
        new = [node for node in part if node not in imports and not names.intersection(_names_of(node))]
        declared += [node for node in new if not isinstance(node, ast.Expr)]
        names.update(name for node in new for name in _names_of(node))
    for node in imports:
        node.names = [a for a in node.names if (a.asname or a.name) not in names]
    return [*(node for node in imports if node.names), *declared]


def _unrepeated(body: list[ast.stmt], inherited: set[str]) -> list[ast.stmt]:
    """Returns declarations without `name: Any` of names that were declared before, or by a base in the module."""
    names, members, left = set(inherited), dict[str, set[str]](), []
    for node in body:
        new = set(_names_of(node))
        if isinstance(node, ast.AnnAssign) and node.annotation is _ANY and new <= names:
            continue
        if isinstance(node, ast.ClassDef):
            bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            above = set[str]().union(*(members.get(getattr(base, "id", ""), ()) for base in bases))
            node.body = _unrepeated(node.body, above) or [_dots()]
            members[node.name] = above.union(*map(_names_of, node.body))
        names |= new
        left.append(node)
    return left


def _attributes(node: ast.ClassDef, declared: set[str]) -> list[ast.stmt]:
    """Returns a declaration of each attribute that `__init__` assigns and that the class does not declare."""
    found: dict[str, ast.stmt] = {}
    for function in node.body:
        if not (isinstance(function, ast.FunctionDef) and function.name == "__init__"):
            continue
        arguments = [*function.args.posonlyargs, *function.args.args]
        own = arguments[0].arg if arguments else None
        types = {part.target: part.annotation for part in ast.walk(function) if isinstance(part, ast.AnnAssign)}
        for part in ast.walk(function):
            match part:
                case ast.Attribute(value=ast.Name(id=name), attr=attr, ctx=ast.Store()) if name == own:
                    if attr not in declared and not _is_private(attr) and (part in types or attr not in found):
                        found[attr] = _any(attr, types.get(part))
    return list(found.values())


def _any(name: str, annotation: ast.expr | None = None) -> ast.stmt:
    return ast.AnnAssign(ast.Name(name), _plain(annotation) if annotation else _ANY, None, 1)


def _names_of(node: ast.stmt) -> list[str]:
    """Returns the names that a statement declares, except by importing them."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            return [name]
    return []


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt:
    is_operator = any(_called(d) == "operator" for d in node.decorator_list)
    made = copy.copy(node)
    made.args = copy.deepcopy(node.args)
    made.decorator_list = [
        d for d in node.decorator_list if _called(d) not in ("operator", "backward", "fixture", *_SAYS_MORE)
    ]
    arguments = [*made.args.posonlyargs, *made.args.args, *made.args.kwonlyargs]
    shapes = [(a.arg, ast.unparse(a.annotation)) for a in arguments if a.annotation and _has_shape(a.annotation)]
    for argument in arguments:
        argument.annotation = argument.annotation and _plain(argument.annotation)
    if node.returns is not None and _has_shape(node.returns):
        shapes.append(("returns", ast.unparse(node.returns)))
    made.returns = node.returns and _plain(node.returns)
    if is_operator and not isinstance(made.returns, ast.Constant):
        optional = ast.BinOp(ast.Name("Tensor"), ast.BitOr(), ast.Constant(None))
        made.args.kwonlyargs.append(ast.arg("out", ast.Name("Any") if _is_several(made.returns) else optional))
        made.args.kw_defaults.append(ast.Constant(None))
    doc = ast.get_docstring(node)
    if shapes:
        lines = [f"    {name}: {shape}" for name, shape in shapes]
        doc = "\n".join([*([doc, ""] if doc else []), "Shapes:", *lines, ""])
    made.body = [*([ast.Expr(ast.Constant(doc))] if doc else []), _dots()]
    return made


def _called(decorator: ast.expr) -> str:
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_several(returns: ast.expr | None) -> bool:
    return not (isinstance(returns, ast.Name) and returns.id == "Tensor")


def _has_shape(annotation: ast.expr) -> bool:
    return any(_is_shaped(node) for node in ast.walk(annotation))


def _is_shaped(node: ast.AST) -> bool:
    """Whether a node is `Float[Tensor, "..."]`."""
    if not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) and len(node.slice.elts) == 2):
        return False
    axes = node.slice.elts[1]
    return isinstance(axes, ast.Constant) and isinstance(axes.value, str)


def _plain(annotation: ast.expr) -> ast.expr:
    """Returns an annotation with Tensor in place of `Float[Tensor, "..."]`."""

    class Replacer(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
            if _is_shaped(node):
                return ast.Name("Tensor")
            if getattr(node.value, "id", "") == "Mutates":
                return self.visit(node.slice)
            if getattr(node.value, "id", getattr(node.value, "attr", "")) == "Annotated":
                return self.visit(node.slice.elts[0])
            return self.generic_visit(node)

    return Replacer().visit(copy.deepcopy(annotation))


def _is_type(value: ast.expr) -> bool:
    """Whether an assignment names a type: `State = tuple[Tensor, Tensor]`."""
    if isinstance(value, ast.Subscript):
        return getattr(value.value, "id", "")[:1].isupper() or getattr(value.value, "id", "") in (
            "tuple",
            "list",
            "dict",
        )
    return isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr) and _is_type(value.left)


def _is_unused_import(node: ast.stmt, names: set[str]) -> bool:
    """Drops the names of an import that the stub does not need; `x as x` is there for others."""
    if not isinstance(node, (ast.Import, ast.ImportFrom)):
        return False
    node.names = [
        a for a in node.names
        if a.asname == a.name or a.name == "*" or (a.asname or a.name).split(".")[0] in names
    ]  # fmt: skip
    return not node.names


def _imports_any(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and any(a.name == "Any" for a in node.names)


def _dots() -> ast.Expr:
    return ast.Expr(ast.Constant(...))
