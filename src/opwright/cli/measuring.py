"""Has another process measure, watches it, and times it from here as well."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opwright import errors
from opwright.cli import pulse
from opwright.errors import NotVerifiedError, OpwrightError
from opwright.records import BenchRecord

# How much longer a call may take by this process's clock than it is said to: the best of some windows of two
# milliseconds, on a machine that may be busy.
_CLOCK_FACTOR = 2.0
_TICK_SECONDS = 0.25
_PATIENCE = 10  # with what is no call of a candidate: verify, the reference in float64
_MIN_OWN_SECONDS = 600  # for the same, however short the limit of a call is: a busy machine starts slowly
_MOST_OUTPUT, _SHOWN_OUTPUT = 16 * 2**20, 64 * 1024  # bytes
_MEMORY_SHARE = 0.75  # of what the machine has to spare when the process begins
TIMEOUT_S = 120.0


class WorkerEnded(Exception):
    """The process that measures has ended, or had to be.

    Attributes:
        how: what it did, in words: "did not return within 120 s".
        who: which candidate ran; "" when none did.
        what: on what, or what else was done.
    """

    def __init__(self, how: str, who: str, what: str) -> None:
        super().__init__(how)
        self.how, self.who, self.what = how, who, what

    def error(self, name: str) -> NotVerifiedError:
        """Returns the finding, as that of an operator or a target."""
        rival = f"`{self.who}`" if self.who not in ("", "opwright") else "it"
        hint = "`--timeout 600` waits longer" if "within" in self.how else ""
        return NotVerifiedError(
            name, f"{rival} {self.how}", rows=[("while", f"{'timing ' if self.who else ''}{self.what}")], hint=hint
        )


class Worker:
    """A process that measures.

    One whose candidate hangs, floods its output or takes all memory is ended.

    Args:
        request: what is measured, for `bench_worker`; `timeout_s` of it is how long one call may take.
        cwd, env: where it runs, and what is different in its environment.
        threads: of PyTorch; by default as many as there are cores for it.
    """

    def __init__(
        self,
        request: dict[str, Any],
        *,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        threads: int | None = None,
    ) -> None:
        pinned = {"PYTHONHASHSEED": "0"}
        if threads is not None:
            pinned |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        if request.get("cpus"):
            pinned |= {"OMP_PROC_BIND": "close", "OMP_PLACES": ",".join(f"{{{cpu}}}" for cpu in request["cpus"])}
        self._timeout_s = request.get("timeout_s", TIMEOUT_S)
        self._most_bytes = _MEMORY_SHARE * _spare_memory()
        self._answers, write = os.pipe()
        self._output, output = os.pipe()
        with tempfile.TemporaryFile() as shared:
            shared.truncate(pulse.SIZE)
            self._pulse = pulse.Pulse(shared.fileno())
            descriptors = [write, shared.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "opwright.cli.bench_worker", *map(str, descriptors)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=descriptors,
                cwd=cwd,
                env={**os.environ, **pinned, **(env or {})},
                text=True,
                start_new_session=True,  # so that what it starts can be ended with it
            )
        os.close(write)
        os.close(output)
        self._unread, self._printed = b"", 0
        self._beats, self._moved = 0, time.monotonic()
        self.last = "started"
        self.ask(request)

    def ask(self, request: Any) -> None:
        """Sends it a line; one that is gone says so when it is read."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def answers(self) -> Iterator[dict[str, Any]]:
        """Yields what it answers, until it is done.

        Raises:
            WorkerEnded: it has ended before it was done, or had to be ended.
            OpwrightError: it could not do what was asked.
        """
        for line in self._lines():
            try:
                answer = json.loads(line)
            except ValueError:
                raise self._ended("wrote into the channel of its judge") from None
            if "done" in answer:
                self.close()
                return
            if "failed" in answer:
                self.close()
                raise rebuilt(answer["failed"])
            if "raised" in answer:
                raise self._ended(f"raised {answer['raised']}")
            self.last = answer.get("measured") or answer.get("operator") or self.last
            yield answer
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        raise self._ended(_how_it_ended(self._process.poll()))

    def _lines(self) -> Iterator[bytes]:
        """Yields lines of its answers, until it closes them."""
        with selectors.DefaultSelector() as selector:
            for descriptor in (self._answers, self._output):
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(_TICK_SECONDS):
                    if key.fd == self._output:
                        if not self._pass_on_output():
                            selector.unregister(self._output)
                        continue
                    data = os.read(self._answers, 1 << 20)
                    if not data:
                        return
                    self._moved = time.monotonic()
                    *lines, self._unread = (self._unread + data).split(b"\n")
                    yield from lines
                excess = self._excess()
                if excess:
                    raise self._ended(excess)

    def _excess(self) -> str:
        """Returns which limit it has passed; "" for none."""
        if self._printed > _MOST_OUTPUT:
            return f"printed more than {_MOST_OUTPUT / 2**20:g} MiB"
        if self._resident_bytes() > self._most_bytes:
            return f"took more than {self._most_bytes / 2**30:.3g} GiB of memory"
        beats, who, _ = self._pulse.read()
        if beats != self._beats:
            self._beats, self._moved = beats, time.monotonic()
        seconds = self._timeout_s if who else max(_MIN_OWN_SECONDS, self._timeout_s * _PATIENCE)
        if time.monotonic() - self._moved < seconds:
            return ""
        return f"did not return within {seconds:g} s"

    def _resident_bytes(self) -> int:
        try:
            with open(f"/proc/{self._process.pid}/statm") as f:
                return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            return 0

    def _pass_on_output(self) -> bool:
        """Shows what it prints, up to a limit; False at the end."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._output, 1 << 20)
            if self._printed < _SHOWN_OUTPUT:
                sys.stderr.write(data[: _SHOWN_OUTPUT - self._printed].decode(errors="replace"))
                sys.stderr.flush()
            self._printed += len(data)
            return bool(data)
        return True

    def _ended(self, how: str) -> WorkerEnded:
        _, who, what = self._pulse.read()
        self.close()
        if self._printed > _SHOWN_OUTPUT:
            sys.stderr.write(f"\n... {self._printed - _SHOWN_OUTPUT} more bytes\n")
        return WorkerEnded(how, who, what)

    def close(self) -> None:
        """Ends it, with what it has started; shows what it has printed last."""
        if self._process.stdin.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.set_blocking(self._output, False)
        while self._printed <= _MOST_OUTPUT and self._has_more():
            pass
        os.close(self._answers)
        os.close(self._output)

    def _has_more(self) -> bool:
        before = self._printed
        return self._pass_on_output() and self._printed > before


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "closed the channel of its judge"
    if code >= 0:
        return f"ended the process, with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    why = "; the kernel does that when memory runs out" if -code == signal.SIGKILL else ""
    return f"crashed the process: {name} ({signal.strsignal(-code)}){why}"


def _spare_memory() -> float:
    """Returns how many bytes could be had, of the machine and of the control group; inf where nobody says."""
    spare = float("inf")
    with contextlib.suppress(OSError, ValueError, StopIteration):  # no limit is "max"
        with open("/proc/meminfo") as f:
            spare = next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
        with open("/sys/fs/cgroup/memory.max") as f, open("/sys/fs/cgroup/memory.current") as used:
            spare = min(spare, int(f.read()) - int(used.read()))
    return max(spare, 2**30)


def rebuilt(parts: dict[str, Any]) -> OpwrightError:
    """Returns the error that the worker has sent."""
    rows = [tuple(row) for row in parts["rows"]]
    kind = getattr(errors, parts["class"], OpwrightError)
    return kind(parts["subject"], parts["rule"], rows=rows, body=parts["body"], hint=parts["hint"])


class Window:
    """Times calls of the worker by the clock of this process: the best of the windows of a measurement."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._seen: list[tuple[str, float, float]] = []
        self._best = float("inf")
        self._claimed = 0.0
        self._begun: tuple[int, float] | None = None

    def see(self, answer: dict[str, Any]) -> None:
        """Takes an answer of the worker, at the time it comes."""
        now = time.perf_counter()
        if "begin" in answer:
            self._claimed, self._begun = answer["begin"]["claimed_us"], (answer["begin"]["calls"], now)
            self._worker.ask("begin")
        elif "end" in answer and self._begun is not None:
            calls, start = self._begun
            self._best, self._begun = min(self._best, (now - start) / calls * 1e6), None
            self._worker.ask("enough" if self._best <= _CLOCK_FACTOR * self._claimed else "again")
        elif "measured" in answer:
            self._seen.append((answer["measured"], self._claimed, self._best))
            self._best = float("inf")

    def agree(self, record: BenchRecord) -> None:
        """Notes in a record that the clocks agree.

        Raises:
            NotVerifiedError: a call takes much longer from here than it is said to.
        """
        for what, claimed, seen in self._seen:
            if seen > _CLOCK_FACTOR * claimed:
                raise NotVerifiedError(
                    record.name,
                    "its times are not those of another process's clock",
                    rows=[("input", what), ("said", f"{claimed:.4g} us"), ("seen from outside", f"{seen:.4g} us")],
                    hint="on a machine that is very busy: again, when it is less so",
                )
        if record.conditions is not None:
            record.conditions.witnessed = len(self._seen) == len(record.measurements)
        self._seen.clear()
