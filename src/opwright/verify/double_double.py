"""Arithmetic and elementary functions on pairs of float64 tensors: about 100 bits instead of 53.

A number is the exact sum of its two parts; the low part is at most half a unit in the last place of the high part.
Beyond what float64 can hold, and for infinities and NaN, the high part is what PyTorch gives in float64, and the low
part is 0. Below 2^-970 the low part loses bits, since it is itself a denormal number.

Source: T. J. Dekker, A Floating-Point Technique for Extending the Available Precision (1971); Y. Hida, X. S. Li,
    D. H. Bailey, Library for Double-Double and Quad-Double Arithmetic (2007).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor


class Pair(NamedTuple):
    """A number for each element: the exact sum of two tensors in float64."""

    high: Tensor
    low: Tensor


# Half of the digits of a factor; above this size the splitting itself would overflow.
_SPLITTER, _LARGE, _SCALE = 2.0**27 + 1, 2.0**900, 2.0**-200
_LN2 = (0.6931471805599453, 2.3190468138462996e-17, 5.707708438416212e-34)
_HALF_PI = (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591833e-33)
_TWO_OVER_ROOT_PI = (1.1283791670955126, 1.533545961316588e-17)
MAX_ANGLE = 2.0**25  # n times the three parts of pi/2 is exact to 2^-130 up to here
_ERF_BY_SERIES = 4.0  # erfc(4) is 2^-26: as many bits are lost in 1 - erf(4)
_ERFC_DEPTH = 60  # of the continued fraction at 4, for 2^-97


def pair(value: Tensor | float, like: Tensor | None = None) -> Pair:
    """Returns a number that float64 holds as a pair."""
    if not isinstance(value, Tensor):
        value = torch.tensor(float(value), dtype=torch.float64, device=None if like is None else like.device)
    high = value.to(torch.float64)
    return Pair(high, torch.zeros_like(high))


def _constant(parts: Sequence[float], like: Tensor) -> Pair:
    high, low = (torch.tensor(part, dtype=torch.float64, device=like.device) for part in parts[:2])
    return Pair(high, low)


def _parts_of(fraction: Fraction) -> tuple[float, float]:
    high = float(fraction)
    return high, float(fraction - Fraction(high))


def _finite(error: Tensor) -> Tensor:
    return error.nan_to_num(0.0, 0.0, 0.0)  # the error of a sum with an infinity


def _two_sum(a: Tensor, b: Tensor) -> Pair:
    total = a + b
    of_b = total - a
    return Pair(total, _finite((a - (total - of_b)) + (b - of_b)))


def renormalize(high: Tensor, low: Tensor) -> Pair:
    total = high + low
    return Pair(total, _finite(low - (total - high)))


def _halves(value: Tensor) -> tuple[Tensor, Tensor]:
    scaled = _SPLITTER * value
    upper = scaled - (scaled - value)
    return upper, value - upper


def _two_product(a: Tensor, b: Tensor) -> Pair:
    product = a * b
    is_large = (a.abs() > _LARGE, b.abs() > _LARGE)
    unscale = None
    if bool(is_large[0].any()) or bool(is_large[1].any()):
        by = [torch.where(large, _SCALE, 1.0) for large in is_large]
        a, b, unscale = a * by[0], b * by[1], by
    (a_up, a_down), (b_up, b_down) = _halves(a), _halves(b)
    error = ((a_up * b_up - a * b) + a_up * b_down + a_down * b_up) + a_down * b_down
    if unscale is not None:
        error = error / unscale[0] / unscale[1]
    return Pair(product, _finite(error))


def settle(found: Pair, plain: Tensor, *inputs: Pair) -> Pair:
    """Returns a result, or PyTorch's own in float64 where that or an input is not finite, with the sign of its zeros."""
    usual = torch.isfinite(plain) & torch.isfinite(found.high)
    for each in inputs:
        usual = usual & torch.isfinite(each.high)
    usual = usual & ~((found.high == 0) & (plain == 0))
    return Pair(torch.where(usual, found.high, plain), torch.where(usual, found.low, 0.0))


# --- arithmetic --------------------------------------------------------------------------------------------


def negative(a: Pair) -> Pair:
    return Pair(-a.high, -a.low)


def absolute(a: Pair) -> Pair:
    return Pair(a.high.abs(), torch.where(a.high < 0, -a.low, a.low))


def add(a: Pair, b: Pair) -> Pair:
    high, low = _two_sum(a.high, b.high)
    more, least = _two_sum(a.low, b.low)
    high, low = renormalize(high, low + more)
    return renormalize(high, low + least)


def subtract(a: Pair, b: Pair) -> Pair:
    return add(a, negative(b))


def multiply(a: Pair, b: Pair) -> Pair:
    high, low = _two_product(a.high, b.high)
    return renormalize(high, low + _finite(a.high * b.low + a.low * b.high))


def _times(a: Pair, power_of_two: float) -> Pair:
    return Pair(a.high * power_of_two, a.low * power_of_two)


def divide(a: Pair, b: Pair) -> Pair:
    plain = a.high / b.high
    digits, rest = plain, subtract(a, multiply(pair(plain), b))
    second = rest.high / b.high
    rest = subtract(rest, multiply(pair(second), b))
    found = renormalize(*_two_sum(digits, second))
    return settle(add(found, pair(rest.high / b.high)), plain, a, b)


def reciprocal(a: Pair) -> Pair:
    return divide(pair(1.0, a.high), a)


def square_root(a: Pair) -> Pair:
    plain = a.high.sqrt()
    rest = subtract(a, multiply(pair(plain), pair(plain)))
    return settle(add(pair(plain), pair(rest.high / (2 * plain))), plain, a)


def integer_power(a: Pair, exponent: int) -> Pair:
    result, factor, left = pair(1.0, a.high), a, abs(exponent)
    while left:
        if left & 1:
            result = multiply(result, factor)
        left >>= 1
        if left:
            factor = multiply(factor, factor)
    result = result if exponent >= 0 else divide(pair(1.0, a.high), result)
    return settle(result, a.high**exponent, a)


def is_less(a: Pair, b: Pair) -> Tensor:
    return (a.high < b.high) | ((a.high == b.high) & (a.low < b.low))


def is_equal(a: Pair, b: Pair) -> Tensor:
    return (a.high == b.high) & (a.low == b.low)


def choose(condition: Tensor, a: Pair, b: Pair) -> Pair:
    return Pair(torch.where(condition, a.high, b.high), torch.where(condition, a.low, b.low))


def floor(a: Pair) -> Pair:
    whole = a.high.floor()
    return renormalize(whole, torch.where(whole == a.high, a.low.floor(), 0.0))


def total(a: Pair, dim: int) -> Pair:
    """Returns the sum along an axis: of the halves, of their halves, and so on."""
    plain = a.high.sum(dim)
    a = Pair(a.high.movedim(dim, 0), a.low.movedim(dim, 0))
    if not a.high.shape[0]:
        return pair(plain)
    while (size := a.high.shape[0]) > 1:
        half = size // 2
        summed = add(Pair(a.high[:half], a.low[:half]), Pair(a.high[half : 2 * half], a.low[half : 2 * half]))
        if size % 2:
            summed = Pair(torch.cat([summed.high, a.high[-1:]]), torch.cat([summed.low, a.low[-1:]]))
        a = summed
    return settle(Pair(a.high[0], a.low[0]), torch.where(torch.isfinite(a.high[0]), a.high[0], plain))


# --- exponentials and logarithms ---------------------------------------------------------------------------


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def _scaled(a: Pair, exponent: Tensor) -> Pair:
    first = torch.div(exponent, 2, rounding_mode="floor")
    factors = _power_of_two(first), _power_of_two(exponent - first)
    return renormalize(a.high * factors[0] * factors[1], a.low * factors[0] * factors[1])


def _series(coefficients: Sequence[Sequence[float]], a: Pair) -> Pair:
    """Returns a polynomial, its coefficients from the constant one on."""
    found = _constant(coefficients[-1], a.high)
    for coefficient in reversed(coefficients[:-1]):
        found = add(multiply(found, a), _constant(coefficient, a.high))
    return found


# 2^k / (1 * 3 * ... * (2k + 1))
_ERROR_SERIES = [_parts_of(Fraction(4**k * math.factorial(k), math.factorial(2 * k + 1))) for k in range(90)]
_EXPONENTIAL = [_parts_of(Fraction(1, math.factorial(k + 1))) for k in range(9)]
_HYPERBOLIC = [_parts_of(Fraction(1, 2 * k + 1)) for k in range(24)]
_SINE = [_parts_of(Fraction((-1) ** k, math.factorial(2 * k + 1))) for k in range(15)]
_COSINE = [_parts_of(Fraction((-1) ** k, math.factorial(2 * k))) for k in range(15)]


def _divide_with_rest(a: Pair, parts: Sequence[float]) -> tuple[Tensor, Pair]:
    """Returns the nearest whole number of times that a constant is in a number, and what is left of that."""
    count = (a.high / parts[0]).round()
    for part in parts:
        a = subtract(a, _two_product(count, torch.full_like(count, part)))
    return count, a


def _small_exponential(a: Pair) -> Pair:
    """Returns exp(a) - 1 for |a| below 0.36: of a/512 by its series, doubled nine times."""
    small = _times(a, 2.0**-9)
    found = multiply(small, _series(_EXPONENTIAL, small))
    for _ in range(9):
        found = add(_times(found, 2.0), multiply(found, found))
    return found


def exponential(a: Pair) -> Pair:
    count, rest = _divide_with_rest(_clamped(a, 800.0), _LN2)
    found = add(_small_exponential(rest), pair(1.0, a.high))
    found = _scaled(found, count.nan_to_num(0.0).clamp(-1200, 1200))
    plain = a.high.exp()
    return settle(found, torch.where(found.high == 0, found.high, plain), a)  # PyTorch flushes denormal results


def _clamped(a: Pair, limit: float) -> Pair:
    inside = a.high.abs() <= limit
    return Pair(a.high.clamp(-limit, limit), torch.where(inside, a.low, 0.0))


def exponential_minus_one(a: Pair) -> Pair:
    is_small = a.high.abs() < 0.35
    near = _small_exponential(Pair(torch.where(is_small, a.high, 0.0), torch.where(is_small, a.low, 0.0)))
    far = subtract(exponential(a), pair(1.0, a.high))
    return settle(choose(is_small, near, far), a.high.expm1(), a)


def exponential_of_two(a: Pair) -> Pair:
    return settle(exponential(multiply(a, _constant(_LN2, a.high))), a.high.exp2(), a)


def _log_of_ratio(a: Pair) -> Pair:
    """Returns log((1 + a) / (1 - a)) for |a| up to 0.18."""
    return _times(multiply(a, _series(_HYPERBOLIC, multiply(a, a))), 2.0)


def logarithm(a: Pair) -> Pair:
    one = pair(1.0, a.high)
    usable = torch.where((a.high > 0) & torch.isfinite(a.high), a.high, 1.0)
    mantissa, exponent = torch.frexp(usable)
    exponent = torch.where(mantissa < math.sqrt(0.5), exponent - 1, exponent).to(torch.float64)
    near_one = _scaled(Pair(usable, torch.where(usable == a.high, a.low, 0.0)), -exponent)
    found = _log_of_ratio(divide(subtract(near_one, one), add(near_one, one)))
    return settle(add(multiply(pair(exponent), _constant(_LN2, a.high)), found), a.high.log(), a)


def logarithm_of_one_plus(a: Pair) -> Pair:
    is_small = (a.high > -0.29) & (a.high < 0.41)
    small = Pair(torch.where(is_small, a.high, 0.0), torch.where(is_small, a.low, 0.0))
    near = _log_of_ratio(divide(small, add(small, pair(2.0, a.high))))
    far = logarithm(add(a, pair(1.0, a.high)))
    return settle(choose(is_small, near, far), a.high.log1p(), a)


def power(a: Pair, b: Pair) -> Pair:
    plain = a.high**b.high
    is_odd = torch.remainder(b.high, 2).abs() == 1
    found = exponential(multiply(b, logarithm(absolute(a))))
    found = choose((a.high < 0) & is_odd, negative(found), found)
    found = settle(found, plain, a, b)
    # Of a zero, and of one to any power, float64 is exact.
    return choose((a.high == 0) | is_equal(a, pair(1.0, a.high)), pair(plain), found)


def sigmoid(a: Pair) -> Pair:
    one, small = pair(1.0, a.high), exponential(negative(absolute(a)))
    large = divide(one, add(one, small))
    found = choose(a.high >= 0, large, multiply(small, large))
    return settle(found, torch.where(found.high != 0, found.high, a.high.sigmoid()), a)


def hyperbolic_tangent(a: Pair) -> Pair:
    size = exponential_minus_one(_times(_clamped(absolute(a), 50.0), 2.0))
    found = divide(size, add(size, pair(2.0, a.high)))
    return settle(choose(a.high < 0, negative(found), found), a.high.tanh(), a)


# --- angles ------------------------------------------------------------------------------------------------


def _sine_and_cosine(a: Pair) -> tuple[Pair, Pair]:
    count, rest = _divide_with_rest(_clamped(a, MAX_ANGLE), _HALF_PI)
    squared = multiply(rest, rest)
    sine, cosine = multiply(rest, _series(_SINE, squared)), _series(_COSINE, squared)
    quarter = torch.remainder(count, 4)
    swapped = (quarter == 1) | (quarter == 3)
    first, second = choose(swapped, cosine, sine), choose(swapped, sine, cosine)
    first = choose(quarter >= 2, negative(first), first)
    return first, choose((quarter == 1) | (quarter == 2), negative(second), second)


def _within_angles(found: Pair, plain: Tensor, a: Pair) -> Pair:
    return settle(choose(a.high.abs() <= MAX_ANGLE, found, pair(plain)), plain, a)


def sine(a: Pair) -> Pair:
    return _within_angles(_sine_and_cosine(a)[0], a.high.sin(), a)


def cosine(a: Pair) -> Pair:
    return _within_angles(_sine_and_cosine(a)[1], a.high.cos(), a)


# --- the error function ------------------------------------------------------------------------------------


def _error_series(a: Pair) -> Pair:
    """Returns erf(a) for |a| up to 4: 2/sqrt(pi) a exp(-a^2) times a series of positive terms."""
    squared = multiply(a, a)
    scale = multiply(multiply(a, exponential(negative(squared))), _constant(_TWO_OVER_ROOT_PI, a.high))
    return multiply(scale, _series(_ERROR_SERIES, squared))


def _complement_by_fraction(a: Pair) -> Pair:
    """Returns erfc(a) for a from 4 on, by its continued fraction."""
    one = pair(1.0, a.high)
    squared = multiply(a, a)
    found = pair(torch.zeros_like(a.high))
    for k in range(_ERFC_DEPTH, 0, -1):
        found = divide(pair(k / 2, a.high), add(a, found))
    bottom = add(a, found)
    scale = _times(multiply(exponential(negative(squared)), _constant(_TWO_OVER_ROOT_PI, a.high)), 0.5)
    return multiply(scale, divide(one, bottom))


def _error_parts(a: Pair) -> tuple[Tensor, Pair, Pair]:
    """Returns where |a| is small, erf(|a|) there, and erfc(|a|) elsewhere."""
    size = absolute(a)
    is_small = size.high < _ERF_BY_SERIES
    zero, limit = pair(torch.zeros_like(a.high)), pair(torch.full_like(a.high, _ERF_BY_SERIES))
    near = _error_series(choose(is_small, size, zero)) if bool(is_small.any()) else zero
    if bool(is_small.all()):
        return is_small, near, zero
    far = Pair(size.high.clamp(max=30.0), torch.where(size.high <= 30.0, size.low, 0.0))
    return is_small, near, _complement_by_fraction(choose(is_small, limit, far))


def error_function(a: Pair) -> Pair:
    is_small, near, far = _error_parts(a)
    found = choose(is_small, near, subtract(pair(1.0, a.high), far))
    return settle(choose(a.high < 0, negative(found), found), a.high.erf(), a)


def error_function_complement(a: Pair) -> Pair:
    is_small, near, far = _error_parts(a)
    one, two = pair(1.0, a.high), pair(2.0, a.high)
    below = choose(is_small, add(one, near), subtract(two, far))
    found = choose(a.high < 0, below, choose(is_small, subtract(one, near), far))
    return settle(found, torch.where(found.high != 0, found.high, a.high.erfc()), a)
