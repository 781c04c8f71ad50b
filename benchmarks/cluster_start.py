"""A job of 1,000 ranks on 125 nodes starts on one operator: builds, fetches, bytes, and the time to the last rank.

    python benchmarks/cluster_start.py [NODES] [RANKS]

Each node is a thread with a store of its own, its ranks are calls one after the other, and each request to the shared
store takes 20 ms more. The kernel is compiled and archives are unpacked as ever, by two cores for all nodes: on a real
cluster each node has its own. One minute.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from opwright_ops.d_sigmoid.op import d_sigmoid
from summary import Figure, update, write_raw

from opwright.build.compile import ensure_built
from opwright.build.request import make_request
from opwright.build.store import Store
from opwright.dispatch import kernels
from opwright.machine import machine_card
from opwright.records import builtins_of

LATENCY = 0.02  # seconds
Counts = dict[str, int]


class Network:
    """Delays and counts what goes to the shared store and comes from it."""

    def __init__(self) -> None:
        self.counts: Counts = {"requests": 0, "bytes": 0}
        self._lock = threading.Lock()

    def watch(self, name: str) -> None:
        """Puts itself in front of a method of the file system."""
        method = getattr(LocalFileSystem, name)

        def call(files: LocalFileSystem, *args: Any, **kwargs: Any) -> Any:
            time.sleep(LATENCY)
            result = method(files, *args, **kwargs)
            moved = result if isinstance(result, bytes) else args[1] if name == "pipe_file" else b""
            with self._lock:
                self.counts["requests"] += 1
                self.counts["bytes"] += len(moved)
            return result

        setattr(LocalFileSystem, name, call)


def start(nodes: int, ranks: int, folder: Path) -> dict[str, float]:
    """Lets all nodes start; returns builds, fetches and the seconds to the last rank."""
    (keys,) = kernels.libraries_of([d_sigmoid.operator])
    request = make_request(kernels.unit_of(keys[0]), ["cpu"])
    compiled: list[bool] = []

    def run_node(number: int) -> None:
        for _ in range(ranks):
            compiled.append(ensure_built(request, Store(folder / f"node{number}"))[1])

    threads = [threading.Thread(target=run_node, args=[number]) for number in range(nodes)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fetches = sum(1 for number in range(nodes) if (folder / f"node{number}").exists()) - sum(compiled)
    return {"builds": sum(compiled), "fetches": fetches, "seconds": time.perf_counter() - started}


def figures(result: dict[str, Any]) -> list[Figure]:
    """Returns one row for each count."""
    label = f"{result['nodes']} nodes with {result['ranks']} ranks each: "
    units = {"builds": "builds", "fetches": "fetches", "requests": "requests", "bytes": "bytes", "seconds": "s"}
    return [Figure(f"{label}{name}", result[name], unit) for name, unit in units.items()]


def main() -> None:
    nodes, ranks = (int(text) for text in (*sys.argv[1:], "125", "8")[:2])
    network = Network()
    for name in ("cat_file", "pipe_file", "ls", "modified", "rm_file", "mv"):
        network.watch(name)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"OPWRIGHT_REMOTE_STORE": f"{folder}/shared", "OPWRIGHT_REMOTE_PUSH": "1"}
        found = start(nodes, ranks, Path(folder))
    card = builtins_of(machine_card())
    result = {"machine": card, "nodes": nodes, "ranks": ranks, **found, **network.counts}
    print({name: value for name, value in result.items() if name != "machine"})
    write_raw("cluster_start", result)
    update(__file__, figures(result), card)


if __name__ == "__main__":
    main()
