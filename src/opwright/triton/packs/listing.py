"""What a pack holds, as rows to print and as plain data."""

from __future__ import annotations

from typing import Any

from ..worker.packfile import Entry


def kernels_of(entries: list[Entry]) -> list[dict[str, Any]]:
    """Returns the kernels of a pack by file, function, key, architecture and Triton."""
    found = [
        {
            **{name: entry.record.get(name) for name in ("file", "function", "arch", "key")},
            **{name: entry.record.get(name) for name in ("triton", "ptxas", "cuda")},
            **{name: entry.record.get(name) for name in ("num_warps", "num_ctas", "shared")},
            "bytes": len(entry.blob),
        }
        for entry in entries
        if entry.blob is not None
    ]
    return sorted(found, key=lambda k: (k["file"], k["function"], k["key"], k["arch"], k["triton"]))


def tables_of(entries: list[Entry]) -> list[dict[str, Any]]:
    """Returns the measurements of a pack."""
    found = [entry.record for entry in entries if "rows" in entry.record and entry.blob is None]
    return sorted(found, key=lambda t: (t["file"], t["function"], t["arch"], t["gpu"]))


def driver_text(cuda: int) -> str:
    """Returns a driver's CUDA version, as 12.8 for 12080."""
    return f"{cuda // 1000}.{cuda % 1000 // 10}"


def size_text(count: int) -> str:
    """Returns a number of bytes, as 5.8 KiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
