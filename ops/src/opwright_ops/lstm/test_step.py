"""`lstm_step` against the module in float64, with weights that are rounded here."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pickle
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import opwright
from opwright import Mutates, operator
from opwright_ops import LSTM, LSTMStep, lstm_step

step_module = importlib.import_module("opwright_ops.lstm.step")
WEIGHTS = ("float32", "bfloat16", "int8")
# Sums of up to 75 products of float32 over six steps.
TIGHT = {"rtol": 1e-5, "atol": 2e-6}


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Rounds a weight [rows, K] on its bits, or row by row."""
    values = weight.detach().numpy()
    if kind == "bfloat16":
        bits = values.view(np.uint32)
        return torch.from_numpy((bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).astype(np.uint32).view(np.float32))
    if kind == "int8":
        rows = []
        for row in values:
            quantum = np.float32(max(abs(row).max(), np.float32(1e-37)) / np.float32(127))
            rows.append(np.rint(row / quantum).astype(np.float64) * np.float64(quantum))
        return torch.from_numpy(np.stack(rows))
    return weight.detach()


def oracle_of(lstm: nn.Module, kind: str = "float32") -> Callable:
    """Returns the module in float64 and eval mode with the weights rounded, as a function with a state."""
    exact = copy.deepcopy(lstm).double().eval()
    with torch.no_grad():
        for name, parameter in lstm.named_parameters():
            if name.startswith("weight_"):
                getattr(exact, name).copy_(rounded(parameter.float(), kind))
    state = None

    @torch.no_grad()
    def take(x: torch.Tensor) -> torch.Tensor:
        nonlocal state
        output, state, *_ = exact(x.double(), state)
        take.state = state
        return output

    return take


def check(got: torch.Tensor, want: torch.Tensor, **tolerances: float) -> None:
    torch.testing.assert_close(got, want.to(got.dtype), **(tolerances or TIGHT))


def made(*sizes: int, **options) -> LSTM:
    torch.manual_seed(5)
    return LSTM(*sizes, **options).eval()


VARIANTS = {
    "plain": {},
    "no bias": {"bias": False},
    "projection": {"proj_size": -1},
    "peephole": {"peephole": True},
    "layer norm": {"layer_norm": True},
    "hard": {"activation": "hard", "slope": 0.2},
    "hard sigmoid": {"activation": "hard_sigmoid"},
    "hard tanh": {"activation": "hard_tanh"},
    "coupled": {"coupled": True},
    "clip": {"clip": 0.3},
    "zoneout": {"zoneout": (0.1, 0.3)},
    "dropout": {
        "weight_dropout": 0.3,
        "variational_dropout": 0.2,
        "return_cell": True,
        "memory": "recompute",
    },
    "two layers": {"num_layers": 2, "proj_size": -1, "peephole": True, "layer_norm": True, "zoneout": 0.2},
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 75])
def test_steps_are_those_of_the_module(size, variant, kind) -> None:
    options = dict(VARIANTS[variant])
    if options.get("proj_size"):
        options["proj_size"] = size // 2
    if size == 1:
        options.pop("layer_norm", None)  # refused
    lstm = made(size // 2 + 2, size, **options)
    for batch in (1, 3, 8):
        step, oracle = lstm_step(lstm, batch, kind), oracle_of(lstm, kind)
        tolerances = {"rtol": 1e-4, "atol": 2e-5} if lstm.layer_norm else TIGHT
        for steps in (1, 3, None, 1):
            x = torch.randn(steps or 1, batch, lstm.input_size)
            got = step(x) if steps else step(x[0])[None]
            check(got, oracle(x), **tolerances)
        for mine, theirs in zip(step.state, oracle.state, strict=True):
            check(mine, theirs, **tolerances)


def test_quick_single_steps_are_those_of_a_sequence() -> None:
    lstm = made(6, 20, num_layers=3)
    x = torch.randn(50, 1, 6)
    one_by_one = lstm_step(lstm)
    got = torch.stack([one_by_one(x[t]) for t in range(50)])
    check(got, oracle_of(lstm)(x))
    assert got.shape == (50, 1, 20)
    together = lstm_step(lstm)
    assert torch.equal(together(x), got)
    assert all(map(torch.equal, one_by_one.state, together.state))


def test_a_module_of_torch() -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(5, 9, num_layers=2, proj_size=4, dropout=0.5)
    step, oracle = lstm_step(lstm, 2), oracle_of(lstm)
    for _ in range(3):
        x = torch.randn(2, 2, 5)
        check(step(x), oracle(x))
    with torch.no_grad():
        lstm.weight_ih_l1 = nn.Parameter(lstm.weight_ih_l1 * 2)
    oracle = oracle_of(lstm)
    step.reset()
    check(step(x), oracle(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_types_of_modules_and_inputs(dtype) -> None:
    lstm = made(5, 9, dtype=dtype)
    step, oracle = lstm_step(lstm, 2), oracle_of(lstm)
    for x in (torch.randn(2, 5), torch.randn(3, 2, 5)):
        x = x.to(dtype)
        got = step(x)
        assert got.dtype == dtype
        check(got, oracle(x.view(-1, 2, 5)).view(got.shape), **({} if dtype != torch.float64 else TIGHT))
    assert {t.dtype for t in step.state} == {torch.float32}
    assert step(torch.randn(2, 5)).dtype == torch.float32


def test_layouts_of_the_input() -> None:
    lstm = made(5, 9)
    x = torch.randn(4, 3, 5)
    want = lstm_step(lstm, 3)(x)
    gaps = torch.randn(5, 3, 8).permute(2, 1, 0)[::2]
    gaps.copy_(x)
    assert torch.equal(lstm_step(lstm, 3)(gaps), want)
    apart = lstm_step(lstm, 3)
    assert torch.equal(torch.stack([apart(row) for row in gaps]), want)
    first = LSTM(5, 9, batch_first=True).eval()
    first.load_state_dict(lstm.state_dict())
    assert torch.equal(lstm_step(first, 3)(x.mT.mT.transpose(0, 1)), want.transpose(0, 1))
    apart = lstm_step(first, 3)
    assert torch.equal(torch.stack([apart(row) for row in x]), want)
    alone = lstm_step(lstm)
    got = torch.stack([alone(x[t, 0]) for t in range(4)])
    check(got, oracle_of(lstm)(x[:, :1])[:, 0])
    shared = torch.randn(1, 5).expand(3, 5)
    check(lstm_step(lstm, 3)(shared), oracle_of(lstm)(shared[None])[0])


def test_no_steps_and_no_entries() -> None:
    lstm = made(5, 9, num_layers=2)
    step = lstm_step(lstm, 2)
    step(torch.randn(2, 5))
    before = step.state
    assert step(torch.randn(0, 2, 5)).shape == (0, 2, 9)
    assert all(map(torch.equal, step.state, before))
    step.reset(0)
    assert step(torch.randn(0, 5)).shape == (0, 9)
    assert step(torch.randn(3, 0, 5)).shape == (3, 0, 9)
    assert step.state[0].shape == (2, 0, 9)


def test_state() -> None:
    lstm = made(5, 9, num_layers=2, proj_size=4)
    step, oracle = lstm_step(lstm, 2), oracle_of(lstm)
    x = torch.randn(6, 2, 5)
    assert not any(t.any() for t in step.state)
    want = oracle(x)
    _, step.state = lstm(x[:4])
    check(step(x[4:]), want[4:])
    kept = step.state
    kept_too = [t.clone() for t in kept]
    first = step(x[0])
    assert all(map(torch.equal, kept, kept_too))  # copies
    step.state = [t.double() for t in kept]
    kept[0].zero_()
    assert torch.equal(step(x[0]), first)
    step.reset()
    check(step(x[0]), want[0])
    step.reset(3)
    assert [t.shape for t in step.state] == [(2, 3, 4), (2, 3, 9)]
    x = torch.randn(3, 5)
    check(step(x), oracle_of(lstm)(x[None])[0])


# --- changes of the weights ---------------------------------------------------------------------------


def _add(lstm: nn.Module) -> None:
    with torch.no_grad():
        lstm.weight_hh_l0.add_(0.25)


def _one_element(lstm: nn.Module) -> None:
    with torch.no_grad():
        lstm.weight_hh_l0[-1, -1] += 3


def _optimizer(lstm: nn.Module) -> None:
    lstm(torch.ones(2, 1, lstm.input_size))[0].sum().backward()
    torch.optim.Adam(lstm.parameters(), lr=0.1).step()


def _load(lstm: nn.Module, assign: bool = False) -> None:
    lstm.load_state_dict({k: v * 0.5 + 0.1 for k, v in lstm.state_dict().items()}, assign=assign)


def _data(lstm: nn.Module) -> None:
    lstm.bias_hh_l0.data.copy_(torch.randn(lstm.bias_hh_l0.shape))


def _gate_of_data(lstm: nn.Module) -> None:
    size = lstm.hidden_size
    lstm.bias_hh_l0.data[size : 2 * size] = 1


def _other_data(lstm: nn.Module) -> None:
    lstm.weight_ih_l0.data = lstm.weight_ih_l0.data * 2


def _numpy(lstm: nn.Module) -> None:
    lstm.weight_ih_l0.detach().numpy()[:] *= 2


def _replaced(lstm: nn.Module) -> None:
    lstm.weight_ih_l0 = nn.Parameter(lstm.weight_ih_l0.detach() * 2)


def _inference(lstm: nn.Module) -> None:
    with torch.inference_mode():
        lstm.weight_ih_l0.mul_(2)


CHANGES = [
    _add, _one_element, _optimizer, _load, lambda m: _load(m, assign=True), _data, _gate_of_data, _other_data,
    _numpy, _replaced, _inference, lambda m: m.double(), lambda m: m.to(torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize("module", [LSTM, nn.LSTM])
@pytest.mark.parametrize("size", [1, 3, 75])
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_changes_of_the_weights_are_seen(change, size, module) -> None:
    for kind in WEIGHTS:
        torch.manual_seed(0)
        lstm, x = module(size + 1, size), torch.randn(3, 1, size + 1)
        step = lstm_step(lstm, 1, kind)
        before = torch.stack([step(x[t]) for t in range(3)])
        change(lstm)
        step.reset()
        after = torch.stack([step(x[t]) for t in range(3)])
        assert not torch.equal(after, before) or lstm.weight_ih_l0.dtype == torch.float64
        check(after, oracle_of(lstm, kind)(x))


def test_a_change_keeps_the_state() -> None:
    lstm = made(5, 9)
    step, oracle, x = lstm_step(lstm), oracle_of(lstm), torch.randn(2, 1, 5)
    oracle(x[:1])
    step(x[0])
    _add(lstm)
    want, _ = copy.deepcopy(lstm).double()(x[1:].double(), oracle.state)
    check(step(x[1]), want[0])


def test_a_small_change_of_data_needs_repack() -> None:
    lstm = made(64, 64)
    step, x = lstm_step(lstm), torch.ones(1, 64)
    before = step(x)
    lstm.weight_ih_l0.data[1, 1] += 5
    step.reset()
    step.repack()
    after = step(x)
    assert not torch.equal(after, before)
    check(after, oracle_of(lstm)(x[None])[0])


@pytest.mark.parametrize("has_numpy", [True, False])
def test_weights_made_in_inference_mode(has_numpy, monkeypatch) -> None:
    if not has_numpy:

        def refuse(self: torch.Tensor) -> None:
            raise RuntimeError("Numpy is not available")

        monkeypatch.setattr(torch.Tensor, "numpy", refuse)
    x = torch.randn(1, 5)
    with torch.inference_mode():
        lstm = made(5, 9)
        step = lstm_step(lstm)
        before = step(x)
        lstm.weight_hh_l0.mul_(2)
        lstm.weight_ih_l0.mul_(2)
    step.reset()
    after = step(x)
    assert not torch.equal(after, before)
    step.state = step.state
    monkeypatch.undo()
    with torch.inference_mode():
        check(after, oracle_of(lstm)(x[None])[0])


def test_rows_of_zeros_and_tiny_weights_in_int8() -> None:
    lstm = made(5, 9)
    with torch.no_grad():
        lstm.weight_ih_l0[::2] = 0
        lstm.weight_hh_l0[3] = 1e-42
    x = torch.randn(1, 5)
    check(lstm_step(lstm, 1, "int8")(x), oracle_of(lstm, "int8")(x[None])[0])


# --- threads, copies, autograd, modes --------------------------------------------------------------------


def test_of_two_threads_one_is_refused() -> None:
    lstm = made(4, 75)
    x = torch.randn(4000, 1, 4)
    want = lstm_step(lstm)(x)
    refusals = 0
    for _ in range(20):
        step, barrier, found = lstm_step(lstm), threading.Barrier(2), []
        step(x[:1])
        step.reset()

        def call(step=step, barrier=barrier, found=found) -> None:
            barrier.wait()
            try:
                found.append(step(x))
            except RuntimeError as error:
                found.append(error)

        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        refused = [f for f in found if isinstance(f, RuntimeError)]
        if not refused:
            continue  # one was done before the other came
        refusals += 1
        assert len(refused) == 1
        assert str(refused[0]) == (
            "`lstm_step`: `step` is in use by another thread, and there is one state\n\n"
            "hint: a handle for each thread: `lstm_step(lstm)`"
        )
        (got,) = [f for f in found if isinstance(f, torch.Tensor)]
        assert torch.equal(got, want)
        assert torch.equal(step.state[0][0], want[-1])  # and it can be used again
        if refusals == 3:
            break
    assert refusals


def test_after_a_refusal_it_goes_on() -> None:
    lstm = made(5, 9)
    step, x = lstm_step(lstm), torch.randn(1, 5)
    with pytest.raises(ValueError, match="input_size"):
        step(torch.randn(1, 6))
    assert not step.state[0].any()
    check(step(x), oracle_of(lstm)(x[None])[0])


def test_copies_have_their_own_state_and_module() -> None:
    step, x = lstm_step(made(5, 9, num_layers=2), 2, "int8"), torch.randn(2, 5)
    step(x)
    copies = [copy.deepcopy(step), pickle.loads(pickle.dumps(step))]
    want = step(x)
    for other in copies:
        assert isinstance(other, LSTMStep)
        assert torch.equal(other(x), want)
        assert other.lstm is not step.lstm
        _add(other.lstm)
        assert not torch.equal(other(x), step(x))
        other.reset()
    with torch.inference_mode():
        other = copy.deepcopy(step)
    other.state = step.state
    assert torch.equal(other(x), step(x))


def test_nothing_is_recorded() -> None:
    lstm = made(5, 9)
    step, x = lstm_step(lstm), torch.randn(1, 5)
    want = lstm_step(lstm)(x)
    for given in (x, x[None], x.double()):
        step.reset()
        assert not step(given).requires_grad
    assert not step.state[0].requires_grad
    step.state = lstm(x[None])[1]
    assert not step.state[0].requires_grad
    leaf = x.clone().requires_grad_()
    for mode in (torch.no_grad, torch.inference_mode):
        step.reset()
        with mode():
            assert torch.equal(step(leaf), want)
            assert torch.equal(step.state[0][0], want)
    step.reset()  # after inference mode
    assert torch.equal(step(x), want)


def test_modes_of_torch() -> None:
    lstm = made(5, 9)
    step, x = lstm_step(lstm), torch.randn(1, 5)
    want = lstm_step(lstm)(x)
    with torch.autocast("cpu", torch.bfloat16):
        got = step(x)
    assert got.dtype == torch.float32
    assert torch.equal(got, want)
    step.reset()
    assert torch.equal(torch.compile(lambda x: step(x) * 2, backend="aot_eager")(x), want * 2)
    step.reset()
    assert torch.equal(torch.vmap(lambda scale: step(x) * scale)(torch.ones(2))[1], want)
    with torch.device("meta"):
        assert torch.equal(lstm_step(lstm)(x), want)


# --- the operator -----------------------------------------------------------------------------------------


@pytest.mark.compiler
def test_the_operator_is_verified() -> None:
    record = opwright.verify(step_module.lstm_step_)
    assert record.passed, str(record)


def test_arguments_are_those_of_the_operator() -> None:
    lstm = made(5, 9, num_layers=2, activation="hard", slope=0.2)
    step, x = lstm_step(lstm, 2), torch.randn(3, 2, 5)
    want = oracle_of(lstm)(x)
    layers, options = step.arguments()
    found = x
    for tensors in layers:
        found = torch.ops.opwright_ops.lstm_step(found, *tensors, **options)
    check(found, want)
    check(step.state[0], torch.stack([layers[0][0], layers[1][0]]))
    assert step.state[0].any()


FROM_CPP = """
#include <opwright/kernel.h>
#include <opwright/tensor.h>
using namespace opwright;

void stream(View<const float, 2> x, View<float, 2> h, View<float, 2> c, View<const float, 3> w_ih,
            View<const float, 3> w_hh, View<const float, 1> bias, View<float, 2> output) {
  const Tensor none_, given = borrow(bias);
  const Tensor input = borrow(x), mine_h = borrow(h), mine_c = borrow(c), ih = borrow(w_ih), hh = borrow(w_hh);
  for (int64_t t = 0; t < x.size(0); ++t) {
    const Tensor step = input.view({1, 1, x.size(1)}, {0, 0, x.stride(1)}, t * x.stride(0));
    const Tensor found = call("opwright_ops::_lstm_step_kernel", step, mine_h, mine_c, ih, hh, optional(none_),
                              optional(given), optional(none_), optional(none_), optional(none_),
                              optional(none_), optional(none_), optional(none_), 0, 0.125, false, 0.0, 0.0, 0.0);
    for (int64_t i = 0; i < output.size(1); ++i) output(t, i) = found.data<float>()[i];
  }
}
OPWRIGHT_KERNEL(stream)
"""


@pytest.mark.compiler
def test_steps_from_cpp(monkeypatch) -> None:
    from jaxtyping import Float32

    @operator("opwright_test_lstm_step::stream", cpu=FROM_CPP)
    def stream(
        x: Float32[torch.Tensor, "T I"],
        h: Mutates[Float32[torch.Tensor, "1 H"]],
        c: Mutates[Float32[torch.Tensor, "1 H"]],
        w_ih: Float32[torch.Tensor, "blocks I 64"],
        w_hh: Float32[torch.Tensor, "blocks H 64"],
        bias: Float32[torch.Tensor, "4*H"],
    ) -> Float32[torch.Tensor, "T H"]:
        raise NotImplementedError

    lstm = made(5, 20)
    step, x = lstm_step(lstm), torch.randn(6, 1, 5)
    step(x[0])
    step.reset()
    ((h, c, w_ih, w_hh, _, bias, *_),), _ = step.arguments()
    ran = []
    registration = step_module.lstm_step_.operator.registration
    others = ("fallback", "coded_fallback", "autograd", "coded_reference")
    noted = dict.fromkeys(others, lambda *a, **k: ran.append(a))
    monkeypatch.setattr(registration, "functions", dataclasses.replace(registration.functions, **noted))
    got = stream(x[:, 0], h, c, w_ih, w_hh, bias)
    check(got, oracle_of(lstm)(x)[:, 0])
    assert torch.equal(step.state[0][0], got[-1:])
    assert not ran
