from opwright_ops.cross_entropy.loss import cross_entropy as cross_entropy
from opwright_ops.cross_entropy.loss import logsumexp as logsumexp
