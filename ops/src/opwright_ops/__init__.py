"""Operators worth installing for themselves; each folder holds one, with its reference and kernels."""

from opwright_ops import sharded_rows as sharded_rows  # declares how operators run on shards
from opwright_ops.adamw import AdamW
from opwright_ops.bias_gelu import bias_gelu
from opwright_ops.cross_entropy import cross_entropy, logsumexp
from opwright_ops.d_sigmoid import d_sigmoid
from opwright_ops.lstm import LSTM, LSTMStep, lstm, lstm_bidirectional, lstm_step, lstm_tier
from opwright_ops.matmul_bias_gelu import matmul_bias_gelu
from opwright_ops.norm import LayerNorm, RMSNorm, add_rms_norm, layer_norm, rms_norm
from opwright_ops.patching import Patch, patch
from opwright_ops.rope import rope, rope_
from opwright_ops.softmax import softmax
from opwright_ops.transducer import transducer_joint, transducer_loss, transducer_loss_fused

__all__ = [
    "AdamW",
    "LSTM",
    "LSTMStep",
    "LayerNorm",
    "Patch",
    "RMSNorm",
    "add_rms_norm",
    "bias_gelu",
    "cross_entropy",
    "d_sigmoid",
    "layer_norm",
    "logsumexp",
    "lstm",
    "lstm_bidirectional",
    "lstm_step",
    "lstm_tier",
    "matmul_bias_gelu",
    "patch",
    "rms_norm",
    "rope",
    "rope_",
    "softmax",
    "transducer_joint",
    "transducer_loss",
    "transducer_loss_fused",
]
