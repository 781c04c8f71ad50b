"""How checks find, copy and compare the tensors among arguments and results."""

from __future__ import annotations

from typing import Any

import torch

from opwright._torch import tree_map
from opwright.contract.memory import overlaps_itself


def tensors_of(values: Any) -> list[torch.Tensor]:
    """Returns the tensors among these values, those in lists and dictionaries included."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_of(value)
        elif isinstance(value, dict):
            found += tensors_of(value.values())
    return found


def count_elements(values: Any) -> int:
    """Returns how many elements the tensors among these values have together."""
    return sum(t.numel() for t in tensors_of(values))


def is_sorted(tensor: torch.Tensor) -> bool:
    """Returns whether the numbers of each row rise, three of them or more."""
    return tensor.ndim > 0 and tensor.shape[-1] > 2 and bool((tensor[..., 1:] >= tensor[..., :-1]).all())


def has_double(values: Any) -> bool:
    """Returns whether a tensor among values is float64."""
    return any(tensor.dtype == torch.float64 for tensor in tensors_of(values))


def copy_of(value: Any, device: torch.device | None = None) -> Any:
    """Returns a copy, its tensors on `device`, else where they are; strides and offset are kept.

    The copy owns a whole storage of its own, so what is misaligned or expanded stays so.
    """
    if isinstance(value, torch.Tensor):
        data = storage_bytes(value.detach())
        data = data.clone() if device is None else data.to(device, copy=True)
        empty = torch.empty(0, dtype=value.dtype, device=data.device)
        return empty.set_(data.untyped_storage(), value.storage_offset(), value.shape, value.stride())
    if isinstance(value, torch.Generator):  # each call begins with the same numbers
        return value.clone_state()
    if isinstance(value, (list, tuple)):
        return type(value)(copy_of(v, device) for v in value)
    return {k: copy_of(v, device) for k, v in value.items()} if isinstance(value, dict) else value


def fill_from(values: Any, sources: Any) -> None:
    """Copies numbers into tensors of the same shapes; what shares memory with itself stays."""
    for into, source in zip(tensors_of(values), tensors_of(sources), strict=True):
        if not overlaps_itself(into):
            into.copy_(source)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole storage behind a tensor, as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors are equal bit for bit, wherever they are."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits_of(a).to(b.device), bits_of(b))


def are_same(a: Any, b: Any) -> bool:
    """Returns whether the tensors among two lists of values are equal bit for bit."""
    return all(is_same(x, y) for x, y in zip(tensors_of(a), tensors_of(b), strict=True))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().contiguous()
    if not tensor.is_floating_point():
        return tensor
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def poison_memory_for(values: Any) -> None:
    """Fills the memory that the next allocations of the sizes of these tensors get with NaN.

    Results mostly have the size of one of the arguments, and PyTorch's allocator of GPU memory hands a block
    that it gets back to whoever asks for that size next. An element that a kernel leaves unwritten is then
    wrong, and not what an earlier call has left there. The allocator of the CPU does so mostly; `out=` is certain.
    """
    blocks = []
    for tensor in tensors_of(values):
        size = tensor.numel() * tensor.element_size()
        # All bits set is NaN in every floating-point type.
        blocks += [torch.full((size,), 255, dtype=torch.uint8, device=tensor.device) for _ in range(2)]
    del blocks


_GUARD_BYTES = 1024  # before and behind; a multiple of every alignment that an allocator keeps


class Bands:
    """Memory on both sides of tensors, in which a write is seen, and a read in the result."""

    def __init__(self) -> None:
        self.found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def are_intact(self) -> bool:
        """Returns whether nothing has been written there."""
        return all(torch.equal(now, before) for now, before in self.found)

    def fill(self, with_zeros: bool) -> None:
        """Makes the bands zero, or what they were at first."""
        for now, before in self.found:
            now.zero_() if with_zeros else now.copy_(before)


def place_between_guards(value: Any, device: torch.device | None = None) -> tuple[Any, Bands]:
    """Returns a copy as `copy_of` makes it, between guard bands of NaN, and the bands."""
    bands = Bands()

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        plain = copy_of(value, device)
        data = storage_bytes(plain)
        fill = 1 if value.dtype == torch.bool else 255
        buffer = torch.full((data.numel() + 2 * _GUARD_BYTES,), fill, dtype=torch.uint8, device=data.device)
        buffer[_GUARD_BYTES : _GUARD_BYTES + data.numel()] = data
        bands.found.extend((b, b.clone()) for b in (buffer[:_GUARD_BYTES], buffer[-_GUARD_BYTES:]))
        offset = plain.storage_offset() + _GUARD_BYTES // value.element_size()
        empty = torch.empty(0, dtype=value.dtype, device=data.device)
        return empty.set_(buffer.untyped_storage(), offset, value.shape, value.stride())

    return tree_map(place, value), bands


def two_alike(values: Any) -> tuple[int, int] | None:
    """Returns the positions of two floating-point tensors of one shape, if there are any."""
    found = [(i, v) for i, v in enumerate(values) if isinstance(v, torch.Tensor) and v.is_floating_point()]
    pairs = ((i, j) for n, (i, a) in enumerate(found) for j, b in found[n + 1 :] if a.shape == b.shape)
    return next(pairs, None)


def shares_memory(a: Any, b: Any) -> bool:
    """Returns whether a tensor among one list of values has its storage in common with one of another."""
    return bool(_storages(a) & _storages(b))


def _storages(values: Any) -> set[int]:
    found = (t.untyped_storage() for t in tensors_of(values) if t.layout == torch.strided)
    return {storage.data_ptr() for storage in found if storage.nbytes()}
