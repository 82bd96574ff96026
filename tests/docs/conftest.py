"""Who reads the pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.reader import Reader


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """Somebody who does what a page says; what they started is ended with the test."""
    made = Reader(tmp_path)
    yield made
    made.stop()
