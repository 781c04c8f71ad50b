"""Random kernels and launches reach the driver as Triton sends them, with the key that Triton's specialiser gives.

`OPWRIGHT_TEST_SEEDS=100-120` tries other seeds.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import runtime
import stub
from stub import triton_python  # noqa: F401
from test_differential import comparable

pytestmark = pytest.mark.compiler
ASK = Path(__file__).parent / "kernels" / "ask_binder.py"
KERNELS, LAUNCHES = 14, 5
POINTERS = "fp16 bf16 fp32 fp64 fp8e4nv fp8e5 i8 i16 i32 i64 u8 u16 u32 u64 u1".split()
INTS = [
    0,
    1,
    -1,
    2,
    15,
    16,
    17,
    -15,
    -16,
    -17,
    2**31 - 1,
    2**31,
    2**31 + 16,
    -(2**31),
    -(2**31) - 1,
    -(2**31) - 16,
]
INTS += [
    2**32 - 1,
    2**32,
    2**63 - 1,
    2**63 - 16,
    -(2**63),
    -(2**63) + 1,
    2**63,
    2**63 + 1,
    2**63 + 16,
    2**64 - 1,
    2**64 - 16,
]
FLOATS = [0.0, -0.0, 1.0, 0.1, -2.5, 1e-42, 65504.0, 3e38, 1e-300, float("inf")]
ADDRESSES = [0, 16, 0x1000, 0x1008, 0x1004, 0x1001, 0x7F0000000010, 2**47 - 1, 2**63, 2**64 - 16]
CONSTANTS = ["0", "1", "-1", "16", "1024", "2147483648", "9223372036854775807", "-9223372036854775808", "0.5", "1.0", "1e-05",
             "1e+16", "-0.0", "inf", '"relu"', '""', '"a\\"b, (c)"', "True", "False", "None", "fp16", "int32", "int1", "bf16",
             "(1, 2)", "(16,)", "()", '("a", (fp32, None), 0.5)', "@helper"]  # fmt: skip
BITS = {
    "int8": 8,
    "int16": 16,
    "int32": 32,
    "int64": 64,
    "uint8": 8,
    "uint16": 16,
    "uint32": 32,
    "uint64": 64,
}
ANNOTATIONS = [*BITS, "float16", "bfloat16", "float32", "float64", "int1"]
DEFAULTS = ["0", "1", "16", "17", "-1", "2147483648", "0.5", "-0.0", "1e-05", "True", "False", "None"]
PYTHON = {"fp16": "tl.float16", "fp32": "tl.float32", "int32": "tl.int32"}


def of_int(value: int) -> dict[str, Any]:
    return {"int": value if value < 2**63 else str(value)}  # as text where C++'s JSON has none


class Batch:
    """A module of kernels, and launches of them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines = [
            "import triton\nimport triton.language as tl\n",
            "\n@triton.jit\ndef helper(x):\n    return x\n",
        ]
        self.launches: list[dict[str, Any]] = []
        for number in range(KERNELS):
            self.add_kernel(f"k{number}")

    def add_kernel(self, name: str) -> None:
        pick = self.random
        params = [self.parameter(f"p{i}") for i in range(pick.randint(1, 6))]
        # Those with defaults come last, as Python demands.
        params.sort(key=lambda param: param["default"] is not None)
        options = []
        for option in ("do_not_specialize", "do_not_specialize_on_alignment"):
            chosen = [p["name"] for p in params if p["kind"] != "constexpr" and pick.random() < 0.25]
            if chosen and pick.random() < 0.6:
                options.append(f"{option}={chosen}")
        signature = ", ".join(
            p["name"]
            + (f": {p['annotation']}" if p["annotation"] else "")
            + (f" = {p['default']}" if p["default"] is not None else "")
            for p in params
        )
        self.lines.append(f"\n@triton.jit({', '.join(options)})\ndef {name}({signature}):\n    pass\n")
        for _ in range(LAUNCHES):
            self.add_launch(name, params)

    def parameter(self, name: str) -> dict[str, Any]:
        pick = self.random
        kind = pick.choice(["plain", "plain", "plain", "constexpr", "annotated", "const"])
        default = None
        annotation = ""
        if kind == "constexpr":
            annotation = "tl.constexpr"
            if pick.random() < 0.4:
                default = pick.choice(["1", "64", "0.5", "'x'", "None", "True", "tl.float16", "(1, 2)", "helper", "-1"])
        elif kind == "annotated":
            annotation = "tl." + pick.choice(ANNOTATIONS)
            if pick.random() < 0.3:
                # An int for int1 is sent by Triton as its low byte, by C++ as 1: no bool is either way.
                numbers = ["True", "False"] if "int1" in annotation.split(".")[1:] else ["0", "1", "16", "3"]
                default = "0.5" if "float" in annotation else pick.choice(numbers)
        elif kind == "const":
            annotation = "tl.const"
        elif pick.random() < 0.3:
            default = pick.choice(DEFAULTS)
        return {"name": name, "kind": kind, "annotation": annotation, "default": default}

    def add_launch(self, name: str, params: list[dict[str, Any]]) -> None:
        pick = self.random
        arguments: Any = {p["name"]: self.argument(p) for p in params}
        for param in reversed(params):
            if param["default"] is None or pick.random() < 0.5:
                break
            del arguments[param["name"]]
        if pick.random() < 0.6:
            arguments = list(arguments.values())
        elif pick.random() < 0.5:
            arguments = dict(pick.sample(list(arguments.items()), len(arguments)))
        launch = {"function": name, "grid": [pick.randint(1, 5), pick.randint(1, 3)], "args": arguments}
        if pick.random() < 0.1:
            launch["options"] = pick.choice([{"num_warps": 8}, {"num_warps": 1, "num_stages": 2}])
        self.launches.append(launch)

    def argument(self, param: dict[str, Any]) -> dict[str, Any]:
        pick = self.random
        if param["kind"] == "constexpr":
            return {"constexpr": pick.choice(CONSTANTS)}
        if param["kind"] == "const":
            return self.pointer()
        if param["kind"] == "annotated":
            kind = param["annotation"].removeprefix("tl.")
            if kind == "int1":
                return {"bool": pick.random() < 0.5}
            if "float" in kind:
                return {"float": pick.choice([value for value in FLOATS if abs(value) <= 65504])}
            unsigned = kind.startswith("u")
            least, most = (0, 2 ** BITS[kind]) if unsigned else (-(2 ** (BITS[kind] - 1)), 2 ** (BITS[kind] - 1))
            return of_int(pick.choice([value for value in [*INTS, least, most - 1] if least <= value < most]))
        return self.value()

    def value(self, depth: int = 0) -> dict[str, Any]:
        pick = self.random
        kind = pick.choice(["int", "int", "int", "pointer", "pointer", "float", "bool", "none", "tuple"])
        if kind == "int":
            return of_int(pick.choice(INTS) if pick.random() < 0.8 else pick.randint(-(2**63), 2**64 - 1))
        if kind == "pointer":
            return self.pointer()
        if kind == "float":
            return {"float": pick.choice(FLOATS)}
        if kind == "bool":
            return {"bool": pick.random() < 0.5}
        if kind == "tuple" and depth < 3:
            return {
                "tuple": [self.value(depth + 1) for _ in range(pick.randint(0 if depth else 1, 9 if not depth else 3))]
            }
        return {"none": True}

    def pointer(self) -> dict[str, Any]:
        return {"tensor": self.random.choice(POINTERS), "address": self.address()}

    def address(self) -> int:
        address = self.random.choice(ADDRESSES)
        return address if address < 2**63 else address - 2**64  # the same bits, as C++'s JSON has them

    def write(self, folder: Path) -> list[dict[str, Any]]:
        path = folder / "random_kernels.py"
        path.write_text("\n".join(self.lines))
        return [{"file": str(path), **launch} for launch in self.launches]


def genuine_form(launch: dict[str, Any]) -> dict[str, Any]:
    """With addresses as Triton takes them."""

    def mend(value: Any) -> Any:
        if isinstance(value, dict):
            made = {name: mend(item) for name, item in value.items()}
            if "tensor" in made:
                made["address"] %= 2**64
            return made
        return [mend(item) for item in value] if isinstance(value, list) else value

    return {**launch, "args": mend(launch["args"])}


def ask_binder(python: Path, launches: list[dict[str, Any]], folder: Path) -> list[Any]:
    source, target = folder / "asked.json", folder / "keys.json"
    source.write_text(json.dumps(launches))
    done = subprocess.run(
        [str(python), str(ASK), str(source), str(target)],
        env=stub.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(target.read_text())


def seeds() -> list[int]:
    text = os.environ.get("OPWRIGHT_TEST_SEEDS", "0-0")
    first, last = map(int, text.split("-"))
    return list(range(first, last + 1))


@pytest.mark.parametrize("seed", seeds())
def test_random_launches(triton_python: Path, tmp_path: Path, seed: int) -> None:  # noqa: F811
    launches = Batch(seed).write(tmp_path)
    expected = stub.run_genuine(triton_python, [genuine_form(launch) for launch in launches])
    keys = ask_binder(triton_python, [genuine_form(launch) for launch in launches], tmp_path)
    results, records = runtime.run_launches(
        triton_python, launches, tmp_path, triton_settings=f"record={tmp_path / 'recorded'}"
    )
    recorded = {
        (line["function"], tuple(line["args"]))
        for line in map(json.loads, (tmp_path / "recorded").read_text().splitlines())
    }
    left = iter(records)
    wrong = []
    fine: set[Any] = set()
    for launch, wanted, key, result in zip(launches, expected, keys, results, strict=True):
        sent = [] if result["error"] else [next(left)]
        what = {"launch": launch, "wanted": wanted["error"] or key, "error": result["error"]}
        if wanted["error"] is not None:
            # Triton 3.6 reads an int8 as an unsigned byte; 3.9 takes what C++ takes.
            if not result["error"] and "unsigned byte integer" not in wanted["error"]["message"]:
                wrong.append({**what, "sent": sent})
            continue
        fine.add((launch["function"], tuple(key)))
        if [comparable(record) for record in sent] != [comparable(record) for record in wanted["records"]]:
            wrong.append({**what, "sent": [r["params"] for r in sent], "is": [r["params"] for r in wanted["records"]]})
    text = (tmp_path / "random_kernels.py").read_text()
    assert not wrong, "\n".join([text, *map(json.dumps, wrong)])
    assert fine - recorded == set()
    refused = {(launch["function"], tuple(key)) for launch, key in zip(launches, keys) if isinstance(key, list)}
    assert recorded - refused == set()


OUT_OF_RANGE = {
    "int8": [128, -129, 2**31],
    "int16": [2**15, -(2**15) - 1],
    "int32": [2**31, -(2**31) - 1, 2**63],
    "int64": [2**63],
}


@pytest.mark.parametrize("kind", OUT_OF_RANGE)
def test_integers_that_do_not_fit_an_annotation(
    triton_python: Path,  # noqa: F811
    tmp_path: Path,
    kind: str,
    request: Any,
) -> None:
    if stub.triton_version(triton_python) < (3, 7) and kind != "int64":
        reason = "what does not fit is cut to the annotated width, where Triton raises"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    path = tmp_path / "ranges.py"
    path.write_text(
        f"import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef k(p: tl.{kind}, tail):\n    pass\n"
    )
    launches = [
        {"file": str(path), "function": "k", "grid": [1], "args": [of_int(value), {"int": 7}]}
        for value in OUT_OF_RANGE[kind]
    ]
    genuine = stub.run_genuine(triton_python, launches)
    refused = [result["error"] is not None for result in genuine]
    results, _ = runtime.run_launches(triton_python, launches, tmp_path)
    given = [result["error"] is not None for result in results]
    assert given == refused
