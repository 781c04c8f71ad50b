"""opwright explain"""

from __future__ import annotations

import inspect

from opwright.cli.help import make_app
from opwright.errors import TargetError, all_errors

explain_app = make_app("explain")


@explain_app.default
def explain(code: str | None = None) -> int:
    """Explain an error code, or list them all.

    Args:
        code: Such as OPW104, or 104.
    """
    errors = all_errors()
    if code is None:
        for name, cls in errors.items():
            summary = (inspect.getdoc(cls) or "").partition("\n")[0]
            print(f"{name}  {summary}")
        return 0
    code = f"OPW{code}" if code.isdigit() else code.upper()
    found = errors.get(code)
    if found is None:
        raise TargetError(code, "there is no such error code", hint="`opwright explain` lists them all")
    print(f"{code}  {found.__name__}\n\n{inspect.getdoc(found)}")
    return 0
