"""The oracle: the reference in float64, and how far a computation in a dtype may be from it.

No tolerance is set by hand. A kernel is compared, element by element, with what PyTorch gets for the
same computation in the same dtype, and with how far the reference moves when each of its intermediate
results is off by one rounding. So an ill-conditioned element allows what it must, and no other does.

Float64 is not exact either: a reference may cancel, and a candidate in float64 is as good as the oracle. Where the
two differ by more than is allowed, but by less than the oracle may err, the reference is computed once more, in twice
the digits (`higher_precision.py`). Where that cannot be done, the difference decides nothing.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from opwright._torch import tree_map
from opwright.contract.precision import Factor, Precision
from opwright.verify.formulas import Overflow, OverflowLeaving, WidenCasts, ZeroProducts, oracle_formulas
from opwright.verify.global_state import in_threads
from opwright.verify.higher_precision import NotWide, Reference, compute_wide, estimate_error
from opwright.verify.rounding import PositiveSums, computes_in_single, round_at_random
from opwright.verify.tensors import copy_of, count_elements, has_double, tensors_of

# A kernel may err this many times what PyTorch itself errs on that element ...
_MULTIPLE = 4.0
# ... plus this many units in the last place: one rounding of the result, and the few ulp of a
# library's exp and its like, which PyTorch's own vectorised functions are allowed as well.
_ULP = 4.0
_UNITS_OF_LARGEST = 4.0
# How often the reference is run with its steps rounded. What fewer runs allow, more of them allow too, so a comparison
# that passes after one needs no other.
_STOCHASTIC_RUNS, MAX_RUNS = (1, 2, 4, 8), 64
_CHAOS = 16.0  # where a reference is chaotic, its results move by more than the largest result over this
_TF32_UNIT = 2.0**-11  # half a unit in the last place of TF32, relatively
# Results of a 16-bit type are rounded to nearest, so they lie above as often as below: the mean distance from the
# correctly rounded result, in ulp, is at most this and twice PyTorch's own. Cutting instead of rounding gives a half.
MAX_BIAS = 0.25
_MIN_BIAS_ELEMENTS, _MAX_BIAS_ULP = 1024, 32.0


@dataclass
class Expected:
    """What the oracle says about one output.

    Attributes:
        exact: the value in float64.
        allowance: largest absolute error that passes, per element.
        ulp: the unit in the last place of the output's dtype at `exact`.
        overflowed: where PyTorch itself gets NaN or an infinity in this dtype that is not right.
        finite_value: what it gets where the exact value is infinite, NaN elsewhere, since rounding may decide between
            the two; None: nowhere.
        bias: the mean distance of PyTorch's results from the correctly rounded ones, upwards and outwards.
        is_negative_zero: where a zero must be negative; None: nowhere.
        is_infinite_input: whether an input holds infinities. Then an infinity is as right as NaN, which a + x (b - a)
            is for an infinite a, and a (1 - x) + b x is not.
        is_loose: whether NaN is as right as an infinity, too.
        doubt: how far `exact` itself may be off, per element; None until `with_doubt`.
        reason: why it may be off.
        refinement: computes the doubt, and the output in more digits; None for exact values.
        output: which output this is.
        is_unsettled: where rounding decides whether the result is NaN, in PyTorch or step by step.
        is_narrow: whether `allowance` leaves out how far the reference moves when it rounds; see `widen`.
        may_be_anything, may_be_infinite, may_be_nan: where another formula overflows or adds infinities; see `with_overflow`.
    """

    exact: torch.Tensor
    allowance: torch.Tensor
    ulp: torch.Tensor
    overflowed: torch.Tensor
    dtype: torch.dtype
    finite_value: torch.Tensor | None = None
    bias: tuple[float, float] = (0.0, 0.0)
    is_negative_zero: torch.Tensor | None = None
    is_infinite_input: bool = False
    is_loose: bool = False
    doubt: torch.Tensor | None = None
    reason: str = ""
    refinement: Refinement | None = None
    output: int = 0
    is_unsettled: torch.Tensor | None = None
    is_narrow: bool = False
    may_be_anything: torch.Tensor | None = None
    may_be_infinite: torch.Tensor | None = None
    may_be_nan: torch.Tensor | None = None

    def widen(self) -> Iterator[Expected]:
        """Yields the same with ever larger allowances, from ever more runs of the reference; the last is the whole."""
        *some, last = _STOCHASTIC_RUNS
        for runs in some:
            if runs >= self.refinement.moves.runs:
                yield replace(self.after(runs), is_narrow=True)
        yield self.after(last)

    def after(self, runs: int = _STOCHASTIC_RUNS[-1]) -> Expected:
        """Returns the same, with what so many runs of the reference allow; by default the whole allowance."""
        spread, is_unsettled = self.refinement.moved(self.output, runs)
        wide = self.refinement.as_declared(_ULP * self.ulp + _MULTIPLE * spread, self.exact)
        allowance = torch.maximum(self.allowance, wide)
        return replace(self, allowance=allowance, is_narrow=False, is_unsettled=is_unsettled)

    def is_unstable(self, share: float) -> bool:
        """Whether more runs of the reference leave the allowance in this share of the elements, as chaotic ones do."""
        allowed = self.after().allowance
        if float((_CHAOS * allowed > self.exact.abs().nan_to_num(0.0, 0.0, 0.0).max()).double().mean()) < share:
            return False  # as almost always, without the time that 64 runs take
        spread, _ = self.refinement.moved(self.output, MAX_RUNS)
        return float((spread > allowed).double().mean()) >= share

    def with_overflow(self) -> Expected:
        """Returns the same, with where a result need not be finite since another formula overflows, or adds infinities.

        In float64 the reference may overflow itself: then nothing is known of the result.
        """
        touched, of_sums, of_infinities, tamed, skipped = (
            run[self.output].double() for run in self.refinement.overflows
        )
        may_be_infinite = touched.isnan() & ~self.exact.isnan()
        # A row whose statistics have no room may come out as any number: x / sqrt(inf) is 0.
        may_be_anything = of_sums.isnan() & self.exact.to(self.dtype).isfinite()
        may_be_anything |= self.exact.isnan() & skipped.isfinite()
        if self.dtype == torch.float64:
            may_be_anything |= may_be_infinite | (~self.exact.isfinite() & tamed.isfinite())
        return replace(
            self, may_be_anything=may_be_anything, may_be_infinite=may_be_infinite, may_be_nan=of_infinities.isnan()
        )

    def with_doubt(self) -> Expected:
        """Returns the same, with how far it may be off."""
        return replace(self, doubt=self.refinement.errors[self.output])

    def in_more_digits(self) -> Expected:
        """Returns the same from the reference in twice the digits, where that can be done. Needs the doubt."""
        if isinstance(self.refinement.wide, str):
            return replace(self, reason=self.refinement.wide)
        found = self.refinement.wide[self.output].double()
        # A result farther away than float64 may err is another function: then neither is known to be right.
        is_same = (found == self.exact) | (found.isnan() & self.exact.isnan())
        is_known = is_same | ((found - self.exact).abs() <= self.doubt)
        exact = torch.where(is_known, found, self.exact)
        expected = self.refinement.allow(
            exact, self.refinement.eager[self.output], self.refinement.rounding[self.output]
        )
        return replace(
            self,
            exact=exact,
            allowance=torch.maximum(self.allowance, expected.allowance),
            ulp=expected.ulp,
            overflowed=expected.overflowed,
            finite_value=expected.finite_value,
            bias=expected.bias,
            doubt=torch.where(is_known, 0.0, self.doubt),
            reason="in more digits the reference is another function than in float64",
        )


@dataclass(frozen=True)
class Discrete:
    """What the oracle says about an output of integers or of truth values: the one or the other is right.

    They differ where rounding decides: of two logits that are equal in bfloat16 and not in float32, either may be the
    largest.

    Attributes:
        eager: what PyTorch gives in the dtype under test.
        exact: what it gives in float64.
    """

    eager: torch.Tensor
    exact: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.eager.dtype


def to_oracle(value: Any) -> Any:
    """Returns an argument as the oracle takes it: a copy, floating-point tensors in float64, with their strides.

    PyTorch chooses how it computes by layout too: a linear layer of what is not contiguous rounds once more.
    """
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point():
            return value.detach().clone()
        value = value.detach()
        elements = value.untyped_storage().nbytes() // value.element_size()
        if value.layout != torch.strided or elements > 4 * value.numel() + 64:  # a small part of much
            return value.to(torch.float64, copy=True)
        flat = torch.empty(0, dtype=value.dtype, device=value.device).set_(
            value.untyped_storage(), 0, (elements,), (1,)
        )
        wide = flat.to(torch.float64, copy=True)
        return wide.as_strided(value.shape, value.stride(), value.storage_offset())
    return [to_oracle(v) for v in value] if isinstance(value, (list, tuple)) else value


def try_reference(reference: Reference, values: Sequence[Any], *, is_exact: bool = False) -> list[Any] | None:
    """Returns what a reference gives for copies of values, in float64 if `is_exact`; None where it refuses them."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whether that is an input is only asked
            return list(reference(to_oracle(list(values)) if is_exact else copy_of(list(values))))
    except Exception:  # whatever a reference may raise to refuse
        return None


def are_finite(outputs: Sequence[Any]) -> bool:
    """Returns whether all numbers among outputs are finite."""
    return all(bool(torch.isfinite(t).all()) for t in tensors_of(outputs))


def expect(
    reference: Reference, values: Sequence[Any], precision: Precision | None = None
) -> list[Expected | Discrete | None]:
    """Returns what each output must be; of integers the oracle and PyTorch are right.

    The reference is called twice only, and the other times when a result seems wrong.

    Args:
        reference: the computation; takes the arguments, returns the outputs.
        values: the arguments, in the dtype under test; they stay as they are until results are compared.
        precision: what the operator is declared to be.
    """
    with few_threads(values):
        eager = reference([copy_of(v) for v in values])
        exact, widens_casts = _compute_exactly(reference, values, eager)
        nudged = _compute_nudged(reference, values)
        if nudged is not None:
            given = [to_oracle(v) for v in values]
            with PositiveSums(tensors_of(given)):
                positive_sums = reference(given)
    is_infinite = any(bool(t.isinf().any()) for t in tensors_of(values) if t.is_floating_point())
    refinement = Refinement(reference, values, exact, eager, precision, widens_casts)
    found: list[Expected | Discrete | None] = []
    for i, (value, plain) in enumerate(zip(exact, eager, strict=True)):
        if value is None or plain is None:
            found.append(None)
        elif not plain.is_floating_point():
            found.append(Discrete(plain, value if value.shape == plain.shape else plain))
        else:
            expected = refinement.allow(value.double(), plain, torch.zeros(()))
            expected.refinement, expected.output, expected.is_narrow = refinement, i, True
            expected.is_infinite_input = is_infinite
            # Where a size depends on data, as of distinct numbers, a moved zero may change it.
            if nudged is not None and nudged[i].shape == value.shape == positive_sums[i].shape:
                zeros = _signed_zeros(expected.exact, plain, nudged[i], values)
                expected.is_negative_zero = zeros & positive_sums[i].signbit()
            found.append(expected)
    return found


def _compute_exactly(reference: Reference, values: Sequence[Any], eager: Sequence[Any]) -> tuple[Sequence[Any], bool]:
    """Returns what a reference gives in float64, and whether that is so where it computes in float32.

    A reference may need float32, for its bits for example: then it raises, or returns other shapes.

    Args:
        eager: what PyTorch gives.
    """
    mode, given = WidenCasts(), [to_oracle(v) for v in values]
    with contextlib.suppress(Exception), mode:
        found = reference(given)
        shapes = [[t.shape for t in tensors_of(outputs)] for outputs in (found, eager)]
        if not mode.has_single or shapes[0] == shapes[1]:
            return found, mode.has_single
    return reference([to_oracle(v) for v in values]), False


def few_threads(values: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which PyTorch computes in one thread if the tensors are small.

    A parallel loop over so few elements saves microseconds, and costs milliseconds wherever another process has the
    core that its second thread waits for.
    """
    # Of other threads the number is not theirs alone.
    is_small = threading.current_thread() is threading.main_thread()
    is_small = is_small and count_elements(values) < 2**19
    return in_threads(1 if is_small else None)


_NUDGE = 2.0**-100


def _compute_nudged(reference: Reference, values: Sequence[Any]) -> Sequence[Any] | None:
    """Returns the outputs for inputs whose negative zeros are tiny negative numbers; None where there are none."""

    def has_zeros(value: Any) -> bool:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return is_float and bool(_negative_zeros(value).any())

    def nudge(value: Any) -> Any:
        wide = to_oracle(value)
        return torch.where(_negative_zeros(wide), -_NUDGE, wide) if has_zeros(value) else wide

    return reference(tree_map(nudge, list(values))) if any(map(has_zeros, tensors_of(values))) else None


def _negative_zeros(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor == 0) & tensor.signbit()


def _signed_zeros(
    exact: torch.Tensor, plain: torch.Tensor, nudged: torch.Tensor, values: Sequence[Any]
) -> torch.Tensor:
    """Returns where a zero must be negative, because it follows a negative zero at its place in an input.

    Underflow gives negative zeros too, and so may a product with zero: there the sign depends on the formula. This
    does not apply to an output that becomes negative with the input, at least a sixteenth as fast.
    """
    of_input = torch.zeros_like(exact, dtype=torch.bool)
    for value in tensors_of(values):
        if value.shape == exact.shape and value.is_floating_point():
            of_input |= _negative_zeros(value)
    agree = _negative_zeros(exact) & _negative_zeros(plain)
    return of_input & agree & (nudged <= -_NUDGE / 16) & (nudged >= -1)


def measure_bias(value: torch.Tensor, expected: Expected) -> tuple[float, float]:
    """Returns the mean distance from the correctly rounded result in ulp, upwards and away from zero."""
    found = _distances(value, expected)
    if found is None:
        return 0.0, 0.0
    distance, counted = found
    return tuple(float(signed[counted].mean()) for signed in (distance, distance * expected.exact.sign()))


def measure_sharing(value: torch.Tensor, expected: Expected) -> float:
    """Returns how far such a mean is off by chance, in ulp, where the elements of a row or column share a rounding.

    One rounded denominator moves all of its row. The rows then differ from each other; where a kernel cuts off
    digits, they do not.
    """
    found, errors = _distances(value, expected), [0.0]
    for dim in range(value.ndim) if found is not None and value.ndim > 1 else ():
        distance, counted = (t.movedim(dim, 0).flatten(1) for t in found)
        counts = counted.sum(1)
        means = (distance.where(counted, 0.0).sum(1) / counts)[counts > 0]
        if 1 < len(means) < counted.sum():
            errors.append(float(means.std()) / math.sqrt(len(means)))
    return max(errors)


def _distances(value: torch.Tensor, expected: Expected) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns how far a result lies from the correctly rounded one, in ulp, and where that counts; None for too few."""
    if torch.finfo(expected.dtype).bits > 16 or value.numel() < _MIN_BIAS_ELEMENTS:
        return None
    info = torch.finfo(expected.dtype)
    size = expected.exact.abs()
    counted = (size >= info.smallest_normal) & (size < info.max / 2) & (value.abs() < math.inf)
    counted &= expected.allowance <= _MAX_BIAS_ULP * expected.ulp
    if expected.may_be_anything is not None:
        counted &= ~(expected.may_be_anything | expected.may_be_infinite)
    if int(counted.sum()) < _MIN_BIAS_ELEMENTS:
        return None
    rounded = expected.exact.to(expected.dtype).double()
    return ((value - rounded) / expected.ulp).clamp(-4, 4), counted


def with_room(expected: Expected | Discrete | None, share: float = 0.0) -> Any:
    """Allows a gradient some units in the last place of the largest one, and at least this share of it.

    A backward may compute from what the forward has saved, and that is rounded: of 1 - sigmoid(5), say, no digit
    below eps is known. A reference that computes the same without such a difference does not show it.
    """
    if isinstance(expected, Expected) and expected.exact.numel():
        largest = expected.exact.abs().nan_to_num(0.0, 0.0, 0.0).max()
        room = max(_UNITS_OF_LARGEST * torch.finfo(expected.dtype).eps, share) * largest
        expected.allowance = torch.maximum(expected.allowance, room)
    return expected


class Refinement:
    """What takes more calls of a reference than its results; each computed on first use.

    How far it moves when it rounds, how far it may be off in float64, and its results in more digits.

    Attributes:
        eager: the results in the dtype under test.
        moves: how far results move when every step is rounded.
    """

    def __init__(
        self,
        reference: Reference,
        values: Sequence[Any],
        exact: Sequence[Any],
        eager: Sequence[Any],
        precision: Precision | None = None,
        widens_casts: bool = False,
    ) -> None:
        self.eager, self._widens_casts = eager, widens_casts
        self._factor = precision if isinstance(precision, Factor) else None
        self._reference, self._values, self._exact = reference, values, exact
        self.moves = _Moves(self._in_steps, values, exact, eager, precision)

    def allow(self, exact: torch.Tensor, plain: torch.Tensor, spread: torch.Tensor) -> Expected:
        """Returns what an output must be, from what PyTorch gets and how far the reference moves."""
        ulp = ulp_of(exact, plain.dtype)
        error = (plain.double() - exact).abs().nan_to_num(0.0, 0.0, 0.0)
        allowance = _ULP * ulp + _MULTIPLE * torch.maximum(error, spread)
        overflowed = ~torch.isnan(exact) & ~torch.isfinite(plain) & (plain.double() != exact)
        expected = Expected(exact, allowance, ulp, overflowed, plain.dtype)
        is_finite = exact.isinf() & plain.isfinite()
        if bool(is_finite.any()):
            expected.finite_value = torch.where(is_finite, plain.double(), math.nan)
        expected.bias = measure_bias(plain.double(), expected)
        expected.allowance = self.as_declared(expected.allowance, exact)
        return expected

    def as_declared(self, allowance: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        """Returns an allowance as the operator is declared to need it."""
        if self._factor is None:
            return allowance
        if self._factor.of_largest and allowance.numel():
            largest = allowance.where(exact.isfinite(), 0.0).max()
            allowance = torch.maximum(allowance, largest)
        return self._factor.factor * allowance

    def moved(self, output: int, runs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns how far a floating-point result moves when every step is rounded to the dtype, in that many runs.

        And where rounding decides whether it is NaN: in PyTorch, or when every step is rounded.
        """
        with few_threads(self._values), torch.no_grad():
            spread, changes = self.moves.after(runs)[output]
        is_unsettled = changes | (self.eager[output].isnan() != self._exact[output].isnan())
        if self._factor is not None and self._factor.of_largest:  # such a formula spreads a NaN over all results
            is_unsettled |= not are_finite([t for t in tensors_of(self._values) if t.is_floating_point()])
        return spread, is_unsettled

    @functools.cached_property
    def rounding(self) -> list[torch.Tensor]:
        """How far each result moves when every step is rounded to float64."""
        moves = _Moves(self._in_steps, self._values, self._exact, self._exact)
        with few_threads(self._values), torch.no_grad():
            return [spread for spread, _ in moves.after(_STOCHASTIC_RUNS[-1])]

    @functools.cached_property
    def overflows(self) -> list[Sequence[Any]]:
        """The results with NaN for: each overflow, each of a sum, each infinite sum; and with the largest number for overflows.

        The last are those where zero times anything is zero.

        The range is that of float32 at least, in which PyTorch and most kernels compute 16-bit types.
        """
        dtypes = [e.dtype for e in self.eager if isinstance(e, torch.Tensor) and e.is_floating_point()]
        largest = max(torch.finfo(dtype).max for dtype in (torch.float32, *dtypes))
        kinds: tuple[dict[str, Any], ...] = (
            {"fill": math.nan},
            {"fill": math.nan, "is_of_sums": True},
            {"fill": math.nan, "is_of_infinities": True},
            {"fill": largest},
        )
        found = []
        for kind in kinds:
            values = [to_oracle(v) for v in self._values]
            overflow = Overflow(largest, inputs=tensors_of(values), **kind)
            with few_threads(self._values), OverflowLeaving(overflow), overflow:
                found.append(self._in_steps(values))
        with few_threads(self._values), ZeroProducts():
            found.append(self._in_steps([to_oracle(v) for v in self._values]))
        return found

    def _in_steps(self, values: Sequence[Any]) -> Sequence[Any]:
        """Calls the reference, an operator that is several steps in one step by step: the candidate may take them so."""
        with oracle_formulas(self._widens_casts and has_double(values)):
            return self._reference(values)

    @functools.cached_property
    def errors(self) -> list[torch.Tensor | None]:
        """How far each result may be off; None for what is not floating-point."""
        with few_threads(self._values), torch.no_grad():
            try:
                found = estimate_error(self._reference, to_oracle(self._values))
            except Exception:  # whatever a reference raises that takes float64 alone
                found = [
                    torch.full_like(e, math.inf) if isinstance(e, torch.Tensor) and e.is_floating_point() else None
                    for e in self._exact
                ]
        return [
            None if error is None else torch.maximum(error, _MULTIPLE * rounding)
            for error, rounding in zip(found, self.rounding, strict=True)
        ]

    @functools.cached_property
    def wide(self) -> list[Any] | str:
        """The results, computed in twice the digits; or why they cannot be."""
        try:
            with few_threads(self._values), torch.no_grad():
                return compute_wide(self._reference, to_oracle(self._values))
        except NotWide as problem:
            return f"the reference may cancel in float64, and cannot be computed in more digits: {problem}"


def ulp_of(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the distance between neighbouring numbers of `dtype` at these float64 values."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    magnitude = values.abs().nan_to_num(0.0, info.max, info.max).clamp(max=info.max)
    _, exponent = torch.frexp(magnitude)
    unit = torch.ldexp(torch.full_like(magnitude, info.eps), exponent - 1)
    return torch.where(magnitude < info.smallest_normal, torch.full_like(unit, smallest), unit)


_Moved = list[tuple[torch.Tensor, torch.Tensor]]


class _Moves:
    """How far results move when every step is rounded, and where one becomes NaN or ceases to be one.

    Each result is rounded to its own type on the way, a float32 state beside bfloat16 parameters to float32; to the
    coarsest among the results if PyTorch's own result is farther off than its type allows.

    Attributes:
        runs: how often the reference has been run.
        trouble: what the reference raises when its steps are rounded, as where a rounded number is an index; "" if
            nothing.
    """

    def __init__(
        self,
        reference: Reference,
        values: Sequence[Any],
        exact: Sequence[Any],
        eager: Sequence[Any],
        precision: Precision | None = None,
    ) -> None:
        self._exact, self._eager = exact, eager
        # Half a unit in the last place; two in float64, where less would be rounded away. A result in float64 that is
        # computed in float32 has the units of that.
        least, single = 2 * torch.finfo(torch.float64).eps, torch.finfo(torch.float32).eps / 2
        units = {
            i: max(torch.finfo(e.dtype).eps / 2, least)
            for i, e in enumerate(eager)
            if isinstance(e, torch.Tensor) and e.is_floating_point()
        }
        if least in units.values() and computes_in_single(reference, values):
            units = {i: max(unit, single) for i, unit in units.items()}
        self._units, self._coarsest = units, max(units.values(), default=0.0)
        self.trouble = ""
        self._moves = {
            unit: self._without_trouble(
                _accumulate_moves(
                    reference, values, exact, unit, _TF32_UNIT if precision == "tf32" and unit == single else 0.0
                )
            )
            for unit in {*units.values(), self._coarsest}
        }
        self._found = {unit: next(moves) for unit, moves in self._moves.items()}
        self.runs, self._lock = 0, threading.Lock()

    def after(self, runs: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns both of each result, after that many runs or more."""
        with self._lock:  # a check compares in several threads
            for _ in range(self.runs, runs):
                self._found = {unit: next(moves, self._found[unit]) for unit, moves in self._moves.items()}
                self.runs += 1
            found = self._found
        return [found[self._unit(i, found)][i] for i in range(len(self._exact))]

    def _without_trouble(self, moves: Iterator[_Moved]) -> Iterator[_Moved]:
        """Yields how far results move as long as the reference takes its own rounded results."""
        try:
            yield from moves
        except Exception as error:  # whatever a reference may raise
            self.trouble = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"

    def _unit(self, output: int, found: dict[float, list[tuple[torch.Tensor, torch.Tensor]]]) -> float:
        own = self._units.get(output, self._coarsest)
        if own == self._coarsest:
            return own
        exact, plain, spread = self._exact[output].double(), self._eager[output], found[own][output][0]
        is_off = (plain.double() - exact).abs() > _ULP * ulp_of(exact, plain.dtype) + _MULTIPLE * spread
        return self._coarsest if bool(is_off.any()) else own


def _accumulate_moves(
    reference: Reference, values: Sequence[Any], exact: Sequence[Any], unit: float, product_unit: float
) -> Iterator[_Moved]:
    """Yields how far results move, and where one becomes NaN or ceases to be one, after 0, 1, 2, ... runs.

    Args:
        unit: what all steps are rounded to; 0: no result is floating-point.
        product_unit: what the inputs of matrix products are rounded to first.
    """
    spreads = [
        torch.zeros_like(e, dtype=torch.float64) if isinstance(e, torch.Tensor) else torch.zeros(()) for e in exact
    ]
    changes = [torch.zeros_like(spread, dtype=torch.bool) for spread in spreads]
    yield list(zip(spreads, changes, strict=True))
    if not unit:
        return
    for moved in round_at_random(reference, lambda: [to_oracle(v) for v in values], unit, MAX_RUNS, product_unit):
        for i, (value, center) in enumerate(zip(moved, exact, strict=True)):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                distance = (value.double() - center.double()).abs().nan_to_num(0.0, 0.0, 0.0)
                spreads[i] = torch.maximum(spreads[i], distance)
                # Rounding does not make a result infinite: the steps also move a sum of exact zeros below 0.
                changes[i] = changes[i] | ((value.isnan() != center.isnan()) & ~center.isinf())
        yield list(zip(spreads, changes, strict=True))
