"""Whose code a frame of a traceback runs."""

from __future__ import annotations

from types import FrameType


def is_of_the_library(frame: FrameType) -> bool:
    """Whether a frame is Opwright's or PyTorch's, and not the author's or the caller's."""
    is_named = (frame.f_globals.get("__name__") or "").partition(".")[0] in ("opwright", "torch")
    return is_named or frame.f_code.co_filename.startswith("<opwright ")  # what was generated for an operator
