"""Online tuning: every configuration is measured at the first launch with a new key, and only then."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import runtime
import stub
from fault_cases import tidy
from syrupy.assertion import SnapshotAssertion

pytestmark = pytest.mark.compiler
KERNELS = """
import triton
import triton.language as tl

CONFIGS = [triton.Config({"BLOCK": 256}, num_warps=2), triton.Config({"BLOCK": 1024}, num_warps=8)]

@triton.autotune(configs=CONFIGS, key=["n"])
@triton.jit
def tuned_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)

@triton.autotune(configs=CONFIGS, key=["n"], reset_to_zero=["out"])
@triton.jit
def accumulating_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out + at, tl.load(x + at, mask=at < n), mask=at < n)

@triton.autotune(configs=[triton.Config({"BLOCK": 256}, num_warps=3), *CONFIGS], key=["n"])
@triton.jit
def partly_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)

@triton.autotune(configs=[triton.Config({"BLOCK": 256}, num_warps=3)], key=["n"])
@triton.jit
def never_kernel(x, out, n, BLOCK: tl.constexpr):
    tl.store(out, n)

def grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)
"""
ROUNDS = 6 * 4  # five and one to warm up, of four launches


@pytest.fixture
def run(tmp_path: Path) -> Any:
    tritons = stub.find_tritons()
    if not tritons:
        pytest.skip("no Triton at .venv/triton-*/bin/python")
    (tmp_path / "kernels.py").write_text(KERNELS)

    def launch(
        *sizes: int, function: str = "tuned_kernel", settings: str = "tune", fail: str | None = None, **options: Any
    ) -> Any:
        pointers = [{"tensor": "fp32", "address": 0x1000}, {"tensor": "fp32", "address": 0x2000}]
        requests = [
            {
                "file": str(tmp_path / "kernels.py"),
                "function": function,
                "grid": "grid",
                "args": [*pointers, {"int": n}],
                "options": options,
            }
            for n in sizes
        ]
        return runtime.run_launches(tritons[max(tritons)], requests, tmp_path, triton_settings=settings, fail=fail)

    return launch


def test_every_configuration_is_measured_once_for_a_key(run: Any) -> None:
    results, records = run(4096, 4096, 8000)
    assert [result["error"] for result in results] == [None] * 3
    launched = [(record["grid"][0], record["block"][0]) for record in records]
    assert launched[: 2 * ROUNDS].count((16, 64)) == ROUNDS  # 4096 / 256 programs of two warps
    assert launched[: 2 * ROUNDS].count((4, 256)) == ROUNDS
    proper, again = launched[2 * ROUNDS : 2 * ROUNDS + 2]
    assert proper == again  # measured once
    rest = launched[2 * ROUNDS + 2 :]
    assert len(rest) == 2 * ROUNDS + 1  # another n is another key
    assert rest.count((32, 64)) in (ROUNDS, ROUNDS + 1)


def test_without_tuning_the_first_configuration_is_taken(run: Any) -> None:
    _, records = run(4096, settings="")
    assert [(record["grid"][0], record["block"][0]) for record in records] == [(16, 64)]


def test_what_would_have_to_be_restored_is_not_measured(run: Any) -> None:
    _, records = run(4096, function="accumulating_kernel")
    assert len(records) == 1


def test_an_option_that_the_configuration_decides_is_refused(run: Any) -> None:
    results, records = run(4096, num_warps=4)
    assert "`num_warps` is bound, and its @triton.autotune decides it" in results[0]["error"]["message"]
    assert records == []


# The first configuration of `partly_kernel` does not compile, so its place has no kernel; none of the others launches.
FAILING = {"tuned_kernel": "cuLaunchKernelEx:0:1", "partly_kernel": "cuLaunchKernelEx:0:1", "never_kernel": None}


@pytest.mark.parametrize("function", FAILING)
def test_when_no_configuration_can_be_launched_the_error_says_why(
    run: Any, function: str, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    results, records = run(4096, 4096, function=function, fail=FAILING[function])
    first, again = (tidy(result["error"]["message"], tmp_path) for result in results)
    assert first == snapshot
    assert again == first  # nothing of it was kept
    assert records == []


def test_a_configuration_that_cannot_be_launched_is_passed_over(run: Any) -> None:
    results, records = run(4096, function="partly_kernel")
    assert results == [{"error": None}]
    launched = [(record["grid"][0], record["block"][0]) for record in records]
    assert launched[:-1].count((16, 64)) == launched[:-1].count((4, 256)) == ROUNDS
