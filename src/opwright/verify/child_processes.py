"""The processes that a check leaves running: finds them and ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from opwright.errors import plural

_TRITON = os.fsencode(Path(__file__).parents[1] / "triton")
_PRECOMPILED = b"from opwright.cpp_extension.precompiled import run"


def end_children(kept: set[int]) -> list[str]:
    """Kills and reaps what this process has started and not waited for, but for `kept`; returns what that was."""
    found: list[str] = []
    for _ in range(100):  # the orphans of one that was killed come to this process
        commands = {pid: _command_of(pid) for pid in children() if pid not in kept}
        gone = {pid: words for pid, words in commands.items() if not _is_opwrights(words)}
        if not gone:
            break
        found += [_describe(words) for words in gone.values()]
        for pid in gone:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    if not found:
        return []
    names = ", ".join(sorted(set(found))[:3])
    return [f"left {plural(len(found), 'process', 'processes')} behind, now killed: {names}"]


def _is_opwrights(words: list[bytes]) -> bool:
    """Returns whether a process is one of Opwright's own, which stay: for Triton kernels, or to precompile headers."""
    is_worker = _TRITON in words[3:] and b"worker.main()" in words[2]
    return is_worker or any(_PRECOMPILED in word for word in words)


def _describe(words: list[bytes]) -> str:
    return " ".join(b" ".join(words).decode(errors="replace").split())[:80] or "one that has ended"


def children() -> list[int]:
    """Returns the processes that this one has started and not waited for."""
    found: list[int] = []
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (path / "children").read_text().split())
    return found


def _command_of(pid: int) -> list[bytes]:
    """Returns the words of a process's command; none of one that has ended."""
    with contextlib.suppress(OSError):
        for _ in range(50):  # of one that has just become another program it comes a moment later
            if words := Path(f"/proc/{pid}/cmdline").read_bytes():
                return words.split(b"\0")
            time.sleep(0.002)
    return []
