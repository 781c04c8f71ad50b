"""The CUDA kernels of the operator library: verify and large sizes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from jaxtyping import Float, Float32
from opwright_ops import LSTM
from opwright_ops.bias_gelu.op import bias_gelu, bias_gelu_backward
from opwright_ops.d_sigmoid.op import d_sigmoid
from opwright_ops.lstm.op import lstm
from opwright_ops.norm import add_rms_norm, layer_norm, rms_norm
from opwright_ops.norm import op as norm_operators
from torch import Tensor

import opwright
from opwright import operator


@pytest.mark.parametrize(
    "op",
    [bias_gelu, d_sigmoid, rms_norm, add_rms_norm, layer_norm, pytest.param(lstm, marks=pytest.mark.slow)],
    ids=["bias_gelu", "d_sigmoid", "rms_norm", "add_rms_norm", "layer_norm", "lstm"],
)
def test_verify(op) -> None:
    record = opwright.verify(op, devices=["cuda"])
    assert record.passed, record.failures
    assert "cuda" in record.backends


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [9, 200, 768, 4096, 5001, 20_000, 140_000, 262_144])
def test_a_row_of_a_norm_has_the_same_bits_in_every_batch(n: int, dtype: torch.dtype) -> None:
    """And at addresses that packs of 16 bytes do not begin at."""
    x, g = torch.randn(2, 41, n, device="cuda").to(dtype)
    weight = torch.randn(n, device="cuda").to(dtype)
    for norm in (rms_norm, layer_norm):

        def call(x: torch.Tensor, g: torch.Tensor, norm=norm) -> tuple[torch.Tensor, torch.Tensor]:
            x = x.detach().requires_grad_()
            y = norm(x, weight)
            return y.detach(), *torch.autograd.grad(y, x, g)

        wholes = call(x, g)
        shifted = torch.empty(n + 1, device="cuda", dtype=dtype)[1:].copy_(x[20])
        for row in (x[20:21], shifted[None]):
            for found, whole in zip(call(row, g[20:21]), wholes, strict=True):
                assert torch.equal(found[0], whole[20])


NARROW = """
#include <opwright/kernel.h>
#include "FOLDER/gpu_backward.cuh"
using namespace opwright_ops;

template <typename T>
void narrow(View<const T, 2> grad_output, View<const T, 2> input, View<const float, 1> weight,
            View<T, 2> grad_input, View<float, 1> grad_weight, View<float, 1> grad_bias,
            cudaStream_t stream) {
  Backward<T, float> p{.rows = input.size(0), .n = input.size(1), .grad_output = rows_of(grad_output),
                .input = rows_of(input), .weight = columns_of(weight), .eps = 1e-5f,
                .grad_input = rows_of(grad_input)};
  opwright::Device device = opwright::current_device();
  device.shared_bytes = 99 << 10;
  norm_backward<Norm::layer>(p, are_aligned(input, grad_output, grad_input, weight), grad_weight,
                                grad_bias, stream, device);
}
OPWRIGHT_KERNEL(narrow, float, opwright::bfloat16)
"""


def test_norms_where_a_block_has_less_shared_memory() -> None:
    """As on GPUs of compute capability 8.6, 8.9 and 12.0: 99 KiB, where this one has 227."""
    folder = str(Path(norm_operators.__file__).parent)

    @operator("narrow_gpu::narrow", cuda=NARROW.replace("FOLDER", folder))
    def narrow(
        grad_output: Float[Tensor, "m n"], input: Float[Tensor, "m n"], weight: Float32[Tensor, "n"]
    ) -> tuple[Float[Tensor, "m n"], Float32[Tensor, "n"], Float32[Tensor, "n"]]:
        reference = norm_operators.WITH_FLOAT32_WEIGHT.layer_norm_backward.operator.declaration.reference
        return reference(grad_output, input, weight, weight)

    for dtype in (torch.float32, torch.bfloat16):
        for n in (40, 200, 768, 4096, 5001, 12_288, 16_384, 40_000, 140_000):
            x, g = torch.randn(2, 41, n, device="cuda").to(dtype)
            weight = torch.randn(n, device="cuda")
            torch.testing.assert_close(
                narrow(g, x, weight),
                narrow.operator.declaration.reference(g, x, weight),
                rtol=1e-2 if dtype == torch.bfloat16 else 1e-4,
                atol=1e-3,
            )


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_more_than_2_31_elements(approximate: str) -> None:
    rows, n = 70_000, 32_768
    x = torch.randn(1, n, device="cuda").expand(rows, n).to(torch.bfloat16).contiguous()
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    row = bias_gelu(x[:1].clone(), bias, approximate=approximate)
    result = bias_gelu(x, bias, approximate=approximate)
    assert all(torch.equal(part, row.expand_as(part)) for part in result.split(4096))
    del result
    grad = torch.ones(1, 1, device="cuda", dtype=torch.bfloat16).expand(rows, n)
    grad_input, grad_bias = bias_gelu_backward(grad, x, bias, approximate=approximate)
    first, _ = bias_gelu_backward(grad[:1], x[:1].clone(), bias, approximate=approximate)
    assert all(torch.equal(part, first.expand_as(part)) for part in grad_input.split(4096))
    # Every row is the same, so the sum is rows times the unrounded gradient of one.
    x64, b64 = x[0].double(), bias.double()
    v = (x64 + b64).requires_grad_()
    (slope,) = torch.autograd.grad(_gelu64(v, approximate).sum(), v)
    torch.testing.assert_close(grad_bias.double(), rows * slope, rtol=1e-2, atol=rows * 2e-5)


def test_bias_gradient_of_more_than_65535_chunks() -> None:
    """Beyond that many, sums were written over each other."""
    rows, n = 400_000_000, 3
    x = torch.tensor([[-0.5, 0.25, 2.0]], device="cuda", dtype=torch.bfloat16)
    bias = torch.zeros(n, device="cuda", dtype=torch.bfloat16)
    grad = torch.ones(1, 1, device="cuda", dtype=torch.bfloat16)
    grad_input, grad_bias = bias_gelu_backward(grad.expand(rows, n), x.expand(rows, n), bias)
    v = x[0].double().requires_grad_()
    (slope,) = torch.autograd.grad(_gelu64(v, "none").sum(), v)
    torch.testing.assert_close(grad_bias.double(), rows * slope, rtol=1e-2, atol=0)
    assert all(torch.equal(part, grad_input[:1].expand_as(part)) for part in grad_input.split(1 << 26))


def _gelu64(v: torch.Tensor, approximate: str) -> torch.Tensor:
    if approximate == "none":
        return 0.5 * v * torch.erfc(-v / math.sqrt(2))
    return v * torch.sigmoid(math.sqrt(8 / math.pi) * (v + 0.044715 * v**3))


@pytest.mark.parametrize("shape", [(1, 1), (100_000, 3), (3, 100_000), (4096, 77), (1, 5), (66_000, 1)])
def test_bias_gradient_is_the_same_in_every_run(shape: tuple[int, int]) -> None:
    x, grad = torch.randn(2, *shape, device="cuda")
    bias = torch.randn(shape[1], device="cuda")
    first = bias_gelu_backward(grad, x, bias)
    for _ in range(20):
        again = bias_gelu_backward(grad, x, bias)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_empty_rows_zero_the_bias_gradient() -> None:
    x = torch.empty(0, 5, device="cuda", requires_grad=True)
    bias = torch.randn(5, device="cuda", requires_grad=True)
    bias_gelu(x, bias).sum().backward()
    assert torch.equal(bias.grad, torch.zeros_like(bias))


@pytest.mark.parametrize(
    "options",
    [{}, {"bidirectional": True, "num_layers": 2}, {"proj_size": 24}, {"batch_first": True, "bias": False}],
    ids=["plain", "both directions", "projection", "batch first"],
)
def test_lstm_is_that_of_pytorch(options: dict) -> None:
    theirs = torch.nn.LSTM(40, 48, device="cuda", dtype=torch.float64, **options)
    ours = LSTM.from_torch(theirs)
    x = torch.randn(11, 5, 40, device="cuda", dtype=torch.float64, requires_grad=True)
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        x, [11, 9, 9, 4, 1] if not options.get("batch_first") else [5, 5, 4, 3, 3, 3, 2, 2, 1, 1, 1],
        batch_first=options.get("batch_first", False),
    )  # fmt: skip
    for given in (x, packed):
        found = []
        for module in (theirs, ours):
            output, state = module(given)
            tensors = [output if isinstance(output, torch.Tensor) else output.data, *state]
            loss = sum((t * torch.arange(t.numel(), device="cuda").view_as(t).cos()).sum() for t in tensors)
            found.append([*tensors, *torch.autograd.grad(loss, [x, *module.parameters()], retain_graph=True)])
        torch.testing.assert_close(*found)
