from opwright_ops.norm.module import LayerNorm as LayerNorm
from opwright_ops.norm.module import RMSNorm as RMSNorm
from opwright_ops.norm.op import add_rms_norm as add_rms_norm
from opwright_ops.norm.op import layer_norm as layer_norm
from opwright_ops.norm.op import rms_norm as rms_norm
