"""Takes the machine out of records: their paths become relative to the manifest's folder."""

from __future__ import annotations

import os
import re
from typing import Any

from .manifest import Manifest

_TRITON = os.path.join("triton", "__init__.py")


def place_record(manifest: Manifest, file: str, record: dict[str, Any]) -> dict[str, Any]:
    """Returns a worker's record as it stands in a pack.

    Args:
        manifest: Whose folder paths are relative to.
        file: The kernel's file.
        record: A kernel or a description.
    """
    paths = {path: _source_name(manifest, path) for path, _ in record["sources"]}
    sources = sorted([paths[path], digest] for path, digest in record["sources"])
    # The longest first: no path is replaced in the middle of another.
    replaced = _without_paths(record, sorted(paths.items(), key=lambda item: -len(item[0])))
    placed = {**replaced, "file": manifest.name_in_pack(file), "sources": sources}
    return {name: value for name, value in placed.items() if name not in ("blob", "sha256")}


def is_tritons(path: str) -> bool:
    """Whether a source is Triton's own file, which stands for its version."""
    return path == _TRITON or path.endswith(os.path.sep + _TRITON)


def _source_name(manifest: Manifest, path: str) -> str:
    if is_tritons(path):
        return _TRITON
    installed = re.split(r"/(?:site|dist)-packages/", path)
    if len(installed) > 1:
        return installed[-1]
    name = manifest.name_of(path)
    # Beside the manifest only the root would be common: the folders are the machine's.
    return os.path.basename(path) if os.path.isabs(name) else name


def _without_paths(value: Any, paths: list[tuple[str, str]]) -> Any:
    """Returns what a record says with its files named shortly; descriptions name them where they explain."""
    if isinstance(value, dict):
        return {
            name: _shortened(item, paths) if name == "error" and isinstance(item, str) else _without_paths(item, paths)
            for name, item in value.items()
        }
    return [_without_paths(item, paths) for item in value] if isinstance(value, list) else value


def _shortened(text: str, paths: list[tuple[str, str]]) -> str:
    for path, name in paths:
        text = text.replace(path, name)
    return text
