"""`LSTM` beyond nn.LSTM: each option against the equations written with loops, or against nn.LSTM in pieces."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from opwright_ops.lstm import LSTM

T, B, I, H = 5, 3, 4, 6  # noqa: E741
EXACT = {"dtype": torch.float64}


def flat(result) -> list[torch.Tensor]:
    output, state, *cells = result
    return [output, *state, *cells]


# --- Greff et al., LSTM: A Search Space Odyssey, section II, with loops over the blocks --------------


class Odyssey:
    """One layer and direction: W input weights, R recurrent weights, p peepholes, b biases, of z, i, f, o."""

    def __init__(self, lstm: LSTM, end: str) -> None:
        def rows(name: str) -> dict[str, np.ndarray] | None:
            value = getattr(lstm, name + end, None)
            return None if value is None else dict(zip("ifzo", value.detach().numpy().reshape(4, lstm.hidden_size, -1)))

        def array(name: str) -> np.ndarray | None:
            value = getattr(lstm, name + end, None)
            return None if value is None else value.detach().numpy()

        self.lstm, self.W, self.R = lstm, rows("weight_ih"), rows("weight_hh")
        self.b_ih, self.b_hh = rows("bias_ih"), rows("bias_hh")
        self.gain_W, self.gain_R, self.norm_c = rows("norm_ih"), rows("norm_hh"), array("norm_c")
        self.p = None if array("peephole") is None else dict(zip("ifo", array("peephole")))
        self.W_proj = array("weight_hr")

    def sigma(self, x: float) -> float:
        x = self.clipped(x)
        is_hard = self.lstm.activation in ("hard", "hard_sigmoid")
        return min(max(0.5 + self.lstm.slope * x, 0), 1) if is_hard else 1 / (1 + math.exp(-x))

    def tanh(self, x: float) -> float:
        return min(max(x, -1), 1) if self.lstm.activation in ("hard", "hard_tanh") else math.tanh(x)

    def clipped(self, x: float) -> float:
        return x if self.lstm.clip is None else min(max(x, -self.lstm.clip), self.lstm.clip)

    def products(self, weights, gains, vector) -> dict[tuple[str, int], float]:
        """Returns the product of each row with a vector, normalised over all rows where there are gains."""
        found = {(k, j): float(row @ vector) for k in weights for j, row in enumerate(weights[k])}
        if gains is None:
            return found
        mean = sum(found.values()) / len(found)
        variance = sum((v - mean) ** 2 for v in found.values()) / len(found)
        return {k: (v - mean) / math.sqrt(variance + 1e-5) * gains[k[0]][k[1]][0] for k, v in found.items()}

    def step(self, x, y, c, mask=1.0):
        """Returns the block output and the cell after one step."""
        width = len(c)
        a = self.products(self.W, self.gain_W, x)
        r = self.products(self.R, self.gain_R, y * mask)
        for key in a:
            a[key] += r[key]
            if self.b_ih is not None:
                a[key] += self.b_ih[key[0]][key[1]][0] + self.b_hh[key[0]][key[1]][0]
        out, cell = np.zeros(width), np.zeros(width)
        see = (lambda k, j, v: self.p[k][j] * v) if self.p is not None else (lambda k, j, v: 0.0)
        for j in range(width):
            z = self.tanh(self.clipped(a["z", j]))
            i = self.sigma(a["i", j] + see("i", j, c[j]))
            f = 1 - i if self.lstm.coupled else self.sigma(a["f", j] + see("f", j, c[j]))
            cell[j] = z * i + c[j] * f
            out[j] = self.sigma(a["o", j] + see("o", j, cell[j]))
        shown = cell
        if self.norm_c is not None:
            shown = (cell - cell.mean()) / np.sqrt(cell.var() + 1e-5) * self.norm_c[0] + self.norm_c[1]
        out = out * np.array([self.tanh(v) for v in shown])
        if self.W_proj is not None:
            out = self.W_proj @ out
        # Zoneout in eval mode: the expectation.
        keep_y, keep_c = self.lstm.zoneout
        return keep_y * y + (1 - keep_y) * out, keep_c * c + (1 - keep_c) * cell

    def run(self, x, y, c, mask=1.0):
        outputs, cells = [], []
        for row in x:
            y, c = self.step(row, y, c, mask)
            outputs.append(y)
            cells.append(c)
        return np.array(outputs), np.array(cells)


def odyssey(lstm: LSTM, x: np.ndarray, h_0: np.ndarray, c_0: np.ndarray) -> tuple[np.ndarray, ...]:
    """Runs all layers and directions over one sequence; returns output, h_n, c_n, cells of the last layer."""
    h_n, c_n = [], []
    for layer in range(lstm.num_layers):
        outputs, cells = [], []
        for suffix in ("", "_reverse") if lstm.bidirectional else ("",):
            order = slice(None, None, -1 if suffix else 1)
            at = len(h_n)
            output, cell = Odyssey(lstm, f"_l{layer}{suffix}").run(x[order], h_0[at], c_0[at])
            h_n.append(output[-1])
            c_n.append(cell[-1])
            outputs.append(output[order])
            cells.append(cell[order])
        x = np.concatenate(outputs, -1)
    return x, np.array(h_n), np.array(c_n), np.concatenate(cells, -1)


def numpy_of(*tensors: torch.Tensor) -> list[np.ndarray]:
    return [t.detach().numpy() for t in tensors]


def check_against_odyssey(lstm: LSTM) -> None:
    """Compares with batch and state; parameters are drawn wide, so that clips and hard activations bite."""
    lstm = lstm.eval()
    lstm.return_cell = True
    with torch.no_grad():
        for parameter in lstm.parameters():
            parameter.copy_(torch.randn_like(parameter))
    count = lstm.num_layers * (2 if lstm.bidirectional else 1)
    x = torch.randn(3, 2, I, **EXACT)
    hx = torch.randn(count, 2, lstm.proj_size or H, **EXACT), torch.randn(count, 2, H, **EXACT)
    output, (h_n, c_n), cells = lstm(x, hx)
    for b in range(2):
        want = odyssey(lstm, *numpy_of(x[:, b], hx[0][:, b], hx[1][:, b]))
        got = numpy_of(output[:, b], h_n[:, b], c_n[:, b], cells[:, b])
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-10, atol=1e-10)


VARIANTS = [
    dict(zip(("activation", "slope", "peephole", "layer_norm", "coupled", "clip"), (*act, *rest), strict=True))
    for act, *rest in itertools.product(
        (("soft", None), ("hard", None), ("hard", 0.2), ("hard_sigmoid", 1 / 6), ("hard_tanh", None)),
        (False, True),
        (False, True),
        (False, True),
        (None, 0.7),
    )
]


@pytest.mark.parametrize("options", VARIANTS, ids=lambda o: "-".join(map(str, o.values())))
def test_variants(options) -> None:
    torch.manual_seed(0)
    for more in (
        {},
        {"bidirectional": True, "num_layers": 2, "zoneout": (0.3, 0.1)},
        {"proj_size": 2, "bias": False},
    ):
        check_against_odyssey(LSTM(I, H, **options, **more, **EXACT))


@pytest.mark.parametrize("options", VARIANTS[::5], ids=lambda o: "-".join(map(str, o.values())))
def test_gradients_of_variants(options) -> None:
    torch.manual_seed(0)
    lstm = LSTM(2, 3, **options, bidirectional=True, zoneout=0.3, weight_dropout=0.3, variational_dropout=0.3, **EXACT)
    names, parameters = zip(*lstm.named_parameters(), strict=True)

    def call(x, *values):
        torch.manual_seed(11)
        return flat(functional_call(lstm, dict(zip(names, values, strict=True)), (x,), {"lengths": [3, 1]}))

    inputs = torch.randn(3, 2, 2, **EXACT, requires_grad=True), *parameters
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


def test_cells_of_all_steps() -> None:
    """Those of the last layer, laid out as the output; the last step's are c_n."""
    for batch_first in (False, True):
        lstm = LSTM(I, H, 2, bidirectional=True, batch_first=batch_first, return_cell=True, **EXACT)
        x = torch.randn(B, T, I, **EXACT) if batch_first else torch.randn(T, B, I, **EXACT)
        output, (_, c_n), cells = lstm(x)
        assert cells.shape == output.shape
        steps = cells.transpose(0, 1) if batch_first else cells
        torch.testing.assert_close(steps[-1, :, :H], c_n[2])
        torch.testing.assert_close(steps[0, :, H:], c_n[3])
        alone = x[0] if batch_first else x[:, 0]
        torch.testing.assert_close(lstm(alone)[2], steps[:, 0])


# --- parameters --------------------------------------------------------------------------------------


def test_start_of_the_additional_parameters() -> None:
    torch.manual_seed(0)
    plain = LSTM(I, H, 2, bidirectional=True).state_dict()
    torch.manual_seed(0)
    lstm = LSTM(I, H, 2, bidirectional=True, peephole=True, layer_norm=True, forget_bias=1.5)
    check_start(lstm, plain)
    with torch.no_grad():
        for parameter in lstm.parameters():
            parameter.fill_(7)
    torch.manual_seed(0)
    lstm.reset_parameters()
    check_start(lstm, plain)


def check_start(lstm: LSTM, plain: dict[str, torch.Tensor]) -> None:
    more = {k: v for k, v in lstm.state_dict().items() if k not in plain}
    ends = ("_l0", "_l0_reverse", "_l1", "_l1_reverse")
    assert sorted(more) == sorted(n + e for n in ("peephole", "norm_ih", "norm_hh", "norm_c") for e in ends)
    for name, value in more.items():
        if name.startswith("peephole"):
            assert value.shape == (3, H)
            assert 0.2 * H**-0.5 < value.abs().mean() < H**-0.5
        elif name.startswith("norm_c"):
            assert value.tolist() == [[1] * H, [0] * H]
        else:
            assert value.tolist() == [1] * 4 * H
    for name, value in plain.items():
        got = lstm.state_dict()[name].clone()
        if name.startswith("bias"):
            assert (got[H : 2 * H] == (1.5 if "_ih_" in name else 0)).all()
            got[H : 2 * H] = value[H : 2 * H]
        assert torch.equal(got, value)


def test_repr_names_what_is_not_the_default() -> None:
    assert repr(LSTM(3, 4, 2, bias=False)) == repr(nn.LSTM(3, 4, 2, bias=False))
    lstm = LSTM(3, 4, activation="hard", slope=0.2, zoneout=(0.1, 0.2), memory="recompute")
    assert repr(lstm) == "LSTM(3, 4, activation='hard', slope=0.2, zoneout=(0.1, 0.2), memory='recompute')"


# --- lengths and resets ------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("lengths", [[5, 4, 2], [0, 5, 1], [0, 0, 0]])
def test_lengths(lengths, batch_first) -> None:
    lstm = LSTM(I, H, 2, bidirectional=True, batch_first=batch_first, **EXACT)
    theirs = lstm.to_torch()
    x = torch.randn(T, B, I, **EXACT)
    x[torch.arange(T)[:, None] >= torch.tensor(lengths)] = 1e3  # what lies behind the end has no effect
    x.requires_grad_()
    hx = [torch.randn(4, B, H, **EXACT, requires_grad=True) for _ in range(2)]
    given = x.transpose(0, 1) if batch_first else x
    found = []
    for form in (lengths, torch.tensor(lengths), torch.tensor(lengths, dtype=torch.int32), tuple(lengths)):
        output, state = lstm(given, hx, lengths=form, enforce_sorted=lengths == [5, 4, 2])
        found.append([output.transpose(0, 1) if batch_first else output, *state])
    got = found[0]
    for other in found[1:]:
        torch.testing.assert_close(other, got, rtol=0, atol=0)
    pieces = []
    for b, length in enumerate(lengths):
        padding = x.new_zeros(T - length, 2 * H)
        if length:
            y, ended = theirs(x[:length, b], (hx[0][:, b], hx[1][:, b]))
            pieces.append((torch.cat([y, padding]), *ended))
        else:
            pieces.append((padding, hx[0][:, b], hx[1][:, b]))
        one, ended = lstm(x[:, b], (hx[0][:, b], hx[1][:, b]), lengths=length)
        torch.testing.assert_close((one, *ended), pieces[-1])
    want = [torch.stack(p, 1) for p in zip(*pieces, strict=True)]
    torch.testing.assert_close(got, want)
    weights = [torch.randn_like(w) for w in want]
    inputs = [x, *hx, *lstm.parameters()]
    losses = [sum((t * w).sum() for t, w in zip(ts, weights, strict=True)) for ts in (got, want)]
    gradients = [torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True) for loss in losses]
    torch.testing.assert_close(*gradients)


def cut(theirs: nn.LSTM, x, h_0, c_0, reset) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs one sequence episode by episode, one bidirectional layer."""
    begins = [0, *[t for t in range(1, len(x)) if reset[t]]]
    outputs, last = [], None
    for begin, end in zip(begins, [*begins[1:], len(x)], strict=True):
        h, c = torch.zeros_like(h_0), torch.zeros_like(c_0)
        if begin == 0 and not reset[0]:
            h[0], c[0] = h_0[0], c_0[0]
        if end == len(x):
            h[1], c[1] = h_0[1], c_0[1]  # the reverse direction begins with the state, at the last step
        y, state = theirs(x[begin:end], (h, c))
        outputs.append(y)
        last = state if last is None else tuple(torch.stack([s[0], r[1]]) for s, r in zip(state, last))
    return torch.cat(outputs), *last


@pytest.mark.parametrize("batch_first", [False, True])
def test_resets_cut_a_sequence_into_episodes(batch_first) -> None:
    lstm = LSTM(I, H, bidirectional=True, batch_first=batch_first, **EXACT)
    theirs = nn.LSTM(I, H, bidirectional=True, **EXACT)
    theirs.load_state_dict(lstm.state_dict())
    torch.manual_seed(0)
    x = torch.randn(8, 6, I, **EXACT, requires_grad=True)
    hx = [torch.randn(2, 6, H, **EXACT, requires_grad=True) for _ in range(2)]
    reset = torch.rand(8, 6) < 0.3
    reset[0] = torch.tensor([True, False] * 3)
    reset[:, 5] = True
    if batch_first:
        output, state = lstm(x.transpose(0, 1), hx, reset=reset.T)
        output = output.transpose(0, 1)
    else:
        output, state = lstm(x, hx, reset=reset)
    pieces = [cut(theirs, x[:, b], hx[0][:, b], hx[1][:, b], reset[:, b]) for b in range(6)]
    want = [torch.stack(p, 1) for p in zip(*pieces, strict=True)]
    got = [output, *state]
    torch.testing.assert_close(got, want)
    weights = [torch.randn_like(w) for w in want]
    found = [
        torch.autograd.grad([(t * w).sum() for t, w in zip(ts, weights, strict=True)], [x, *hx, *m.parameters()])
        for ts, m in ((got, lstm), (want, theirs))
    ]
    torch.testing.assert_close(*found)
    alone = lstm(x[:, 1], [h[:, 1] for h in hx], reset=reset[:, 1])
    torch.testing.assert_close(alone[0], output[:, 1])


def test_resets_with_lengths_and_packed_sequences() -> None:
    lstm = LSTM(I, H, 2, bidirectional=True, **EXACT)
    x, lengths, reset = torch.randn(T, B, I, **EXACT), [2, 5, 3], torch.rand(T, B) < 0.4
    want = lstm(x, lengths=lengths, reset=reset)
    for b, n in enumerate(lengths):
        torch.testing.assert_close(lstm(x[:n, b], reset=reset[:n, b])[0], want[0][:n, b])
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    output, state = lstm(packed, reset=reset)
    padded, _ = nn.utils.rnn.pad_packed_sequence(output)
    torch.testing.assert_close(padded, want[0])
    torch.testing.assert_close(state, want[1])


# --- randomness --------------------------------------------------------------------------------------


def seeded(lstm: LSTM, *args, seed: int = 0, **kwargs):
    torch.manual_seed(seed)
    return lstm(*args, **kwargs)


@pytest.mark.parametrize("options", [{"zoneout": 0.3}, {"weight_dropout": 0.3}, {"variational_dropout": 0.3}])
def test_random_variants_follow_the_seed_and_the_mode(options) -> None:
    lstm = LSTM(I, H, 2, bidirectional=True, **options)
    x = torch.randn(T, B, I)
    assert torch.equal(seeded(lstm, x)[0], seeded(lstm, x)[0])
    assert not torch.equal(seeded(lstm, x)[0], seeded(lstm, x, seed=1)[0])
    lstm.eval()
    assert torch.equal(seeded(lstm, x)[0], seeded(lstm, x, seed=1)[0])
    if "zoneout" not in options:  # off in eval mode
        torch.testing.assert_close(lstm(x), lstm.to_torch()(x))


def test_zoneout_keeps_elements_with_its_probability() -> None:
    p_h, p_c = 0.2, 0.5
    lstm = LSTM(I, 64, 2, bidirectional=True, zoneout=(p_h, p_c), return_cell=True, **EXACT)
    torch.manual_seed(0)
    output, _, cells = lstm(torch.randn(12, 40, I, **EXACT))
    kept = {}
    for name, values, p in (("h", output, p_h), ("c", cells, p_c)):
        kept[name] = (values[1:] - values[:-1]).abs() < 1e-14
        for direction in kept[name].split(64, -1):
            share = direction.double().mean().item()
            assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / direction.numel())
    # Directions, steps and entries are drawn apart: what is kept in one says nothing about another.
    forward, reverse = kept["c"].double().split(64, -1)
    # Row i of `forward` is of step i + 1, of `reverse` of step i.
    for a, b in ((forward[:-1], reverse[1:]), (forward[1:], forward[:-1]), (forward[:, 1:], forward[:, :-1])):
        both = (a * b).mean().item()
        assert abs(both - p_c**2) < 5 * math.sqrt(p_c**2 * (1 - p_c**2) / a.numel())


def test_zoneout_takes_each_element_from_before_or_after() -> None:
    lstm = LSTM(I, H, zoneout=0.5, **EXACT)
    plain = LSTM.from_torch(nn.LSTM(I, H, **EXACT))
    plain.load_state_dict(lstm.state_dict())
    x, hx = torch.randn(1, B, I, **EXACT), (torch.randn(1, B, H, **EXACT), torch.randn(1, B, H, **EXACT))
    for got, new, old in zip(lstm(x, hx)[1], plain(x, hx)[1], hx, strict=True):
        is_old, is_new = ((got - value).abs() < 1e-14 for value in (old, new))
        assert (is_old ^ is_new).all()
        assert is_old.any()
        assert is_new.any()


def test_zoneout_in_eval_mode_is_the_expectation() -> None:
    lstm = LSTM(I, H, zoneout=(0.3, 0.6), **EXACT)
    x = torch.randn(1, 1, I, **EXACT).expand(1, 20000, I)
    hx = tuple(torch.randn(1, 1, H, **EXACT).expand(1, 20000, H) for _ in range(2))
    torch.manual_seed(0)
    _, trained = lstm(x, hx)
    _, expected = lstm.eval()(x[:, :1], [s[:, :1] for s in hx])
    for sample, mean in zip(trained, expected, strict=True):
        error = sample.std(1) / math.sqrt(20000)
        assert ((sample.mean(1) - mean[:, 0]).abs() <= 5 * error + 1e-12).all()


def test_weight_dropout_drops_elements_of_weight_hh_for_a_whole_call() -> None:
    p = 0.4
    lstm = LSTM(I, 20, 2, weight_dropout=p, **EXACT)
    x, hx = torch.randn(T, B, I, **EXACT), tuple(torch.randn(2, B, 20, **EXACT) for _ in range(2))
    seeded(lstm, x, hx)[0].sum().backward()
    theirs = nn.LSTM(I, 20, 2, **EXACT)
    theirs.load_state_dict(lstm.state_dict())
    for name in ("weight_hh_l0", "weight_hh_l1"):
        kept = getattr(lstm, name).grad != 0  # a dropped weight has no gradient
        assert abs(kept.double().mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / kept.numel())
        with torch.no_grad():
            getattr(theirs, name).mul_(kept / (1 - p))
    assert not torch.equal(lstm.weight_hh_l0.grad == 0, lstm.weight_hh_l1.grad == 0)
    torch.testing.assert_close(seeded(lstm, x, hx), theirs(x, hx))


def test_variational_dropout_has_one_mask_per_sequence_and_layer() -> None:
    p_x, p_h = 0.3, 0.5
    lstm = LSTM(I, 20, variational_dropout=(p_x, p_h), **EXACT)
    x = torch.randn(T, 30, I, **EXACT, requires_grad=True)
    h_0, c_0 = (torch.randn(1, 30, 20, **EXACT, requires_grad=True) for _ in range(2))
    # The masks do not depend on the number of steps; a dropped element has no gradient.
    seeded(lstm, x[:1], (h_0, c_0))[0].sum().backward()
    kept_x, kept_h = x.grad[0] != 0, h_0.grad[0] != 0
    for kept, p in ((kept_x, p_x), (kept_h, p_h)):
        assert abs(kept.double().mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / kept.numel())
        assert not torch.equal(kept[0], kept[1])
    output, (_, c_n) = seeded(lstm, x, (h_0, c_0))
    cell = Odyssey(lstm, "_l0")
    for b in range(3):
        masked = numpy_of(x[:, b] * kept_x[b] / (1 - p_x), h_0[0, b], c_0[0, b], kept_h[b].double() / (1 - p_h))
        want, cells = cell.run(*masked)
        np.testing.assert_allclose(output[:, b].detach(), want, atol=1e-12)
        np.testing.assert_allclose(c_n[0, b].detach(), cells[-1], atol=1e-12)
    x.grad = None
    seeded(lstm, x, (h_0, c_0))[0].sum().backward()
    assert torch.equal(x.grad != 0, kept_x.expand_as(x))


def test_variational_dropout_of_layers_and_directions() -> None:
    """Directions share the mask of their input, and have their own of h; each layer has its own."""
    lstm = LSTM(20, 20, 2, bidirectional=True, variational_dropout=(0.5, 0.0), **EXACT)
    x = torch.randn(T, B, 20, **EXACT, requires_grad=True)
    output = seeded(lstm, x)[0]
    for half in output.split(20, -1):
        grad = torch.autograd.grad(half.sum(), x, retain_graph=True)[0]
        dropped = grad == 0
        assert torch.equal(dropped, dropped[:1].expand_as(dropped))
        assert 0.2 < dropped.double().mean() < 0.8
    lstm = LSTM(20, 20, bidirectional=True, variational_dropout=(0.0, 0.5), **EXACT)
    hx = tuple(torch.randn(2, B, 20, **EXACT, requires_grad=True) for _ in range(2))
    grad = torch.autograd.grad(seeded(lstm, x[:1], hx)[0].sum(), hx[0])[0]
    assert not torch.equal(grad[0] == 0, grad[1] == 0)
