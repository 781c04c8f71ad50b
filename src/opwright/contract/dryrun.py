"""The reference, run at the declaration on tensors of a few elements.

It finds what would otherwise surface in a user's program: a result that breaks the contract, random
numbers, sizes that depend on the data, writes into arguments that are not declared. It costs well under
a millisecond; on device "meta" the same run would import torch._dynamo, which takes a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from opwright import _torch
from opwright._torch import DispatchMode
from opwright.contract.axes import Computed, Named, Variadic, names_in
from opwright.contract.contract import MISSING, Contract, Output, TensorType
from opwright.contract.declaration import Declaration
from opwright.contract.dtypes import describe
from opwright.errors import (
    DataDependentShapeError,
    RandomnessError,
    ReferenceError,
    ShapeError,
    UndeclaredMutationError,
)

# Different sizes for the first axes; few elements however many there are.
_SIZES = (3, 5, 7, 11, 2, 2, *(1,) * 64)
# The size of all axes, and sizes for one of them alone: twice as large, half as large, and in no simple ratio.
_ALIKE, _OTHERS = 6, (12, 3, 7)
# The axes that a variadic one stands for, and others for one of them alone: those that broadcast, that have as many
# elements, as many axes, and that are in no relation.
_BATCH = (2, 3)
_OTHER_BATCHES = ((), (1,), (3,), (1, 1), (1, 3), (2, 1), (4, 2, 3), (6,), (3, 2), (2, 2), (3, 3), (4, 6), (5, 7))
_DATA_TAGS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class _Watch(DispatchMode):
    """Sees every PyTorch operator that the reference calls.

    Attributes:
        data_operator: one whose result's size depends on data.
        may_draw: whether one draws random numbers, or would if it were given another probability or were training.
    """

    def __init__(self, declaration: Declaration, inputs: dict[str, list[torch.Tensor]]) -> None:
        super().__init__()
        self.declaration = declaration
        self.mutable = {p.name for p in declaration.contract.mutated}
        self.inputs = {_torch.address_of(t.untyped_storage()): name for name, ts in inputs.items() for t in ts}
        self.data_operator: str | None = None
        self.may_draw = False

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not self.declaration.random:
            self.may_draw = True
            if _draws(func, args, kwargs):
                raise RandomnessError(
                    self.declaration.name,
                    f"the reference draws random numbers with `{func}`",
                    hint=f'`@operator("{self.declaration.qualified_name}", random=True)`',
                )
        if any(tag in func.tags for tag in _DATA_TAGS):
            self.data_operator = str(func)
        for argument, value in zip(_torch.schema_of(func).arguments, args, strict=False):
            self._check_write(argument, value, func)
        for argument in _torch.schema_of(func).arguments:
            if argument.name in kwargs:
                self._check_write(argument, kwargs[argument.name], func)
        return func(*args, **kwargs)

    def _check_write(self, argument: Any, value: Any, func: Any) -> None:
        if argument.alias_info is None or not argument.alias_info.is_write:
            return
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if not isinstance(tensor, torch.Tensor):
                continue
            name = self.inputs.get(_torch.address_of(tensor.untyped_storage()))
            if name is not None and name not in self.mutable:
                parameter = next(p for p in self.declaration.contract.parameters if p.name == name)
                raise UndeclaredMutationError(
                    self.declaration.name,
                    f"the reference writes into `{name}` with `{func}`",
                    hint=f"`{name}: Mutates[{parameter.type}]`, or write into `{name}.clone()`",
                )


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether an operator that may draw random numbers does: attention without dropout does not."""
    schema = _torch.schema_of(func).arguments
    given = {a.name: a.default_value for a in schema} | dict(zip((a.name for a in schema), args, strict=False)) | kwargs
    is_training = all(given.get(name) is not False for name in ("train", "training"))
    chances = ("dropout_p", "dropout", *(("p",) if "train" in given else ()))  # the last of dropout itself
    return is_training and all(given.get(name) != 0 for name in chances)


@contextlib.contextmanager
def _single_threaded() -> Iterator[None]:
    """Keeps PyTorch's parallel loops in the calling thread, so that no OpenMP thread pool is started.

    Such a pool does not survive a fork: a child would wait for its threads at the first parallel loop.
    """
    torch.get_num_threads()  # the first time, PyTorch sets the number itself
    openmp = ctypes.CDLL(None)
    if not hasattr(openmp, "omp_set_num_threads"):
        yield
        return
    count = openmp.omp_get_max_threads()
    openmp.omp_set_num_threads(1)  # of this thread: others keep theirs
    try:
        yield
    finally:
        openmp.omp_set_num_threads(count)


@_single_threaded()
def dry_run(declaration: Declaration) -> None:
    """Runs the reference on small tensors and compares the result with the contract.

    A reference that does not run at these sizes or on this data is left to `opwright verify`.

    Raises:
        DeclarationError: the subclass for what was found.
    """
    for seed in (0, 1):
        values = small_arguments(declaration.contract, torch.Generator().manual_seed(seed))
        if values is None:
            return
        with torch.no_grad(), torch.random.fork_rng(devices=[], enabled=declaration.random):
            result, watch = _run(declaration, values)
        if watch.may_draw:  # an option may be the probability: with another value it is seen to draw
            with torch.no_grad():
                _run(declaration, values | _other_options(declaration.contract, values))
        if seed == 0:
            (_check_axes if result is None else _check_variadic_axes)(declaration)
        if result is None or declaration.contract.data_dependent:
            return
        try:
            _check_result(declaration, values, result[0])
        except ReferenceError:
            if watch.data_operator is None:
                raise
            raise _data_dependent(declaration, watch.data_operator) from None
        if watch.data_operator is None:
            return  # no operator whose result's size depends on data: once is enough


def _check_axes(declaration: Declaration) -> None:
    """Raises ReferenceError for names of axes whose sizes the reference takes only where they are equal."""
    names = _axis_names(declaration.contract)

    def refusal_of(sizes: dict[str, int]) -> str:
        return _refusal_of(declaration, dict.fromkeys(names, _ALIKE) | sizes)

    if refusal_of({}):
        return
    tied = [name for name in names if all(refusal_of({name: size}) for size in _OTHERS)]
    for count in range(2, len(tied) + 1):
        for group in itertools.combinations(tied, count):
            if not any(refusal_of(dict.fromkeys(group, size)) for size in _OTHERS):
                sizes = dict.fromkeys(group, _ALIKE) | {group[0]: _OTHERS[0]}
                raise _only_equal(declaration, sizes, refusal_of(sizes))


def _check_variadic_axes(declaration: Declaration) -> None:
    """Raises ReferenceError for names of variadic axes that the reference takes only where they are equal.

    It takes one alone, with other sizes, if it broadcasts it.
    """
    axes = [axis for parameter in declaration.contract.tensors for axis in parameter.type.axes]
    names = list(dict.fromkeys(f"*{axis.name}" for axis in axes if isinstance(axis, Variadic) and axis.name))
    if len(names) < 2:
        return

    def refusal_of(batches: dict[str, tuple[int, ...]]) -> str:
        return _refusal_of(declaration, None, dict.fromkeys(names, _BATCH) | batches)

    if refusal_of({}):
        return
    tied = [name for name in names if all(refusal_of({name: batch}) for batch in _OTHER_BATCHES)]
    for count in range(2, len(tied) + 1):
        for group in itertools.combinations(tied, count):
            if not all(refusal_of(dict.fromkeys(group, batch)) for batch in _OTHER_BATCHES):
                batches = dict.fromkeys(group, _BATCH) | {group[0]: _OTHER_BATCHES[-1]}
                raise _only_equal(declaration, batches, refusal_of(batches))


def _refusal_of(
    declaration: Declaration, sizes: dict[str, int] | None, batches: dict[str, tuple[int, ...]] | None = None
) -> str:
    """Returns what the reference says to tensors with axes of these sizes; "" if it takes them."""
    values = small_arguments(declaration.contract, torch.Generator().manual_seed(0), sizes, batches)
    if values is None:
        return "sizes that are not its own"
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[], enabled=declaration.random):
            _call_reference(declaration, values)
    except Exception as error:  # whatever a reference may raise
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ""


def _call_reference(declaration: Declaration, values: Mapping[str, Any]) -> Any:
    args, kwargs = declaration.contract.split_arguments([values[p.name] for p in declaration.contract.parameters])
    return declaration.reference(*args, **kwargs)


def _only_equal(declaration: Declaration, tried: Mapping[str, Any], refusal: str) -> ReferenceError:
    *names, last = tried
    listed = " and ".join([", ".join(f"`{name}`" for name in names), f"`{last}`"])
    return ReferenceError(
        declaration.name,
        f"the reference takes {listed} only where they are equal",
        rows=[
            ("tried", ", ".join(f"{name} = {size}" for name, size in tried.items())),
            ("it says", refusal),
        ],
        hint=f"if they are one axis, write `{names[0]}` everywhere; if one broadcasts, expand it before the call",
    )


def _hint_on_output(declaration: Declaration, output: Output, got: Any, shape: tuple[int, ...]) -> str:
    if declaration.forward is None:
        return f"change the annotation `{output.type}` or the reference"
    name = output.name.removeprefix("grad_")
    if isinstance(got, torch.Tensor) and tuple(got.shape) != shape:
        given = f"{name}.shape" if name in [p.name for p in declaration.contract.tensors] else str(shape)
        return f"it has the shape of `{name}`: `.sum_to_size({given})` sums over what was broadcast"
    return f"a gradient has the shape and dtype of its input, `{name}`"


def _data_dependent(declaration: Declaration, data_operator: str) -> DataDependentShapeError:
    output = declaration.contract.outputs[0]
    return DataDependentShapeError(
        declaration.name,
        f"the size of the result depends on data, through `{data_operator}`",
        hint=f'`@operator("{declaration.qualified_name}", data_dependent=["k"])`, and '
        f'`-> {output.type.family}[Tensor, "k ..."]` with a new name for the axis that varies',
    )


def _run(declaration: Declaration, values: dict[str, Any]) -> tuple[tuple[Any] | None, _Watch]:
    inputs = {
        name: [t for t in (v if isinstance(v, list) else [v]) if isinstance(t, torch.Tensor)]
        for name, v in values.items()
    }
    watch = _Watch(declaration, inputs)
    try:
        with watch:
            return (_call_reference(declaration, values),), watch
    except (RandomnessError, UndeclaredMutationError):
        raise
    except Exception:  # whatever a reference may raise at sizes or on tensors that are not its own
        return None, watch


def _other_options(contract: Contract, values: dict[str, Any]) -> dict[str, Any]:
    """Returns other values of flags, and of numbers that are 0."""
    flags = {p.name: not values[p.name] for p in contract.parameters if p.kind == "bool"}
    return flags | {p.name: values[p.name] or 0.5 for p in contract.parameters if p.kind == "float"}


def _check_result(declaration: Declaration, values: dict[str, Any], result: Any) -> None:
    contract, name = declaration.contract, declaration.name
    try:
        bindings = contract.bind(values)
    except ShapeError:  # an output of a negative size, such as `t-k`: these sizes are not its own
        return
    outputs = list(result) if isinstance(result, (tuple, list)) else [] if result is None else [result]
    if len(outputs) != len(contract.outputs):
        got = "nothing" if result is None else "1 value" if len(outputs) == 1 else f"{len(outputs)} values"
        order = ", ".join(output.name for output in contract.outputs)
        raise ReferenceError(
            name,
            f"the reference does not return {'its gradients' if declaration.forward else 'what its annotation says'}",
            rows=[
                ("got", got),
                ("expected", f"{len(contract.outputs)}: " + ", ".join(str(o.type) for o in contract.outputs)),
            ],
            hint="write the computation in PyTorch and return it"
            if result is None
            else f"`return {order}`" + ("; options have no gradients" if declaration.forward else ""),
        )
    for output, got in zip(contract.outputs, outputs, strict=True):
        if got is None and output.gradient_of:
            continue
        shape, dtype = contract.output_shape(output, bindings), contract.output_dtype(output, bindings)
        if not isinstance(got, torch.Tensor) or tuple(got.shape) != shape or got.dtype != dtype:
            expected = describe(torch.empty(shape, dtype=dtype))
            bound = ", ".join(f"{k} = {v}" for k, v in bindings.sizes.items())
            raise ReferenceError(
                name,
                f"the reference's `{output.name}` "
                + ("has another shape or dtype than its input" if declaration.forward else "breaks its annotation"),
                rows=[
                    *((p.name, describe(values[p.name])) for p in contract.tensors),
                    (output.name, describe(got)),
                    ("expected", expected, bound),
                ],
                hint=_hint_on_output(declaration, output, got, shape),
            )


def _axis_names(contract: Contract) -> list[str]:
    """Returns the names of axes whose sizes no argument gives."""
    named = names_in(axis for parameter in contract.tensors for axis in parameter.type.axes)
    given = {parameter.name for parameter in contract.parameters if parameter.kind == "int"}
    return [name for name in named if name not in given]


def small_arguments(
    contract: Contract,
    generator: torch.Generator,
    chosen: dict[str, int] | None = None,
    batches: dict[str, tuple[int, ...]] | None = None,
) -> dict[str, Any] | None:
    """Returns small arguments that satisfy the contract; None if none do.

    Args:
        chosen: the size of each axis; by default they differ.
        batches: the sizes of variadic axes, by names such as `*batch`; by default they are equal.
    """
    sizes: dict[str, int] = {}
    values: dict[str, Any] = {}
    for parameter in contract.parameters:
        default = parameter.default
        match parameter.kind:
            case "int":
                values[parameter.name] = sizes[parameter.name] = 1 if default is MISSING else default
            case "float":
                values[parameter.name] = 0.5 if default is MISSING else default
            case "bool":
                values[parameter.name] = False if default is MISSING else default
            case "choice":
                values[parameter.name] = parameter.choices[0] if default is MISSING else default
    sizes |= dict(zip(_axis_names(contract), _SIZES)) if chosen is None else chosen
    for parameter in contract.tensors:
        shape = _shape(parameter.type, sizes, batches or {})
        if shape is None:
            return None
        dtype = parameter.type.family.dtypes[0]
        made = [_tensor(shape, dtype, generator) for _ in range(2)]
        values[parameter.name] = made if parameter.kind == "tensors" else made[0]
    return values


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    return (
        noise > 0 if dtype == torch.bool else noise.abs_().to(dtype) if not dtype.is_floating_point else noise.to(dtype)
    )


def _shape(type_: TensorType, sizes: dict[str, int], batches: dict[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    shape: list[int] = []
    for axis in type_.axes:
        match axis:
            case Variadic():
                shape += batches.get(str(axis), _BATCH)
            case Named(name):
                shape.append(sizes[name])
            case Computed():
                shape.append(axis.evaluate(sizes))
            case _:
                shape.append(getattr(axis, "size", 4))
    return tuple(shape) if all(size >= 0 for size in shape) else None
