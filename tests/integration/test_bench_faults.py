"""Operators that hang, exit, flood or never stop allocating once they are timed: each by its name, and the run goes on."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from opwright import isolation
from opwright.bench.worker import start_worker
from opwright.isolation import Running, WorkerEnded

# Fine wherever verify looks: what they do, they do at the size that is measured.
PROGRAM = """
import os, time
import torch
from jaxtyping import Float
from torch import Tensor
from opwright import operator

def declare(name, fault):
    def f(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        if x.shape == (4321,) and x.device.type == "cpu":
            fault()
        return x * 2
    return operator(f"bench_faults::{name}")(f)

def hang():
    while True:
        time.sleep(0.1)

def flood():
    while True:
        print("x" * 100_000)

def take_all():
    kept = []
    while True:
        kept.append(torch.ones(1 << 24))
        time.sleep(0.01)

def raise_it():
    raise ValueError("not this one")
"""
FLAGS = ["--axis", "batch=4321", "--seconds", "0.01", "--direction", "forward", "--dtype", "f32", "--threads", "1"]


def command(run_python, *arguments: str, before: str = ""):
    program = f"import sys; sys.argv = {['opwright', 'bench', *arguments]!r}\nfrom opwright.cli import main; main()"
    return run_python(before + program, check=False)


def test_each_fault_is_named_and_the_others_are_measured(run_python, tmp_path: Path) -> None:
    faults = {"exits": "lambda: os._exit(0)", "floods": "flood", "hangs": "hang", "raises": "raise_it", "right": "int"}
    declared = "\n".join(f'declare("{name}", {fault})' for name, fault in faults.items())
    (tmp_path / "faulty.py").write_text(f"{PROGRAM}\n{declared}\n")
    result = command(run_python, "faulty.py", *FLAGS, "--against", "eager", "--timeout", "3", "--json")
    assert result.returncode == 1
    found = {record["name"].partition("::")[2]: record for record in json.loads(result.stdout)}
    place = " (while timing forward x=f32[4321])"
    assert {name: record["refused"] for name, record in found.items()} == {
        "exits": "it ended the process, with exit code 0" + place,
        "floods": "it printed more than 16 MiB" + place,
        "hangs": "it did not return within 3 s" + place,
        "raises": "it raised ValueError: not this one" + place,
        "right": "",
    }
    assert {name: record["hint"] for name, record in found.items() if record["hint"]} == {
        "hangs": "`--timeout 600` waits longer"
    }
    assert [name for name, record in found.items() if record["measurements"]] == ["right"]
    assert "hint: `--timeout 600` waits longer" in result.stderr
    assert len(result.stderr) < 2 * 64 * 1024  # of what was printed, the beginning is shown


def test_one_that_refuses_its_own_input_is_named_and_the_others_are_measured(run_python, tmp_path: Path) -> None:
    (tmp_path / "op.py").write_text(f"""{PROGRAM}
from opwright.errors import KernelError

def give_up():
    raise KernelError("gives_up", "not this size")

declare("gives_up", give_up)
declare("right", int)
""")
    result = command(run_python, "op.py", *FLAGS, "--against", "eager", "--json", "--out", "records")
    refused, right = json.loads(result.stdout)
    assert (result.returncode, refused["refused"]) == (1, "not this size")
    assert len(right["measurements"]) == 1
    assert {path.name for path in (tmp_path / "records").iterdir()} == {"gives_up.bench.json", "right.bench.json"}


def test_a_rival_that_ends_the_process_is_left_out(run_python, tmp_path: Path) -> None:
    declared = 'fine = declare("fine", int)\n@fine.baseline\ndef baseline(x):\n    return os._exit(3) if len(x) == 4321 else x * 2'
    (tmp_path / "rival.py").write_text(f"{PROGRAM}\n{declared}\n")
    result = command(run_python, "rival.py", *FLAGS, "--against", "eager", "--json")
    (found,) = json.loads(result.stdout)
    assert result.returncode == 1
    assert found["left_out"] == ["eager: `eager` ended the process, with exit code 3"]
    assert [[t["candidate"] for t in m["timings"]] for m in found["measurements"]] == [["opwright"]]


def test_one_that_never_stops_allocating(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request_of) -> None:
    monkeypatch.setattr(isolation, "free_memory", lambda: 2 * 2**30)
    (tmp_path / "greedy.py").write_text(f'{PROGRAM}\ndeclare("greedy", take_all)\n')
    worker = start_worker(request_of(tmp_path / "greedy.py"), 1)
    with pytest.raises(WorkerEnded, match=r"took more than 1\.5 GiB of memory") as caught:
        list(worker.events())
    assert caught.value.running == Running("opwright", "timing forward x=f32[4321]")


def test_an_input_that_takes_all_memory_is_skipped_and_the_others_are_measured(run_python, tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text(f'{PROGRAM}\ndeclare("greedy", take_all)\n')
    flags = ["--axis", "s=4320,4321,4322", *FLAGS[2:], "--against", "eager", "--json"]
    less = "from opwright import isolation\nisolation.free_memory = lambda: 2 * 2**30\n"
    result = command(run_python, "greedy.py", *flags, before=less)
    assert result.returncode == 0, result.stderr
    (found,) = json.loads(result.stdout)
    assert (found["refused"], [m["case"] for m in found["measurements"]]) == ("", ["f32[4320]"])
    assert found["left_out"] == [
        "forward x=f32[4321]: it took more than 1.5 GiB of memory; "
        "`--axis` chooses smaller sizes, as `--axis n=256,1024`",
        "forward on 4,322 elements: it does not fit in memory; `--axis` chooses smaller sizes, as `--axis n=256,1024`",
    ]


def test_a_target_that_hangs_when_it_is_imported(tmp_path: Path, request_of) -> None:
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(600)")
    worker = start_worker(request_of(tmp_path / "sleeps.py") | {"timeout_s": 2.0}, None)
    with pytest.raises(WorkerEnded, match="did not return within 2 s") as caught:
        list(worker.events())
    assert caught.value.running.who == "target"


def test_what_it_leaves_running_is_ended_with_it(tmp_path: Path, request_of) -> None:
    pid = tmp_path / "pid"
    program = f"import os, subprocess, time\nopen({str(pid)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))\nos._exit(5)"
    (tmp_path / "starts.py").write_text(program)
    with pytest.raises(WorkerEnded, match="exit code 5"):
        list(start_worker(request_of(tmp_path / "starts.py"), None).events())
    limit = time.monotonic() + 10
    while is_running(pid.read_text()):
        assert time.monotonic() < limit
        time.sleep(0.05)


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def request_of():
    def request(path: Path) -> dict:
        return {
            "target": str(path), "skip": [], "against": [], "sweep": {"batch": [4321]}, "dtypes": ["f32"],
            "directions": ["forward"], "device": "cpu", "seconds": 0.01, "precision": 0.02, "measure_limits": False,
            "cpus": [], "mode": "bench", "timeout_s": 60.0, "candidate": "", "part": [0, 1], "env": {},
        }  # fmt: skip

    return request
