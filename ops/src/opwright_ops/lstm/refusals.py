"""Errors of `LSTM` at construction and in a call, with the exception types of nn.LSTM."""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from opwright_ops import refusals
from opwright_ops.refusals import shown as shown
from opwright_ops.tensors import is_autocast_on


def refuse(
    kind: type[Exception], what: str, rule: str, *rows: tuple[str, str], hint: str = "", subject: str = "LSTM"
) -> NoReturn:
    """Raises `kind` as `opwright_ops.refusals.refuse` does, by default for `LSTM`."""
    refusals.refuse(kind, what, rule, *rows, subject=subject, hint=hint)


def is_readable(value: Tensor) -> bool:
    """Whether a check may look at the values: it would wait for a GPU, and break a trace."""
    return (
        not torch.compiler.is_compiling()
        and type(value) is Tensor
        and value.device.type == "cpu"
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )


# --- names ------------------------------------------------------------------------------------------


def _hint_activations(value: Any) -> str:
    """Translates ONNX's three activations: of the gates, of the cell's input and of the output."""
    names = [str(name) for name in value] if isinstance(value, (tuple, list)) else []
    if names == ["HardSigmoid", "Tanh", "Tanh"]:
        return '`activation="hard_sigmoid", slope=0.2`, where `activation_alpha` is not given'
    return (
        '`activation="soft"` is [Sigmoid, Tanh, Tanh]; "hard_sigmoid" has HardSigmoid first; others are not supported'
    )


def _hint_recurrent_activation(value: Any) -> str:
    if value == "hard_sigmoid":
        return '`activation="hard_sigmoid", slope=1 / 6`; in Keras 2 the slope is 0.2'
    return '`activation="soft"` is sigmoid and tanh; others are "hard", "hard_sigmoid" and "hard_tanh"'


def _hint_direction(value: Any) -> str:
    known = {"reverse": "`reverse=True`", "bidirectional": "`bidirectional=True`"}
    return known.get(str(value).lower(), "omit it: forward is the default")


def _hint_hard(value: Any) -> str:
    return f'`activation="{"hard" if value else "soft"}"`; the slope is 1/8, as there'


def _hint_state(value: Any) -> str:
    return "`lstm(input, (h_0, c_0))`"


# What other libraries call an argument, and what to write here for a value of it.
_OTHER_NAMES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "hard": ("caiman-asr", _hint_hard),
    "hard_activation": ("caiman-asr", _hint_hard),
    "hard_activation_functions": ("caiman-asr", _hint_hard),
    "rw_dropout": ("caiman-asr", lambda v: f"`weight_dropout={v}`; it is off in eval mode"),
    "forget_gate_bias": ("caiman-asr", lambda v: f"`forget_bias={v}`"),
    "batch_norm": ("caiman-asr", lambda v: "`layer_norm=True`, or a BatchNorm1d behind each `LSTM(..., num_layers=1)`"),
    "quantize": ("caiman-asr", lambda v: '`lstm_step(lstm, weights="int8")` rounds the weights of a stream'),
    "custom_lstm": ("caiman-asr", lambda v: "omit it: this module has all options on every device"),
    "init_states": ("caiman-asr", _hint_state),
    "return_state_sequence": ("haste", lambda v: f"`return_cell={bool(v)}`; h of all steps is the output"),
    "num_units": ("haste", lambda v: f"`hidden_size={v}`"),
    "activations": ("ONNX", _hint_activations),
    "activation_alpha": ("ONNX", lambda v: '`activation="hard_sigmoid", slope=...`; alpha of HardSigmoid is the slope'),
    "activation_beta": ("ONNX", lambda v: "omit it: the hard sigmoid is 0.5 at 0"),
    "direction": ("ONNX", _hint_direction),
    "input_forget": ("ONNX", lambda v: f"`coupled={bool(v)}`"),
    "layout": (
        "ONNX",
        lambda v: f"`batch_first={bool(v)}`; the state is [layers x directions, batch, features] in both",
    ),
    "sequence_lens": ("ONNX", lambda v: "`lstm(input, lengths=...)`"),
    "initial_h": ("ONNX", _hint_state),
    "initial_c": ("ONNX", _hint_state),
    "units": ("Keras", lambda v: f"`hidden_size={v}`, after `input_size`"),
    "recurrent_activation": ("Keras", _hint_recurrent_activation),
    "use_bias": ("Keras", lambda v: f"`bias={v}`"),
    "unit_forget_bias": ("Keras", lambda v: f"`forget_bias={1.0 if v else None}`"),
    "recurrent_dropout": ("Keras", lambda v: f"`variational_dropout=(0.0, {v})`"),
    "return_sequences": ("Keras", lambda v: "omit it: the output has all steps; that of the last is `h_n[-1]`"),
    "return_state": ("Keras", lambda v: "omit it: the result is (output, (h_n, c_n))"),
    "go_backwards": ("Keras", lambda v: f"`reverse={v}`; the output stays in the order of time, so `output.flip(0)`"),
    "stateful": ("Keras", lambda v: "`output, state = lstm(input, state)`, or `lstm_step` for a stream"),
    "time_major": ("Keras", lambda v: f"`batch_first={not v}`"),
    "unroll": ("Keras", lambda v: "omit it: one call of a kernel takes all steps"),
    "use_cudnn": ("Keras", lambda v: "omit it, or `tier=...` for a GPU"),
    "implementation": ("Keras", lambda v: "omit it, or `tier=...` for a GPU"),
    "initial_state": ("Keras", _hint_state),
    "mask": ("Keras", lambda v: "`lstm(input, lengths=mask.sum(1))`, where True comes first in each row"),
    "training": ("Keras", lambda v: "`lstm.train()` or `lstm.eval()`"),
}


def refuse_name(name: str, value: Any, here: Callable[..., Any], elsewhere: Callable[..., Any]) -> NoReturn:
    """Says what to write in place of a keyword that `here` lacks: the name of the same thing in this library.

    Args:
        here, elsewhere: the functions of the constructor and of a call, or the other way round.
    """
    got = ("got", shown(value))
    if name in inspect.signature(elsewhere).parameters:
        text = repr(value) if isinstance(value, (bool, int, float, str)) else "..."
        is_call = elsewhere.__name__ == "forward"
        place, form = ("a call", "lstm(input, {})") if is_call else ("the constructor", "LSTM(..., {})")
        refuse(TypeError, name, f"is an argument of {place}", got, hint=f"`{form.format(f'{name}={text}')}`")
    if name in _OTHER_NAMES:
        library, hint_for = _OTHER_NAMES[name]
        refuse(TypeError, name, f"is an argument of {library}'s LSTM, not of this one", got, hint=hint_for(value))
    near = difflib.get_close_matches(
        name, [n for n in inspect.signature(here).parameters if n not in ("self", "others")]
    )
    refuse(TypeError, name, "is unknown", got, hint=f"`{near[0]}=...`" if near else "`help(opwright_ops.LSTM)` has all")


# --- construction -----------------------------------------------------------------------------------


def check_sizes(
    input_size: Any, hidden_size: Any, num_layers: Any, bias: Any, batch_first: Any, dropout: Any,
    proj_size: Any, dtype: Any,
) -> None:  # fmt: skip
    """Refuses what nn.LSTM's constructor refuses."""
    if isinstance(dropout, bool) or not isinstance(dropout, numbers.Real) or not 0 <= dropout <= 1:
        kind = ValueError if isinstance(dropout, (str, numbers.Number)) else TypeError
        refuse(kind, "dropout", "must be a probability", ("got", shown(dropout)), ("expected", "0 to 1"))
    for name, value in (("bias", bias), ("batch_first", batch_first)):
        if not isinstance(value, bool):
            refuse(TypeError, name, "must be a bool", ("got", shown(value)), hint=f"`{name}={bool(value)}`")
    sizes = (("input_size", input_size), ("hidden_size", hidden_size), ("num_layers", num_layers))
    for name, value in sizes:
        if not isinstance(value, int):
            _refuse_type(name, value)
        if value <= 0:
            refuse(ValueError, name, "must be greater than zero", ("got", str(value)), ("expected", "1, 2, ..."))
    if not isinstance(proj_size, int):
        _refuse_type("proj_size", proj_size)
    if not 0 <= proj_size < hidden_size:
        refuse(
            ValueError, "proj_size", "must be smaller than `hidden_size`; 0 is for no projection",
            ("got", str(proj_size)), ("expected", f"0 to {hidden_size - 1}"),
        )  # fmt: skip
    if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
        kind = TypeError if dtype.is_complex else RuntimeError
        refuse(kind, "dtype", "must be a floating-point type", ("got", str(dtype)), hint="`dtype=torch.float32`")


def _refuse_type(name: str, value: Any) -> NoReturn:
    is_whole = isinstance(value, float) and value.is_integer()
    hint = f"`{name}={int(value)}`" if is_whole else ""
    refuse(TypeError, name, "must be an int", ("got", shown(value)), hint=hint)


def check_options(
    bias: bool, hidden_size: int, bidirectional: bool, activation: Any, slope: Any, flags: dict[str, Any], clip: Any,
    forget_bias: Any, return_cell: Any, memory: Any, tier: Any,
) -> None:  # fmt: skip
    """Refuses unknown options and combinations without a meaning."""
    _check_choice("activation", activation, ("soft", "hard", "hard_sigmoid", "hard_tanh"))
    _check_choice("memory", memory, ("default", "recompute"))
    _check_choice("tier", tier, ("auto", "cluster", "grid", "step"))
    for name, value in flags.items():
        if not isinstance(value, bool):
            refuse(TypeError, name, "must be a bool", ("got", shown(value)), hint=f"`{name}={bool(value)}`")
    if not isinstance(return_cell, bool) and return_cell != "all":
        refuse(
            TypeError, "return_cell", "must be a bool, or \"all\" for every layer", ("got", shown(return_cell)),
            hint=f"`return_cell={bool(return_cell)}`",
        )  # fmt: skip
    if flags["reverse"] and bidirectional:
        refuse(
            ValueError, "reverse", "is for one direction, and `bidirectional` has both",
            ("reverse", "True"), ("bidirectional", "True"), hint="`bidirectional=False`",
        )  # fmt: skip
    if slope is not None:
        _check_positive("slope", slope, "the slope of the hard sigmoid at 0", "0.125, 0.2, 1 / 6")
        if activation in ("soft", "hard_tanh"):
            refuse(
                ValueError, "slope", "belongs to the hard sigmoid; the soft one has none",
                ("slope", str(slope)), ("activation", f'"{activation}"'), hint=f'`activation="hard", slope={slope}`',
            )  # fmt: skip
    if clip is not None:
        _check_positive("clip", clip, "the largest magnitude that enters a gate", "a number > 0, or None")
    if forget_bias is not None:
        if not _is_number(forget_bias):
            kind = ValueError if isinstance(forget_bias, float) else TypeError
            refuse(kind, "forget_bias", "must be a number", ("got", shown(forget_bias)), hint="`forget_bias=1.0`")
        if not bias:
            refuse(
                ValueError, "forget_bias", "is the start of a bias, and there is none",
                ("forget_bias", str(forget_bias)), ("bias", "False"), hint="`bias=True`",
            )  # fmt: skip
        if flags["coupled"]:
            refuse(
                ValueError, "forget_bias", "has no effect on a coupled forget gate, which is 1 - i",
                ("forget_bias", str(forget_bias)), ("coupled", "True"), hint="`forget_bias=None`",
            )  # fmt: skip
    if flags["layer_norm"] and hidden_size == 1:
        refuse(
            ValueError, "layer_norm", "makes a cell of one element 0",
            ("hidden_size", "1"), ("expected", "2 or more"), hint="`layer_norm=False`",
        )  # fmt: skip


def check_probabilities(name: str, value: Any, parts: tuple[str, ...]) -> tuple[float, ...]:
    """Returns one probability in [0, 1) for each of `parts`, from one for all or one for each."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,) * len(parts)
    wanted = "a number" if len(parts) == 1 else f"a number, or a pair ({', '.join(parts)})"
    if len(values) != len(parts) or not all(_is_number(v) for v in values):
        kind = ValueError if any(isinstance(v, float) for v in values) else TypeError
        refuse(kind, name, f"must be {wanted}", ("got", shown(value)), ("expected", "0 <= p < 1"))
    if not all(0 <= v < 1 for v in values):
        refuse(ValueError, name, "must be a probability below 1", ("got", str(value)), ("expected", "0 <= p < 1"))
    return tuple(map(float, values))


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        expected = " or ".join(f'"{c}"' for c in choices)
        refuse(
            ValueError, name, "is unknown", ("got", repr(value)), ("expected", expected),
            hint=f'`{name}="{choices[0]}"`',
        )  # fmt: skip


def _check_positive(name: str, value: Any, meaning: str, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        refuse(TypeError, name, f"must be a number: {meaning}", ("got", shown(value)), ("expected", expected))
    if not (value > 0 and math.isfinite(value)):
        refuse(
            ValueError,
            name,
            f"must be greater than zero: {meaning}",
            ("got", str(value)),
            ("expected", expected),
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


# --- calls ------------------------------------------------------------------------------------------


def fits(value: Tensor, weight: Tensor) -> bool:
    """Whether a tensor can be computed with: of the weights' type, or brought to one by autocast."""
    return value.dtype == weight.dtype or (
        is_autocast_on(weight) and value.is_floating_point() and torch.float64 not in (value.dtype, weight.dtype)
    )


def refuse_input(input: Any, weight: Tensor, input_size: int, is_packed: bool) -> NoReturn:
    """Says what is wrong with an input that cannot be taken."""
    name = "input.data" if is_packed else "input"
    if not isinstance(input, Tensor):
        refuse(
            TypeError, name, "must be a tensor or a PackedSequence", ("got", shown(input)),
            hint="`torch.nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)`",
        )  # fmt: skip
    got = ("got", shown(input))
    if input.ndim not in ((2,) if is_packed else (2, 3)):
        kind, expected = (RuntimeError, "2") if is_packed else (ValueError, "3, or 2 without a batch")
        refuse(kind, name, "has the wrong number of dimensions", got, ("expected", expected),
               hint="" if input.ndim > 1 else "`input.unsqueeze(0)` for one step")  # fmt: skip
    if not fits(input, weight):
        hint = f"`input.to({weight.dtype})`" + (f", or `lstm.to({input.dtype})`" if input.is_floating_point() else "")
        rows = got, ("weights", shown(weight))
        refuse(ValueError, name, "must have the type of the weights", *rows, hint=hint)
    if input.shape[-1] != input_size:
        refuse(
            RuntimeError, name, "must have `input_size` as its last size", got,
            ("expected", f"[..., {input_size}]"), hint=f"`LSTM({input.shape[-1]}, ...)`",
        )  # fmt: skip
    refuse(
        RuntimeError, name, "must be on the device of the weights", got, ("weights", shown(weight)),
        hint=f'`input.to("{weight.device}")`, or `lstm.to("{input.device}")`',
    )  # fmt: skip


def refuse_state(hx: Any, weight: Tensor, h_shape: tuple[int, ...], c_shape: tuple[int, ...]) -> NoReturn:
    """Says what is wrong with a state that cannot be taken."""
    if not isinstance(hx, (tuple, list)):
        refuse(TypeError, "hx", "must be a pair (h_0, c_0)", ("got", shown(hx)), hint="`lstm(input, (h_0, c_0))`")
    if len(hx) != 2:
        refuse(RuntimeError, "hx", "must be a pair (h_0, c_0)", ("got", f"{len(hx)} of them"),
               hint="`lstm(input, (h_0, c_0))`")  # fmt: skip
    for name, value, shape in (("h_0", hx[0], h_shape), ("c_0", hx[1], c_shape)):
        got, expected = ("got", shown(value)), ("expected", f"[{', '.join(map(str, shape))}]")
        if not isinstance(value, Tensor):
            refuse(TypeError, name, "must be a tensor", got, expected, hint="`lstm(input)` starts from zeros")
        if value.ndim != len(shape):
            hint = f"`{name}.unsqueeze({0 if value.ndim < len(shape) - 1 else 1})`"
            if value.ndim > len(shape):
                hint = f"`{name}.squeeze(1)`: without a batch, the state has none"
            refuse(RuntimeError, name, "has the wrong number of dimensions", got, expected, hint=hint)
        if tuple(value.shape) != shape:
            hint = "sizes of a state are [layers x directions, batch, features], also with `batch_first=True`"
            refuse(RuntimeError, name, "has the wrong shape", got, expected, hint=hint)
        if not fits(value, weight):
            refuse(RuntimeError, name, "must have the type of the weights", got, ("weights", shown(weight)),
                   hint=f"`{name}.to({weight.dtype})`")  # fmt: skip
        if value.device != weight.device:
            refuse(RuntimeError, name, "must be on the device of the weights", got, ("weights", shown(weight)),
                   hint=f'`{name}.to("{weight.device}")`')  # fmt: skip
    raise AssertionError


def checked_lengths(lengths: Any, steps: int, batch: tuple[int, ...], enforce_sorted: bool) -> Tensor:
    """Returns the lengths as a tensor int64[*batch], on the device where they are."""
    given = lengths
    if not isinstance(lengths, Tensor):
        try:
            lengths = torch.as_tensor(lengths)
        except (TypeError, ValueError, RuntimeError):
            _refuse_lengths_type(given)
        lengths = lengths if lengths.numel() else lengths.long()
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        _refuse_lengths_type(given)
    if tuple(lengths.shape) != tuple(batch):
        refuse(
            ValueError, "lengths", "must have one length for each entry of the batch", ("got", shown(lengths)),
            ("expected", f"[{', '.join(map(str, batch))}]"),
            hint="the batch is the first axis of the input with `batch_first=True`, else the second",
        )  # fmt: skip
    if lengths.numel() and is_readable(lengths):
        low, high = (int(v) for v in lengths.aminmax())
        if low < 0 or high > steps:
            refuse(
                ValueError, "lengths", "must not be negative" if low < 0 else "must not be above the input's steps",
                ("got", f"{low} to {high}"), ("expected", f"0 to {steps}"),
                hint=f"`lengths.clamp(0, {steps})`",
            )  # fmt: skip
        if enforce_sorted and lengths.ndim and bool((lengths[1:] > lengths[:-1]).any()):
            refuse(
                RuntimeError, "lengths", "must be in decreasing order with `enforce_sorted=True`",
                ("got", str(lengths.tolist())), hint="`enforce_sorted=False`",
            )  # fmt: skip
    return lengths.long()


def _refuse_lengths_type(lengths: Any) -> NoReturn:
    refuse(
        TypeError, "lengths", "must be whole numbers", ("got", shown(lengths)), ("expected", "int64[batch]"),
        hint="`torch.as_tensor(lengths, dtype=torch.int64)`",
    )  # fmt: skip


def check_reset(reset: Any, shape: tuple[int, ...], device: torch.device) -> None:
    """Refuses a mask of resets that is not bool, or not of the layout of the input."""
    if not isinstance(reset, Tensor) or reset.dtype != torch.bool:
        refuse(TypeError, "reset", "must be a tensor of bools", ("got", shown(reset)), hint="`reset.bool()`")
    if tuple(reset.shape) != tuple(shape):
        refuse(
            ValueError, "reset", "must have one element for each step of each entry, laid out as the input",
            ("got", shown(reset)), ("expected", f"[{', '.join(map(str, shape))}]"), hint="`reset.mT`",
        )  # fmt: skip
    if reset.device != device:
        refuse(ValueError, "reset", "must be on the device of the input", ("got", shown(reset)),
               ("expected", str(device)), hint=f'`reset.to("{device}")`')  # fmt: skip
