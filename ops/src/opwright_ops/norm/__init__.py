from opwright_ops.norm.module import LayerNorm as LayerNorm
from opwright_ops.norm.module import RMSNorm as RMSNorm
from opwright_ops.norm.norm import add_rms_norm as add_rms_norm
from opwright_ops.norm.norm import layer_norm as layer_norm
from opwright_ops.norm.norm import rms_norm as rms_norm
