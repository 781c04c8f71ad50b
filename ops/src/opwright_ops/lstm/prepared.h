// Products with weights that are kept packed between calls, in float, bfloat16 or int8 with a scale
// for each column; rows and sums are float.
//
// The order is the same on every CPU: blocks of 64 columns, each [k, 64]. For gates, a block has 16
// units of all four; registers of 8 lanes take it in halves.
#pragma once

#include "panels.h"

namespace opwright_ops {

inline constexpr int64_t kPreparedColumns = 64, kPreparedUnits = 16;

struct Prepared {
  const void* data = nullptr;
  int dtype = 0;
  const float* scale = nullptr;  // of each column, or null
  int64_t k = 0;
};

namespace detail {

template <typename W>
OPWRIGHT_INLINE Vec<float> load_weights(const W* from) {
  return opwright::load(from);
}
OPWRIGHT_INLINE Vec<float> load_weights(const int8_t* from) {
#if defined(__AVX512F__) && !defined(__clang__)
  typedef char Bytes __attribute__((vector_size(16)));
  typedef int32_t Words __attribute__((vector_size(64)));
  Bytes bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(__builtin_ia32_pmovsxbd512_mask(bytes, Words{}, -1), Vec<float>);
#else
  Vec<float> result;
  for (int i = 0; i < opwright::kLanes<float>; ++i) result[i] = from[i];
  return result;
#endif
}

template <int M, typename W>
OPWRIGHT_INLINE void add_prepared_step(const float* row, int64_t stride, const W* weights,
                                       int64_t distance, Sums<float> (&sum)[M]) {
  // The CPU's own prefetcher alone does not keep up, from the second level nor from the third.
  constexpr int64_t kAhead = 2048, kLine = 64;
  OPWRIGHT_UNROLL
  for (int64_t i = 0; i < kPreparedColumns * int64_t{sizeof(W)}; i += kLine)
    __builtin_prefetch(reinterpret_cast<const char*>(weights) + kAhead + i);
  Vec<float> column[kVectors];
  OPWRIGHT_UNROLL
  for (int v = 0; v < kVectors; ++v) column[v] = load_weights(weights + v * distance);
  OPWRIGHT_UNROLL
  for (int m = 0; m < M; ++m) {
    const Vec<float> factor = opwright::splat<Vec<float>>(row[m * stride]);
    OPWRIGHT_UNROLL
    for (int v = 0; v < kVectors; ++v) sum[m][v] = opwright::fma(factor, column[v], sum[m][v]);
  }
}

template <int M, typename W>
void multiply_prepared_group(const float* rows, int64_t stride, const W* weights, int64_t distance,
                             int64_t k, const float* scale, Sums<float>* sums) {
  Sums<float> sum[M] = {};
  int64_t at = 0;
  if constexpr (M == 1) {
    // As in multiply_group.
    Sums<float> other[1] = {};
    for (; at + 1 < k; at += 2) {
      add_prepared_step<1>(rows + at, 0, weights + at * kPreparedColumns, distance, sum);
      add_prepared_step<1>(rows + at + 1, 0, weights + (at + 1) * kPreparedColumns, distance,
                           other);
    }
    OPWRIGHT_UNROLL
    for (int v = 0; v < kVectors; ++v) sum[0][v] += other[0][v];
  }
  for (; at < k; ++at)
    add_prepared_step<M>(rows + at, stride, weights + at * kPreparedColumns, distance, sum);
  OPWRIGHT_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    const Vec<float> factor =
        scale ? opwright::load(scale + v * distance) : opwright::splat<Vec<float>>(1);
    OPWRIGHT_UNROLL
    for (int m = 0; m < M; ++m) sums[m][v] = opwright::fma(sum[m][v], factor, sums[m][v]);
  }
}

template <typename W>
void multiply_prepared_as(const float* rows, int64_t stride, int64_t count,
                          const Prepared& prepared, int64_t block, int64_t offset, int64_t distance,
                          Sums<float>* sums) {
  const W* weights =
      static_cast<const W*>(prepared.data) + block * prepared.k * kPreparedColumns + offset;
  const float* scale =
      prepared.scale ? prepared.scale + block * kPreparedColumns + offset : nullptr;
  for (; count >= kRegisterRows;
       count -= kRegisterRows, rows += kRegisterRows * stride, sums += kRegisterRows) {
    multiply_prepared_group<kRegisterRows>(rows, stride, weights, distance, prepared.k, scale,
                                           sums);
  }
  for (; count >= 2; count -= 2, rows += 2 * stride, sums += 2) {
    multiply_prepared_group<2>(rows, stride, weights, distance, prepared.k, scale, sums);
  }
  if (count) multiply_prepared_group<1>(rows, stride, weights, distance, prepared.k, scale, sums);
}

inline void multiply_prepared(const float* rows, int64_t stride, int64_t count,
                              const Prepared& prepared, int64_t block, int64_t offset,
                              int64_t distance, Sums<float>* sums) {
  using opwright::detail::kScalarType;
  if (prepared.dtype == kScalarType<int8_t>) {
    multiply_prepared_as<int8_t>(rows, stride, count, prepared, block, offset, distance, sums);
  } else if (prepared.dtype == kScalarType<bfloat16>) {
    multiply_prepared_as<bfloat16>(rows, stride, count, prepared, block, offset, distance, sums);
  } else {
    multiply_prepared_as<float>(rows, stride, count, prepared, block, offset, distance, sums);
  }
}

}  // namespace detail

// sums[m][gate] += row m times the columns of the gates of one register of units.
template <typename E, typename O>
void multiply_prepared_gates(const O* rows, int64_t stride, int64_t count, const Prepared& prepared,
                             int64_t unit, Sums<E>* sums) {
  if constexpr (sizeof(E) == 4 && sizeof(O) == 4) {
    detail::multiply_prepared(rows, stride, count, prepared, unit / kPreparedUnits,
                              unit % kPreparedUnits, kPreparedUnits, sums);
  }
}

// sums[m][v] += row m times kVectors registers of columns.
template <typename E, typename O>
void multiply_prepared_columns(const O* rows, int64_t stride, int64_t count,
                               const Prepared& prepared, int64_t column, Sums<E>* sums) {
  if constexpr (sizeof(E) == 4 && sizeof(O) == 4) {
    detail::multiply_prepared(rows, stride, count, prepared, column / kPreparedColumns,
                              column % kPreparedColumns, opwright::kLanes<E>, sums);
  }
}

}  // namespace opwright_ops
