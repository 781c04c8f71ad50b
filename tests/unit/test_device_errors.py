"""What a CUDA error becomes: the operator, the GPU and the remedy. No GPU is needed: torch.cuda is played."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from jaxtyping import Float
from syrupy.assertion import SnapshotAssertion
from torch import Tensor

from opwright import operator
from opwright.dispatch.device_errors import device_error

_CASES = {
    "no code": "CUDA error 209, cudaErrorNoKernelImageForDevice: no kernel image is available for execution",
    "old driver": "CUDA error 35, cudaErrorInsufficientDriver: CUDA driver version is insufficient",
    "new PTX": "CUDA error 222, cudaErrorUnsupportedPtxVersion: the provided PTX was compiled with an unsupported toolchain.",
    "bad launch": "CUDA error 9, cudaErrorInvalidConfiguration: invalid configuration argument",
    "fault": "CUDA error 700, cudaErrorIllegalAddress: an illegal memory access was encountered",
    "memory": "CUDA error 2, cudaErrorMemoryAllocation: out of memory",
    "output": "cannot allocate `output` [2000000, 2000000]",
    "scratch": "out of memory for scratch space",
}


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch):
    """Returns an operator, and plays a GPU."""

    @operator("device_errors::faulty", cuda="// no kernel\n")
    def faulty(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x

    played = {
        "get_device_properties": lambda device: SimpleNamespace(name="Some GPU", major=9, minor=0),
        "get_device_capability": lambda device: (9, 0),
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda device: (3 << 30, 80 << 30),
        "memory_reserved": lambda device: 70 << 30,
        "synchronize": lambda device: None,
    }
    for name, function in played.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr("opwright.backends.cuda.driver_version", lambda: "12.4")
    monkeypatch.setattr("opwright.backends.cuda.gpu_architectures", lambda: ("90",))
    monkeypatch.setattr("opwright.dispatch.kernels.is_loaded", lambda operator, backend: True)
    monkeypatch.setattr("opwright.dispatch.registry.operators", {"device_errors::faulty": faulty.operator})
    monkeypatch.delenv("OPWRIGHT_ARCH", raising=False)
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    return faulty.operator.declaration.name


def _inputs() -> list:
    return [SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), dtype=torch.float32, shape=torch.Size([7]))]


@pytest.mark.parametrize("case", _CASES)
def test_messages(case: str, faulty, snapshot: SnapshotAssertion) -> None:
    error = device_error(faulty, _CASES[case], _inputs())
    assert f"{type(error).__name__}\n{error}" == snapshot


def test_memory_is_pytorchs_own_error(faulty) -> None:
    for case in ("memory", "output", "scratch"):
        assert isinstance(device_error(faulty, _CASES[case], _inputs()), torch.OutOfMemoryError)


def test_a_blocking_launch_accuses_the_operator_itself(faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    error = device_error(faulty, _CASES["fault"], _inputs())
    assert "its kernel faulted" in str(error)
    assert "suspects" not in str(error)


def test_a_named_architecture_is_part_of_the_remedy(faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPWRIGHT_ARCH", "80")
    assert "`export OPWRIGHT_ARCH=90`" in str(device_error(faulty, _CASES["no code"], _inputs()))


def test_a_dead_device_is_found_behind_any_failure(faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_error(faulty, "aoti_torch_copy_ failed", _inputs()) is None

    def raise_error(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", raise_error)
    assert "faulted" in str(device_error(faulty, "aoti_torch_copy_ failed", _inputs()))
    # Asking would end a capture, so nothing is asked.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert device_error(faulty, "aoti_torch_copy_ failed", _inputs()) is None


def test_other_devices_have_other_errors(faulty) -> None:
    assert device_error(faulty, _CASES["fault"], [torch.zeros(3)]) is None
