"""A fourth backend, brought by an installed package: three files, found through the registry alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

# Kernels are Python functions that fill NumPy arrays.
NUMPY = """
import importlib.util
from opwright.backends.protocol import LaunchedBackend

class Library:
    def __init__(self, path):
        spec = importlib.util.spec_from_file_location("kernels", path)
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)

    def launch(self, declaration, values, outputs):
        arrays = [v.detach().numpy() if hasattr(v, "numpy") else v for v in (*values, *outputs)]
        getattr(self.module, declaration.name)(*arrays)

class NumpyBackend(LaunchedBackend):
    name, file_name, device_type, devices, comments = "numpy", "numpy_kernels.py", "cpu", "CPUs", "#.*"

    def load(self, unit, source):
        return Library(source.path)

    def find_refusal(self, contract, dtype=None):
        if any(p.kind == "tensors" for p in contract.parameters):
            return "NumPy has no lists of arrays"
        return "NumPy has no bfloat16" if "bfloat16" in str(dtype) else super().find_refusal(contract, dtype)

BACKEND = NumpyBackend()
"""
OPERATOR = """
from jaxtyping import Float
from torch import Tensor
from opwright import operator

@operator("fourth_{name}::{name}")
def {name}(x: Float[Tensor, "*s"], y: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    return x * y + 1
"""
RIGHT = "import numpy\ndef {name}(x, y, out):\n    calls.append(x.shape)\n    out[...] = x * y + 1\ncalls = []\n"


def install(folder: Path, module: str, text: str) -> None:
    """Lays a package with a backend out as pip does."""
    (folder / f"{module}.py").write_text(text)
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[opwright.backends]\n{module} = {module}:BACKEND\n")


def declare(folder: Path, name: str, kernels: str, file: str = "numpy_kernels.py") -> None:
    (folder / f"{name}_op.py").write_text(OPERATOR.format(name=name))
    (folder / file).write_text(kernels.format(name=name))


CALL = """
import json, torch, scaled_op
from opwright.dispatch import kernels
op = scaled_op.scaled
x, y = torch.randn(2, 5), torch.randn(2, 5)
torch.testing.assert_close(op(x, y), x * y + 1)
torch.testing.assert_close(op(x.bfloat16(), y.bfloat16()), x.bfloat16() * y.bfloat16() + 1)
library = kernels.library_of(op.operator, "cpu")
print(json.dumps([list(shape) for shape in library.launch.__self__.module.calls] if library else None))
"""


def test_a_call_launches_a_kernel_of_a_fourth_backend(tmp_path, run_python) -> None:
    declare(tmp_path, "scaled", RIGHT)
    without = json.loads(run_python(CALL).stdout)
    install(tmp_path, "numpy_backend", NUMPY)
    found = json.loads(run_python(CALL).stdout)
    assert without is None  # the reference ran
    assert found == [[2, 5]]  # once, for bfloat16 is refused


VERIFY = """
import json, opwright, shifted_op
record = opwright.verify(shifted_op.shifted, checks=["numerics"], devices=["cpu"], isolated=False, quick=True)
print(json.dumps([record.passed, sorted(record.backends)]))
"""


@pytest.mark.parametrize(("constant", "is_right"), [("1", True), ("2", False)])
def test_verify_holds_its_kernel_to_the_reference(tmp_path, run_python, constant, is_right) -> None:
    install(tmp_path, "numpy_backend", NUMPY)
    declare(tmp_path, "shifted", RIGHT.replace("+ 1", f"+ {constant}"))
    passed, backends = json.loads(run_python(VERIFY).stdout)
    assert passed is is_right
    assert backends == ["cpu"]


def test_an_operator_that_it_cannot_take_is_an_error(tmp_path, run_python) -> None:
    install(tmp_path, "numpy_backend", NUMPY)
    declare(tmp_path, "total", "")
    text = (tmp_path / "total_op.py").read_text()
    changed = text.replace('x: Float[Tensor, "*s"], y: Float[Tensor, "*s"]', 'x: list[Float[Tensor, "n"]]')
    changed = changed.replace('-> Float[Tensor, "*s"]', '-> Float[Tensor, "n"]').replace("x * y + 1", "sum(x)")
    (tmp_path / "total_op.py").write_text(changed)
    program = (
        "import torch, total_op\nfrom opwright.errors import CompileError\n"
        "try:\n    total_op.total([torch.ones(3)])\nexcept CompileError as error:\n    print(error)"
    )
    said = run_python(program).stdout
    assert "its numpy kernel cannot be used: NumPy has no lists of arrays" in said


# Compile only, by the C++ compiler in place of a toolkit's: for a type of device that torch has no build for here.
HIP = """
from opwright.backends.protocol import CompiledBackend
from opwright.backends.toolchain import INCLUDE

class HipBackend(CompiledBackend):
    name, file_name, device_type, devices, is_gpu = "hip", "hip.cpp", "hip", "AMD GPUs", True
    stream, prelude = "hipStream_t", ("using hipStream_t = struct ihipStream_t*;",)

    def flags(self):
        return ("-std=c++20", "-fPIC", "-fvisibility=hidden")

    def is_in_torch(self):
        return False

    def is_device_here(self):
        return False

    def make_command(self, job, part=""):
        return [
            job.compiler.path, *job.flags, "-I", str(INCLUDE), "-include", job.header,
            "-MMD", "-MF", f"{job.stem}.d", "-c", str(job.path), "-o", f"{job.stem}.o",
        ]

BACKEND = HipBackend()
"""
HIP_KERNEL = """
#include <opwright/kernel.h>
template <typename T>
void {name}(opwright::View<const T, 1> x, opwright::View<const T, 1> y, opwright::View<T, 1> out, hipStream_t stream) {{}}
OPWRIGHT_KERNEL({name}, float)
"""
BUILD = """
import json, torch, on_hip_op
from opwright.build.glue import kernel_signature
from opwright.dispatch import kernels
operator = on_hip_op.on_hip.operator
torch.testing.assert_close(on_hip_op.on_hip(torch.ones(3), torch.ones(3)), torch.full((3,), 2.0))
(keys,) = kernels.libraries_of([operator])
library, is_new = kernels.build(*keys)
print(json.dumps([is_new, keys[0][1], kernel_signature(operator.declaration, "hip"), str(library.entry.library)]))
"""


@pytest.mark.compiler
def test_a_compiled_backend_for_a_device_of_its_own(tmp_path, run_python) -> None:
    install(tmp_path, "hip_backend", HIP)
    declare(tmp_path, "on_hip", HIP_KERNEL, "hip.cpp")
    is_new, device, signature, library = json.loads(run_python(BUILD).stdout)
    assert (is_new, device) == (True, "hip")
    assert signature.endswith("View<T, 1> output, hipStream_t stream)")
    assert b"HIP" in Path(library).read_bytes()  # the dispatcher's key that its glue registers for
