"""What a declaration leaves behind in its process."""

from __future__ import annotations

import subprocess
import sys

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
