"""A wheel whose build requirements cannot be installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from opwright.errors import PackageError
from opwright.package.build import build_project


def test_requirements_that_are_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before a release, or without a network: what is installed will do."""
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "some-ops"\nversion = "1.0"\n'
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(PackageError, match="No matching distribution found for hatchling") as caught:
        build_project(tmp_path, tmp_path / "dist")
    assert str(caught.value).endswith("hint: `opwright wheel --no-isolation` builds with what is installed here")
    assert not (tmp_path / "dist").exists()


def test_an_environment_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error named no remedy."""
    (tmp_path / "pyproject.toml").write_text("")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(PackageError, match=r"No module named pip\n\nhint: `.*/python -m ensurepip`, or `uv pip"):
        build_project(tmp_path, tmp_path / "dist")
