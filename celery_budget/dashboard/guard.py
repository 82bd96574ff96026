"""What every request passes first: who asks, by which name, and what for.

Pure ASGI around everything else, so that no answer goes out without its headers, not even that to
a fault.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Collection
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from celery_budget.dashboard.tokens import SESSION_SECONDS, Token

__all__ = ["COOKIE", "HEADERS", "Guard", "path_of"]

COOKIE = "celery_budget_dashboard"
#: In a query: shows the token once.
TOKEN = "token"  # noqa: S105 - a parameter's name
#: What anybody may have: it is in the package, and the page that asks for the token looks by it.
OPEN = "/static/"
METHODS = ("GET", "HEAD")

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}

Authenticate = Callable[[Request], bool | Awaitable[bool]]
#: Makes the answer to who is turned away: to which request, its status, and why.
TurnAway = Callable[[Request, int, str], Response]


class Guard:
    """Lets through what is allowed to look.

    :param token: what opens; none where nothing of the kind does.
    :param authenticate: asked of what comes without it.
    :param hosts: the names that may be asked for, in lower case; none for any.
    """

    def __init__(
        self,
        app: ASGIApp,
        turn_away: TurnAway,
        token: Token | None,
        authenticate: Authenticate | None,
        hosts: Collection[str] | None,
    ) -> None:
        self._app = app
        self._turn_away = turn_away
        self._token = token
        self._authenticate = authenticate
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or turn it away."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        request = Request(scope, receive)
        answer = await self._turned_away(request)
        await (self._app if answer is None else answer)(scope, receive, send_on)

    async def _turned_away(self, request: Request) -> Response | None:
        """Return the answer to who is not let in; none to who is."""
        if request.method not in METHODS:
            answer = self._turn_away(request, 405, "a dashboard shows, and changes nothing")
            answer.headers["Allow"] = ", ".join(METHODS)
            return answer
        if self._hosts is not None and _host_of(request) not in self._hosts:
            told = "this dashboard is open to this machine alone, and is not known by that name"
            return self._turn_away(request, 403, told)
        if path_of(request.scope).startswith(OPEN):
            return None
        if self._token is not None:
            given = request.query_params.get(TOKEN)
            if given is not None and self._token.opens(given):
                return self._opened(request, self._token)
        if await self._lets_in(request):
            return None
        answer = self._turn_away(request, 401, "this dashboard opens to its token")
        answer.headers["WWW-Authenticate"] = 'Bearer realm="budget dashboard"'
        if request.headers.get("sec-fetch-site") == "cross-site":
            # A link on another site leads here: a browser keeps its session to itself until a page
            # of ours asks.
            answer.headers["Refresh"] = "0"
        return answer

    async def _lets_in(self, request: Request) -> bool:
        if self._token is not None:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() == "bearer" and self._token.opens(given.strip()):
                return True
            session = request.cookies.get(COOKIE)
            if session is not None and self._token.holds(session, time.time()):
                return True
        if self._authenticate is None:
            return False
        answer = self._authenticate(request)
        return bool(await answer if inspect.isawaitable(answer) else answer)

    def _opened(self, request: Request, token: Token) -> Response:
        """Open a session, and lead to the same address without the token."""
        pairs = parse_qsl(request.url.query, keep_blank_values=True)
        rest = urlencode([pair for pair in pairs if pair[0] != TOKEN])
        # One slash: a browser takes what begins with two for another host.
        path = "/" + quote(request.scope["path"].lstrip("/"))
        answer = RedirectResponse(f"{path}?{rest}" if rest else path, 303)
        answer.set_cookie(
            COOKIE,
            token.session(time.time()),
            max_age=SESSION_SECONDS,
            path=request.scope.get("root_path") or "/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return answer


def path_of(scope: Scope) -> str:
    """Return the path below where the application is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root) else path


def _host_of(request: Request) -> str:
    """Return the name that was asked for, without its port; empty where it cannot be told."""
    host = request.headers.get("host", "").lower()
    name, colon, port = host.rpartition(":")
    if colon and port.isdigit():
        return name
    return host
