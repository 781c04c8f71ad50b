"""Modules of PyTorch in a model, replaced by those of this library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from opwright_ops.lstm import LSTM
from opwright_ops.norm.module import LayerNorm, RMSNorm
from opwright_ops.refusals import refuse, shown

# Those with the same attributes become modules of the other class where they are.
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {nn.RMSNorm: RMSNorm, nn.LayerNorm: LayerNorm}


@dataclass
class Patch:
    """What `patch` did; `print` shows it.

    Attributes:
        replaced: the class of each module that was replaced, by its name in the model.
        left: why a module was not replaced, by its name.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _undo: dict[str, Callable[[], str]] = field(default_factory=dict, repr=False)

    def undo(self) -> None:
        """Puts back what was replaced, with the parameters, the mode and the hooks that it has now.

        Raises:
            RuntimeError: modules that were changed since, such as by a parametrization, stay replaced; all others were
                put back.
        """
        obstacles = {}
        for name in reversed(list(self._undo)):
            if obstacle := self._undo[name]():
                obstacles[name] = obstacle
            else:
                del self._undo[name], self.replaced[name]
        if obstacles:
            rule = "could not put back some modules, which were changed since `patch`"
            hint = (
                "undo these changes, such as by `torch.nn.utils.parametrize.remove_parametrizations(module, name)`, "
                "and call `undo()` again"
            )
            refuse(RuntimeError, "undo", rule, *obstacles.items(), hint=hint, subject="patch")

    def __str__(self) -> str:
        counts = Counter(self.replaced.values())
        done = ", ".join(f"{count} nn.{name}" for name, count in sorted(counts.items())) or "nothing"
        return "\n".join([f"replaced {done}", *(f"left `{name}`: {reason}" for name, reason in self.left.items())])


def patch(model: nn.Module) -> Patch:
    """Replaces each nn.RMSNorm, nn.LayerNorm and nn.LSTM of a model, in place.

    Parameters, their names and optimizers stay as they are. Modules of derived classes, which may compute something
    else, are left. A parametrization or FSDP2 makes such a class of a module, so call `patch` before.

    Returns:
        What was replaced, and what was left and why; its `undo()` puts everything back.

    Raises:
        TypeError: `model` is not an nn.Module.
    """
    if not isinstance(model, nn.Module):
        hint = "`patch(model)`, a call for each model"
        refuse(TypeError, "model", "must be an nn.Module", ("got", shown(model)), hint=hint, subject="patch")
    done = Patch()
    made: dict[nn.Module, nn.Module] = {}
    changed: dict[nn.Module, type[nn.Module]] = {}
    for name, module in [*model.named_modules(remove_duplicate=False)]:
        kind = type(module)
        if kind in _CLASSES:
            module.__class__, changed[module] = _CLASSES[kind], kind
        if module in changed:
            done.replaced[name] = changed[module].__name__
            done._undo[name] = partial(_put_back_class, module, changed[module])
        elif kind is nn.LSTM:
            _replace_lstm(model, name, module, made, done)
        elif isinstance(module, (*_CLASSES, nn.LSTM)) and not isinstance(module, tuple(_CLASSES.values())):
            done.left[name] = f"its class, `{kind.__name__}`, is a derived one, and may compute something else"
    return done


def _replace_lstm(model: nn.Module, name: str, module: nn.LSTM, made: dict[nn.Module, nn.Module], done: Patch) -> None:
    if not name:
        done.left[name] = "it is the model itself: `LSTM.from_torch(model)` returns another one"
        return
    if "forward" in vars(module):
        done.left[name] = "it has a `forward` of its own, which would not be called"
        return
    if any(hooks for attribute, hooks in vars(module).items() if attribute.endswith("_hooks")):
        done.left[name] = "it has hooks, which would not be called"
        return
    if module._buffers or module._modules or set(module._parameters) != set(module._flat_weights_names):
        done.left[name] = "it has other parameters, buffers or modules than nn.LSTM has"
        return
    if module not in made:
        try:
            made[module] = LSTM.from_torch(module)
        except ValueError as error:
            done.left[name] = str(error).splitlines()[0]
            return
    parent, _, child = name.rpartition(".")
    holder = model.get_submodule(parent)
    setattr(holder, child, made[module])
    done._undo[name] = partial(_put_back, module, made[module], holder, child)
    done.replaced[name] = "LSTM"


def _put_back_class(module: nn.Module, kind: type[nn.Module]) -> str:
    """Gives a module its class back; returns why not, or nothing."""
    if type(module) not in (kind, _CLASSES[kind]):  # `kind`: it has several names, and one was put back
        return f"its class is `{type(module).__name__}`"
    module.__class__ = kind
    return ""


def _put_back(module: nn.LSTM, made: nn.Module, holder: nn.Module, child: str) -> str:
    """Puts an nn.LSTM where it was, with what `made` has been given since; returns why not, or nothing."""
    if type(made) is not LSTM:
        return f"its class is `{type(made).__name__}`"
    if made._buffers or made._modules or set(made._parameters) != set(module._flat_weights_names):
        return "it has other parameters, buffers or modules than nn.LSTM has"
    # Such hooks are bound to the module that they were registered on.
    if any(getattr(hook, "with_module", False) for hook in made._load_state_dict_pre_hooks.values()):
        return "it has hooks that were registered by `register_load_state_dict_pre_hook`"
    vars(module).update({name: hooks for name, hooks in vars(made).items() if "_hook" in name})
    for name, parameter in made.named_parameters():
        setattr(module, name, parameter)
    module.train(made.training)
    setattr(holder, child, module)
    return ""
