"""The command that serves the dashboard."""

from __future__ import annotations

import errno
import ipaddress
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from celery.bin.base import CeleryOption

from celery_budget.cli.group import ReadingCommand, budget, installed_of
from celery_budget.cli.streams import note
from celery_budget.dashboard import create_app, server
from celery_budget.errors import ConfigurationError
from celery_budget.render.text import printable

__all__ = ["dashboard"]

TOKEN = "CELERY_BUDGET_DASHBOARD_TOKEN"  # noqa: S105 - a variable's name
#: Under which names this machine knows itself.
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
#: How long a signal that another thread got may go unseen.
SIGNAL_SECONDS = 0.1


@budget.command(cls=ReadingCommand)
@click.option(
    "--port",
    cls=CeleryOption,
    type=click.IntRange(0, 65535),
    default=8765,
    show_default=True,
    help="The port to listen on; 0 for any that is free, which is printed.",
)
@click.option(
    "--host",
    cls=CeleryOption,
    default="127.0.0.1",
    show_default=True,
    help="The address to listen on; any other than this machine's own needs a token.",
)
@click.option(
    "--token",
    cls=CeleryOption,
    help=f"What opens it; better given by {TOKEN}, which no list of processes shows.",
)
@click.option(
    "--root-path",
    cls=CeleryOption,
    default="",
    help="Under which path a proxy before it is reached, where that takes the path off.",
)
@click.pass_context
def dashboard(ctx: click.Context, port: int, host: str, token: str | None, root_path: str) -> None:
    """Show the ledger in a browser, until stopped.

    Budgets, lanes, what waits and why, plots, and the life of each request. It changes nothing. It
    is open to this machine alone; on any other address it needs a token, best given by the
    variable CELERY_BUDGET_DASHBOARD_TOKEN. SIGTERM and SIGINT (Ctrl-C) stop it.

    \b
    Examples:
      celery -A proj budget dashboard --port 8765
      celery -A proj budget dashboard --host 0.0.0.0    # with a token
    """
    installed = installed_of(ctx)
    # An empty one is none, but where it was named: a variable that was to have it is not set.
    given = token
    if given is None:
        given = os.environ.get(TOKEN) or installed.settings.dashboard_token or None
    root_path = "/".join(["", *filter(None, root_path.split("/"))])
    with _listening(host, port) as listener:
        shown, is_own = _address(listener, host)
        if given is None and not is_own:
            raise ConfigurationError(
                f"a dashboard on {printable(host)} can be reached from elsewhere and needs a "
                f"token: set {TOKEN}, budget_dashboard_token, or --token; or leave --host out, "
                "and it is open to this machine alone"
            )
        project = ctx.find_root().params.get("app")
        app = create_app(
            installed,
            given,
            authenticate=_everybody if given is None else None,
            # A page of somebody else's could give this machine's address a name of its own.
            hosts=(*LOOPBACK, host) if given is None else None,
            project=project if isinstance(project, str) else "PROJ",
        )
        serving = server(app, root_path)
        click.echo(f"The dashboard is at {shown}{root_path}/ (Ctrl-C stops it)")
        if given is not None:
            click.echo("It asks for its token once; programs send 'Authorization: Bearer TOKEN'.")
        _serve(serving, listener)


def _everybody(request: Any) -> bool:
    """Let in whoever reaches it: nobody but this machine does."""
    return True


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Listen; nothing is accepted yet.

    :raises ConfigurationError: where that cannot be done, and why.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listener = socket.create_server(address[:2], family=family, backlog=128)
    # A name that no name can be is a UnicodeError.
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(_why(error, host, port)) from error
    with listener:
        yield listener


def _why(error: OSError | UnicodeError, host: str, port: int) -> str:
    if isinstance(error, UnicodeError):
        return f"{printable(host)!r} is no address, and no name of one; give another --host"
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {printable(host)} is in use, by another dashboard or something else; "
            "give another --port, or 0 for any that is free"
        )
    return (
        f"the dashboard cannot listen on port {port} of {printable(host)}: "
        f"{error.strerror or error}; give another --host or --port"
    )


def _address(listener: socket.socket, host: str) -> tuple[str, bool]:
    """Return where a socket is reached, and whether by this machine alone."""
    address, port = listener.getsockname()[:2]
    bound = ipaddress.ip_address(address.partition("%")[0])
    if bound.is_unspecified:
        name = "localhost"
    elif host == "localhost":
        name = host
    else:
        name = f"[{address}]" if bound.version == 6 else address
    return f"http://{name}:{port}", bound.is_loopback


def _serve(serving: Any, listener: socket.socket) -> None:
    """Serve until a signal says to stop.

    In a thread: the server leaves signals alone there, and they end this process in good order.
    """
    thread = threading.Thread(target=serving.run, args=([listener],), name="budget-dashboard")
    names: list[str] = []

    def stop(number: int, frame: Any) -> None:
        names.append(signal.Signals(number).name)
        serving.should_exit = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        thread.start()
        while thread.is_alive():
            # In short steps: a signal that another thread got is seen only when this one wakes.
            thread.join(SIGNAL_SECONDS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for name in names[:1]:
        note(f"{name}: the dashboard is stopped")
