"""Every error of the package, raised as people meet it, beside what is written of it."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click import ClickException

from celery_budget import errors
from celery_budget.core.declarations import tomllib
from celery_budget.errors import BudgetError
from tests.integration.calls import names
from tests.integration.causes import CAUSES, Scene
from tests.integration.support import Shop
from tests.messages import JARGON, REMEDY

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs"
ENTRIES: list[dict[str, Any]] = tomllib.loads((HERE / "catalogue.toml").read_text())["error"]
TEXTS: list[dict[str, Any]] = tomllib.loads((HERE / "texts.toml").read_text())["text"]
BY_CAUSE = {entry["cause"]: entry for entry in ENTRIES}
#: Causes that need a PostgreSQL.
NEED_SERVERS = {"a_connection_to_another_kind_of_database", "a_replica_that_does_not_answer"}


def parameters() -> list[Any]:
    marks = [pytest.mark.postgres]
    return [
        pytest.param(one, id=one["cause"], marks=marks if one["cause"] in NEED_SERVERS else [])
        for one in ENTRIES
    ]


def pattern(text: str) -> re.Pattern[str]:
    """What a text of the catalogue stands for."""
    return re.compile(".+".join(map(re.escape, text.split("*"))), re.DOTALL)


@pytest.mark.parametrize("entry", parameters())
def test_an_error_as_it_is_met(
    entry: dict[str, Any],
    make_shop: Callable[..., Shop],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    def postgres() -> str:
        found: str = request.getfixturevalue("postgres_url")
        return found

    with pytest.raises(BudgetError) as met:
        CAUSES[entry["cause"]](Scene(make_shop, monkeypatch, tmp_path, postgres))
    error = met.value
    assert type(error).__name__ == entry["class"]
    text = str(error)
    assert pattern(entry["text"]).fullmatch(text), text
    for about in entry["about"]:
        assert pattern(about).search(text), f"it is about {about}"
    assert "hush" not in text, "a password"
    # By both ways in which it crosses to another process.
    pickled = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    stored = type(error)(*json.loads(json.dumps(error.args)))
    for again in (pickled, stored):
        assert (type(again), again.args, str(again)) == (type(error), error.args, text)
        assert vars(again) == vars(error)


@pytest.mark.parametrize("entry", TEXTS, ids=lambda one: one["call"][:60])
def test_a_text_as_it_is_met(
    entry: dict[str, Any],
    make_shop: Callable[..., Shop],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    scene = Scene(make_shop, monkeypatch, tmp_path, str)
    call = compile(entry["call"], "texts.toml", "eval")
    with pytest.raises((BudgetError, ClickException)) as met:
        eval(call, names(scene))  # noqa: S307 - our own file
    assert type(met.value).__name__ == entry["class"]
    text = str(met.value)
    assert pattern(entry["text"]).fullmatch(text), text
    assert entry["about"] in text


@pytest.mark.parametrize(
    "entry", [*ENTRIES, *TEXTS], ids=lambda one: one.get("cause") or one["call"][:60]
)
def test_its_text_is_of_use(entry: dict[str, Any]) -> None:
    text = entry["text"]
    # What a command says is a sentence.
    text = text.removesuffix(".") if "command(" in entry.get("call", "") else text
    assert entry["about"], "it names what it is about"
    assert REMEDY.search(text), "it says what to do"
    assert not JARGON.search(text)
    assert text == " ".join(text.split()), "it is one line"
    # The command line ends it; a log line goes on after it.
    assert text[-1] not in ".;,:!"


def test_every_error_has_its_entry_and_every_entry_its_cause() -> None:
    def below(kind: type[BudgetError]) -> set[str]:
        own = {kind.__name__} if kind.__module__ == errors.__name__ else set()
        return own.union(*map(below, kind.__subclasses__()))

    assert below(BudgetError) == {entry["class"] for entry in ENTRIES}
    assert set(CAUSES) == set(BY_CAUSE)
    assert len(BY_CAUSE) == len(ENTRIES)


def test_every_error_is_explained() -> None:
    page = (DOCS / "errors.md").read_text()
    help_page = (DOCS / "troubleshooting.md").read_text()
    # The term of a definition is one or several texts in backticks.
    terms = re.findall(r"^(`.+`)\n: ", help_page, re.MULTILINE)
    quotes = [quote for term in terms for quote in re.findall(r"`([^`]+)`", term)]
    for name in errors.__all__:
        assert f"`{name}`" in page, f"docs/errors.md does not explain {name}"
        texts = [one["text"] for one in ENTRIES if one["class"] == name]
        assert any(quote in text for quote in quotes for text in texts), (
            f"docs/troubleshooting.md has no words of {name}'s text"
        )
