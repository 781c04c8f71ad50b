"""Does `opwright bench --base` see a difference where there is none?

    python benchmarks/same_twice.py [RUNS]

Compares `opwright_ops.bias_gelu` of this commit with itself, as `--base HEAD` does, in independent runs. Every row of a
run states its smallest visible difference; a run raises a false alarm when any of its rows is beyond it. With a stated
95 % for all rows of a run together, about one run of twenty may. Writes results/same_twice.json. A quarter of an
hour; meant to be run on a machine that does other things as well.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent

REQUEST = {
    "target": str(ROOT / "ops/src/opwright_ops/bias_gelu/op.py"),
    "skip": [],
    "against": [],
    "sweep": {"batch": [64, 512], "n": [1024]},
    "dtypes": ["float32"],
    "directions": None,
    "device": "cpu",
    "seconds": 1.0,
    "precision": 0.02,
    "measure_limits": False,
    "cpus": [],
    "mode": "pairs",
}


def main() -> None:
    from opwright.cli.base import Duel, checkout
    from opwright.records import builtins_of
    from opwright.verify.machine import machine_card

    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    card = builtins_of(machine_card())
    operator = {"name": "opwright_ops::bias_gelu", "machine": card, "device": "cpu"}
    runs = []
    with checkout(ROOT, "HEAD") as tree:
        for number in range(count):
            started = time.time()
            record = Duel(REQUEST, operator, "HEAD", ROOT, tree, threads=1).run()
            rows = [
                {
                    "input": f"{row.direction} {row.case}",
                    "difference %": round(100 * (row.ratio - 1), 3),
                    "visible %": round(100 * row.visible, 3),
                    "verdict": row.verdict,
                }
                for row in record.rows
            ]
            is_silent = all(row["verdict"] == "same" for row in rows)
            runs.append({"silent": is_silent, "seconds": round(time.time() - started, 1), "load": os.getloadavg()[0], "rows": rows})
            widest = max(row["visible %"] for row in rows)
            print(f"run {number + 1}: {'silent' if is_silent else 'ALARM'}, visible up to {widest:.1f} %, load {os.getloadavg()[0]:.1f}", flush=True)
    silent = sum(run["silent"] for run in runs)
    target = ROOT / "benchmarks" / "results" / "same_twice.json"
    found = {"machine": card, "runs": count, "silent": silent, "each": runs}
    target.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{silent} of {count} runs below the smallest visible difference\n{target}")


if __name__ == "__main__":
    main()
