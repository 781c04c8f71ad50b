"""Wrong calls: the error of the contract, through both entries, and nothing computed."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from jaxtyping import Float, Int
from syrupy.assertion import SnapshotAssertion
from torch import Tensor

from opwright import Mutates, errors, operator

calls: list[int] = []


@operator("call_errors::attend")
def attend(
    query: Float[Tensor, "*batch t 2*h"],
    table: Float[Tensor, "v h"],
    index: Int[Tensor, "t"],
    bias: Float[Tensor, "h"] | None = None,
    *,
    mode: Literal["mean", "sum"] = "mean",
    scale: float = 1.0,
) -> Float[Tensor, "*batch t h"]:
    calls.append(1)
    half = query[..., : table.shape[1]] + table[index]
    return half * scale if bias is None else half * scale + bias


def arguments(**changes):
    good = {
        "query": torch.ones(2, 3, 5, 8),
        "table": torch.ones(7, 4),
        "index": torch.zeros(5, dtype=torch.int64),
        "bias": torch.ones(4),
    }
    return good | changes


WRONG = {
    "a number": (errors.NotATensorError, {"table": 3}),
    "a list": (errors.NotATensorError, {"table": [1.0, 2.0]}),
    "None": (errors.NotATensorError, {"table": None}),
    "rank too low": (errors.RankError, {"query": torch.ones(8)}),
    "rank too high": (errors.RankError, {"table": torch.ones(1, 7, 4)}),
    "dtype outside the family": (errors.DtypeError, {"index": torch.zeros(5)}),
    "dtype not shared": (errors.DtypeError, {"bias": torch.ones(4, dtype=torch.float64)}),
    "axis of another tensor": (errors.ShapeError, {"index": torch.zeros(6, dtype=torch.int64)}),
    "computed axis": (errors.ShapeError, {"query": torch.ones(2, 3, 5, 9)}),
    "swapped tensors": (errors.ShapeError, {"bias": torch.ones(7)}),
    "another device": (errors.DeviceError, {"table": torch.ones(7, 4, device="meta")}),
    "no such choice": (errors.OptionError, {"mode": "average"}),
    "a number for a choice": (errors.OptionError, {"mode": 1}),
    "sparse": (errors.NotATensorError, {"table": torch.ones(7, 4).to_sparse()}),
    "nested": (errors.NotATensorError, {"bias": torch.nested.nested_tensor([torch.ones(4)])}),
    "complex": (errors.DtypeError, {"table": torch.ones(7, 4, dtype=torch.complex64)}),
    "quantized": (errors.NotATensorError, {"table": torch.quantize_per_tensor(torch.ones(7, 4), 0.1, 0, torch.qint8)}),
    "text for a number": (errors.OptionTypeError, {"scale": "big"}),
}


@pytest.mark.parametrize("case", WRONG)
def test_refused(case: str, snapshot: SnapshotAssertion) -> None:
    error, changes = WRONG[case]
    calls.clear()
    with pytest.raises(error) as caught:
        attend(**arguments(**changes))
    assert str(caught.value) == snapshot
    assert calls == []
    assert isinstance(caught.value, (TypeError, ValueError))


@pytest.mark.parametrize(
    "case",
    [c for c in WRONG if c not in ("a number", "a list", "None", "a number for a choice", "text for a number")],
)
def test_refused_through_torch_ops(case: str) -> None:
    error, changes = WRONG[case]
    calls.clear()
    with pytest.raises(error):
        torch.ops.call_errors.attend(**arguments(**changes))
    assert calls == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_refused_in_every_grad_mode(mode) -> None:
    with mode(), pytest.raises(errors.ShapeError):
        attend(**arguments(index=torch.zeros(6, dtype=torch.int64)))


def test_refused_with_gradient() -> None:
    query = torch.ones(2, 3, 5, 8, requires_grad=True)
    with pytest.raises(errors.ShapeError):
        attend(**arguments(query=query, bias=torch.ones(5)))


@operator("call_errors::add_rows")
def add_rows(x: Float[Tensor, "*batch n"], y: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    return x + y


@pytest.mark.parametrize(
    ("shape", "hint"),
    [
        ((5,), "`y.expand(2, 4, 5)` when one tensor serves all entries"),
        ((2, 1, 5), "`y.expand(2, 4, 5)` when one tensor serves all entries"),
        ((4, 2, 5), "axes of the same name have the same sizes in all tensors; `x` came first"),
        ((3, 2, 4, 5), "axes of the same name have the same sizes in all tensors; `x` came first"),
    ],
)
def test_another_batch_is_expanded_where_that_can_be(shape: tuple[int, ...], hint: str) -> None:
    x, y = torch.ones(2, 4, 5), torch.ones(shape)
    with pytest.raises(errors.ShapeError) as caught:
        add_rows(x, y)
    assert caught.value.hint == hint
    if "expand" in hint:
        assert torch.equal(add_rows(x, eval(hint.split("`")[1], {"y": y})), x + y)


def test_missing_and_unknown_arguments_are_pythons_own() -> None:
    with pytest.raises(TypeError, match="table"):
        attend(torch.ones(2, 8))
    with pytest.raises(TypeError, match="colour"):
        attend(**arguments(), colour="red")


def test_a_good_call() -> None:
    out = attend(**arguments(scale=2.0))
    assert out.shape == (2, 3, 5, 4)
    assert torch.equal(out, torch.full((2, 3, 5, 4), 5.0))  # (1 + 1) * 2 + 1


def test_out_is_checked(snapshot: SnapshotAssertion) -> None:
    good = arguments()
    for out in (torch.empty(2, 3, 5, 5), torch.empty(2, 3, 5, 4, dtype=torch.float64)):
        with pytest.raises(errors.OutError) as caught:
            attend(**good, out=out)
        assert str(caught.value) == snapshot
    with pytest.raises(errors.OutError, match="autograd"):
        attend(**arguments(bias=torch.ones(4, requires_grad=True)), out=torch.empty(2, 3, 5, 4))
    out = torch.empty(2, 3, 5, 4)
    assert attend(**good, out=out) is out
    assert torch.equal(out, attend(**good))


def test_errors_can_be_pickled() -> None:
    import pickle

    with pytest.raises(errors.ShapeError) as caught:
        attend(**arguments(bias=torch.ones(7)))
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert type(again) is errors.ShapeError


@operator("call_errors::windows")
def windows(x: Float[Tensor, "*b t"], w: Float[Tensor, "k"], stride: int = 1) -> Float[Tensor, "*b (t-k)//stride+1"]:
    calls.append(1)
    return (x.unfold(-1, w.shape[0], stride) * w).sum(-1)


@operator("call_errors::total")
def total(tensors: list[Float[Tensor, "n"]], count: int = 1) -> Float[Tensor, "count"]:
    calls.append(1)
    return torch.stack(tensors).sum().expand(count).clone()


@operator("call_errors::decay_", autocast=None)
def decay_(x: Mutates[Float[Tensor, "*s"]], by: float) -> None:
    calls.append(1)
    x.mul_(by)


ONES = torch.ones(3)
IMPOSSIBLE = {
    "a negative size of an output": (errors.ShapeError, lambda: windows(torch.ones(2, 3), torch.ones(5))),
    "a size divided by zero": (errors.ShapeError, lambda: windows(torch.ones(2, 3), torch.ones(2), 0)),
    "a negative number for a size": (errors.ShapeError, lambda: total([ONES], -1)),
    "a tensor for a list": (errors.NotATensorError, lambda: total(torch.ones(2, 3))),
    "None in a list": (errors.NotATensorError, lambda: total([ONES, None])),
    "a number in a list": (errors.NotATensorError, lambda: total([ONES, 3.0])),
    "an expanded tensor that is written into": (errors.ShapeError, lambda: decay_(torch.ones(1).expand(3), 0.5)),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_impossible(case: str, snapshot: SnapshotAssertion) -> None:
    """Neither the kernel's check nor PyTorch's words: the contract's error, with what it is computed from."""
    error, call = IMPOSSIBLE[case]
    calls.clear()
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == snapshot
    assert calls == []


def test_what_is_counted_has_its_plural() -> None:
    counts = [errors.plural(count, "case") for count in (0, 1, 2, 1412)]
    assert counts == ["0 cases", "1 case", "2 cases", "1,412 cases"]
    assert [errors.plural(count, "library", "libraries") for count in (1, 2)] == ["1 library", "2 libraries"]


def test_a_namespace_without_a_name_is_the_callers() -> None:
    with pytest.raises(errors.ContractError):
        exec("attend(**given)", {"__name__": None, "attend": attend, "given": arguments(table=torch.ones(7))})
