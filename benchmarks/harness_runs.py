"""The harnesses of harnesses.py: how each is given a mutant, on which inputs, and what of it runs.

A judge takes a candidate and returns what it found, "" where it passes it. Every harness gets what it asks for: its
own inputs and tolerances, a module, a registered operator. Of the other projects nothing is copied: their modules
are imported from the given checkout. What of them speaks to a GPU is replaced, and named where that is done.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness_candidates import Call, Candidate, Problem

import opwright
from opwright.verify.checks import CHECKS

OPINFO_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Judge = Callable[[Candidate], str]


@dataclass(frozen=True)
class Harness:
    """A harness of the comparison.

    Attributes:
        prepare: takes a problem and the checkout; returns the judge, or why there is none.
        sees_gradients: whether it calls a backward.
        flag: of the command, for the path of its checkout.
    """

    name: str
    prepare: Callable[[Problem, Path | None], Judge | str]
    sees_gradients: bool
    flag: str = ""

    def place(self, args: argparse.Namespace) -> Path | None:
        return getattr(args, self.flag.strip("-").replace("-", "_")) if self.flag else None

    def version(self, place: Path | None) -> str:
        if not self.flag:
            return (
                f"opwright {opwright.__version__}" if self.name.startswith("opwright") else f"torch {torch.__version__}"
            )
        if place is None:
            return "not installed: skipped"
        found = subprocess.run(
            ["git", "-C", str(place), "log", "-1", "--format=%h (%cs)"], capture_output=True, text=True, check=False
        )
        return found.stdout.strip() or "unknown"


def _needs_checkout(prepare: Callable[[Problem, Path], Judge | str]) -> Callable[[Problem, Path | None], Judge | str]:
    return lambda problem, place: "not installed: skipped" if place is None else prepare(problem, place)


def _package(name: str, place: Path) -> None:
    """Makes a package known by its folder, so that what its `__init__` imports (clients of models) is not needed."""
    module = types.ModuleType(name)
    module.__path__ = [str(place)]
    sys.modules[name] = module


def _callable(problem: Problem, place: Path | None) -> Judge:
    """opwright.verify of any callable: no contract, a large sample in float32, small ones in other dtypes."""

    def judge(candidate: Candidate) -> str:
        samples = [tuple(problem.normal(256, 384))]
        samples += [tuple(problem.normal(43, 33, dtype=dtype)) for dtype in (torch.bfloat16, torch.float64)]
        # What is wrapped around an operator in Python needs memory of its own.
        checks = [c for c in CHECKS if c not in ("memory", "leaks") or c in candidate.resource]
        record = opwright.verify(
            lambda *tensors: candidate.with_gradient(problem.values(*tensors)),
            reference=lambda *tensors: problem.reference(problem.values(*tensors)),
            samples=samples,
            checks=checks,
        )
        return "; ".join(f"{f.check}: {f.message}" for f in record.failures)

    return judge


def _assert_close(problem: Problem, place: Path | None) -> Judge:
    """torch.testing.assert_close on one sample of normal numbers in float32, forward and gradients."""

    def judge(candidate: Candidate) -> str:
        tensors = [t.requires_grad_() for t in problem.normal(64, 128)]
        others = [t.detach().clone().requires_grad_() for t in tensors]
        expected, got = problem.reference(problem.values(*others)), candidate.with_gradient(problem.values(*tensors))
        torch.testing.assert_close(got, expected)
        seed = torch.randn(expected.shape)
        expected.backward(seed)
        got.backward(seed)
        for mine, theirs in zip(tensors, others, strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
        return ""

    return judge


def _opinfo(problem: Problem, place: Path | None) -> Judge | str:
    """PyTorch's OpInfo: its reference inputs in four dtypes, each also as not contiguous; assert_close.

    What is expected is computed in float64, as PyTorch's tests against NumPy do with more digits than the dtype has.
    """
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError as error:  # expecttest
        return f"not installed: skipped ({error})"
    info = next(op for op in op_db if op.name == problem.known_as[0] and not op.variant_test_name)
    calls = []
    for dtype in OPINFO_DTYPES:
        for given in info.reference_inputs("cpu", dtype):
            for sample in (given, given.noncontiguous()):
                if "dtype" not in sample.kwargs:
                    calls.append((sample.input, sample.args, sample.kwargs))

    def judge(candidate: Candidate) -> str:
        for x, args, kwargs in calls:
            values = problem.from_call(x, *args, **kwargs)
            expected = problem.reference([v.double() if isinstance(v, torch.Tensor) else v for v in values])
            torch.testing.assert_close(candidate.forward(values), expected.to(x.dtype), equal_nan=True)
        return ""

    return judge


def _opcheck(problem: Problem, place: Path | None) -> Judge:
    """torch.library.opcheck of the candidate as a registered operator: plain, transposed, empty inputs."""
    wanted = ("base", "no batch axes", "transposed", "empty batch")
    cases = [c for c in problem.target.cases() if c.dtype == torch.float32 and c.label in wanted]
    cases = list({case.label: case for case in reversed(cases)}.values())

    def judge(candidate: Candidate) -> str:
        operator = _registered(candidate)
        for case in cases:
            values = problem.target.inputs(case)
            values = [v.requires_grad_() if isinstance(v, torch.Tensor) else v for v in values]
            found = torch.library.opcheck(operator, tuple(values), raise_exception=False)
            bad = [f"{name}: {said}" for name, said in found.items() if said != "SUCCESS"]
            if bad:
                return f"{case.label}: {'; '.join(bad)}"
        return ""

    judge(Candidate(problem, problem.right, problem.right))  # what it imports on its first call
    _library.pop()
    return judge


_library: list[torch.library.Library] = []


def _registered(candidate: Candidate) -> Any:
    """Registers a candidate as an operator with a fake kernel and a backward, an operator too."""
    problem, name = candidate.problem, candidate.problem.name
    tensors = 1 + problem.parameters
    declared = ", ".join(
        [f"Tensor t{i}" for i in range(tensors)] + [f"str o{i}" for i, _ in enumerate(problem.options)]
    )
    _library.append(library := torch.library.Library("harnesses", "FRAGMENT"))
    library.define(f"{name}({declared}) -> Tensor")
    library.define(f"{name}_backward(Tensor gradient, {declared}) -> Tensor[]")

    def gradients(gradient: torch.Tensor, *values: Any) -> list[torch.Tensor]:
        def compute() -> list[torch.Tensor]:
            leaves = [v.detach().requires_grad_() for v in values[:tensors]]
            output = candidate.with_gradient([*leaves, *values[tensors:]])
            found = torch.autograd.grad(output, leaves, gradient, allow_unused=True)
            return [torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves, strict=True)]

        with ThreadPoolExecutor(1) as thread:  # within a kernel there is no autograd; another thread has its own
            return thread.submit(compute).result()

    def forward(*values: Any) -> torch.Tensor:
        got = candidate.forward(values)
        wanted = problem.right(values)
        if got.shape != wanted.shape or got.stride() == wanted.stride():
            return got
        # That it is written in PyTorch, which chooses strides by itself, is not what is wrong with a mutant.
        return torch.empty_strided(wanted.shape, wanted.stride(), dtype=got.dtype, device=got.device).copy_(got)

    library.impl(name, forward, "CPU")
    library.impl(f"{name}_backward", gradients, "CPU")
    full = f"harnesses::{name}"
    torch.library.register_fake(full, lambda *values: problem.right(values), lib=library)
    torch.library.register_fake(
        f"{full}_backward", lambda gradient, *values: [torch.empty_like(v) for v in values[:tensors]], lib=library
    )
    backward = getattr(torch.ops.harnesses, f"{name}_backward")

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:tensors])
        ctx.options = inputs[tensors:]

    def pull_back(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return *backward(gradient, *ctx.saved_tensors, *ctx.options), *[None] * len(ctx.options)

    torch.library.register_autograd(full, pull_back, setup_context=keep, lib=library)
    return getattr(torch.ops.harnesses, name).default


def _gradcheck(problem: Problem, place: Path | None) -> Judge:
    """torch.autograd.gradcheck and gradgradcheck on a small sample in float64."""

    def judge(candidate: Candidate) -> str:
        tensors = tuple(t.requires_grad_() for t in problem.normal(3, 5, dtype=torch.float64))

        def call(*given: torch.Tensor) -> torch.Tensor:
            return candidate.with_gradient(problem.values(*given))

        torch.autograd.gradcheck(call, tensors)
        if candidate.has_second_gradient:
            torch.autograd.gradgradcheck(call, tensors)
        return ""

    return judge


class _Task(torch.nn.Module):
    """A model of the benchmarks: an input, and parameters of its own."""

    def __init__(self, problem: Problem, call: Call | None = None, width: int = 0) -> None:
        super().__init__()
        self.problem, self.call = problem, call
        self.own = torch.nn.ParameterList([torch.randn(width) for _ in range(problem.parameters)])

    def forward(self, x: torch.Tensor, fn: Call | None = None) -> torch.Tensor:
        return (fn or self.call)(self.problem.values(x, *self.own))

    def to(self, *args: Any, **kwargs: Any) -> _Task:
        return self  # robust-kbench says "cuda"


# The tasks 21, 23 and 26 of its level 1 have a batch of 4096 rows, 6 GB; here it is 8, the width is theirs.
_KERNELBENCH = (8, 393216)


def _kernelbench(problem: Problem, place: Path) -> Judge:
    """KernelBench: `run_and_check_correctness` with five trials in float32, as its scripts do.

    Replaced: torch.cuda.synchronize. `eval_kernel_against_ref` around it refuses to start without CUDA; what it adds
    is loading sources, timing, and a flag for a speed-up above ten.
    """
    _package("kernelbench", place / "src/kernelbench")
    evaluation = importlib.import_module("kernelbench.eval")

    def model(call: Call) -> _Task:
        torch.manual_seed(42)
        return _Task(problem, call, _KERNELBENCH[1])

    def judge(candidate: Candidate) -> str:
        with mock.patch("torch.cuda.synchronize"):
            result = evaluation.run_and_check_correctness(
                model(problem.reference),
                model(candidate.forward),
                lambda: [torch.rand(_KERNELBENCH)],
                metadata={},
                num_correct_trials=5,
                seed=42,
                device="cpu",
                precision=torch.float32,
            )
        return "" if result.correctness else str(result.metadata)

    return judge


def _backendbench(problem: Problem, place: Path) -> Judge | str:
    """BackendBench: `eval_correctness` on the tests of its OpInfo suite, in bfloat16 as its command has it, on the CPU.

    Every test has to pass, as in its summary. Of its table of operators only the one in question is built.
    """
    _package("BackendBench", place / "BackendBench")
    _package("BackendBench.suite", place / "BackendBench/suite")
    evaluation = importlib.import_module("BackendBench.eval")
    suites = importlib.import_module("BackendBench.suite.opinfo")
    own = [op for op in suites.op_db if op.name == problem.known_as[0]]
    with mock.patch.object(suites, "op_db", own):
        suite = suites.OpInfoTestSuite("opinfo", "cpu", torch.bfloat16, filter=[problem.known_as[1]])
    tests = [test for optest in suite for test in optest.correctness_tests]
    if not tests:
        return f"its OpInfo suite has no test of {problem.known_as[0]}"

    def reference(*args: Any, **kwargs: Any) -> torch.Tensor:
        return problem.reference(problem.from_call(*args, **kwargs))

    def judge(candidate: Candidate) -> str:
        def implementation(*args: Any, **kwargs: Any) -> torch.Tensor:
            return candidate.forward(problem.from_call(*args, **kwargs))

        _, results = evaluation.eval_correctness(reference, implementation, tests)
        wrong = [r for r in results if not r.is_correct]
        return f"{len(wrong)} of {len(results)} tests: {wrong[0].max_abs_error} {wrong[0].error_type}" if wrong else ""

    return judge


def _robust_kbench(problem: Problem, place: Path) -> Judge:
    """robust-kbench: `check_forward_correctness` and `check_backward_correctness`, five trials, its sizes and tolerances.

    Replaced: `easy_to_device`, `graceful_eval_cleanup` and the model's `to`, which name a GPU.
    """
    _package("robust_kbench", place / "robust_kbench")
    _package("robust_kbench.sandbox", place / "robust_kbench/sandbox")
    checks = [importlib.import_module(f"robust_kbench.sandbox.correct_{way}_fn") for way in ("forward", "backward")]
    for module in checks:
        module.easy_to_device = lambda values, device: values
        module.graceful_eval_cleanup = lambda device: None

    def judge(candidate: Candidate) -> str:
        settings = {"input_settings": {}, "init_settings": {"problem": problem, "width": 16384}}
        forward = checks[0].check_forward_correctness(
            _Task, problem.reference, candidate.forward, lambda: [torch.randn(16, 16384)], **settings
        )
        if not forward.correct:
            return f"forward, off by {forward.max_diff}"

        class Function(torch.autograd.Function):
            backward_fn: Any = None

            @staticmethod
            def forward(ctx: Any, *values: Any) -> torch.Tensor:
                ctx.values = values
                return problem.reference(values)

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> Any:
                return (*Function.backward_fn(gradient, ctx.values), *[None] * len(problem.options))

        class Spread:
            backward_fn: Any = None

            @staticmethod
            def apply(values: Sequence[Any]) -> torch.Tensor:
                Function.backward_fn = Spread.backward_fn
                return Function.apply(*values)

        def gradients(gradient: torch.Tensor, values: Sequence[Any]) -> Any:
            with torch.enable_grad():
                leaves = [v.detach().requires_grad_() for v in values if isinstance(v, torch.Tensor)]
                output = candidate.with_gradient([*leaves, *problem.options])
                return torch.autograd.grad(output, leaves, gradient, allow_unused=True)

        backward = checks[1].check_backward_correctness(
            _Task,
            problem.reference,
            Spread,
            gradients,
            lambda: [torch.randn(16, 16384, requires_grad=True)],
            **settings,
        )
        return "" if backward.correct else f"backward, off by {backward.max_diff}"

    return judge


class _Event:
    """A CUDA event's time, on a CPU."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, other: _Event) -> float:
        return 1e3 * (other.seconds - self.seconds)


def _gpu_mode(problem: Problem, place: Path) -> Judge:
    """gpu-mode's reference-kernels: the evaluation of pmpp_v2, its tests and a ranked run that checks every result.

    The task is in its form: normal numbers in float32, the sizes of its vectoradd, the tolerances of its grayscale,
    its one task in float32 with elements of their own. Replaced: torch.cuda.synchronize, torch.cuda.Event and
    `clear_l2_cache`. Its pool of one process is this process.
    """
    sys.path.insert(0, str(place / "problems/pmpp_v2"))
    for name in ("eval", "utils", "reference", "submission"):
        sys.modules.pop(name, None)
    utils = importlib.import_module("utils")
    reference, submission = types.ModuleType("reference"), types.ModuleType("submission")

    def generate_input(size: int, seed: int) -> tuple[torch.Tensor, ...]:
        made = torch.Generator().manual_seed(seed)
        shapes = [(size, size), *[(size,)] * problem.parameters]
        return tuple(torch.randn(s, generator=made) for s in shapes)

    reference.generate_input = generate_input
    reference.check_implementation = utils.make_match_reference(
        lambda data: problem.reference(problem.values(*data)), rtol=1e-4, atol=1e-4
    )
    sys.modules |= {"reference": reference, "submission": submission}
    evaluation = importlib.import_module("eval")
    evaluation.clear_l2_cache = lambda: None
    sys.path.pop(0)
    tests = [(127, 4242), (128, 5236), (129, 1001), (256, 5531), (512, 9173)]

    def case(size: int, seed: int) -> Any:
        return evaluation.TestCase(args={"size": size, "seed": seed}, spec="")

    def judge(candidate: Candidate) -> str:
        submission.custom_kernel = lambda data: candidate.forward(problem.values(*data))
        with mock.patch("torch.cuda.synchronize"), mock.patch("torch.cuda.Event", _Event):
            for size, seed in tests:
                good, message = evaluation._run_single_test(case(size, seed))
                if not good:
                    return f"size {size}: {message}"
            ranked = evaluation._run_single_benchmark(case(512, 31232), True, 100, 30e9)
        return ranked if isinstance(ranked, str) else ""

    return judge


HARNESSES = [
    Harness("opwright, a callable", _callable, True),
    Harness("assert_close", _assert_close, True),
    Harness("OpInfo", _opinfo, False),
    Harness("opcheck", _opcheck, True),
    Harness("gradcheck", _gradcheck, True),
    Harness("KernelBench", _needs_checkout(_kernelbench), False, "--kernelbench"),
    Harness("BackendBench", _needs_checkout(_backendbench), False, "--backendbench"),
    Harness("robust-kbench", _needs_checkout(_robust_kbench), True, "--robust-kbench"),
    Harness("gpu-mode", _needs_checkout(_gpu_mode), False, "--gpu-mode"),
]
