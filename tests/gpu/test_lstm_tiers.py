"""`lstm` with all its steps in one launch: right, as `lstm_tier` says, under capture, on streams, under load."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from opwright_ops import LSTM, lstm, lstm_tier
from opwright_ops.lstm.op import lstm_backward
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-3}
_DTYPES = list(_TOLERANCE)
_EXACT = 2e-5  # float32 without TF32

if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("one launch for all steps needs compute capability 9.0", allow_module_level=True)


def _inputs(T: int, B: int, H: int, dtype: torch.dtype, present: str = "", device: Any = "cuda") -> dict[str, Tensor]:
    torch.manual_seed(T * 1000 + B * 10 + H)
    sizes: dict[str, tuple[int, ...]] = {
        "input": (T, B, 24), "h_0": (B, H), "c_0": (B, H), "weight_ih": (4 * H, 24), "weight_hh": (4 * H, H),
        "bias_ih": (4 * H,), "bias_hh": (4 * H,),
    }  # fmt: skip
    if "peephole" in present:
        sizes["peephole"] = (3, H)
    if "h_mask" in present:
        sizes["h_mask"] = (B, H)
    if "norms" in present:
        sizes |= {"norm_ih": (4 * H,), "norm_hh": (4 * H,), "norm_c": (2, H)}
    scale = {"weight_ih": 24**-0.5, "weight_hh": H**-0.5, "bias_ih": 0.3, "bias_hh": 0.3, "peephole": 0.3, "h_mask": 4}
    given = {
        name: (torch.randn(size, device=device) * scale.get(name, 0.5)).to(dtype) for name, size in sizes.items()
    }  # fmt: skip
    if "lengths" in present:
        given["lengths"] = torch.randint(0, T + 1, (B,), device=device)
    if "reset" in present:
        given["reset"] = torch.rand(T, B, device=device) < 0.1
    if "seed" in present:
        given["seed"] = torch.randint(2**40, (B,), device=device)
    return given


def _results(given: dict[str, Tensor], dtype: torch.dtype | None = None, **options: Any) -> list[Tensor]:
    """Returns outputs and gradients, the inputs taken in `dtype` if one is given."""
    leaves = {
        name: value.to(dtype or value.dtype).detach().requires_grad_() if value.is_floating_point() else value
        for name, value in given.items()
    }
    outputs = [output for output in lstm(**leaves, **options)[:4] if output.numel()]
    generator = torch.Generator().manual_seed(3)
    loss = torch.zeros((), device=outputs[0].device, dtype=torch.float64)
    for output in outputs:
        loss = loss + (output.double() * torch.randn(output.shape, generator=generator).to(output.device)).sum()
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    return [output.detach() for output in outputs] + list(torch.autograd.grad(loss, wanted))


def _error(found: list[Tensor], true: list[Tensor]) -> float:
    pairs = zip(found, true, strict=True)
    return max(
        float((a.detach().double() - b.detach()).abs().max() / b.detach().abs().max().clamp_min(1e-6)) for a, b in pairs
    )


_SHAPES = [
    (1, 1, 16), (2, 3, 17), (21, 3, 33), (13, 600, 60), (9, 12, 64), (12, 5, 200), (7, 20, 256), (7, 33, 512), (6, 70, 520), (6, 16, 768),
    (5, 32, 1024), (5, 130, 1000), (4, 16, 1536), (4, 40, 2048),
    # With TF32, blocks of 12 units.
    (5, 3, 1025), (4, 40, 1100), (6, 64, 1536),
    # Two teams of warps share the slices of a batch.
    (12, 260, 128), (11, 250, 256), (11, 100, 512), (8, 90, 768), (9, 128, 1024), (10, 49, 1024),
]  # fmt: skip


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize(
    ("T", "B", "H", "tier"),
    [(*shape, tier) for shape in _SHAPES for tier in ("cluster", "grid") if tier == "grid" or shape[2] <= 512],
)
def test_values_and_gradients(T: int, B: int, H: int, tier: str, dtype: torch.dtype) -> None:
    _check_values(T, B, H, dtype, _TOLERANCE[dtype], tier=tier, fp32_precision="tf32")


@pytest.mark.parametrize(
    ("T", "B", "H", "tier"),
    [(*shape, tier) for shape in _SHAPES for tier in ("cluster", "grid") if tier == "grid" or shape[2] <= 256],
)
def test_values_and_gradients_in_float32(T: int, B: int, H: int, tier: str) -> None:
    _check_values(T, B, H, torch.float32, _EXACT, tier=tier, fp32_precision="ieee")


def _check_values(T: int, B: int, H: int, dtype: torch.dtype, allowed: float, **options: Any) -> None:
    given = _inputs(T, B, H, dtype)
    options = {"keep_gates": T % 2, "reverse": H % 3 == 0, **options}
    true = _results(given, torch.float64, **options)
    found = _results(given, **options)
    assert _error(found, true) < allowed
    for one, other in zip(found, _results(given, **options), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [*_DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize(("T", "B", "H"), [(5, 1, 1), (3, 5, 7), (4, 130, 6), (5, 20, 200)])
def test_steps_one_by_one(T: int, B: int, H: int, dtype: torch.dtype) -> None:
    """Against the kernels of the CPU, since the other tests take the steps of float64 for the truth."""
    given = _inputs(T, B, H, dtype)
    options: dict[str, Any] = {"keep_gates": T % 2, "keep_cells": B % 2, "reverse": H % 3 == 0}
    true = _results({name: value.cpu() for name, value in given.items()}, torch.float64, **options)
    found = [value.cpu() for value in _results(given, tier="step", **options)]
    allowed = {torch.float64: 1e-12, torch.float32: _EXACT}.get(dtype, _TOLERANCE[torch.bfloat16])
    assert _error(found, true) < allowed


@pytest.mark.parametrize("dtype", [*_DTYPES, torch.float64], ids=str)
def test_gates_that_are_not_aligned_to_pairs(dtype: torch.dtype) -> None:
    """A thread reads the gates of two units at once only if their address is a multiple of the pair's size."""
    given = _inputs(4, 3, 40, dtype)
    results = lstm(**given, keep_gates=1, keep_cells=1, tier="step")
    grads = [torch.randn_like(result) for result in results[:-1]]
    order = ["input", "h_0", "c_0", "weight_ih", "weight_hh", "bias_ih", "bias_hh"]
    found = []
    for gates in (results.gates, _move_by_one_element(results.gates)):
        inputs = [*grads, *(given[name] for name in order), *[None] * 9, results.output, gates]
        found.append(lstm_backward(*inputs, keep_gates=1, keep_cells=1, tier="step"))
    for aligned, other in zip(*found, strict=True):
        assert torch.equal(aligned, other)


def _move_by_one_element(values: Tensor) -> Tensor:
    return torch.empty(values.numel() + 1, dtype=values.dtype, device=values.device)[1:].view_as(values).copy_(values)


_VARIANTS = [
    ("peephole", {"keep_cells": 1, "keep_gates": 1}),
    ("h_mask", {}),  # h reaches 2, which chunks do not hold
    ("lengths", {"keep_gates": 1}),
    ("lengths reset", {"reverse": True, "keep_cells": 1}),
    ("seed", {"zoneout_h": 0.3, "zoneout_c": 0.2, "keep_gates": 1}),
    ("", {"zoneout_h": 0.3, "zoneout_c": 0.2, "coupled": True}),
    ("peephole lengths reset seed", {"zoneout_h": 0.1, "zoneout_c": 0.1, "reverse": True, "keep_gates": 1}),
]


@pytest.mark.parametrize(("present", "options"), _VARIANTS)
@pytest.mark.parametrize(
    ("tier", "B", "H", "dtype"),
    [
        *(
            (tier, B, H, torch.float16)
            for B, H in ((5, 40), (5, 72), (20, 256), (80, 512))
            for tier in ("cluster", "grid")
        ),
        ("grid", 20, 1100, torch.float32),
    ],
)
def test_variants(tier: str, B: int, H: int, dtype: torch.dtype, present: str, options: dict) -> None:
    """With factors of 11 bits, which is enough to tell a wrong variant, and against the steps one by one."""
    given = _inputs(9, B, H, dtype, present)
    options = {"fp32_precision": "tf32", **options}
    true = _results(given, torch.float64, **options)
    allowed = max(2 * _error(_results(given, tier="step", **options), true), _TOLERANCE[dtype])
    assert _error(_results(given, tier=tier, **options), true) < allowed


@pytest.mark.parametrize("activation", ["hard", "hard_sigmoid", "hard_tanh"])
@pytest.mark.parametrize("tier", ["cluster", "grid", "step"])
def test_hard_activations(tier: str, activation: str) -> None:
    """Against a loop in float64 that PyTorch differentiates."""
    given, slope = _inputs(9, 5, 72, torch.float32), 0.2

    def sigmoid(z: Tensor) -> Tensor:
        return torch.sigmoid(z) if activation == "hard_tanh" else (slope * z + 0.5).clamp(0, 1)

    def tanh(z: Tensor) -> Tensor:
        return torch.tanh(z) if activation == "hard_sigmoid" else z.clamp(-1, 1)

    leaves = {name: value.double().requires_grad_() for name, value in given.items()}
    h, c, rows = leaves["h_0"], leaves["c_0"], []
    for x in leaves["input"]:
        z = x @ leaves["weight_ih"].T + h @ leaves["weight_hh"].T + leaves["bias_ih"] + leaves["bias_hh"]
        i, f, g, o = z.chunk(4, 1)
        c = sigmoid(f) * c + sigmoid(i) * tanh(g)
        h = sigmoid(o) * tanh(c)
        rows.append(h)
    wanted = torch.stack(rows)
    weights = torch.randn(wanted.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    true = [wanted.detach(), *torch.autograd.grad((wanted * weights).sum(), list(leaves.values()))]

    leaves = {name: value.requires_grad_() for name, value in given.items()}
    output = lstm(**leaves, activation=activation, slope=slope, tier=tier, fp32_precision="ieee")[0]
    found = [output.detach(), *torch.autograd.grad((output * weights).sum(), list(leaves.values()))]
    assert _error(found, true) < _EXACT


@pytest.mark.parametrize(
    ("dtype", "fp32_precision"), [*((d, "tf32") for d in _DTYPES), (torch.float32, "ieee")], ids=str
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.0e4])
@pytest.mark.parametrize("tier", ["cluster", "grid"])
def test_what_is_not_finite_stays_with_its_entry(
    tier: str, dtype: torch.dtype, fp32_precision: str, value: float
) -> None:
    given = _inputs(6, 12, 256, dtype)
    given["h_0"][3, 7] = value
    given["c_0"][5, 9] = value
    options = {"fp32_precision": fp32_precision, "zoneout_h": 0.5}
    step, found = (_results(given, tier=each, **options)[0] for each in ("step", tier))
    assert torch.equal(step.isnan(), found.isnan())
    assert torch.equal(step.isinf(), found.isinf())
    others = [entry for entry in range(12) if entry not in (3, 5)]
    torch.testing.assert_close(found[:, others], step[:, others], rtol=0, atol=_TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [*_DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("B", "H"),
    [
        (1, 16), (12, 512), (528, 64), (529, 64), (300, 512), (64, 1024), (5, 1100), (64, 1536), (65, 1536), (65, 2048),
        (16, 2049), (8, 4096),
    ],
)  # fmt: skip
@pytest.mark.parametrize("fp32_precision", ["ieee", "tf32"])
def test_the_tier_is_what_lstm_tier_says(dtype: torch.dtype, B: int, H: int, fp32_precision: str) -> None:
    given = _inputs(3, B, H, dtype)
    lstm(**given, fp32_precision=fp32_precision)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        lstm(**given, fp32_precision=fp32_precision)
        torch.cuda.synchronize()
    names = [event.key for event in profiled.key_averages() if "take_in_grid<" in event.key]
    kinds = {int(name.split(",")[1].strip().removeprefix("(int)")) for name in names}  # take_in_grid<type, kind, ...>
    is_alone = any("take_alone<" in event.key for event in profiled.key_averages())
    used = "cluster" if is_alone else ("cluster" if kinds.pop() & 1 else "grid") if names else "step"
    assert used == lstm_tier(H, B, dtype, fp32_precision=fp32_precision)


def test_a_larger_batch_after_a_smaller_one() -> None:
    """What one launch of a kernel may take of the shared memory holds for the others."""
    for B in (64, 32, 64, 8, 64):
        given = _inputs(3, B, 1024, torch.bfloat16)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            lstm(**given)
            torch.cuda.synchronize()
        assert any("take_in_grid<" in event.key for event in profiled.key_averages()), B


_PROJECTED = [
    ("", {}, True), ("lengths", {"keep_gates": 1}, True), ("lengths reset", {"reverse": True, "keep_cells": 1}, True),
    ("peephole", {"zoneout_c": 0.2, "coupled": True, "keep_gates": 1}, True), ("reset", {}, True),
    ("", {"zoneout_h": 0.3}, False), ("h_mask", {}, False), ("norms", {}, False),
]  # fmt: skip


@pytest.mark.parametrize(("present", "options", "at_once"), _PROJECTED)
@pytest.mark.parametrize(("B", "H", "R"), [(5, 72, 40), (12, 256, 256), (20, 512, 128), (33, 1024, 512)])
def test_projections(B: int, H: int, R: int, present: str, options: dict, at_once: bool) -> None:
    given = _inputs(7, B, H, torch.float16, present)
    given["weight_hh"] = given["weight_hh"][:, :R]
    given |= {name: given[name][:, :R] for name in ("h_0", "h_mask") if name in given}
    given["weight_hr"] = torch.randn(R, H, device="cuda").mul(H**-0.5).to(torch.float16)
    true = _results(given, torch.float64, **options)
    allowed = max(2 * _error(_results(given, tier="step", **options), true), _TOLERANCE[torch.float16])
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        found = _results(given, **options)
        torch.cuda.synchronize()
    assert _error(found, true) < allowed
    names = {event.key for event in profiled.key_averages()}
    for kernel in ("take_in_grid<", "sweep_in_grid<"):
        assert any(kernel in name for name in names) == at_once


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize(
    ("present", "options"),
    [("", {}), ("h_mask", {"keep_gates": 1}), *(v for v in _VARIANTS if v[0] not in ("", "h_mask"))],
)
@pytest.mark.parametrize(("B", "H"), [(3, 8), (5, 72), (20, 256), (80, 512)])
def test_layer_normalisation(B: int, H: int, present: str, options: dict, dtype: torch.dtype) -> None:
    rounded = dtype
    if dtype == torch.float32:
        H, rounded = H // 2, torch.float16  # as many bytes; factors of 11 bits
    narrow = _inputs(9, B, H, rounded, f"norms {present}")
    given = {name: value.to(dtype) if value.is_floating_point() else value for name, value in narrow.items()}
    options = {"fp32_precision": "tf32", **options}
    true = _results(given, torch.float64, **options)
    of_steps = _error(_results(narrow, tier="step", **options), true)
    allowed = max(2 * of_steps, _TOLERANCE[dtype])
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        found = _results(given, **options)
        torch.cuda.synchronize()
    assert _error(found, true) < allowed
    for one, other in zip(found, _results(given, **options), strict=True):
        assert torch.equal(one, other)
    names = {event.key for event in profiled.key_averages()}
    assert all(any(kernel in name for name in names) for kernel in ("take_in_grid<", "sweep_in_grid<"))


def test_moments_of_values_far_from_0() -> None:
    """The variance of what weight_hh gives is what is left of large sums."""
    given = _inputs(6, 8, 256, torch.float16, "norms")
    given["weight_hh"] = (given["weight_hh"] * 0.01 + 0.2).to(torch.float16)
    given["h_0"] = (given["h_0"] + 1).to(torch.float16)
    true = _results(given, torch.float64)[0]
    error, of_steps = (_error([_results(given, tier=tier)[0]], [true]) for tier in ("cluster", "step"))
    assert error < max(2 * of_steps, _TOLERANCE[torch.float16])


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_projections_as_the_module_takes_them(dtype: torch.dtype) -> None:
    theirs = torch.nn.LSTM(48, 256, 2, bidirectional=True, proj_size=64, device="cuda", dtype=dtype)
    ours, true = LSTM.from_torch(theirs), copy.deepcopy(theirs).double()
    x = torch.randn(30, 6, 48, device="cuda", dtype=dtype)
    expected = true(x.double())[0]
    error, other = (_error([module(x)[0]], [expected]) for module in (ours, theirs))
    assert error < max(2 * other, _TOLERANCE[dtype])


def test_a_width_that_leaves_a_block_without_units_beside_another_stream() -> None:
    given = _inputs(200, 56, 272, torch.bfloat16)
    expected = lstm(**given).output
    other, x = torch.cuda.Stream(), torch.randn(64, 4096, device="cuda")
    for _ in range(50):
        with torch.cuda.stream(other):
            for _ in range(20):
                x.sin_()
        assert torch.equal(lstm(**given).output, expected)


def test_the_module_follows_the_flag_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = LSTM(64, 64, device="cuda"), torch.randn(20, 4, 64, device="cuda")
    true = LSTM(64, 64, device="cuda", dtype=torch.float64)
    true.load_state_dict(module.state_dict())
    errors = []
    for is_rounded in (True, False):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", is_rounded)
        errors.append(_error([module(x)[0]], [true(x.double())[0]]))
    assert errors[1] < 1e-6 < errors[0] < 2e-3


@pytest.mark.parametrize("tier", ["cluster", "grid"])
def test_capture_and_side_streams(tier: str) -> None:
    given = _inputs(30, 12, 512, torch.bfloat16)
    expected = _results(given, tier=tier)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        on_side = _results(given, tier=tier)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        output = lstm(**given, tier=tier).output
    for _ in range(3):
        output.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(output, expected[0])
    assert all(torch.equal(a, b) for a, b in zip(on_side, expected, strict=True))


def test_two_streams_at_a_time() -> None:
    """Two launches that each need most of the GPU wait for each other; neither may hold a part of it."""
    given = [_inputs(60, 16, 1024, torch.bfloat16), _inputs(60, 16, 2048, torch.bfloat16)]
    expected = [lstm(**one).output for one in given]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(30):
        found = []
        for stream, one in zip(streams, given, strict=True):
            with torch.cuda.stream(stream):
                found.append(lstm(**one).output)
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_compile_and_autocast() -> None:
    module = LSTM(64, 128, 2, bidirectional=True, device="cuda")
    x = torch.randn(10, 12, 64, device="cuda")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x)[0], module(x)[0], rtol=0, atol=0)
    with torch.autocast("cuda", torch.bfloat16):
        narrow = module(x)[0]
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), module(x)[0], rtol=0, atol=2e-2)


@pytest.mark.two_gpus
def test_the_second_device() -> None:
    given = _inputs(9, 12, 512, torch.float16)
    there = {name: value.to("cuda:1") for name, value in given.items()}
    assert torch.equal(lstm(**there, tier="grid").output.cpu(), lstm(**given, tier="grid").output.cpu())


_LOAD = "import torch; a = torch.randn(4096, 4096, device='cuda')\nwhile True: print((a @ a).sum().item(), flush=True)"


@pytest.mark.slow
def test_many_launches_beside_another_process() -> None:
    given = _inputs(4, 12, 512, torch.bfloat16)
    wide = _inputs(4, 16, 2048, torch.bfloat16)
    expected = [lstm(**one).output for one in (given, wide)]
    load = subprocess.Popen([sys.executable, "-c", _LOAD], stdout=subprocess.PIPE, text=True)
    try:
        assert load.stdout is not None
        assert load.stdout.readline()  # it runs
        done = threading.Thread(target=load.stdout.read)
        done.start()
        for number in range(10_000):
            one = (given, wide)[number % 2]
            output = lstm(**one).output
            if number % 100 < 2:
                assert torch.equal(output, expected[number % 2])
        torch.cuda.synchronize()
        assert load.poll() is None
    finally:
        load.kill()
        load.wait()
        done.join()
