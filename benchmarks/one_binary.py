"""Proves that one binary serves several machines.

    python benchmarks/one_binary.py build FOLDER     on any machine with nvcc, without a GPU
    python benchmarks/one_binary.py run FOLDER       on another, with another torch, Python and a GPU

`build` builds the CPU and CUDA kernels of each operator of the library into one file and copies it to
FOLDER. `run` loads those files, takes every compiler away, checks the operators with verify on every
device there is, and writes what it found to FOLDER/one_binary.json and to the summary.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from summary import Figure, update

# A machine that is not this one: no -march=native.
_PORTABLE = "-march=x86-64-v3"
_OPERATORS = ("bias_gelu", "d_sigmoid")


def operators():
    import opwright_ops

    return [getattr(opwright_ops, name).operator for name in _OPERATORS]


def build(folder: Path) -> None:
    os.environ["OPWRIGHT_CXXFLAGS"] = _PORTABLE
    os.environ.setdefault("OPWRIGHT_ARCH", "80,90")
    from opwright.dispatch import kernels

    for operator in operators():
        (keys,) = kernels.libraries_of([operator])
        library, _ = kernels.build(*keys)
        target = folder / operator.declaration.name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(library.entry.path, target)
        print(f"{target}: {library.entry.library.stat().st_size >> 10} KiB, {[key[1] for key in keys]}")
    (folder / "built_on.json").write_text(json.dumps(versions()))


def figures(result: dict[str, Any]) -> list[Figure]:
    built, found = result["built on"], []
    for name in (name for name in _OPERATORS if name in result):
        row = result[name]
        failed, ran = len(row["failures"]), ", ".join(row["ran"])
        cases = f"{row['cases']} cases, {failed} failures; kernels {ran}; built with torch {built['torch']}"
        found.append(Figure(f"{name}: checks passed", row["checks"], "checks", beside=cases))
    return found


def machine_of(versions: dict[str, str]) -> str:
    place = versions["gpu"] if versions["gpu"] != "none" else "a machine without a GPU"
    return f"{place}, torch {versions['torch']}, Python {versions['python']}, {versions['libc']}"


def run(folder: Path) -> None:
    path = os.environ["PATH"]
    os.environ["PATH"] = "/nonexistent"
    os.environ["OPWRIGHT_CACHE_DIR"] = str(folder / "no-store")
    import opwright
    from opwright.backends.registry import device_types
    from opwright.build.load import load
    from opwright.build.store import read_entry
    from opwright.dispatch import kernels

    result = {"built on": json.loads((folder / "built_on.json").read_text()), "run on": versions()}
    failed = False
    for operator in operators():
        name = operator.declaration.name
        library = load(read_entry(folder / name))
        backends = [b for b in device_types() if kernels.has_kernel(operator.declaration, b)]
        for backend in backends:
            library.register(backend)
        for each in filter(None, [operator, operator.backward_operator]):
            kernels.adopt(each, dict.fromkeys(backends, library))
        # Its own code, not torch.compile's, is what needs no compiler.
        record = opwright.verify(operator.function)
        failed |= not record.passed
        result[name] = {
            "kernels": backends,
            "ran": record.backends,
            "passed": record.passed,
            "checks": sum(check.outcome == "passed" for check in record.checks),
            "cases": sum(check.cases for check in record.checks),
            "failures": [f"{f.check}: {f.case}: {f.message}" for f in record.failures],
        }
        print(name, json.dumps(result[name], indent=2), flush=True)
    (folder / "one_binary.json").write_text(json.dumps(result, indent=2) + "\n")
    os.environ["PATH"] = path  # `update` asks git
    update(__file__, figures(result), machine_of(result["run on"]))
    sys.exit(failed)


def versions() -> dict[str, str]:
    import torch

    nvcc = shutil.which("nvcc")
    release = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout if nvcc else ""
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "nvcc": next((line for line in release.splitlines() if "release" in line), "none"),
        "libc": " ".join(platform.libc_ver()),
    }


if __name__ == "__main__":
    verb, place = sys.argv[1], Path(sys.argv[2]).absolute()
    place.mkdir(parents=True, exist_ok=True)
    {"build": build, "run": run}[verb](place)
