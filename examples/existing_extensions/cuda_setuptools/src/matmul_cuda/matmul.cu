// matmul: a @ b for matrices of any size and strides, on a GPU.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
// Every header that needs a torch with CUDA:
#include <c10/cuda/CUDAGuard.h>  // with CUDAStream.h, CUDAException.h

namespace {

// A block of 16 x 16 threads computes kTile x kTile elements, kTile / 16 in each direction a
// thread, from slices of a and b that are kDepth deep. A thread's elements lie in groups of four,
// which one 16-byte load takes from shared memory.
constexpr int kSide = 16;
constexpr int kThreads = kSide * kSide;
constexpr int kDepth = 16;
constexpr int kGroup = 4;

// Two blocks of large tiles on a multiprocessor: at most 128 registers a thread. Doubles need more
// for the sums alone.
template <typename T, int kTile>
constexpr int kBlocks = kTile == 128 && sizeof(T) < 8 ? 2 : 1;

// A matrix whose lines (rows of a, columns of b) are multiplied with those of the other.
template <typename T>
struct Lines {
  const T* data;
  int64_t count, stride, depth_stride;
};

// What a thread brings of a slice: elements `step` apart, along whichever direction lies together
// in memory.
template <typename T, int kTile>
struct Loader {
  using Math = at::opmath_type<T>;
  static constexpr int kCount = kTile * kDepth / kThreads;

  __device__ Loader(const Lines<T>& lines, int64_t first) {
    const bool is_deep = lines.depth_stride == 1;
    line = is_deep ? threadIdx.x / kDepth : threadIdx.x % kTile;
    depth = is_deep ? threadIdx.x % kDepth : threadIdx.x / kTile;
    line_step = is_deep ? kThreads / kDepth : 0;
    depth_step = is_deep ? 0 : kThreads / kTile;
    lines_left = lines.count - first;
    from = lines.data + (first + line) * lines.stride + depth * lines.depth_stride;
    step = line_step * lines.stride + depth_step * lines.depth_stride;
    advance = kDepth * lines.depth_stride;
  }

  // Loads the next slice; what lies outside is zero.
  __device__ void load(int64_t depth_left) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool is_inside =
          line + i * line_step < lines_left && depth + i * depth_step < depth_left;
      values[i] = is_inside ? Math(from[i * step]) : Math(0);
    }
    from += advance;
  }

  template <typename Slice>
  __device__ void store(Slice& slice) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      slice[depth + i * depth_step][line + i * line_step] = values[i];
  }

  const T* from;
  int64_t step, advance, lines_left;
  int line, depth, line_step, depth_step;
  Math values[kCount];
};

// The place in a tile of a thread's element i.
__device__ int place(int thread, int i) {
  return i / kGroup * (kGroup * kSide) + thread * kGroup + i % kGroup;
}

template <typename T, int kTile>
__global__ void __launch_bounds__(kThreads, kBlocks<T, kTile>)
    matmul_kernel(Lines<T> a, Lines<T> b, T* c, int64_t depth) {
  using Math = at::opmath_type<T>;  // float for 16-bit types
  constexpr int kPerThread = kTile / kSide;
  // Rows of slices are 16 bytes longer than a tile, so that stores across them meet other banks.
  constexpr int kPitch = kTile + 16 / sizeof(Math);
  __shared__ alignas(16) Math a_slice[kDepth][kPitch], b_slice[kDepth][kPitch];

  const int64_t across = (b.count + kTile - 1) / kTile;
  const int64_t row = blockIdx.x / across * kTile, column = blockIdx.x % across * kTile;
  const int down = threadIdx.x / kSide, right = threadIdx.x % kSide;
  Loader<T, kTile> a_loader(a, row), b_loader(b, column);
  Math sum[kPerThread][kPerThread] = {};

  a_loader.load(depth);
  b_loader.load(depth);
  for (int64_t left = depth; left > 0; left -= kDepth) {
    a_loader.store(a_slice);
    b_loader.store(b_slice);
    __syncthreads();
    if (left > kDepth) {  // on their way while this slice is computed with
      a_loader.load(left - kDepth);
      b_loader.load(left - kDepth);
    }
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      Math x[kPerThread], y[kPerThread];
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        x[i] = a_slice[k][place(down, i)];
        y[i] = b_slice[k][place(right, i)];
      }
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) sum[i][j] += x[i] * y[j];
      }
    }
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t y = row + place(down, i);
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int64_t x = column + place(right, j);
      if (y < a.count && x < b.count) c[y * b.count + x] = T(sum[i][j]);
    }
  }
}

// How many tiles cover the product. A grid has room for 2^31 - 1, which is more than any memory.
template <int kTile>
int64_t tiles(int64_t rows, int64_t columns) {
  return (rows + kTile - 1) / kTile * ((columns + kTile - 1) / kTile);
}

template <typename T>
void launch(const Lines<T>& a, const Lines<T>& b, T* c, int64_t depth, cudaStream_t stream) {
  int device, processors;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  // Large tiles read less, small ones keep every multiprocessor busy.
  if (tiles<128>(a.count, b.count) >= processors) {
    matmul_kernel<T, 128>
        <<<unsigned(tiles<128>(a.count, b.count)), kThreads, 0, stream>>>(a, b, c, depth);
  } else {
    matmul_kernel<T, 64>
        <<<unsigned(tiles<64>(a.count, b.count)), kThreads, 0, stream>>>(a, b, c, depth);
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

at::Tensor matmul(const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK_VALUE(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0),
                    "matmul: cannot multiply ", a.sizes(), " by ", b.sizes());
  TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), "matmul: a is ", a.scalar_type(), ", b is ",
                   b.scalar_type());
  TORCH_CHECK_VALUE(a.is_cuda() && a.device() == b.device(), "matmul: a and b must be on one GPU");
  const c10::cuda::CUDAGuard guard(a.device());
  const int64_t rows = a.size(0), columns = b.size(1), depth = a.size(1);
  if (rows == 0 || columns == 0 || depth == 0) return at::zeros({rows, columns}, a.options());
  at::Tensor c = at::empty({rows, columns}, a.options());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, a.scalar_type(), "matmul", [&] {
    const Lines<scalar_t> left{a.const_data_ptr<scalar_t>(), rows, a.stride(0), a.stride(1)};
    const Lines<scalar_t> right{b.const_data_ptr<scalar_t>(), columns, b.stride(1), b.stride(0)};
    launch<scalar_t>(left, right, c.mutable_data_ptr<scalar_t>(), depth, stream);
  });
  return c;
}
