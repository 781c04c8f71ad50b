"""What can go wrong around a build: each fault gives a clear error or a rebuild, never a wrong result."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.compiler

# An operator that adds a constant, so that whose kernel ran can be seen from the result.
PROGRAM = '''
import sys, time
import torch
from jaxtyping import Float
from torch import Tensor
from opwright import operator

SOURCE = """
#include <opwright/kernel.h>
using opwright::View;
{slow}
template <typename T> void plus(View<const T, 1> x, View<T, 1> output) {{
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = T(x(i) + {amount});
}}
OPWRIGHT_KERNEL(plus, float)
"""

@operator("faults::plus", cpu=SOURCE)
def plus(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    return x - 1000  # another result than the kernel's: a fall-back would show

print(float(plus(torch.zeros(3))[2]))
'''


def program(amount: int, slow: bool = False) -> str:
    # Templates that take the compiler a few seconds.
    text = (
        "#include <map>\n#include <string>\n#include <regex>\ntemplate class std::map<std::string, std::regex>;"
        if slow
        else ""
    )
    return PROGRAM.format(amount=amount, slow=text)


def start(code: str, store: Path, **env: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "OPWRIGHT_CACHE_DIR": str(store), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(code: str, store: Path, **env: str) -> tuple[str, str, int]:
    process = start(code, store, **env)
    out, err = process.communicate(timeout=300)
    return out.strip(), err, process.returncode


def libraries(store: Path) -> list[Path]:
    return sorted(store.glob("opwright-store/entries/*/*/library.so"))


def test_second_process_needs_no_compiler(tmp_path: Path) -> None:
    assert run(program(1), tmp_path)[0] == "1.0"
    out, err, _ = run(program(1), tmp_path, PATH="/nonexistent")
    assert out == "1.0", err
    assert len(libraries(tmp_path)) == 1


def test_without_compiler_the_reference_runs_with_one_warning(tmp_path: Path) -> None:
    out, err, _ = run(program(1) + "plus(torch.zeros(3))\n", tmp_path, PATH="/nonexistent")
    assert out == "-1000.0"
    assert err.count("RuntimeWarning") == 1
    assert "no C++ compiler was found" in err
    assert "apt-get install g++" in err


def test_a_warning_of_a_call_points_at_the_line_of_the_call(tmp_path: Path) -> None:
    (tmp_path / "called.py").write_text(program(1).replace("print(float(", "def call():\n    return (float("))
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport called\ncalled.call()"
    _, err, _ = run(code, tmp_path, PATH="/nonexistent")
    lines = (tmp_path / "called.py").read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "return (float(" in text)
    assert f"{tmp_path}/called.py:{line}: RuntimeWarning: plus: no C++ compiler was found" in err


def test_without_compiler_kernels_can_be_required(tmp_path: Path) -> None:
    _, err, code = run(program(1), tmp_path, PATH="/nonexistent", OPWRIGHT_REQUIRE_KERNELS="1")
    assert code != 0
    assert "NoCompilerError" in err
    assert "OPW201" in err


def test_a_killed_build_is_made_again_at_once(tmp_path: Path) -> None:
    process = start(program(2, slow=True), tmp_path)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("opwright-store/work/*/unit.c")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)  # the compilers with it, in the middle of their work
    process.communicate()
    assert libraries(tmp_path) == []
    assert run(program(2, slow=True), tmp_path)[0] == "2.0"


def test_killing_only_the_python_process_does_not_block_the_next(tmp_path: Path) -> None:
    process = start(program(3, slow=True), tmp_path)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("opwright-store/work/*/unit.c")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()  # its compilers live on and must not hold the lock
    process.communicate()
    assert run(program(3, slow=True), tmp_path)[0] == "3.0"


def test_32_processes_compile_once(tmp_path: Path) -> None:
    # A compiler that notes each of its runs on a kernel.
    log = tmp_path / "runs.txt"
    wrapper = tmp_path / "c++"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *-c*kernel0_cpu.o*) echo run >> {log};; esac\nexec /usr/bin/env c++ "$@"\n'
    )
    wrapper.chmod(0o755)
    store = tmp_path / "store"
    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(lambda _: run(program(4), store, OPWRIGHT_CXX=str(wrapper)), range(32)))
    assert [out for out, _, _ in results] == ["4.0"] * 32, [err for _, err, code in results if code][:1]
    assert log.read_text().count("run") == 1
    assert len(libraries(store)) == 1


def test_same_name_with_different_sources_in_two_processes(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: run(program(10 + i % 2), tmp_path)[0], range(8)))
    assert results == [f"{10 + i % 2}.0" for i in range(8)]


@pytest.mark.parametrize("offset", [0, 100, -1, "middle"])
def test_a_flipped_byte_is_rebuilt(tmp_path: Path, offset: int | str) -> None:
    assert run(program(5), tmp_path)[0] == "5.0"
    (library,) = libraries(tmp_path)
    data = bytearray(library.read_bytes())
    data[len(data) // 2 if offset == "middle" else offset] ^= 0xFF
    library.write_bytes(data)
    assert run(program(5), tmp_path)[0] == "5.0"
    assert library.read_bytes() != bytes(data)


@pytest.mark.parametrize("damage", ["truncate", "empty record", "no record", "no library"])
def test_a_damaged_entry_is_rebuilt(tmp_path: Path, damage: str) -> None:
    assert run(program(6), tmp_path)[0] == "6.0"
    (library,) = libraries(tmp_path)
    record = library.with_name("record.json")
    {
        "truncate": lambda: library.write_bytes(library.read_bytes()[:1000]),
        "empty record": lambda: record.write_text(""),
        "no record": record.unlink,
        "no library": library.unlink,
    }[damage]()
    assert run(program(6), tmp_path)[0] == "6.0"


def test_a_library_of_another_source_is_not_taken(tmp_path: Path) -> None:
    """A digest that fits is not enough: an entry copied under another request must not be loaded."""
    assert run(program(7), tmp_path)[0] == "7.0"
    (seven,) = libraries(tmp_path)
    assert run(program(8), tmp_path)[0] == "8.0"
    eight = next(path for path in libraries(tmp_path) if path != seven)
    eight.write_bytes(seven.read_bytes())
    eight.with_name("record.json").write_bytes(seven.with_name("record.json").read_bytes())
    assert run(program(8), tmp_path)[0] == "8.0"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_store_of_another_user_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert run(program(9), store)[0] == "9.0"
    os.chown(store / "opwright-store", 12345, 12345)
    _, err, code = run(program(9), store)
    assert code != 0
    assert "OPW205" in err
    assert "belongs to another user" in err
    assert "OPWRIGHT_CACHE_DIR" in err


def test_a_store_that_others_can_write_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert run(program(9), store)[0] == "9.0"
    (store / "opwright-store").chmod(0o777)
    _, err, code = run(program(9), store)
    assert code != 0
    assert "OPW205" in err
    assert "chmod" in err


def test_the_store_is_private(tmp_path: Path) -> None:
    store = tmp_path / "store"
    run(program(9), store)
    assert stat.S_IMODE((store / "opwright-store").stat().st_mode) == 0o700


def test_a_store_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    # A file where a directory has to go: refused for root too, unlike a read-only directory.
    (tmp_path / "file").write_text("")
    _, err, code = run(program(9), tmp_path / "file" / "store")
    assert code != 0
    assert "OPW204" in err
    assert "OPWRIGHT_CACHE_DIR" in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes to read-only directories")
def test_a_read_only_store_is_a_clear_error(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir(mode=0o500)
    _, err, code = run(program(9), store)
    assert code != 0
    assert "OPW204" in err


def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    # No file may grow past 2 kB: what a full disk does to every write of the build.
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))\n"
    out, err, code = run(limit + program(9), tmp_path / "store")
    assert code != 0
    assert out == ""
    assert re.search("OPW20[24]", err), err[-2000:]
    assert libraries(tmp_path / "store") == []


def test_a_full_tmpfs_is_a_clear_error(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "none", str(tmp_path)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("this machine does not let the tests mount a tmpfs")
    try:
        out, err, code = run(program(9), tmp_path / "store")
        assert code != 0
        assert out == ""
        assert "OPW204" in err, err[-2000:]
        assert "full" in err
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_changed_header_is_seen(tmp_path: Path) -> None:
    (tmp_path / "amount.h").write_text("#define AMOUNT 1\n")
    (tmp_path / "cpu.cpp").write_text(
        '#include <opwright/kernel.h>\n#include "amount.h"\nusing opwright::View;\n'
        "template <typename T> void plus(View<const T, 1> x, View<T, 1> output) {\n"
        "  for (int64_t i = 0; i < x.size(0); ++i) output(i) = T(x(i) + AMOUNT);\n}\n"
        "OPWRIGHT_KERNEL(plus, float)\n"
    )
    (tmp_path / "op.py").write_text(
        "import torch\nfrom jaxtyping import Float\nfrom torch import Tensor\nfrom opwright import operator\n"
        '@operator("faults::plus")\n'
        'def plus(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:\n    return x - 1000\n'
    )
    code = f"import sys, torch; sys.path.insert(0, {str(tmp_path)!r})\nfrom op import plus\nprint(float(plus(torch.zeros(3))[0]))"
    store = tmp_path / "store"
    assert run(code, store)[0] == "1.0"
    (tmp_path / "amount.h").write_text("#define AMOUNT 2\n")
    assert run(code, store)[0] == "2.0"
    (tmp_path / "amount.h").write_text("#define AMOUNT 1\n")
    assert run(code, store)[0] == "1.0"


def test_flags_are_part_of_the_key(tmp_path: Path) -> None:
    code = program(1).replace("+ 1", "+ AMOUNT")
    assert run(code, tmp_path, OPWRIGHT_CXXFLAGS="-DAMOUNT=3")[0] == "3.0"
    assert run(code, tmp_path, OPWRIGHT_CXXFLAGS="-DAMOUNT=4")[0] == "4.0"
    assert run(code, tmp_path, OPWRIGHT_CXXFLAGS="-DAMOUNT=3")[0] == "3.0"


@pytest.mark.parametrize(
    ("message", "subject", "hint"),
    [
        ("error writing to $TMPDIR/cc1.s: No space left on device", "temporary", "`export TMPDIR=/a/larger/disk`"),
        ("can't write 9 bytes to k.o: 'No space left on device'", "store/opwright-store", "`opwright cache prune`"),
    ],
)
def test_the_disk_that_is_full_is_named(tmp_path: Path, message: str, subject: str, hint: str) -> None:
    """In the words of g++ and of the assembler; with two disks only one of them is full."""
    (tmp_path / "temporary").mkdir()
    compiler = tmp_path / "c++"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *-c*) echo "k.cpp:1:1: fatal error: {message}"; exit 1;; esac\nexec c++ "$@"\n'
    )
    compiler.chmod(0o755)
    environment = {"OPWRIGHT_CXX": str(compiler), "TMPDIR": str(tmp_path / "temporary")}
    _, err, code = run(program(1), tmp_path / "store", **environment)
    assert code == 1
    assert f"StoreError: `{tmp_path}/{subject}`: " in err
    assert f"hint: {hint}" in err


def test_an_interrupted_command_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "op.py").write_text(program(7, slow=True).replace("print(", "(lambda *_: None)("))
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # also below nohup
    code += f"import sys; sys.argv[1:] = ['build', {str(tmp_path / 'op.py')!r}]\nfrom opwright.cli import main; main()"
    process = start(code, tmp_path / "store")
    limit = time.monotonic() + 120
    while not list(tmp_path.glob("store/opwright-store/work/*/output*.txt")) and time.monotonic() < limit:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
    assert process.communicate(timeout=60) == ("", "Interrupted\n")
    assert process.returncode == 128 + signal.SIGINT
