"""What of a process a call must leave as it was, beside the settings that every call is watched for."""

from __future__ import annotations

import os
import random
import sys
import threading
from typing import Any

import torch


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
