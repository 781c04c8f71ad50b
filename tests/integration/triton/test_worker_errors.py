"""Every way a request can fail: an error at the author's line, and a worker that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .conftest import FOLDER, Worker

pytestmark = pytest.mark.triton

HEAD = "import triton\nimport triton.language as tl\n"
JIT = "@triton.jit\ndef k(x):\n"


def _file(folder: Path, body: str, name: str = "k.py", head: str = HEAD) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(head + body)
    return file


def _error(worker: Any, file: Path, function: str = "k") -> dict[str, Any]:
    return worker.ask(do="describe", file=str(file), function=function)["error"]


@pytest.mark.parametrize(
    ("body", "line", "source", "says"),
    [
        ("def broken(:\n", 3, "def broken(:", "SyntaxError: invalid syntax"),
        ("\nimport no_such_module\n", 4, "import no_such_module", "No module named 'no_such_module'"),
        (
            "from . import sibling\n",
            3,
            "from . import sibling",
            "Relative imports work in a folder with `__init__.py`",
        ),
        ("1 / 0\n", 3, "1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)\n", 4, "sys.exit(3)", "SystemExit: 3"),
        (
            "def f():\n    raise ValueError('first\\n\\nsecond')\nf()\n",
            4,
            "raise ValueError(",
            "ValueError: first",
        ),
    ],
)
def test_a_file_that_does_not_import(newest: Any, tmp_path: Path, body: str, line: int, source: str, says: str) -> None:
    file = _file(tmp_path, body)
    error = _error(newest, file)
    assert (error["kind"], error["file"], error["line"]) == ("import", str(file), line)
    assert error["source"].startswith(source)
    assert error["message"].startswith(f"`{file}` cannot be imported: ")
    assert says in error["message"]
    assert "\n\n" not in error["message"]


def test_an_import_that_fails_below_names_the_file_below(newest: Any, tmp_path: Path) -> None:
    below = _file(tmp_path, "x = 1\nx.y\n", "below.py")
    file = _file(tmp_path, "import below\n")
    error = _error(newest, file)
    assert (error["file"], error["line"], error["source"]) == (str(below), 4, "x.y")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("missing", "has no `missing`; its kernels: `k`, `tuned`."),
        ("plain", "`plain` is a function, expected a function under `@triton.jit`"),
        ("NUMBER", "`NUMBER` is a int, expected"),
        ("twice", "`twice` has two `@triton.autotune`"),
    ],
)
def test_what_is_no_kernel(newest: Any, tmp_path: Path, function: str, says: str) -> None:
    body = (
        f"{JIT}    pass\nNUMBER = 3\ndef plain(x):\n    pass\ntuned = triton.autotune([triton.Config({{}})], [])(k)\n"
    )
    twice = "twice = triton.autotune([triton.Config({})], [])(tuned)\n" if function == "twice" else ""
    error = _error(newest, _file(tmp_path, body + twice), function)
    assert error["kind"] == "function"
    assert says in error["message"]
    if function == "plain":
        assert error["source"] == "def plain(x):"


def test_a_file_that_is_not_there(newest: Any, tmp_path: Path) -> None:
    error = _error(newest, tmp_path / "none.py")
    assert error["message"] == f"`{tmp_path}/none.py` is not there: no kernel can be read from it."


@pytest.mark.parametrize(
    ("args", "options", "kind", "message"),
    [
        (["*fp32"], {}, "argument", "was given 1 arguments, expected 5: x, y, out, n, BLOCK."),
        (
            ["*fp32"] * 3 + ["i32", "i32"],
            {},
            "argument",
            "argument 5 `BLOCK` is `tl.constexpr`: given `i32`, expected `=VALUE`.",
        ),
        (
            ["*fp32"] * 3 + ["=4", "=64"],
            {},
            "argument",
            "argument 4 `n` is not a `tl.constexpr`: given `=4`, expected `i32`",
        ),
        (["*fp32"] * 3 + ["i33", "=64"], {}, "argument", "argument 4 `n`: `i33` cannot be read"),
        (
            ["*fp32"] * 3 + ["i32", "=064"],
            {},
            "argument",
            "argument 5 `BLOCK`: `=064` must be written as `=64`.",
        ),
        (
            ["*fp32"] * 3 + ["i32", "=@nobody"],
            {},
            "argument",
            "`@nobody` must name a JIT function of the kernel's module",
        ),
        (["*fp32"] * 3 + ["i32", "=64"], {"num_wraps": 4}, "option", "`num_wraps` is not an option of Triton"),
        (["*fp32"] * 3 + ["i32", "=64"], {"num_warps": 3}, "option", "num_warps must be a power of 2"),
        (["*fp32"] * 3 + ["i32", "=64"], {"BLOCK": 4}, "option", "`BLOCK` is not an option of Triton"),
        (["*fp32"] * 3 + ["i32", "=100"], {}, "compile", "arange's range must be a power of 2"),
    ],
)
def test_arguments_and_options(worker: Any, args: list[str], options: Any, kind: str, message: str) -> None:
    error = worker.refuses("add.py", "add_kernel", args, **options)
    assert error["kind"] == kind
    assert message in error["message"]


def test_a_compile_error_is_at_the_innermost_line_of_the_author(worker: Any, tmp_path: Path) -> None:
    below = _file(
        tmp_path, "\n\n@triton.jit\ndef inner(\n    x,\n):\n    y = x + 1\n    return y.no_such\n", "below.py"
    )
    file = _file(tmp_path, f"from below import inner\n{JIT}    tl.store(x, inner(tl.load(x)))\n")
    error = worker.refuses(file, "k", ["*fp32"])
    assert (error["kind"], error["file"], error["line"]) == ("compile", str(below), 10)
    assert error["source"] == "return y.no_such"
    assert error["message"].startswith("`k` does not compile: ")
    assert "no_such" in error["message"]


def test_a_compile_error_in_the_kernel_itself(worker: Any, tmp_path: Path) -> None:
    file = _file(tmp_path, f"{JIT}    tl.static_assert(False, 'only of 8')\n")
    error = worker.refuses(file, "k", ["*fp32"])
    assert (error["file"], error["line"]) == (str(file), 5)
    assert "only of 8" in error["message"]
    call = _file(tmp_path, f"{JIT}    tl.store(x, tl.dot(x, x))\n", "dot.py")
    assert worker.refuses(call, "k", ["*fp32"])["line"] == 5
    assert worker.compile("add.py", "add_kernel", ["*fp32"] * 3 + ["i32", "=64"])


def test_a_call_of_a_plain_function(worker: Any, tmp_path: Path) -> None:
    file = _file(tmp_path, f"def plain(x):\n    return x\n{JIT}    tl.store(x, plain(1))\n")
    error = worker.refuses(file, "k", ["*fp32"])
    assert (error["kind"], error["file"]) == ("compile", str(file))
    assert "plain" in error["message"]


def test_a_kernel_that_ptxas_refuses(worker: Any, tmp_path: Path) -> None:
    asm = 'tl.inline_asm_elementwise("bogus.op $0, $1;", "=r,r", [tl.load(x)], dtype=tl.int32, is_pure=False, pack=1)'
    file = _file(tmp_path, f"{JIT}    tl.store(x, {asm})\n")
    error = worker.refuses(file, "k", ["*i32"])
    assert error["kind"] == "compile"
    assert "ptxas" in error["message"]
    assert worker.compile("add.py", "add_kernel", ["*fp32"] * 3 + ["i32", "=64"])


def test_starred_parameters(worker: Any, tmp_path: Path) -> None:
    file = _file(tmp_path, "@triton.jit\ndef k(x, *rest):\n    pass\n")
    error = _error(worker, file)
    assert error["kind"] in ("function", "import")
    if error["kind"] == "function":
        assert "takes `*rest`; its number of parameters must be fixed" in error["message"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("no json", "A line is not JSON"),
        ("[1]", "A request is a JSON object, not a list."),
        ('{"id": 5, "do": "dance"}', "`do` is 'dance', expected 'describe' or 'compile'."),
        ('{"id": 5, "do": {}}', "`do` is {}, expected"),
        ('{"id": 5, "do": "describe", "file": 3}', "`file` is 3, expected a str."),
        (
            '{"id": 5, "do": "compile", "file": "", "function": "", "arch": true}',
            "`arch` is True, expected a int.",
        ),
        (
            '{"id": 5, "do": "compile", "file": "", "function": "", "arch": 90, "args": [1], "options": {}, "out": ""}',
            "`args` is [1], expected a list of classes.",
        ),
    ],
)
def test_requests_that_are_none(newest: Any, line: str, says: str) -> None:
    reply = newest.ask_line(line)
    assert reply["error"]["kind"] == "request"
    assert says in reply["error"]["message"]
    assert reply["id"] == (5 if '"id"' in line else None)


def test_a_pack_that_cannot_be_written(newest: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    request = {
        "file": str(_file(tmp_path, f"{JIT}    pass\n")),
        "function": "k",
        "arch": 90,
        "args": ["i32"],
        "options": {},
    }
    error = newest.ask(do="compile", out=str(tmp_path / "file" / "a.opk"), **request)["error"]
    assert error["kind"] == "output"
    assert str(tmp_path / "file" / "a.opk") in error["message"]


def test_the_interpreter_is_refused(triton_pythons: Any, tmp_path: Path) -> None:
    worker = Worker(max(triton_pythons), tmp_path, TRITON_INTERPRET="1")
    error = worker.refuses("add.py", "add_kernel", ["*fp32"] * 3 + ["i32", "=64"])
    assert error["kind"] == "interpreted"
    assert "`unset TRITON_INTERPRET`" in error["message"]
    worker.close()


def test_a_python_without_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    monkeypatch.syspath_prepend(str(FOLDER))
    from opwright.triton.worker import handle

    try:
        import triton  # noqa: F401
    except ImportError:
        pass
    else:
        pytest.skip("this Python has Triton")
    file = _file(tmp_path, f"{JIT}    pass\n")
    error = handle({"id": 1, "do": "describe", "file": str(file), "function": "k"})["error"]
    assert error["kind"] == "no-triton"
    assert "-m pip install triton" in error["message"]
