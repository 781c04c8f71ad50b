"""The operator of the README, as its author wrote it: nothing in it is about several processes."""

from jaxtyping import Float
from torch import Tensor

from opwright import operator


@operator("my_ops::scale_shift")
def scale_shift(
    input: Float[Tensor, "*batch n"], scale: Float[Tensor, "n"], shift: float = 0.0
) -> Float[Tensor, "*batch n"]:
    return input * scale + shift
