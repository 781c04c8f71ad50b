"""The library's Triton kernels compute the right numbers: under Triton's interpreter, which needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import stub
import torch

# Units in the last place of the result, or of 0.001 where it is smaller: rounding of the sum, the exponential
# and the quotient; a matrix product of 33 terms rounds as often.
ALLOWED = {"softmax": 12, "softmax_backward": 12, "bias_gelu": 12, "matmul_bias_gelu": 60}


def test_kernels_under_the_interpreter() -> None:
    tritons = stub.find_tritons()
    if not tritons:
        pytest.skip("no Triton at .venv/triton-*/bin/python")
    # Older interpreters convert arrays in a way that numpy 2.4 refuses.
    triton_python = tritons[max(tritons)]
    env = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(Path(torch.__file__).parents[1]),  # that Python has Triton and no torch
    }
    script = Path(__file__).with_name("interpreted_operators.py")
    command = [str(triton_python), str(script), str(stub.ROOT / "ops" / "src" / "opwright_ops")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    errors = json.loads(done.stdout)
    assert len(errors) == 27
    assert {n: e for n, e in errors.items() if not (isinstance(e, float) and e <= ALLOWED[n.split()[0]])} == {}
