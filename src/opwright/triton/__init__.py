"""Triton kernels launched from C++: what Python does for them before the first launch.

`docs/decisions/0006-triton-from-cpp.md` holds the texts and files that the parts exchange.
"""
