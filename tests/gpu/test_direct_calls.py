"""Calls on a GPU that bypass the dispatcher: on the right device and stream, with results of PyTorch's allocator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opwright_ops import bias_gelu
from opwright_ops.softmax.op import softmax
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from opwright.dispatch.direct import is_result

pytestmark = pytest.mark.gpu

REFERENCE = bias_gelu.operator.declaration.reference


class Watched:
    """Counts the calls that go directly."""

    def __init__(self, call: Any) -> None:
        self.count, self._call = 0, call

    def __call__(self, *values: Any) -> Any:
        found = self._call(*values)
        self.count += is_result(found)
        return found


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> Watched:
    for device in ("cpu", "cuda"):
        for _ in range(2):  # builds; finds out what direct calls need
            bias_gelu(torch.ones(1, 1, device=device), torch.ones(1, device=device))
    found = bias_gelu.operator.registration.direct
    watched = Watched(found.call)
    monkeypatch.setattr(found, "call", watched)
    return watched


def make(*shape: int, **options: Any) -> Tensor:
    return torch.randn(shape, device="cuda", **options)


def check(x: Tensor, b: Tensor) -> None:
    wanted = REFERENCE(x.double(), b.double()).to(x.dtype)
    torch.testing.assert_close(bias_gelu(x, b), wanted)


def test_a_backward_goes_directly_in_pytorchs_thread() -> None:
    x, b = make(3, 5, requires_grad=True), make(5)
    for _ in range(2):
        bias_gelu(x, b).sum().backward()
    direct = bias_gelu.operator.backward_operator.registration.direct
    assert "call_directly" in str(direct.call)


def test_both_devices_go_directly(direct: Watched) -> None:
    check(make(3, 5), make(5))
    check(torch.randn(3, 5), torch.randn(5))
    check(make(5, 3).t(), make(5))
    check(make(3, 5, dtype=torch.bfloat16), make(5, dtype=torch.bfloat16))
    with torch.inference_mode():
        check(make(3, 5), make(5))
    assert direct.count == 5
    with pytest.raises(ValueError, match="device"):
        bias_gelu(make(3, 5), torch.randn(5))


def test_what_needs_the_dispatcher_goes_there(direct: Watched) -> None:
    check(torch._neg_view(make(3, 5)), make(5))
    with torch.autocast("cuda", torch.bfloat16):
        bias_gelu(make(3, 5), make(5))
    with profile(activities=[ProfilerActivity.CPU]) as found:
        bias_gelu(make(3, 5), make(5))
    assert any("bias_gelu" in event.key for event in found.key_averages())
    assert direct.count == 0


def test_the_current_stream_is_taken(direct: Watched) -> None:
    x, b, stream = make(4096, 4096), make(4096), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(1)
        late = bias_gelu(x, b)
    assert not stream.query()  # the kernel waits behind the others
    stream.synchronize()
    torch.testing.assert_close(late, REFERENCE(torch.ones_like(x), b))
    assert direct.count == 1


def test_a_graph_holds_the_call(direct: Watched) -> None:
    x, b = make(64, 64), make(64)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        bias_gelu(x, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = bias_gelu(x, b)
    x.fill_(2)
    graph.replay()
    torch.testing.assert_close(result, REFERENCE(x, b))
    assert direct.count == 2


def test_a_recorded_stream_keeps_the_memory() -> None:
    """A result that another stream still reads is not handed out again, which PyTorch's allocator alone can know."""
    x, b, other = make(1 << 20, 4), make(4), torch.cuda.Stream()
    result = bias_gelu(x, b)
    kept = result.clone()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.cuda._sleep(100_000_000)
        seen = result.clone()
    result.record_stream(other)
    address = result.data_ptr()
    del result
    again = torch.zeros(1 << 20, 4, device="cuda")
    assert again.data_ptr() != address
    torch.cuda.synchronize()
    assert torch.equal(seen, kept)


def test_results_are_as_pytorch_makes_them(direct: Watched) -> None:
    before = torch.cuda.memory_allocated()
    result = bias_gelu(make(256, 256), make(256))
    assert torch.cuda.memory_allocated() >= before + result.numel() * 4
    result.resize_(512, 512)
    del result
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert direct.count == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_tensors_say_which_device(direct: Watched) -> None:
    x, b = torch.randn(3, 5, device="cuda:1"), torch.randn(5, device="cuda:1")
    check(x, b)
    assert torch.cuda.current_device() == 0
    assert direct.count == 1
    with pytest.raises(ValueError, match="device"):
        bias_gelu(x, b.to("cuda:0"))


def test_a_triton_kernel_goes_directly() -> None:
    rows = make(8, 512)
    for _ in range(2):
        found = softmax(rows)
    direct = softmax.operator.registration.direct.call(rows)
    torch.testing.assert_close(found, torch.softmax(rows, -1))
    assert torch.equal(direct, found)
