"""`opwright wheel`: builds a project's wheel with its own build backend."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from opwright.errors import PackageError


def build_project(project: Path, output: Path, isolation: bool = True) -> Path:
    """Builds the wheel of a project; returns where it is. A build that fails leaves none.

    Raises:
        PackageError: there is no project, or its build fails.
    """
    if not (project / "pyproject.toml").is_file():
        raise PackageError(
            str(project),
            "there is no pyproject.toml in this folder",
            hint="`opwright new NAME` writes a project",
        )
    with tempfile.TemporaryDirectory(prefix="opwright-dist-") as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--quiet",
            "--wheel-dir",
            folder,
            str(project.resolve()),
        ]
        if not isolation:
            command.insert(5, "--no-build-isolation")
        result = subprocess.run(command, capture_output=True, text=True)
        found = list(Path(folder).glob("*.whl"))
        if result.returncode != 0 or not found:
            said = _essence(result.stdout + result.stderr)
            is_missing = "No matching distribution found for" in said
            hint = "`opwright wheel --no-isolation` builds with what is installed here" if is_missing else ""
            if said.endswith("No module named pip"):  # an environment that uv has made
                hint = f"`{sys.executable} -m ensurepip`, or `uv pip install pip`"
            raise PackageError(str(project), "its build fails", body=said, hint=hint)
        output.mkdir(parents=True, exist_ok=True)
        target = output / found[0].name
        part = target.with_suffix(".part")
        shutil.copyfile(found[0], part)
        part.replace(target)
    return target


def _essence(text: str) -> str:
    """Returns what a build said, without pip's frame and the traceback above an error of Opwright's."""
    lines = text.splitlines()
    ends = [i for i, line in enumerate(lines) if "[end of output]" in line] or [len(lines)]
    begins = [i for i, line in enumerate(lines[: ends[0]]) if re.match(r"\s*opwright\.[\w.]+: ", line)]
    if not begins:
        return "\n".join(lines[-40:])
    found = textwrap.dedent("\n".join(lines[begins[-1] : ends[0]])).rstrip()
    return re.sub(r"^\s*opwright\.[\w.]+: ", "", found)
