"""How the parameters of a kernel differ from those of its contract."""

from __future__ import annotations

from typing import Literal

import pytest
from jaxtyping import Float
from torch import Tensor

from opwright import operator
from opwright.build.parameters import line_of_function, parameters_of, tell_difference
from opwright.contract.schema import interface_of, schema_of

WANTED = "template <typename T> void f(View<const T, 2> x, double eps, Mode mode, View<T, 2> output)"


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("View<const T, 2> x, double eps, Mode mode, View<T, 2> output", ""),
        ("opwright::View<const T,2> a, double  b, ::opwright::Mode c, View< T, 2 > d", ""),
        ("View<const T, 2> x, float eps, Mode mode, View<T, 2> output", "`float eps` must be `double eps`"),
        ("View<const T, 2>& x, double eps, Mode mode, View<T, 2> out", "`View<const T, 2>& x` must be `View<const T, 2> x`"),
        ("View<const T, 2> x, Mode mode, View<T, 2> output", "`double eps` is missing"),
        ("View<const T, 2> x, double eps, Mode mode, int n, View<T, 2> output", "`int n` is one too many"),
        ("View<const T, 2> x, /* double eps, */ Mode mode, View<T, 2> output", "`double eps` is missing"),
        ("View<const T, 1> x, float eps, Mode mode, View<T, 2> output", ""),  # two of them
        ("View<const T, 1> x, Mode mode, View<T, 2> output", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_one_parameter_that_differs_is_named(written: str, told: str) -> None:
    assert tell_difference(f"template <typename T>\nvoid f({written}) {{ g(x, eps); }}", "f", WANTED) == told


def test_two_parameters_of_one_type_are_told_apart() -> None:
    wanted = "void f(View<const T, 1> x, View<T, 1> output)"
    told = tell_difference("void f(View<T, 1> x, View<T, 1> output)", "f", wanted)
    assert told == "`View<T, 1> x` must be `View<const T, 1> x`"


def test_a_function_is_found_by_its_name() -> None:
    text = (
        "void f_helper(int a) {}\nvoid f(int a);\nvoid f(\n    int a, // the first, of (two\n    int b = g(1, 2)) {}\n"
    )
    assert line_of_function(text, "f") == 3
    assert line_of_function(text, "h") == 0
    assert parameters_of(text.split("\n", 2)[2], "f") == ["int a", "int b"]
    assert parameters_of("void f(int a", "f") is None
    assert parameters_of(text, "h") is None


def test_the_interface_of_kernels_has_the_order_of_choices() -> None:
    """Kernels get the number of a choice, so files with another order are another build's."""

    def before(x: Float[Tensor, "n"], way: Literal["up", "down"] = "up") -> Float[Tensor, "n"]:
        return x * 2

    def after(x: Float[Tensor, "n"], way: Literal["down", "up"] = "up") -> Float[Tensor, "n"]:
        return x * 2

    contracts = [operator(f"choices::{f.__name__}")(f).operator.contract for f in (before, after)]
    assert schema_of(contracts[0], "f") == schema_of(contracts[1], "f")
    assert [interface_of(c, "f").split("; ")[1] for c in contracts] == ["way: up | down", "way: down | up"]
