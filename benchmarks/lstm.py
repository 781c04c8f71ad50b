"""opwright_ops.LSTM and lstm_step on the CPU beside nn.LSTM.

    python benchmarks/lstm.py [--quick] [--threads N]

Candidates of a sequence take turns, call by call; those of a stream in runs of 50 calls, because a stream
finds its weights in the cache where its own last step left them. Every figure is the minimum, with the median beside it.
Gradients are of the input and of all parameters. Also: what is saved for the backward, the error of streams
with rounded weights, and how fast this machine reads weights of such sizes, which is the limit of a stream.
`--quick` measures a tenth as often and writes nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from opwright_ops import LSTM, lstm_step
from summary import Figure, beside, number, update, write_raw
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

QUICK = "--quick" in sys.argv
VARIANTS = {
    "hard": {"activation": "hard"}, "peephole": {"peephole": True}, "zoneout": {"zoneout": 0.1},
    "coupled": {"coupled": True}, "clip": {"clip": 3.0}, "layer norm": {"layer_norm": True},
    "recompute": {"memory": "recompute"},
}  # fmt: skip

rows: dict[str, dict[str, float]] = {}


def note(name: str, **values: float) -> None:
    """Prints and keeps one row."""
    rows[name] = {key: float(f"{value:.5g}") for key, value in values.items()}
    print(f"{name:<58}", "  ".join(f"{k} {v:.4g}" for k, v in values.items()), flush=True)


def measured(calls: dict[str, Callable[[], object]], seconds: float, run: int = 1) -> dict[str, tuple[float, float]]:
    """Returns minimum and median in us of each call; they take turns in runs of `run`."""
    for call in calls.values():
        call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + (seconds / 10 if QUICK else seconds)
    while time.perf_counter() < end or min(map(len, found.values())) < 3:
        for name, call in calls.items():
            for i in range(run):
                start = time.perf_counter()
                call()
                if run == 1 or i >= run // 5:  # the first find the others' weights
                    found[name].append(1e6 * (time.perf_counter() - start))
    return {name: (min(times), statistics.median(times)) for name, times in found.items()}


def compare(
    name: str, calls: dict[str, Callable[[], object]], unit: float = 1e3, seconds: float = 8, run: int = 1
) -> None:
    """Notes the candidates in ms (or us, with unit 1) and the first one's time over each of the others'."""
    times = measured(calls, seconds, run)
    suffix = "ms" if unit == 1e3 else "us"
    values = {f"{n} {suffix}": low / unit for n, (low, _) in times.items()}
    values |= {f"{n} median": middle / unit for n, (_, middle) in times.items()}
    (first, (ours, _)), *rest = times.items()
    note(name, **values, **{f"{first}/{n}": ours / low for n, (low, _) in rest})


def forward(module: nn.Module, x: object, *args: object) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return module(x, *args)

    return call


def both(module: nn.Module, x: torch.Tensor, grad: torch.Tensor, pack: Callable = lambda x: x) -> Callable[[], None]:
    def call() -> None:
        module.zero_grad()
        x.grad = None
        output = module(pack(x))[0]
        (output if isinstance(output, torch.Tensor) else output.data).backward(grad)

    return call


def pair(size: int, dtype: torch.dtype = torch.float32, **options: object) -> tuple[LSTM, nn.LSTM]:
    theirs = nn.LSTM(size, size, dtype=dtype, **options)
    return LSTM.from_torch(theirs), theirs


def sequences() -> None:
    cases = [
        (100, 1, 512, torch.float32), (100, 16, 1024, torch.float32), (100, 16, 1024, torch.bfloat16),
        (100, 16, 512, torch.float32), (100, 16, 512, torch.bfloat16), (100, 1, 512, torch.bfloat16),
        (100, 1, 64, torch.float32), (100, 1, 256, torch.float32), (100, 16, 128, torch.float32),
        (100, 64, 256, torch.float32), (100, 5, 512, torch.float32),
    ]  # fmt: skip
    for T, B, H, dtype in cases:
        ours, theirs = pair(H, dtype)
        x, grad = torch.randn(T, B, H, dtype=dtype, requires_grad=True), torch.randn(T, B, H, dtype=dtype)
        name = f"T={T} B={B} H={H} {str(dtype).removeprefix('torch.')}"
        compare(f"{name} forward", {"opwright": forward(ours, x), "nn.LSTM": forward(theirs, x)})
        compare(f"{name} forward+backward", {"opwright": both(ours, x, grad), "nn.LSTM": both(theirs, x, grad)})
    T, B, H = 100, 16, 512
    for name, options in {
        "two layers": {"num_layers": 2}, "bidirectional": {"bidirectional": True}, "projection to H/2": {"proj_size": H // 2}
    }.items():  # fmt: skip
        ours, theirs = pair(H, **options)
        x = torch.randn(T, B, H, requires_grad=True)
        grad = torch.randn_like(theirs(x)[0])
        compare(f"{name} forward", {"opwright": forward(ours, x), "nn.LSTM": forward(theirs, x)})
        compare(f"{name} forward+backward", {"opwright": both(ours, x, grad), "nn.LSTM": both(theirs, x, grad)})


def directions() -> None:
    """Both directions of a layer beside two calls for one direction each."""
    T = 100
    for H, B in ((32, 1), (64, 1), (64, 16), (128, 1), (128, 16), (256, 1), (256, 16), (512, 1)):
        ours, theirs = pair(H, bidirectional=True)
        one, x = LSTM(H, H), torch.randn(T, B, H, requires_grad=True)
        grad, grads = torch.randn(T, B, 2 * H), torch.randn(T, B, H)
        for direction, calls in {
            "forward": {"both": forward(ours, x), "one": forward(one, x), "nn.LSTM": forward(theirs, x)},
            "forward+backward": {
                "both": both(ours, x, grad), "one": both(one, x, grads), "nn.LSTM": both(theirs, x, grad),
            },
        }.items():  # fmt: skip
            times = {name: low / 1e3 for name, (low, _) in measured(calls, 4).items()}
            note(
                f"two directions T={T} B={B} H={H} {direction}", **{f"{n} ms": t for n, t in times.items()},
                **{"both/(2 one)": times["both"] / (2 * times["one"]), "both/nn.LSTM": times["both"] / times["nn.LSTM"]},
            )  # fmt: skip


def packed() -> None:
    T, B, H = 100, 16, 512
    lengths = torch.linspace(T, 0.2 * T, B).long()
    full = float(lengths.sum()) / (T * B)
    ours, theirs = pair(H)
    x = torch.randn(T, B, H, requires_grad=True)

    def pack(x: torch.Tensor) -> object:
        return pack_padded_sequence(x, lengths)

    with torch.no_grad():
        grad = torch.randn_like(theirs(pack(x))[0].data)
        given = pack(x)
    name = f"packed, {100 * full:.0f} % full,"
    compare(f"{name} forward", {"opwright": forward(ours, given), "nn.LSTM": forward(theirs, given)})
    compare(
        f"{name} forward+backward",
        {"opwright": both(ours, x, grad, pack), "nn.LSTM": both(theirs, x, grad, pack)},
    )


def variants() -> None:
    T, B, H = 100, 16, 512
    modules = {"plain": LSTM(H, H)} | {name: LSTM(H, H, **options) for name, options in VARIANTS.items()}
    x, grad = torch.randn(T, B, H, requires_grad=True), torch.randn(T, B, H)
    for direction, make in {
        "forward": lambda m: forward(m, x), "forward+backward": lambda m: both(m, x, grad)
    }.items():  # fmt: skip
        times = measured({name: make(module) for name, module in modules.items()}, 40)
        plain = times["plain"][0]
        note(f"variants over the plain cell, {direction}", **{n: low / plain for n, (low, _) in times.items()})


def streams() -> None:
    for H in (128, 512, 1024):
        _, theirs = pair(H)
        cell = nn.LSTMCell(H, H)
        x, state = torch.randn(1, 1, H), (torch.zeros(1, 1, H), torch.zeros(1, 1, H))
        calls = {f"lstm_step {kind}": _stream(theirs, kind, x[0]) for kind in ("float32", "bfloat16", "int8")}
        calls["LSTM"] = forward(LSTM.from_torch(theirs), x, state)
        calls["nn.LSTM"] = forward(theirs, x, state)
        calls["nn.LSTMCell"] = forward(cell, x[0], (state[0][0], state[1][0]))
        compare(f"stream, T=1 B=1 H={H}", calls, unit=1, seconds=10, run=50)
        note(
            f"  the machine reads such weights, H={H}",
            **{
                f"{kind} us": _read_us(8 * H * H * size)
                for kind, size in (("float32", 4), ("bfloat16", 2), ("int8", 1))
            },
        )
        _errors(theirs, H)


def _stream(module: nn.LSTM, kind: str, x: torch.Tensor) -> Callable[[], object]:
    step = lstm_step(module, weights=kind)
    return lambda: step(x)


def _read_us(count: int) -> float:
    """Returns what one reading of so many bytes takes, split among the threads, as PyTorch's sum does it."""
    memory = torch.ones(count // 8, dtype=torch.int64)
    return measured({"read": memory.sum}, 2, run=50)["read"][0]


def _errors(module: nn.LSTM, H: int) -> None:
    """Notes how far streams of 100 steps with rounded weights are from float64."""
    x = torch.randn(100, 1, H)
    with torch.no_grad():
        exact = LSTM.from_torch(module).double()(x.double())[0]
        exact_steps = {kind: lstm_step(module.float(), weights=kind)(x) for kind in ("float32", "bfloat16", "int8")}
    note(
        f"  largest error of h in 100 steps, H={H}",
        **{kind: float((h.double() - exact).abs().max()) for kind, h in exact_steps.items()},
        largest=float(exact.abs().max()),
    )
    module.float()


def saved() -> None:
    T, B, H = 50, 8, 128
    for dtype in (torch.float32, torch.bfloat16):
        modules = {
            "default": LSTM(H, H, dtype=dtype), "recompute": LSTM(H, H, dtype=dtype, memory="recompute"),
            "nn.LSTM": nn.LSTM(H, H, dtype=dtype),
        }  # fmt: skip
        note(
            f"saved for backward, units of T*B*H, {str(dtype).removeprefix('torch.')}",
            **{
                name: _saved_bytes(module, T, B, H, dtype) / (T * B * H * dtype.itemsize)
                for name, module in modules.items()
            },
        )


def _saved_bytes(module: nn.Module, T: int, B: int, H: int, dtype: torch.dtype) -> int:
    known = {p.untyped_storage().data_ptr() for p in module.parameters()}
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        output = module(torch.randn(T, B, H, dtype=dtype, requires_grad=True))  # noqa: F841
    return sum(found.values())


def figures(result: dict[str, Any]) -> list[Figure]:
    found = []
    for name, row in result["rows"].items():
        name = name.strip()
        if name.startswith("variants"):
            found += [Figure(f"{name}: {variant}", value, "ratio") for variant, value in row.items() if value != 1]
        elif name.startswith("two directions"):
            if name.endswith("forward"):
                both = result["rows"][f"{name}+backward"]["both/(2 one)"]
                others = f"over nn.LSTM {number(row['both/nn.LSTM'])}; forward+backward {number(both)}"
                found.append(Figure(f"{name}, over two calls for one", row["both/(2 one)"], "ratio", beside=others))
        elif "opwright/nn.LSTM" in row:
            times = f"opwright {number(row['opwright ms'])} ms; nn.LSTM {number(row['nn.LSTM ms'])} ms"
            found.append(Figure(f"{name}, over nn.LSTM", row["opwright/nn.LSTM"], "ratio", beside=times))
        else:
            found.append(_streams_or_saved(name, row))
    return found


def _streams_or_saved(name: str, row: dict[str, float]) -> Figure:
    """The first value with the others beside it: times in us, errors, or what is saved for the backward."""
    is_time = any(key.endswith(" us") for key in row)
    values = {key.removesuffix(" us"): v for key, v in row.items() if not is_time or key.endswith(" us")}
    first = next(iter(values))
    value = values.pop(first)
    unit = "us" if is_time else "T*B*H" if name.startswith("saved") else "absolute"
    others = beside(value, values) if unit != "absolute" else "; ".join(f"{k} {number(v)}" for k, v in values.items())
    return Figure(f"{name.replace('units of T*B*H, ', '')}, {first}", value, unit, beside=others)


def main() -> None:
    from opwright.machine import machine_card
    from opwright.records import builtins_of

    warnings.filterwarnings("ignore", message="LSTM with projections")
    threads = int(sys.argv[sys.argv.index("--threads") + 1]) if "--threads" in sys.argv else 2
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    card = builtins_of(machine_card())
    for part in (streams, sequences, directions, packed, variants, saved):
        part()
    if not QUICK:
        result = {"machine": card, "threads": threads, "rows": rows}
        print(write_raw("lstm", result))
        update(__file__, figures(result), card)


if __name__ == "__main__":
    main()
