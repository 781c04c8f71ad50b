"""What of a process a call must leave as it was."""

from __future__ import annotations

import os
import random
import sys
import threading
from typing import Any

import torch


def modes() -> dict[str, Any]:
    """Returns settings that stay as they are from the start of verify to its end."""
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": str(torch.get_default_device()),
        "torch's number of threads": torch.get_num_threads(),
        "whether algorithms are deterministic": torch.are_deterministic_algorithms_enabled(),
        "the precision of float32 products": torch.get_float32_matmul_precision(),
        "whether denormal numbers are flushed": bool(torch.full((1,), 1e-40).mul(0.5) == 0),
        "the current folder": os.getcwd(),
    }


def passing_state(device: torch.device) -> dict[str, Any]:
    """Returns what others may change, but not a call: random numbers, environment, threads, whether gradients are on."""
    found = {
        "the state of torch's random numbers": torch.get_rng_state().numpy().tobytes(),
        "the state of Python's random numbers": random.getstate(),
        "whether gradients are recorded": torch.is_grad_enabled(),
        "the environment": dict(os.environ),
        "the number of threads": threading.active_count(),
    }
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        found["the state of numpy's random numbers"] = (name, keys.tobytes(), *rest)
    if device.type == "cuda":
        found["the state of the GPU's random numbers"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return found
