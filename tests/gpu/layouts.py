"""Calls of the operators with inputs and outputs of many layouts, compared with their references.

    compute-sanitizer python tests/gpu/layouts.py elementwise

Each tensor lies in a larger one. What is around an input is NaN, so that reading it shows in the result; what
is around an output is compared with what it was before. Sizes are small: a sanitizer makes a kernel a hundred
times slower.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import opwright_ops
import torch
from opwright_ops import LSTM, matmul_bias_gelu
from opwright_ops.bias_gelu.op import bias_gelu, bias_gelu_backward
from opwright_ops.d_sigmoid.op import d_sigmoid, d_sigmoid_backward
from opwright_ops.lstm.op import lstm, lstm_backward
from opwright_ops.norm.op import (
    add_rms_norm,
    add_rms_norm_backward,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
)
from opwright_ops.softmax.op import softmax
from torch import Tensor

# A tensor in a larger one: the shape of that, and the view of it.
Layout = tuple[Callable[[torch.Size], Sequence[int]], Callable[[Tensor, torch.Size], Tensor]]
LAYOUTS: dict[str, Layout] = {
    "dense": (lambda shape: shape, lambda base, shape: base),
    "offset": (lambda shape: [shape.numel() + 1], lambda base, shape: base[1:].view(shape)),
    "rows apart": (lambda shape: [*shape[:-1], shape[-1] + 3], lambda base, shape: base[..., 1:-2]),
    "columns apart": (lambda shape: [*shape[:-1], 2 * shape[-1] + 1], lambda base, shape: base[..., 1::2]),
    "every other row": (lambda shape: [2 * shape[0], *shape[1:]], lambda base, shape: base[::2]),
    "transposed": (
        lambda shape: [*shape[:-2], shape[-1], shape[-2] + 1],
        lambda base, shape: base[..., 1:].mT,
    ),
}
EXPANDED = ["rows expanded", "all expanded"]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def layouts_for(shape: torch.Size) -> list[str]:
    """Returns the names of the layouts that a tensor of that shape can have."""
    least = {"dense": 0, "offset": 0, "transposed": 2}
    return [name for name in LAYOUTS if len(shape) >= least.get(name, 1)]


def place(layout: str, values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a tensor of that layout with these values, and the larger one that it is a view of."""
    shape_of, view_of = LAYOUTS[layout]
    filler = float("nan") if values.is_floating_point() else 1
    base = torch.full(tuple(shape_of(values.shape)), filler, dtype=values.dtype, device=values.device)
    view = view_of(base, values.shape)
    return view.copy_(values), base


def arrange(layout: str, values: Tensor) -> Tensor:
    """Returns an input of that layout; expanded ones repeat the first of the values."""
    if layout == "rows expanded" and values.dim() > 1 and values.numel():
        return values[:1].clone().expand_as(values)
    if layout == "all expanded" and values.dim() and values.numel():
        return values.flatten()[:1].clone().expand(values.shape)
    return place(layout if layout in layouts_for(values.shape) else "offset", values)[0]


def tensors_of(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [t for t in results if t is not None]


class Comparison:
    """Calls an operator again and again, and compares what it returns and writes.

    Attributes:
        rounds: calls with each set of arguments, each argument in a layout that is drawn.
        is_brief: only these calls, and one with an output in a layout that is drawn.
    """

    def __init__(self, rounds: int, is_brief: bool = False) -> None:
        self.rounds, self.is_brief, self.calls, self.random = rounds, is_brief, 0, random.Random(0)

    def check_close(self, got: Tensor, wanted: Tensor, factor: float, case: str) -> None:
        allowed = factor * torch.finfo(got.dtype).eps * (1 + wanted.abs().double())
        is_right = (got.double() - wanted.double()).abs() <= allowed  # false for NaN
        assert is_right.all(), f"{case}: {int((~is_right).sum())} of {got.numel()} elements are wrong"

    def run(
        self,
        op: Callable[..., Any],
        arguments: Sequence[Any],
        options: dict[str, Any] | None = None,
        *,
        reference: Callable[..., Any] | None = None,
        factor: float = 16,
        expandable: int | None = None,
        each: bool = True,
        writes: bool = True,
    ) -> None:
        """Calls with the arguments in layouts that are drawn, and with outputs in each layout.

        Args:
            reference: in float64; without one, the operator itself on dense tensors.
            factor: the error that is allowed, in units of the rounding of the dtype.
            expandable: how many of the arguments, from the first, are tried expanded; by default all.
            each: whether to try all arguments in one layout, for each layout, too.
            writes: whether to try outputs.
        """
        options, count = options or {}, len(arguments)
        expandable = count if expandable is None else expandable
        names = [[*LAYOUTS, *(EXPANDED if i < expandable else [])] for i in range(count)]
        label = f"{op.operator.declaration.name} {options}"
        choices = [[name] * count for name in [*LAYOUTS, *EXPANDED] if each and not self.is_brief]
        choices += [[self.random.choice(some) for some in names] for _ in range(self.rounds)]
        for choice in choices:
            values = [
                arrange(layout, a) if isinstance(a, Tensor) else a for layout, a in zip(choice, arguments, strict=True)
            ]
            case = f"{label} {choice} {[tuple(v.shape) for v in values if isinstance(v, Tensor)]}"
            got = tensors_of(op(*values, **options))
            self.calls += 1
            for g, w in zip(got, self._wanted(op, values, options, reference), strict=True):
                self.check_close(g, w, factor, case)
        if writes:
            self._check_outputs(op, arguments, options, factor, label)

    def _wanted(self, op: Callable, values: list[Any], options: dict, reference: Callable | None) -> list[Tensor]:
        def dense(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            wide = reference is not None and value.is_floating_point()
            value = value.double() if wide else value
            return value.clone(memory_format=torch.contiguous_format)

        return tensors_of((reference or op)(*map(dense, values), **options))

    def _check_outputs(self, op: Callable, arguments: Sequence[Any], options: dict, factor: float, label: str) -> None:
        wanted = tensors_of(op(*arguments, **options))
        for name in [self.random.choice(list(LAYOUTS))] if self.is_brief else LAYOUTS:
            layouts = [name if name in layouts_for(w.shape) else "offset" for w in wanted]
            places = [place(layout, torch.zeros_like(w)) for layout, w in zip(layouts, wanted, strict=True)]
            before = [base.clone() for _, base in places]
            outs = [view for view, _ in places]
            op(*arguments, **options, out=outs[0] if len(outs) == 1 else tuple(outs))
            self.calls += 1
            for layout, w, (view, base), around in zip(layouts, wanted, places, before, strict=True):
                case = f"{label} out {layout} {tuple(w.shape)} {w.dtype}"
                self.check_close(view, w, factor, case)
                LAYOUTS[layout][1](around, w.shape).copy_(view)
                is_kept = torch.equal(base.reshape(-1).view(torch.uint8), around.reshape(-1).view(torch.uint8))
                assert is_kept, f"{case}: wrote around `out`"


# --- what is called --------------------------------------------------------------------------------


def reference_of(op: Any) -> Callable[..., Any]:
    return op.operator.declaration.reference


def matrices(device: str, sizes: Sequence[tuple[int, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """Yields, for each dtype and size, a matrix, another one and a row."""
    for dtype, shape in itertools.product(DTYPES, sizes):
        x, grad = torch.randn(2, *shape, device=device).to(dtype)
        yield x, grad, torch.randn(shape[-1], device=device).to(dtype)


def elementwise(comparison: Comparison, device: str) -> None:
    """bias_gelu, d_sigmoid and their backwards; rows of whole packs, of others, and shorter than a pack."""
    sizes = [(1, 1), (7, 5), (70, 77), (33, 256), (2, 3, 1032)]
    for x, grad, bias in matrices(device, sizes):
        for approximate in ("tanh", "none", "quick"):
            options = {"approximate": approximate}
            comparison.run(bias_gelu, (x, bias), options, reference=reference_of(bias_gelu))
            comparison.run(bias_gelu_backward, (grad, x, bias), options, reference=reference_of(bias_gelu_backward))
        comparison.run(d_sigmoid, (x,), reference=reference_of(d_sigmoid))
        comparison.run(d_sigmoid_backward, (grad, x), reference=reference_of(d_sigmoid_backward))
    if device == "cuda":
        kernels_of_tests(comparison, device)


def kernels_of_tests(comparison: Comparison, device: str) -> None:
    from gpu_operators import column_sums, plus, plus_backward, square, total

    for n in (1, 77, 256, 5000):
        x = torch.randn(n, device=device)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            comparison.run(plus, (x.to(dtype),), reference=lambda x: x + 1)
            comparison.run(plus_backward, (x.to(dtype),), reference=lambda x: x + 10)
        comparison.run(total, (x,), reference=lambda x: x.sum(), factor=1000)
        comparison.run(square, (x[:300],), reference=lambda x: torch.outer(x, x))
    for x, _, _ in matrices(device, [(13, 1964), (777, 3), (300, 1030)]):
        if x.dtype != torch.bfloat16:
            for chunks in (1, 3, 65535):
                comparison.run(column_sums, (x, chunks), reference=lambda x, chunks: x.sum(0), factor=100)


def norms(comparison: Comparison, device: str) -> None:
    """Norms and their backwards: rows within a warp, a block, a cluster, and longer."""
    sizes = [(5, 9), (7, 5), (70, 77), (33, 256), (2, 3, 1032), (5, 12_000), (3, 20_000), (2, 140_000)]
    # A row of one value has a deviation of 0, which makes its gradient some hundred times as inexact.
    options: dict[str, Any] = {"factor": 4e3, "expandable": 1, "each": False}
    for x, grad, weight in matrices(device, sizes):
        other, bias = x.roll(1, 0), weight.roll(1, 0)
        comparison.run(rms_norm, (x, weight), reference=reference_of(rms_norm), **options)
        comparison.run(layer_norm, (x, weight, bias), reference=reference_of(layer_norm), **options)
        comparison.run(rms_norm_backward, (grad, x, weight), reference=reference_of(rms_norm_backward), **options)
        arguments = (grad, x, weight, bias)
        comparison.run(layer_norm_backward, arguments, reference=reference_of(layer_norm_backward), **options)
        # Without a reference, which would not round the sum.
        comparison.run(add_rms_norm, (x, other, weight), **options)
        arguments = (grad, other, weight, x)
        comparison.run(add_rms_norm_backward, arguments, reference=reference_of(add_rms_norm_backward), **options)


def triton(comparison: Comparison, device: str) -> None:
    """The operators whose kernel is a Triton kernel, and bias_gelu's."""
    chosen = triton_bias_gelu()
    for x, _, bias in matrices(device, [(1, 1), (7, 5), (70, 77), (2, 3, 1032)]):
        comparison.run(softmax, (x,), reference=reference_of(softmax))
        for approximate in ("tanh", "none", "quick"):
            comparison.run(chosen, (x, bias), {"approximate": approximate}, reference=reference_of(bias_gelu))
    for x, _, _ in matrices(device, [(2, 20_000)]):
        comparison.run(softmax, (x,), reference=reference_of(softmax))
    for m, n, k in [(1, 1, 1), (5, 7, 9), (40, 70, 256), (70, 130, 77)]:
        for dtype in DTYPES:
            x, weight, bias = torch.randn(m, k), torch.randn(n, k) / k**0.5, torch.randn(n)
            arguments = [t.to(device, dtype) for t in (x, weight, bias)]
            for approximate in ("tanh", "none"):
                options = {"approximate": approximate}
                comparison.run(matmul_bias_gelu, arguments, options, reference=reference_of(matmul_bias_gelu))


def triton_bias_gelu() -> Any:
    """Declares bias_gelu with its triton.py."""
    folder = Path(opwright_ops.__file__).parent / "bias_gelu"
    text = (folder / "op.py").read_text()
    name = '@operator("opwright_ops::bias_gelu")'
    assert name in text
    module = ModuleType("layouts_bias_gelu")
    sys.modules[module.__name__] = module
    source = str(folder / "triton.py")
    exec(text.replace(name, f'@operator("layouts::bias_gelu", cuda={source!r})'), vars(module))
    return module.bias_gelu


LSTM_OPTIONS: list[dict[str, Any]] = [
    {},
    {"tier": "grid", "reverse": True},
    {"tier": "step"},
    {"peephole": True, "zoneout_h": 0.2, "zoneout_c": 0.2, "seed": True, "clip": 2.0, "lengths": True},
    {"weight_hr": True, "reset": True},
    {"norms": True, "h_mask": True},
    {"norms": True, "weight_hr": True},
    {"activation": "hard_sigmoid", "slope": 0.2},
]


def recurrent(dtype: torch.dtype, factor: float, comparison: Comparison, device: str, is_odd: bool = False) -> None:
    """The LSTM in every tier and with the arguments of its variants, and its module.

    Args:
        factor: the error that is allowed, in units of the rounding of the dtype.
        is_odd: rows are without alignment; initcheck does not see how cuBLAS writes those with it.
    """
    features, sizes = (15, (41, 255)) if is_odd else (16, (40, 256))
    for given in LSTM_OPTIONS:
        for batch, size in zip([3, 12], sizes):
            arguments, options = lstm_arguments(device, dtype, 4, batch, features, size, given)
            results = lstm(*arguments, **options)
            # Weights that are all equal make sums overflow, and norms of nothing but rounding errors.
            comparison.run(lstm, arguments, options, factor=factor, expandable=3, each=False, writes=size == sizes[0])
            grads = [torch.randn_like(r) for r in results[:-1]]
            backward = [*grads, *arguments, results.output, results.gates]
            comparison.run(lstm_backward, backward, options, factor=8 * factor, expandable=7, each=False, writes=False)
            module = LSTM(features, size, device=device, dtype=dtype, num_layers=2, bidirectional=True)
            x = torch.randn(4, batch, features, device=device, dtype=dtype, requires_grad=True)
            module(x, lengths=torch.arange(batch, device=device) % 5)[0].sum().backward()


def lstm_arguments(
    device: str, dtype: torch.dtype, steps: int, batch: int, features: int, H: int, given: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    def tensor(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=device) * scale).to(dtype)

    flags = {"peephole", "lengths", "weight_hr", "reset", "norms", "h_mask", "seed"} & given.keys()
    options = {name: value for name, value in given.items() if name not in flags}
    R = H // 2 if "weight_hr" in flags else H
    scale = H**-0.5
    arguments: list[Any] = [
        tensor(steps, batch, features), tensor(batch, R, scale=0.5), tensor(batch, H),
        tensor(4 * H, features, scale=scale), tensor(4 * H, R, scale=scale), tensor(4 * H), tensor(4 * H),
        tensor(R, H, scale=scale) if "weight_hr" in flags else None,
        tensor(3, H) if "peephole" in flags else None,
        *([tensor(4 * H), tensor(4 * H), tensor(2, H)] if "norms" in flags else [None] * 3),
        tensor(batch, R) if "h_mask" in flags else None,
        torch.arange(batch, device=device) % (steps + 1) if "lengths" in flags else None,
        torch.arange(steps * batch, device=device).view(steps, batch) % 3 == 0 if "reset" in flags else None,
        torch.arange(batch, device=device) if "seed" in flags else None,
    ]  # fmt: skip
    return arguments, {"keep_cells": 1, "keep_gates": 1, **options}


GROUPS: dict[str, Callable[..., None]] = {
    "elementwise": elementwise,
    "norms": norms,
    "triton": triton,
    "lstm-float64": functools.partial(recurrent, torch.float64, 1e5),
    "lstm-float32": functools.partial(recurrent, torch.float32, 2e3),
    "lstm-float16": functools.partial(recurrent, torch.float16, 64),
}


def run(group: str, device: str = "cuda", rounds: int = 4, is_odd: bool = False, is_brief: bool = False) -> int:
    """Runs a group; returns how many calls were compared."""
    torch.manual_seed(0)
    comparison = Comparison(rounds, is_brief)
    GROUPS[group](comparison, device, **({"is_odd": is_odd} if group.startswith("lstm") else {}))
    if device == "cuda":
        torch.cuda.synchronize()
    return comparison.calls


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--is-odd", action="store_true")
    parser.add_argument("--is-brief", action="store_true")
    print(run(**vars(parser.parse_args())), "calls")
