"""`opwright bench`: what it takes, the process that measures, earlier versions."""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import errno
import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from opwright import records
from opwright.bench import versions, worker
from opwright.cli import bench_command
from opwright.cli.bench_command import parse_axis, parse_cpus, parse_devices
from opwright.cli.bench_tables import print_base, print_bench, table_of
from opwright.errors import CheckError, NotVerifiedError, RecordError, TargetError
from opwright.isolation import Running, WorkerEnded, describe_error
from opwright.records import BenchRecord, Comparison, Conditions, Machine, Measurement, Timing

MACHINE = Machine("EPYC", 2, "", "Linux", "3.11", "2.13", "g++ 12", 0.5)


def make_record(us: float = 10.0, name: str = "ns::f", cpu: str = "EPYC") -> BenchRecord:
    timings = [Timing("opwright", us, us, 0.0, [us] * 16), Timing("eager", 30.0, 30.0, 0.0, [30.0] * 16)]
    one = Measurement(
        "forward",
        "f32[8]",
        {},
        "f32",
        64,
        None,
        timings,
        0.5,
        True,
        comparisons=[Comparison("eager", 30 / us, 0.01, 8)],
    )
    machine = Machine(**{**vars(MACHINE), "cpu": cpu})
    conditions = Conditions("own", [0, 1], "keeps", 0.0, 0.0)
    return BenchRecord(name, [one], {}, True, 2, machine, 1.0, 1.0, conditions=conditions)


def test_axes_are_sizes_shapes_and_values() -> None:
    assert parse_axis("n=1024,4096") == ("n", [1024, 4096])
    assert parse_axis("batch=512,8x128") == ("batch", [512, (8, 128)])
    assert parse_axis("approximate=tanh,none") == ("approximate", ["tanh", "none"])
    dim, values = parse_axis("dim=-1,0.5")
    assert (dim, values, type(values[0])) == ("dim", [-1, 0.5], int)
    assert parse_axis("bias=-") == ("bias", [None])
    assert parse_axis("flag=true,false") == ("flag", [True, False])
    assert parse_axis("eps=1e-5") == ("eps", [1e-5])
    for wrong in ("n", "n=", "=3"):
        with pytest.raises(CheckError, match="--axis`: invalid value"):
            parse_axis(wrong)


def test_cpus_are_numbers_and_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_command.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert parse_cpus("0-3") == [0, 1, 2, 3]
    assert parse_cpus("0,2-3") == [0, 2, 3]
    assert parse_cpus(None) == []
    with pytest.raises(CheckError, match="--cpus`: invalid value"):
        parse_cpus("all")
    with pytest.raises(CheckError, match="names CPUs that this process cannot use"):
        parse_cpus("3-4")


def test_devices_are_numbers_and_ranges() -> None:
    assert parse_devices(None) == []
    assert parse_devices("0,2-3") == ["cuda:0", "cuda:2", "cuda:3"]
    assert parse_devices("cuda:1,cuda:0") == ["cuda:1", "cuda:0"]
    for wrong in ("", ",", "3-0", "0,,1", "all"):
        with pytest.raises(CheckError, match="--devices`: invalid value"):
            parse_devices(wrong)
    with pytest.raises(CheckError, match="names a device twice"):
        parse_devices("0-1,1")


PROGRAM = """
import os, sys
import torch
from jaxtyping import Float
from torch import Tensor
from opwright import operator

print("who reads JSON does not want this")

@operator("bench_process::aborts")
def aborts(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    if x.shape == (4321,) and x.device.type == "cpu":
        os.kill(os.getpid(), 6)
    return x * 2

@operator("bench_process::fine")
def fine(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    return x * 2
"""


# The process that measures is a fork of the command, in place of a new interpreter that imports PyTorch.
FORKED = """
from opwright.bench import worker
from opwright.isolation import Limits, Worker, fork

def start_worker(request, threads):
    def run(channel):
        channel.receive = lambda: request
        worker.answer(channel)
    return Worker(fork(run), Limits(request["timeout_s"]))

worker.start_worker = start_worker
"""


def command(run_python, *arguments: str, before: str = ""):
    program = f"import sys; sys.argv = {['opwright', 'bench', *arguments]!r}\nfrom opwright.cli import main; main()"
    return run_python(before + program, check=False)


def test_an_operator_that_ends_the_process_is_named_and_the_others_are_measured(run_python, tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(PROGRAM)
    flags = ["--against", "eager", "--seconds", "0.01", "--direction", "forward", "--dtype", "f32", "--threads", "1"]
    result = command(run_python, "two.py", "--axis", "batch=4321", *flags, "--json")
    assert result.returncode == 1
    assert "`bench_process::aborts`: it crashed the process: SIGABRT" in result.stderr
    refused, found = json.loads(result.stdout)
    assert (refused["name"], refused["measurements"]) == ("bench_process::aborts", [])
    assert refused["refused"] == "it crashed the process: SIGABRT (Aborted) (while timing forward x=f32[4321])"
    assert found["name"] == "bench_process::fine"
    (measured,) = found["measurements"]
    assert (measured["case"], measured["named_case"]) == ("f32[4321]", "x=f32[4321]")
    assert found["threads"] == 1
    assert found["conditions"]["process"] == "own"
    assert "who reads JSON" in result.stderr


def test_an_option_that_one_operator_of_a_file_cannot_take_leaves_the_others(run_python, tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text("""
from jaxtyping import Float, Int
from torch import Tensor
from opwright import operator

@operator("bench_process::counts")
def counts(x: Int[Tensor, "*s"]) -> Int[Tensor, "*s"]:
    return x + 1

@operator("bench_process::doubles")
def doubles(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    return x * 2
""")
    flags = ["--against", "eager", "--seconds", "0.01", "--direction", "forward", "--axis", "s=64"]
    result = command(run_python, "two.py", "--dtype", "f32", *flags, "--json", before=FORKED)
    assert result.returncode == 1
    assert "`bench_process::counts`: it has no f32" in result.stderr
    found, refused = json.loads(result.stdout)
    assert (refused["name"], refused["measurements"]) == ("bench_process::counts", [])
    assert (found["name"], len(found["measurements"])) == ("bench_process::doubles", 1)


def test_what_cannot_be_measured_is_said(run_python, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    program = PROGRAM.replace('print("who reads JSON does not want this")', "")
    (tmp_path / "two.py").write_text(program)
    (tmp_path / "one_dtype.py").write_text(
        program[: program.index("@operator")].replace("Float", "Float32, Int64")
        + """
@operator("bench_process::halves")
def halves(x: Float32[Tensor, "n"], rows: Int64[Tensor, "k"]) -> Float32[Tensor, "k"]:
    return x[rows] / 2
"""
    )
    for arguments in (
        ["two.py::fine", "--axis", "m=3"],
        ["two.py::fine", "--axis", "batch=-"],
        ["two.py::fine", "--dtype", "float12"],
        ["two.py::fine", "--dtype", "i64"],
        ["two.py::fine", "--dtype", "i32", "--dtype", "i64"],
        ["one_dtype.py", "--dtype", "bf16"],
        ["one_dtype.py", "--dtype", "i64"],
        ["two.py", "--axis", "m=3"],
        ["two.py::fine", "--direction", "sideways"],
        ["two.py::fine", "--against", "eagr"],
        ["two.py::fine", "--device", "gpu"],
        ["two.py::fine", "--base", "no-such-thing"],
        ["nothing.py"],
        ["two.py", "--cpus", "4095"],
        ["two.py", "--threads", "0"],
        ["two.py", "--call", "--base", "HEAD"],
        ["two.py", "--call", "--axis", "n=4096"],
        ["two.py", "--devices", "0,x"],
        ["two.py", "--devices", "0,0"],
        ["two.py", "--devices", "0,1", "--call"],
        ["two.py", "--devices", "0,1", "--device", "cuda"],
        ["two.py", "--devices", "97"],
    ):
        result = command(run_python, *arguments, before=FORKED)
        assert result.returncode == 2
        text = result.stderr.replace(str(tmp_path.resolve()), "FOLDER").replace(torch.__version__, "TORCH")
        text = re.sub(r"some of 0.*", "some of 0, ...", text)
        assert text == snapshot(name=" ".join(arguments))


class Told(worker.Watcher):
    """Prints what is said, as the command does."""

    def say(self, text: str) -> None:
        print(text, file=sys.stderr)


class Interrupted:
    """A worker that is interrupted behind one of two inputs."""

    running = SimpleNamespace(who="", what="timing")

    def events(self, is_interrupted=None):
        yield {"operator": "ns::f", "machine": vars(MACHINE), "memory_hint": "smaller"}
        record = make_record()
        found = records.builtins_of(record.measurements[0])
        record.measurements = []
        yield {"started": records.encodable(record), "inputs": 2}
        yield {"measured": found, "number": 1}
        raise KeyboardInterrupt

    def close(self) -> None: ...


def test_an_interrupted_run_keeps_what_it_has_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(worker, "start_worker", lambda request, threads: Interrupted())
    assert bench_command.bench_operators("f.py", out=tmp_path) == 130
    said = capsys.readouterr()
    assert "forward: 3.00x faster than eager (±1 %) (1 input)" in said.out
    assert "skipped: interrupted after 1 of 2 inputs" in said.out
    assert "[1/2] forward f32[8]: 10.00 us, 3.00x ±1 % against eager" in said.err
    kept = records.read(tmp_path / "f.bench.json")
    assert [m.case for m in kept.measurements] == ["f32[8]"]
    assert kept.refused == ""


class Refined(Interrupted):
    def events(self, is_interrupted=None):
        with contextlib.suppress(KeyboardInterrupt):
            yield from super().events()
        if self.again:
            yield {"measured": records.builtins_of(make_record(20.0).measurements[0]), "number": 1}


@pytest.mark.parametrize(("is_live", "again", "tables"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_first_figures_are_shown_where_they_are_refined_and_have_no_line(
    is_live: bool, again: bool, tables: int, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(worker, "start_worker", lambda request, threads: Refined())
    monkeypatch.setattr(Refined, "again", again, raising=False)
    made = bench_command.Progress("")
    made.is_live = is_live
    monkeypatch.setattr(bench_command, "Progress", lambda title: made)
    bench_command.bench_operators("f.py")
    said = capsys.readouterr().err
    assert said.count("First figures, to be refined:") == tables
    assert said.count("[1/2] forward f32[8]") == (not is_live)
    assert said.count("Measuring f.py: verify first, then 8 s for each operator") == 1


class Warned(Interrupted):
    def events(self, is_interrupted=None):
        yield {"operator": "ns::f", "machine": vars(MACHINE), "memory_hint": "smaller"}
        record = make_record()
        record.warnings = ["the machine is busy (load 8.1 on 2 cores): confidence intervals reach ±30 %"]
        yield {"record": records.encodable(record)}


@pytest.mark.parametrize(("strict", "code"), [(False, 0), (True, 1)])
def test_warnings_are_an_exit_code_where_asked_for(strict: bool, code: int, monkeypatch, capsys) -> None:
    monkeypatch.setattr(worker, "start_worker", lambda request, threads: Warned())
    assert bench_command.bench_operators("f.py", strict=strict) == code
    said = capsys.readouterr()
    assert "warning: the machine is busy (load 8.1 on 2 cores): confidence intervals reach ±30 %" in said.err
    assert "10" in said.out


class Crashed(Interrupted):
    def events(self, is_interrupted=None):
        with contextlib.suppress(KeyboardInterrupt):
            yield from super().events()
        raise WorkerEnded(
            "crashed the process: SIGSEGV (Segmentation fault)", Running("opwright", "timing forward f32[9]")
        )


def test_a_crash_keeps_what_was_measured_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    workers = iter([Crashed(), Done()])
    monkeypatch.setattr(worker, "start_worker", lambda request, threads: next(workers))
    assert bench_command.bench_operators("f.py", out=tmp_path) == 1
    kept = records.read(tmp_path / "f.bench.json")
    assert len(kept.measurements) == 1
    assert kept.refused == "it crashed the process: SIGSEGV (Segmentation fault) (while timing forward f32[9])"


class Greedy(Interrupted):
    """A worker that takes all memory on its only input."""

    def events(self, is_interrupted=None):
        yield {"operator": "ns::f", "machine": vars(MACHINE), "memory_hint": "smaller"}
        yield {"started": records.encodable(make_record()), "inputs": 1}
        raise WorkerEnded("took more than 17.3 GiB of memory", Running("opwright", "timing forward f32[9]"))


def test_one_that_takes_all_memory_is_told_how_to_choose_sizes(monkeypatch, tmp_path: Path, capsys) -> None:
    workers = iter([Greedy(), Done()])
    monkeypatch.setattr(worker, "start_worker", lambda request, threads: next(workers))
    assert bench_command.bench_operators("f.py", out=tmp_path) == 1
    kept = records.read(tmp_path / "f.bench.json")
    assert kept.refused == "it took more than 17.3 GiB of memory (while timing forward f32[9])"
    assert kept.hint == "smaller"
    assert "hint: smaller" in capsys.readouterr().err


class Done(Interrupted):
    def events(self, is_interrupted=None):
        yield from ()


# --- several devices ------------------------------------------------------------------------------------------------


class OnDevice(Interrupted):
    """A worker that measures its part of five inputs, and is refused on the second device if `refuses` is set."""

    refuses = False

    def __init__(self, request) -> None:
        self.device, (self.first, self.count) = request["device"], request["part"]
        self.is_done = "ns::f" in request["skip"]

    def events(self, is_interrupted=None):
        if self.is_done:
            return
        yield {"operator": "ns::f", "machine": vars(MACHINE), "memory_hint": "smaller"}
        record = dataclasses.replace(make_record(), device=self.device)
        parts = [dataclasses.replace(record.measurements[0], case=f"f32[{n}]") for n in range(5)]
        record.measurements = parts[self.first :: self.count]
        started = dataclasses.replace(record, measurements=[])
        yield {"started": records.encodable(started), "inputs": len(record.measurements)}
        yield {"measured": records.builtins_of(record.measurements[0]), "number": 0}
        if self.refuses:
            yield {"refused": describe_error(NotVerifiedError("ns::f", "it does not pass verify"))}
        else:
            yield from self.rest(record, is_interrupted)

    def rest(self, record, is_interrupted):
        yield {"record": records.encodable(record)}


class InterruptedOnDevice(OnDevice):
    """Ctrl-C reaches the first thread; the others see it because they ask."""

    both_run = threading.Barrier(2)

    def rest(self, record, is_interrupted):
        self.both_run.wait(60)
        if self.first == 0:
            time.sleep(0.1)  # the first thread waits for these by now
            _thread.interrupt_main()
        until = time.monotonic() + 60
        while not is_interrupted():
            assert time.monotonic() < until
            time.sleep(0.01)  # the first thread is to run
        yield from ()
        raise KeyboardInterrupt


def test_devices_share_the_inputs_and_their_records_are_merged(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(worker, "start_worker", lambda request, threads: OnDevice(request))
    assert bench_command.bench_operators("f.py", devices="0-1", out=tmp_path) == 0
    kept = records.read(tmp_path / "f.cuda.bench.json")
    assert [(m.case, m.device) for m in kept.measurements] == [(f"f32[{n}]", f"cuda:{n % 2}") for n in range(5)]
    assert "Measured ns::f on 5 inputs on 2 devices, EPYC" in capsys.readouterr().out


def test_what_both_devices_say_is_said_once(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(worker, "start_worker", lambda request, threads: OnDevice(request))
    monkeypatch.setattr(OnDevice, "refuses", True)
    assert bench_command.bench_operators("f.py", devices="0,1", out=tmp_path) == 1
    assert capsys.readouterr().err.count("it does not pass verify") == 1
    assert records.read(tmp_path / "f.cuda.bench.json").refused == "it does not pass verify"


def test_an_interrupted_run_keeps_what_all_devices_have_measured(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(worker, "start_worker", lambda request, threads: InterruptedOnDevice(request))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
    try:
        assert bench_command.bench_operators("f.py", devices="0,1", out=tmp_path) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    kept = records.read(tmp_path / "f.cuda.bench.json")
    assert [m.case for m in kept.measurements] == ["f32[0]", "f32[1]"]
    assert kept.left_out == ["cuda:0: interrupted after 1 of 3 inputs", "cuda:1: interrupted after 1 of 2 inputs"]


# --- earlier versions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "cpu", "code", "verdict", "is_hint"),
    [(10.0, "EPYC", 0, "same", False), (20.0, "EPYC", 1, "slower", False), (5.0, "EPYC", 0, "faster", False), (20.0, "Xeon", 0, "slower", True)],
)  # fmt: skip
def test_a_record_as_the_base(
    now: float, cpu: str, code: int, verdict: str, is_hint: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    records.save(make_record(cpu=cpu), tmp_path / "f.bench.json")
    (tmp_path / "damaged.json").write_text("{")
    monkeypatch.setattr(versions, "measure", lambda *args, **kwargs: ([make_record(now)], 0))
    (found,), exit_code = versions.compare_with_base({}, str(tmp_path), None, Told())
    assert exit_code == code
    assert (found.method, found.is_hint, [row.verdict for row in found.rows]) == ("record", is_hint, [verdict])
    assert ("Xeon" in found.reason) == is_hint


def test_a_base_without_records_or_without_this_operator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
) -> None:
    with pytest.raises(CheckError, match="there is no record of a benchmark here"):
        versions.compare_with_base({}, str(tmp_path), None, Told())
    records.save(make_record(name="ns::other"), tmp_path / "other.bench.json")
    monkeypatch.setattr(versions, "measure", lambda *args, **kwargs: ([make_record()], 0))
    assert versions.compare_with_base({}, str(tmp_path), None, Told()) == ([], 5)
    assert "ns::f is not among the records" in capsys.readouterr().err


class PretendWorker:
    """A side of a duel whose times are known."""

    US = {"base": 10.0, "now": 10.0}  # noqa: RUF012
    asked: list[str] = []  # noqa: RUF012
    cores: list[int | None] = []  # noqa: RUF012

    def __init__(self, request, threads, *, cwd, env) -> None:
        self.cores.append(request["core"])
        self.side = "base" if "tree" in request["target"] else "now"
        self.pending: list[str] = []

    def ask(self, name: str) -> None:
        PretendWorker.asked.append(f"{self.side}: {name}")
        self.pending.append(name)

    def events(self, is_interrupted=None):
        yield {"operator": "f"}
        yield {"running": ["opwright", "f32[8]"]}
        names = ["forward f32[8]", f"forward only {self.side}"]
        yield {"inputs": names, "named_cases": {names[0]: f"{self.side}=f32[8]", names[1]: self.side}}
        while self.pending:
            self.pending.pop()
            rounding = 1 + 0.001 * (len(PretendWorker.asked) % 7)
            yield {"block": [3 * self.US[self.side], self.US[self.side] * rounding]}

    def close(self) -> None: ...


@pytest.fixture
def two_trees(tmp_path: Path) -> tuple[Path, Path]:
    """Returns a project as it is now, and as it was."""
    for name in ("root", "tree"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "op.py").write_text("")
    return tmp_path / "root", tmp_path / "tree"


@pytest.fixture
def duel(two_trees, monkeypatch: pytest.MonkeyPatch):
    """Returns a function that compares two versions whose calls take that long."""
    root, tree = two_trees
    for name, value in {"asked": [], "cores": []}.items():
        monkeypatch.setattr(PretendWorker, name, value)
    monkeypatch.setattr(versions, "start_worker", PretendWorker)

    def run(*, base_us: float = 10.0, now_us: float = 10.0, threads: int | None = None, device="cpu", **request):
        monkeypatch.setattr(PretendWorker, "US", {"base": base_us, "now": now_us})
        request = {"target": str(root / "op.py"), "seconds": 0.0, "precision": 0.0, **request}
        operator = {"name": "ns::f", "machine": vars(MACHINE), "device": device}
        return versions.Duel(request, operator, "HEAD", root, tree, threads).run(Told())

    return run


@pytest.mark.parametrize(("now", "verdict"), [(10.0, "same"), (12.0, "slower"), (8.0, "faster")])
def test_two_versions_measure_in_turns(now: float, verdict: str, duel) -> None:
    record = duel(now_us=now)
    (row,) = record.rows
    # A tensor that has another name by now is the same input.
    assert (row.case, row.named_case, row.verdict) == ("f32[8]", "now=f32[8]", verdict)
    assert row.ratio == pytest.approx(10 / now, rel=0.01)
    assert record.missing == ["forward only base", "forward only now"]
    assert versions._exit_code([record], Told()) == (1 if verdict == "slower" else 0)
    sides = [asked.partition(":")[0] for asked in PretendWorker.asked]
    assert len(sides) == 2 * 4 * 2 * 8  # visits of a pair to an input, blocks of a visit, and pairs
    assert sides.count("base") == sides.count("now")
    assert all(set(sides[i : i + 2]) == {"base", "now"} for i in range(0, len(sides), 2))


def test_slow_calls_are_left_out_of_two_versions(duel, capsys) -> None:
    """Calls of minutes were made by the hundred."""
    record = duel(base_us=0.7e6, seconds=0.1)
    assert len(PretendWorker.asked) == 2
    assert record.rows == []
    (told,) = record.left_out
    assert re.fullmatch(r"forward f32\[8\]: a call of the base takes 7\d\d ms; `--seconds 2` has time for it", told)
    print_base(record)
    assert told in capsys.readouterr().err
    assert versions._exit_code([record], Told()) == 5


@pytest.mark.parametrize(
    ("threads", "device", "cores"),
    [(1, "cpu", [2, 2, 5, 5] * 4), (2, "cpu", [None] * 16), (1, "cuda", [None] * 16)],
)
def test_a_pair_has_one_core(threads: int, device: str, cores: list, duel) -> None:
    duel(threads=threads, device=device, cpus=[2, 5])
    assert PretendWorker.cores == cores


def test_an_operator_that_the_base_does_not_have_yet_is_skipped(two_trees, monkeypatch, capsys) -> None:
    class Missing(PretendWorker):
        def events(self, is_interrupted=None):
            if self.side == "base":
                raise TargetError("op.py", "there is no operator `f`")
            yield from super().events()

    root, tree = two_trees
    monkeypatch.setattr(versions, "start_worker", Missing)
    monkeypatch.setattr(versions, "_root_of", lambda target, ref: root)
    monkeypatch.setattr(versions, "_commit", lambda root, ref: "1234567890123")
    monkeypatch.setattr(versions, "checkout", lambda root, commit: contextlib.nullcontext(tree))
    operator = {"name": "ns::f", "machine": vars(MACHINE), "device": "cpu"}
    monkeypatch.setattr(versions, "measure", lambda request, threads, watcher: ([operator], 0))
    request = {"target": str(root / "op.py"), "seconds": 0.0, "precision": 0.0}
    assert versions.compare_with_base(request, "main", None, Told()) == ([], 5)
    said = capsys.readouterr().err
    assert "skipped: ns::f cannot be had of main (123456789012): there is no operator `f`" in said
    assert "there is nothing that both versions have" in said


def test_long_times_are_written_out(capsys) -> None:
    print_bench(make_record(23_812.4))
    printed = capsys.readouterr().out
    assert "  23,810  " in printed
    assert "e+" not in printed


def test_options_that_all_inputs_share_are_said_once(capsys) -> None:
    record = make_record()
    one = record.measurements[0]
    for i, case in enumerate(["f32[8] mode='a b' slope=0.5 keep=0", "f32[9] mode='a b' slope=0.5 keep=1"]):
        record.measurements[i:] = [dataclasses.replace(one, case=case)]
    print_bench(record)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:4]] == ["f32[8] keep=0", "f32[9] keep=1"]
    assert "all inputs: mode='a b' slope=0.5" in lines
    record.measurements[1:] = []
    print_bench(record)
    assert "f32[8] mode='a b' slope=0.5 keep=0  forward" in capsys.readouterr().out


@pytest.mark.parametrize(("columns", "shown"), [("120", "x=f32[8, 4] bias=f32[4]"), ("60", "f32[8, 4] f32[4]")])
def test_tensors_have_their_names_in_the_table_where_it_is_wide_enough(
    columns: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    record = make_record()
    one = record.measurements[0]
    cases = [(f"f32[{n}, 4] f32[4] keep=0", f"x=f32[{n}, 4] bias=f32[4] keep=0") for n in (8, 9)]
    record.measurements = [dataclasses.replace(one, case=case, named_case=named) for case, named in cases]
    lines = table_of(record)
    assert lines[1].split("  ")[0] == shown
    assert lines[3] == "all inputs: keep=0"
    record.measurements[0].named_case = ""  # a record of before
    assert table_of(record)[1].startswith("f32[8, 4] f32[4]  ")


@pytest.mark.parametrize("broken", ["no time", "no timings", "no samples"])
def test_a_record_whose_times_cannot_be_compared_is_skipped(broken: str, tmp_path: Path, capsys) -> None:
    record = make_record()
    one = record.measurements[0]
    if broken == "no time":
        one.timings[0].median_us = 0.0
    elif broken == "no timings":
        one.timings.clear()
    else:
        one.comparisons.clear()
        one.timings[1].samples_us.clear()
    records.save(record, tmp_path / "f.bench.json")
    with pytest.raises(CheckError, match="there is no record of a benchmark here"):
        versions.compare_with_base({"target": "f.py"}, str(tmp_path), None, Told())
    assert "it holds times that cannot be compared" in capsys.readouterr().err


def test_a_run_that_is_interrupted_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from opwright import cli
    from opwright.cli import parser

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["opwright", "bench", "f.py"])
    monkeypatch.setattr(parser, "app", SimpleNamespace(meta=interrupted))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130


@pytest.mark.parametrize(
    ("flag", "value"),
    [("seconds", -1.0), ("seconds", float("nan")), ("precision", -0.1), ("timeout", 0.0), ("timeout", float("inf"))],
)
def test_a_time_or_a_share_that_is_none(flag: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "measure", lambda *args, **kwargs: pytest.fail("it has been measured"))
    with pytest.raises(CheckError, match=f"`--{flag}`: must be a finite number"):
        bench_command.bench_operators("f.py", **{flag: value})


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker, "measure", lambda *args, **kwargs: pytest.fail("it has been measured"))
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing")):
        with pytest.raises(RecordError, match="no records can be written into this folder"):
            bench_command.bench_operators("f.py", out=folder)


def test_a_record_is_written_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(path: Path, text: str) -> None:
        with open(path, "w") as f:
            f.write(text[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    records.save(make_record(10.0), tmp_path / "f.bench.json")
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RecordError, match="this record cannot be written"):
        records.save(make_record(20.0), tmp_path / "f.bench.json")
    assert [path.name for path in tmp_path.iterdir()] == ["f.bench.json"]
    assert records.read(tmp_path / "f.bench.json").measurements[0].timings[0].median_us == 10.0


def test_an_operator_in_no_repository_has_no_earlier_commit(tmp_path: Path) -> None:
    (tmp_path / "op.py").write_text("")
    with pytest.raises(CheckError, match="it is in no git repository"):
        versions.compare_with_base({"target": str(tmp_path / "op.py")}, "HEAD~1", None, Told())


@pytest.mark.slow
def test_an_earlier_commit_is_measured_beside_this_one(run_python, tmp_path: Path) -> None:
    """Five pairs of processes: the one version is what was committed, the other what is there now."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "two.py").write_text(PROGRAM + "\nfine.sweep(batch=[(64,)])\n")
    for arguments in (["init", "-q"], ["add", "two.py"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *arguments], check=True)
    (tmp_path / "two.py").write_text(PROGRAM + "\nfine.sweep(batch=[(64,), (128,)])\n")
    flags = ["--direction", "forward", "--dtype", "f32", "--threads", "1", "--seconds", "0.01", "--json"]
    result = command(run_python, "two.py::fine", "--base", "HEAD", *flags)
    assert result.returncode in (0, 1), result.stderr  # whether it is faster is not what is tested
    (found,) = json.loads(result.stdout)
    assert (found["type"], found["method"], found["is_hint"]) == ("base", "interleaved", False)
    assert [row["case"] for row in found["rows"]] == ["f32[64]"]
    assert found["missing"] == ["forward f32[128]"]
    assert found["base"].startswith("HEAD (")
    trees = subprocess.run([*git, "worktree", "list"], check=True, capture_output=True, text=True).stdout
    assert len(trees.splitlines()) == 1
    unknown = command(run_python, "two.py::fine", "--base", "no-such-branch", *flags)
    assert unknown.returncode == 2
    assert "there is neither a record nor a commit of this name" in unknown.stderr
