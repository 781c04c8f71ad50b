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

// Mean and inverse deviation of rows of which each member knows a part. Parts are joined by the
// formula of Chan et al., which does not cancel.
template <typename E>
struct Moments {
  Buffer<E> parts;  // [B, members, 3]: count, mean, sum of squared deviations
  int members = 0;

  void allocate(int64_t rows, int most_members) {
    parts.allocate(rows * most_members * 3);
    members = most_members;
  }
  void set(int64_t row, const Member& member, E count, E mean, E squares) const {
    E* part = parts.data() + (row * members + member.id()) * 3;
    part[0] = count, part[1] = mean, part[2] = squares;
  }
  // Returns the mean; `scale` becomes 1/sqrt(variance + epsilon).
  E joined(int64_t row, const Member& member, E* scale) const {
    const E* part = parts.data() + row * members * 3;
    E count = 0, mean = 0, squares = 0;
    for (int m = 0; m < member.count(); ++m, part += 3) {
      if (part[0] == 0) continue;
      const E total = count + part[0], distance = part[1] - mean;
      squares += part[2] + distance * distance * count * part[0] / total;
      mean += distance * part[0] / total;
      count = total;
    }
    *scale = 1 / __builtin_sqrt(squares / count + E(kNormEpsilon));
    return mean;
  }
};

// Sums over rows of which each member knows a part.
template <typename E>
struct PartSums {
  Buffer<E> parts;  // [B, members, 2]
  int members = 0;

  void allocate(int64_t rows, int most_members) {
    parts.allocate(rows * most_members * 2);
    members = most_members;
  }
  void set(int64_t row, const Member& member, E first, E second) const {
    E* part = parts.data() + (row * members + member.id()) * 2;
    part[0] = first, part[1] = second;
  }
  void joined(int64_t row, const Member& member, E* first, E* second) const {
    *first = *second = 0;
    for (int m = 0; m < member.count(); ++m) {
      *first += parts[(row * members + m) * 2];
      *second += parts[(row * members + m) * 2 + 1];
    }
  }
};

}  // namespace opwright_ops
