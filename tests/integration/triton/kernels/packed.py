"""Kernels for the tests of packs: small ones, and ones that do not compile."""

import triton
import triton.language as tl


@triton.jit
def fill(out, value, BLOCK: tl.constexpr = 64):
    tl.store(out + tl.arange(0, BLOCK), value)


@triton.jit
def adds_text(out, value):
    tl.store(out, value + "text")


def no_kernel(out, value):
    return out


@triton.autotune(
    configs=[triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 128}, num_warps=4)],
    key=["n", "scale"],
)
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def scaled(out, n, bias, scale: tl.constexpr = 2, BLOCK: tl.constexpr = 64, EVEN: tl.constexpr = False):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(bias) * scale, mask=None if EVEN else at < n)


def grid(args):
    return (triton.cdiv(args["n"], args["BLOCK"]),)
