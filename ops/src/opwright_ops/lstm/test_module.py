"""`LSTM` against nn.LSTM: results, gradients, parameters, conversions and copies."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from opwright_ops.lstm import LSTM

T, B, I, H = 5, 3, 4, 6  # noqa: E741
EXACT = {"dtype": torch.float64}
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


def pair(*args, **options) -> tuple[nn.LSTM, LSTM]:
    """Returns nn.LSTM and LSTM with the same parameters, not shared."""
    torch.manual_seed(0)
    theirs = nn.LSTM(*args, **options)
    ours = LSTM(*args, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def state_of(module: nn.RNNBase, *batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    count = module.num_layers * (2 if module.bidirectional else 1)
    like = module.weight_ih_l0
    widths = module.proj_size or module.hidden_size, module.hidden_size
    return tuple(torch.randn(count, *batch, w, dtype=like.dtype).requires_grad_() for w in widths)


def flat(result) -> list[torch.Tensor]:
    output, (h_n, c_n), *cells = result
    return [output.data if isinstance(output, PackedSequence) else output, h_n, c_n, *cells]


def gradients(module: nn.Module, result, inputs) -> list[torch.Tensor]:
    """Returns the gradients of a loss that weighs every element of the result differently."""
    torch.manual_seed(3)
    loss = sum((t.double() * torch.randn(t.shape, dtype=torch.float64)).sum() for t in flat(result))
    return torch.autograd.grad(loss, [*inputs, *module.parameters()], retain_graph=True)


def check(theirs: nn.LSTM, ours: LSTM, x, hx=None, inputs=(), **tolerances) -> None:
    want, got = theirs(x, hx), ours(x, hx)
    inputs = [*inputs, *(hx or ())]
    torch.testing.assert_close(flat(got), flat(want), **tolerances)
    torch.testing.assert_close(gradients(ours, got, inputs), gradients(theirs, want, inputs), **tolerances)


GRID = [
    dict(zip(("num_layers", "bias", "batch_first", "bidirectional", "proj_size"), values, strict=True))
    for values in itertools.product((1, 2), (True, False), (True, False), (True, False), (0, 2))
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", GRID, ids=lambda o: "-".join(map(str, o.values())))
def test_results_and_gradients_are_those_of_nn_lstm(options, dtype) -> None:
    theirs, ours = pair(I, H, **options, dtype=dtype)
    shape = (B, T, I) if options["batch_first"] else (T, B, I)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    tolerances = {} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    check(theirs, ours, x, None, [x], **tolerances)
    check(theirs, ours, x, state_of(ours, B), [x], **tolerances)
    alone = x[0].detach().requires_grad_()
    check(theirs, ours, alone, state_of(ours), [alone], **tolerances)
    assert ours(x)[0].stride() == theirs(x)[0].stride()


@pytest.mark.parametrize("lengths", [[5, 3, 1], [2, 5, 4], [4, 4, 4]])
@pytest.mark.parametrize("options", GRID[::3], ids=lambda o: "-".join(map(str, o.values())))
def test_packed_sequences(options, lengths) -> None:
    theirs, ours = pair(I, H, **options, **EXACT)
    x = torch.randn(T, B, I, **EXACT, requires_grad=True)
    packed = pack_padded_sequence(x, lengths, enforce_sorted=lengths[0] == 5)
    for hx in (None, state_of(ours, B)):
        check(theirs, ours, packed, hx, [x])
    got, want = ours(packed)[0], theirs(packed)[0]
    for field in ("batch_sizes", "sorted_indices", "unsorted_indices"):
        assert getattr(got, field) is getattr(packed, field) is getattr(want, field)


def test_cells_of_a_packed_sequence_are_packed() -> None:
    lstm = LSTM(I, H, 2, bidirectional=True, return_cell=True, **EXACT)
    x, lengths = torch.randn(T, B, I, **EXACT), [2, 5, 4]
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
    _, state, cells = lstm(packed)
    _, padded_state, padded_cells = lstm(x, lengths=lengths)
    assert isinstance(cells, PackedSequence)
    want = pack_padded_sequence(padded_cells, lengths, enforce_sorted=False)
    torch.testing.assert_close(cells.data, want.data)
    torch.testing.assert_close(state, padded_state)


@pytest.mark.parametrize("options", GRID, ids=lambda o: "-".join(map(str, o.values())))
def test_the_same_seed_draws_the_same_parameters(options) -> None:
    drawn = []
    for cls in (nn.LSTM, LSTM):
        torch.manual_seed(7)
        module = cls(I, H, **options)
        first = module.state_dict(keep_vars=False)
        drawn.append([(k, v.clone()) for k, v in first.items()])
        module.reset_parameters()
        drawn[-1] += [(k, v.clone()) for k, v in module.state_dict().items()]
        assert [len(w) for w in module.all_weights] == [len(w) for w in nn.LSTM(I, H, **options).all_weights]
    assert [k for k, _ in drawn[0]] == [k for k, _ in drawn[1]]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(*drawn, strict=True))


def test_dropout_between_layers() -> None:
    ours = LSTM(I, H, 2, dropout=0.25, **EXACT)
    x = torch.randn(T, B, I, **EXACT)
    torch.testing.assert_close(flat(ours.eval()(x)), flat(ours.to_torch()(x)))
    layers = [nn.LSTM(width, H, **EXACT) for width in (I, H)]
    for i, layer in enumerate(layers):
        layer.load_state_dict({k.replace(f"l{i}", "l0"): v for k, v in ours.state_dict().items() if f"l{i}" in k})
    torch.manual_seed(1)
    got = ours.train()(x)[0]
    torch.manual_seed(1)
    want = layers[1](nn.functional.dropout(layers[0](x)[0], 0.25))[0]
    torch.testing.assert_close(got, want)


def test_dropout_of_one_drops_all_of_the_second_layers_input() -> None:
    lstm = LSTM(I, H, 2, dropout=1.0, **EXACT)
    second = nn.LSTM(H, H, **EXACT)
    second.load_state_dict({k.replace("l1", "l0"): v for k, v in lstm.state_dict().items() if "l1" in k})
    got = lstm(torch.randn(T, B, I, **EXACT))[0]
    torch.testing.assert_close(got, second(torch.zeros(T, B, H, **EXACT))[0])


def test_no_steps_and_no_entries() -> None:
    lstm = LSTM(I, H, 2, bidirectional=True, return_cell=True, **EXACT)
    h_0, c_0 = state_of(lstm, B)
    output, (h_n, c_n), cells = lstm(torch.randn(0, B, I, **EXACT), (h_0, c_0))
    assert output.shape == cells.shape == (0, B, 2 * H)
    assert torch.equal(h_n, h_0)
    assert torch.equal(c_n, c_0)
    (2 * h_n + 3 * c_n).sum().backward()
    assert h_0.grad.unique().tolist() == [2]
    assert c_0.grad.unique().tolist() == [3]
    output, (h_n, c_n), cells = lstm(torch.randn(T, 0, I, **EXACT))
    assert output.shape == cells.shape == (T, 0, 2 * H)
    assert h_n.shape == c_n.shape == (4, 0, H)
    output.sum().backward()
    assert all(not p.grad.any() for p in lstm.parameters())
    assert lstm(torch.randn(T, 0, I, **EXACT), lengths=[])[0].shape == (T, 0, 2 * H)
    assert lstm(torch.randn(0, B, I, **EXACT), lengths=[0, 0, 0], reset=torch.zeros(0, B).bool())[0].shape[0] == 0


# --- conversions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", GRID[::5], ids=lambda o: "-".join(map(str, o.values())))
def test_from_torch_and_to_torch_share_parameters(options) -> None:
    theirs = nn.LSTM(I, H, **options, **EXACT).eval()
    ours = LSTM.from_torch(theirs)
    back = ours.to_torch()
    assert type(back) is nn.LSTM
    for name, parameter in theirs.named_parameters():
        assert getattr(ours, name) is parameter is getattr(back, name)
    assert not ours.training
    assert not back.training
    theirs.dropout = 0.25
    assert LSTM.from_torch(theirs).to_torch().dropout == 0.25
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    x = torch.randn(2, 3, I, **EXACT)
    before = ours(x)[0]
    before.sum().backward()
    optimizer.step()
    assert not torch.equal(ours(x)[0], before)
    torch.testing.assert_close(ours(x)[0], theirs(x)[0])
    torch.testing.assert_close(ours(x)[0], back(x)[0])


def test_from_torch_with_options_adds_parameters() -> None:
    theirs = nn.LSTM(I, H, bidirectional=True, dtype=torch.bfloat16)
    ours = LSTM.from_torch(theirs, peephole=True, layer_norm=True, zoneout=0.1)
    assert ours.weight_hh_l0_reverse is theirs.weight_hh_l0_reverse
    assert ours.peephole_l0.dtype == torch.bfloat16
    assert ours.peephole_l0.abs().max() <= H**-0.5
    assert ours.peephole_l0.unique().numel() > H
    assert ours.norm_c_l0_reverse.tolist() == [[1] * H, [0] * H]
    assert ours.zoneout == (0.1, 0.1)


def test_dropout_that_is_off_in_eval_mode_goes_to_torch() -> None:
    lstm = LSTM(I, H, weight_dropout=0.2, variational_dropout=0.3).eval()
    x = torch.randn(T, B, I)
    torch.testing.assert_close(lstm.to_torch()(x), lstm(x))


def test_copies() -> None:
    lstm = LSTM(I, H, 2, bidirectional=True, peephole=True, layer_norm=True, activation="hard", slope=0.2, clip=2.0)
    x = torch.randn(T, B, I)
    want = lstm(x)
    for made in (copy.deepcopy(lstm), pickle.loads(pickle.dumps(lstm))):
        assert repr(made) == repr(lstm)
        torch.testing.assert_close(made(x), want, rtol=0, atol=0)
        with torch.no_grad():
            made.weight_hh_l0.zero_()
        assert not torch.equal(made(x)[0], want[0])
    torch.testing.assert_close(lstm(x), want, rtol=0, atol=0)
    fresh = LSTM(I, H, 2, bidirectional=True, peephole=True, layer_norm=True, activation="hard", slope=0.2, clip=2.0)
    fresh.load_state_dict(lstm.state_dict())
    torch.testing.assert_close(fresh(x), want, rtol=0, atol=0)
    torch.testing.assert_close(lstm.double()(x.double()), want, check_dtype=False)


def test_weights_put_in_place_of_the_parameters_are_used() -> None:
    """Nothing keeps the parameters themselves: parametrizations, weight norm, functional_call, DataParallel."""
    theirs, ours = pair(I, H, **EXACT)
    x = torch.randn(T, B, I, **EXACT)

    class Halved(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            calls.append(weight)
            return weight / 2

    calls = []
    with torch.no_grad():
        theirs.weight_hh_l0 /= 2
    want = theirs(x)
    halved = {**dict(ours.named_parameters()), "weight_hh_l0": ours.weight_hh_l0 / 2}
    torch.testing.assert_close(functional_call(ours, halved, (x,)), want)
    parametrize.register_parametrization(ours, "weight_hh_l0", Halved())
    calls.clear()
    torch.testing.assert_close(ours(x), want)
    assert len(calls) == 1
    torch.testing.assert_close(copy.deepcopy(ours)(x), want)
    ours(x)[0].sum().backward()
    assert ours.parametrizations.weight_hh_l0.original.grad.any()
    parametrize.remove_parametrizations(ours, "weight_hh_l0")
    torch.testing.assert_close(ours(x), want)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        normed = nn.utils.weight_norm(ours, "weight_hh_l0")
    with torch.no_grad():
        normed.weight_hh_l0_g *= 2
        theirs.weight_hh_l0 *= 2
    torch.testing.assert_close(normed(x), theirs(x))
    replica = LSTM(I, H)._replicate_for_data_parallel()
    replica._parameters = {}
    for name, value in theirs.named_parameters():
        object.__setattr__(replica, name, value)
    torch.testing.assert_close(replica(x), theirs(x))


def test_to_moves_all_parameters() -> None:
    lstm = LSTM(I, H, peephole=True, device="meta").to_empty(device="cpu")
    lstm.reset_parameters()
    assert lstm(torch.randn(T, B, I))[0].isfinite().all()
    assert LSTM(I, H, device="meta")(torch.randn(T, B, I, device="meta"))[0].shape == (T, B, H)
    assert lstm.flatten_parameters() is None
