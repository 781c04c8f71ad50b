"""A worker that is missing, slow, killed or lying is an Error, and a cache that cannot be written, too."""

from __future__ import annotations

import re
import sys
import textwrap
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import runtime
from fault_cases import HEAD, KERNEL, OUT, C, launch, number, outcomes
from syrupy.assertion import SnapshotAssertion

pytestmark = pytest.mark.compiler

# ---- workers

TWICE = "failed twice: "
NEITHER = "answered with neither a result nor an error"
# name -> what its program does, what the error says that the compile worker did
FAKES = {
    "dies at once": ("sys.exit(3)", TWICE + "it ended with status 3"),
    "is killed": ("read(); os.kill(os.getpid(), 9)", TWICE + "it was killed by signal 9"),
    "answers garbage": ("read(); write('Traceback (most recent call last):')", TWICE + "no JSON at byte 0"),
    "prints a banner": ("write('Welcome to Python'); read(); write(reply(error))", TWICE + "no JSON at byte 0"),
    "answers nothing": ("read(); write('')", TWICE + "no JSON at byte 0"),
    "answers another request": (
        "read(); write(json.dumps({'id': 99, 'ok': {}}))",
        TWICE + "it answered another request",
    ),
    "answers a list": ("read(); write('[1, 2]')", TWICE + "it answered another request"),
    "answers no id": ("read(); write('{\"ok\": {}}')", TWICE + "it answered another request"),
    "answers neither": ("write(json.dumps({'id': read()['id']}))", NEITHER),
    "answers an empty error": ("write(json.dumps({'id': read()['id'], 'error': {}}))", NEITHER),
    "closes its output": ("read(); os.close(1); time.sleep(30)", TWICE + "it closed its output"),
    "is slow": ("read(); time.sleep(30)", TWICE + "it did not answer within 1 s"),
    "answers in pieces and stops": (
        "read(); sys.stdout.write('{\"id\": 1, '); sys.stdout.flush(); time.sleep(30)",
        TWICE + "it did not answer within 1 s",
    ),
}  # fmt: skip
EMPTY_DESCRIPTIONS = {
    "answers an empty description": "write(json.dumps({'id': read()['id'], 'ok': {}}))",
    "answers a description of nothing": "write(json.dumps({'id': read()['id'], 'ok': {'params': []}}))",
}
KERNELS = "<opwright>/tests/integration/triton/kernels/fault_kernels.py"
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


def said(what: str, place: str = KERNELS) -> str:
    return f"""worker: `scaled` ({place}): the compile worker {what}

  python  <tmp>/bin/python
  worker  <worker>

hint: name a Python that has Triton 3.5 to 3.9: OPWRIGHT_TRITON=python=/path/to/venv/bin/python"""


def refusal_by(body: str, folder: Path) -> str:
    """What a launch says that has this worker."""
    fake = fake_python(folder, body)
    runtime.build(runtime.RUNNER)  # the first test to come would be timed with it
    start = time.monotonic()
    texts, records = outcomes(fake, [launch("scaled", OUT, number(5), C)], folder, triton_settings="timeout=1")
    assert records == []
    assert time.monotonic() - start < 8
    return texts[0]


@pytest.mark.parametrize("name", FAKES)
def test_a_worker_that_does_not_work(tmp_path: Path, name: str) -> None:
    body, what = FAKES[name]
    assert refusal_by(body, tmp_path) == said(what)


@pytest.mark.parametrize("name", EMPTY_DESCRIPTIONS)
def test_a_worker_that_describes_nothing(tmp_path: Path, name: str) -> None:
    text = refusal_by(EMPTY_DESCRIPTIONS[name], tmp_path)
    assert text == f"worker: `scaled` ({KERNELS}): the compile worker described another function: ``"


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
# name -> what it changes before and after; what it writes is not the kernel that was asked for
LIARS = {
    "writes nothing": ("", "request['do'] == 'compile' and os.unlink(out)"),
    "writes half": ("", "request['do'] == 'compile' and os.truncate(out, 2000)"),
    "writes another kernel": ("if request['do'] == 'compile': request['args'][2] = '=2'", ""),
    "writes another function": (
        "if request['do'] == 'compile': request['function'] = 'whole'; request['args'] = ['*fp32:16', 'i32']",
        "",
    ),
    "writes for another GPU": ("if request['do'] == 'compile': request['arch'] = 80", ""),
    "writes with other options": ("if request['do'] == 'compile': request['options'] = {'num_warps': 8}", ""),
}  # fmt: skip
WORDLESS = "request['do'] == 'compile' and (answer.pop('ok'), answer.update(error={'kind': 'compile'}))"
OF_ANOTHER = "if request['do'] == 'describe': request['function'] = 'whole'"


def proxy(folder: Path, python: Path, before: str = "", after: str = "") -> Path:
    return fake_python(folder, PROXY.format(before=before or "pass", after=after or "pass"), python)


@pytest.mark.parametrize("name", LIARS)
def test_a_worker_that_writes_something_else(python: Path, tmp_path: Path, name: str) -> None:
    fake = proxy(tmp_path, python, *LIARS[name])
    texts, records = outcomes(fake, [launch("scaled", OUT, number(5), C)], tmp_path)
    assert records == []
    assert texts == [
        f"""worker: `scaled` ({KERNELS}:8): the compile worker answered, but did not write this kernel

  kernel  *fp32:16, i32, =1, i32
  file    <tmp>/cache/opwright-store/triton/<digest>.opk"""
    ]


def test_a_worker_that_refuses_without_a_word(python: Path, tmp_path: Path) -> None:
    texts, records = outcomes(proxy(tmp_path, python, after=WORDLESS), [launch("scaled", OUT, number(5), C)], tmp_path)
    assert (texts, records) == ([said(NEITHER, f"{KERNELS}:8")], [])


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
    texts, _ = outcomes(python, [launch("scaled", OUT, number(5), file=file)], tmp_path, triton_settings="timeout=1")
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


def test_a_cache_that_cannot_be_written(python: Path, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    (tmp_path / "cache").write_text("a file")
    texts, records = outcomes(python, [launch("scaled", OUT, number(5), C)], tmp_path)
    assert texts[0] == snapshot
    assert records == []


@pytest.mark.parametrize("arguments", [(OUT, number(5), C), (OUT, number(5))], ids=["its own", "of the other"])
def test_a_description_of_another_function_is_refused(python: Path, tmp_path: Path, arguments: tuple) -> None:
    texts, records = outcomes(proxy(tmp_path, python, before=OF_ANOTHER), [launch("scaled", *arguments)], tmp_path)
    assert texts == [f"worker: `scaled` ({KERNELS}): the compile worker described another function: `whole`"]
    assert records == []
