"""Has another process measure, and times it from here as well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opwright import errors
from opwright.errors import NotVerifiedError, OpwrightError
from opwright.records import BenchRecord

# How much longer a call may take by this process's clock than it is said to: the best of some windows of two
# milliseconds, on a machine that may be busy.
_CLOCK_FACTOR = 2.0


class Worker:
    """A process that measures.

    Args:
        request: what is measured, for `bench_worker`.
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
        read, write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "opwright.cli.bench_worker", str(write)],
            stdin=subprocess.PIPE,
            stdout=2,
            pass_fds=[write],
            cwd=cwd,
            env={**os.environ, **pinned, **(env or {})},
            text=True,
        )
        os.close(write)
        self._answers = os.fdopen(read, encoding="utf-8")
        self.last = "started"
        self.ask(request)

    def ask(self, request: Any) -> None:
        """Sends it a line; one that is gone says so when it is read."""
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass

    def answers(self) -> Iterator[dict[str, Any]]:
        """Yields what it answers, until it ends.

        Raises:
            NotVerifiedError: it ended by a signal, or by itself in the middle.
            OpwrightError: it could not do what was asked.
        """
        for line in self._answers:
            answer = json.loads(line)
            if "failed" in answer:
                self.close()
                raise rebuilt(answer["failed"])
            self.last = answer.get("measured") or answer.get("operator") or self.last
            yield answer
        code = self._process.wait()
        if code:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise NotVerifiedError(
                "bench", "the process that measured has ended", rows=[("ended by", how), ("behind", self.last)]
            )

    def close(self) -> None:
        """Ends it."""
        self._process.stdin.close()
        self._process.terminate()
        self._process.wait()
        self._answers.close()


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
