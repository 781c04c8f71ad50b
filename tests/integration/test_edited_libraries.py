"""Cells with TORCH_LIBRARY that are edited within a process: what stays, what is replaced, what is refused."""

from __future__ import annotations

import pytest
import torch

from opwright.cpp_extension import load_inline
from opwright.errors import LoadError

pytestmark = pytest.mark.compiler


def cell(name: str, text: str) -> None:
    text = "#include <torch/library.h>\n" + text
    load_inline(name, text, extra_cflags=["-O0"], no_implicit_headers=True, is_python_module=False)


@pytest.mark.slow  # torch/library.h takes a compiler ten seconds
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


@pytest.mark.slow
def test_an_edited_library_with_a_custom_class_is_refused_and_the_earlier_stays() -> None:
    """The operators of both versions were gone."""
    text = """
#include <torch/custom_class.h>
struct Stack : torch::CustomClassHolder { int64_t size() { return 1; } };
int64_t total(int64_t s) { return s + 1; }
TORCH_LIBRARY(with_class, m) {
  m.class_<Stack>("Stack").def(torch::init<>()).def("size", &Stack::size);
  m.def("total(int s) -> int", &total);
}
"""
    cell("with_class", text)
    with pytest.raises(LoadError, match=r"(?s)custom class.*within a process.*start Python again"):
        cell("with_class", text.replace("s + 1", "s + 2"))
    assert torch.ops.with_class.total(1) == 2
    cell("with_class", text)
    assert (torch.ops.with_class.total(1), torch.classes.with_class.Stack().size()) == (2, 1)


# Without ATen: a second, where torch/library.h takes ten.
STABLE = """
#include <torch/csrc/stable/library.h>
STABLE_TORCH_LIBRARY(NAMESPACE, m) { m.def("NAME(int x) -> int"); }
"""


def test_a_namespace_of_another_extension_is_refused() -> None:
    """The second extension removed the operators of the first, and said nothing."""

    def load(extension: str, operator: str, kind: str = "STABLE_TORCH_LIBRARY") -> None:
        text = STABLE.replace("NAMESPACE", "shared_by_two").replace("NAME", operator)
        text = text.replace("STABLE_TORCH_LIBRARY", kind)
        load_inline(extension, text, no_implicit_headers=True, is_python_module=False)

    load("the_first", "f")
    with pytest.raises(LoadError, match=r"(?s)in the extension `the_first`.*TORCH_LIBRARY_FRAGMENT"):
        load("the_second", "g")
    assert torch.ops.shared_by_two.f.default.name() == "shared_by_two::f"
    load("the_second", "g", kind="STABLE_TORCH_LIBRARY_FRAGMENT")
    assert torch.ops.shared_by_two.g.default.name() == "shared_by_two::g"
    load("the_first", "h")  # an edited cell
    names = {name for name in ("f", "g", "h") if hasattr(torch.ops.shared_by_two, name)}
    assert names == {"g", "h"}
