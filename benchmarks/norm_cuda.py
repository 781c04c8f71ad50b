"""Norms on a GPU beside eager and torch.compile: time with a cold L2, and the share of a copy of the same bytes.

    python benchmarks/norm_cuda.py [--dtype bfloat16] [--weight float32] [--without compile] [--only rms_norm]

A copy moves the bytes that an operator must move: what it reads and writes, each once. The backward goes through
`torch.autograd.grad`; below 100 us some of it is the host.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from cold_times import micros
from opwright_ops.norm import add_rms_norm, layer_norm, rms_norm
from summary import Figure, beside, update

from opwright.machine import machine_card
from opwright.records import builtins_of

SMALL = [(4096, 1024), (128, 4096)]
SHAPES = [(16384, 4096), (8192, 8192), (32768, 768), (4096, 32768), *SMALL]
Call = Callable[..., Any]


class Norm(NamedTuple):
    """A norm, and how often it must read or write all of a matrix."""

    ours: Call
    eager: Call
    columns: int  # inputs behind the matrices
    forward_passes: int
    backward_passes: int


def add_in_pytorch(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    total = x + residual
    return F.rms_norm(total, total.shape[-1:], weight, 1e-6), total


NORMS = {
    "rms_norm": Norm(rms_norm, lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6), 1, 2, 3),
    "add_rms_norm": Norm(add_rms_norm, add_in_pytorch, 1, 4, 4),
    "layer_norm": Norm(layer_norm, lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), 2, 2, 3),
}


def copy_micros(passes: int, rows: int, n: int, dtype: torch.dtype) -> float:
    """Returns the time of a copy_ that moves as many bytes as so many passes over a matrix."""
    x = torch.randn(rows * n * passes // 2, device="cuda").to(dtype)
    y = torch.empty_like(x)
    return micros(lambda: y.copy_(x))


def time_one(call: Call, inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Returns the times of forward and backward."""
    forward = micros(lambda: call(*inputs))
    leaves = [t.detach().requires_grad_() for t in inputs]
    outputs = call(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return forward, micros(lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True))


def compare(
    name: str, rows: int, n: int, dtype: torch.dtype, weight: torch.dtype, without: Sequence[str]
) -> list[dict[str, float]]:
    """Times a norm beside others on one shape, and shows it; returns the shares of a copy, forward and backward."""
    norm = NORMS[name]
    matrices = [torch.randn(rows, n, device="cuda", dtype=dtype) for _ in range(4)]
    count = norm.forward_passes // 2
    inputs = [*matrices[:count], *(torch.randn(n, device="cuda", dtype=weight) for _ in range(norm.columns))]
    copies = [copy_micros(passes, rows, n, dtype) for passes in (norm.forward_passes, norm.backward_passes)]
    torch.compiler.reset()
    candidates = {"opwright": norm.ours, "eager": norm.eager, "compile": torch.compile(norm.eager, dynamic=False)}
    times = {
        label: time_one(call, inputs, matrices[2 : 2 + count])
        for label, call in candidates.items()
        if label not in without
    }
    line = f"{name:12s} {rows:5d} x {n:5d}"
    for i, direction in enumerate(("forward", "backward")):
        line += f"  {direction} copy {copies[i]:6.1f}"
        line += "".join(f"  {label} {t[i]:6.1f} ({copies[i] / t[i]:4.2f})" for label, t in times.items())
    print(line, flush=True)
    return [{label: copies[i] / t[i] for label, t in times.items()} for i in range(2)]


def figures_of(name: str, kind: str, shares: Sequence[Sequence[dict[str, float]]]) -> list[Figure]:
    """Returns the median share of a copy over the shapes, with the smallest and the largest, for both directions."""
    figures = []
    for i, direction in enumerate(("forward", "backward")):
        each = {label: [shape[i][label] for shape in shares] for label in shares[0][i]}
        ours = each.pop("opwright")
        others = {label: statistics.median(values) for label, values in each.items()}
        median = statistics.median(ours)
        text = f"{name} {kind}, {direction}: share of a copy, median of {len(ours)} shapes"
        figures.append(Figure(text, median, "of a copy", min(ours), max(ours), beside(median, others)))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weight", help="the type of weights and biases, if not that of the rows")
    parser.add_argument("--without", nargs="*", default=[], choices=["eager", "compile"])
    parser.add_argument("--only", nargs="*", default=list(NORMS), choices=list(NORMS))
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    weight = getattr(torch, options.weight or options.dtype)
    shares = {
        (name, rows, n): compare(name, rows, n, dtype, weight, options.without)
        for rows, n in SHAPES
        for name in options.only
    }
    kind = options.dtype + (f", weights {options.weight}" if options.weight else "")
    figures = [
        figure
        for name in options.only
        for figure in figures_of(name, kind, [shares[(name, *shape)] for shape in SHAPES if shape not in SMALL])
    ]
    update(__file__, figures, builtins_of(machine_card(torch.device("cuda", 0))))


if __name__ == "__main__":
    main()
