"""Records which kernel keys a command launches, into a manifest."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from opwright.errors import ManifestError, RecordingError

from .manifest import KernelEntry, Manifest, option_value, read_manifest

_VARIABLE = "OPWRIGHT_TRITON"


@dataclass(frozen=True)
class Recording:
    """What a command launched.

    Attributes:
        status: The command's exit status, 128 + N if signal N ended it.
        manifest: The manifest as it is now.
        seen: The number of different keys that the command launched.
        added: How many of them the manifest did not have.
        skipped: Lines of the record that could not be read.
    """

    status: int
    manifest: Manifest
    seen: int
    added: int
    skipped: int


def record(command: list[str], output: Path) -> Recording:
    """Runs a command and adds the kernel keys that it launches to a manifest.

    Raises:
        RecordingError: The command cannot be started.
        ManifestError: The manifest is there and cannot be read.
    """
    # Read before the command runs: it may take hours. A kernel's file may be gone that another run recorded.
    before = read_manifest(output, needs_files=False) if output.exists() else Manifest(output)
    with tempfile.TemporaryDirectory(prefix="opwright-record-") as folder:
        lines = Path(folder, "keys")
        status = _run(command, lines)
        text = lines.read_text(encoding="utf-8", errors="replace") if lines.exists() else ""
    entries: dict[tuple[str, str, str], KernelEntry] = {}
    architectures, skipped = set(), 0
    for line in text.splitlines():
        try:
            item = json.loads(line)
            options = tuple((name, option_value(value)) for name, value in sorted(item["options"].items()))
            entry = KernelEntry(os.path.normpath(item["file"]), str(item["function"]), tuple(item["args"]), options)
            architectures.add(int(item["arch"]))
            entries[entry.identity] = entry
        except (ValueError, KeyError, TypeError, AttributeError):
            skipped += 1
    manifest = before.merged(entries.values(), architectures)
    if entries or not output.exists():
        try:
            manifest.write()
        except OSError as error:
            raise ManifestError(
                str(output),
                f"the manifest cannot be written: {error.strerror}",
                hint="`--out` another file",
            ) from error
    return Recording(status, manifest, len(entries), len(manifest.entries) - len(before.entries), skipped)


def _run(command: list[str], lines: Path) -> int:
    settings = [*filter(None, [os.environ.get(_VARIABLE)]), f"record={lines}"]
    try:
        process = subprocess.Popen(command, env={**os.environ, _VARIABLE: ",".join(settings)})
    except OSError as error:
        raise RecordingError(
            command[0],
            f"cannot be run: {error.strerror}",
            hint="`opwright pack record --out manifest.json -- COMMAND ARGUMENTS`",
        ) from error
    while True:
        try:
            status = process.wait()
            return status if status >= 0 else 128 - status
        except KeyboardInterrupt:
            continue  # the command got it too, and decides; what it had launched is kept
