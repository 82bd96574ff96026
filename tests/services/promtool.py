"""promtool, which comes with Prometheus; where it is missing it is installed, as root on Debian."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.services.debian import find_or_install

HOW_TO_GET = "install the system package prometheus, or put promtool on PATH"


def find() -> Path | None:
    """Where it is."""
    found = shutil.which("promtool")
    return Path(found) if found else None


def promtool() -> Path:
    """Return where it is, installed if need be. Raises ServiceUnavailable with what is missing."""
    [path] = find_or_install("prometheus", find)
    return path
