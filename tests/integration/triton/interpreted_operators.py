"""Runs launch functions of the library's operators under Triton's interpreter; test_interpreter.py starts it.

TRITON_INTERPRET=1 python interpreted_operators.py FOLDER_OF_OPERATORS
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle


def erfcx(x: Any) -> Any:
    values = x.handle.data.astype(np.float64)
    scaled = np.vectorize(lambda v: math.erfc(v) * math.exp(v * v) if v < 20 else 0.5641895835 / v)(values)
    return tl.tensor(TensorHandle(scaled.astype(x.handle.data.dtype), x.handle.dtype), x.type)


def load(folder: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_triton", folder / name / "triton.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # The interpreter has no libdevice: these go through numpy and math.
    module.libdevice = SimpleNamespace(exp=lambda x: tl.exp(x), erfcx=erfcx)
    return module


def gelu(z: torch.Tensor, approximate: str) -> torch.Tensor:
    """In forms that do not cancel; F.gelu's do."""
    if approximate == "none":
        return 0.5 * z * torch.erfc(-z / math.sqrt(2))
    v = 1.702 * z if approximate == "quick" else math.sqrt(8 / math.pi) * z * (1 + 0.044715 * z * z)
    return z * torch.sigmoid(v)


def strided(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows with a gap between them, columns two apart."""
    return torch.randn(shape[0], 2 * shape[1] + 3, dtype=dtype)[:, : 2 * shape[1] : 2]


def main() -> None:
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    errors: dict[str, Any] = {}

    def compare(name: str, got: torch.Tensor, wanted: torch.Tensor, least: float = 1e-3) -> None:
        same = torch.isnan(got) & torch.isnan(wanted)
        scale = torch.finfo(got.dtype).eps * wanted.double().abs().clamp_min(least)
        error = ((got.double() - wanted.double()).abs() / scale).masked_fill(same, 0).max().item()
        errors[name] = error if error == error else "nan"

    softmax = load(folder, "softmax")
    # So that small rows take all kernels.
    softmax.RESIDENT, softmax.RESIDENT_BACKWARD, softmax.TILE, softmax.LANES = 256, 256, 64, 16
    for dtype in (torch.float32, torch.float64, torch.float16):
        for n in (1, 5, 300):
            x = strided(4, n, dtype=dtype)
            x[1, 0] = -torch.inf
            if n > 1:
                x[2, n // 2] = torch.nan
            output = torch.full((4, n), 7.0, dtype=dtype)
            softmax.softmax(x, output)
            compare(f"softmax {dtype} {n}", output, torch.softmax(x.double(), -1))
            values, grads = strided(4, n, dtype=dtype).softmax(-1), strided(4, n, dtype=dtype)
            softmax.softmax_backward(grads, values, output)
            total = (grads.double() * values.double()).sum(-1, keepdim=True)
            compare(f"softmax_backward {dtype} {n}", output, values.double() * (grads.double() - total))
    bias_gelu = load(folder, "bias_gelu")
    for dtype in (torch.float32, torch.float64):
        for approximate in ("none", "tanh", "quick"):
            x, bias = strided(3, 70, dtype=dtype), strided(1, 70, dtype=dtype)[0]
            x[0, 0] = -torch.inf
            output = torch.empty(3, 70, dtype=dtype)
            bias_gelu.bias_gelu(x, bias, approximate, output)
            z = (x + bias).double()
            compare(f"bias_gelu {dtype} {approximate}", output[:, 1:], gelu(z, approximate)[:, 1:])
            assert output[0, 0] == 0
    matmul = load(folder, "matmul_bias_gelu")
    # Elements of a row so far apart that 32 bits do not count to the last ones; memory of 300 pages is touched.
    columns = torch.empty(300, 8_500_000, dtype=torch.float16)
    far = columns[:, :23].normal_().t()
    cases = [
        (strided(m, k, dtype=torch.float32), strided(n, k, dtype=torch.float32))
        for m, n, k in ((5, 7, 9), (40, 70, 33))
    ]
    for x, w in (*cases, (far[:16], far[16:])):
        (m, k), n, dtype = x.shape, len(w), x.dtype
        bias = torch.randn(n, dtype=dtype)
        output = torch.empty(m, n, dtype=dtype)
        matmul.matmul_bias_gelu(x, w, bias, "tanh", output)
        wanted = gelu(x.double() @ w.double().T + bias.double(), "tanh")
        size = (x.abs() @ w.abs().T).max().item()  # what the rounding of the sum is relative to
        compare(f"matmul_bias_gelu {m} {n} {k}", output, wanted, size)
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
