"""Environment variables that mean the same."""

from __future__ import annotations

import os

import pytest

from opwright import settings
from opwright.dispatch import kernels
from opwright.errors import NoCompilerError


def test_the_warning_without_a_compiler_names_the_one_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPWRIGHT_CXX", "c++-of-nobody")
    monkeypatch.setattr(kernels, "_warned", set())
    with pytest.raises(NoCompilerError) as caught:
        settings.cxx()
    with pytest.warns(RuntimeWarning, match=r"^OPWRIGHT_CXX: no C\+\+ compiler was found \(c\+\+-of-nobody\), so"):
        kernels._warn_once("cpu", caught.value)


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
