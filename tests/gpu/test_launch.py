"""What the glue does for every CUDA kernel: device, stream, memory, errors of a launch."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch
from gpu_operators import broken, column_sums, early, late, plus, square, total
from jaxtyping import Float
from opwright_ops.bias_gelu.op import bias_gelu, bias_gelu_backward
from opwright_ops.d_sigmoid.op import d_sigmoid

import opwright
from opwright.errors import DeviceError, KernelError


def test_the_kernel_runs_for_its_dtypes_and_the_reference_for_others() -> None:
    for dtype, amount in [(torch.float32, 1), (torch.float16, 1), (torch.bfloat16, 1), (torch.float64, 1000)]:
        x = torch.arange(1000, device="cuda").to(dtype)
        assert torch.equal(plus(x), x + amount)
        assert torch.equal(torch.ops.gpu_tests.plus(x), x + amount)


def test_layouts() -> None:
    x = torch.arange(6000.0, device="cuda").view(20, 10, 30)
    for view in (x[:, 3:5], x.mT, x[..., ::7], x[5:6].expand(4, 10, 30), x.flip(0), x[0, 0, 1:], x[3, 3, 3]):
        assert torch.equal(plus(view), view + 1)
    out = torch.zeros(10, 20, 30, device="cuda").transpose(0, 1)
    assert plus(x, out=out) is out
    assert torch.equal(out, x + 1)


@pytest.mark.parametrize("max_chunks", [1, 3, 65535])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_column_sums_of_grids_of_several_layers(dtype: torch.dtype, max_chunks: int) -> None:
    """Sums of layers had one place, and the end of the last row was counted twice."""
    generator = torch.Generator("cuda").manual_seed(0)
    for rows, n in [(1, 1), (13, 1964), (777, 3), (5000, 77), (9000, 8), (300, 1030), (2050, 256), (101, 100)]:
        # Sums of small integers are exact; 16 bits hold those of a few of them.
        x = torch.randint(-3, 4, (rows, n), device="cuda", generator=generator).to(dtype)
        if dtype == torch.float16:
            x[torch.randperm(rows, device="cuda", generator=generator)[500:]] = 0
        for view in (x, x.mT.contiguous().mT, x[:, 1:]):
            if view.numel():
                assert torch.equal(column_sums(view, max_chunks), view.double().sum(0).to(dtype)), (rows, n)


_BETWEEN = {
    "d_sigmoid": lambda x: d_sigmoid(x),
    "bias_gelu": lambda x: bias_gelu(x, x[0]),
    "bias_gelu_backward": lambda x: bias_gelu_backward(x, x, x[0]),
}


@pytest.mark.parametrize("between", _BETWEEN)
def test_no_kernel_starts_beside_the_one_before_the_last(between: str) -> None:
    """A kernel between two others let the third start while it still waited for the first."""
    one, small = torch.ones(1, device="cuda"), torch.randn(64, 64, device="cuda")
    late(one, 1), _BETWEEN[between](small), early(one)  # they are built
    for _ in range(5):
        written = torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        late(one, 2_000_000, out=written)  # 2 ms
        _BETWEEN[between](small)
        assert early(written).item() == 1


def test_empty_tensors_launch_nothing() -> None:
    for shape in [(0,), (5, 0), (0, 5)]:
        assert plus(torch.empty(shape, device="cuda")).shape == shape
    torch.cuda.synchronize()
    assert torch.equal(plus(torch.zeros(3, device="cuda")).cpu(), torch.ones(3))


def _slow_input(stream: torch.cuda.Stream, size: int = 1 << 20) -> torch.Tensor:
    """Returns a tensor of zeros that a stream will fill with 7 after a while."""
    x = torch.zeros(size, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(7)
    return x


@pytest.mark.parametrize("entry", [plus, torch.ops.gpu_tests.plus], ids=["function", "torch.ops"])
def test_side_stream_with_a_slow_producer(entry) -> None:
    entry(torch.zeros(4, device="cuda"))  # it is built
    stream = torch.cuda.Stream()
    x = _slow_input(stream)
    with torch.cuda.stream(stream):
        result = entry(x)
    assert not stream.query(), "the producer has finished before the call returned: nothing was tried"
    stream.synchronize()
    assert torch.equal(result, torch.full_like(x, 8))


def test_backward_on_a_side_stream() -> None:
    stream = torch.cuda.Stream()
    x = _slow_input(stream)
    with torch.cuda.stream(stream):
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(plus(leaf), leaf, x)
    stream.synchronize()
    assert torch.equal(gradient, torch.full_like(x, 17))


def test_scratch_is_not_handed_on_before_the_stream_is_through() -> None:
    x = torch.ones(100_000, device="cuda")
    results = []
    for _ in range(200):
        results.append(total(x))
        torch.full((128,), float("nan"), device="cuda")  # takes the scratch memory of the call before
    assert torch.equal(torch.stack(results).cpu(), torch.full((200,), 100_000.0))


@pytest.mark.two_gpus
def test_a_device_that_is_not_current() -> None:
    x = torch.arange(1000.0, device="cuda:1")
    assert torch.cuda.current_device() == 0
    result = plus(x)
    assert result.device == x.device
    assert torch.equal(result, x + 1)
    assert torch.cuda.current_device() == 0
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(plus(leaf), leaf, torch.ones_like(x))
    assert torch.equal(gradient, torch.full_like(x, 11))
    assert torch.equal(total(x.new_ones(10)).cpu(), torch.tensor(10.0))
    # And from a thread that has never touched a device.
    found = []
    thread = threading.Thread(target=lambda: found.append(plus(x)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], x + 1)


@pytest.mark.two_gpus
def test_tensors_on_two_devices_are_refused() -> None:
    from opwright_ops.bias_gelu import bias_gelu

    with pytest.raises(DeviceError, match="bias"):
        bias_gelu(torch.ones(2, 3, device="cuda:0"), torch.ones(3, device="cuda:1"))


def test_graph_capture_and_replay_with_new_data() -> None:
    x = torch.zeros(5000, device="cuda")
    plus(x), total(x)  # built and loaded before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, s = plus(plus(x)), total(x)
    for value in (3.0, -5.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, x + 2)
        assert s.item() == 5000 * value


def test_first_load_inside_a_capture(start_python) -> None:
    # A library that is loaded during a capture brings its module to the device there.
    program = """
import sys, torch
sys.path.insert(0, {folder!r})
from gpu_operators import plus
x = torch.zeros(100, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = plus(x)
x.fill_(4)
graph.replay()
print(y.sum().item())
"""
    assert start_python(program.format(folder=str(Path(__file__).parent))).stdout.strip() == "500.0"


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile(mode: str) -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, mode=mode)
    def function(x):
        return plus(x * 2) * 3

    for value in (1.0, 2.0, 3.0, 4.0):
        x = torch.full((300,), value, device="cuda")
        assert torch.equal(function(x).clone(), (x * 2 + 1) * 3)


def test_compiled_gradient() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: plus(x) * 2, fullgraph=True)
    x = torch.ones(64, device="cuda", requires_grad=True)
    compiled(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 12))


def test_threads() -> None:
    inputs = [torch.full((100_000,), float(i), device="cuda") for i in range(8)]
    torch.cuda.synchronize()
    failures: list[int] = []

    def work(index: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(200):
                x = plus(inputs[index])
            stream.synchronize()
            if not torch.equal(x, inputs[index] + 1):
                failures.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_autocast() -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert plus(torch.ones(3, device="cuda", dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_more_than_2_31_elements() -> None:
    size = (1 << 31) + 77
    x = torch.zeros(size, dtype=torch.float16, device="cuda")
    x[-3:] = 5
    result = plus(x)
    assert result[-4:].tolist() == [1, 6, 6, 6]
    assert result[(1 << 31) - 1 : (1 << 31) + 2].tolist() == [1, 1, 1]
    assert torch.equal(result[: 1 << 20], torch.ones(1 << 20, dtype=torch.float16, device="cuda"))


def test_swap_of_a_cuda_kernel() -> None:
    def declare(amount: int):
        source = """
#include <opwright/kernel.h>
__global__ void swapped_kernel(float* y) { y[threadIdx.x] = AMOUNT; }
template <typename T>
void swapped(opwright::View<const T, 1> x, opwright::View<T, 1> output, cudaStream_t stream) {
  swapped_kernel<<<1, unsigned(x.size(0)), 0, stream>>>(output.data());
}
OPWRIGHT_KERNEL(swapped, float)
""".replace("AMOUNT", str(amount))

        def swapped(x):
            return x.clone()

        swapped.__annotations__ = {"x": Float[torch.Tensor, "n"], "return": Float[torch.Tensor, "n"]}
        return opwright.operator("gpu_tests::swapped", cuda=source)(swapped)

    x = torch.zeros(4, device="cuda")
    first = declare(1)
    assert first(x).tolist() == [1] * 4
    second = declare(2)
    assert second(x).tolist() == [2] * 4
    assert first(x).tolist() == [2] * 4


def test_out_of_memory_is_told_and_the_next_call_works() -> None:
    x = torch.ones(2_000_000, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match=r"(?s)`square`.*not enough memory.*2000000, 2000000.*MiB free"):
        square(x)
    assert torch.equal(square(x[:3]).cpu(), torch.ones(3, 3))


def test_a_bad_launch_is_told_and_the_next_call_works() -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(KernelError, match=r"(?s)`broken`.*cannot be launched.*sm_.*cudaErrorInvalid"):
        broken(x, False, 4096)
    with pytest.raises(KernelError, match="threads must not be negative"):
        broken(x, False, -1)
    assert broken(x, False, 1)[0] == 1
    assert torch.equal(plus(x), x + 1)


def test_the_kernel_of_the_guide() -> None:
    guide = Path(__file__).parents[2] / "docs" / "guides" / "cuda.md"
    (source,) = re.findall(r"```cuda\n(.*?)```", guide.read_text(), re.DOTALL)

    @opwright.operator("gpu_tests::scale_shift", cuda=source)
    def scale_shift(
        input: Float[torch.Tensor, "*batch n"], scale: Float[torch.Tensor, "n"], shift: float = 0.0
    ) -> Float[torch.Tensor, "*batch n"]:
        return input * scale + shift

    record = opwright.verify(scale_shift, devices=["cuda"])
    assert record.passed, record.failures
    assert "cuda" in record.backends
