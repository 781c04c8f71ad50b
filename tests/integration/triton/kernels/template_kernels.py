"""Kernels of triton_templates.cpp: one argument under test, and one behind it that shows where it lands."""

import triton
import triton.language as tl


@triton.jit
def plain(p, tail):
    pass


@triton.jit
def constant(C: tl.constexpr, tail):
    pass


@triton.jit
def helper(x):
    return x


@triton.jit
def sized(p, n, BLOCK: tl.constexpr = 64):
    pass


@triton.jit
def copies(source, target, column):
    target.store([0, column], source.load([0, column]))


def sized_grid(args):
    return (triton.cdiv(args["n"], args["BLOCK"]), 2)
