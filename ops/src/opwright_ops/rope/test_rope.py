"""`rope` against complex multiplication in float64, which shares no code with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import opwright
from opwright_ops.rope import rope, rope_
from opwright_ops.rope.op import rotate, rotate_

# Each test runs on a CPU and on a GPU.
pytestmark = pytest.mark.usefixtures("device")

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# Pairs and columns behind them: one pair, shorter than a vector, beside vectors, those of models.
WIDTHS = [(1, 0), (3, 2), (16, 1), (36, 0), (64, 0), (16, 48), (129, 7)]


def by_complex_numbers(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Returns e^(i angle) (a + bi) of the pairs of `x` [*batch, heads, time, dim], in float64."""
    half = angles.shape[-1]
    turned, rest = x.double()[..., : 2 * half], x.double()[..., 2 * half :]
    pairs = turned.unflatten(-1, (half, 2)) if interleaved else turned.unflatten(-1, (2, half)).transpose(-1, -2)
    number = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles).unsqueeze(-3)
    pairs = torch.view_as_real(number)
    turned = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    return torch.cat((turned, rest), -1)


def tables(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns angles whose cosines and sines are floats, in float64, with the two in float32."""
    angles = torch.rand(shape, dtype=torch.float64) * 6
    cos, sin = angles.cos().float(), angles.sin().float()
    return angles, cos, sin


def allowed(wanted: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the error that tables in float32, three operations and one rounding may have."""
    scale = x.double().abs().amax(-1, keepdim=True) * 2
    computed = torch.finfo(torch.float32).eps  # the tables are in float32, also beside float64
    return scale * 3 * computed + wanted.abs() * torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_complex_numbers(dtype: torch.dtype, interleaved: bool) -> None:
    torch.manual_seed(0)
    for half, rest in WIDTHS:
        angles, cos, sin = tables(19, half)
        q, k = (torch.randn(2, heads, 19, 2 * half + rest).to(dtype) for heads in (3, 2))
        in_place = q.clone(), k.clone()
        rope_(*in_place, cos, sin, interleaved=interleaved)
        leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
        found = rope(*leaves, cos, sin, interleaved=interleaved)
        grads = torch.autograd.grad(found, leaves, (q, k))
        for x, y, same, grad in zip((q, k), found, in_place, grads, strict=True):
            wanted = by_complex_numbers(x, angles, interleaved)
            assert ((y.double() - wanted).abs() <= allowed(wanted, x, dtype)).all(), (half, rest)
            assert torch.equal(y, same)
            # The inverse of a rotation is the rotation by the negative angle; what is behind is passed on.
            wanted = by_complex_numbers(x, -angles, interleaved)
            assert ((grad.double() - wanted).abs() <= allowed(wanted, x, dtype)).all(), (half, rest)
            assert torch.equal(y[..., 2 * half :], x[..., 2 * half :])


@pytest.mark.parametrize("interleaved", [False, True])
def test_parts_of_a_joint_projection(interleaved: bool) -> None:
    """Queries and keys of [batch, time, heads, dim], read and written where they lie."""
    torch.manual_seed(0)
    qkv = torch.randn(2, 17, 3 + 2 + 2, 64).bfloat16()
    q, k = qkv[..., :3, :].transpose(1, 2), qkv[..., 3:5, :].transpose(1, 2)
    angles, cos, sin = tables(17, 32)
    found = rope(q, k, cos, sin, interleaved=interleaved)
    before = qkv.clone()
    rope_(q, k, cos, sin, interleaved=interleaved)
    for x, y, now in ((before[..., :3, :], found[0], q), (before[..., 3:5, :], found[1], k)):
        x = x.transpose(1, 2)
        wanted = by_complex_numbers(x, angles, interleaved)
        assert ((y.double() - wanted).abs() <= allowed(wanted, x, torch.bfloat16)).all()
        assert torch.equal(now, y)
    assert torch.equal(qkv[..., 5:, :], before[..., 5:, :])


@pytest.mark.parametrize("interleaved", [False, True])
def test_columns_that_are_apart(interleaved: bool) -> None:
    angles, cos, sin = tables(5, 4)
    wide = torch.randn(2, 2, 5, 22)
    q, k = wide[..., :20:2], wide[..., 1:21:2]
    wanted = by_complex_numbers(q, angles, interleaved), by_complex_numbers(k, angles, interleaved)
    found = rope(q, k, cos, sin, interleaved=interleaved)
    rope_(q, k, cos, sin, interleaved=interleaved)
    for x, y, exact in ((q, found[0], wanted[0]), (k, found[1], wanted[1])):
        assert torch.equal(x, y)
        torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-5)


def test_tables_of_each_entry() -> None:
    """Tables with the axes of the batch, one that broadcasts, and one that is a part of a wider table."""
    q, k = torch.randn(3, 2, 7, 8), torch.randn(3, 1, 7, 8)
    for shape in ((3, 7, 4), (1, 7, 4), (7, 4)):
        angles, cos, sin = tables(*shape)
        for c, s in ((cos, sin), (torch.cat((cos, cos), -1)[..., :4], torch.cat((sin, sin), -1)[..., :4])):
            for x, y in zip((q, k), rope(q, k, c, s), strict=True):
                wanted = by_complex_numbers(x, angles, False)
                assert ((y.double() - wanted).abs() <= allowed(wanted, x, torch.float32)).all()
    q, k = torch.randn(2, 3, 2, 7, 8), torch.randn(2, 3, 1, 7, 8)
    angles, cos, sin = tables(2, 1, 7, 4)
    wanted = by_complex_numbers(q, angles, True)
    assert ((rope(q, k, cos, sin, interleaved=True)[0].double() - wanted).abs() <= allowed(wanted, q, q.dtype)).all()


def test_as_in_transformers() -> None:
    """Its tables have each angle twice, in the type of the model; it rotates by `x * cos + rotate_half(x) * sin`."""
    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16)
    angles = torch.rand(1, 9, 8) * 6
    twice = torch.cat((angles, angles), -1)
    cos, sin = twice.cos(), twice.sin()

    def rotate_half(x: Tensor) -> Tensor:
        return torch.cat((-x[..., 8:], x[..., :8]), -1)

    found = rope(q, k, cos[..., :8], sin[..., :8])
    for x, y in zip((q, k), found, strict=True):
        torch.testing.assert_close(y, x * cos[:, None] + rotate_half(x) * sin[:, None])
    with pytest.raises(ValueError, match=r"cos\[\.\.\., :half\]"):
        rope(q, k, cos, sin)


def test_tables_in_other_types() -> None:
    q, k = torch.randn(2, 7, 8, dtype=torch.float64), torch.randn(1, 7, 8, dtype=torch.float64)
    angles, cos, sin = tables(7, 4)
    wanted = by_complex_numbers(q, angles, False)
    torch.testing.assert_close(rope(q, k, angles.cos(), angles.sin())[0], wanted, rtol=1e-14, atol=1e-14)
    q, k = q.bfloat16(), k.bfloat16()
    for x, y in zip(
        rope(q, k, cos.bfloat16(), sin.bfloat16()), rope(q, k, cos.bfloat16().float(), sin.bfloat16().float())
    ):
        assert torch.equal(x, y)


def test_gradients_of_the_tables() -> None:
    q, k, cos, sin = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 3, 4), (1, 3, 4), (3, 2), (3, 2)))
    leaves = [t.requires_grad_() for t in (q, k, cos, sin)]
    assert torch.autograd.gradcheck(lambda *values: rope(*values), leaves)
    c, s = cos.detach().float().requires_grad_(), sin.detach().float().requires_grad_()
    found = torch.autograd.grad([y.sum() for y in rope(q, k, c, s)], (c, s))
    wanted = torch.autograd.grad([y.sum() for y in rope(q, k, cos, sin)], (cos, sin))
    for mine, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)


def test_nothing_is_kept_but_the_tables() -> None:
    kept = []
    q, k = torch.randn(2, 7, 8, requires_grad=True), torch.randn(1, 7, 8, requires_grad=True)
    _, cos, sin = tables(7, 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        rope(q, k, cos, sin)
    assert kept == [cos.data_ptr(), sin.data_ptr()]


def test_a_head_has_the_same_bits_beside_any_others() -> None:
    """And with any number of threads."""
    q, k = torch.randn(3, 8, 50, 40).bfloat16(), torch.randn(3, 2, 50, 40).bfloat16()
    _, cos, sin = tables(50, 20)
    whole = rope(q, k, cos, sin)[0]
    alone, _ = rope(q[1:2, 5:6, 20:], k[1:2, :1, 20:], cos[20:], sin[20:])
    assert torch.equal(alone[0, 0], whole[1, 5, 20:])
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(rope(q, k, cos, sin)[0], whole)
    finally:
        torch.set_num_threads(threads)


def test_infinities_stay_in_their_pair() -> None:
    q, k = torch.ones(1, 1, 10), torch.ones(1, 1, 10)
    q[..., 0], q[..., 9] = torch.inf, torch.nan
    found, _ = rope(q, k, torch.full((1, 4), 0.5), torch.full((1, 4), 0.5))
    assert found[0, 0].isinf().nonzero().flatten().tolist() == [0, 4]
    assert found[0, 0].isnan().nonzero().flatten().tolist() == [9]


def test_compiled() -> None:
    q, k = torch.randn(2, 3, 7, 8, requires_grad=True), torch.randn(2, 1, 7, 8, requires_grad=True)
    angles, cos, sin = tables(7, 4)
    compiled = torch.compile(lambda *values: rope(*values)[0].sin(), backend="aot_eager", fullgraph=True)
    found = compiled(q, k, cos, sin)
    torch.testing.assert_close(found.double(), by_complex_numbers(q, angles, False).sin(), rtol=0, atol=1e-5)
    (grad,) = torch.autograd.grad(found.sum(), q)
    (wanted,) = torch.autograd.grad(by_complex_numbers(q, angles, False).sin().sum(), q)
    torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-5)


def test_refusals() -> None:
    q, k = torch.randn(2, 3, 7, 8), torch.randn(2, 1, 7, 8)
    _, cos, sin = tables(7, 4)
    cases = [
        ((q, k, cos, sin[..., :3]), "`sin` must have the shape of `cos`"),
        ((q, k, cos.expand(3, 7, 4), sin.expand(3, 7, 4)), "leading axes that broadcast"),
        ((q[0], k[0], cos[None], sin[None]), "leading axes that broadcast"),
        ((q, k, cos[:6], sin[:6]), r"time = 7\n.*time = 6\n\nhint: tables with the angles of 7 times"),
        ((q[:, :, :5], k[:, :, :5], cos, sin), r"hint: `cos\[..., :5, :\], sin\[..., :5, :\]`"),
        ((q.transpose(1, 2), k.transpose(1, 2), cos, sin), r"hint: .* `q.transpose\(-3, -2\)` makes that"),
        ((q, k[..., :6], cos, sin), "`k`"),
        ((q, k.half(), cos, sin), "`q`"),
        ((q, k, cos, sin.double()), "`sin` must have the type of `cos`"),
        ((q, k[:1], cos, sin), r"\*batch = \[2\]"),
        ((q.long(), k.long(), cos, sin), "`q` must have a dtype of `Float`"),
        ((q.cfloat(), k.cfloat(), cos, sin), "`q` must have a dtype of `Float`"),
        ((q, k, cos.to("meta"), sin), "device of `q`"),
        ((q[0, 0], k[0, 0], cos, sin), "must be"),
        ((q, k, cos[0], sin[0]), "must be"),
    ]
    # Tables in float64 have operators of their own.
    cases += [((*a[:2], *(t.double() for t in a[2:])), m) for a, m in cases if a[2].dtype == a[3].dtype]
    for arguments, message in cases:
        for call in (rope, rope_):
            with pytest.raises((ValueError, TypeError), match=message):
                call(*arguments)
    for made in (cos, cos.double()):
        with pytest.raises(RuntimeError, match="no gradient"):
            rope_(q.clone().requires_grad_() * 1, k, made, sin.to(made.dtype))
        with pytest.raises(RuntimeError, match="no gradient"):
            rope_(q, k, made.clone().requires_grad_(), sin.to(made.dtype))
        with pytest.raises(ValueError, match="share memory"):
            rope_(q, q[:, :1], made, sin.to(made.dtype))


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["rotate", "rotate_"])
def test_verify(name: str, device: str) -> None:
    with torch.device("cpu"):
        record = opwright.verify({"rotate": rotate, "rotate_": rotate_}[name], devices=[device])
    assert record.passed, record.failures
    assert device in record.backends
