"""What `verify` finds, for tests of kernels that are wrong and of their right twins."""

from __future__ import annotations

import opwright


def failure_of(function, *checks: str) -> str:
    """Returns the first failure of an operator, "" if there is none."""
    record = opwright.verify(function, checks=checks)
    assert record.backends == ["cpu"]
    assert all(check.outcome in ("passed", "failed") for check in record.checks), record.checks
    assert record.passed == (not record.failures)
    return "".join(f"{f.check}: {f.case}: {f.message}" for f in record.failures[:1])
