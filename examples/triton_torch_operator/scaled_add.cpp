// torch.ops.triton_example.scaled_add: x + scale * y, on CUDA by the Triton kernel of
// scaled_add.py.
#include <ATen/ops/add.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <opwright/triton.h>
#include <opwright/triton/aten.h>

namespace ot = opwright::triton;

static at::Tensor scaled_add_cuda(const at::Tensor& x, const at::Tensor& y, double scale) {
  TORCH_CHECK(x.sizes() == y.sizes() && x.scalar_type() == y.scalar_type(),
              "scaled_add: x and y must have one shape and one dtype");
  static const ot::Kernel kernel(KERNEL_FILE, "scaled_add_kernel");
  constexpr int64_t kBlock = 1024;
  const at::DeviceGuard guard(x.device());
  const at::Tensor a = x.contiguous(), b = y.contiguous(), out = at::empty_like(a);
  kernel(ot::current_stream(x), ot::cdiv(x.numel(), kBlock), a, b, out, scale, x.numel(),
         ot::cx(kBlock));
  return out;
}

static at::Tensor scaled_add_cpu(const at::Tensor& x, const at::Tensor& y, double scale) {
  return at::add(x, y, scale);
}

TORCH_LIBRARY(triton_example, library) {
  library.def("scaled_add(Tensor x, Tensor y, float scale) -> Tensor");
}
TORCH_LIBRARY_IMPL(triton_example, CUDA, library) { library.impl("scaled_add", scaled_add_cuda); }
TORCH_LIBRARY_IMPL(triton_example, CPU, library) { library.impl("scaled_add", scaled_add_cpu); }
