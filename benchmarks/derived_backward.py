"""What a derived backward costs: operators without `@name.backward` beside the same formula in eager PyTorch.

    python benchmarks/derived_backward.py [ROUNDS]

The README's example with its C++ kernel, and an RMS norm that has neither a kernel nor a backward of its own. One thread.
Eager and operator take turns; the table shows the best time of each, the result the medians as well. A speed is eager's
time divided by the operator's. Two minutes.
"""

from __future__ import annotations

import importlib.util
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from summary import Figure, beside, update, write_raw
from torch import Tensor

from opwright import operator
from opwright.machine import machine_card
from opwright.records import builtins_of

ROOT = Path(__file__).parent.parent
SIZES = [(64, 64), (256, 256), (1024, 1024), (4096, 4096)]
MIN_SAMPLE_S = 1e-3  # a sample repeats short calls until the clock's steps do not matter


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


@operator("derived_backward::rms_norm")
def rms_norm(x: Float[Tensor, "*batch n"], weight: Float[Tensor, "n"], eps: float = 1e-6) -> Float[Tensor, "*batch n"]:
    return plain_rms_norm(x, weight, eps)


def readme_example() -> Callable[..., Tensor]:
    """Returns the operator that the README declares."""
    text = (ROOT / "README.md").read_text()
    block = re.search(r"```python\n(# scale_shift\.py\n.*?)```", text, re.DOTALL)[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scale_shift.py"
        path.write_text(block)
        spec = importlib.util.spec_from_file_location("scale_shift", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["scale_shift"] = module
        spec.loader.exec_module(module)
        module.scale_shift(torch.ones(1, 1), torch.ones(1))  # built while the file is there
    return module.scale_shift


def calls_of(function: Callable[..., Tensor], shape: tuple[int, int]) -> dict[str, Callable[[], Any]]:
    """Returns what is timed, by the direction's name."""
    torch.manual_seed(0)
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(shape[1], requires_grad=True)
    gradient = torch.randn(shape)
    kept = function(x, weight)
    return {
        "forward": lambda: function(x, weight),
        "backward": lambda: torch.autograd.grad(kept, (x, weight), gradient, retain_graph=True),
        "step": lambda: torch.autograd.grad(function(x, weight), (x, weight), gradient),
    }


def seconds_of(call: Callable[[], Any], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count


def compare(eager: Callable[[], Any], ours: Callable[[], Any], rounds: int) -> dict[str, float]:
    for _ in range(5):
        eager(), ours()
    count = max(1, round(MIN_SAMPLE_S / seconds_of(eager, 3)))
    times: dict[str, list[float]] = {"eager": [], "operator": []}
    for i in range(rounds):
        turns = [("eager", eager), ("operator", ours)]
        for name, call in turns if i % 2 else reversed(turns):
            times[name].append(1e6 * seconds_of(call, count))
    best = {name: min(values) for name, values in times.items()}
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "eager_us": round(best["eager"], 2),
        "operator_us": round(best["operator"], 2),
        "speed": round(best["eager"] / best["operator"], 3),
        "speed_of_medians": round(median["eager"] / median["operator"], 3),
    }


def figures(result: dict[str, Any]) -> list[Figure]:
    found = [
        Figure(f"{name}: speed of forward and backward over eager's, median of {len(SIZES)} sizes", value, "x")
        for name, value in result["median_step_speed"].items()
    ]
    for row in result["rows"]:
        if row["direction"] == "step":
            size, us = "x".join(map(str, row["shape"])), row["operator_us"]
            name = f"{row['operator']}: {size} forward and backward"
            found.append(Figure(name, us, "us", beside=beside(us, {"eager": row["eager_us"]})))
    return found


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    torch.set_num_threads(1)
    pairs = {
        "scale_shift (README, C++ kernel)": (lambda x, s: x * s + 0.0, readme_example()),
        "rms_norm (no kernel)": (plain_rms_norm, rms_norm),
    }
    rows: list[dict[str, Any]] = []
    print(f"{'operator':34}{'size':>11}{'':3}{'direction':10}{'eager us':>11}{'ours us':>11}{'speed':>8}")
    for name, (eager, ours) in pairs.items():
        for shape in SIZES:
            eager_calls, our_calls = calls_of(eager, shape), calls_of(ours, shape)
            for direction in eager_calls:
                found = compare(eager_calls[direction], our_calls[direction], rounds)
                rows.append({"operator": name, "shape": list(shape), "direction": direction, **found})
                size = "x".join(map(str, shape))
                print(
                    f"{name:34}{size:>11}{'':3}{direction:10}{found['eager_us']:11.1f}"
                    f"{found['operator_us']:11.1f}{found['speed']:8.2f}",
                    flush=True,
                )
    steps = {name: [r["speed"] for r in rows if r["operator"] == name and r["direction"] == "step"] for name in pairs}
    medians = {name: round(statistics.median(values), 3) for name, values in steps.items()}
    for name, value in medians.items():
        print(f"{name}: forward and backward at {value:.2f}x of eager's speed, the median of {len(SIZES)} sizes")
    result = {"machine": builtins_of(machine_card()), "rounds": rounds, "median_step_speed": medians, "rows": rows}
    write_raw("derived_backward", result)
    update(__file__, figures(result), result["machine"])


if __name__ == "__main__":
    main()
