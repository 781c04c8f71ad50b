"""Operators that cover what the operators of `opwright_ops` do not: sizes from integers, integers and bools of every
width, indices, lists, mutated arguments beside outputs, calls of PyTorch from a kernel.

The kernels index their views and nothing else, so that a view with wrong sizes or strides leads out of memory.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Float, Int, Int64, Num, Shaped
from torch import Tensor

from opwright import Mutates, operator

_HEAD = """#include <opwright/kernel.h>
using opwright::View;
"""


@operator(
    "sanitized::repeat",
    cpu=_HEAD
    + """
template <typename T>
void repeat(View<const T, 1> x, int64_t k, int64_t s, View<T, 1> output, View<int64_t, 1> rest) {
  for (int64_t i = 0; i < output.size(0); ++i) output(i) = x(i % x.size(0));
  for (int64_t i = 0; i < rest.size(0); ++i) rest(i) = i;
}
OPWRIGHT_KERNEL(repeat, float, double, int64_t, int8_t, uint8_t)
""",
)
def repeat(x: Num[Tensor, "n"], k: int, s: int) -> tuple[Num[Tensor, "n*k"], Int64[Tensor, "min(s//k,n)%7+1"]]:
    return x.repeat(k), torch.arange(min(s // k, x.shape[0]) % 7 + 1, device=x.device)


@operator(
    "sanitized::gather",
    cpu=_HEAD
    + """
template <typename T>
void gather(View<const T, 2> table, View<const int64_t, 1> index, View<T, 2> output) {
  for (int64_t i = 0; i < index.size(0); ++i) {
    const int64_t n = table.size(0), row = index(i) < 0 ? index(i) + n : index(i);
    opwright::check(0 <= row && row < n, "an index is out of range");
    for (int64_t j = 0; j < table.size(1); ++j) output(i, j) = table(row, j);
  }
}
OPWRIGHT_KERNEL(gather, float, opwright::half, opwright::bfloat16, int16_t, int32_t, int64_t, bool)
""",
)
def gather(table: Shaped[Tensor, "n d"], index: Int[Tensor, "*k"]) -> Shaped[Tensor, "*k d"]:
    return table[index.long()]


@operator(
    "sanitized::accumulate",
    cpu=_HEAD
    + """
template <typename T>
void accumulate(View<T, 2> sums, View<const T, 2> x, View<int64_t, 1> count, double scale, bool negated,
                View<T, 1> total) {
  for (int64_t i = 0; i < sums.size(0); ++i) {
    double sum = 0;
    for (int64_t j = 0; j < sums.size(1); ++j) {
      sums(i, j) = static_cast<T>(float(sums(i, j)) + float(scale) * (negated ? -float(x(i, j)) : float(x(i, j))));
      sum += float(sums(i, j));
    }
    total(i) = T(sum);
  }
  for (int64_t j = 0; j < count.size(0); ++j) count(j) = int64_t(uint64_t(count(j)) + uint64_t(sums.size(0)));
}
OPWRIGHT_KERNEL(accumulate, float, opwright::half, opwright::bfloat16)
""",
)
def accumulate(
    sums: Mutates[Float[Tensor, "*b n"]],
    x: Float[Tensor, "*b n"],
    count: Mutates[Int64[Tensor, "n"]],
    *,
    scale: float = 1.0,
    negated: bool = False,
) -> Float[Tensor, "*b"]:
    sums.add_(-x if negated else x, alpha=scale)
    count.add_(x.shape[:-1].numel())
    return sums.sum(-1)


@operator(
    "sanitized::moments",
    cpu=_HEAD
    + """
template <typename T>
void moments(View<const T, 2> x, View<const T, 1> weight, View<const T, 1> pairs, int64_t shift, Side side,
             View<T, 1> rows, View<T, 1> columns, View<T, 2> turned) {
  for (int64_t i = 0; i < rows.size(0); ++i) rows(i) = T(0);
  for (int64_t j = 0; j < columns.size(0); ++j) columns(j) = weight.defined() ? weight(j) : T(0);
  for (int64_t i = 0; i < x.size(0); ++i) {
    for (int64_t j = 0; j < x.size(1); ++j) {
      const T value = x(i, j) + (side == Side::left ? pairs(2 * j) : pairs(2 * j + 1));
      rows(i) += value;
      columns(j) += value;
      turned(j, i) = value * T(shift);
    }
  }
}
OPWRIGHT_KERNEL(moments, float, double)
""",
)
def moments(
    x: Float[Tensor, "m n"],
    weight: Float[Tensor, "n"] | None,
    pairs: Float[Tensor, "2*n"],
    shift: int = 1,
    side: Literal["left", "right"] = "left",
) -> tuple[Float[Tensor, "m"], Float[Tensor, "n"], Float[Tensor, "n m"]]:
    value = x + pairs[0 if side == "left" else 1 :: 2]
    columns = value.sum(0) if weight is None else value.sum(0) + weight
    return value.sum(1), columns, value.t() * shift


@operator(
    "sanitized::total",
    cpu=_HEAD
    + """
template <typename T> void total(opwright::List<View<const T, 2>> parts, View<T, 1> output) {
  for (int64_t j = 0; j < output.size(0); ++j) output(j) = T(0);
  for (const auto& part : parts) {
    for (int64_t i = 0; i < part.size(0); ++i) {
      for (int64_t j = 0; j < part.size(1); ++j) output(j) += part(i, j);
    }
  }
}
OPWRIGHT_KERNEL(total, float, double)
""",
)
def total(parts: list[Float[Tensor, "... n"]]) -> Float[Tensor, "n"]:
    return torch.stack([part.reshape(part.shape[:-1].numel(), part.shape[-1]).sum(0) for part in parts]).sum(0)


@operator(
    "sanitized::windows",
    cpu=_HEAD
    + """
#include <opwright/scratch.h>
#include <opwright/tensor.h>
template <typename T> void windows(View<const T, 2> x, View<const T, 1> w, View<T, 2> output) {
  const int64_t m = output.size(0), n = output.size(1), k = w.size(0);
  T* const unrolled = opwright::scratch<T>(m * n * k);
  opwright::parallel_for(m, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        for (int64_t l = 0; l < k; ++l) unrolled[(i * n + j) * k + l] = x(i, j + l);
      }
    }
  });
  opwright::call("aten::mv.out", opwright::borrow(unrolled, {m * n, k}), opwright::borrow(w),
                 opwright::borrow(output.data(), {m * n}));
}
OPWRIGHT_KERNEL(windows, float, double)
""",
)
def windows(x: Float[Tensor, "*b t"], w: Float[Tensor, "k"]) -> Float[Tensor, "*b t-k+1"]:
    if x.shape[-1] == w.shape[0] - 1:  # no window, which `unfold` refuses
        return x.new_zeros(*x.shape[:-1], 0)
    return x.unfold(-1, w.shape[0], 1) @ w


OPERATORS = [repeat, gather, accumulate, moments, total, windows]


# --- what must be found ---------------------------------------------------------------------------------------------


def _wrong(name: str, body: str) -> Any:
    source = f"""{_HEAD}
template <typename T> void {name}(View<const T, 1> x, View<T, 1> output) {{
  const int64_t n = x.size(0);
  for (int64_t i = 0; i < n; ++i) output(i) = x(i);
  {body}
}}
OPWRIGHT_KERNEL({name}, float, double, opwright::half, opwright::bfloat16)"""

    def copied(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x.clone()

    copied.__name__ = name
    return operator(f"sanitized::{name}", cpu=source)(copied)


WRONG = [
    _wrong("writes_beyond", "output.data()[n] = T(1);"),
    _wrong("reads_beyond", "output(0) = x.data()[x.stride(0) * n] == T(1) ? T(0) : output(0);"),
    _wrong("overflows", "volatile int product = int(n + 1) * 2000000000; (void)product;"),
    _wrong("forgets_the_last", "output(n - 1) = T(0);"),
    # PyTorch's memory begins at multiples of 64: elsewhere, `output` lies in a larger tensor.
    _wrong("writes_around", "if (reinterpret_cast<uintptr_t>(output.data()) % 64) output.data()[-1] = T(1);"),
    _wrong("refuses", 'opwright::check(n != 17, "17 elements");'),
]
