"""The kill rate: operators made wrong in every way that is known must not pass verify."""

from opwright.verify.mutants.run import UNCHANGED, try_mutants

__all__ = ["UNCHANGED", "try_mutants"]
