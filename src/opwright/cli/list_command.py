"""opwright list"""

from __future__ import annotations

from opwright.cli.console import print_json, print_rows
from opwright.cli.help import Target, make_app

list_app = make_app("list")


@list_app.default
def list_operators(target: Target, *, json: bool = False) -> int:
    """List the operators of TARGET.

    Args:
        json: Print JSON.
    """
    from opwright.contract.schema import schema_of
    from opwright.target import find_operators

    found = find_operators(target)
    facts = [
        {
            "name": o.declaration.qualified_name,
            "schema": schema_of(o.contract, o.declaration.name),
            "kernels": sorted(o.declaration.sources),
            "backward": o.backward_operator is not None,
            "file": o.declaration.file,
        }
        for o in found
    ]
    if json:
        print_json(facts)
        return 0
    print_rows(
        [("operator", "kernels", "backward", "schema")]
        + [
            (
                f["name"],
                " ".join(f["kernels"]) or "reference",
                "own" if f["backward"] else "derived",
                f["schema"],
            )
            for f in facts
        ]
    )
    return 0
