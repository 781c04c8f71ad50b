"""Imports kernel files so that what was compiled is known to the byte: every author's file is read once and hashed.

A kernel file and the author's modules that it imports are executed from their text, never from bytecode (which is
matched by seconds and size only), and are taken out of `sys.modules` afterwards. So a changed file is imported
afresh with everything it imports, and two folders may each have a module of the same name. Modules that the host
had imported before stay as they are: a second copy would run their side effects twice.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import linecache
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from .errors import WorkerError, author_place, first_paragraph, line_of

_OPWRIGHT = Path(os.path.realpath(__file__)).parents[2]
# PyTorch, and Triton as far as it is not loaded yet, cannot be imported twice. Both are named because developers use
# them from a checkout, which no installer has recorded.
_IMPORTED_ONCE = ("torch", "triton")


def _installed_folders() -> tuple[str, ...]:
    folders = [
        str(_OPWRIGHT),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *(site.getsitepackages() if hasattr(site, "getsitepackages") else ()),
    ]
    for name in _IMPORTED_ONCE:
        with suppress(ImportError, ValueError):  # of a module that has no spec
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin is not None:  # not a mere folder of that name
                folders += spec.submodule_search_locations or ()
    return tuple(os.path.realpath(folder) + os.sep for folder in dict.fromkeys(folders))


_INSTALLED = _installed_folders()


class KernelFile:
    """An imported kernel file: its module, and the text of every author's file that was executed for it."""

    def __init__(self, path: str, module: ModuleType, texts: dict[str, bytes]) -> None:
        self.path = path
        self.module = module
        self.texts = texts

    def is_current(self) -> bool:
        """Whether every file still has the text that was executed."""
        return all(_read(path) == text for path, text in self.texts.items())

    def is_authors(self, path: str) -> bool:
        """Whether a file is one of those."""
        return os.path.abspath(path) in self.texts

    def text(self, path: str) -> str | None:
        """Returns the text of one of those files, or None."""
        found = self.texts.get(os.path.abspath(path))
        return None if found is None else importlib.util.decode_source(found)

    def digests(self, jit: Any) -> list[list[str]]:
        """Returns `[path, sha256]` of every file, sorted by path.

        Triton's own first module is among them, and installed modules whose functions a JIT function calls.
        """
        import triton

        assert triton.__file__ is not None
        root = os.path.realpath(os.path.dirname(triton.__file__)) + os.sep
        files = {os.path.abspath(triton.__file__): Path(triton.__file__).read_bytes()}
        for called in _called_functions(jit):
            path = os.path.abspath(called.fn.__code__.co_filename)
            if path not in self.texts and not os.path.realpath(path).startswith(root):
                text, source = _read(path) or b"", "".join(called.raw_src)
                is_same = source in importlib.util.decode_source(text) and files.get(path, text) == text
                files[path] = text if is_same else source.encode()  # no file has this digest: it was updated since
        files |= self.texts
        return [[path, hashlib.sha256(text).hexdigest()] for path, text in sorted(files.items())]

    def error(self, kind: str, message: str, path: str | None, line: int | None) -> WorkerError:
        """Returns an error that shows a line of one of the files."""
        path = path or self.path
        return WorkerError(kind, message, file=path, line=line, source=line_of(self.text(path), line))


def _called_functions(jit: Any) -> Iterator[Any]:
    """Yields a JIT function and those that it calls, directly or through others."""
    waiting, seen = [jit], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if hasattr(value, "raw_src"):
            yield value
            closure = inspect.getclosurevars(value.fn)
            names = value.fn.__code__.co_names
            used = [*closure.nonlocals.values(), *closure.globals.values()]
            waiting += used
            modules = [v for v in used if isinstance(v, ModuleType)]
            for module in modules:  # grows by the modules that are attributes of others
                found = [getattr(module, name) for name in names if hasattr(module, name)]
                modules += [v for v in found if isinstance(v, ModuleType) and v not in modules]
                waiting += found


_imported: dict[str, KernelFile] = {}
_first_seen: dict[str, bytes] = {}  # texts of the host's modules when a kernel first used them


def import_kernel_file(path: str) -> KernelFile:
    """Returns a kernel file, imported afresh if it or what it imports has changed.

    Raises:
        WorkerError: It is not there, cannot be imported, or uses a module of the host that has changed on the disk.
    """
    path = os.path.abspath(path)
    known = _imported.get(path)
    if known is None or not known.is_current():
        _imported.pop(path, None)
        if not os.path.isfile(path):
            raise WorkerError("import", f"`{path}` is not there: no kernel can be read from it.", file=path)
        known = _imported[path] = _import(path)
    _check_host_modules(known)
    return known


def _import(path: str) -> KernelFile:
    texts: dict[str, bytes] = {}
    name, root = _module_name(path)
    if "." in name and not _has_relative_imports(path):
        # The package's own `__init__.py` is not run for nothing: it may need a torch that the worker has not.
        name = f"kernels_{Path(path).stem}"
    importlib.invalidate_caches()
    before = dict(sys.modules)
    hidden = _hide_namesakes(root, before)
    try:
        with _author_modules(texts, root):
            module = _execute(path, name, texts)
        _add_host_modules(texts, before)
    except (Exception, SystemExit) as error:
        raise _import_error(path, error, texts) from error
    finally:
        for added in set(sys.modules) - set(before):
            if _is_authors_module(sys.modules[added]):
                del sys.modules[added]
        sys.modules.update(hidden)
    return KernelFile(path, module, texts)


def _module_name(path: str) -> tuple[str, str]:
    """Returns the name to import a file by, and the folder that its imports start from."""
    folder, stem = os.path.dirname(path), Path(path).stem
    parts: list[str] = []
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        folder, package = os.path.split(folder)
        parts.insert(0, package)
    if parts:
        return ".".join([*parts, stem]), folder
    # `triton.py` is a natural name for a kernel file: it must not be imported in place of Triton.
    return f"kernels_{stem}", folder


def _execute(path: str, name: str, texts: dict[str, bytes]) -> ModuleType:
    if "." in name:
        importlib.import_module(name.rpartition(".")[0])
        found = sys.modules.get(name)
        if found is not None and os.path.abspath(getattr(found, "__file__", None) or "") == path:
            return found
    spec = importlib.util.spec_from_file_location(name, path, loader=_ReadOnceLoader(name, path, texts))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _has_relative_imports(path: str) -> bool:
    try:
        tree = ast.parse(_read(path) or b"")
    except SyntaxError:
        return False  # which the import reports
    return any(isinstance(node, ast.ImportFrom) and node.level > 0 for node in ast.walk(tree))


class _ReadOnceLoader(SourceFileLoader):
    """Compiles a module from its text and keeps the text."""

    def __init__(self, name: str, path: str, texts: dict[str, bytes]) -> None:
        super().__init__(name, path)
        self._texts = texts

    def get_code(self, fullname: str) -> CodeType:
        path = os.path.abspath(self.path)
        text = self.get_data(path)
        self._texts[path] = text
        # Triton reads a function's lines through linecache; without a time it keeps what was executed.
        source = importlib.util.decode_source(text)
        linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
        return self.source_to_code(text, path)


class _AuthorFinder:
    """Finds modules as the other finders do, and gives the author's modules the loader that keeps their text."""

    def __init__(self, texts: dict[str, bytes]) -> None:
        self._texts = texts

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find and finder is not self else None
            if spec is None:
                continue
            if type(spec.loader) is SourceFileLoader and is_authors_path(spec.origin):
                spec.loader = _ReadOnceLoader(name, spec.origin, self._texts)
                return spec
            return None
        return None


@contextmanager
def _author_modules(texts: dict[str, bytes], root: str) -> Iterator[None]:
    finder = _AuthorFinder(texts)
    sys.meta_path.insert(0, finder)
    sys.path.insert(0, root)
    try:
        yield
    finally:
        sys.path.remove(root)
        sys.meta_path.remove(finder)


def is_authors_path(path: str | None) -> bool:
    """Whether a file is the author's: neither of the standard library, nor installed, nor of Opwright.

    Links are followed: a project that is linked into `site-packages` remains its author's.
    """
    if not path:
        return False
    path = os.path.realpath(path)
    return not ((path + os.sep).startswith(_INSTALLED) or _is_installed_elsewhere(path))


def _is_installed_elsewhere(path: str) -> bool:
    """Whether a file is installed outside this interpreter's folders, which a `.pth`, PYTHONPATH or a link leads to."""
    parts = path.split(os.sep)
    if not {"site-packages", "dist-packages"}.isdisjoint(parts[:-1]):
        return True
    # `pip install --target`, or the cache of an installer that links: a record beside the package names it.
    return any(parts[depth] in _recorded_names(os.sep.join(parts[:depth]) or os.sep) for depth in range(1, len(parts)))


@functools.cache
def _recorded_names(folder: str) -> frozenset[str]:
    """Returns the packages and modules of a folder that an installer has recorded there."""
    names: set[str] = set()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        with suppress(OSError):
            lines = record.read_text("utf-8", "replace").splitlines()
            names.update(line.partition(",")[0].partition("/")[0] for line in lines)
    return frozenset(names)


def _module_path(module: Any) -> str | None:
    path = getattr(module, "__file__", None)
    if isinstance(path, str):
        return path
    spec = getattr(module, "__spec__", None)
    folders = list(getattr(spec, "submodule_search_locations", None) or ())
    return folders[0] if folders else None


def _is_authors_module(module: Any) -> bool:
    path = _module_path(module)
    return is_authors_path(path)


def _hide_namesakes(root: str, modules: dict[str, Any]) -> dict[str, Any]:
    """Takes out of `sys.modules` what would be found there instead of a file of the kernel's own folder."""
    hidden: dict[str, Any] = {}
    for name, module in modules.items():
        path = _module_path(module)
        if "." in name or name == "__main__" or not (is_authors_path(path) or name == __package__):
            continue  # this package is `worker` in a process of its own, which a kernel's folder may have too
        own = (os.path.join(root, f"{name}.py"), os.path.join(root, name, "__init__.py"))
        if any(os.path.isfile(file) for file in own) and os.path.abspath(path or "") not in own:
            hidden.update({key: value for key, value in modules.items() if f"{key}.".startswith(f"{name}.")})
    for name in hidden:
        del sys.modules[name]
    return hidden


def _add_host_modules(texts: dict[str, bytes], host: dict[str, Any]) -> None:
    """Adds the files of the author's modules that the host had imported already: no loader of ours saw them."""
    waiting = list(texts)
    while waiting:
        path = waiting.pop()
        for name in _imported_names(path, texts[path]):
            module = host.get(name)
            found = os.path.abspath(getattr(module, "__file__", None) or "")
            if module is None or found in texts or not found.endswith(".py") or not _is_authors_module(module):
                continue
            text = _read(found)
            if text is not None:
                texts[found] = _first_seen.setdefault(found, text)
                waiting.append(found)


def _imported_names(path: str, text: bytes) -> Iterator[str]:
    package = _module_name(path)[0].rpartition(".")[0].split(".")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                yield from (".".join(parts[: end + 1]) for end in range(len(parts)))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield start
            yield from (f"{start}.{alias.name}" for alias in node.names)


def _check_host_modules(kernel_file: KernelFile) -> None:
    for path in kernel_file.texts:
        if path in _first_seen and _read(path) != _first_seen[path]:
            raise WorkerError(
                "stale",
                f"`{path}` has changed since this process imported it, and `{kernel_file.path}` uses it. "
                "Restart the process.",
                file=path,
            )


def _import_error(path: str, error: BaseException, texts: dict[str, bytes]) -> WorkerError:
    if isinstance(error, WorkerError):
        return error
    file, line = author_place(error, lambda name: os.path.abspath(name) in texts)
    message = f"`{path}` cannot be imported: {first_paragraph(error)}"
    if isinstance(error, ImportError) and "relative import" in str(error):
        message += ". Relative imports work in a folder with `__init__.py`."
    source = line_of(texts[file].decode("utf-8", "replace"), line) if file in texts else None
    return WorkerError("import", message, file=file or path, line=line, source=source)


def _read(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except OSError:
        return None
