"""What one launch of a Triton kernel costs the host, from C++, from Python, and through an operator.

    python benchmarks/triton_launch.py          above the stub driver: the host's own time, no GPU
    python benchmarks/triton_launch.py --gpu    on a GPU, beside the driver's calls, Triton and PyTorch

Every figure is the median of batches that run in turns within one process; the least is given, too. Above the stub, genuine
Triton is measured in each Python at .venv/triton-*/bin/python.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from summary import Figure, beside, update, write_raw

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ROOT / "src" / "opwright" / "native"
KERNELS = ROOT / "benchmarks" / "native" / "triton_launch_kernels.py"


def build(folder: Path) -> Path:
    """Compiles the measuring program with the runtime; returns its path."""
    sources = [*sorted((NATIVE / "src" / "triton").glob("*.cpp")), ROOT / "benchmarks/native/triton_launch.cpp"]
    program = folder / "triton_launch"
    worker = ROOT / "src" / "opwright" / "triton"
    command = ["g++", "-std=c++20", "-O2", f'-DOPWRIGHT_TRITON_WORKER_DIR="{worker}"', "-I", NATIVE / "include"]
    subprocess.run([*command, *sources, "-o", program, "-ldl", "-pthread"], check=True)
    return program


def build_stub(folder: Path) -> Path:
    stub = folder / "stub"
    stub.mkdir()
    sources = sorted((ROOT / "tests" / "native").glob("stub_*.c"))
    command = ["gcc", "-O2", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", stub / "libcuda.so.1"]
    subprocess.run([*command, *sources], check=True)
    return stub


def run_cpp(
    program: Path, python: Path | str, rounds: int, calls: int, folder: Path, env: dict[str, str], *more: Any
) -> Any:
    env = env | {"OPWRIGHT_TRITON": f"python={python}", "OPWRIGHT_CACHE_DIR": str(folder / "cache")}
    command = [program, KERNELS, str(rounds), str(calls), *more]
    return json.loads(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)


# Runs in a Python with Triton above the stub: Triton's own launch path with tensors that it does not look into.
GENUINE = """
import json, statistics, sys, time
sys.path.insert(0, sys.argv[1])
import genuine_launch as g
g.CUDA = g.Cuda()
active = g.StubDriver()
g.driver.set_active(active)
g.CUDA.use_device(0)
module = g.load_module(sys.argv[2], {})
x = [g.Tensor("fp32", 4096 * (i + 1), [4096], [1]) for i in range(3)]
rows = {
    "Triton, no arguments": lambda: module.nop0[(1,)](),
    "Triton, add of 3 (5 arguments)": lambda: module.add3[(4,)](x[0], x[1], x[2], 4095, 1024),
    "Triton, 19 arguments": lambda: module.nop19[(1,)](
        x[0], x[1], x[2], x[0], x[1], 2, 3, 4, 5, 6, 7, 8, 9, 10, 32, 32, 32, 32, 32),
}
found = {name: [] for name in rows}
for round in range(-1, 15):
    for name, run in rows.items():
        start = time.perf_counter_ns()
        for _ in range(2000):
            run()
        if round >= 0:
            found[name].append((time.perf_counter_ns() - start) / 2000)
print(json.dumps({name: [statistics.median(ns), min(ns)] for name, ns in found.items()}))
"""


def above_stub(folder: Path) -> dict[str, Any]:
    program, stub = build(folder), build_stub(folder)
    env = {**os.environ, "LD_LIBRARY_PATH": str(stub), "TRITON_LIBCUDA_PATH": str(stub)}
    pythons = {p.parents[1].name: p for p in sorted(ROOT.glob(".venv/triton-*/bin/python"))}
    found: dict[str, Any] = {}
    for name, python in pythons.items():
        shutil.rmtree(folder / "cache", ignore_errors=True)
        env["TRITON_CACHE_DIR"] = str(folder / name)
        cold = run_cpp(program, python, 1, 100, folder, env)
        found[f"{name}: first kernel, cold worker and cache, ms"] = cold["first_ms"]
        found[f"{name}: next kernel, same worker, ms"] = cold["second_ms"]
        warm = run_cpp(program, python, 1, 100, folder, env)
        found[f"{name}: first kernel, from the cache, ms"] = warm["first_ms"]
        (folder / "stub" / "libcuda.so").exists() or (folder / "stub" / "libcuda.so").symlink_to("libcuda.so.1")
        command = [str(python), "-c", GENUINE, str(ROOT / "tests" / "integration" / "triton"), str(KERNELS)]
        found[name] = json.loads(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)
    rows = [run_cpp(program, python, 25, 20000, folder, env)["rows"] for _ in range(3)]
    found["C++"] = {name: [min(r[name][i] for r in rows) for i in (0, 1)] for name in rows[0]}
    return found


def in_turns(rows: dict[str, Callable[[], Any]], rounds: int, calls: int, wait: Callable[[], None]) -> dict[str, Any]:
    found: dict[str, list[float]] = {name: [] for name in rows}
    for turn in range(-1, rounds):
        for name, run in rows.items():
            wait()
            start = time.perf_counter_ns()
            for _ in range(calls):
                run()
            spent = (time.perf_counter_ns() - start) / calls
            wait()
            if turn >= 0:
                found[name].append(spent)
    return {name: [round(statistics.median(ns), 1), round(min(ns), 1)] for name, ns in found.items()}


def on_gpu(folder: Path) -> dict[str, Any]:
    import importlib.util

    import torch
    import triton

    program = build(folder)
    found: dict[str, Any] = {}
    cold = run_cpp(program, sys.executable, 1, 100, folder, dict(os.environ, TRITON_CACHE_DIR=str(folder / "t")))
    found["first kernel, cold worker and cache, ms"] = cold["first_ms"]
    found["next kernel, same worker, ms"] = cold["second_ms"]
    env = dict(os.environ)
    found["first kernel, from the cache, ms"] = run_cpp(program, sys.executable, 1, 100, folder, env)["first_ms"]
    manifest, pack = folder / "manifest.json", folder / "bench.opk"
    recorded = folder / "keys.jsonl"
    record_env = env | {
        "OPWRIGHT_TRITON": f"python={sys.executable},record={recorded}",
        "OPWRIGHT_CACHE_DIR": str(folder / "cache"),
    }
    subprocess.run([program, KERNELS, "1", "100"], env=record_env, check=True, capture_output=True)
    keys = [json.loads(line) for line in recorded.read_text().splitlines()]
    arch = keys[0]["arch"]
    for key in keys:
        del key["arch"]
    manifest.write_text(json.dumps({"kernels": keys}))
    command = [sys.executable, "-m", "opwright", "pack", "build", manifest, "--out", pack, "--arch", str(arch)]
    subprocess.run(command, check=True, capture_output=True)
    times = [run_cpp(program, "/nonexistent", 1, 100, folder, env, pack)["first_ms"] for _ in range(5)]
    found["pack: open and first launch, ms (CUDA context there)"] = statistics.median(times)
    found["C++"] = run_cpp(program, sys.executable, 60, 400, folder, env)["rows"]

    spec = importlib.util.spec_from_file_location("triton_launch_kernels", KERNELS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x, y = torch.randn(2, 4096, device="cuda").unbind()
    x, y = x[:4095], y[:4095].clone()
    out = torch.empty_like(x)
    from opwright_ops.softmax.op import softmax

    rows32 = torch.randn(8, 512, device="cuda")

    sys.path.insert(0, str(KERNELS.parent))
    from triton_launch_peers import make_peers

    add_triton_op, add_custom_op = make_peers(module.add3)

    def softmax_in_triton(x: torch.Tensor) -> torch.Tensor:
        from opwright_ops.softmax import triton as own

        y = torch.empty_like(x)
        own.softmax(x, y)
        return y

    with torch.no_grad():
        softmax(rows32)
        rows: dict[str, Callable[[], Any]] = {
            "torch.add": lambda: torch.add(x, y),
            "torch.add, out": lambda: torch.add(x, y, out=out),
            "torch.softmax": lambda: torch.softmax(rows32, -1),
            "operator softmax (a Triton kernel), its function": lambda: softmax(rows32),
            "operator softmax through torch.ops": lambda: torch.ops.opwright_ops.softmax(rows32),
            "operator softmax through torch.ops, .default": lambda: torch.ops.opwright_ops.softmax.default(rows32),
            "its launch function in Python, with Triton": lambda: softmax_in_triton(rows32),
            "Triton, no arguments": lambda: module.nop0[(1,)](),
            "Triton, add of 3 (5 arguments)": lambda: module.add3[(4,)](x, y, out, 4095, 1024),
            "Triton, 19 arguments": lambda: module.nop19[(1,)](
                x, y, out, x, y, 2, 3, 4, 5, 6, 7, 8, 9, 10, 32, 32, 32, 32, 32
            ),
            "torch.library.triton_op, add": lambda: add_triton_op(x, y),
            "torch.library.custom_op, add": lambda: add_custom_op(x, y),
        }
        found["Python, no_grad"] = in_turns(rows, 25, 200, torch.cuda.synchronize)
    found["versions"] = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
    found["gpu"] = torch.cuda.get_device_name()
    return found


def figures(result: dict[str, Any]) -> list[Figure]:
    """Rows are medians, with the least as the lower end; of several Tritons those of the newest."""
    found = []
    versions = [part.partition(":")[0] for part in result if part.startswith("triton-")]
    newest = max(versions, default="", key=lambda name: [int(n) for n in re.findall(r"\d+", name)])
    for part, value in result.items():
        if part.startswith("triton-") and part.partition(":")[0] != newest:
            continue
        if isinstance(value, (int, float)):
            name, _, unit = part.partition(", ms")
            found.append(Figure(f"{name}{unit}", value, "ms"))
        elif part not in ("machine", "versions", "gpu"):
            calls = {name: times for name, times in value.items() if "cuLaunch" not in name and "cuCtx" not in name}
            for name, (median, least) in calls.items():
                driver = f"{'two threads: ' if 'two threads' in name else ''}cuLaunchKernelEx, add of 3"
                others = beside(median, {"cuLaunchKernelEx": value[driver][0]}) if driver in value else ""
                found.append(Figure(f"{part}: {name}", median, "ns", least, beside=others))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = on_gpu(Path(folder)) if options.gpu else above_stub(Path(folder))
    from opwright.machine import machine_card

    found = {"machine": vars(machine_card())} | found
    print(json.dumps(found, indent=1, default=str))
    write_raw("triton_launch_gpu" if options.gpu else "triton_launch", found)
    update(__file__, figures(found), found["machine"], group="on a GPU" if options.gpu else "above a stub driver")


if __name__ == "__main__":
    main()
