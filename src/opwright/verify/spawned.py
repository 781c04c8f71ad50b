"""What a process does that was started anew for the checks: it makes the candidate again, and runs them."""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Sequence

import torch

from opwright.verify.child import Send, Start, Unfit, do_work, serve
from opwright.verify.finding import first_line
from opwright.verify.oracle_process import OracleProcess
from opwright.verify.processes import Process, Spawn
from opwright.verify.recipes import NotAgain, Recipe, pack, unpack
from opwright.verify.subject import Subject
from opwright.verify.worker import Job, Work


def starter(recipe: Recipe, work: Work, jobs: Sequence[Job]) -> Start:
    """Returns what starts such a process.

    Raises:
        Unfit: it could not make the candidate again.
    """
    try:
        request = pack(recipe, work.only, work.repeat, list(jobs))
    except NotAgain as reason:
        raise Unfit(str(reason)) from None

    def start(events: int, output: int, counter: int) -> Process:
        with open(os.memfd_create("opwright-request"), "w+b") as file:
            file.write(request)
            file.flush()
            return Spawn("opwright.verify.spawned:main", (events, output, counter, file.fileno()), output)

    return start


def main(events: int, output: int, counter: int, request: int) -> None:
    """Serves one request."""
    with open(request, "rb") as file:
        file.seek(0)
        data = file.read()

    def references(device: torch.device) -> dict[str, Subject]:
        return unpack(data)[0].references(device)

    serve(
        functools.partial(_run, data), events, output, counter, is_fork=False,
        start_oracle=lambda: OracleProcess(references),
    )  # fmt: skip


def _run(data: bytes, send: Send, calls: mmap.mmap, oracle: OracleProcess) -> None:
    try:
        recipe, only, repeat, jobs = unpack(data)
    except NotAgain as reason:
        raise Unfit(str(reason)) from None
    try:
        for device in dict.fromkeys(job.device for job in jobs):
            torch.zeros(1, device=device)  # CUDA starts here, and not in the first call
    except RuntimeError as error:
        raise Unfit(f"another process cannot use the device: {first_line(error)}") from None
    send({"settled": True})
    do_work(Work(recipe.subjects, only, repeat), jobs, send, calls, oracle)
