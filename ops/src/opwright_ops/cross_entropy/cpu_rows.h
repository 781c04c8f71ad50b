// Log-sum-exp of rows, and gradients that are made of a row's softmax, on the CPU.
#pragma once

#include <opwright/along.h>
#include <opwright/kernel.h>
#include <opwright/math.h>
#include <opwright/scratch.h>

#include "base.h"

namespace opwright_ops {

using opwright::along;
using opwright::compute_t;
using opwright::read;
using opwright::View;
using opwright::write;

// Elements of a row that one piece of work covers: they stay in the first-level cache between its
// two passes. From n alone, so that a row has the same bits in every batch.
constexpr int64_t kPart = 4096;

// The sum of exp(x - origin) over a part of a row, where origin is its largest element, and the sum
// of the elements themselves.
template <typename S>
struct Part {
  S origin, exponentials;
  double elements;
};

template <typename S>
constexpr S kLargest = sizeof(S) == 8 ? S(0x1.fffffffffffffp1023) : S(0x1.fffffep127f);

template <bool kHasElements, typename T>
Part<compute_t<T>> part_of(const T* row, int64_t n) {
  using S = compute_t<T>;
  // Not infinite: exp(inf - origin) is still inf, and exp(-inf - origin) is 0.
  S origin = opwright::largest_along(row, n);
  origin = origin > kLargest<S> ? kLargest<S> : origin < -kLargest<S> ? -kLargest<S> : origin;
  // What all elements may have in common would take the digits of the rest of their sum: the median
  // of three, so that no single outlier is taken for it.
  const S base = n > 0 ? opwright_ops::base_of(S(row[0]), S(row[n / 2]), S(row[n - 1])) : S(0);
  S sums[2];
  opwright::sums_along<T>(n, sums, [&]<typename R>(int64_t at, R(&to)[2]) {
    const R x = read<R>(row + at);
    to[0] += opwright::exp(x - origin);
    if constexpr (kHasElements) to[1] += x - base;
  });
  return {origin, sums[0], double(sums[1]) + double(base) * double(n)};
}

inline bool is_any_row(int64_t) { return true; }

// Calls finish(row, log-sum-exp, sum of the elements) for each row that is used; others are not
// read.
template <bool kHasElements, typename T, typename Finish, typename IsUsed = bool (*)(int64_t)>
void over_rows(const View<const T, 2>& rows, const Finish& finish,
               const IsUsed& is_used = is_any_row) {
  using S = compute_t<T>;
  const int64_t n = rows.size(1), parts = (n + kPart - 1) / kPart;
  auto* all = opwright::scratch<Part<S>>(rows.size(0) * parts);
  const int64_t grain = opwright::grain_of(4 * (n < kPart ? n : kPart));
  opwright::parallel_for(rows.size(0) * parts, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / parts, first = i % parts * kPart;
      if (!is_used(row)) continue;
      all[i] = part_of<kHasElements>(rows.data() + row * rows.stride(0) + first,
                                     n - first < kPart ? n - first : kPart);
    }
  });
  opwright::parallel_for(
      rows.size(0), opwright::grain_of(8 * parts), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          if (!is_used(row)) continue;
          const Part<S>* of_row = all + row * parts;
          double origin = -kLargest<double>, exponentials = 0, elements = 0;
          for (int64_t p = 0; p < parts; ++p)
            origin = of_row[p].origin > origin ? of_row[p].origin : origin;
          for (int64_t p = 0; p < parts; ++p) {
            exponentials += of_row[p].exponentials * opwright::exp(of_row[p].origin - origin);
            if constexpr (kHasElements) elements += of_row[p].elements;
          }
          finish(row, origin + __builtin_log(exponentials), elements);
        }
      });
}

// A column of a row, and what is subtracted there; none below 0.
struct Column {
  int64_t at = -1;
  double subtracted = 0;
};

// The gradient of a row x is grad * (slope * exp(x[j] - normalizer) - shift - what column j has).
// Both columns are different.
struct RowGradient {
  double grad = 0, slope = 1, shift = 0;
  Column columns[2] = {};
  bool is_zero = false;
};

// Accurate to half for bfloat16, too: label smoothing subtracts what may be nearly as large.
template <typename T, typename V>
OPWRIGHT_INLINE V exp_of(V x) {
  if constexpr (sizeof(T) == 2)
    return opwright::exp<opwright::half>(x);
  else
    return opwright::exp(x);
}

template <typename T, typename GradientOf>
void write_gradients(const View<const T, 2>& rows, const View<const double, 1>& normalizer,
                     const View<T, 2>& output, const GradientOf& gradient_of) {
  using S = compute_t<T>;
  const int64_t n = rows.size(1), parts = (n + kPart - 1) / kPart;
  const int64_t grain = opwright::grain_of(4 * (n < kPart ? n : kPart));
  opwright::parallel_for(rows.size(0) * parts, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / parts, first = i % parts * kPart;
      const int64_t count = n - first < kPart ? n - first : kPart;
      const T* from = rows.data() + row * rows.stride(0) + first;
      T* to = output.data() + row * output.stride(0) + first;
      const RowGradient gradient = gradient_of(row);
      if (gradient.is_zero) {
        for (int64_t j = 0; j < count; ++j) to[j] = T(S(0));
        continue;
      }
      // In two parts: x - normalizer loses no bit of float64.
      const S high = S(normalizer(row)), low = high - high == 0 ? S(normalizer(row) - high) : S(0);
      const S grad = S(gradient.grad), slope = S(gradient.slope), shift = S(gradient.shift);
      const auto softmax = [&](auto x) { return exp_of<T>((x - high) - low); };
      S values[2];  // `to` may be `from`
      for (int c = 0; c < 2; ++c) {
        const int64_t at = gradient.columns[c].at - first;
        values[c] = 0 <= at && at < count ? softmax(S(from[at])) : S(0);
      }
      along<T>(count, [&]<typename R>(R, int64_t j) {
        write(to + j, (softmax(read<R>(from + j)) * slope - shift) * grad);
      });
      for (int c = 0; c < 2; ++c) {
        const int64_t at = gradient.columns[c].at - first;
        if (at < 0 || at >= count) continue;
        to[at] = T((values[c] * slope - (shift + S(gradient.columns[c].subtracted))) * grad);
      }
    }
  });
}

}  // namespace opwright_ops
