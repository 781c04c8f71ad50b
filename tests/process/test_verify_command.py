"""`opwright verify`: --quick, --full."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from fork_server import run_opwright

from opwright.verify.checks import CHECKS

pytestmark = pytest.mark.compiler

OPERATOR = '''
import torch
from jaxtyping import Float
from torch import Tensor
from opwright import operator

@operator("verify_command::thrice", cpu="""
#include <opwright/kernel.h>
template <typename T>
void thrice(opwright::View<const T, 1> x, opwright::View<T, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = T(x(i) * T(3));
}
OPWRIGHT_KERNEL(thrice, float, opwright::half)
""")
def thrice(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    return x * 3
'''


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("verify_command")
    (folder / "op.py").write_text(OPERATOR)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_opwright("verify", *arguments, cwd=folder)

    return run


def test_every_check_runs_in_order(command, tmp_path: Path) -> None:
    result = command("op.py", "--device", "cpu", "--out", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads((tmp_path / "thrice.verify.json").read_text())
    assert [check["name"] for check in record["checks"]] == list(CHECKS)
    assert record["effort"] == "default"
    assert record["in_process"] == ""
    *rows, verdict = [line for line in result.stdout.splitlines()[1:] if line]
    assert verdict.startswith("Verified verify_command::thrice (cpu) on ")
    assert [row.split("  ")[0] for row in rows] == list(CHECKS)
    skipped = {check["name"] for check in record["checks"] if check["outcome"] == "skipped"}
    assert {"side stream", "other device", "graph"} <= skipped
    assert not {"numerics", "opcheck", "compile", "leaks", "threads", "gradients"} & skipped


def test_full_changes_the_inputs_and_nothing_else(command) -> None:
    found = {}
    for effort in ("", "--full"):
        flags = [effort] if effort else []
        result = command("op.py", *flags, "--check", "numerics", "--device", "cpu", "--json")
        assert result.returncode == 0, result.stdout + result.stderr
        (record,) = json.loads(result.stdout)
        (check,) = record["checks"]
        found[effort] = [error["case"] for error in check["errors"]]
    assert len(found[""]) < len(found["--full"])
    labels = {effort: {case.rpartition("(")[2] for case in cases} for effort, cases in found.items()}
    assert labels[""] <= labels["--full"]
    assert any(case.startswith("f16") and "every value" in case for case in found["--full"])


def test_quick_and_full_together_are_a_mistake(command) -> None:
    result = command("op.py", "--quick", "--full")
    assert result.returncode == 2
    assert "exclude each other" in result.stderr


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--level", "v3"], "`--level` chooses among the kernels of a wheel"),
        (["--timeout", "0"], "must be a finite number, above 0"),
        (["--timeout", "-1"], "must be a finite number, above 0"),
        (["--timeout", "nan"], "must be a finite number, above 0"),
    ],
)
def test_flags_that_say_nothing_are_mistakes(command, flags: list[str], text: str) -> None:
    result = command("op.py", *flags)
    assert result.returncode == 2
    assert text in result.stderr
