"""opwright report"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from opwright.cli.console import say
from opwright.cli.help import make_app

if TYPE_CHECKING:
    from opwright.records import Record

_PAGE = Path("opwright-report.html")
report_app = make_app("report")


@report_app.default
def report(
    records: list[Path],
    *,
    out: Annotated[Path | None, Parameter(help="The page to write: opwright-report.html.")] = None,
    svg: Annotated[Path | None, Parameter(help="A folder to write each picture into, as SVG.")] = None,
    png: Annotated[Path | None, Parameter(help="The same as PNG; needs vl-convert-python.")] = None,
    markdown: Annotated[
        Path | None, Parameter(help="Write a summary; with --svg or --png it shows the pictures.")
    ] = None,
) -> int:
    """Write one HTML page from the records of verify, bench and build; or pictures, or Markdown.

    Exit code 5: there are no records.

    Args:
        records: Record files, or folders of them.
    """
    from opwright.errors import RecordError
    from opwright.records import read
    from opwright.report import verdict

    files = [f for path in records for f in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    found, skipped = [], []
    for file in files:
        try:
            found.append(read(file))
        except RecordError as error:
            skipped.append(f"{file}: {error.rows[0][1]}")
            say(f"skipped: {skipped[-1]}")
    if not found:
        deeper = next((path for path in records if path.is_dir() and any(path.glob("*/*.json"))), None)
        target = next((path for path in records if path.suffix == ".py"), "TARGET")
        hint = f"opwright report {deeper}/*" if deeper else f"opwright verify {target} --out reports"
        say(f"error: there are no records to show\n\nhint: `{hint}`")
        return 5
    say(verdict(found))
    page = out / _PAGE if out and out.is_dir() else out
    try:
        written = _write(found, skipped, page, svg, png, markdown)
    except OSError as error:
        raise RecordError("report", "it cannot be written", rows=[("reason", str(error))]) from None
    for path in written:
        print(path)
    return 0


def _write(
    records: list[Record],
    skipped: list[str],
    out: Path | None,
    svg: Path | None,
    png: Path | None,
    markdown: Path | None,
) -> list[Path]:
    """Writes what was asked for, the page where nothing else was."""
    from opwright.report import write_markdown, write_png, write_report, write_svg

    pictures = [*(write_svg(records, svg) if svg else []), *(write_png(records, png) if png else [])]
    written = [file.path for file in pictures]
    if markdown:
        # One file of each picture: those of PNG where there are both, which every reader shows.
        shown = [file for file in pictures if not (svg and png and file.path.suffix == ".svg")]
        written.append(write_markdown(records, markdown, shown, skipped))
    if out or not written:
        written.append(write_report(records, out or _PAGE, skipped))
    return written
