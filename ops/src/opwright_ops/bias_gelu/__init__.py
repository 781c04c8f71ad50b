from opwright_ops.bias_gelu.op import bias_gelu as bias_gelu
