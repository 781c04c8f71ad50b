"""PyTorch's private names, all of them that Opwright uses: what a new version of PyTorch may take away stands here.

They have names without an underscore here. Those whose module takes long to import are imported when they are first
asked for. Checked with PyTorch 2.11 to 2.14; no name differs between these.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import _C
from torch._C import DispatchKey, DispatchKeySet
from torch._C import _functorch as functorch
from torch._C._dynamo import eval_frame as _eval_frame
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd import forward_ad
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_iter,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

__all__ = [
    "DispatchKey",
    "DispatchKeySet",
    "OpOverload",
    "OpOverloadPacket",
    "TreeSpec",
    "functorch",
    "keystr",
    "return_and_correct_aliasing",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_iter",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]


class DispatchMode(TorchDispatchMode):
    """Computes the operators of PyTorch that are called while it is active."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first call imports torch._dynamo, a second, and every operator runs through its wrapper

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.compute(func, args, kwargs or {})

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result of an operator; this mode is not active meanwhile."""
        raise NotImplementedError


# --- what is active ------------------------------------------------------------------------------------

count_dispatch_modes = _C._len_torch_dispatch_stack
count_function_modes = _C._len_torch_function_stack
are_transforms_active = _C._are_functorch_transforms_active
is_any_autocast_enabled = _C._is_any_autocast_enabled
set_forward_grad_enabled = forward_ad._set_fwd_grad_enabled
# For generated functions, which have `torch.autograd.forward_ad` under this name: a test that costs no call.
FORWARD_MODE_TEST = "_forward_ad._current_level >= 0"
pause_dispatch_mode = _python_dispatch._pop_mode_temporarily
disable_dispatch_modes = _python_dispatch._disable_current_modes
current_dispatch_mode = _python_dispatch._get_current_dispatch_mode
set_grad_enabled = _C._set_grad_enabled


def find_flag(getter: str, setter: str) -> tuple[Any, Any] | None:
    """Returns the functions that read and write a setting; None where this PyTorch has not both."""
    read, write = getattr(_C, f"_get_{getter}", None), getattr(_C, f"_set_{setter}", None)
    return None if read is None or write is None else (read, write)


tracing_state = _C._get_tracing_state  # of torch.jit.trace


def is_forward_mode() -> bool:
    """Returns whether forward-mode derivatives are being computed."""
    return forward_ad._current_level >= 0


def has_tangent(tensor: torch.Tensor) -> bool:
    """Returns whether forward-mode derivatives are being computed of a tensor.

    Functions that Dynamo has compiled take derivatives at the level 0 and do not tell `forward_ad` so.
    """
    return (is_forward_mode() or are_transforms_active()) and torch._VF._unpack_dual(tensor, level=0)[1] is not None


def unwrap_dead(tensors: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Returns tensors without the wrappers of transforms that have ended, which say that they need a gradient."""
    return tuple(t if t is None else _C._functorch.unwrap_if_dead(t) for t in tensors)


# --- the dispatcher --------------------------------------------------------------------------------------

without_keys = _C._ExcludeDispatchKeyGuard
below_autograd = _C._AutoDispatchBelowAutograd
below_inplace_or_view = _C._AutoDispatchBelowADInplaceOrView
is_key_included = _C._dispatch_tls_is_dispatch_key_included  # by this thread
PYTHON_DISPATCHER = DispatchKey.PythonDispatcher
KEYS_AFTER_AUTOGRAD = _C._after_autograd_keyset
KEYS_AFTER_INPLACE_OR_VIEW = _C._after_ADInplaceOrView_keyset
has_kernel = _C._dispatch_has_kernel
all_schemas = _C._jit_get_all_schemas
schemas_of = _C._jit_get_schemas_for_operator
destroy_library = torch.library.Library._destroy
direct_entry = attrgetter("_op")  # of `torch.ops.ns.name` and its overloads: what their `__call__` calls
schema_of = attrgetter("_schema")  # of an overload
overload_name_of = attrgetter("_overloadname")
OPERATOR_MODULE = OpOverload.__module__


def forget_choices(overload: OpOverload) -> None:
    """Forgets which kernel PyTorch's dispatcher in Python has chosen for each key."""
    overload._dispatch_cache.clear()


def can_decompose(overload: OpOverload) -> bool:
    """Returns whether an overload is a composition of others."""
    return overload._can_decompose()


def replace_direct_entry(target: Any, function: Any) -> None:
    """Makes an entry of `torch.ops` call a function from now on."""
    target._op = function


def key_set(*names: str) -> DispatchKeySet:
    """Returns a set of the dispatcher's keys."""
    found = DispatchKeySet(getattr(DispatchKey, names[0]))
    for name in names[1:]:
        found = found | DispatchKeySet(getattr(DispatchKey, name))
    return found


def number_of_key(name: str) -> int:
    """Returns a key of the dispatcher as a set's number has it; 0 where this PyTorch has no such key."""
    key = _C._parse_dispatch_key(name)
    return 0 if key is None else DispatchKeySet(key).raw_repr()


def has_key(name: str) -> bool:
    """Returns whether the dispatcher has a key."""
    return hasattr(DispatchKey, name)


# --- tensors ---------------------------------------------------------------------------------------------

address_of = attrgetter("_cdata")  # of the C++ object behind a tensor or a storage
version_of = attrgetter("_version")
is_view = torch.Tensor._is_view
assume = torch._check
negated = torch._neg_view  # the same memory, under the dispatcher's key for negation
is_zero_tensor = torch.Tensor._is_zerotensor
make_wrapper = torch.Tensor._make_wrapper_subclass
no_torch_function = _C._disabled_torch_function_impl
# Where bindings of PyTorch's operators are that read their arguments in half of the time that `torch.ops` takes.
BINDINGS = (_C._VariableFunctions, _C.TensorBase)


handle_of = attrgetter("_handle")  # of a library that ctypes has opened


def find_extension() -> str:
    """Returns the path of the library through which all of PyTorch's functions are found."""
    return _C.__file__


def keys_of(tensor: torch.Tensor) -> int:
    """Returns the dispatcher's keys of a tensor as the number that its implementation holds."""
    return _C._dispatch_keys(tensor).raw_repr()


def is_free_of_siblings(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor may be written into: it is not one of several views made at once."""
    return not tensor._is_view() or _C._autograd._get_creation_meta(tensor) == _C._autograd.CreationMeta.DEFAULT


add_batch_dim = functorch._add_batch_dim
unwrap_batched = functorch._unwrap_batched

# --- autograd's nodes ------------------------------------------------------------------------------------

SingleLevelFunction = torch.autograd.function._SingleLevelFunction
compiled_autograd_key = torch.autograd.Function._compiled_autograd_key
# In the text of generated classes: the attribute that compiled autograd reads, and that of a context without which
# zeros are made for outputs that are not differentiable.
COMPILED_AUTOGRAD_KEY = "_compiled_autograd_key"
MATERIALIZE_CONSTANT_GRADIENTS = "_materialize_non_diff_grads"

# --- what takes long to import ---------------------------------------------------------------------------

_LATE = {
    "decomposition_table": "torch._decomp",
    "get_decompositions": "torch._decomp",
    "FakeTensor": "torch._subclasses.fake_tensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor",
    "enable_single_level_autograd_function": "torch._functorch.utils",
    "retrieve_current_functorch_interpreter": "torch._functorch.pyfunctorch",
}


def __getattr__(name: str) -> Any:
    home = _LATE.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(home), name)
    return found


def is_dynamo_imported() -> bool:
    """Returns whether this process has imported torch._dynamo."""
    return "torch._dynamo" in sys.modules


def import_dynamo() -> None:
    """Imports torch._dynamo, which takes a second."""
    importlib.import_module("torch._dynamo")


def hide_frames(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps torch.compile from compiling a function, and all that it calls, when it runs between two graphs.

    Tracing passes through the function as before. It is returned.
    """
    skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))
    return function


def is_of_compiler(error: Exception) -> bool:
    """Returns whether the error is torch.compile's own, and was not raised by the code that it compiles."""
    return type(error).__module__ == "torch._dynamo.exc"


def import_optests() -> ModuleType:
    """Imports what opcheck does, and returns it; the flags of torch.backends can be set as before.

    PyTorch's own tests import it, and must not set them: it forbids that for the rest of the process.
    """
    is_allowed = not torch.backends.flags_frozen()
    optests = importlib.import_module("torch.testing._internal.optests")
    # Not as an attribute: what `torch.backends` is now was put in the place of the module that reads it.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = is_allowed
    return optests


@contextlib.contextmanager
def hide_graph_breaks() -> Iterator[None]:
    """Keeps torch.compile from logging graph breaks."""
    logger = logging.getLogger("torch._dynamo")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def leave_out_jacobians() -> Iterator[None]:
    """Keeps `gradcheck(fast_mode=True)` from computing whole Jacobians for the text of its error.

    That would take minutes.
    """
    module = sys.modules["torch.autograd.gradcheck"]
    compute = module._run_slow_mode_and_get_error
    module._run_slow_mode_and_get_error = lambda *args, **options: ""
    try:
        yield
    finally:
        module._run_slow_mode_and_get_error = compute


def reset_dynamo() -> None:
    """Forgets all that torch.compile has compiled."""
    import_dynamo()
    sys.modules["torch._dynamo"].reset()


def is_inductor_imported() -> bool:
    """Returns whether this process has compiled with torch.compile."""
    return "torch._inductor.compile_fx" in sys.modules


def compile_in_this_thread() -> None:
    """Keeps torch.compile from starting workers."""
    if "torch._inductor.config" in sys.modules:
        sys.modules["torch._inductor.config"].compile_threads = 1


# --- GPUs ------------------------------------------------------------------------------------------------


def keep_gpu_busy(cycles: int) -> None:
    """Lets the current stream wait for so many cycles of its GPU."""
    torch.cuda._sleep(cycles)


# --- distributed tensors ---------------------------------------------------------------------------------


def find_distributed() -> SimpleNamespace:
    """Returns the names of torch.distributed.tensor that are used. The import takes a second.

    Raises:
        ImportError, AttributeError, RuntimeError: this PyTorch lacks one of them.
    """
    from torch._prims_common import make_contiguous_strides_for
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import OpSchema
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    class Pair(DeviceMesh):
        """Two ranks of no process group: placements can be followed on it, wherever this process is."""

        def __init__(self) -> None:
            super().__init__("cpu", torch.arange(2), _init_backend=False, _rank=0)

        def get_coordinate(self) -> list[int]:
            return [0]

        def _is_current_rank_part_of_mesh(self) -> bool:
            return True

    def all_reduce_now(tensor: torch.Tensor, how: str, group: Any) -> torch.Tensor:
        reduced = all_reduce(tensor, how, group)
        return reduced.wait() if isinstance(reduced, AsyncCollectiveTensor) else reduced

    dispatcher = DTensor._op_dispatcher
    return SimpleNamespace(
        Pair=Pair,
        DTensor=DTensor,
        Partial=Partial,
        Replicate=Replicate,
        Shard=Shard,
        Spec=DTensorSpec,
        TensorMeta=TensorMeta,
        OpSchema=OpSchema,
        handlers=dispatcher._custom_op_handlers,
        all_reduce=all_reduce_now,
        takes_plain=lambda: dispatcher._allow_implicit_replication,
        propagator=dispatcher.sharding_propagator,
        redistribute=redistribute_local_tensor,
        strides_of=make_contiguous_strides_for,
    )


def find_simulation() -> SimpleNamespace:
    """Returns what runs several ranks in one process, and PyTorch's validator of placements.

    Raises:
        ImportError: this PyTorch has not both.
    """
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor._ops.strategy_validation import validate_aten_combination

    return SimpleNamespace(
        LocalTensorMode=LocalTensorMode,
        init_device_mesh=init_device_mesh,
        validate_aten_combination=validate_aten_combination,
    )
