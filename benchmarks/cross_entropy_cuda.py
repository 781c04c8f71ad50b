"""Log-sum-exp and cross-entropy on a GPU beside eager and torch.compile, and Liger's where it is installed.

    python benchmarks/cross_entropy_cuda.py [--dtype bfloat16] [--without compile]

Times with a cold L2, and the share of a copy of the bytes that must move: the logits once forward, twice backward. The
backward goes through `torch.autograd.grad`. Liger writes the gradient in its forward, into the logits: `both` alone.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from cold_times import micros
from opwright_ops import cross_entropy, logsumexp
from summary import Figure, beside, update

from opwright.machine import machine_card
from opwright.records import builtins_of

SHAPES = [(8192, 128256), (4096, 32768), (8192, 50257)]
Call = Callable[..., Any]


def copy_micros(elements: int, dtype: torch.dtype) -> float:
    """Returns the time of a copy_ of so many elements: they are read and written."""
    x = torch.randn(elements, device="cuda").to(dtype)
    y = torch.empty_like(x)
    return micros(lambda: y.copy_(x))


def liger(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    return LigerCrossEntropyFunction.apply(logits, target, None)[0]


def rivals_of(name: str, without: Sequence[str]) -> dict[str, Call]:
    eager: Call = F.cross_entropy if name == "cross_entropy" else lambda x, _: torch.logsumexp(x, -1)
    ours: Call = cross_entropy if name == "cross_entropy" else lambda x, _: logsumexp(x)
    found = {"opwright": ours, "eager": eager, "compile": torch.compile(eager, dynamic=False)}
    return {label: call for label, call in found.items() if label not in without}


def compare(name: str, rows: int, n: int, dtype: torch.dtype, without: Sequence[str]) -> list[dict[str, float]]:
    """Times an operator beside others on one shape, and shows it.

    Returns the shares of a copy: forward, backward, both.
    """
    logits = torch.randn(rows, n, device="cuda", dtype=dtype)
    target = torch.randint(0, n, (rows,), device="cuda")
    copy = copy_micros(rows * n, dtype)
    limits = [copy / 2, copy, 1.5 * copy]
    torch.compiler.reset()
    times: dict[str, list[float]] = {}
    for label, call in rivals_of(name, without).items():
        x = logits.clone().requires_grad_()
        forward = micros(lambda call=call: call(logits, target))
        y = call(x, target)
        grad = torch.ones_like(y)
        backward = micros(lambda y=y, x=x, grad=grad: torch.autograd.grad(y, x, grad, retain_graph=True))
        both = micros(lambda call=call, x=x, grad=grad: torch.autograd.grad(call(x, target), x, grad))
        times[label] = [forward, backward, both]
    line = f"{name:13s} {rows:5d} x {n:6d}  copy {copy:6.1f}"
    for label, found in times.items():
        shares = ", ".join(f"{t:6.1f} ({limit / t:4.2f})" for t, limit in zip(found, limits, strict=True))
        line += f"  {label} {shares}"
    if name == "cross_entropy" and importlib.util.find_spec("liger_kernel"):
        x = logits.clone().requires_grad_()
        line += f"  liger, into the logits {micros(lambda: liger(x, target).backward()):6.1f}"
    print(line, flush=True)
    return [{label: limits[i] / found[i] for label, found in times.items()} for i in range(3)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--without", nargs="*", default=[], choices=["eager", "compile"])
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    figures = []
    for name in ("logsumexp", "cross_entropy"):
        for rows, n in SHAPES:
            shares = compare(name, rows, n, dtype, options.without)
            if (rows, n) != SHAPES[0]:
                continue
            parts = zip(("forward", "backward", "both"), shares, strict=True)
            for part, found in list(parts)[2:] if name == "cross_entropy" else list(parts)[:2]:
                ours = found.pop("opwright")
                text = f"{name} {options.dtype} {rows} x {n}, {part}: share of a copy"
                figures.append(Figure(text, ours, "of a copy", beside=beside(ours, found)))
    update(__file__, figures, builtins_of(machine_card(torch.device("cuda", 0))))


if __name__ == "__main__":
    main()
