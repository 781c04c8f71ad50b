"""The wheel of opwright_ops: its size, the time and memory of a clean build without torch, the time of its import.

    python benchmarks/wheel.py

The import is of an installed wheel, beyond `import torch`, the minimum of 15 processes. Memory is that of the largest
process of the build.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from summary import Figure, update, write_raw

ROOT = Path(__file__).resolve().parent.parent
# Keeps torch, or the toolkit, from being imported.
BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""
IMPORT = """
import time, torch
start = time.perf_counter()
import opwright_ops
print(1e3 * (time.perf_counter() - start))
"""


def figures(result: dict[str, Any]) -> list[Figure]:
    return [
        Figure("size", result["MB"], "MB"),
        Figure("build", result["build s"], "s"),
        Figure("largest process of the build", result["largest process GB"], "GB"),
        Figure("import, beyond torch's", result["import ms"], "ms"),
    ]


def main() -> None:
    from opwright.machine import machine_card
    from opwright.records import builtins_of

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(BLOCKER.format(name="torch"))
        command = [sys.executable, "-m", "opwright", "wheel", str(ROOT / "ops"), "--no-isolation", "--out", folder]
        start = time.perf_counter()
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": folder})
        seconds = time.perf_counter() - start
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        (wheel,) = Path(folder).glob("*.whl")
        site = Path(folder, "site")
        install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
        subprocess.run([sys.executable, *install], check=True)
        program = f"{BLOCKER.format(name='opwright')}\nsys.path.insert(0, {str(site)!r})\n{IMPORT}"
        times = [
            float(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout)
            for _ in range(15)
        ]
        result = {
            "machine": builtins_of(machine_card()),
            "wheel": wheel.name,
            "MB": round(wheel.stat().st_size / 1e6, 3),
            "build s": round(seconds, 1),
            "largest process GB": round(memory / 1e9, 2),
            "import ms": round(min(times), 1),
        }
    write_raw("wheel", result)
    update(__file__, figures(result), result["machine"])
    print(json.dumps({name: value for name, value in result.items() if name != "machine"}, indent=1))


if __name__ == "__main__":
    main()
