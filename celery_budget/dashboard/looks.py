"""What each page shows: read from the ledger, filtered and sorted; plain data, for JSON as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from markupsafe import Markup

from celery_budget.core.budgets import check_name, is_template
from celery_budget.errors import InvalidName, UnknownBudget, UnknownRequest
from celery_budget.integration.views import Views
from celery_budget.reconcile import (
    BudgetSeen,
    BudgetStory,
    Entry,
    Overview,
    Report,
    Standing,
    Story,
    Template,
)
from celery_budget.render import plots

__all__ = [
    "BudgetLook",
    "Filters",
    "Life",
    "OverviewLook",
    "PlotsLook",
    "TemplateLook",
    "budget",
    "life",
    "overview",
    "report",
]

#: So many budgets are read, filtered and sorted; where there are more, a page says so.
MOST_BUDGETS = 1000
#: So many are on one page.
PAGE = 50
#: So many holds, requests that wait and entries of its journal are on a budget's page.
LISTED = 25

#: The states of a budget that can be asked for, in words; those of the ledger and two to be seen.
STATES = {
    "": "any",
    "open": "open",
    "draining": "draining",
    "closed": "closed",
    "full": "full",
    "overcommitted": "over its limit",
}
_STORED = ("open", "draining", "closed")

#: The orders that budgets can be in, in words.
SORTS = {"name": "name", "used": "fullest first", "available": "least available first"}

#: For how many days plots are, in words.
PERIODS = {"7": "7 days", "31": "31 days"}


@dataclass(frozen=True)
class Filters:
    """What is asked for; anything that cannot be is as if it were not.

    :ivar containing: only what has this in its name, in whatever case.
    :ivar state: only budgets in it; one of :data:`STATES`.
    :ivar sort: one of :data:`SORTS`.
    :ivar page: which page of the budgets, from 1 on.
    """

    containing: str = ""
    state: str = ""
    sort: str = "name"
    page: int = 1

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Filters:
        """Return what a query asks for: ``q``, ``state``, ``sort``, ``page``."""
        state, sort, page = (query.get(name, "") for name in ("state", "sort", "page"))
        return cls(
            query.get("q", "").replace("\0", "").strip()[:255],
            state if state in STATES else "",
            sort if sort in SORTS else "name",
            max(1, int(page)) if page.isascii() and page.isdigit() and len(page) < 6 else 1,
        )

    @property
    def active(self) -> bool:
        """Whether anything is left out."""
        return bool(self.containing or self.state)


@dataclass(frozen=True)
class OverviewLook:
    """The first page.

    :ivar budgets: those on this page.
    :ivar found: how many there are on all pages.
    """

    filters: Filters
    overview: Overview
    budgets: tuple[BudgetSeen, ...]
    found: int
    page: int
    pages: int

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        shown = [one.as_dict() for one in self.budgets]
        pages = {"found": self.found, "page": self.page, "pages": self.pages}
        return {**self.overview.as_dict(), **pages, "budgets": shown}


def overview(views: Views, filters: Filters) -> OverviewLook:
    """Read how everything stands."""
    state = filters.state if filters.state in _STORED else None
    seen = views.overview(filters.containing, state, MOST_BUDGETS)
    budgets = sorted(filter(_KEPT.get(filters.state, _any), seen.budgets), key=_ORDER[filters.sort])
    pages = max(1, -(-len(budgets) // PAGE))
    page = min(filters.page, pages)
    shown = tuple(budgets[(page - 1) * PAGE : page * PAGE])
    return OverviewLook(filters, seen, shown, len(budgets), page, pages)


def _any(one: BudgetSeen) -> bool:
    return True


def _full(one: BudgetSeen) -> bool:
    return one.full


def _overcommitted(one: BudgetSeen) -> bool:
    return one.overcommitted


_KEPT: dict[str, Callable[[BudgetSeen], bool]] = {"full": _full, "overcommitted": _overcommitted}


def _by_name(one: BudgetSeen) -> tuple[Any, ...]:
    return (one.budget.name,)


def _by_use(one: BudgetSeen) -> tuple[Any, ...]:
    """Order by how much of the limit is used, most first; without a limit last."""
    limit, total = one.balance.limit, one.balance.reserved + one.balance.spent
    used = -1 if limit is None else total * 1_000_000 // max(1, limit)
    return (-used, one.budget.name)


def _by_available(one: BudgetSeen) -> tuple[Any, ...]:
    left = one.balance.available
    return (left is None, left or 0, one.budget.name)


_ORDER: dict[str, Callable[[BudgetSeen], tuple[Any, ...]]] = {
    "name": _by_name,
    "used": _by_use,
    "available": _by_available,
}


@dataclass(frozen=True)
class BudgetLook:
    """One budget's page.

    :ivar seen: it as in the overview.
    :ivar story: what holds it, what frees it, and what waits for it.
    :ivar journal: its last changes, the last first.
    """

    seen: BudgetSeen
    story: BudgetStory
    journal: tuple[Entry, ...]

    @property
    def standing(self) -> Standing:
        """Its terms and balance."""
        return self.story.standing

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {**self.story.as_dict(), "journal": [one.as_dict() for one in self.journal]}


@dataclass(frozen=True)
class TemplateLook:
    """A template's page."""

    standing: Template

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return self.standing.as_dict()


def budget(views: Views, name: str) -> BudgetLook | TemplateLook:
    """Read how one budget or template stands.

    :raises UnknownBudget: where there is none, as what cannot be a name names none.
    """
    try:
        check_name(name)
    except InvalidName as exc:
        raise UnknownBudget(name) from exc
    if is_template(name):
        found = views.standing(name)
        assert isinstance(found, Template)  # noqa: S101 - its name says so
        return TemplateLook(found)
    story = views.explain_budget(name, LISTED)
    seen = BudgetSeen(story.standing.budget, story.standing.balance)
    return BudgetLook(seen, story, tuple(views.journal(name, LISTED)))


@dataclass(frozen=True)
class Life:
    """What is known of the requests with one id."""

    some_id: str
    stories: tuple[Story, ...]

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {"id": self.some_id, "requests": [story.as_dict() for story in self.stories]}


def life(views: Views, some_id: str) -> Life:
    """Read the life of one request; nothing of none.

    :raises UnknownRequest: where nothing is known of it.
    """
    if not some_id:
        return Life(some_id, ())
    # No id has a null character, and a database takes none.
    stories = () if "\0" in some_id else tuple(views.explain(some_id))
    if not stories:
        raise UnknownRequest(some_id)
    return Life(some_id, stories)


@dataclass(frozen=True)
class PlotsLook:
    """The figures of the last days, with the plots of them."""

    report: Report
    drawn: tuple[Markup, ...]

    def as_dict(self) -> dict[str, Any]:
        """The figures for JSON."""
        return self.report.as_dict()


def report(views: Views, days: str) -> PlotsLook:
    """Read the figures of the last days, and draw them."""
    found = views.report(since=timedelta(days=int(days)))
    spend = (plots.spend_plot(found.days, one) for one in plots.top_budgets(found.balances))
    return PlotsLook(
        found,
        (
            *spend,
            plots.drift_plot(found.drift),
            plots.waits_plot(found.days),
            plots.runs_plot(found.days),
        ),
    )
