"""`assert_matches` and `inputs`: what they let through, what they catch, what they draw."""

from __future__ import annotations

import math
import re
from typing import Literal

import mpmath
import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample, Unsatisfiable
from jaxtyping import Float, Int64
from torch import Tensor

from opwright import Mutates, operator
from opwright.errors import CheckError
from opwright.testing import Inputs, assert_matches, inputs
from opwright.testing.sweep import find_cases

# --- assert_matches -------------------------------------------------------------------------------------


def test_correctly_rounded_values_pass_and_five_ulp_do_not() -> None:
    """The exact values are mpmath's; the result is moved by whole units in the last place."""
    points = [0.1, 0.7, 2.5, 30.0]
    exact = torch.tensor([float(mpmath.exp(mpmath.mpf(x))) for x in points], dtype=torch.float64)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rounded = exact[:3].to(dtype)
        assert_matches(rounded, exact[:3])
        bits = rounded.view(torch.int32 if dtype == torch.float32 else torch.int16)
        assert_matches((bits + 3).view(dtype), exact[:3])
        with pytest.raises(AssertionError, match=r"(?s)3 of 3 elements are wrong.*every element"):
            assert_matches((bits + 5).view(dtype), exact[:3])


def test_the_allowance_grows_where_the_computation_is_ill_conditioned_and_only_there() -> None:
    x = torch.tensor([1.0, 1.0 + 2**-20])

    def difference(x: Tensor) -> Tensor:
        return x.log() - (x - 1) + 1  # well conditioned: 1

    def cancelling(x: Tensor) -> Tensor:
        return (x + 1e6) - 1e6

    assert_matches(difference(x), difference, x)
    assert_matches(x + 0.03, cancelling, x)  # one rounding of 1e6 is 0.06
    with pytest.raises(AssertionError):
        assert_matches(x + 0.03, difference, x)
    with pytest.raises(AssertionError):
        assert_matches(x + 3, cancelling, x)


@pytest.mark.parametrize(
    ("actual", "text"),
    [
        (torch.zeros(3), "got f32[3] cpu, expected f32[2]"),
        (torch.zeros(2, dtype=torch.float64), "got f64[2] cpu, expected f32[2]"),
        ((torch.zeros(2), torch.zeros(2)), "got 2 tensors, expected 1"),
        (torch.tensor([0.0, math.nan]), "only index 1 of 2 along axis 0"),
        (torch.tensor([0.0, math.inf]), "got inf, expected 2"),
    ],
)
def test_shapes_dtypes_nan_and_infinities_must_match(actual, text) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_matches(actual, lambda x: x + x, torch.tensor([0.0, 1.0]))
    assert text in str(caught.value)
    assert re.search(r"\n  case +f32\[2\]\n", str(caught.value))


def test_what_is_not_floating_point_must_be_equal() -> None:
    x = torch.tensor([3.0, 1.0, 2.0])
    assert_matches(torch.sort(x), torch.sort, x)
    wrong = torch.sort(x)
    with pytest.raises(AssertionError, match="first at"):
        assert_matches((wrong.values, wrong.indices.flip(0)), torch.sort, x)


def test_what_cannot_serve_is_refused_with_a_hint() -> None:
    x = torch.ones(2)
    with pytest.raises(CheckError, match="exact values are more precise") as caught:
        assert_matches(x, x)
    assert "x.double()" in str(caught.value)
    with pytest.raises(CheckError, match="on the arguments of the call"):
        assert_matches(x, torch.exp)
    with pytest.raises(CheckError, match="need no arguments"):
        assert_matches(x, x.double(), x)
    with pytest.raises(CheckError, match="it compares tensors"):
        assert_matches(1.0, x.double())
    with pytest.raises(CheckError, match=r"(?s)a tuple or list of tensors.*got +dict from `<lambda>`.*found\.values"):
        assert_matches({"y": x}, lambda x: {"y": x}, x)


# --- inputs ---------------------------------------------------------------------------------------------


@operator("testing::blend", cpu=None)
def blend(
    x: Float[Tensor, "*batch n"],
    gates: Float[Tensor, "4*n"],
    rows: Int64[Tensor, "k"],
    offset: Float[Tensor, "n"] | None = None,
    count: int = 3,
    *,
    mode: Literal["add", "mul"] = "mul",
    eps: float = 0.25,
) -> Float[Tensor, "*batch n"]:
    if count > 5:
        raise ValueError("count is at most 5")
    kept = gates[: x.shape[-1]] + eps + rows.sum()
    out = x * kept if mode == "mul" else x + kept
    return out * count if offset is None else out * count + offset


@operator("testing::bump_", cpu=None, autocast=None)
def bump_(x: Mutates[Float[Tensor, "*s"]], by: Float[Tensor, "*s"]) -> None:
    x.add_(by)


_DRAWN = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@_DRAWN
@given(case=inputs(blend, n=(2, 40), eps=(0.5, 0.75), x=(-3.0, 3.0), rows=(0, 1)))
def test_examples_satisfy_the_annotations_and_the_ranges(case) -> None:
    x, gates, rows, offset, count = case.args
    n = x.shape[-1]
    assert 2 <= n <= 40
    assert gates.shape == (4 * n,)
    assert offset is None or offset.shape == (n,)
    assert x.dtype == gates.dtype == (x.dtype if offset is None else offset.dtype)
    assert rows.dtype == torch.int64
    assert not rows.numel() or set(rows.tolist()) <= {0, 1}
    assert x.ndim <= 4
    assert max(x.numel(), gates.numel()) <= 4096
    assert not x.numel() or float(x.abs().max()) <= 3
    assert case.kwargs["mode"] in ("add", "mul")
    assert 0.5 <= case.kwargs["eps"] <= 0.75
    assert count <= 5  # what the reference refuses is left out
    blend(*case.args, **case.kwargs)


def seen_in(strategy, what, examples: int = 4000) -> bool:
    # The first ends the search. Hypothesis draws constants of imported modules too, so draws differ from run to run.
    kept = [Phase.generate]  # no shrinking: seen is seen
    try:
        find(
            strategy,
            what,
            settings=settings(max_examples=examples, phases=kept, database=None, deadline=None, derandomize=True),
        )
    except (NoSuchExample, Unsatisfiable):
        return False
    return True


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("no batch axes", lambda c: c.args[0].ndim == 1),
        ("three batch axes", lambda c: c.args[0].ndim == 4),
        ("an empty axis", lambda c: c.args[0].numel() == 0),
        ("more than a vector", lambda c: c.args[0].shape[-1] > 64),
        ("bfloat16", lambda c: c.dtype == torch.bfloat16),
        ("NaN", lambda c: bool(c.args[0].isnan().any())),
        ("infinity", lambda c: bool(c.args[1].isinf().any())),
        ("subnormal", lambda c: c.dtype == torch.float32 and bool(((c.args[1] != 0) & (c.args[1].abs() < 1e-38)).any())),
        ("an offset", lambda c: c.args[3] is not None),
        ("not contiguous", lambda c: not c.args[0].is_contiguous()),
        ("misaligned", lambda c: c.args[0].storage_offset() == 3),
        ("stride 0", lambda c: c.args[1].stride() == (0,) and c.args[1].numel() > 1),
        ("add", lambda c: c.kwargs["mode"] == "add"),
    ],
)  # fmt: skip
def test_every_kind_of_input_is_drawn(name, what) -> None:
    assert seen_in(inputs(blend), what)


def test_special_false_and_layouts_leave_out_what_they_say() -> None:
    tame = inputs(blend, special=False, layouts=["contiguous"], dtypes=[torch.float64])

    def breaks_it(case: Inputs) -> bool:
        x = case.args[0]
        return x.dtype != torch.float64 or not x.is_contiguous() or not bool(torch.isfinite(x).all())

    assert not seen_in(tame, breaks_it, 150)
    assert seen_in(inputs(blend), breaks_it)
    assert not seen_in(inputs(blend, layouts="contiguous"), lambda c: not c.args[0].is_contiguous(), 20)
    for unknown, text in ((["contiguous", "strided"], "`strided`: unknown layout"), ([], "`layouts` names no layout")):
        with pytest.raises(CheckError, match=rf"(?s){text}.*expected +contiguous transposed sliced"):
            inputs(blend, layouts=unknown)


def test_dtypes_have_the_names_that_cases_take() -> None:
    for dtypes in (["bf16"], "bf16", torch.bfloat16):
        assert not seen_in(inputs(blend, dtypes=dtypes), lambda c: c.dtype != torch.bfloat16, 20)
    with pytest.raises(CheckError, match=r"(?s)`f23`: unknown dtype.*expected +bf16 bool f16"):
        inputs(blend, dtypes=["f23"])
    with pytest.raises(CheckError, match=r"(?s)`Float` has none of these dtypes.*got +i32\n +there +f32"):
        inputs(blend, dtypes=["i32"])


def test_hypothesis_shows_the_operator_and_no_internals() -> None:
    told = repr(inputs(blend, n=(1, 64)))
    assert "<inputs of testing::blend>" in told
    assert len(told) < 60


def test_a_written_argument_is_never_expanded() -> None:
    assert not seen_in(inputs(bump_), lambda c: 0 in c.args[0].stride() and c.args[0].numel() > 1, 150)


def smallest(strategy, what=lambda c: True) -> Inputs:
    return find(strategy, what, settings=settings(max_examples=150, database=None, deadline=None))


def test_examples_shrink_to_what_matters() -> None:
    plain = smallest(inputs(blend))
    assert repr(plain) == (
        "Inputs(f32[1] = [0.0], f32[4] = [0.0, 0.0, 0.0, 0.0], i64[1] = [0], None, 3, mode='mul', eps=0.25)"
    )
    tail = smallest(inputs(blend), lambda c: c.args[0].shape[-1] % 4 == 3)
    assert tail.args[0].shape == (3,)
    large = smallest(inputs(blend, special=False), lambda c: c.args[0].numel() > 0 and bool((c.args[0] > 5).any()))
    assert large.args[0].numel() == 1
    assert 5 < float(large.args[0]) <= 16


def test_a_strategy_takes_the_place_of_an_argument() -> None:
    rows = st.just(torch.tensor([7]))
    once = settings(max_examples=20, database=None, deadline=None, phases=[Phase.generate])
    found = find(inputs(blend, rows=rows, mode=st.just("add")), lambda c: True, settings=once)
    assert found.args[2].tolist() == [7]
    assert found.kwargs["mode"] == "add"


@operator("testing::rows", cpu=None)
def rows(
    x: Float[Tensor, "*batch n k"], scale: Float[Tensor, "n"], wide: Float[Tensor, "2*n"], k: int = 2
) -> Float[Tensor, "*batch n k"]:
    return x * scale[:, None] + wide[: x.shape[-2], None]


@pytest.mark.parametrize(
    ("given_tensors", "sizes"),
    [
        ({"scale": torch.ones(3, dtype=torch.float64)}, {"n": 3}),
        ({"wide": torch.ones(10)}, {"n": 5}),
        ({"x": torch.ones(2, 1, 7, 5)}, {"n": 7, "k": 5}),
    ],
)
def test_a_tensor_of_a_strategy_binds_its_axes(given_tensors, sizes) -> None:
    """The other tensors took another size for the axis, so that the call was refused."""

    @_DRAWN
    @given(case=inputs(rows, **{name: st.just(tensor) for name, tensor in given_tensors.items()}))
    def check(case: Inputs) -> None:
        x, scale, wide, k = case.args
        n = scale.shape[0]
        assert x.shape[-2:] == (n, k)
        assert wide.shape == (2 * n,)
        assert x.dtype == scale.dtype == wide.dtype == next(iter(given_tensors.values())).dtype
        assert {"n": n, "k": k}.items() >= sizes.items()
        rows(*case.args)

    check()


@operator("testing::flat", cpu=None)
def flat(x: Float[Tensor, "n*k"], scale: Float[Tensor, "n"], k: int = 2) -> Float[Tensor, "n k"]:
    return x.view(-1, k) * scale[:, None]


def test_a_size_that_its_tensor_does_not_tell_is_drawn() -> None:
    once = settings(max_examples=50, database=None, deadline=None)
    case = find(inputs(flat, x=st.just(torch.ones(12))), lambda c: c.args[2] == 3, settings=once)
    assert case.args[1].shape == (4,)


def test_a_batch_of_a_strategy_is_that_of_the_others() -> None:
    once = settings(max_examples=20, database=None, deadline=None)
    found = find(inputs(bump_, by=st.just(torch.ones(4, 2))), lambda c: True, settings=once)
    assert found.args[0].shape == (4, 2)


@pytest.mark.parametrize(
    "ranges",
    [
        {"x": st.just(torch.ones(2, 3, 4)), "scale": st.just(torch.ones(5))},
        {"scale": st.just(torch.ones(5)), "n": (1, 4)},
        {"x": st.just(torch.ones(2, 3, 4)), "k": (1, 2)},
        {"scale": st.just(None)},
    ],
)
def test_tensors_of_strategies_that_do_not_fit_are_skipped(ranges) -> None:
    assert not seen_in(inputs(rows, **ranges), lambda c: True, 20)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"m": (1, 2)}, r"(?s)it has no axis or argument `m`.*hint: `n=\(1, 64\)`"),
        (
            {"batch": (0, 4)},
            r"(?s)`\*batch` is a variadic axis, whose sizes have no range.*hint: `x=st.just\(tensor\)`",
        ),
        ({"n": 3}, "`n` takes the least and the largest size"),
        ({"n": (5, 2)}, "`n` takes the least and the largest size"),
        ({"n": st.just(3)}, "`n` takes the least and the largest size"),
        ({"x": ("a", 2)}, "`x` takes the least and the largest value, or a strategy"),
    ],
)
def test_a_wrong_range_is_refused(arguments, text) -> None:
    with pytest.raises(CheckError, match=text):
        inputs(blend, **arguments)


def test_inputs_are_samples_and_pickle() -> None:
    import pickle

    import opwright

    (case, *_) = find_cases(blend, only="sliced", dtypes=torch.float32)
    again = pickle.loads(pickle.dumps(case))
    assert (again.label, again.kwargs, str(again)) == (case.label, case.kwargs, str(case))
    record = opwright.verify(blend, samples=[case], checks=["numerics"])
    assert (record.checks[0].cases, record.checks[0].outcome) == (4, "passed")  # it, and in three other layouts


def test_cases_are_fresh_and_keep_their_strides() -> None:
    (case, *_) = find_cases(blend, only="sliced", dtypes=torch.float32)
    fresh = case.fresh()
    assert fresh.args[0].stride() == case.args[0].stride()
    assert not fresh.args[0].is_contiguous()
    before = case.args[0].clone()
    fresh.args[0].zero_()
    assert torch.equal(case.args[0], before)
