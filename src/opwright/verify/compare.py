"""How an output differs from what the oracle says, and what the wrong elements have in common."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from opwright.errors import plural
from opwright.verify.oracle import MAX_BIAS, MAX_RUNS, Discrete, Expected, few_threads, measure_bias, measure_sharing


@dataclass
class Difference:
    """How an output differs from what is expected.

    Attributes:
        worst_ulp: error in ulp of the element nearest to its allowance; 0 where that is not a normal number.
        worst_ratio: largest error over allowance; above 1 is wrong. inf: a NaN or infinity too many or
            too few.
        message: what is wrong; "" if nothing is.
        pattern: what the wrong elements have in common; "" if nothing.
        undecided: which elements differ by more than is allowed, but by less than the oracle itself may be off.
        share: of the elements, how many are wrong.
    """

    worst_ulp: float
    worst_ratio: float
    message: str = ""
    pattern: str = ""
    undecided: str = ""
    share: float = 0.0


# Where a rounding decides, a result jumps, as a gradient does at the kink of a clamp. Only some runs of the reference
# show it. So more runs are made if few elements are wrong, and by little.
_MAX_SHARE, _MAX_JUMP = 1 / 16, 100.0
_CHANCE = 3.0  # standard errors
_SIDES = (("above", "below"), ("farther from 0 than", "nearer to 0 than"))
_NARROW = "beyond the narrow allowance"
_collected: list[list[str]] = []


@contextlib.contextmanager
def collect_undecided() -> Iterator[list[str]]:
    """Collects what could not be decided in all comparisons within."""
    _collected.append([])
    try:
        yield _collected[-1]
    finally:
        _collected.pop()


def compare(got: torch.Tensor, expected: Expected | Discrete) -> Difference:
    """Returns how far an output, on any device, is from what it must be.

    What seems wrong is compared again with how far the oracle may be off; and if nothing in it is farther off than
    that, with the oracle in more digits.
    """
    with few_threads([got]):
        return _compare(got.to(expected.exact.device), expected)


def _compare(got: torch.Tensor, expected: Expected | Discrete) -> Difference:
    found = _compare_once(got, expected)
    if isinstance(expected, Discrete) or expected.refinement is None:
        return found
    if found.message and expected.is_narrow:
        for wider in expected.widen():
            expected, found = wider, _compare_once(got, wider)
            if not found.message:
                break
    is_unstable = False
    if 0 < found.share <= _MAX_SHARE:
        is_unstable = found.worst_ratio > _MAX_JUMP and expected.is_unstable(found.share)
        if is_unstable or found.worst_ratio <= _MAX_JUMP:
            expected = expected.after(MAX_RUNS)
            found = _compare_once(got, expected)
    for refine in (Expected.with_overflow, Expected.with_doubt):
        if found.message:
            expected = refine(expected)
            found = _compare_once(got, expected)
    if found.undecided:
        found = _compare_once(got, expected.in_more_digits())
    why = expected.refinement.moves.trouble
    if found.message and why and found.worst_ratio <= _MAX_JUMP:
        unknown = "how far the reference moves when it is rounded is unknown, as it then raises"
        found = Difference(found.worst_ulp, 1.0, undecided=f"{found.message}; {unknown} {why}")
    elif found.message and is_unstable:
        as_much = "rounded in other ways, the reference differs from itself as much in as many elements"
        found = Difference(0.0, 1.0, undecided=f"{found.message}; {as_much}")
    if found.undecided:
        note_undecided(found.undecided)
    return found


def note_undecided(text: str) -> None:
    """Adds a text to what is collected."""
    if _collected:
        _collected[-1].append(text)


def _compare_once(got: torch.Tensor, expected: Expected | Discrete) -> Difference:
    if isinstance(expected, Discrete):
        wrong = (got != expected.eager) & (got != expected.exact)
        ratio = math.inf if bool(wrong.any()) else 0.0
        return Difference(0.0, ratio, _describe_exact(got, expected.eager, wrong), pattern_of(wrong))
    if not got.numel():
        return Difference(0.0, 0.0)
    exact, value = expected.exact, got.double()
    error = (value - exact).abs()
    ratio = error / expected.allowance
    undecided = ""
    if expected.is_negative_zero is not None or not bool((ratio <= 1).all()):  # mostly it is that simple
        ratio = _ratio_of(value, expected, error)
        wrong = ratio > 1
        if expected.doubt is not None and bool(wrong.any()):
            is_open = wrong & (error > 0) & (error <= expected.allowance + expected.doubt)
            if bool(is_open.any()):
                undecided = _describe_undecided(got, expected, torch.where(is_open, ratio, 0.0))
                ratio = torch.where(is_open, 0.0, ratio)
    at = int(ratio.argmax())
    worst = float(ratio.reshape(-1)[at])
    if worst > 1 and expected.is_narrow:  # a wider allowance follows
        return Difference(0.0, worst, _NARROW)
    message = _describe_worst(got, expected, ratio, error) if worst > 1 else ""
    worst_ulp = _ulps_at(at, error, expected) if worst < math.inf else 0.0
    if not message:
        for found, own, sides in zip(measure_bias(value, expected), expected.bias, _SIDES, strict=True):
            allowed = MAX_BIAS + 2 * abs(own)
            if abs(found) > allowed:
                allowed += _CHANCE * measure_sharing(value, expected)
            worst, worst_ulp = max((worst, worst_ulp), (abs(found) / allowed, abs(found)))
            if abs(found) > allowed:
                message = (
                    f"on average the results lie {abs(found):.2g} ulp {sides[found < 0]} the correctly rounded ones, "
                    f"where {allowed:.2g} are allowed: they are not rounded to nearest"
                )
                break
    wrong = ratio > 1
    pattern, share = (pattern_of(wrong), float(wrong.double().mean())) if message else ("", 0.0)
    return Difference(worst_ulp, worst, message, pattern, undecided if not message else "", share)


def _ratio_of(value: torch.Tensor, expected: Expected, error: torch.Tensor) -> torch.Tensor:
    """Returns error over allowance; inf where a NaN, an infinity or the sign of a zero is wrong."""
    exact = expected.exact
    rounded = exact.to(expected.dtype).double()  # overflows where the dtype does
    # Half the time of `torch.isfinite`.
    size = exact.abs()
    is_value, is_exact, is_rounded = value.abs() < math.inf, size < math.inf, rounded.abs() < math.inf
    # Where the dtype overflows, the largest number or infinity is right; NaN and infinity must match.
    limit = torch.finfo(expected.dtype).max
    near_limit = is_exact & (size + expected.allowance > limit)
    same = torch.where(
        exact.isnan(),
        value.isnan(),
        torch.where(
            (is_exact & ~is_rounded) | near_limit,
            (value.abs() >= limit * 0.99) & (value.sign() == exact.sign()),
            value == rounded,
        ),
    )
    same = same | (expected.overflowed & ~is_value)  # an intermediate result has no room
    if expected.finite_value is not None:
        unit = torch.finfo(expected.dtype).eps * expected.finite_value.abs()
        same = same | ((value - expected.finite_value).abs() <= 8 * unit)
    if expected.is_unsettled is not None:
        same = same | (expected.is_unsettled & (exact.isnan() | value.isnan()))
    if expected.is_infinite_input:
        same = same | (exact.isnan() & value.isinf())
    if expected.is_loose:
        same = same | (exact.isinf() & value.isnan())
    ratio = torch.where(is_value & is_exact & is_rounded, error / expected.allowance, torch.where(same, 0.0, math.inf))
    ratio = torch.where(near_limit & same, 0.0, ratio)
    if expected.is_negative_zero is not None:
        lost = expected.is_negative_zero & (value == 0) & ~value.signbit()
        ratio = torch.where(lost, math.inf, ratio)
    if expected.may_be_infinite is not None:
        is_open = (expected.may_be_infinite & ~is_value) | (expected.may_be_nan & value.isnan())
        is_open |= expected.may_be_anything
        ratio = torch.where(is_open, 0.0, ratio)
    return ratio


def _ulps_at(at: int, error: torch.Tensor, expected: Expected) -> float:
    """Returns the error of an element in ulp; 0 below the normal numbers, where an ulp says nothing of what matters."""
    exact, off, ulp = (float(t.reshape(-1)[at]) for t in (expected.exact, error, expected.ulp))
    is_normal = torch.finfo(expected.dtype).smallest_normal <= abs(exact) < math.inf
    return off / ulp if is_normal else 0.0


def _describe_worst(got: torch.Tensor, expected: Expected, ratio: torch.Tensor, error: torch.Tensor) -> str:
    at = int(ratio.argmax())
    index = _index_of(at, got.shape)
    value, exact = got.reshape(-1)[at].item(), expected.exact.reshape(-1)[at].item()
    count, total = int((ratio > 1).sum()), ratio.numel()
    ulp, allowed = expected.ulp.reshape(-1)[at].item(), expected.allowance.reshape(-1)[at].item()
    text = f"{tell_share(count, total)} wrong; worst at {index}: got {value:.9g}, expected {exact:.9g}"
    if value == exact == 0:
        return f"{text}: zeros of another sign"
    if math.isfinite(value) and math.isfinite(exact):
        text += f", off by {error.reshape(-1)[at].item() / ulp:.3g} ulp where {allowed / ulp:.3g} are allowed"
    return text


def _describe_undecided(got: torch.Tensor, expected: Expected, ratio: torch.Tensor) -> str:
    at = int(ratio.argmax())
    index = _index_of(at, got.shape)
    value, exact, ulp, allowed, unknown = (
        t.reshape(-1)[at].item() for t in (got, expected.exact, expected.ulp, expected.allowance, expected.doubt)
    )
    return (
        f"{tell_share(int((ratio > 0).sum()), got.numel())} undecided; worst at {index}: got {value:.9g}, the "
        f"reference gives {exact:.9g}, off by {abs(value - exact) / ulp:.3g} ulp where {allowed / ulp:.3g} are allowed "
        f"and the reference itself may be off by {unknown / ulp:.3g}; {expected.reason}"
    )


def _describe_exact(got: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor) -> str:
    if not bool(wrong.any()):
        return ""
    at = int(wrong.reshape(-1).int().argmax())
    index = _index_of(at, got.shape)
    pair = got.reshape(-1)[at].item(), expected.reshape(-1)[at].item()
    share = tell_share(int(wrong.sum()), wrong.numel())
    return f"{share} wrong; first at {index}: got {pair[0]}, expected {pair[1]}"


def tell_share(count: int, total: int) -> str:
    """Returns which part of some elements is meant: `1 of 3 elements is`, `2 of 3 elements are`."""
    return f"{count} of {plural(total, 'element')} {'is' if count == 1 else 'are'}"


def _index_of(at: int, shape: torch.Size) -> list[int]:
    return [int(i) for i in torch.unravel_index(torch.tensor(at), shape)]


def _tell_end(end: str, indices: list[int]) -> str:
    return f"index {indices[0]}" if len(indices) == 1 else f"the {end} {len(indices)}"


def pattern_of(wrong: torch.Tensor) -> str:
    """Returns what the wrong elements have in common, as far as their positions tell."""
    if wrong.ndim == 0 or not bool(wrong.any()):
        return ""
    if bool(wrong.all()):
        return "every element"
    for dim in range(wrong.ndim):
        size = wrong.shape[dim]
        others = [d for d in range(wrong.ndim) if d != dim]
        hit = wrong.any(dim=tuple(others)) if others else wrong
        indices = hit.nonzero().flatten().tolist()
        if len(indices) == size:
            continue
        if indices == list(range(indices[0], size)):
            return f"only {_tell_end('last', indices)} of {size} along axis {dim}"
        if indices == list(range(len(indices))):
            return f"only {_tell_end('first', indices)} of {size} along axis {dim}"
        if len(indices) <= 3:
            return f"only {indices} along axis {dim}"
    share = 100 * wrong.double().mean().item()
    return f"{f'{share:.2g}' if share < 99 else 'more than 99'} % of the elements, scattered"
