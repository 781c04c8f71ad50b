"""Environment variables that mean the same."""

from __future__ import annotations

import os

import pytest

from opwright import settings


@pytest.mark.parametrize(
    ("own", "of_torch", "expected"), [("3", "5", 3), (None, "5", 5), (None, "0", 2), (None, "many", 2), (None, None, 2)]
)
def test_jobs(monkeypatch: pytest.MonkeyPatch, own: str | None, of_torch: str | None, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for name, value in (("OPWRIGHT_JOBS", own), ("MAX_JOBS", of_torch)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert settings.jobs() == expected
