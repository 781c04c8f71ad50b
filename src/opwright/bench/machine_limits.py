"""What a machine can do at best: measured once, kept in the store, measured again when asked."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import asdict, replace
from pathlib import Path

import torch

from opwright.bench.limits import CpuBench, GpuBench
from opwright.build.store import Store, digest_of
from opwright.errors import StoreError
from opwright.records import Limits, Machine
from opwright.typed_json import decode

_FORMAT = 1  # changes when the way to measure does


def limits_of(place: CpuBench | GpuBench, machine: Machine, *, again: bool = False) -> Limits:
    """Returns the limits of a device, measured at the first time.

    They are kept for the model of the CPU, its usable cores, the threads, the versions of PyTorch and of the driver, and
    the GPU. A store that cannot be written does not prevent the measurement.

    Args:
        again: measure them now, whatever is kept.
    """
    path = _path(place.device, machine)
    if not again:
        found = _read(path)
        if found is not None:
            return found
    found = place.measure_limits()
    with contextlib.suppress(StoreError, OSError):
        _write(path, found)
    return found


def measure_limits_again(place: CpuBench | GpuBench, machine: Machine, known: Limits) -> Limits:
    """Measures exceeded limits again and keeps the better of each: other work may have slowed the first measurement."""
    found = _best_of(known, place.measure_limits())
    with contextlib.suppress(StoreError, OSError):
        _write(_path(place.device, machine), found)
    return found


def _best_of(one: Limits, other: Limits) -> Limits:
    better = {name: max(getattr(one, name), getattr(other, name)) for name in ("copy_gb_s", "triad_gb_s", "cache_gb_s")}
    shared = {dtype: max(one.gemm_gflops.get(dtype, 0.0), rate) for dtype, rate in other.gemm_gflops.items()}
    return replace(other, **better, gemm_gflops=one.gemm_gflops | shared)


def _path(device: torch.device, machine: Machine) -> Path:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = [machine.device, machine.driver, machine.multiprocessors] if device.type == "cuda" else []
    key = [_FORMAT, machine.cpu, cores, torch.get_num_threads(), machine.torch, *gpu]
    return Store().root / "limits" / f"{digest_of(json.dumps(key).encode())[:32]}.json"


def _read(path: Path) -> Limits | None:
    """Returns what is kept; None where there is nothing, or nothing whole, or someone else's."""
    try:
        if os.stat(path).st_uid != os.geteuid():
            return None
        return decode(Limits, json.loads(path.read_bytes()), "limits")
    except (OSError, ValueError):
        return None


def _write(path: Path, limits: Limits) -> None:
    with Store().lock(f"limits-{path.stem}"):  # makes the store, and refuses one that is not ours
        path.parent.mkdir(mode=0o700, exist_ok=True)
        staged = path.with_name(f"{path.stem}.{secrets.token_hex(4)}")
        with open(staged, "w") as f:
            json.dump(asdict(limits), f)
            f.flush()
            os.fsync(f.fileno())
        staged.rename(path)
