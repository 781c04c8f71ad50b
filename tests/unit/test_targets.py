"""Which operators a TARGET means."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from opwright.target import find_operators

SOURCE = """
from jaxtyping import Float
from torch import Tensor
from opwright import operator

@operator("{name}")
def scale(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 2
"""


def names_in(target: str) -> list[str]:
    return [operator.declaration.qualified_name for operator in find_operators(target)]


def test_files_of_one_name_in_two_folders(ns, tmp_path: Path) -> None:
    """Both were one module: the second had the operators of the first as well."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "op.py").write_text(SOURCE.format(name=f"{ns}_{folder}::scale"))
    for folder in ("a", "b", "a"):
        assert names_in(str(tmp_path / folder)) == [f"{ns}_{folder}::scale"]


def test_a_module_that_imports_its_operators_from_others(ns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It declared none where it had been imported before."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{ns}_own.py").write_text(SOURCE.format(name=f"{ns}::scale"))
    (tmp_path / f"{ns}_all.py").write_text(f"from {ns}_own import scale\n")
    try:
        assert names_in(f"{ns}_all") == names_in(f"{ns}_all") == [f"{ns}::scale"]
    finally:
        for name in (f"{ns}_own", f"{ns}_all"):
            sys.modules.pop(name, None)
