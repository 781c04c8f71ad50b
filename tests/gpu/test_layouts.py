"""Every kernel with inputs and outputs of many layouts, as it is and under compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import layouts
import pytest

SANITIZER = shutil.which("compute-sanitizer") or shutil.which(
    "compute-sanitizer", path="/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer"
)


def _skip_without_triton(group: str) -> None:
    if group == "triton":
        pytest.importorskip("triton")


@pytest.mark.parametrize("group", layouts.GROUPS)
def test_layouts(group: str) -> None:
    _skip_without_triton(group)
    assert layouts.run(group) > 100


@pytest.mark.sanitizer
@pytest.mark.slow
@pytest.mark.skipif(SANITIZER is None, reason="no compute-sanitizer on PATH or under /usr/local/cuda")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
@pytest.mark.parametrize("group", layouts.GROUPS)
def test_sanitizer(group: str, tool: str) -> None:
    _skip_without_triton(group)
    # Without PyTorch's cache of memory every allocation is one of CUDA's, so that its bounds are known.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    # Of three groups of threads that meet two and two at named barriers, racecheck reports what is in order, and so it
    # does of PyTorch's reductions. To initcheck, what a kernel writes that is left out was never written.
    excluded = ["at::", *(["2at6native", "sweep_alone"] if tool == "racecheck" else [])]
    names = ",".join(f"kernel_substring={name}" for name in excluded)
    options = ["--tool", tool, "--target-processes", "application-only", "--error-exitcode", "9"]
    program = [sys.executable, layouts.__file__, group, "--rounds", "1", "--is-brief"]
    # initcheck of CUDA 13.0 does not see the bulk stores of cuBLAS, which rows without alignment do not get.
    program += ["--is-odd"] * (tool == "initcheck")
    result = subprocess.run(
        [SANITIZER, *options, "--kernel-name-exclude", names, *program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert " calls" in result.stdout, result.stdout[-2000:] + result.stderr[-2000:]
    assert result.returncode == 0, result.stdout[-4000:]
