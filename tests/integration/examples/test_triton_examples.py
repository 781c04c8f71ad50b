"""The Triton examples: each does what its README shows, on a GPU or above the stub driver, which computes nothing."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
HAS_GPU = torch.cuda.is_available()
sys.path.insert(0, str(ROOT / "tests" / "integration" / "triton"))

import stub  # noqa: E402


def find_triton() -> Path | None:
    """Returns a Python with Triton: this one on a machine with a GPU, else the newest at .venv."""
    if HAS_GPU and importlib.util.find_spec("triton"):
        return Path(sys.executable)
    found = stub.find_tritons()
    return found[max(found, key=lambda version: tuple(map(int, version.split("."))))] if found else None


@pytest.mark.compiler
@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake on PATH")
@pytest.mark.skipif(find_triton() is None, reason="no Triton at .venv/triton-*/bin/python")
@pytest.mark.parametrize(
    "example",
    [
        "triton_vector_add",
        pytest.param("triton_reduction", marks=pytest.mark.slow),
        pytest.param("triton_torch_operator", marks=pytest.mark.slow),
    ],
)
def test_readme(example: str, tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "examples" / example, tmp_path / example)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, command in {"opwright": "src/opwright/cmake/run_opwright.py", "python": ""}.items():
        words = " ".join(filter(None, [sys.executable, command and str(ROOT / command)]))
        (tools / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (tools / name).chmod(0o755)
    env = dict(os.environ) if HAS_GPU else stub.environment()
    env |= {
        "PATH": f"{tools}{os.pathsep}{env['PATH']}",
        "TRITON_PYTHON": str(find_triton()),
        "OPWRIGHT_TRITON": f"python={find_triton()}",
        "OPWRIGHT_CACHE_DIR": str(tmp_path / "cache"),
    }
    (text,) = re.findall(r"^```console\n(.*?)^```", (folder / "README.md").read_text(), re.M | re.S)
    commands = "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
    expected = [line for line in text.splitlines() if not line.startswith("$ ")]
    if HAS_GPU:
        expected = [line.replace("cpu:", "cuda:") for line in expected]
    elif example != "triton_torch_operator":
        commands = re.sub(r"build/\w+$", r"\g<0> --launch-only", commands, flags=re.M)
    commands = commands.replace("cmake -B build", f"cmake -B build -DPython3_EXECUTABLE={sys.executable}")
    done = subprocess.run(["bash", "-e", "-c", commands], cwd=folder, env=env, capture_output=True, text=True)
    log = (folder / "log").read_text() if (folder / "log").exists() else ""
    assert done.returncode == 0, (log + done.stdout + done.stderr)[-6000:]
    assert done.stdout.splitlines() == expected
