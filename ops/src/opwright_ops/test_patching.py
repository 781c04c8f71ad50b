"""Modules of a model that are replaced: the same results, parameters and names; and back again."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import opwright_ops
from opwright_ops import LSTM, LayerNorm, RMSNorm

pytestmark = pytest.mark.compiler


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rnn = nn.LayerNorm(12), nn.LSTM(12, 6, bidirectional=True)
        self.rms, self.planes = nn.RMSNorm(12), nn.LayerNorm((3, 4), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.rms(self.rnn(self.norm(x))[0])
        return self.planes(y.unflatten(-1, (3, 4)))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    torch.manual_seed(1)
    return [y, *torch.autograd.grad(y, list(model.parameters()), torch.randn(y.shape))]


def test_a_model_computes_the_same() -> None:
    torch.manual_seed(0)
    model = Block()
    x, plain = torch.randn(5, 2, 12), copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    done = opwright_ops.patch(model)
    assert done.replaced == {"norm": "LayerNorm", "rnn": "LSTM", "rms": "RMSNorm", "planes": "LayerNorm"}
    assert str(done) == "replaced 1 nn.LSTM, 2 nn.LayerNorm, 1 nn.RMSNorm"
    assert [type(m) for m in model.children()] == [LayerNorm, LSTM, RMSNorm, LayerNorm]
    for found, wanted in zip(gradients(model, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(found, wanted)
    assert all(value is parameters[name] for name, value in model.named_parameters())
    assert list(model.state_dict()) == list(plain.state_dict())
    done.undo()
    assert [type(m) for m in model.children()] == [nn.LayerNorm, nn.LSTM, nn.RMSNorm, nn.LayerNorm]
    assert done.replaced == {}
    torch.testing.assert_close(model(x), plain(x))


def test_a_module_that_two_places_share_stays_one() -> None:
    rnn, norm = nn.LSTM(4, 4), nn.LayerNorm(4)
    model = nn.ModuleDict({"a": rnn, "b": rnn, "c": norm, "d": norm})
    done = opwright_ops.patch(model)
    assert model["a"] is model["b"]
    assert model["c"] is model["d"] is norm
    assert (type(model["a"]), type(norm)) == (LSTM, LayerNorm)
    assert done.replaced == {"a": "LSTM", "b": "LSTM", "c": "LayerNorm", "d": "LayerNorm"}
    done.undo()
    assert model["a"] is model["b"] is rnn
    assert type(norm) is nn.LayerNorm


def test_what_is_left() -> None:
    class Own(nn.LayerNorm):
        pass

    hooked = nn.LSTM(3, 3)
    hooked.register_forward_hook(lambda *_: None)
    parametrized = parametrizations.weight_norm(nn.LSTM(3, 3), "weight_hh_l0")
    model = nn.ModuleDict({"own": Own(3), "hooked": hooked, "parametrized": parametrized, "ours": LayerNorm(3)})
    done = opwright_ops.patch(model)
    assert (
        str(done)
        == """replaced nothing
left `own`: its class, `Own`, is a derived one, and may compute something else
left `hooked`: it has hooks, which would not be called
left `parametrized`: its class, `ParametrizedLSTM`, is a derived one, and may compute something else"""
    )
    assert type(model["own"]) is Own
    renaming, buffered, wrapped = nn.LSTM(3, 3), nn.LSTM(3, 3), nn.LSTM(3, 3)
    wrapped.forward = lambda x: (x, None)
    renaming.register_load_state_dict_pre_hook(lambda *_: None)
    buffered.register_buffer("h0", torch.zeros(1, 3))
    assert opwright_ops.patch(nn.ModuleDict({"a": renaming, "b": buffered, "c": wrapped})).left == {
        "a": "it has hooks, which would not be called",
        "b": "it has other parameters, buffers or modules than nn.LSTM has",
        "c": "it has a `forward` of its own, which would not be called",
    }
    alone = nn.LSTM(3, 3)
    assert opwright_ops.patch(alone).left == {
        "": "it is the model itself: `LSTM.from_torch(model)` returns another one"
    }


@pytest.mark.parametrize("model", [None, [nn.LayerNorm(3)], nn.LayerNorm], ids=["None", "list", "class"])
def test_what_is_not_a_model_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match=r"`patch`: `model` must be an nn\.Module"):
        opwright_ops.patch(model)


def result_of(module: nn.Module, x: Tensor) -> Tensor | str:
    try:
        return module(x)
    except RuntimeError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # PyTorch's, of its slow path
@pytest.mark.parametrize("module", [nn.RMSNorm, nn.LayerNorm])
def test_what_the_operators_do_not_take_is_pytorchs(module: type[nn.Module]) -> None:
    """An input of another dtype than the weight, and of another shape."""
    plain = module(6)
    model = nn.Sequential(copy.deepcopy(plain))
    opwright_ops.patch(model)
    jagged = torch.nested.nested_tensor([torch.randn(2, 6), torch.randn(3, 6)], layout=torch.jagged)
    complex_numbers = torch.randn(2, 6, dtype=torch.complex64)
    for x in (torch.randn(2, 5), torch.randn(2, 1), torch.randn(2, 6).double(), complex_numbers, jagged):
        found, wanted = result_of(model, x), result_of(plain, x)
        if isinstance(wanted, Tensor) and wanted.is_nested:
            found, wanted = found.values(), wanted.values()
        assert found == wanted if isinstance(wanted, str) else torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_the_default_eps_of_rms_norm(dtype: torch.dtype) -> None:
    """It is that of the type that is computed in: float32 for 16 bits."""
    x = torch.full((1, 4), 1e-3, dtype=dtype)
    model = nn.Sequential(nn.RMSNorm(4, elementwise_affine=False))
    wanted = model(x)
    opwright_ops.patch(model)
    torch.testing.assert_close(model(x), wanted)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("module", [nn.RMSNorm, nn.LayerNorm])
def test_autocast_on_a_cpu_leaves_16_bits(module: type[nn.Module]) -> None:
    narrow, x = nn.Sequential(module(6, eps=1e-5).bfloat16()), torch.randn(2, 6)
    model = nn.Sequential(nn.Linear(6, 6), module(6, eps=1e-5))
    with torch.autocast("cpu", torch.bfloat16):
        plain = result_of(narrow, x)
        opwright_ops.patch(narrow)
        assert str(result_of(narrow, x)) == str(plain)
        wanted = model(x)
        opwright_ops.patch(model)
        torch.testing.assert_close(model(x), wanted)


def test_undo_keeps_what_was_loaded_and_the_mode() -> None:
    model = nn.Sequential(nn.LSTM(4, 4, 2, dropout=0.5))
    done = opwright_ops.patch(model)
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()}, assign=True)
    model.eval()
    loaded = dict(model.named_parameters())
    done.undo()
    assert type(model[0]) is nn.LSTM
    assert not model[0].training
    assert all(value is loaded[name] for name, value in model.named_parameters())
    assert not model(torch.randn(3, 1, 4))[0].any()


def test_undo_carries_hooks_over() -> None:
    model, calls = nn.Sequential(nn.LSTM(4, 4)), []
    done = opwright_ops.patch(model)
    handle = model[0].register_forward_hook(lambda module, *_: calls.append(type(module)))
    done.undo()
    model(torch.randn(3, 1, 4))
    handle.remove()
    model(torch.randn(3, 1, 4))
    assert calls == [nn.LSTM]


def test_undo_of_modules_that_were_changed_since() -> None:
    """The others are put back, and these once the change is undone."""
    model = nn.ModuleDict({"a": nn.LayerNorm(4), "b": nn.LSTM(4, 4), "c": nn.LayerNorm(4), "d": nn.LSTM(4, 4)})
    done = opwright_ops.patch(model)
    parametrized = {"a": "weight", "b": "weight_ih_l0"}
    for name, weight in parametrized.items():
        parametrizations.weight_norm(model[name], weight)
    model["d"].register_buffer("h0", torch.zeros(1, 4))
    with pytest.raises(RuntimeError) as caught:
        done.undo()
    assert (
        str(caught.value)
        == """`patch`: `undo` could not put back some modules, which were changed since `patch`

  d  it has other parameters, buffers or modules than nn.LSTM has
  b  its class is `ParametrizedLSTM`
  a  its class is `ParametrizedLayerNorm`

hint: undo these changes, such as by `torch.nn.utils.parametrize.remove_parametrizations(module, name)`, and call \
`undo()` again"""
    )
    assert done.replaced == {"a": "LayerNorm", "b": "LSTM", "d": "LSTM"}
    assert type(model["c"]) is nn.LayerNorm
    for name, weight in parametrized.items():
        parametrize.remove_parametrizations(model[name], weight)
    del model["d"].h0
    done.undo()
    assert done.replaced == {}
    assert [type(m) for m in model.values()] == [nn.LayerNorm, nn.LSTM, nn.LayerNorm, nn.LSTM]
    assert model["b"](torch.randn(3, 1, 4))[0].shape == (3, 1, 4)


def test_the_example_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(
        r"^```python\n(.*?)^```", Path(__file__).parents[2].joinpath("README.md").read_text(), re.M | re.S
    )
    exec(code)
    assert f"# {capsys.readouterr().out}" in code
