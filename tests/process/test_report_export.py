"""Pictures as files, Markdown, and the page of 20 operators in a browser."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import shutil
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from fork_server import run_opwright
from report_cases import FAILURES, Page, compare, make_bench, make_gpu_bench, make_timing, make_verify

from opwright.errors import RecordError
from opwright.records import save
from opwright.report import write_markdown, write_png, write_report, write_svg
from opwright.report.export import File

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def _benchmark():
    """Returns benchmarks/report.py: the records of 20 operators, and a browser to look at their page."""
    spec = importlib.util.spec_from_file_location("benchmark_of_the_report", ROOT / "benchmarks" / "report.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        spec.loader.exec_module(module)
    return module


# --- files ----------------------------------------------------------------------------------------------


def test_each_picture_is_a_file_that_needs_no_style_sheet(tmp_path) -> None:
    written = write_svg([make_verify(), make_bench()], tmp_path / "svg")
    names = sorted(file.path.name for file in written)
    assert names[0] == "ns-bias-gelu-errors.svg"
    assert {"ns-bias-gelu-roofline.svg", "ns-bias-gelu-sizes-4.svg", "ns-bias-gelu-speed-ups.svg"} <= set(names)
    for path in (file.path for file in written):
        text = path.read_text()
        root = ElementTree.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(" not in text
        assert "prefers-color-scheme: dark" in text
        assert not re.search(r'(href|src)="|url\((?!#)|@import', text)
        style = root.find("{http://www.w3.org/2000/svg}style").text
        used = {name for node in root.iter() for name in (node.get("class") or "").split()}
        ruled = set(re.findall(r"\.([a-z][\w-]*)", style))
        assert used <= ruled
        lines = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
        title = {"roofline": "roofline", "speed-ups": "speed-ups", "errors": "error map"}.get(path.stem[14:])
        assert (
            title is None or lines[0] == f"ns::bias_gelu: {title}"
        )  # alone it says what it is of, and where it was made
        assert lines[1].startswith("EPYC 9B14, PyTorch 2.13.0+cpu, 2026-")


def test_an_operator_on_two_machines_gets_two_sets_of_files(tmp_path) -> None:
    written = write_svg([make_bench(), make_gpu_bench()], tmp_path)
    assert len({file.path for file in written}) == len(written)
    assert {file.path.name.split("-")[3] for file in written} == {"1", "2"}


@pytest.mark.parametrize(
    "names",
    [("ns::f_a", "ns::f__a"), ("ns::größe", "ns::gr e"), ("x" * 300, "x" * 301)],
    ids=["signs", "letters", "long"],
)
def test_names_that_files_cannot_tell_apart_get_two_sets_of_files(tmp_path, names) -> None:
    written = write_svg([make_bench(name) for name in names], tmp_path)
    assert len({file.path for file in written}) == len(written)
    assert {file.operator for file in written} == set(names)


def test_png_is_twice_as_large_as_the_picture(tmp_path) -> None:
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed")
    (path,) = [f.path for f in write_png([make_bench()], tmp_path) if "roofline" in f.path.name]
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (
        2200,
        1052,
    )  # 66 pixels of each are its heading and where it was measured


def test_without_vl_convert_png_says_what_to_type(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(RecordError) as caught:
        write_png([make_bench()], tmp_path / "png")
    assert "PNG files are made by vl-convert, which is not installed" in str(caught.value)
    assert "hint: `pip install vl-convert-python`, or `opwright report --svg FOLDER`" in str(caught.value)
    assert not (tmp_path / "png").exists()


# --- Markdown -------------------------------------------------------------------------------------------


def test_markdown_has_the_verdict_a_table_and_the_failures(tmp_path) -> None:
    records = [make_verify("ns::a|b"), make_bench("ns::a|b"), make_verify("ns::c", FAILURES), make_bench("ns::c")]
    path = write_markdown(
        records, tmp_path / "deep" / "sum.md", [File(tmp_path / "svg" / "x.svg", "ns::c", "ns::c: shares. 3 [inputs].")]
    )
    text = path.read_text()
    assert text.startswith("**1 of 2 operators FAIL verify: ns::c (2 failures).**\n")
    rows = [re.split(r"(?<!\\)\|", line) for line in text.splitlines() if line.startswith("|")]
    assert len({len(row) for row in rows}) == 1
    good = next(row for row in rows if "a\\|b" in row[1])
    forward, backward = (s for s in make_bench().summarize() if s.candidate == "eager")
    assert [cell.strip() for cell in good[2:6]] == ["✅ verified", "412", "forward", f"{forward.ratio:.2f}x ±1.2 %"]
    after = rows[rows.index(good) + 1]
    assert [cell.strip() for cell in after[1:6]] == ["", "", "", "backward", f"{backward.ratio:.2f}x ±1.2 %"]
    bad = next(row for row in rows if "ns::c" in row[1])
    assert [cell.strip() for cell in bad[2:]] == ["❌ fails", "112", *6 * [""]]
    assert "numerics on f32[7, 13] sliced\nerror 3.1e-2 at [6, 12]\n  of 7.9e-5\nlast column\nverify x\n```" in text
    assert "![ns::c: shares. 3 \\[inputs\\].](<../svg/x.svg>)" in text
    assert "Pictures of" not in text
    assert "<zero> & more" in text.split("```")[3]  # in a block of code nothing is markup


def test_pictures_of_several_operators_are_folded_and_told_in_words(tmp_path) -> None:
    records = [make_bench(), make_bench("ns::d<b>", flop_each=None)]
    pictures = write_svg(records, tmp_path / "svg")
    text = write_markdown(records, tmp_path / "sum.md", pictures, ["bad.json: no [record]"]).read_text()
    folded = re.findall(r"<details><summary>Pictures of (.*)</summary>\n\n((?:!\[.*\n\n)+)</details>", text)
    assert [name for name, _ in folded] == ["ns::bias_gelu", "ns::d&lt;b&gt;"]
    assert sum(block.count("![") for _, block in folded) == len(pictures)
    assert "![ns::bias\\_gelu: share of the roof. 12 inputs, 3 % to 75 % of the copy bandwidth.](<svg/" in text
    assert "<sub>not read: bad.json: no \\[record\\]</sub>" in text


def test_the_fastest_of_the_other_candidates_has_one_column(tmp_path) -> None:
    """Each peer had a column of its own, in a table of as many columns as all operators had peers."""
    records = [make_bench(), make_bench("ns::other")]
    for m in records[1].measurements:
        m.timings[1:] = [make_timing("apex", 6 * m.timings[0].median_us), make_timing("te", 4 * m.timings[0].median_us)]
        compare(m)
    text = write_markdown(records, tmp_path / "sum.md").read_text()
    head, _, *rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("|")]
    assert head[4:8] == ["direction", "vs eager", "vs compile", "vs fastest other"]
    assert [row[7] for row in rows] == 2 * ["1.26x ±1.2 % (liger)"] + 2 * ["4.04x ±1.2 % (te)"]
    page = Page(write_report(records, tmp_path / "r.html"))
    assert page.cells("ns::other")[2:] == ["", "forward", "", "", "4.04x ±1.2 % (te)", "75 %"]


def test_names_from_records_are_no_markup(tmp_path) -> None:
    text = write_markdown([make_verify("ns::<img>*", FAILURES)], tmp_path / "x.md").read_text()
    assert "ns::\\<img\\>\\*" in text.splitlines()[0]


# --- the command ----------------------------------------------------------------------------------------


def run_report(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_opwright("report", *arguments, cwd=folder, env={"CI": "1"})


def test_the_command_writes_what_is_asked_for_and_the_page_where_nothing_is(tmp_path) -> None:
    save(make_verify(), tmp_path / "records" / "a.verify.json")
    save(make_bench(), tmp_path / "records" / "a.bench.json")
    plain = run_report(tmp_path, "records")
    assert plain.stdout == "opwright-report.html\n"
    both = run_report(tmp_path, "records", "--markdown", "sum.md", "--svg", "pictures")
    assert both.returncode == 0, both.stderr
    lines = both.stdout.splitlines()
    assert lines[-1] == "sum.md"
    assert len(lines) == 1 + len(list((tmp_path / "pictures").glob("*.svg")))
    assert (tmp_path / "sum.md").read_text().count("](<pictures/") == len(lines) - 1
    assert not (tmp_path / "page.html").exists()
    (tmp_path / "opwright-report.html").unlink()
    run_report(tmp_path, "records", "--svg", "pictures")
    assert not (tmp_path / "opwright-report.html").exists()


def test_the_page_lists_newer_and_damaged_records_as_skipped(tmp_path) -> None:
    save(make_verify(), tmp_path / "good.json")
    newer = json.loads((tmp_path / "good.json").read_text()) | {"version": 99}
    (tmp_path / "newer.json").write_text(json.dumps(newer))
    (tmp_path / "damaged.json").write_text('{"type": "verify", ')
    done = run_report(tmp_path, ".")
    assert done.returncode == 0
    told = [line for line in done.stderr.splitlines() if line.startswith("skipped: ")]
    assert told[0].startswith("skipped: damaged.json: it is not a record, which is JSON: Expecting ")
    assert told[1] == "skipped: newer.json: it has version 99, and this Opwright reads up to 2"
    page = (tmp_path / "opwright-report.html").read_text()
    assert "2 files are not in this report, as no record could be read from them" in page
    assert f"<li>{html.escape(told[1].removeprefix('skipped: '))}</li>" in page


def test_an_operator_is_not_a_record(tmp_path) -> None:
    (tmp_path / "op.py").write_text("import torch\n")
    refused = run_report(tmp_path, "op.py")
    assert refused.returncode == 5
    assert refused.stderr.startswith("skipped: op.py: it is not a record, which is JSON: ")
    assert refused.stderr.endswith("hint: `opwright verify op.py --out reports`\n")


def test_records_in_folders_below_are_pointed_at(tmp_path) -> None:
    save(make_verify(), tmp_path / "records" / "1a2b3c4" / "a.json")
    refused = run_report(tmp_path, "records")
    assert (refused.returncode, refused.stdout) == (5, "")
    assert "hint: `opwright report records/*`" in refused.stderr


def test_what_cannot_be_written_is_an_error_and_a_folder_gets_a_page(tmp_path) -> None:
    save(make_verify(), tmp_path / "records" / "a.json")
    refused = run_report(tmp_path, "records", "--svg", "records/a.json")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[1] == "error: `report`: it cannot be written   [OPW304]"
    assert "Traceback" not in refused.stderr
    assert run_report(tmp_path, "records", "--out", "records").stdout == "records/opwright-report.html\n"
    with pytest.raises(RecordError, match="no records can be written into this folder"):
        save(make_verify(), tmp_path / "records" / "a.json" / "b.json")


def test_the_commands_of_the_guide_work(tmp_path) -> None:
    """Those that read records; how they are made is tested elsewhere."""
    guide = (ROOT / "docs" / "guides" / "report.md").read_text()
    commands = re.findall(r"^\$ opwright report (.*)$", guide, re.MULTILINE)
    assert len(commands) == 3
    save(make_verify(), tmp_path / "records" / "a.verify.json")
    save(make_bench(), tmp_path / "records" / "a.bench.json")
    has_png = importlib.util.find_spec("vl_convert") is not None
    for command in commands:
        done = run_report(tmp_path, *command.split())
        assert done.returncode == (2 if "--png" in command and not has_png else 0), done.stderr
    assert (tmp_path / "report.html").exists()
    titles = set(re.findall(r"^\| ([A-Z][\w -]+) \|", guide, re.MULTILINE))
    page = (tmp_path / "report.html").read_text()
    drawn = set(re.findall(r"<figure[^>]*>\s*<h3>([^<]*)</h3>", page))
    assert drawn == {"Speed-ups", "Roofline", "Share of the roof", "Time against size", "All samples", "Error map"}
    assert drawn < titles


# --- twenty operators -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large_page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    return write_report(_benchmark().make_records(), folder / "report.html")


def test_twenty_operators_fit_two_megabytes(large_page: Path) -> None:
    assert large_page.stat().st_size <= 2_000_000
    page = Page(large_page)
    assert page.mistakes == []
    assert len(set(page.ids)) == len(page.ids)
    assert not re.search(r'(src|href)="(?!#|data:,)', page.source)


@pytest.mark.chromium
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
def test_twenty_operators_in_a_browser(large_page: Path) -> None:
    """No picture or table is wider than a narrow screen, no text of a picture outside of it; in print, too."""
    browser = _benchmark().Browser()
    outside = """[...document.querySelectorAll("svg")].slice(0, 60).flatMap(svg => {
        const box = svg.getBoundingClientRect();
        return [...svg.querySelectorAll("text")].map(t => t.getBoundingClientRect())
          .filter(r => r.width && (r.left < box.left - 1 || r.right > box.right + 1 || r.bottom > box.bottom + 1
                                   || r.top < box.top - 1)).map(r => svg.querySelector("title").textContent);
      })"""
    try:
        for width, media in ((375, ""), (1280, ""), (794, "print")):
            browser.ask(
                "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
            )
            browser.ask("Emulation.setEmulatedMedia", media=media)
            browser.events.clear()
            browser.ask("Page.navigate", url=large_page.as_uri())
            browser.wait_for(lambda event: event.get("method") == "Page.loadEventFired")

            def value(expression: str):
                return browser.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"]["value"]

            if media != "print":
                assert value("document.documentElement.scrollWidth") <= width
            assert value(outside) == []
            unnamed = 'svg:not([aria-labelledby]), [role="region"]:not([aria-labelledby]):not([aria-label])'
            assert value(f"document.querySelectorAll('{unnamed}').length") == 0
            levels = value("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])")
            assert levels[0] == 1
            assert all(b - a <= 1 for a, b in pairwise(levels))  # no level left out
    finally:
        browser.close()
