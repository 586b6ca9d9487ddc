"""Runs `python -m lightrl`, which is `lightrl`."""

import sys

from lightrl.programs import main

if __name__ == "__main__":
    sys.exit(main())
