"""`LSTM` under what PyTorch does with a module: compile, export, vmap, derivatives, autocast, memory kept."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.nn.utils.rnn import pack_padded_sequence

from opwright_ops.lstm import LSTM
from opwright_ops.lstm.test_module import EXACT, B, H, I, T, flat, gradients, pair, state_of

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


def compiled(module: nn.Module):
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend="aot_eager")


CALLS = {
    "plain": ({}, {}),
    "deep": ({"num_layers": 2, "bidirectional": True, "proj_size": 2, "dropout": 0.2, "batch_first": True}, {}),
    "variants": (
        {"peephole": True, "layer_norm": True, "zoneout": 0.2, "weight_dropout": 0.1, "variational_dropout": 0.1,
         "return_cell": True, "activation": "hard", "clip": 2.0, "memory": "recompute"},
        {},
    ),
    "lengths": ({"bidirectional": True}, {"lengths": torch.tensor([2, 5, 0]), "reset": torch.eye(T, B) > 0}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_compiles_without_a_graph_break(name) -> None:
    options, arguments = CALLS[name]
    lstm = LSTM(I, H, **options)
    x = torch.randn(T, B, I)
    if options.get("batch_first"):
        x = x.transpose(0, 1)
    found = []
    for call in (lstm, compiled(lstm)):
        torch.manual_seed(1)
        result = call(x, **arguments)
        found.append([*flat(result), *gradients(lstm, result, [])])
    torch.testing.assert_close(found[0], found[1])
    with torch.no_grad():
        torch.manual_seed(1)
        torch.testing.assert_close(compiled(lstm)(x, **arguments)[0], found[0][0])


@pytest.mark.parametrize("enforce_sorted", [True, False])
@pytest.mark.parametrize("with_state", [True, False])
def test_a_packed_sequence_compiles(enforce_sorted, with_state) -> None:
    lstm = LSTM(I, H, bidirectional=True)
    lengths = [5, 3, 2] if enforce_sorted else [2, 5, 3]
    packed = pack_padded_sequence(torch.randn(T, B, I), lengths, enforce_sorted=enforce_sorted)
    hx = state_of(lstm, B) if with_state else None
    torch.testing.assert_close(flat(compiled(lstm)(packed, hx)), flat(lstm(packed, hx)))


def test_one_compilation_for_all_sizes() -> None:
    lstm = LSTM(I, H)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = torch.compile(lstm, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for steps, batch in ((5, 3), (7, 2), (4, 9)):
        x = torch.randn(steps, batch, I)
        torch.testing.assert_close(call(x), lstm(x))
        counts.append(counter.frame_count)
    assert counts == counts[:1] * 3


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict) -> None:
    lstm = LSTM(I, H, 2, bidirectional=True).eval()
    dynamic = {"input": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}
    program = torch.export.export(lstm, (torch.randn(T, B, I),), dynamic_shapes=dynamic, strict=strict)
    x = torch.randn(T + 2, B + 1, I)
    torch.testing.assert_close(program.module()(x), lstm(x))


def test_vmap() -> None:
    lstm = LSTM(I, H, 2, bidirectional=True, **EXACT)
    x = torch.randn(4, T, B, I, **EXACT)
    want = [torch.stack(ts) for ts in zip(*(flat(lstm(v)) for v in x), strict=True)]
    torch.testing.assert_close(flat(torch.vmap(lstm)(x)), want)
    one = torch.vmap(lambda v: lstm(v)[0], in_dims=1, out_dims=1)(x[0])
    torch.testing.assert_close(one, lstm(x[0])[0])
    lengths = torch.tensor([[5, 2, 0], [1, 1, 4], [3, 5, 2], [0, 0, 1]])
    got = torch.vmap(lambda v, n: lstm(v, lengths=n)[0])(x, lengths)
    torch.testing.assert_close(got, torch.stack([lstm(v, lengths=n)[0] for v, n in zip(x, lengths, strict=True)]))


def test_vmap_over_an_ensemble() -> None:
    models = [LSTM(I, H, 2, peephole=True, **EXACT) for _ in range(3)]
    parameters, buffers = stack_module_state(models)
    x = torch.randn(T, B, I, **EXACT)
    got = torch.vmap(lambda p: functional_call(models[0], (p, buffers), (x,))[0])(parameters)
    torch.testing.assert_close(got, torch.stack([m(x)[0] for m in models]))


def test_random_masks_under_vmap() -> None:
    lstm = LSTM(I, 50, zoneout=0.5, variational_dropout=0.5)
    x = torch.randn(T, 1, I).expand(6, T, 1, I)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lstm)(x)
    same = torch.vmap(lstm, randomness="same")(x)[0]
    torch.testing.assert_close(same, same[:1].expand_as(same))
    different = torch.vmap(lstm, randomness="different")(x)[0]
    assert all(not torch.equal(different[0], other) for other in different[1:])


def test_gradients_of_each_sample() -> None:
    lstm = LSTM(I, H, bidirectional=True, **EXACT)
    parameters = dict(lstm.named_parameters())
    x = torch.randn(T, B, I, **EXACT)

    def loss(p, v):
        return functional_call(lstm, p, (v,))[0].square().sum()

    got = torch.vmap(torch.func.grad(loss), in_dims=(None, 1))(parameters, x)
    for b in range(B):
        want = torch.autograd.grad(loss(parameters, x[:, b]), list(parameters.values()))
        torch.testing.assert_close([g[b] for g in got.values()], list(want))


def test_derivatives_of_every_kind() -> None:
    lstm = LSTM(2, 2, bidirectional=True, layer_norm=True, peephole=True, **EXACT)
    x = torch.randn(2, 2, 2, **EXACT, requires_grad=True)

    def call(v, *hx):
        return flat(lstm(v, hx, lengths=[2, 1]))

    inputs = (x, *state_of(lstm, 2))
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_autocast() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for options in (
            {},
            {"proj_size": 2, "num_layers": 2},
            {"variational_dropout": 0.1, "layer_norm": True},
        ):
            lstm = LSTM(I, H, **options).eval()
            x = torch.randn(T, B, I, requires_grad=True)
            exact = lstm(x)
            with torch.autocast("cpu", dtype):
                result = lstm(x)
                packed = lstm(pack_padded_sequence(x, [5, 4, 4]))
            assert {t.dtype for t in [*flat(result), *flat(packed)]} == {dtype}
            torch.testing.assert_close(flat(result), flat(exact), check_dtype=False, rtol=0.02, atol=0.02)
            result[0].float().sum().backward()
            assert x.grad.dtype == torch.float32
            assert {p.grad.dtype for p in lstm.parameters()} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        assert LSTM(I, H).double()(x.double())[0].dtype == torch.float64
        assert LSTM(I, H).bfloat16()(x)[0].dtype == torch.bfloat16


def test_autocast_gives_the_types_of_nn_lstm() -> None:
    theirs, ours = pair(I, H)
    with torch.autocast("cpu", torch.bfloat16):
        got = flat(ours(torch.ones(T, B, I)))
        try:
            want = flat(theirs(torch.ones(T, B, I)))
        except RuntimeError as error:
            pytest.skip(f"nn.LSTM has no bfloat16 on this CPU: {error}")
    assert [t.dtype for t in got] == [t.dtype for t in want]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_types(dtype) -> None:
    theirs, ours = pair(I, H, 2, bidirectional=True, proj_size=2, **EXACT)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.to(dtype))
    ours = ours.to(dtype)
    x = torch.randn(T, B, I, dtype=dtype)
    got = ours(x)
    assert {t.dtype for t in flat(got)} == {dtype}
    torch.testing.assert_close(flat(got), flat(theirs(x.double())), check_dtype=False, rtol=0.02, atol=0.01)


def test_without_gradients() -> None:
    lstm = LSTM(I, H)
    x = torch.randn(T, B, I)
    want = lstm(x)[0].detach()
    with torch.no_grad():
        assert not lstm(x)[0].requires_grad
        with torch.enable_grad():
            assert lstm(x)[0].requires_grad
    with torch.inference_mode():
        result = lstm(x)[0]
        assert result.is_inference()
        with torch.inference_mode(False):
            assert lstm(x)[0].requires_grad
    assert torch.equal(result, want)


# --- memory -----------------------------------------------------------------------------------------


def kept_units(lstm: LSTM, x: torch.Tensor) -> float:
    """Returns what a call keeps for its backward, in units of its output; parameters are not counted."""
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in lstm.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = lstm(x)[0]
    return sum(kept.values()) / (output.numel() * output.element_size())


@pytest.mark.parametrize(("memory", "units"), [("default", 6), ("recompute", 2)])
def test_what_is_kept_for_the_backward(memory, units) -> None:
    width = 64
    x = torch.randn(40, 8, width)
    small = 0.2  # the state before the first step and the bias
    assert units - 1 < kept_units(LSTM(width, width, memory=memory), x) <= units + small
    assert kept_units(LSTM(width, width, memory=memory, peephole=True, activation="hard"), x) <= units + small
    assert kept_units(LSTM(width, width, memory=memory, layer_norm=True), x) <= units + small
    # Where nothing asks for a gradient, nothing is kept.
    frozen = LSTM(width, width, memory=memory).requires_grad_(False)
    assert kept_units(frozen, x) == 0


def test_recompute_gives_the_same_gradients() -> None:
    default = LSTM(I, H, 2, bidirectional=True, layer_norm=True, peephole=True, zoneout=0.3, **EXACT)
    recompute = LSTM(
        I, H, 2, bidirectional=True, layer_norm=True, peephole=True, zoneout=0.3, memory="recompute", **EXACT
    )
    recompute.load_state_dict(default.state_dict())
    x = torch.randn(T, B, I, **EXACT, requires_grad=True)
    found = []
    for lstm in (default, recompute):
        torch.manual_seed(5)
        result = lstm(x, lengths=[5, 2, 0])
        found.append([*flat(result), *gradients(lstm, result, [x])])
    torch.testing.assert_close(found[0], found[1])
