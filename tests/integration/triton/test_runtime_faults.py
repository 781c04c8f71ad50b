"""A wrong call or a kernel file that cannot be used is an Error with a text that helps, and the next launch works."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import stub
from fault_cases import HEAD, KERNEL, KERNELS, OUT, C, constant, descriptor, launch, number, outcomes
from syrupy.assertion import SnapshotAssertion

pytestmark = pytest.mark.compiler

# ---- what a caller gets wrong

WRONG = {
    "too many": launch("scaled", OUT, number(5), C, number(3), number(4)),
    "too few": launch("scaled", OUT, number(5)),
    "none at all": launch("scaled"),
    "unknown name": launch("scaled", **{}) | {"args": {"out": OUT, "n": number(5), "D": C}},
    "constexpr at run time": launch("scaled", OUT, number(5), number(1)),
    "pointer for a constexpr": launch("scaled", OUT, number(5), OUT),
    "constexpr for a value": launch("scaled", OUT, constant("5"), C),
    "text for a value": launch("scaled", OUT, constant('"five"'), C),
    "dtype for a value": launch("scaled", OUT, constant("fp16"), C),
    "float for an annotated int": launch("whole", OUT, {"float": 2.5}),
    "pointer for an annotated int": launch("whole", OUT, OUT),
    "None for an annotated int": launch("whole", OUT, {"none": True}),
    "tuple for an annotated int": launch("whole", OUT, {"tuple": [number(1)]}),
    "None where it is used": launch("scaled", {"none": True}, number(5), C),
    "tuple where a pointer is": launch("scaled", {"tuple": [OUT]}, number(5), C),
    "pointer where a tuple is": launch("tupled", OUT, OUT),
    "tuple too short": launch("tupled", OUT, {"tuple": [OUT]}),
    "pointer of a dtype that NVIDIA lacks": launch("scaled", {"tensor": "fp8e4b8", "address": 16}, number(5), C),
    "text that is not a value": launch("scaled", OUT, number(5), constant("1 + 1")),
    "number written otherwise": launch("scaled", OUT, number(5), constant("01")),
    "unknown function": launch("scaled", OUT, number(5), constant("@nothing")),
    "unknown option": launch("scaled", OUT, number(5), C, options={"num_wraps": 4}),
    "three warps": launch("scaled", OUT, number(5), C, options={"num_warps": 3}),
    "no warps": launch("scaled", OUT, number(5), C, options={"num_warps": 0}),
    "descriptor that is not aligned": launch("copies", descriptor(), descriptor(address=0x10008), number(0)),
    "descriptor with strides": launch("copies", descriptor(), descriptor(strides=[128, 2]), number(0)),
    "descriptor of another rank": launch("copies", descriptor(), descriptor(shape=[256], strides=[1]), number(0)),
    "descriptor of no memory": launch("copies", descriptor(), descriptor(shape=[0, 128]), number(0)),
    "memory of another GPU": launch("scaled", {"tensor": "fp32", "allocate": 1, "gpu": 1}, number(5), C),
    "memory of the host": launch("scaled", {"tensor": "fp32", "address": 0x7FFF12345670, "gpu": -2}, number(5), C),
    "memory of another GPU in a tuple": launch(
        "tupled",
        {"tensor": "fp32", "allocate": 0, "gpu": 0},
        {"tuple": [{"tensor": "fp32", "allocate": 1, "gpu": 1}, number(5)]},
    ),
    "memory of another GPU in a descriptor": launch(
        "copies", descriptor(allocate=0, gpu=0), descriptor(allocate=1, gpu=1), number(0)
    ),
    "memory of another GPU that the driver does not know": launch(
        "scaled", {"tensor": "fp32", "address": 0x1000, "gpu": 1}, number(5), C
    ),
    "grid that is not there": launch("scaled", OUT, number(5), C, grid="nothing"),
    "grid of a float": launch("scaled", OUT, number(5), C, grid="halves"),
    "grid that divides by zero": launch("scaled", OUT, number(5), C, grid="divides"),
    "grid that reads an option": launch("scaled", OUT, number(5), C, grid="reads_option"),
    "grid that cannot be translated": launch("scaled", OUT, number(5), C, grid="reads_files"),
    "grid of four": launch("scaled", OUT, number(5), C, grid="four"),
    "grid that is too large": launch("scaled", OUT, number(5), C) | {"grid": [1, 70000]},
    "heuristic that divides by zero": launch("divided", OUT, number(5), number(0)),
    "heuristic of a pointer": launch("divided", OUT, number(5), OUT),
    "what a heuristic gives": launch("divided", OUT, number(5), number(2), C),
    "compile error": launch("broken", OUT, number(5)),
    "plain function": launch("plain_function", OUT, number(5)),
    "number for a function": launch("no_function", OUT, number(5)),
    "missing function": launch("missing", OUT, number(5)),
    "missing file": launch("scaled", OUT, file=Path("/nowhere/kernels.py")),
    "folder for a file": launch("scaled", OUT, file=KERNELS.parent),
}  # fmt: skip
# The runtime counts arguments from 1, and so must the worker's errors.
COUNTED = {"float for an annotated int": 2, "pointer for an annotated int": 2, "text that is not a value": 3}


@pytest.fixture(scope="module")
def refusals(python: Path, tmp_path_factory: Any) -> dict[str, str | None]:
    """What each of these gives, all in one process; a good launch ends it."""
    good = launch("scaled", OUT, number(5), C)
    texts, _ = outcomes(python, [*WRONG.values(), good], tmp_path_factory.mktemp("wrong"), devices=2, unified=False)
    assert texts[-1] is None
    return dict(zip(WRONG, texts))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call(refusals: Any, name: str, snapshot: SnapshotAssertion) -> None:
    assert refusals[name] is not None
    assert not refusals[name].startswith("NO ERROR OF OURS")
    assert refusals[name] == snapshot


@pytest.mark.parametrize("name", COUNTED)
def test_arguments_are_counted_from_1(refusals: Any, name: str) -> None:
    assert f"argument {COUNTED[name]} `" in refusals[name]


def test_a_descriptor_of_another_rank_without_tma(python: Path, tmp_path: Path) -> None:
    wrong = launch("copies", descriptor(), descriptor(shape=[256], strides=[1]), number(0))
    (text,), records = outcomes(python, [wrong], tmp_path, arch=80)
    assert text is not None
    assert records == []


def test_a_pointer_is_not_none(python: Path, tmp_path: Path) -> None:
    bias = {"tensor": "fp32", "address": 0x2000}
    texts, _ = outcomes(
        python,
        [launch("biased", OUT, bias), launch("biased", OUT, {"none": True})],
        tmp_path,
        triton_settings=f"record={tmp_path / 'keys'}",
    )
    keys = [json.loads(line)["args"][2] for line in (tmp_path / "keys").read_text().splitlines()]
    assert (texts, keys) == ([None, None], ["=True", "=False"])


@pytest.mark.parametrize("function", ["huge_default", "tuple_default"])
def test_defaults_that_triton_takes(python: Path, tmp_path: Path, function: str) -> None:
    (genuine,) = stub.run_genuine(python, [launch(function, OUT)])
    assert genuine["error"] is None
    (text,), records = outcomes(python, [launch(function, OUT)], tmp_path)
    assert text is None
    assert [record["params"] for record in records] == [record["params"] for record in genuine["records"]]


POINTER_TEXTS = """import triton
import triton.language as tl

CONFIGS = [triton.Config({"C": 16}), triton.Config({"C": 32})]


@triton.heuristics({"C": lambda args: args["p"]})
@triton.jit
def given(out, p, C: tl.constexpr):
    tl.store(out, 1.0)


@triton.autotune(CONFIGS, key=["p"])
@triton.jit
def tuned(out, p, C: tl.constexpr):
    tl.store(out, 1.0)
"""


@pytest.mark.parametrize("kind", ["pointer", "tuple"])
@pytest.mark.parametrize("function", ["given", "tuned"])
def test_a_pointer_that_decides(python: Path, tmp_path: Path, function: str, kind: str) -> None:
    file = tmp_path / "pointers.py"
    file.write_text(POINTER_TEXTS)
    decides = OUT if kind == "pointer" else {"tuple": [OUT, number(5)]}
    (text,), _ = outcomes(python, [launch(function, OUT, decides, file=file)], tmp_path)
    assert text is None or not text.startswith("NO ERROR OF OURS")


# ---- files

FILES = {
    "syntax error": "import triton\n\n\ndef scaled(out, n:\n    pass\n",
    "import that is missing": "import triton\nimport no_such_module_of_ours\n",
    "raises": "import triton\n\nraise RuntimeError('no licence')\n",
    "ends the process": "import os\nos._exit(7)\n",
    "exits": "import sys\nsys.exit(3)\n",
    "relative import": "from .names import add\n",
    "null byte": "x = '\0'\n",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_used(python: Path, tmp_path: Path, name: str, snapshot: SnapshotAssertion) -> None:
    bad, fine = tmp_path / "bad.py", tmp_path / "fine.py"
    bad.write_text(FILES[name])
    fine.write_text(HEAD + KERNEL)
    texts, records = outcomes(python, [launch("scaled", OUT, number(5), file=path) for path in (bad, fine)], tmp_path)
    assert texts[0] == snapshot
    assert (texts[1], len(records)) == (None, 1)


def test_relative_imports_in_a_package(python: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "names.py").write_text("SIZE = 3\n")
    (package / "kernels.py").write_text(HEAD + "from .names import SIZE\n" + KERNEL)
    texts, records = outcomes(python, [launch("scaled", OUT, number(5), file=package / "kernels.py")], tmp_path)
    assert texts[0] is None or "package" in texts[0]
    assert len(records) == (texts[0] is None)


def test_a_kernel_file_that_prints(python: Path, tmp_path: Path) -> None:
    file = tmp_path / "loud.py"
    file.write_text('import sys, os\nprint(\'{"id": 1, "ok": {}}\', flush=True)\n' + HEAD + KERNEL)
    texts, records = outcomes(python, [launch("scaled", OUT, number(5), file=file)], tmp_path)
    assert (texts, len(records)) == ([None], 1)
