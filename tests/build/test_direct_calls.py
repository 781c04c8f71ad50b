"""Calls that bypass the dispatcher: taken where no mode is active, and left to the dispatcher everywhere else."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import opwright
from opwright.dispatch import direct as direct_module
from opwright.dispatch.direct import Direct, is_result
from opwright.errors import ContractError, KernelError

pytestmark = pytest.mark.compiler

SOURCE = """
#include <stdexcept>
#include <opwright/kernel.h>
using opwright::View;
template <typename T>
void scaled(View<const T, 2> x, View<const T, 1> w, double by, int64_t shift, bool negative, Kind kind,
            View<T, 2> output, View<T, 1> sums) {
  for (int64_t j = 0; j < x.size(1); ++j) sums(j) = T(0);
  for (int64_t i = 0; i < x.size(0); ++i)
    for (int64_t j = 0; j < x.size(1); ++j) {
      const T scale = T(by) * (w.data() ? w(j) : T(1)) * (negative ? T(-1) : T(1)) * (int(kind) ? T(10) : T(1));
      output(i, j) = x(i, j) * scale + T(shift);
      sums(j) += output(i, j);
    }
  if (shift == 99) throw std::runtime_error("shift is 99");
}
OPWRIGHT_KERNEL(scaled, float)
"""


def declare(name: str) -> Any:
    def function(
        x: Float[Tensor, "*batch n"],
        w: Float[Tensor, "n"] | None = None,
        by: float = 1.0,
        shift: int = 0,
        negative: bool = False,
        kind: Literal["one", "ten"] = "one",
    ) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "n"]]:
        scale = by * (1 if w is None else w) * (-1 if negative else 1) * (10 if kind == "ten" else 1)
        output = x * scale + shift
        return output, output.reshape(-1, x.shape[-1]).sum(0)

    function.__name__ = name
    return opwright.operator(f"direct_calls::{name}", cpu=SOURCE.replace("scaled", name))(function)


scaled = declare("scaled")
REFERENCE = scaled.operator.declaration.reference


class Watched:
    """Counts the calls that go directly."""

    def __init__(self, direct: Direct) -> None:
        self.count = 0
        self._call = direct.call

    def __call__(self, *values: Any) -> Any:
        found = self._call(*values)
        self.count += is_result(found)
        return found


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> Watched:
    scaled(torch.ones(1, 1))  # builds
    scaled(torch.ones(1, 1))  # finds out what direct calls need
    found = scaled.operator.registration.direct
    assert found.call is not direct_module.decline
    watched = Watched(found)
    monkeypatch.setattr(found, "call", watched)
    return watched


@contextlib.contextmanager
def counting_dispatch() -> Iterator[list[str]]:
    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Mode():
        yield seen


@pytest.mark.parametrize(
    "options",
    [{}, {"by": 2.5}, {"by": -1}, {"shift": -1}, {"negative": True}, {"kind": "ten"}],
    ids=str,
)
@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("shape", [(3, 4), (4,), (2, 3, 4), (0, 4)], ids=str)
def test_plain_calls_go_directly(shape: tuple[int, ...], with_weight: bool, options: dict, direct: Watched) -> None:
    x, w = torch.randn(shape), torch.randn(4) if with_weight else None
    output, sums = scaled(x, w, **options)
    expected, expected_sums = REFERENCE(x, w, **options)
    torch.testing.assert_close((output, sums), (expected, expected_sums))
    # Some outputs are empty and others are not: the reference computes these, through the dispatcher.
    assert direct.count == (0 not in shape)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 3).t(),
        lambda: torch.randn(6, 8)[::2, ::2],
        lambda: torch.randn(2, 3, 4).transpose(0, 1),  # the kernel sees a copy
        lambda: torch.randn(1, 4).expand(3, 4),
        lambda: torch.nn.Parameter(torch.randn(3, 4), requires_grad=False),
        lambda: torch.randn(3, 4, requires_grad=True).detach(),
    ],
)
def test_any_strides_and_parameters_go_directly(make: Callable[[], Tensor], direct: Watched) -> None:
    x = make()
    torch.testing.assert_close(scaled(x), REFERENCE(x))
    assert direct.count == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch._neg_view(torch.randn(3, 4)),
        lambda: torch.randn(3, 4, dtype=torch.complex64).conj().imag,
        lambda: torch._efficientzerotensor((3, 4)),
        lambda: torch.randn(3, 4, dtype=torch.float64),  # there is no kernel for it
        lambda: torch.randn(3, 4).requires_grad_(),
    ],
    ids=["negated", "imaginary", "zeros", "dtype", "gradient"],
)
def test_tensors_that_need_the_dispatcher_go_there(make: Callable[[], Tensor], direct: Watched) -> None:
    x = make()
    torch.testing.assert_close(scaled(x), REFERENCE(x + 0))
    assert direct.count == (1 if x.requires_grad else 0)  # below the node that records the gradient


def test_a_gradient_is_recorded_only_where_it_is_asked_for(direct: Watched) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    assert scaled(x)[0].requires_grad
    with torch.no_grad():
        assert not scaled(x)[0].requires_grad
    with torch.inference_mode():
        assert scaled(x)[0].is_inference()
        inference = torch.randn(3, 4)
        assert scaled(inference)[0].is_inference()
    assert not scaled(inference)[0].is_inference()
    assert direct.count == 5


def test_results_are_as_pytorch_makes_them(direct: Watched) -> None:
    output, sums = scaled(torch.randn(3, 4))
    assert (type(output), output._version, output.is_leaf, output._is_view()) == (Tensor, 0, True, False)
    output.resize_(10, 10)
    sums.add_(1)
    assert (output.shape, sums._version) == ((10, 10), 1)
    assert direct.count == 1


def test_arguments_of_other_types_are_those_of_the_dispatcher(direct: Watched) -> None:
    x = torch.randn(3, 4)
    for options in ({"by": torch.tensor(2.0)}, {"shift": torch.tensor(2)}):
        name, value = next(iter(options.items()))
        torch.testing.assert_close(scaled(x, **options), REFERENCE(x, **{name: value.item()}))
    for options in ({"by": "x"}, {"shift": 1.5}, {"shift": 2**70}, {"kind": "two"}, {"kind": []}):
        with pytest.raises((ContractError, TypeError, RuntimeError, OverflowError)):
            scaled(x, **options)
    assert direct.count == 0


def test_broken_contracts_are_said_as_ever(direct: Watched) -> None:
    for x, w in (
        (torch.ones(3, 4), torch.ones(5)),
        (torch.ones(()), None),
        (torch.ones(3, 4, dtype=torch.int32), None),
    ):
        with pytest.raises(ContractError):
            scaled(x, w)
    with pytest.raises((ContractError, TypeError)):
        scaled([1.0], None)
    assert direct.count == 0


def test_a_kernel_that_fails_is_called_once(direct: Watched) -> None:
    with pytest.raises(KernelError, match="shift is 99"):
        scaled(torch.ones(3, 4), shift=99)


def test_whoever_looks_on_sees_the_call(direct: Watched) -> None:
    x = torch.randn(3, 4)
    with counting_dispatch() as seen:
        scaled(x)
    assert seen == ["direct_calls.scaled.default"]
    with profile(activities=[ProfilerActivity.CPU]) as found:
        scaled(x)
    assert any("scaled" in event.key for event in found.key_averages())

    graph = make_fx(lambda x: scaled(x)[0])(x)
    assert any("scaled" in str(node.target) for node in graph.graph.nodes)
    with torch.autocast("cpu", torch.bfloat16):
        scaled(x)
    torch.testing.assert_close(torch.vmap(lambda x: scaled(x)[0])(torch.ones(2, 3, 4)), torch.ones(2, 3, 4))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        output = scaled(dual, by=3.0)[0]
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(output).tangent, torch.full_like(x, 3.0))
    assert direct.count == 0


def test_a_function_mode_may_pass_the_call_on(direct: Watched) -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(direct.count)
            return function(*args, **(kwargs or {}))

    seen: list[int] = []
    with Mode():
        scaled(torch.randn(3, 4))
    assert (seen[0], direct.count) == (0, 1)


def test_torch_compile_sees_no_function_of_c(direct: Watched) -> None:
    compiled = torch.compile(lambda x: scaled(x)[0] + 1, fullgraph=True, backend="eager")
    x = torch.randn(3, 4)
    torch.testing.assert_close(compiled(x), x + 1)


def test_subclasses_and_other_devices_go_to_the_dispatcher(direct: Watched) -> None:
    class Sub(Tensor):
        pass

    assert type(scaled(torch.randn(3, 4).as_subclass(Sub))[0]) is Sub
    assert scaled(torch.randn(3, 4, device="meta"))[0].device.type == "meta"
    assert direct.count == 0


def test_other_threads_run_meanwhile(direct: Watched, request: pytest.FixtureRequest) -> None:
    """Where Python itself takes no turns, the other thread runs only while a call gives the interpreter's lock away."""
    request.addfinalizer(functools.partial(sys.setswitchinterval, sys.getswitchinterval()))
    x, ticks, calls = torch.randn(2000, 2000), 0, 0
    is_done = threading.Event()

    def count() -> None:
        nonlocal ticks
        while not is_done.is_set():
            ticks += 1
            time.sleep(0)

    sys.setswitchinterval(1000)  # before the thread waits for a turn, which ends when this interval has
    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = ticks
        while ticks == before and calls < 100:  # a busy machine may not run it at once
            scaled(x)
            calls += 1
        assert ticks > before
    finally:
        is_done.set()
        thread.join()
    assert direct.count == calls


def test_a_new_declaration_has_its_own_kernels() -> None:
    def declare(by: int) -> Any:
        source = f"""
#include <opwright/kernel.h>
using opwright::View;
template <typename T> void twice(View<const T, 1> x, View<T, 1> output) {{
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = x(i) * T({by});
}}
OPWRIGHT_KERNEL(twice, float)
"""

        @opwright.operator("direct_calls::twice", cpu=source)
        def twice(x: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
            return x * by

        return twice

    first = declare(2)
    assert [first(torch.ones(2)).tolist() for _ in range(3)] == [[2.0, 2.0]] * 3
    second = declare(3)
    assert [second(torch.ones(2)).tolist() for _ in range(3)] == [[3.0, 3.0]] * 3
    assert [first(torch.ones(2)).tolist() for _ in range(3)] == [[3.0, 3.0]] * 3


def is_direct(function: Any) -> bool:
    return is_result(function.operator.registration.direct.call(torch.ones(2, 3), None, 1.0, 0, False, 0))


def test_the_first_call_may_be_one_that_is_watched() -> None:
    later, x = declare("later"), torch.ones(2, 3)
    with counting_dispatch() as seen:
        later(x)
        later(x)
    assert len(seen) == 2
    later(x)
    assert is_direct(later)


def test_calls_in_inference_mode_alone_go_directly() -> None:
    served = declare("served")
    with torch.inference_mode():
        for _ in range(2):
            served(torch.ones(2, 3))
        assert is_direct(served)
        assert "call_directly" in str(served.operator.registration.direct.call)


def test_a_pytorch_whose_objects_are_unknown_takes_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    found = scaled.operator.registration
    scaled(torch.ones(1, 1))
    monkeypatch.setattr(direct_module, "_tables", [None])
    monkeypatch.setattr(found, "direct", Direct())
    library = opwright.dispatch.kernels.library_of(scaled.operator, "cpu")
    found.direct.add(library.handle, "cpu", "cpu", scaled.operator.declaration)
    assert found.direct.call(torch.ones(1, 1), None, 1.0, 0, False, 0) is False
    assert found.direct.call is direct_module.decline


PLUS_ONE = """
import threading, torch, opwright
from jaxtyping import Float
from torch import Tensor
@opwright.operator("direct_calls::plus_one", cpu='''
#include <chrono>
#include <thread>
#include <opwright/kernel.h>
using opwright::View;
template <typename T> void plus_one(View<const T, 1> x, View<T, 1> output) {
  if (x.size(0) > 10) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = x(i) + T(1);
}
OPWRIGHT_KERNEL(plus_one, float)
''')
def plus_one(x: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    return x + 1

plus_one(torch.zeros(2))
plus_one(torch.zeros(2))
"""


def test_tensors_that_are_swapped_meanwhile_are_kept(run_python) -> None:
    """The kernel reads memory that nothing else may still hold."""
    run_python(
        PLUS_ONE
        + """
x, results = torch.zeros(2**20), []
thread = threading.Thread(target=lambda: results.append(plus_one(x)))
thread.start()
threading.Event().wait(0.1)
other = torch.zeros(3)
try:
    torch.utils.swap_tensors(x, other)
except RuntimeError:  # somebody else holds it: the call
    pass
else:
    raise AssertionError("it was swapped")
del other
thread.join()
assert torch.equal(results[0], torch.ones(2**20))
"""
    )


def test_what_runs_last_in_a_process_may_call() -> None:
    program = (
        PLUS_ONE
        + """
class Last:
    def __init__(self):
        self.package, self.call, self.x = opwright, plus_one, torch.zeros(2)
    def __del__(self):
        print(float(self.call(self.x).sum()))
torch.last = Last()
"""
    )
    # Not `run_python`, whose processes end without that.
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "2.0\n"


def test_a_choice_beside_a_proxy_is_traced() -> None:
    traced = torch.fx.symbolic_trace(lambda x, kind: scaled(x, kind=kind))
    assert "scaled" in traced.code


@pytest.mark.parametrize("trace", [
    lambda f, x: make_fx(f, pre_dispatch=True)(x), lambda f, x: torch.jit.trace(f, (x,)),
], ids=["pre_dispatch", "jit"])  # fmt: skip
def test_tracers_record_the_operator_with_its_gradient(trace: Callable[..., Any]) -> None:
    x = torch.randn(3, 4)
    traced = trace(lambda x: scaled(x, by=2.0)[0], x)
    assert torch.equal(traced(x), 2 * x)
    x.requires_grad_()
    traced(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 2.0))


def test_a_first_call_in_pytorchs_python_dispatcher() -> None:
    """It keeps its choice of a kernel, so it has to be told of one that was registered from C."""
    early, x = declare("early"), torch.ones(2, 3)
    with enable_python_dispatcher():
        assert torch.equal(early(x)[0], x)
    assert torch.equal(early(x)[0], x)
    with enable_python_dispatcher():
        assert torch.equal(early(x)[0], x)


def test_no_gradient_is_recorded_in_inference_mode(direct: Watched) -> None:
    w = torch.ones(4, requires_grad=True)
    with torch.inference_mode(), torch.enable_grad():
        result = scaled(scaled(torch.ones(3, 4), w)[0], w)[0]
    assert not result.requires_grad


@pytest.mark.parametrize("text", ["ö", "€", "𝄞"])
def test_a_message_is_cut_between_characters(text: str) -> None:
    """Python refuses a message that ends inside of a character."""
    for lead in ("", "a", "ab", "abc"):
        said = lead + 300 * text

        @opwright.operator(
            "direct_calls::failing",
            cpu=f"""
#include <stdexcept>
#include <opwright/kernel.h>
using opwright::View;
template <typename T> void failing(View<const T, 1> x, View<T, 1> output) {{ throw std::runtime_error("{said}"); }}
OPWRIGHT_KERNEL(failing, float)
""",
        )
        def failing(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
            return x + 1

        for call in (failing, failing, failing.operator.registration.kernel):
            with pytest.raises(RuntimeError, match=f"{lead}{10 * text}") as caught:
                call(torch.ones(3))
            assert text in str(caught.value)
