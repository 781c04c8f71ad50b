import torch
from setuptools import setup

from opwright.cpp_extension import BuildExtension, CUDAExtension

if torch.version.cuda is None:
    raise SystemExit("matmul_cuda needs a torch with CUDA to link with; a GPU is not needed to build it")

sources = ["src/matmul_cuda/bindings.cpp", "src/matmul_cuda/matmul.cu"]
setup(
    ext_modules=[CUDAExtension("matmul_cuda._C", sources)],
    cmdclass={"build_ext": BuildExtension},
)
