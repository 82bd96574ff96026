"""A bar for what takes longer than a moment."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

__all__ = ["Progress"]

#: How long something may take before a bar is shown.
QUIET_SECONDS = 1.0


class Progress:
    """Shows how far something is, on the standard error stream, where that is a terminal.

    :param doing: what is done.
    :param what: what it is done to.
    """

    def __init__(self, doing: str, what: str) -> None:
        self._began = time.monotonic()
        self._text = doing
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(what),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown:
            self._bar.stop()

    def told(self, done: int, total: int) -> None:
        """Take note that ``done`` of ``total`` are done."""
        if not self._shown:
            if time.monotonic() - self._began < QUIET_SECONDS or not sys.stderr.isatty():
                return
            self._shown = True
            self._task = self._bar.add_task(self._text)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total)
