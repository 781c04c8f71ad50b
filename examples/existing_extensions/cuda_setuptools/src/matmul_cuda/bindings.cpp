// Apart from the kernel: torch/extension.h is not for nvcc to read, and an edited kernel does not
// compile it again.
#include <torch/extension.h>

at::Tensor matmul(const at::Tensor& a, const at::Tensor& b);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("matmul", &matmul, "a @ b, on a GPU"); }
