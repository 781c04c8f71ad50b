"""`LSTM`: what nn.LSTM is, and the variants that it lacks, on the operator `lstm`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from opwright_ops.lstm.bidirectional import BidirectionalOutputs, in_two_calls, lstm_bidirectional
from opwright_ops.lstm.op import Activation, LstmOutputs, Tier, lstm
from opwright_ops.lstm.refusals import (
    check_options,
    check_probabilities,
    check_reset,
    check_sizes,
    checked_lengths,
    fits,
    is_readable,
    refuse,
    refuse_input,
    refuse_name,
    refuse_state,
)

State = tuple[Tensor, Tensor]
_SIZES = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "bidirectional", "proj_size")


class LSTM(nn.RNNBase):
    """Takes the place of nn.LSTM: the same parameters, state_dict, arguments, results and refusals.

    Not a subclass of nn.LSTM, in which torch.compile breaks every graph. Of the weights beyond nn.LSTM's, each
    layer and direction has `peephole_l0` [3, H] (i, f, o), `norm_ih_l0` and `norm_hh_l0` [4H] (gains),
    `norm_c_l0` [2, H] (gain, bias), where the option asks for them.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size, device, dtype:
            as for nn.LSTM.
        activation: "hard" is clamp(0.5 + slope * z, 0, 1) for sigmoid, clamp(z, -1, 1) for tanh. "hard_sigmoid" and
            "hard_tanh" replace only one of the two: the gates i, f, o, or the cell's input and the output.
        slope: of the hard sigmoid; 1/8 where none is given.
        peephole: the gates see the cell.
        layer_norm: normalises weight_ih @ x, weight_hh @ h and the cell before the output.
        coupled: the forget gate is 1 - i.
        clip: clamps what enters the gates' activations to [-clip, clip].
        zoneout: the probability that an element of the state keeps its value from the step before: one for
            h and c, or a pair (h, c). In eval mode, its expectation.
        weight_dropout: the probability that an element of weight_hh is 0 in a call; off in eval mode.
        variational_dropout: of elements of a layer's input, and of h on its way into the gates, the same at
            all steps of a sequence: one probability for both, or a pair (input, recurrent); off in eval mode.
        forget_bias: what the forget gate's bias starts from.
        return_cell: the result is (output, (h_n, c_n), cells), with the last layer's cells of all steps; for "all",
            `cells` is a tuple of those of each layer.
        reverse: the only direction is from the last step to the first. The output stays in the order of time.
        memory: "recompute" keeps two values of the size of the output for the backward in place of six, and
            computes the others again with one matrix product.
        tier: how a GPU takes the steps; `lstm_tier` tells what "auto" is.

    On a GPU products of float32 are rounded as torch.backends.cudnn.allow_tf32 says, as those of nn.LSTM are.

    Raises:
        ValueError, TypeError, RuntimeError: as nn.LSTM, and for options that have no meaning together.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: Activation = "soft",
        slope: float | None = None,
        peephole: bool = False,
        layer_norm: bool = False,
        coupled: bool = False,
        clip: float | None = None,
        zoneout: float | tuple[float, float] = 0.0,
        weight_dropout: float = 0.0,
        variational_dropout: float | tuple[float, float] = 0.0,
        forget_bias: float | None = None,
        return_cell: bool | Literal["all"] = False,
        reverse: bool = False,
        memory: Literal["default", "recompute"] = "default",
        tier: Tier = "auto",
        **others: NoReturn,
    ) -> None:
        for name, value in others.items():
            refuse_name(name, value, LSTM.__init__, LSTM.forward)
        check_sizes(input_size, hidden_size, num_layers, bias, batch_first, dropout, proj_size, dtype)
        flags = {
            "peephole": peephole, "layer_norm": layer_norm, "coupled": coupled, "reverse": reverse,
        }  # fmt: skip
        check_options(
            bias, hidden_size, bidirectional, activation, slope, flags, clip, forget_bias, return_cell, memory, tier
        )
        if dropout > 0 and num_layers == 1:
            warnings.warn(
                f"`LSTM`: `dropout={dropout}` has no effect: it lies between layers, and `num_layers=1`",
                stacklevel=2,
            )
        super().__init__(
            "LSTM", input_size, hidden_size, num_layers, bias, batch_first, 0.0, bidirectional, proj_size,
            device, dtype,
        )  # fmt: skip
        self.dropout = float(dropout)
        self.activation = activation
        self.slope = 0.125 if slope is None else float(slope)
        self.peephole, self.layer_norm, self.coupled = peephole, layer_norm, coupled
        self.clip = None if clip is None else float(clip)
        self.zoneout = check_probabilities("zoneout", zoneout, ("h", "c"))
        (self.weight_dropout,) = check_probabilities("weight_dropout", weight_dropout, ("weight_hh",))
        parts = ("input", "recurrent")
        self.variational_dropout = check_probabilities("variational_dropout", variational_dropout, parts)
        self.forget_bias = None if forget_bias is None else float(forget_bias)
        self.return_cell, self.reverse, self.memory, self.tier = return_cell, reverse, memory, tier
        self._roles = [self._register_more(*place, device, dtype) for place in self._places()]
        self._reset_more()

    # --- parameters -------------------------------------------------------------------------------------

    def _places(self) -> list[tuple[int, str]]:
        """Returns the layer and the suffix of the names, of each layer and direction."""
        suffixes = ("", "_reverse") if self.bidirectional else ("",)
        return [(layer, suffix) for layer in range(self.num_layers) for suffix in suffixes]

    def _register_more(self, layer: int, suffix: str, device: Any, dtype: Any) -> tuple[str | None, ...]:
        """Registers the parameters beyond nn.LSTM's; returns the names of all, None for the absent ones."""
        end, size = f"_l{layer}{suffix}", self.hidden_size
        more = {
            "peephole": (3, size) if self.peephole else None,
            "norm_ih": (4 * size,) if self.layer_norm else None,
            "norm_hh": (4 * size,) if self.layer_norm else None,
            "norm_c": (2, size) if self.layer_norm else None,
        }
        for name, shape in more.items():
            if shape is not None:
                self.register_parameter(name + end, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        present = {
            "weight_ih": True, "weight_hh": True, "bias_ih": self.bias, "bias_hh": self.bias,
            "weight_hr": self.proj_size > 0, **{name: shape is not None for name, shape in more.items()},
        }  # fmt: skip
        return tuple(name + end if is_present else None for name, is_present in present.items())

    def reset_parameters(self) -> None:
        """Draws all parameters anew, nn.LSTM's with the numbers that nn.LSTM draws."""
        bound = 1 / math.sqrt(self.hidden_size)
        for name, parameter in self.named_parameters():
            if not _is_more(name):
                nn.init.uniform_(parameter, -bound, bound)
        if "_roles" in self.__dict__:  # else nn.RNNBase is still constructing
            self._reset_more()

    @torch.no_grad()
    def _reset_more(self) -> None:
        bound, size = 1 / math.sqrt(self.hidden_size), self.hidden_size
        for name, parameter in self.named_parameters():
            if not _is_more(name):
                continue
            if "peephole_l" in name:
                parameter.uniform_(-bound, bound)
            else:
                parameter.fill_(1)
                if parameter.ndim == 2:
                    parameter[1] = 0
        if self.forget_bias is not None:
            for names in self._roles:
                getattr(self, names[2])[size : 2 * size] = self.forget_bias
                getattr(self, names[3])[size : 2 * size] = 0

    def _weights(self, at: int) -> list[Tensor | None]:
        """Returns the parameters of one layer and direction, in the order of `_roles`."""
        names, registered = self._roles[at], self._parameters
        try:  # nn.Module's own look-up costs 0.3 us for each
            return [None if name is None else registered[name] for name in names]
        except KeyError:  # a parametrization, a pre-hook or DataParallel has put something in its place
            return [None if name is None else getattr(self, name) for name in names]

    def _one_weight(self) -> Tensor:
        """Returns a weight, for its type and device."""
        weight = self._parameters.get("weight_ih_l0")
        return self.weight_ih_l0 if weight is None else weight

    # nn.RNNBase keeps a second list of the weights for cuDNN, which goes stale when they are replaced.

    @property
    def _flat_weights(self) -> list[Tensor | None]:
        return [getattr(self, name, None) for name in self._flat_weights_names]

    def _init_flat_weights(self) -> None:
        pass

    def _update_flat_weights(self) -> None:
        pass

    def _replicate_for_data_parallel(self) -> LSTM:
        return nn.Module._replicate_for_data_parallel(self)

    def flatten_parameters(self) -> None:
        """Does nothing: parameters may lie anywhere."""

    # --- from and to nn.LSTM ----------------------------------------------------------------------------

    @classmethod
    def from_torch(cls, module: nn.LSTM, **options: Any) -> LSTM:
        """Returns an LSTM with the same parameters, not copies: optimizers of `module` stay valid.

        Args:
            module: an nn.LSTM.
            options: the keyword-only options of `LSTM`.

        Raises:
            TypeError: it is not an nn.LSTM.
            ValueError: a weight of it is computed by a parametrization, or `forget_bias` would overwrite one.
        """
        if not isinstance(module, nn.LSTM):
            refuse(TypeError, "from_torch", "takes an nn.LSTM", ("got", type(module).__name__))
        if options.get("forget_bias") is not None:
            refuse(
                ValueError, "forget_bias", "is where a bias starts, and this one is given",
                ("got", str(options["forget_bias"])), hint="`LSTM(..., forget_bias=1.0)` draws its own",
            )  # fmt: skip
        sizes = {name: getattr(module, name) for name in _SIZES}
        made = cls(**sizes, device="meta", **options)
        made.dropout = module.dropout
        _share(module, made, "from_torch")
        weight = made.weight_ih_l0
        for name in [name for name in made._parameters if _is_more(name)]:
            empty = torch.empty_like(made._parameters[name], device=weight.device, dtype=weight.dtype)
            setattr(made, name, nn.Parameter(empty))
        made._reset_more()
        return made.train(module.training)

    def to_torch(self) -> nn.LSTM:
        """Returns an nn.LSTM with the same parameters, not copies.

        Raises:
            ValueError: nn.LSTM does not compute what this module does.
        """
        training = self.training
        beyond = {
            f'activation="{self.activation}"': self.activation != "soft",
            "peephole=True": self.peephole,
            "layer_norm=True": self.layer_norm,
            "coupled=True": self.coupled,
            f"clip={self.clip}": self.clip is not None,
            f"zoneout={self.zoneout}": any(self.zoneout),
            "return_cell=True": self.return_cell is True,
            'return_cell="all"': self.return_cell == "all",
            "reverse=True": self.reverse,
            f"weight_dropout={self.weight_dropout}": training and self.weight_dropout,
            f"variational_dropout={self.variational_dropout}": training and any(self.variational_dropout),
        }
        found = [text for text, is_on in beyond.items() if is_on]
        if found:
            trains_only = all("_dropout" in text for text in found)
            refuse(
                ValueError, "to_torch", "cannot make an nn.LSTM of this one", ("nn.LSTM lacks", ", ".join(found)),
                hint="`lstm.eval().to_torch()`: dropout is off in eval mode" if trains_only else "",
            )  # fmt: skip
        made = nn.LSTM(**{name: getattr(self, name) for name in _SIZES}, device="meta")
        made.dropout = self.dropout
        _share(self, made, "to_torch")
        made._init_flat_weights()
        return made.train(training)

    # --- calls ------------------------------------------------------------------------------------------

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: State | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        enforce_sorted: bool = False,
        reset: Tensor | None = None,
        **others: NoReturn,
    ) -> tuple[Any, ...]:
        """Runs all layers over a sequence.

        Args:
            input: as for nn.LSTM: [T, B, I], [B, T, I] with `batch_first`, [T, I], or a PackedSequence.
            hx: the state (h_0, c_0) before the first step; zeros where there is none.
            lengths: int[B], the steps of each entry, from 0 to T. Later steps have no
                effect: the output is 0 there and the state stays. The reverse direction starts from each
                entry's last step.
            enforce_sorted: refuses lengths that are not in decreasing order.
            reset: bool, laid out as the input: [T, B], [B, T] with `batch_first`, or [T]. Where true, a new
                episode begins with that step, and neither direction sees what lies on the other side.

        Returns:
            (output, (h_n, c_n)) as nn.LSTM; with `return_cell`, (output, (h_n, c_n), cells). The cells are laid out as
            the output.
        """
        for name, value in others.items():
            refuse_name(name, value, LSTM.forward, LSTM.__init__)
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, hx, lengths, reset)
        weight = self._one_weight()
        if (
            not isinstance(input, Tensor)
            or not 2 <= input.ndim <= 3
            or not (input.dtype == weight.dtype or fits(input, weight))
            or input.shape[-1] != self.input_size
            or input.device != weight.device
        ):
            refuse_input(input, weight, self.input_size, is_packed=False)
        if reset is not None:
            check_reset(reset, input.shape[:-1], input.device)
        swapped = self.batch_first and input.ndim == 3
        if swapped:
            input = input.transpose(0, 1)
            reset = None if reset is None else reset.mT
        if lengths is not None:
            lengths = checked_lengths(lengths, input.shape[0], input.shape[1:-1], enforce_sorted)
            lengths = lengths.to(input.device)
        elif enforce_sorted:
            refuse(ValueError, "enforce_sorted", "is about `lengths`, and there are none", hint="`lengths=...`")
        output, state, cells = self._run(input, hx, weight, lengths, reset)
        if swapped:
            output = output.transpose(0, 1)
        if not self.return_cell:
            return output, state
        if swapped:
            cells = [c.transpose(0, 1) for c in cells]
        return output, state, self._select_cells(cells)

    def _forward_packed(
        self, packed: PackedSequence, hx: State | None, lengths: Any, reset: Tensor | None
    ) -> tuple[Any, ...]:
        """Lays the entries out side by side, runs, and packs the results again."""
        data, sizes, to_sorted, to_given = packed
        if lengths is not None:
            refuse(
                ValueError, "lengths", "are those of the PackedSequence",
                hint="`lstm(packed)`, or `lstm(padded, lengths=lengths)`",
            )  # fmt: skip
        weight = self._one_weight()
        if data.ndim != 2 or data.shape[1] != self.input_size or not fits(data, weight) or data.device != weight.device:
            refuse_input(data, weight, self.input_size, is_packed=True)
        # A traced program knows the size of a tensor, not its values.
        count = int(sizes[0]) if to_sorted is None else to_sorted.shape[0]
        if to_sorted is None and hx is not None and torch.compiler.is_compiling():
            torch._check(count == hx[0].shape[1])
        if is_readable(sizes):
            found = sizes.tolist()
            if sorted(found, reverse=True) != found or sum(found) != data.shape[0]:
                refuse(
                    RuntimeError, "input.batch_sizes", "must decrease, and add up to the rows of `input.data`",
                    ("got", str(found)), ("rows", str(data.shape[0])), hint="`torch.nn.utils.rnn.pack_sequence`",
                )  # fmt: skip
        steps = sizes.shape[0]
        # Row r of `data`, which belongs to step t, lies at row r + shift[t] of [T * B, I].
        shift = torch.arange(steps) * count - sizes.cumsum(0) + sizes
        rows = torch.arange(data.shape[0]) + shift.repeat_interleave(sizes, output_size=data.shape[0])
        entries = torch.arange(count)
        lengths = (sizes.unsqueeze(1) > entries).sum(0)
        rows, lengths = rows.to(data.device), lengths.to(data.device)
        padded = data.new_zeros(steps * count, data.shape[1]).index_copy_(0, rows, data)
        if reset is not None:
            check_reset(reset, (count, steps) if self.batch_first else (steps, count), data.device)
            reset = reset.mT if self.batch_first else reset
        if to_sorted is not None:
            reset = None if reset is None else reset.index_select(1, to_sorted)
            if hx is not None:
                self._check_state(hx, (count,), weight)
                hx = tuple(s.index_select(1, to_sorted) for s in hx)
        output, state, cells = self._run(padded.view(steps, count, data.shape[1]), hx, weight, lengths, reset)
        if to_given is not None:
            state = tuple(s.index_select(1, to_given) for s in state)
        results = (output, *cells) if self.return_cell else (output,)
        results = [PackedSequence(r.flatten(0, 1).index_select(0, rows), sizes, to_sorted, to_given) for r in results]
        return (results[0], state, self._select_cells(results[1:])) if self.return_cell else (results[0], state)

    def _select_cells(self, cells: list[Any]) -> Any:
        """Returns what `return_cell` asks for of the cells of the layers that keep them."""
        return tuple(cells) if self.return_cell == "all" else cells[0]

    def _check_state(self, hx: Any, batch: Sequence[int], weight: Tensor) -> None:
        count = len(self._roles)
        h_shape = (count, *batch, self.proj_size or self.hidden_size)
        c_shape = (count, *batch, self.hidden_size)
        if not (
            isinstance(hx, (tuple, list))
            and len(hx) == 2
            and _is_state(hx[0], h_shape, weight)
            and _is_state(hx[1], c_shape, weight)
        ):
            refuse_state(hx, weight, h_shape, c_shape)

    def _run(
        self, x: Tensor, hx: State | None, weight: Tensor, lengths: Tensor | None, reset: Tensor | None
    ) -> tuple[Tensor, State, list[Tensor]]:
        """Runs all layers over x [T, *B, I]; returns the output, the state, and the cells of layers that keep them."""
        count, batch, training = len(self._roles), x.shape[1:-1], self.training
        if hx is not None:
            self._check_state(hx, batch, weight)
        both = self.bidirectional
        seeds = None
        if training and any(self.zoneout):
            seeds = torch.randint(2**62, (count, *batch), device=x.device)
        if reset is not None and (both or self.reverse):
            # An episode's first step going forward is the last one that the reverse direction takes in it.
            backward = torch.cat([reset[1:], torch.zeros_like(reset[:1])])
            reset = torch.stack([reset, backward]) if both else backward
        h_n, c_n, cells = [], [], []
        for at in range(0, count, 2 if both else 1):
            if training:
                if at and self.dropout:
                    x = F.dropout(x, self.dropout, True)
                if self.variational_dropout[0]:
                    x = x * F.dropout(x.new_ones(*batch, x.shape[-1]), self.variational_dropout[0], True)
            of_layer = slice(at, at + 2) if both else at
            h_0, c_0 = (None, None) if hx is None else (hx[0][of_layer], hx[1][of_layer])
            found = self._run_layer(at, x, h_0, c_0, lengths, reset, None if seeds is None else seeds[of_layer])
            x = found.output
            h_n.append(found.h_n)
            c_n.append(found.c_n)
            if self._keeps_cells(at):
                cells.append(found.cells)
        join = torch.cat if both else torch.stack
        if len(h_n) > 1:
            return x, (join(h_n), join(c_n)), cells
        state = (found.h_n, found.c_n) if both else (found.h_n[None], found.c_n[None])
        return x, state, cells

    def _keeps_cells(self, at: int) -> bool:
        """Whether the layer whose first direction has the index `at` returns its cells."""
        is_last = at + (2 if self.bidirectional else 1) == len(self._roles)
        return self.return_cell == "all" or (self.return_cell and is_last)

    def _run_layer(
        self, at: int, x: Tensor, h_0: Tensor | None, c_0: Tensor | None, lengths: Tensor | None, reset: Tensor | None,
        seed: Tensor | None,
    ) -> LstmOutputs | BidirectionalOutputs:  # fmt: skip
        """Runs one layer, whose first direction has the index `at` in the state."""
        both = self.bidirectional
        weights = self._weights(at)
        if both:
            weights += self._weights(at + 1)
        h_mask = None
        if self.training:
            width = weights[1].shape[1]
            if self.weight_dropout:
                for i in range(1, len(weights), len(self._roles[at])):
                    weights[i] = F.dropout(weights[i], self.weight_dropout, True)
            if self.variational_dropout[1]:
                shape = (2, *x.shape[1:-1], width) if both else (*x.shape[1:-1], width)
                h_mask = F.dropout(x.new_ones(shape), self.variational_dropout[1], True)
        tensors = (x, h_0, c_0, *weights)
        keep_gates = 0
        if self.memory == "default" and torch.is_grad_enabled():
            for tensor in tensors:
                if tensor is not None and tensor.requires_grad:
                    keep_gates = 1
                    break
        zoneout_h, zoneout_c = self.zoneout
        options = {
            "activation": self.activation, "slope": self.slope, "coupled": self.coupled, "clip": self.clip or 0.0,
            "zoneout_h": zoneout_h, "zoneout_c": zoneout_c, "keep_cells": int(self._keeps_cells(at)),
            "keep_gates": keep_gates, "tier": self.tier,
            "fp32_precision": "tf32" if x.is_cuda and torch.backends.cudnn.allow_tf32 else "ieee",
        }  # fmt: skip
        if not both:
            return lstm(*tensors, h_mask, lengths, reset, seed, reverse=self.reverse, **options)
        run = in_two_calls if x.is_cuda else lstm_bidirectional
        return run(*tensors, h_mask, lengths, reset, seed, **options)

    def extra_repr(self) -> str:
        parts = [super().extra_repr()]
        defaults = {
            "activation": "soft", "slope": 0.125, "peephole": False, "layer_norm": False, "coupled": False,
            "clip": None, "zoneout": (0.0, 0.0), "weight_dropout": 0.0, "variational_dropout": (0.0, 0.0),
            "forget_bias": None, "return_cell": False, "reverse": False, "memory": "default",
            "tier": "auto",
        }  # fmt: skip
        for name, default in defaults.items():
            value = getattr(self, name)
            if value != default:
                parts.append(f"{name}={value!r}")
        return ", ".join(parts)


def _is_state(value: Any, shape: tuple[int, ...], weight: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and value.shape == shape
        and (value.dtype == weight.dtype or fits(value, weight))
        and value.device == weight.device
    )


def _is_more(name: str) -> bool:
    """Whether a parameter of this name is one that nn.LSTM lacks."""
    return "peephole_l" in name or "norm_" in name


def _share(source: nn.RNNBase, target: nn.RNNBase, subject: str) -> None:
    """Makes nn.LSTM's parameters of `target` those of `source`."""
    for name in target._flat_weights_names:
        if source._parameters.get(name) is None:
            refuse(
                ValueError, subject, "shares parameters, and one of them is computed from others",
                ("computed", name),
                hint=f'`torch.nn.utils.parametrize.remove_parametrizations(module, "{name}")`',
            )  # fmt: skip
        setattr(target, name, source._parameters[name])
