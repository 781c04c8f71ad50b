from opwright_ops.softmax.softmax import softmax as softmax
