// Moments of rows, for layer normalisation.
#pragma once

#include "sequence.h"

namespace opwright_ops {

using opwright::Member;

inline constexpr double kNormEpsilon = 1e-5;

template <typename V>
OPWRIGHT_INLINE opwright::Lane<V> sum_of_lanes(V value) {
  opwright::Lane<V> sum = 0;
  for (int i = 0; i < static_cast<int>(sizeof(V) / sizeof(sum)); ++i) sum += value[i];
  return sum;
}

// The first `count` lanes, 0 in the others.
template <typename E>
OPWRIGHT_INLINE Vec<E> first_lanes(Vec<E> value, int64_t count) {
  if (count >= opwright::kLanes<E>) return value;
  E lanes[opwright::kLanes<E>];
  opwright::store(lanes, value);
  return opwright::load_partial(lanes, static_cast<int>(count));
}

// Mean and inverse deviation of the rows of a matrix.
template <typename E>
struct RowMoments {
  E mean, scale;
};

// Mean and inverse deviation of a row; load(i, count) gives a register of it.
template <typename E, typename Load>
RowMoments<E> moments_of(const Load& load, int64_t width) {
  constexpr int N = opwright::kLanes<E>;
  const auto sum_over = [&](const auto& term) {
    Vec<E> sum{};
    for (int64_t i = 0; i < width; i += N) {
      const int count = static_cast<int>(width - i < N ? width - i : N);
      sum += first_lanes<E>(term(load(i, count)), count);
    }
    return sum_of_lanes(sum) / static_cast<E>(width);
  };
  const E mean = sum_over([](Vec<E> v) { return v; });
  const E variance = sum_over([&](Vec<E> v) { return (v - mean) * (v - mean); });
  return {mean, E(1) / static_cast<E>(__builtin_sqrt(variance + E(kNormEpsilon)))};
}
template <typename E>
RowMoments<E> moments_of_row(const E* row, int64_t width) {
  return moments_of<E>([row](int64_t i, int count) { return load_first(row + i, count); }, width);
}

// Rows are summed in parts of kVectors registers, and the parts in their order, so that the bits do
// not depend on how many members a team has. A member works on whole parts.
template <typename E>
inline constexpr int64_t kPartColumns = kVectors * opwright::kLanes<E>;

// Mean and inverse deviation of rows. Parts are joined by the formula of Chan et al., which does
// not cancel.
template <typename E>
struct Moments {
  Buffer<E> parts;  // [B, parts, 3]: count, mean, sum of squared deviations
  int64_t count = 0;

  void allocate(int64_t rows, int64_t width) {
    count = (width + kPartColumns<E> - 1) / kPartColumns<E>;
    parts.allocate(rows * count * 3);
  }
  void set(int64_t row, int64_t part, E elements, E mean, E squares) const {
    E* to = parts.data() + (row * count + part) * 3;
    to[0] = elements, to[1] = mean, to[2] = squares;
  }
  // Returns the mean; `scale` becomes 1/sqrt(variance + epsilon).
  E joined(int64_t row, E* scale) const {
    const E* part = parts.data() + row * count * 3;
    E elements = 0, mean = 0, squares = 0;
    for (int64_t p = 0; p < count; ++p, part += 3) {
      const E total = elements + part[0], distance = part[1] - mean, share = part[0] / total;
      squares += part[2] + distance * distance * elements * share;
      mean += distance * share;
      elements = total;
    }
    *scale = 1 / __builtin_sqrt(squares / elements + E(kNormEpsilon));
    return mean;
  }
};

// Two sums over rows.
template <typename E>
struct PartSums {
  Buffer<E> parts;  // [B, parts, 2]
  int64_t count = 0;

  void allocate(int64_t rows, int64_t width) {
    count = (width + kPartColumns<E> - 1) / kPartColumns<E>;
    parts.allocate(rows * count * 2);
  }
  void set(int64_t row, int64_t part, E first, E second) const {
    E* to = parts.data() + (row * count + part) * 2;
    to[0] = first, to[1] = second;
  }
  void joined(int64_t row, E* first, E* second) const {
    *first = *second = 0;
    for (int64_t p = 0; p < count; ++p) {
      *first += parts[(row * count + p) * 2];
      *second += parts[(row * count + p) * 2 + 1];
    }
  }
};

}  // namespace opwright_ops
