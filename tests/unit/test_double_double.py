"""Functions on pairs of float64 tensors against mpmath in 120 digits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch

from opwright.verify import double_double as dd
from opwright.verify.double_double import Pair

_COUNT = 40
mp = mpmath.MPContext()
mp.dps = 120


def _numbers(low: float, high: float, octaves: int = 0) -> Pair:
    """Returns numbers of a range with digits beyond float64, spread over so many octaves below and above it."""
    generator = torch.Generator().manual_seed(1)
    value = torch.rand(_COUNT, dtype=torch.float64, generator=generator) * (high - low) + low
    less = value * 2.0**-54 * (torch.rand(_COUNT, dtype=torch.float64, generator=generator) - 0.5)
    scale = 2.0 ** torch.randint(-octaves, octaves + 1, (_COUNT,), generator=generator).double()
    return Pair(value * scale, less * scale)


def _exact(value: Pair) -> list[Any]:
    return [mp.mpf(high) + mp.mpf(low) for high, low in zip(value.high.tolist(), value.low.tolist(), strict=True)]


def _reversed(value: Pair) -> Pair:
    return Pair(value.high.flip(0), value.low.flip(0))


def _worst(found: Pair, exact: list[Any]) -> float:
    return max(float(abs(f / e - 1)) for f, e in zip(_exact(found), exact, strict=True))


_UNARY: list[tuple[Callable[[Pair], Pair], Callable[[Any], Any], list[Pair]]] = [
    (dd.square_root, mp.sqrt, [_numbers(1, 4, 300)]),
    (dd.exponential, mp.exp, [_numbers(-600, 700), _numbers(-1e-3, 1e-3, 9)]),
    (dd.exponential_of_two, lambda x: 2**x, [_numbers(-800, 1000)]),
    (dd.exponential_minus_one, mp.expm1, [_numbers(-50, 700), _numbers(-0.4, 0.4, 6), _numbers(0.3, 0.4)]),
    (dd.logarithm, mp.log, [_numbers(0.5, 2), _numbers(1, 2, 900), _numbers(1 - 1e-9, 1 + 1e-9)]),
    (dd.logarithm_of_one_plus, mp.log1p, [_numbers(-0.99, 2), _numbers(-0.3, 0.4, 40)]),
    (dd.sigmoid, lambda x: 1 / (1 + mp.exp(-x)), [_numbers(-600, 50)]),
    (dd.hyperbolic_tangent, mp.tanh, [_numbers(-45, 45), _numbers(-0.1, 0.1, 9)]),
    (dd.sine, mp.sin, [_numbers(-40, 40), _numbers(-3e7, 3e7)]),
    (dd.cosine, mp.cos, [_numbers(-40, 40), _numbers(-3e7, 3e7)]),
    (dd.error_function, mp.erf, [_numbers(-6, 6), _numbers(-0.1, 0.1, 9)]),
    (dd.error_function_complement, mp.erfc, [_numbers(-6, 2), _numbers(4, 24)]),
    (lambda x: dd.integer_power(x, 3), lambda x: x**3, [_numbers(-9, 9)]),
    (lambda x: dd.integer_power(x, -2), lambda x: x**-2, [_numbers(-9, 9)]),
]


@pytest.mark.parametrize(("function", "truth", "given"), _UNARY, ids=lambda f: getattr(f, "__name__", ""))
def test_functions_have_ninety_bits(
    function: Callable[[Pair], Pair], truth: Callable[[Any], Any], given: list[Pair]
) -> None:
    for value in given:
        assert _worst(function(value), [truth(x) for x in _exact(value)]) < 2.0**-90


def test_erfc_is_right_where_it_is_one_minus_erf() -> None:
    value = _numbers(2, 4)  # 26 bits are lost at 4
    assert _worst(dd.error_function_complement(value), [mp.erfc(x) for x in _exact(value)]) < 2.0**-70


def test_arithmetic_has_a_hundred_bits() -> None:
    a = _numbers(-9, 9, 300)
    b = _reversed(a)
    pairs = list(zip(_exact(a), _exact(b), strict=True))
    assert _worst(dd.add(a, b), [x + y for x, y in pairs]) < 2.0**-100
    assert _worst(dd.multiply(a, b), [x * y for x, y in pairs]) < 2.0**-100
    assert _worst(dd.divide(a, b), [x / y for x, y in pairs]) < 2.0**-100
    positive = _numbers(0.1, 100)
    exact = [x**y for x, y in zip(_exact(positive), _exact(_reversed(positive)), strict=True)]
    assert _worst(dd.power(positive, _reversed(positive)), exact) < 2.0**-90


def test_a_sum_that_cancels_in_float64_keeps_its_digits() -> None:
    value = _numbers(1, 2)
    less = _numbers(1, 2, 3)
    terms = [torch.cat([a, b, -a]) for a, b in zip(value, Pair(less.high * 1e-20, less.low * 1e-20), strict=True)]
    found = dd.total(Pair(*terms), 0)
    (exact,) = [mp.fsum(mp.mpf(x) for part in terms for x in part.tolist())]
    assert abs(float((mp.mpf(found.high.item()) + mp.mpf(found.low.item())) / exact - 1)) < 2.0**-25
    assert abs(terms[0].sum().item() / float(exact) - 1) > 1


@pytest.mark.parametrize("name", "exp expm1 exp2 log log1p sigmoid tanh sin cos erf erfc sqrt reciprocal".split())
def test_special_values_are_those_of_float64(name: str) -> None:
    names = {
        "exp": "exponential",
        "expm1": "exponential_minus_one",
        "exp2": "exponential_of_two",
        "log": "logarithm",
    }
    names |= {"log1p": "logarithm_of_one_plus", "tanh": "hyperbolic_tangent"}
    names |= {"sin": "sine", "cos": "cosine"}
    names |= {"erf": "error_function", "erfc": "error_function_complement", "sqrt": "square_root"}
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e300, -1e300, 1.0, -1.0], dtype=torch.float64)
    found = getattr(dd, names.get(name, name))(dd.pair(special))
    torch.testing.assert_close(found.high, getattr(torch, name)(special), rtol=1e-15, atol=0, equal_nan=True)
    zeros = found.high == 0
    assert torch.equal(found.high[zeros].signbit(), getattr(torch, name)(special)[zeros].signbit())
    assert bool(torch.isfinite(found.low).all())
