"""Who may import whom, and what is not imported before it is needed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_layers() -> None:
    found = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Returns the largest sets of modules that each reach all others of the set by imports."""
    reached = {name: reach(name, imports) for name in imports}
    found = {frozenset({name} | {o for o in reached[name] if name in reached[o]}) for name in imports}
    return [set(each) for each in found if len(each) > 1]


def reach(start: str, imports: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = imports[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def test_imports_go_in_no_circle() -> None:
    import grimp

    graph = grimp.build_graph("opwright", exclude_type_checking_imports=False, cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert len(imports) > 200
    assert not [sorted(each) for each in circles(imports)]


def test_a_circle_is_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


@pytest.mark.parametrize(
    "module",
    [
        "opwright",
        "opwright.errors",
        "opwright.cli",
        "opwright.cli.parser",
        "opwright.report",
        "opwright.records",
        "opwright.testing",
        "opwright.testing.plugin",
    ],
)
def test_imports_without_torch(module: str, start_python) -> None:
    start_python(f"import sys, {module}\nassert 'torch' not in sys.modules, 'torch was imported'")


def test_help_needs_no_torch_and_no_parser(start_python) -> None:
    program = (
        "import sys; sys.argv = ['opwright', '--help']\nfrom opwright.cli import main; main()\n"
        "assert not {'torch', 'cyclopts', 'rich'} & set(sys.modules)"
    )
    assert "verify" in start_python(program).stdout


def test_declaring_creates_nothing_and_imports_neither_the_compiler_nor_dynamo(start_python, tmp_path: Path) -> None:
    store = tmp_path / "store"
    start_python(
        "import sys, opwright_ops\n"
        "late = {'torch._dynamo', 'opwright.build.compile', 'subprocess', 'filelock'} & set(sys.modules)\n"
        "import torch\n"
        "assert not {'torch._dynamo', 'opwright.build.compile'} & late, late",
        env={"OPWRIGHT_CACHE_DIR": str(store)},
    )
    assert not store.exists()


def test_no_file_is_too_long() -> None:
    sources = [*ROOT.glob("src/**/*.py"), *ROOT.glob("ops/**/*.py"), *ROOT.glob("src/**/native/**/*.[hc]")]
    long = {str(p): n for p in sources if (n := len(p.read_text().splitlines())) > 650}
    assert not long


def test_every_error_has_its_own_code_and_text() -> None:
    from opwright import errors

    found = errors.all_errors()
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.OpwrightError)]
    with_code = [c for c in classes if "code" in vars(c)]
    assert len(found) == len(with_code)
    assert all(c.__doc__ for c in with_code)


def private_names_of_torch() -> frozenset[str]:
    """Returns the names with an underscore that classes and some modules of PyTorch have."""
    import torch
    from torch.utils import _python_dispatch, _pytree

    overload = torch.ops.aten.add.default
    owners = [
        torch.Tensor, torch.UntypedStorage, torch.library.Library, torch.autograd.Function,
        torch.autograd.forward_ad, torch.autograd.function.FunctionCtx, torch.overrides, torch.cuda, torch.ops.aten.add,
        overload, overload._schema, _python_dispatch, _pytree,
    ]  # fmt: skip
    return frozenset(name for owner in owners for name in dir(owner) if re.match(r"_[a-zA-Z]", name))


def private_uses(tree: ast.Module, known: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Yields the private names of PyTorch in a module: imported, as attributes, and in text that is not a docstring."""
    scopes = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, scopes) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "torch":
                names = [*module.split("."), *(alias.name for alias in node.names)]
                yield from ((node.lineno, name) for name in names if name.startswith("_"))
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names if alias.name.startswith("torch._"))
            case ast.Attribute(value=owner, attr=name):
                is_own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
                is_of_torch = re.match(r"torch\b(?!\.ops\b)", ast.unparse(owner)) and re.match(r"_[a-zA-Z]", name)
                if is_of_torch or (name in known and not is_own):
                    yield node.lineno, name
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                found = re.search(r"\btorch\.(\w+\.)*_\w+", text)
                if found:
                    yield node.lineno, found[0]


def test_one_file_knows_private_names_of_torch() -> None:
    source, known = ROOT / "src" / "opwright", private_names_of_torch()
    uses = {}
    for path in sorted(source.rglob("*.py")):
        place = path.relative_to(source)
        if str(place) != "_torch.py":
            uses[str(place)] = sorted(private_uses(ast.parse(path.read_text()), known))
    assert len(uses) > 100
    assert not {place: found for place, found in uses.items() if found}


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nx = torch._C._len_torch_dispatch_stack()",
        "from torch._ops import OpOverload",
        "from torch.utils import _pytree",
        "import torch._dynamo",
        "def f(tensor): return tensor.untyped_storage()._cdata",
        "LATE = {'torch._dynamo'}",
    ],
)
def test_each_way_to_a_private_name_is_seen(text: str) -> None:
    assert list(private_uses(ast.parse(text), private_names_of_torch()))
