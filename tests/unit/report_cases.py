"""Records that the report's tests show, and the page read back."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

from opwright.records import (
    BenchRecord,
    BuildRecord,
    BuildStep,
    Check,
    Comparison,
    Failure,
    KernelUse,
    Machine,
    Measurement,
    Timing,
    VerifyRecord,
)
from opwright.report import write_report

COPY_GB_S, COMPUTE_GFLOPS = 40.0, 125.0
SIZES = (1024, 65536, 2**24)
BYTES_EACH = {("forward", "f32"): 8, ("forward", "bf16"): 4, ("backward", "f32"): 12, ("backward", "bf16"): 6}


def make_machine(**changes) -> Machine:
    facts = {"cpu": "EPYC 9B14", "cores": 2, "device": "", "system": "Linux 6.8", "python": "3.11.7"}
    facts |= {"torch": "2.13.0+cpu", "compiler": "g++ 12.2.0", "load": 0.5}
    return Machine(**(facts | changes))


MEASURED = make_machine(copy_gb_s=COPY_GB_S, compute_gflops=COMPUTE_GFLOPS)


def make_timing(candidate: str, median_us: float, noise: float = 0.012, interval: float | None = 0.021) -> Timing:
    return Timing(candidate, median_us, 0.9 * median_us, noise, [median_us] * 3, interval=interval)


def compare(measurement: Measurement, visible: float = 0.03) -> Measurement:
    """Compares Opwright with the other candidates of a measurement; ratios beside those of the medians, as in a run."""
    ours = measurement.timings[0].median_us
    measurement.comparisons = [
        Comparison(t.candidate, 1.01 * t.median_us / ours, visible, 12) for t in measurement.timings[1:]
    ]
    return measurement


def make_measurement(direction: str, dtype: str, elements: int, *, flop_each=10, copy=COPY_GB_S, **changes):
    moved = BYTES_EACH[direction, dtype] * elements
    ours = 3.0 + moved / 30e3  # 3 us of host, 30 GB/s
    factor = 2.0 + math.log2(elements) / 8 + (0.37 if dtype == "bf16" else 0.0)
    facts = {
        "direction": direction,
        "case": f"{dtype}[{elements // 1024}, 1024] approximate='tanh'",
        "axes": {"elements": elements},
        "dtype": dtype,
        "bytes_moved": moved,
        "flop": flop_each * elements if flop_each else None,
        "timings": [
            make_timing("opwright", ours),
            make_timing("eager", ours * factor),
            make_timing("compile", ours * (factor - 0.5), noise=0.34),
            make_timing("liger", ours * 1.25),
        ],
        "roof_share": moved / ours / 1e3 / copy if copy else None,
        "in_cache": moved < 32e6,
    }
    measurement = Measurement(**(facts | changes))
    return measurement if "comparisons" in changes else compare(measurement)


def make_bench(name: str = "ns::bias_gelu", machine: Machine = MEASURED, **changes) -> BenchRecord:
    copy, flop_each = machine.copy_gb_s, changes.pop("flop_each", 10)
    measurements = [
        make_measurement(direction, dtype, elements, flop_each=flop_each, copy=copy)
        for direction, dtype in BYTES_EACH
        for elements in SIZES
    ]
    facts = {
        "name": name,
        "measurements": measurements,
        "host_us": {"opwright": 3.1, "eager": 6.28},
        "verified": True,
        "threads": 2,
        "machine": machine,
        "created": 1_795_000_000.0,
        "seconds": 81.0,
    }
    return BenchRecord(**(facts | changes))


def make_old_bench(name: str = "ns::bias_gelu", **changes) -> BenchRecord:
    """As version 1 wrote it: no intervals, no comparisons."""
    bench = make_bench(name, version=1, **changes)
    for m in bench.measurements:
        m.comparisons = []
        for t in m.timings:
            t.interval = None
    return bench


def make_verify(name: str = "ns::bias_gelu", failures=(), **changes) -> VerifyRecord:
    outcome, worst = ("failed", 391.4) if failures else ("passed", 0.4127)
    checks = [
        Check("numerics", outcome, 300, worst_ulp=1.6234, worst_ratio=worst, seconds=12.06),
        Check("gradcheck", "passed", 112, worst_ratio=0.08, seconds=0.4),
        Check("second device", "skipped", reason="only 1 <device> & no more"),
    ]
    facts = {"checks": checks, "failures": list(failures), "backends": ["cpu"], "machine": make_machine()}
    return VerifyRecord(**({"name": name, "created": 1_794_990_000.0, "seconds": 66.0} | facts | changes))


FAILURES = [
    Failure("numerics", "f32[7, 13] sliced", "error 3.1e-2 at [6, 12]\n  of 7.9e-5", "last column", "verify x"),
    Failure("gradcheck", "f64[3]", "grad of `w` is <zero> & more"),
]


class Page(HTMLParser):
    """A page, parsed: whether its elements are balanced, its references, and its tables as text."""

    VOID = frozenset({"meta", "link", "br", "hr", "img", "input"})

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.mistakes: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.counts: dict[str, int] = {}
        self.rows: list[list[str]] = []
        self.heading = ""
        self.feed(self.source)
        self.close()
        self.mistakes += [f"<{tag}> is never closed" for tag in self.open]

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        names = [name for name, _ in attrs]
        if len(set(names)) != len(names):
            self.mistakes.append(f"<{tag}> repeats an attribute")
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
                self.references.append(value)
            elif name == "id":
                self.ids.append(value)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.mistakes.append(f"</{tag}> at {self.getpos()} closes something else")

    def handle_data(self, data):
        if "tr" in self.open and ("td" in self.open or "th" in self.open):
            self.rows[-1][-1] += data
        elif self.open and self.open[-1] == "h1":
            self.heading += data

    def cells(self, *starts: str) -> list[str]:
        """Returns the cells of the only row that begins with a text, stripped."""
        found = [[" ".join(cell.split()) for cell in row] for row in self.rows]
        found = [row for row in found if row[: len(starts)] == list(starts)]
        assert len(found) == 1, found
        return found[0]


def show(tmp_path: Path, *records) -> Page:
    return Page(write_report(records, tmp_path / "deep" / "report.html"))


def three(value: float) -> str:
    """Three significant digits by another route than the report's: decimal shifting."""
    exponent = math.floor(math.log10(abs(value)))
    return f"{round(value, 2 - exponent):.{max(0, 2 - exponent)}f}"


GPU = make_machine(
    device="H200",
    driver="580.1 (CUDA 13.0)",
    gpu_memory_bytes=150 * 10**9,
    gpu_l2_bytes=60 * 2**20,
    multiprocessors=132,
    copy_gb_s=4250.0,
    compute_gflops=51000.0,
)


def make_gpu_bench(name="ns::bias_gelu", **changes) -> BenchRecord:
    bench = make_bench(name, GPU, device="cuda", **changes)
    for m in bench.measurements:
        m.copy_us = 0.75 * m.timings[0].median_us
        for t in m.timings:
            t.warm_us, t.host_us = 0.5 * t.median_us, 4.25
    return bench


def every_record():
    bare = make_machine(cpu="Old & slow")
    return [
        make_verify(),
        make_bench(),
        make_verify("ns::lstm", FAILURES),
        make_bench("ns::d_sigmoid", flop_each=None),
        make_bench("ns::bare", bare, flop_each=None),
        make_bench("ns::flop_only", bare, host_us={}),
        make_bench("ns::half", make_machine(compute_gflops=90.0)),
        make_bench("ns::empty", measurements=[]),
    ]


def make_build(**changes) -> BuildRecord:
    steps = [BuildStep("kernel0_cpu", 0.0, 0.5), BuildStep("glue", 0.1, 0.04), BuildStep("link", 0.5, 0.3)]
    kernels = [
        KernelUse("f_kernel<float, 4>", "sm_80", 64, 0, 0, 1024),
        KernelUse("f_kernel<float, 4>", "sm_90", 128, 48, 16, 1024),
    ]
    facts = {"name": "ns::bias_gelu", "operators": ["ns::bias_gelu", "ns::bias_gelu_backward"]}
    facts |= {"compiler": "g++ 12", "library_bytes": 1_500_000, "steps": steps, "kernels": kernels}
    facts |= {"machine": MEASURED, "built": 1_795_000_000.0, "created": 1_795_000_001.0, "seconds": 0.8}
    return BuildRecord(**(facts | changes))


def find_svg(page: Page, ending: str) -> str:
    found = re.findall(r"<svg.*?</svg>", page.source, re.DOTALL)
    (svg,) = [svg for svg in found if re.search(r"<title [^>]*>([^<]*)", svg)[1].endswith(ending)]
    return svg


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)
