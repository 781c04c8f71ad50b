"""The part of Opwright that operators need when they run, for this package alone."""

from __future__ import annotations

from opwright import errors as errors
from opwright.dispatch.operator import Operator as Operator
from opwright.dispatch.operator import operator as operator
from opwright.spec.annotations import Mutates as Mutates
from opwright.spec.domains import Index as Index
from opwright.spec.domains import NonNegative as NonNegative
from opwright.spec.domains import Positive as Positive
from opwright.spec.domains import Probability as Probability
from opwright.spec.domains import Range as Range
from opwright.spec.precision import Factor as Factor
