"""Compares the installed extension with PyTorch: `python -m pybind_d_sigmoid`."""

import torch

from pybind_d_sigmoid import d_sigmoid

print("d_sigmoid:", *(f"{value:.4g}" for value in d_sigmoid(torch.tensor([0.0, 2.0, -20.0])).tolist()))
z = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
s = torch.sigmoid(z)
torch.testing.assert_close(d_sigmoid(z), s * (1 - s))
torch.testing.assert_close(d_sigmoid(z.mT), (s * (1 - s)).mT)
print("gradcheck:", torch.autograd.gradcheck(d_sigmoid, z))
