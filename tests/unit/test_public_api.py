"""The public API is what its committed list says: a change of it touches the list, knowingly."""

from __future__ import annotations

import re
from importlib.metadata import metadata
from pathlib import Path

from celery_budget.core.declarations import tomllib
from tests.unit.public import LIST, MODULES, everything

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "versioning.md").read_text("utf-8")


def test_the_public_api_is_what_the_list_says() -> None:
    listed, found = LIST.read_text("utf-8").splitlines(), everything()
    changes = {
        "gone, which breaks applications": [one for one in listed if one not in set(found)],
        "new, and promised from now on": [one for one in found if one not in set(listed)],
    }
    why = "see docs/versioning.md; then: python -m tests.unit.public"
    assert not any(changes.values()), f"{changes}; {why}"
    assert listed == found, why


def test_the_list_has_every_part() -> None:
    parts = {line.split()[0] for line in LIST.read_text("utf-8").splitlines()}
    assert parts == {"python", "setting", "command", "event", "metric"}


def test_the_page_names_the_modules_and_the_versions() -> None:
    for suffix in MODULES:
        assert f"`celery_budget{suffix}`" in PAGE
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = dict(re.findall(r"^(\w+)>=([\d.]+)", "\n".join(project["dependencies"]), re.MULTILINE))
    assert f"| Celery, kombu | {needed['celery']} and later, below 6 |" in PAGE
    assert f"(from {needed['SQLAlchemy']})" in PAGE
    python = project["requires-python"].removeprefix(">=")
    assert f"| Python | {python} and later" in PAGE
    assert metadata("celery-budget")["License-Expression"] == "BSD-3-Clause"


def test_there_is_a_security_policy_without_addresses() -> None:
    policy = (ROOT / "SECURITY.md").read_text("utf-8")
    assert "private" in policy
    assert not re.search(r"\S+@\S+|https?://", policy)
