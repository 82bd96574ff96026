"""The plugin of pytest's: fixtures ``budget_app``, ``budget_ledger``, ``budget_clock`` and
``freeze_budget``, and the marks and the setting that they go by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from celery_budget import CeleryBudget
    from celery_budget.testing import Clock

__all__ = ["budget_app", "budget_clock", "budget_ledger", "freeze_budget"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting ``budget_app``."""
    parser.addini(
        "budget_app",
        "the Celery application whose budget tests use, as module:name; see celery_budget.testing",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Say what the marks mean."""
    config.addinivalue_line(
        "markers",
        "budget_ledger(eager=None, **settings): how the test's ledger is made; settings without "
        "their prefix (celery_budget.testing)",
    )
    config.addinivalue_line(
        "markers",
        "budget_clock(at): what the ledger's clock says first, as ISO 8601 with an offset or a "
        "datetime (celery_budget.testing)",
    )


@pytest.fixture
def budget_app(request: pytest.FixtureRequest) -> Any:
    """The application whose ledger tests have; override it, or set ``budget_app`` in the ini file.

    By default the only application that has a ``CeleryBudget`` by then.
    """
    return request.config.getini("budget_app") or None


@pytest.fixture
def budget_clock(request: pytest.FixtureRequest) -> Clock:
    """The clock of the test's ledger: it stands still until the test moves it."""
    from celery_budget.testing import Clock

    mark = request.node.get_closest_marker("budget_clock")
    if mark is None:
        return Clock()
    [at] = mark.args
    # Before 3.11 no "Z" was read.
    return Clock(datetime.fromisoformat(at.replace("Z", "+00:00")) if isinstance(at, str) else at)


@pytest.fixture
def budget_ledger(request: pytest.FixtureRequest, budget_app: Any) -> Iterator[CeleryBudget]:
    """The application's budget on an empty ledger of the test's own."""
    from celery_budget.testing import in_memory

    node = request.node
    clocked = "budget_clock" in request.fixturenames or node.get_closest_marker("budget_clock")
    clock = request.getfixturevalue("budget_clock") if clocked else None
    # The nearest one counts, term by term.
    terms: dict[str, Any] = {}
    for mark in reversed(list(node.iter_markers("budget_ledger"))):
        terms |= mark.kwargs
    with in_memory(budget_app, clock=clock, **terms) as ledger:
        yield ledger


@pytest.fixture
def freeze_budget(
    budget_ledger: CeleryBudget,
) -> Iterator[Callable[..., AbstractContextManager[None]]]:
    """As ``celery_budget.testing.freeze_budget``; without ``with`` it lasts until the test ends."""
    from celery_budget import testing

    with ExitStack() as until_the_end:

        def freeze(*names: str, limit: int | None = 0) -> AbstractContextManager[None]:
            frozen = ExitStack()
            frozen.enter_context(testing.freeze_budget(*names, limit=limit, ledger=budget_ledger))
            # Closed once: by its block, or by the end of the test.
            until_the_end.callback(frozen.close)
            return _Frozen(frozen)

        yield freeze


class _Frozen(AbstractContextManager[None]):
    """What is frozen already, until its block ends."""

    def __init__(self, frozen: ExitStack) -> None:
        self._frozen = frozen

    def __exit__(self, *raised: object) -> None:
        self._frozen.close()
