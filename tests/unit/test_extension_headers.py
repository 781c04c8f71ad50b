"""What may be put in front of a source without changing its meaning."""

from __future__ import annotations

from pathlib import Path

import pytest

from opwright.cpp_extension import precompiled
from opwright.cpp_extension.headers import prefix_of
from opwright.cpp_extension.objects import Source

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
        (f"#include <ATen/ATen.h>\n#include <c10/cuda/CUDAGuard.h>\n#include <Python.h>\n{INCLUDE}", "code"),
        (f"#include <torch/csrc/stable/library.h>\n{INCLUDE}", None),
        (f"#include <pybind11/numpy.h>\n{INCLUDE}", None),
        ("#include <torch/torch.h>\nvoid f();", "code"),
        ("#include <torch/torch.h>\nPYBIND11_MODULE(m, m) {}", "module"),
        ("#include <torch/all.h>\nPyObject* f();", "all"),  # which has no Python
        ("#include <torch/script.h>\nvoid f();", "all"),
        (f"#include <torch/script.h>\n{INCLUDE}PYBIND11_MODULE(m, m) {{}}", "module"),
        ("#ifdef WITH_PYTHON\n#include <Python.h>\n#endif\n#include <torch/script.h>\n", "all"),
        ("#ifdef WITH_PYTHON\n#include <torch/script.h>\n#endif\n", None),
        ("#ifdef MINE\n#include <Python.h>\n#endif\n#include <torch/script.h>\n", None),
        ("#include <torch/script.h>\ntorch::jit::Module m;", None),
        ("#define C10_DISABLE_ENUM\n#include <torch/all.h>\n", None),
        ("#include <ATen/ATen.h>\n#include <torch/types.h>\n", None),  # the prefix has much more
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
    (tmp_path / "changing.h").write_text(f"#pragma once\n#define NDEBUG\n{INCLUDE}")
    (tmp_path / "declaring.h").write_text("#ifndef D\n#define D\nvoid f();\n#endif\n")
    (tmp_path / "empty.h").write_text("#ifndef EMPTY_H\n#define EMPTY_H\n#include <vector>\n#endif  // EMPTY_H\n")
    (tmp_path / "config.h").write_text("#ifndef NDEBUG\n#define NDEBUG\n#endif\n")  # no guard, but a macro
    source = tmp_path / "k.cpp"
    assert prefix_of('#include "mine.h"\n', source, []) == "code"
    assert prefix_of('#include "guarded.h"\n', None, [tmp_path]) == "code"
    assert prefix_of('#include "other.h"\n', source, []) is None
    assert prefix_of('#include "missing.h"\n', source, []) is None
    assert prefix_of('#include "changing.h"\n', source, []) is None
    assert prefix_of(f'#include "declaring.h"\n{INCLUDE}', source, []) is None
    assert prefix_of(f'#include "empty.h"\n{INCLUDE}', source, []) == "code"
    assert prefix_of(f'#include "config.h"\n{INCLUDE}', source, []) is None
    assert prefix_of(f"#include <declaring.h>\n{INCLUDE}", source, [tmp_path]) is None


def test_headers_of_the_author_in_place_of_those_of_pytorch(tmp_path: Path) -> None:
    assert prefix_of(INCLUDE, None, [tmp_path]) == "code"
    (tmp_path / "pybind11").mkdir()
    assert prefix_of(INCLUDE, None, [tmp_path]) is None
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/extension.h").write_text("namespace torch {}\n")
    assert prefix_of('#include "torch/extension.h"\n', tmp_path / "k.cpp", []) is None


def test_flags_of_a_precompiled_header() -> None:
    flags = ["-O2", "-std=c++20", "-DMINE=1", "-I/a", "-isystem", "/b", "-Wall", "-DNDEBUG", "-fopenmp"]
    assert precompiled.core_flags(flags) == ("-O2", "-std=c++20", "-DNDEBUG", "-fopenmp")
    assert precompiled.core_flags(["-include", "mine.h"]) is None
    assert precompiled.core_flags(["-D", "MINE"]) is None


def test_folders_in_flags_are_searched(tmp_path: Path) -> None:
    (tmp_path / "mine.h").write_text("#define NDEBUG\n")
    text = f"#include <mine.h>\n{INCLUDE}"
    assert Source("cpp", text).kind == "code"  # as a header of the system
    for flags in ([f"-I{tmp_path}"], ["-I", str(tmp_path)], ["-isystem", str(tmp_path)], ["-include", "mine.h"]):
        assert Source("cpp", text, flags=tuple(flags)).kind is None
