"""``/metrics`` over HTTP."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from celery_budget.metrics import server
from tests.services.base import free_port


@pytest.fixture
def start(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., threading.Event]]:
    """Serve what is given on a port until the test is over."""
    caplog.set_level("INFO", server.__name__)
    running: list[tuple[threading.Event, threading.Thread]] = []

    def serve(port: int, body: bytes = b"up 1\n", host: str = "127.0.0.1") -> threading.Event:
        stop = threading.Event()

        def answer(accept: str) -> tuple[bytes, str]:
            return body + accept.encode(), "text/plain"

        thread = threading.Thread(target=server.serve, args=(host, port, answer, stop))
        running.append((stop, thread))
        thread.start()
        return stop

    yield serve
    for stop, thread in running:
        stop.set()
        thread.join(10)
        assert not thread.is_alive()


def logged(caplog: pytest.LogCaptureFixture, text: str, times: int = 1) -> None:
    """Wait until the server has said something."""
    for _ in range(3000):
        if sum(text in record.getMessage() for record in caplog.records) >= times:
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{text!r} was not logged: {caplog.text}")


def ask(port: int, method: str = "GET", path: str = "/metrics") -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, headers={"Accept": "text/x"})
    response = connection.getresponse()
    try:
        return response.status, response.headers["Content-Type"], response.read()
    finally:
        connection.close()


def test_it_answers_a_scrape_and_nothing_else(
    start: Callable[..., threading.Event], caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    start(port)
    logged(caplog, f"metrics are served on http://127.0.0.1:{port}/metrics")
    assert ask(port) == (200, "text/plain", b"up 1\ntext/x")
    assert ask(port, path="/metrics?name=x")[0] == 200
    assert ask(port, "HEAD") == (200, "text/plain", b"")
    assert [ask(port, path=path)[0] for path in ("/", "/metrics/x", "//")] == [404, 404, 404]
    assert ask(port, "POST")[0] == 501


def test_an_address_that_is_none_is_said_and_ends_nothing(
    start: Callable[..., threading.Event], caplog: pytest.LogCaptureFixture
) -> None:
    start(free_port(), host=".local")
    logged(caplog, "metrics cannot be served on http://.local:")


FORKS = """
import os, socket, sys, threading
from celery_budget.metrics import server

port, stop = int(sys.argv[1]), threading.Event()
thread = threading.Thread(target=server.serve, args=("127.0.0.1", port, None, stop))
thread.start()
while not server._listening:
    pass
reading, writing = os.pipe()
if not os.fork():
    os.close(writing)
    os.read(reading, 1)
    os._exit(0)
os.close(reading)
stop.set()
thread.join()
socket.create_server(("127.0.0.1", port)).close()
os.close(writing)
os.wait()
"""


def test_a_child_does_not_keep_the_port() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(free_port())],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_client_that_says_nothing_holds_up_nobody(
    start: Callable[..., threading.Event], caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    start(port)
    logged(caplog, "metrics are served")
    with socket.create_connection(("127.0.0.1", port)):
        assert ask(port)[0] == 200


def test_a_port_that_is_taken_is_waited_for(
    start: Callable[..., threading.Event],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "AGAIN_SECONDS", 0.01)
    port = free_port()
    first = start(port, b"first ")
    logged(caplog, "metrics are served")
    start(port, b"second ")
    logged(caplog, f"metrics cannot be served on http://127.0.0.1:{port}/metrics")
    assert ask(port)[2].startswith(b"first ")
    first.set()
    logged(caplog, "metrics are served", 2)
    assert ask(port)[2].startswith(b"second ")
    assert caplog.text.count("cannot be served") == 1


def test_it_stops_while_its_port_is_taken(
    start: Callable[..., threading.Event], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        start(taken.getsockname()[1])
        logged(caplog, "cannot be served")
