"""opwright_ops.LSTM beside nn.LSTM (cuDNN) on a GPU: microseconds per time step, the product for the inputs included.

    python benchmarks/lstm_cuda.py [--quick]

Forward, and forward and backward with all gradients; as they are called, four calls in a row, and from a CUDA graph,
where the host's time does not count. Minima of rounds in which the two take turns. TF32 as PyTorch has it by default,
cuDNN's, but in the row that says otherwise. Errors are those of the output, and of all gradients together, against
nn.LSTM in float64 with the same parameters: root of the mean square over that of the true values. `--quick` measures
the first cases only, and writes nothing.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from opwright_ops import LSTM, lstm_tier
from summary import Figure, beside, number, update, write_raw
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from opwright.machine import machine_card
from opwright.records import builtins_of

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
# dtype, H, B, T, options of the modules; "packed": lengths from T / 5 to T; "ieee": without TF32.
CASES = [
    (bf16, 1024, 32, 1024, {}), (bf16, 768, 16, 1024, {}), (bf16, 512, 1, 256, {}), (bf16, 512, 12, 256, {}),
    (bf16, 1536, 16, 256, {}), (bf16, 2048, 16, 256, {}), (f16, 768, 16, 1024, {}), (f16, 1024, 32, 1024, {}),
    (f32, 1024, 16, 256, {}), (bf16, 512, 32, 256, {"bidirectional": True}), (bf16, 512, 32, 256, {"num_layers": 2}),
    (bf16, 512, 32, 256, {"packed": True}), (bf16, 1024, 32, 256, {"proj_size": 512}), (bf16, 520, 32, 256, {}),
    (f16, 512, 64, 256, {}), (f16, 512, 128, 256, {}), (f16, 1024, 64, 256, {}), (f16, 1024, 128, 256, {}),
    (bf16, 1024, 64, 256, {}), (bf16, 1024, 128, 256, {}), (bf16, 2048, 32, 256, {}), (bf16, 2048, 128, 256, {}),
    (f16, 64, 16, 256, {}), (f16, 128, 16, 256, {}), (bf16, 128, 64, 256, {}), (f32, 128, 16, 256, {}),
    (f16, 256, 16, 256, {}), (bf16, 256, 256, 256, {}), (f32, 512, 64, 256, {}), (f32, 1536, 16, 256, {}),
    (f32, 64, 16, 256, {}), (f32, 64, 16, 256, {"ieee": True}), (bf16, 64, 128, 256, {}), (f32, 64, 528, 256, {"ieee": True}),
    (f32, 128, 16, 256, {"ieee": True}), (f32, 128, 256, 256, {"ieee": True}), (f32, 256, 64, 256, {"ieee": True}),
    (f32, 512, 16, 256, {"ieee": True}), (f32, 512, 128, 256, {"ieee": True}), (f32, 1024, 16, 256, {"ieee": True}),
    (f32, 1024, 64, 256, {"ieee": True}), (bf16, 4096, 16, 64, {}), (bf16, 1024, 32, 16, {}), (bf16, 1024, 32, 4, {}),
    (bf16, 1024, 32, 1, {}),
]  # fmt: skip
# These lie between others, and have no rows in the summary.
BETWEEN = """float16 H=512 B=64 T=256, float16 H=512 B=128 T=256, float16 H=1024 B=64 T=256, float16 H=1024 B=128 T=256,
bfloat16 H=1024 B=64 T=256, bfloat16 H=2048 B=32 T=256, bfloat16 H=128 B=64 T=256, float16 H=256 B=16 T=256,
float32 TF32 H=512 B=64 T=256, float32 IEEE H=64 B=528 T=256, float32 IEEE H=256 B=64 T=256, bfloat16 H=4096 B=16 T=64,
bfloat16 H=1024 B=32 T=16, bfloat16 H=1024 B=32 T=1""".replace("\n", " ").split(", ")
NORMALISED = [(256, 16, 256), (512, 16, 256), (512, 64, 256)]


def fastest(calls: dict[str, Callable[[], object]], rounds: int = 5, in_a_row: int = 4) -> dict[str, float]:
    """Returns the milliseconds of a call of each, the least of the rounds."""
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(in_a_row):
                call()
            end.record()
            end.synchronize()
            best[name] = min(best[name], start.elapsed_time(end) / in_a_row)
    return best


def graph_of(call: Callable[[], object]) -> Callable[[], object]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def relative_error(found: tuple[Tensor, ...], true: tuple[Tensor, ...]) -> float:
    squares = sum(float((a - b).square().sum()) for a, b in zip(found, true, strict=True))
    return (squares / sum(float(b.square().sum()) for b in true)) ** 0.5


def measure(dtype: torch.dtype, H: int, B: int, T: int, options: dict[str, object]) -> dict[str, object]:
    torch.backends.cudnn.allow_tf32 = not options.get("ieee")
    of_modules = {name: value for name, value in options.items() if name not in ("ieee", "packed")}
    theirs = nn.LSTM(H, H, device="cuda", dtype=dtype, **of_modules)
    modules = {"nn.LSTM": theirs, "opwright": LSTM.from_torch(theirs)}
    x = torch.randn(T, B, H, device="cuda", dtype=dtype)
    given = x
    if options.get("packed"):
        lengths = torch.linspace(T, T // 5, B).long()
        given = pack_padded_sequence(x, lengths)
    with torch.no_grad():
        forward = {name: (lambda module=module: module(given)) for name, module in modules.items()}
        times = {"forward": fastest(forward)}
        if not options.get("packed"):
            times["forward in a graph"] = fastest({name: graph_of(call) for name, call in forward.items()})
    leaf = x.clone().requires_grad_()
    with torch.no_grad():
        first = modules["opwright"](given)[0]
        grad = torch.randn_like(first.data if options.get("packed") else first)

    def both(module: nn.Module, leaf: Tensor = leaf, grad: Tensor = grad) -> tuple[Tensor, ...]:
        batch = pack_padded_sequence(leaf, lengths) if options.get("packed") else leaf
        output = module(batch)[0]
        output = output.data if options.get("packed") else output
        parameters = dict(module.named_parameters())
        wanted = [leaf, *(parameters[name] for name in sorted(parameters))]
        return output.detach(), *torch.autograd.grad(output, wanted, grad)

    calls = {name: (lambda module=module: both(module)) for name, module in modules.items()}
    times["forward and backward"] = fastest(calls)
    if not options.get("packed"):
        times["forward and backward in a graph"] = fastest({name: graph_of(call) for name, call in calls.items()})
    tier = lstm_tier(H, B, dtype, fp32_precision="ieee" if options.get("ieee") else "tf32")
    row: dict[str, object] = {
        "dtype": str(dtype).removeprefix("torch."),
        "H": H,
        "B": B,
        "T": T,
        **options,
        "tier": tier,
    }
    for title, found in times.items():
        row[f"{title}, us per step"] = {name: round(1e3 * value / T, 2) for name, value in found.items()}
    true = both(copy.deepcopy(theirs).double(), leaf.detach().double().requires_grad_(), grad.double())
    found = {name: both(module) for name, module in modules.items()}
    for title, of in (("error of the output", slice(0, 1)), ("error of the gradients", slice(1, None))):
        row[title] = {name: float(f"{relative_error(one[of], true[of]):.3g}") for name, one in found.items()}
    return row


def measure_normalised(H: int, B: int, T: int) -> dict[str, object]:
    """Returns the times of layers that cuDNN does not have, in clusters and step by step."""
    tiers = ("cluster", "step")
    modules = {tier: LSTM(H, H, layer_norm=True, tier=tier, device="cuda", dtype=bf16) for tier in tiers}
    leaf = torch.randn(T, B, H, device="cuda", dtype=bf16, requires_grad=True)
    calls = {tier: (lambda module=module: module(leaf)[0].sum().backward()) for tier, module in modules.items()}
    row: dict[str, object] = {"dtype": "bfloat16", "H": H, "B": B, "T": T, "layer_norm": True}
    with torch.no_grad():
        times = {"forward": fastest({tier: (lambda module=module: module(leaf)) for tier, module in modules.items()})}
    times["forward and backward"] = fastest(calls)
    for title, found in times.items():
        row[f"{title}, us per step"] = {name: round(1e3 * value / T, 2) for name, value in found.items()}
    return row


def figures(result: dict[str, Any]) -> list[Figure]:
    found, seen = [], set()
    for case in result["cases"]:
        name = name_of(case)
        if name in BETWEEN:
            continue
        candidates = ("cluster", "step") if case.get("layer_norm") else ("opwright", "nn.LSTM")
        for title in ("forward", "forward and backward"):
            called, graph = (case.get(f"{title}{how}, us per step", {}) for how in ("", " in a graph"))
            ours, others = called[candidates[0]], {candidates[1]: called[candidates[1]]}
            others |= {f"{candidate} in a graph": graph[candidate] for candidate in candidates if graph}
            found.append(Figure(f"{name}, {title}", ours, "us/step", beside=beside(ours, others)))
        kind = (case["dtype"], case.get("ieee"), case["H"] < 512)  # errors depend on little else
        if "error of the output" in case and kind not in seen:
            seen.add(kind)
            (ours, theirs), gradients = (
                (case[title]["opwright"], case[title]["nn.LSTM"])
                for title in ("error of the output", "error of the gradients")
            )
            others = f"nn.LSTM {number(theirs)}; gradients {number(gradients[0])}, nn.LSTM {number(gradients[1])}"
            found.append(Figure(f"{name}, error", ours, "relative", beside=others))
    return found


def name_of(case: dict[str, Any]) -> str:
    """Returns a case as `bfloat16 H=512 B=32 T=256 packed`."""
    dtype = case["dtype"] if case["dtype"] != "float32" else f"float32 {'IEEE' if case.get('ieee') else 'TF32'}"
    options = [
        name if value is True else f"{name}={value}"
        for name, value in case.items()
        if name in ("bidirectional", "num_layers", "packed", "proj_size", "layer_norm")
    ]
    return " ".join([dtype, *(f"{axis}={case[axis]}" for axis in "HBT"), *options])


def main() -> None:
    is_quick = "--quick" in sys.argv[1:]
    rows = []
    for case in CASES[:14] if is_quick else CASES:
        rows.append(measure(*case))
        print(json.dumps(rows[-1]), flush=True)
    for case in () if is_quick else NORMALISED:
        rows.append(measure_normalised(*case))
        print(json.dumps(rows[-1]), flush=True)
    if not is_quick:
        result = {"machine": builtins_of(machine_card()), "cases": rows}
        write_raw("lstm_cuda", result)
        update(__file__, figures(result), result["machine"])


if __name__ == "__main__":
    main()
