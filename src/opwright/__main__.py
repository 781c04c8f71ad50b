"""`python -m opwright`: the command, of this very Python."""

from opwright.cli import main

if __name__ == "__main__":
    main()
