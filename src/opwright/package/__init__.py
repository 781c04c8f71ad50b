"""Wheels: one library for every torch, Python and GPU, built without any of them."""
