"""References were tried when the wheel was made. In place of `contract/dryrun.py`."""

from __future__ import annotations

from opwright.contract.declaration import Declaration


def dry_run(declaration: Declaration) -> None:
    """Does nothing."""
