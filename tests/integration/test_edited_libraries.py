"""Cells with TORCH_LIBRARY that are edited within a process: what stays, what is replaced, what is refused."""

from __future__ import annotations

import pytest
import torch

from opwright.cpp_extension import load_inline

# torch/library.h takes a compiler ten seconds.
pytestmark = [pytest.mark.compiler, pytest.mark.slow]


def cell(name: str, text: str) -> None:
    text = "#include <torch/library.h>\n" + text
    load_inline(name, text, extra_cflags=["-O0"], no_implicit_headers=True, is_python_module=False)


def test_another_signature_of_one_operator_leaves_the_others() -> None:
    """All operators of the namespace said that they were replaced, whenever they were called again."""
    text = """
int64_t f(int64_t x) { return x + 10; }
int64_t h(int64_t x) { return x + 1; }
TORCH_LIBRARY(one_edited, m) { m.def("f(int x) -> int", &f); m.def("h(int x) -> int", &h); }
"""
    cell("one_edited", text)
    kept_f, kept_h = torch.ops.one_edited.f, torch.ops.one_edited.h
    assert (kept_f(1), kept_h(1)) == (11, 2)
    cell(
        "one_edited",
        text.replace("h(int64_t x) { return x + 1", "h(int64_t x, int64_t k) { return x + k").replace(
            "h(int x)", "h(int x, int k=5)"
        ),
    )
    assert (torch.ops.one_edited.f(1), torch.ops.one_edited.h(1), kept_f(1)) == (11, 6, 11)
    with pytest.raises(RuntimeError, match=r"torch\.ops\.one_edited\.h anew"):
        kept_h(1)
