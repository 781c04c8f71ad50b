"""`reverse=True` against nn.LSTM on flipped sequences, and the cells of every layer against a loop over steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from opwright_ops.lstm import LSTM
from opwright_ops.lstm.test_module import EXACT, B, H, I, T, gradients, state_of

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


def reversed_pair(**options) -> tuple[nn.LSTM, LSTM]:
    """Returns nn.LSTM, and LSTM that goes backward in time, with the same parameters, not shared."""
    torch.manual_seed(0)
    theirs = nn.LSTM(I, H, **options, **EXACT)
    ours = LSTM(I, H, reverse=True, **options, **EXACT)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def check(theirs: nn.Module, ours: LSTM, want: tuple, got: tuple, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(gradients(ours, got, inputs), gradients(theirs, want, inputs), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2}, {"batch_first": True}, {"proj_size": 2, "num_layers": 2}, {"bias": False}],
    ids=str,
)
def test_reverse_is_nn_lstm_on_the_flipped_sequence(options) -> None:
    theirs, ours = reversed_pair(**options)
    axis = 1 if options.get("batch_first") else 0
    shape = (B, T, I) if axis else (T, B, I)
    x = torch.randn(shape, **EXACT, requires_grad=True)
    for hx in (None, state_of(ours, B)):
        output, state = theirs(x.flip(axis), hx)
        check(theirs, ours, (output.flip(axis), state), ours(x, hx), [x, *(hx or ())])
    alone = torch.randn(T, I, **EXACT, requires_grad=True)
    output, state = theirs(alone.flip(0))
    check(theirs, ours, (output.flip(0), state), ours(alone), [alone])


@pytest.mark.parametrize("lengths", [[5, 3, 1], [2, 5, 4]])
def test_reverse_begins_at_each_sequences_end(lengths) -> None:
    theirs, ours = reversed_pair(num_layers=2)
    x = torch.randn(T, B, I, **EXACT, requires_grad=True)
    hx = state_of(ours, B)
    pieces = []
    for b, length in enumerate(lengths):
        output, state = theirs(x[:length, b].flip(0), (hx[0][:, b], hx[1][:, b]))
        pieces.append((torch.cat([output.flip(0), x.new_zeros(T - length, H)]), *state))
    output, *state = (torch.stack(p, 1) for p in zip(*pieces, strict=True))
    check(theirs, ours, (output, tuple(state)), ours(x, hx, lengths=lengths), [x, *hx])
    packed, state_of_packed = ours(pack_padded_sequence(x, lengths, enforce_sorted=False), hx)
    check(theirs, ours, (output, tuple(state)), (pad_packed_sequence(packed)[0], state_of_packed), [x, *hx])


@pytest.mark.parametrize("batch_first", [False, True])
def test_resets_cut_a_reversed_sequence_between_the_same_steps(batch_first) -> None:
    theirs, ours = reversed_pair()
    ours.batch_first = batch_first
    steps = 8
    x = torch.randn(steps, B, I, **EXACT, requires_grad=True)
    hx = state_of(ours, B)
    reset = torch.rand(steps, B) < 0.4
    reset[0] = torch.tensor([True, False, True])  # nothing comes before the first step
    reset[3, 0] = True
    pieces = []
    for b in range(B):
        begins = [0, *(t for t in range(1, steps) if reset[t, b])]
        outputs, state = [], (hx[0][:, b], hx[1][:, b])
        for begin, end in reversed(list(zip(begins, [*begins[1:], steps], strict=True))):
            output, last = theirs(x[begin:end, b].flip(0), state)
            outputs.insert(0, output.flip(0))
            state = tuple(torch.zeros_like(s) for s in last)
        pieces.append((torch.cat(outputs), *last))
    output, *state = (torch.stack(p, 1) for p in zip(*pieces, strict=True))
    got = ours(x.transpose(0, 1), hx, reset=reset.T) if batch_first else ours(x, hx, reset=reset)
    got = (got[0].transpose(0, 1) if batch_first else got[0], got[1])
    check(theirs, ours, (output, tuple(state)), got, [x, *hx])


def test_reverse_with_random_masks_has_its_own_direction() -> None:
    """Dropout of weight_hh, of inputs and of h, and zoneout, on the flipped sequence with the same numbers."""
    options = {"weight_dropout": 0.3, "variational_dropout": 0.3, "peephole": True, "layer_norm": True}
    forward, ours = LSTM(I, H, 2, **options, **EXACT), LSTM(I, H, 2, reverse=True, **options, **EXACT)
    ours.load_state_dict(forward.state_dict())
    x = torch.randn(T, B, I, **EXACT)
    torch.manual_seed(1)
    output, state = forward(x.flip(0))
    torch.manual_seed(1)
    torch.testing.assert_close(ours(x), (output.flip(0), state))


def test_from_torch_takes_reverse() -> None:
    theirs = nn.LSTM(I, H, **EXACT)
    x = torch.randn(T, B, I, **EXACT)
    torch.testing.assert_close(LSTM.from_torch(theirs, reverse=True)(x)[0], theirs(x.flip(0))[0].flip(0))


# --- cells of every layer ---------------------------------------------------------------------------------


def loop(lstm: LSTM, x: Tensor, hx: tuple[Tensor, Tensor]) -> tuple:
    """Returns what the module does with `return_cell="all"`, by PyTorch's function for one step."""
    suffixes = ("", "_reverse") if lstm.bidirectional else ("",)
    h_n, c_n, cells = [], [], []
    for layer in range(lstm.num_layers):
        outputs, found = [], []
        for suffix in suffixes:
            at = len(h_n)
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            weights = [getattr(lstm, f"{name}_l{layer}{suffix}") for name in names]
            backward = bool(suffix) or lstm.reverse
            h, c, hs, cs = hx[0][at], hx[1][at], [], []
            for step in x.flip(0) if backward else x:
                h, c = torch.lstm_cell(step, (h, c), *weights)
                hs.append(h)
                cs.append(c)
            h_n.append(h)
            c_n.append(c)
            outputs.append(torch.stack(hs[::-1] if backward else hs))
            found.append(torch.stack(cs[::-1] if backward else cs))
        x = torch.cat(outputs, -1)
        cells.append(torch.cat(found, -1))
    return x, (torch.stack(h_n), torch.stack(c_n)), cells


@pytest.mark.parametrize(
    "options",
    [{}, {"bidirectional": True}, {"reverse": True}, {"num_layers": 1}, {"memory": "recompute"}],
    ids=str,
)
@pytest.mark.parametrize("batch_first", [False, True])
def test_cells_of_every_layer(options, batch_first) -> None:
    options = {"num_layers": 3, **options}
    lstm = LSTM(I, H, batch_first=batch_first, return_cell="all", **options, **EXACT)
    x = torch.randn(T, B, I, **EXACT, requires_grad=True)
    hx = state_of(lstm, B)
    want_output, want_state, want_cells = loop(lstm, x, hx)
    output, state, cells = lstm(x.transpose(0, 1) if batch_first else x, hx)
    assert isinstance(cells, tuple)
    if batch_first:
        output, *cells = (value.transpose(0, 1) for value in (output, *cells))
    want, got = (want_output, want_state, *want_cells), (output, state, *cells)
    check(lstm, lstm, want, got, [x, *hx])
    last = LSTM(I, H, batch_first=batch_first, return_cell=True, **options, **EXACT)
    last.load_state_dict(lstm.state_dict())
    only = last(x.transpose(0, 1) if batch_first else x, hx)[2]
    torch.testing.assert_close(only.transpose(0, 1) if batch_first else only, want_cells[-1])


def test_cells_of_every_layer_of_sequences_of_different_lengths() -> None:
    lengths = [2, 5, 4]
    lstm = LSTM(I, H, 2, bidirectional=True, return_cell="all", **EXACT)
    x, hx = torch.randn(T, B, I, **EXACT), state_of(lstm, B)
    padded = lstm(x, hx, lengths=lengths)[2]
    packed = lstm(pack_padded_sequence(x, lengths, enforce_sorted=False), hx)[2]
    for b, length in enumerate(lengths):
        alone = loop(lstm, x[:length, b : b + 1], tuple(s[:, b : b + 1] for s in hx))[2]
        for layer, want in enumerate(alone):
            torch.testing.assert_close(padded[layer][:length, b], want[:, 0])
            assert not padded[layer][length:, b].any()
            torch.testing.assert_close(pad_packed_sequence(packed[layer])[0][:length, b], want[:, 0])


def test_cells_of_every_layer_compile() -> None:
    lstm = LSTM(I, H, 2, return_cell="all", reverse=True, activation="hard_sigmoid")
    x = torch.randn(T, B, I)
    torch._dynamo.reset()
    found = torch.compile(lstm, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, lstm(x))
    assert len(found[2]) == 2
