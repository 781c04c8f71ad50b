"""The part of the toolkit that a wheel brings along, so that its operators need torch alone.

It lies in the package as `_opwright`, so that packages made by different versions do not meet. Modules that
build kernels are replaced by those in `shipped/`; imports are rewritten, in it and in the package.
"""

from __future__ import annotations

import ast
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from opwright.backends.registry import dispatch_keys

_TOOLKIT = Path(__file__).resolve().parent.parent
_TAKEN = ("_torch.py", "errors.py", "settings.py", "contract/*.py", "dispatch/*.py")
_LEFT = ("contract/sweep.py", "contract/fill.py", "contract/likely.py")
_REPLACED = {
    "__init__.py": "init.py",
    "jaxtyping.py": "jaxtyping.py",
    "backends/__init__.py": "__init__.py",
    "backends/cuda.py": "cuda.py",
    "dispatch/compiled.py": "compiled.py",
    "dispatch/kernels.py": "kernels.py",
    "dispatch/triton_file.py": "triton_file.py",
    "contract/dryrun.py": "dryrun.py",
}


def runtime_files(package: str, gates: Mapping[str, str]) -> dict[str, str]:
    """Returns the texts of the modules that go into a package, by their paths in it.

    Args:
        package: its import name.
        gates: the generated text of each operator's Python function.
    """
    paths = {str(path.relative_to(_TOOLKIT)): path for pattern in _TAKEN for path in sorted(_TOOLKIT.glob(pattern))}
    paths |= {name: _TOOLKIT / "package" / "shipped" / source for name, source in _REPLACED.items()}
    texts = {name: path.read_text() for name, path in sorted(paths.items()) if name not in _LEFT}
    texts["dispatch/gates.py"] = _gates_text(gates)
    texts["dispatch/devices.py"] = f"DISPATCH_KEYS = {dispatch_keys()!r}\n"
    return {f"_opwright/{name}": rewritten(text, package) for name, text in texts.items()}


def _gates_text(gates: Mapping[str, str]) -> str:
    """Returns a module with the operators' functions: where it is installed, they need not be compiled."""
    parts = [
        f"{text}\n\nGATES[{name!r}] = ({zlib.crc32(text.encode())}, make)\n\n\n" for name, text in sorted(gates.items())
    ]
    return "GATES = {}\n\n\n" + "".join(parts)


def rewritten(text: str, package: str) -> str:
    """Returns the text of a module that imports the package's own runtime in place of opwright and jaxtyping."""
    data = text.encode()  # the syntax tree counts bytes
    starts = [0, *(found.end() for found in re.finditer(rb"\r\n|\r|\n", data))]
    changes = [
        (
            starts[node.lineno - 1] + node.col_offset,
            starts[node.end_lineno - 1] + node.end_col_offset,
            _moved(node, package),
        )
        for node in _imports(ast.parse(data))
    ]
    for begin, end, new in sorted(changes, reverse=True):
        lines = data[begin:end].count(b"\n")
        word, rest = new.encode().split(b" ", 1)
        data = data[:begin] + word + b" \\\n" * lines + b" " + rest + data[end:]  # what follows keeps its line
    return data.decode()


def _imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.walk(tree):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        if any(name.split(".")[0] in ("opwright", "jaxtyping") for name in names):
            yield node


def _moved(node: ast.Import | ast.ImportFrom, package: str) -> str:
    if isinstance(node, ast.ImportFrom):
        node = ast.ImportFrom(_place(node.module, package), node.names, 0)
        return ast.unparse(node)
    statements = []
    for alias in node.names:
        top = alias.name.split(".")[0]
        place = _place(alias.name, package)
        if alias.asname:
            statements.append(f"import {place} as {alias.asname}")
        elif top in ("opwright", "jaxtyping"):
            statements.append(f"import {_place(top, package)} as {top}")
            if alias.name != top:
                statements.append(f"import {place}")
        else:
            statements.append(f"import {alias.name}")
    return "; ".join(statements)


def _place(name: str, package: str) -> str:
    top, *rest = name.split(".")
    if top == "opwright":
        return ".".join([package, "_opwright", *rest])
    return f"{package}._opwright.{name}" if top == "jaxtyping" else name
