"""The wheel of opwright_ops: built whole, examined, used from Python and from C++."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from opwright.package.audit import audit_wheel

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/operators_from_cpp"
HAS_NVCC = bool(shutil.which("nvcc")) or Path("/usr/local/cuda/bin/nvcc").exists()
pytestmark = pytest.mark.compiler


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("opwright_ops")
    project = shutil.copytree(ROOT / "ops", folder / "ops", ignore=shutil.ignore_patterns("__pycache__"))
    if not HAS_NVCC:
        settings = project / "pyproject.toml"
        settings.write_text(re.sub(r"architectures = .*", "architectures = []", settings.read_text()))
    command = [sys.executable, "-m", "opwright", "wheel", project, "--no-isolation", "--output", folder / "dist"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (found,) = (folder / "dist").iterdir()
    return found


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_nothing_is_wrong_with_it(wheel: Path) -> None:
    audit = audit_wheel(wheel)
    assert not audit.problems
    assert [r for r in audit.remarks if "Triton" not in r] == []
    assert wheel.stat().st_size < 8e6
    if HAS_NVCC:
        assert dict(audit.facts)["  GPU code"] == "sm_80 sm_90 sm_100 compute_100"


PROGRAM = """
import torch, opwright_ops as ops
from opwright_ops._opwright.dispatch import kernels
x, b = torch.randn(64, 128, requires_grad=True), torch.randn(128)
torch.testing.assert_close(ops.bias_gelu(x, b), torch.nn.functional.gelu(x + b, approximate="tanh"))
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


@pytest.mark.skipif(not shutil.which("cmake"), reason="no cmake")
def test_from_cpp(unpacked: Path, tmp_path: Path) -> None:
    """The example, with what its README says that it prints."""
    torch_dir = Path(torch.utils.cmake_prefix_path) / "Torch"
    if not torch_dir.is_dir():
        pytest.skip("this torch has no CMake package")
    folder = subprocess.run([sys.executable, "-m", "opwright", "--cmake-dir"], check=True, capture_output=True, text=True)
    configure = ["cmake", "-S", EXAMPLE, "-B", tmp_path, f"-Dopwright_DIR={folder.stdout.strip()}", f"-DTorch_DIR={torch_dir}"]
    for command in (configure, ["cmake", "--build", tmp_path]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    program = [tmp_path / "operators_from_cpp", unpacked / "opwright_ops/_opwright/library.so"]
    printed = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    assert printed in (EXAMPLE / "README.md").read_text()
    assert printed.count("\n") == 2
