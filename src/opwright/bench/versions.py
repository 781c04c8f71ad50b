"""`opwright bench --base`: an operator beside an earlier version of it, a commit or a record."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opwright.bench.environment import run_git
from opwright.bench.statistics import MIN_PAIRS, reason_for_hint, row_of, rows_of_records
from opwright.bench.worker import INTERRUPTED, Watcher, measure, start_worker
from opwright.errors import CheckError, NotVerifiedError, RecordError, TargetError
from opwright.isolation import Worker, WorkerEnded
from opwright.quantities import TIME, with_unit
from opwright.records import BaseRecord, BenchRecord, Machine, read

_MAX_PAIRS = 16
_VISITS = 4  # to each input, by turns: what disturbs a machine lasts for seconds
_BLOCKS = 2  # of each process of a pair in each visit, in turns
_BLOCK_SECONDS = 0.05
_LIMIT_FACTOR = 16  # of the seconds asked for: each pair starts PyTorch twice
# Of the seconds asked for, which are at least one: fewer than a hundred calls of a version prove nothing.
_MAX_CALL = 0.5


def compare_with_base(
    request: dict[str, Any], base: str, threads: int | None, watcher: Watcher
) -> tuple[list[BaseRecord], int]:
    """Measures the operators of a request beside an earlier version; returns the comparisons and the exit code.

    Raises:
        CheckError: there is neither such a record nor such a commit.
    """
    if Path(base).exists():
        return _with_records(request, Path(base), threads, watcher)
    return _with_commit(request, base, threads, watcher)


# --- records --------------------------------------------------------------------------------------------------


def _with_records(
    request: dict[str, Any], path: Path, threads: int | None, watcher: Watcher
) -> tuple[list[BaseRecord], int]:
    earlier = _newest(path, watcher)
    if not earlier:
        raise CheckError(
            str(path), "there is no record of a benchmark here", hint="`opwright bench TARGET --out records`"
        )
    found, code = measure(request, threads, watcher)
    compared = []
    for record in found:
        if not record.measurements:
            continue
        base = earlier.get((record.name, record.on_gpu))
        if base is None:
            watcher.say(f"skipped: {record.name} is not among the records of {path}")
            continue
        rows, missing = rows_of_records(base, record)
        reason = reason_for_hint(base, record, rows)
        compared.append(
            BaseRecord(
                name=record.name,
                base=str(path),
                method="record",
                rows=rows,
                machine=record.machine,
                created=record.created,
                seconds=record.seconds,
                device=record.device,
                is_hint=bool(reason),
                reason=reason,
                missing=missing,
            )
        )
    return compared, code or _exit_code(compared, watcher)


def _newest(path: Path, watcher: Watcher) -> dict[tuple[str, bool], BenchRecord]:
    """Returns the newest record of each operator, by its name and whether it is of a GPU."""
    found: dict[tuple[str, bool], BenchRecord] = {}
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        try:
            record = read(file)
        except RecordError as error:
            watcher.say(f"skipped: {error}")
            continue
        if isinstance(record, BenchRecord):
            if not _can_be_compared(record):
                watcher.say(f"skipped: `{file}`: it holds times that cannot be compared")
                continue
            key = record.name, record.on_gpu
            if key not in found or found[key].created < record.created:
                found[key] = record
    return found


def _can_be_compared(record: BenchRecord) -> bool:
    """Tells whether a record has all that a comparison asks for: with itself, to begin with."""
    try:
        rows_of_records(record, record)
    except (ArithmeticError, LookupError, ValueError, StopIteration):  # no times, no samples, a time of zero
        return False
    return True


def _exit_code(compared: list[BaseRecord], watcher: Watcher) -> int:
    if not compared or not any(record.rows for record in compared):
        watcher.say("error: there is nothing that both versions have")
        return 5
    return 1 if any(record.slower for record in compared) else 0


# --- commits --------------------------------------------------------------------------------------------------


def _with_commit(
    request: dict[str, Any], ref: str, threads: int | None, watcher: Watcher
) -> tuple[list[BaseRecord], int]:
    root = _root_of(request["target"], ref)
    commit = _commit(root, ref)
    # The numerics first, as always; the base is what it was.
    operators, code = measure({**request, "mode": "verified"}, threads, watcher)
    if code == INTERRUPTED:
        return [], code
    compared = []
    with checkout(root, commit) as tree:
        for operator in operators:
            try:
                compared.append(Duel(request, operator, f"{ref} ({commit[:12]})", root, tree, threads).run(watcher))
            except NotThere as reason:
                watcher.say(f"skipped: {operator['name']} cannot be had of {ref} ({commit[:12]}): {reason}")
            except WorkerEnded as ended:
                watcher.say(f"error: {ended.error(operator['name'], NotVerifiedError)}")
                code = 1
    return compared, code or _exit_code(compared, watcher)


class NotThere(Exception):
    """The base has no such operator; the text is what it says."""


class Duel:
    """One operator, two versions, pairs of processes."""

    def __init__(
        self, request: dict[str, Any], operator: dict[str, Any], base: str, root: Path, tree: Path, threads: int | None
    ) -> None:
        self._operator, self._base, self._root, self._tree = operator, base, root, tree
        place = request["target"].partition("::")[0]
        self._request = {
            **request,
            "target": f"{place}::{operator['name'].rpartition('::')[2]}",
            "mode": "pairs",
            "seconds": _BLOCK_SECONDS,
        }
        self._limit, self._precision, self._threads = request["seconds"], request["precision"], threads
        self._missing: set[str] = set()
        self._left_out: dict[str, str] = {}  # what each was
        self._named_cases: dict[str, str] = {}
        self._names = {"base": base, "now": "now"}

    def run(self, watcher: Watcher) -> BaseRecord:
        """Measures pair after pair, until differences of the precision are visible or the time is over."""
        started = time.time()
        found: dict[str, list[tuple[list[float], list[float]]]] = {}
        rows = []
        for number in range(_MAX_PAIRS):
            watcher.watch_pair(self._operator["name"], number + 1)
            for name, pair in self._pair(number).items():
                found.setdefault(name, []).append(pair)
            found = {name: pairs for name, pairs in found.items() if name not in self._left_out}
            if not found:
                break
            if number + 1 < MIN_PAIRS:
                continue
            rows = [row_of(name, pairs, len(found), self._named_cases[name]) for name, pairs in found.items()]
            if all(row.visible <= self._precision for row in rows):
                break
            if time.time() - started > _LIMIT_FACTOR * self._limit:
                break
        return BaseRecord(
            name=self._operator["name"],
            base=self._base,
            method="interleaved",
            rows=rows,
            machine=Machine(**self._operator["machine"]),
            created=started,
            seconds=time.time() - started,
            device=self._operator["device"],
            missing=sorted(self._missing),
            left_out=list(self._left_out.values()),
        )

    def _pair(self, number: int) -> dict[str, tuple[list[float], list[float]]]:
        """Starts both versions, and lets them measure each input in turns."""
        self._request["core"] = self._core(number)
        sides = {"base": self._start(self._tree), "now": self._start(self._root)}
        try:
            events = {side: worker.events() for side, worker in sides.items()}
            inputs = {side: self._inputs(side, events[side]) for side in sides}
            shared = [name for name in inputs["now"] if name in inputs["base"]]
            self._missing |= set(inputs["now"]) ^ set(inputs["base"])
            found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in shared}
            for visit, name, block in itertools.product(range(_VISITS), shared, range(_BLOCKS)):
                if name in self._left_out:
                    continue
                order = ("base", "now") if (number + visit + block) % 2 else ("now", "base")
                for side in order:
                    sides[side].ask(name)
                    found[name][side == "now"].append(min(self._answer(side, events[side])["block"]))
                self._leave_out_if_slow(name, found[name][0][-1] / 1e6)
            return found
        finally:
            for worker in sides.values():
                worker.close()

    def _leave_out_if_slow(self, name: str, call_s: float) -> None:
        if call_s > _MAX_CALL * max(self._limit, 1.0):
            enough = math.ceil(call_s / _MAX_CALL)
            self._left_out[name] = (
                f"{name}: a call of the base takes {with_unit(1e6 * call_s, TIME)}; "
                f"`--seconds {enough}` has time for it"
            )

    def _core(self, number: int) -> int | None:
        """Returns the core for both versions: one whose neighbour is busy is slow for as long as that is, for both."""
        if self._threads != 1 or self._operator["device"] != "cpu" or not hasattr(os, "sched_getaffinity"):
            return None
        cores = self._request["cpus"] or sorted(os.sched_getaffinity(0))
        return cores[number % len(cores)]

    def _inputs(self, side: str, answers: Iterator[dict[str, Any]]) -> list[str]:
        while True:
            answer = self._answer(side, answers)
            if "inputs" in answer:
                self._named_cases |= answer["named_cases"]  # the last ones are those of now
                return answer["inputs"]

    def _answer(self, side: str, answers: Iterator[dict[str, Any]]) -> dict[str, Any]:
        """Returns the next answer of one version, which is named if it has none."""
        try:
            return next(event for event in answers if "running" not in event)
        except WorkerEnded as ended:
            raise WorkerEnded(f"{ended.how}, in the version of {self._names[side]}", ended.running) from None
        except TargetError as error:
            if side == "now":
                raise
            raise NotThere(error.rule) from None

    def _start(self, tree: Path) -> Worker:
        """Starts the process of one version: this toolkit, the target of that tree."""
        toolkit = Path(__file__).resolve().parents[2]
        folders = [str(toolkit)]
        for entry in filter(None, sys.path):
            path = Path(entry).resolve()
            if path != toolkit:
                folders.append(str(_move(path, self._root, tree)))
        request = dict(self._request)
        place, _, name = request["target"].partition("::")
        if place.endswith(".py") or "/" in place:
            request["target"] = f"{_move(Path(place).resolve(), self._root, tree)}::{name}"
        env = {"PYTHONPATH": os.pathsep.join(folders)}
        return start_worker(request, self._threads, cwd=_move(Path.cwd(), self._root, tree), env=env)


def _move(path: Path, root: Path, tree: Path) -> Path:
    """Returns where a path of the repository is in another tree of it."""
    moved = tree / path.relative_to(root) if path.is_relative_to(root) else path
    return moved if moved.exists() or moved == path else tree


def _root_of(target: str, ref: str) -> Path:
    """Returns the repository that the target is in.

    Raises:
        CheckError: it is in none.
    """
    place = target.partition("::")[0]
    if place.endswith(".py") or "/" in place:
        file = Path(place).resolve()
    else:
        sys.path.insert(0, "")
        with contextlib.suppress(ModuleNotFoundError):
            spec = importlib.util.find_spec(place.partition(".")[0])
            found = spec and (spec.origin or next(iter(spec.submodule_search_locations or ()), None))
            file = Path(found or place)
    folder = file if file.is_dir() else file.parent
    try:
        return Path(run_git(folder, "rev-parse", "--show-toplevel"))
    except (OSError, subprocess.SubprocessError):
        raise CheckError(
            target,
            "it is in no git repository, so it has no earlier commit",
            rows=[("base", f"{ref}, which is not a file or folder either"), ("folder", str(folder))],
            hint="`--base FILE` with a record of an earlier version",
        ) from None


def _commit(root: Path, ref: str) -> str:
    try:
        return run_git(root, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    except (OSError, subprocess.SubprocessError):
        raise CheckError(
            ref,
            "there is neither a record nor a commit of this name",
            rows=[("repository", str(root))],
            hint="`--base HEAD~1`, `--base main`, or `--base reports` with the records of an earlier run",
        ) from None


@contextlib.contextmanager
def checkout(root: Path, commit: str) -> Iterator[Path]:
    """Yields a folder with the files of a commit; it is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="opwright-base-") as folder:
        tree = Path(folder).resolve() / "tree"
        run_git(root, "worktree", "add", "--detach", "--quiet", str(tree), commit)
        try:
            yield tree
        finally:
            run_git(root, "worktree", "remove", "--force", str(tree))
