"""Runs programs in processes of their own: forks of one server, which imports PyTorch and most of Opwright once."""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

# What the interpreter or PyTorch reads when it starts: a program that changes one of them gets a start of its own.
_READ_AT_START = ("PYTHON", "LD_", "OMP_", "KMP_", "MKL_", "ATEN_", "TORCH", "CUDA_")
_COMMAND = "from opwright.cli import main; main()"
# The child leaves out what the interpreter frees at its end, 0.7 s with PyTorch on a busy machine.
_SERVER = """
import atexit, gc, json, os, socket, sys, threading, types
import torch
import opwright.build.compile, opwright.cli.parser, opwright.verify.api
from opwright.backends import registry
for found in (registry.all_backends, registry.device_types):  # a program's folder may bring backends
    found.cache_clear()
gc.collect(); gc.freeze()
jobs = socket.socket(fileno=int(sys.argv[1]))
while True:
    text, files, _, _ = socket.recv_fds(jobs, 1 << 22, 3)
    if not text:
        sys.exit()
    pid = os.fork()
    if not pid:
        break
    jobs.send(str(pid).encode())
    for file in files:
        os.close(file)
    jobs.send(str(os.waitpid(pid, 0)[1]).encode())
jobs.close()
program, arguments, folder, environment = json.loads(text)
for number, file in enumerate(files):
    os.dup2(file, number)
    os.close(file)
os.chdir(folder)
os.environ.clear()
os.environ.update(environment)
sys.argv[1:] = arguments
sys.path[0] = ""
main = sys.modules["__main__"] = types.ModuleType("__main__")
main.__builtins__ = __builtins__
code = 0
try:
    exec(compile(program, "<string>", "exec"), main.__dict__)
except SystemExit as end:
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if isinstance(end.code, str):
        print(end.code, file=sys.stderr)
except BaseException:
    sys.excepthook(*sys.exc_info())
    code = 1
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
"""


@functools.cache
def _server() -> tuple[socket.socket, dict[str, str]]:
    """Returns the server, which takes one program at a time and ends with this process, and its environment."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    process = subprocess.Popen([sys.executable, "-c", _SERVER, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    atexit.register(lambda: (ours.close(), process.wait()))
    return ours, dict(os.environ)


def run_python(
    program: str,
    *arguments: str | Path,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Runs a program as `python -c` does, with all its output caught.

    Args:
        env: variables beside those of this process, or in their place.
        timeout: seconds after which it is killed.

    Raises:
        subprocess.TimeoutExpired: it was killed.
    """
    environment = {**os.environ, **(env or {})}
    words = [*map(str, arguments)]
    server, at_start = _server()
    names = [name for name in {*environment, *at_start} if name.startswith(_READ_AT_START)]
    if any(environment.get(name) != at_start.get(name) for name in names):
        return subprocess.run(
            [sys.executable, "-c", program, *words],
            cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip
    with open(os.devnull) as empty, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        job = json.dumps([program, words, str(cwd or Path.cwd()), environment])
        socket.send_fds(server, [job.encode()], [file.fileno() for file in (empty, out, err)])
        server.settimeout(None)
        pid = int(server.recv(32))
        server.settimeout(timeout)
        try:
            status = server.recv(32)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            server.settimeout(None)
            server.recv(32)
            raise subprocess.TimeoutExpired(program, timeout) from None
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    code = os.waitstatus_to_exitcode(int(status))
    return subprocess.CompletedProcess([sys.executable, "-c", program, *words], code, *texts)


def run_opwright(
    *arguments: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Runs the command `opwright`."""
    return run_python(_COMMAND, *arguments, cwd=cwd, env=env, timeout=timeout)
