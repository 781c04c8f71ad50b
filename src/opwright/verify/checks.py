"""The checks of verify. Each takes a subject and yields one finding for each case it tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from opwright.verify.boundaries import boundaries
from opwright.verify.calls import determinism, fresh_data, global_state
from opwright.verify.concurrency import chunks, graph_replays, other_device, side_stream, threads
from opwright.verify.finding import Finding
from opwright.verify.gradient_calls import gradient_layouts, gradient_subsets, repeated_backward
from opwright.verify.gradients import gradient_numerics, gradients, second_gradients
from opwright.verify.outputs import guard_bands, outputs_written
from opwright.verify.resources import leaks, memory
from opwright.verify.sharding import sharding
from opwright.verify.subject import Subject
from opwright.verify.systems import autocast, compiled, exported, opcheck, refusals, survives_copy, vmapped
from opwright.verify.values import independence, numerics

Check = Callable[[Subject], Iterator[Finding]]

# The failures of a record are in this order: first what makes all other calls worthless, then what may follow from it.
CHECKS: dict[str, Check] = {
    "outputs written": outputs_written,
    "determinism": determinism,
    "numerics": numerics,
    "fresh data": fresh_data,
    "boundaries": boundaries,
    "guard bands": guard_bands,
    "global state": global_state,
    "independence": independence,
    "refusals": refusals,
    "gradients": gradients,
    "second gradients": second_gradients,
    "gradient numerics": gradient_numerics,
    "gradient subsets": gradient_subsets,
    "gradient layouts": gradient_layouts,
    "repeated backward": repeated_backward,
    "vmap": vmapped,
    "autocast": autocast,
    "copy": survives_copy,
    "opcheck": opcheck,
    "compile": compiled,
    "export": exported,
    "sharding": sharding,
    "side stream": side_stream,
    "other device": other_device,
    "graph": graph_replays,
    "chunks": chunks,
    "threads": threads,
    "memory": memory,
    "leaks": leaks,
}

_GROUPS = {
    "boundaries": ("boundaries",),  # its cases are its own
    "gradients": (
        "gradients", "second gradients", "gradient numerics", "gradient subsets", "gradient layouts", "repeated backward"
    ),
    "systems": ("vmap", "autocast", "copy", "opcheck", "compile", "export", "sharding"),
}  # fmt: skip

# The longest groups start first, so that no process works alone at the end. The first group is also reported first.
_ORDER = (
    "calls", "backward: calls", "systems", "backward: boundaries", "backward: gradients", "gradients", "boundaries"
)  # fmt: skip


def group_of(prefix: str, check: str) -> str:
    """Returns the name of the group of a check: one process does all of a group.

    They share what the oracle has said of each case, and the modules that torch.compile takes a second to import.
    """
    found = next((name for name, checks in _GROUPS.items() if check in checks), "calls")
    return found if found == "systems" else prefix + found


def place_of(group: str) -> int:
    """Returns when a group is to be started: the one with the smallest number first."""
    return _ORDER.index(group) if group in _ORDER else len(_ORDER)
