"""Streaming: an LSTM that takes a few steps per call, with weights and state prepared once."""

import threading
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float32, Num
from torch import Tensor, nn

from opwright import Mutates, operator
from opwright_ops.lstm.module import LSTM
from opwright_ops.lstm.op import Activation
from opwright_ops.lstm.op import lstm as lstm_sequence
from opwright_ops.lstm.refusals import refuse, shown

# The order of packed weights: blocks of 16 units, each [K, 4 gates, 16].
_UNITS, _COLUMNS = 16, 64
Weights = Literal["float32", "bfloat16", "int8"]


@operator("opwright_ops::lstm_step", cpu="step.cpp", autocast=None)
def lstm_step_(
    input: Float32[Tensor, "T *B I"],
    h: Mutates[Float32[Tensor, "*B R"]],
    c: Mutates[Float32[Tensor, "*B H"]],
    weight_ih: Num[Tensor, "blocks I 64"],
    weight_hh: Num[Tensor, "blocks R 64"],
    scale: Float32[Tensor, "2 blocks 64"] | None = None,
    bias: Float32[Tensor, "4*H"] | None = None,
    weight_hr: Num[Tensor, "blocks_hr H 64"] | None = None,
    scale_hr: Float32[Tensor, "blocks_hr 64"] | None = None,
    peephole: Float32[Tensor, "3 H"] | None = None,
    norm_ih: Float32[Tensor, "4*H"] | None = None,
    norm_hh: Float32[Tensor, "4*H"] | None = None,
    norm_c: Float32[Tensor, "2 H"] | None = None,
    *,
    activation: Activation = "soft",
    slope: float = 0.125,
    coupled: bool = False,
    clip: float = 0.0,
    zoneout_h: float = 0.0,
    zoneout_c: float = 0.0,
) -> Float32[Tensor, "T *B R"]:
    """Steps of one layer with packed weights; `h` and `c` become the state after them.

    Args:
        weight_ih, weight_hh: as `pack_gates` makes them, float32, bfloat16 or int8.
        scale: of the columns of weight_ih and weight_hh, where they are int8.
        weight_hr, scale_hr: of the projection, as `pack_columns` makes them.
        input, bias and the others: as for `lstm`.

    Numerics:
        Only the weights are rounded; products and sums are float32.
    """
    units, width = c.shape[-1], h.shape[-1]
    scale_ih, scale_hh = (None, None) if scale is None else scale
    projection = None if weight_hr is None else unpacked_columns(weight_hr, scale_hr, width)
    result = lstm_sequence.operator.declaration.reference(
        input, h, c, unpacked_gates(weight_ih, scale_ih, units), unpacked_gates(weight_hh, scale_hh, units),
        bias, projection, peephole, norm_ih, norm_hh, norm_c,
        activation=activation, slope=slope, coupled=coupled, clip=clip, zoneout_h=zoneout_h, zoneout_c=zoneout_c,
    )  # fmt: skip
    h.copy_(result.h_n)
    c.copy_(result.c_n)
    return result.output


def pack_gates(weight: Tensor) -> Tensor:
    """Returns a weight [4H, K] as blocks [ceil(H / 16), K, 64], in the order k, gate, unit."""
    width = weight.shape[1]
    units = F.pad(weight.view(4, -1, width), (0, 0, 0, -(weight.shape[0] // 4) % _UNITS))
    return units.view(4, -1, _UNITS, width).permute(1, 3, 0, 2).reshape(-1, width, _COLUMNS).contiguous()


def pack_columns(weight: Tensor) -> Tensor:
    """Returns a weight [R, K] as blocks [ceil(R / 64), K, 64]."""
    padded = F.pad(weight, (0, 0, 0, -weight.shape[0] % _COLUMNS))
    return padded.view(-1, _COLUMNS, weight.shape[1]).transpose(1, 2).contiguous()


def unpacked_gates(blocks: Tensor, scale: Tensor | None, units: int) -> Tensor:
    """Returns the weight [4H, K] that `pack_gates` packed, in float32."""
    count, width, _ = blocks.shape
    values = blocks.float() if scale is None else blocks.float() * scale.unsqueeze(1)
    values = values.view(count, width, 4, _UNITS).permute(2, 0, 3, 1).reshape(4, count * _UNITS, width)
    return values[:, :units].reshape(4 * units, width)


def unpacked_columns(blocks: Tensor, scale: Tensor | None, rows: int) -> Tensor:
    """Returns the weight [R, K] that `pack_columns` packed, in float32."""
    values = blocks.float() if scale is None else blocks.float() * scale.unsqueeze(1)
    return values.transpose(1, 2).reshape(-1, blocks.shape[1])[:rows]


def quantized(weight: Tensor, dtype: Weights) -> tuple[Tensor, Tensor | None]:
    """Returns a weight [rows, K] in `dtype`, and for int8 the scale of each row: its largest magnitude is 127."""
    if dtype != "int8":
        return weight.to(getattr(torch, dtype)), None
    scale = weight.float().abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (weight.float() / scale.unsqueeze(1)).round().to(torch.int8), scale


class LSTMStep:
    """Takes an LSTM through a stream, one step or a few per call, with its own copy of the weights and the state.

    Computes as the module does in eval mode: without dropout, with the expectation of zoneout. Cells, sums and
    the state are float32; outputs have the type of the input. Changes of the module's parameters are seen at
    the next call, and their copy is made anew. One thread at a time may use it.

    Args:
        lstm: an LSTM or nn.LSTM, in one direction.
        batch_size: entries that go on side by side.
        weights: what the copy is kept in: "float32", "bfloat16", or "int8" with a scale for each row.

    Raises:
        TypeError, ValueError: the module is no LSTM, is bidirectional, or has parameters that are computed.
    """

    def __init__(self, lstm: nn.LSTM | LSTM, batch_size: int = 1, weights: Weights = "float32") -> None:
        if isinstance(lstm, nn.LSTM):
            lstm = LSTM.from_torch(lstm)
        if not isinstance(lstm, LSTM):
            refuse(TypeError, "lstm", "must be an LSTM", ("got", type(lstm).__name__), subject="lstm_step")
        if lstm.bidirectional:
            refuse(
                ValueError, "lstm", "must go in one direction: a stream has no end to come back from",
                hint="`LSTM(..., bidirectional=False)`", subject="lstm_step",
            )  # fmt: skip
        if weights not in get_args(Weights):
            refuse(
                ValueError, "weights", "is none of the types that weights are kept in",
                ("got", repr(weights)), ("expected", " | ".join(map(repr, get_args(Weights)))), subject="lstm_step",
            )  # fmt: skip
        self.lstm, self.weights = lstm, weights
        self._busy = threading.Lock()
        self._seen: list[tuple[str, Tensor, int, int, Any, bytes]] = []
        self._layers: list[tuple[Tensor | None, ...]] = []
        self.reset(batch_size)

    def reset(self, batch_size: int | None = None) -> None:
        """Sets the state to 0, for another number of entries if one is given."""
        lstm, batch = self.lstm, self._h.shape[1] if batch_size is None else batch_size
        device = lstm._one_weight().device
        self._h = torch.zeros(lstm.num_layers, batch, lstm.proj_size or lstm.hidden_size, device=device)
        self._c = torch.zeros(lstm.num_layers, batch, lstm.hidden_size, device=device)
        self._states = list(zip(self._h, self._c, strict=True))

    @property
    def state(self) -> tuple[Tensor, Tensor]:
        """A copy of (h, c), [layers, B, ...] in float32; setting it copies too."""
        return self._h.clone(), self._c.clone()

    @state.setter
    def state(self, state: tuple[Tensor, Tensor]) -> None:
        for mine, given, name in zip((self._h, self._c), state, ("h", "c"), strict=True):
            if given.shape != mine.shape:
                refuse(
                    ValueError, f"state: {name}", "must have the sizes of this handle",
                    ("got", shown(given)), ("expected", shown(mine)),
                    hint="`step.reset(batch_size)` first", subject="lstm_step",
                )  # fmt: skip
        with torch.no_grad():
            self._h.copy_(state[0])
            self._c.copy_(state[1])

    @torch.no_grad()
    def __call__(self, input: Tensor) -> Tensor:
        """Returns the output of the next step, [B, R] for an input [B, I], or of the next T for [T, B, I].

        Raises:
            ValueError: the input has other sizes than the module and the state.
            RuntimeError: another thread is in a call.
        """
        if not self._busy.acquire(blocking=False):
            refuse(
                RuntimeError, "step", "is in use by another thread, and there is one state",
                hint="a handle for each thread: `lstm_step(lstm)`", subject="lstm_step",
            )  # fmt: skip
        try:
            is_one = input.ndim == 2
            x = input[None] if is_one else input
            if x.ndim != 3 or x.shape[1] != self._h.shape[1] or x.shape[2] != self.lstm.input_size:
                self._refuse_input(input)
            if self._is_stale():
                self._prepare()
            if x.dtype is not torch.float32:
                x = x.float()
            for (h, c), weights in zip(self._states, self._layers, strict=True):
                x = lstm_step_(x, h, c, *weights, **self._options)
            if input.dtype is not torch.float32:
                x = x.to(input.dtype)
            return x[0] if is_one else x
        finally:
            self._busy.release()

    def _refuse_input(self, input: Tensor) -> None:
        refuse(
            ValueError, "input", "must have the sizes of the module and of the state",
            ("got", shown(input)), ("expected", f"[T, {self._h.shape[1]}, {self.lstm.input_size}], or without T"),
            hint=f"`step.reset({input.shape[-2] if input.ndim > 1 else 1})` for another number of entries",
            subject="lstm_step",
        )  # fmt: skip

    def _is_stale(self) -> bool:
        if not self._seen:
            return True
        registered = self.lstm._parameters
        for name, parameter, version, address, sample, values in self._seen:
            if registered.get(name) is not parameter or parameter._version != version:
                return True
            if parameter.data_ptr() != address or sample is not None and sample.tobytes() != values:
                return True
        return False

    def _prepare(self) -> None:
        """Packs the weights, and notes what they were made from."""
        lstm = self.lstm
        zoneout_h, zoneout_c = lstm.zoneout
        self._options = {
            "activation": lstm.activation, "slope": lstm.slope, "coupled": lstm.coupled, "clip": lstm.clip or 0.0,
            "zoneout_h": zoneout_h, "zoneout_c": zoneout_c,
        }  # fmt: skip
        self._layers, seen = [], []
        for names in lstm._roles:
            for name in filter(None, names):
                parameter = lstm._parameters.get(name)
                if parameter is None:
                    refuse(
                        TypeError, name, "is computed in each call, so no copy of it can be kept",
                        hint="`torch.nn.utils.parametrize.remove_parametrizations(lstm, ...)`", subject="lstm_step",
                    )  # fmt: skip
                seen.append((name, parameter, parameter._version, parameter.data_ptr(), *_sample(parameter)))
            found = [None if name is None else lstm._parameters[name].detach() for name in names]
            self._layers.append(_packed(*found, weights=self.weights))
        self._seen = seen


def lstm_step(lstm: nn.LSTM | LSTM, batch_size: int = 1, weights: Weights = "float32") -> LSTMStep:
    """Returns a handle that takes an LSTM through a stream; see `LSTMStep`."""
    return LSTMStep(lstm, batch_size, weights)


def _packed(
    w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None, w_hr: Tensor | None,
    *more: Tensor | None, weights: Weights,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Returns the arguments of `lstm_step_` behind the state."""
    (ih, scale_ih), (hh, scale_hh) = quantized(w_ih, weights), quantized(w_hh, weights)
    scale = bias = hr = scale_hr = None
    if scale_ih is not None:
        scale = torch.stack([pack_gates(s[:, None]).squeeze(1) for s in (scale_ih, scale_hh)])
    if b_ih is not None:
        bias = b_ih.float() + b_hh.float()
    if w_hr is not None:
        hr, scale_hr = quantized(w_hr, weights)
        hr = pack_columns(hr)
        scale_hr = None if scale_hr is None else pack_columns(scale_hr[:, None]).squeeze(1)
    rest = (None if value is None else value.float() for value in more)
    return (pack_gates(ih), pack_gates(hh), scale, bias, hr, scale_hr, *rest)


def _sample(parameter: Tensor) -> tuple[Any, bytes]:
    """Returns a view of a few elements of a parameter, and their bytes now.

    Changes through `.data` leave no trace in its version; those of a whole parameter show here.
    """
    flat = parameter.detach()
    if flat.device.type != "cpu" or not flat.is_contiguous():
        return None, b""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    flat = flat.view(bits).flatten()
    try:
        sample = flat[:: max(1, flat.numel() // 61)].numpy()
    except RuntimeError:  # no NumPy
        return None, b""
    return sample, sample.tobytes()
