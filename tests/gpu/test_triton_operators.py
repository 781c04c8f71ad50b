"""Operators whose GPU kernel is a Triton kernel: right, differentiable, compiled, captured."""

from __future__ import annotations

import math
from pathlib import Path

import opwright_ops
import pytest
import torch
from opwright_ops import matmul_bias_gelu, softmax

import opwright

pytest.importorskip("triton")


def failures_of(record: opwright.VerifyRecord) -> str:
    return "\n".join(f"{f.check}: {f.case}: {f.message}" for f in record.failures)


def test_verify_softmax() -> None:
    record = opwright.verify(softmax)
    assert record.passed, failures_of(record)


@pytest.mark.xfail(
    strict=False,
    reason="16-bit sums that cancel to a millionth of their terms miss the allowance by up to 1.4 times in 1 of 1000 "
    "elements; PyTorch's own gradient of the reference does, too",
)
def test_verify_matmul_bias_gelu() -> None:
    record = opwright.verify(matmul_bias_gelu)
    assert record.passed, failures_of(record)


def test_verify_bias_gelu_in_triton(tmp_path: Path) -> None:
    """The declaration chooses triton.py where there is a cuda.cu, too."""
    folder = Path(opwright_ops.__file__).parent / "bias_gelu"
    text = (
        (folder / "op.py")
        .read_text()
        .replace('@operator("opwright_ops::bias_gelu")', '@operator("chosen::bias_gelu", cuda="triton.py")')
    )
    (tmp_path / "op.py").write_text(text)
    (tmp_path / "triton.py").write_text((folder / "triton.py").read_text())
    import importlib.util

    spec = importlib.util.spec_from_file_location("chosen_bias_gelu", tmp_path / "op.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    record = opwright.verify(module.bias_gelu)
    assert record.passed, failures_of(record)


@pytest.mark.parametrize("n", [1, 3, 64, 1000, 16384, 16385, 100_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_softmax_sizes(n: int, dtype: torch.dtype) -> None:
    x = torch.randn(7, n, device="cuda", dtype=dtype) * 5
    x[3, -1] = -torch.inf if n > 1 else 0
    expected = torch.softmax(x.double(), -1)
    # The difference to the largest element is rounded, then taken to the exponent; 16-bit types in float32.
    wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    far = (x.double() - x.double().amax(-1, keepdim=True)).abs().nan_to_num(posinf=0)
    allowed = (torch.finfo(dtype).eps + (6 + far) * wide.eps) * expected + torch.finfo(dtype).smallest_normal
    assert ((softmax(x).double() - expected).abs() <= allowed).all()


def test_softmax_special_rows() -> None:
    for n in (100, 20_000):
        x = torch.zeros(4, n, device="cuda")
        x[0] = -torch.inf
        x[1, 5] = torch.nan
        x[2, 5] = torch.inf
        torch.testing.assert_close(softmax(x), torch.softmax(x, -1), equal_nan=True)


@pytest.mark.parametrize("shape", [(1, 1, 1), (17, 33, 65), (300, 1000, 77), (1024, 512, 2048)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_matmul_sizes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    m, n, k = shape
    x = torch.randn(m, k, device="cuda", dtype=dtype)
    w = torch.randn(n, k, device="cuda", dtype=dtype) / k**0.5
    b = torch.randn(n, device="cuda", dtype=dtype)
    expected = torch.nn.functional.gelu(x.double() @ w.double().T + b.double())
    got = matmul_bias_gelu(x, w, b)
    # Four times the error of PyTorch's product in that dtype, and eight roundings of the sum of the terms' sizes.
    own = torch.nn.functional.gelu(torch.nn.functional.linear(x, w, b))
    size = (x.double().abs() @ w.double().abs().T + b.double().abs()).max()
    allowed = 4 * (own.double() - expected).abs().max() + 8 * torch.finfo(dtype).eps * size
    assert (got.double() - expected).abs().max() <= allowed


def test_offsets_beyond_32_bits() -> None:
    """Columns of 20,000,000 elements: the depth of a tile times their stride was computed in 32 bits."""
    columns = torch.empty(257, 20_000_000, device="cuda", dtype=torch.float16)
    near = torch.randn(257, 50, device="cuda", dtype=torch.float16) / 4
    far = columns[:, -50:].copy_(near).t()
    near = near.t()
    for k in (256, 257):
        x, w = slice(None, 16), slice(16, None)
        got = matmul_bias_gelu(far[x, :k], far[w, :k], far[w, 0])
        torch.testing.assert_close(got, matmul_bias_gelu(near[x, :k], near[w, :k], near[w, 0]), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(softmax(far), softmax(near))


def test_a_row_of_almost_2_31_elements() -> None:
    x = torch.zeros(1, (1 << 31) - 1, device="cuda", dtype=torch.bfloat16)
    x[0, :2] = x[0, -2:] = 30.0  # exp(30) each, beside a sum of 2^31
    y = softmax(x)
    wanted = torch.tensor([1.0, math.exp(-30)], dtype=torch.float64) / (4 + (x.numel() - 4) * math.exp(-30))
    edges = [y[0, 0].item(), y[0, -1].item(), y[0, 2].item(), y[0, -3].item(), y[0, 1 << 30].item()]
    expected = wanted[[0, 0, 1, 1, 1]]
    torch.testing.assert_close(torch.tensor(edges, dtype=torch.float64), expected, rtol=2**-8, atol=0)


def test_in_torch_compile() -> None:
    x = torch.randn(64, 1000, device="cuda", requires_grad=True)
    compiled = torch.compile(lambda x: softmax(x * 2).square().sum(), fullgraph=True)
    expected = torch.autograd.grad(torch.softmax(x * 2, -1).square().sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], expected)


def test_in_a_graph() -> None:
    x = torch.randn(64, 1000, device="cuda")
    softmax(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = softmax(x)
    x.normal_()
    graph.replay()
    torch.testing.assert_close(y, torch.softmax(x, -1))
