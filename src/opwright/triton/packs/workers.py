"""Compile workers: processes of the Pythons that have Triton, asked one line at a time."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from opwright.processes import Process

FOLDER = Path(__file__).parents[1]  # of the package `worker`
PROGRAM = "import sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)]; import worker; worker.main()"
_TIMEOUT_S = 600.0
_TRIES = 2


class WorkerGone(Exception):
    """A worker ended, was too slow, or sent an invalid reply."""


class NoPython(WorkerGone):
    """A worker cannot even be started."""


class Worker:
    """One process."""

    def __init__(self, python: str) -> None:
        self.python = python
        self._numbers = itertools.count(1)
        self._received = b""
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = Process(
                [python, "-c", PROGRAM, str(FOLDER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                bufsize=0,
            )
        except OSError as error:
            self._complaints.close()
            raise NoPython(f"`{python}` cannot be run: {error.strerror}") from error

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the reply to a request.

        Raises:
            WorkerGone: There is none.
        """
        number = next(self._numbers)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps({"id": number, **request}) + "\n").encode())
        except OSError as error:
            raise WorkerGone(self._how_it_ended()) from error
        line = self._line()
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict) or reply.get("id") != number:
            raise WorkerGone(f"the worker of `{self.python}` answered another request")
        return reply

    def kill(self) -> None:
        """Ends the process while another thread may be waiting for its reply, which learns it that way."""
        self._process.kill()

    def close(self) -> None:
        """Ends the process that no thread is waiting for."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self._process.wait()
        self._complaints.close()

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._received:
            ready, _, _ = select.select([descriptor], [], [], _TIMEOUT_S)
            if not ready:
                raise WorkerGone(f"the worker of `{self.python}` did not answer within {_TIMEOUT_S:.0f} s")
            found = os.read(descriptor, 1 << 16)
            if not found:
                raise WorkerGone(self._how_it_ended())
            self._received += found
        line, self._received = self._received.split(b"\n", 1)
        return line

    def _how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        status = self._process.poll()
        how = (
            "closed its output"
            if status is None
            else f"was killed by signal {-status}"
            if status < 0
            else f"ended with status {status}"
        )
        self._complaints.seek(0)
        said = self._complaints.read().decode("utf-8", "replace").strip().splitlines()
        return f"the worker of `{self.python}` {how}" + (f": {said[-1]}" if said else "")


class WorkerPool:
    """As many workers as may run at a time, of whichever Pythons; threads take and give them back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._all: list[Worker] = []
        self._is_closed = False

    def ask(self, python: str, request: dict[str, Any]) -> dict[str, Any]:
        """Returns a worker's reply; a worker that ends is replaced once.

        Raises:
            WorkerGone: Two workers ended at this request.
        """
        for attempt in range(_TRIES):
            worker = self._take(python)  # which may raise NoPython: not tried again
            try:
                reply = worker.ask(request)
            except WorkerGone:
                self._remove(worker)
                if attempt + 1 == _TRIES or self._is_closed:
                    raise
            except BaseException:
                self._remove(worker)
                raise
            else:
                with self._lock:
                    self._idle.append(worker)
                return reply
        raise AssertionError

    def close(self) -> None:
        """Ends every worker, the busy ones too."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            busy = [worker for worker in self._all if worker not in idle]
        for worker in busy:
            worker.kill()
        for worker in idle:
            self._remove(worker)

    def _take(self, python: str) -> Worker:
        with self._lock:
            if self._is_closed:
                raise WorkerGone("the build was stopped")
            for index, worker in enumerate(self._idle):
                if worker.python == python:
                    return self._idle.pop(index)
            surplus = self._idle.pop(0) if self._idle else None
        if surplus is not None:  # of another Python: the number of processes stays that of the threads
            self._remove(surplus)
        worker = Worker(python)
        with self._lock:
            self._all.append(worker)
        return worker

    def _remove(self, worker: Worker) -> None:
        with self._lock:
            self._all.remove(worker)
        worker.close()


def is_installed() -> bool:
    """Returns whether this Python has Triton; it is not imported."""
    found = importlib.util.find_spec("triton")
    return found is not None and found.origin is not None  # no mere folder of that name


def default_python() -> str:
    """Returns the Python whose Triton compiles: the one of OPWRIGHT_TRITON, this one, else as the C++ side chooses."""
    for item in os.environ.get("OPWRIGHT_TRITON", "").split(","):
        if item.startswith("python="):
            return item.partition("=")[2]
    if is_installed():
        return sys.executable
    environment = os.environ.get("VIRTUAL_ENV")
    python = os.path.join(environment, "bin", "python") if environment else ""
    return python if python and os.access(python, os.X_OK) else "python3"
