"""Kernels that are called wrongly."""

import triton
import triton.language as tl


@triton.jit
def scaled(out, n, C: tl.constexpr, factor=2):
    tl.store(out + tl.arange(0, 64), n * factor + C)


@triton.jit
def whole(out, p: tl.int32):
    tl.store(out, p)


@triton.jit
def tupled(out, pair):
    tl.store(out, tl.load(pair[0]) + pair[1])


@triton.jit
def copies(source, target, column):
    target.store([0, column], source.load([0, column]))


@triton.jit
def broken(out, n):
    tl.store(out, undefined_name + n)  # noqa: F821


@triton.heuristics({"HAS_BIAS": lambda args: args["bias"] is not None})
@triton.jit
def biased(out, bias, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        tl.store(out, tl.load(bias))


@triton.heuristics({"C": lambda args: args["n"] // args["m"]})
@triton.jit
def divided(out, n, m, C: tl.constexpr):
    tl.store(out, n + C)


@triton.jit
def huge_default(out, n=9223372036854775808):
    tl.store(out, n)


@triton.jit
def tuple_default(out, pair=(1, 2.5)):
    tl.store(out, pair[0] + pair[1])


def plain_function(out, n):
    pass


no_function = 17


def halves(args):
    return (args["n"] / 2,)


def divides(args):
    return (args["n"] // (args["n"] - 5),)


def reads_option(args):
    return (args["num_stages"],)


def reads_files(args):
    return (len(open(args["n"]).read()),)


def four(args):
    return (1, 2, 3, 4)
