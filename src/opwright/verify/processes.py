"""Processes on Linux: a fork whose thread pools work, one that starts anew, and what has become of their descendants."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from opwright.isolation import end_with_parent, resident_bytes

_PR_SET_CHILD_SUBREAPER = 36
_TRITON = os.fsencode(Path(__file__).parents[1] / "triton")
_SEED = 0x6F7077  # any; the parent's seed is its own
_LOOKS = 50  # at the words of a process: of one that has just become another program they come a moment later


class Process:
    """A child process.

    Attributes:
        pid: its number.
        settles: whether it has to import PyTorch before it can do anything.
    """

    pid: int
    settles = False
    _code: int | None = None

    def ended(self) -> int | None:
        """Returns its exit code, of a signal the negative number, or None while it runs."""
        if self._code is None:
            self._reap(os.WNOHANG)
        return self._code

    def kill(self) -> None:
        """Kills it with its process group, and waits until it is gone."""
        for kill in (os.killpg, os.kill):  # it may not lead a group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
        if self._code is None:
            self._reap(0)

    def let_go(self) -> None:
        """Gives up what was kept for it, when it is gone."""

    def _reap(self, options: int) -> None:
        try:
            pid, status = os.waitpid(self.pid, options)
        except ChildProcessError:  # the program has reaped it
            pid, status = self.pid, 0
        if pid:
            self._code = os.waitstatus_to_exitcode(status)

    def resident_bytes(self) -> int:
        """Returns how much memory it has, that it shares with its parent included."""
        return resident_bytes(self.pid)


class Fork(Process):
    """A copy of this process that runs a function and ends.

    The thread that has forked stays until `let_go`: the child is killed when it ends, as it does with the parent.
    """

    def __init__(self, main: Callable[[], None]) -> None:
        self._done, forked = threading.Event(), threading.Event()
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

        self._thread = threading.Thread(target=fork, name="opwright-verify", daemon=True)
        self._thread.start()
        forked.wait()
        if collects:
            gc.enable()
        if isinstance(found[0], OSError):
            raise found[0]
        self.pid = found[0]

    def let_go(self) -> None:
        self._done.set()
        self._thread.join()  # one that runs on while the interpreter ends may bring it down


class Spawn(Process):
    """A process that starts anew and runs a function of an importable module.

    Args:
        main: `module:function`, called with `descriptors`, which it inherits.
        output: the descriptor that gets what it prints.
    """

    settles = True

    def __init__(self, main: str, descriptors: Sequence[int], output: int) -> None:
        module, function = main.split(":")
        program = (
            "import json, sys\n"
            "sys.path[:] = json.loads(sys.argv[1])\n"
            f"from {module} import {function}\n"
            f"{function}(*map(int, sys.argv[2:]))\n"
        )
        self._popen = subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(sys.path), *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=descriptors,
            start_new_session=True,
        )
        self.pid = self._popen.pid

    def _reap(self, options: int) -> None:
        self._code = self._popen.poll() if options == os.WNOHANG else self._popen.wait()


def settle_in(output: int, is_fork: bool) -> None:
    """Makes a child a process of its own: nothing it does by mistake reaches its parent.

    Args:
        output: the descriptor that gets what it prints.
        is_fork: whether it has all that its parent has.
    """
    if os.getsid(0) != os.getpid():
        os.setsid()
    end_with_parent()
    # Orphans of what the candidate forks become children of this process.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")  # when memory runs out, this process goes first
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    sys.stdin = sys.__stdin__ = open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _text(1)
    sys.stderr = sys.__stderr__ = _text(2)
    faulthandler.enable(file=2, all_threads=False)
    gc.freeze()  # the parent's objects are not looked at again, so their pages stay shared
    torch.default_generator.manual_seed(_SEED)
    # Pools of workers of the parent's torch.compile are not here, and new ones would be left behind.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    if "torch._inductor.config" in sys.modules:
        sys.modules["torch._inductor.config"].compile_threads = 1
    if is_fork and torch.version.cuda is not None:  # it cannot use the GPU of its parent, so it sees none
        torch.cuda.is_available = lambda: False
        torch.cuda.device_count = lambda: 0


def _text(descriptor: int) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, errors="replace", write_through=True)  # nothing waits in a crash


def children() -> list[int]:
    """Returns the processes that this one has started and not waited for."""
    found: list[int] = []
    for task in _entries("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as f:
            found += [int(pid) for pid in f.read().split()]
    return found


_kept: set[int] = set()


def keep(pid: int) -> None:
    """Excludes a child of this process from `end_children`."""
    _kept.add(pid)


def end_children() -> list[str]:
    """Kills and reaps what this process has started and not waited for; returns what that was."""
    found: list[str] = []
    for _ in range(100):  # the orphans of one that was killed come to this process
        pids = [pid for pid in children() if pid not in _kept and not _is_own(pid)]
        if not pids:
            break
        found += [_command_of(pid) for pid in pids]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return [_left_behind(found)] if found else []


def end_stragglers(session: int, pipe: int) -> str:
    """Kills what a process that is gone has left; returns what that was, "" if nothing.

    That is whoever is of its session, or has kept what it printed to: a pipe, with this inode.
    """
    found = []
    for pid in _entries("/proc"):
        if not pid.isdigit() or int(pid) == os.getpid():
            continue
        try:
            with open(f"/proc/{pid}/stat") as f:
                fields = f.read().rpartition(")")[2].split()
            is_its = int(fields[3]) == session and fields[0] != "Z"
            is_its = is_its or any(
                os.readlink(f"/proc/{pid}/fd/{n}") == f"pipe:[{pipe}]" for n in ("1", "2") if fields[0] != "Z"
            )
            if is_its:
                found += [] if _is_own(int(pid)) else [_command_of(int(pid))]
                os.kill(int(pid), signal.SIGKILL)
        except (OSError, IndexError):
            continue
    return _left_behind(found) if found else ""


def _left_behind(commands: list[str]) -> str:
    one = len(commands) == 1
    names = ", ".join(sorted(set(commands))[:3])
    return f"left {len(commands)} {'process' if one else 'processes'} behind, now killed: {names}"


def _command_of(pid: int) -> str:
    return b" ".join(_words_of(pid)).decode(errors="replace").strip()[:80] or "one that has ended"


def _words_of(pid: int) -> list[bytes]:
    """Returns the words of a process's command; none of one that has ended."""
    with contextlib.suppress(OSError):
        for _ in range(_LOOKS):
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                words = f.read()
            if words or _has_ended(pid):
                return words.split(b"\0")
            time.sleep(0.002)
    return []


def _has_ended(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as f:
        return f.read().rpartition(")")[2].split()[0] == "Z"


def _is_own(pid: int) -> bool:
    """Returns whether a process compiles Triton kernels for Opwright: it waits for the next one, so it stays."""
    words = _words_of(pid)
    return _TRITON in words[3:] and b"worker.main()" in words[2]


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
