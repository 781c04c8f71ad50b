"""Which kernels the text of a source exports."""

from __future__ import annotations

from pathlib import Path

import pytest

from opwright.backends.exports import find_exports
from opwright.contract.sources import Source

PLAIN = "#include <opwright/kernel.h>\nvoid one() {}\nOPWRIGHT_KERNEL(one, float, opwright::half)\n"


def exports_of(text: str, tmp_path: Path, backend: str = "cpu"):
    path = tmp_path / "cpu.cpp"
    path.write_text(text)
    return find_exports(Source(backend, path, None, str(path)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PLAIN, {"one": ["float", "opwright::half"]}),
        (
            "OPWRIGHT_KERNEL(one,\n    float,\n    double)\nOPWRIGHT_KERNEL(two)\n",
            {"one": ["float", "double"], "two": []},
        ),
        ("// OPWRIGHT_KERNEL(one, float)\n/* OPWRIGHT_KERNEL(two,\n float) */\n", {}),
        ('const char* text = "/*";\nOPWRIGHT_KERNEL(one, float)  // */\n', {"one": ["float"]}),
        ('#include "inner.h"\n', {"inner": ["double"]}),
        # Which names it exports is the preprocessor's to say.
        ("#define EXPORT(NAME) \\\n  OPWRIGHT_KERNEL(NAME, float)\nEXPORT(one)\n", None),
        ('#include "nowhere.h"\n', None),
    ],
)  # fmt: skip
def test_exports_are_read_off_the_text(text: str, expected, tmp_path: Path) -> None:
    (tmp_path / "inner.h").write_text('#include "cpu.cpp"\nOPWRIGHT_KERNEL(inner, double)\n')
    assert exports_of(text, tmp_path) == expected


def test_a_language_of_its_own_exports_otherwise(tmp_path: Path) -> None:
    assert exports_of(PLAIN, tmp_path, "triton") is None
