"""Modules of candidates, as texts for the fixture `module`: another process can import them again."""

from __future__ import annotations

# A candidate that does something before its first sample is computed.
ACTING = """
import ctypes, os, sys, time
import torch

HERE = {{}}
TABLE = torch.zeros(16)

def reference(x):
    return torch.sin(x) * 2

def candidate(x):
    HERE["pid"] = os.getpid()
    if x.ndim == 2:
        {action}
    return torch.sin(x) + torch.sin(x)
"""
