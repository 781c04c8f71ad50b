"""The operators whose GPU kernel is a Triton kernel, beside eager and torch.compile, on a GPU.

    python benchmarks/triton_operators.py

Times are medians of triton.testing.do_bench in microseconds (it clears L2 before each call), of one process, in turns.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from opwright_ops import matmul_bias_gelu, softmax
from summary import Figure, beside, update, write_raw

from opwright.machine import machine_card

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def measure(rows: dict[str, Callable[[], Any]]) -> dict[str, float]:
    from triton.testing import do_bench

    found: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(3):
        for name, run in rows.items():
            found[name].append(do_bench(run, warmup=10, rep=40, return_mode="median") * 1e3)
    return {name: round(statistics.median(us), 2) for name, us in found.items()}


def softmax_rows(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, float]:
    x = torch.randn(shape, device="cuda", dtype=dtype)
    compiled = torch.compile(lambda x: torch.softmax(x, -1))
    out = torch.empty_like(x)
    return measure(
        {
            "copy_": lambda: out.copy_(x),
            "torch.softmax": lambda: torch.softmax(x, -1),
            "torch.compile": lambda: compiled(x),
            "opwright": lambda: softmax(x),
        }
    )


def softmax_backward_rows(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, float]:
    """Times the operators of the gradient, without autograd; the copy moves as many bytes, three passes."""
    grads = torch.randn(shape, device="cuda", dtype=dtype)
    output = torch.randn(shape, device="cuda", dtype=dtype).softmax(-1)
    compiled = torch.compile(lambda grads, output: output * (grads - (grads * output).sum(-1, keepdim=True)))
    source = torch.randn(3 * grads.numel() // 2, device="cuda").to(dtype)
    target = torch.empty_like(source)
    return measure(
        {
            "copy_": lambda: target.copy_(source),
            "torch.softmax": lambda: torch.ops.aten._softmax_backward_data(grads, output, -1, dtype),
            "torch.compile": lambda: compiled(grads, output),
            "opwright": lambda: torch.ops.opwright_ops.softmax_backward(grads, output),
        }
    )


def matmul_rows(shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, float]:
    m, n, k = shape
    x, w = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(n, k, device="cuda", dtype=dtype)
    b = torch.randn(n, device="cuda", dtype=dtype)
    compiled = torch.compile(lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"))
    return measure(
        {
            "linear alone": lambda: F.linear(x, w, b),
            "linear, gelu": lambda: F.gelu(F.linear(x, w, b), approximate="tanh"),
            "torch.compile": lambda: compiled(x, w, b),
            "opwright": lambda: matmul_bias_gelu(x, w, b, approximate="tanh"),
        }
    )


def figures(result: dict[str, Any]) -> list[Figure]:
    found = []
    for name, times in result.items():
        if name != "machine":
            others = {candidate: us for candidate, us in times.items() if candidate != "opwright"}
            found.append(Figure(name, times["opwright"], "us", beside=beside(times["opwright"], others)))
    return found


def main() -> None:
    found: dict[str, Any] = {"machine": vars(machine_card(torch.device("cuda")))}
    with torch.no_grad():
        for name in ("f32", "bf16"):
            for shape in ((4096, 1000), (4096, 4096), (512, 65536)):
                found[f"softmax {shape} {name}"] = softmax_rows(shape, DTYPES[name])
            for shape in ((4096, 4096), (512, 65536)):
                found[f"softmax {shape} {name}, backward"] = softmax_backward_rows(shape, DTYPES[name])
        for name in ("f16", "bf16"):
            for shape in ((16, 4096, 4096), (512, 4096, 1024), (8192, 4096, 4096)):
                found[f"matmul_bias_gelu {shape} {name}"] = matmul_rows(shape, DTYPES[name])
    print(json.dumps(found, indent=1, default=str))
    write_raw("triton_operators", found)
    update(__file__, figures(found), found["machine"])


if __name__ == "__main__":
    main()
