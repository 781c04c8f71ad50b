"""Gives PyTorch's own operators to verify as candidates: what it finds is a false alarm, or a defect of PyTorch.

Each operator of OPERATORS is verified against itself in float64, by all checks that a callable has, on samples and
on what verify makes of them, in float32, bfloat16 and float16. It takes about ten minutes on one core
with `OMP_NUM_THREADS=1`. Names after the command restrict the run to these operators.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from summary import Figure, update, write_raw

import opwright
from opwright.machine import machine_card
from opwright.records import builtins_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEEDS = (0, 1)


def normal(*shape: int) -> Callable[[torch.dtype], torch.Tensor]:
    return lambda dtype: torch.randn(shape).to(dtype)


def uniform(*shape: int) -> Callable[[torch.dtype], torch.Tensor]:
    return lambda dtype: torch.rand(shape).mul(0.98).add(0.01).to(dtype)


def indices(high: int, *shape: int) -> Callable[[torch.dtype], torch.Tensor]:
    return lambda dtype: torch.randint(high, shape)


def norm(function: Callable, shape: tuple[int, ...]) -> Callable:
    return lambda x, weight, bias: function(x, shape, weight, bias)


part = functools.partial
ROWS, IMAGE = normal(13, 67), normal(2, 6, 9, 11)
OPERATORS: dict[str, tuple[Callable, list[Callable]]] = {
    "gelu": (F.gelu, [ROWS]),
    "gelu tanh": (part(F.gelu, approximate="tanh"), [ROWS]),
    "silu": (F.silu, [ROWS]),
    "mish": (F.mish, [ROWS]),
    "softplus": (F.softplus, [ROWS]),
    "elu": (F.elu, [ROWS]),
    "selu": (F.selu, [ROWS]),
    "leaky_relu": (F.leaky_relu, [ROWS]),
    "hardswish": (F.hardswish, [ROWS]),
    "logsigmoid": (F.logsigmoid, [ROWS]),
    "relu": (F.relu, [ROWS]),
    "sigmoid": (torch.sigmoid, [ROWS]),
    "tanh": (torch.tanh, [ROWS]),
    "exp": (torch.exp, [ROWS]),
    "log": (torch.log, [uniform(13, 67)]),
    "sqrt": (torch.sqrt, [uniform(13, 67)]),
    "rsqrt": (torch.rsqrt, [uniform(13, 67)]),
    "sin": (torch.sin, [ROWS]),
    "erf": (torch.erf, [ROWS]),
    "expm1": (torch.expm1, [ROWS]),
    "log1p": (torch.log1p, [uniform(13, 67)]),
    "add": (torch.add, [ROWS, ROWS]),
    "mul": (torch.mul, [ROWS, normal(67)]),
    "div": (torch.div, [ROWS, ROWS]),
    "where": (lambda x, y: torch.where(x > 0, x, y), [ROWS, ROWS]),
    "clamp": (part(torch.clamp, min=-0.5, max=0.7), [ROWS]),
    "lerp": (torch.lerp, [ROWS, ROWS, uniform(13, 67)]),
    "softmax": (part(F.softmax, dim=-1), [ROWS]),
    "log_softmax": (part(F.log_softmax, dim=-1), [ROWS]),
    "logsumexp": (part(torch.logsumexp, dim=-1), [ROWS]),
    "layer_norm": (norm(F.layer_norm, (67,)), [ROWS, normal(67), normal(67)]),
    "rms_norm": (lambda x, weight: F.rms_norm(x, (67,), weight, 1e-5), [ROWS, normal(67)]),
    "group_norm": (lambda x, weight, bias: F.group_norm(x, 3, weight, bias), [IMAGE, normal(6), normal(6)]),
    "batch_norm": (
        lambda x, mean, var, weight, bias: F.batch_norm(x, mean, var, weight, bias),
        [IMAGE, normal(6), uniform(6), normal(6), normal(6)],
    ),
    "normalize": (F.normalize, [ROWS]),
    "sum": (part(torch.sum, dim=-1), [ROWS]),
    "mean": (part(torch.mean, dim=0), [ROWS]),
    "var": (part(torch.var, dim=-1), [ROWS]),
    "amax": (part(torch.amax, dim=-1), [ROWS]),
    "cumsum": (part(torch.cumsum, dim=-1), [ROWS]),
    "prod": (part(torch.prod, dim=-1), [uniform(13, 7)]),
    "sort": (part(torch.sort, dim=-1, stable=True), [ROWS]),
    "topk": (part(torch.topk, k=5, dim=-1), [ROWS]),
    "matmul": (torch.matmul, [normal(19, 33), normal(33, 21)]),
    "linear": (F.linear, [normal(19, 33), normal(21, 33), normal(21)]),
    "bmm": (torch.bmm, [normal(3, 19, 33), normal(3, 33, 21)]),
    "conv1d": (part(F.conv1d, padding=1), [normal(2, 6, 31), normal(8, 6, 3), normal(8)]),
    "conv2d": (part(F.conv2d, padding=1), [IMAGE, normal(8, 6, 3, 3), normal(8)]),
    "scaled_dot_product_attention": (
        F.scaled_dot_product_attention,
        [normal(2, 3, 17, 16), normal(2, 3, 19, 16), normal(2, 3, 19, 16)],
    ),
    "embedding": (F.embedding, [indices(11, 13, 7), normal(11, 16)]),
    "avg_pool2d": (part(F.avg_pool2d, kernel_size=3), [IMAGE]),
    "max_pool2d": (part(F.max_pool2d, kernel_size=3), [IMAGE]),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [IMAGE]),
    "pad": (part(F.pad, pad=(1, 2), mode="reflect"), [ROWS]),
    "cross_entropy": (F.cross_entropy, [ROWS, indices(67, 13)]),
    "mse_loss": (F.mse_loss, [ROWS, ROWS]),
    "smooth_l1_loss": (F.smooth_l1_loss, [ROWS, ROWS]),
    "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, [ROWS, uniform(13, 67)]),
    "kl_div": (part(F.kl_div, reduction="batchmean"), [ROWS, uniform(13, 67)]),
    "cosine_similarity": (F.cosine_similarity, [ROWS, ROWS]),
}  # fmt: skip


def samples_of(makers: list[Callable], dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    made = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        made.append(tuple(make(dtype) for make in makers))
    return made


def figures(result: dict[str, Any]) -> list[Figure]:
    ratios = [row["worst_ratio"] for row in result["rows"] if row["worst_ratio"] is not None]
    return [
        Figure("operators of PyTorch verified", result["operators"], "operators"),
        Figure("runs, an operator in a dtype", result["runs"], "runs"),
        Figure("runs with findings", result["with findings"], "runs"),
        Figure("cases", result["cases"], "cases"),
        Figure("largest error over its allowance", max(ratios), "ratio"),
        Figure("time", result["seconds"], "s"),
    ]


def main(names: list[str]) -> None:
    started, rows = time.time(), []
    for name in names or OPERATORS:
        function, makers = OPERATORS[name]
        for dtype in DTYPES:
            record = opwright.verify(function, reference=function, samples=samples_of(makers, dtype))
            rows.append(
                {
                    "operator": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "passed": record.passed,
                    "checks": sum(check.outcome != "skipped" for check in record.checks),
                    "cases": sum(check.cases for check in record.checks),
                    "worst_ratio": max(
                        (c.worst_ratio for c in record.checks if c.worst_ratio is not None), default=None
                    ),
                    "findings": [f"{f.check}: {f.case}: {f.message}" for f in record.failures],
                }
            )
            print(name, rows[-1]["dtype"], "passed" if record.passed else rows[-1]["findings"], flush=True)
    found = [row for row in rows if not row["passed"]]
    print(f"{len(rows)} runs of {len(names or OPERATORS)} operators, {len(found)} with findings")
    if names:
        return
    result = {
        "machine": builtins_of(machine_card()),
        "operators": len(OPERATORS),
        "runs": len(rows),
        "cases": sum(row["cases"] for row in rows),
        "with findings": len(found),
        "seconds": round(time.time() - started),
        "rows": rows,
    }
    write_raw("false_alarms", result)
    update(__file__, figures(result), result["machine"])


if __name__ == "__main__":
    main(sys.argv[1:])
