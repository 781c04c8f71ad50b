"""benchmarks/harnesses.py, and docs/guides/harnesses.md, which is made from its result."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import ModuleType

import mutants
import pytest
from mutants import UNCHANGED
from wrong_calls import CALLS
from wrong_gradients import GRADIENTS
from wrong_results import RESULTS

ROOT = Path(__file__).parents[2]
KILLED, PASSES = "killed", "passes"


@pytest.fixture(scope="module")
def harnesses() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import harnesses

        return harnesses


@pytest.fixture(scope="module")
def result(harnesses: ModuleType) -> dict:
    return harnesses.read()


def test_the_tables_of_the_page_are_those_of_the_result(harnesses: ModuleType, result: dict) -> None:
    text = harnesses.PAGE.read_text()
    assert harnesses.page(text, result) == text


def test_a_total_of_the_page_counts_the_rows_of_the_result(harnesses: ModuleType, result: dict) -> None:
    for operator, found in result["operators"].items():
        for name, rows in found.items():
            if "skipped" in rows:
                continue
            outcomes = [row["outcome"] for kind, row in rows.items() if kind != UNCHANGED]
            killed, tried = outcomes.count(KILLED), outcomes.count(KILLED) + outcomes.count(PASSES)
            line = next(line for line in harnesses.totals(result).splitlines() if line.startswith(f"| {name} |"))
            assert f"| {killed} of {tried} |" in line, (operator, name)


def test_what_the_page_says_of_a_harness_is_in_the_result(harnesses: ModuleType, result: dict) -> None:
    """Sentences like: it kills "a", "b" and "c", of `softmax` it passes "d"."""
    said = 0
    text = harnesses.PAGE.read_text()
    for name, paragraph in re.findall(r"^\*\*(.+?)\*\* (.+?)(?=\n\n)", text, re.MULTILINE | re.DOTALL):
        sentences = r"(?:[Oo]f `(\w+)` )?it (kills|passes)((?:,? (?:and )?\"[^\"]+\")+)"
        for operator, verb, kinds in re.findall(sentences, " ".join(paragraph.split()), re.IGNORECASE):
            found = result["operators"][operator or "bias_gelu"][name]
            for kind in re.findall(r'"([^"]+)"', kinds):
                assert found[kind]["outcome"] == {"kills": KILLED, "passes": PASSES}[verb], (name, operator, kind)
                said += 1
    assert said == text.partition("## What each is good for")[2].partition("## Every kind")[0].count('"') // 2


def test_the_result_is_of_kinds_that_exist(result: dict) -> None:
    known = {kind.name for kind in (*RESULTS, *CALLS, *GRADIENTS)} | {UNCHANGED}
    for found in result["operators"].values():
        for rows in found.values():
            assert "skipped" in rows or rows.keys() <= known


def test_a_gradient_that_opwright_kills_is_not_killed_for_its_missing_derivative_only(result: dict) -> None:
    """The backward of a mutant has no derivative of its own, which is the matter of one kind."""
    checks = mutants.read_result(mutants.RESULT)
    for operator, found in result["operators"].items():
        for kind, check in checks[operator]["mutants"][f"{operator}_backward"].items():
            if kind.startswith("gradient:") and check == "second gradients":
                assert kind == "gradient: its own derivative lost"
                assert found["opwright"][kind]["outcome"] == KILLED


def test_a_judge_that_ends_its_process_is_an_answer(harnesses: ModuleType) -> None:
    assert harnesses.in_a_process(lambda: "") == ""
    assert harnesses.in_a_process(lambda: os._exit(0)) == "the process ended"
    assert harnesses.in_a_process(lambda: sys.exit(0)) == "raised SystemExit: 0"


@pytest.mark.parametrize("name", ["assert_close", "gradcheck"])
def test_a_judge_tells_the_operator_from_a_mutant(harnesses: ModuleType, name: str) -> None:
    problem = next(p for p in harnesses.problems() if p.name == "softmax")
    harness = next(h for h in harnesses.HARNESSES if h.name == name)
    judge = harness.prepare(problem, None)
    made = {kind: make for kind, why_not, make in harnesses.candidates_of(problem) if not why_not}
    assert harnesses.in_a_process(lambda: judge(made[UNCHANGED]())) == ""
    assert "raised" in harnesses.in_a_process(lambda: judge(made["zeros"]()))
    assert "raised" in harnesses.in_a_process(lambda: judge(made["gradient: zeros"]()))


def test_a_harness_that_is_not_there_is_skipped(harnesses: ModuleType) -> None:
    problem = harnesses.problems()[0]
    skipped = [h.prepare(problem, None) for h in harnesses.HARNESSES if h.flag]
    assert len(skipped) == 4
    assert set(skipped) == {"not installed: skipped"}
