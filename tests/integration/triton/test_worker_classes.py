"""Argument classes: their texts, and what Triton's binder and the cubin make of each."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opwright.triton.worker.classes import parse_class, write_class
from opwright.triton.worker.errors import WorkerError
from opwright.triton.worker.packfile import read_pack
from opwright.triton.worker.values import DTYPES, Dtype, Function, parse_value, write_value

pytestmark = pytest.mark.triton

POINTED = "fp16 bf16 fp32 fp64 fp8e4nv fp8e5 i8 i16 i32 i64 u8 u16 u32 u64 u1".split()
# Of `docs/decisions/0006-triton-from-cpp.md`: the class, and the type and size of the parameter; None where it has none.
TABLE: list[tuple[str, str, tuple[str, int] | None]] = [
    *(("plain", f"*{dtype}", (f"*{dtype}", 8)) for dtype in POINTED),
    *(("plain", f"*{dtype}:16", (f"*{dtype}", 8)) for dtype in POINTED),
    ("plain", "i32", ("i32", 4)),
    ("plain", "i32:16", ("i32", 4)),
    ("plain", "i32:1", None),
    ("plain", "i64", ("i64", 8)),
    ("plain", "i64:16", ("i64", 8)),
    ("plain", "u64", ("u64", 8)),
    ("plain", "u64:16", ("u64", 8)),
    ("plain", "u1", ("u1", 1)),
    ("plain", "fp32", ("fp32", 4)),
    ("plain", "none", None),
    ("unspecialized", "i32", ("i32", 4)),
    ("unspecialized", "i64", ("i64", 8)),
    ("unspecialized", "u64", ("u64", 8)),
    ("unspecialized", "*fp32", ("*fp32", 8)),
    ("unspecialized", "u1", ("u1", 1)),
    ("unspecialized", "none", None),
    ("unaligned", "i32", ("i32", 4)),
    ("unaligned", "i32:1", None),
    ("unaligned", "*fp32", ("*fp32", 8)),
    ("as_i64", "i64", ("i64", 8)),
    ("as_i64", "i64:16", ("i64", 8)),
    ("as_i32", "i32", ("i32", 4)),
    ("as_i32", "i32:16", ("i32", 4)),
    ("as_u8", "u8", ("u8", 1)),
    ("as_u8", "u8:16", ("u8", 1)),
    ("as_fp16", "fp16", ("fp16", 2)),
    ("as_bf16", "bf16", ("bf16", 2)),
    ("as_fp64", "fp64", ("fp64", 8)),
    ("as_u1", "u1", ("u1", 1)),
    ("as_const", "*fp32:16", ("*fp32", 8)),
    ("as_pointer", "*fp16:16", ("*fp16", 8)),
]
SCRATCH = ["global_scratch", "profile_scratch"]


@pytest.mark.parametrize(("function", "text", "parameter"), TABLE, ids=[f"{f}-{t}" for f, t, _ in TABLE])
def test_each_class_gives_its_parameter(worker: Any, function: str, text: str, parameter: Any) -> None:
    record = worker.compile("classes.py", function, [text])
    expected = [] if parameter is None else [([0], *parameter)]
    assert [(p["arg"], p["type"], p["size"]) for p in record["params"][:-2]] == expected
    assert [p["arg"] for p in record["params"][-2:]] == SCRATCH
    assert record["key"] == text


@pytest.mark.parametrize("dtype", ["fp8e4b8", "fp8e5b16"])
def test_fp8_of_amd_is_known_to_the_binder_only(worker: Any, dtype: str) -> None:
    error = worker.refuses("classes.py", "plain", [f"*{dtype}"])
    assert error["kind"] == "compile"
    assert f"type {dtype} not supported in this architecture" in error["message"]


@pytest.mark.parametrize(
    ("function", "given_", "expected", "why"),
    [
        ("unspecialized", "i32:16", "i32", "under `do_not_specialize`"),
        ("unspecialized", "i32:1", "i32", "under `do_not_specialize`"),
        ("unspecialized", "*fp32:16", "*fp32", "under `do_not_specialize`"),
        ("unaligned", "*fp32:16", "*fp32", "under `do_not_specialize_on_alignment`"),
        ("as_i64", "i32", "i64", "declared `i64`"),
        ("as_i32", "i32:1", "i32", "declared `i32`"),
        ("as_fp16", "fp32", "fp16", "declared `fp16`"),
        ("plain", "fp16", "fp32", None),
        ("plain", "i16", "i32", None),
    ],
)
def test_a_class_that_the_declaration_cannot_have(
    worker: Any, function: str, given_: str, expected: str, why: str | None
) -> None:
    error = worker.refuses("classes.py", function, [given_])
    because = f", for it is {why}" if why else ""
    assert error["kind"] == "argument"
    assert error["message"] == f"`{function}`: argument 1 `p`: given `{given_}`, expected `{expected}`{because}."
    assert error["source"].startswith(f"def {function}(")


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("1024", "1024"),
        ("-3", "-3"),
        ("1", "1"),
        ("0.5", "0.5"),
        ("1e-05", "1e-05"),
        ("inf", "inf"),
        ("nan", "nan"),
        ("True", "True"),
        ("False", "False"),
        ("None", "None"),
        ('"relu"', "'relu'"),
        ('"a, b; \\"c\\" é"', "'a, b; \"c\" é'"),
        ("fp16", "triton.language.float16"),
        ("int32", "triton.language.int32"),
        ("fp8e4nv", "triton.language.fp8e4nv"),
        ("(1, 2)", "(1, 2)"),
        ("(1,)", "(1,)"),
        ("@helper", "JITFunction(kernels_classes:helper)"),
    ],
)
def test_constexpr_of_each_kind_arrives(worker: Any, text: str, seen: str) -> None:
    record = worker.compile("classes.py", "constant", ["*fp32", f"={text}"])
    arrived = bytes.fromhex(record["symbol"].removeprefix("constant_")).decode()
    if text == "fp8e4nv":
        assert arrived in (seen, "triton.language.float8e4nv")
    else:
        assert arrived == seen
    assert record["key"] == f"*fp32, ={text}"


def test_an_aligned_class_makes_other_code(worker: Any) -> None:
    aligned = worker.compile("add.py", "add_kernel", ["*fp32:16"] * 3 + ["i32:16", "=1024"])
    plain = worker.compile("add.py", "add_kernel", ["*fp32"] * 3 + ["i32", "=1024"])
    assert aligned["sha256"] != plain["sha256"]
    assert aligned["params"] == plain["params"]


def test_tuples_are_flattened(worker: Any) -> None:
    record = worker.compile("classes.py", "sums_tuple", ["*fp32:16", "(*fp32, *fp16:16)"])
    assert [(p["arg"], p["type"]) for p in record["params"][:-2]] == [
        ([0], "*fp32"),
        ([1, 0], "*fp32"),
        ([1, 1], "*fp16"),
    ]
    nested = worker.compile("classes.py", "plain", ["(i32, i32:1, none, (fp32, u1), =7)"])
    assert [(p["arg"], p["type"]) for p in nested["params"][:-2]] == [
        ([0, 0], "i32"),
        ([0, 3, 0], "fp32"),
        ([0, 3, 1], "u1"),
    ]
    single = worker.compile("classes.py", "plain", ["(i32:16,)"])
    assert [p["arg"] for p in single["params"][:-2]] == [[0, 0]]


@pytest.mark.parametrize("arch", [80, 90])
def test_host_descriptors(worker: Any, arch: int) -> None:
    descriptor = "tensordesc<fp16[64, 64]>"
    record = worker.compile("classes.py", "copies", [descriptor, descriptor, "=64", "=64"], arch=arch)
    first = [p for p in record["params"] if p["arg"] == [0]]
    shape_and_stride = [
        ("shape", 0, "i32", 4),
        ("shape", 1, "i32", 4),
        ("stride", 0, "i64", 8),
        ("stride", 1, "i64", 8),
    ]
    if arch == 90:
        head = [("tma", None, "tma", 128)]
    else:
        head = [
            ("base", None, "*fp16", 8),
            *(("shape", axis, "i64", 8) for axis in (0, 1)),
            *(("stride", axis, "i64", 8) for axis in (0, 1)),
            ("nan", None, "u1", 1),
            *([("tf32", None, "u1", 1)] if worker.version >= (3, 7) else []),
        ]
    assert [(p["field"], p.get("dim"), p["type"], p["size"]) for p in first] == head + shape_and_stride
    assert len(record["tma"]) == (2 if arch == 90 else 0)
    if arch == 90:
        assert record["tma"][0]["block_size"] == [64, 64]
    ends = [p["offset"] + p["size"] for p in record["params"]]
    assert all(end <= p["offset"] for end, p in zip(ends, record["params"][1:]))


def test_versions_agree(triton_pythons: Any, worker: Any, newest: Any) -> None:
    args = ["*fp32:16", "*fp32", "*fp32:16", "i32:16", "=1024"]
    own, other = (w.compile("add.py", "add_kernel", args) for w in (worker, newest))
    for name in ("key", "params", "num_warps", "max_threads", "symbol", "global_scratch", "source_key"):
        assert own[name] == other[name]


def test_pack_of_a_compile(worker: Any) -> None:
    record = worker.compile("add.py", "add_kernel", ["*fp32"] * 3 + ["i32", "=64"], num_warps=2, enable_fp_fusion=False)
    assert record["key"] == "*fp32, *fp32, *fp32, i32, =64; enable_fp_fusion=False, num_warps=2"
    entries = {"key" in entry.record: entry for entry in read_pack(worker.out)}
    assert entries[True].record == record
    assert entries[True].blob is not None
    assert entries[True].blob[:4] == b"\x7fELF"
    assert entries[False].record["params"][4] == {
        "name": "BLOCK",
        "constexpr": True,
        "const": False,
        "specialize": True,
        "align": True,
        "type": None,
        "default": "1024",
    }
    assert record["max_threads"] == 64


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.builds(Dtype, st.sampled_from(sorted(DTYPES)))
    | st.builds(Function, st.from_regex(r"[a-z]\w{0,5}(\.[a-z]\w{0,3})?", fullmatch=True)),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@given(values)
def test_values_read_back(value: Any) -> None:
    found = parse_value(write_value(value))
    assert repr(found) == repr(value)  # nan is not equal to nan, and True is not 1
    text = f"={write_value(value)}"
    assert write_class(parse_class(text)) == text


@given(st.text(max_size=20) | st.text('*fpi126:()=, "\\tnesord<[]>@.-', max_size=12))
def test_any_text_is_a_class_or_an_error(text: str) -> None:
    try:
        found = parse_class(text)
    except WorkerError as error:
        found = error.kind
    assert found == "request" or write_class(found) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fp32:16",
        "u1:16",
        "i64:1",
        "*fp4",
        "none:16",
        "(i32",
        "(i32)",
        "=",
        '="a',
        "=@",
        "=(1)",
        "=01",
        "=1e-5",
        "i32 ",
    ],
)
def test_texts_that_are_no_class(text: str) -> None:
    with pytest.raises(WorkerError):
        parse_class(text)


def test_strings_are_written_as_cpp_does() -> None:
    assert write_value('a"b\\c\n\x7f\u00e9/') == '"a\\"b\\\\c\\u000a\x7f\u00e9/"'


def test_floats_are_written_as_python_does() -> None:
    for value in (0.5, 1e-05, 1e16, 1e22, math.pi, -0.0):
        assert write_value(value) == repr(value)
