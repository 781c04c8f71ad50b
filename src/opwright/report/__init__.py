"""Shows records as one HTML file that opens without a network. Reads records only, never torch."""

from __future__ import annotations

from opwright.report.page import write_report
from opwright.report.verdict import verdict

__all__ = ["verdict", "write_report"]
