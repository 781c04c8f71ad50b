"""The compiler of a process that is Python: what Ctrl-C and fork do while it is at work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import runtime
import stub

pytestmark = pytest.mark.compiler
LIBRARY = runtime.ROOT / "tests" / "native" / "triton_host.cpp"
KERNEL = """
{head}
import triton
import triton.language as tl

@triton.jit
def kernel(x, C: tl.constexpr):
    tl.store(x, C)
"""
HOST = """
import ctypes, os, signal, sys, threading, time
sys.path.insert(0, {source!r})
from opwright.triton import host
library = ctypes.CDLL(sys.argv[1])
library.launch.restype, library.launch.argtypes = ctypes.c_char_p, [ctypes.c_char_p, ctypes.c_int64]
host.attach(library, "test::kernel")
file, marker = sys.argv[2].encode(), sys.argv[3]
"""
# Only the first import is interrupted, or takes long.
FIRST = "import os, signal, time\nif not os.path.exists({marker!r}):\n    open({marker!r}, 'w').close()\n    {act}\n"
INTERRUPTED = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # also below nohup
try:
    print("returned", library.launch(file, 3))
except KeyboardInterrupt as error:
    print("KeyboardInterrupt", error.__context__)
print(library.launch(file, 3))
"""
FORKED = """
thread = threading.Thread(target=library.launch, args=(file, 3))
thread.start()
while not os.path.exists(marker):
    time.sleep(0.01)
if os.fork() == 0:
    signal.alarm(60)
    wrong = library.launch(file, 3), library.launch(file, 4)
    print("child", wrong, flush=True)
    os._exit(0)
print("status", os.wait()[1], flush=True)
thread.join()
print("parent", library.launch(file, 3), library.launch(file, 5))
"""


def run_host(python: Path, folder: Path, script: str, act: str) -> list[str]:
    """Runs a script in a Python with Triton; `act` is what the kernel's file does when it is first imported."""
    marker = str(folder / "marker")
    file = folder / "kernels.py"
    file.write_text(KERNEL.format(head=FIRST.format(marker=marker, act=act)))
    record = folder / "record.jsonl"
    env = stub.environment(record=record) | {
        "OPWRIGHT_CACHE_DIR": str(folder / "cache"),
        "TRITON_CACHE_DIR": str(stub.BUILD / f"worker-cache-{python.parents[1].name}"),
    }
    library = runtime.build(LIBRARY, ("-shared",))
    command = [python, "-c", HOST.format(source=str(runtime.ROOT / "src")) + script, library, file, marker]
    done = subprocess.run([*map(str, command)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    assert "Exception ignored" not in done.stderr
    return done.stdout.splitlines()


def test_ctrl_c_during_a_compile_is_a_keyboard_interrupt(python: Path, tmp_path: Path) -> None:
    act = "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
    assert run_host(python, tmp_path, INTERRUPTED, act) == ["KeyboardInterrupt None", "None"]
    assert len(stub.read_records(tmp_path / "record.jsonl")) == 1


def test_a_fork_during_a_compile_of_the_process(python: Path, tmp_path: Path) -> None:
    """The child compiles the kernel that the parent's thread was at, and another."""
    lines = run_host(python, tmp_path, FORKED, "time.sleep(3)")
    assert lines == ["child (None, None)", "status 0", "parent None None"]
