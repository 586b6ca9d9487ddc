"""Runs `python -m lightrl`, which is `lightrl`."""

from lightrl.programs import main

if __name__ == "__main__":
    main()
