"""A real Chromium, Debian's own, driven through playwright without a window."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.services.base import ServiceUnavailable
from tests.services.debian import find_or_install

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HOW_TO_GET = "apt-get install chromium, and pip install playwright"
PROGRAM = Path("/usr/bin/chromium")

#: No sandbox, since CI runs as root; and nothing that would ask the network by itself.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def find_program() -> Path:
    """The Chromium to run, installed where it is missing; raises ServiceUnavailable."""
    [program] = find_or_install("chromium", _program)
    return program


def _program() -> Path | None:
    return PROGRAM if PROGRAM.exists() else None


@contextmanager
def browser() -> Iterator[Browser]:
    """A running browser, closed afterwards; raises ServiceUnavailable where none can be had."""
    program = find_program()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise ServiceUnavailable(f"playwright is not installed: {error}") from error
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=str(program), args=list(ARGUMENTS))
        try:
            yield found
        finally:
            found.close()
