"""The worker as a process: its pipes, its end, its modules; and in the host's process."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from .conftest import CODE, FOLDER, KERNELS, Worker

pytestmark = pytest.mark.triton

KERNEL = "import triton\nimport triton.language as tl\n{head}\n@triton.jit\ndef k(x):\n    tl.store(x, {value})\n"


def _write(file: Path, value: str, head: str = "") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(KERNEL.format(head=head, value=value))
    return file


def test_what_a_kernel_file_prints_disturbs_nothing(newest: Any, tmp_path: Path) -> None:
    noise = (
        "import os, subprocess, sys\nprint('{\"id\": 0, \"ok\": {}}', flush=True)\nos.write(1, b'raw')\n"
        "subprocess.run(['echo', 'child'])\nassert sys.stdin.read() == ''\nassert os.read(0, 1) == b''\n"
    )
    file = _write(tmp_path / "noisy.py", "1", noise)
    assert newest.describe(file, "k")["function"] == "k"
    assert newest.compile(file, "k", ["*i32"])["symbol"] == "k"


def test_a_changed_kernel_is_compiled_afresh(worker: Any, tmp_path: Path) -> None:
    file = _write(tmp_path / "k.py", "1")
    first = worker.compile(file, "k", ["*i32"])
    again = worker.compile(file, "k", ["*i32"])
    _write(file, "2")
    other = worker.compile(file, "k", ["*i32"])
    assert first == again
    assert first["sha256"] != other["sha256"]
    assert first["source_key"] != other["source_key"]
    assert dict(map(tuple, other["sources"]))[str(file)] == hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_changed_module_below_is_seen(newest: Any, tmp_path: Path) -> None:
    below = tmp_path / "deep.py"
    (tmp_path / "between.py").write_text("from deep import VALUE\n")
    below.write_text("import triton.language as tl\nVALUE = tl.constexpr(1)\n")
    file = _write(tmp_path / "k.py", "VALUE", "from between import VALUE")
    first = newest.compile(file, "k", ["*i32"])
    time_of_change = below.stat().st_mtime_ns
    below.write_text("import triton.language as tl\nVALUE = tl.constexpr(2)\n")
    os.utime(below, ns=(time_of_change, time_of_change))
    second = newest.compile(file, "k", ["*i32"])
    assert first["sha256"] != second["sha256"]
    names = [Path(path).name for path, _ in second["sources"]]
    assert sorted(names) == ["__init__.py", "between.py", "deep.py", "k.py"]
    assert not list(tmp_path.rglob("*.pyc"))


def test_a_file_that_fails_once_is_read_again(newest: Any, tmp_path: Path) -> None:
    file = _write(tmp_path / "k.py", "1", "import nothing_like_it")
    assert newest.ask(do="describe", file=str(file), function="k")["error"]["kind"] == "import"
    assert newest.describe(_write(file, "1"), "k")["function"] == "k"


def test_modules_of_one_name_in_two_folders(newest: Any, tmp_path: Path) -> None:
    seen = []
    for name, value in (("a", 1), ("b", 2), ("a", 1)):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "worker.py").write_text(f"import triton.language as tl\nVALUE = tl.constexpr({value})\n")
        file = _write(folder / "k.py", "VALUE", "from worker import VALUE")
        seen.append(newest.compile(file, "k", ["*i32"])["sha256"])
    assert seen[0] == seen[2] != seen[1]


# A package that can be imported once, as PyTorch and NumPy, and where it lies: its file from the test's folder, the
# folder that PYTHONPATH names, and an installer's record, if any.
ONCE = "import builtins\nassert not hasattr(builtins, 'once'), 'imported twice'\nbuiltins.once = True\n"
INSTALLED_ELSEWHERE = {
    "another environment": ("other/lib/python3/site-packages/once", "other/lib/python3/site-packages", None),
    "pip install --target": ("target/once", "target", "target/once-1.dist-info"),
    "links to a cache": ("cache/once", "linked", "cache/once-1.dist-info"),
    "links to another environment": ("other/dist-packages/once", "linked", None),
    "checkout of PyTorch": ("pytorch/torch", "pytorch", None),
}


@pytest.mark.parametrize("layout", INSTALLED_ELSEWHERE)
def test_a_package_installed_elsewhere_is_imported_once(layout: str, triton_pythons: Any, tmp_path: Path) -> None:
    """A worker describes a second file that imports PyTorch from outside the interpreter's prefix."""
    package, folder, record = (part and tmp_path / part for part in INSTALLED_ELSEWHERE[layout])
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(ONCE)
    if record:
        record.mkdir()
        (record / "RECORD").write_text(f"{package.name}/__init__.py,,\nonce-1.dist-info/RECORD,,\n")
    if not folder.exists():
        folder.mkdir()
        (folder / package.name).symlink_to(package)
    started = Worker(max(triton_pythons), tmp_path, PYTHONPATH=str(folder))
    for name in ("a", "b"):
        file = _write(tmp_path / "kernels" / f"{name}.py", "1", f"import {package.name}")
        sources = [path for path, _ in started.describe(file, "k")["sources"]]
        assert [path for path in sources if str(tmp_path) in path] == [str(file)]
    started.close()


def test_installed_functions_that_a_kernel_calls_are_sources(triton_pythons: Any, tmp_path: Path) -> None:
    """The cache gave the kernel that was compiled before the package was updated."""
    package = tmp_path / "site-packages" / "shapes"
    package.mkdir(parents=True)
    jit = "import triton\nimport triton.language as tl\n{}\n@triton.jit\ndef {}(x):\n    return {}\n"
    # `inner` of the package is not the one that `outer` calls.
    (package / "__init__.py").write_text("from .outer import outer\nfrom .unused import inner\n")
    (package / "outer.py").write_text(jit.format("from . import inner", "outer", "inner.inner(x)"))
    (package / "inner.py").write_text(jit.format("", "inner", "x + 1"))
    (package / "unused.py").write_text(jit.format("", "inner", "x"))
    file = _write(tmp_path / "k.py", "shapes.outer(tl.load(x))", "import shapes, shapes.unused")
    started = Worker(max(triton_pythons), tmp_path, PYTHONPATH=str(package.parent))

    def sources() -> dict[str, str]:
        records = started.compile(file, "k", ["*i32"]), started.describe(file, "k")
        assert records[0]["sources"] == records[1]["sources"]
        return {os.path.relpath(path, tmp_path): d for path, d in records[0]["sources"] if str(tmp_path) in path}

    inner = package / "inner.py"
    assert sources().keys() == {"k.py", "site-packages/shapes/inner.py", "site-packages/shapes/outer.py"}
    assert sources()["site-packages/shapes/inner.py"] == hashlib.sha256(inner.read_bytes()).hexdigest()
    inner.write_text(jit.format("", "inner", "x + 2"))  # the worker has imported the first text
    assert sources()["site-packages/shapes/inner.py"] != hashlib.sha256(inner.read_bytes()).hexdigest()
    started.close()


@pytest.mark.parametrize("layout", ["link in site-packages", "beside installed packages"])
def test_a_project_among_installed_packages_is_the_authors(layout: str, triton_pythons: Any, tmp_path: Path) -> None:
    """Its edited module is seen, although `site-packages` links to it or `pip install --target` was given its folder."""
    project, folder = tmp_path / "project", tmp_path / "project"
    (project / "once-1.dist-info").mkdir(parents=True)
    (project / "once-1.dist-info/RECORD").write_text("once/__init__.py,,\n")
    (project / "mine").mkdir()
    if layout == "link in site-packages":
        folder = tmp_path / "site-packages"
        folder.mkdir()
        (folder / "mine").symlink_to(project / "mine")
    started = Worker(max(triton_pythons), tmp_path, PYTHONPATH=str(folder))
    file = _write(tmp_path / "k.py", "VALUE", "from mine import VALUE")
    seen = []
    for value in (1, 2):
        text = f"import triton.language as tl\nVALUE = tl.constexpr({value})\n"
        (project / "mine/__init__.py").write_text(text)
        seen.append(started.compile(file, "k", ["*i32"])["sha256"])
    started.close()
    assert seen[0] != seen[1]


def test_relative_imports_in_a_package(newest: Any, tmp_path: Path) -> None:
    package = tmp_path / "ops" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "ops/__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (tmp_path / "ops/shared.py").write_text("import triton.language as tl\nVALUE = tl.constexpr(5)\n")
    file = _write(package / "triton.py", "VALUE", "from ..shared import VALUE")
    record = newest.compile(file, "k", ["*i32"])
    assert {str(tmp_path / "ops/shared.py"), str(file)} <= {path for path, _ in record["sources"]}


def test_a_package_is_not_run_without_need(newest: Any, tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops/__init__.py").write_text("import no_such_torch\n")
    (tmp_path / "ops/sizes.py").write_text("")
    file = _write(tmp_path / "ops/k.py", "1")
    assert newest.compile(file, "k", ["*i32"])["symbol"] == "k"
    _write(file, "1", "from .sizes import *")
    error = newest.refuses(file, "k", ["*i32"])
    assert (error["kind"], error["file"]) == ("import", str(tmp_path / "ops/__init__.py"))


def test_a_kernel_file_named_triton(worker: Any, tmp_path: Path) -> None:
    file = _write(tmp_path / "triton.py", "3")
    assert worker.compile(file, "k", ["*i32"])["symbol"] == "k"
    assert worker.compile("add.py", "add_kernel", ["*fp32"] * 3 + ["i32", "=64"])


def test_names_in_the_current_folder_are_not_imported(triton_pythons: Any, tmp_path: Path) -> None:
    for name in ("triton", "json", "worker"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    request = json.dumps({"id": 1, "do": "describe", "file": str(KERNELS / "add.py"), "function": "add_kernel"})
    done = subprocess.run(
        [str(triton_pythons[max(triton_pythons)]), "-c", CODE, str(FOLDER)],
        input=f"{request}\n",
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout)["ok"]["function"] == "add_kernel", done.stderr


def test_the_target_is_the_one_asked_for(worker: Any) -> None:
    for arch in (80, 90):
        for is_hopper in (False, True):
            reply = worker.try_compile("classes.py", "asks_target", [f"={is_hopper}"], arch=arch)
            assert ("ok" in reply) == (is_hopper == (arch == 90)), reply


def test_scratch_of_a_device_descriptor(worker: Any) -> None:
    record = worker.compile("classes.py", "makes_descriptor", ["*fp16:16", "i32", "=64"])
    size, alignment = record["global_scratch"]
    assert size >= 128
    assert alignment == 128


def test_keyword_parameters(worker: Any) -> None:
    reply = worker.try_compile("classes.py", "keywords", ["*i32", "i32", "=64"])
    if worker.version >= (3, 9):
        assert [p["arg"] for p in reply["ok"]["params"][:2]] == [[0], [1]]
    else:
        says = "`keywords`: `n` may only be passed by name, which needs Triton 3.9 or later."
        assert (reply["error"]["kind"], reply["error"]["message"]) == ("function", says)


def test_options_reach_the_compiler(worker: Any) -> None:
    args = ["*fp32:16"] * 3 + ["i32:16", "=1024"]
    plain = worker.compile("add.py", "add_kernel", args)
    for options, name, value in (
        ({"num_warps": 8}, "max_threads", 256),
        ({"num_ctas": 2}, "num_ctas", 2),
        ({"launch_pdl": True}, "pdl", True),
        ({"launch_cooperative_grid": True}, "cooperative", True),
    ):
        record = worker.compile("add.py", "add_kernel", args, **options)
        assert (plain[name], record[name]) == ({"max_threads": 128, "num_ctas": 1}.get(name, False), value)
    assert plain["key"] == ", ".join(args)


def test_the_least_driver(worker: Any) -> None:
    args = ["*fp32:16"] * 3 + ["i32:16", "=1024"]
    for arch in (80, 100):
        record = worker.compile("add.py", "add_kernel", args, arch=arch)
        major = int(record["ptxas"].split(".")[0])
        assert record["cuda"] == {(12, 80): 12000, (12, 100): 12080, (13, 80): 13000, (13, 100): 13000}[major, arch]


def test_an_interrupt_is_for_the_host(triton_pythons: Any, tmp_path: Path) -> None:
    worker = Worker(max(triton_pythons), tmp_path)
    worker.describe("add.py", "add_kernel")
    worker.process.send_signal(signal.SIGINT)
    assert worker.describe("add.py", "add_kernel")["function"] == "add_kernel"
    worker.close()
    assert worker.process.returncode == 0


HOST = """
import os, subprocess, sys, threading
def start():
    global worker
    worker = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
thread = threading.Thread(target=start)
thread.start()
thread.join()
worker.stdin.write(b'{"do": "x"}\\n')
worker.stdin.flush()
worker.stdout.readline()
print(worker.pid, flush=True)
%s
sys.stdin.read()
"""


@pytest.mark.parametrize("fork_holds_the_pipe", [False, True])
def test_a_killed_host_takes_its_worker_along(triton_pythons: Any, fork_holds_the_pipe: bool) -> None:
    """And the end of the thread that started it does not."""
    python = str(triton_pythons[max(triton_pythons)])
    fork = "child = os.fork()\nif not child: import time; time.sleep(6); os._exit(0)" if fork_holds_the_pipe else ""
    host = subprocess.Popen(
        [sys.executable, "-c", HOST % fork, python, "-c", CODE, str(FOLDER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert host.stdout
    worker = int(host.stdout.readline())
    time.sleep(0.3)
    assert _is_running(worker)
    host.kill()
    host.wait()
    ends = time.monotonic() + 5
    while _is_running(worker) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not _is_running(worker)
    for pipe in (host.stdin, host.stdout):
        assert pipe
        pipe.close()


def _is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


IN_PROCESS = """
import json, os, sys, threading
sys.path.insert(0, sys.argv[1])
sys.path.insert(0, sys.argv[3])
import worker, triton
import host_module
from triton import knobs
from triton.language import semantic, target_info
before = (dict(os.environ), list(sys.path), list(sys.meta_path), semantic.driver, target_info.driver, vars(knobs.compilation).copy())
modules = set(sys.modules)
kernels, scratch = sys.argv[2], sys.argv[3]
def ask(number, replies):
    args = ["*fp32"] * 3 + ["i32", f"={64 << number}"]
    replies.append(worker.handle({"id": number, "do": "compile", "file": kernels + "/add.py", "function": "add_kernel", "arch": 90,
        "args": args, "options": {}, "out": f"{scratch}/{number}.opk"}))
replies = []
threads = [threading.Thread(target=ask, args=(number, replies)) for number in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
uses = worker.handle({"id": 9, "do": "describe", "file": scratch + "/uses.py", "function": "k"})
open(scratch + "/host_module.py", "a").write("# changed\\n")
stale = worker.handle({"id": 10, "do": "describe", "file": scratch + "/uses.py", "function": "k"})
after = (dict(os.environ), list(sys.path), list(sys.meta_path), semantic.driver, target_info.driver, vars(knobs.compilation).copy())
print(json.dumps({"replies": replies, "same": before == after, "uses": uses, "stale": stale, "loads": host_module.LOADS,
    "authors": [n for n in set(sys.modules) - modules if n in ("add", "uses", "kernels_add", "kernels_uses", "host_module")]}))
"""


def test_in_the_process_of_a_host(triton_pythons: Any, tmp_path: Path) -> None:
    (tmp_path / "host_module.py").write_text("LOADS = []\nLOADS.append(1)\n")
    _write(tmp_path / "uses.py", "1", "import host_module")
    done = subprocess.run(
        [
            str(triton_pythons[max(triton_pythons)]),
            "-c",
            IN_PROCESS,
            str(FOLDER),
            str(KERNELS),
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "triton")},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sorted(r["id"] for r in found["replies"]) == [0, 1, 2, 3]
    for reply in found["replies"]:
        assert reply["ok"]["key"].endswith(f"={64 << reply['id']}")
    assert found["same"]
    assert found["authors"] == []
    assert found["loads"] == [1]
    assert str(tmp_path / "host_module.py") in [path for path, _ in found["uses"]["ok"]["sources"]]
    assert found["stale"]["error"]["kind"] == "stale"
