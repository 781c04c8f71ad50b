"""The program that tests the power of the checks, on one mutant for each check that sees mutants.

`make power` tries all of them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mutants
import pytest
import torch
from jaxtyping import Float
from mutants import PAGE, RESULT, UNCHANGED, try_mutants
from torch import Tensor
from wrong_calls import CALLS
from wrong_gradients import GRADIENTS
from wrong_results import RESULTS

import opwright
from opwright.errors import CheckError
from opwright.verify import api
from opwright.verify.checks.finding import Finding, Skipped
from opwright.verify.target import make_target

# A mutant for each check, and the check is the first that sees it, wherever the allocator puts its memory.
CHECK_OF = {
    "zeros": "numerics",
    "draws torch's random numbers": "global state",
    "reads behind its input": "guard bands",
    "the same buffer returned by every call": "determinism",
    "scratch memory shared by threads": "threads",
    "a workspace of 32 outputs": "memory",
    "keeps every result": "leaks",
    "gradient: zeros": "gradient numerics",
    "gradient: wrong for one that is not contiguous": "gradient layouts",
    "gradient: wrong unless all inputs need one": "gradient subsets",
    "gradient: overwrites what it has saved": "repeated backward",
    "gradient: its own derivative lost": "second gradients",
}

CPU = '''cpu="""
#include <opwright/kernel.h>
template <typename T>
void thrice(opwright::View<const T, 1> x, opwright::View<T, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = T(x(i) * T(3));
}
OPWRIGHT_KERNEL(thrice, float, opwright::half)
"""'''
CUDA = CPU.replace("cpu=", "cuda=").replace("output) {", "output, cudaStream_t stream) {")
OPERATOR = """
from jaxtyping import Float
from torch import Tensor
from opwright import operator

@operator("mutants::thrice", KERNELS)
def thrice(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    return x * 3
"""


@pytest.fixture(scope="module")
def swish():
    @opwright.operator("mutants::swish")
    def swish(x: Float[Tensor, "*batch n"], beta: Float[Tensor, "n"]) -> Float[Tensor, "*batch n"]:
        return x * torch.sigmoid(beta * x)

    return swish


def test_each_check_kills_its_mutant(swish) -> None:
    tried = try_mutants(swish, only=list(CHECK_OF))
    found = {m.kind: m.check for m in tried if m.kind in CHECK_OF}
    assert found == CHECK_OF
    assert {m.outcome for m in tried if m.kind == UNCHANGED} == {"passed"}


@pytest.mark.slow
def test_all_mutants_of_an_operator_die(swish) -> None:
    tried = try_mutants(swish)
    assert [(m.kind, m.reason) for m in tried if m.outcome not in ("killed", "passed", "none")] == []
    assert len([m for m in tried if m.outcome == "killed"]) >= 60


@pytest.mark.parametrize(
    ("label", "kind"),
    [("many rows", "wrong from row 65 536 on"), ("long n", "wrong from element 4 096 of a row on")],
)
def test_a_mutant_survives_where_the_sweep_has_a_hole(
    swish, label: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_target(swish, None, None).cases()
    holed = [case for case in whole if case.label != label]
    assert len(holed) < len(whole)
    monkeypatch.setattr("opwright.verify.target.Target.cases", lambda self: holed)
    tried = try_mutants(swish, only=[kind])
    assert [m.kind for m in tried if m.outcome == "survived"] == [kind]


def test_a_survivor_of_a_skipped_check_says_so(swish, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def skip(target):
        raise Skipped("too few calls")

    monkeypatch.setitem(api.CHECKS, "leaks", skip)
    mutants.print_table(try_mutants(swish, only=["keeps every result"]))
    assert "SURVIVED swish: keeps every result\n  found  leaks was skipped: too few calls" in capsys.readouterr().out


def test_a_check_that_fails_the_right_operator_shows(swish, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setitem(api.CHECKS, "numerics", lambda target: iter([Finding("a case", "it is wrong")]))
    tried = try_mutants(swish, only=["zeros"])
    assert [(m.kind, m.outcome) for m in tried if m.outcome == "failed"] == [(UNCHANGED, "failed")]
    mutants.print_table(tried)
    assert "FAILED swish: unchanged\n  check  numerics\n  found  a case: it is wrong" in capsys.readouterr().out


def test_a_callable_has_no_mutants() -> None:
    with pytest.raises(CheckError):
        try_mutants(torch.sigmoid)


# --- the program -----------------------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path: Path):
    def run(kernels: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "op.py").write_text(OPERATOR.replace("KERNELS", kernels))
        command = [sys.executable, mutants.__file__, "op.py", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    return run


@pytest.mark.compiler
def test_the_program_prints_a_table_and_writes_it(program, tmp_path: Path) -> None:
    result = program(f"{CPU}, {CUDA}", "--only", "zeros", "--out", "result.csv")
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [[cell.strip() for cell in line.split("  ") if cell] for line in result.stdout.splitlines()]
    table = {kind: cells for kind, *cells in rows}
    assert table == {
        "mutant": ["thrice", "thrice_backward"],
        UNCHANGED: ["passes", "passes"],
        "zeros": ["numerics", "-"],
        "gradient: zeros": ["-", "gradient numerics"],
    }
    assert "Killed 2 of 2 mutants of thrice" in result.stderr
    assert "mutants of thrice change its CPU kernel and run on the CPU; its CUDA kernel is not tested" in result.stderr
    (entry,) = mutants.read_result(tmp_path / "result.csv").values()
    assert entry["mutants"] == {
        "thrice": {UNCHANGED: "passes", "zeros": "numerics"},
        "thrice_backward": {UNCHANGED: "passes", "gradient: zeros": "gradient numerics"},
    }


def test_the_program_says_that_it_tried_nothing(program) -> None:
    assert program("", "--only", "no such kind").returncode == 5


def test_a_part_of_the_mutants_is_not_published(program) -> None:
    result = program("", "--only", "zeros", "--publish")
    assert result.returncode == 2
    assert "`--publish` needs every kind of mutant" in result.stderr


# --- what is published -----------------------------------------------------------------------------------


def test_the_guide_shows_the_published_result() -> None:
    text = PAGE.read_text()
    assert mutants.make_page(text, mutants.read_result(RESULT)) == text


def test_the_published_result_has_every_kind() -> None:
    calls = {UNCHANGED, *(kind.name for kind in (*RESULTS, *CALLS))}
    for name, entry in mutants.read_result(RESULT).items():
        forward, *backward = entry["mutants"].values()
        assert set(forward) == calls, name
        assert {kind for column in backward for kind in column} >= {kind.name for kind in GRADIENTS}, name
