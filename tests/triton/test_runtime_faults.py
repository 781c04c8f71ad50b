"""What goes wrong at a launch from C++ is an Error with a text that helps, and the next launch works."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import runtime
import stub
import synthetic_packs
from syrupy.assertion import SnapshotAssertion

from opwright.triton.worker.packfile import Entry, pack

pytestmark = pytest.mark.compiler
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


@pytest.fixture(scope="module")
def python() -> Path:
    tritons = stub.find_tritons()
    if not tritons:
        pytest.skip("no Triton at .venv/triton-*/bin/python")
    return tritons[max(tritons)]


def tidy(text: str, folder: Path) -> str:
    """A message without what differs from machine to machine."""
    for path, name in ((folder, "<tmp>"), (runtime.WORKER, "<worker>"), (stub.ROOT, "<opwright>")):
        text = text.replace(str(path), name)
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


# ---- what a caller gets wrong

C = constant("1")
WRONG = {
    "too many": launch("scaled", OUT, number(5), C, number(3), number(4)),
    "too few": launch("scaled", OUT, number(5)),
    "none at all": launch("scaled"),
    "unknown name": launch("scaled", **{}) | {"args": {"out": OUT, "n": number(5), "D": C}},
    "constexpr at run time": launch("scaled", OUT, number(5), number(1)),
    "pointer for a constexpr": launch("scaled", OUT, number(5), OUT),
    "constexpr for a value": launch("scaled", OUT, constant("5"), C),
    "text for a value": launch("scaled", OUT, constant('"five"'), C),
    "dtype for a value": launch("scaled", OUT, constant("fp16"), C),
    "float for an annotated int": launch("whole", OUT, {"float": 2.5}),
    "pointer for an annotated int": launch("whole", OUT, OUT),
    "None for an annotated int": launch("whole", OUT, {"none": True}),
    "tuple for an annotated int": launch("whole", OUT, {"tuple": [number(1)]}),
    "None where it is used": launch("scaled", {"none": True}, number(5), C),
    "tuple where a pointer is": launch("scaled", {"tuple": [OUT]}, number(5), C),
    "pointer where a tuple is": launch("tupled", OUT, OUT),
    "tuple too short": launch("tupled", OUT, {"tuple": [OUT]}),
    "pointer of a dtype that NVIDIA lacks": launch("scaled", {"tensor": "fp8e4b8", "address": 16}, number(5), C),
    "text that is no value": launch("scaled", OUT, number(5), constant("1 + 1")),
    "number written otherwise": launch("scaled", OUT, number(5), constant("01")),
    "unknown function": launch("scaled", OUT, number(5), constant("@nothing")),
    "unknown option": launch("scaled", OUT, number(5), C, options={"num_wraps": 4}),
    "three warps": launch("scaled", OUT, number(5), C, options={"num_warps": 3}),
    "no warps": launch("scaled", OUT, number(5), C, options={"num_warps": 0}),
    "descriptor that is not aligned": launch("copies", descriptor(), descriptor(address=0x10008), number(0)),
    "descriptor with strides": launch("copies", descriptor(), descriptor(strides=[128, 2]), number(0)),
    "descriptor of another rank": launch("copies", descriptor(), descriptor(shape=[256], strides=[1]), number(0)),
    "descriptor of no memory": launch("copies", descriptor(), descriptor(shape=[0, 128]), number(0)),
    "memory of another GPU": launch("scaled", {"tensor": "fp32", "allocate": 1, "gpu": 1}, number(5), C),
    "memory of the host": launch("scaled", {"tensor": "fp32", "address": 0x7FFF12345670, "gpu": -2}, number(5), C),
    "memory of another GPU in a tuple": launch(
        "tupled",
        {"tensor": "fp32", "allocate": 0, "gpu": 0},
        {"tuple": [{"tensor": "fp32", "allocate": 1, "gpu": 1}, number(5)]},
    ),
    "memory of another GPU in a descriptor": launch(
        "copies", descriptor(allocate=0, gpu=0), descriptor(allocate=1, gpu=1), number(0)
    ),
    "memory of another GPU that the driver does not know": launch(
        "scaled", {"tensor": "fp32", "address": 0x1000, "gpu": 1}, number(5), C
    ),
    "grid that is not there": launch("scaled", OUT, number(5), C, grid="nothing"),
    "grid of a float": launch("scaled", OUT, number(5), C, grid="halves"),
    "grid that divides by zero": launch("scaled", OUT, number(5), C, grid="divides"),
    "grid that reads an option": launch("scaled", OUT, number(5), C, grid="reads_option"),
    "grid that cannot be translated": launch("scaled", OUT, number(5), C, grid="reads_files"),
    "grid of four": launch("scaled", OUT, number(5), C, grid="four"),
    "grid that is too large": launch("scaled", OUT, number(5), C) | {"grid": [1, 70000]},
    "heuristic that divides by zero": launch("divided", OUT, number(5), number(0)),
    "heuristic of a pointer": launch("divided", OUT, number(5), OUT),
    "what a heuristic gives": launch("divided", OUT, number(5), number(2), C),
    "compile error": launch("broken", OUT, number(5)),
    "plain function": launch("plain_function", OUT, number(5)),
    "number for a function": launch("no_function", OUT, number(5)),
    "missing function": launch("missing", OUT, number(5)),
    "missing file": launch("scaled", OUT, file=Path("/nowhere/kernels.py")),
    "folder for a file": launch("scaled", OUT, file=KERNELS.parent),
}  # fmt: skip
# The runtime counts arguments from 1, and so must the worker's errors.
COUNTED = {"float for an annotated int": 2, "pointer for an annotated int": 2, "text that is no value": 3}


@pytest.fixture(scope="module")
def refusals(python: Path, tmp_path_factory: Any) -> dict[str, str | None]:
    """What each of these gives, all in one process; a good launch ends it."""
    good = launch("scaled", OUT, number(5), C)
    texts, _ = outcomes(
        python, [*WRONG.values(), good], tmp_path_factory.mktemp("wrong"), devices=2, unified=False
    )
    assert texts[-1] is None
    return dict(zip(WRONG, texts))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call(refusals: Any, name: str, snapshot: SnapshotAssertion) -> None:
    assert refusals[name] is not None
    assert not refusals[name].startswith("NO ERROR OF OURS")
    assert refusals[name] == snapshot


@pytest.mark.parametrize("name", COUNTED)
def test_arguments_are_counted_from_1(refusals: Any, name: str) -> None:
    assert f"argument {COUNTED[name]} `" in refusals[name]


def test_a_descriptor_of_another_rank_without_tma(python: Path, tmp_path: Path) -> None:
    wrong = launch("copies", descriptor(), descriptor(shape=[256], strides=[1]), number(0))
    (text,), records = outcomes(python, [wrong], tmp_path, arch=80)
    assert text is not None
    assert records == []


def test_a_pointer_is_not_none(python: Path, tmp_path: Path) -> None:
    bias = {"tensor": "fp32", "address": 0x2000}
    texts, _ = outcomes(
        python,
        [launch("biased", OUT, bias), launch("biased", OUT, {"none": True})],
        tmp_path,
        triton_settings=f"record={tmp_path / 'keys'}",
    )
    keys = [json.loads(line)["args"][2] for line in (tmp_path / "keys").read_text().splitlines()]
    assert (texts, keys) == ([None, None], ["=True", "=False"])


@pytest.mark.parametrize("function", ["huge_default", "tuple_default"])
def test_defaults_that_triton_takes(python: Path, tmp_path: Path, function: str) -> None:
    (genuine,) = stub.run_genuine(python, [launch(function, OUT)])
    assert genuine["error"] is None
    (text,), records = outcomes(python, [launch(function, OUT)], tmp_path)
    assert text is None
    assert [record["params"] for record in records] == [record["params"] for record in genuine["records"]]


POINTER_TEXTS = """import triton
import triton.language as tl

CONFIGS = [triton.Config({"C": 16}), triton.Config({"C": 32})]


@triton.heuristics({"C": lambda args: args["p"]})
@triton.jit
def given(out, p, C: tl.constexpr):
    tl.store(out, 1.0)


@triton.autotune(CONFIGS, key=["p"])
@triton.jit
def tuned(out, p, C: tl.constexpr):
    tl.store(out, 1.0)
"""


@pytest.mark.parametrize("kind", ["pointer", "tuple"])
@pytest.mark.parametrize("function", ["given", "tuned"])
def test_a_pointer_that_decides(python: Path, tmp_path: Path, function: str, kind: str) -> None:
    file = tmp_path / "pointers.py"
    file.write_text(POINTER_TEXTS)
    decides = OUT if kind == "pointer" else {"tuple": [OUT, number(5)]}
    (text,), _ = outcomes(python, [launch(function, OUT, decides, file=file)], tmp_path)
    assert text is None or not text.startswith("NO ERROR OF OURS")


# ---- files

FILES = {
    "syntax error": "import triton\n\n\ndef scaled(out, n:\n    pass\n",
    "import that is missing": "import triton\nimport no_such_module_of_ours\n",
    "raises": "import triton\n\nraise RuntimeError('no licence')\n",
    "ends the process": "import os\nos._exit(7)\n",
    "exits": "import sys\nsys.exit(3)\n",
    "relative import": "from .names import add\n",
    "null byte": "x = '\0'\n",
}
HEAD = "import triton\nimport triton.language as tl\n"
KERNEL = "\n\n@triton.jit\ndef scaled(out, n):\n    tl.store(out, n)\n"


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_used(
    python: Path, tmp_path: Path, name: str, snapshot: SnapshotAssertion
) -> None:
    bad, fine = tmp_path / "bad.py", tmp_path / "fine.py"
    bad.write_text(FILES[name])
    fine.write_text(HEAD + KERNEL)
    texts, records = outcomes(
        python, [launch("scaled", OUT, number(5), file=path) for path in (bad, fine)], tmp_path
    )
    assert texts[0] == snapshot
    assert (texts[1], len(records)) == (None, 1)


def test_relative_imports_in_a_package(python: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "names.py").write_text("SIZE = 3\n")
    (package / "kernels.py").write_text(HEAD + "from .names import SIZE\n" + KERNEL)
    texts, records = outcomes(
        python, [launch("scaled", OUT, number(5), file=package / "kernels.py")], tmp_path
    )
    assert texts[0] is None or "package" in texts[0]
    assert len(records) == (texts[0] is None)


def test_a_kernel_file_that_prints(python: Path, tmp_path: Path) -> None:
    file = tmp_path / "loud.py"
    file.write_text('import sys, os\nprint(\'{"id": 1, "ok": {}}\', flush=True)\n' + HEAD + KERNEL)
    texts, records = outcomes(python, [launch("scaled", OUT, number(5), file=file)], tmp_path)
    assert (texts, len(records)) == ([None], 1)


# ---- workers

FAKES = {
    "dies at once": "sys.exit(3)",
    "is killed": "read(); os.kill(os.getpid(), 9)",
    "answers garbage": "read(); write('Traceback (most recent call last):')",
    "prints a banner": "write('Welcome to Python'); read(); write(reply(error))",
    "answers nothing": "read(); write('')",
    "answers another request": "read(); write(json.dumps({'id': 99, 'ok': {}}))",
    "answers a list": "read(); write('[1, 2]')",
    "answers no id": "read(); write('{\"ok\": {}}')",
    "answers neither": "write(json.dumps({'id': read()['id']}))",
    "answers an empty error": "write(json.dumps({'id': read()['id'], 'error': {}}))",
    "answers an empty description": "write(json.dumps({'id': read()['id'], 'ok': {}}))",
    "answers a description of nothing": "write(json.dumps({'id': read()['id'], 'ok': {'params': []}}))",
    "closes its output": "read(); os.close(1); time.sleep(30)",
    "is slow": "read(); time.sleep(30)",
    "answers in pieces and stops": "read(); sys.stdout.write('{\"id\": 1, '); sys.stdout.flush(); time.sleep(30)",
}  # fmt: skip
FAKE = """
import json, os, sys, time
def read():
    return json.loads(sys.stdin.readline())
def write(line):
    sys.stdout.write(line + "\\n")
    sys.stdout.flush()
def reply(error):
    return "{}"
error = None
"""


def fake_python(folder: Path, body: str, real: Path | None = None) -> Path:
    """A program that stands for the worker's Python; `real` is the one that it may ask."""
    path = folder / "bin" / "python"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!{sys.executable} -S\n{FAKE}REAL = {str(real)!r}\n{textwrap.dedent(body)}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", FAKES)
def test_a_worker_that_does_not_work(tmp_path: Path, name: str, snapshot: SnapshotAssertion) -> None:
    fake = fake_python(tmp_path, FAKES[name])
    start = time.monotonic()
    texts, records = outcomes(
        fake, [launch("scaled", OUT, number(5), C)], tmp_path, triton_settings="timeout=1"
    )
    assert texts[0] == snapshot
    assert records == []
    assert time.monotonic() - start < 8


PROXY = """
import subprocess
real = subprocess.Popen([REAL, *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
for line in sys.stdin:
    request = json.loads(line)
    out = request.get("out")
    {before}
    real.stdin.write(json.dumps(request) + "\\n")
    real.stdin.flush()
    answer = json.loads(real.stdout.readline())
    {after}
    write(json.dumps(answer))
"""
LIARS = {
    "writes nothing": ("", "request['do'] == 'compile' and os.unlink(out)"),
    "writes half": ("", "request['do'] == 'compile' and os.truncate(out, 2000)"),
    "writes another kernel": (
        "if request['do'] == 'compile': request['args'][2] = '=2'",
        "",
    ),
    "writes another function": (
        "if request['do'] == 'compile': request['function'] = 'whole'; request['args'] = ['*fp32:16', 'i32']",
        "",
    ),
    "writes for another GPU": ("if request['do'] == 'compile': request['arch'] = 80", ""),
    "writes with other options": ("if request['do'] == 'compile': request['options'] = {'num_warps': 8}", ""),
    "refuses without a word": ("", "request['do'] == 'compile' and (answer.pop('ok'), answer.update(error={'kind': 'compile'}))"),
    "describes another function": ("if request['do'] == 'describe': request['function'] = 'whole'", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", LIARS)
def test_a_worker_that_lies(python: Path, tmp_path: Path, name: str, snapshot: SnapshotAssertion) -> None:
    before, after = LIARS[name]
    fake = fake_python(tmp_path, PROXY.format(before=before or "pass", after=after or "pass"), python)
    texts, records = outcomes(fake, [launch("scaled", OUT, number(5), C)], tmp_path)
    assert records == []
    assert texts[0] == snapshot


def test_a_worker_that_is_killed_once_is_started_again(python: Path, tmp_path: Path) -> None:
    file = tmp_path / "once.py"
    died = tmp_path / "died"
    file.write_text(
        "import os, signal\n"
        f"if not os.path.exists({str(died)!r}):\n"
        f"    open({str(died)!r}, 'w').close()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n" + HEAD + KERNEL
    )
    texts, records = outcomes(python, [launch("scaled", OUT, number(5), file=file)], tmp_path)
    assert (texts, len(records), died.exists()) == ([None], 1, True)


def test_a_file_that_sleeps(python: Path, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    file = tmp_path / "sleeps.py"
    file.write_text("import time\ntime.sleep(60)\n" + HEAD + KERNEL)
    texts, _ = outcomes(
        python, [launch("scaled", OUT, number(5), file=file)], tmp_path, triton_settings="timeout=1"
    )
    assert texts[0] == snapshot


@pytest.mark.parametrize("kind", ["missing", "folder", "no triton"])
def test_a_python_without_triton(tmp_path: Path, kind: str, snapshot: SnapshotAssertion) -> None:
    chosen = {"missing": None, "folder": tmp_path, "no triton": tmp_path / "bin" / "python"}[kind]
    if kind == "no triton":
        fake_python(tmp_path, f"os.execv({sys.executable!r}, [{sys.executable!r}, '-S', *sys.argv[1:]])")
    texts, records = outcomes(chosen, [launch("scaled", OUT, number(5), C)], tmp_path)
    # This Python's own name, as the worker gives it, behind whatever link it was started by.
    assert re.sub(r"`[^` ]*/bin/python[\d.]*", "`<python>", texts[0]) == snapshot
    assert records == []


# ---- the driver


@pytest.fixture(scope="module")
def entries(python: Path) -> list[Entry]:
    def request(function: str, args: list[str], file: Path = PACKED) -> dict[str, Any]:
        return {"file": str(file), "function": function, "arch": 90, "args": args, "options": {}}

    return synthetic_packs.compile_entries(
        python,
        [
            request("left", ["*i32:16", "i32", "=1"]),
            request("copies", [TILE, TILE, "i32:16"]),
        ],
    )


def with_shared(entries: list[Entry], size: int) -> list[Entry]:
    """The entries, `left` with so many bytes of shared memory."""
    return [
        synthetic_packs.changed(entry, shared=size) if entry.record.get("shared") == 0 else entry
        for entry in entries
    ]


LEFT = launch("left", {"tensor": "i32", "address": 0x1000}, number(5), C, file=PACKED)
COPIES = launch("copies", descriptor(), descriptor(), number(0), file=PACKED)
FAILURES = {
    "cuInit": (999, LEFT),
    "cuDriverGetVersion": (1, LEFT),
    "cuCtxGetCurrent": (201, LEFT),
    "cuDeviceGet": (101, LEFT),
    "cuDevicePrimaryCtxRetain": (2, LEFT),
    "cuCtxSetCurrent": (201, LEFT),
    "cuCtxGetDevice": (201, LEFT),
    "cuDeviceGetAttribute": (101, LEFT),
    "cuModuleLoadData": (2, LEFT),
    "cuModuleGetFunction": (500, LEFT),
    "cuFuncGetAttribute": (1, LEFT),
    "cuFuncGetParamInfo": (1, LEFT),
    "cuFuncSetAttribute": (1, LEFT),
    "cuFuncSetCacheConfig": (1, LEFT),
    "cuTensorMapEncodeTiled": (1, COPIES),
    "cuLaunchKernelEx": (700, LEFT),
}


def from_pack(
    entries: list[Entry], folder: Path, launches: list[dict[str, Any]], **settings: Any
) -> tuple[list[str | None], list[Any]]:
    path = folder / "app.opk"
    path.write_bytes(pack(entries))
    return outcomes(None, launches, folder, triton_settings=f"pack={path},freeze", **settings)


@pytest.mark.parametrize("name", FAILURES)
def test_a_driver_that_fails_once(
    entries: list[Entry], tmp_path: Path, name: str, snapshot: SnapshotAssertion, request: Any
) -> None:
    code, launched = FAILURES[name]
    if name.startswith("cuFuncSet"):
        entries = with_shared(entries, 100_000)
    texts, records = from_pack(entries, tmp_path, [launched, launched], fail=f"{name}:1:{code}")
    assert texts[0] == snapshot
    assert texts[0] is not None
    assert (texts[1], len(records)) == (None, 1)


def test_a_driver_whose_answer_is_lost_is_not_a_damaged_pack(entries: list[Entry], tmp_path: Path) -> None:
    texts, _ = from_pack(entries, tmp_path, [LEFT], fail="cuFuncGetParamInfo:1:2")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in texts[0]


def test_too_much_shared_memory(entries: list[Entry], tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    texts, records = from_pack(with_shared(entries, 240_000), tmp_path, [LEFT])
    assert texts[0] == snapshot
    assert records == []


def test_a_driver_that_is_absent(entries: list[Entry], tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    source, target = tmp_path / "launches.json", tmp_path / "results.jsonl"
    source.write_text(json.dumps([LEFT, LEFT]))
    env = stub.environment() | {"LD_LIBRARY_PATH": "", "OPWRIGHT_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [runtime.build(stub.NATIVE / "triton_runner.cpp"), source, target],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(line)["error"] for line in target.read_text().splitlines())
    if "cuInit" in first["message"]:
        pytest.skip("this machine has a driver")
    assert first == second
    assert first["message"] == snapshot


DRIVERS = {
    "no devices": {"devices": 0},
    "older than the cubin": {"driver_version": 12000},
    "other architecture": {"arch": 100},
}


@pytest.mark.parametrize("name", DRIVERS)
def test_a_driver_that_cannot(
    entries: list[Entry], tmp_path: Path, name: str, snapshot: SnapshotAssertion
) -> None:
    texts, records = from_pack(entries, tmp_path, [LEFT], **DRIVERS[name])
    assert texts[0] == snapshot
    assert records == []


# ---- capture


def capture(status: int, stream: str = "new") -> dict[str, Any]:
    return {"do": "capture", "stream": stream, "status": status}


def test_capture(python: Path, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    def on(stream: str, value: int = 5) -> dict[str, Any]:
        return launch("scaled", OUT, number(value), C, stream=stream)

    texts, records = outcomes(
        python,
        [
            capture(1),
            on("new"),
            capture(0),
            on("new"),
            capture(1),
            on("new"),
            on("new", 6),
            on("new", 16),
            capture(0),
            on("new", 16),
        ],
        tmp_path,
    )
    assert [text is None for text in texts] == [True, False, True, True, True, True, True, False, True, True]
    assert len(records) == 4
    assert texts[1] == snapshot(name="before anything")
    assert texts[7] == snapshot(name="another class")


def test_capture_refuses_to_load(entries: list[Entry], tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    texts, records = from_pack(
        entries, tmp_path, [capture(1), LEFT | {"stream": "new"}, capture(0), LEFT | {"stream": "new"}]
    )
    assert texts[1] == snapshot
    assert (texts[3], len(records)) == (None, 1)


def test_capture_of_another_stream_refuses_to_load(entries: list[Entry], tmp_path: Path) -> None:
    texts, _ = from_pack(
        entries,
        tmp_path,
        [
            capture(1, "captured"),
            LEFT | {"stream": "free"},
            capture(0, "captured"),
            LEFT | {"stream": "free"},
        ],
    )
    assert texts[3] is None
    assert texts[1] is None or texts[1].startswith("capturing: ")


# ---- frozen


def left(pointer: str, address: int, n: int, c: str) -> dict[str, Any]:
    return launch("left", {"tensor": pointer, "address": address}, number(n), constant(c), file=PACKED)


MISSING = {
    "another alignment": (left("i32", 0x1004, 5, "1"), "argument 1 `p`"),
    "another divisibility": (left("i32", 0x1000, 16, "1"), "argument 2 `n`"),
    "another constant": (left("i32", 0x1000, 5, "3"), "argument 3 `C`"),
    "another dtype": (left("fp32", 0x1000, 5, "1"), "argument 1 `p`"),
    "a shorter class": (left("i32", 0x1000, 5, "10"), "argument 3 `C`"),
    "another option": (left("i32", 0x1000, 5, "1") | {"options": {"num_warps": 8}}, "options"),
    "another function": (launch("right", OUT, number(5), C, file=PACKED), ""),
    "another file": (LEFT | {"file": "/elsewhere/kernels.py"}, ""),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_frozen_process_names_what_is_missing(
    entries: list[Entry], tmp_path: Path, name: str, snapshot: SnapshotAssertion
) -> None:
    launched, named = MISSING[name]
    base = next(entry for entry in entries if entry.record.get("key") == "*i32:16, i32, =1")
    more = [synthetic_packs.changed(base, key=key) for key in ("*i64:16, i64:16, =100", "*fp16, i32:16, =7")]
    texts, records = from_pack([*entries, *more], tmp_path, [launched])
    assert records == []
    assert not named or f"differs  {named}" in texts[0]
    assert texts[0] == snapshot


def test_nothing_is_loaded(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    texts, _ = outcomes(None, [LEFT], tmp_path, triton_settings="freeze")
    assert texts[0] == snapshot


def test_freeze_keeps_what_is_loaded(python: Path, tmp_path: Path) -> None:
    known, other = (launch("scaled", OUT, number(n), C) for n in (5, 16))
    texts, records = outcomes(python, [known, {"do": "freeze"}, known, other], tmp_path)
    assert [text is None for text in texts] == [True, True, True, False]
    assert len(records) == 2


@pytest.mark.parametrize(
    "text", ["pyhton=x", "pack=/nowhere.opk", "timeout", "=", "freeze,record=/nowhere/keys"]
)
def test_settings(tmp_path: Path, text: str, snapshot: SnapshotAssertion) -> None:
    texts, records = outcomes(None, [LEFT], tmp_path, triton_settings=text)
    assert texts[0] == snapshot
    assert records == []


def test_a_cache_that_cannot_be_written(python: Path, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    (tmp_path / "cache").write_text("a file")
    texts, records = outcomes(python, [launch("scaled", OUT, number(5), C)], tmp_path)
    assert texts[0] == snapshot
    assert records == []


@pytest.mark.parametrize(
    "name", ["answers neither", "answers an empty error", "answers a description of nothing"]
)
def test_a_worker_that_lies_is_named(tmp_path: Path, name: str) -> None:
    fake = fake_python(tmp_path, FAKES[name])
    texts, _ = outcomes(fake, [launch("scaled", OUT, number(5), C)], tmp_path)
    assert texts[0].startswith("worker: `scaled`")


def test_a_description_of_another_function_is_not_believed(python: Path, tmp_path: Path) -> None:
    before, _ = LIARS["describes another function"]
    fake = fake_python(tmp_path, PROXY.format(before=before, after="pass"), python)
    texts, _ = outcomes(fake, [launch("scaled", OUT, number(5))], tmp_path)
    assert texts[0].startswith("worker: `scaled`")


@pytest.mark.parametrize("text", ["timeout=", "timeout=10m", "workers=many", "timeout=-5"])
def test_settings_that_are_no_numbers(tmp_path: Path, text: str) -> None:
    texts, _ = outcomes(None, [LEFT], tmp_path, triton_settings=text)
    assert "OPWRIGHT_TRITON" in texts[0].split("hint")[0]
