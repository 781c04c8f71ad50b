"""bias_gelu on the CPU against eager and torch.compile: all variants, dtypes and sizes.

    python benchmarks/bias_gelu.py [--quick | --others]

Candidates are timed in turn on the same inputs; the outputs are allocated by each. torch.compile gets static
shapes and a fresh compile for each input, and is timed at (512, 4096) only, where the bar is. The records go to
results/raw, for `opwright report`. `--quick` measures (512, 4096) only, `--others` all other sizes only.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from typing import Any

import torch
from opwright_ops.bias_gelu import bias_gelu
from summary import RAW, Figure, figure_of, update

import opwright
from opwright.records import BenchRecord, Measurement, builtins_of, save

MAIN = {"batch": [(512,)], "n": [4096]}
# From 4,096 elements up: one row, wide rows, tall and narrow, odd widths, larger than the caches.
OTHERS = {
    "rows": {"batch": [(1,), (16,), (4096,)], "n": [4096]},
    "odd": {"batch": [(64,), (1024,)], "n": [77, 1000, 4095]},
    "extreme": {"batch": [(1,)], "n": [1 << 20]},
    "narrow": {"batch": [(1 << 18,)], "n": [3, 8]},
}


def gelu_backward_and_sum(grad_output, input, bias, *, approximate):
    """Eager's backward without autograd's own cost; `input` stands for the sum input + bias that eager keeps."""
    grad_input = torch.ops.aten.gelu_backward(grad_output, input, approximate=approximate)
    return grad_input, grad_input.sum(0)


def show(m: Measurement) -> None:
    rivals = "  ".join(f"{t.candidate} {m.speedup_over(t.candidate):5.2f}x" for t in m.timings[1:])
    ours = m.timings[0]
    print(
        f"{m.direction:<8} {m.case:<58} {ours.median_us:10.1f} us +-{100 * ours.noise:3.0f} %  {rivals}",
        flush=True,
    )


def figures(record: dict[str, Any]) -> list[Figure]:
    return [figure_of(m, f"{m['case'].partition(' approximate')[0]}, {m['direction']}") for m in record["measurements"]]


def ranges(record: dict[str, Any]) -> list[Figure]:
    """The sizes of a sweep in one row for each direction: how many times faster than eager."""
    found = []
    for direction in ("forward", "backward"):
        timings = [m["timings"] for m in record["measurements"] if m["direction"] == direction]
        ratios = [eager["median_us"] / ours["median_us"] for ours, eager in timings]
        name = f"speed-up over eager, {direction}, median of {len(ratios)} inputs"
        found.append(Figure(name, statistics.median(ratios), "x", min(ratios), max(ratios)))
    return found


def publish(record: BenchRecord, name: str, rows: list[Figure]) -> None:
    save(record, RAW / f"bias_gelu_{name}.json")
    update(__file__, rows, builtins_of(record.machine), group=name.replace("_", " "))


def main() -> None:
    verified = opwright.verify(bias_gelu, checks=["numerics", "gradients"])
    slower: list[Measurement] = []
    runs = {"": {"main": MAIN}, "_other_sizes": OTHERS}
    if "--quick" in sys.argv:
        del runs["_other_sizes"]
    if "--others" in sys.argv:
        del runs[""]
    for (ending, sweeps), approximate in itertools.product(runs.items(), ("tanh", "none", "quick")):
        measurements: list[Measurement] = []
        for sweep in sweeps.values():
            record = opwright.bench(
                bias_gelu,
                ["eager", "compile"] if not ending else ["eager"],
                sweep=sweep,
                options={"approximate": approximate},
                dtypes=[torch.float32, torch.bfloat16, torch.float16, torch.float64],
                seconds=math.prod(map(len, sweep.values())) * (12.0 if not ending else 1.0),
                verified=verified,
            )
            measurements += record.measurements
            for m in record.measurements:
                show(m)
        record.measurements = measurements
        slower += [m for m in measurements if m.speedup_over("eager") < 1]
        rows = ranges if ending else figures
        publish(record, f"{approximate}{ending}", rows(builtins_of(record)))
    print("the backward alone, without autograd's engine on either side:")
    record = opwright.bench(
        bias_gelu.operator.backward_operator.function,
        [gelu_backward_and_sum],
        sweep=MAIN,
        options={"approximate": "tanh"},
        directions=["forward"],
        seconds=30.0,
        verified=verified,
    )
    for m in record.measurements:
        show(m)
    publish(record, "backward_alone", figures(builtins_of(record)))
    print(f"slower than eager: {len(slower)} of all inputs")
    for m in slower:
        show(m)


if __name__ == "__main__":
    main()
