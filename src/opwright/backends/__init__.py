"""Backends: the languages of kernels. `protocol.py` says what one is, `registry.py` which there are."""
