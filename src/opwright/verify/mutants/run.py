"""Tries every kind of mutant on an operator: which check kills it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from opwright.errors import CheckError
from opwright.records import Mutant, MutantsRecord
from opwright.verify.checks import CHECKS
from opwright.verify.finding import Skipped
from opwright.verify.machine import machine_card
from opwright.verify.mutants.calls import CALLS
from opwright.verify.mutants.gradients import GRADIENTS
from opwright.verify.mutants.kinds import Kind
from opwright.verify.mutants.results import RESULTS
from opwright.verify.state import Guard
from opwright.verify.subject import Subject, subject_of

# The checks that reach a mutant, a function in Python: those that call the operator through PyTorch's dispatcher do
# not. The cheap ones first, since a mutant ends at the first that fails.
_CALL_CHECKS = (
    "numerics", "global state", "guard bands", "fresh data", "determinism", "independence", "threads", "memory", "leaks"
)  # fmt: skip
_GRADIENT_CHECKS = (
    "gradient numerics", "gradient layouts", "gradient subsets", "repeated backward", "second gradients"
)  # fmt: skip
UNCHANGED = "unchanged"
# A mutant that cannot be called proves nothing.
_BROKEN = re.compile(r"\braised (?!SystemExit)")


def try_mutants(
    target: Any,
    *,
    only: str = "",
    on_trial: Callable[[Mutant], None] | None = None,
) -> MutantsRecord:
    """Verifies mutants of an operator, quickly and on the CPU, and says which check kills each.

    A mutant is the operator with something wrong around it. The operator itself comes first, unchanged: the same
    checks must pass it.

    Args:
        only: try only kinds whose name contains this text.
        on_trial: called with each mutant when it has been tried.

    Raises:
        CheckError: the target is no operator.
    """
    started = time.time()
    subject = subject_of(target, target, (), "quick")
    operator = subject.operator
    if operator is None:
        raise CheckError(subject.name, "mutants are made from a contract, which only an operator has")
    if operator.declaration.random:
        raise CheckError(subject.name, "it draws random numbers, so no numbers say whether a mutant is right")
    subject = replace(subject_of(target, None, None, "quick"), memo={})
    own = operator.backward_operator
    kinds = [*RESULTS, *CALLS]
    columns = [(operator.declaration.name, subject, kinds, _CALL_CHECKS)]
    if own is not None:
        behind = replace(subject_of(own.function, None, None, "quick"), memo={})
        columns.append((own.declaration.name, behind, kinds, _CALL_CHECKS))
    name = own.declaration.name if own is not None else f"{operator.declaration.name}_backward"
    columns.append((name, subject, GRADIENTS, _GRADIENT_CHECKS))
    found: list[Mutant] = []
    right = Kind(UNCHANGED, lambda s: s.call)
    for column, each, tried, checks in columns:
        for kind in (right, *tried):
            if only and kind is not right and only not in kind.name:
                continue
            trial = _try(column, each, kind, checks)
            found.append(trial)
            if on_trial is not None:
                on_trial(trial)
    return MutantsRecord(
        name=operator.declaration.qualified_name,
        mutants=found,
        machine=machine_card(),
        created=started,
        seconds=time.time() - started,
    )


def _try(column: str, subject: Subject, kind: Kind, checks: tuple[str, ...]) -> Mutant:
    started = time.perf_counter()
    reason = kind.needs(subject)
    if reason:
        return Mutant(kind.name, column, "none", reason=reason)
    if kind.name != UNCHANGED:
        checks = tuple(name for name in checks if name not in ("memory", "leaks") or name == kind.resource)
    guard = Guard()
    mutated = replace(subject, call=guard.wrap(kind.make(subject)), series=guard.series, _cases=subject.cases())
    check, message = _killed_by(mutated, checks, guard)
    outcome = "killed" if check and not _BROKEN.search(message) else "survived"
    if kind.name == UNCHANGED:
        outcome = "accused" if check else "passed"
    return Mutant(kind.name, column, outcome, check, message, time.perf_counter() - started)


def _killed_by(subject: Subject, checks: tuple[str, ...], guard: Guard) -> tuple[str, str]:
    for name in checks:
        try:
            for finding in CHECKS[name](subject):
                found = [finding.message] if finding.message else guard.take()
                if found:
                    return name, f"{finding.case}: {'; '.join(found)}"
        except Skipped:
            continue
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return name, f"{subject.current}: raised {type(error).__name__}: {error}"
    return "", ""
