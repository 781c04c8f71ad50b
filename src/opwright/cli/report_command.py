"""opwright report"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from opwright.cli.console import say

report_app = App(name="report")


@report_app.default
def report(
    records: list[Path],
    *,
    out: Annotated[Path, Parameter(help="The page to write.")] = Path("opwright-report.html"),
) -> int:
    """Write one HTML page from the records of verify and bench.

    Args:
        records: Record files, or folders of them.
    """
    from opwright.errors import RecordError
    from opwright.records import read
    from opwright.report import verdict, write_report

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
    print(write_report(found, out))
    return 0
