"""Rotary position embedding on a GPU beside eager and torch.compile: time with a cold L2, and the share of a copy.

    python benchmarks/rope_cuda.py [--dtype bfloat16]

Queries 4 x 32 x 4096 x 128 with 8 heads of keys, and 8 x 12 x 4096 x 64 with 12: tensors of their own ("bhtd"), and
views of a joint projection ("bthd"). The copy moves as many bytes as queries and keys have. The backward goes through
`torch.autograd.grad`.
"""

from __future__ import annotations

import argparse

import torch
from cold_times import micros
from opwright_ops.rope.op import rotate_in_pytorch
from opwright_ops.rope.rope import rope, rope_
from summary import Figure, beside, update

from opwright.machine import machine_card
from opwright.records import builtins_of

SHAPES = [(4, 32, 8, 4096, 128), (8, 12, 12, 4096, 64)]


def inputs_of(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> list[torch.Tensor]:
    batch, heads, key_heads, time, dim = shape
    if layout == "bhtd":
        return [torch.randn(batch, h, time, dim, device="cuda").to(dtype) for h in (heads, key_heads)]
    joint = torch.randn(batch, time, heads + 2 * key_heads, dim, device="cuda").to(dtype)
    return [t.transpose(1, 2) for t in (joint[:, :, :heads], joint[:, :, heads : heads + key_heads])]


def compare(shape: tuple[int, ...], layout: str, interleaved: bool, dtype: torch.dtype) -> list[Figure]:
    batch, *_, time, dim = shape
    q, k = inputs_of(shape, layout, dtype)
    angles = torch.rand(time, dim // 2, device="cuda") * 6
    cos, sin = angles.cos(), angles.sin()
    from_copy = torch.randn(q.numel() + k.numel(), device="cuda").to(dtype)
    to_copy = torch.empty_like(from_copy)
    copy = micros(lambda: to_copy.copy_(from_copy))

    def eager(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tables = (t.expand(batch, -1, -1) for t in (cos, sin))
        return rotate_in_pytorch(q, k, *tables, interleaved=interleaved)

    torch.compiler.reset()
    calls = {
        "opwright": lambda q, k: rope(q, k, cos, sin, interleaved=interleaved),
        "eager": eager,
        "compile": torch.compile(eager, dynamic=False),
    }
    forward = {label: micros(lambda call=call: call(q, k)) for label, call in calls.items()}
    in_place = micros(lambda: rope_(q.detach(), k.detach(), cos, sin, interleaved=interleaved))
    backward = {}
    for label, call in calls.items():
        leaves = [t.detach().requires_grad_() for t in (q, k)]
        outputs = call(*leaves)
        grads = [torch.randn_like(o) for o in outputs]
        backward[label] = micros(
            lambda outputs=outputs, leaves=leaves, grads=grads: torch.autograd.grad(
                outputs, leaves, grads, retain_graph=True
            )
        )
    kind = f"{'x'.join(map(str, shape))} {layout}{', interleaved' if interleaved else ''}"
    print(f"{kind:36s} copy {copy:6.1f}  in place {in_place:6.1f} ({copy / in_place:.2f})", end="")
    for direction, times in (("forward", forward), ("backward", backward)):
        shares = "  ".join(f"{label} {t:6.1f} ({copy / t:.2f})" for label, t in times.items())
        print(f"  {direction} {shares}", end="")
    print(flush=True)
    if shape != SHAPES[0] or layout != "bhtd" or interleaved:
        return []
    name = str(dtype).removeprefix("torch.")
    figures = []
    for direction, times in (("forward", forward), ("backward", backward)):
        share = {label: copy / t for label, t in times.items()}
        ours = share.pop("opwright")
        figures.append(
            Figure(f"rope {name} {kind}, {direction}: share of a copy", ours, "of a copy", beside=beside(ours, share))
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    dtype = getattr(torch, parser.parse_args().dtype)
    figures = [
        figure
        for shape in SHAPES
        for layout in ("bhtd", "bthd")
        for interleaved in (False, True)
        for figure in compare(shape, layout, interleaved, dtype)
    ]
    update(__file__, figures, builtins_of(machine_card(torch.device("cuda", 0))))


if __name__ == "__main__":
    main()
