"""The routes of the dashboard, and its answers: pages for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Hashable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from celery_budget.dashboard import looks
from celery_budget.dashboard.guard import Authenticate, Guard, path_of
from celery_budget.dashboard.pages import FILES, Pages
from celery_budget.dashboard.reads import Reads, Seen
from celery_budget.dashboard.tokens import Token
from celery_budget.errors import (
    BudgetError,
    MissingExtra,
    SchemaError,
    StoreError,
    UnknownBudget,
    UnknownRequest,
)
from celery_budget.events import Logger
from celery_budget.integration.views import Views
from celery_budget.metrics import exposition

__all__ = ["build"]

logger = Logger(__name__)

API = "/api/"
#: When to ask again while the ledger does not answer, in seconds.
AGAIN_SECONDS = 5

Endpoint = Callable[[Request], Awaitable[Response]]
#: Says what is to be read for a request: by which key it is remembered, and how it is read.
Ask = Callable[[Request], tuple[Hashable, Callable[[], Any]]]
#: Makes a page of what was read.
Show = Callable[[Request, Seen[Any]], Response]


def build(
    views: Views,
    token: str | None,
    authenticate: Authenticate | None,
    hosts: Collection[str] | None,
    project: str,
) -> ASGIApp:
    """Return the whole application; see :func:`celery_budget.dashboard.create_app`."""
    pages = Pages(project)
    routes = _Routes(views, pages)
    application = Starlette(
        routes=routes.all(),
        exception_handlers={
            HTTPException: routes.http_error,
            BudgetError: routes.budget_error,
            Exception: routes.fault,
        },
    )
    opens = None if token is None else Token(token)
    return Guard(application, routes.turned_away, opens, authenticate, hosts)


class _Routes:
    """What answers to which address."""

    def __init__(self, views: Views, pages: Pages) -> None:
        self._views = views
        self._pages = pages
        self._reads = Reads()

    def all(self) -> list[Route]:
        """Return the routes: each look as a page and, below ``/api``, as JSON."""
        pages = self._pages
        looked: list[tuple[str, str, Ask, Show]] = [
            ("/", "overview", self._overview, pages.overview),
            ("/budget", "budget", self._budget, pages.budget),
            ("/request", "request", self._request, pages.request),
            ("/plots", "report", self._report, pages.plots),
        ]
        found = [
            Route("/static/{name}", self._static, name="static"),
            Route("/metrics", self._metrics, name="metrics"),
        ]
        for path, name, ask, show in looked:
            found.append(Route(path, self._page(ask, show), name=name))
            found.append(Route(API + name, self._document(ask), name=f"api-{name}"))
        return found

    # What is read.

    def _overview(self, request: Request) -> tuple[Hashable, Callable[[], Any]]:
        filters = looks.Filters.of(request.query_params)
        return ("overview", filters), lambda: looks.overview(self._views, filters)

    def _budget(self, request: Request) -> tuple[Hashable, Callable[[], Any]]:
        name = request.query_params.get("name", "")
        return ("budget", name), lambda: looks.budget(self._views, name)

    def _request(self, request: Request) -> tuple[Hashable, Callable[[], Any]]:
        some_id = request.query_params.get("id", "").strip()
        return ("request", some_id), lambda: looks.life(self._views, some_id)

    def _report(self, request: Request) -> tuple[Hashable, Callable[[], Any]]:
        days = request.query_params.get("days", "")
        days = days if days in looks.PERIODS else next(iter(looks.PERIODS))
        return ("report", days), lambda: looks.report(self._views, days)

    # How it is answered.

    def _page(self, ask: Ask, show: Show) -> Endpoint:
        async def page(request: Request) -> Response:
            return show(request, await self._reads.get(*ask(request)))

        return page

    def _document(self, ask: Ask) -> Endpoint:
        async def document(request: Request) -> Response:
            seen = await self._reads.get(*ask(request))
            return JSONResponse({"updated_at": seen.at, **seen.value.as_dict()})

        return document

    async def _metrics(self, request: Request) -> Response:
        accept = request.headers.get("accept", "")[:255]
        key = ("metrics", accept)
        seen = await self._reads.get(key, lambda: exposition(self._views, accept))
        body, kind = seen.value
        return Response(body, headers={"Content-Type": kind})

    async def _static(self, request: Request) -> Response:
        file = FILES.get(request.path_params["name"])
        if file is None:
            raise HTTPException(404)
        headers = {"Cache-Control": "max-age=31536000, immutable"}
        return Response(file.content, media_type=file.kind, headers=headers)

    # What is answered where there is nothing to show.

    async def http_error(self, request: Request, error: Exception) -> Response:
        """Answer to an address that is none."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        return self.turned_away(request, status, "there is no such page")

    async def budget_error(self, request: Request, error: Exception) -> Response:
        """Answer to a budget or a request that is not there, and to a ledger that does not answer.

        What the database has said is for who runs it: it is in the log.
        """
        if isinstance(error, (UnknownBudget, UnknownRequest, MissingExtra)):
            return self.turned_away(request, 404, str(error))
        if isinstance(error, SchemaError):
            answer = self.turned_away(request, 503, str(error))
        elif isinstance(error, StoreError):
            logger.event("store.unreachable", error=error, consequence="the page says so")
            answer = self.turned_away(request, 503, "the ledger's database does not answer")
        else:
            return await self.fault(request, error)
        answer.headers["Retry-After"] = str(AGAIN_SECONDS)
        return answer

    async def fault(self, request: Request, error: Exception) -> Response:
        """Answer to a fault of ours; its traceback is in the log of who serves it."""
        if isinstance(error, BudgetError):
            logger.event("page.failed", path=path_of(request.scope), exc_info=error)
        told = "something went wrong here; the log of the dashboard says what"
        return self.turned_away(request, 500, told)

    def turned_away(self, request: Request, status: int, why: str) -> Response:
        """Answer with an error: as JSON below ``/api``, as a page elsewhere."""
        why = self._pages.said(why)
        if path_of(request.scope).startswith(API):
            return JSONResponse({"error": why, "status": status}, status)
        return self._pages.error(request, status, why)
