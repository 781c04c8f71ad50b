"""Descriptions: parameters, decorators, grids; and expressions against Python's own evaluation."""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.triton

_OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_CALLS = {
    "cdiv": lambda a, b: -(a // -b),
    "min": min,
    "max": max,
    "abs": abs,
    "int": int,
    "next_power_of_2": lambda n: 1 << max(n - 1, 0).bit_length() if n > 0 else 0,
}


def evaluate(expression: Any, args: dict[str, Any]) -> Any:
    """Evaluates an expression as the decision record says."""
    if not isinstance(expression, list):
        return expression
    head, *rest = expression
    if head == "str":
        return rest[0]
    if head == "arg":
        return args[rest[0]]
    if head in ("and", "or"):
        left = evaluate(rest[0], args)
        return evaluate(rest[1], args) if bool(left) == (head == "and") else left
    if head == "if":
        return evaluate(rest[1 if evaluate(rest[0], args) else 2], args)
    if head == "call":
        assert len(rest) <= 3  # a name and at most two arguments
        return _CALLS[rest[0]](*(evaluate(e, args) for e in rest[1:]))
    values = [evaluate(e, args) for e in rest]
    if head == "tuple":
        return tuple(values)
    return (
        {"neg": lambda a: -a, "not": lambda a: not a}[head](*values) if len(values) == 1 else _OPERATORS[head](*values)
    )


def test_parameters(worker: Any) -> None:
    record = worker.describe("classes.py", "defaults")
    assert [(p["name"], p["constexpr"], p.get("default")) for p in record["params"]] == [
        ("x", False, None),
        ("n", False, "1"),
        ("eps", False, "1e-05"),
        ("name", True, '"a\\"b"'),
        ("kind", True, "fp16"),
        ("act", True, "@helper"),
    ]
    for function, name, value in (
        ("as_i64", "type", "i64"),
        ("as_u1", "type", "u1"),
        ("as_pointer", "type", "*fp16"),
        ("as_const", "const", True),
        ("unspecialized", "specialize", False),
        ("unaligned", "align", False),
        ("plain", "type", None),
    ):
        assert worker.describe("classes.py", function)["params"][0][name] == value


def test_decorators(worker: Any) -> None:
    record = worker.describe("decorated.py", "tuned")
    assert record["autotune"] == {
        "key": ["n"],
        "configs": [
            {"constexprs": {"BLOCK": "128"}, "options": {"num_warps": 4, "num_ctas": 1, "num_stages": 3}},
            {
                "constexprs": {"BLOCK": "1024"},
                "options": {"num_warps": 8, "num_ctas": 1, "num_stages": 2, "maxnreg": 128},
            },
        ],
        "reset_to_zero": ["out"],
        "restore_value": [],
        "hooks": False,
    }
    even, bias, half = record["heuristics"]
    assert [h["name"] for h in record["heuristics"]] == ["EVEN", "HAS_BIAS", "HALF"]
    assert evaluate(even["expression"], {"n": 256, "BLOCK": 128}) is True
    assert evaluate(even["expression"], {"n": 257, "BLOCK": 128}) is False
    assert bias["expression"] == ["!=", ["arg", "bias"], None]
    assert evaluate(half["expression"], {"BLOCK": 128, "EVEN": True}) == 64
    path = next(path for path, _ in record["sources"] if path.endswith("decorated.py"))
    assert Path(path).read_text().splitlines()[record["line"] - 1].startswith("def tuned(")

    hooked = worker.describe("decorated.py", "hooked")
    assert hooked["autotune"]["hooks"] is True
    assert hooked["heuristics"][0]["expression"] == ["call", "next_power_of_2", ["arg", "n"]]


def test_grids(worker: Any) -> None:
    record = worker.describe("decorated.py", "tuned")
    grids = record["grids"]
    assert grids["plain_grid"]["expression"] == ["tuple", ["call", "cdiv", ["arg", "n"], ["arg", "BLOCK"]], 1]
    smallest = ["call", "min", ["call", "min", ["arg", "n"], 256], 8]
    assert grids["folded"]["expression"] == ["tuple", ["*", smallest, 4]]
    path = next(path for path, _ in record["sources"] if path.endswith("decorated.py"))
    lines = Path(path).read_text().splitlines()
    for name, reason in (
        ("refused", "`len` is not a function that C++ has"),
        ("listed", "`NAMES` is a list that C++ cannot hold"),
        ("grid", "`n` is neither a constant of the module nor an argument"),
    ):
        line = grids[name]["line"]
        assert f"{name} = lambda" in lines[line - 1]
        assert grids[name]["error"] == f"{path}:{line}: {reason}; pass a C++ functor instead"


def test_grids_of_one_name(newest: Any, tmp_path: Path) -> None:
    file = tmp_path / "k.py"
    file.write_text(
        "import triton\ngrid = lambda a: (1,)\n@triton.jit\ndef k():\n    pass\n"
        "def f(x, y):\n    grid = lambda a: (2,)\n    return lambda a: (3,)\n"
    )
    grids = newest.describe(file, "k")["grids"]
    assert {name: grid["expression"] for name, grid in grids.items()} == {
        "grid": ["tuple", 1],
        "grid:7": ["tuple", 2],
        ":8": ["tuple", 3],
    }


def test_heuristics_that_have_no_expression(newest: Any, tmp_path: Path) -> None:
    file = tmp_path / "k.py"
    file.write_text(
        "import functools, triton, triton.language as tl\n"
        "def outer(width):\n"
        "    return lambda args: args['n'] + width\n"
        "pair = (lambda args: args['n'], lambda args: args['n'] + 1)\n"
        "@triton.heuristics({'A': outer(7), 'B': functools.partial(max, 1), 'C': pair[1], 'D': lambda a: a['n'].numel()})\n"
        "@triton.jit\n"
        "def k(n, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):\n"
        "    pass\n"
    )
    a, b, c, d = newest.describe(file, "k")["heuristics"]
    assert a["expression"] == ["+", ["arg", "n"], 7]
    assert "a partial; pass a C++ functor instead" in b["error"]
    assert c["expression"] == ["+", ["arg", "n"], 1]
    assert d["error"] == f"{file}:5: `a['n'].numel` is not a function that C++ has; pass a C++ functor instead"


def test_a_tuned_kernel_compiles_from_its_description(worker: Any) -> None:
    record = worker.describe("decorated.py", "tuned")
    config = record["autotune"]["configs"][1]
    block = config["constexprs"]["BLOCK"]
    args = ["*fp32:16", "none", "*fp32:16", "i32:16", f"={block}", "=True", "=False", "=512"]
    compiled = worker.compile("decorated.py", "tuned", args, **config["options"])
    assert compiled["num_warps"] == 8
    assert compiled["key"].endswith("; maxnreg=128, num_ctas=1, num_stages=2, num_warps=8")


_small = st.integers(-9, 9).map(str) | st.sampled_from(["1.5", "True", "WIDTH", "a['n']", "a['b']", "a['n']", "a['f']"])


def _combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    binary = st.sampled_from("+ - * / // % == != < <= > >= and or & | ^".split())
    two = st.tuples(inner, binary, inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})")
    chained = st.tuples(inner, inner, inner).map(lambda t: f"({t[0]} < {t[1]} <= {t[2]})")
    choice = st.tuples(inner, inner, inner).map(lambda t: f"({t[0]} if {t[1]} else {t[2]})")
    call = st.tuples(st.sampled_from(["min", "max"]), inner, inner, inner).map(lambda t: f"{t[0]}({', '.join(t[1:])})")
    unary = st.tuples(st.sampled_from(["-", "+", "not ", "~", "abs", "int"]), inner).map(lambda t: f"({t[0]}({t[1]}))")
    cdiv = st.tuples(inner, inner).map(lambda t: f"triton.cdiv({t[0]}, {t[1]})")
    return two | chained | choice | call | unary | cdiv


class _Triton:
    @staticmethod
    def cdiv(x: Any, y: Any) -> Any:
        return -(x // -y)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(st.recursive(_small, _combined, max_leaves=8), min_size=8, max_size=16))
def test_expressions_mean_what_python_means(newest: Any, tmp_path: Path, bodies: list[str]) -> None:
    file = tmp_path / "grids.py"
    lines = ["import triton", "WIDTH = 3", "@triton.jit", "def k():", "    pass"]
    file.write_text("\n".join(lines + [f"grid_{i} = lambda a: {body}" for i, body in enumerate(bodies)]) + "\n")
    found = newest.describe(file, "k")["grids"].values()
    for body, grid in zip(bodies, found, strict=True):
        for args in ({"n": 7, "b": 0, "f": 2.5}, {"n": -4, "b": 3, "f": -0.5}):
            expected = _outcome(lambda b=body, a=args: eval(b, {"a": a, "WIDTH": 3, "triton": _Triton}))
            seen = _outcome(lambda g=grid, a=args: evaluate(json.loads(json.dumps(g["expression"])), a))
            assert repr(seen) == repr(expected), (body, grid)


def _outcome(compute: Any) -> Any:
    try:
        return compute()
    except Exception as error:
        return type(error)


def test_branches_that_assign_are_translated_once(newest: Any, tmp_path: Path) -> None:
    """What follows an `if` was translated again for each branch: 16 of them took 8 s and 2.6 MB."""
    file = tmp_path / "k.py"
    steps = "".join(f"    if args['n'] > {i}:\n        block = {i + 1}\n" for i in range(13))
    parity = (
        "    if args['n'] % 2:\n        rest = 1\n        same = 7\n    else:\n        rest = 0\n        same = 7\n"
    )
    file.write_text(
        "import triton\n@triton.jit\ndef k():\n    pass\n"
        f"def size(args):\n    block = 0\n{steps}{parity}    return block * 2 + rest + same\n"
    )
    expression = newest.describe(file, "k")["grids"]["size"]["expression"]
    assert len(json.dumps(expression)) < 1500
    for n in (-3, 0, 1, 7, 12, 20):
        assert evaluate(expression, {"n": n}) == min(max(n, 0), 13) * 2 + n % 2 + 7


def test_functions_with_assignments_and_branches(newest: Any, tmp_path: Path) -> None:
    file = tmp_path / "k.py"
    source = (
        "def size(args):\n"
        "    '''Doc.'''\n"
        "    n: int = args['n']\n"
        "    if n > 64:\n"
        "        n = 64\n"
        "    elif n < 0:\n"
        "        return 0\n"
        "    twice = n * 2\n"
        "    n = twice + n\n"
        "    return n\n"
    )
    file.write_text(
        f"import triton\n{source}\ndef loops(args):\n    for i in args:\n        pass\n    return 1\n"
        "def falls(args):\n    if args['n']:\n        return 1\n@triton.jit\ndef k():\n    pass\n"
    )
    size, loops, falls = newest.describe(file, "k")["grids"].values()
    scope: dict[str, Any] = {}
    exec(source, scope)
    for n in (-3, 0, 5, 64, 100):
        assert evaluate(size["expression"], {"n": n}) == scope["size"]({"n": n})
    assert (
        loops["error"]
        == f"{file}:14: `for i in args:` is not an assignment, `if` or `return`; pass a C++ functor instead"
    )
    assert "there is a way to its end without `return`" in falls["error"]
