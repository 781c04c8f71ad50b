// Products of whole sequences with a weight: by PyTorch, or through panels where those are faster
// or more accurate.
#pragma once

#include <opwright/tensor.h>

#include "sequence.h"

namespace opwright_ops {

template <typename S>
struct Matrix {
  S* data;
  int64_t rows, columns, row_stride, column_stride;

  Matrix(S* data, int64_t rows, int64_t columns, int64_t row_stride)
      : data(data), rows(rows), columns(columns), row_stride(row_stride), column_stride(1) {}
  template <typename T>
  explicit Matrix(View<T, 2> view)
      : data(const_cast<S*>(view.data())),
        rows(view.size(0)),
        columns(view.size(1)),
        row_stride(view.stride(0)),
        column_stride(view.stride(1)) {}

  Matrix transposed() const {
    Matrix result = *this;
    result.rows = columns, result.columns = rows;
    result.row_stride = column_stride, result.column_stride = row_stride;
    return result;
  }
  S& operator()(int64_t row, int64_t column) const {
    return data[row * row_stride + column * column_stride];
  }
  opwright::Tensor borrowed() const {
    return opwright::borrow(View<S, 2>{data, {rows, columns}, {row_stride, column_stride}});
  }
};

// The panels of a matrix, packed side by side.
template <typename O>
void pack(Panels<O>& panels, Buffer<O>& memory, const Matrix<O>& from) {
  panels = Panels<O>(from.rows, from.columns);
  memory.allocate(panels.size());
  panels.data = memory.data();
  opwright::parallel_for(panels.count, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = panel * kPanelColumns<O>;
      const O* source = from.data + first * from.column_stride;
      if (from.row_stride == 1) {
        const O* columns[kPanelColumns<O>];
        for (int64_t c = 0; c < kPanelColumns<O>; ++c) {
          columns[c] = first + c < from.columns ? source + c * from.column_stride : nullptr;
        }
        pack_columns(panels[panel], from.rows, columns);
      } else if (first + kPanelColumns<O> <= from.columns && from.column_stride == 1) {
        if constexpr (kPair<O> == 1) {
          for (int64_t row = 0; row < from.rows; ++row) {
            __builtin_memcpy(panels[panel] + row * kPanelColumns<O>, source + row * from.row_stride,
                             sizeof(O) * kPanelColumns<O>);
          }
          continue;
        }
        pack_panel(panels[panel], from.rows, [&](int64_t row, int64_t column) {
          return source[row * from.row_stride + column];
        });
      } else {
        pack_panel(panels[panel], from.rows, [&](int64_t row, int64_t column) {
          return first + column < from.columns ? from(row, first + column) : O(0.0f);
        });
      }
    }
  });
}

// Whether panels multiply elements of type O into sums of type E; PyTorch would round sums of
// bfloat16.
template <typename E, typename O>
#if defined(__AVX512F__)
inline constexpr bool kByPanels = opwright::detail::kSame<E, opwright::compute_t<O>> &&
                                  (sizeof(O) > 2 || opwright::detail::kSame<O, operand_t<O>>);
#else
inline constexpr bool kByPanels = false;
#endif

// A block of rows of `a` whose elements lie side by side: where it is, or copied.
template <typename O>
class RowBlock {
 public:
  explicit RowBlock(const Matrix<O>& a) : a_(a), stride_(a.row_stride) {
    if (a.column_stride == 1) return;
    stride_ = round_up(a.columns, opwright::kLanes<O>);
    copy_.allocate_zeros(kRowsOfBlock<O> * stride_);
  }

  int64_t stride() const { return stride_; }

  const O* take(int64_t first, int64_t count) {
    const O* from = a_.data + first * a_.row_stride;
    if (a_.column_stride == 1) return from;
    if (first == taken_) return copy_.data();
    taken_ = first;
    constexpr int kLanes = opwright::kLanes<O>;
    int64_t row = 0;
    if constexpr (sizeof(O) > 2) {
      for (; a_.row_stride == 1 && row + kLanes <= count; row += kLanes) {
        int64_t k = 0;
        for (; k + kLanes <= a_.columns; k += kLanes) {
          Vec<O> block[kLanes];
          for (int i = 0; i < kLanes; ++i)
            block[i] = opwright::load(from + row + (k + i) * a_.column_stride);
          detail::transpose(block);
          for (int i = 0; i < kLanes; ++i)
            opwright::store(&copy_[(row + i) * stride_ + k], block[i]);
        }
        copy(from, row, row + kLanes, k);
      }
    }
    copy(from, row, count, 0);
    return copy_.data();
  }

 private:
  void copy(const O* from, int64_t begin, int64_t end, int64_t first_k) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t k = first_k; k < a_.columns; ++k)
        copy_[row * stride_ + k] = from[row * a_.row_stride + k * a_.column_stride];
    }
  }

  const Matrix<O>& a_;
  int64_t stride_, taken_ = -1;
  Buffer<O> copy_;
};

// Stores the sums of a block of rows with the panel that begins at a column.
template <typename E>
void store_block(const Matrix<E>& out, int64_t first, int64_t count, int64_t column,
                 const Sums<E>* sums) {
  constexpr int kLanes = opwright::kLanes<E>;
  for (int64_t m = 0; m < count; ++m) {
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = column + v * kLanes, left = out.columns - at;
      if (left <= 0) break;
      const int lanes = static_cast<int>(left < kLanes ? left : kLanes);
      if (out.column_stride == 1) {
        store_first(&out(first + m, at), sums[m][v], lanes);
      } else {
        for (int l = 0; l < lanes; ++l) out(first + m, at + l) = sums[m][v][l];
      }
    }
  }
}

// Whether PyTorch's library has AVX-512 kernels for this CPU: it takes AVX2 on those of AMD.
inline bool has_wide_library() {
#if defined(__x86_64__)
  static const bool is_intel = (__builtin_cpu_init(), __builtin_cpu_is("intel"));
  return is_intel;
#else
  return true;
#endif
}

// out = a b. Rows of `a` have a readable, finite element behind an odd width of bfloat16.
template <typename E, typename O>
void multiply(const Matrix<E>& out, const Matrix<O>& a, const Matrix<O>& b) {
  if (!out.rows || !out.columns) return;
  if constexpr (opwright::detail::kSame<E, O>) {
    if (!kByPanels<E, O> || has_wide_library()) {
      opwright::call("aten::mm.out", a.borrowed(), b.borrowed(), out.borrowed());
      return;
    }
  }
  if constexpr (kByPanels<E, O>) {
    constexpr int64_t kBlock = kRowsOfBlock<O>;
    Panels<O> panels;
    Buffer<O> memory;
    pack(panels, memory, b);
    const int64_t blocks = (out.rows + kBlock - 1) / kBlock;
    opwright::parallel_for(blocks * panels.count, [&](int64_t begin, int64_t end) {
      Buffer<Sums<E>> sums(kBlock);
      RowBlock<O> rows(a);
      for (int64_t at = begin; at < end; ++at) {
        const int64_t panel = at % panels.count, first = at / panels.count * kBlock;
        const int64_t count = first + kBlock < out.rows ? kBlock : out.rows - first;
        const O* next = at + 1 < end ? panels[(panel + 1) % panels.count] : nullptr;
        multiply_panel<E>(rows.take(first, count), rows.stride(), count, panels[panel], panels.k,
                          next, sums.data());
        store_block(out, first, count, panel * kPanelColumns<O>, sums.data());
      }
    });
  }
}

}  // namespace opwright_ops
