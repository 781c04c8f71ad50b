"""Streaming: an LSTM that takes a few steps per call, with weights and state prepared once."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn, get_args

import torch
from jaxtyping import Float32, Num
from torch import Tensor, nn

from opwright import Mutates, operator
from opwright_ops.lstm.module import LSTM
from opwright_ops.lstm.op import Activation
from opwright_ops.lstm.op import lstm as lstm_sequence
from opwright_ops.lstm.packing import Weights, packed_layer, unpacked_columns, unpacked_gates
from opwright_ops.lstm.refusals import refuse, shown
from opwright_ops.lstm.samples import inputs_of

_refuse = partial(refuse, subject="lstm_step")
_transforms, _forward_ad = torch._C._are_functorch_transforms_active, torch.autograd.forward_ad
_is_vmapped = torch._C._functorch.is_batchedtensor
_OPTIONAL = ("scale", "weight_hr", "scale_hr", "peephole", "norm_ih", "norm_hh", "norm_c")


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
        weight_ih, weight_hh: as `packing.pack_gates` makes them, float32, bfloat16 or int8.
        scale: of the columns of weight_ih and weight_hh, where they are int8.
        weight_hr, scale_hr: of the projection, as `packing.pack_columns` makes them.
        input, bias and the others: as for `lstm`.

    Numerics:
        Only the weights are rounded; products and sums are float32.
    """
    units, width = c.shape[-1], h.shape[-1]
    scale_ih, scale_hh = (None, None) if scale is None else scale
    projection = None if weight_hr is None else unpacked_columns(weight_hr, scale_hr, width, h.dtype)
    result = lstm_sequence.operator.declaration.reference(
        input, h, c, unpacked_gates(weight_ih, scale_ih, units, h.dtype),
        unpacked_gates(weight_hh, scale_hh, units, h.dtype), bias, None, projection, peephole, norm_ih, norm_hh, norm_c,
        activation=activation, slope=slope, coupled=coupled, clip=clip, zoneout_h=zoneout_h, zoneout_c=zoneout_c,
    )  # fmt: skip
    h.copy_(result.h_n)
    c.copy_(result.c_n)
    return result.output


# A call of the handle asks the operator's function's questions itself, once for all layers.
_kernel = lstm_step_.operator.kernel


class LSTMStep:
    """Takes an LSTM through a stream, one step or a few per call, with its own copy of the weights and the state.

    Computes what the module computes in eval mode: without dropout, with the expectation of zoneout. Cells, h
    and sums are float32 whatever the module's type; outputs have the type of the input. Nothing is recorded for
    autograd.

    A change of the module's parameters is seen at the next call, which copies them anew: in-place operations,
    optimizers, load_state_dict, another Parameter or other `.data`. Operations on `.data` leave no trace, so a
    few elements of each parameter are compared: on the CPU, a change of a whole parameter or of one gate is
    seen. After smaller ones, call `repack`.

    One thread at a time may use it. It can be copied and pickled, with its module and state.

    Args:
        lstm: an LSTM or nn.LSTM, in one direction, forward in time.
        batch_size: entries that go on side by side.
        weights: what the copy is kept in: "float32", "bfloat16", or "int8" with a scale for each row.

    Raises:
        TypeError: the module is not an LSTM.
        ValueError: it is bidirectional or reversed, or a parameter of it is computed from others.
    """

    def __init__(self, lstm: nn.LSTM | LSTM, batch_size: int = 1, weights: Weights = "float32") -> None:
        if not isinstance(lstm, (nn.LSTM, LSTM)):
            _refuse(
                TypeError, "lstm", "must be an LSTM", ("got", type(lstm).__name__),
                ("expected", "opwright_ops.LSTM, torch.nn.LSTM"),
            )  # fmt: skip
        if lstm.bidirectional:
            _refuse(
                ValueError, "lstm", "must go in one direction: a stream has no end to come back from",
                hint="`LSTM(..., bidirectional=False)`",
            )  # fmt: skip
        if getattr(lstm, "reverse", False):
            _refuse(
                ValueError, "lstm", "must go forward in time: a stream has no end to begin at",
                hint="`LSTM(..., reverse=False)`",
            )  # fmt: skip
        if weights not in get_args(Weights):
            _refuse(
                ValueError, "weights", "is not a type that weights can be kept in",
                ("got", repr(weights)), ("expected", " | ".join(map(repr, get_args(Weights)))),
            )  # fmt: skip
        self._begin(lstm, weights)
        self._put_zeros(batch_size)

    def _begin(self, lstm: nn.LSTM | LSTM, weights: Weights) -> None:
        self.lstm, self.weights = lstm, weights
        # What the module computes; the parameters are looked up in the module itself.
        self._form = lstm if isinstance(lstm, LSTM) else LSTM.from_torch(lstm)
        self._busy = threading.Lock()
        self._layers: list[tuple[Tensor | None, ...]] = []
        self._seen: list[tuple[Any, ...]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"lstm": self.lstm, "weights": self.weights, "state": self.state}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self._begin(kept["lstm"], kept["weights"])
        self._put_zeros(kept["state"][0].shape[1])
        self.state = kept["state"]

    @property
    def state(self) -> tuple[Tensor, Tensor]:
        """A copy of (h, c), as the module takes and returns it: [layers, B, ...], but always float32.

        Setting it copies too, from any floating-point type.
        """
        with self._alone():
            return self._h.clone(), self._c.clone()

    @state.setter
    def state(self, state: tuple[Tensor, Tensor]) -> None:
        if not isinstance(state, (tuple, list)) or len(state) != 2:
            _refuse(TypeError, "state", "must be a pair (h, c)", ("got", shown(state)),
                    hint="`step.state = lstm(input)[1]`")  # fmt: skip
        with self._alone(), torch.no_grad():
            for mine, given, name in zip((self._h, self._c), state, ("h", "c"), strict=True):
                if not isinstance(given, Tensor) or not given.is_floating_point():
                    _refuse(TypeError, f"state: {name}", "must be a floating-point tensor",
                            ("got", shown(given)), ("expected", shown(mine)))  # fmt: skip
                if given.shape != mine.shape:
                    _refuse(
                        ValueError, f"state: {name}", "must have the sizes of this handle's",
                        ("got", shown(given)), ("expected", shown(mine)),
                        hint="`step.reset(batch_size)` first, for another number of entries",
                    )  # fmt: skip
            self._h.copy_(state[0])
            self._c.copy_(state[1])

    def reset(self, batch_size: int | None = None) -> None:
        """Sets the state to 0, for another number of entries if one is given."""
        with self._alone():
            self._put_zeros(self._h.shape[1] if batch_size is None else batch_size)
            if self._layers:
                self._bind()

    def _put_zeros(self, batch_size: int) -> None:
        if not isinstance(batch_size, int) or isinstance(batch_size, bool):
            _refuse(TypeError, "batch_size", "must be an int", ("got", shown(batch_size)))
        if batch_size < 0:
            _refuse(ValueError, "batch_size", "must not be negative", ("got", str(batch_size)))
        form = self._form
        # A tensor that is made in inference mode could not be set outside of it.
        with torch.inference_mode(False):
            like = {"dtype": torch.float32, "device": self.lstm.weight_ih_l0.device}
            self._h = torch.zeros(form.num_layers, batch_size, form.proj_size or form.hidden_size, **like)
            self._c = torch.zeros(form.num_layers, batch_size, form.hidden_size, **like)

    def repack(self) -> None:
        """Copies the weights anew at the next call."""
        self._seen = []

    def arguments(self) -> tuple[list[tuple[Tensor | None, ...]], dict[str, Any]]:
        """Returns what `lstm_step_` takes behind its input: the tensors of each layer, and the options.

        For programs that call the operator without this handle. The first two of a layer are its state, not
        copied; the others are the weights as they are now.
        """
        with self._alone():
            if self._is_stale():
                self._prepare()
            given = zip(self._h, self._c, self._layers, strict=True)
            return [(h, c, *layer) for h, c, layer in given], dict(self._options)

    def __call__(self, input: Tensor) -> Tensor:
        """Takes the next step, or the next T.

        Args:
            input: one step [B, I], or [I] where B is 1; or several, laid out as for the module: [T, B, I], or
                [B, T, I] with its `batch_first`. Of any floating-point type.

        Returns:
            The last layer's output, laid out as the input, in its type.

        Raises:
            ValueError: the input has other sizes than the module and the state, is not a floating-point
                tensor, or is on another device.
            RuntimeError: the input needs a gradient, or another thread is in a call.
        """
        if not self._busy.acquire(blocking=False):
            self._refuse_thread()
        try:
            if self._is_stale():
                self._prepare()
            if (
                type(input) is Tensor
                and input.shape == self._quick_shape
                and input.dtype is torch.float32
                and input.is_cpu
                and not (input.requires_grad or _transforms() or _forward_ad._current_level >= 0)
            ):
                for call in self._quick_calls:
                    input = _kernel(input, *call)
                return input
            return self._run(input)
        finally:
            self._busy.release()

    def _run(self, input: Tensor) -> Tensor:
        """Runs any input that there may be."""
        axes = input.ndim if isinstance(input, Tensor) else 0
        swapped = axes == 3 and self._form.batch_first
        x = input[None] if axes == 2 else input[None, None] if axes == 1 else input
        x = x.transpose(0, 1) if swapped else x
        is_plain = type(x) is Tensor and not (x.requires_grad or _transforms() or _forward_ad._current_level >= 0)
        if not (
            is_plain
            and x.shape[1:] == (self._h.shape[1], self._form.input_size)
            and x.is_floating_point()
            and x.device == self._h.device
        ):
            self._check_input(input)
        if input.dtype is not torch.float32:
            x = x.float()
        if is_plain:
            for call in self._calls:
                x = _kernel(x, *call)
        else:
            for h, c, layer in zip(self._h, self._c, self._layers, strict=True):
                x = lstm_step_(x, h, c, *layer, **self._options)
        if input.dtype is not torch.float32:
            x = x.to(input.dtype)
        return x.transpose(0, 1) if swapped else x[0] if axes == 2 else x[0, 0] if axes == 1 else x

    def _check_input(self, input: Any) -> None:
        """Refuses an input that cannot be taken."""
        batch, width = self._h.shape[1], self._form.input_size
        steps = f"[B, T, {width}]" if self._form.batch_first else f"[T, B, {width}]"
        got, expected = ("got", shown(input)), ("expected", f"[B, {width}] or {steps}, B = {batch}")
        if not isinstance(input, Tensor):
            _refuse(TypeError, "input", "must be a tensor", got, expected)
        if not input.is_floating_point():
            _refuse(ValueError, "input", "must be of a floating-point type", got, hint="`input.float()`")
        if input.ndim not in (1, 2, 3):
            _refuse(ValueError, "input", "has the wrong number of dimensions", got, expected)
        if input.shape[-1] != width:
            _refuse(ValueError, "input", "must have `input_size` as its last size", got, expected)
        found = 1 if input.ndim == 1 else input.shape[0 if input.ndim == 2 or self._form.batch_first else 1]
        if found != batch:
            hint = f"`step.reset({found})` for another number of entries"
            if batch == 1 and input.ndim == 2:
                hint = f"`input.unsqueeze({int(not self._form.batch_first)})` for steps of one entry; " + hint
            _refuse(ValueError, "input", "must have the entries of the state", got, expected, hint=hint)
        if input.device != self._h.device:
            _refuse(ValueError, "input", "must be on the device of the weights", got,
                    ("expected", str(self._h.device)), hint=f'`input.to("{self._h.device}")`')  # fmt: skip
        if _is_vmapped(input):
            _refuse(ValueError, "input", "must not be batched by vmap: the state is not",
                    hint="`lstm_step(lstm, batch_size)`")  # fmt: skip
        has_tangent = _forward_ad._current_level >= 0 and _forward_ad.unpack_dual(input).tangent is not None
        if has_tangent or (input.requires_grad and torch.is_grad_enabled()):
            _refuse(
                RuntimeError, "input", "needs a gradient, and steps have none", got,
                hint="`with torch.no_grad():`, or `input.detach()`; the module itself has one",
            )  # fmt: skip

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            self._refuse_thread()
        try:
            yield
        finally:
            self._busy.release()

    def _refuse_thread(self) -> NoReturn:
        _refuse(
            RuntimeError, "step", "is in use by another thread, and there is one state",
            hint="a handle for each thread: `lstm_step(lstm)`",
        )  # fmt: skip

    def _is_stale(self) -> bool:
        registered = self.lstm._parameters
        for name, parameter, versioned, version, data_ptr, address, sample, values in self._seen:
            if (
                registered.get(name) is not parameter
                or versioned._version != version
                or data_ptr() != address
                or sample() != values
            ):
                return True
        return not self._seen

    def _prepare(self) -> None:
        """Packs the weights, and notes what they were made from."""
        registered, form = self.lstm._parameters, self._form
        layers, seen = [], []
        for names in form._roles:
            for name in filter(None, names):
                parameter = registered.get(name)
                if parameter is None:
                    _refuse(
                        ValueError, name, "is computed from others, so no copy of it can be kept",
                        hint=f'`torch.nn.utils.parametrize.remove_parametrizations(lstm, "{name}")`',
                    )  # fmt: skip
                versioned = SimpleNamespace(_version=0) if parameter.is_inference() else parameter
                data_ptr, sample = parameter.data_ptr, _sample_of(parameter)
                seen.append((name, parameter, versioned, versioned._version, data_ptr, data_ptr(), sample, sample()))
            found = [None if name is None else registered[name].detach() for name in names]
            layers.append(packed_layer(*found, weights=self.weights))
        device = seen[0][1].device
        self._h, self._c = self._h.to(device), self._c.to(device)
        self._layers, self._seen = layers, seen
        self._options = {
            "activation": form.activation, "slope": form.slope, "coupled": form.coupled,
            "clip": form.clip or 0.0, "zoneout_h": form.zoneout[0], "zoneout_c": form.zoneout[1],
        }  # fmt: skip
        self._bind()

    def _bind(self) -> None:
        """Puts together what the kernel takes behind the input, for each layer."""
        _, *others = self._options.values()
        options = (get_args(Activation).index(self._options["activation"]), *others)
        given = list(zip(self._h, self._c, self._layers, strict=True))
        self._calls = [(h, c, *layer, *options) for h, c, layer in given]
        # One entry needs no axis: without it, [1, I] is an input of one step, and [1, R] its output.
        is_one = self._h.shape[1] == 1 and self._h.is_cpu
        self._quick_shape = (1, self._form.input_size) if is_one else None
        self._quick_calls = [(h[0], c[0], *layer, *options) for h, c, layer in given] if is_one else []


def lstm_step(lstm: nn.LSTM | LSTM, batch_size: int = 1, weights: Weights = "float32") -> LSTMStep:
    """Returns a handle that takes an LSTM through a stream; see `LSTMStep`."""
    return LSTMStep(lstm, batch_size, weights)


@lstm_step_.samples
def samples() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yields weights of each type, in sizes with and without a rest of units and columns, with each option."""
    norms, hard = "norm_ih norm_hh norm_c", {"activation": "hard", "slope": 0.2}
    cases: list[tuple[tuple[int, ...], str, dict[str, Any]]] = [
        ((1, 1, 1, 1, 1), "", {}),  # T, B, I, H, R
        ((2, 3, 5, 17, 17), "bias", {}),
        ((1, 1, 16, 16, 16), "bias", {}),
        ((3, 2, 7, 20, 6), "bias weight_hr", {"zoneout_h": 0.2, "zoneout_c": 0.1}),
        ((2, 9, 4, 15, 15), "bias peephole", hard | {"clip": 0.8}),
        ((2, 2, 18, 33, 33), f"bias {norms}", {"coupled": True}),
        ((2, 2, 6, 19, 18), f"peephole weight_hr {norms}", {"clip": 1.5}),
        ((0, 2, 3, 5, 5), "bias", {}),
        ((2, 0, 3, 5, 5), "bias", {}),
        ((4, 5, 90, 80, 70), "bias weight_hr", {}),
        ((2, 3, 5, 17, 17), "bias", {"activation": "hard_sigmoid", "slope": 0.2}),
        ((2, 2, 5, 18, 18), "bias peephole", {"activation": "hard_tanh"}),
    ]
    for weights in get_args(Weights):
        for number, (sizes, present, options) in enumerate(cases):
            x, h, c, *layer = inputs_of(sizes, present, torch.float32, number)[:12]
            yield (x, h, c, *packed_layer(*layer, weights=weights)), options


@lstm_step_.baseline
def lstm_step_baseline(*arguments: Any, **options: Any) -> Tensor:
    """A step in PyTorch with the weights as they are packed, where the layer is plain; else the reference."""
    input, h, c, weight_ih, weight_hh, scale, bias, *more = arguments
    usual = {"activation": "soft", "coupled": False, "clip": 0, "zoneout_h": 0, "zoneout_c": 0}
    if (
        input.ndim != 3
        or any(value is not None for value in (scale, *more))
        or any(options[name] != value for name, value in usual.items())
    ):
        return lstm_step_.operator.declaration.reference(*arguments, **options)
    units, weight_ih, weight_hh = c.shape[-1], weight_ih.to(h.dtype), weight_hh.to(h.dtype)

    def products(rows: Tensor, weight: Tensor) -> Tensor:
        gates = torch.matmul(rows, weight).view(len(weight), -1, 4, 16).permute(2, 1, 0, 3)
        return gates.reshape(4, len(rows), -1)[..., :units]

    outputs = []
    for x in input:
        gates = products(x, weight_ih) + products(h, weight_hh)
        if bias is not None:
            gates = gates + bias.view(4, 1, units)
        i, f, g, o = gates
        c.copy_(torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g))
        h.copy_(torch.sigmoid(o) * torch.tanh(c))
        outputs.append(h.clone())
    return torch.stack(outputs) if outputs else input.new_empty(*input.shape[:2], h.shape[-1])


# Sizes that fit each other: blocks of 16 units.
lstm_step_.sweep(
    *(
        {"T": [1], "batch": [(1,), (16,)], "I": [width], "H": [width], "R": [width], "blocks": [width // 16]}
        | {name: [None] for name in _OPTIONAL}
        for width in (128, 512)
    )
)


def _sample_of(parameter: Tensor) -> Callable[[], Any]:
    """Returns a function that gives the values of up to 4 elements along a diagonal: one of each gate.

    Each is a cache miss in the call that looks at it: with 16, a step at H = 512 takes 10 us more (2-core Xeon,
    Sapphire Rapids class).
    """
    if not parameter.is_cpu:
        return bytes  # looking would wait for the device
    count = min(4, parameter.shape[0])
    axes = zip(parameter.shape, parameter.stride(), strict=True)
    step = sum(size // count * stride for size, stride in axes)
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()]
    some = parameter.detach().as_strided((count,), (step,)).view(bits)
    try:
        return some.numpy().tobytes
    except RuntimeError:  # no NumPy
        return some.tolist
