"""The stress at a small scale: `make stress` runs it in full."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.compiler

RUNS = {
    "swap": ["--swaps", "60", "--forks", "3", "--threads", "4"],
    "start": ["--processes", "6"],
    "kill": ["--kills", "4"],
    "edit": ["--edits", "4"],
}


@pytest.mark.parametrize("verb", RUNS)
def test_nothing_goes_wrong(verb: str) -> None:
    program = Path(__file__).with_name("stress.py")
    made = subprocess.run(
        [sys.executable, str(program), verb, *RUNS[verb], "--timeout", "500"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
