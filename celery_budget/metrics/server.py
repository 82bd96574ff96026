"""``/metrics`` over HTTP, for processes that serve nothing else: the relay's."""

from __future__ import annotations

import os
import socket
import socketserver
import threading
import weakref
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from celery_budget.events import Logger

__all__ = ["PATH", "serve"]

logger = Logger(__name__)

PATH = "/metrics"
#: How long a client may take for its request, or to take the answer.
CLIENT_SECONDS = 10.0
#: How soon it is seen that the server is to stop.
STOP_SECONDS = 0.1
#: How often an address that is taken is tried again.
AGAIN_SECONDS = 5.0

Answer = Callable[[str], tuple[bytes, str]]


def serve(host: str, port: int, answer: Answer, stop: threading.Event) -> None:
    """Serve ``/metrics`` until ``stop`` is set.

    An address that cannot be had is logged once and tried again: of several relays on one host
    with the same configuration one serves, and another one follows it.

    :param answer: gives the body and its type for a scrape's ``Accept``.
    """
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{port}{PATH}"
    told = False
    while not stop.is_set():
        try:
            server = _server(host, port, answer)
        # A name that no name can be is a UnicodeError.
        except (OSError, UnicodeError) as error:
            if not told:
                logger.event("metrics.unserved", address=address, error=error)
            told = True
            stop.wait(AGAIN_SECONDS)
            continue
        with server:
            logger.event("metrics.served", address=address)
            while not stop.is_set():
                server.handle_request()


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16
    timeout = STOP_SECONDS

    def __init__(self, family: socket.AddressFamily, *args: Any) -> None:
        self.address_family = family
        super().__init__(*args)
        _listening.add(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no fault of ours."""
        logger.event("metrics.unanswered", exc_info=True)


#: The servers of this process. A child that is forked of it, such as a worker's, has their sockets
#: as well: while it lived, the port would be taken and nobody would answer there.
_listening: weakref.WeakSet[_Server] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for server in list(_listening):
        server.socket.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def _server(host: str, port: int, answer: Answer) -> _Server:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    handler = type("_Handler", (_Scrape,), {"answer": staticmethod(answer)})
    return _Server(family, (host, port), handler)


class _Scrape(BaseHTTPRequestHandler):
    timeout = CLIENT_SECONDS
    server_version = "celery_budget"
    sys_version = ""
    answer: Answer

    def do_GET(self) -> None:
        """Answer a scrape; anything else is not found."""
        if urlsplit(self.path).path != PATH:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        body, content_type = self.answer(self.headers.get("Accept", ""))
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - as http.server calls it

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as its base has it
        """Nothing: scrapes come every few seconds."""
