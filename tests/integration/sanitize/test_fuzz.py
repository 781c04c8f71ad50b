"""The fuzzer reports kernels that are wrong: without this, a run without reports would prove nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent / "fuzz.py"

pytestmark = [pytest.mark.compiler, pytest.mark.slow]


def fuzz(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(FUZZ), "--seed", "1", "--workers", "1", "--reports", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("writes_beyond", "AddressSanitizer: heap-buffer-overflow"),
        ("reads_beyond", "AddressSanitizer: heap-buffer-overflow"),
        ("overflows", "signed integer overflow"),
        ("forgets_the_last", "result 0 at"),
        ("writes_around", "wrote where it must not"),
        ("refuses", "refused a right call"),
    ],
)
def test_a_wrong_kernel_is_reported(name: str, reported: str) -> None:
    result = fuzz("--calls", "200", name)
    assert result.returncode == 1
    assert reported in result.stdout


def test_a_right_kernel_is_not() -> None:
    result = fuzz("--calls", "300", "gather", "accumulate")
    assert result.returncode == 0, result.stdout
    assert ", 0 reports" in result.stdout
