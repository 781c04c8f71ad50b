"""Operators worth installing for themselves; each folder holds one, with its reference and kernels."""

from opwright_ops.bias_gelu import bias_gelu
from opwright_ops.d_sigmoid import d_sigmoid
from opwright_ops.lstm import LSTM, lstm
from opwright_ops.matmul_bias_gelu import matmul_bias_gelu
from opwright_ops.softmax import softmax

__all__ = ["LSTM", "bias_gelu", "d_sigmoid", "lstm", "matmul_bias_gelu", "softmax"]
