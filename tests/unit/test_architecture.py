"""Who may import whom, and what is not imported before it is needed."""

from __future__ import annotations

import subprocess
import sys
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
def test_imports_without_torch(module: str, run_python) -> None:
    run_python(f"import sys, {module}\nassert 'torch' not in sys.modules, 'torch was imported'")


def test_help_needs_no_torch_and_no_parser(run_python) -> None:
    program = (
        "import sys; sys.argv = ['opwright', '--help']\nfrom opwright.cli import main; main()\n"
        "assert not {'torch', 'cyclopts', 'rich'} & set(sys.modules)"
    )
    assert "verify" in run_python(program).stdout


def test_import_creates_nothing(run_python, tmp_path: Path) -> None:
    store = tmp_path / "store"
    run_python("import opwright, opwright_ops", env={"OPWRIGHT_CACHE_DIR": str(store)})
    assert not store.exists()


def test_declaring_does_not_import_the_compiler_or_dynamo(run_python) -> None:
    run_python(
        "import sys, opwright_ops\n"
        "late = {'torch._dynamo', 'opwright.build.compile', 'subprocess', 'filelock'} & set(sys.modules)\n"
        "import torch\n"
        "assert not {'torch._dynamo', 'opwright.build.compile'} & late, late"
    )


def test_no_file_is_too_long() -> None:
    sources = [*ROOT.glob("src/**/*.py"), *ROOT.glob("ops/**/*.py"), *ROOT.glob("src/**/native/**/*.[hc]")]
    long = {str(p): n for p in sources if (n := len(p.read_text().splitlines())) > 650}
    assert not long


def test_every_error_has_its_own_code_and_text() -> None:
    from opwright import errors

    found = errors.all_errors()
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.OpwrightError)]
    with_code = [c for c in classes if "code" in vars(c) and c is not errors.OpwrightError]
    assert len(found) == len(with_code)
    assert all(c.__doc__ for c in with_code)
    assert all(code in errors.__doc__ for code in found)
