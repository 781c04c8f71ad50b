// Products of whole sequences with a weight: PyTorch's own, but for bfloat16 with sums kept in
// float.
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

// out = a b.
template <typename S>
void multiply(const Matrix<S>& out, const Matrix<S>& a, const Matrix<S>& b) {
  if (!out.rows || !out.columns) return;
  opwright::call("aten::mm.out", a.borrowed(), b.borrowed(), out.borrowed());
}

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

#if defined(__AVX512BF16__)
// The same with sums in float. Rows of `a` have a readable, finite element behind an odd width.
inline void multiply(const Matrix<float>& out, const Matrix<bfloat16>& a,
                     const Matrix<bfloat16>& b) {
  constexpr int64_t kMostRows = 64;  // their sums take 16 KiB
  Panels<bfloat16> panels;
  Buffer<bfloat16> memory;
  pack(panels, memory, b);
  opwright::parallel_for(panels.count, [&](int64_t begin, int64_t end) {
    Buffer<Sums<float>> sums(kMostRows);
    for (int64_t panel = begin; panel < end; ++panel) {
      for (int64_t first = 0; first < out.rows; first += kMostRows) {
        const int64_t count = first + kMostRows < out.rows ? kMostRows : out.rows - first;
        multiply_panel<float>(a.data + first * a.row_stride, a.row_stride, count, panels[panel],
                              panels.k, static_cast<const bfloat16*>(nullptr), sums.data());
        for (int64_t m = 0; m < count; ++m) {
          for (int v = 0; v < kVectors; ++v) {
            const int64_t column = (panel * kVectors + v) * 16;
            const int lanes =
                static_cast<int>(out.columns - column < 16 ? out.columns - column : 16);
            if (lanes <= 0) break;
            float* to = out.data + (first + m) * out.row_stride + column;
            if (lanes == 16)
              opwright::store(to, sums[m][v]);
            else
              opwright::store_partial(to, sums[m][v], lanes);
          }
        }
      }
    }
  });
}
#endif

}  // namespace opwright_ops
