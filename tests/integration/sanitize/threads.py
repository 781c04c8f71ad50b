"""Runs a program with the thread sanitizer in Opwright's glue and kernels; exits with 99 after a report.

    cd tests/integration; python sanitize/threads.py stress/stress.py swap --swaps 1000 --forks 50 --threads 4

PyTorch is as it is: the sanitizer knows its locks, as it knows Python's, but not the barriers of its OpenMP threads.
So each parallel loop runs in the calling thread.
"""

from __future__ import annotations

import os
import sys

from sanitizers import environment

# The sanitizer cannot place its memory where addresses have as many random bits as recent kernels give them.
COMMAND = ["setarch", "--addr-no-randomize", sys.executable]


def main() -> None:
    os.execvpe(COMMAND[0], [*COMMAND, *sys.argv[1:]], environment("thread") | {"OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
