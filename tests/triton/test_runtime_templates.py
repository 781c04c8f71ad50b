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
_PAIR = "Shape<std::pair> is missing: a pair's classes are not in the key, so another pair gets its kernel"
_ENUM = "std::is_unsigned_v of an enumeration is false: one of 64 bits is taken for signed"
_BOUND = "FrozenKernel compares neither number nor types of its arguments with what was bound"
BUGS = {
    "enum class of 64 bits": _ENUM,
    "cx wide enum": _ENUM,
    "pair": _PAIR,
    "pair of others": _PAIR,
    "tuple of a pair": _PAIR,
    "cx 2^63 + 1": "a dynamic constexpr beyond int64 is keyed by its double: 2^63 + 1 gets the kernel of 2^63",
    "bound with fewer": _BOUND,
    "bound with more": _BOUND,
    "bound with others": _BOUND,
    "dynamic name before position": "names are taken for those of the last arguments: values change places",
}


def names(call: str) -> list[str]:
    """The cases of a part of the program, from its text."""
    found = re.findall(rf'\b{call}(?:<\w+>)?\("([^"]+)",', PROGRAM.read_text())
    assert found, call
    return found


def with_bugs(found: list[str]) -> list[Any]:
    return [
        pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=BUGS[name])) if name in BUGS else name
        for name in found
    ]


POINTERS = [f"{const}{name} pointer" for name in names("pointer_to") for const in ("", "const ")]
SAME = [
    *names("value"),
    *POINTERS,
    *(f"{name}" for name in names("constant")),
    *names("same"),
    *names("grid"),
]
SAME += ["grid of a bound kernel", "prepared and bound"]
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


@pytest.mark.parametrize("name", with_bugs(SAME))
def test_templates_launch_as_dynamic_arguments_do(results: Any, name: str) -> None:
    result, records = results[name]
    assert result["error"] == ""
    assert result["keys"] == [result["expected"]] * 2
    assert len(records) == 4
    assert records == [records[0]] * 4


@pytest.mark.parametrize("name", with_bugs(REFUSED))
def test_misuse_is_refused(results: Any, name: str) -> None:
    result, records = results[name]
    assert (bool(result["error"]), records) == (True, [])
