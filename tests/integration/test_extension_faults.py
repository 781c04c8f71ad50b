"""Bad input and faults around a build of an extension: a clear error, nothing half-built, nothing of the user's touched."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from extension_modules import inline, source

from opwright import errors
from opwright.build.store import Store
from opwright.cpp_extension import load, load_inline

pytestmark = pytest.mark.compiler


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPWRIGHT_CACHE_DIR", str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Returns a directory with the user's files."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "k.cpp").write_text(source(1))
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


def left_in(store: Path) -> list[str]:
    """Returns what a failed build left behind. An object that was finished before another source failed is kept."""
    found = [str(path) for name in ("work", "extensions") for path in store.glob(f"opwright-store/{name}/*")]
    return found + broken_in(store)


def broken_in(store: Path) -> list[str]:
    """Returns the entries of the store that are not whole."""
    found = []
    for folder in ("extensions", "objects"):
        root = store / "opwright-store"
        whole = {entry.path for entry in Store(root, folder).entries()}
        found += [str(path.relative_to(root)) for path in root.glob(f"{folder}/*/*") if path not in whole]
    return found


@contextlib.contextmanager
def refused(store: Path, project: Path, error: type[errors.OpwrightError], pattern: str) -> Iterator[None]:
    """Expects a clear error, that nothing of the build is left, and that the user's files are as they were."""
    before = files_of(project)
    with pytest.raises(error, match=pattern) as caught:
        yield
    assert caught.value.hint  # what to type
    assert left_in(store) == []
    assert files_of(project) == before


# --- arguments ----------------------------------------------------------------------------------------


def test_a_missing_source(store: Path, project: Path) -> None:
    sources = [str(project / "k.cpp"), str(project / "nowhere.cpp")]
    with refused(store, project, errors.ExtensionError, r"(?s)no such source.*nowhere\.cpp"):
        load("missing", sources)
    assert sources == [str(project / "k.cpp"), str(project / "nowhere.cpp")]


def test_a_directory_as_source(store: Path, project: Path) -> None:
    with refused(store, project, errors.ExtensionError, re.escape(str(project))):
        load("folder", [str(project)])


def test_no_sources(store: Path, project: Path) -> None:
    with refused(store, project, errors.ExtensionError, "there is no source"):
        load("empty", [])


def test_a_source_that_is_named_twice(store: Path, project: Path) -> None:
    """The linker said that its functions were defined twice, and the hint was to make them inline."""
    twice = f"{project}/../project/k.cpp"
    with refused(store, project, errors.ExtensionError, re.escape(f"`{twice}` is named twice in `sources`")):
        load("twice", [project / "k.cpp", twice])


def test_an_unknown_function(store: Path, project: Path) -> None:
    functions = {"twise": "doubles"}
    text = "#include <pybind11/pybind11.h>\nint twice(int x) { return 2 * x; }\n"
    with refused(store, project, errors.CompileError, "`functions` names `twise`"):
        load_inline("unknown", text, functions=functions, no_implicit_headers=True, with_pytorch_error_handling=False)
    assert functions == {"twise": "doubles"}


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a-b",
        "a.b",
        "1a",
        "a b",
        "a\n",
        "a;b",
        "../a",
        None,
        5,
        "naïve",
    ],
)
def test_a_name_that_is_no_identifier(store: Path, project: Path, name: object) -> None:
    with refused(store, project, errors.ExtensionError, "must be an identifier"):
        inline(name, 1)


def test_the_hint_for_a_name_is_a_name(store: Path, project: Path) -> None:
    """For None it was `None`."""
    for name, hint in ((None, "`my_extension`"), ("1a", "`my_1a`"), ("a-b", "`a_b`")):
        with refused(store, project, errors.ExtensionError, f"hint: {hint}"):
            inline(name, 1)
    with refused(store, project, errors.ExtensionError, "hint: `my_extension`"):
        load(None, str(project / "k.cpp"), is_python_module=False)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "../a", "a\n", "-a", None])
def test_a_name_that_is_none_of_a_file(store: Path, project: Path, name: str | None) -> None:
    with refused(store, project, errors.ExtensionError, "must be one of a file"):
        load(name, str(project / "k.cpp"), is_python_module=False)


def test_a_string_that_is_not_utf8(store: Path, project: Path) -> None:
    with refused(store, project, errors.ExtensionError, "UTF-8"):
        load_inline("surrogate", "// \udce9\n" + source(1), no_implicit_headers=True)


@pytest.mark.parametrize("argument", ["extra_cflags", "extra_ldflags"])
def test_a_flag_with_an_open_quote(store: Path, project: Path, argument: str) -> None:
    flags = ["-DNAME=it's"]
    with refused(store, project, errors.ExtensionError, f"(?s){argument}.*it's"):
        inline("quote", 1, **{argument: flags})
    assert flags == ["-DNAME=it's"]


@pytest.mark.parametrize("flag", ["`echo -lz`", "$(echo -lz)", '"$$(echo -lz)"', "-DX=$(echo -lz)"])
def test_a_flag_that_a_shell_would_run(store: Path, project: Path, flag: str) -> None:
    """The linker was given "`echo" and "-lz`"."""
    hint = r'extra_ldflags=subprocess\.check_output\(\["echo", "-lz"\], text=True\)\.split\(\)'
    with refused(store, project, errors.ExtensionError, f"(?s)no shell runs.*{hint}"):
        inline("shell", 1, extra_ldflags=[flag])


def test_quoted_characters_of_a_shell_are_themselves() -> None:
    for quoted in ("'-DX=\"`\"'", '-DX=\\"\\`\\"', '"-DX=\\"\\`\\""', "'-DX=\"$(\"'"):
        text = "static_assert(X[0] == '`' || X[0] == '$');\n" + source("sizeof(X)")
        assert load_inline("quoted", text, extra_cflags=[quoted], no_implicit_headers=True).value() > 0


# --- paths --------------------------------------------------------------------------------------------

ODD_NAMES = [
    "with space",
    "it's",
    'say "hi"',
    "pour & cent %",
    "a$b#c",
]


@pytest.mark.parametrize("odd", ODD_NAMES)
def test_odd_paths_of_sources_and_headers(store: Path, tmp_path: Path, odd: str) -> None:
    folder, include, out = tmp_path / odd / "source", tmp_path / odd / "include", tmp_path / odd / "build"
    folder.mkdir(parents=True)
    include.mkdir()
    (folder / "k 1.cpp").write_text('#include "beside it.h"\n#include <from elsewhere.h>\n' + source("ONE + TWO"))
    (folder / "beside it.h").write_text("#define ONE 1\n")
    (include / "from elsewhere.h").write_text("#define TWO 2\n")
    sources, paths = [folder / "k 1.cpp"], [include]
    before = files_of(tmp_path / odd)
    module = load("odd", sources, extra_include_paths=paths, build_directory=out)
    assert module.value() == 3
    assert (sources, paths) == ([folder / "k 1.cpp"], [include])
    after = files_of(tmp_path / odd)
    assert {path: data for path, data in after.items() if not path.startswith(str(out))} == before
    assert [path.name for path in out.iterdir()] == ["odd.so"]
    (include / "from elsewhere.h").write_text("#define TWO 20\n")  # what was recorded is found again
    assert load("odd", sources, extra_include_paths=paths).value() == 21


@pytest.mark.parametrize("odd", ["with space", "it's", 'say "hi"'])
def test_odd_paths_of_libraries(store: Path, tmp_path: Path, odd: str) -> None:
    """As for PyTorch's own, a flag is quoted for the shell."""
    import shlex

    folder = tmp_path / odd
    folder.mkdir()
    (tmp_path / "mine.c").write_text("int mine(void) { return 7; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libmine.so", tmp_path / "mine.c"], check=True)
    flags = ["-L" + shlex.quote(str(folder)), "-lmine", "-Wl,-rpath," + shlex.quote(str(folder))]
    given = list(flags)
    text = 'extern "C" int mine();\n' + source("mine()")
    assert load_inline("linked", text, extra_ldflags=flags, no_implicit_headers=True).value() == 7
    assert flags == given


# --- the disk -----------------------------------------------------------------------------------------


def test_a_store_that_cannot_be_made(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A file where a directory has to go: refused for root too, unlike a read-only directory.
    (tmp_path / "file").touch()
    monkeypatch.setenv("OPWRIGHT_CACHE_DIR", str(tmp_path / "file" / "store"))
    with refused(tmp_path / "file" / "store", project, errors.StoreError, "(?s)cannot be written.*OPWRIGHT_CACHE_DIR"):
        load("nowhere_to_put", [str(project / "k.cpp")])


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes to read-only directories")
def test_a_read_only_store(store: Path, project: Path) -> None:
    store.mkdir(mode=0o500)
    with refused(store, project, errors.StoreError, "(?s)cannot be written.*OPWRIGHT_CACHE_DIR"):
        load("read_only", [str(project / "k.cpp")])


@pytest.mark.parametrize("below", ["", "build"])
def test_a_build_directory_that_cannot_be_made(store: Path, project: Path, below: str) -> None:
    (project / "file").write_text("mine")
    before = files_of(project)
    with pytest.raises(errors.OpwrightError, match=r"(?s)build_directory.*file"):
        load("exported", [str(project / "k.cpp")], build_directory=str(project / "file" / below))
    assert files_of(project) == before
    assert list(store.glob("opwright-store/work/*")) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes to read-only directories")
def test_a_read_only_build_directory(store: Path, project: Path) -> None:
    (project / "build").mkdir(mode=0o500)
    with pytest.raises(errors.OpwrightError, match="build_directory"):
        load("exported", [str(project / "k.cpp")], build_directory=str(project / "build"))


def test_a_directory_in_the_place_of_the_result(store: Path, project: Path) -> None:
    (project / "build" / "exported.so" / "mine").mkdir(parents=True)
    before = files_of(project)
    with pytest.raises(errors.OpwrightError, match="build_directory"):
        load("exported", [str(project / "k.cpp")], build_directory=str(project / "build"))
    assert files_of(project) == before


PROGRAM = """
import sys
from opwright.cpp_extension import load_inline
import torch, opwright.cpp_extension.extension
print("ready", flush=True)
print(load_inline({name!r}, [{text!r}], no_implicit_headers=True).value())
"""


def start(name: str, text: str, store: Path, before: str = "") -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", before + PROGRAM.format(name=name, text=text)],
        env={**os.environ, "OPWRIGHT_CACHE_DIR": str(store)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return process


def run(name: str, text: str, store: Path, before: str = "") -> tuple[str, str, int]:
    process = start(name, text, store, before)
    out, err = process.communicate(timeout=300)
    return out.removeprefix("ready").strip(), err, process.returncode


def test_a_full_disk(tmp_path: Path) -> None:
    # No file may grow past 2 kB: what a full disk does to every write of the build. Bytecode that Python cut off there
    # would break later imports.
    limit = (
        "import resource, signal, sys; sys.dont_write_bytecode = True; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))\n"
    )
    out, err, code = run("full", source(1), tmp_path / "store", limit)
    assert (out, code) == ("", 1)
    assert re.search(r"OPW20[24]", err), err[-2000:]
    assert left_in(tmp_path / "store") == []


def test_a_full_tmpfs(tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "none", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("this machine does not let the tests mount a small file system")
    try:
        out, err, code = run("full", "char filler[200000] = {1};\n" + source(1), tmp_path / "store")
        assert (out, code) == ("", 1)
        assert "OPW204" in err, err[-2000:]
        assert "full" in err
        assert left_in(tmp_path / "store") == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# --- the compiler -------------------------------------------------------------------------------------


def fake_compiler(tmp_path: Path, does: str) -> str:
    path = tmp_path / "fake-c++"
    path.write_text(f'#!/bin/sh\ncase "$*" in --version) echo "fake 1.0"; exit 0;; esac\n{does}\n')
    path.chmod(0o755)
    return str(path)


def test_no_compiler(store: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    with refused(store, project, errors.NoCompilerError, "(?s)no C\\+\\+ compiler.*apt-get install"):
        load("no_compiler", [str(project / "k.cpp")])


def test_a_named_compiler_that_is_absent(store: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPWRIGHT_CXX", "/nowhere/c++")
    with refused(store, project, errors.NoCompilerError, "(?s)OPWRIGHT_CXX.*/nowhere/c\\+\\+"):
        load("no_compiler", [str(project / "k.cpp")])


@pytest.mark.parametrize("command", ["/nowhere/c++ -m64", "ccache nowhere-c++"])
def test_an_absent_compiler_that_cxx_names(
    command: str, store: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`c++` was taken in its place with no message, and the flags were omitted."""
    monkeypatch.delenv("OPWRIGHT_CXX", raising=False)
    monkeypatch.setenv("CXX", command)
    with refused(store, project, errors.NoCompilerError, "(?s)CXX names does not exist.*nowhere.*unset CXX"):
        load("named_compiler", [str(project / "k.cpp")])
    monkeypatch.delenv("CXX")
    load("named_compiler", [str(project / "k.cpp")])
    monkeypatch.setenv("CXX", command)
    assert load("named_compiler", [str(project / "k.cpp")]).value() == 1  # the cache needs no compiler


@pytest.mark.parametrize("text", ["no program\n", "#!/nowhere/sh\n"], ids=["no program", "no interpreter"])
def test_a_compiler_that_cannot_run(
    store: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    path = tmp_path / "c++"
    path.write_text(text)
    path.chmod(0o755)
    monkeypatch.setenv("OPWRIGHT_CXX", str(path))
    with refused(store, project, errors.NoCompilerError, re.escape(str(path))):
        load("cannot_run", [str(project / "k.cpp")])


@pytest.mark.parametrize(
    ("number", "says"),
    [
        ("KILL", "(?s)memory.*OPWRIGHT_JOBS=1"),
        ("SEGV", "(?s)killed by signal 11.*OPWRIGHT_CXX"),
    ],
)
def test_a_compiler_that_dies(
    store: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str, says: str
) -> None:
    monkeypatch.setenv("OPWRIGHT_CXX", fake_compiler(tmp_path, f"kill -{number} $$"))
    flags = ["-DX"]
    with refused(store, project, errors.CompileError, says):
        load("dies", [str(project / "k.cpp")], extra_cflags=flags)
    assert flags == ["-DX"]
    monkeypatch.delenv("OPWRIGHT_CXX")
    assert load("dies", [str(project / "k.cpp")]).value() == 1  # and the next build is none the worse


def test_a_compiler_that_dies_in_the_middle_of_its_output(
    store: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    does = 'while [ $# -gt 1 ]; do shift; done\nprintf "half an object" > "$1"\nkill -SEGV $$'
    monkeypatch.setenv("OPWRIGHT_CXX", fake_compiler(tmp_path, does))
    with refused(store, project, errors.CompileError, "dies"):
        load("dies", [str(project / "k.cpp")])


def test_a_compiler_that_does_nothing(
    store: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPWRIGHT_CXX", fake_compiler(tmp_path, "exit 0"))
    with refused(store, project, errors.CompileError, "nothing"):
        load("nothing", [str(project / "k.cpp")])


def test_a_source_with_a_suffix_of_its_own(store: Path, project: Path) -> None:
    (project / "k.inc").write_text(source(2))
    assert load("suffix", [str(project / "k.inc")]).value() == 2


# --- the process --------------------------------------------------------------------------------------

# The compiler takes a second or two for it.
SLOW = "#include <map>\n#include <regex>\n#include <string>\ntemplate class std::map<std::string, std::regex>;\n"


@pytest.mark.parametrize("seed", range(4))
def test_a_build_that_is_killed_at_any_point(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    delay, whole_group = draw.uniform(0, 2.5), draw.random() < 0.7
    store = tmp_path / "store"
    process = start("killed", SLOW + source(4), store)
    assert process.stdout.readline() == "ready\n"
    time.sleep(delay)
    if whole_group:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the compilers with it, in the middle of their work
    else:
        process.kill()  # its compilers live on
    process.communicate()
    assert broken_in(store) == [], f"killed after {delay:.2f} s"
    out, err, _ = run("killed", SLOW + source(4), store)
    assert out == "4", err
    assert broken_in(store) == []


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    store = tmp_path / "store"
    listens = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # also below nohup
    process = start("interrupted", SLOW + source(5), store, before=listens)
    limit = time.monotonic() + 60
    while not list(store.glob("opwright-store/work/*/output*.txt")) and time.monotonic() < limit:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
    _, err = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in err
    assert left_in(store) == []
