"""Inputs that follow from samples, from a contract, and from what a reference takes."""
