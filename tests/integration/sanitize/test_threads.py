"""The thread sanitizer reports a kernel with a data race: without this, a run without reports would prove nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

THREADS = Path(__file__).parent / "threads.py"
PROGRAM = """
import threading
import opwright, torch
from jaxtyping import Float
from torch import Tensor

@opwright.operator("sanitized::counting", cpu='''
#include <opwright/kernel.h>
static int64_t calls;
template <typename T> void counting(opwright::View<const T, 1> x, opwright::View<T, 1> output) {
  COUNT;
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = x(i);
}
OPWRIGHT_KERNEL(counting, float)
''')
def counting(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    return x.clone()

def work():
    for _ in range(1000):
        counting(torch.zeros(3))

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""

pytestmark = [pytest.mark.compiler, pytest.mark.slow]


@pytest.mark.parametrize(("count", "status"), [("++calls", 99), ("__atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED)", 0)])
def test_a_race_in_a_kernel_is_reported(count: str, status: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("COUNT", count))
    result = subprocess.run([sys.executable, THREADS, program], capture_output=True, text=True, timeout=500)
    assert result.returncode == status, result.stderr
    assert ("data race" in result.stderr) == bool(status)
