"""How rows.cuh shares a tensor among threads, on a CPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.compiler
def test_every_element_has_one_thread_in_grids_of_several_layers(tmp_path: Path) -> None:
    """Blocks beyond the tensor took the end of the last row a second time."""
    program = tmp_path / "rows_cover"
    include = ROOT / "src" / "opwright" / "native" / "include"
    source = ROOT / "tests" / "native" / "rows_cover.cpp"
    command = ["c++", "-std=c++20", "-O2", f"-I{include}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
