"""`opwright new`: a project that works as it stands, and operators added to one."""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from opwright.errors import PackageError
from opwright.package.names import check_operator_name, check_package_name

_TEMPLATES = Path(__file__).resolve().parent.parent / "templates"
FIRST_OPERATOR = "scale_shift"


def new_project(name: str, folder: Path) -> list[Path]:
    """Writes a project with one operator into `folder/name`; returns the files.

    Raises:
        PackageError: the name cannot be had, or the folder exists.
    """
    package = name.replace("-", "_")
    check_package_name(package, name)
    project = folder / name
    if project.exists() and any(project.iterdir()):
        raise PackageError(name, "the folder exists and is not empty", rows=[("folder", str(project))])
    files = _render("project", project, project=name, package=package)
    source = project / "src" / package
    source.mkdir(parents=True, exist_ok=True)
    (source / "__init__.py").write_text(f'"""PyTorch operators of {name}."""\n')
    return [*files, source / "__init__.py", *_add(source, FIRST_OPERATOR)]


def enclosing_project(folder: Path) -> Path | None:
    """Returns the nearest of a folder and its parents that has a pyproject.toml."""
    folder = folder.resolve()
    return next((path for path in (folder, *folder.parents) if (path / "pyproject.toml").is_file()), None)


def new_operator(name: str, project: Path) -> list[Path]:
    """Adds an operator to a project; returns the files.

    Args:
        name: `my_op`, or `my_package/my_op` where the project has several packages.

    Raises:
        PackageError: there is no project, or the name is taken.
    """
    package, _, operator = name.rpartition("/")
    check_operator_name(operator, name)
    packages = [path.parent for path in sorted(project.glob("src/*/__init__.py"))]
    if not (project / "pyproject.toml").is_file() or not packages:
        raise PackageError(
            str(project), "there is no project in this folder: pyproject.toml, and a package in src",
            hint="`opwright new NAME` writes one",
        )  # fmt: skip
    chosen = [path for path in packages if package in ("", path.name)]
    if len(chosen) != 1:
        rows = [("packages", ", ".join(path.name for path in packages))]
        raise PackageError(
            name,
            "it is not clear which package it belongs to",
            rows=rows,
            hint=f"`{packages[0].name}/{operator}`",
        )
    if (chosen[0] / operator).exists():
        raise PackageError(name, "the folder exists", rows=[("folder", str(chosen[0] / operator))])
    return _add(chosen[0], operator)


def _add(package: Path, operator: str) -> list[Path]:
    files = _render("operator", package / operator, package=package.name, name=operator)
    (package / operator / "test_op.py").rename(package / operator / f"test_{operator}.py")
    files = [file if file.name != "test_op.py" else file.with_name(f"test_{operator}.py") for file in files]
    init = package / "__init__.py"
    text = init.read_text()
    new = f"from {package.name}.{operator} import {operator} as {operator}"
    lines = text.rstrip().splitlines()
    own = [i for i, line in enumerate(lines) if line.startswith(f"from {package.name}.")]
    sortable = [i for i in own if re.match(r"from [\w.]+ import [^(\\]+$", lines[i])]
    if own and sortable == own:  # where it belongs by name; all others stay, since code may stand between them
        lines.insert(max((i + 1 for i in own if lines[i] < new), default=own[0]), new)
    else:
        lines += [new] if own or not lines else ["", new]
    init.write_text("\n".join([*lines, ""]))
    return files


def _render(kind: str, target: Path, **names: str) -> list[Path]:
    """Writes the templates of a kind, with these names in them."""
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    files = []
    for template in sorted((_TEMPLATES / kind).rglob("*.j2")):
        path = target / template.relative_to(_TEMPLATES / kind).with_suffix("")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(environment.from_string(template.read_text()).render(**names))
        files.append(path)
    return files
