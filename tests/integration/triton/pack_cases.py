"""What the tests of packs share: the command, manifests, and the kernels' folder copied elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).parent / "kernels"
FILL = {"file": "kernels/packed.py", "function": "fill", "args": ["*i32:16", "i32", "=64"]}
ADD = {
    "file": "kernels/add.py",
    "function": "add_kernel",
    "args": ["*fp32:16", "*fp32:16", "*fp32:16", "i32", "=256"],
    "options": {"num_warps": 2},
}
SCALED = {
    "file": "kernels/packed.py",
    "function": "scaled",
    "tune": [
        {
            "arguments": {
                "out": {"shape": [n], "dtype": "fp32"},
                "n": n,
                "bias": {"shape": [1], "dtype": "fp16"},
            },
            **grid,
        }
        for n, grid in ((64, {"grid": "grid"}), (1000, {}))
    ],
}


def write_manifest(folder: Path, *kernels: dict[str, Any], seen: list[int] | None = None) -> Path:
    """Writes a manifest into a folder that gets the kernels, too."""
    if not (folder / "kernels").exists():
        shutil.copytree(KERNELS, folder / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "manifest.json"
    lines = ",\n".join(map(json.dumps, kernels))
    path.write_text(f'{{"architectures seen": {json.dumps(seen or [])}, "kernels": [\n{lines}\n]}}\n')
    return path


def opwright(
    folder: Path, *arguments: str | Path, check: int | None = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs the command in a folder, with a Python that has no Triton of its own."""
    result = subprocess.run(
        [sys.executable, "-c", "from opwright.cli import main; main()", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "CI": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert check is None or result.returncode == check, result.stdout + result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    return result


def build(
    folder: Path,
    manifest: Path,
    output: str,
    pythons: list[Path],
    *arguments: str,
    arch: str = "90",
    check: int | None = 0,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Builds a pack."""
    named = [text for python in pythons for text in ("--python", str(python))]
    return opwright(
        folder,
        *("pack", "build", manifest, "--out", output, "--arch", arch, *named, *arguments),
        check=check,
        **{"TRITON_CACHE_DIR": str(folder / "triton-cache"), **environment},
    )
