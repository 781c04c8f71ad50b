"""opwright report"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from opwright.cli.console import say

if TYPE_CHECKING:
    from opwright.records import Record

report_app = App(name="report")


@report_app.default
def report(
    records: list[Path],
    *,
    out: Annotated[Path | None, Parameter(help="The page to write: opwright-report.html.")] = None,
    svg: Annotated[Path | None, Parameter(help="A folder to write each picture into, as SVG.")] = None,
    png: Annotated[Path | None, Parameter(help="The same as PNG; needs vl-convert-python.")] = None,
    markdown: Annotated[Path | None, Parameter(help="Write a summary; with --svg or --png it shows the pictures.")] = None,
) -> int:
    """Write one HTML page from the records of verify, bench and build; or pictures, or Markdown.

    Args:
        records: Record files, or folders of them.
    """
    from opwright.errors import RecordError
    from opwright.records import read
    from opwright.report import verdict

    files = [f for path in records for f in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    found = []
    for file in files:
        try:
            found.append(read(file))
        except RecordError as error:
            say(f"skipped: {error}")
    if not found:
        say("error: there are no records to show\n\nhint: `opwright verify TARGET --out reports`")
        return 5
    say(verdict(found))
    for path in _write(found, out, svg, png, markdown):
        print(path)
    return 0


def _write(
    records: list[Record], out: Path | None, svg: Path | None, png: Path | None, markdown: Path | None
) -> list[Path]:
    """Writes what was asked for, the page where nothing else was."""
    from opwright.report import write_markdown, write_png, write_report, write_svg

    pictures = [*(write_svg(records, svg) if svg else []), *(write_png(records, png) if png else [])]
    written = list(pictures)
    if markdown:
        # One file of each picture: those of PNG where there are both, which every reader shows.
        shown = [path for path in pictures if not (svg and png and path.suffix == ".svg")]
        written.append(write_markdown(records, markdown, shown))
    if out or not written:
        written.append(write_report(records, out or Path("opwright-report.html")))
    return written
