"""A small web application that shows a ledger, and changes nothing.

``budget dashboard`` serves it; :func:`create_app` makes it for an application that mounts it. It
answers GET and HEAD alone, to who has its token or whom the application lets in. What it shows is
read at most once a second however many look at it, in threads of its own; while the ledger's
database does not answer, pages say so and go on by themselves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Any

from celery_budget.errors import ConfigurationError, MissingExtra

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request
    from starlette.types import ASGIApp

    from celery_budget.integration.views import Views

__all__ = ["create_app", "server"]

#: Packages of the extra.
_EXTRA = ("starlette", "anyio", "uvicorn")


def create_app(
    budget: Views,
    token: str | None = None,
    *,
    authenticate: Callable[[Request], bool | Awaitable[bool]] | None = None,
    hosts: Collection[str] | None = None,
    project: str = "PROJ",
) -> ASGIApp:
    """Return the dashboard of a ledger as an ASGI application, to be mounted anywhere.

    :param budget: the application's :class:`~celery_budget.CeleryBudget`.
    :param token: who has it is let in.
    :param authenticate: asked with each request of anybody else, whether to let it in; it may be a
        coroutine function. One of the two has to be given.
    :param hosts: under which names it may be reached; any others are turned away. None for any.
    :param project: stands behind ``celery -A`` in the commands that are shown.
    :raises ConfigurationError: where neither ``token`` nor ``authenticate`` is given, and for a
        token that cannot be one.
    :raises MissingExtra: without the extra ``dashboard``.
    """
    if token is None and authenticate is None:
        raise ConfigurationError(
            "a dashboard is not started without a way to tell who may look; give token='…', or "
            "authenticate= with a function that tells whether a request is let in"
        )
    try:
        from celery_budget.dashboard.app import build
    except ModuleNotFoundError as exc:
        raise _missing(exc) from exc
    return build(budget, token, authenticate, hosts, project)


def server(app: Any, root_path: str = "") -> uvicorn.Server:
    """Return a server of the dashboard, which is to be run with a socket that listens.

    It says nothing by itself but errors, and logs no addresses: one of them may have the token.

    :raises MissingExtra: without the extra ``dashboard``.
    """
    try:
        import uvicorn
    except ModuleNotFoundError as exc:
        raise _missing(exc) from exc
    return uvicorn.Server(
        uvicorn.Config(
            app,
            root_path=root_path,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
    )


def _missing(error: ModuleNotFoundError) -> Exception:
    """Return the error to raise: the extra's, unless something else is missing."""
    missing = (error.name or "").partition(".")[0]
    return MissingExtra("the dashboard", "dashboard") if missing in _EXTRA else error
