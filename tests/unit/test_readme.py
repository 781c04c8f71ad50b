"""The code blocks of README.md do what the text around them says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.compiler
def test_python_blocks_run_and_print_what_is_shown(run_python, tmp_path: Path) -> None:
    python = [text for language, text in BLOCKS if language == "python"]
    plain = [text for language, text in BLOCKS if not language]
    assert python[0].startswith("# scale_shift.py")
    (tmp_path / "scale_shift.py").write_text(python[0])
    output = run_python("\n".join(python[1:])).stdout
    assert output.strip() == plain[-1].strip()


@pytest.mark.compiler
def test_the_readme_operator_passes_verify(run_python, tmp_path: Path) -> None:
    (tmp_path / "scale_shift.py").write_text(next(text for language, text in BLOCKS if language == "python"))
    console = next(text for language, text in BLOCKS if language == "console")
    assert "$ opwright verify scale_shift.py --out reports" in console
    result = run_python(
        "import sys; sys.argv = ['opwright', 'verify', 'scale_shift.py']\nfrom opwright.cli import main; main()",
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Verified my_ops::scale_shift" in result.stderr


def test_it_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 120


def test_its_links_lead_somewhere() -> None:
    prose = re.sub(r"^```.*?^```", "", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", prose):
        assert (README.parent / target).exists(), target
