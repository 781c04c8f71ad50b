from opwright_ops.rope.rope import rope as rope
from opwright_ops.rope.rope import rope_ as rope_
