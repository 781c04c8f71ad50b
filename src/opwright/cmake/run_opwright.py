"""The command `opwright` of the package around this file: python run_opwright.py pack build ...

Not by PYTHONPATH, which the compile worker would inherit: its Python may be another, with packages of its own.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from opwright.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
