"""opwright.cpp_extension beside torch.utils.cpp_extension: cold, warm, shared and incremental builds.

    python benchmarks/extensions.py [--rounds 3]
    python benchmarks/extensions.py --headers  # their sizes alone; two minutes

Each figure is taken in a process of its own, torch's and Opwright's in turn; medians. The import of torch is not
part of any. torch needs ninja. It takes about ten minutes on two cores.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from summary import Figure, update, write_raw

from opwright.machine import machine_card
from opwright.records import builtins_of

SOURCE = """
torch::Tensor d_sigmoid(torch::Tensor z) {{
  auto s = torch::sigmoid(z);
  return (1 - s) * s + {value};
}}
"""
INLINE = """
import sys, time, torch
{load}
start = time.perf_counter()
module = load_inline({name!r}, [{source!r}], functions=["d_sigmoid"], **{options!r})
seconds = time.perf_counter() - start
assert module.d_sigmoid(torch.zeros(1)).item() == 0.25 + {value}
print(module.__file__, seconds)
"""
DLOPEN = """
import importlib.util, sys, time, torch
start = time.perf_counter()
spec = importlib.util.spec_from_file_location("d_sigmoid_module", {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(time.perf_counter() - start)
"""
FILES = """
import sys, time, torch
{load}
start = time.perf_counter()
module = load("ten", {files!r})
seconds = time.perf_counter() - start
assert module.f9(torch.zeros(1)).item() == {value}
print(seconds)
"""
LOADS = {
    "torch": "from torch.utils.cpp_extension import load, load_inline",
    "opwright": "from opwright.cpp_extension import load, load_inline",
}


def run(program: str, folder: Path) -> list[str]:
    """Runs a program with stores of its own below a folder; returns the words that it prints, seconds last."""
    stores = {"OPWRIGHT_CACHE_DIR": str(folder / "store"), "TORCH_EXTENSIONS_DIR": str(folder / "torch")}
    environment = {**os.environ, **stores}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stderr[-3000:])
    return result.stdout.split()


def inline(who: str, folder: Path, value: int, name: str = "d_sigmoid_module", **options: object) -> float:
    source = SOURCE.format(value=value)
    program = INLINE.format(load=LOADS[who], name=name, source=source, options=options, value=value)
    path, seconds = run(program, folder)
    (folder / "last.txt").write_text(path)
    return float(seconds)


def dlopen(folder: Path) -> float:
    """Imports the library that `inline` has loaded last, without any of it."""
    return float(run(DLOPEN.format(path=(folder / "last.txt").read_text()), folder)[-1])


def load_files(who: str, folder: Path, value: int) -> float:
    files = ten_sources(folder / "ten", value)
    return float(run(FILES.format(load=LOADS[who], files=files, value=value), folder)[-1])


def wait_for_headers(store: Path) -> float:
    """Waits until the headers that a build left to be precompiled are; returns the seconds."""
    start = time.perf_counter()
    while len(list((store / "opwright-store/headers").glob("*/prefix.h.gch"))) < 2:
        if time.perf_counter() - start > 600:
            sys.exit("the headers were not precompiled in ten minutes")
        time.sleep(0.2)
    return time.perf_counter() - start


def header_megabytes(folder: Path) -> list[float]:
    """Returns the sizes of the precompiled headers that `load_inline` leaves, in MB, the smaller one first."""
    inline("opwright", folder, 1)
    wait_for_headers(folder / "store")
    return sorted(path.stat().st_size / 1e6 for path in (folder / "store").rglob("prefix.h.gch"))


def ten_sources(folder: Path, value: int) -> list[str]:
    """Writes ten sources, of which the tenth depends on `value`."""
    folder.mkdir(exist_ok=True)
    for i in range(10):
        body = f"torch::Tensor f{i}(torch::Tensor x) {{ return x + {value if i == 9 else i}; }}\n"
        if i == 0:
            declared = "".join(f"torch::Tensor f{k}(torch::Tensor x);\n" for k in range(1, 10))
            bound = "".join(f'  m.def("f{k}", &f{k});\n' for k in range(10))
            body += f"{declared}PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{\n{bound}}}\n"
        path = folder / f"f{i}.cpp"
        text = f"#include <torch/extension.h>\n{body}"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    return [str(folder / f"f{i}.cpp") for i in range(10)]


def round_of(folder: Path, number: int) -> dict[str, float]:
    found: dict[str, float] = {}
    found["torch, cold, -O0"] = inline("torch", folder, 100 * number)
    found["torch, warm"] = inline("torch", folder, 100 * number)
    found["cold, -O2"] = inline("opwright", folder, 100 * number)
    found["precompiling the headers, in the background"] = wait_for_headers(folder / "store")
    found["same source, other process and name"] = inline("opwright", folder, 100 * number, "other_name")
    found["warm"] = inline("opwright", folder, 100 * number)
    found["of which dlopen"] = dlopen(folder)
    found["body changed, headers precompiled, -O2"] = inline("opwright", folder, 100 * number + 1)
    found["all new, headers precompiled, -O2"] = inline(
        "opwright", folder, 100 * number + 2, "third", extra_cflags=["-DD_SIGMOID_NEW"]
    )
    return found


def figures(result: dict[str, Any]) -> list[Figure]:
    found = []
    for name, seconds in result["seconds"].items():
        rounds = [each[name] for each in result["rounds"] if name in each] or [seconds]
        found.append(Figure(name, seconds, "s", min(rounds), max(rounds)))
    return found


def measure_headers() -> None:
    with tempfile.TemporaryDirectory() as folder:
        sizes = header_megabytes(Path(folder))
    found = [Figure(name, size, "MB") for name, size in zip(("smaller", "larger"), sizes, strict=True)]
    for figure in found:
        print(f"{figure.name} precompiled header {figure.value:8.1f} MB")
    update(__file__, found, builtins_of(machine_card()), group="precompiled headers")


def main() -> None:
    if "--headers" in sys.argv:
        return measure_headers()
    rounds = int(sys.argv[sys.argv.index("--rounds") + 1]) if "--rounds" in sys.argv else 3
    every: list[dict[str, float]] = []
    for number in range(1, rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            every.append(round_of(Path(folder), number))
        print(f"round {number}: " + ", ".join(f"{k} {v:.2f}" for k, v in every[-1].items()), flush=True)
    with tempfile.TemporaryDirectory() as name:
        ten = {f"ten sources, {who}": load_files(who, Path(name), 1) for who in LOADS}
        wait_for_headers(Path(name) / "store")
        ten |= {f"one of ten changed, {who}": load_files(who, Path(name), 2 + i) for i, who in enumerate(LOADS)}
    seconds = {key: statistics.median(each[key] for each in every) for key in every[0]} | ten
    for name, value in seconds.items():
        print(f"{name:<48} {value:8.3f} s")
    result = {"machine": builtins_of(machine_card()), "rounds": every, "seconds": seconds}
    write_raw("extensions", result)
    update(__file__, figures(result), result["machine"])
    measure_headers()


if __name__ == "__main__":
    main()
