"""The report of 20 operators: its size, how long it takes to write, and when a browser first paints it.

    python benchmarks/report.py [--keep FOLDER]

The records are made up, in the sizes of what the commands write by default: 36 checks, those of numerics with 280
cases, 12 inputs on which three candidates have 200 samples each, five benchmarks of history, a call, a build. Paint is Chromium's own first contentful paint, in a
fresh headless process each time, from a file; the median of five.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from summary import Figure, update, write_raw

from opwright.records import (
    BenchRecord,
    BuildRecord,
    BuildStep,
    CallPart,
    CallRecord,
    CaseError,
    Check,
    Comparison,
    Conditions,
    Failure,
    KernelUse,
    Limits,
    Machine,
    Measurement,
    Record,
    Timing,
    VerifyRecord,
)
from opwright.report import write_report

NAMES = """bias_gelu softmax layer_norm rms_norm lstm lstm_step matmul_bias_gelu d_sigmoid rope swiglu cross_entropy
gather_rows scatter_add cumsum top_k dropout_add group_norm attention_bias int8_linear adam_step""".split()
CHECKS = """outputs written,numerics,determinism,independence,refusals,gradients,second gradients,gradient numerics,vmap,autocast,\
copy,opcheck,compile,export,side stream,other device,graph,threads""".split(",")
LABELS = """base,empty batch,empty n,transposed,sliced,offset,expanded,values around 0.001,values around 1,values around 10,\
values around 1e+03,special values,large,large; sliced""".split(",")
BYTES_OF = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2}
CREATED = 1_795_000_000.0


def make_records(count: int = 20, history: int = 5) -> list[Record]:
    """Returns the records of so many operators."""
    chance = random.Random(1)
    machine = Machine("EPYC 9B14", 2, "", "Linux 6.8", "3.11.7", "2.13.0+cpu", "g++ 12.2.0", 0.5, 40.0, 125.0)
    records: list[Record] = []
    for i, name in enumerate(f"opwright_ops::{name}" for name in NAMES[:count]):
        records.append(_verify(name, machine, chance, fails=i == 7))
        records += [_bench(name, machine, chance, age) for age in range(history - 1, -1, -1)]
        records += [_call(name, machine, chance), _build(name, machine, chance)]
    return records


def _verify(name: str, machine: Machine, chance: random.Random, fails: bool) -> VerifyRecord:
    checks = []
    for prefix in ("", "backward: "):
        for check in CHECKS:
            if check in ("side stream", "other device", "graph"):
                checks.append(Check(prefix + check, "skipped", reason="only on a GPU", device="cpu"))
                continue
            errors = []
            if "numerics" in check:
                errors = [
                    CaseError(
                        f"{dtype}[{7 + k}, 13] f32[13] ({label})", chance.uniform(0.3, 3), chance.betavariate(2, 4)
                    )
                    for dtype in BYTES_OF
                    for label in LABELS
                    for k in range(5)
                ]
            worst = max((e.ratio for e in errors), default=None)
            checks.append(
                Check(prefix + check, "passed", len(errors) or 40, worst_ulp=max((e.ulp for e in errors), default=None),
                      worst_ratio=worst, seconds=chance.uniform(0.1, 9), device="cpu", errors=errors)
            )  # fmt: skip
    failures = []
    if fails:
        checks[1].outcome, checks[1].worst_ulp, checks[1].worst_ratio = "failed", 15_300_000.0, 391.4
        checks[1].errors[12] = CaseError("f32[9, 13] f32[13] (empty n)", 15_300_000.0, 391.4)
        failures = [
            Failure(
                "numerics",
                "f32[2, 3, 13] f32[13] (base)",
                "`output`: 18 of 78 elements are wrong; worst at [1, 2, 12]: got 0, expected -0.452, off by 1.5e+07 ulp where 4.1 are allowed",
                "only the last 3 of 13 along axis 2",
                f"opwright verify op.py::{name.split('::')[1]} --check 'numerics' --device cpu",
                "cpu",
            )
        ]
    return VerifyRecord(name, checks, failures, ["cpu"], machine, CREATED, 66.0)


def _bench(name: str, machine: Machine, chance: random.Random, age: int) -> BenchRecord:
    measurements = []
    for direction in ("forward", "backward"):
        for dtype, size in (("f32", 4), ("bf16", 2)):
            for elements in (2**10, 2**16, 2**24):
                moved = (2 if direction == "forward" else 3) * size * elements
                ours = (3.0 + moved / 28e3) * (1 + 0.08 * age) * chance.uniform(0.9, 1.1)
                timings = [
                    _timing(candidate, ours * factor * chance.uniform(0.9, 1.1), chance)
                    for candidate, factor in (("opwright", 1), ("eager", 2.9), ("compile", 1.3))
                ]
                compared = [Comparison(t.candidate, t.median_us / timings[0].median_us, 0.02, 12) for t in timings[1:]]
                share = moved / timings[0].median_us / 1e3 / 40
                measurements.append(
                    Measurement(direction, f"{dtype}[{elements // 1024}, 1024] {dtype}[1024] approximate='tanh'",
                                {"elements": elements}, dtype, moved, 12 * elements, timings, share, moved < 32e6,
                                comparisons=compared)
                )  # fmt: skip
    conditions = Conditions("own", [0, 1], "keeps", 0.5, 1.6, 2700.0, 2700.0, governor="performance")
    limits = Limits(40.0, 38.0, 140.0, {"f32": 125.0}, 1.1, None, 2, CREATED)
    return BenchRecord(name, measurements, {"opwright": 3.1, "eager": 6.3}, True, 2, machine, CREATED - age * 86400,
                       81.0, limits=limits, conditions=conditions, commit=f"{chance.getrandbits(160):040x}")  # fmt: skip


def _timing(candidate: str, median_us: float, chance: random.Random) -> Timing:
    samples = sorted(median_us * chance.lognormvariate(0, 0.03) for _ in range(200))
    middle = statistics.median(samples)
    return Timing(candidate, middle, samples[0], (samples[150] - samples[50]) / 2 / middle, samples, interval=0.02)


def _call(name: str, machine: Machine, chance: random.Random) -> CallRecord:
    parts = {"python": 0.62, "dispatcher": 0.9, "checks": 0.11, "allocation": 0.48, "views": 0.02, "kernel": 0.35}
    found = [
        CallPart(part, us * chance.uniform(0.8, 1.2), 0.03, "operator - kernel's entry") for part, us in parts.items()
    ]
    total = sum(part.us for part in found)
    return CallRecord(name, "f32[1, 1] f32[1] approximate='tanh'", found, total, {"torch.add": 1.1, "empty operator": 1.9},
                      None, 20_000, machine, CREATED, 4.0)  # fmt: skip


def _build(name: str, machine: Machine, chance: random.Random) -> BuildRecord:
    steps = [BuildStep("kernel0_cpu", 0.0, 0.52), BuildStep("glue", 0.0, 0.04), BuildStep("kernel1_cuda_32bit", 0.04, 2.1),
             BuildStep("kernel1_cuda_16bit", 0.52, 1.9), BuildStep("link", 2.43, 0.05)]  # fmt: skip
    kernels = [
        KernelUse(f"{name.split('::')[1]}_{way}_kernel<{type_}>", f"sm_{arch}", chance.randrange(20, 200),
                  chance.choice([0, 0, 0, 48]), 0, chance.choice([0, 1024]))
        for arch in (80, 90)
        for way in ("forward", "backward")
        for type_ in ("float", "double", "half")
    ]  # fmt: skip
    return BuildRecord(name, [name, f"{name}_backward"], "g++ 12.2.0; nvcc release 13.0", 1_430_000, steps, kernels, machine,
                       CREATED, CREATED, 2.5)  # fmt: skip


# --- a browser --------------------------------------------------------------------------------------------


class Browser:
    """A headless Chromium, driven through a pipe (no port, no other program)."""

    def __init__(self) -> None:
        path = next(p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n)))
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        # The browser reads commands from descriptor 3 and writes answers to 4; bash puts the pipes there (sh knows no descriptor above 9).
        flags = f"""--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
        --disable-component-update --disable-sync --remote-debugging-pipe --user-data-dir={self._profile.name}"""
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "bash", path, *flags.split(), "about:blank"],
            pass_fds=[to_read, to_write],
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number, self.events = b"", 0, []
        self._session = ""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask("Page.enable")

    def ask(self, method: str, **parameters) -> dict:
        """Sends a command and returns its result; events that come in between are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, wanted) -> dict:
        """Returns the first event that is wanted."""
        while True:
            for event in self.events:
                if wanted(event):
                    return event
            self.events.append(self._read())

    def _read(self) -> dict:
        while b"\0" not in self._buffer:
            found = os.read(self._from, 1 << 20)
            if not found:
                raise RuntimeError("the browser has ended")
            self._buffer += found
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def close(self) -> None:
        """Ends the browser."""
        try:
            self._session = ""
            self.ask("Browser.close")
        except (OSError, RuntimeError):
            pass
        self._process.wait(timeout=30)
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()


def first_paint_ms(page: Path) -> float:
    """Returns the time from the start of the navigation to Chromium's first contentful paint."""
    browser = Browser()
    try:
        browser.ask("Page.setLifecycleEventsEnabled", enabled=True)
        browser.ask("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
        browser.events.clear()
        loader = browser.ask("Page.navigate", url=page.resolve().as_uri())["loaderId"]

        def named(name: str) -> float:
            event = browser.wait_for(
                lambda e: (
                    e.get("method") == "Page.lifecycleEvent"
                    and e["params"]["loaderId"] == loader
                    and e["params"]["name"] == name
                )
            )
            return event["params"]["timestamp"]

        return 1e3 * (named("firstContentfulPaint") - named("init"))
    finally:
        browser.close()


def figures(result: dict[str, Any]) -> list[Figure]:
    paints = result["first_paint_ms_all"]
    name = f"page of {result['operators']} operators"
    return [
        Figure(f"{name}: size", result["page_bytes"], "bytes"),
        Figure(f"{name}: pictures", result["pictures"], "pictures"),
        Figure(f"{name}: records read", result["records"], "records"),
        Figure(f"{name}: written in", result["write_seconds"], "s"),
        Figure(f"{name}: first paint", result["first_paint_ms"], "ms", min(paints), max(paints)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="a folder to leave the page in")
    folder = parser.parse_args().keep or Path(tempfile.mkdtemp())
    records = make_records()
    started = time.perf_counter()
    page = write_report(records, folder / "report.html")
    seconds = time.perf_counter() - started
    paints = [first_paint_ms(page) for _ in range(5)]
    result = {
        "operators": len({record.name for record in records}),
        "records": len(records),
        "page_bytes": page.stat().st_size,
        "write_seconds": round(seconds, 2),
        "first_paint_ms": round(statistics.median(paints), 1),
        "first_paint_ms_all": [round(paint, 1) for paint in paints],
        "pictures": page.read_text().count("<svg"),
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
        },
    }
    print(json.dumps(result, indent=2))
    write_raw("report", result)
    update(__file__, figures(result), result["machine"])
    if result["page_bytes"] > 2e6 or result["first_paint_ms"] > 1000:
        sys.exit("the bars are 2 MB and 1,000 ms")


def _cpu() -> str:
    with open("/proc/cpuinfo") as f:
        return next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
