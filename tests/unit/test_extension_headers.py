"""What may be put in front of a source without changing its meaning."""

from __future__ import annotations

from pathlib import Path

import pytest

from opwright.cpp_extension import precompiled
from opwright.cpp_extension.headers import prefix_of

INCLUDE = "#include <torch/extension.h>\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{INCLUDE}torch::Tensor f();", "code"),
        (f"// a comment\n#include <vector>\n{INCLUDE}", "code"),
        ('#include "torch/extension.h"\nPYBIND11_MODULE(m, m) {}', "module"),
        (f"{INCLUDE}PyObject* f();", "module"),
        (f"/* {INCLUDE} */ int x;", None),
        ("int x;", None),
        (f"#define NDEBUG\n{INCLUDE}", None),  # it may mean something to the header
        (f"#include <ATen/ATen.h>\n{INCLUDE}", None),
        (f"#include <Python.h>\n{INCLUDE}", None),
        (f"namespace a {{}}\n{INCLUDE}", None),
        (f"{INCLUDE}torch::nn::Linear l(1, 1);", None),  # only the whole header has it
        (f"{INCLUDE}using namespace torch;", None),
    ],
)
def test_prefix(text: str, expected: str | None) -> None:
    assert prefix_of(text, None, []) == expected


def test_through_a_header_of_the_author(tmp_path: Path) -> None:
    (tmp_path / "mine.h").write_text(f"#pragma once\n#include <vector>\n{INCLUDE}")
    (tmp_path / "guarded.h").write_text(f"#ifndef GUARDED\n#define GUARDED\n{INCLUDE}#endif")
    (tmp_path / "other.h").write_text(f"#define AT_PER_OPERATOR_HEADERS 1\n{INCLUDE}")
    source = tmp_path / "k.cpp"
    assert prefix_of('#include "mine.h"\n', source, []) == "code"
    assert prefix_of('#include "guarded.h"\n', None, [tmp_path]) == "code"
    assert prefix_of('#include "other.h"\n', source, []) is None
    assert prefix_of('#include "missing.h"\n', source, []) is None


def test_headers_of_the_author_in_place_of_those_of_pytorch(tmp_path: Path) -> None:
    assert prefix_of(INCLUDE, None, [tmp_path]) == "code"
    (tmp_path / "pybind11").mkdir()
    assert prefix_of(INCLUDE, None, [tmp_path]) is None


def test_flags_of_a_precompiled_header() -> None:
    flags = ["-O2", "-std=c++20", "-DMINE=1", "-I/a", "-isystem", "/b", "-Wall", "-DNDEBUG", "-fopenmp"]
    assert precompiled.core_flags(flags) == ("-O2", "-std=c++20", "-DNDEBUG", "-fopenmp")
    assert precompiled.core_flags(["-include", "mine.h"]) is None
    assert precompiled.core_flags(["-D", "MINE"]) is None
