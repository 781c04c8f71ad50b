"""The part of Opwright that operators need when they run, for this package alone."""

from __future__ import annotations

from opwright import errors as errors
from opwright.contract.annotations import Mutates as Mutates
from opwright.contract.domains import Index as Index
from opwright.contract.domains import NonNegative as NonNegative
from opwright.contract.domains import Positive as Positive
from opwright.contract.domains import Probability as Probability
from opwright.contract.domains import Range as Range
from opwright.contract.precision import Factor as Factor
from opwright.dispatch.operator import Operator as Operator
from opwright.dispatch.operator import operator as operator
