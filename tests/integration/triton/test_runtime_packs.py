"""Packs in the C++ runtime: the right kernel of several, and from damaged or hostile bytes an error or the right one."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import runtime
import stub
import synthetic_packs
from synthetic_packs import changed, raw_pack

from opwright.build.store import Store
from opwright.triton.worker.packfile import Entry, digest_of, pack

pytestmark = pytest.mark.compiler
KERNELS = synthetic_packs.KERNELS / "pack_kernels.py"
ASAN = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1")
FUZZ = runtime.ROOT / "tests" / "native" / "triton_pack_fuzz.cpp"
TILE = "tensordesc<fp16[64, 64]>"
FLIPS = 1500


def request(function: str, args: list[str], arch: int = 90) -> dict[str, Any]:
    return {"file": str(KERNELS), "function": function, "arch": arch, "args": args, "options": {}}


REQUESTS = [
    request("left", ["*i32:16", "i32", "=1"]),
    request("right", ["*i32:16", "i32", "=1"]),
    request("mixed", ["*fp32:16", "(fp32, i32)", "fp32", "i32", "=1"]),
    request("copies", [TILE, TILE, "i32:16"]),
    request("left", ["*i32:16", "i32", "=1"], 80),
    request("right", ["*i32:16", "i32", "=1"], 80),
    request("copies", [TILE, TILE, "i32:16"], 80),
]


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    """Kernels and descriptions that a worker made of pack_kernels.py."""
    tritons = stub.find_tritons()
    if not tritons:
        pytest.skip("no Triton at .venv/triton-*/bin/python")
    return synthetic_packs.compile_entries(tritons[max(tritons)], REQUESTS)


def one(entries: list[Entry], function: str, arch: int | None = 90) -> Entry:
    """A kernel, or with no arch a description."""
    return next(entry for entry in entries if entry.record["function"] == function and entry.record.get("arch") == arch)


def left(n: int = 5, **more: Any) -> dict[str, Any]:
    arguments = [{"tensor": "i32", "address": 0x1000}, {"int": n}, {"constexpr": "1"}]
    return {"file": str(KERNELS), "function": "left", "grid": [3], "args": arguments, **more}


def run(
    folder: Path, packs: list[bytes], launches: list[dict[str, Any]], *, freeze: bool = True, **settings: Any
) -> tuple[list[Any], list[Any]]:
    """Launches from packs, with no Python that works; gives the errors' texts and the stub's record."""
    chosen = ["freeze"] if freeze else []
    for number, content in enumerate(packs):
        path = folder / f"{number}.opk"
        path.write_bytes(content)
        chosen.append(f"pack={path}")
    results, records = runtime.run_launches(None, launches, folder, triton_settings=",".join(chosen), **settings)
    return [result["error"] and result["error"]["message"] for result in results], records


def image(entry: Entry) -> str:
    assert entry.blob is not None
    return stub.image_digest(entry.blob)


def test_frozen_without_python(entries: list[Entry], tmp_path: Path) -> None:
    errors, records = run(tmp_path, [pack(entries)], [left()])
    assert errors == [None]
    assert [record["image"] for record in records] == [image(one(entries, "left"))]
    assert stub.unpack_params(records[0], "QiQQ") == [0x1000, 5, 0, 0]


def test_scratch_memory_that_64_bits_cannot_count(entries: list[Entry], tmp_path: Path) -> None:
    kernel = changed(one(entries, "left"), global_scratch=[1 << 32, 16])
    content = pack([kernel, one(entries, "left", None)])
    launches = [left(grid=[2**31 - 1, 8]), left(grid=[1])]
    (error, fine), records = run(tmp_path, [content], launches)
    assert "no scratch memory\n\n  needed  more than 2^64 bytes" in error
    assert fine is None
    assert len(records) == 1


def test_each_gpu_gets_the_cubin_of_its_architecture(entries: list[Entry], tmp_path: Path) -> None:
    launches = [left(device=device) for device in (0, 1, 0, 2)]
    errors, records = run(tmp_path, [pack(entries)], launches, devices=4, arch="90,80,86,100")
    assert errors == [None] * 4
    new, old = image(one(entries, "left")), image(one(entries, "left", 80))
    assert [(record["device"], record["image"]) for record in records] == [
        (0, new),
        (1, old),
        (0, new),
        (2, old),
    ]


def test_a_cubin_of_sm_90_is_not_for_newer_gpus(entries: list[Entry], tmp_path: Path) -> None:
    (error,), records = run(tmp_path, [pack(entries)], [left()], arch="100")
    assert "is in no pack" in error
    assert records == []


@pytest.mark.parametrize("driver", [13000, 12080, 12000])
def test_of_two_tritons_one_is_launched(entries: list[Entry], tmp_path: Path, driver: int) -> None:
    kinds = {"3.9.0": (12080, "right"), "3.10.0": (13000, "copies"), "3.6.0": (12000, "left")}
    # Told apart by their cubins, all with the parameters of `left`, which those of `copies` do not fit.
    base = one(entries, "left", 80).record
    made = [
        Entry({**base, "triton": version, "cuda": cuda, "symbol": symbol}, one(entries, symbol, 80).blob)
        for version, (cuda, symbol) in kinds.items()
    ]
    content = pack([*made, one(entries, "left", None)])
    (error,), records = run(tmp_path, [content], [left()], arch=80, driver_version=driver)
    if driver == 13000:
        assert "is not what its record says" in error
    else:
        assert error is None
        assert records[0]["kernel"] == {12080: "right", 12000: "left"}[driver]


def test_a_pack_whose_cubin_the_driver_cannot_load_is_passed_over(entries: list[Entry], tmp_path: Path) -> None:
    base, kinds = one(entries, "left", 80).record, ((13000, "right"), (12000, "left"))
    packs = [
        pack(
            [Entry({**base, "cuda": cuda, "symbol": symbol}, one(entries, symbol, 80).blob), one(entries, "left", None)]
        )
        for cuda, symbol in kinds
    ]
    (error,), records = run(tmp_path, packs, [left()], arch=80, driver_version=12080)
    assert error is None
    assert [record["kernel"] for record in records] == ["left"]


def place(entries: list[Entry], file: str) -> list[Entry]:
    return [changed(entry, file=file) for entry in entries]


@pytest.mark.parametrize(
    ("filed", "is_found"),
    [
        ("pack_kernels.py", True),
        ("kernels/pack_kernels.py", True),
        ("triton/kernels/pack_kernels.py", True),
        ("/elsewhere/kernels/pack_kernels.py", False),
        ("other/pack_kernels.py", False),
        ("./kernels/pack_kernels.py", True),
        ("kernels/../kernels/pack_kernels.py", True),
        ("y_kernels.py", False),
    ],
)
def test_a_path_matches_if_its_last_components_do(
    entries: list[Entry], tmp_path: Path, filed: str, is_found: bool
) -> None:
    (error,), records = run(tmp_path, [pack(place(entries, filed))], [left()])
    assert (error is None, len(records)) == (is_found, int(is_found))


def test_of_two_files_of_one_name_the_right_one(entries: list[Entry], tmp_path: Path) -> None:
    other = [
        Entry(
            {**one(entries, "left").record, "symbol": "right", "file": "other/pack_kernels.py"},
            one(entries, "right").blob,
        ),
        changed(one(entries, "left", None), file="other/pack_kernels.py"),
    ]
    mine = place([one(entries, "left"), one(entries, "left", None)], "kernels/pack_kernels.py")
    errors, records = run(
        tmp_path, [pack([*other, *mine])], [left(), left() | {"file": "/build/other/pack_kernels.py"}]
    )
    assert errors == [None, None]
    assert [record["kernel"] for record in records] == ["left", "right"]


def test_the_first_pack_that_has_it_wins(entries: list[Entry], tmp_path: Path) -> None:
    description = one(entries, "left", None)
    second = Entry({**one(entries, "left").record, "symbol": "right"}, one(entries, "right").blob)
    errors, records = run(tmp_path, [pack([one(entries, "left"), description]), pack([second, description])], [left()])
    assert (errors, records[0]["kernel"]) == ([None], "left")
    errors, records = run(tmp_path, [pack([description]), pack([second, description])], [left()])
    assert (errors, records[0]["kernel"]) == ([None], "right")


def test_a_stale_pack_is_used_only_when_frozen(entries: list[Entry], tmp_path: Path) -> None:
    file = tmp_path / "pack_kernels.py"
    file.write_text(KERNELS.read_text() + "\n# changed\n")
    content = [pack(place(entries, "pack_kernels.py"))]
    launch = left() | {"file": str(file)}
    (error,), records = run(tmp_path, content, [launch], freeze=False)
    assert "/nonexistent/python" in error
    assert records == []
    (error,), records = run(tmp_path, content, [launch])
    assert (error, len(records)) == (None, 1)
    file.write_text(KERNELS.read_text())
    (error,), records = run(tmp_path, content, [launch], freeze=False)
    assert (error, len(records)) == (None, 1)


@pytest.mark.parametrize("content", [b"", b"OPWPACK1", b"no pack" * 20, b"OPWPACK1" + bytes(56)], ids=len)
def test_what_is_no_pack(tmp_path: Path, content: bytes) -> None:
    (error,), records = run(tmp_path, [content], [left()])
    assert f"the pack {tmp_path}/0.opk" in error
    assert records == []


def damaged_cache(entries: list[Entry], tmp_path: Path, what: bytes, python: Path) -> tuple[Any, Any]:
    """Launches, damages the records that contain `what` in the cache, launches again."""
    (result,), _ = runtime.run_launches(python, [left()], tmp_path)
    assert result["error"] is None
    for path in (tmp_path / "cache" / "opwright-store" / "triton").glob("*.opk"):
        content = path.read_bytes()
        path.write_bytes(content.replace(what, what.swapcase()))
        assert what.swapcase() == what or path.read_bytes() != content or what not in content
    (result,), records = runtime.run_launches(python, [left()], tmp_path)
    return result["error"], records


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(b"num_warps", id="kernel"),
        pytest.param(b'"heuristics"', id="description"),
    ],
)
def test_a_damaged_cache_is_made_again(entries: list[Entry], tmp_path: Path, what: bytes) -> None:
    tritons = stub.find_tritons()
    error, records = damaged_cache(entries, tmp_path, what, tritons[max(tritons)])
    assert (error, len(records)) == (None, 1)


def test_the_cache_lies_in_the_store_and_leaves_other_folders_alone(entries: list[Entry], tmp_path: Path) -> None:
    """It was `triton` beside the store, and took a folder of that name for its own."""
    tritons = stub.find_tritons()
    python, theirs = tritons[max(tritons)], tmp_path / "cache" / "triton"
    theirs.mkdir(parents=True)
    theirs.chmod(0o755)
    (result,), _ = runtime.run_launches(python, [left()], tmp_path)
    store = tmp_path / "cache" / "opwright-store"
    assert result["error"] is None
    assert (list(theirs.iterdir()), stat.S_IMODE(theirs.stat().st_mode)) == ([], 0o755)
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (store, store / "triton")} == {0o700}
    count = len(list((store / "triton").glob("*.opk")))
    assert (Store(store).clean(), count) == (0, 2)  # it counts builds; the marker is Python's, so that it cleans
    assert list((store / "triton").iterdir()) == []


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda store: (store.mkdir(), (store / "thesis.tex").touch()), "it has files, and Opwright has not made it"),
        (lambda store: store.symlink_to(store.parent), "it is a symbolic link or a file"),
        (lambda store: store.touch(), "it is a symbolic link or a file"),
        (lambda store: (store.mkdir(), store.chmod(0o777)), "others may write to it"),
    ],
)
def test_a_store_that_is_not_opwrights_is_refused(
    make: Callable, reason: str, entries: list[Entry], tmp_path: Path
) -> None:
    tritons = stub.find_tritons()
    store = tmp_path / "cache" / "opwright-store"
    store.parent.mkdir()
    make(store)
    (result,), records = runtime.run_launches(tritons[max(tritons)], [left()], tmp_path)
    assert f"the cache cannot be used\n\n  folder  {store}/triton\n  reason  {reason}" in result["error"]["message"]
    assert records == []


def fuzz(tmp_path: Path, good: bytes, *arguments: str) -> list[dict[str, Any]]:
    """Runs triton_pack_fuzz under the address sanitizer."""
    path = tmp_path / "good.opk"
    path.write_bytes(good)
    env = stub.environment(folder=stub.build(flags=ASAN)) | {
        "ASAN_OPTIONS": "detect_leaks=0",
        "OPWRIGHT_TRITON": "python=/nonexistent/python",
        "OPWRIGHT_CACHE_DIR": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [runtime.build(FUZZ, ASAN), path, KERNELS, tmp_path, *arguments],
        env=env,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (tmp_path / "stderr").write_text(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]


def good(entries: list[Entry]) -> bytes:
    return pack(entry for entry in entries if entry.record.get("arch") != 80)


def test_flipped_and_cut_packs(entries: list[Entry], tmp_path: Path) -> None:
    *found, total = fuzz(tmp_path, good(entries), "flip", str(FLIPS), "1")
    assert found == []
    assert total.get("refused", 0) > FLIPS // 2


def row(record: dict[str, Any], **place: Any) -> tuple[bytes, dict[str, Any]]:
    return digest_of({**record, **place}), record


# A record's numbers that must not be believed: where, the value, and whether only a crash would be a fault, for a
# record may lie of what it alone knows.
NUMBERS: dict[str, tuple[str, list[Any], Any, str]] = {
    "no warps": ("left", ["num_warps"], 0, "refused"),
    "more warps than a block has": ("left", ["num_warps"], 64, "refused"),
    "negative warps": ("left", ["num_warps"], -1, "refused"),
    "warps as a float": ("left", ["num_warps"], 4.0, "refused"),
    "cluster of 3": ("left", ["num_ctas"], 3, "any"),
    "negative shared memory": ("left", ["shared"], -1, "refused"),
    "1 MiB of shared memory": ("left", ["shared"], 1 << 20, "refused"),
    "2^40 of shared memory": ("left", ["shared"], 1 << 40, "refused"),
    "scratch of 2^60": ("left", ["global_scratch"], [1 << 60, 16], "refused"),
    "scratch of no list": ("left", ["global_scratch"], {"0": 1}, "refused"),
    "alignment of 0": ("left", ["global_scratch"], [64, 0], "any"),
    "no symbol": ("left", ["symbol"], "", "refused"),
    "another symbol": ("left", ["symbol"], "right", "refused"),
    "a CUDA of tomorrow": ("left", ["cuda"], 99990, "refused"),
    "params are an object": ("left", ["params"], {"a": 1}, "refused"),
    "params are absent": ("left", ["params"], None, "refused"),
    "the last params are absent": ("left", ["params"], slice(2), "refused"),
    "the first param is absent": ("left", ["params"], slice(1, None), "refused"),
    "param of argument 999": ("left", ["params", 1, "arg"], [999], "refused"),
    "param of argument -1": ("left", ["params", 1, "arg"], [-1], "refused"),
    "param inside of a pointer": ("left", ["params", 0, "arg"], [0, 0], "refused"),
    "param inside of a constexpr": ("left", ["params", 1, "arg"], [2], "refused"),
    "param of no argument": ("left", ["params", 1, "arg"], [], "refused"),
    "deep path": ("left", ["params", 1, "arg"], [1] * 1000, "refused"),
    "pointer for an int": ("left", ["params", 1, "type"], "*i32", "refused"),
    "float for an int": ("left", ["params", 1, "type"], "fp64", "any"),
    "int for a pointer": ("left", ["params", 0, "type"], "i64", "refused"),
    "size 0": ("left", ["params", 1, "size"], 0, "refused"),
    "size 128": ("left", ["params", 1, "size"], 128, "refused"),
    "size 255": ("left", ["params", 3, "size"], 255, "refused"),
    "offset 2^31": ("left", ["params", 3, "offset"], 1 << 31, "refused"),
    "offset 2^32 + 24": ("left", ["params", 3, "offset"], (1 << 32) + 24, "refused"),
    "offset 32764": ("left", ["params", 3, "offset"], 32764, "refused"),
    "offset 32000": ("left", ["params", 3, "offset"], 32000, "refused"),
    "offset before": ("left", ["params", 3, "offset"], 0, "refused"),
    "negative offset": ("left", ["params", 1, "offset"], -8, "refused"),
    "shape of 128 bytes": ("copies", ["params", 1, "size"], 128, "refused"),
    "shape of 64 bytes": ("copies", ["params", -1], {"arg": [0], "field": "shape", "dim": 0, "type": "i64", "offset": 408, "size": 64}, "refused"),
    "fifth dimension": ("copies", ["params", 1, "dim"], 4, "refused"),
    "sixth dimension": ("copies", ["params", 1, "dim"], 5, "refused"),
    "map of 8 bytes": ("copies", ["params", 0, "size"], 8, "refused"),
    "no recipes": ("copies", ["tma"], [], "refused"),
    "one recipe": ("copies", ["tma"], slice(1), "refused"),
    "recipe of no block": ("copies", ["tma", 0, "block_size"], [], "refused"),
    "recipe of six dimensions": ("copies", ["tma", 0, "block_size"], [1] * 6, "refused"),
    "recipe of type 31": ("copies", ["tma", 0, "elem_type"], 31, "refused"),
    "tuple's second for its third": ("mixed", ["params", 2, "arg"], [1, 2], "refused"),
    "tuple for its element": ("mixed", ["params", 2, "arg"], [1], "refused"),
    "deeply nested": ("left", ["sources"], json.loads("[" * 100 + "]" * 100), "refused"),
}  # fmt: skip


def put(record: dict[str, Any], path: list[Any], value: Any) -> dict[str, Any]:
    """A copy in which a place has a value, or a slice of what it had."""
    made = json.loads(json.dumps(record))
    at = made
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = at[path[-1]][value] if isinstance(value, slice) else value
    return made


def descriptions_of(entries: list[Entry]) -> Iterator[tuple[str, str, Any]]:
    """Descriptions that lie: a name, the record's text, what must come of it."""
    described = one(entries, "left", None).record
    for name, path, value in (
        ("no params", ["params"], []),
        ("a fourth param", ["params"], [*described["params"], {"name": "q", "default": "3"}]),
        ("params without names", ["params"], [{}, {}, {}]),
        ("default that is not a value", ["params", 2, "default"], "((("),
        ("default that is an open text", ["params", 1, "default"], '"abc'),
        ("unknown type", ["params", 1, "type"], "zzz"),
        ("heuristic that is not an expression", ["heuristics"], [{"name": "C", "expression": ["nothing"]}]),
        ("heuristic of no name", ["heuristics"], [{"expression": 1}]),
        ("heuristic without anything", ["heuristics"], [{}]),
        (
            "many heuristics",
            ["heuristics"],
            [{"name": f"h{i}", "expression": ["arg", "n"]} for i in range(40)],
        ),
        ("heuristic that reads its option", ["heuristics"], [{"name": "C", "expression": ["arg", "zzz"]}]),
        (
            "heuristic that divides by zero",
            ["heuristics"],
            [{"name": "C", "expression": ["//", ["arg", "n"], 0]}],
        ),
        ("autotune of no constexprs", ["autotune"], {"key": ["n", "n"], "configs": [{}]}),
        ("grids are a list", ["grids"], [1, 2]),
        ("grid that is not an expression", ["grids"], {"g": {"expression": "x"}}),
    ):
        yield name, json.dumps(put(described, path, value)), "any"
    deep = "(" * 3_000_000  # more than a stack holds
    for name, path, value in (
        ("default of 3 MB of parentheses", ["params"], [*described["params"], {"name": "q", "default": deep}]),
        ("autotune of 3 MB of parentheses", ["autotune"], {"configs": [{"constexprs": {"C": deep}}]}),
    ):
        yield name, json.dumps(put(described, path, value)), "refused"
    for name, text in (
        ("a list", "[1, 2]"),
        ("null", "null"),
        ("a number", "17"),
        ("nothing", ""),
        ("no UTF-8", json.dumps(described).replace("left", "l\xff\xfe").encode("latin-1").decode("latin-1")),
        ("half a record", json.dumps(described)[:-30]),
        ("an open text", '{"params": "'),
        ("a bad escape", '{"params": "\\u12'),
        ("twice", json.dumps(described) * 2),
    ):
        yield f"record is {name}", text, "refused"


def hostile(entries: list[Entry]) -> dict[str, tuple[bytes, str]]:
    """Packs whose digests are all right: bytes, and what must come of them."""
    functions = ("left", "right", "mixed", "copies")
    kernels = {name: one(entries, name) for name in functions}
    described = {name: one(entries, name, None).record for name in functions}
    blobs = [kernels[name].blob or b"" for name in functions]
    numbers = {name: number for number, name in enumerate(functions)}
    fine = [row({**kernels[name].record, "blob": numbers[name]}) for name in functions]
    fine += [row(described[name]) for name in functions]

    def without(*names: str, kind: str) -> list[Any]:
        is_kernel = kind == "kernel"
        return [item for item in fine if not (item[1]["function"] in names and ("key" in item[1]) == is_kernel)]

    found: dict[str, tuple[bytes, str]] = {}
    others = without("left", "right", kind="kernel")
    found["rows of two functions change places"] = (
        raw_pack(
            [
                *others,
                row({**kernels["left"].record, "blob": 0}, function="right"),
                row({**kernels["right"].record, "blob": 1}, function="left"),
            ],
            blobs,
        ),
        "refused",
    )
    found["row of another architecture"] = (
        raw_pack(
            [
                *without("left", kind="kernel"),
                row({**kernels["left"].record, "arch": 80, "blob": 0}, arch=90),
            ],
            blobs,
        ),
        "refused",
    )
    found["row of another key"] = (
        raw_pack(
            [
                *without("left", kind="kernel"),
                row({**kernels["left"].record, "key": "*i32:16, i32, =2", "blob": 0}, key="*i32:16, i32, =1"),
            ],
            blobs,
        ),
        "refused",
    )
    found["row of another file"] = (
        raw_pack(
            [
                *without("left", kind="kernel"),
                row({**kernels["left"].record, "file": "a/other.py", "blob": 0}, file=str(KERNELS)),
            ],
            blobs,
        ),
        "refused",
    )
    swapped = without("left", "right", kind="description")
    found["descriptions change places"] = (
        raw_pack(
            [
                *swapped,
                row({**described["right"], "params": described["right"]["params"][::-1]}, function="left"),
                row(described["left"], function="right"),
            ],
            blobs,
        ),
        "refused",
    )
    for name, (function, path, value, outcome) in NUMBERS.items():
        record = put({**kernels[function].record, "blob": numbers[function]}, path, value)
        found[name] = raw_pack([*without(function, kind="kernel"), row(record)], blobs), outcome
    for name, text, outcome in descriptions_of(entries):
        found[f"description: {name}"] = (
            raw_pack(
                [
                    *without("left", kind="description"),
                    (digest_of(described["left"]), text.encode("latin-1", "replace")),
                ],
                blobs,
            ),
            outcome,
        )
    tuned = put(described["left"], ["autotune"], {"key": ["n"], "configs": [{}, {}]})
    table = {"file": str(KERNELS), "function": "left", "arch": 90, "gpu": "GPU"}
    table["rows"] = [{"key": ["(" * 3_000_000, "i32"], "config": 1}]
    found["table of 3 MB of parentheses"] = (
        raw_pack([*without("left", kind="description"), row(tuned), row(table)], blobs),
        "refused",
    )
    elf = blobs[0]
    for name, blob in (
        ("empty", b""),
        ("no ELF", b"\x7fELG" + bytes(200)),
        ("magic alone", b"\x7fELF"),
        ("header alone", elf[:64]),
        ("first half", elf[: len(elf) // 2]),
        ("without its last 100 bytes", elf[:-100]),
        ("sections beyond its end", elf[:40] + (1 << 40).to_bytes(8, "little") + elf[48:]),
        ("sections at the end of memory", elf[:40] + ((1 << 64) - 64).to_bytes(8, "little") + elf[48:]),
        ("65535 sections", elf[:60] + b"\xff\xff" + elf[62:]),
    ):
        # At the end of everything: nothing behind it can be read by mistake.
        content = raw_pack(
            [*without("left", kind="kernel"), row({**kernels["left"].record, "blob": 0})], [blob, *blobs[1:]]
        )
        found[f"cubin: {name}"] = content, "refused"
    for name, at in (("outside", [1 << 40, 10]), ("negative", [-64, 64]), ("around the end", [(1 << 63) - 1, 4000]),
                     ("a text", "here"), ("of one number", [64])):  # fmt: skip
        record = {**kernels["left"].record, "blob": at, "sha256": "0" * 64}
        found[f"cubin's place is {name}"] = (
            raw_pack([*without("left", kind="kernel"), row(record)], blobs),
            "refused",
        )
    return found


def outcomes(entries: list[Entry], folder: Path) -> dict[str, dict[str, Any]]:
    made = hostile(entries)
    paths = {}
    for number, (name, (content, _)) in enumerate(made.items()):
        paths[name] = folder / f"{number}.opk"
        paths[name].write_bytes(content)
    found = fuzz(folder, good(entries), "files", *map(str, paths.values()))
    return {name: {**line, "wanted": made[name][1]} for name, line in zip(made, found, strict=True)}


def test_hostile_packs(entries: list[Entry], tmp_path: Path) -> None:
    allowed = {"any": ("right", "refused", "wrong"), "refused": ("right", "refused")}
    wrong = {
        name: (line["outcome"], line["errors"][:200])
        for name, line in outcomes(entries, tmp_path).items()
        if line["outcome"] not in allowed[line["wanted"]]
    }
    assert wrong == {}
