"""Runs the matrix."""

if __name__ == "__main__":
    import sys

    from tests.matrix.cli import main

    sys.exit(main())
