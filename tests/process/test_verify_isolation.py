"""Candidates that do harm: each is a finding with its name, the run goes on, and the caller is unharmed."""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from jaxtyping import Float, Int64
from torch import Tensor

import opwright
from opwright import isolation
from opwright.cpp_extension import precompiled
from opwright.errors import CheckError
from opwright.isolation import Fork, Limits, Worker, fork
from opwright.verify import devices, runner
from opwright.verify.child_processes import children, end_children

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are supervised on Linux only")

_numbers = itertools.count()
SAMPLES = [(torch.linspace(-3, 3, 35).view(5, 7),), (torch.linspace(-2, 2, 16),)]


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * torch.erfc(-x / math.sqrt(2))


def check(candidate, **options):
    usual = {"checks": ["numerics", "determinism"], "timeout_s": 1.0, "samples": SAMPLES, "expand": False}
    options = usual | options
    return opwright.verify(candidate, reference=gelu, **options)


def after(action):
    """Returns a candidate that is right, and does something else as well."""

    def candidate(x: Tensor) -> Tensor:
        action()
        return gelu(x)

    return candidate


def print_without_end() -> None:
    while True:
        print("x" * 100_000)


def allocate_without_end() -> None:
    kept = []
    while True:
        kept.append(torch.ones(4 * 2**20))


def fork_and_return() -> None:
    os.fork()


def start_a_daemon() -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)


def overrun_the_heap() -> None:
    # Python's report names all extension modules behind what glibc says: a long one, as in a process with many.
    sys.modules.update({f"{'extension' * 9}{i}": torch._C for i in range(100)})
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    first, _ = ctypes.c_void_p(libc.malloc(2000)), libc.malloc(2000)
    ctypes.memset(first, 0x41, 2100)  # over the size of the second
    libc.free(first)


def raise_interrupt() -> None:
    raise KeyboardInterrupt


HARM = {
    "crash": (lambda: ctypes.string_at(0), "SIGSEGV (Segmentation fault)"),
    "abort": (os.abort, "SIGABRT (Aborted)"),
    "overrun": (overrun_the_heap, "memory was written out of bounds, or freed twice"),
    "killed": (lambda: os.kill(os.getpid(), 9), "SIGKILL (Killed)"),
    "hang": (lambda: time.sleep(600), "did not return within 1 s"),
    "stop": (lambda: os.kill(os.getpid(), 19), "did not return within 1 s"),
    "os._exit": (lambda: os._exit(0), "ended the process, with exit code 0"),
    "sys.exit": (lambda: sys.exit(3), "raised SystemExit: 3"),
    "interrupt": (raise_interrupt, "raised KeyboardInterrupt"),
    "flood": (print_without_end, "printed more than 16 MiB"),
    "memory": (allocate_without_end, "took more than 0.25 GiB of memory"),
    "fork": (fork_and_return, "behind, now killed"),
    "subprocess": (lambda: subprocess.Popen(["sleep", "600"]), "sleep 600"),
    "daemon": (start_a_daemon, "behind, now killed"),
}


def test_a_process_that_precompiles_headers_goes_on() -> None:
    program = "import time; time.sleep(60)" + precompiled._PROGRAM
    process = subprocess.Popen([sys.executable, "-S", "-c", program, "[]", "{}"])
    try:
        assert end_children(set(children()) - {process.pid}) == []
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("kind", HARM)
def test_harm_is_a_finding_and_the_run_goes_on(kind: str) -> None:
    action, text = HARM[kind]
    before = children()
    # Only what hangs has to pass the limit of time; a busy machine needs more than that for the others.
    record = check(after(action), memory_bytes=2**28, timeout_s=1.0 if kind in ("hang", "stop") else 30.0)
    assert record.in_process == ""
    assert [c.outcome for c in record.checks] == ["failed", "failed"]  # the second was tried as well
    for failure in record.failures:
        assert text in failure.message
    if kind not in ("fork", "subprocess", "daemon"):
        assert record.failures[0].case == "f32[5, 7] (sample 0)"
    assert children() == before  # no zombie


def test_only_the_case_that_crashes_is_named() -> None:
    record = check(lambda x: ctypes.string_at(0) if x.ndim == 1 else gelu(x), checks=["numerics"])
    assert [f.case for f in record.failures] == ["f32[16] (sample 1)"]


def test_a_crash_on_a_part_of_a_failing_case_leaves_the_failure_of_the_whole() -> None:
    def wrong(x: Tensor) -> Tensor:
        return 2 * gelu(x) if x.shape == (5, 7) else ctypes.string_at(0)

    record = check(wrong, samples=SAMPLES[:1], checks=["numerics", "determinism"])
    assert [c.outcome for c in record.checks] == ["passed", "failed"]  # determinism comes first
    (failure,) = record.failures
    assert failure.case == "f32[5, 7] (sample 0)"
    assert "expected" in failure.message


class _SumThatCrashes(torch.autograd.Function):
    """Its backward crashes where the second argument alone needs a gradient."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @staticmethod
    def backward(ctx, grad: Tensor):
        if ctx.needs_input_grad == (False, True):
            ctypes.string_at(0)
        return grad, grad


def test_a_crash_in_a_backward_names_what_needed_gradients_and_spares_what_the_reference_does_too() -> None:
    """The backward of group_norm crashes in PyTorch itself, with the bias alone."""

    def right(a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def crashing(a: Tensor, b: Tensor) -> Tensor:
        return _SumThatCrashes.apply(a, b)

    samples = [(torch.ones(2, 3), torch.ones(2, 3))]
    usual = {"samples": samples, "checks": ["gradient subsets", "repeated backward"], "expand": False}
    record = opwright.verify(crashing, reference=crashing, **usual)
    assert [c.outcome for c in record.checks] == ["skipped", "passed"]
    where = "f32[2, 3] f32[2, 3] (sample 0), gradients of `b` alone"
    assert (
        record.checks[0].reason == f"the reference alone crashed the process: SIGSEGV (Segmentation fault), on {where}"
    )

    (failure,) = opwright.verify(crashing, reference=right, **usual).failures
    assert (failure.check, failure.case) == ("gradient subsets", where)
    assert failure.message == "crashed the process: SIGSEGV (Segmentation fault), after the call had returned"


def test_pythons_report_of_a_crash_is_shown_once(capfd: pytest.CaptureFixture[str]) -> None:
    record = check(after(lambda: (print("before it"), sys.stdout.flush(), ctypes.string_at(0))))
    assert len(record.failures) == 2
    printed = capfd.readouterr().err
    assert printed.count("before it") == 2
    assert printed.count("Fatal Python error: Segmentation fault") == 1


def test_a_check_that_ends_well_after_one_that_crashed() -> None:
    """Every check starts in a process that no earlier check has damaged."""
    calls = itertools.count()

    def third_call_crashes(x: Tensor) -> Tensor:
        return ctypes.string_at(0) if next(calls) == 2 else gelu(x)

    record = check(third_call_crashes, samples=SAMPLES[:1], checks=["determinism", "numerics", "side stream"])
    assert [c.outcome for c in record.checks] == ["failed", "passed", "skipped"]
    assert record.checks[2].reason == "only on a GPU"
    assert next(calls) == 0  # none of this was here


def test_a_lost_gpu_is_lost_to_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check after the fault has a process of its own, until there have been too many."""
    lost: list[Tensor] = []
    monkeypatch.setattr(devices, "is_lost", lambda device: bool(lost))

    def faulty(x: Tensor) -> Tensor:
        if x.ndim == 2:
            lost.append(x)
            raise RuntimeError("an illegal memory access was encountered")
        return gelu(x)

    record = check(faulty, checks=["numerics", "determinism", "side stream"])
    assert [c.outcome for c in record.checks] == ["failed", "failed", "skipped"]
    assert {f.case for f in record.failures} == {"f32[5, 7] (sample 0)"}
    assert "accepts no more work after this call: an illegal" in record.failures[0].message
    record = check(faulty, isolated=False)
    assert [c.outcome for c in record.checks] == ["failed", "skipped"]
    assert record.checks[1].reason == "a fault on f32[5, 7] (sample 0) has ended all work on the GPU"


def test_one_that_always_dies_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_MAX_DEATHS", 1)
    record = check(after(os.abort))
    assert [c.outcome for c in record.checks] == ["failed", "skipped"]
    assert "has ended its process 1 times" in record.checks[1].reason


# --- what must stay as it was ----------------------------------------------------------------------------------


_LIBC = ctypes.CDLL(None)
_UPWARD = 0x800 if platform.machine() == "x86_64" else 0x400000
CHANGES = {
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), "torch.get_default_dtype() was torch.float32"),
    "default device": (lambda: torch.set_default_device("meta"), "torch.get_default_device() was cpu"),
    "threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "torch.get_num_threads() was"),
    "grad mode": (lambda: torch.set_grad_enabled(not torch.is_grad_enabled()), "torch.is_grad_enabled() was"),
    "deterministic": (lambda: torch.use_deterministic_algorithms(True), "torch.use_deterministic_algorithms was"),
    "precision": (lambda: torch.set_float32_matmul_precision("medium"), "matmul_precision() was highest"),
    "autocast": (lambda: torch.set_autocast_enabled("cuda", True), "is_autocast_enabled('cuda') was False"),
    "autocast dtype": (lambda: torch.set_autocast_dtype("cpu", torch.half), "dtype('cpu') was torch.bfloat16"),
    "attention": (lambda: torch.backends.cuda.enable_flash_sdp(False), "flash_sdp_enabled() was True"),
    # Not by torch.backends, which PyTorch's own tests close for the process that imports them.
    "cuDNN": (lambda: torch._C._set_cudnn_deterministic(True), "cudnn.deterministic was False"),
    "denormals": (lambda: torch.set_flush_denormal(True), "torch.set_flush_denormal was False"),
    "seed": (lambda: torch.manual_seed(5), "the seed of torch's generator was"),
    "directory": (lambda: os.chdir("/"), "the working directory was"),
    "rounding mode": (lambda: _LIBC.fesetround(_UPWARD), "the rounding mode was 0"),
}  # fmt: skip


@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_of_the_process_is_a_finding_and_is_put_back(kind: str, isolated: bool) -> None:
    action, text = CHANGES[kind]
    held = torch.get_default_dtype(), os.getcwd(), torch.initial_seed()
    record = check(after(action), isolated=isolated, checks=["numerics"], timeout_s=30.0)  # some import modules
    assert [c.outcome for c in record.checks] == ["failed"]
    (failure,) = record.failures
    assert text in failure.message
    assert bool(record.in_process) is not isolated
    assert held == (torch.get_default_dtype(), os.getcwd(), torch.initial_seed())


def replace_comparisons() -> None:
    torch.where = lambda *args: torch.zeros(())
    torch.Tensor.__gt__ = lambda *args: torch.zeros(1, dtype=torch.bool)


def replace_a_kernel_of_pytorch() -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("erfc", lambda x: torch.zeros_like(x), "CPU")
    kept.append(library)


def replace_the_reference() -> None:
    gelu.__code__ = (lambda x: x * 0).__code__


kept: list[torch.library.Library] = []
REPLACE = [replace_comparisons, replace_a_kernel_of_pytorch, replace_the_reference]


@pytest.mark.parametrize("replace", REPLACE, ids=lambda replace: replace.__name__)
def test_what_a_call_replaces_does_not_reach_the_oracle(replace) -> None:
    """The oracle and its comparison are in another process."""

    def candidate(x: Tensor) -> Tensor:
        replace()
        return torch.zeros_like(x)

    record = check(candidate, checks=["numerics"])
    assert record.in_process == ""
    assert " wrong; worst at " in " ".join(f.message for f in record.failures)


def test_what_is_right_changes_nothing() -> None:
    def candidate(x: Tensor) -> Tensor:
        print("a line of the candidate's")
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            Path(folder, "x").write_text("x")
            subprocess.run(["true"], check=True)
            torch.rand(3)  # drawing numbers changes nothing
        return gelu(x)

    record = check(candidate)
    assert record.passed, record.failures


def test_a_file_edited_beside_a_running_verify_is_no_finding(tmp_path: Path) -> None:
    """The author saves the next version meanwhile, or an editor removes its lock."""
    (tmp_path / "lock").write_text("x")
    source = tmp_path / "candidate.py"
    source.write_text(
        "import math, pathlib, torch\n"
        "def candidate(x):\n"
        "    here = pathlib.Path(__file__).parent\n"
        "    (here / 'lock').unlink(missing_ok=True)\n"
        "    (here / 'candidate.py').write_text('the next version')\n"
        "    return 0.5 * x * torch.erfc(-x / math.sqrt(2))\n"
    )
    namespace = {"__file__": str(source)}
    exec(compile(source.read_text(), source, "exec"), namespace)
    record = check(namespace["candidate"], checks=["numerics"])
    assert record.passed, record.failures


# --- the caller ------------------------------------------------------------------------------------------------


def test_thread_pools_work_in_the_fork() -> None:
    """Matrix products, loops, autograd, torch.compile, threads: after all have run in the caller, with all threads."""
    large = torch.ones(600, 600)

    def work(x: Tensor) -> Tensor:
        product = torch.exp(large * 0.001) @ large
        leaf = large.clone().requires_grad_()
        with torch.enable_grad():
            (leaf @ leaf).tanh().sum().backward()
        results = []
        thread = threading.Thread(target=lambda: results.append(torch.sin(large).sum()))
        thread.start()
        thread.join()
        compiled = torch.compile(lambda t: t.sin() * 2 + t.softmax(-1))(x)
        return gelu(x) + 0 * (product.sum() + leaf.grad.sum() + results[0] + compiled.sum())

    work(SAMPLES[0][0])
    torch._dynamo.reset()
    record = check(work, checks=["numerics"], timeout_s=120.0, samples=SAMPLES[:1])
    assert record.passed, record.failures


@pytest.mark.compiler
def test_an_operator_whose_kernel_crashes() -> None:
    """And the next operator is verified as if nothing had been."""
    source = """
    #include <opwright/kernel.h>
    template <typename T>
    void twice(opwright::View<const T, 1> x, opwright::View<T, 1> output) {
      for (int64_t i = 0; i < x.size(0); ++i) output(i) = x(i) + x(i);
      if (x.size(0) == 7) *(volatile int*)0 = 1;
    }
    OPWRIGHT_KERNEL(twice, float, double, opwright::half, opwright::bfloat16)
    """

    def make(text: str):
        @opwright.operator(f"isolation{next(_numbers)}::twice", cpu=text)
        def twice(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
            return x * 2

        return twice

    checks = ["outputs written", "numerics", "refusals"]
    record = opwright.verify(make(source), checks=checks)
    assert [c.outcome for c in record.checks] == ["failed", "failed", "passed"]
    assert record.failures[0].message == "crashed the process: SIGSEGV (Segmentation fault)"
    assert "--check 'outputs written'" in record.failures[0].repeat
    assert record.backends == ["cpu"]
    right = opwright.verify(make(source.replace("if (x.size(0) == 7) *(volatile int*)0 = 1;", "")), checks=checks)
    assert right.passed, right.failures


def test_an_interrupt_ends_the_child(run_python, tmp_path: Path) -> None:
    program = f"""
import os, pathlib, signal, threading, time, torch, opwright
signal.signal(signal.SIGINT, signal.default_int_handler)  # also below nohup
pid = pathlib.Path({str(tmp_path / "pid")!r})
def hang(x):
    pid.write_text(str(os.getpid()))
    time.sleep(600)
def interrupt():
    while not (pid.exists() and pid.read_text()):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    opwright.verify(hang, reference=torch.sin, samples=[(torch.ones(3),)], checks=["numerics"])
except KeyboardInterrupt:
    os.kill(int(pid.read_text()), 0)
"""
    result = run_python(program, check=False, timeout=60)
    assert "ProcessLookupError" in result.stderr  # it is gone, and not a zombie either


def test_flags_of_pytorch_can_be_set_after_opcheck(run_python) -> None:
    program = """
import sys, torch, opwright
from jaxtyping import Float
from torch import Tensor
@opwright.operator("flags::doubled")
def doubled(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return 2 * x
record = opwright.verify(doubled, checks=["opcheck"], isolated=False)
assert record.passed and "torch.testing._internal.optests" in sys.modules
torch.backends.cudnn.benchmark = True
print(torch.backends.cudnn.benchmark)
"""
    assert run_python(program).stdout == "True\n"


def test_flags_stay_settable_where_the_import_of_optests_forbids_it(run_python) -> None:
    """As that of PyTorch 2.11 does."""
    program = """
import importlib, torch
from opwright import _torch
imported = importlib.import_module
def importing(name, *args, **kwargs):
    found = imported(name, *args, **kwargs)
    if name.endswith(".optests"):
        torch.backends.disable_global_flags()
    return found
importlib.import_module = importing
_torch.import_optests()
torch.backends.cudnn.benchmark = True
"""
    run_python(program)


def test_without_isolation_it_says_so_and_runs_here() -> None:
    calls = []

    def candidate(x: Tensor) -> Tensor:
        calls.append(os.getpid())
        return gelu(x)

    record = check(candidate, isolated=False)
    assert record.passed
    assert set(calls) == {os.getpid()}
    assert record.in_process == "isolated=False"


def test_a_fork_that_cannot_run_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where autograd has threads for a GPU: they run here, and the record says why."""
    monkeypatch.setattr(runner, "_tell_unfit", lambda: "Unable to handle autograd's threading")
    record = check(gelu)
    assert record.passed
    assert record.in_process == "Unable to handle autograd's threading"


class _Slow:
    """Garbage that is long in being collected, lets other threads run meanwhile, and leaves more of it."""

    goes_on = True

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        time.sleep(0.02)
        if _Slow.goes_on:
            _Slow()


def test_a_fork_collects_garbage() -> None:
    """Also where its parent was about to."""
    read, write = os.pipe()

    def main() -> None:
        _Slow.goes_on = False
        gc.set_threshold(*thresholds)
        cycle = threading.local()
        cycle.own = cycle
        gone = weakref.ref(cycle)
        del cycle
        gc.collect()
        os.write(write, b"collected" if gone() is None else b"kept")
        os._exit(0)

    thresholds = gc.get_threshold()
    _Slow()
    gc.set_threshold(1)
    try:
        fork = Fork(main)
    finally:
        gc.set_threshold(*thresholds)
        _Slow.goes_on = False
    assert os.read(read, 100) == b"collected"
    fork.kill()
    os.close(read)
    os.close(write)


@pytest.mark.parametrize(
    ("folder", "limit", "used", "cached"),
    [
        (".", "max", "current", {"inactive_file": 600, "active_file": 300, "slab_reclaimable": 100}),
        (
            "memory",  # of version 1
            "limit_in_bytes",
            "usage_in_bytes",
            {"inactive_file": 9, "total_inactive_file": 600, "total_active_file": 400},
        ),
    ],
)
def test_files_that_a_control_group_caches_take_no_memory(monkeypatch, tmp_path, folder, limit, used, cached) -> None:
    """Candidates in a container that had read large files were ended for want of memory."""
    group = tmp_path / folder
    group.mkdir(exist_ok=True)
    (group / f"memory.{limit}").write_text(f"{2500 * 2**20}\n")
    (group / f"memory.{used}").write_text(f"{2200 * 2**20}\n")
    (group / "memory.stat").write_text("".join(f"{name} {mb * 2**20}\n" for name, mb in cached.items()))
    (tmp_path / "meminfo").write_text(f"MemTotal: 9000000 kB\nMemAvailable: {4000 * 2**10} kB\n")
    monkeypatch.setattr(isolation, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(isolation, "_GROUPS", tmp_path)
    assert isolation.free_memory() == 1300 * 2**20
    (group / f"memory.{limit}").write_text("max\n")
    assert isolation.free_memory() == 4000 * 2**20


def test_what_came_before_an_error_is_not_lost() -> None:
    """Both may arrive at once, if this process was busy."""

    def run(channel) -> None:
        channel.send(number=1)
        raise CheckError("that", "cannot be done")

    worker = Worker(fork(run), Limits())
    worker._process.poll(0)  # wait until it has sent all
    found = []
    with pytest.raises(CheckError, match="cannot be done"):
        found.extend(event["number"] for event in worker.events())
    assert found == [1]


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="PyTorch has one thread")
def test_the_candidate_has_all_threads(ns, tmp_path: Path) -> None:
    """Workers side by side share the cores, but a loop that is wrong in several threads must be seen."""
    seen = tmp_path / "threads"

    @opwright.operator(f"{ns}::twice")
    def twice(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        with seen.open("a") as file:
            file.write(f"{torch.get_num_threads()}\n")
        return 2 * x

    before = torch.get_num_threads()
    assert opwright.verify(twice, checks=["determinism"]).passed
    assert set(map(int, seen.read_text().split()[-20:])) == {before}


def test_a_reference_that_crashes_is_named(ns) -> None:
    """As embedding_bag of PyTorch does on some offsets; the command ended without a word."""

    @opwright.operator(f"{ns}::bag")
    def bag(x: Float[Tensor, "n"], offsets: Int64[Tensor, "b"]) -> Float[Tensor, "b"]:
        if (offsets > 5).any():  # more than a declaration tries
            os.kill(os.getpid(), signal.SIGSEGV)
        return x.new_zeros(offsets.shape)

    with pytest.raises(CheckError, match=r"^`bag`: its reference crashed the process: SIGSEGV"):
        opwright.verify(bag, checks=["refusals"])
