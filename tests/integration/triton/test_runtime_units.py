"""The runtime's JSON, SHA-256, float texts and expressions against Python's own."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import runtime

pytestmark = pytest.mark.compiler
ASAN = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1")
PROGRAM = runtime.ROOT / "tests" / "native" / "triton_units.cpp"


@pytest.fixture(scope="module", params=[(), ASAN], ids=["plain", "sanitized"])
def ask(request: Any) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    program = runtime.build(PROGRAM, request.param)

    def run(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        text = "".join(json.dumps(request) + "\n" for request in requests)
        done = subprocess.run([program], input=text, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in done.stdout.split("\n") if line]

    return run


# ---- JSON


def random_json(pick: random.Random, depth: int = 0) -> Any:
    kind = pick.randrange(8 if depth < 5 else 6)
    if kind == 0:
        return pick.choice([None, True, False])
    if kind == 1:
        return pick.choice([0, 1, -1, 2**31, 2**63 - 1, -(2**63), pick.randint(-(2**63), 2**63 - 1)])
    if kind == 2:
        return pick.choice([0.0, -0.0, 0.1, 1e-5, 1e300, -1e-300, 5e-324, 1.7976931348623157e308, 123456.789, 1e16])
    if kind in (3, 4, 5):
        letters = 'ab"\\/\b\f\n\r\t\x00\x1f\x7fé中\U0001f600\u2028 ,:[]{}'
        return "".join(pick.choice(letters) for _ in range(pick.randrange(12)))
    if kind == 6:
        return [random_json(pick, depth + 1) for _ in range(pick.randrange(5))]
    return {random_json_name(pick): random_json(pick, depth + 1) for _ in range(pick.randrange(5))}


def random_json_name(pick: random.Random) -> str:
    return "".join(pick.choice('ab"\\é\n') for _ in range(pick.randrange(4)))


def same(a: Any, b: Any) -> bool:
    """Equal, in the types of numbers and the sign of zero too."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("d", a) == struct.pack("d", b)
    return type(a) is type(b) and a == b


def test_json_is_read_as_python_reads_it(ask: Any) -> None:
    pick = random.Random(1)
    values = [random_json(pick) for _ in range(400)]
    texts = [
        json.dumps(
            value,
            ensure_ascii=pick.random() < 0.5,
            indent=pick.choice([None, 1]),
            separators=pick.choice([None, (",", ":")]),
        )
        for value in values
    ]
    for value, text, reply in zip(values, texts, ask([{"do": "json", "text": text} for text in texts])):
        assert same(reply.get("ok", reply), value), text


INVALID = ["", " ", "{", "[", '"', '"\\', '"\\u', '"\\u12', '"\\u12x4"', "[1,]", "[,1]", "[1 2]", "{,}", '{"a"}', '{"a":}', '{"a":1,}',
           "{1:2}", "{a:1}", "tru", "truee", "nul", "nulll", "-", "+1", "--1", "1 2", "[1]]", "'a'", "[" * 100, "[" * 70 + "]" * 70,
           '{"a":1 "b":2}', "//", "[1,,2]", "\ufeff1", '{"a" 1}']  # fmt: skip


@pytest.mark.parametrize("text", INVALID)
def test_what_is_no_json(ask: Any, text: str) -> None:
    assert "error" in ask([{"do": "json", "text": text}])[0]


@pytest.mark.parametrize("text", ["1e400", "-1e400", "1e-400"])
def test_numbers_beyond_a_double(ask: Any, text: str) -> None:
    assert same(ask([{"do": "json", "text": text}])[0].get("ok"), json.loads(text))


def test_cut_json_is_refused(ask: Any) -> None:
    text = json.dumps({"a": [1, 2.5, "x\u00e9\n", None, {"b": [True, False]}], "c": -17})
    replies = ask([{"do": "json", "text": text[:size]} for size in range(len(text))])
    assert all("error" in reply for reply in replies)


def test_flipped_json_never_crashes(ask: Any) -> None:
    pick = random.Random(2)
    text = json.dumps(random_json(pick, 0) or [1, {"a": "\u1234"}], ensure_ascii=True) + json.dumps(
        {"a": [1.5, "\u1234"]}
    )
    requests = []
    for _ in range(500):
        letters = list(text)
        for _ in range(pick.randint(1, 4)):
            letters[pick.randrange(len(letters))] = chr(pick.randrange(1, 128))
        requests.append({"do": "json", "text": "".join(letters)})
    assert len(ask(requests)) == len(requests)


def test_a_quoted_text_is_the_decision_s(ask: Any) -> None:
    texts = ["", "a", 'a"b\\c/', "\n\t\x01\x1f\x7f", "é中\U0001f600", "\u2028"]
    replies = [reply["ok"] for reply in ask([{"do": "quote", "text": text} for text in texts])]
    for text, reply in zip(texts, replies):
        assert json.loads(reply) == text
        wanted = "".join(
            "\\" + letter if letter in '"\\' else f"\\u{ord(letter):04x}" if letter < " " else letter for letter in text
        )
        assert reply == f'"{wanted}"'


# ---- digests and floats


def test_sha256(ask: Any) -> None:
    pick = random.Random(3)
    contents = [pick.randbytes(size) for size in (*range(130), 183, 184, 247, 248, 4096, 10_001)]
    replies = ask([{"do": "sha256", "hex": content.hex()} for content in contents])
    assert [reply["ok"] for reply in replies] == [hashlib.sha256(content).hexdigest() for content in contents]


def doubles() -> list[float]:
    pick = random.Random(4)
    found = [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        5e-324,
        2.2250738585072014e-308,
        sys.float_info.max,
        1e22,
        1e23,
    ]
    for power in range(-8, 24):
        for value in (10.0**power, 10.0**power * 3, 2.0**power, 2.0 ** (53 + power)):
            found += [value, -value, math.nextafter(value, 0), math.nextafter(value, math.inf)]
    found += [struct.unpack("d", pick.randbytes(8))[0] for _ in range(3000)]
    found += [pick.uniform(-1e6, 1e6) for _ in range(500)] + [float(pick.randrange(2**53, 2**54)) for _ in range(500)]
    found += [struct.unpack("f", pick.randbytes(4))[0] for _ in range(500)]
    return found


def test_floats_are_written_as_repr_does(ask: Any) -> None:
    bits = [str(struct.unpack("<Q", struct.pack("<d", value))[0]) for value in doubles()]
    replies = ask([{"do": "float", "bits": text} for text in bits])
    wrong = [(repr(v), reply["ok"]) for v, reply in zip(doubles(), replies) if reply["ok"] != repr(v)]
    assert wrong == []


VALUES = ["0", "-1", "9223372036854775807", "-9223372036854775808", "0.5", "1e-05", "-0.0", "inf", "-inf", "nan", "True", "False", "None",
          '"a"', '""', '"a\\"\\\\b"', '"\\u000a"', '"\u00e9"']  # fmt: skip


def test_values_are_written_as_they_were_read(ask: Any) -> None:
    assert [reply.get("ok") for reply in ask([{"do": "value", "text": text} for text in VALUES])] == VALUES


@pytest.mark.parametrize("text", ["9223372036854775808", "18446744073709551615", "(1, 2)", '("a",)', "()"])
def test_large_ints_and_tuples_are_written_as_they_were_read(ask: Any, text: str) -> None:
    assert ask([{"do": "value", "text": text}])[0].get("ok") == text


# ---- expressions

BINARY = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "**": operator.pow, "<<": operator.lshift, ">>": operator.rshift, "&": operator.and_,
    "|": operator.or_, "^": operator.xor, "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le,
    ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def next_power_of_2(n: int) -> int:
    """Triton's, of 3.6 and 3.9."""
    n -= 1
    for shift in (1, 2, 4, 8, 16, 32):
        n |= n >> shift
    return n + 1


CALLS: dict[str, Callable[..., Any]] = {
    "cdiv": lambda x, y: (x + y - 1) // y,
    "min": min,
    "max": max,
    "next_power_of_2": next_power_of_2,
    "abs": abs,
    "int": int,
}


class Beyond(Exception):
    """What C++ may refuse: an integer beyond 64 bits, a shift by more than 62, `cdiv` of floats."""


def evaluate(form: Any, arguments: dict[str, Any]) -> Any:
    """What Python makes of an expression; raises Beyond where any part of it is."""
    if not isinstance(form, list):
        return form
    head, *rest = form
    if head == "str":
        return rest[0]
    if head == "arg":
        return arguments[rest[0]]
    if head == "if":
        return evaluate(rest[1 if evaluate(rest[0], arguments) else 2], arguments)
    if head in ("and", "or"):
        for operand in rest:
            value = evaluate(operand, arguments)
            if bool(value) == (head == "or"):
                break
        return value
    operands = [evaluate(operand, arguments) for operand in rest[head == "call" :]]
    if head == "**" and isinstance(operands[1], (int, float)) and abs(operands[1]) > 200:
        raise Beyond
    if head == "<<" and isinstance(operands[1], int) and operands[1] > 62:
        raise Beyond
    if head == "call" and rest[0] == "cdiv" and any(isinstance(operand, float) for operand in operands):
        raise Beyond
    if head == "call":
        value = CALLS[rest[0]](*operands)
    elif head == "tuple":
        value = tuple(operands)
    elif head == "not":
        value = not operands[0]
    else:
        value = -operands[0] if head == "neg" else BINARY[head](*operands)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise Beyond
    return value


def text_of(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return f"({', '.join(map(text_of, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def random_form(pick: random.Random, leaf: Callable[[], Any], depth: int = 0) -> Any:
    if depth > 3 or pick.random() < 0.2:
        return leaf()

    def more() -> Any:
        return random_form(pick, leaf, depth + 1)

    kind = pick.randrange(10)
    if kind < 5:
        return [pick.choice(list(BINARY)), more(), more()]
    if kind == 5:
        return [pick.choice(["and", "or"]), *(more() for _ in range(pick.randint(2, 3)))]
    if kind == 6:
        return [pick.choice(["not", "neg"]), more()]
    if kind == 7:
        return ["if", more(), more(), more()]
    name = pick.choice(list(CALLS))
    return ["call", name, *(more() for _ in range(1 if name in ("next_power_of_2", "abs", "int") else 2))]


def check(ask: Any, forms: list[Any], arguments: dict[str, Any]) -> list[Any]:
    texts = {name: text_of(value) for name, value in arguments.items()}
    replies = ask([{"do": "evaluate", "form": form, "args": texts} for form in forms])
    wrong = []
    for form, reply in zip(forms, replies):
        try:
            expected = text_of(evaluate(form, arguments))
        except (Beyond, ArithmeticError, ValueError, TypeError):
            continue  # an error in C++ or a value that no one asks for
        given = reply.get("ok")
        limits = ("beyond 64 bits", "a root of a negative number", "a power beyond the range of floats")
        if given != expected and not (given is None and any(limit in reply["error"] for limit in limits)):
            wrong.append((form, expected, reply))
    return wrong


INTEGERS = {"n": 1000, "m": 7, "z": 0, "k": -13, "b": 64, "t": True}


FORMS = {
    "sum": ["+", 3, 4],
    "difference": ["-", 3, 4],
    "product": ["*", 3, 4],
    "negative": ["neg", 3],
    "absolute": ["call", "abs", -3],
    "shift": ["<<", 3, 2],
    "divided by -1": ["//", 7, -1],
    "quotient": ["//", -7, 2],
    "rest": ["%", -7, 3],
    "power": ["**", 3, 4],
    "cdiv": ["call", "cdiv", 1000, 64],
    "next power": ["call", "next_power_of_2", 1000],
    "and of bools": ["&", True, True],
    "quotient of floats": ["//", 1.0, 0.1],
    "rest of floats": ["%", -6.0, 3.0],
    "not a number, equal": ["==", ["arg", "x"], ["arg", "x"]],
    "not a number, at most": ["<=", ["arg", "x"], 1],
    "int and float": ["==", 2**53 + 1, 2.0**53],
    "quotient of large ints": ["/", 2**53 + 1, 3],
}


@pytest.mark.parametrize("name", FORMS)
def test_an_expression(ask: Any, name: str) -> None:
    assert check(ask, [FORMS[name]], {"x": math.nan}) == []


POWERS = {"zero": ["**", 0, -1], "root": ["**", -8, 0.5], "large": ["**", 2.0, 5000]}


@pytest.mark.parametrize("name", POWERS)
def test_a_power_that_python_refuses(ask: Any, name: str) -> None:
    """Or that has a complex value there."""
    assert "error" in ask([{"do": "evaluate", "form": POWERS[name], "args": {}}])[0]


def test_integer_expressions(ask: Any) -> None:
    pick = random.Random(5)
    leaves = [*(["arg", name] for name in INTEGERS if name != "t"), 0, 1, 2, -1, 3, 16, 1000, 12345]
    forms = [random_form(pick, lambda: pick.choice(leaves)) for _ in range(1500)]
    wrong = check(ask, forms, INTEGERS)
    assert wrong == [], f"{len(wrong)} of {len(forms)}; the shortest: {sorted(map(str, wrong), key=len)[:6]}"


EXTREMES = [0, 1, -1, 2, -7, 64, 2**62 + 1, 2**63 - 1, -(2**63) + 1, -(2**63)]


def test_expressions_of_the_largest_integers(ask: Any) -> None:
    pick = random.Random(7)
    forms = [random_form(pick, lambda: pick.choice(EXTREMES), 2) for _ in range(1500)]
    assert check(ask, forms, {}) == []


def test_cdiv_of_the_largest_integers(ask: Any) -> None:
    asked = [(a, b) for a in EXTREMES for b in EXTREMES]
    replies = ask([{"do": "cdiv", "a": a, "b": b} for a, b in asked])
    for (a, b), reply in zip(asked, replies):
        assert reply.get("ok") == (-(-a // b) if b > 0 else None), (a, b)


def test_what_python_refuses_is_refused(ask: Any) -> None:
    pick = random.Random(6)
    leaves = [*(["arg", name] for name in INTEGERS), 0, 1, -1, 2, 0.5, None, ["str", "a"]]
    forms = [random_form(pick, lambda: pick.choice(leaves), 2) for _ in range(1500)]
    replies = ask(
        [{"do": "evaluate", "form": form, "args": {k: text_of(v) for k, v in INTEGERS.items()}} for form in forms]
    )
    wrong = []
    for form, reply in zip(forms, replies):
        try:
            evaluate(form, INTEGERS)
        except Beyond:
            pass
        except (ArithmeticError, ValueError, TypeError) as error:
            if "error" not in reply:
                wrong.append((form, repr(error), reply))
    assert wrong == [], f"{len(wrong)}; the shortest: {sorted(map(str, wrong), key=len)[:6]}"
