"""Computations of PyTorch in twice the digits: against mpmath, and the same function as in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mpmath
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from opwright.verify.higher_precision import NotWide, compute_wide, estimate_error
from opwright.verify.oracle import to_oracle

Computation = Callable[[Sequence[Any]], Sequence[Any]]
mp = mpmath.MPContext()
mp.dps = 700


def _evaluate(computation: Computation, *values: Any) -> list[Any]:
    with torch.no_grad():
        return compute_wide(computation, [to_oracle(v) for v in values])


def _assert_right(found: Tensor, exact: Sequence[Any], ulp: float = 1) -> None:
    for f, e in zip(found.flatten().tolist(), exact, strict=True):
        assert abs(f - float(e)) <= ulp * math.ulp(float(e)), (f, float(e))


def _gradient_of(computation: Computation) -> Computation:
    def gradient(values: Sequence[Any]) -> Sequence[Any]:
        leaves = [v.detach().requires_grad_() for v in values]
        with torch.enable_grad():
            outputs = [o for o in computation(leaves) if o.requires_grad]
        seeds = [torch.cos(torch.arange(o.numel(), dtype=torch.float64)).view(o.shape) for o in outputs]
        return torch.autograd.grad(outputs, leaves, seeds, allow_unused=True, materialize_grads=True)

    return gradient


# --- against mpmath ----------------------------------------------------------------------------------------

_TAIL = torch.linspace(-19, 3, 23, dtype=torch.float64)  # beyond -19 the results are denormal


def _tanh_gelu(x: float) -> Any:
    x = mp.mpf(x)
    # PyTorch's constants are those of C++: numbers of float64.
    u = mp.mpf(math.sqrt(2 / math.pi)) * (x + mp.mpf(0.044715) * x**3)
    return x * (1 + mp.tanh(u)) / 2


def test_gelu_is_right_where_float64_has_no_digit_left() -> None:
    found = _evaluate(lambda v: [F.gelu(v[0], approximate="tanh"), F.gelu(v[0])], _TAIL)
    assert F.gelu(_TAIL, approximate="tanh")[0] == 0  # PyTorch's own
    _assert_right(found[0], [_tanh_gelu(x) for x in _TAIL.tolist()], ulp=2000)  # of constants in float64: x^4 times
    _assert_right(found[1], [mp.mpf(x) * mp.erfc(-mp.mpf(x) / mp.sqrt(2)) / 2 for x in _TAIL.tolist()], ulp=2000)


def test_layer_norm_far_from_zero() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 33, dtype=torch.float64) * 1e-3 + 1e5
    (found,) = _evaluate(lambda v: [F.layer_norm(v[0], (33,))], x)
    exact = []
    for row in x.tolist():
        row = [mp.mpf(value) for value in row]
        mean = mp.fsum(row) / 33
        deviation = mp.sqrt(mp.fsum((value - mean) ** 2 for value in row) / 33 + mp.mpf(1e-5))
        exact += [(value - mean) / deviation for value in row]
    _assert_right(found, exact)
    errors = (F.layer_norm(x, (33,)) - found).abs() / found.abs()
    assert errors.max() > 1e-9


def test_gradient_of_a_softmax() -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 9, dtype=torch.float64) * 8
    seeds = torch.cos(torch.arange(18, dtype=torch.float64)).view(2, 9)

    def computation(values: Sequence[Any]) -> Sequence[Any]:
        leaf = values[0].detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(F.softmax(leaf, -1), leaf, seeds)

    exact = []
    for row, seed in zip(x.tolist(), seeds.tolist(), strict=True):
        powers = [mp.exp(mp.mpf(value)) for value in row]
        share = [power / mp.fsum(powers) for power in powers]
        mean = mp.fsum(s * mp.mpf(g) for s, g in zip(share, seed, strict=True))
        exact += [s * (mp.mpf(g) - mean) for s, g in zip(share, seed, strict=True)]
    _assert_right(_evaluate(computation, x)[0], exact)


def test_products_and_sums_that_cancel() -> None:
    torch.manual_seed(2)
    a = torch.randn(4, 50, dtype=torch.float64)
    b = torch.cat([a[:1], -a[:1]]) * torch.tensor([[1.0], [1 + 2.0**-40]], dtype=torch.float64)
    product, total, variance = _evaluate(lambda v: [v[0] @ v[1].T, v[1].sum(0), (v[0] + 1e8).var(1)], a, b)
    rows = [[mp.mpf(value) for value in row] for row in a.tolist()]
    others = [[mp.mpf(value) for value in row] for row in b.tolist()]
    _assert_right(product, [mp.fsum(x * y for x, y in zip(r, o, strict=True)) for r in rows for o in others])
    _assert_right(total, [x + y for x, y in zip(*others, strict=True)])
    exact = []
    for row in rows:
        mean = mp.fsum(row) / 50
        exact.append(mp.fsum((value - mean) ** 2 for value in row) / 49)
    _assert_right(variance, exact)


# --- the same function as float64 --------------------------------------------------------------------------

_INDEX = torch.tensor([0, 2, 1])


def _in_place(v: Sequence[Any]) -> Sequence[Any]:
    a = v[0].clone()
    a += 1
    a[0] = v[1][1]
    a[1:].mul_(2)
    a.view(-1)[3] = 7.0
    a[a > 2] = 0.0
    b = torch.zeros(4, 6, dtype=torch.float64)
    b[:, 1:3] = v[0][:, 1:3]
    c = torch.empty_like(a)
    c.copy_(a).sub_(v[1]).div_(2).clamp_(-1, 1)
    return [a, b.exp_(), c, c.T.clone().zero_()]


_SAME: dict[str, Computation] = {
    "reductions": lambda v: [v[0].sum(), v[0].mean(0), *torch.var_mean(v[0], 1), v[0].std(), v[0].cumsum(1)],
    "products": lambda v: [v[0] @ v[1].T, F.linear(v[0], v[1], v[2][:4]), torch.einsum("ij,kj->ik", v[0], v[1]), v[0] @ v[2]],
    "extremes": lambda v: [v[0].amax(1), *v[0].max(0), *v[0].sort(1), *v[0].topk(2), v[0].clamp(-0.5, 0.5), torch.maximum(*v[:2])],
    "indices": lambda v: [
        v[0][_INDEX], v[0].gather(1, _INDEX[None].expand(4, 3)), torch.cat(list(v[:2])), v[0].unfold(1, 3, 1),
        v[0].index_add(0, _INDEX, v[1][:3]), v[0].scatter_add(1, _INDEX[None].expand(4, 3), v[1][:, :3]), v[0].masked_fill(v[0] > 0, -2.0),
        torch.where(v[0] > 0, v[0], 0.25), F.pad(v[0], (1, 2), value=4.0), F.embedding(_INDEX, v[0]), *v[0].chunk(3, 1),
    ],
    "activations": lambda v: [
        f(v[0]) for f in (F.gelu, F.silu, F.softplus, F.mish, F.elu, F.selu, F.logsigmoid, F.hardswish, F.tanhshrink, F.glu)
    ],
    "norms": lambda v: [
        F.layer_norm(v[0], (6,), v[2], v[2]), F.group_norm(v[0], 2, v[2], v[2]), F.rms_norm(v[0], (6,), v[2]),
        F.batch_norm(v[0], None, None, training=True), F.log_softmax(v[0], 0), torch.logsumexp(v[0], 1), F.normalize(v[0]),
    ],
    "losses": lambda v: [
        F.mse_loss(v[0], v[1]), F.huber_loss(v[0], v[1]), F.cross_entropy(v[0], torch.tensor([0, 1, 2, 5])),
        F.binary_cross_entropy_with_logits(v[0], v[1].sigmoid()), F.kl_div(F.log_softmax(v[0], 1), F.softmax(v[1], 1), reduction="sum"),
    ],
    "steps": lambda v: [v[0] ** 3, v[0].abs() ** 1.7, 2 ** v[0], v[0] / v[1], torch.lerp(*v[:2], 0.3), torch.addcmul(*v[:2], v[2]), 1 - v[0]],
    "windows": lambda v: [v[0].unfold(1, 2, 2).mean(-1)],
    "max pooling": lambda v: [F.max_pool1d(v[0][None], 2)],
}  # fmt: skip


def _assert_same(computation: Computation) -> None:
    torch.manual_seed(3)
    values = [
        torch.randn(4, 6, dtype=torch.float64),
        torch.randn(4, 6, dtype=torch.float64),
        torch.randn(6, dtype=torch.float64),
    ]
    with torch.no_grad():
        plain = computation([v.clone() for v in values])
    found = _evaluate(computation, *values)
    for p, f in zip(plain, found, strict=True):
        torch.testing.assert_close(f, p, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", _SAME)
def test_it_is_the_same_function(name: str) -> None:
    if name == "max pooling" and torch.__version__ < (2, 13):
        pytest.skip("torch has a decomposition of max pooling from 2.13 on")
    _assert_same(_SAME[name])
    _assert_same(_gradient_of(_SAME[name]))
    _assert_same(_gradient_of(lambda v: [sum(o.sum() for o in _SAME[name](v) if o.is_floating_point())]))


def test_writing_in_place() -> None:
    _assert_same(_in_place)


def test_inputs_of_any_layout() -> None:
    base = torch.randn(4, 6, dtype=torch.float64)
    for value in (
        base[:, ::2],
        base.T,
        base[:1].expand(3, 6),
        base[1:, 2:3].expand(3, 5),
        base.as_strided((3, 3), (2, 1), 3),
    ):
        (found,) = _evaluate(lambda v: [(v[0].mT * 2 + 1).reshape(-1)], value)
        torch.testing.assert_close(found, (value.mT * 2 + 1).reshape(-1))


# --- what is not known in more digits ----------------------------------------------------------------------


def test_an_operator_without_a_formula_is_named_and_its_error_estimated() -> None:
    x = torch.linspace(1.4616, 1.4617, 20, dtype=torch.float64)  # about the root of digamma

    def computation(v: Sequence[Any]) -> list[Tensor]:
        return [torch.digamma(v[0]) * 3]

    with pytest.raises(NotWide, match=r"`aten\.digamma` has no formula in more digits"):
        _evaluate(computation, x)
    exact = torch.tensor([float(3 * mp.digamma(mp.mpf(value))) for value in x.tolist()], dtype=torch.float64)
    off = (computation([x])[0] - exact).abs()
    assert (off <= estimate_error(computation, [x])[0]).all()
    assert (off > 1e4 * exact.abs() * torch.finfo(torch.float64).eps).any()


def test_the_error_in_float32_tells_of_float64() -> None:
    torch.manual_seed(4)
    x = torch.randn(200, dtype=torch.float64) * 3 - 4

    def cancels(values: Sequence[Any]) -> list[Tensor]:
        return [1 + torch.tanh(values[0])]

    (error,) = estimate_error(cancels, [x])
    exact = torch.tensor([float(1 + mp.tanh(mp.mpf(value))) for value in x.tolist()], dtype=torch.float64)
    assert ((cancels([x])[0] - exact).abs() <= error).all()
    known = error[x > -4]
    assert (known < 1e-14).all()


@pytest.mark.parametrize(
    "computation",
    [
        lambda v: [torch.from_numpy(v[0].numpy())],
        lambda v: [torch.fft.rfft(v[0]).abs()],
        lambda v: [v[0].tolist() and v[0]],
        lambda v: [v[0].expand(2**20, 4) * 2],
    ],
    ids=["NumPy", "complex numbers", "numbers in Python", "large"],
)
def test_what_cannot_be_done_is_said(computation: Computation) -> None:
    with pytest.raises(NotWide):
        _evaluate(computation, torch.ones(4, dtype=torch.float64))
