"""A launch function does in C++ what it does in Python: the same grids, arguments and options."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import runtime
import stub
import torch
from jaxtyping import Float
from stub import triton_python  # noqa: F401
from torch import Tensor

from opwright.build.glue import header_text, kernel_signature
from opwright.contract.declaration import declare
from opwright.errors import CompileError
from opwright.triton.launch_file import read_launch_file
from opwright.triton.translate import translate

pytestmark = pytest.mark.compiler

KERNELS = """
import triton
import triton.language as tl

SCALE = 3

@triton.jit
def ints_kernel(out, a, b, c, d, e, f, g, h, K: tl.constexpr = 7):
    tl.store(out, a + b + c + d + e + f + g + h + K)

@triton.jit
def floats_kernel(out, x, y, flag, NAME: tl.constexpr, pointer):
    tl.store(out, x + y)
"""

# `new` and `signed` are keywords of C++.
LAUNCHES = {
    "arithmetic": """
def probe(input, new, mode, k, signed, output):
    rows, n = input.shape
    ints_kernel[(rows, triton.cdiv(n, 3))](
        output, n // 3, -n // 3, -n % 5, n * k - 4, 2**5, (n << 2) | 1, n & 6, k >> 1)
""",
    "strides and sizes": """
def probe(input, new, mode, k, signed, output):
    ints_kernel[input.numel() + 1,](
        output, input.stride(0), input.stride(-1), input.size(1), input.element_size(),
        new.shape[0], len(input.shape), input.ndim, triton.next_power_of_2(input.shape[-1]), K=9)
""",
    "choices": """
def probe(input, new, mode, k, signed, output):
    "A docstring."
    n = input.size(1)
    if mode == "fast" and n > 5:
        a = 1
    elif mode != "fast" or k in (2, 3):
        a = 2
    else:
        a = 3
    b = a if not (1 < k <= 4) else -a
    b += 10
    c, d = a, b
    c, d = d, c
    while_ = min(c, d, 100)
    default = max(c, d)
    ints_kernel[(4,)](output, a, b, c, d, while_, default, abs(-k), SCALE, num_warps=8 if k > 2 else 2)
""",
    "several launches": """
def probe(input, new, mode, k, signed, output):
    assert k >= 0, "k is negative"
    ints_kernel[(1,)](output, 1, 2, 3, 4, 5, 6, 7, 8, num_warps=2)
    if k > 3:
        return
    ints_kernel[(0, 5)](output, 1, 2, 3, 4, 5, 6, 7, 8)
    grid = (k, 2, 3)
    ints_kernel[grid](output, h=1, g=2, f=3, e=4, d=5, c=6, b=7, a=8, num_warps=1)
""",
    "floats, None, text": """
def probe(input, new, mode, k, signed, output):
    root = signed * 2 + k
    half = k / 2
    floats_kernel[lambda meta: (triton.cdiv(input.numel(), 64), k)](
        output, root, half, input.is_contiguous(), NAME=mode, pointer=1)
    floats_kernel[(1,)](output, int(half), float(k), k > 2, mode, None)
""",
    "optional tensor": """
def probe(input, new, mode, k, signed, output):
    if new is None:
        floats_kernel[(1,)](output, 1, 0.5, True, "none", None)
    else:
        floats_kernel[(2,)](output, 1, 0.5, False, mode, new)
    floats_kernel[(3,)](output, 1, 0.5, False, "no", new)
""",
    "dtypes": """
def probe(input, new, mode, k, signed, output):
    wide = input.dtype == torch.float32
    ints_kernel[(1,)](output, wide, 2, 3, 4, 5, 6, 7, 8 if input.dtype in (torch.float16, torch.bfloat16) else 9)
""",
}


def probe(
    input: Float[Tensor, "*batch n"],
    new: Float[Tensor, "m"] | None = None,
    *,
    mode: Literal["fast", "slow"] = "fast",
    k: int = 3,
    signed: float = 0.5,
) -> Float[Tensor, "*batch n"]:
    return input * 2


class PythonTriton:
    """Triton's own functions, of 3.6 and 3.9."""

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return (a + b - 1) // b

    @staticmethod
    def next_power_of_2(n: int) -> int:
        n -= 1
        for shift in (1, 2, 4, 8, 16, 32):
            n |= n >> shift
        return n + 1


class Recorder:
    """Stands for a kernel of the file while its launch function runs in Python."""

    def __init__(self, launches: list[Any], parameters: list[str], defaults: dict[str, Any]) -> None:
        self.launches, self.parameters, self.defaults = launches, parameters, defaults

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            options = {name: kwargs.pop(name) for name in list(kwargs) if name not in self.parameters}
            values = self.defaults | dict(zip(self.parameters, args)) | kwargs
            sizes = grid(values) if callable(grid) else grid
            sizes = tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,)
            if all(sizes):
                self.launches.append(((*sizes, 1, 1)[:3], values, options))

        return launch


def run_in_python(text: str, arguments: tuple[Any, ...]) -> list[Any]:
    """What the launch function launches when Python runs it."""
    launches: list[Any] = []
    names = "out a b c d e f g h K".split()
    scope = {
        "ints_kernel": Recorder(launches, names, {"K": 7}),
        "floats_kernel": Recorder(launches, "out x y flag NAME pointer".split(), {}),
        "triton": PythonTriton,
        "torch": torch,
        "SCALE": 3,
    }
    exec(text, scope)
    scope["probe"](*arguments)
    return launches


class FakeTensor:
    """Sizes, strides and an address: what a launch function sees of a tensor."""

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...], address: int) -> None:
        self.shape, self._stride, self.address = shape, stride, address
        self.ndim, self.dtype = len(shape), torch.float32

    def size(self, d: int) -> int:
        return self.shape[d]

    def stride(self, d: int) -> int:
        return self._stride[d]

    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def element_size(self) -> int:
        return 4

    def is_contiguous(self) -> bool:
        return self._stride == (self.shape[1], 1)


INPUT = FakeTensor((5, 70), (80, 1), 0x10000)
OTHER = FakeTensor((12,), (2,), 0x20004)
OUTPUT = FakeTensor((5, 70), (70, 1), 0x30000)


MAIN = """
#include <cstdio>
#include <cstdlib>
#include <cstring>
int main(int argc, char** argv) {
  if (argc != 6) return 2;
  const opwright::View<const float, 2> input = {reinterpret_cast<const float*>(0x10000), {5, 70}, {80, 1}};
  opwright::View<const float, 1> other = {reinterpret_cast<const float*>(0x20004), {12}, {2}};
  const opwright::View<float, 2> output = {reinterpret_cast<float*>(0x30000), {5, 70}, {70, 1}};
  const Mode mode = std::strcmp(argv[2], "fast") == 0 ? Mode::fast : Mode::slow;
  const int64_t k = std::atoi(argv[3]);
  const double scale = std::atof(argv[4]);
  if (std::atoi(argv[5]) == 0) other.data_ = nullptr;
  try {
    switch (std::atoi(argv[1])) {
CASES
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s", error.what());
    return 1;
  }
}
"""


def translated(text: str, file: str = "triton.py") -> str:
    declaration = declare("translated::probe", probe, find_sources=lambda subject, file: {})
    launch_file = read_launch_file("probe", file, KERNELS + text)
    return translate(launch_file, [declaration.contract], [kernel_signature(declaration, "cuda")])


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that runs the launch function of a number."""
    folder = stub.BUILD / "translated"
    folder.mkdir(parents=True, exist_ok=True)
    kernels = folder / "translated_kernels.py"
    kernels.write_text(KERNELS)
    declaration = declare("translated::probe", probe, find_sources=lambda subject, file: {})
    # Launch functions need not use all of the operator's arguments.
    parts = ['#pragma GCC diagnostic ignored "-Wunused-parameter"']
    parts += [header_text([declaration], "cuda").replace("#pragma once", ""), '#include "opwright/triton/operator.h"']
    for i, text in enumerate(LAUNCHES.values()):
        body = translated(text, str(kernels)).split("#include", 1)[1].split("\n", 1)[1]
        body = body.split("OPWRIGHT_KERNEL(", 1)[0]
        parts.append(f"namespace case{i} {{\n{body}\n}}")
    call = "      case {0}: case{0}::probe<float>(input, other, mode, k, scale, output, nullptr); break;"
    parts.append(MAIN.replace("CASES", "\n".join(call.format(i) for i in range(len(LAUNCHES)))))
    source = folder / "translated.cpp"
    source.write_text("\n".join(parts))
    return runtime.build(source)


PARAMETERS = {"ints_kernel": "abcdefgh", "floats_kernel": ["x", "y", "flag"]}


def values_of(record: dict[str, Any], launched: dict[str, Any]) -> dict[str, Any]:
    """The run-time values of a record by name; those that Triton makes constants (1, None) are not there."""
    names = [
        name
        for name in PARAMETERS[record["kernel"]]
        if not (isinstance(launched[name], int) and not isinstance(launched[name], bool) and launched[name] == 1)
    ]
    found = {}
    for name, param in zip(names, record["params"][1:]):
        raw = bytes.fromhex(param["hex"])
        wanted = launched[name]
        if isinstance(wanted, bool):
            found[name] = bool(raw[0])
        elif isinstance(wanted, float):
            found[name] = struct.unpack("<f", raw)[0]
        else:
            found[name] = int.from_bytes(raw, "little", signed=True)
    return found


@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("other", [OTHER, None], ids=["given", "absent"])
@pytest.mark.parametrize("options", [("fast", 3, 0.5), ("slow", 2, -1.25), ("fast", 40, 3.0)], ids=str)
def test_launch_function(
    name: str,
    other: Any,
    options: Any,
    program: Path,
    triton_python: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    if other is None and "new.shape" in LAUNCHES[name]:
        other = OTHER
    expected = run_in_python(LAUNCHES[name], (INPUT, other, *options, OUTPUT))
    env = stub.environment(record=tmp_path / "record.jsonl") | {
        "OPWRIGHT_CACHE_DIR": str(stub.BUILD / "translated" / "cache"),
        "OPWRIGHT_TRITON": f"python={triton_python}",
    }
    number = str(list(LAUNCHES).index(name))
    arguments = [number, *map(str, options), str(int(other is not None))]
    done = subprocess.run([program, *arguments], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    records = stub.read_records(tmp_path / "record.jsonl")
    assert len(records) == len(expected)
    for record, (grid, launched, chosen) in zip(records, expected):
        assert tuple(record["grid"]) == grid
        assert record["block"][0] == 32 * chosen.get("num_warps", 4)
        got = values_of(record, launched)
        for argument, value in got.items():
            wanted = launched[argument]
            if isinstance(wanted, float):
                wanted = struct.unpack("<f", struct.pack("<f", wanted))[0]
            assert value == wanted, (argument, value, wanted)


# Launch functions that compare an expression of integers with what Python made of it.
EXTREMES = [
    0,
    1,
    -1,
    2,
    -2,
    3,
    -3,
    7,
    -7,
    63,
    64,
    2**31,
    2**32 + 1,
    2**62,
    2**62 + 1,
    -(2**62),
    2**63 - 1,
    -(2**63) + 1,
    -(2**63),
]
EXPRESSIONS = [
    "a + b", "a - b", "a * b", "a // b", "a % b", "a ** b", "a << b", "a >> b", "-a", "abs(a)", "a // 4 * 2 + b % 5",
    "triton.cdiv(a, b)", "triton.next_power_of_2(a)", "int(a * 2.5)", "int(a / b)", "-9223372036854775808 + a",
]  # fmt: skip
INTEGERS_MAIN = """
#include <iostream>
#include <string>
int main() {
  const opwright::View<const float, 1> input = {nullptr, {1}, {1}};
  const opwright::View<float, 1> output = {nullptr, {1}, {1}};
  int64_t number, a, b, expected;
  while (std::cin >> number >> a >> b >> expected) {
    try {
      switch (number) {
CASES
      }
      std::cout << "equal\\n";
    } catch (const std::exception& error) {
      std::cout << error.what() << "\\n";
    }
  }
}
"""


def integers(input: Float[Tensor, "n"], *, a: int = 0, b: int = 0, expected: int = 0) -> Float[Tensor, "n"]:
    return input * 2


def python_integer(expression: str, a: int, b: int) -> int | str:
    """What Python makes of an expression, or what the error says."""
    if "**" in expression and b < 0:
        return "the exponent is negative"
    if ("**" in expression and abs(a) > 1 and b > 64) or ("<<" in expression and a != 0 and b > 64):
        return "beyond 64 bits"  # Python would take all memory
    if ("**" in expression or "<<" in expression) and b > 64:
        b = 64 + b % 2
    try:
        scope = {"a": a, "b": b, "triton": PythonTriton}
        value = eval(expression, scope)
    except ZeroDivisionError:
        return "by zero"
    except ValueError:
        return "a negative shift"
    return value if -(2**63) <= value < 2**63 else "beyond 64 bits"


def test_integers_never_wrap_or_trap() -> None:
    """The largest, the smallest and their neighbours give Python's number, or an error that names the expression."""
    declaration = declare("translated::integers", integers, find_sources=lambda subject, file: {})
    signature = kernel_signature(declaration, "cuda")
    parts = ['#pragma GCC diagnostic ignored "-Wunused-parameter"']
    parts += [header_text([declaration], "cuda").replace("#pragma once", ""), '#include "opwright/triton/operator.h"']
    for i, expression in enumerate(EXPRESSIONS):
        text = f"""
def integers(input, a, b, expected, output):
    assert {expression} == expected, "differs"
    if input.numel() == 1:
        return
    ints_kernel[(1,)](output, 1, 2, 3, 4, 5, 6, 7, 8)
"""
        body = translate(read_launch_file("integers", "triton.py", KERNELS + text), [declaration.contract], [signature])
        body = body.split("#include", 1)[1].split("\n", 1)[1].split("OPWRIGHT_KERNEL(", 1)[0]
        parts.append(f"namespace case{i} {{\n{body}\n}}")
    call = "      case {0}: case{0}::integers<float>(input, a, b, expected, output, nullptr); break;"
    parts.append(INTEGERS_MAIN.replace("CASES", "\n".join(call.format(i) for i in range(len(EXPRESSIONS)))))
    source = stub.BUILD / "translated" / "integers.cpp"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text("\n".join(parts))
    program = runtime.build(source, ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1"))
    asked = [(i, a, b) for i in range(len(EXPRESSIONS)) for a in EXTREMES for b in EXTREMES]
    expected = [python_integer(EXPRESSIONS[i], a, b) for i, a, b in asked]
    lines = [f"{i} {a} {b} {e if isinstance(e, int) else 0}" for (i, a, b), e in zip(asked, expected)]
    env = {**stub.environment(), "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([program], input="\n".join(lines), env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = done.stdout.splitlines()
    assert len(answers) == len(asked)
    wrong = []
    for (i, a, b), wanted, answer in zip(asked, expected, answers):
        expression = EXPRESSIONS[i]
        # (a + b - 1) // b of the smallest a and a negative b has an intermediate that does not fit.
        if expression.startswith("triton.cdiv") and b < 0 and a == -(2**63):
            wanted = "beyond 64 bits"
        pattern = "equal" if isinstance(wanted, int) else rf"`.+` \(triton\.py:\d+\): .*{wanted}.*"
        if not re.fullmatch(pattern, answer):
            wrong.append((expression, a, b, wanted, answer))
    assert wrong == []


def test_a_constant_beyond_64_bits_is_refused(snapshot: Any) -> None:
    with pytest.raises(CompileError) as raised:
        translated("\ndef probe(input, new, mode, k, signed, output):\n    a = k + 9223372036854775808\n")
    assert str(raised.value) == snapshot


def test_a_path_with_quotes_and_newlines_compiles() -> None:
    text = translated(LAUNCHES["arithmetic"], 'a "quoted"\nfolder\\/triton.py')
    assert '"a \\"quoted\\"\\nfolder\\\\/triton.py"' in text
    assert not [line for line in text.splitlines() if line.startswith("folder")]


REFUSED = {
    "loop": "    for i in range(3):\n        ints_kernel[(1,)](output, 1, 2, 3, 4, 5, 6, 7, 8)",
    "unknown name": "    ints_kernel[(rows,)](output, 1, 2, 3, 4, 5, 6, 7, 8)",
    "one side only": "    if k > 1:\n        a = 2\n    ints_kernel[(a,)](output, 1, 2, 3, 4, 5, 6, 7, 8)",
    "two types": "    a = 1\n    a = 'x'\n    ints_kernel[(a,)](output, 1, 2, 3, 4, 5, 6, 7, 8)",
    "not a kernel": "    other_kernel[(1,)](output)",
    "too many": "    ints_kernel[(1,)](output, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)",
    "twice": "    ints_kernel[(1,)](output, 1, 2, 3, 4, 5, 6, 7, 8, a=3)",
    "tensor arithmetic": "    ints_kernel[(1,)](output + 1, 1, 2, 3, 4, 5, 6, 7, 8)",
    "float grid": "    ints_kernel[(k / 2,)](output, 1, 2, 3, 4, 5, 6, 7, 8)",
    "dimension": "    ints_kernel[(1,)](output, input.stride(2), 2, 3, 4, 5, 6, 7, 8)",
    "nothing launched": "    a = 1",
    "text at run time": "    ints_kernel[(1,)](output, mode, 2, 3, 4, 5, 6, 7, 8)",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, snapshot: Any) -> None:
    with pytest.raises(CompileError) as raised:
        translated(f"\ndef probe(input, new, mode, k, signed, output):\n{REFUSED[name]}\n")
    assert str(raised.value) == snapshot


def test_other_signature_is_refused(snapshot: Any) -> None:
    with pytest.raises(CompileError) as raised:
        translated("\ndef probe(input, output):\n    ints_kernel[(1,)](output, 1, 2, 3, 4, 5, 6, 7, 8)\n")
    assert str(raised.value) == snapshot


def test_file_without_launch_function_is_refused(snapshot: Any) -> None:
    with pytest.raises(CompileError) as raised:
        translated("\ndef other(): pass\n")
    assert str(raised.value) == snapshot


def test_syntax_error_is_the_authors(snapshot: Any) -> None:
    with pytest.raises(CompileError) as raised:
        translated("\ndef probe(:\n")
    assert str(raised.value) == snapshot


def test_launch_function_by_another_name() -> None:
    """One file may serve two declarations, which are to be compared."""
    text = LAUNCHES["arithmetic"].replace("def probe(", "def original(") + "probe = original\n"
    assert "void probe(" in translated(text)
    assert "ints_kernel_(stream" in translated(text)
