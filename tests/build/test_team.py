"""opwright::team: threads that wait for each other, and never for one that may not come."""

import concurrent.futures
import re
from pathlib import Path

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from opwright import operator
from opwright.errors import KernelError

pytestmark = pytest.mark.compiler

# Each step of `spread` reads what other members wrote in the step before; `members` gets how many there were.
OPERATORS = '''
import torch
from jaxtyping import Int64
from torch import Tensor
from opwright import operator

HEAD = r"""
#include <stdexcept>
#include <vector>
#include <opwright/kernel.h>
#include <opwright/team.h>
using opwright::Member, opwright::View;

void steps_of(View<const int64_t, 1> x, int64_t steps, int threads, View<int64_t, 1> output, int64_t& members) {
  const int64_t n = x.size(0);
  std::vector<int64_t> buffer(n);
  opwright::team(threads, [&](const Member& member) {
    if (member.id() == 0) members = member.count();
    const int64_t begin = n * member.id() / member.count(), end = n * (member.id() + 1) / member.count();
    for (int64_t i = begin; i < end; ++i) output(i) = x(i);
    member.barrier();
    for (int64_t t = 0; t < steps; ++t) {
      for (int64_t i = begin; i < end; ++i) buffer[i] = (output(i) * 3 + output(n - 1 - i) + t) % 1000003;
      member.barrier();
      for (int64_t i = begin; i < end; ++i) output(i) = buffer[n - 1 - i];
      member.barrier();
    }
  });
}
"""

@operator("team_tests::spread", cpu=HEAD + r"""
void spread(View<const int64_t, 1> x, int64_t steps, int64_t threads, View<int64_t, 1> output,
            View<int64_t, 0> members) {
  steps_of(x, steps, threads ? int(threads) : opwright::num_threads(), output, members());
}
OPWRIGHT_KERNEL(spread)
""")
def spread(x: Int64[Tensor, "n"], steps: int, threads: int = 0) -> tuple[Int64[Tensor, "n"], Int64[Tensor, ""]]:
    for t in range(steps):
        x = (x * 3 + x.flip(0) + t).flip(0) % 1000003
    return x.clone(), torch.tensor(-1)

@operator("team_tests::nested", cpu=HEAD + r"""
// mode 0: teams in a parallel loop; 1: a team in each member of a team.
void nested(View<const int64_t, 1> x, int64_t steps, int64_t mode, View<int64_t, 2> output,
            View<int64_t, 1> members) {
  auto row = [&](int64_t i) {
    steps_of(x, steps, opwright::num_threads(), {&output(i, 0), {x.size(0)}, {1}}, members(i));
  };
  if (mode == 0) {
    opwright::parallel_for(4, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) row(i);
    });
  } else {
    opwright::team(4, [&](const Member& member) {
      for (int64_t i = member.id(); i < 4; i += member.count()) row(i);
    });
  }
}
OPWRIGHT_KERNEL(nested)
""")
def nested(x: Int64[Tensor, "n"], steps: int, mode: int) -> tuple[Int64[Tensor, "4 n"], Int64[Tensor, "4"]]:
    for t in range(steps):
        x = (x * 3 + x.flip(0) + t).flip(0) % 1000003
    return x.expand(4, -1).clone(), torch.full((4,), -1)

@operator("team_tests::broken", cpu=HEAD + r"""
// mode 0: the last member throws; 1: the first one; 2: all throw; 3: the last one returns early.
void broken(View<const int64_t, 1> x, int64_t mode, View<int64_t, 1> output) {
  opwright::team(opwright::num_threads(), [&](const Member& member) {
    member.barrier();
    const bool is_last = member.id() == member.count() - 1;
    if (mode == 3 && is_last && member.count() > 1) return;
    if (mode == 2 || (mode == 0 && is_last) || (mode == 1 && member.id() == 0)) {
      throw std::runtime_error(std::string("member ") + char('0' + member.count()) + " gave up");
    }
    for (int i = 0; i < 3; ++i) member.barrier();
  });
  output(0) = x(0);
}
OPWRIGHT_KERNEL(broken)
""")
def broken(x: Int64[Tensor, "1"], mode: int) -> Int64[Tensor, "1"]:
    return x.clone()

def expected(x, steps):
    return spread.operator.declaration.reference(x, steps)[0]

x = torch.arange(37)
'''


@pytest.fixture(scope="module")
def ops():
    names = {}
    exec(OPERATORS, names)
    return names


def test_members_see_what_others_wrote(ops):
    x = ops["x"]
    for steps in (0, 1, 100, 2000):
        for threads in (0, 1, 2, 3, 9):
            got, members = ops["spread"](x, steps, threads)
            assert torch.equal(got, ops["expected"](x, steps))
            assert 1 <= members <= (threads or torch.get_num_threads())


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="PyTorch has one thread")
def test_a_team_has_more_than_one_member(ops):
    # Seldom, a thread is not there in time.
    assert sum(int(ops["spread"](ops["x"], 10)[1]) > 1 for _ in range(50)) > 25


@pytest.mark.parametrize("mode", [0, 1])
def test_nested(ops, mode):
    got, members = ops["nested"](ops["x"], 50, mode)
    assert torch.equal(got, ops["expected"](ops["x"], 50).expand(4, -1))
    assert members.tolist() == [1] * 4 or torch.get_num_threads() == 1


def test_the_kernel_of_the_guide(ns):
    """docs/guides/write-an-operator.md, with team.h and tensor.h."""
    guide = (Path(__file__).parents[2] / "docs/guides/write-an-operator.md").read_text()
    (source,) = (block for block in re.findall(r"```cpp\n(.*?)```", guide, re.DOTALL) if "elman" in block)

    @operator(f"{ns}::elman", cpu=source)
    def elman(x: Float[Tensor, "T I"], w_in: Float[Tensor, "H I"], w: Float[Tensor, "H H"]) -> Float[Tensor, "T H"]:
        return x @ w_in.T  # not what the kernel gives

    # Such weights may double a rounding error at each of the steps.
    x, w_in, w = (torch.randn(shape, dtype=torch.float64) for shape in ((20, 5), (7, 5), (7, 7)))
    cell = torch.nn.RNN(5, 7, bias=False, dtype=torch.float64)
    cell.weight_ih_l0.data, cell.weight_hh_l0.data = w_in, w
    torch.testing.assert_close(elman(x, w_in, w), cell(x)[0].detach())


def test_many_callers_at_once(run_python):
    run_python(
        OPERATORS
        + """
import concurrent.futures
wanted = expected(x, 5)
def work(_):
    return all(torch.equal(spread(x, 5)[0], wanted) for _ in range(1000))
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert all(pool.map(work, range(4)))
""",
        timeout=120,
    )


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_more_threads_than_cores(run_python, threads):
    program = """
for threads in (0, 2, 8):
    for _ in range(20):
        got, members = spread(x, 30, threads)
        assert torch.equal(got, expected(x, 30)) and members <= torch.get_num_threads()
torch.set_num_threads(1)
assert spread(x, 30)[1] == spread(x, 30, 8)[1] == 1
assert torch.equal(nested(x, 30, 0)[0][3], expected(x, 30))
"""
    run_python(f"{OPERATORS}\ntorch.set_num_threads({threads})\n{program}", timeout=120)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_an_exception_breaks_the_barriers(run_python, threads):
    program = """
from opwright.errors import KernelError
for _ in range(20):
    for mode in (0, 1, 2):
        try:
            broken(torch.ones(1, dtype=torch.long), mode)
        except KernelError as error:
            assert "gave up" in str(error), error
        else:
            raise AssertionError("no error")
    assert torch.equal(spread(x, 5)[0], expected(x, 5))
"""
    run_python(f"{OPERATORS}\ntorch.set_num_threads({threads})\n{program}", timeout=120)


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="PyTorch has one thread")
def test_a_member_that_returns_early_is_an_error(ops):
    # Where a team was of one, nobody waits.
    texts = []
    for _ in range(10):
        try:
            ops["broken"](torch.ones(1, dtype=torch.long), 3)
        except KernelError as error:
            texts.append(str(error))
    assert texts
    assert all("returned while others wait" in text for text in texts)


def test_beside_a_busy_machine(ops):
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        a = torch.randn(400, 400)
        others = [pool.submit(lambda: [a @ a for _ in range(100)]) for _ in range(3)]
        for _ in range(100):
            assert torch.equal(ops["spread"](ops["x"], 20)[0], ops["expected"](ops["x"], 20))
        for other in others:
            other.result()
