"""Captures calls into CUDA graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch

_Result = TypeVar("_Result")


def capture(
    call: Callable[[], _Result], stream: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, _Result]:
    """Captures a call into a graph on the current device, and returns the graph and what the call returned.

    Raises:
        Exception: the call's own, or that of a capture that failed; the process is as before.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            result = call()
    except Exception:
        _end_capture()
        raise
    return graph, result


def _end_capture() -> None:
    """Ends what a failed capture leaves: the default generator, which draws for a capture until one succeeds."""
    with contextlib.suppress(Exception), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
        torch.empty(1, device="cuda").zero_()
