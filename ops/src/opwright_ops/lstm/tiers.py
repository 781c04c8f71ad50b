"""How a GPU takes the steps of an `lstm`."""

from __future__ import annotations

from typing import Literal

import torch

from opwright_ops.lstm.refusals import refuse

# As in gpu_tiers.cuh, which decides; tests/gpu hold the two against each other.
_BEST_CLUSTER, _WIDEST_CLUSTER, _WIDEST, _WIDEST_TF32 = 512, 1024, 4096, 6144  # bytes of h of one entry
_MAX_ENTRIES = 64  # of a batch, for one group of blocks that holds all weights
_BEST_SLICES = 2  # of 8 entries, of a cluster whose h has _BEST_CLUSTER bytes
_BESIDE_CLUSTERS = 12  # multiprocessors that clusters of more than 2 blocks leave over
_MOST_UNITS_SINGLE, _MOST_SINGLE = 64, 4  # where each entry has a block of its own; of those for a multiprocessor


def lstm_tier(
    hidden_size: int,
    batch_size: int,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    *,
    layer_norm: bool = False,
    fp32_precision: Literal["ieee", "tf32"] = "ieee",
) -> Literal["cluster", "grid", "step"]:
    """Returns how `lstm(..., tier="auto")` takes the steps on a GPU.

    "cluster" and "grid": all of them in one launch, whose blocks keep the weights on the chip; a cluster of blocks has
    all of them, and eight entries or more of the batch (up to 64 units one block, and one entry), or all blocks have
    them together. "step": each with one matrix
    product and one kernel. The steps are taken one by one all the same where other work keeps some of the GPU's
    multiprocessors (MPS with a share of the threads) and this says "grid", and where `h_mask`, `zoneout_h` or layer
    normalisation come together with a projection, and where there are no more than two.

    Args:
        hidden_size: H, the units of a direction of a layer.
        batch_size: entries that the steps are taken of together.
        dtype: of the weights.
        device: a CUDA device; the current one where none is given.
        layer_norm: whether the layer is normalised.
        fp32_precision: that of `lstm`.

    Raises:
        RuntimeError: there is no such CUDA device.
    """
    where = torch.device("cuda" if device is None else device)
    if where.type != "cuda" or not torch.cuda.is_available():
        refuse(
            RuntimeError, "device", "must be a CUDA device that is there",
            ("got", str(where)), ("there are", str(torch.cuda.device_count())), subject="lstm_tier",
        )  # fmt: skip
    gpu = torch.cuda.get_device_properties(where)
    size = dtype.itemsize
    is_exact = dtype == torch.float32 and fp32_precision == "ieee"
    if gpu.major < 9 or size > 4 or batch_size < 1:
        return "step"
    is_single = hidden_size <= _MOST_UNITS_SINGLE and batch_size <= _MOST_SINGLE * gpu.multi_processor_count
    if is_single and not layer_norm:
        return "cluster"
    if hidden_size < 1:
        return "step"
    units = 16 if is_exact else 32  # of a block of a cluster
    clusters = _clusters_within(gpu.multi_processor_count, -(-hidden_size // units))
    max_bytes = _WIDEST_CLUSTER if layer_norm else _BEST_CLUSTER
    is_near = not (is_exact and layer_norm) and hidden_size * size <= max_bytes and clusters > 0
    if layer_norm:
        return "cluster" if is_near else "step"
    has_half = size == 4 and not is_exact and hidden_size * size > _WIDEST
    units = 16 if size == 2 else 12 if has_half else 8
    blocks = 2 * -(-hidden_size // (2 * units))
    groups = gpu.multi_processor_count // blocks  # that run at once
    max_bytes = _WIDEST_TF32 if has_half else _WIDEST
    fits = hidden_size * size <= max_bytes and batch_size <= groups * _MAX_ENTRIES
    is_widest = hidden_size * size == _BEST_CLUSTER and (size == 2 or is_exact)
    is_crowded = is_widest and batch_size > 8 * _BEST_SLICES * clusters
    if is_near and not (is_crowded and fits):
        return "cluster"
    return "grid" if fits else "step"


def _clusters_within(multiprocessors: int, blocks: int) -> int:
    """Returns how many clusters of so many blocks a GPU runs at once, as `clusters_within` of launch.cuh does."""
    if blocks <= 2:
        return multiprocessors // blocks
    in_gpcs = multiprocessors // 16 * (16 // blocks)
    return min(in_gpcs, max((multiprocessors - _BESIDE_CLUSTERS) // blocks, 1))
