"""What starts programs: how it gets on with forks."""

import subprocess
import sys

from opwright.processes import run_program

STARTS_BESIDE_FORKS = """
import os, sys, threading
from opwright.processes import run_program

sys.setswitchinterval(1e-6)  # a fork at any moment of a start
is_over = threading.Event()

def start():
    while not is_over.is_set():
        run_program(["true"])

starting = threading.Thread(target=start, daemon=True)
starting.start()
read, write = os.pipe()
for _ in range(200):
    if os.fork() == 0:
        os.close(write)
        os.read(read, 1)  # lives until the parent is done
        os._exit(0)
is_over.set()
starting.join(60)
os._exit(starting.is_alive())
"""


def test_a_start_waits_for_no_process_that_another_thread_forked() -> None:
    """A child that got the write end of the pipe of a start kept the start waiting for as long as it lived."""
    made = subprocess.run([sys.executable, "-c", STARTS_BESIDE_FORKS], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr or "the thread still waits"


def test_what_a_program_says_need_not_be_utf8() -> None:
    said = run_program([sys.executable, "-c", r"import os; os.write(2, b'Fehler: Men\xfc')"])
    assert (said.returncode, said.stderr) == (0, "Fehler: Men\N{REPLACEMENT CHARACTER}")
