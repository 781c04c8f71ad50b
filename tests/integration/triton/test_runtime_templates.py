"""A call through C++'s templates is the call with dynamic arguments, and has the key that a person expects."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import runtime
import stub

pytestmark = pytest.mark.compiler
PROGRAM = runtime.ROOT / "tests" / "native" / "triton_templates.cpp"
KERNELS = Path(__file__).parent / "kernels" / "template_kernels.py"
ASAN = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1")


def names(call: str) -> list[str]:
    """The cases of a part of the program, from its text."""
    found = re.findall(rf'\b{call}(?:<\w+>)?\("([^"]+)",', PROGRAM.read_text())
    assert found, call
    return found


POINTERS = [f"{const}{name} pointer" for name in names("pointer_to") for const in ("", "const ")]
SAME = [
    *names("value"),
    *POINTERS,
    *(f"{name}" for name in names("constant")),
    *names("same"),
    *names("grid"),
]
SAME += ["grid of a bound kernel", "bound to a tuple", "prepared and bound"]
REFUSED = names("refused")


@pytest.fixture(scope="module", params=[(), ASAN], ids=["plain", "sanitized"])
def results(request: Any, tmp_path_factory: Any) -> dict[str, tuple[dict[str, Any], list[Any]]]:
    """For each case the program's line and what the driver received."""
    tritons = stub.find_tritons()
    if not tritons:
        pytest.skip("no Triton at .venv/triton-*/bin/python")
    python = tritons[max(tritons)]
    folder = tmp_path_factory.mktemp("templates")
    env = stub.environment(folder=stub.build(flags=request.param)) | {
        "OPWRIGHT_CACHE_DIR": str(tmp_path_factory.getbasetemp() / "templates-cache"),
        "OPWRIGHT_TRITON": f"python={python}",
        "TRITON_CACHE_DIR": str(stub.BUILD / f"worker-cache-{python.parents[1].name}"),
    }
    # The sanitizer's library is the program's, and leaks are the runtime's design: nothing of it is freed.
    env["ASAN_OPTIONS"] = "detect_leaks=0"
    program = runtime.build(PROGRAM, request.param)
    done = subprocess.run([program, KERNELS, folder], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-4000:]}"
    lines = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    return {line["name"]: (line, stub.read_records(line["record"])) for line in lines}


@pytest.mark.parametrize("name", SAME)
def test_templates_launch_as_dynamic_arguments_do(results: Any, name: str) -> None:
    result, records = results[name]
    assert result["error"] == ""
    assert result["keys"] == [result["expected"]] * 2
    assert len(records) == 4
    assert records == [records[0]] * 4


@pytest.mark.parametrize("name", REFUSED)
def test_misuse_is_refused(results: Any, name: str) -> None:
    result, records = results[name]
    assert (bool(result["error"]), records) == (True, [])


def test_hooks_come_in_pairs_where_a_launch_fails(results: Any) -> None:
    """The function `exit` was not called."""
    result, _ = results["hooks of a failed launch"]
    assert result["error"].startswith("0 open: "), result["error"]
    assert "the launch failed" in result["error"]


def test_a_name_before_a_position_does_not_compile(tmp_path: Path) -> None:
    program = tmp_path / "turned.cpp"
    program.write_text(
        """#include "opwright/triton.h"
using namespace opwright::triton;
void turned(const Kernel& kernel) { kernel(nullptr, 1, named<"n">(5), 7); }
"""
    )
    done = subprocess.run(
        ["c++", "-std=c++20", "-fsyntax-only", "-I", str(runtime.INCLUDE), str(program)],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "arguments by name come after those by position" in done.stderr
