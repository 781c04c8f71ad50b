"""The first lines of the kernels in these tests, and the dtypes of their lists of types."""

import torch

HEAD = """
#include <cmath>
#include <opwright/kernel.h>
using opwright::List;
using opwright::View;
template <typename T> using C = opwright::compute_t<T>;
#define THREE float, double, opwright::half
#define FLOATS float, double, opwright::half, opwright::bfloat16
"""
# The dtypes of THREE. bfloat16 is left out on purpose: it shows that the reference stands in.
COMPILED = (torch.float32, torch.float64, torch.float16)
