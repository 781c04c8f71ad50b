"""opwright doctor"""

from __future__ import annotations

import os
import platform
import shutil

from cyclopts import App

from opwright.cli.console import print_json, print_rows

doctor_app = App(name="doctor")

_OLDEST_TORCH = (2, 11)


@doctor_app.default
def doctor(*, json: bool = False) -> int:
    """Say what is there, what is missing, and how to get it. Exit code 2 when something is missing.

    Args:
        json: Print JSON.
    """
    findings = [_python(), _torch(), _compiler(), _cpu(), _nvcc(), _gpu(), _store()]
    if json:
        print_json([{"subject": a, "state": b, "detail": c, "hint": d} for a, b, c, d in findings])
    else:
        print_rows([(subject, state, detail) for subject, state, detail, _ in findings])
        for subject, state, _, hint in findings:
            if state != "ok" and hint:
                print(f"hint: {subject}: {hint}")
    return 2 if any(state == "missing" for _, state, _, _ in findings) else 0


def _python() -> tuple[str, str, str, str]:
    return ("Python", "ok", f"{platform.python_version()} {platform.machine()}", "")


def _torch() -> tuple[str, str, str, str]:
    try:
        import torch
    except ImportError:
        return ("torch", "missing", "not installed", "`pip install 'torch>=2.11'`")
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    state = "ok" if version >= _OLDEST_TORCH else "missing"
    return ("torch", state, str(torch.__version__), "`pip install 'torch>=2.11'`")


def _compiler() -> tuple[str, str, str, str]:
    from opwright.build.store import Store
    from opwright.build.toolchain import find_compiler

    compiler = find_compiler(Store().identities)
    if compiler is None:
        return ("C++ compiler", "missing", "operators run their reference", "`apt-get install g++`")
    return ("C++ compiler", "ok", f"{compiler.path}  {compiler.identity}", "")


def _cpu() -> tuple[str, str, str, str]:
    import torch

    return ("CPU", "ok", f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads", "")


def _nvcc() -> tuple[str, str, str, str]:
    from opwright.build import cuda
    from opwright.build.store import Store
    from opwright.errors import NoNvccError

    try:
        nvcc = cuda.find_nvcc(Store().identities)
    except NoNvccError as error:
        return ("nvcc", "missing", f"{error.subject}: {error.rule}", error.hint)
    if nvcc is None:
        hint = "`pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-crt nvidia-nvvm`"
        return ("nvcc", "none", "operators run their reference on CUDA", hint)
    compiled_for = " ".join(f"sm_{name}" for name in cuda.architectures())
    return ("nvcc", "ok", f"{nvcc.path}  {nvcc.identity}, compiles for {compiled_for}", "")


def _gpu() -> tuple[str, str, str, str]:
    import torch

    from opwright.build import cuda

    present = cuda.gpu_architectures()
    if not present:
        return ("GPU", "none", f"driver: {cuda.driver_version()}", "")
    driver = f"driver for CUDA {cuda.driver_version()}"
    if not torch.cuda.is_available():
        hint = "install a torch with CUDA"
        return ("GPU", "none", f"sm_{present[-1]}, {driver}, but this torch has no CUDA", hint)
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return ("GPU", "ok", f"{names}, sm_{' sm_'.join(present)}, {driver}", "")


def _store() -> tuple[str, str, str, str]:
    from opwright.build.store import Store

    store = Store()
    place = store.root
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if store.root.exists() and store.root.stat().st_uid != os.geteuid():
        return (
            "store",
            "missing",
            f"{store.root} belongs to another user",
            "`export OPWRIGHT_CACHE_DIR=~/.cache/opwright`",
        )
    if not os.access(place, os.W_OK):
        return (
            "store",
            "missing",
            f"{store.root} cannot be written",
            "`export OPWRIGHT_CACHE_DIR=/tmp/opwright`",
        )
    state = "ok" if free > 100 << 20 else "missing"
    detail = f"{store.root}  {sum(1 for _ in store.entries())} builds, {free >> 20} MiB free"
    return ("store", state, detail, "`opwright cache prune`")
