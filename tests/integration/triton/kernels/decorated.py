"""Kernels under `@triton.autotune` and `@triton.heuristics`, and grids of every form."""

import triton
import triton.language as tl

WIDTH = 256
SCALE: tl.constexpr = tl.constexpr(4)
NAMES = ["a"]


def _is_even(args):
    """Whether the rows fill their blocks."""
    rest = args["n"] % args["BLOCK"]
    if rest == 0:  # noqa: SIM103
        return True
    return False


def _nothing(*args, **kwargs):
    return None


@triton.autotune(
    configs=[
        triton.Config({"BLOCK": 128}, num_warps=4),
        triton.Config({"BLOCK": 1024}, num_warps=8, num_stages=2, maxnreg=128),
    ],
    key=["n"],
    reset_to_zero=["out"],
)
@triton.heuristics({"EVEN": _is_even, "HAS_BIAS": lambda args: args["bias"] is not None})
@triton.heuristics({"HALF": lambda args: args["BLOCK"] // 2 if args["EVEN"] else 1})
@triton.jit
def tuned(x, bias, out, n, BLOCK: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, HALF: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at) if EVEN else tl.load(x + at, mask=at < n)
    if HAS_BIAS:
        value += tl.load(bias)
    tl.store(out + at, value, mask=at < n)


@triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["n"])})
@triton.autotune(configs=[triton.Config({}, num_warps=2, pre_hook=_nothing)], key=[])
@triton.jit
def hooked(x, n, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), n)


plain_grid = lambda META: (triton.cdiv(META["n"], META["BLOCK"]), 1)  # noqa: E731
folded = lambda args: (min(args["n"], WIDTH, 8) * SCALE,)  # noqa: E731
refused = lambda args: (len(args["x"]),)  # noqa: E731
listed = lambda args: (NAMES,)  # noqa: E731


def launch(x, n):
    grid = lambda meta: (triton.cdiv(n, meta["BLOCK"]),)  # noqa: E731
    tuned[grid](x, None, x, n)
