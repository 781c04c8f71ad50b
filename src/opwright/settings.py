"""The settings of Opwright: environment variables, most of them the twins of a flag.

OPWRIGHT_CACHE_DIR        --cache-dir        where builds are kept, in a directory `opwright-store`
OPWRIGHT_CXX              --cxx              the C++ compiler
OPWRIGHT_CXXFLAGS         --cxxflags         flags added after Opwright's own
OPWRIGHT_JOBS             --jobs             compilers running at the same time
OPWRIGHT_ARCH             --arch             GPU architectures to compile for: 90, sm_90a, "80,90"
OPWRIGHT_REQUIRE_KERNELS  --require-kernels  1: a kernel that cannot be built is an error
OPWRIGHT_WITHOUT          build --no-compile-commands  what to leave out: "compile_commands" (compile_commands.json for
                                             editors), "pch" (precompiled headers of extensions), or both
OPWRIGHT_REMOTE_STORE     none               a store of builds for many machines: a path, or an fsspec URL such as s3://
OPWRIGHT_REMOTE_PUSH      build --push       1: builds made here are written there; under torchrun they are by default
OPWRIGHT_REMOTE_KEY       none               a public Ed25519 key, a PEM file: only builds signed by it are fetched
OPWRIGHT_REMOTE_SIGNING_KEY  none            the private key that signs what is written
OPWRIGHT_TRITON           pack build --python  where Triton kernels come from: "python=/venv/bin/python,pack=app.opk,..."
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

from opwright.errors import NoCompilerError, SettingError

_flags: dict[str, str] = {}  # that gave settings, by variable


def give(flag: str, value: str) -> None:
    """Sets what a flag is the twin of; an error about it then names the flag."""
    name = f"OPWRIGHT_{flag.removeprefix('--').replace('-', '_').upper()}"
    os.environ[name], _flags[name] = value, flag


def named(name: str) -> str:
    """Returns what the user typed for a setting: its flag, or its variable."""
    return _flags.get(name, name)


def check() -> None:
    """Refuses wrong values of settings, even if nothing is to be built."""
    architectures()
    cxxflags()
    jobs()
    without()
    if "OPWRIGHT_CXX" in _flags:  # the variable may stand in the way of verbs that need no compiler
        cxx()


def cache_dir() -> Path:
    """Returns the directory that caches lie in, which may hold other things too; nothing is created."""
    named = os.environ.get("OPWRIGHT_CACHE_DIR")
    if named:
        return Path(named).expanduser().absolute()
    caches = os.environ.get("XDG_CACHE_HOME", "").strip()
    return Path(caches if os.path.isabs(caches) else os.path.expanduser("~/.cache")) / "opwright"


def store_dir() -> Path:
    """Returns the directory of the store, which holds nothing else; nothing is created."""
    return cache_dir() / "opwright-store"


def cxx() -> str | None:
    """Returns the compiler that the user named, if any.

    Raises:
        NoCompilerError: it is not there.
    """
    text = os.environ.get("OPWRIGHT_CXX") or None
    if text and not shutil.which(text):
        subject = named("OPWRIGHT_CXX")
        hint = "unset OPWRIGHT_CXX" if subject == "OPWRIGHT_CXX" else f"`{subject}=g++`"
        raise NoCompilerError(subject, "this compiler does not exist", rows=[("got", text)], hint=hint)
    return text


def cxxflags() -> tuple[str, ...]:
    """Returns the user's additional compiler flags.

    Raises:
        SettingError: they are not words as a shell reads them.
    """
    text = os.environ.get("OPWRIGHT_CXXFLAGS", "")
    try:
        return tuple(shlex.split(text))
    except ValueError as error:  # a quotation that is not closed
        raise SettingError(
            named("OPWRIGHT_CXXFLAGS"),
            f"cannot be read: {error}",
            rows=[("got", repr(text))],
            hint="words are separated and quoted as in a shell",
        ) from None


def jobs() -> int:
    """Returns how many compilers may run at the same time.

    MAX_JOBS limits those of `torch.utils.cpp_extension`, which ignores what is not a positive number.
    """
    text = os.environ.get("OPWRIGHT_JOBS")
    if not text:
        of_torch = os.environ.get("MAX_JOBS", "")
        if of_torch.isdigit() and int(of_torch) > 0:
            return int(of_torch)
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not text.isdigit() or int(text) < 1:
        subject = named("OPWRIGHT_JOBS")
        raise SettingError(subject, "must be a positive number", rows=[("got", repr(text))], hint=f"`{subject}=2`")
    return int(text)


def architectures() -> tuple[str, ...]:
    """Returns the GPU architectures that the user named, as "90" or "90a"; empty: none was named."""
    text = os.environ.get("OPWRIGHT_ARCH", "")
    names = []
    for word in re.split(r"[,;\s]+", text.strip()):
        found = re.fullmatch(r"(?:sm_|compute_)?(\d+)(?:\.(\d))?([af]?)(?:\+PTX)?", word, re.IGNORECASE)
        if word and not found:
            subject = named("OPWRIGHT_ARCH")
            raise SettingError(
                subject,
                "must be a list of GPU architectures",
                rows=[("got", repr(word))],
                hint=f"`{subject}=90` or `{subject}=80,90a`; `nvcc --list-gpu-arch` lists what there is",
            )
        if found:
            names.append(f"{found[1]}{found[2] or ''}{found[3].lower()}")
    return tuple(names)


# What PyTorch's names of families in TORCH_CUDA_ARCH_LIST stand for.
_FAMILIES = {
    "Kepler": ("35",),
    "Kepler+Tesla": ("37",),
    "Maxwell": ("50", "52"),
    "Maxwell+Tegra": ("53",),
    "Pascal": ("60", "61"),
    "Volta": ("70",),
    "Volta+Tegra": ("72",),
    "Turing": ("75",),
    "Ampere": ("80", "86"),
    "Ampere+Tegra": ("87",),
    "Ada": ("89",),
    "Hopper": ("90",),
    "Blackwell": ("100", "103", "120", "121"),
    "Blackwell+Tegra": ("110",),
}


def torch_architectures() -> tuple[str, ...]:
    """Returns the architectures in TORCH_CUDA_ARCH_LIST ("8.0;9.0+PTX", "Ampere Hopper") as "80"; empty: none named."""
    text = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    names: list[str] = []
    for word in filter(None, re.split(r"[,;\s]+", text)) if text != "native" else ():
        found = re.fullmatch(r"(\d+)\.(\d)([af]?)(?:\+PTX)?", word, re.IGNORECASE)
        family = _FAMILIES.get(word)
        if family:
            names += family
        elif found:
            names.append(f"{found[1]}{found[2]}{found[3].lower()}")
        else:
            raise SettingError(
                "TORCH_CUDA_ARCH_LIST",
                "must be a list of GPU architectures",
                rows=[("got", repr(word)), ("expected", f"numbers such as 9.0 and 8.6+PTX, or {', '.join(_FAMILIES)}")],
                hint='`export TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX"`',
            )
    return tuple(names)


def remote_store() -> str | None:
    """Returns the URL of the remote store, if there is one."""
    return os.environ.get("OPWRIGHT_REMOTE_STORE") or None


def pushes() -> bool:
    """Returns whether builds are written to the remote store."""
    return _is_on("OPWRIGHT_REMOTE_PUSH", "1" if "TORCHELASTIC_RUN_ID" in os.environ else "0")


def remote_key() -> Path | None:
    """Returns the file of the public key that signs what is fetched, if there is one."""
    return _path_in("OPWRIGHT_REMOTE_KEY")


def remote_signing_key() -> Path | None:
    """Returns the file of the private key that signs what is written, if there is one."""
    return _path_in("OPWRIGHT_REMOTE_SIGNING_KEY")


def _path_in(name: str) -> Path | None:
    text = os.environ.get(name)
    return Path(text).expanduser() if text else None


def require_kernels() -> bool:
    """Returns whether a kernel that cannot be built is an error."""
    return _is_on("OPWRIGHT_REQUIRE_KERNELS", "0")


def precompiles_headers() -> bool:
    """Returns whether PyTorch's headers are precompiled for extensions."""
    return "pch" not in without()


def compile_commands() -> bool:
    """Returns whether builds in a project keep its compile_commands.json."""
    return "compile_commands" not in without()


_OMISSIBLE = ("compile_commands", "pch")


def without() -> tuple[str, ...]:
    """Returns what the user does without."""
    names = tuple(filter(None, re.split(r"[,\s]+", os.environ.get("OPWRIGHT_WITHOUT", ""))))
    for name in names:
        if name not in _OMISSIBLE:
            raise SettingError(
                "OPWRIGHT_WITHOUT",
                "unknown value",
                rows=[("got", repr(name)), ("expected", " | ".join(map(repr, _OMISSIBLE)))],
            )
    return names


def _is_on(name: str, default: str) -> bool:
    text = os.environ.get(name, default).lower()
    if text in ("0", "", "false", "no"):
        return False
    if text in ("1", "true", "yes"):
        return True
    raise SettingError(name, "must be 0 or 1", rows=[("got", repr(text))])
