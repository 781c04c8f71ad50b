"""Starts other programs so that a fork in another thread cannot keep their pipes open."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# A fork between the creation of a pipe and its end would leave the pipe's end for writing in the child. Whoever reads
# the pipe here would wait for as long as that child lives: a build, for a worker that waits for the build.
_starting = threading.RLock()
os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release)


class Process(subprocess.Popen):
    """A program of one's own; forks in other threads wait until it has started."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        with _starting:
            super().__init__(command, **options)


def run_program(
    command: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end; returns what it said on both streams, in whatever encoding.

    Raises:
        OSError: it cannot be started.
    """
    pipe = subprocess.PIPE
    with Process(command, env=env, cwd=cwd, stdout=pipe, stderr=pipe, text=True, errors="replace") as process:
        out, error = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, out, error)
