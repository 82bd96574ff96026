"""Data for programs."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["json_document"]


def json_document(data: dict[str, Any]) -> str:
    """Return one JSON object: keys sorted, integers exact to the last digit, ASCII only."""
    return json.dumps(data, indent=2, sort_keys=True, allow_nan=False) + "\n"
