"""Asks Triton's own specialiser what it makes of launches' arguments, for test_runtime_random.py.

    python ask_binder.py LAUNCHES.json KEYS.json

in the environment of genuine_launch.py, whose form LAUNCHES.json has. KEYS.json: for each launch the classes of its
arguments, written as decision 0006 says, or the error's text.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import triton.language as tl
from genuine_launch import Values, load_module, make_argument
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature


def write(value: Any) -> str:
    if isinstance(value, tl.constexpr):
        return write(value.value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tl.dtype):
        return str(value)
    if isinstance(value, JITFunction):
        return "@" + value.__name__
    if isinstance(value, tuple):
        return f"({', '.join(map(write, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def name(kind: Any, attribute: Any, value: Any, is_constexpr: bool) -> str:
    if is_constexpr:
        return "=" + write(value)
    if isinstance(value, tuple) and isinstance(kind, (tuple, list)):
        parts = [name(k, a, v, False) for k, a, v in zip(kind, attribute, value)]
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    if kind == "constexpr":
        if value is None:
            return "none"
        return "i32:1" if type(value) is int and value == 1 else "=" + write(value)
    kind = "*" + kind[2:] if kind.startswith("*k") else kind
    return kind + (":16" if attribute == "D" else "")


def main() -> None:
    source, target = sys.argv[1:]
    with open(source) as file:
        launches = json.load(file)
    modules: dict[str, Any] = {}
    keys: list[Any] = []
    for launch in launches:
        try:
            module = load_module(launch["file"], modules)
            values = Values(module)
            function = getattr(module, launch["function"])
            binder = create_function_from_signature(
                function.signature, function.params, CUDABackend(GPUTarget("cuda", 90, 32))
            )
            given = launch["args"]
            if isinstance(given, dict):
                named, by_position = {k: make_argument(v, values) for k, v in given.items()}, []
            else:
                named, by_position = {}, [make_argument(item, values) for item in given]
            bound, specialization, _ = binder(*by_position, **named)
            parts = zip(function.params, bound.values(), specialization)
            keys.append([name(s[0], s[1], value, p.is_constexpr) for p, value, s in parts])
        except Exception as error:
            keys.append({"error": f"{type(error).__name__}: {error}"})
    with open(target, "w") as file:
        json.dump(keys, file)


if __name__ == "__main__":
    main()
