"""The dispatcher's schema of a contract."""

from __future__ import annotations

from opwright.contract.contract import MISSING, Contract, Parameter


def kernel_twin(name: str, generation: int = 0) -> str:
    """Returns the name of the operator that reaches the kernels without passing autograd."""
    return f"_{name}_kernel{generation or ''}"


def reference_twin(name: str, generation: int = 0) -> str:
    """Returns the name of the operator that always runs the reference."""
    return f"_{name}_reference{generation or ''}"


def schema_of(contract: Contract, name: str) -> str:
    """Returns `name(Tensor input, Tensor bias, *, str approximate="tanh") -> Tensor`."""
    return f"{name}({', '.join(_arguments(contract))}) -> {_returns(contract)}"


def interface_of(contract: Contract, name: str) -> str:
    """Returns the schema and, behind it, the choices in their order: kernels get their numbers."""
    return schema_of(contract, name) + "".join(
        f"; {p.name}: {' | '.join(p.choices)}" for p in contract.parameters if p.choices
    )


def coded_schema_of(contract: Contract, name: str) -> str:
    """Returns the schema of the hidden entries: the index of a choice in place of its name, no defaults.

    A string costs 0.2 us on its way to C, and one that C hands back to the dispatcher leaks or not,
    depending on the version of torch.
    """
    coded = [
        p._replace(kind="int" if p.kind == "choice" else p.kind, default=MISSING, keyword_only=False)
        for p in contract.parameters
    ]
    return schema_of(contract._replace(parameters=tuple(coded)), name)


def out_schema_of(contract: Contract, name: str) -> str:
    """Returns the schema of the variant that writes into given tensors: `name.out(..., Tensor(a!) out)`."""
    arguments = _arguments(contract)
    if "*" not in arguments:
        arguments.append("*")
    letters = [_letter(len(contract.mutated) + i) for i in range(len(contract.outputs))]
    names = out_names(contract)
    arguments += [f"Tensor({a}!) {n}" for a, n in zip(letters, names, strict=True)]
    returns = [f"Tensor({a}!)" for a in letters]
    result = returns[0] if len(returns) == 1 else f"({', '.join(returns)})"
    return f"{name}.out({', '.join(arguments)}) -> {result}"


def out_names(contract: Contract) -> list[str]:
    """Returns the argument names of the out variant: `out`, or `out0`, `out1`, ..."""
    count = len(contract.outputs)
    return ["out"] if count == 1 else [f"out{i}" for i in range(count)]


def _arguments(contract: Contract) -> list[str]:
    arguments: list[str] = []
    mutated = 0
    for parameter in contract.parameters:
        if parameter.keyword_only and "*" not in arguments:
            arguments.append("*")
        letter = ""
        if parameter.mutated:
            letter = f"({_letter(mutated)}!)"
            mutated += 1
        arguments.append(f"{_type(parameter, letter)} {parameter.name}{_default(parameter)}")
    return arguments


def _letter(index: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return f"{letters[index % len(letters)]}{index // len(letters) or ''}"


def _type(parameter: Parameter, letter: str) -> str:
    match parameter.kind:
        case "tensor":
            return f"Tensor{letter}" + ("?" if parameter.optional else "")
        case "tensors":
            return f"Tensor{letter}[]"
        case "int":
            return "SymInt"
        case "choice":
            return "str"
    return parameter.kind


def _default(parameter: Parameter) -> str:
    value = parameter.default
    if value is MISSING:
        return ""
    match parameter.kind:
        case "choice":
            return f'="{value}"'
        case "float":
            return f"={float(value)!r}"
    return f"={value}"


def _returns(contract: Contract) -> str:
    count = len(contract.outputs)
    if count == 1:
        return "Tensor"
    return f"({', '.join(['Tensor'] * count)})" if count else "()"
