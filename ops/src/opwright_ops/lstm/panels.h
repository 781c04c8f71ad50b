// Products of a few rows with a matrix that is packed once and used at every step.
//
// A matrix [K, columns] is cut into panels of kVectors registers of columns. A panel lies in the
// order in which one pass over k reads it, so the product of up to kRows rows with it keeps its
// sums in registers and reads the panel as one stream.
#pragma once

#include <opwright/kernel.h>
#include <opwright/math.h>

namespace opwright_ops {

using opwright::bfloat16;
using opwright::Vec;

inline constexpr int kVectors = 4;  // registers of columns in a panel: one for each gate

// Rows whose sums fit the registers, with a panel's vectors and a broadcast factor: 6 * 4 + 4 + 1
// of 32 with AVX-512, 2 * 4 + 4 + 1 of 16 else.
#if defined(__AVX512F__)
inline constexpr int kRegisterRows = 6;
#else
inline constexpr int kRegisterRows = 2;
#endif

// Whether one instruction sums products of bfloat16 in float, two at a time.
#if defined(__AVX512BF16__)
inline constexpr bool kHasBfloat16Dot = true;
#else
inline constexpr bool kHasBfloat16Dot = false;
#endif

// What the factors of products are kept in for elements of type T; sums are compute_t<T>.
template <typename T, bool kIsDot>
struct OperandOf {
  using type = opwright::compute_t<T>;
};
template <>
struct OperandOf<bfloat16, true> {
  using type = bfloat16;
};
template <typename T>
using operand_t = typename OperandOf<T, kHasBfloat16Dot>::type;

// Whether a panel times 16 rows is one block of the matrix unit (AMX), where the process may use
// that.
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
template <typename O>
inline constexpr bool kIsTiled = sizeof(O) == 2;
#else
template <typename O>
inline constexpr bool kIsTiled = false;
#endif
// Rows of one pass; up to the second number the registers are as fast.
inline constexpr int kMostRowsUntiled = 2;
template <typename O>
inline constexpr int kRows = kIsTiled<O> ? 16 : kRegisterRows;

// Rows of the matrix that lie side by side in a panel: that instruction takes pairs.
template <typename O>
inline constexpr int kPair = sizeof(O) == 2 ? 2 : 1;
template <typename O>
inline constexpr int kPanelColumns = kVectors * opwright::kLanes<O>;

inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// A packed matrix.
template <typename O>
struct Panels {
  O* data;
  int64_t k;      // rows, rounded up to whole pairs
  int64_t count;  // panels

  Panels() : data(nullptr), k(0), count(0) {}
  Panels(int64_t rows, int64_t columns)
      : data(nullptr),
        k(round_up(rows, kPair<O>)),
        count(round_up(columns, kPanelColumns<O>) / kPanelColumns<O>) {}
  int64_t size() const { return k * count * kPanelColumns<O>; }
  O* operator[](int64_t panel) const { return data + panel * k * kPanelColumns<O>; }
  // The panel that a member with panels begin to end reads after one.
  O* after(int64_t panel, int64_t begin, int64_t end) const {
    return data ? (*this)[panel + 1 < end ? panel + 1 : begin] : nullptr;
  }
};

namespace detail {

template <typename V>
inline constexpr int kLanesOf = sizeof(V) / sizeof(opwright::Lane<V>);

// Of two vectors in blocks of 2 * half lanes: `first` becomes the lower halves of both, side by
// side, `second` the upper ones.
template <typename V>
OPWRIGHT_INLINE void join_halves(V& first, V& second, int half) {
  constexpr int kLanes = kLanesOf<V>;
  const V a = first, b = second;
#if defined(__clang__)
  for (int l = 0; l < kLanes; ++l) {
    const bool is_second = l % (2 * half) >= half;
    first[l] = is_second ? b[l - half] : a[l];
    second[l] = is_second ? b[l] : a[l + half];
  }
#else
  decltype(a < b) low, high;
  OPWRIGHT_UNROLL
  for (int l = 0; l < kLanes; ++l) {
    const bool is_second = l % (2 * half) >= half;
    low[l] = is_second ? kLanes + l - half : l;
    high[l] = is_second ? kLanes + l : l + half;
  }
  first = __builtin_shuffle(a, b, low);
  second = __builtin_shuffle(a, b, high);
#endif
}

// rows[i][j] becomes rows[j][i]: blocks off the diagonal change places, of half the size each time.
template <typename V>
OPWRIGHT_INLINE void transpose(V (&rows)[kLanesOf<V>]) {
  OPWRIGHT_UNROLL
  for (int half = kLanesOf<V> / 2; half > 0; half /= 2) {
    OPWRIGHT_UNROLL
    for (int i = 0; i < kLanesOf<V>; ++i) {
      if (!(i & half)) join_halves(rows[i], rows[i + half], half);
    }
  }
}

}  // namespace detail

// Packs one panel whose columns lie in memory one by one: columns[c] has `rows` elements, or is
// null for zeros.
template <typename O>
void pack_columns(O* to, int64_t rows, const O* const (&columns)[kPanelColumns<O>]) {
  // A pair is moved as one word.
  using V = Vec<opwright::compute_t<O>>;
  constexpr int kLanes = opwright::kLanes<O>, kWord = kPair<O>;
  int64_t row = 0;
  for (; row + kLanes * kWord <= rows; row += kLanes * kWord) {
    for (int v = 0; v < kVectors; ++v) {
      V block[kLanes];
      for (int c = 0; c < kLanes; ++c) {
        const O* column = columns[v * kLanes + c];
        block[c] = V{};
        if (column) __builtin_memcpy(&block[c], column + row, sizeof block[c]);
      }
      detail::transpose(block);
      for (int i = 0; i < kLanes; ++i) {
        __builtin_memcpy(to + (row + i * kWord) * kPanelColumns<O> + v * kLanes * kWord, &block[i],
                         sizeof block[i]);
      }
    }
  }
  for (; row < round_up(rows, kWord); ++row) {
    for (int c = 0; c < kPanelColumns<O>; ++c) {
      to[(row / kWord * kPanelColumns<O> + c) * kWord + row % kWord] =
          columns[c] && row < rows ? columns[c][row] : O(0.0f);
    }
  }
}

// Packs one panel: value(row, column) is its element.
template <typename O, typename Value>
void pack_panel(O* to, int64_t rows, const Value& value) {
  for (int64_t row = 0; row < round_up(rows, kPair<O>); ++row) {
    for (int column = 0; column < kPanelColumns<O>; ++column) {
      O* place = to + (row / kPair<O> * kPanelColumns<O> + column) * kPair<O> + row % kPair<O>;
      *place = row < rows ? value(row, column) : O(0.0f);
    }
  }
}

namespace detail {

template <int M, typename E, typename V>
OPWRIGHT_INLINE void add_step(const E* row, int64_t stride, const E* panel, V (&sum)[M][kVectors]) {
  V column[kVectors];
  OPWRIGHT_UNROLL
  for (int v = 0; v < kVectors; ++v) column[v] = opwright::load(panel + v * opwright::kLanes<E>);
  OPWRIGHT_UNROLL
  for (int m = 0; m < M; ++m) {
    const V factor = opwright::splat<V>(row[m * stride]);
    OPWRIGHT_UNROLL
    for (int v = 0; v < kVectors; ++v) sum[m][v] = opwright::fma(factor, column[v], sum[m][v]);
  }
}

#if defined(__AVX512BF16__)
template <int M>
OPWRIGHT_INLINE void add_step(const bfloat16* row, int64_t stride, const bfloat16* panel,
                              Vec<float> (&sum)[M][kVectors]) {
  Vec<float> column[kVectors];
  OPWRIGHT_UNROLL
  for (int v = 0; v < kVectors; ++v) __builtin_memcpy(&column[v], panel + v * 32, sizeof column[v]);
  OPWRIGHT_UNROLL
  for (int m = 0; m < M; ++m) {
    uint32_t pair;
    __builtin_memcpy(&pair, row + m * stride, sizeof pair);
    const opwright::detail::UInt32Vec factor = pair - opwright::detail::UInt32Vec{};
    OPWRIGHT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      // The compilers disagree about the types of the intrinsic's builtin.
      asm("vdpbf16ps %2, %1, %0" : "+v"(sum[m][v]) : "v"(factor), "v"(column[v]));
    }
  }
}
#endif

}  // namespace detail

// What is to be read next, fetched into the cache near the core while products are computed: from
// beyond it it comes slower than they are.
struct Ahead {
  const char* from = nullptr;
  int64_t step = 0;  // bytes for each step of k; at most two cache lines

  OPWRIGHT_INLINE void fetch(int64_t steps) const {
    __builtin_prefetch(from + steps * step, 0, 2);
    __builtin_prefetch(from + steps * step + 64, 0, 2);
  }
};

// A group of rows, and the sums of their products with one panel.
template <typename E>
using Sums = Vec<E>[kVectors];

namespace detail {

template <int M, typename O, typename E>
void multiply_group(const O* rows, int64_t stride, const O* panel, int64_t k, Sums<E>* sums,
                    const Ahead& ahead) {
  constexpr int kStep = kPair<O>;
  constexpr int64_t kPanelStep = kPanelColumns<O> * kStep;
  Vec<E> sum[M][kVectors] = {};  // of this block alone: long chains of additions lose accuracy
  int64_t at = 0;
  if constexpr (M == 1) {
    // One row has too few sums to hide the latency of an addition, so two sets take turns.
    Vec<E> other[1][kVectors] = {};
    for (; at + kStep < k; at += 2 * kStep) {
      add_step<1>(rows + at, 0, panel + at / kStep * kPanelStep, sum);
      add_step<1>(rows + at + kStep, 0, panel + (at / kStep + 1) * kPanelStep, other);
    }
    OPWRIGHT_UNROLL
    for (int v = 0; v < kVectors; ++v) sum[0][v] += other[0][v];
  }
  if (M > 2 && ahead.from) {
    for (; at < k; at += kStep) {
      ahead.fetch(at / kStep);
      add_step<M>(rows + at, stride, panel + at / kStep * kPanelStep, sum);
    }
  }
  for (; at < k; at += kStep) add_step<M>(rows + at, stride, panel + at / kStep * kPanelStep, sum);
  OPWRIGHT_UNROLL
  for (int m = 0; m < M; ++m) {
    OPWRIGHT_UNROLL
    for (int v = 0; v < kVectors; ++v) sums[m][v] += sum[m][v];
  }
}

template <typename E, typename O>
void multiply_in_registers(const O* rows, int64_t stride, int64_t count, const O* panel, int64_t k,
                           Sums<E>* sums, const Ahead& ahead) {
  switch (count) {
    case 1:
      return multiply_group<1, O, E>(rows, stride, panel, k, sums, ahead);
    case 2:
      return multiply_group<2, O, E>(rows, stride, panel, k, sums, ahead);
#if defined(__AVX512F__)
    case 3:
      return multiply_group<3, O, E>(rows, stride, panel, k, sums, ahead);
    case 4:
      return multiply_group<4, O, E>(rows, stride, panel, k, sums, ahead);
    case 5:
      return multiply_group<5, O, E>(rows, stride, panel, k, sums, ahead);
    case 6:
      return multiply_group<6, O, E>(rows, stride, panel, k, sums, ahead);
#endif
  }
}

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
// Asks the system for the matrix unit, once; false where it has none to give.
inline bool may_use_tiles() {
  static const bool granted = [] {
    constexpr long kArchPrctl = 158, kRequestPermission = 0x1023, kTileData = 18;
    long result;
    asm volatile("syscall"
                 : "=a"(result)
                 : "a"(kArchPrctl), "D"(kRequestPermission), "S"(kTileData)
                 : "rcx", "r11", "memory");
    return result == 0;
  }();
  return granted;
}

// The unit's registers: 0 to 3 are the sums of a panel's vectors, 4 the rows, 5 to 7 the panel in
// turn.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

inline void multiply_tiles(const bfloat16* rows, int64_t stride, int64_t count,
                           const bfloat16* panel, int64_t blocks, Sums<float>* sums) {
  TileShapes shapes;
  for (int tile = 0; tile < 5; ++tile) shapes.rows[tile] = static_cast<uint8_t>(count);
  asm volatile("ldtilecfg %0" : : "m"(shapes));
  asm volatile("tilezero %%tmm0\n tilezero %%tmm1\n tilezero %%tmm2\n tilezero %%tmm3"
               :
               :
               : "memory");
  const int64_t row_bytes = stride * 2, panel_bytes = kPanelColumns<bfloat16> * 4,
                sum_bytes = sizeof(Sums<float>);
  asm volatile(
      "tileloadd (%0,%1,1), %%tmm0\n"
      "tileloadd 64(%0,%1,1), %%tmm1\n"
      "tileloadd 128(%0,%1,1), %%tmm2\n"
      "tileloadd 192(%0,%1,1), %%tmm3\n"
      :
      : "r"(sums), "r"(sum_bytes)
      : "memory");
  for (int64_t block = 0; block < blocks; ++block) {
    const bfloat16 *a = rows + block * 32, *b = panel + block * 32 * kPanelColumns<bfloat16>;
    asm volatile(
        "tileloadd (%0,%1,1), %%tmm4\n"
        "tileloadd (%2,%3,1), %%tmm5\n"
        "tdpbf16ps %%tmm5, %%tmm4, %%tmm0\n"
        "tileloadd 64(%2,%3,1), %%tmm6\n"
        "tdpbf16ps %%tmm6, %%tmm4, %%tmm1\n"
        "tileloadd 128(%2,%3,1), %%tmm7\n"
        "tdpbf16ps %%tmm7, %%tmm4, %%tmm2\n"
        "tileloadd 192(%2,%3,1), %%tmm5\n"
        "tdpbf16ps %%tmm5, %%tmm4, %%tmm3\n"
        :
        : "r"(a), "r"(row_bytes), "r"(b), "r"(panel_bytes)
        : "memory");
  }
  asm volatile(
      "tilestored %%tmm0, (%0,%1,1)\n"
      "tilestored %%tmm1, 64(%0,%1,1)\n"
      "tilestored %%tmm2, 128(%0,%1,1)\n"
      "tilestored %%tmm3, 192(%0,%1,1)\n"
      "tilerelease"
      :
      : "r"(sums), "r"(sum_bytes)
      : "memory");
}
#endif

}  // namespace detail

// sums[m] += row m of `rows` times a panel, for count <= kRows<O> rows of k elements.
template <typename E, typename O>
__attribute__((noinline)) void multiply_rows(const O* rows, int64_t stride, int64_t count,
                                             const O* panel, int64_t k, Sums<E>* sums,
                                             const Ahead& ahead) {
  if constexpr (!kIsTiled<O>) {
    detail::multiply_in_registers<E>(rows, stride, count, panel, k, sums, ahead);
  } else {
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
    int64_t done = 0;
    if (count > kMostRowsUntiled && detail::may_use_tiles()) {
      done = k / 32 * 32;
      detail::multiply_tiles(rows, stride, count, panel, k / 32, sums);
      if (done == k) return;
    }
    for (int64_t first = 0; first < count; first += kRegisterRows) {
      const int64_t group = count - first < kRegisterRows ? count - first : kRegisterRows;
      detail::multiply_in_registers<E>(rows + first * stride + done, stride, group,
                                       panel + done * kPanelColumns<O>, k - done, sums + first,
                                       Ahead());
    }
#endif
  }
}

// Bytes of a panel that all rows are multiplied with before the next: they stay in the first-level
// cache (32 KiB on most CPUs). Blocks of the matrix unit are compute-bound from the second level
// too.
template <typename O>
inline constexpr int64_t kBlockBytes = kIsTiled<O> ? 128 << 10 : 16 << 10;

// Rows that are multiplied with one panel after the other: their sums take 16 to 18 KiB.
template <typename O>
inline constexpr int64_t kRowsOfBlock = kIsTiled<O> ? 4 * kRows<O> : 12 * kRegisterRows;

// sums[m] = row m of `rows` times a panel, for any number of rows; `next` is the panel to be read
// after it.
template <typename E, typename O>
void multiply_panel(const O* rows, int64_t stride, int64_t count, const O* panel, int64_t k,
                    const O* next, Sums<E>* sums) {
  constexpr int64_t kRowBytes = kPanelColumns<O> * sizeof(O), kBlock = kBlockBytes<O> / kRowBytes;
  const int64_t groups = (count + kRows<O> - 1) / kRows<O>;
  __builtin_memset(static_cast<void*>(sums), 0, count * sizeof(Sums<E>));
  for (int64_t at = 0; at < k; at += kBlock) {
    const int64_t block = at + kBlock < k ? kBlock : k - at;
    const O* following = at + block < k ? panel + (at + block) * kPanelColumns<O> : next;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t first = count * group / groups;
      Ahead ahead;
      // A single group reads no slower than it computes.
      if (groups > 1 && following) {
        ahead.step = kRowBytes * kPair<O> / groups;
        ahead.from =
            reinterpret_cast<const char*>(following) + group * ahead.step * (block / kPair<O>);
      }
      multiply_rows<E>(rows + first * stride + at, stride, count * (group + 1) / groups - first,
                       panel + at * kPanelColumns<O>, block, sums + first, ahead);
    }
  }
}

}  // namespace opwright_ops
