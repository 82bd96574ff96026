"""Each way of publishing sends, from the first message to the last, what Celery alone would send.

What ``apply_async`` sends for each of its options is in ``test_capture.py``.
"""

from __future__ import annotations

import re

import pytest

from tests.cluster import ROOT
from tests.integration.publication.paths import OPTIONS, PATHS
from tests.integration.publication.sides import Sides, compared


@pytest.mark.parametrize("name", PATHS)
def test_all_messages_are_celerys(sides: Sides, name: str) -> None:
    path = PATHS[name]
    rounds = []
    for side in sides:
        side.publish(path.publish)
        rounds.append(compared(side.run_all()))
    assert rounds[1] == rounds[0]
    assert len(sides.plain.tasks.ran) == path.runs
    assert sides.budget.tasks.told() == sides.plain.tasks.told()


def test_the_page_lists_every_path() -> None:
    page = (ROOT / "docs" / "publishing.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .+ \| (`.+`) \|$", page, re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert set(listed) == {*PATHS, *OPTIONS}
