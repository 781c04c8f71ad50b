"""A worker process that sends events as lines of JSON; a crash, a hang or a full memory ends it and not its caller.

The process that asks has a `Worker`; the function that runs in the other process gets a `Channel`:

    worker = Worker(spawn("-m", "package.module"))       serve(lambda channel: channel.send(record=...))
    worker.ask({"target": ...})
    for event in worker.events(): ...

A worker is a module that starts anew (`spawn`), or a copy of this process (`fork`), which has all that lives here.
Thread pools of OpenMP and MKL do not survive a fork, but only the thread that used one knows of it: the fork is made
from a fresh thread, and the first parallel loop in the copy makes a new pool.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import io
import json
import mmap
import os
import re
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from opwright import errors
from opwright.errors import OpwrightError

TIMEOUT_S = 120.0
_TICK_SECONDS = 0.05
# Outside of calls of a candidate: importing PyTorch and the reference in float64 take their time on a busy machine.
_MIN_OWN_SECONDS, _OWN_FACTOR = 600.0, 10
_MAX_OUTPUT, _MAX_SHOWN_OUTPUT = 16 * 2**20, 64 * 1024  # bytes
# The end of a worker's output, where the cause of a crash is searched for. After glibc's message, Python prints the
# stacks of all threads and the names of all extension modules.
_LAST_BYTES = 64 * 1024
# glibc's messages for a damaged heap or stack, after which it aborts the process.
_DAMAGE = re.compile(
    r"(?:free|malloc|realloc|calloc|malloc_consolidate|munmap_chunk)\(\): [^\n]+|double free or corruption[^\n]*"
    r"|corrupted (?:size|double)[^\n]*|\*\*\* stack smashing detected"
)
_MEMORY_SHARE = 0.75  # of the free memory when the process starts
_TOOK_MEMORY = "took more than"
_PR_SET_PDEATHSIG = 1
_COUNTER_BYTES = 8
# The most that Linux gives every user. With its default of 64 KiB, workers would wait for a busy reader.
_PIPE_BYTES = 2**20


@dataclass(frozen=True)
class Limits:
    """What a worker may take.

    Attributes:
        timeout_s: seconds for one call of a candidate.
        memory_bytes: more than it had when it was ready; None: three quarters of what is free.
    """

    timeout_s: float = TIMEOUT_S
    memory_bytes: int | None = None


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

    @property
    def took_memory(self) -> bool:
        """Whether it took more memory than it may."""
        return self.how.startswith(_TOOK_MEMORY)

    def error(self, subject: str, kind: type[OpwrightError], memory_hint: str = "") -> OpwrightError:
        """Returns the error to show; `memory_hint` is its hint if it took too much memory."""
        who, what = self.running.who, self.running.what
        doer = f"`{who}`" if who not in ("", "opwright") else "it"
        hint = "`--timeout 600` waits longer" if "within" in self.how else memory_hint if self.took_memory else ""
        return kind(subject, f"{doer} {self.how}", rows=[("while", what)], hint=hint)


class Unfit(Exception):
    """A process of its own cannot do the work; the text is the reason."""


class Worker:
    """A process that works for this one.

    Args:
        start: starts it: `spawn` or `fork`.
        is_live: whether what it prints is shown at once; else when it has ended.
        told: how others have crashed: Python's report of each way to crash is shown once.

    Attributes:
        running: what it does.
        is_done: whether it has done all that it was asked.
        is_over: whether nothing more will come: it is done, has ended or must be ended.
    """

    def __init__(
        self, start: Start, limits: Limits = Limits(), *, is_live: bool = True, told: set[str] | None = None
    ) -> None:
        self._limits, self._is_live, self._told = limits, is_live, set() if told is None else told
        self._free = free_memory()
        self._events, events = os.pipe()
        with contextlib.suppress(AttributeError, OSError):  # Linux; the worker goes on while this process is busy
            fcntl.fcntl(events, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._output, output = os.pipe()
        with tempfile.TemporaryFile() as counter:  # shared: counts each time that a candidate is entered or left
            counter.truncate(_COUNTER_BYTES)
            self._calls = mmap.mmap(counter.fileno(), _COUNTER_BYTES)
            try:
                self._process = start(events, output, counter.fileno())
            finally:
                os.close(events)
                os.close(output)
        for descriptor in (self._events, self._output):
            os.set_blocking(descriptor, False)
        self._unread, self._kept, self._last, self._printed, self._prints = b"", b"", b"", 0, True
        self._first_bytes, self._is_ready = resident_bytes(self._process.pid), self._process.is_ready
        self._seen, self._moved, self._ended_by, self._is_closed = b"", time.monotonic(), "", False
        self.running, self.is_done, self.is_over = Running(), False, False

    def ask(self, request: Any) -> None:
        """Sends a line; a process that has ended shows when its events are read."""
        assert isinstance(self._process, Spawn)  # a fork has its work from the start
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.requests.write(json.dumps(request) + "\n")
            self._process.requests.flush()

    def events(self, is_interrupted: Callable[[], bool] = lambda: False) -> Iterator[dict[str, Any]]:
        """Yields what it sends, until it is done.

        Args:
            is_interrupted: asked many times a second whether to stop: for threads, which Ctrl-C does not reach.

        Raises:
            WorkerEnded: it has ended before it was done, or had to be ended.
            OpwrightError: it could not do what was asked.
            KeyboardInterrupt: it was to stop.
        """
        while not self.is_over:
            wait_for_any([self])
            if is_interrupted():
                raise KeyboardInterrupt
            yield from self.look()
        self.close()
        if not self.is_done:
            raise WorkerEnded(self.tell_end(), self.running)

    def look(self) -> Iterator[dict[str, Any]]:
        """Yields what it has sent since the last time, and notes whether it is over.

        Raises:
            Unfit: it cannot do the work.
            OpwrightError: it could not do what was asked.
        """
        self._prints = self._prints and self._read_output()
        status = self._process.poll()  # before the last look at what it has sent
        for line in self._read_events():
            self._moved = time.monotonic()
            event = json.loads(line)
            if "failed" in event:
                self.close()
                raise rebuild_error(event["failed"])
            if "unfit" in event:
                raise Unfit(event["unfit"])
            if "done" in event:
                self.is_done = True
            elif "ready" in event:
                self._first_bytes, self._is_ready = resident_bytes(self._process.pid), True
            elif "raised" in event:
                self._ended_by = f"raised {event['raised']}"
            else:
                self.running = Running(*event.get("running", (self.running.who, self.running.what)))
                yield event
        if status is None and not (self.is_done or self._ended_by):
            self._ended_by = self._exceeded_limit()
        self.is_over = self.is_done or status is not None or bool(self._ended_by)

    @property
    def _is_inside(self) -> bool:
        """Whether a candidate runs."""
        return bool(self.running.who) or self._calls[0] % 2 == 1

    def _exceeded_limit(self) -> str:
        """Returns which limit it has exceeded; "" for none."""
        if self._printed > _MAX_OUTPUT:
            return f"printed more than {_MAX_OUTPUT / 2**20:g} MiB"
        most = self._limits.memory_bytes or _MEMORY_SHARE * self._free
        if not self._is_ready:  # PyTorch and CUDA take some until it is
            most = max(most, self._free // 2)
        if resident_bytes(self._process.pid) - self._first_bytes > most:
            return f"{_TOOK_MEMORY} {most / 2**30:.3g} GiB of memory"
        calls = self._calls[:]
        if calls != self._seen:
            self._seen, self._moved = calls, time.monotonic()
        seconds = self._limits.timeout_s
        if not self._is_inside:
            seconds = max(_MIN_OWN_SECONDS, _OWN_FACTOR * seconds)
        return f"did not return within {seconds:g} s" if time.monotonic() - self._moved > seconds else ""

    def _read_output(self) -> bool:
        """Takes what it has printed, shown up to a limit; False at the end."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._output, 1 << 20):
                shown = data[: max(_MAX_SHOWN_OUTPUT - self._printed, 0)]
                self._printed += len(data)
                self._last = (self._last + data)[-_LAST_BYTES:]
                if self._is_live:
                    _show(shown.decode(errors="replace"))
                else:
                    self._kept += shown
                if self._printed > _MAX_OUTPUT:
                    break
            else:
                return False
        return True

    def _read_events(self) -> list[bytes]:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._events, 1 << 20):
                self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        return lines

    def close(self) -> None:
        """Ends it, with what it has started; shows what it has printed last."""
        if self._is_closed:
            return
        self._is_closed = True
        self._process.kill()
        self._read_output()
        os.close(self._events)
        os.close(self._output)
        text, fatal, report = self._kept.decode(errors="replace").partition("Fatal Python error: ")
        if fatal and (how := report.partition("\n")[0]) not in self._told:
            self._told.add(how)
            text += fatal + report
        if self._printed > _MAX_SHOWN_OUTPUT:
            text += f"\n... {self._printed - _MAX_SHOWN_OUTPUT} more bytes\n"
        _show(text)

    def tell_end(self) -> str:
        """Returns how it has ended, in words."""
        how = self._ended_by or describe_exit(self._process.poll() or 0)
        has_aborted = not self._ended_by and self._process.poll() == -signal.SIGABRT
        if has_aborted and (damage := _DAMAGE.search(self._last.decode(errors="replace"))):
            how += f"; glibc reported `{damage[0]}`: memory was written out of bounds, or freed twice"
        has_returned = any(self._calls[:]) and not (self._ended_by or self._is_inside)
        return f"{how}, after the call had returned" if has_returned else how


def wait_for_any(workers: Sequence[Worker]) -> None:
    """Waits until one has something to say, but no longer than until it is time to look after them."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker._events, selectors.EVENT_READ)
            if worker._prints:
                selector.register(worker._output, selectors.EVENT_READ)
        selector.select(_TICK_SECONDS)


def _show(text: str) -> None:
    if text:
        sys.stderr.write(text)
        sys.stderr.flush()


# --- processes ----------------------------------------------------------------------------------------------------

# Starts a process; takes the descriptors of its events, of its output and of the counter of calls.
Start = Callable[[int, int, int], "Spawn | Fork"]


class Spawn:
    """A process that starts anew.

    Attributes:
        is_ready: whether it has imported all that it needs.
        requests: what it reads on stdin.
    """

    is_ready = False

    def __init__(
        self, command: Sequence[str], descriptors: Sequence[int], output: int, cwd: Path | None, env: Mapping[str, str]
    ) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, *command, *map(str, descriptors)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=descriptors,
            cwd=cwd,
            env={**os.environ, **env},
            text=True,
            start_new_session=True,  # so that what it starts can be ended with it
        )
        assert self._popen.stdin is not None
        self.pid, self.requests = self._popen.pid, self._popen.stdin

    def poll(self) -> int | None:
        """Returns its exit code, of a signal the negative number, or None while it runs."""
        return self._popen.poll()

    def kill(self) -> None:
        """Kills it with its process group, and waits until it is gone."""
        with contextlib.suppress(BrokenPipeError):
            self.requests.close()
        _kill_group(self.pid)
        self._popen.wait()


class Fork:
    """A copy of this process that runs a function and ends.

    The thread that has forked stays until it is killed: the copy is killed when that thread ends, as with its parent.
    """

    is_ready = True

    def __init__(self, main: Callable[[], None]) -> None:
        self._done, forked = threading.Event(), threading.Event()
        self._code: int | None = None
        found: list[Any] = []
        # Forked while another thread collects garbage, the child's collector would be marked as running for good.
        collects = gc.isenabled()
        gc.disable()

        def fork() -> None:
            with warnings.catch_warnings():  # Python 3.12 warns of other threads: they are not needed here
                warnings.simplefilter("ignore", DeprecationWarning)
                try:
                    pid = os.fork()
                except OSError as error:
                    found.append(error)
                    forked.set()
                    return
            if pid == 0:
                try:
                    if collects:
                        gc.enable()
                    main()
                finally:
                    os._exit(70)  # `main` has not ended by itself
            found.append(pid)
            forked.set()
            self._done.wait()

        self._thread = threading.Thread(target=fork, name="opwright-worker", daemon=True)
        self._thread.start()
        forked.wait()
        if collects:
            gc.enable()
        if isinstance(found[0], OSError):
            raise found[0]
        self.pid = found[0]

    def poll(self, options: int = os.WNOHANG) -> int | None:
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # the program has reaped it
                pid, status = self.pid, 0
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def kill(self) -> None:
        _kill_group(self.pid)
        if self._code is None:  # it may not lead a group yet
            os.kill(self.pid, signal.SIGKILL)
        self.poll(0)
        self._done.set()
        self._thread.join()  # one that runs on while the interpreter ends may bring it down


def spawn(
    *command: str, files: Sequence[int] = (), cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Start:
    """Returns what starts a process that runs `python command`.

    Args:
        files: descriptors that it has too, with the same numbers: the last words of its command.
        cwd, env: where it runs, and what is different in its environment.
    """
    return lambda events, output, counter: Spawn(command, [events, counter, *files], output, cwd, env or {})


def fork(run: Callable[[Channel], None]) -> Start:
    """Returns what starts a copy of this process that calls a function."""

    def start(events: int, output: int, counter: int) -> Fork:
        def main() -> None:
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((nothing, 0), (output, 1), (output, 2)):
                os.dup2(source, target)
            sys.stdin = sys.__stdin__ = open(os.devnull)  # noqa: SIM115
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = _open_text(1), _open_text(2)
            for descriptor in (events, output, counter):
                os.set_inheritable(descriptor, False)  # nothing that the candidate starts needs them
            serve(run, Channel(events, counter, sys.stdin))

        return Fork(main)

    return start


def _open_text(descriptor: int) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, errors="replace", write_through=True)  # nothing waits in a crash


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def end_with_parent() -> None:
    """Lets the kernel kill this process when the one that started it ends; Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def describe_exit(code: int) -> str:
    """Returns how a process with this exit code, of a signal the negative number, has ended."""
    if code >= 0:
        return f"ended the process, with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    why = "; the kernel does that when memory runs out" if -code == signal.SIGKILL else ""
    return f"crashed the process: {name} ({signal.strsignal(-code)}){why}"


_MEMINFO = Path("/proc/meminfo")
# A control group's limit and use, and the parts of that use which the kernel takes back when memory runs short.
_GROUPS = Path("/sys/fs/cgroup")
_VERSIONS = (
    ("", "max", "current", ("inactive_file", "active_file", "slab_reclaimable")),
    ("memory", "limit_in_bytes", "usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


def free_memory() -> int:
    """Returns how many bytes could be allocated: of the machine, or of the control group if that is less."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError, StopIteration), open(_MEMINFO) as f:
        free = next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
    for folder, limit, used, cached in _VERSIONS:
        group = _GROUPS / folder
        with contextlib.suppress(OSError, ValueError):  # of the other version, or no limit, which is "max"
            unused = int((group / f"memory.{limit}").read_text()) - int((group / f"memory.{used}").read_text())
            parts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            free = min(free, unused + sum(int(parts.get(name, 0)) for name in cached))
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

    def __init__(self, events: int, counter: int, requests: TextIO) -> None:
        self._events, self._calls, self.requests = events, mmap.mmap(counter, _COUNTER_BYTES), requests
        self._owner = os.getpid()

    def receive(self) -> Any:
        """Returns the next request."""
        return json.loads(self.requests.readline())

    def send(self, **event: Any) -> None:
        """Sends one event."""
        if os.getpid() != self._owner:  # a fork of the candidate's, that has come back
            os._exit(0)
        data = json.dumps(event).encode() + b"\n"
        while data:
            data = data[os.write(self._events, data) :]

    def running(self, who: str, what: str) -> None:
        """Says which candidate runs next, "" for none, and on what."""
        self.send(running=[who, what])

    def mark_inside(self, now: bool) -> None:
        """Says whether a candidate is running: cheaper than an event. The first and the last of its threads count."""
        if self._calls[0] % 2 != now:
            self._calls[:] = (int.from_bytes(self._calls[:], "little") + 1).to_bytes(_COUNTER_BYTES, "little")


def hide_warnings_of_pytorch() -> None:
    """Hides warnings of PyTorch's C++: they are of inputs that a check makes, such as a variance of one number."""
    warnings.filterwarnings("ignore", message=r"(?s).*\(Triggered internally at")


def serve(run: Callable[[Channel], None], channel: Channel | None = None) -> None:
    """Calls a function with the channel of this process, says how it went, and ends the process."""
    if channel is None:
        requests = os.fdopen(os.dup(0), encoding="utf-8")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        channel = Channel(int(sys.argv[1]), int(sys.argv[2]), requests)
        for descriptor in (nothing, *map(int, sys.argv[1:3])):
            os.set_inheritable(descriptor, False)
    hide_warnings_of_pytorch()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        end_with_parent()
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
            f.write("1000")  # when memory runs out, this process is ended first
    try:
        run(channel)
        channel.send(done=True)
    except Unfit as reason:
        channel.send(unfit=str(reason))
    except OpwrightError as error:
        channel.send(failed=describe_error(error))
    except BaseException as error:  # KeyboardInterrupt is a candidate's to raise
        traceback.print_exc()
        channel.send(raised=f"{type(error).__name__}: {error}"[:300])
    finally:
        sys.stdout.flush()
        os._exit(0)


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
