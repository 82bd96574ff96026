"""A bar for what takes longer than a moment."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from celery_budget.cli.streams import lively

__all__ = ["Progress", "Waiting"]

#: How long something may take before a bar is shown.
QUIET_SECONDS = 1.0


class Progress:
    """Shows how far something is, on the standard error stream, where that is a terminal.

    :param doing: what is done.
    :param what: what it is done to.
    """

    def __init__(self, doing: str, what: str) -> None:
        self._doing = doing
        self._what = what
        self._began = time.monotonic()
        self._bar: Bar | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def told(self, done: int, total: int) -> None:
        """Take note that ``done`` of ``total`` are done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
        elif lively() and time.monotonic() - self._began >= QUIET_SECONDS:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn(self._what),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(self._doing, completed=done, total=total)
            self._bar.start()


class Waiting:
    """Shows that something goes on, once it takes longer than a moment and nobody can say how far.

    On the standard error stream, where that is a terminal.

    :param doing: what is done.
    """

    def __init__(self, doing: str) -> None:
        self._status = Console(stderr=True).status(doing)
        self._timer = threading.Timer(QUIET_SECONDS, self._status.start)
        self._timer.daemon = True

    def __enter__(self) -> Waiting:
        if lively():
            self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if self._timer.is_alive():
            self._timer.join()
        self._status.stop()
