"""README.md: its code runs, its commands work, and the indexes of documentation and examples are complete."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
INDEXES = [README, ROOT / "docs/README.md", ROOT / "examples/README.md"]


def test_every_block_is_run_here() -> None:
    assert [language for language, _ in BLOCKS] == ["console", "python", "python", "console"]


def test_the_install_commands_work_in_a_checkout(environment: dict[str, str], tmp_path: Path) -> None:
    """As a user types them, but with the packages that are installed here: hatchling for the build, torch, numpy."""
    ignored = shutil.ignore_patterns(".*", "reports", "tests", "benchmarks")
    checkout = shutil.copytree(ROOT, tmp_path / "checkout", ignore=ignored)
    *own, commands = [line.removeprefix("$ ") for line in BLOCKS[0][1].splitlines()]
    # Not run: an environment of its own would fetch torch.
    assert own == ["python3 -m venv .venv && source .venv/bin/activate"]
    assert commands.startswith("pip install")
    commands += "\ncd /\nopwright --version\npython -c 'import opwright; print(opwright.__file__)'"
    environment = environment | {"PIP_NO_BUILD_ISOLATION": "0"}  # pip's way to say that there is no isolation
    result = subprocess.run(
        ["bash", "-e", "-c", commands], cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    version, file = result.stdout.splitlines()[-2:]
    assert re.fullmatch(r"(opwright )?\d+\.\d+\.\d+", version)
    assert Path(file).is_relative_to(Path(environment["PATH"].split(":")[0]).parent)


@pytest.mark.compiler
def test_python_blocks_run(run_python, tmp_path: Path) -> None:
    python = [text for language, text in BLOCKS if language == "python"]
    assert python[0].startswith("# scale_shift.py")
    assert "assert_close" in python[1]
    (tmp_path / "scale_shift.py").write_text(python[0])
    assert run_python("\n".join(python[1:])).stdout == "right: torch.Size([8, 5, 16])\n"


@pytest.mark.compiler
def test_the_readme_operator_passes_verify(run_python, tmp_path: Path) -> None:
    (tmp_path / "scale_shift.py").write_text(next(text for language, text in BLOCKS if language == "python"))
    assert "$ opwright verify scale_shift.py --out reports" in BLOCKS[-1][1]
    result = run_python(
        "import sys; sys.argv = ['opwright', 'verify', 'scale_shift.py']\nfrom opwright.cli import main; main()",
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Verified my_ops::scale_shift" in result.stdout


def test_it_is_short() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 130
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("path", INDEXES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\((?!http)([^)#]+)(?:#([^)]+))?\)", prose)
    assert targets
    for target, anchor in targets:
        assert (path.parent / target).exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)", (path.parent / target).read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings], anchor


def test_the_index_names_every_page_and_every_example() -> None:
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert set(re.findall(r"\]\(((?!\.\.)[^)#]+\.md)\)", INDEXES[1].read_text())) == pages
    examples = {path.name for path in (ROOT / "examples").iterdir() if path.is_dir()}
    assert set(re.findall(r"\]\((\w+)(?:/README\.md)?\)", INDEXES[2].read_text())) == examples
