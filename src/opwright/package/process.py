"""The process that builds a package's library: `python -m opwright.package.process ORDER`.

Its torch is the stand-in, so it runs alike where there is a torch and where there is none.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from opwright.errors import OpwrightError, PackageError
from opwright.package import torch_stand_in


def main() -> int:
    """Builds what ORDER (JSON) asks for; prints what the library holds, or the error, as JSON."""
    order = json.loads(sys.argv[1])
    torch_stand_in.install()
    from opwright.dispatch.entry_point import entry_point_source
    from opwright.package.collect import collect
    from opwright.package.library import ARCHITECTURES, Options, build_library
    from opwright.package.wheel import describe

    out = sys.stdout
    sys.stdout = sys.stderr  # what the package's modules print
    try:
        root = Path(order["root"])
        options = Options(tuple(order.get("architectures", ARCHITECTURES)), tuple(order.get("levels", ())))
        declarations = collect(root, order["package"])
        made = build_library(declarations, root, Path(order["work"]), options)
        gates = {d.qualified_name: entry_point_source(d.contract) for d in declarations}
    except OpwrightError as error:
        print(json.dumps(describe(error)), file=out)
        return 1
    except Exception as error:
        body = "".join(traceback.format_exception(error, limit=-3))
        failed = PackageError(order["package"], "its library could not be built", body=body)
        print(json.dumps(describe(failed)), file=out)
        return 1
    print(json.dumps({"provenance": made, "gates": gates}), file=out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
