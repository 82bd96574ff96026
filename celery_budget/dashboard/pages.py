"""Pages, made of what was read: templates, and the two files that they need."""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

from celery_budget.dashboard import looks, words
from celery_budget.dashboard.reads import Seen
from celery_budget.render import plots
from celery_budget.render.budgets import standing_facts
from celery_budget.render.lanes import WHY
from celery_budget.render.sources import replica_told
from celery_budget.render.stories import facts_of
from celery_budget.render.tables import ISOLATED, MEANING, OVERDUE_SECONDS
from celery_budget.render.text import printable
from celery_budget.render.timeline import events_of
from celery_budget.store import ReadFrom

__all__ = ["FILES", "Pages"]


@dataclass(frozen=True)
class File:
    """A file that pages need."""

    content: str
    kind: str

    @property
    def version(self) -> str:
        """Another one for other content: what browsers keep for a year is asked for by it."""
        return hashlib.sha256(self.content.encode()).hexdigest()[:12]


def _file(name: str, kind: str) -> File:
    return File(files(__package__).joinpath("static").joinpath(name).read_text("utf-8"), kind)


#: All that is served as it is.
FILES = {
    "dashboard.css": _file("dashboard.css", "text/css"),
    "dashboard.js": _file("dashboard.js", "text/javascript"),
    "icon.svg": _file("icon.svg", "image/svg+xml"),
    "plots.css": File(plots.PLOT_CSS, "text/css"),
}

#: What a page says above the reason why there is nothing else on it.
_TITLES = {
    401: "A token is needed",
    403: "Not by this name",
    404: "Not found",
    405: "Only to look at",
    503: "The ledger does not answer",
}

#: Open work that is no request, in words.
_OPEN = {
    "cancelling": "asked to be cancelled while they run",
    "unclosed": "attempts not closed",
    "due": "messages to publish",
    "held": "messages held by lanes",
    "untold": "results not stored",
}


def _told(source: ReadFrom | None) -> str:
    """Return from which replica a page was read; nothing where it is the ledger itself."""
    return replica_told(source) if source is not None and source.replica else ""


class Pages:
    """Makes pages.

    :param project: stands behind ``celery -A`` in commands.
    """

    def __init__(self, project: str) -> None:
        self._environment = Environment(
            loader=PackageLoader("celery_budget.dashboard"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._called = f"-A {shlex.quote(project)} "
        self._environment.filters |= {**words.FILTERS, "said": self.said}
        self._environment.globals |= {
            "command": words.command(project),
            "versions": {name: file.version for name, file in FILES.items()},
            "meaning": {**MEANING, **_OPEN},
            "isolated": ISOLATED,
            "held_back": WHY,
        }

    def said(self, text: str) -> str:
        """Return what is said on one line, with the commands it names as they are called here."""
        return printable(text).replace("-A PROJ ", self._called)

    def overview(self, request: Request, seen: Seen[looks.OverviewLook]) -> HTMLResponse:
        """The first page."""
        look = seen.value
        query = {"q": look.filters.containing, "state": look.filters.state}
        query["sort"] = "" if look.filters.sort == "name" else look.filters.sort
        return self._page(
            request,
            "overview.html",
            seen,
            look=look,
            overview=look.overview,
            now_us=look.overview.at_us,
            query={name: value for name, value in query.items() if value},
            states=looks.STATES,
            sorts=looks.SORTS,
            overdue=look.overview.overdue_seconds > OVERDUE_SECONDS,
            read_from=_told(look.overview.read_from),
        )

    def budget(
        self, request: Request, seen: Seen[looks.BudgetLook | looks.TemplateLook]
    ) -> HTMLResponse:
        """One budget, or a template."""
        look = seen.value
        told = standing_facts(look.standing)
        if isinstance(look, looks.TemplateLook):
            return self._page(request, "template.html", seen, standing=look.standing, told=told)
        standing, balance = look.standing, look.standing.balance
        if balance.end_us is not None:
            begin, end = words.clock(balance.start_us), words.clock(balance.end_us)
            told["window"] = f"{begin} to {end} UTC"
        if standing.room_of in (None, balance.budget):
            told.pop("new work")  # as the tile says
        return self._page(
            request,
            "budget.html",
            seen,
            look=look,
            story=look.story,
            standing=standing,
            told=told,
            now_us=look.story.now_us,
        )

    def request(self, request: Request, seen: Seen[looks.Life]) -> HTMLResponse:
        """The life of the requests with one id."""
        lives = [(story, facts_of(story), events_of(story)) for story in seen.value.stories]
        return self._page(request, "request.html", seen, some_id=seen.value.some_id, lives=lives)

    def plots(self, request: Request, seen: Seen[looks.PlotsLook]) -> HTMLResponse:
        """The plots."""
        days = request.query_params.get("days", "")
        return self._page(
            request,
            "plots.html",
            seen,
            look=seen.value,
            read_from=_told(seen.value.report.read_from),
            days=days if days in looks.PERIODS else next(iter(looks.PERIODS)),
            periods=looks.PERIODS,
        )

    def error(self, request: Request, status: int, why: str) -> HTMLResponse:
        """A page that says why it shows nothing."""
        title = _TITLES.get(status, "Something went wrong")
        return self._made(request, "error.html", status, title=title, why=why)

    def _page(self, request: Request, name: str, seen: Seen[Any], **more: Any) -> HTMLResponse:
        more.setdefault("now_us", int(seen.at * 1_000_000))
        return self._made(request, name, 200, at_us=int(seen.at * 1_000_000), **more)

    def _made(self, request: Request, name: str, status: int, **more: Any) -> HTMLResponse:
        base = request.scope.get("root_path", "").rstrip("/")
        template = self._environment.get_template(name)
        known = {"base": base, "status": status, "here": "", "some_id": "", "read_from": "", **more}
        return HTMLResponse(template.render(known), status)
