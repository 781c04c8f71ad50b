"""The first call in a process whose library is in the cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.compiler

PROGRAM = '''
import sys
import torch
from jaxtyping import Float
from torch import Tensor
from opwright import operator

@operator("first::twice", cpu="""
#include <opwright/kernel.h>
template <typename T>
void twice(opwright::View<const T, 1> x, opwright::View<T, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = 2 * x(i);
}
OPWRIGHT_KERNEL(twice, float)
""")
def twice(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return 2 * x

assert twice(torch.ones(3)).tolist() == [2.0] * 3
print(sorted({"filelock", "opwright.build.compile", "opwright.build.diagnostics"} & set(sys.modules)))
'''


def test_it_imports_nothing_that_builds(tmp_path: Path) -> None:
    environment = {**os.environ, "OPWRIGHT_CACHE_DIR": str(tmp_path), "OPWRIGHT_REQUIRE_KERNELS": "1"}
    command = [sys.executable, "-c", PROGRAM]
    found = [subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(2)]
    assert "opwright.build.compile" in found[0].stdout
    assert found[1].stdout == "[]\n"
