// Loops along adjacent elements on a CPU, written once for vectors and for what is left over.
//
//   along<T>(n, [&]<typename R>(R, int64_t i) { write(to + i, read<R>(from + i) * 2); });
//
//   compute_t<T> sums[1];
//   sums_along<T>(n, sums, [&]<typename R>(int64_t i, R(&to)[1]) { to[0] += read<R>(from + i); });
#pragma once

#include <cstdint>

#include "opwright/entry.h"
#include "opwright/types.h"
#include "opwright/vec.h"

namespace opwright {

// Element or elements at an address, as the scalar or the vector R.
template <typename R, typename T>
OPWRIGHT_INLINE R read(const T* from) {
  if constexpr (detail::kSame<R, Lane<R>>)
    return static_cast<R>(*from);
  else
    return load(from);
}
template <typename T, typename R>
OPWRIGHT_INLINE void write(T* to, R value) {
  if constexpr (detail::kSame<R, Lane<R>>)
    *to = T(value);
  else
    store(to, value);
}

// Calls body(R{}, i) along n elements, R being the vector, and the scalar for what is left.
template <typename T, typename Body>
OPWRIGHT_INLINE void along(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes<T> <= n; i += kLanes<T>) body(Vec<compute_t<T>>{}, i);
  for (; i < n; ++i) body(compute_t<T>{}, i);
}

// Adds up what body(i, to) adds to `to`, along n elements. Blocks of them are added up in double.
template <typename T, int kCount, typename Body>
OPWRIGHT_INLINE void sums_along(int64_t n, compute_t<T> (&totals)[kCount], const Body& body) {
  using V = Vec<compute_t<T>>;
  constexpr int64_t kBlock = 1 << 14;
  constexpr int kLanesOfT = kLanes<T>, kAtOnce = 4;  // an addition waits four cycles for the last
  double of_blocks[kCount] = {};
  for (int64_t i = 0; i < n;) {
    const int64_t end = n - i < kBlock ? n : i + kBlock;
    V sums[kAtOnce][kCount] = {};
    for (; i + kAtOnce * kLanesOfT <= end; i += kAtOnce * kLanesOfT) {
      for (int k = 0; k < kAtOnce; ++k) body(i + k * kLanesOfT, sums[k]);
    }
    for (; i + kLanesOfT <= end; i += kLanesOfT) body(i, sums[0]);
    for (int c = 0; c < kCount; ++c) {
      const V sum = (sums[0][c] + sums[1][c]) + (sums[2][c] + sums[3][c]);
      totals[c] = 0;
      for (int lane = 0; lane < static_cast<int>(sizeof sum / sizeof totals[c]); ++lane) {
        totals[c] += sum[lane];
      }
    }
    for (; i < end; ++i) body(i, totals);
    for (int c = 0; c < kCount; ++c) of_blocks[c] += static_cast<double>(totals[c]);
  }
  for (int c = 0; c < kCount; ++c) totals[c] = static_cast<compute_t<T>>(of_blocks[c]);
}

// The largest of n elements; minus infinity where there are none, or where all are NaN.
template <typename T>
compute_t<T> largest_along(const T* row, int64_t n) {
  using S = compute_t<T>;
  using V = Vec<S>;
  constexpr int64_t kStep = kLanes<T>, kAtOnce = 4;  // chains that do not wait for each other
  V most[kAtOnce];
  for (V& m : most) m = splat<V>(S(-__builtin_inf()));
  int64_t i = 0;
  for (; i + kAtOnce * kStep <= n; i += kAtOnce * kStep) {
    for (int k = 0; k < kAtOnce; ++k) most[k] = max(most[k], read<V>(row + i + k * kStep));
  }
  for (; i + kStep <= n; i += kStep) most[0] = max(most[0], read<V>(row + i));
  most[0] = max(max(most[0], most[1]), max(most[2], most[3]));
  S largest = most[0][0];
  for (int lane = 1; lane < kStep; ++lane) largest = max(largest, S(most[0][lane]));
  for (; i < n; ++i) largest = max(largest, S(row[i]));
  return largest;
}

}  // namespace opwright
