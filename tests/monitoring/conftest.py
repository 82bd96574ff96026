"""promtool for tests of the rules; it is needed on CI and may be missing elsewhere."""

from __future__ import annotations

import os

import pytest

from tests.services import promtool as tool
from tests.services.base import ServiceUnavailable


@pytest.fixture(scope="session")
def promtool() -> str:
    """Where promtool is."""
    try:
        return str(tool.promtool())
    except ServiceUnavailable as error:
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(f"promtool is needed on CI: {error}", pytrace=False)
        pytest.skip(f"no promtool: {tool.HOW_TO_GET}")
