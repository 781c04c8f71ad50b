// Products of a few rows with weights as they are: where steps are too few to pay for packing.
#pragma once

#include "panels.h"

namespace opwright_ops {

// The rows of a matrix of gates [4H, k] as they are, for products that are too few to pay for
// packing.
template <typename O>
struct GateRows {
  const O* data = nullptr;
  int64_t stride = 0, k = 0, units = 0;
};

inline constexpr int kDotRows = 4;  // rows that share one reading of the weights

namespace detail {

// Lane l is the sum of the lanes of parts[l].
template <int kLanes, typename V>
OPWRIGHT_INLINE V sums_of_lanes(V (&parts)[kLanes]) {
  OPWRIGHT_UNROLL
  for (int half = kLanes / 2; half > 0; half /= 2) {
    OPWRIGHT_UNROLL
    for (int i = 0; i < half; ++i) {
      join_halves(parts[i], parts[i + half], half);
      parts[i] += parts[i + half];
    }
  }
  return parts[0];
}

template <typename E>
OPWRIGHT_INLINE void add_dot(Vec<E>& sum, const E* a, const E* b) {
  sum = opwright::fma(opwright::load(a), opwright::load(b), sum);
}
#if defined(__AVX512BF16__)
OPWRIGHT_INLINE void add_dot(Vec<float>& sum, const bfloat16* a, const bfloat16* b) {
  Vec<float> left, right;
  __builtin_memcpy(&left, a, sizeof left);
  __builtin_memcpy(&right, b, sizeof right);
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(left), "v"(right));
}
#endif

// Elements of one register of factors.
template <typename O>
inline constexpr int kFactors = opwright::kLanes<O> * kPair<O>;

// sum[l][m] = row m of `rows` times row l of a matrix.
template <int L, int M, typename O, typename V>
OPWRIGHT_INLINE void dot_group(const O* rows, int64_t stride, const O* const (&matrix)[L],
                               int64_t k, V (&sum)[L][M]) {
  int64_t at = 0;
  for (; at + kFactors<O> <= k; at += kFactors<O>) {
    OPWRIGHT_UNROLL
    for (int l = 0; l < L; ++l) {
      OPWRIGHT_UNROLL
      for (int m = 0; m < M; ++m) add_dot(sum[l][m], rows + m * stride + at, matrix[l] + at);
    }
  }
  if (at == k) return;
  for (int m = 0; m < M; ++m) {
    O row[kFactors<O>] = {}, factors[kFactors<O>] = {};
    __builtin_memcpy(row, rows + m * stride + at, (k - at) * sizeof(O));
    for (int l = 0; l < L; ++l) {
      __builtin_memcpy(factors, matrix[l] + at, (k - at) * sizeof(O));
      add_dot(sum[l][m], row, factors);
    }
  }
}

template <int M, typename E, typename O>
void dot_units(const O* rows, int64_t stride, const GateRows<O>& gates, int64_t unit,
               Sums<E>* sums) {
  constexpr int kLanes = opwright::kLanes<E>,
                L = M == 1 ? (kLanes < 8 ? kLanes : 8) : (kLanes < 4 ? kLanes : 4);
  const int64_t last = gates.units - 1;
  for (int gate = 0; gate < 4; ++gate) {
    Vec<E> parts[M][kLanes];
    for (int first = 0; first < kLanes; first += L) {
      const O* matrix[L];
      for (int l = 0; l < L; ++l) {
        const int64_t row = unit + first + l < last ? unit + first + l : last;
        matrix[l] = gates.data + (gate * gates.units + row) * gates.stride;
      }
      Vec<E> sum[L][M] = {};
      dot_group<L, M>(rows, stride, matrix, gates.k, sum);
      for (int l = 0; l < L; ++l) {
        for (int m = 0; m < M; ++m) parts[m][first + l] = sum[l][m];
      }
    }
    for (int m = 0; m < M; ++m) sums[m][gate] += sums_of_lanes<kLanes>(parts[m]);
  }
}

}  // namespace detail

// sums[m][gate] += row m of `rows` times the rows of a register of units, for count rows of gates.k
// elements. Lanes beyond the last unit repeat it.
template <typename E, typename O>
__attribute__((noinline)) void dot_rows(const O* rows, int64_t stride, int64_t count,
                                        const GateRows<O>& gates, int64_t unit, Sums<E>* sums) {
  for (; count > 0; count -= kDotRows, rows += kDotRows * stride, sums += kDotRows) {
    switch (count) {
      case 1:
        detail::dot_units<1, E>(rows, stride, gates, unit, sums);
        break;
      case 2:
        detail::dot_units<2, E>(rows, stride, gates, unit, sums);
        break;
      case 3:
        detail::dot_units<3, E>(rows, stride, gates, unit, sums);
        break;
      default:
        detail::dot_units<kDotRows, E>(rows, stride, gates, unit, sums);
    }
  }
}

}  // namespace opwright_ops
