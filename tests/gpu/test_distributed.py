"""The example for several processes with NCCL, one GPU for each."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.two_gpus
EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed"
_RUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def said_by(folder: Path, *command: str) -> str:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def losses_in(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", text)]


def test_training_on_two_gpus_is_that_on_one_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "example"
    shutil.copytree(EXAMPLE, folder)
    alone = losses_in(said_by(folder, sys.executable, "train.py", "--last", "6", "--device", "cuda"))
    on_two = losses_in(said_by(folder, *_RUN, "train.py", "--last", "4", "--folder", "kept", "--device", "cuda"))
    resumed = said_by(
        folder, sys.executable, "train.py", "--first", "4", "--last", "6", "--folder", "kept", "--device", "cuda"
    )
    assert len(alone) == 6
    assert [*on_two, *losses_in(resumed)] == pytest.approx(alone, abs=2e-3)  # printed with three digits


def test_tensor_parallel_on_two_gpus(tmp_path: Path) -> None:
    folder = tmp_path / "example"
    shutil.copytree(EXAMPLE, folder)
    assert "result and gradients are those of one process" in said_by(folder, *_RUN, "tensor_parallel.py", "cuda")
