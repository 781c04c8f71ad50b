"""The pytest plugin and docs/guides/testing.md: each in a pytest of its own, in a project of a user."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opwright.testing
from opwright import operator

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "testing.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)

OPERATORS = '''
import torch
from jaxtyping import Float
from torch import Tensor
from opwright import operator

KERNEL = """
#include <opwright/kernel.h>
template <typename T>
void {name}(opwright::View<const T, 2> x, opwright::View<const T, 1> scale, {more}opwright::View<T, 2> output) {{
  for (int64_t i = 0; i < x.size(0); ++i)
    for (int64_t j = 0; j < x.size(1); ++j) output(i, j) = {value};
}}
OPWRIGHT_KERNEL({name}, float, double)
"""

@operator(
    "my_ops::scale_shift",
    cpu=KERNEL.format(name="scale_shift", more="double shift, ", value="x(i, j) * scale(j) + T(shift)"),
)
def scale_shift(
    input: Float[Tensor, "*batch n"], scale: Float[Tensor, "n"], shift: float = 0.0
) -> Float[Tensor, "*batch n"]:
    return input * scale + shift

@operator(
    "my_ops::tail",
    cpu=KERNEL.format(name="tail", more="", value="j < x.size(1) / 4 * 4 ? x(i, j) * scale(j) : T(0)"),
)
def tail(x: Float[Tensor, "*batch n"], scale: Float[Tensor, "n"]) -> Float[Tensor, "*batch n"]:
    """The end of a row stays 0."""
    return x * scale
'''


def plugin_flags() -> list[str]:
    """Loads the plugin by name where this checkout is not installed, so that its entry point is not there."""
    points = importlib.metadata.entry_points(group="pytest11")
    return [] if "opwright" in {point.name for point in points} else ["-p", "opwright.testing.plugin"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "my_ops.py").write_text(OPERATORS)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    for language, text in BLOCKS:
        named = re.match(r"# (test_\w+\.py)\n", text)
        if language == "python" and named:
            (folder / named[1]).write_text(text)
    return folder


class Run:
    """One run of pytest: its output, and outcome and text of each item by `file::name`."""

    def __init__(self, folder: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        report = folder / "junit.xml"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", *plugin_flags(), "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, f"--junit-xml={report}", *arguments],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", **(env or {})},
            capture_output=True,
            text=True,
            timeout=300,
        )
        self.output, self.code = done.stdout + done.stderr, done.returncode
        self.items: dict[str, tuple[str, str]] = {}
        for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
            found = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
            text = "" if found is None else f"{found.get('message')}\n{found.text}"
            outcome = "passed" if found is None else found.tag
            self.items[f"{case.get('classname')}::{case.get('name')}"] = (outcome, text)


def passed(run: Run, prefix: str = "") -> list[str]:
    return [name for name, (outcome, _) in run.items.items() if outcome == "passed" and name.startswith(prefix)]


# --- the suite ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def suite_run(project: Path) -> Run:
    (project / "test_suite.py").write_text(
        "import opwright.testing\n"
        "checks = ['numerics', 'graph', 'copy']\n"
        "test_operators = opwright.testing.suite('my_ops', checks=checks)\n"
        "test_only = opwright.testing.suite('my_ops::tail', checks=['numerics'], only='f32[2, 3, 7]')\n"
        "test_gpu = opwright.testing.suite('my_ops::tail', checks=['numerics'], devices=['cuda'])\n"
    )
    return Run(project, "-n", "2", "-v", "test_suite.py", env={"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.compiler
def test_each_operator_and_check_is_an_item_of_its_own(suite_run: Run) -> None:
    outcomes = {name.removeprefix("test_suite::"): outcome for name, (outcome, _) in suite_run.items.items()}
    assert outcomes == {
        "test_operators[scale_shift-numerics]": "passed",
        "test_operators[scale_shift-graph]": "skipped",
        "test_operators[scale_shift-copy]": "passed",
        "test_operators[tail-numerics]": "failure",
        "test_operators[tail-graph]": "skipped",
        "test_operators[tail-copy]": "passed",
        "test_only[tail-numerics]": "failure",
        "test_gpu[tail-numerics-cuda]": "skipped",
    }
    assert "<-" not in suite_run.output  # where pytest says that a test is of another file than its id's


@pytest.mark.compiler
def test_what_does_not_apply_is_skipped_with_its_reason(suite_run: Run) -> None:
    assert "only on a GPU" in suite_run.items["test_suite::test_operators[tail-graph]"][1]
    assert "there is no device cuda here" in suite_run.items["test_suite::test_gpu[tail-numerics-cuda]"][1]


@pytest.mark.compiler
def test_a_failure_shows_what_verify_found_and_no_traceback(suite_run: Run, project: Path) -> None:
    """The text of the guide, too: its lines begin as those of the failure."""
    text = suite_run.items["test_suite::test_only[tail-numerics]"][1]
    (shown,) = [block for language, block in BLOCKS if not language and block.startswith("FAILED")]
    for line in shown.splitlines():
        assert line in text
    assert f"opwright verify {project}/my_ops.py::tail --check numerics" in text
    assert "generic.py" not in text


def test_inputs_are_made_once_for_all_checks_of_an_operator() -> None:
    calls: list[torch.Size] = []

    @operator("suite::counted")
    def counted(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        calls.append(x.shape)
        return x * 2

    calls.clear()  # of the declaration
    test = opwright.testing.suite(counted, checks=["refusals", "copy"], quick=True)
    counts = []
    for item in test.pytestmark[0].args[1]:
        test(*item.values)  # the checks run in other processes; in this one inputs are tried as they are made
        counts.append(len(calls))
    assert counts[0] > 0
    assert counts == [counts[0], counts[0]]


# --- the guide ----------------------------------------------------------------------------------------


@pytest.mark.compiler
def test_the_files_of_the_guide_pass(project: Path) -> None:
    files = sorted(path.name for path in project.glob("test_*.py") if path.name != "test_suite.py")
    assert files == ["test_cases.py", "test_my_ops.py", "test_properties.py"]
    run = Run(project, "-rs", "-q", *files, "-k", "not tail and (not test_operators or copy or graph)")
    assert run.code == 0, run.output
    cases = passed(run, "test_cases::test_scale_shift_is_linear[")
    assert "test_cases::test_scale_shift_is_linear[f32[2, 3, 7] f32[7] 0.0 sliced]" in cases
    assert {re.search(r"\[(\w+)\[", name)[1] for name in cases} == {"f32", "bf16"}
    assert passed(run, "test_properties::") == ["test_properties::test_scale_shift_matches"]
    assert passed(run, "test_my_ops::") == ["test_my_ops::test_operators[scale_shift-copy]"]
    (console,) = [text for language, text in BLOCKS if language == "console"]
    assert console.splitlines()[-1] in run.output


def test_the_message_of_the_guide_is_that_of_assert_matches(run_python) -> None:
    (program,) = [text for language, text in BLOCKS if language == "python" and "# test_" not in text]
    (shown,) = [text for language, text in BLOCKS if not language and text.startswith("the result")]
    printed = run_python(program).stdout.splitlines()
    for line, wanted in zip(printed, shown.splitlines(), strict=True):
        assert line.startswith(wanted)


# --- the plugin ---------------------------------------------------------------------------------------


def test_the_entry_point_is_declared() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points.pytest11]\nopwright = "opwright.testing.plugin"' in text


def test_the_plugin_imports_neither_torch_nor_the_rest(start_python) -> None:
    start_python(
        "import sys, pytest\nbefore = set(sys.modules)\nimport opwright.testing.plugin\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "assert new <= {'opwright', 'importlib'}, new"
    )


WRONG = {
    "@pytest.mark.opwright('my_ops')": "`my_ops`: this TARGET has several operators",
    "@pytest.mark.opwright('my_ops::tail', only='none such')": "`tail`: no case is left",
    "@pytest.mark.opwright('my_ops::tail', dtypes='f23')": "`f23`: unknown dtype",
    "@opwright.testing.cases(len)": "`opwright.testing.cases`: it takes an operator of Opwright",
    "": "it takes `opwright_case` of no operator",
}


def test_a_wrong_mark_is_said_in_words(project: Path) -> None:
    names = [f"wrong{i}.py" for i in range(len(WRONG))]
    for name, source in zip(names, WRONG, strict=True):
        text = f"import pytest, opwright.testing\n{source}\ndef test_it(opwright_case): ...\n"
        (project / name).write_text(text)
    run = Run(project, *names)
    assert run.code == 2
    for name, text in zip(names, WRONG.values(), strict=True):
        assert f"{name}::test_it: {text}" in run.output
    assert run.output.count("hint: ") == 4
    assert "expected  bf16 bool f16" in run.output
    assert "plugin.py" not in run.output


def test_without_hypothesis_the_error_says_what_to_type(run_python) -> None:
    found = run_python("import sys; sys.modules['hypothesis'] = None\nfrom opwright.testing import inputs", check=False)
    assert "`opwright.testing.inputs`: its strategies are Hypothesis's" in found.stderr
    assert "hint: `pip install hypothesis`" in found.stderr
