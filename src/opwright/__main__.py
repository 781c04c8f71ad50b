"""`python -m opwright`: the command, of this very Python."""

from opwright.cli import run

if __name__ == "__main__":
    run()
