"""One parameter, or few, of every declaration that Triton knows."""

import triton
import triton.language as tl


@triton.jit
def plain(p):
    pass


@triton.jit(do_not_specialize=["p"])
def unspecialized(p):
    pass


@triton.jit(do_not_specialize_on_alignment=["p"])
def unaligned(p):
    pass


@triton.jit
def as_i64(p: tl.int64):
    pass


@triton.jit
def as_i32(p: tl.int32):
    pass


@triton.jit
def as_u8(p: tl.uint8):
    pass


@triton.jit
def as_fp16(p: tl.float16):
    pass


@triton.jit
def as_bf16(p: tl.bfloat16):
    pass


@triton.jit
def as_fp64(p: tl.float64):
    pass


@triton.jit
def as_u1(p: tl.int1):
    pass


@triton.jit
def as_const(p: tl.const):
    pass


@triton.jit
def as_pointer(p: "*fp16"):
    pass


@triton.jit
def helper(x):
    return x + 1


def _spelled(proxy):
    return "constant_" + repr(proxy.constants["C"]).encode().hex()


@triton.jit(repr=_spelled)
def constant(out, C: tl.constexpr):
    pass


@triton.jit
def defaults(x, n=1, eps=1e-5, name: tl.constexpr = 'a"b', kind: tl.constexpr = tl.float16, act: tl.constexpr = helper):
    pass


@triton.jit
def sums_tuple(out, parts):
    total = 0.0
    for i in tl.static_range(len(parts)):
        total += tl.load(parts[i])
    tl.store(out, total)


@triton.jit
def copies(source, target, M: tl.constexpr, N: tl.constexpr):
    target.store([0, 0], source.load([0, 0]))


@triton.jit
def keywords(x, *, n, BLOCK: tl.constexpr = 64):
    tl.store(x + tl.arange(0, BLOCK), n)


@triton.jit
def asks_target(IS_HOPPER: tl.constexpr):
    tl.static_assert(tl.target_info.cuda_capability_geq(9, 0) == IS_HOPPER)


@triton.jit
def makes_descriptor(x, M, N: tl.constexpr):
    desc = tl.make_tensor_descriptor(x, shape=[M, N], strides=[N, 1], block_shape=[64, N])
    desc.store([0, 0], tl.zeros((64, N), dtype=tl.float16))
