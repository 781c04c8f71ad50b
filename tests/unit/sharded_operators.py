"""Operators whose rules for distributed tensors are known, each for another reason."""

from __future__ import annotations

from typing import Annotated

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from opwright import Index, Mutates, Range, operator


@operator("sharded::scale")
def scale(x: Float[Tensor, "*batch n"], w: Float[Tensor, "n"]) -> Float[Tensor, "*batch n"]:
    return x * w


@operator("sharded::affine")
def affine(x: Float[Tensor, "*batch n"], w: Float[Tensor, "n"]) -> Float[Tensor, "*batch n"]:
    return x * w + 1


@operator("sharded::matmul")
def matmul(x: Float[Tensor, "*batch k"], w: Float[Tensor, "n k"]) -> Float[Tensor, "*batch n"]:
    return x @ w.t()


@operator("sharded::linear_gelu")
def linear_gelu(x: Float[Tensor, "*batch k"], w: Float[Tensor, "n k"]) -> Float[Tensor, "*batch n"]:
    return torch.nn.functional.gelu(x @ w.t())


@operator("sharded::rms_norm")
def rms_norm(x: Float[Tensor, "*batch n"], w: Float[Tensor, "n"], eps: float = 1e-6) -> Float[Tensor, "*batch n"]:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


@operator("sharded::largest")
def largest(x: Float[Tensor, "*batch n"]) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch n"]]:
    return x.amax(-1), x.exp()


@operator("sharded::total")
def total(x: Float[Tensor, "*batch n"]) -> Float[Tensor, ""]:
    return x.sum()


@operator("sharded::clip_norm")
def clip_norm(x: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    """Rows depend on each other only where a column's norm is large."""
    return x * torch.clamp(1e6 / x.square().sum(0, keepdim=True), max=1.0)


@operator("sharded::over_rows")
def over_rows(x: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    """To PyTorch's rules the number of rows is a number like any other."""
    return x / x.shape[0]


@operator("sharded::clamp")
def clamp(x: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    """Linear as far as one looks, up to a billion."""
    return x.clamp(-1e9, 1e9)


@operator("sharded::lower")
def lower(x: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    return torch.tril(x)


@operator("sharded::lookup")
def lookup(table: Float[Tensor, "v d"], i: Annotated[Int64[Tensor, "*b"], Index("v")]) -> Float[Tensor, "*b d"]:
    return table[i]


@operator("sharded::square")
def square(x: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    return x.exp()


@operator("sharded::repeat")
def repeat(x: Float[Tensor, "n"], w: Float[Tensor, "2*n"]) -> Float[Tensor, "2*n"]:
    return torch.cat([x, x]) * w


@operator("sharded::nested")
def nested(x: Float[Tensor, "*batch n"], w: Float[Tensor, "n"]) -> Float[Tensor, "*batch n"]:
    return affine(x, w) * 2


@operator("sharded::optional")
def optional(
    x: Float[Tensor, "*batch n"],
    w: Float[Tensor, "n"] | None = None,
    *,
    mask: Float[Tensor, "*batch n"] | None = None,
    power: int = 1,
) -> Float[Tensor, "*batch n"]:
    y = x if power == 1 else x * x
    y = y if w is None else y * w
    return y if mask is None else y.exp() * mask


@operator("sharded::add_all")
def add_all(xs: list[Float[Tensor, "*batch n"]], w: Float[Tensor, "n"]) -> Float[Tensor, "*batch n"]:
    return sum(x * x for x in xs) + w


@operator("sharded::halve_and_add_", autocast=None)
def halve_and_add_(a: Mutates[Float[Tensor, "*s"]], v: Float[Tensor, "*s"]) -> None:
    a.mul_(0.5).add_(v)


@operator("sharded::collect_", autocast=None)
def collect_(a: Mutates[Float[Tensor, "n"]], v: Float[Tensor, "*batch n"]) -> None:
    a.add_(v.reshape(-1, v.shape[-1]).sum(0))


@operator("sharded::nonzero", data_dependent=["k"])
def nonzero(x: Float[Tensor, "n"]) -> Int64[Tensor, "k"]:
    return x.nonzero()[:, 0]


@operator("sharded::noise", random=True)
def noise(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x + torch.rand_like(x)


@operator("sharded::outer")
def outer(x: Float[Tensor, "m"], y: Float[Tensor, "n"]) -> Float[Tensor, "m n"]:
    return x[:, None] * y


@operator("sharded::total_of_exp")
def total_of_exp(x: Float[Tensor, "n"]) -> Float[Tensor, ""]:
    return x.exp().sum()


@operator("sharded::over_the_batch")
def over_the_batch(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    """Breaks the promise of its contract."""
    return x - x.mean(0, keepdim=True) if x.ndim > 1 else x


@operator("sharded::shuffle")
def shuffle(x: Float[Tensor, "*b 4*c h w"], c: Annotated[int, Range(1, 4)] = 2) -> Float[Tensor, "*b c 2*h 2*w"]:
    """PyTorch's backward raises where `*b` is empty, its forward does not."""
    return torch.nn.functional.pixel_shuffle(x, 2)
