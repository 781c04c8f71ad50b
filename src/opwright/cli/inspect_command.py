"""opwright inspect"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from opwright.cli.console import print_json, print_rows
from opwright.cli.help import Target, make_app

if TYPE_CHECKING:  # a module with torch is imported where it is used
    from opwright.contract.declaration import Declaration
    from opwright.contract.sources import Source

inspect_app = make_app("inspect")


@inspect_app.default
def inspect_operators(
    target: Target, *, glue: bool = False, header: bool = False, backend: str = "cpu", json: bool = False
) -> int:
    """Show the contract, schema and generated code of the operators of TARGET.

    Args:
        glue: Print the generated C glue.
        header: Print the generated C++ contract header.
        backend: Whose glue, header and kernel signature: cpu or cuda.
        json: Print the contract as JSON.
    """
    from opwright.backends.registry import device_types
    from opwright.backends.sources import tell_where
    from opwright.build.glue import glue_text, header_text, kernel_signature
    from opwright.contract.schema import out_schema_of, schema_of
    from opwright.dispatch import kernels
    from opwright.errors import CheckError
    from opwright.target import find_operators

    if backend not in device_types():
        raise CheckError("--backend", f"there is no backend {backend!r}", hint=f"`--backend {device_types()[-1]}`")
    found = find_operators(target, with_backward=True)
    if glue or header:
        for operator in found:
            key = kernels.unit_key(operator.declaration, backend)
            unit = kernels.unit_of(key) if key else [operator.declaration]
            if unit[0] is operator.declaration or len(found) == 1:
                print(glue_text(unit, [backend]) if glue else header_text(unit, backend))
        return 0
    facts = []
    for operator in found:
        declaration, contract = operator.declaration, operator.contract
        facts.append(
            {
                "name": declaration.qualified_name,
                "declared": f"{declaration.file}:{declaration.line}",
                "schema": schema_of(contract, declaration.name),
                **({"out schema": out_schema_of(contract, declaration.name)} if contract.outputs else {}),
                "kernel": kernel_signature(declaration, backend),
                "kernels": {b: s.origin for b, s in _sources(declaration).items()},
                "backward": operator.gradient.describe(),
                "autocast": declaration.autocast or "none",
                **({} if declaration.deterministic else {"deterministic": "no: last bits vary from call to call"}),
                **({"precision": str(declaration.precision)} if declaration.precision else {}),
                **({"batch invariant": "yes"} if declaration.batch_invariant else {}),
                "arguments": {p.name: str(p) for p in contract.parameters},
                "outputs": {o.name: str(o.type) for o in contract.outputs},
            }
        )
    if json:
        print_json(facts)
        return 0
    for i, (operator, fact) in enumerate(zip(found, facts, strict=True)):
        if i:
            print()
        rows = [(key, value) for key, value in fact.items() if isinstance(value, str)]
        told = {
            "kernels": [
                _tell_kernel(operator.declaration.name, *each) for each in _sources(operator.declaration).items()
            ]
            or [f"none; {tell_where(operator.declaration.file)}"],
            "arguments": [f"{name}: {type_}" for name, type_ in fact["arguments"].items()],
            "outputs": [f"{name}: {type_}" for name, type_ in fact["outputs"].items()],
        }
        for key, lines in told.items():
            rows += [(key if not j else "", line) for j, line in enumerate(lines)]
        print_rows(rows)
    return 0


def _sources(declaration: Declaration) -> dict[str, Source]:
    """Returns the sources of an operator's kernels, each once: one in Triton stands under its type of device too."""
    return {b: s for b, s in declaration.sources.items() if b == s.backend or s.backend not in declaration.sources}


def _tell_kernel(name: str, backend: str, source: Source) -> str:
    """Returns where a kernel is, and for which dtypes."""
    from opwright.backends.exports import find_exports
    from opwright.contract.dtypes import SCALAR_TYPES

    exports = find_exports(source)
    if exports is None:
        return f"{backend}: {source.origin}"
    if name not in exports:
        return f"{backend}: none ({os.path.basename(source.origin)} exports no `{name}`); the reference runs"
    short = {scalar.removeprefix("opwright::"): text for _, text, scalar in SCALAR_TYPES.values()}
    types = [short.get(each.removeprefix("opwright::"), each) for each in exports[name]]
    return f"{backend}: {source.origin}" + (f" ({', '.join(types)})" if types else "")
