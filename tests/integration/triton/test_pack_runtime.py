"""From an application to a frozen process: recorded, built and tuned by the command, launched by the C++ runtime."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import runtime
import stub

from opwright.triton.packs.choice import make_rows
from opwright.triton.worker.packfile import Entry, read_pack, write_pack

from .pack_cases import SCALED, build, opwright, write_manifest

pytestmark = [pytest.mark.triton, pytest.mark.compiler]
POINTER = 0x10000


def _launches(folder: Path) -> list[dict[str, Any]]:
    packed, add = str(folder / "kernels/packed.py"), str(folder / "kernels/add.py")

    def tensor(dtype: str, at: int = POINTER) -> dict[str, Any]:
        return {"tensor": dtype, "address": at}

    sums = [tensor("fp32"), tensor("fp32", POINTER + 4), tensor("fp32"), {"int": 1000}, {"constexpr": "256"}]
    return [
        {"file": packed, "function": "fill", "grid": [2], "args": [tensor("i32"), {"int": 7}]},
        {"file": add, "function": "add_kernel", "grid": [4], "args": sums, "options": {"num_warps": 2}},
        {
            "file": packed,
            "function": "scaled",
            "grid": [1],
            "args": [tensor("fp32"), {"int": 64}, tensor("fp16")],
        },
    ]


def _launched(record: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: call[name] for name in ("function", "grid", "block", "shared", "params") if name in call}
        for call in record
        if "grid" in call
    ]


def test_recorded_built_tuned_and_frozen(triton_pythons: dict[str, Path], tmp_path: Path) -> None:
    python = triton_pythons[min(triton_pythons)]
    write_manifest(tmp_path)
    (tmp_path / "manifest.json").unlink()
    launches = _launches(tmp_path)
    results, seen = runtime.run_launches(python, launches, tmp_path)
    assert [result["error"] for result in results] == [None, None, None]

    program = runtime.build(runtime.ROOT / "tests/native/triton_runner.cpp")
    environment = stub.environment() | {
        "OPWRIGHT_TRITON": f"python={python}",
        "OPWRIGHT_CACHE_DIR": os.environ.get("OPWRIGHT_TEST_CACHE", str(tmp_path / "cache")),
    }
    command = ("--", program, "launches.json", "results.jsonl")
    recorded = opwright(tmp_path, "pack", "record", *command, **environment)
    assert recorded.stderr == "Recorded 3 kernel keys, 3 of them new; manifest.json has 3 kernel keys\n"
    manifest = tmp_path / "manifest.json"
    document = json.loads(manifest.read_text())
    assert document["architectures seen"] == [90]
    assert {kernel["file"] for kernel in document["kernels"]} == {"kernels/packed.py", "kernels/add.py"}

    # What the runtime compiled is in the cache, under the same digests.
    built = opwright(tmp_path, "pack", "build", manifest, "--out", "app.opk", **environment)
    assert "Built 3 kernels" in built.stderr
    assert "3 cached" in built.stderr
    frozen, again = runtime.run_launches(None, launches, tmp_path, triton_settings=f"pack={tmp_path}/app.opk,freeze")
    assert [result["error"] for result in frozen] == [None, None, None]
    assert _launched(again) == _launched(seen)
    assert len(_launched(again)) == 3

    # The table of the pack decides, and every configuration is there.
    document["kernels"].append(SCALED)
    manifest.write_text(json.dumps(document))
    build(tmp_path, manifest, "app.opk", [python])
    entries = read_pack(tmp_path / "app.opk")
    for times, warps in (([1.0, 2.0], 2), ([2.0, 1.0], 4)):
        rows = make_rows([(["64", "2", "fp32", "fp16"], times)])
        place = {"file": "kernels/packed.py", "function": "scaled", "arch": 90, "gpu": "GPU"}
        write_pack(tmp_path / "tuned.opk", [*entries, Entry({**place, "rows": rows})])
        tuned, calls = runtime.run_launches(
            None, launches[2:], tmp_path, triton_settings=f"pack={tmp_path}/tuned.opk,freeze"
        )
        assert tuned == [{"error": None}]
        assert _launched(calls)[0]["block"] == [32 * warps, 1, 1]


def test_what_a_frozen_process_misses_is_what_the_manifest_takes(
    triton_pythons: dict[str, Path], tmp_path: Path
) -> None:
    python = triton_pythons[min(triton_pythons)]
    manifest = write_manifest(
        tmp_path, {"file": "kernels/packed.py", "function": "fill", "args": ["*i32:16", "i32:1", "=64"]}
    )
    build(tmp_path, manifest, "app.opk", [python])
    launches = _launches(tmp_path)[:1]
    settings = f"pack={tmp_path}/app.opk,freeze"
    (result,), _ = runtime.run_launches(None, launches, tmp_path, triton_settings=settings)
    # The error ends in the line to add.
    line = result["error"]["message"].splitlines()[-1].strip()
    document = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**document, "kernels": [*document["kernels"], json.loads(line)]}))
    build(tmp_path, manifest, "app.opk", [python])
    (result,), _ = runtime.run_launches(None, launches, tmp_path, triton_settings=settings)
    assert result["error"] is None
