"""What a declaration leaves behind in its process, and how it is read where a wheel is built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os
import torch
from jaxtyping import Float
from torch import Tensor
from opwright import operator

torch.set_num_threads(2)
before = len(os.listdir("/proc/self/task"))

@operator("left::normalize")
def normalize(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    return torch.nn.functional.layer_norm(x, x.shape[-1:])  # a loop in threads at any size

assert torch.get_num_threads() == 2
assert len(os.listdir("/proc/self/task")) == before
child = os.fork()
if child == 0:
    torch.ones(1 << 20).exp()  # a loop in two threads
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the threads of a process from /proc")
def test_a_child_of_fork_runs_loops_in_threads() -> None:
    """A declaration runs its reference. The child would wait for threads that this had started in the parent."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


MODULE = """
from jaxtyping import Float
from torch import Tensor
from opwright import *
from opwright import bench, verify

@operator("starred::twice")
def twice(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return 2 * x

if __name__ == "__main__":
    verify(twice)
    bench(twice)
"""


def test_a_module_that_imports_verify_and_bench_can_be_shipped(tmp_path: Path) -> None:
    """A wheel is built without torch, which both of them need: an AttributeError of their code ended it."""
    (tmp_path / "starred").mkdir()
    (tmp_path / "starred" / "__init__.py").write_text(MODULE)
    program = (
        "import pathlib, sys\nfrom opwright.package import torch_stand_in\ntorch_stand_in.install()\n"
        "from opwright.package.collect import collect\n"
        "print([d.qualified_name for d in collect(pathlib.Path(sys.argv[1]), 'starred')])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "['starred::twice']\n", done.stderr
