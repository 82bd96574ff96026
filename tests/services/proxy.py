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

    `lose` has what passes lost from certain bytes on, on whichever connection they come.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self._server = socket.create_server((LOOPBACK, 0), backlog=64)
        self._losing: tuple[str, bytes, threading.Event] | None = None
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        port: int = self._server.getsockname()[1]
        return port

    def lose(self, what: str, having: bytes) -> threading.Event:
        """Lose the next "request" or "answer" with these bytes, and all that would follow it.

        Set when it was lost.
        """
        lost = threading.Event()
        self._losing = (what, having, lost)
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
        with suppress(OSError), client, socket.create_connection((LOOPBACK, self.target)) as server:
            with self._lock:
                self._open |= {client, server}
            try:
                self._exchange(client, server)
            finally:
                with self._lock:
                    self._open -= {client, server}

    def _exchange(self, client: socket.socket, server: socket.socket) -> None:
        silent = ""
        with selectors.DefaultSelector() as ready:
            ready.register(client, selectors.EVENT_READ, ("request", server))
            ready.register(server, selectors.EVENT_READ, ("answer", client))
            while True:
                for key, _ in ready.select():
                    what, other = key.data
                    data = key.fileobj.recv(65536)  # type: ignore[union-attr]
                    if not data:
                        return
                    losing = self._losing
                    if losing is not None and losing[0] == what and losing[1] in data:
                        self._losing, silent = None, what
                        losing[2].set()
                    if what != silent:
                        other.sendall(data)
