"""bias_gelu on a GPU against eager, torch.compile and the bias inside the GEMM.

    python benchmarks/bias_gelu_cuda.py [--seconds 230]

Times are device times with a cold L2 (the median of single calls, candidates in turn), as a share of what a
large copy_ reaches in the same run ("copy") and of a copy_ of as many bytes in the same rounds ("same"); beside
them device time with a warm L2 and the host's time. What is timed otherwise says so. The result is written section by
section, with a record for `opwright report` beside it. A section that fails is named and the others go on; it ends by
itself.
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from opwright_ops.bias_gelu import bias_gelu
from summary import RAW, Figure, beside, figure_of, number, update, write_raw

import opwright
from opwright.bench.roofline import GpuBench
from opwright.bench.timers import Gpu, time_on_gpu
from opwright.records import BenchRecord, Measurement, Timing, VerifyRecord, builtins_of, save

DEVICE = torch.device("cuda")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(8192, 4096), (16384, 16384)]
WIDTHS = [4095, 1000, 77]
AT_LEAST_BYTES = 64 << 20
SECONDS = 0.12  # for each candidate on each input
TANH = {"approximate": "tanh"}  # unless a section says otherwise
gelu_bias_backward = bias_gelu.operator.backward_operator.function


class OutOfTime(Exception):
    """Ends the section that is running, and all that follow."""


class Run:
    """What has been measured so far, and until when to measure."""

    def __init__(self, seconds: float) -> None:
        self.started = time.monotonic()
        self.seconds = seconds
        self.sections: dict[str, Any] = {}
        self.measurements: list[Measurement] = []
        self.records: list[BenchRecord] = []
        self.verified: VerifyRecord | None = None

    @property
    def result(self) -> dict[str, Any]:
        machine = builtins_of(self.records[-1].machine) if self.records else None
        return {"machine": machine, "sections": self.sections}

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def check_time(self) -> None:
        if self.elapsed > self.seconds:
            raise OutOfTime(f"{self.seconds:.0f} s are over")

    def do(self, name: str, section: Callable[[Run], Any]) -> None:
        """Runs a section, and writes down what there is."""
        print(f"\n{name}  [{self.elapsed:.0f} s]", flush=True)
        before = len(self.measurements)
        try:
            self.check_time()
            found = section(self)
        except OutOfTime as error:
            found = {"left out": str(error)}
            print(f"  left out: {error}", flush=True)
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {error}"}
            traceback.print_exc(limit=3)
        measured = [builtins_of(m) for m in self.measurements[before:]]
        for each in (t for m in measured for t in m["timings"]):
            del each["samples_us"]
        self.sections[name] = {**(found or {}), **({"measurements": measured} if measured else {})}
        self.save()

    def save(self) -> None:
        write_raw("bias_gelu_cuda", self.result)
        if self.records:
            record = replace(self.records[0], measurements=self.measurements)
            record.seconds = self.elapsed
            save(record, RAW / "bias_gelu_cuda_record.json")

    def bench(self, rivals: Any = ("eager", "compile"), note: str = "", **options: Any) -> None:
        """Measures inputs and shows them, with a note on what its shapes do not tell."""
        sizes = len(options.get("samples", ())) or math.prod(map(len, options["sweep"].values())) * len(
            options["dtypes"]
        )
        record = opwright.bench(
            bias_gelu,
            rivals,
            device=DEVICE,
            seconds=SECONDS * 2 * sizes * (1 + len(rivals)),  # forward and backward
            verified=self.verified,
            **options,
        )
        self.records.append(record)
        for m in record.measurements:
            m.case += note and f" {note}"
            self.measurements.append(m)
            show(m)
        self.check_time()


def show(m: Measurement) -> None:
    ours = m.timings[0]
    rivals = "  ".join(f"{t.candidate} {m.speedup_over(t.candidate):5.2f}x" for t in m.timings[1:])
    print(
        f"  {m.direction:<8} {m.case:<56} {ours.median_us:8.1f} us +-{100 * ours.noise:2.0f} %"
        f"  copy {100 * m.roof_share:4.0f} %  same {100 * m.copy_share:4.0f} %"
        f"  warm {ours.warm_us:8.1f}  host {ours.host_us:5.1f}  {rivals}",
        flush=True,
    )


def show_timings(title: str, timings: list[Timing]) -> dict[str, Any]:
    """Prints candidates beside each other; the first is the one to compare with."""
    first = timings[0].median_us
    print(f"  {title}", flush=True)
    for t in timings:
        print(
            f"    {t.candidate:<32} {t.median_us:9.1f} us +-{100 * t.noise:2.0f} %  warm {t.warm_us:9.1f}"
            f"  host {t.host_us:6.1f}  {t.median_us / first:5.2f}",
            flush=True,
        )
    return {
        t.candidate: {"median_us": t.median_us, "noise": t.noise, "warm_us": t.warm_us, "host_us": t.host_us}
        for t in timings
    }


# --- sections ------------------------------------------------------------------------------------------------


def check(run: Run) -> dict[str, Any]:
    """It is right: nothing else is measured before that."""
    run.verified = opwright.verify(bias_gelu, devices=[DEVICE])
    for failure in run.verified.failures:
        print(f"  FAILED {failure.title} {failure.case}: {failure.message}", flush=True)
    print(f"  {'right' if run.verified.passed else 'WRONG'} ({', '.join(run.verified.backends)})", flush=True)
    return {"passed": run.verified.passed, "backends": run.verified.backends}


def host_time(run: Run) -> dict[str, Any]:
    """Host time of a call on a small tensor without a gradient; the work is not waited for."""
    x, b = torch.randn(4, 32, device=DEVICE), torch.randn(32, device=DEVICE)
    place = GpuBench(DEVICE)
    with torch.no_grad():
        found = place.host_us(
            {
                "torch.add": lambda: torch.add(x, b),
                "bias_gelu": lambda: bias_gelu(x, b, approximate="tanh"),
                "F.gelu(x + b)": lambda: F.gelu(x + b, approximate="tanh"),
                "torch.ops": lambda: torch.ops.opwright_ops.bias_gelu(x, b, approximate="tanh"),
            }
        )
    for name, microseconds in found.items():
        print(f"  {name:<16} {microseconds:6.2f} us  {microseconds / found['torch.add']:5.2f}x torch.add")
    return found


def do_bench_512(run: Run) -> dict[str, Any]:
    """(512, 4096) float32 as triton.testing.do_bench sees it: launch included, L2 cold, median."""
    from triton.testing import do_bench

    x = torch.randn(512, 4096, device=DEVICE, requires_grad=True)
    b = torch.randn(4096, device=DEVICE, requires_grad=True)
    dy = torch.randn_like(x)

    def eager(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.gelu(x + b, approximate="tanh")

    compiled = torch.compile(eager, dynamic=False)
    functions = {"bias_gelu": partial(bias_gelu, approximate="tanh"), "eager": eager, "compile": compiled}
    found: dict[str, float] = {}
    with torch.no_grad():
        for name, function in functions.items():
            found[f"forward {name}"] = do_bench(lambda f=function: f(x, b), return_mode="median") * 1e3
    for name, function in functions.items():
        y = function(x, b)
        found[f"backward {name}"] = (
            do_bench(lambda y=y: torch.autograd.grad(y, (x, b), dy, retain_graph=True), return_mode="median") * 1e3
        )
    xd, bd = x.detach(), b.detach()

    def eager_backward() -> object:
        grad = torch.ops.aten.gelu_backward(dy, xd, approximate="tanh")
        return grad, grad.sum(0)

    found["backward bias_gelu, no autograd"] = (
        do_bench(lambda: gelu_bias_backward(dy, xd, bd, approximate="tanh"), return_mode="median") * 1e3
    )
    found["backward eager, no autograd"] = do_bench(eager_backward, return_mode="median") * 1e3
    for name, microseconds in found.items():
        print(f"  {name:<34} {microseconds:7.2f} us", flush=True)
    return found


def device_time_512(run: Run) -> None:
    """(512, 4096): device time, without the launch."""
    run.bench(sweep={"batch": [(512,)], "n": [4096]}, options=TANH, dtypes=DTYPES)


def large(approximate: str, shape: tuple[int, int]) -> Callable[[Run], None]:
    def section(run: Run) -> None:
        sweep = {"batch": [shape[:1]], "n": [shape[1]]}
        run.bench(sweep=sweep, options={"approximate": approximate}, dtypes=DTYPES)

    return section


def odd_widths(run: Run) -> None:
    """Widths that no vector divides, at 64 MiB and above."""
    for dtype in DTYPES:
        for n in WIDTHS:
            rows = -(-AT_LEAST_BYTES // (n * dtype.itemsize))
            run.bench(rivals=["eager"], sweep={"batch": [(rows,)], "n": [n]}, options=TANH, dtypes=[dtype])


def offset_slices(run: Run) -> None:
    """x[1:] of a flat tensor, which is misaligned, and x[:, 1:], whose rows are as well; 64 MiB and above."""
    rows, n = 8192, 4096
    for dtype in DTYPES:
        bias = torch.randn(n, device=DEVICE, dtype=dtype)
        flat = torch.randn(rows * n + 1, device=DEVICE, dtype=dtype)[1:].view(rows, n)
        columns = torch.randn(rows, n + 1, device=DEVICE, dtype=dtype)[:, 1:]
        for kind, x in (("x.flatten()[1:]", flat), ("x[:, 1:]", columns)):
            run.bench(rivals=["eager"], note=kind, samples=[((x, bias), TANH)])


def transposed(run: Run) -> None:
    """x.t() of 64 MiB and above, whose columns are adjacent in memory."""
    for dtype in DTYPES:
        x, bias = torch.randn(4096, 8192, device=DEVICE, dtype=dtype).t(), torch.randn(4096, device=DEVICE, dtype=dtype)
        run.bench(rivals=["eager"], note="x.t()", samples=[((x, bias), TANH)])


def linear(run: Run) -> dict[str, Any]:
    """F.linear(x, w, b) and F.gelu, the bias inside the GEMM, against F.linear(x, w) and bias_gelu."""
    found = {}
    gpu = Gpu(DEVICE)
    for tokens, width, hidden, dtype in (
        (8192, 4096, 16384, torch.bfloat16),
        (2048, 1024, 4096, torch.bfloat16),
        (2048, 1024, 4096, torch.float32),
    ):
        run.check_time()
        x = torch.randn(tokens, width, device=DEVICE, dtype=dtype)
        w = torch.randn(hidden, width, device=DEVICE, dtype=dtype) / width**0.5
        b = torch.randn(hidden, device=DEVICE, dtype=dtype)
        title = f"({tokens}, {width}) x ({hidden}, {width}) {str(dtype).removeprefix('torch.')}"

        def inside(x, w, b):
            return F.gelu(F.linear(x, w, b), approximate="tanh")

        def behind(x, w, b):
            return bias_gelu(F.linear(x, w), b, approximate="tanh")

        functions = {
            "linear(x, w) + bias_gelu": behind,
            "linear(x, w, b) + F.gelu": inside,
            "the same, compiled": torch.compile(inside, dynamic=False),
        }
        with torch.no_grad():
            z = F.linear(x, w, b)
            parts = {
                "bias_gelu alone": lambda z=z, b=b: bias_gelu(z, b, approximate="tanh"),
                "F.gelu alone": lambda z=z: F.gelu(z, approximate="tanh"),
            }
            calls = {name: [lambda f=f, x=x, w=w, b=b: f(x, w, b)] for name, f in functions.items()}
            calls |= {name: [part] for name, part in parts.items()}
            timings = time_on_gpu(calls, len(calls) * SECONDS, gpu).timings
        found[f"{title} forward"] = show_timings(f"{title} forward", timings)
        leaves = [t.detach().requires_grad_() for t in (x, w, b)]
        dy = torch.randn(tokens, hidden, device=DEVICE, dtype=dtype)
        backwards = {}
        for name, function in functions.items():
            y = function(*leaves)
            backwards[name] = [lambda y=y, leaves=leaves, dy=dy: torch.autograd.grad(y, leaves, dy, retain_graph=True)]
        zd = z.detach()

        def gelu_backward_and_sum(dy=dy, zd=zd) -> object:
            grad = torch.ops.aten.gelu_backward(dy, zd, approximate="tanh")
            return grad, grad.sum(0)

        backwards["bias_gelu's backward alone"] = [
            lambda dy=dy, zd=zd, b=b: gelu_bias_backward(dy, zd, b, approximate="tanh")
        ]
        backwards["gelu_backward + sum alone"] = [gelu_backward_and_sum]
        timings = time_on_gpu(backwards, len(backwards) * SECONDS, gpu).timings
        found[f"{title} backward"] = show_timings(f"{title} backward", timings)
    return found


def figures(result: dict[str, Any]) -> list[Figure]:
    sections = {name: section for name, section in result["sections"].items() if "failed" not in section}
    found: list[Figure] = []
    for name, section in sections.items():
        if name in ("odd widths", "offset slices", "transposed"):
            found += shares(section.get("measurements", []))
        else:
            # float16 takes as long as bfloat16.
            found += [figure_of(m) for m in section.get("measurements", []) if not m["case"].startswith("f16")]
    host = dict(sections.get("host time of a small call", {}))
    if "bias_gelu" in host:
        ours = host.pop("bias_gelu")
        found.append(Figure("host time of a small call", ours, "us", beside=beside(ours, host)))
    seen = sections.get("(512, 4096) float32 by do_bench", {})
    for call in ("forward {}", "backward {}", "backward {}, no autograd"):
        times = {
            name: seen[call.format(name)] for name in ("bias_gelu", "eager", "compile") if call.format(name) in seen
        }
        if times:
            ours = times.pop("bias_gelu")
            name = f"(512, 4096) float32 by do_bench, {call.format('').replace(' ,', ',').strip()}"
            found.append(Figure(name, ours, "us", beside=beside(ours, times)))
    for case, timings in sections.get("bias inside the GEMM", {}).items():
        if isinstance(timings, dict):
            times = {name: timing["median_us"] for name, timing in timings.items()}
            ours = times.pop("linear(x, w) + bias_gelu")
            found.append(Figure(f"linear, bias_gelu {case}", ours, "us", beside=beside(ours, times)))
    return found


def shares(measurements: list[dict[str, Any]]) -> list[Figure]:
    """Groups inputs that differ in dtype and number of rows: the share of the copy bandwidth that each reaches."""
    groups: dict[str, dict[str, float]] = {}
    for m in measurements:
        note = m["case"].partition("' ")[2]
        what = f"{note} of (8192, 4096)" if note else f"64 MiB of width {m['axes']['n']}"
        found = groups.setdefault(f"{what}, {m['direction']}, share of copy_'s speed, f32", {})
        found[m["dtype"]] = m["copy_us"] / m["timings"][0]["median_us"]
    return [
        Figure(name, found.pop("f32"), "ratio", beside="; ".join(f"{dtype} {number(v)}" for dtype, v in found.items()))
        for name, found in groups.items()
    ]


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here: this measures CUDA kernels")
    seconds = float(sys.argv[sys.argv.index("--seconds") + 1]) if "--seconds" in sys.argv else 230.0
    run = Run(seconds)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    run.do("verify", check)
    if run.verified is None or not run.verified.passed:
        sys.exit("it is not right, so it is not measured")
    run.do("host time of a small call", host_time)
    run.do("(512, 4096) float32 by do_bench", do_bench_512)
    for approximate in ("tanh", "none"):
        for shape in SHAPES if approximate == "tanh" else SHAPES[:1]:
            run.do(f"{shape} {approximate}", large(approximate, shape))
    run.do("odd widths", odd_widths)
    run.do("offset slices", offset_slices)
    run.do("transposed", transposed)
    run.do("bias inside the GEMM", linear)
    run.do("(512, 4096) device time", device_time_512)
    if run.records:
        update(__file__, figures(run.result), run.result["machine"])
    print(f"\nwrote {RAW / 'bias_gelu_cuda.json'} in {run.elapsed:.0f} s")


if __name__ == "__main__":
    main()
