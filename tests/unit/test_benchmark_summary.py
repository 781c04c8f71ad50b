"""benchmarks/results/summary.csv, the figures that the documentation quotes, and the module that writes it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 400
DOCUMENTS = [
    path
    for pattern in ("*.md", "docs/**/*.md", "ops/src/opwright_ops/*/NOTES.md")
    for path in sorted(ROOT.glob(pattern))
]


@pytest.fixture
def summary(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "summary", raising=False)
    import summary

    return summary


def test_every_row_is_complete(summary: ModuleType) -> None:
    rows = summary.read()
    assert 0 < len(rows) < MAX_LINES - 1
    for row in rows:
        assert tuple(row) == summary.COLUMNS
        assert (ROOT / row["script"]).is_file(), row
        assert row["figure"], row
        assert row["unit"], row
        assert row["machine"], row
        assert re.fullmatch(r"[0-9a-f]{7,}\+?|unknown", row["commit"]), row
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"]), row
        ends = [float(row[end]) for end in ("low", "value", "high") if row[end]]
        assert ends == sorted(ends), row
    names = [(row["script"], row["figure"]) for row in rows]
    assert len(set(names)) == len(names)


def test_every_benchmark_that_a_document_names_has_rows(summary: ModuleType) -> None:
    measured = {row["script"] for row in summary.read()}
    named = {name for path in DOCUMENTS for name in re.findall(r"`(benchmarks/\w+\.py)", path.read_text())}
    assert len(named) > 10
    assert named - measured == {"benchmarks/fit_math.py"}  # it makes tables of coefficients


def test_the_figures_of_the_readme_are_in_the_summary(summary: ModuleType) -> None:
    line = next(line for line in (ROOT / "README.md").read_text().splitlines() if "`lstm_cuda.py`" in line)
    ours, theirs = re.search(r"\| ([\d.]+) us \| cuDNN ([\d.]+) us", line).groups()
    (row,) = [row for row in summary.read() if row["figure"] == "bfloat16 H=1024 B=32 T=1024, forward"]
    assert f"{float(row['value']):.1f}" == ours
    (cudnn,) = re.findall(r"nn\.LSTM ([\d.]+) ", row["beside"])
    assert f"{float(cudnn):.1f}" == theirs


def test_the_pictures_show_the_summary(summary: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "picture", raising=False)
    import picture

    pages = (ROOT / "README.md").read_text(), (ROOT / "docs" / "README.md").read_text()
    for each in picture.PICTURES:
        assert (summary.RESULTS / each.file).read_text() == picture.draw(each)
        assert any(f"benchmarks/results/{each.file})" in page for page in pages)
    shown = (summary.RESULTS / "beside_pytorch.svg").read_text()
    (row,) = [row for row in summary.read() if row["figure"] == "cold build, torch load_inline"]
    assert f"load_inline {float(row['value']):.0f} s" in shown


def test_raw_results_are_not_tracked() -> None:
    raw = "benchmarks/results/raw/toolkit.json"
    assert subprocess.run(["git", "-C", str(ROOT), "check-ignore", "--quiet", raw]).returncode == 0


def test_an_update_replaces_the_rows_of_its_script_or_part(
    summary: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(summary, "SUMMARY", tmp_path / "summary.csv")
    card = {"cpu": "Intel(R) Xeon(R) Processor", "cores": 2, "device": "", "torch": "2.13.0+cpu"}
    script, other = ROOT / "benchmarks/lstm.py", ROOT / "benchmarks/toolkit.py"

    def update(path: Path, *figures: tuple, group: str = "") -> list[tuple[str, str]]:
        found = [summary.Figure(*figure) for figure in figures]
        summary.update(path, found, card, group=group, commit="abcdef1", date="2026-11-25")
        return [(row["figure"], row["value"]) for row in summary.read()]

    update(other, ("call", 1.30533, "us"))
    update(script, ("H=128", 12.885, "us"), ("H=64", 1.69e-7, "us"), group="cpu")
    assert update(script, ("H=64", 10675.2, "us", 9.0, 20000), group="gpu") == [
        ("cpu: H=64", "1.69e-07"), ("cpu: H=128", "12.88"), ("gpu: H=64", "10675"), ("call", "1.305")
    ]  # fmt: skip
    assert update(script, ("H=64", 3, "us"), group="cpu")[0] == ("cpu: H=64", "3")
    assert update(script, ("H=32", 0.0, "us")) == [("H=32", "0"), ("call", "1.305")]
    assert summary.read()[0]["machine"] == "Intel Xeon, 2 cores, torch 2.13.0+cpu"


def test_candidates_stand_beside_a_value_with_their_ratio(summary: ModuleType) -> None:
    assert summary.beside(8.832, {"eager": 16.768, "copy_": 8.0}) == "eager 16.77 (1.899x); copy_ 8 (0.906x)"
    assert summary.machine_name({"cpu": "AMD EPYC", "cores": 2, "device": "NVIDIA H200", "torch": "2.11"}) == (
        "NVIDIA H200, torch 2.11"
    )
