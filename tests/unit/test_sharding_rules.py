"""Rules for distributed tensors: those that follow from a contract and its reference, and no others.

The expected ones are written by hand, from what each formula does. "S1 R > S1": the first tensor sharded along dimension 1,
the second replicated, the result sharded along dimension 1; P is a sum, Pmax a maximum over the ranks.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import sharded_operators as ops
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Partial, Replicate, Shard

from opwright import _torch
from opwright.dispatch import record, sharding_rules
from opwright.dispatch.reference import tensors_in
from opwright.dispatch.sharding_rules import signature_of
from opwright.errors import ShardingError

X, M, W, V = torch.randn(4, 6), torch.randn(4, 5), torch.randn(6), torch.randn(3, 6)


def short(placement):
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P{placement.reduce_op}"
    return "R"


def rules_of(function, *values, **options):
    """Returns the rules for a call but for the one that replicates, which is always there."""
    operator = function.operator
    values = operator.normalize(*values, **options)
    *found, whole = operator.rules.offer(signature_of(operator.contract, values), list(tensors_in(values)))
    assert {*whole.inputs, *whole.outputs} <= {Replicate()}
    return {" > ".join(" ".join(map(short, each)) for each in (rule.inputs, rule.outputs)) for rule in found}


@pytest.mark.parametrize(
    ("function", "values", "expected"),
    [
        (ops.scale, (X, W), "S0 R > S0, S1 S0 > S1, P R > P, R P > P"),
        (ops.affine, (X, W), "S0 R > S0, S1 S0 > S1"),
        (ops.matmul, (X, V), "S0 R > S0, R S0 > S1, S1 S1 > P, P R > P, R P > P"),
        (ops.linear_gelu, (X, V), "S0 R > S0, R S0 > S1"),
        (ops.rms_norm, (X, W), "S0 R > S0, R P > P"),
        (ops.largest, (X,), "S0 > S0 S0, S1 > Pmax S1"),
        (ops.total, (X,), "S0 > P, S1 > P, P > P"),
        (ops.lookup, (M, torch.tensor([1, 2])), "S1 R > S1, R S0 > S0, P R > P"),
        (ops.add_all, ([X, X + 1], W), "S0 S0 R > S0, S1 S1 S0 > S1"),
        (ops.halve_and_add_, (X, X), "S0 S0 > , S1 S1 > "),
        (ops.collect_, (W, X), "S0 S1 > "),
        (ops.nested, (X, W), "S0 R > S0, S1 S0 > S1"),
        (ops.optional, (X,), "S0 > S0, S1 > S1, P > P"),
        (ops.optional, (X, W), "S0 R > S0, S1 S0 > S1, P R > P, R P > P"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_rules(function, values, expected) -> None:
    wanted = set(expected.split(", "))
    if torch.__version__ < (2, 12) and function is not ops.matmul:
        wanted.discard("R P > P")  # it reduces a partial second factor before it multiplies
    assert rules_of(function, *values) == wanted


def test_they_depend_on_the_options() -> None:
    assert rules_of(ops.optional, X, power=2) == {"S0 > S0", "S1 > S1"}
    assert "P R > P" not in rules_of(ops.optional, X, mask=X)


@pytest.mark.parametrize(
    ("function", "expected", "why"),
    [
        (ops.clip_norm, "S1 > S1", "no data that are tried show that rows depend on each other"),
        (ops.over_rows, "S1 > S1, P > P", "PyTorch's rules take x.shape[0] for a number"),
        (ops.clamp, "S0 > S0, S1 > S1", "no data that are tried show that it is not linear"),
        (ops.lower, "", "the place of an element counts"),
        (ops.square, "", "a shard is not square"),
    ],
)
def test_a_rule_that_only_seems_right_is_not_offered(function, expected, why) -> None:
    square = torch.randn(4, 4)
    assert rules_of(function, square) == set(filter(None, expected.split(", "))), why


def test_what_was_found_for_many_calls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that has another value in each call made a program grow without end."""
    monkeypatch.setattr(record, "_MAX_KEPT", 3)
    found: dict[tuple, Any] = {}
    for i in range(10):
        record.keep(found, (i,), i)
        assert found[i,] == i
        assert len(found) <= 3


def test_axes_that_others_are_computed_from_stay_whole() -> None:
    assert rules_of(ops.repeat, W, torch.randn(12)) <= {"P R > P", "R P > P"}


def test_an_index_axis_stays_whole() -> None:
    """Indices of a table's rows are those of the whole table."""
    assert not any(rule.startswith("S0") for rule in rules_of(ops.lookup, M, torch.tensor([1])))


def test_torch_distributed_is_not_imported_before_a_program_does(run_python) -> None:
    """PyTorch itself, which the process has loaded, does not."""
    code = f"""
import sys, torch, opwright_ops
sys.path.append({str(Path(__file__).parent)!r})
import sharded_operators as ops
x = torch.randn(3, 2, requires_grad=True)
ops.scale(x, torch.randn(2)).sum().backward()
torch.vmap(ops.scale, in_dims=(0, None))(x, torch.randn(2))
print("torch.distributed.tensor" in sys.modules)
"""
    assert run_python(code).stdout == "False\n"


class TestDeclared:
    """`@name.sharding`."""

    @pytest.fixture
    def scale(self):
        yield ops.scale
        ops.scale.operator.sharding_rules = None

    def test_it_takes_the_place_of_what_is_derived(self, scale) -> None:
        seen = []

        @scale.sharding
        def rules(x, w):
            seen.append((x.device.type, x.shape, w.shape))
            return [({"x": Shard(0)}, Shard(0))]

        assert rules_of(scale, X, W) == {"S0 R > S0"}
        assert seen == [("meta", X.shape, W.shape)]

    @pytest.mark.parametrize(
        ("rule", "message"),
        [
            (Shard(0), "is not a pair of placements"),
            (({"y": Shard(0)}, Shard(0)), "names `y`, which is not a tensor argument"),
            (({"x": Shard(0)}, (Shard(0), Shard(0))), "has 2 placements for 1 results"),
            (({"x": 0}, Shard(0)), "has `0`, which is not a placement"),
        ],
    )
    def test_what_is_not_a_rule_is_refused(self, scale, rule, message) -> None:
        scale.sharding(lambda x, w: [rule])
        with pytest.raises(ShardingError) as refused:
            rules_of(scale, X, W)
        assert refused.value.rule == f"a rule of `@scale.sharding` {message}"
        assert "Shard(0)" in refused.value.hint


def test_the_first_fake_mode_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch built with CUDA keeps a pointer into the first thread that enters one, where there is no GPU."""
    entered = []

    class Mode(FakeTensorMode):
        def __enter__(self) -> Any:
            entered.append(threading.current_thread())
            return super().__enter__()

    monkeypatch.setattr(_torch, "FakeTensorMode", Mode)
    sharding_rules._enter_fake_mode.cache_clear()
    sharding_rules._run_apart(lambda: None)
    assert entered == [threading.current_thread()]
