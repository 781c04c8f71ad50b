"""Operators worth installing for themselves; each folder holds one, with its reference and kernels."""

from opwright_ops.bias_gelu import bias_gelu
from opwright_ops.d_sigmoid import d_sigmoid
from opwright_ops.lstm import LSTM, LSTMStep, lstm, lstm_bidirectional, lstm_step, lstm_tier
from opwright_ops.matmul_bias_gelu import matmul_bias_gelu
from opwright_ops.softmax import softmax

__all__ = [
    "LSTM",
    "LSTMStep",
    "bias_gelu",
    "d_sigmoid",
    "lstm",
    "lstm_bidirectional",
    "lstm_step",
    "lstm_tier",
    "matmul_bias_gelu",
    "softmax",
]
