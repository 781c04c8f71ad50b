"""Links against the oldest glibc that has what a library uses, whatever glibc the machine has that builds it.

glibc 2.34 gave `dlopen`, `pthread_create` and their like a new version, and kept the same functions under the
old one; other releases did so for others. The linker takes the newest version, and with it the machine's glibc
becomes the least one. So it is given a stub in which these functions have their oldest version alone. What
is truly new keeps its version.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from elftools.elf.elffile import ELFFile

from opwright.backends.toolchain import Compiler

_LOADERS = ("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1")
_STACK = '.section .note.GNU-stack,"",%progbits\n'
_KINDS = {"STT_FUNC": "function", "STT_LOOS": "function", "STT_OBJECT": "object"}  # STT_LOOS: chosen at load
# Before 2.34 these functions lay in libraries of their own, which newer ones still have, empty.
_ONCE_APART = ("libpthread.so.0", "libdl.so.2", "librt.so.1")


# The old versions differ in what pthread_kill returns for a thread that has ended (CUDA's runtime uses it), and in that
# the functions of libm also ask for an error handler that is long gone.
_ALIKE = frozenset({"pthread_kill", "exp", "exp2", "log", "log2", "pow", "fmod", "fmodf", "hypot", "hypotf"})


def stub_commands(compiler: Compiler, work: Path) -> dict[str, list[str]]:
    """Returns the commands that make the stubs; empty where the C library is not glibc."""
    libraries = {name: _path_of(compiler, f"{name}.so.6") for name in ("libc", "libm")}
    if None in libraries.values():
        return {}
    link = [compiler.path, "-shared", "-nostdlib", "-Wl,--build-id=none"]
    made = {}
    for name, path in libraries.items():
        symbols = _symbols(path)
        (work / f"{name}_stub.S").write_text(
            "".join(
                f".global _{i}\n.type _{i}, %{kind}\n_{i}:\n.symver _{i}, {symbol}@@{version}\n"
                for i, (symbol, (version, kind)) in enumerate(symbols.items())
            )
            + _STACK
        )
        nodes = "".join(f"{v} {{ }};\n" for v in sorted({version for version, _ in symbols.values()}))
        (work / f"{name}_stub.map").write_text(nodes + "HIDDEN { local: _*; };\n")
        made[f"stub of {name}"] = [
            *link, f"{name}_stub.S", f"-Wl,--version-script={name}_stub.map", f"-Wl,-soname,{name}.so.6",
            "-o", f"{name}_stub.so",
        ]  # fmt: skip
    (work / "libc_empty.S").write_text(_STACK)
    for name in _ONCE_APART:
        made[f"stub of {name}"] = [*link, "libc_empty.S", f"-Wl,-soname,{name}", "-o", name]
    return made


def link_flags(compiler: Compiler, commands: dict[str, list[str]]) -> list[str]:
    """Returns what ends a link: the compiler's libraries and the C library, its stubs if there are some."""
    # Helpers of 16-bit arithmetic are in libgcc_s only since GCC 12; the archive has them always.
    if not commands:
        return ["-lgcc"]
    # The part that every library takes along, and the loader, which has what thread-local variables need.
    found = [_path_of(compiler, name) for name in ("libc_nonshared.a", *_LOADERS)]
    c = [
        "libc_stub.so",
        *_ONCE_APART,
        "-Wl,--as-needed",
        *(str(path) for path in found if path),
        "-Wl,--no-as-needed",
    ]
    vectors = _path_of(compiler, "libmvec.so.1")  # of x86-64 alone; the functions that are declared are old
    m = ["libm_stub.so", *(["-Wl,--as-needed", str(vectors), "-Wl,--no-as-needed"] if vectors else [])]
    return ["-nodefaultlibs", "-lstdc++", *m, "-lgcc", *c, "-lgcc_s", "-lgcc"]


def _path_of(compiler: Compiler, name: str) -> Path | None:
    found = subprocess.run([compiler.path, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return Path(found) if "/" in found and Path(found).exists() else None


def _symbols(library: Path) -> dict[str, tuple[str, str]]:
    """Returns what glibc has for new links: a version and the kind of each symbol.

    The version is the oldest one that has the same function at the same address.
    """
    newest: dict[str, tuple[str, int, str]] = {}
    older: dict[tuple[str, int | None], list[str]] = {}
    with library.open("rb") as f:
        elf = ELFFile(f)
        symbols, indices = elf.get_section_by_name(".dynsym"), elf.get_section_by_name(".gnu.version")
        names = {}
        for entry, parts in elf.get_section_by_name(".gnu.version_d").iter_versions():
            names[entry["vd_ndx"]] = next(iter(parts)).name
        for position, symbol in enumerate(symbols.iter_symbols()):
            index, kind = indices.get_symbol(position)["ndx"], _KINDS.get(symbol["st_info"]["type"])
            if symbol["st_shndx"] in ("SHN_UNDEF", "SHN_ABS") or kind is None or not isinstance(index, int):
                continue
            version, address = names[index & 0x7FFF], symbol["st_value"]
            if not version.startswith("GLIBC_2"):
                continue
            if not index & 0x8000:
                newest[symbol.name] = (version, address, kind)
            elif kind == "function":  # kept for what was linked long ago
                key = (symbol.name, None if symbol.name in _ALIKE else address)
                older.setdefault(key, []).append(version)
    return {
        name: (min([version, *older.get((name, None if name in _ALIKE else address), [])], key=_number), kind)
        for name, (version, address, kind) in sorted(newest.items())
    }


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.removeprefix("GLIBC_").split("."))
