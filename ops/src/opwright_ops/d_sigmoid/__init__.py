from opwright_ops.d_sigmoid.op import d_sigmoid as d_sigmoid
