"""The texts that the troubleshooting page goes by are those that the code says."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
#: What others say: SQLite, and PostgreSQL behind a proxy.
OF_OTHERS = {"database is locked", "prepared statement", "does not exist", "already exists"}
SOURCES = [
    *sorted((ROOT / "celery_budget").rglob("*.py")),
    *sorted((ROOT / "celery_budget").rglob("*.sql")),
]
#: Two literals that Python joins, and what a placeholder stands for.
JOINT = re.compile(r'"\s*\n\s*f?"')


def texts() -> list[str]:
    terms = re.findall(r"^(`.+)\n: ", PAGE.read_text("utf-8"), re.MULTILINE)
    return sorted({text for term in terms for text in re.findall(r"`([^`]+)`", term)} - OF_OTHERS)


@pytest.fixture(scope="module")
def said() -> str:
    return "\n".join(JOINT.sub("", source.read_text("utf-8")) for source in SOURCES)


@pytest.mark.parametrize("text", texts())
def test_the_text_is_one_that_is_said(text: str, said: str) -> None:
    # The key of a setting is put together.
    known = said.replace("{PREFIX.upper()}", "BUDGET_")
    assert text in known


def test_there_are_texts() -> None:
    assert len(texts()) > 20
