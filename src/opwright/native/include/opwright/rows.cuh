// How the threads of a grid share rows x n elements. Every thread keeps the same columns for all
// its rows: what belongs to a column (a bias, a sum) stays in registers, and no loop divides.
//
// Rows are laid end to end into panels of `height` rows and width = height * n columns, so that
// neither short rows nor rows that are not a multiple of a pack leave threads idle: the last panel
// alone may be shorter. A block is `across` threads wide, each with the N columns of a pack, and
// `down` panels high; blockIdx.x says which columns, blockIdx.y which panels.
//
//   const Packing packing = packing_of(output, input);                                  // host
//   const Rows rows = cut_rows(input.size(0), input.size(1), packing.width, packing.height_step);
//   const Tiling tiling = tile(rows, {.pack = packing.width, .deep = 4});
//   kernel<<<tiling.grid, tiling.block, 0, stream>>>(rows, tiling.depth, plane_of(rows, input));
//
//   const Lot<N> lot(rows, depth);                                                      // device
//   const T* at = plane.at(lot);
//   for (int32_t panel = lot.first; panel < lot.end; panel += lot.step) {
//     ...;                                        // a pack of N elements at `at`
//     at += lot.step * plane.panel;
//   }
//   for (int i = 0; i < lot.partial; ++i) ...;    // at[i]: what the tensor ends in
#pragma once

#include <cstdint>

#include "opwright/types.h"
#include "opwright/vector.cuh"
#include "opwright/view.h"

namespace opwright {

// Threads of a block. bias_gelu, bfloat16, (8192, 4096): 512 take 7 % longer, 128 the same forward
// and 1 % longer backward (NVIDIA H200, torch 2.11.0+cu130, nvcc 13.0).
inline constexpr int kThreads = 256;
inline constexpr int kWarp = 32;

// How rows x n elements are cut into panels.
struct Rows {
  int64_t n, width;
  int32_t height, panels;
  int64_t last;  // elements in the last panel
};

// The share of threads left idle at the right edge that a block of `columns` columns would have is
// more than 1/16.
inline bool is_wasteful(int64_t width, int64_t columns) {
  return (width + columns - 1) / columns * columns * 16 > width * 17;
}

// Rows for packs of `pack` elements; the height is a multiple of `height_step` (or all rows).
// Without elements there are no panels.
inline Rows cut_rows(int64_t rows, int64_t n, int pack, int height_step = 1) {
  if (rows == 0 || n == 0) return {n, 0, 1, 0, 0};
  // A few warps wide, so that a panel's end costs little; 64 steps then find a good height.
  const int64_t least = (4 * kWarp * pack + n - 1) / n;
  int64_t height = (least + height_step - 1) / height_step * height_step;
  for (int i = 0; i < 64 && height < rows && is_wasteful(height * n, kWarp * pack); ++i) {
    height += height_step;
  }
  if (height > rows) height = rows;
  const int64_t panels = (rows + height - 1) / height;
  return {n, height * n, static_cast<int32_t>(height), static_cast<int32_t>(panels),
          (rows - (panels - 1) * height) * n};
}

// Rows of a tensor without rows: `count` elements cut into panels of one block's width.
inline Rows cut_flat(int64_t count, int pack) {
  if (count == 0) return {0, 0, 1, 0, 0};
  const int64_t width = count < kThreads * pack ? count : kThreads * pack;
  const int64_t panels = (count + width - 1) / width;
  return {width, width, 1, static_cast<int32_t>(panels), count - (panels - 1) * width};
}

// Grid and block of a launch; each block goes through `depth` panels. One block where there are
// none.
struct Tiling {
  dim3 grid, block;
  int32_t depth;
};

// What a kernel wants of its tiling.
struct Shape {
  int pack;               // elements of a pack
  int deep;               // panels that a thread goes through, where there are that many
  int across = kThreads;  // widest block, as long as there are panels for the threads below
  int64_t blocks = 0;     // blocks to have at least; threads go less deep for it
  // Chunks along gridDim.y, at most; gridDim.z counts on. CUDA allows 65535; tests take fewer.
  int64_t max_chunks = 65535;
};

inline Tiling tile(const Rows& rows, Shape shape) {
  if (rows.panels == 0) return {dim3(1), dim3(kThreads), 1};
  int across = kThreads;
  while (across > kWarp && kThreads / across * 2 <= rows.panels &&
         (across > shape.across || is_wasteful(rows.width, int64_t{across} * shape.pack))) {
    across /= 2;
  }
  const int64_t columns = int64_t{across} * shape.pack, down = kThreads / across;
  const int64_t slabs = (rows.width + columns - 1) / columns;
  int64_t chunks = (rows.panels + down * shape.deep - 1) / (down * shape.deep);
  if (slabs * chunks < shape.blocks) chunks = shape.blocks / slabs > 0 ? shape.blocks / slabs : 1;
  const int64_t depth = ((rows.panels + chunks - 1) / chunks + down - 1) / down * down;
  chunks = (rows.panels + depth - 1) / depth;
  const int64_t layers = (chunks + shape.max_chunks - 1) / shape.max_chunks;
  return {dim3(static_cast<unsigned>(slabs), static_cast<unsigned>((chunks + layers - 1) / layers),
               static_cast<unsigned>(layers)),
          dim3(static_cast<unsigned>(across), static_cast<unsigned>(down)),
          static_cast<int32_t>(depth)};
}

// The chunks of a grid, and the one of this block. A grid of several layers has a few more than the
// tensor needs where their number does not divide by that of the layers: the last ones are empty.
inline int64_t chunks_of(const Tiling& tiling) { return int64_t{tiling.grid.y} * tiling.grid.z; }
__device__ inline int32_t chunk_of_block() {
  return static_cast<int32_t>(blockIdx.z * gridDim.y + blockIdx.y);
}

// What one thread has to do: columns column..column + N of the panels first, first + step, ...
// before `end`. An empty chunk has none.
template <int N>
struct Lot {
  int64_t column;  // in the panel: row * n + rest
  int64_t rest;
  uint32_t row;
  int32_t first, step, end;
  int partial;  // elements of the pack in panel `end` that the tensor ends in, or 0

  __device__ Lot(const Rows& rows, int32_t depth) {
    column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    const int32_t begin = chunk_of_block() * depth;
    first = begin + static_cast<int32_t>(threadIdx.y);
    step = static_cast<int32_t>(blockDim.y);
    end = depth < rows.panels - begin ? begin + depth : rows.panels;
    partial = 0;
    row = 0;
    rest = column;
    if (rows.height > 1) {
      row = static_cast<uint32_t>(column) / static_cast<uint32_t>(rows.n);
      rest = static_cast<uint32_t>(column) - row * static_cast<uint32_t>(rows.n);
    }
    if (column >= rows.width || begin >= rows.panels) {
      end = first;
    } else if (end == rows.panels && column + N > rows.last) {
      --end;
      if (column < rows.last && (end - first) % step == 0) {
        partial = static_cast<int>(rows.last - column);
      }
    }
  }
};

// Calls body(i) for those of kAtOnce panels that exist: `left` is end - panel, what is left of the
// lot. for_each_panel asks once, since nearly always all exist; for_each_panel_alone asks for each.
// The compiler schedules the two differently; NOTES.md of bias_gelu has what each was good for.
template <int kAtOnce, int N, typename Body>
__device__ OPWRIGHT_INLINE void for_each_panel_alone(const Lot<N>& lot, int left,
                                                     const Body& body) {
  OPWRIGHT_UNROLL
  for (int i = 0; i < kAtOnce; ++i) {
    if (i * lot.step < left) body(i);
  }
}
template <int kAtOnce, int N, typename Body>
__device__ OPWRIGHT_INLINE void for_each_panel(const Lot<N>& lot, int left, const Body& body) {
  if ((kAtOnce - 1) * lot.step < left) {
    OPWRIGHT_UNROLL
    for (int i = 0; i < kAtOnce; ++i) body(i);
  } else {
    for_each_panel_alone<kAtOnce>(lot, left, body);
  }
}

// A tensor as a thread walks it.
template <typename T>
struct Plane {
  T* data;
  int64_t row, column, panel;  // strides
  int64_t gap;                 // elements between two rows

  // The element at the first of a thread's columns in panel `lot.first`.
  template <int N>
  __device__ T* at(const Lot<N>& lot) const {
    // Packs are of tensors whose columns are adjacent.
    return data + lot.row * row + (N > 1 ? lot.rest : lot.rest * column) + lot.first * panel;
  }
};

// The columns of a thread's packs that are in the row they begin in. The others are `gap`
// elements further on: an unaligned pack is joined from two loads, which stay between the start of
// that row and the end of the next, since packing_of wants rows of N columns or more.
template <int N>
__device__ OPWRIGHT_INLINE int columns_here(const Rows& rows, const Lot<N>& lot) {
  return lot.rest + N > rows.n ? static_cast<int>(rows.n - lot.rest) : N;
}

// How the tensors of a kernel may be cut: packs of `width` elements, or single elements.
struct Packing {
  int width, height_step;
  bool is_aligned;  // load_pack can load the packs, and not only load_unaligned
};

namespace detail {

template <typename T>
int64_t gap_of(const View<T, 2>& view) {
  return view.size(0) == 1 ? 0 : view.stride(0) - view.size(1);
}
template <typename T>
bool has_adjacent_columns(const View<T, 2>& view) {
  return view.size(1) == 1 || view.stride(1) == 1;
}
// Every pack is at 16 bytes: rows are whole packs and a multiple of a pack apart, or follow each
// other without a gap.
template <typename T>
bool has_aligned_packs(const View<T, 2>& view) {
  const int64_t n = view.size(1), gap = gap_of(view);
  return has_adjacent_columns(view) && is_aligned(view.data(), kPackWidth<T>) &&
         (gap == 0 || (n % kPackWidth<T> == 0 && gap % kPackWidth<T> == 0));
}

}  // namespace detail

// Packs need an output of aligned ones, and inputs with adjacent columns. Rows that are not
// whole packs are cut height_step at a time; inputs with gaps between them must have as many
// columns as a pack, so that it lies in two rows at most.
template <typename T, typename... Inputs>
Packing packing_of(const View<T, 2>& output, const Inputs&... inputs) {
  constexpr int kWidth = kPackWidth<T>;
  const int64_t n = output.size(1);
  const auto is_readable = [&](const auto& view) {
    const int64_t gap = detail::gap_of(view);
    return detail::has_aligned_packs(view) ||
           (detail::has_adjacent_columns(view) && (gap == 0 || (gap > 0 && n >= kWidth)));
  };
  const bool is_aligned = (detail::has_aligned_packs(inputs) && ...);
  if (!detail::has_aligned_packs(output) || !(is_readable(inputs) && ...) ||
      !(is_aligned || sizeof(T) < 8)) {
    return {1, 1, true};
  }
  if (n % kWidth == 0) return {kWidth, 1, is_aligned};
  if (n > (1 << 28)) return {1, 1, true};
  int64_t step = kWidth;
  while (step > 1 && n % 2 == 0 && (step / 2 * n) % kWidth == 0) step /= 2;
  return {kWidth, static_cast<int>(step), is_aligned};
}

template <typename T>
Plane<T> plane_of(const Rows& rows, const View<T, 2>& view) {
  const int64_t row = view.size(0) == 1 ? rows.n : view.stride(0);
  return {view.data(), row, view.size(1) == 1 ? 1 : view.stride(1), rows.height * row,
          detail::gap_of(view)};
}

}  // namespace opwright
