"""Backends: the languages that kernels are written in. `protocol.py` says what one is, `registry.py` which there are."""
