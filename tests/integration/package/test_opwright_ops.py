"""The wheel of opwright_ops: built whole, examined, used from Python; test_from_cpp.py uses it from C++."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from opwright.package.audit import audit_wheel

# The first to come builds the wheel: kernels for three GPUs and the LSTM, minutes on two cores.
pytestmark = [pytest.mark.compiler, pytest.mark.timeout(1800)]


def test_nothing_is_wrong_with_it(wheel: Path, has_nvcc: bool) -> None:
    audit = audit_wheel(wheel)
    assert not audit.problems
    # Triton kernels are compiled for no GPU here; rotations with float64 tables are PyTorch's operators.
    assert [r for r in audit.remarks if "Triton" not in r and "rotate_float64_tables" not in r] == []
    assert wheel.stat().st_size < 13.5e6  # all operators, for three GPUs and as PTX
    if has_nvcc:
        assert dict(audit.facts)["  GPU code"] == "sm_80 sm_90 sm_100 compute_100"


PROGRAM = """
import torch, opwright_ops as ops
from opwright_ops._opwright.dispatch import kernels
x, b = torch.randn(64, 128, requires_grad=True), torch.randn(128)
torch.testing.assert_close(ops.bias_gelu(x, b), torch.nn.functional.gelu(x + b))
theirs = torch.nn.LSTM(16, 32, num_layers=2, bidirectional=True)
ours, steps = ops.LSTM.from_torch(theirs), torch.randn(7, 3, 16, requires_grad=True)
torch.testing.assert_close(ours(steps)[0], theirs(steps)[0])
grads = [torch.autograd.grad(m(steps)[0].square().sum(), steps)[0] for m in (ours, theirs)]
torch.testing.assert_close(*grads)
torch.testing.assert_close(ops.softmax(x), x.softmax(-1))
assert ops.lstm_step(torch.nn.LSTM(8, 8))(torch.randn(1, 8)).shape == (1, 8)
for name in ("bias_gelu", "lstm", "lstm_bidirectional"):
    assert kernels.is_loaded(getattr(ops, name).operator, "cpu"), name
"""


def test_from_python(unpacked: Path) -> None:
    head = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("opwright", "jaxtyping"): raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Blocker())
sys.path.insert(0, {str(unpacked)!r})
"""
    subprocess.run([sys.executable, "-c", head + PROGRAM], check=True)
