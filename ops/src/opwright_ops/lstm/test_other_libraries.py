"""`LSTM` against other libraries: their equations written out, their weights brought here as the guide says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from opwright_ops.lstm import LSTM

T, B, I, H = 5, 3, 4, 6  # noqa: E741
EXACT = {"dtype": torch.float64}


def noise(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, **EXACT)).requires_grad_()


def rows(weight: Tensor, there: str, here: str = "ifgo") -> Tensor:
    """Returns the rows of the gates in another order."""
    blocks = dict(zip(there, weight.chunk(4), strict=True))
    return torch.cat([blocks[gate] for gate in here])


def check(got: list[Tensor], want: list[Tensor], inputs: list[Tensor]) -> None:
    """Compares results, and the gradients of a loss that weighs each of their elements differently."""
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    factors = [torch.randn_like(w) for w in want]
    found = [
        torch.autograd.grad(sum((r * f).sum() for r, f in zip(results, factors, strict=True)), inputs)
        for results in (got, want)
    ]
    assert all(gradient.any() for gradient in found[1])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def called(lstm: LSTM, weights: dict[str, Tensor], *args: object, **options: object) -> list[Tensor]:
    output, state, *cells = torch.func.functional_call(lstm, weights, args, options)
    return [output, *state, *cells]


# --- ONNX: the equations of the operator LSTM, version 22 -------------------------------------------------


def onnx_lstm(
    X: Tensor, W: Tensor, R: Tensor, B: Tensor, P: Tensor, sequence_lens: list[int], initial_h: Tensor,
    initial_c: Tensor, is_reverse: bool, alpha: float | None, clip: float | None, input_forget: bool,
) -> list[Tensor]:  # fmt: skip
    """One direction, entry by entry; alpha is that of HardSigmoid for f, where f is not Sigmoid."""

    def clipped(z: Tensor) -> Tensor:
        return z if clip is None else torch.minimum(torch.maximum(z, torch.tensor(-clip)), torch.tensor(clip))

    def f(z: Tensor) -> Tensor:
        z = clipped(z)
        if alpha is None:
            return 1 / (1 + torch.exp(-z))
        return torch.maximum(torch.tensor(0.0), torch.minimum(torch.tensor(1.0), alpha * z + 0.5))

    Wi, Wo, Wf, Wc = W.chunk(4)
    Ri, Ro, Rf, Rc = R.chunk(4)
    Wbi, Wbo, Wbf, Wbc, Rbi, Rbo, Rbf, Rbc = B.chunk(8)
    Pi, Po, Pf = P.chunk(3)
    Y, Y_h, Y_c = [], [], []
    for b, length in enumerate(sequence_lens):
        h, c, outputs = initial_h[b], initial_c[b], {}
        for t in reversed(range(length)) if is_reverse else range(length):
            x = X[t, b]
            i = f(Wi @ x + Ri @ h + Pi * c + Wbi + Rbi)
            forget = 1 - i if input_forget else f(Wf @ x + Rf @ h + Pf * c + Wbf + Rbf)
            c = forget * c + i * torch.tanh(clipped(Wc @ x + Rc @ h + Wbc + Rbc))
            o = f(Wo @ x + Ro @ h + Po * c + Wbo + Rbo)
            h = outputs[t] = o * torch.tanh(c)
        Y.append(torch.stack([outputs.get(t, torch.zeros(H, **EXACT)) for t in range(T)]))
        Y_h.append(h)
        Y_c.append(c)
    return [torch.stack(Y, 1), torch.stack(Y_h)[None], torch.stack(Y_c)[None]]


@pytest.mark.parametrize("is_reverse", [False, True])
@pytest.mark.parametrize(
    ("alpha", "clip", "input_forget"), [(None, None, False), (0.2, None, False), (0.2, 1.5, True), (0.3, 3.0, False)]
)
def test_onnx(is_reverse, alpha, clip, input_forget) -> None:
    torch.manual_seed(0)
    X, W, R, bias, P = noise(T, B, I), noise(4 * H, I), noise(4 * H, H), noise(8 * H), noise(3 * H)
    initial_h, initial_c = noise(B, H), noise(B, H)
    lens = [5, 2, 4]
    hard = {} if alpha is None else {"activation": "hard_sigmoid", "slope": alpha}
    lstm = LSTM(I, H, peephole=True, clip=clip, coupled=input_forget, reverse=is_reverse, **hard, **EXACT)
    weights = {
        "weight_ih_l0": rows(W, "iofg"),
        "weight_hh_l0": rows(R, "iofg"),
        "bias_ih_l0": rows(bias[: 4 * H], "iofg"),
        "bias_hh_l0": rows(bias[4 * H :], "iofg"),
        "peephole_l0": P.view(3, H)[[0, 2, 1]],
    }
    got = called(lstm, weights, X, (initial_h[None], initial_c[None]), lengths=lens)
    want = onnx_lstm(X, W, R, bias, P, lens, initial_h, initial_c, is_reverse, alpha, clip, input_forget)
    check(got, want, [X, W, R, bias, P, initial_h, initial_c])


# --- Keras ------------------------------------------------------------------------------------------------


def keras_lstm(
    inputs: Tensor, kernel: Tensor, recurrent_kernel: Tensor, bias: Tensor, hard_slope: float | None, go_backwards: bool
) -> list[Tensor]:
    """Returns the sequence as Keras does, that of `go_backwards` from its last step on, and both states."""

    def recurrent_activation(z: Tensor) -> Tensor:
        if hard_slope is None:
            return torch.sigmoid(z)
        return torch.nn.functional.hardtanh(hard_slope * z + 0.5, 0.0, 1.0)

    h = c = torch.zeros(inputs.shape[0], H, **EXACT)
    outputs = []
    for x in inputs.flip(1).unbind(1) if go_backwards else inputs.unbind(1):
        i, f, g, o = (x @ kernel + h @ recurrent_kernel + bias).split(H, -1)
        c = recurrent_activation(f) * c + recurrent_activation(i) * torch.tanh(g)
        h = recurrent_activation(o) * torch.tanh(c)
        outputs.append(h)
    return [torch.stack(outputs, 1), h, c]


@pytest.mark.parametrize("go_backwards", [False, True])
@pytest.mark.parametrize("hard_slope", [None, 1 / 6, 0.2])
def test_keras(hard_slope, go_backwards) -> None:
    torch.manual_seed(0)
    inputs, kernel, recurrent, bias = noise(B, T, I), noise(I, 4 * H), noise(H, 4 * H), noise(4 * H)
    hard = {} if hard_slope is None else {"activation": "hard_sigmoid", "slope": hard_slope}
    lstm = LSTM(I, H, batch_first=True, reverse=go_backwards, **hard, **EXACT)
    weights = {
        "weight_ih_l0": kernel.T,
        "weight_hh_l0": recurrent.T,
        "bias_ih_l0": bias,
        "bias_hh_l0": torch.zeros(4 * H, **EXACT),
    }
    output, h_n, c_n = called(lstm, weights, inputs)
    got = [output.flip(1) if go_backwards else output, h_n[0], c_n[0]]
    want = keras_lstm(inputs, kernel, recurrent, bias, hard_slope, go_backwards)
    check(got, want, [inputs, kernel, recurrent, bias])


# --- haste ------------------------------------------------------------------------------------------------


def test_haste() -> None:
    """Gates in the order i, g, f, o; one bias."""
    torch.manual_seed(0)
    x, kernel, recurrent, bias = noise(T, B, I), noise(I, 4 * H), noise(H, 4 * H), noise(4 * H)
    h = c = torch.zeros(B, H, **EXACT)
    outputs = []
    for step in x:
        i, g, f, o = (step @ kernel + h @ recurrent + bias).split(H, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    weights = {
        "weight_ih_l0": rows(kernel.T, "igfo"),
        "weight_hh_l0": rows(recurrent.T, "igfo"),
        "bias_ih_l0": rows(bias, "igfo"),
        "bias_hh_l0": torch.zeros(4 * H, **EXACT),
    }
    got = called(LSTM(I, H, **EXACT), weights, x)
    check(got, [torch.stack(outputs), h[None], c[None]], [x, kernel, recurrent, bias])


# --- caiman-asr -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hard", [False, True])
def test_caiman_asr(hard) -> None:
    """Its state_dict is this one's; the cells of all layers are stacked there."""
    torch.manual_seed(0)
    layers = 3
    lstm = LSTM(I, H, layers, activation="hard" if hard else "soft", return_cell="all", **EXACT)
    weights = {name: noise(*parameter.shape) for name, parameter in lstm.named_parameters()}
    x, h_0, c_0 = noise(T, B, I), noise(layers, B, H), noise(layers, B, H)
    sigmoid = (lambda z: (0.5 + z / 8).clamp(0, 1)) if hard else torch.sigmoid
    tanh = (lambda z: z.clamp(-1, 1)) if hard else torch.tanh
    h_n, c_n, c_all, output = [], [], [], x
    for at in range(layers):
        w, r, b_ih, b_hh = (weights[f"{name}_l{at}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        h, c, hs, cs = h_0[at], c_0[at], [], []
        for step in output:
            i, f, g, o = (step @ w.T + h @ r.T + b_ih + b_hh).split(H, -1)
            c = sigmoid(f) * c + sigmoid(i) * tanh(g)
            h = sigmoid(o) * tanh(c)
            hs.append(h)
            cs.append(c)
        output = torch.stack(hs)
        h_n.append(h)
        c_n.append(c)
        c_all.append(torch.stack(cs))
    result, state, cells = torch.func.functional_call(lstm, weights, (x, (h_0, c_0)))
    got = [result, *state, torch.stack(cells)]
    want = [output, torch.stack(h_n), torch.stack(c_n), torch.stack(c_all)]
    # The bias of the input and that of h have one gradient, and a hard activation may leave some elements without.
    check(got, want, [x, h_0, c_0, *weights.values()])
