"""d_sigmoid on a GPU, 2^26 elements, aligned and offset by one, against eager: share of a copy's speed.

    python benchmarks/d_sigmoid_cuda.py

Device times with a cold L2, medians; the copy is a copy_ of as many bytes in the same rounds.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from opwright_ops.d_sigmoid import d_sigmoid
from summary import Figure, number, update, write_raw

import opwright
from opwright.records import builtins_of


def figures(result: dict[str, Any]) -> list[Figure]:
    """Groups the rows by input and direction: float32, and the other dtypes beside it."""
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        groups.setdefault(f"{row['input']}, {row['direction']}, float32", {})[row["dtype"]] = row
    found = []
    for name, rows in groups.items():
        own = rows.pop("float32")
        beside = [f"copy_ ({number(own['share of copy'])}x); eager ({number(own['eager'])}x)"]
        beside += [f"{dtype} {number(r['us'])} (copy_ {number(r['share of copy'])}x)" for dtype, r in rows.items()]
        found.append(Figure(name, own["us"], "us", beside="; ".join(beside)))
    return found


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here: this measures CUDA kernels")
    rows, machine = [], None
    verified = opwright.verify(d_sigmoid, devices=["cuda"], checks=["numerics", "gradient numerics"])
    if not verified.passed:
        sys.exit("it is not right, so it is not measured")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        whole = torch.randn((1 << 26) + 1, device="cuda").to(dtype)
        for what, z in (("whole", whole[:-1]), ("z[1:]", whole[1:])):
            record = opwright.bench(d_sigmoid, ["eager"], samples=[(z,)], seconds=0.15, verified=verified)
            machine = builtins_of(record.machine)
            for m in record.measurements:
                us = m.timings[0].median_us
                row = {
                    "dtype": str(dtype).removeprefix("torch."),
                    "input": what,
                    "direction": m.direction,
                    "us": round(us, 1),
                    "share of copy": round(m.copy_share, 3),
                    "eager": round(m.speedup_over("eager"), 2),
                }
                rows.append(row)
                print(row, flush=True)
    result = {"machine": machine, "rows": rows}
    write_raw("d_sigmoid_cuda", result)
    update(__file__, figures(result), machine)


if __name__ == "__main__":
    main()
