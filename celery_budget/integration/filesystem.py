"""Kombu's filesystem transport, with files that are whole once a reader can find them.

Kombu creates a message's file under its last name and writes it afterwards. A worker that looks in
between reads an empty message and ends: nothing says that it is not there yet. The same goes for
the file that says which queues are bound to an exchange.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

from kombu import Connection
from kombu.exceptions import ChannelError
from kombu.transport import filesystem
from kombu.utils.json import dumps

__all__ = ["write_whole_files"]


def write_whole_files(connection: Connection) -> None:
    """Have a connection that is not open yet write whole files, where kombu's own would not.

    A transport with channels of its own is left alone, as are all others.
    """
    transport = connection.transport
    if isinstance(transport, filesystem.Transport) and transport.Channel is filesystem.Channel:
        transport.Channel = _Channel


class _Channel(filesystem.Channel):
    """Gives each file its name once it is written; kombu's readers look at no other."""

    def _put(self, queue: str, payload: Any, **kwargs: Any) -> None:
        folder = Path(self.data_folder_out)
        # Kombu's own names: the queue is found by the end, the order is that of the names.
        name = f"{round(monotonic() * 1000)}_{uuid4()}.{queue}.msg"
        try:
            _written(folder, dumps(payload)).replace(folder / name)
        except OSError as exc:
            raise ChannelError(f"{name} cannot be added to {folder}: {exc}") from exc

    def _queue_bind(self, exchange: str, *args: Any) -> None:
        file = self._exchange_file(exchange)
        if not file.exists():
            self.control_folder.mkdir(exist_ok=True)
            empty = _written(self.control_folder, "[]")
            try:
                # Unlike a new name this one is taken by nobody else: what they bound stays. Where a
                # file has one name only, kombu makes its own.
                with suppress(OSError):
                    os.link(empty, file)
            finally:
                empty.unlink()
        super()._queue_bind(exchange, *args)


def _written(folder: Path, text: str) -> Path:
    """Return a new file with a name that nobody looks for."""
    file = folder / f".{uuid4()}"
    try:
        file.write_text(text)
    except OSError:
        file.unlink(missing_ok=True)
        raise
    return file
