// GELU(input + bias) and its gradients where a tensor is transposed: the rows of a column are
// adjacent in memory. Tiles of it go through shared memory, so that they are read in lines of 128
// bytes and leave in rows. Included by cuda.cu, behind its formulas.
#pragma once

// How many tiles a block goes through at most, and how many it holds at once.
constexpr int kTransposedDeep = 16, kTransposedStages = 3;
// Blocks that a multiprocessor holds at once: it limits the registers of a thread to 80, or 64.
template <typename T>
constexpr int kTransposedBlocks = sizeof(T) == 2 ? 3 : 4;
// A tile has kTransposedPacks packs to a side, along rows and along columns.
constexpr int kTransposedPacks = 8;

// A tensor of packs: along its rows, or, where it is transposed, along its columns.
template <typename T>
struct Source {
  const T* data;
  int64_t row, column;  // strides
  bool is_transposed;
};

template <typename T>
Source<T> source_of(const View<const T, 2>& view) {
  const bool is_transposed = view.stride(1) != 1;
  return {view.data(), view.stride(0), view.stride(1), is_transposed};
}

// Whether every pack of a matrix along its rows, or of its transpose, is 16 bytes at 16 bytes.
template <typename T>
bool has_packs(const T* data, int64_t n, int64_t stride, int64_t apart) {
  constexpr int kWidth = kPackWidth<std::remove_const_t<T>>;
  return stride == 1 && n % kWidth == 0 && apart % kWidth == 0 &&
         opwright::is_aligned(data, kWidth);
}
template <typename T>
bool has_packs(const View<T, 2>& view) {
  return has_packs(view.data(), view.size(1), view.stride(1), view.stride(0));
}
template <typename T>
bool is_transposed(const View<const T, 2>& view) {
  return !has_packs(view) && has_packs(view.data(), view.size(0), view.stride(0), view.stride(1));
}

// Whether one of the inputs is transposed, and the others are that or made of packs.
template <typename T, typename... Inputs>
bool are_transposed(const View<T, 2>& output, const Inputs&... inputs) {
  return output.size(0) > 0 && output.size(1) > 0 && (is_transposed(inputs) || ...) &&
         ((is_transposed(inputs) || has_packs(inputs)) && ...) && has_packs(output);
}

template <typename T>
struct Tiles {
  static constexpr int kWidth = kPackWidth<T>, kSide = kTransposedPacks * kWidth;
  static constexpr int kElements = kSide * kSide;

  // Where pack `pack` of line `line` lies: of a column of a transposed source, or of a row. What
  // eight neighbours read at once, columns that are a pack apart or packs of a row, is in eight
  // places, and so in different banks.
  static __device__ OPWRIGHT_INLINE int place(int line, int pack, bool is_transposed) {
    const int turn = is_transposed ? line / kWidth : line;
    return line * kSide + (pack ^ turn % kTransposedPacks) * kWidth;
  }

  // Starts to copy the tile that begins at `row` and `column`.
  static __device__ OPWRIGHT_INLINE void copy(const Source<T>& source, int64_t rows, int64_t n,
                                              int64_t row, int64_t column, T* tile) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, pack = thread % kTransposedPacks;
    const int64_t along = pack * kWidth;
    OPWRIGHT_UNROLL
    for (int line = thread / kTransposedPacks; line < kSide; line += kThreads / kTransposedPacks) {
      const int64_t at_row = row + (source.is_transposed ? along : line);
      const int64_t at_column = column + (source.is_transposed ? line : along);
      if (at_row < rows && at_column < n) {
        opwright::copy_async(tile + place(line, pack, source.is_transposed),
                             source.data + at_row * source.row + at_column * source.column);
      }
    }
  }

  // The pack of row `row` of a tile at the columns of this thread.
  static __device__ OPWRIGHT_INLINE Pack<T, kWidth> load(const Source<T>& source, const T* tile,
                                                         int row) {
    const int column = threadIdx.x * kWidth;
    if (!source.is_transposed)
      return opwright::load_pack<kWidth>(tile + place(row, threadIdx.x, false));
    Pack<T, kWidth> pack;
    OPWRIGHT_UNROLL
    for (int i = 0; i < kWidth; ++i)
      pack.elements[i] = tile[place(column + i, row / kWidth, true) + row % kWidth];
    return pack;
  }
};

// Forward: `first` is the input. Backward: it is the gradient of the output, `second` the input,
// and the column sums of the result go to `partials`.
template <typename T, bool kIsBackward>
__global__ void __launch_bounds__(kThreads, kTransposedBlocks<T>)
    bias_gelu_transposed_kernel(Rows rows, int32_t depth, Source<T> first, Source<T> second,
                                Bias<T> bias, Approximate approximate, T* output,
                                int64_t output_row, Partials<compute_t<T>> partials, T* grad_bias,
                                int64_t grad_bias_stride) {
  using S = compute_t<T>;
  constexpr int kWidth = Tiles<T>::kWidth, kSide = Tiles<T>::kSide;
  constexpr int kTile = Tiles<T>::kElements, kStage = (kIsBackward ? 2 : 1) * kTile;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  T* stages = reinterpret_cast<T*>(shared_bytes);
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * kSide;
  const int64_t column = first_column + threadIdx.x * kWidth;
  const int64_t begin = static_cast<int64_t>(opwright::chunk_of_block()) * depth;
  const int64_t end = begin + depth < rows.panels ? begin + depth : rows.panels;
  const auto copy = [&](int64_t row, int stage) {
    T* to = stages + stage * kStage;
    if (row < end) {
      Tiles<T>::copy(first, rows.panels, rows.n, row, first_column, to);
      if (kIsBackward) Tiles<T>::copy(second, rows.panels, rows.n, row, first_column, to + kTile);
    }
    opwright::end_copies();
  };
  opwright::wait_for_previous();
  S biases[kWidth] = {}, sums[kWidth] = {};
  if (column < rows.n) {
    OPWRIGHT_UNROLL
    for (int i = 0; i < kWidth; ++i) biases[i] = bias.data[(column + i) * bias.stride];
  }
  for (int i = 0; i < kTransposedStages - 1; ++i) copy(begin + i * kSide, i);
  int stage = 0;
  for (int64_t row = begin; row < end; row += kSide) {
    opwright::wait_for_copies<kTransposedStages - 2>();
    __syncthreads();  // and all have read what the next copy goes over
    copy(row + (kTransposedStages - 1) * kSide,
         (stage + kTransposedStages - 1) % kTransposedStages);
    const T* tile = stages + stage * kStage;
    for (int at = threadIdx.y; at < kSide && row + at < end && column < rows.n; at += blockDim.y) {
      S values[kWidth];
      opwright::unpack(Tiles<T>::load(first, tile, at), values);
      S slopes[kWidth];
      if constexpr (kIsBackward) opwright::unpack(Tiles<T>::load(second, tile + kTile, at), slopes);
      choose(approximate, [&]<Approximate kApproximate>() {
        OPWRIGHT_UNROLL
        for (int i = 0; i < kWidth; ++i) {
          if constexpr (kIsBackward) {
            values[i] *= d_gelu<T, kApproximate>(slopes[i] + biases[i]);
            sums[i] += values[i];
          } else {
            values[i] = gelu<T, kApproximate>(values[i] + biases[i]);
          }
        }
      });
      opwright::store_pack(output + (row + at) * output_row + column, opwright::pack_of<T>(values));
    }
    stage = (stage + 1) % kTransposedStages;
  }
  opwright::let_next_start();
  if constexpr (kIsBackward) {
    opwright::wait_for_copies();
    __syncthreads();  // the sums take the place of the tiles
    opwright::write_column_sums<T, S, kWidth>(sums, rows, partials, grad_bias, grad_bias_stride);
  }
}

template <typename T>
size_t stage_bytes(int sources) {
  return sizeof(T) * Tiles<T>::kElements * kTransposedStages * sources;
}

// A panel is a row.
template <typename T>
opwright::Tiling tile_transposed(const Rows& rows) {
  constexpr int kSide = Tiles<T>::kSide;
  const int64_t slabs = (rows.n + kSide - 1) / kSide, tiles = (rows.panels + kSide - 1) / kSide;
  const int64_t wanted =
      (opwright::current_device().multiprocessors * kTransposedBlocks<T> + slabs - 1) / slabs;
  int64_t deep = tiles / wanted;
  deep = deep < 1 ? 1 : deep > kTransposedDeep ? kTransposedDeep : deep;
  const int64_t chunks = (tiles + deep - 1) / deep, layers = (chunks + 65534) / 65535;
  return {dim3(static_cast<unsigned>(slabs), static_cast<unsigned>((chunks + layers - 1) / layers),
               static_cast<unsigned>(layers)),
          dim3(kTransposedPacks, kThreads / kTransposedPacks), static_cast<int32_t>(deep * kSide)};
}

template <typename T>
void bias_gelu_transposed(const View<const T, 2>& input, const View<const T, 1>& bias,
                          Approximate approximate, const View<T, 2>& output, cudaStream_t stream) {
  const Rows rows{input.size(1), input.size(1), 1, static_cast<int32_t>(input.size(0)),
                  input.size(1)};
  const auto tiling = tile_transposed<T>(rows);
  opwright::launch_behind(bias_gelu_transposed_kernel<T, false>, tiling.grid, tiling.block,
                          stage_bytes<T>(1), stream, rows, tiling.depth, source_of(input),
                          Source<T>{}, bias_of(bias, 1), approximate, output.data(),
                          output.stride(0), Partials<compute_t<T>>{}, static_cast<T*>(nullptr),
                          int64_t{0});
}

template <typename T>
void bias_gelu_transposed_backward(const View<const T, 2>& grad_output,
                                   const View<const T, 2>& input, const View<const T, 1>& bias,
                                   Approximate approximate, const View<T, 2>& grad_input,
                                   const View<T, 1>& grad_bias, cudaStream_t stream) {
  using S = compute_t<T>;
  constexpr int kWidth = Tiles<T>::kWidth;
  const Rows rows{input.size(1), input.size(1), 1, static_cast<int32_t>(input.size(0)),
                  input.size(1)};
  const auto tiling = tile_transposed<T>(rows);
  const auto partials = opwright::partials_of<S>(rows, tiling, kWidth);
  const size_t of_sums = opwright::column_sums_bytes<S, kWidth>(tiling.block);
  const size_t bytes = std::max(of_sums, stage_bytes<T>(2));
  opwright::launch_behind(bias_gelu_transposed_kernel<T, true>, tiling.grid, tiling.block, bytes,
                          stream, rows, tiling.depth, source_of(grad_output), source_of(input),
                          bias_of(bias, 1), approximate, grad_input.data(), grad_input.stride(0),
                          partials, grad_bias.data(), grad_bias.stride(0));
  opwright::sum_partials(partials, rows.n, grad_bias, stream);
}
