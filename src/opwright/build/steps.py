"""Runs the commands of a build side by side."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from opwright import settings
from opwright.processes import Process

_MIN_FREE_BYTES = 1 << 16  # a compiler that fails with less than this left failed for want of space


class StepFailed(Exception):
    """A command of a build failed.

    Attributes:
        step, output: which, and what it said.
        log: what all of them said.
        outputs: what each of those said that failed.
        seconds: how long the others took.
    """

    def __init__(self, outputs: dict[str, str], log: str, seconds: dict[str, float]) -> None:
        self.step, self.output = next(iter(outputs.items()))
        super().__init__(self.step)
        self.outputs, self.log, self.seconds = outputs, log, seconds


def run_all(
    commands: Mapping[str, Sequence[str]],
    work: Path,
    starts: dict[str, float] | None = None,
    outputs: dict[str, str] | None = None,
) -> dict[str, float]:
    """Runs commands side by side, at most OPWRIGHT_JOBS at a time; returns the seconds of each.

    What they say goes to `work/build.log`.

    Args:
        starts: gets when each began, by time.perf_counter.
        outputs: gets what each said.

    Raises:
        StepFailed: one of them failed; the others have ended too.
        OSError: the disk is full.
    """
    running: dict[str, tuple[Process, float, Path]] = {}
    try:
        return _run_all(commands, work, {} if starts is None else starts, {} if outputs is None else outputs, running)
    except BaseException:  # Ctrl-C that only this process has got, say
        for process, _, _ in running.values():
            _end(process)
        raise


def _end(process: Process) -> None:
    """Ends a command and, on Linux, what it has started: a compiler's driver leaves the compiler behind."""
    if process.poll() is None:
        _kill_below(process.pid)
        process.kill()
        process.wait()


def _kill_below(pid: int) -> None:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        for child in map(int, text.split()):
            _kill_below(child)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def _run_all(
    commands: Mapping[str, Sequence[str]],
    work: Path,
    starts: dict[str, float],
    outputs: dict[str, str],
    running: dict[str, tuple[Process, float, Path]],
) -> dict[str, float]:
    waiting = list(commands.items())
    seconds: dict[str, float] = {}
    logs: list[str] = []
    failed: dict[str, str] = {}
    environment = {**os.environ, "LC_ALL": "C"}
    while waiting or running:
        while waiting and len(running) < max(settings.jobs(), 1):
            name, command = waiting.pop(0)
            output = work / f"output{len(seconds) + len(running)}.txt"
            with open(output, "wb") as f:
                process = Process(
                    command,
                    cwd=work,
                    stdout=f,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                )
            running[name] = (process, time.perf_counter(), output)
        name = _wait_for_one(running)
        process, started, output = running.pop(name)
        seconds[name], starts[name] = time.perf_counter() - started, started
        text = output.read_text(errors="replace")
        output.unlink()
        if process.returncode < 0:
            text += f"{commands[name][0]}: killed by signal {-process.returncode}\n"
        outputs[name] = text
        logs.append(f"$ {shlex.join(commands[name])}\n{text}")
        if process.returncode != 0:
            failed[name] = text
    with open(work / "build.log", "a") as f:
        f.write("\n".join(logs))
    if failed:
        if full := _full_folder(work, "\n".join(failed.values())):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), full)
        raise StepFailed(
            {name: failed[name] for name in commands if name in failed},
            "\n".join(logs),
            {name: s for name, s in seconds.items() if name not in failed},
        )
    return seconds


def _full_folder(work: Path, output: str) -> str:
    """Returns the folder for want of whose space a compiler failed: a build's own, or that of temporary files."""
    temporary = os.environ.get("TMPDIR", "/tmp")
    if shutil.disk_usage(work).free < _MIN_FREE_BYTES:
        return str(work)
    with contextlib.suppress(OSError):  # compilers take another if it is not there
        if f"error writing to {temporary}/" in output or shutil.disk_usage(temporary).free < _MIN_FREE_BYTES:
            return temporary
    return str(work) if "No space left on device" in output else ""


def _wait_for_one(running: dict[str, tuple[Process, float, Path]]) -> str:
    pids = {process.pid: name for name, (process, _, _) in running.items()}
    if len(pids) == 1:
        name = next(iter(running))
        running[name][0].wait()
        return name
    while True:
        for name, (process, _, _) in running.items():
            if process.poll() is not None:
                return name
        time.sleep(0.001)
