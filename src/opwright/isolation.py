"""A worker process that takes requests as lines of JSON; a crash, a hang or a full memory ends it and not its caller.

The process that asks has a `Worker`; the module that runs in the other process has a `Channel`:

    worker = Worker("package.module", {"target": ...})       channel = Channel.open()
    for event in worker.events(): ...                        channel.send(record=...)

What the worker prints on stdout and stderr is shown on stderr.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from opwright import errors
from opwright.errors import OpwrightError

TIMEOUT_S = 120.0
_TICK_SECONDS = 0.25
# Outside of calls of a candidate: importing PyTorch and the reference in float64 take their time on a busy machine.
_MIN_OWN_SECONDS, _OWN_FACTOR = 600.0, 10
_MAX_OUTPUT, _MAX_SHOWN_OUTPUT = 16 * 2**20, 64 * 1024  # bytes
_MEMORY_SHARE = 0.75  # of the free memory when the process starts
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Running:
    """What a worker does.

    Attributes:
        who: the candidate that runs; "" where none does.
        what: the input, or what else is done.
    """

    who: str = ""
    what: str = "start"


class WorkerEnded(Exception):
    """A worker process has ended before it was done, or had to be ended.

    Attributes:
        how: what it did: "did not return within 120 s".
        running: what it was doing.
    """

    def __init__(self, how: str, running: Running) -> None:
        super().__init__(how)
        self.how, self.running = how, running

    def error(self, subject: str, kind: type[OpwrightError]) -> OpwrightError:
        """Returns the error to show."""
        who, what = self.running.who, self.running.what
        doer = f"`{who}`" if who not in ("", "opwright") else "it"
        hint = "`--timeout 600` waits longer" if "within" in self.how else ""
        return kind(subject, f"{doer} {self.how}", rows=[("while", what)], hint=hint)


class Worker:
    """A process that runs a module.

    Args:
        module: what runs, as `python -m module`; it opens a `Channel`.
        request: what it is asked first.
        cwd, env: where it runs, and what is different in its environment.
        timeout_s: how long one call of a candidate may take.
    """

    def __init__(
        self,
        module: str,
        request: Any,
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._max_bytes = _MEMORY_SHARE * free_memory()
        self._events, write = os.pipe()
        self._output, output = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(write)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=[write],
            cwd=cwd,
            env={**os.environ, **(env or {})},
            text=True,
            start_new_session=True,  # so that what it starts can be ended with it
        )
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        os.close(write)
        os.close(output)
        self._unread, self._printed = b"", 0
        self._last_event = time.monotonic()
        self.running = Running()
        self.ask(request)

    def ask(self, request: Any) -> None:
        """Sends a line; a process that has ended shows when its events are read."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._stdin.write(json.dumps(request) + "\n")
            self._stdin.flush()

    def events(self) -> Iterator[dict[str, Any]]:
        """Yields what it sends, until it is done.

        Raises:
            WorkerEnded: it has ended before it was done, or had to be ended.
            OpwrightError: it could not do what was asked.
        """
        for line in self._lines():
            try:
                event = json.loads(line)
            except ValueError:
                raise self._end("wrote into the pipe of its results") from None
            if "done" in event:
                self.close()
                return
            if "failed" in event:
                self.close()
                raise rebuild_error(event["failed"])
            if "raised" in event:
                raise self._end(f"raised {event['raised']}")
            if "running" in event:
                self.running = Running(*event["running"])
            yield event
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        raise self._end(describe_exit(self._process.poll()))

    def _lines(self) -> Iterator[bytes]:
        """Yields the lines that it sends, until it closes the pipe."""
        with selectors.DefaultSelector() as selector:
            for descriptor in (self._events, self._output):
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(_TICK_SECONDS):
                    if key.fd == self._output:
                        if not self._show_output():
                            selector.unregister(self._output)
                        continue
                    data = os.read(self._events, 1 << 20)
                    if not data:
                        return
                    self._last_event = time.monotonic()
                    *lines, self._unread = (self._unread + data).split(b"\n")
                    yield from lines
                excess = self._exceeded_limit()
                if excess:
                    raise self._end(excess)

    def _exceeded_limit(self) -> str:
        """Returns which limit it has exceeded; "" for none."""
        if self._printed > _MAX_OUTPUT:
            return f"printed more than {_MAX_OUTPUT / 2**20:g} MiB"
        if resident_bytes(self._process.pid) > self._max_bytes:
            return f"took more than {self._max_bytes / 2**30:.3g} GiB of memory"
        is_inside = bool(self.running.who)
        seconds = self._timeout_s if is_inside else max(_MIN_OWN_SECONDS, self._timeout_s * _OWN_FACTOR)
        return f"did not return within {seconds:g} s" if time.monotonic() - self._last_event > seconds else ""

    def _show_output(self) -> bool:
        """Shows what it prints, up to a limit; False at the end."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._output, 1 << 20)
            if self._printed < _MAX_SHOWN_OUTPUT:
                sys.stderr.write(data[: _MAX_SHOWN_OUTPUT - self._printed].decode(errors="replace"))
                sys.stderr.flush()
            self._printed += len(data)
            return bool(data)
        return True

    def _end(self, how: str) -> WorkerEnded:
        self.close()
        if self._printed > _MAX_SHOWN_OUTPUT:
            sys.stderr.write(f"\n... {self._printed - _MAX_SHOWN_OUTPUT} more bytes\n")
        return WorkerEnded(how, self.running)

    def close(self) -> None:
        """Ends it, with what it has started; shows what it has printed last."""
        if self._stdin.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.set_blocking(self._output, False)
        while self._printed <= _MAX_OUTPUT and self._has_more():
            pass
        os.close(self._events)
        os.close(self._output)

    def _has_more(self) -> bool:
        before = self._printed
        return self._show_output() and self._printed > before


def end_with_parent() -> None:
    """Lets the kernel kill this process when the one that started it ends; Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def describe_exit(code: int | None) -> str:
    """Returns how a process with this exit code, of a signal the negative number, has ended."""
    if code is None:
        return "closed the pipe of its results"
    if code >= 0:
        return f"ended the process, with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    why = "; the kernel does that when memory runs out" if -code == signal.SIGKILL else ""
    return f"crashed the process: {name} ({signal.strsignal(-code)}){why}"


def free_memory() -> int:
    """Returns how many bytes could be allocated: of the machine, or of the control group if that is less."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError, StopIteration):  # no limit is "max"
        with open("/proc/meminfo") as f:
            free = next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
        with open("/sys/fs/cgroup/memory.max") as f, open("/sys/fs/cgroup/memory.current") as used:
            free = min(free, int(f.read()) - int(used.read()))
    return max(free, 2**30)


def resident_bytes(pid: int) -> int:
    """Returns how much memory a process has, shared memory included; 0 where that is not known."""
    try:
        with open(f"/proc/{pid}/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


# --- in the worker process ----------------------------------------------------------------------------------------


class Channel:
    """Where a worker process sends its events.

    Attributes:
        requests: what it is asked, line by line.
    """

    def __init__(self, descriptor: int, requests: TextIO) -> None:
        self._stream = os.fdopen(descriptor, "w", buffering=1, encoding="utf-8")
        self.requests = requests

    @classmethod
    def open(cls) -> Channel:
        """Opens that of this process, and leaves its stdin empty; the process ends with the one that started it."""
        requests = os.fdopen(os.dup(0), encoding="utf-8")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if sys.platform == "linux":
            end_with_parent()
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
                f.write("1000")  # when memory runs out, this process is ended first
        return cls(int(sys.argv[1]), requests)

    def receive(self) -> Any:
        """Returns the next request."""
        return json.loads(self.requests.readline())

    def send(self, **event: Any) -> None:
        """Sends one event."""
        self._stream.write(json.dumps(event) + "\n")

    def running(self, who: str, what: str) -> None:
        """Says which candidate runs next, "" for none, and on what."""
        self.send(running=[who, what])


def describe_error(error: OpwrightError) -> dict[str, Any]:
    """Returns an error as JSON."""
    return {
        "class": type(error).__name__,
        "subject": error.subject,
        "rule": error.rule,
        "rows": error.rows,
        "body": error.body,
        "hint": error.hint,
    }


def rebuild_error(parts: Mapping[str, Any]) -> OpwrightError:
    """Returns the error that `describe_error` has made JSON of."""
    rows = [tuple(row) for row in parts["rows"]]
    kind = getattr(errors, parts["class"], OpwrightError)
    return kind(parts["subject"], parts["rule"], rows=rows, body=parts["body"], hint=parts["hint"])
