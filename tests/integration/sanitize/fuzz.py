"""Calls operators with drawn arguments, in processes whose kernels and glue have the address sanitizer and UBSan.

    python tests/integration/sanitize/fuzz.py --calls 100000 --seed 1
    python tests/integration/sanitize/fuzz.py --seed 1 --at 4711 --calls 1     # that call again

Opwright's part of a process is compiled with the sanitizers; PyTorch is as it is, but its memory comes from their
allocator, so that an access beyond a tensor is a report. Every result is compared with the reference, everything
around the tensors of a call with what it was before. Exits with 1 after a report.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter

from sanitizers import environment

MAX_SECONDS = 120  # for one call; the first ones wait for a compiler


# --- in a process with sanitizers ---------------------------------------------------------------------------------


def subjects(names: list[str]):
    """Returns what is called: all operators with a kernel for the CPU, or those named."""
    import operators
    from calls import Subject, backward_samples, samples_of
    from opwright_ops.bias_gelu.op import bias_gelu, bias_gelu_backward
    from opwright_ops.d_sigmoid.op import d_sigmoid, d_sigmoid_backward
    from opwright_ops.lstm.bidirectional import lstm_bidirectional
    from opwright_ops.lstm.op import lstm
    from opwright_ops.lstm.step import lstm_step_

    plain = [bias_gelu, bias_gelu_backward, d_sigmoid, d_sigmoid_backward, *operators.OPERATORS]
    sums = (bias_gelu_backward, operators.moments, operators.total)  # their terms cancel
    found = [Subject(op, factor=2e4 if op in sums else 64) for op in plain]
    found += [Subject(op) for op in operators.WRONG]
    packed = ("weight_ih", "weight_hh", "weight_hr", "scale", "scale_hr")
    for op, dense in ((lstm, ()), (lstm_bidirectional, ()), (lstm_step_, packed)):
        found.append(Subject(op, samples_of, factor=2e4, is_wide=False, weight=0.1, dense=dense))
    for op in (lstm, lstm_bidirectional):
        backward = op.operator.backward_operator.function
        found.append(Subject(backward, backward_samples, factor=2e5, is_wide=False, weight=0.05, forward=op))
    wrong = {op.operator.declaration.name for op in operators.WRONG}
    chosen = [s for s in found if (s.short in names if names else s.short not in wrong)]
    assert not names or len(chosen) == len(names), f"one of {names} is unknown"
    return chosen


def work(seed: int, first: int, count: int, step: int, names: list[str], progress: int) -> None:
    """Makes `count` calls from number `first` on, with `step` from each to the next."""
    import torch
    from calls import Call, Wrong, run

    warnings.simplefilter("ignore")
    chosen = subjects(names)
    weights = [subject.weight for subject in chosen]
    endings: Counter[str] = Counter()
    for number in range(first, first + count * step, step):
        os.pwrite(progress, struct.pack("q", number), 0)
        signal.alarm(MAX_SECONDS)  # ends the process
        chance = random.Random(f"{seed} {number}")
        torch.set_num_threads(chance.choice([1, 1, 1, 2]))
        torch.manual_seed(chance.getrandbits(32))
        call = Call(chance.choices(chosen, weights)[0], chance)
        try:
            endings[run(call)] += 1
        except Wrong as error:
            print(f"call {number} of seed {seed}: {error}\n{call}", file=sys.stderr)
            os._exit(1)
        except BaseException:
            print(f"call {number} of seed {seed}\n{call}", file=sys.stderr)
            raise
    print(*(f"{ending}={n}" for ending, n in endings.items()))


# --- in the process that starts them ------------------------------------------------------------------------------


class Worker:
    """A process that makes every so-manieth call, started again behind a call that ended it."""

    def __init__(self, args: argparse.Namespace, first: int, last: int) -> None:
        self.args, self.next, self.last = args, first, last
        self.endings: Counter[str] = Counter()
        self.reports: list[str] = []
        self.environment = environment("address,undefined")
        self.start()

    def start(self) -> None:
        self.progress, self.output = tempfile.TemporaryFile(), tempfile.TemporaryFile("w+")  # noqa: SIM115
        count = len(range(self.next, self.last, self.args.workers))
        arguments = [self.args.seed, self.next, count, self.args.workers, self.progress.fileno(), *self.args.names]
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--work", *map(str, arguments)],
            env=self.environment,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            pass_fds=[self.progress.fileno()],
        )

    def is_done(self) -> bool:
        """Notes what has happened; whether all calls are made."""
        if self.process.poll() is None:
            return False
        self.output.seek(0)
        text = self.output.read()
        if self.process.returncode == 0:
            self.endings.update({e: int(n) for e, n in (w.split("=") for w in text.splitlines()[-1].split())})
            return True
        noted = os.pread(self.progress.fileno(), 8, 0)
        if not noted:
            sys.exit(text)
        number = struct.unpack("q", noted)[0]
        status = self.process.returncode
        ending = "took too long" if status == -signal.SIGALRM else f"ended with {status}"
        self.reports.append(f"--- call {number} of seed {self.args.seed} {ending}\n{text}")
        print(self.reports[-1], flush=True)
        self.next = number + self.args.workers
        if len(self.reports) >= self.args.reports or self.next >= self.last:
            return True
        self.start()
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--at", type=int, default=0, help="the number of the first call")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--reports", type=int, default=10, help="after so many a worker stops")
    parser.add_argument("names", nargs="*", help="operators; all by default")
    args = parser.parse_args()
    args.workers = min(args.workers, args.calls)
    print(f"seed {args.seed}", flush=True)
    start = time.monotonic()
    workers = [Worker(args, args.at + i, args.at + args.calls) for i in range(args.workers)]
    waiting = workers
    while waiting:
        time.sleep(0.1)
        waiting = [worker for worker in waiting if not worker.is_done()]
    reports = [report for worker in workers for report in worker.reports]
    endings = sum((worker.endings for worker in workers), Counter())
    counts = ", ".join(f"{n} {ending}" for ending, n in sorted(endings.items()))
    print(f"{sum(endings.values())} calls ({counts}) in {time.monotonic() - start:.0f} s, {len(reports)} reports")
    return 1 if reports else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        seed, first, count, step, progress = map(int, sys.argv[2:7])
        work(seed, first, count, step, sys.argv[7:], progress)
    else:
        sys.exit(main())
