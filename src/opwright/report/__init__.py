"""Shows records as one HTML file that opens without a network. Reads records only, never torch."""

from __future__ import annotations

from opwright.report.export import write_png, write_svg
from opwright.report.markdown import write_markdown
from opwright.report.page import write_report
from opwright.report.verdict import verdict

__all__ = ["verdict", "write_markdown", "write_png", "write_report", "write_svg"]
