"""An operator declared again in one process: a cell that is run once more, a file that is edited."""

import ast
import functools
import importlib.util
import re

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from opwright import operator
from opwright.errors import CompileError, NameTakenError

pytestmark = pytest.mark.compiler

KERNEL = """
#include <opwright/kernel.h>
using opwright::View;
template <typename T> void NAME(View<const T, 1> x, View<T, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = x(i) + T(AMOUNT);
}
OPWRIGHT_KERNEL(NAME, float)
"""
BACKWARD = """
template <typename T>
void NAME_backward(View<const T, 1> grad_output, View<const T, 1> x, View<T, 1> grad_x) {
  for (int64_t i = 0; i < x.size(0); ++i) grad_x(i) = grad_output(i) * T(SLOPE);
}
OPWRIGHT_KERNEL(NAME_backward, float)
"""


def kernel(name, amount, slope=None):
    text = KERNEL + (BACKWARD.replace("SLOPE", str(slope)) if slope is not None else "")
    return text.replace("NAME", name).replace("AMOUNT", str(amount))


def plus(ns, name, amount, slope=None, reference_amount=None, declare_backward=True):
    """Declares `x + amount`; float32 runs the kernel, float64 the reference."""
    offset = amount if reference_amount is None else reference_amount

    @operator(f"{ns}::{name}", cpu=kernel(name, amount, slope))
    def declared(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        return x + offset

    if slope is not None and declare_backward:

        @declared.backward
        def declared_backward(grad_output, x):
            return grad_output * slope + 0 * x

    return declared


def test_an_edited_kernel_replaces_the_old_one(ns, entries):
    old = plus(ns, "edited", 1)
    assert old(torch.zeros(2)).tolist() == [1.0, 1.0]
    held = torch.ops.__getattr__(ns).edited.default  # an entry that somebody keeps
    for amount in (2, 3, 1):  # 1: an earlier kernel comes back from the store
        new = plus(ns, "edited", amount)
        for entry in (*entries(new), held):
            assert entry(torch.zeros(2)).tolist() == [amount] * 2


def test_an_edited_reference_replaces_the_old_one(ns, entries):
    plus(ns, "reference", 1)(torch.zeros(2, dtype=torch.float64))
    new = plus(ns, "reference", 1, reference_amount=7)
    for entry in entries(new):
        assert entry(torch.zeros(1, dtype=torch.float64)).tolist() == [7.0]
        assert entry(torch.zeros(1)).tolist() == [1.0]


def test_a_kernel_can_go_and_come(ns, entries):
    assert plus(ns, "comes", 1, reference_amount=5)(torch.zeros(1)).tolist() == [1.0]

    @operator(f"{ns}::comes")
    def comes(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        return x + 5

    for entry in entries(comes):
        assert entry(torch.zeros(1)).tolist() == [5.0]
    for entry in entries(plus(ns, "comes", 2)):
        assert entry(torch.zeros(1)).tolist() == [2.0]


def test_a_changed_schema(ns, entries):
    plus(ns, "schema", 1)(torch.zeros(1))
    source = kernel("schema", "by").replace("View<T, 1> output", "double by, View<T, 1> output")

    @operator(f"{ns}::schema", cpu=source)
    def schema(x: Float[Tensor, "*s"], by: float = 4.0) -> Float[Tensor, "*s"]:
        return x + by

    for entry in entries(schema):
        assert entry(torch.zeros(1)).tolist() == [4.0]
        assert entry(torch.zeros(1), 6.0).tolist() == [6.0]
        assert torch.vmap(entry)(torch.zeros(2, 1)).tolist() == [[4.0]] * 2
    out = torch.zeros(1)
    getattr(torch.ops, ns).schema.out(torch.zeros(1), 2.0, out=out)
    assert out.tolist() == [2.0]


def gradient(entry, dtype=torch.float32):
    x = torch.zeros(2, dtype=dtype, requires_grad=True)
    (found,) = torch.autograd.grad(entry(x).sum(), x)
    return found.tolist()


def test_a_changed_backward(ns, entries):
    # float32: the kernel of the backward, float64: its reference.
    for amount, slope in ((1, 10), (1, 20), (2, 20), (1, 10)):
        for entry in entries(plus(ns, "sloped", amount, slope)):
            assert entry(torch.zeros(2)).tolist() == [amount] * 2
            assert gradient(entry) == [slope] * 2
            assert gradient(entry, torch.float64) == [slope] * 2


def test_a_backward_that_is_taken_away(ns, entries):
    assert gradient(plus(ns, "removed", 1, 10)) == [10.0, 10.0]
    # Neither its kernel nor its declaration may linger: the gradient is the derived one.
    for entry in entries(plus(ns, "removed", 2, declare_backward=False)):
        assert entry(torch.zeros(2)).tolist() == [2.0, 2.0]
        assert gradient(entry) == [1.0, 1.0]
    # A kernel of a backward that nobody declares would be dead code that looks alive.
    with pytest.raises(CompileError, match="`removed_backward` is not an operator of this folder"):
        plus(ns, "removed", 2, 10, declare_backward=False)(torch.zeros(2))


def test_a_backward_that_is_added(ns, entries):
    assert gradient(plus(ns, "added", 1)) == [1.0, 1.0]
    for entry in entries(plus(ns, "added", 1, 10)):
        assert gradient(entry) == [10.0, 10.0]


def test_a_kernel_that_does_not_compile_can_be_mended(ns, entries):
    plus(ns, "mended", 1)(torch.zeros(1))
    broken = plus(ns, "mended", "oops")
    for entry in entries(broken):
        with pytest.raises(Exception, match="oops"):
            entry(torch.zeros(1))
    for entry in entries(plus(ns, "mended", 3)):
        assert entry(torch.zeros(1)).tolist() == [3.0]


def test_compiled_functions_call_the_new_kernel(ns):
    old = plus(ns, "compiled", 1, 10)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def through_function(x):
        return old(x) * 2

    @torch.compile(fullgraph=True, backend="aot_eager")
    def through_torch_ops(x):
        return getattr(torch.ops, ns).compiled(x) * 2

    for function in (through_function, through_torch_ops):
        assert function(torch.zeros(2)).tolist() == [2.0, 2.0]
        assert gradient(function) == [20.0, 20.0]
    plus(ns, "compiled", 3, 30)
    for function in (through_function, through_torch_ops):
        assert function(torch.zeros(2)).tolist() == [6.0, 6.0]
        assert gradient(function) == [60.0, 60.0]


def test_a_function_from_before_a_swap(ns):
    # What was imported by name before the swap goes on working, with the new kernel.
    old = plus(ns, "before", 1, 10)
    old(torch.zeros(1))
    plus(ns, "before", 2, 20)
    assert old(torch.zeros(1)).tolist() == [2.0]
    assert gradient(old)[0] in (10.0, 20.0)


def test_an_output_from_before_a_swap_still_has_its_gradient(ns):
    x = torch.zeros(1, requires_grad=True)
    y = plus(ns, "pending", 1, 10)(x)
    plus(ns, "pending", 2, 20)
    y.backward()
    assert x.grad.item() in (10.0, 20.0)


MODULE = """
from jaxtyping import Float
from torch import Tensor
from opwright import operator

@operator("NAMESPACE::mine")
def mine(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    return x + AMOUNT
"""


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_same_name_from_another_file_is_refused(ns, tmp_path):
    for name, amount in (("first", "1"), ("second", "2")):
        (tmp_path / f"{name}.py").write_text(MODULE.replace("NAMESPACE", ns).replace("AMOUNT", amount))
    first = load(tmp_path / "first.py", f"{ns}_first")
    with pytest.raises(NameTakenError) as caught:
        load(tmp_path / "second.py", f"{ns}_second")
    assert re.search(r"first\.py:\d+", str(caught.value))
    assert re.search(r"second\.py:\d+", str(caught.value))
    assert first.mine(torch.zeros(1)).tolist() == [1.0]
    # The same file again is an edit, not another operator.
    (tmp_path / "first.py").write_text(MODULE.replace("NAMESPACE", ns).replace("AMOUNT", "3"))
    assert load(tmp_path / "first.py", f"{ns}_first").mine(torch.zeros(1)).tolist() == [3.0]


TWICE = """
from jaxtyping import Float
from torch import Tensor
from opwright import operator

@operator("NAMESPACE::twice")
def twice(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    return x + 1

@operator("NAMESPACE::twice")
def other(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    return x + 2
"""


def test_the_same_name_for_two_functions_of_a_file_is_refused(ns, tmp_path):
    """The second one replaced the first, and nothing said so."""
    (tmp_path / "twice.py").write_text(TWICE.replace("NAMESPACE", ns))
    for _ in range(2):  # also where it is imported once more
        with pytest.raises(NameTakenError) as caught:
            load(tmp_path / "twice.py", f"{ns}_twice")
        assert re.search(r"first +.*twice\.py:6\n +second +.*twice\.py:10\n", str(caught.value))
        assert f'`@operator("{ns}::other")`' in str(caught.value)
    assert getattr(torch.ops, ns).twice(torch.zeros(1)).tolist() == [1.0]


FACTORY = """
from jaxtyping import Float
from torch import Tensor
from opwright import operator

class Half:
    def __rmul__(self, x):
        return x * 0.5

def scale_by(factor, name):
    def double(x):
        return x * 2

    @operator(f"NAMESPACE::{name}")
    def scaled(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        return double(x) * factor
    return scaled
"""


def test_a_factory_that_declares_one_name_twice_is_refused(ns, tmp_path):
    """The first function computed what the second one does, and nothing said so."""
    text = FACTORY.replace("NAMESPACE", ns)
    (tmp_path / "factory.py").write_text(text + "scaled = scale_by(2.5, 'a'), scale_by(3.5, 'a')")
    for _ in range(2):
        with pytest.raises(NameTakenError) as caught:
            load(tmp_path / "factory.py", f"{ns}_factory")
        assert re.search(r"first +2\.5\n +second +3\.5\n", str(caught.value))
        assert f'`@operator(f"{ns}::a_{{factor}}")`' in str(caught.value)
    (tmp_path / "factory.py").write_text(text + "scaled = [scale_by(float(f'{i}.5'), f'b{i}') for i in (2, 3, 3)]")
    assert [f(torch.ones(1)).item() for f in load(tmp_path / "factory.py", f"{ns}_factory").scaled] == [5, 7, 7]
    # Whether two objects are equal, nobody knows: they are taken for the same.
    (tmp_path / "factory.py").write_text(text + "scaled = [scale_by(Half(), 'd').operator for _ in range(2)]")
    load(tmp_path / "factory.py", f"{ns}_factory")
    # A cell that is run once more, perhaps with another number in it.
    cells: dict = {"__name__": f"{ns}_cells"}
    exec(compile(text, "<cell 0>", "exec"), cells)
    for number in (2.5, 2.5, 3.5):
        exec(compile(f"scaled = scale_by({number}, 'c')", "<cell 1>", "exec"), cells)
        assert cells["scaled"](torch.ones(1)).item() == 2 * number


def test_a_file_that_is_executed_again_replaces_what_it_declared(ns, tmp_path):
    path, name = tmp_path / "module.py", f"{ns}_reloaded"
    text = MODULE.replace("NAMESPACE", ns).replace("mine", "again")
    for amount, lines in ((1, 0), (2, 3), (2, 3)):  # edited, with other lines before it; and as it was
        path.write_text("\n" * lines + text.replace("AMOUNT", str(amount)))
        assert load(path, name).again(torch.zeros(1)).tolist() == [amount]
    # A notebook's cells are in one module, each in a file of its own.
    cells: dict = {"__name__": name}
    for number in range(2):
        exec(compile(text.replace("AMOUNT", "5"), f"<cell {number}>", "exec"), cells)
    assert cells["again"](torch.zeros(1)).tolist() == [5.0]
    # One function, declared in a loop or by a function that is called again.
    path.write_text(
        text.replace("AMOUNT", "1").replace("@operator", "for i in range(2):\n  @operator").replace("\ndef", "\n  def")
    )
    assert load(path, name).again(torch.zeros(1)).tolist() == [1.0]


def test_each_namespace_of_pytorch_is_refused(start_python):
    found = start_python(
        "import torch, torch.distributed, torch._dynamo, torch._inductor.lowering, torch.distributed.tensor\n"
        "print({schema.name.partition('::')[0] for schema in torch._C._jit_get_all_schemas()})"
    )
    namespaces = ast.literal_eval(found.stdout)
    assert {"aten", "prim", "prims", "c10d", "_c10d_functional", "_dtensor", "inductor"} <= namespaces
    of_others = {"prepacked", "coor", "mempool"}  # in torch 2.12, and since 2.14
    for namespace in sorted(namespaces | of_others):
        with pytest.raises(NameTakenError, match=f"the namespace `{namespace}` is PyTorch's own"):

            @operator(f"{namespace}::free")
            def free(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
                return x + 1


def test_a_reference_behind_a_decorator_that_makes_an_object(ns):
    @operator(f"{ns}::kept")
    @functools.lru_cache
    def kept(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        return x + 1

    assert kept(torch.ones(2)).tolist() == [2.0, 2.0]


def test_an_edited_reference_changes_the_key_of_compiled_graphs(ns, tmp_path):
    """torch.compile's cache on disk kept the gradient of the reference as it was."""
    path, name = tmp_path / "module.py", f"{ns}_compiled"
    text = MODULE.replace("NAMESPACE", ns).replace("mine", "graphed")
    config = torch.compiler.config
    others = f"the user's another.runtime-{'0' * 64}"
    tags = []
    with config.patch(cache_key_tag=others + config.cache_key_tag):
        for amount in (1, 2, 1):
            path.write_text(text.replace("AMOUNT", str(amount)))
            load(path, name)
            tags.append(config.cache_key_tag)
    assert tags[0] == tags[2] != tags[1]
    assert all(tag.startswith(others) for tag in tags)
    assert len({len(tag) for tag in tags}) == 1


@pytest.mark.slow  # compiles with Inductor three times
def test_a_compiled_gradient_follows_an_edited_reference(start_python, tmp_path):
    program = f"""
from importlib.util import module_from_spec, spec_from_file_location
import torch
from torch._dynamo.utils import counters
spec = spec_from_file_location("kept", {str(tmp_path / "kept.py")!r})
module = module_from_spec(spec)
spec.loader.exec_module(module)
x = torch.ones(2, requires_grad=True)
torch.compile(lambda x: module.kept(x).sum())(x).backward()
print(x.grad.tolist(), counters["aot_autograd"]["autograd_cache_hit"])
"""
    text = MODULE.replace("NAMESPACE", "compiled_twice").replace("mine", "kept")
    printed = []
    for amount in (3, 3, 5):
        (tmp_path / "kept.py").write_text(text.replace("x + AMOUNT", f"x * {amount}"))
        found = start_python(program, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")})
        printed.append(found.stdout.strip())
    assert printed == ["[3.0, 3.0] 0", "[3.0, 3.0] 1", "[5.0, 5.0] 0"]
