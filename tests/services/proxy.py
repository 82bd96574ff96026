"""A TCP proxy before a server of the tests, which can lead elsewhere and lose answers."""

from __future__ import annotations

import selectors
import socket
import threading
from contextlib import suppress

from typing_extensions import Self

from tests.services.base import LOOPBACK


class Proxy:
    """Forwards connections to `target`, a port; those that are open stay with theirs.

    `swallow` has an answer with certain bytes in it lost, on whichever connection it comes.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self._server = socket.create_server((LOOPBACK, 0), backlog=64)
        self._lost: tuple[bytes, threading.Event] | None = None
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        port: int = self._server.getsockname()[1]
        return port

    def swallow(self, answer: bytes) -> threading.Event:
        """Lose the next answer with these bytes, and all that follows it; set when it was."""
        lost = threading.Event()
        self._lost = (answer, lost)
        return lost

    def cut(self) -> None:
        """End all connections."""
        with self._lock:
            ending = list(self._open)
        for one in ending:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            with socket.create_connection((LOOPBACK, self.target)) as server:
                with self._lock:
                    self._open |= {client, server}
                try:
                    self._exchange(client, server)
                finally:
                    with self._lock:
                        self._open -= {client, server}

    def _exchange(self, client: socket.socket, server: socket.socket) -> None:
        silent = False
        with selectors.DefaultSelector() as ready:
            ready.register(client, selectors.EVENT_READ)
            ready.register(server, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    data = key.fileobj.recv(65536)  # type: ignore[union-attr]
                    if not data:
                        return
                    if key.fileobj is client:
                        server.sendall(data)
                        continue
                    if self._lost is not None and self._lost[0] in data:
                        lost, self._lost, silent = self._lost[1], None, True
                        lost.set()
                    if not silent:
                        client.sendall(data)
