"""Does `opwright bench --base` see a difference where there is none, and one that is there?

    python benchmarks/same_twice.py [RUNS]

Compares `opwright_ops.bias_gelu` of this commit with itself, as `--base HEAD` does, in independent runs. Every row of a
run states its smallest visible difference; a run raises a false alarm when any of its rows is beyond it. With a stated
99 % for all rows of a run together, about one run of a hundred may. Then an operator whose kernel does its work 1000 times
over is compared with versions of it that do it 1030 and 1100 times. Twenty minutes; meant for a machine
that does other things as well.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from summary import Figure, update, write_raw

ROOT = Path(__file__).parent.parent

REQUEST = {
    "target": str(ROOT / "ops/src/opwright_ops/bias_gelu/op.py"),
    "skip": [],
    "against": [],
    "sweep": {"batch": [64, 512], "n": [1024], "approximate": ["tanh"]},
    "dtypes": ["float32"],
    "directions": None,
    "device": "cpu",
    "seconds": 1.0,
    "precision": 0.02,
    "measure_limits": False,
    "cpus": [],
    "mode": "pairs",
    "candidate": "",
    "timeout_s": 120.0,
}

# Each round waits for the one before it, so the time is that of the rounds.
WORK = '''
from jaxtyping import Float
from torch import Tensor
from opwright import operator

@operator("known::work", cpu="""
#include <opwright/kernel.h>
template <typename T>
void work(opwright::View<const T, 1> x, opwright::View<T, 1> output) {{
  for (int64_t i = 0; i < x.size(0); ++i) {{
    T value = x(i);
    for (int round = 0; round < {rounds}; ++round) value = T(1) - value;
    output(i) = value;
  }}
}}
OPWRIGHT_KERNEL(work, float)
""")
def work(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 1
'''
ROUNDS = 1000
SLOWER = (3, 10)  # percent


def run(request: dict[str, Any], name: str, card: dict[str, Any], root: Path, tree: Path) -> dict[str, Any]:
    from opwright.bench.versions import Duel
    from opwright.bench.worker import Watcher

    started = time.time()
    operator = {"name": name, "machine": card, "device": "cpu"}
    record = Duel(request, operator, "HEAD", root, tree, threads=1).run(Watcher())
    rows = [
        {
            "input": f"{row.direction} {row.case}",
            "difference %": round(100 * (row.ratio - 1), 3),
            "visible %": round(100 * row.visible, 3),
            "verdict": row.verdict,
        }
        for row in record.rows
    ]
    return {"seconds": round(time.time() - started, 1), "load": os.getloadavg()[0], "rows": rows}


def same(count: int, card: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields what is found of a version beside itself."""
    from opwright.bench.versions import checkout

    with checkout(ROOT, "HEAD") as tree:
        for number in range(count):
            found = run(REQUEST, "opwright_ops::bias_gelu", card, ROOT, tree)
            is_silent = all(row["verdict"] == "same" for row in found["rows"])
            widest = max(row["visible %"] for row in found["rows"])
            print(
                f"run {number + 1}: {'silent' if is_silent else 'ALARM'}, visible up to {widest:.1f} %, "
                f"load {found['load']:.1f}",
                flush=True,
            )
            yield {"silent": is_silent, **found}


def slower(count: int, percent: int, card: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields what is found of a version that is slower by so much, and whether it was seen."""
    from opwright.bench.versions import checkout

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve() / "repository"
        subprocess.run(["git", "init", "--quiet", str(root)], check=True)
        file = root / "work.py"
        file.write_text(WORK.format(rounds=ROUNDS))
        who = ("-c", "user.name=benchmark", "-c", "user.email=benchmark")
        subprocess.run(["git", "-C", str(root), "add", "."], check=True)
        subprocess.run(["git", "-C", str(root), *who, "commit", "--quiet", "-m", "base"], check=True)
        file.write_text(WORK.format(rounds=ROUNDS + ROUNDS * percent // 100))
        request = {**REQUEST, "target": str(file), "sweep": {"n": [256]}, "directions": ["forward"]}
        with checkout(root, "HEAD") as tree:
            for number in range(count):
                found = run(request, "known::work", card, root, tree)
                (row,) = found["rows"]
                print(f"run {number + 1}, {percent} % slower: {row}", flush=True)
                yield {"seen": row["verdict"] == "slower", **found}


def figures(result: dict[str, Any]) -> list[Figure]:
    visible = [row["visible %"] for run in result["each"] for row in run["rows"]]
    found = [
        Figure("same version: runs", result["runs"], "runs"),
        Figure("same version: runs without a false alarm", result["silent"], f"runs of {result['runs']}"),
        Figure("smallest visible difference", statistics.median(visible), "%", min(visible), max(visible)),
    ]
    for percent in SLOWER:
        if f"{percent} % slower" in result:
            runs = result[f"{percent} % slower"]
            found.append(Figure(f"{percent} % slower: seen", runs["seen"], f"runs of {len(runs['each'])}"))
    return found


def main() -> None:
    from opwright.machine import machine_card
    from opwright.records import builtins_of

    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    card = builtins_of(machine_card())
    found: dict[str, Any] = {"machine": card, "runs": 0, "silent": 0, "each": []}
    for one in same(count, card):
        found["each"].append(one)
        found |= {"runs": len(found["each"]), "silent": sum(r["silent"] for r in found["each"])}
        write_raw("same_twice", found)
    for percent in SLOWER:
        runs = list(slower(count // 2, percent, card))
        found[f"{percent} % slower"] = {"seen": sum(r["seen"] for r in runs), "each": runs}
        write_raw("same_twice", found)
    update(__file__, figures(found), card)
    print(f"{found['silent']} of {count} runs of the same version below the smallest visible difference")
    for percent in SLOWER:
        runs = found[f"{percent} % slower"]
        print(f"{percent} % slower: seen in {runs['seen']} of {len(runs['each'])} runs")


if __name__ == "__main__":
    main()
