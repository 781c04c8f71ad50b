"""Launches that go wrong, and what is made of their errors, for the tests of faults."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import runtime
import stub
import synthetic_packs

KERNELS = synthetic_packs.KERNELS / "fault_kernels.py"
PACKED = synthetic_packs.KERNELS / "pack_kernels.py"
CAUSES = re.findall(r"^  k(\w+),", (runtime.INCLUDE / "opwright/triton/error.h").read_text(), re.MULTILINE)
ERRORS = [re.sub(r"(?<!^)(?=[A-Z])", " ", cause).lower() for cause in CAUSES]
TILE = "tensordesc<fp16[64, 64]>"
OUT = {"tensor": "fp32", "address": 0x1000}


def launch(function: str, *args: Any, file: Path = KERNELS, **more: Any) -> dict[str, Any]:
    return {"file": str(file), "function": function, "grid": [1], "args": list(args), **more}


def number(value: int) -> dict[str, int]:
    return {"int": value}


def constant(text: str) -> dict[str, str]:
    return {"constexpr": text}


def descriptor(**more: Any) -> dict[str, Any]:
    given = {"dtype": "fp16", "address": 0x10000, "shape": [256, 128], "strides": [128, 1], "block": [64, 64]}
    return {"descriptor": given | more}


def tidy(text: str, folder: Path) -> str:
    """A message without what differs from machine to machine."""
    for path, name in ((folder, "<tmp>"), (runtime.WORKER, "<worker>"), (stub.ROOT, "<opwright>")):
        text = text.replace(str(path), name)
    # Python before 3.11.4 and 3.12 has another class for it.
    text = text.replace("ValueError: source code string", "SyntaxError: source code string")
    text = re.sub(r"[^\s=`]*/triton-[\d.]+/bin/python", "<python>", text)
    text = re.sub(r"\b[0-9a-f]{32}\.opk", "<digest>.opk", text)
    text = re.sub(r"/tmp/\S*/(?=\w+\.(?:ptx|cubin|log))", "<scratch>/", text)
    return re.sub(r"0x[5-7][0-9a-f]{8,}", "<address>", text)


def outcomes(
    python: Path | None, launches: list[dict[str, Any]], folder: Path, **settings: Any
) -> tuple[list[str | None], list[Any]]:
    """For each launch None or `cause: message`, and the stub's record."""
    results, records = runtime.run_launches(python, launches, folder, **settings)
    texts = []
    for result in results:
        error = result["error"]
        cause = error and (ERRORS[error["cause"]] if error["cause"] >= 0 else "NO ERROR OF OURS")
        texts.append(error and f"{cause}: {tidy(error['message'], folder)}")
    return texts, records


C = constant("1")
LEFT = launch("left", {"tensor": "i32", "address": 0x1000}, number(5), C, file=PACKED)
COPIES = launch("copies", descriptor(), descriptor(), number(0), file=PACKED)
# A file with one good kernel, for what is put before it.
HEAD = "import triton\nimport triton.language as tl\n"
KERNEL = "\n\n@triton.jit\ndef scaled(out, n):\n    tl.store(out, n)\n"
