"""The part of Opwright that operators need when they run, for this package alone."""

from __future__ import annotations

from opwright import errors as errors
from opwright.dispatch.operator import Operator as Operator
from opwright.dispatch.operator import operator as operator
from opwright.spec.annotations import Mutates as Mutates
