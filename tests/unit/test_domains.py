"""Domains of arguments: what they hold, how they are declared, and the inputs that are drawn from them."""

from __future__ import annotations

import itertools
import math
from typing import Annotated

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from jaxtyping import Bool, Float, Int64
from torch import Tensor

import opwright
from opwright import Index, Mutates, NonNegative, Positive, Probability, Range, errors, operator
from opwright.bench.workload import Workload, one_element, plans
from opwright.contract.likely import find_likely
from opwright.contract.sweep import Sweep
from opwright.testing import inputs

_numbers = itertools.count()
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def declared(reference, **kwargs):
    return operator(f"domains{next(_numbers)}::{reference.__name__}", **kwargs)(reference)


def pick(
    table: Float[Tensor, "n d"],
    index: Annotated[Int64[Tensor, "m"], Index("n")],
    weight: Annotated[Float[Tensor, "m"], Probability],
    eps: Annotated[float, Range(0.25, 0.75)] = 0.5,
) -> Float[Tensor, "m d"]:
    return table[index] * (weight + eps)[:, None]


def entropy(p: Annotated[Float[Tensor, "*b n"], Positive]) -> Float[Tensor, "*b n"]:
    return -p * p.log()


# --- what is in a domain -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "domain", [Positive, NonNegative, Probability, Range(-1, 1), Range(0.1, 0.3), Range(5, math.inf)], ids=str
)
def test_folding_leads_into_the_domain(domain: Range, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, info.max, -info.max, info.tiny, -info.tiny])
    values = torch.cat([special.to(dtype), (10 * torch.randn(1000)).to(dtype), torch.rand(1000).to(dtype)])
    folded = domain.fold(values)
    wide = folded.double()
    assert folded.dtype == dtype
    assert bool(((wide >= domain.low) & (wide <= domain.high) & wide.isfinite()).all())
    assert domain is not Positive or bool((wide > 0).all())
    assert domain.low != 0 or not bool(folded.signbit().any())
    inside = domain.mask_of(values)
    assert torch.equal(folded[inside], values[inside])
    low, high = domain.ends(dtype)
    assert domain.contains(low)
    assert domain.contains(high)
    assert not domain.contains(math.nan)
    assert not domain.contains(math.inf)


def test_ends_are_the_extremes_of_the_dtype() -> None:
    assert Positive.ends(torch.float16) == (2.0**-24, 65504.0)
    assert NonNegative.ends(torch.float32)[0] == 0.0
    assert Probability.ends(torch.bfloat16) == (0.0, 1.0)
    low, high = Range(0.1, 0.3).ends(torch.bfloat16)
    assert 0.1 <= low < 0.101
    assert 0.298 < high <= 0.3
    assert Range(0.5, 300).ends(torch.int8) == (1, 127)
    assert Positive.ends(torch.uint8) == (1, 255)


def test_an_index_depends_on_the_sizes_of_a_call() -> None:
    assert Index("2*n-1").within({"n": 4}) == Range(0, 6, name='Index("2*n-1"), [0, 6]')
    assert Index("n").within({"n": 0}) is None


# --- declarations ------------------------------------------------------------------------------------------


def test_a_domain_is_shown_where_the_contract_is() -> None:
    shown = [str(parameter) for parameter in declared(pick).operator.contract.parameters]
    assert shown[1:] == [
        'Annotated[Int64[Tensor, "m"], Index("n")]',
        'Annotated[Float[Tensor, "m"], Probability]',
        "Annotated[float, Range(0.25, 0.75)]",
    ]


def test_marks_combine() -> None:
    @operator(f"domains{next(_numbers)}::add_")
    def add_(
        x: Mutates[Annotated[Float[Tensor, "n"], NonNegative]],
        y: Annotated[Mutates[Float[Tensor, "n"]], Positive],
        z: Annotated[Float[Tensor, "n"], Positive] | None,
        w: list[Annotated[Float[Tensor, "n"], Probability]],
    ) -> None:
        x.add_(y)
        y.add_(x)

    found = add_.operator.contract.parameters
    assert [p.domain for p in found] == [NonNegative, Positive, Positive, Probability]
    assert [p.mutated for p in found] == [True, True, False, False]
    assert [p.kind for p in found] == ["tensor", "tensor", "tensor", "tensors"]


def of_default(x: Float[Tensor, "n"], eps: Annotated[float, Positive] = 0.0) -> Float[Tensor, "n"]:
    return x


def of_bool(x: Annotated[Bool[Tensor, "n"], Positive]) -> Float[Tensor, "n"]:
    return x


def of_float_index(x: Annotated[Float[Tensor, "n"], Index("n")]) -> Float[Tensor, "n"]:
    return x


def of_unknown_axis(x: Float[Tensor, "n"], i: Annotated[Int64[Tensor, "n"], Index("k")]) -> Float[Tensor, "n"]:
    return x


def of_two(x: Annotated[Float[Tensor, "n"], Positive, Probability]) -> Float[Tensor, "n"]:
    return x


def without_bounds(x: Annotated[Float[Tensor, "n"], Range]) -> Float[Tensor, "n"]:
    return x


@pytest.mark.parametrize(
    ("reference", "rule"),
    [
        (of_default, "`eps`: the default is outside of its domain"),
        (of_bool, "`x`: only numbers have a domain"),
        (of_float_index, "`x`: only integers are indices"),
        (of_unknown_axis, '`i`: no input has the axis `k` of Index("k")'),
        (of_two, "`x` has more than one domain"),
        (without_bounds, "`x`: `Range` needs its bounds"),
    ],
)
def test_a_domain_that_cannot_be_honoured_is_refused(reference, rule: str) -> None:
    with pytest.raises(errors.DeclarationError) as raised:
        declared(reference)
    assert raised.value.rule == rule


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`Range\(2, 1\)` is empty"):
        Range(2, 1)


def test_ends_and_axes_of_the_other_kind_are_refused() -> None:
    """They raised an error of Python's: of `<=`, and of `split`."""
    with pytest.raises(TypeError, match=r'numbers; `Index\("t\+1"\)` takes the integers from 0 to `t`'):
        Range(0, "t")
    with pytest.raises(TypeError, match=r"name of an axis in quotes, got 5"):
        Index(5)


# --- inputs ------------------------------------------------------------------------------------------------


def assert_inside(contract, values) -> None:
    """Asserts what the domains of `pick` and `entropy` say, without Opwright's own arithmetic of domains."""
    named = dict(zip([p.name for p in contract.parameters], values, strict=True))
    if "index" in named:
        n = len(named["table"])
        assert all(0 <= i < n for i in named["index"].tolist())
        assert all(0 <= w <= 1 for w in named["weight"].tolist())
        assert 0.25 <= named["eps"] <= 0.75
    else:
        assert all(0 < p < math.inf for p in named["p"].flatten().tolist())


@pytest.mark.parametrize("reference", [pick, entropy])
def test_a_sweep_stays_within_domains_and_reaches_their_ends(reference) -> None:
    contract = declared(reference).operator.contract
    ends: dict[torch.dtype, set[float]] = {}
    for dtype in FLOATS:
        for case in Sweep(contract).cases(dtype):
            if contract.find_outside(case.values) is None:  # indices of an empty axis
                assert_inside(contract, case.values)
                for parameter, value in zip(contract.parameters, case.values, strict=True):
                    if parameter.domain in (Probability, Positive) and value.numel():
                        ends.setdefault(dtype, set()).update((value.min().item(), value.max().item()))
            else:
                assert "empty n" in case.label or "index" in case.label
    for dtype, found in ends.items():
        low, high = (
            (0.0, 1.0)
            if reference is pick
            else (torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps, torch.finfo(dtype).max)
        )
        assert {low, high} <= found


def test_inputs_of_a_benchmark_stay_within_domains() -> None:
    found = declared(pick).operator
    cases = [
        plan.make(n) for plan in plans(found, None, None, None, [torch.float32], torch.device("cpu")) for n in (0, 1)
    ]
    for case in (*cases, one_element(found, torch.device("cpu"))):
        assert_inside(found.contract, case.values)


@pytest.mark.parametrize("reference", [pick, entropy])
def test_strategies_stay_within_domains(reference) -> None:
    op = declared(reference)

    @settings(max_examples=60, deadline=None, database=None)
    @given(case=inputs(op))
    def check(case) -> None:
        assert_inside(op.operator.contract, [*case.args, *case.kwargs.values()])

    check()


def test_strategies_reach_the_ends_of_a_domain() -> None:
    op = declared(pick)
    no_shrinking = settings(database=None, phases=[Phase.generate])
    for wanted in (0.0, 1.0):
        assert find(inputs(op), lambda c, wanted=wanted: wanted in c.args[2].tolist(), settings=no_shrinking)
    assert isinstance(inputs(op, weight=(0.5, 0.6)), st.SearchStrategy)


# --- without a declared domain -----------------------------------------------------------------------------


def likely_of(reference) -> dict[str, str]:
    found = declared(reference).operator
    contract = find_likely(found.contract, opwright.verify.target.make_target(found.function, None, None).reference)
    return {p.name: str(p.likely) for p in contract.parameters if p.likely}


def embedding(index: Int64[Tensor, "*b"], table: Float[Tensor, "n d"]) -> Float[Tensor, "*b d"]:
    return torch.nn.functional.embedding(index, table)


def two_tables(
    a: Float[Tensor, "n d"], b: Float[Tensor, "m d"], i: Int64[Tensor, "k"], j: Int64[Tensor, "k"]
) -> Float[Tensor, "k d"]:
    return a[i] + b.gather(0, j[:, None].expand(-1, b.shape[1]))


def shifted(x: Int64[Tensor, "n"], y: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
    return x + y


def root(x: Float[Tensor, "n"], y: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x.sqrt() * y


def two_logarithms(x: Float[Tensor, "n"], y: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x.log() + (1 - y * y).sqrt()


def of_both(x: Float[Tensor, "n"], y: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return (x - y).sqrt()


@pytest.mark.parametrize(
    ("reference", "wanted"),
    [
        (embedding, {"index": 'Index("n")'}),
        (two_tables, {"i": 'Index("n")', "j": 'Index("m")'}),
        (shifted, {}),
        (root, {"x": "NonNegative"}),
        (two_logarithms, {"x": "Positive", "y": "Range(-1, 1)"}),
        (of_both, {}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_likely_domains_are_found_by_trying(reference, wanted: dict[str, str]) -> None:
    assert likely_of(reference) == wanted


def test_a_benchmark_changes_values_within_their_domain() -> None:
    def inverse(x: Annotated[Float[Tensor, "n"], Range(5, 10)], y: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return y / x

    work = Workload("forward", [torch.rand(64) * 5 + 5, torch.randn(64)], declared(inverse).operator)
    first = work.values[0].clone()
    changed = []
    for _ in range(4):
        work.refresh()
        changed.append(work.values[0].clone())
    assert all(5 <= v <= 10 for values in changed for v in values.tolist())
    assert not torch.equal(changed[0], first)
    assert not torch.equal(changed[-1], changed[-2])


@pytest.mark.parametrize("domain", [Positive, NonNegative, Probability, Range(-1, 2.5)], ids=str)
def test_numbers_are_in_a_domain_as_tensors_are(domain: Range) -> None:
    """Numbers are looked at without torch, which is not there where a wheel is built."""
    for value in (-2.0, -1, -0.0, 0.0, 0, 5e-324, 0.5, 1, 1.0, 2.5, 3, math.inf, -math.inf, math.nan):
        made = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
        assert domain.contains(value) == domain.contains(made), value
