"""A step of AdamW on a GPU beside torch.optim.AdamW, fused and foreach: share of a copy of the bytes that must move.

    python benchmarks/adamw_cuda.py

One tensor of 201 million parameters, the tensors of a model of 124 million, and 100 tensors of 1,000. A step reads
parameter, gradient and both states, and writes all but the gradient. `in a graph` is a step in a CUDA graph; the other
times include the host.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from cold_times import micros
from opwright_ops import AdamW
from summary import Figure, beside, update

from opwright.machine import machine_card
from opwright.records import builtins_of

_LAYER = [
    (768,),
    (768,),
    (2304, 768),
    (2304,),
    (768, 768),
    (768,),
    (768,),
    (768,),
    (3072, 768),
    (3072,),
    (768, 3072),
    (768,),
]
MODELS = {
    "1 x 201 M": [(201_326_592,)],
    "148 tensors, 124 M": [(50257, 768), (1024, 768), *itertools.chain(*[_LAYER] * 12), (768,), (768,)],
    "100 x 1,000": [(1000,)] * 100,
}
VARIANTS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "bfloat16, stochastic rounding": (torch.bfloat16, {"stochastic_rounding": True}),
}


def parameters_of(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    found = [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]
    for param in found:
        param.grad = torch.randn_like(param)
    return found


def time_in_graph(params: list[torch.Tensor], options: dict[str, Any]) -> float:
    optimizer = AdamW(params, capturable=True, **options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return micros(graph.replay)


def compare(model: str, variant: str) -> Figure:
    dtype, options = VARIANTS[variant]
    params = parameters_of(MODELS[model], dtype)
    elements = sum(p.numel() for p in params)
    from_copy = torch.empty(elements * 7 // 2, device="cuda", dtype=dtype)
    to_copy = torch.empty_like(from_copy)
    copy = micros(lambda: to_copy.copy_(from_copy))
    del from_copy, to_copy
    times = {"opwright": micros(AdamW(params, **options).step), "in a graph": time_in_graph(params, options)}
    if not options:
        times |= {
            "fused": micros(torch.optim.AdamW(params, fused=True).step),
            "foreach": micros(torch.optim.AdamW(params, foreach=True).step),
        }
    shares = {label: copy / t for label, t in times.items()}
    text = "  ".join(f"{label} {t:7.1f} ({shares[label]:.2f})" for label, t in times.items())
    print(f"{model:20s} {variant:30s} copy {copy:7.1f}  {text}", flush=True)
    ours = shares.pop("opwright")
    return Figure(f"AdamW {variant}, {model}: share of a copy", ours, "of a copy", beside=beside(ours, shares))


def main() -> None:
    figures = [compare(model, variant) for model in MODELS for variant in VARIANTS]
    # The large tensor alone is bound by memory.
    update(__file__, figures[: len(VARIANTS)], builtins_of(machine_card(torch.device("cuda", 0))))


if __name__ == "__main__":
    main()
