"""Runs the soak from the command line."""

if __name__ == "__main__":
    import sys

    from tests.soak.cli import main

    sys.exit(main())
