from opwright_ops.softmax.op import softmax as softmax
