"""The environment of a process whose glue and kernels are compiled with sanitizers."""

from __future__ import annotations

import os
import subprocess

from opwright import settings

# `--version` is what Opwright knows a compiler by.
COMPILER = """#!/bin/sh
[ "$1" = --version ] && printf 'with sanitizers: '
exec "${{SANITIZED_CXX:-g++}}" "$@" $([ "$1" = --version ] || echo {flags})
"""
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=512:handle_abort=1:exitcode=99",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # Without the first, the child of a process with threads ends at its start.
    "TSAN_OPTIONS": "die_after_fork=0:second_deadlock_stack=1:exitcode=99",
}
LIBRARIES = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}


def environment(sanitizers: str) -> dict[str, str]:
    """Returns the environment of a process that compiles and runs kernels with sanitizers.

    Args:
        sanitizers: what follows `-fsanitize=`: "address,undefined" or "thread".
    """
    home = settings.cache_dir() / f"sanitized_{sanitizers.replace(',', '_')}"
    home.mkdir(parents=True, exist_ok=True)
    flags = f"-O1 -g1 -fno-omit-frame-pointer -fsanitize={sanitizers} -fno-sanitize-recover=undefined"
    text, compiler = COMPILER.format(flags=flags), home / "c++"
    if not compiler.exists() or compiler.read_text() != text:
        compiler.write_text(text)
        compiler.chmod(0o755)
    # libstdc++ too: the sanitizers look for the functions that throw when they start.
    names = [*(LIBRARIES[name] for name in sanitizers.split(",")), "libstdc++.so"]
    found = [subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in names]
    return {
        **os.environ,
        **OPTIONS,
        "LD_PRELOAD": " ".join(found),
        "OPWRIGHT_CACHE_DIR": str(home),
        "OPWRIGHT_CXX": str(compiler),
        "OPWRIGHT_CXXFLAGS": "",
        "OPWRIGHT_REQUIRE_KERNELS": "1",
        "OPWRIGHT_WITHOUT": "compile_commands",
        "OMP_WAIT_POLICY": "passive",
    }
