"""Runs the crash matrix; its processes import this too, and are not to run it."""

if __name__ == "__main__":
    import sys

    from tests.crash.cli import main

    sys.exit(main())
