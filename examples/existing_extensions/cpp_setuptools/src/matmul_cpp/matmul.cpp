// matmul: a @ b for matrices of any size and strides, float and double, on the CPU.
#include <torch/extension.h>

#include <algorithm>
#include <memory>

namespace {

// A task computes kBlock x kBlock elements of the output. It copies its parts of a and b, kDepth
// deep, side by side into panels of at most 192 KiB (384 in double), which the second-level cache
// holds together.
constexpr int64_t kBlock = 192;
constexpr int64_t kDepth = 256;

// A micro-tile is held in registers: kRows x kVectors, 12 of the 16 that AVX2 has.
constexpr int64_t kRows = 6;
constexpr int64_t kVectors = 2;
#if defined(__AVX512F__)
constexpr int64_t kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int64_t kVectorBytes = 32;
#else
constexpr int64_t kVectorBytes = 16;
#endif
template <typename T>
constexpr int64_t kLanes = kVectorBytes / sizeof(T);
template <typename T>
constexpr int64_t kColumns = kVectors * kLanes<T>;
static_assert(kBlock % kRows == 0 && kBlock % kColumns<float> == 0, "panels have no room for more");

template <typename T>
struct Matrix {
  T* data;
  int64_t rows, columns, row_stride, column_stride;
};

// tile[kRows][kColumns] = sum over k of a[k][kRows] * b[k][kColumns].
template <typename T>
void micro_tile(const T* a, const T* b, int64_t depth, T* tile) {
  typedef T Vector __attribute__((vector_size(kVectorBytes)));
  typedef T Unaligned __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
  Vector sum[kRows][kVectors] = {};
  for (int64_t k = 0; k < depth; ++k, a += kRows, b += kColumns<T>) {
#pragma GCC unroll 8
    for (int64_t j = 0; j < kVectors; ++j) {
      const Vector right = *reinterpret_cast<const Unaligned*>(b + j * kLanes<T>);
#pragma GCC unroll 8
      for (int64_t i = 0; i < kRows; ++i) sum[i][j] += a[i] * right;
    }
  }
#pragma GCC unroll 16
  for (int64_t i = 0; i < kRows * kVectors; ++i) {
    *reinterpret_cast<Unaligned*>(tile + i * kLanes<T>) = sum[i / kVectors][i % kVectors];
  }
}

// Copies count x depth elements from `from` in slivers of `width`: to[sliver][k][within], rest
// zero.
template <typename T>
void pack(const T* from, int64_t stride, int64_t count, int64_t depth_stride, int64_t depth,
          int64_t width, T* to) {
  for (int64_t first = 0; first < count; first += width, to += width * depth) {
    const int64_t present = std::min(width, count - first);
    if (present < width) std::fill_n(to, width * depth, T(0));
    const T* sliver = from + first * stride;
    if (stride == 1) {
      for (int64_t k = 0; k < depth; ++k)
        std::copy_n(sliver + k * depth_stride, present, to + k * width);
    } else {
      for (int64_t i = 0; i < present; ++i) {
        for (int64_t k = 0; k < depth; ++k)
          to[k * width + i] = sliver[i * stride + k * depth_stride];
      }
    }
  }
}

// Computes the block of c whose first element is (row, column).
template <typename T>
void block(const Matrix<const T>& a, const Matrix<const T>& b, const Matrix<T>& c, int64_t row,
           int64_t column, T* a_panel, T* b_panel) {
  constexpr int64_t kWide = kColumns<T>;
  const int64_t rows = std::min(kBlock, c.rows - row);
  const int64_t columns = std::min(kBlock, c.columns - column);
  T tile[kRows * kWide];
  for (int64_t k = 0; k < a.columns; k += kDepth) {
    const int64_t depth = std::min(kDepth, a.columns - k);
    pack(a.data + row * a.row_stride + k * a.column_stride, a.row_stride, rows, a.column_stride,
         depth, kRows, a_panel);
    pack(b.data + k * b.row_stride + column * b.column_stride, b.column_stride, columns,
         b.row_stride, depth, kWide, b_panel);
    for (int64_t j = 0; j < columns; j += kWide) {
      for (int64_t i = 0; i < rows; i += kRows) {
        micro_tile(a_panel + i * depth, b_panel + j * depth, depth, tile);
        const int64_t tall = std::min(kRows, rows - i), wide = std::min(kWide, columns - j);
        for (int64_t y = 0; y < tall; ++y) {
          T* to = c.data + (row + i + y) * c.row_stride + column + j;
          for (int64_t x = 0; x < wide; ++x) to[x] = tile[y * kWide + x] + (k ? to[x] : T(0));
        }
      }
    }
  }
}

template <typename T>
void matmul_kernel(const Matrix<const T>& a, const Matrix<const T>& b, const Matrix<T>& c) {
  const int64_t across = (c.columns + kBlock - 1) / kBlock;
  const int64_t blocks = (c.rows + kBlock - 1) / kBlock * across;
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<T[]> a_panel(new T[kBlock * kDepth]), b_panel(new T[kBlock * kDepth]);
    for (int64_t i = begin; i < end; ++i) {
      block(a, b, c, i / across * kBlock, i % across * kBlock, a_panel.get(), b_panel.get());
    }
  });
}

template <typename T>
Matrix<const T> matrix(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<T>(), tensor.size(0), tensor.size(1), tensor.stride(0),
          tensor.stride(1)};
}

at::Tensor matmul(const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK_VALUE(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0),
                    "matmul: cannot multiply ", a.sizes(), " by ", b.sizes());
  TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), "matmul: a is ", a.scalar_type(), ", b is ",
                   b.scalar_type());
  TORCH_CHECK_VALUE(a.device().is_cpu() && b.device().is_cpu(),
                    "matmul: a and b must be on the CPU");
  const auto sizes = {a.size(0), b.size(1)};
  if (a.size(1) == 0) return at::zeros(sizes, a.options());
  at::Tensor c = at::empty(sizes, a.options());
  AT_DISPATCH_FLOATING_TYPES(a.scalar_type(), "matmul", [&] {
    const Matrix<scalar_t> to{c.mutable_data_ptr<scalar_t>(), c.size(0), c.size(1), c.size(1), 1};
    matmul_kernel<scalar_t>(matrix<scalar_t>(a), matrix<scalar_t>(b), to);
  });
  return c;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("matmul", &matmul, "a @ b, on the CPU"); }
