"""Tables of measurements: their keys and choices, with a timer that is told what to say; the GPU has its own test."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from opwright.triton.packs import tune
from opwright.triton.packs.choice import fastest, make_rows, row_key, runs_on
from opwright.triton.packs.manifest import read_manifest
from opwright.triton.packs.verify import verify
from opwright.triton.worker.packfile import Entry, read_pack
from opwright.triton.worker.values import write_value

from .pack_cases import FILL, KERNELS, SCALED, build, opwright, write_manifest

FOLDER = Path(tune.__file__).parents[1]
# Measures by a formula, calls nothing, and looks at the grid and the arguments that would be launched.
MEASURE = """
import json, sys
sys.path[:] = [sys.argv[1], *filter(None, sys.path)]
import worker, packs.tuner
sys.path.remove(sys.argv[1])
tuner = packs.tuner
calls = []
class Stop(Exception): pass
def bench(call):
    from triton.runtime.jit import JITFunction
    def run(self, *args, grid, warmup, **kwargs):
        names = dict(zip((p.name for p in self.params), args), **kwargs)
        calls.append({"grid": grid(names), **{k: v for k, v in names.items() if isinstance(v, (int, bool))}})
        raise Stop
    genuine, JITFunction.run = JITFunction.run, run
    try:
        call()
    except Stop:
        pass
    finally:
        JITFunction.run = genuine
    times = json.loads(sys.argv[3])
    return times[(len(calls) - 1) % len(times)]
found = tuner.examine(json.loads(sys.argv[2]), tuner.stand_in, bench)
print(json.dumps({**found, "calls": calls}))
"""


def test_fastest() -> None:
    assert fastest([3.0, None, 1.5, 1.5]) == 2
    with pytest.raises(ValueError, match="no configuration can run"):
        fastest([None, None])


@given(st.lists(st.one_of(st.none(), st.floats(0.5, 1e6)), min_size=1).filter(lambda t: any(t)))
def test_the_choice_is_never_slower_than_another(times: list[float | None]) -> None:
    (row,) = make_rows([(["1"], times)])
    chosen = times[row["config"]]
    assert chosen is not None
    assert all(time is None or chosen <= time for time in times)


def test_which_gpu_runs_what() -> None:
    pairs = [(80, 80), (80, 86), (80, 89), (86, 80), (80, 90), (90, 90), (90, 100), (100, 103), (75, 80)]
    assert [pair for pair in pairs if runs_on(*pair)] == [(80, 80), (80, 86), (80, 89), (90, 90)]


def test_row_keys() -> None:
    values = {"x": "a tensor", "n": 4096, "act": "relu", "p": 0.5, "flag": True, "y": None}
    classes = ["*fp16:16", "i32:16", '="relu"', "fp32", "u1", "none", "*i64"]
    key = row_key(["n", "act", "p", "flag", "y", "gone"], values, classes, write_value)
    assert key == ["4096", '"relu"', "0.5", "True", "None", "fp16", "i64"]


def test_cases_of_one_key_are_added_up() -> None:
    rows = make_rows([(["2"], [9.0, 1.0]), (["1"], [1.0, 10.0]), (["1"], [3.0, 2.0]), (["2"], [None, 1.0])])
    assert rows == [
        {"key": ["1"], "config": 0, "microseconds": [4.0, 12.0]},
        {"key": ["2"], "config": 1, "microseconds": [None, 2.0]},
    ]


def _measure(python: Path, asked: dict[str, Any], times: list[float | None]) -> dict[str, Any]:
    done = subprocess.run(
        [python, "-c", MEASURE, FOLDER, json.dumps(asked), json.dumps(times)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=["oldest", "newest"])
def python(request: pytest.FixtureRequest, triton_pythons: dict[str, Path]) -> Path:
    return triton_pythons[(min if request.param == "oldest" else max)(triton_pythons)]


@pytest.mark.triton
def test_every_configuration_is_measured_as_triton_would_call_it(python: Path) -> None:
    asked = {"file": str(KERNELS / "packed.py"), "function": "scaled", "options": {"maxnreg": 64}}
    found = _measure(python, {**asked, "tune": SCALED["tune"]}, [5.0, 7.0, 4.0, 3.0])
    assert found["rows"] == [
        {"key": ["1000", "2", "fp32", "fp16"], "config": 1, "microseconds": [4.0, 3.0]},
        {"key": ["64", "2", "fp32", "fp16"], "config": 0, "microseconds": [5.0, 7.0]},
    ]
    config = {"num_ctas": 1, "num_stages": 3, "warmup": False, "maxnreg": 64}
    seen = [{k: v for k, v in call.items() if k != "warmup"} for call in found["calls"]]
    config.pop("warmup")
    assert seen == [
        {"grid": [1], "n": 64, "BLOCK": 64, "EVEN": True, "num_warps": 2, **config},
        {"grid": [1], "n": 64, "BLOCK": 128, "EVEN": False, "num_warps": 4, **config},
        {"grid": [16], "n": 1000, "BLOCK": 64, "EVEN": False, "num_warps": 2, **config},
        {"grid": [8], "n": 1000, "BLOCK": 128, "EVEN": False, "num_warps": 4, **config},
    ]
    given = {**config, "num_warps": 2}
    assert found["keys"][0] == {
        "args": ["*fp32:16", "i32:16", "*fp16:16", "=2", "=64", "=True"],
        "options": given,
    }
    assert [key["args"][1:] for key in found["keys"][2:]] == [
        ["i32", "*fp16:16", "=2", "=64", "=False"],
        ["i32", "*fp16:16", "=2", "=128", "=False"],
    ]


@pytest.mark.triton
def test_tables_are_kept_in_the_pack(
    triton_pythons: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    snapshot: SnapshotAssertion,
) -> None:
    python = triton_pythons[max(triton_pythons)]
    path = write_manifest(tmp_path, FILL, SCALED)
    build(tmp_path, path, "app.opk", [python], arch="80,90")
    pack = tmp_path / "app.opk"
    kernels = [e.record for e in read_pack(pack) if e.blob]
    assert sorted(r["key"].split(", ")[4] for r in kernels if r["arch"] == 90 and r["function"] == "scaled") == (
        ["=128", "=128", "=64", "=64"]
    )
    genuine, times = tune._ask, [2.0, 1.0]

    def measured(python: str, entries: Any, *, measure: bool, architectures: tuple[int, ...]) -> dict[str, Any]:
        assert (measure, architectures) == (True, (80, 90))
        reply = genuine(python, entries, measure=False, architectures=architectures)
        for result in reply["results"]:
            result["rows"] = make_rows([([n, "2", "fp32", "fp16"], times) for n in ("64", "1000")])
        return {**reply, "gpu": "NVIDIA H100", "arch": 90}

    monkeypatch.setattr(tune, "_ask", measured)
    manifest = read_manifest(path)
    report = tune.tune(manifest, pack, str(python))
    assert (report.kernels, report.rows, report.failures, report.absent) == (1, 2, [], [])
    times[:] = [1.0, 2.0]
    tune.tune(manifest, pack, str(python))
    tables = [e.record for e in read_pack(pack) if "rows" in e.record]
    assert tables == [
        {
            "file": "kernels/packed.py",
            "function": "scaled",
            "arch": 90,
            "gpu": "NVIDIA H100",
            "rows": [
                {"key": [n, "2", "fp32", "fp16"], "config": 0, "microseconds": [1.0, 2.0]} for n in ("1000", "64")
            ],
        }
    ]
    opwright(tmp_path, "pack", "verify", "app.opk", "--root", ".")
    listed = opwright(tmp_path, "pack", "ls", "app.opk").stdout
    assert "kernels/packed.py::scaled sm_90 tuned on NVIDIA H100, 2 keys" in listed

    # A build keeps them, as long as the configurations are the same.
    again = build(tmp_path, path, "app.opk", [python], arch="90")
    assert "Kept 1 tuned table of the app.opk that was there" in again.stderr
    assert [e.record for e in read_pack(pack) if "rows" in e.record] == tables
    report = tune.TuneReport("", 0, 0, 0, [], [])
    monkeypatch.setattr(
        tune, "read", lambda path: [e for e in read_pack(path) if "=128" not in str(e.record.get("key"))]
    )
    monkeypatch.setattr(tune, "write", lambda path, entries: None)
    monkeypatch.setattr(tune, "_ask", lambda *args, **kwargs: measured(*args, measure=True, architectures=(80, 90)))
    absent = tune.tune(manifest, pack, str(python)).absent
    assert len(absent) == 2
    assert all("=128" in key for key in absent)
    file = tmp_path / "kernels/packed.py"
    file.write_text(file.read_text().replace('"BLOCK": 128', '"BLOCK": 256'))
    changed = build(tmp_path, path, "app.opk", [python], arch="90")
    assert "Kept" not in changed.stderr
    assert not [e for e in read_pack(pack) if "rows" in e.record]


@pytest.mark.triton
def test_wrong_tables(triton_pythons: dict[str, Path], tmp_path: Path) -> None:
    python = triton_pythons[max(triton_pythons)]
    build(tmp_path, write_manifest(tmp_path, SCALED, FILL), "app.opk", [python])
    entries = read_pack(tmp_path / "app.opk")
    table = {"file": "kernels/packed.py", "function": "scaled", "arch": 90, "gpu": "GPU"}
    row = {"key": ["64"], "config": 0, "microseconds": [1.0, 2.0]}

    def findings(record: dict[str, Any]) -> list[str]:
        from opwright.triton.worker.packfile import pack

        return [finding.what for finding in verify(pack([*entries, Entry(record)]))[1]]

    assert findings({**table, "rows": [row]}) == []
    (slow,) = findings({**table, "rows": [{**row, "config": 1}]})
    assert "is not the fastest" in slow
    (many,) = findings({**table, "rows": [{**row, "microseconds": [1.0, 2.0, 3.0]}]})
    assert many == "has configuration 0 of 3, and the description 2"
    (outside,) = findings({**table, "rows": [{**row, "config": 2}]})
    assert "expected key, config and microseconds" in outside
    assert findings({**table, "function": "fill", "rows": [row]}) == [
        "is of a kernel that is not under @triton.autotune"
    ]


@pytest.mark.triton
def test_what_is_missing_to_tune(triton_pythons: dict[str, Path], tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    python = triton_pythons[max(triton_pythons)]
    path = write_manifest(tmp_path, FILL)
    command = ("pack", "tune", path, "--out", "app.opk", "--python", python)

    def said() -> str:
        text = opwright(tmp_path, *command, check=2).stderr
        return text.replace(str(tmp_path), "FOLDER").replace(str(python), "PYTHON")

    assert said() == snapshot(name="no tune")
    path = write_manifest(tmp_path, SCALED)
    assert said() == snapshot(name="no pack")
    build(tmp_path, path, "app.opk", [python])
    if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 0:
        pytest.skip("this Python has torch")
    assert said() == snapshot(name="no torch")
    torch = tmp_path / "modules" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text(
        "__version__ = '2.0'\nclass cuda:\n    is_available = staticmethod(lambda: False)\n"
    )
    no_gpu = opwright(tmp_path, *command, check=2, PYTHONPATH=str(torch.parent)).stderr
    assert "torch 2.0 of" in no_gpu
    assert "finds no CUDA GPU" in no_gpu
    (torch / "__init__.py").write_text(
        "class cuda:\n    is_available = staticmethod(lambda: True)\n"
        "    get_device_capability = staticmethod(lambda: (10, 0))\n"
        "    get_device_name = staticmethod(lambda: 'B200')\n"
    )
    other = opwright(tmp_path, *command, check=2, PYTHONPATH=str(torch.parent)).stderr
    assert "the GPU here is sm_100 (B200), and the pack is for sm_90" in other
