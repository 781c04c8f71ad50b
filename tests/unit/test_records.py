"""Records: old ones read, newer and damaged ones named, fields documented and stable."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from record_fields import KINDS, PAGE, page, parts_of
from syrupy.assertion import SnapshotAssertion

from opwright import records
from opwright.errors import RecordError
from opwright.records import (
    BaseRecord,
    BaseRow,
    BenchRecord,
    CallPart,
    CallRecord,
    Comparison,
    Conditions,
    Limits,
    Machine,
    Measurement,
    Timing,
    VerifyRecord,
)

# Written by an Opwright of version 1, and cut to one or two inputs and three samples.
OLD = sorted((Path(__file__).parent / "records_of_version_1").glob("*.json"))
MACHINE = Machine("EPYC", 2, "", "Linux", "3.11", "2.13", "g++ 12", 0.5)


def every_kind() -> list[records.Record]:
    timing = Timing(
        "opwright",
        2.0,
        1.9,
        0.01,
        [2.0],
        fresh_us=3.0,
        interval=math.inf,
        thread_us=2.0,
        page_faults=0.0,
        peak_bytes=64,
    )
    one = Measurement(
        "step",
        "f32[8]",
        {"n": 8},
        "f32",
        64,
        None,
        [timing],
        0.5,
        True,
        None,
        [Comparison("eager", 1.5, 0.02, 8), Comparison("once", 1.5, math.inf, 1)],
        32,
        0.1,
        "noise",
    )
    conditions = Conditions("own", [0, 1], "keeps", 0.1, 0.2, 2700.0, 2700.0)
    limits = Limits(10.0, 11.0, 200.0, {"f32": 100.0}, 0.8, None, 2, 1.0)
    part = CallPart("python", 0.5, 0.01, "operator - entry")
    row = BaseRow("forward", "f32[8]", 2.0, 2.5, 0.8, 0.05, "slower")
    blind = BaseRow("forward", "f32[9]", 2.0, 2.5, 0.8, math.inf, "same")
    return [
        VerifyRecord("ns::f", [], [], ["cpu"], MACHINE, 1.0, 2.0),
        BenchRecord("ns::f", [one], {"opwright": 1.0}, True, 2, MACHINE, 1.0, 2.0, conditions=conditions, limits=limits, commit="abc"),
        CallRecord("ns::f", "f32[1]", [part], 2.0, {"torch.add": 0.8}, None, 160, MACHINE, 1.0, 2.0),
        BaseRecord("ns::f", "HEAD~1", "interleaved", [row, blind], MACHINE, 1.0, 2.0),
    ]  # fmt: skip


@pytest.mark.parametrize("record", every_kind(), ids=lambda r: type(r).__name__)
def test_every_record_comes_back_as_it_was(record: records.Record, tmp_path: Path) -> None:
    records.save(record, tmp_path / "deep" / "r.json")
    assert records.read(tmp_path / "deep" / "r.json") == record


def test_no_record_takes_the_place_of_another_operators_or_devices(tmp_path: Path) -> None:
    bench, call = every_kind()[1:3]
    for device in ("cpu", "cuda", "cuda:1"):
        records.save_in(tmp_path, replace(bench, device=device))
    found = {path.name: records.read(path).device for path in tmp_path.iterdir()}
    assert found == {"f.bench.json": "cpu", "f.cuda.bench.json": "cuda", "f.cuda1.bench.json": "cuda:1"}
    other = records.save_in(tmp_path, replace(bench, name="other::f"))
    assert other.name == "other.f.bench.json"
    assert records.save_in(tmp_path, replace(bench, seconds=3.0)) == tmp_path / "f.bench.json"
    assert records.read(tmp_path / "f.bench.json").seconds == 3.0
    assert records.save_in(tmp_path, call).name == "f.call.json"
    (tmp_path / "f.call.json").write_text("{")
    assert records.save_in(tmp_path, replace(call, name="other::f")).name == "f.call.json"


def test_there_are_old_records_to_read() -> None:
    assert len(OLD) == 2
    assert {json.loads(p.read_text())["version"] for p in OLD} == {1}


@pytest.mark.parametrize("path", OLD, ids=lambda p: p.stem)
def test_version_1_is_read(path: Path) -> None:
    written = json.loads(path.read_text())
    record = records.read(path)
    assert record.version == 1
    assert [t.median_us for m in record.measurements for t in m.timings] == [
        t["median_us"] for m in written["measurements"] for t in m["timings"]
    ]
    assert (record.conditions, record.limits) == (None, None)


def newer(tmp_path: Path) -> Path:
    path = tmp_path / "newer.json"
    path.write_text(json.dumps({"type": "bench", "version": records.VERSION + 1, "what": "nobody knows yet"}))
    return path


def test_a_newer_version_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError) as caught:
        records.read(newer(tmp_path))
    assert f"it has version {records.VERSION + 1}, and this Opwright reads up to {records.VERSION}" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "no known kind"),
        ('{"type": "poem"}', "no known kind: 'poem'"),
        ('{"type": "mutants", "name": "ns::f", "version": 2}', "records of mutants are no longer read"),
        ('{"type": "call", "name": 3}', "record has no field `case`"),
        ('{"type": "verify", "version": 2, "flavour": 1}', "field"),
        ('{"type": ["verify"]}', "no known kind: ['verify']"),
        ('{"type": "verify", "seconds": NaN}', "it has NaN for a number"),
        ('{"type": "verify", "seconds": 1e999}', "it has 1e999 for a number"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_damaged_record_is_named(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(content)
    with pytest.raises(RecordError) as caught:
        records.read(path)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)


def other_candidate(content: dict) -> None:
    (one,) = content["measurements"]
    content["measurements"].append(one | {"timings": [one["timings"][0] | {"candidate": "eager"}]})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content["machine"].update(copy_gb_s=-1.0), "-1 for copy_gb_s"),
        (lambda content: content.update(host_us={"opwright": -2.0}), "-2 for the host time of opwright"),
        (lambda content: content.update(name="ns::\ud800"), "surrogates not allowed"),
        (other_candidate, "begin with different candidates: eager, opwright"),
    ],
)
def test_a_record_that_no_report_can_show_is_damaged(
    damage: Callable[[dict], Any], reason: str, tmp_path: Path
) -> None:
    content = records.encodable(every_kind()[1])
    damage(content)
    (tmp_path / "damaged.json").write_text(json.dumps(content))
    with pytest.raises(RecordError, match=reason):
        records.read(tmp_path / "damaged.json")


def test_a_field_of_a_later_opwright_is_passed_over(tmp_path: Path) -> None:
    """As the page says that a reader should do: within a version, fields are added."""
    for number, record in enumerate(every_kind()):
        path = tmp_path / f"{number}.json"
        records.save(record, path)
        content = json.loads(path.read_text())
        content["machine"]["weight_kg"] = 17
        path.write_text(json.dumps(content | {"mood": "fine"}))
        assert records.read(path) == record


def test_report_skips_what_it_cannot_read_and_shows_the_rest(run_python, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    for number, record in enumerate(every_kind()):
        records.save(record, folder / f"{number}.json")
    newer(folder)
    (folder / "damaged.json").write_text("{")
    (folder / "f.mutants.json").write_text('{"type": "mutants", "name": "ns::f", "version": 2}')
    program = "import sys; sys.argv = ['opwright', 'report', 'records']\nfrom opwright.cli import main; main()"
    result = run_python(program, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("skipped: ") == 3
    assert "newer.json" in result.stderr
    assert "damaged.json" in result.stderr
    assert "f.mutants.json: records of mutants are no longer read" in result.stderr
    assert "ns::f" in (tmp_path / "opwright-report.html").read_text()


# --- what others build on -----------------------------------------------------------------------------------------


def test_the_fields_of_the_json_of_bench(snapshot: SnapshotAssertion) -> None:
    """Whoever reads `opwright bench --json` relies on these names and types: they may be added to, and a change of
    what is there takes a new version."""
    found = {
        name: {f.name: str(f.type) for f in fields(type_)}
        for kind in (BenchRecord, CallRecord, BaseRecord)
        for name, type_ in parts_of(kind).items()
    }
    assert found == snapshot


def test_every_field_is_documented() -> None:
    text = page(PAGE.read_text())
    assert f"The version is {records.VERSION}." in text
    for kind in KINDS.values():
        for name, type_ in parts_of(kind).items():
            for field in fields(type_):
                row = re.search(rf"^\| `{field.name}` \| .* \| .* \| (.*) \|$", text, re.MULTILINE)
                assert row is not None, (name, field.name)
                assert row[1].strip(), (name, field.name)


@pytest.mark.parametrize(
    ("ratio", "ulp", "worst"),
    [
        (None, None, ""),
        (0.3114, 1.24, "0.31 of the allowance (1.2 ulp)"),
        (0.0, 0.0, "0.00 of the allowance (0 ulp)"),
        (0.42, 1.49e12, "0.42 of the allowance"),  # nothing is left of the digits: an error in ulp means nothing
        (0.08, 0.0, "0.08 of the allowance"),  # of a denormal number
        (731.4, 2e4, "731 times the allowance"),
        (1.8e12, 1e13, "more than 1,000 times the allowance"),
        (math.inf, 0.0, "infinite"),
    ],
)
def test_a_worst_error_is_a_share_of_what_is_allowed(ratio: float | None, ulp: float | None, worst: str) -> None:
    assert records.Check("numerics", "passed", worst_ratio=ratio, worst_ulp=ulp).worst == worst


def test_an_infinite_error_stays_one_in_a_file(tmp_path: Path) -> None:
    check = records.Check("numerics", "failed", worst_ratio=math.inf, worst_ulp=0.0)
    check.errors.append(records.CaseError("f32[2]", 0.0, math.inf))
    verified = records.VerifyRecord("n", [check], [], [], every_kind()[0].machine, 0.0, 0.0)
    records.save(verified, tmp_path / "n.verify.json")
    assert records.read(tmp_path / "n.verify.json").checks[0].worst == "infinite"


def test_the_outcomes_of_checks_are_counted_with_the_reasons() -> None:
    checks = [
        records.Check("a", "passed"),
        records.Check("b", "failed"),
        records.Check("c", "skipped", reason="only on a GPU"),
        records.Check("d", "skipped", reason="it mutates its arguments"),
        records.Check("e", "undecided"),
        records.Check("f", "skipped", reason="it mutates its arguments"),
    ]
    verified = records.VerifyRecord("n", checks, [], [], every_kind()[0].machine, 0.0, 0.0)
    expected = (
        "1 of 6 checks passed; 1 failed; 1 undecided; 2 skipped: it mutates its arguments; 1 skipped: only on a GPU"
    )
    assert verified.outcomes == expected


# --- records of several devices -----------------------------------------------------------------------------------


def record_of(device: str, *cases: tuple[str, str], model: str = "H100", **fields: Any) -> BenchRecord:
    timing = Timing("opwright", 2.0, 1.9, 0.01, [2.0])
    measurements = [Measurement(way, case, {}, "f32", 64, None, [timing], 0.5, False) for way, case in cases]
    machine = replace(MACHINE, device=model)
    return BenchRecord("ns::f", measurements, {}, True, 2, machine, 1.0, 1.0, device=device, **fields)


def test_merged_measurements_are_in_the_order_of_the_inputs_and_name_their_device() -> None:
    parts = {
        "cuda:0": record_of("cuda:0", ("forward", "a"), ("forward", "c"), ("backward", "b"), warnings=["hot"]),
        "cuda:1": record_of("cuda:1", ("forward", "b"), ("backward", "a"), ("backward", "c"), left_out=["compile: no"]),
    }
    merged = BenchRecord.merge(parts)
    assert [(m.direction, m.case) for m in merged.measurements] == [
        *(("forward", name) for name in "abc"),
        *(("backward", name) for name in "abc"),
    ]
    assert [m.device for m in merged.measurements] == [f"cuda:{n % 2}" for n in range(6)]
    assert (merged.device, merged.warnings, merged.left_out) == ("cuda", ["cuda:0: hot"], ["cuda:1: compile: no"])


def test_a_merged_record_says_that_the_devices_differ() -> None:
    parts = {
        "one cuda:0": record_of("cuda", ("forward", "a")),
        "two cuda:0": record_of("cuda", ("forward", "b"), model="H200", refused="it is wrong", hint="correct it"),
    }
    merged = BenchRecord.merge(parts)
    assert merged.warnings == ["the devices differ, so only their ratios compare: H100, H200"]
    assert (merged.refused, merged.hint) == ("it is wrong", "correct it")
