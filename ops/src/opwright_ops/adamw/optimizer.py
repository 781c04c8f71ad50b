"""`AdamW`: the optimizer whose step is one launch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from opwright_ops.adamw.op import adamw_, adamw_bfloat16_state_, adamw_float32_state_
from opwright_ops.refusals import refuse, shown

_STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
# Entries of the groups of torch.optim.AdamW, whose load_state_dict expects them, that can have no other value here.
_FIXED_OPTIONS = {"differentiable": False, "decoupled_weight_decay": True}
# Entries that a state_dict of torch.optim.AdamW lacks; those of the construction are kept.
_OWN = ("stochastic_rounding", "state_dtype", "seed")


class AdamW(Optimizer):
    """AdamW with the state_dict of torch.optim.AdamW and, up to rounding, its results; a step is one launch.

    There is a launch for each group of parameters, device, type, number of steps that parameters have taken, and 500
    tensors. A `state_dict` of torch.optim.AdamW can be loaded, and the other way round. It lacks options of this class,
    so `torch.distributed.checkpoint.load` needs `planner=DefaultLoadPlanner(allow_partial_load=True)` for it.

    Parameters may be distributed tensors, as those of FSDP2: each rank takes the step for its part. Frozen parameters
    may have any type.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as for torch.optim.AdamW; `lr` may be a tensor.
        capturable: numbers of steps, and a tensor `lr`, are on the device of the parameters and read there, so that
            a CUDA graph can hold the step. Counting the steps is then a launch of its own.
        stochastic_rounding: bfloat16 parameters and states are rounded up or down at random, in proportion to how near
            the two are: small updates are not lost, and float32 copies are not needed. The random bits follow from
            PyTorch's seed at construction, the number of the step and the place of the element, and are the
            same on a CPU and a GPU. Ranks that hold the same parameter need the same seed of PyTorch then.
        state_dtype: of exp_avg and exp_avg_sq, float32 or bfloat16; None is the type of each parameter.
        foreach, fused: have no effect, here and in groups of parameters, since each step is fused.

    Raises:
        ValueError: an argument is out of its range.
        TypeError: a parameter with a gradient is complex, `state_dtype` is not one of the types, `lr`, `eps` or
            `weight_decay` is not a number, or a group asks for `differentiable`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        capturable: bool = False,
        stochastic_rounding: bool = False,
        state_dtype: torch.dtype | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        if isinstance(lr, Tensor) and lr.numel() != 1:
            refuse(ValueError, "lr", "must be one number", ("got", shown(lr)), subject="AdamW")
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not isinstance(value, (Real, Tensor)):
                refuse(TypeError, name, "must be a number", ("got", shown(value)), subject="AdamW")
            if not value >= 0:
                refuse(ValueError, name, "must be at least 0", ("got", str(value)), subject="AdamW")
        if not hasattr(betas, "__len__") or len(betas) != 2:
            refuse(ValueError, "betas", "must be two numbers", ("got", str(betas)), subject="AdamW")
        for i, beta in enumerate(betas):
            if not 0 <= beta < 1:
                refuse(ValueError, f"betas[{i}]", "must be from 0 to below 1", ("got", str(beta)), subject="AdamW")
        if state_dtype not in (None, torch.float32, torch.bfloat16):
            refuse(
                TypeError,
                "state_dtype",
                "is not a type that states are kept in",
                ("got", str(state_dtype)),
                ("expected", "torch.float32, torch.bfloat16, None"),
                subject="AdamW",
            )
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "capturable": capturable,
            "stochastic_rounding": stochastic_rounding,
            "state_dtype": state_dtype,
            "seed": 0,
            "foreach": foreach,
            "fused": fused,
            **_FIXED_OPTIONS,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with options of their own, as torch.optim.Optimizer does."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["stochastic_rounding"] and not group["seed"]:
            seeds = [each["seed"] for each in self.param_groups if each["seed"]]
            group["seed"] = seeds[0] if seeds else int(torch.randint(1, 1 << 62, ()))
        try:
            _check_fixed_options(group)
            for param in group["params"]:
                if param.requires_grad:
                    _check_type(param, group)
        except TypeError:
            self.param_groups.pop()
            raise

    # What load_state_dict loads, as its hooks have left it, and the options that this optimizer had.
    _loading: tuple[Mapping[str, Any], list[dict[str, Any]]] | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                if name != "lr":
                    group.setdefault(name, value)
            group["decoupled_weight_decay"] = True  # as torch.optim.AdamW, also with a state of torch.optim.Adam
        if self._loading is not None:
            self._take_loaded(*self._loading)
            return
        for group in self.param_groups:
            for param in group["params"]:
                kept = self.state.get(param)
                if kept:
                    self.state[param] = self._place(param, kept, group)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the state of this optimizer or of torch.optim.AdamW.

        States are converted to `state_dtype`; PyTorch would convert them to the type of the parameter.

        Raises:
            ValueError: it is of other groups, or of parameters of other shapes.
        """
        own = [{name: group[name] for name in _OWN} for group in self.param_groups]

        def keep(_: Optimizer, given: Mapping[str, Any]) -> None:  # the last of the hooks
            self._check_shapes(given)
            self._loading = given, own

        handle = self.register_load_state_dict_pre_hook(keep)
        try:
            super().load_state_dict(state_dict)  # calls __setstate__
        finally:
            handle.remove()
            self._loading = None

    def _check_shapes(self, given: Mapping[str, Any]) -> None:
        for group, saved in zip(self.param_groups, given["param_groups"], strict=False):
            for param, key in zip(group["params"], saved["params"], strict=False):
                for name in _STATES:
                    state = given["state"].get(key, {}).get(name)
                    if state is not None and state.shape != param.shape:
                        rows = ("parameter", shown(param)), (name, shown(state))
                        refuse(ValueError, "state_dict", "is of a parameter of another shape", *rows, subject="AdamW")

    def _take_loaded(self, given: Mapping[str, Any], own: list[dict[str, Any]]) -> None:
        for group, saved, kept in zip(self.param_groups, given["param_groups"], own, strict=True):
            group.update({name: value for name, value in kept.items() if name not in saved})
            for param, key in zip(group["params"], saved["params"], strict=True):
                if key in given["state"]:
                    self.state[param] = self._place(param, given["state"][key], group)

    def _place(self, param: Tensor, kept: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a copy of the state of a parameter, in the types and on the devices that a step reads."""
        placed = dict(kept)
        step = torch.as_tensor(kept["step"], dtype=torch.float32)
        placed["step"] = step.to(param.device if group["capturable"] else "cpu", copy=True)
        dtype = group["state_dtype"] or param.dtype
        for name in _STATES:
            if name in kept:
                made = torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format)
                placed[name] = made.copy_(kept[name])
        return placed

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step.

        Args:
            closure: computes the loss again, with gradients, and returns it.

        Returns:
            The result of the closure.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = 0
        for group in self.param_groups:
            first = self._step_group(group, first)
        return loss

    def _step_group(self, group: dict[str, Any], first: int) -> int:
        """Takes a step with one group; `first` tensors were in launches before. Returns how many are then."""
        params = [param for param in group["params"] if param.grad is not None]
        if not params:
            return first
        for param in params:
            if param.grad.layout != torch.strided:
                refuse(
                    RuntimeError,
                    "step",
                    "does not accept sparse gradients",
                    ("parameter", shown(param)),
                    hint="`torch.optim.SparseAdam`, or dense gradients: `nn.Embedding(..., sparse=False)`",
                    subject="AdamW",
                )
        fresh = [param for param in params if not self.state[param]]
        for param in fresh:
            _check_type(param, group)  # it may have been frozen before
        for param, step in zip(fresh, _fresh_steps(fresh, group["capturable"]), strict=True):
            self.state[param] = _fresh_state(param, step, group)
        steps = [self.state[param]["step"] for param in params]
        is_compiled = torch.compiler.is_compiling()
        together = None if is_compiled else _shared_memory(steps)
        if together is None:
            torch._foreach_add_(steps, 1)
        else:
            together.add_(1)
        counts: list[float | None] = [None] * len(steps)
        if not (group["capturable"] or is_compiled):  # else the kernel reads them
            if hasattr(steps[0], "fake_mode"):  # a FakeTensor, which has no values
                counts = [1.0] * len(steps)
            else:
                counts = (torch.stack(steps) if together is None else together).tolist()
        launches: defaultdict[Any, list[Tensor]] = defaultdict(list)
        for param, count in zip(params, counts, strict=True):
            launches[param.device, param.dtype, count].append(param)
        lr, (beta1, beta2) = group["lr"], group["betas"]
        for (device, dtype, step), some in launches.items():
            is_read = group["capturable"] and isinstance(lr, Tensor)  # on the device
            take_step = _OPERATORS.get((dtype, group["state_dtype"]), adamw_)
            if any(map(_is_distributed, some)):
                # The random bits of a tensor follow from its number. Replicated parameters need the same number on all
                # ranks, so they come before sharded ones, whose parts may be empty on some ranks.
                some.sort(key=_is_sharded)
            lists = self._lists(some, group["amsgrad"])
            # Beside an empty one the reference would compute all of them.
            filled = [i for i, param in enumerate(lists[0]) if param.numel()]
            start, first = first, first + len(some)
            if not filled:
                continue
            counted = [self.state[some[i]]["step"] for i in filled] if step is None else []
            # torch.compile takes every optimizer for capturable, and leaves the steps where they are.
            if counted and counted[0].device != device:
                counted = list(torch.stack(counted).to(device).unbind())
            take_step(
                *([each[i] for i in filled] if each else [] for each in lists),
                counted,
                lr.to(device, torch.float32).reshape(()) if is_read else None,
                step=1 if step is None else int(step),
                lr=0.0 if is_read else float(lr),
                beta1=float(beta1),
                beta2=float(beta2),
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                maximize=group["maximize"],
                stochastic_rounding=group["stochastic_rounding"],
                seed=group["seed"],
                first=start,
            )
        return first

    def _lists(self, params: list[Tensor], amsgrad: bool) -> list[list[Tensor]]:
        """Returns the lists of a launch, each tensor with its axes in the order that its parameter has in memory."""
        names = _STATES if amsgrad else _STATES[:2]
        lists = [params, [param.grad for param in params], *([self.state[p][name] for p in params] for name in names)]
        if any(map(_is_distributed, params)):
            lists = [[_part_here(t, param) for t, param in zip(each, params, strict=True)] for each in lists]
        if not all(param.is_contiguous() for param in lists[0]):
            orders = [sorted(range(p.ndim), key=p.stride, reverse=True) for p in lists[0]]
            lists = [[t.permute(order) for t, order in zip(each, orders, strict=True)] for each in lists]
        return lists if amsgrad else [*lists, []]


def _check_fixed_options(group: Mapping[str, Any]) -> None:
    for name, value in _FIXED_OPTIONS.items():
        if group[name] != value:
            rows = ("got", str(group[name])), ("expected", str(value))
            hint = f"`torch.optim.AdamW`, or leave `{name}` out"
            refuse(TypeError, name, "is not supported in a group of parameters", *rows, hint=hint, subject="AdamW")


def _check_type(param: Tensor, group: Mapping[str, Any]) -> None:
    dtype = group["state_dtype"]
    if not param.is_floating_point():
        rule, hint = "must be floating-point", "torch.optim.AdamW takes complex parameters"
    elif dtype not in (None, param.dtype) and (param.dtype, dtype) not in _OPERATORS:
        rule, hint = f"cannot have states in {dtype}", "leave `state_dtype` out"
    elif group["stochastic_rounding"] and param.dtype == torch.float16:
        rule, hint = "cannot be float16 with `stochastic_rounding=True`, which rounds bfloat16", "`model.bfloat16()`"
    else:
        return
    refuse(TypeError, "params", rule, ("got", shown(param)), hint=hint, subject="AdamW")


def _is_distributed(param: Tensor) -> bool:
    return hasattr(param, "device_mesh")


def _is_sharded(param: Tensor) -> bool:
    return any(placement.is_shard() for placement in getattr(param, "placements", ()))


def _part_here(tensor: Tensor, param: Tensor) -> Tensor:
    """Returns the part of a distributed tensor on this rank, placed as its parameter is; any other as it is."""
    if not _is_distributed(param):
        return tensor
    if tensor.placements != param.placements:
        tensor = tensor.redistribute(placements=param.placements)
    return tensor.to_local()


# By the types of parameter and state, where they differ.
_OPERATORS = {
    (torch.bfloat16, torch.float32): adamw_float32_state_,
    (torch.float16, torch.float32): adamw_float32_state_,
    (torch.float32, torch.bfloat16): adamw_bfloat16_state_,
}


def _fresh_steps(params: list[Tensor], are_on_device: bool) -> list[Tensor]:
    """Returns a number of steps for each parameter, in shared memory if all are on one device."""
    devices = [param.device if are_on_device else torch.device("cpu") for param in params]
    if len(set(devices)) > 1:
        return [torch.zeros((), device=device) for device in devices]
    return list(torch.zeros(len(params), device=devices[0]).unbind()) if params else []


def _shared_memory(steps: list[Tensor]) -> Tensor | None:
    """Returns the tensor whose elements these numbers are, in this order; None if they are not all of one."""
    together = steps[0]._base
    is_shared = (
        together is not None
        and len(together) == len(steps)
        and all(step._base is together and step.storage_offset() == i for i, step in enumerate(steps))
    )
    return together if is_shared else None


def _fresh_state(param: Tensor, step: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    dtype = group["state_dtype"] or param.dtype
    state: dict[str, Any] = {"step": step}
    for name in _STATES if group["amsgrad"] else _STATES[:2]:
        state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    return state
