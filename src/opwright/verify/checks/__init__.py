"""The checks of verify. Each takes a target and yields one finding for each case that it tried."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from opwright.errors import CheckError
from opwright.verify.checks import (
    finite_differences,
    gradients,
    memory,
    memory_safety,
    numerics,
    pytorch,
    sharding,
    threads_and_streams,
)
from opwright.verify.checks.finding import Finding, Skipped
from opwright.verify.target import Target

Run = Callable[[Target], Iterator[Finding]]


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        of_operator: runs it on an operator.
        of_callable: runs it on a callable: there is no `out=`, no schema and no float64 for finite differences, but
            samples and what the reference gives for them. None: it needs the contract of an operator.
        group: those of one group run in one process. They share what the oracle has said of each case, and what
            torch.compile and recorded gradients take a second to set up.
        preconditions: each says why the check does not apply to a target, "" if it does; the first reason counts.
    """

    of_operator: Run
    of_callable: Run | None
    group: str = "calls"
    preconditions: tuple[Callable[[Target], str], ...] = ()

    def __call__(self, target: Target) -> Iterator[Finding]:
        """Runs it.

        Raises:
            Skipped: it does not apply.
        """
        run = self.of_operator if target.operator is not None else self.of_callable
        if run is None:
            raise Skipped("a plain callable, not an operator")
        for tell in self.preconditions:
            if reason := tell(target):
                raise Skipped(reason)
        return run(target)


def _for_both(run: Run, group: str = "calls") -> Check:
    return Check(run, run, group)


def _tell_mutating(target: Target) -> str:
    return "it mutates its arguments" if target.mutated() else ""


def _tell_data_dependent(target: Target) -> str:
    return "sizes depend on data" if target.operator.contract.data_dependent else ""


# The failures of a record are in this order: first what makes all other calls worthless, then what may follow from it.
CHECKS: dict[str, Check] = {
    "outputs written": Check(memory_safety.outputs_written, memory_safety.outputs_written_of_callable),
    "determinism": _for_both(numerics.determinism),
    "numerics": Check(numerics.numerics, numerics.numerics_of_samples),
    "fresh data": _for_both(numerics.fresh_data),
    "boundaries": Check(numerics.boundaries, None, "boundaries"),  # its cases are its own
    "guard bands": _for_both(memory_safety.guard_bands),
    "global state": _for_both(numerics.global_state),
    "independence": Check(numerics.independence, None, preconditions=(_tell_mutating,)),
    "refusals": Check(pytorch.refusals, None),
    "gradients": Check(finite_differences.gradients, None, "gradients"),
    "second gradients": Check(
        finite_differences.second_gradients, gradients.second_gradients_of_callable, "gradients", (_tell_mutating,)
    ),
    "gradient numerics": Check(
        gradients.gradient_numerics, gradients.gradient_numerics_of_callable, "gradients", (_tell_mutating,)
    ),
    "gradient subsets": _for_both(gradients.gradient_subsets, "gradients"),
    "gradient layouts": _for_both(gradients.gradient_layouts, "gradients"),
    "repeated backward": _for_both(gradients.repeated_backward, "gradients"),
    "vmap": Check(pytorch.torch_vmap, None, "pytorch", (_tell_mutating, _tell_data_dependent)),
    "autocast": Check(pytorch.autocast, None, "pytorch"),
    "copy": Check(pytorch.survives_copy, None, "pytorch"),
    "opcheck": Check(pytorch.opcheck, None, "pytorch", (_tell_data_dependent,)),
    "compile": Check(pytorch.torch_compile, pytorch.torch_compile_of_callable, "pytorch", (_tell_mutating,)),
    "export": Check(pytorch.torch_export, None, "pytorch", (_tell_data_dependent, _tell_mutating)),
    "sharding": Check(sharding.sharding, None, "pytorch", (_tell_data_dependent,)),
    "side stream": _for_both(threads_and_streams.side_stream),
    "other device": _for_both(threads_and_streams.other_device),
    "graph": _for_both(threads_and_streams.graph_replays),
    "chunks": Check(threads_and_streams.chunks, None),
    "threads": _for_both(threads_and_streams.threads, "gradients"),
    "memory": _for_both(memory.memory),
    "leaks": _for_both(memory.leaks, "gradients"),
}

# Groups that need neither torch._dynamo nor gradients start first. Short ones start last, so that the processes end at
# about the same time.
_ORDER = "calls", "backward: calls", "gradients", "backward: boundaries", "pytorch", "boundaries"
# Groups that call the candidate through its target alone, which says how many threads it has in a call.
CALLING = frozenset({"calls", "boundaries"})
TRACING = frozenset({"gradients", "pytorch"})  # groups that need torch._dynamo


def unknown_check(subject: str, name: str) -> CheckError:
    """Returns the error for a check that there is not."""
    near = difflib.get_close_matches(name, CHECKS, n=1)
    hint = f"did you mean `{near[0]}`?" if near else ""
    return CheckError(subject, f"there is no check {name!r}", rows=[("there", ", ".join(CHECKS))], hint=hint)


def group_of(prefix: str, check: str) -> str:
    """Returns the name of the group of a check."""
    group = CHECKS[check].group
    return group if group in TRACING else prefix + group


def place_of(group: str) -> int:
    """Returns when a group is to be started: the one with the smallest number first."""
    return _ORDER.index(group) if group in _ORDER else len(_ORDER)
