"""Declares, builds, forks and kills as fast as it can while other threads call. Prints what went wrong.

    python tests/integration/stress/stress.py swap --swaps 1000 --forks 50 --threads 4
    python tests/integration/stress/stress.py start --processes 64
    python tests/integration/stress/stress.py kill --kills 50
    python tests/integration/stress/stress.py edit --edits 50

Each has a store of its own in a temporary directory. Kernels add a number that tells which declaration they belong to, and
references do the same, so that a result of a wrong version is seen wherever it came from.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import inspect
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from opwright import operator
from opwright.errors import OpwrightError

KERNEL = """
#include <opwright/kernel.h>
{slow}
using opwright::View;
template <typename T> void NAME(View<const T, 1> x, View<T, 1> output) {{
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = x(i) + T({amount});
}}
OPWRIGHT_KERNEL(NAME, float)
"""
# Templates that take the compiler a few seconds.
SLOW = "#include <map>\n#include <string>\n#include <regex>\ntemplate class std::map<std::string, std::regex>;"
VERSIONS = 8  # kernels of different text, each built once
CHILD_SECONDS = 240  # what a child may take on a busy machine before it counts as hung


def declare(name: str, amount: int, *, slow: bool = False, backward: bool = False) -> Callable[..., Tensor]:
    """Declares `x + amount`: float32 runs the kernel, other dtypes the reference."""
    source = KERNEL.format(amount=amount, slow=SLOW if slow else "").replace("NAME", name)

    @operator(f"stress::{name}", cpu=source)
    def declared(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        return x + amount

    if backward:

        @declared.backward
        def declared_backward(grad_output, x):
            return grad_output + 0 * x

    return declared


class Versions:
    """Which declaration of an operator is current, as far as a caller can know."""

    def __init__(self, name: str, backward: bool) -> None:
        self.name, self.backward = name, backward
        self.started = self.finished = 0
        self.function = declare(name, 0, backward=backward)

    def swap(self) -> int:
        """Declares the next version; returns the number that it adds."""
        self.started += 1
        self.function = declare(self.name, self.started % VERSIONS, backward=self.backward)
        self.finished = self.started
        return self.finished % VERSIONS

    def call(self, how: Callable[[Callable[..., Tensor], Tensor], Tensor], x: Tensor) -> str | None:
        """Calls the operator; returns what is wrong with the result, if anything."""
        first = self.finished
        result = how(self.function, x).tolist()
        allowed = {float(version % VERSIONS) for version in range(first, self.started + 1)}
        if len(set(result)) == 1 and result[0] in allowed:
            return None
        return f"{self.name}: got {result}, expected one of {sorted(allowed)}"


def into_out(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    return function(x, out=torch.empty_like(x))


def through_the_dispatcher(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    return function.operator.public._op(x)


def recorded(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    y = function(x.clone().requires_grad_())
    y.sum().backward()
    return y.detach()


WAYS = [lambda function, x: function(x), into_out, through_the_dispatcher, recorded]


@contextlib.contextmanager
def fresh_store() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="opwright_stress_") as folder:
        os.environ["OPWRIGHT_CACHE_DIR"] = folder
        yield


@fresh_store()
def swap(swaps: int, forks: int, threads: int) -> list[str]:
    """Calls from several threads while this one swaps kernels and forks, and another one builds."""
    wrong: list[str] = []
    plain, differentiable = Versions("plain", False), Versions("differentiable", True)
    is_over = threading.Event()
    counts = dict.fromkeys(("calls", "builds", "children"), 0)

    def call(start: int) -> None:
        inputs = [torch.zeros(3), torch.zeros(3, dtype=torch.float64)]
        number = start
        while not is_over.is_set():
            number += 1
            versions = (plain, differentiable)[number // 8 % 2]
            try:
                problem = versions.call(WAYS[number % 4], inputs[number // 4 % 2])
            except Exception as error:
                problem = f"a call failed: {error!r}"
            if problem:
                wrong.append(problem)
            counts["calls"] += 1

    def build() -> None:
        while not is_over.is_set():
            number = counts["builds"] = counts["builds"] + 1
            try:
                function = declare(f"slow{number}", number, slow=True)
                if function(torch.zeros(1)).item() != number:
                    wrong.append("the operator built in the background gives a wrong result")
            except Exception as error:
                wrong.append(f"the build in the background failed: {error!r}")

    running = [threading.Thread(target=call, args=(i,)) for i in range(threads)]
    running.append(threading.Thread(target=build))
    for thread in running:
        thread.start()
    children: dict[int, int] = {}
    for i in range(1, swaps + 1):
        versions = differentiable if i % 10 == 0 else plain
        wanted = versions.swap()
        if versions.function(torch.zeros(1)).item() != wanted:
            wrong.append(f"swap {i}: the call after it does not run the new kernel")
        if forks and i % max(swaps // forks, 1) == 0 and counts["children"] < forks:
            counts["children"] += 1
            pid = fork(lambda: check_in_child((plain, differentiable), counts["builds"]))
            children[pid] = i
    for pid, i in children.items():
        _, status = os.waitpid(pid, 0)
        if status:
            wrong.append(f"the child forked after swap {i} ended with {os.waitstatus_to_exitcode(status)}")
    is_over.set()
    for thread in running:
        thread.join()
    print(f"{swaps} swaps, " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    return wrong


def check_in_child(operators: tuple[Versions, ...], number: int) -> None:
    """Calls, swaps and builds in a child of a fork, also what a thread of the parent is building."""
    for versions in operators:
        for how in WAYS:
            problem = versions.call(how, torch.zeros(3))
            assert problem is None, problem
        wanted = versions.swap()
        assert versions.function(torch.zeros(1)).item() == wanted
    assert declare("late", 1)(torch.zeros(1)).item() == 1
    if number % 3 == 0:
        assert declare(f"slow{number}", number, slow=True)(torch.zeros(1)).item() == number


def fork(work: Callable[[], None]) -> int:
    """Runs a function in a child, which is killed when it takes too long; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.alarm(CHILD_SECONDS)
        work()
        status = 0
    except BaseException as error:
        print(f"child: {error!r}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
import stress, torch
print(stress.declare("plain", 5)(torch.zeros(1)).item())
"""


@fresh_store()
def start(processes: int) -> list[str]:
    """Starts processes at once that all need the same library, which is not in the store."""
    program = PROGRAM.format(folder=str(Path(__file__).parent))
    command = [sys.executable, "-c", program]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    results = [(*process.communicate(), process.returncode) for process in started]
    wrong = [f"exit status {code}: {out}{error[-2000:]}" for out, error, code in results if code or out != "5.0\n"]
    libraries = list(Path(os.environ["OPWRIGHT_CACHE_DIR"]).rglob("library.so"))
    if len(libraries) != 1:
        wrong.append(f"{len(libraries)} libraries in the store, expected 1")
    print(f"{processes} processes, {len(libraries)} library")
    return wrong


def kill(kills: int) -> list[str]:
    """Kills a build at moments all over its time, then builds the same again. The store is empty each time."""
    wrong = []
    with fresh_store():
        began = time.monotonic()
        check_exit(fork(build_alone), "the first build", wrong)
        whole_s = time.monotonic() - began
    for i in range(kills):
        with fresh_store():
            pid = fork(build_alone)
            time.sleep(1.1 * whole_s * i / kills)
            if i % 2:
                with contextlib.suppress(ProcessLookupError):  # it leads no group yet
                    os.killpg(pid, signal.SIGKILL)  # its compilers too
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            check_exit(fork(build_alone), f"the build after kill {i}", wrong)
    print(f"{kills} kills of a build of {whole_s:.1f} s")
    return wrong


def build_alone() -> None:
    with contextlib.suppress(OSError):
        os.setsid()
    assert declare("plain", 5)(torch.zeros(1)).item() == 5


def check_exit(pid: int, what: str, wrong: list[str]) -> None:
    _, status = os.waitpid(pid, 0)
    if status:
        wrong.append(f"{what} ended with {os.waitstatus_to_exitcode(status)}")


def edit(edits: int) -> list[str]:
    """Edits a source or its header at moments all over a build; what is on disk must run from then on."""
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="opwright_stress_") as name, fresh_store():
        folder = Path(name)
        save(folder, 0)
        check_exit(fork(lambda: check_result(folder, {0})), "the first build", wrong)
        save(folder, 1)
        began = time.monotonic()
        check_exit(fork(lambda: check_result(folder, {1})), "the second build", wrong)
        whole_s = time.monotonic() - began
        for i in range(edits):
            before, after = 3 * i + 2, 3 * i + 3  # a new build each time, and an edit of either file in turn
            go = folder / f"go{i}"
            save(folder, before)
            pid = fork(lambda edit=(before, after, go): run_beside_an_edit(folder, *edit))
            time.sleep(1.1 * whole_s * i / edits)
            save(folder, after)
            go.touch()
            check_exit(pid, f"the process beside edit {i}", wrong)
            check_exit(fork(lambda after=after: check_result(folder, {after})), f"the process after edit {i}", wrong)
    print(f"{edits} edits of a build of {whole_s:.1f} s")
    return wrong


def save(folder: Path, edits: int) -> None:
    """Writes a source and a header as they are after a number of edits, which is what the kernel adds."""
    in_header, in_source = edits // 2, edits - edits // 2
    kernel = KERNEL.format(amount=f"AMOUNT + {in_source}", slow="").replace("NAME", "plain")
    texts = {"plain.cpp": '#include "amount.h"\n' + kernel, "amount.h": f"#define AMOUNT {in_header}\n"}
    for name, text in texts.items():
        path, part = folder / name, folder / "part"
        if not path.exists() or path.read_text() != text:
            part.write_text(text)
            part.rename(path)  # as editors do, so that nobody reads half of it


def run_beside_an_edit(folder: Path, before: int, after: int, go: Path) -> None:
    """Runs the kernel of before or after the edit, and in the same process that of after it."""
    try:
        check_result(folder, {before, after})
    except OpwrightError as error:
        if "changed" not in str(error):
            raise
    while not go.exists():
        time.sleep(0.005)
    check_result(folder, {after})


def check_result(folder: Path, allowed: set[int]) -> None:
    """Declares the operator of a folder and calls it."""

    @operator("stress::plain", cpu=folder / "plain.cpp")
    def declared(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        raise AssertionError("the reference runs")

    got = declared(torch.zeros(1)).item()
    assert got in allowed, f"got {got}, expected one of {sorted(allowed)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    verbs = {"swap": swap, "start": start, "kill": kill, "edit": edit}
    for name, verb in verbs.items():
        command = commands.add_parser(name)
        for option in inspect.signature(verb).parameters:
            command.add_argument(f"--{option}", type=int, required=True)
        command.add_argument("--timeout", type=int, default=3600, help="seconds before it counts as hung")
    options = vars(parser.parse_args())
    verb, timeout = verbs[options.pop("command")], options.pop("timeout")
    faulthandler.register(signal.SIGALRM, chain=True)  # shows where all threads are, then ends the process
    signal.alarm(timeout)
    wrong = verb(**options)
    for problem in wrong[:20]:
        print(f"wrong: {problem}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
