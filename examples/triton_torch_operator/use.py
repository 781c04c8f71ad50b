"""Calls the operator from Python: python use.py build/libscaled_add.so."""

import sys

import torch

torch.ops.load_library(sys.argv[1])
device = "cuda" if torch.cuda.is_available() else "cpu"
x, y = torch.rand(2, 1000, 77, device=device)
torch.testing.assert_close(torch.ops.triton_example.scaled_add(x, y, 2.5), x + 2.5 * y)
print(f"{device}: right")
