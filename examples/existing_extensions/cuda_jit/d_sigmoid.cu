// d_sigmoid(z) = sigmoid'(z) and its gradient, on a GPU.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
// Every header that needs a torch with CUDA:
#include <c10/cuda/CUDAGuard.h>  // with CUDAStream.h, CUDAException.h

#include <algorithm>

namespace {

constexpr int kThreads = 256;
// A loop over the grid takes what is left: 32 blocks for each of 132 multiprocessors (H200) are
// enough.
constexpr int64_t kMaxBlocks = 4096;

// s (1 - s) with s = sigmoid(z), without the difference, which is 0 from z = 17 on in float.
template <typename T>
__device__ T slope(T z) {
  const T e = std::exp(-std::abs(z));
  return e / ((1 + e) * (1 + e));
}

template <typename T>
__global__ void d_sigmoid_kernel(const T* z, T* output, int64_t size) {
  using Math = at::opmath_type<T>;  // float for 16-bit types
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < size; i += step) {
    output[i] = T(slope(Math(z[i])));
  }
}

// d/dz s (1 - s) = s (1 - s) (1 - 2 s), and 1 - 2 s = -tanh(z / 2).
template <typename T>
__global__ void d_sigmoid_backward_kernel(const T* grad_output, const T* z, T* output,
                                          int64_t size) {
  using Math = at::opmath_type<T>;
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < size; i += step) {
    const Math value(z[i]);
    output[i] = T(-Math(grad_output[i]) * slope(value) * std::tanh(value / 2));
  }
}

unsigned blocks_for(int64_t size) {
  return unsigned(std::min(kMaxBlocks, (size + kThreads - 1) / kThreads));
}

}  // namespace

at::Tensor d_sigmoid(const at::Tensor& z) {
  TORCH_CHECK_VALUE(z.is_cuda(), "d_sigmoid: z must be on a GPU, got ", z.device());
  const c10::cuda::CUDAGuard guard(z.device());
  const at::Tensor from = z.contiguous();
  at::Tensor output = at::empty_like(from);
  if (from.numel() == 0) return output;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, z.scalar_type(), "d_sigmoid", [&] {
    d_sigmoid_kernel<<<blocks_for(from.numel()), kThreads, 0, stream>>>(
        from.const_data_ptr<scalar_t>(), output.mutable_data_ptr<scalar_t>(), from.numel());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return output;
}

at::Tensor d_sigmoid_backward(const at::Tensor& grad_output, const at::Tensor& z) {
  TORCH_CHECK_VALUE(grad_output.sizes() == z.sizes() && grad_output.dtype() == z.dtype(),
                    "d_sigmoid_backward: grad_output must be like z");
  TORCH_CHECK_VALUE(z.is_cuda() && grad_output.device() == z.device(),
                    "d_sigmoid_backward: z and grad_output must be on one GPU");
  const c10::cuda::CUDAGuard guard(z.device());
  const at::Tensor from = z.contiguous(), grad = grad_output.contiguous();
  at::Tensor output = at::empty_like(from);
  if (from.numel() == 0) return output;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, z.scalar_type(), "d_sigmoid_backward", [&] {
        d_sigmoid_backward_kernel<<<blocks_for(from.numel()), kThreads, 0, stream>>>(
            grad.const_data_ptr<scalar_t>(), from.const_data_ptr<scalar_t>(),
            output.mutable_data_ptr<scalar_t>(), from.numel());
      });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return output;
}
