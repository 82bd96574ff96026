"""Faults, as they strike inside of a process: it dies, or stands still until a server is back.

Whoever passes a place counts, in whichever process of its role; each fault strikes once, and after
the one before it.
"""

from __future__ import annotations

import fcntl
import functools
import os
import signal
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from celery_budget.store import Store
from tests.crash.points import Fault

__all__ = ["Trap", "passed", "released", "struck"]

#: Seconds that a process stands still at most: far more than a server takes to come back.
STILL = 240


def passed(folder: Path, number: int) -> Path:
    """Return the file that has a byte for each time that a fault's place was passed."""
    return folder / f"passed-{number}"


def struck(folder: Path, number: int) -> Path:
    """Return the file that is there when a fault has struck."""
    return folder / f"struck-{number}"


def released(folder: Path, number: int) -> Path:
    """Return the file that lets the process go on that stands still."""
    return folder / f"released-{number}"


class Trap:
    """The faults that wait for a process of one role.

    :param folder: where processes tell each other, and the harness, what was passed.
    """

    def __init__(self, role: str, folder: Path, faults: Iterable[Fault]) -> None:
        self._folder = folder
        self._mine = [(number, fault) for number, fault in enumerate(faults) if fault.role == role]

    def arm(self) -> None:
        """Have the places passed that are methods, and the store's transactions."""
        for place in sorted({fault.place for _, fault in self._mine if ":" in fault.place}):
            self._wrap_method(place)
        for name in ("run", "run_statement", "read"):
            self._wrap_transactions(name, 0)
        for name in ("wait_out", "wait_out_statement", "wait_out_reading"):
            self._wrap_transactions(name, 1)

    def passing(self, place: str, when: str, value: object = True) -> None:
        """Say that this process is at a place, with what came of it; it may not survive that."""
        for number, fault in self._mine:
            if (fault.place, fault.when) != (place, when) or (fault.done and not value):
                continue
            if fault.then and not struck(self._folder, number - 1).exists():
                continue
            if self._count(number) == fault.nth:
                self._strike(number, fault)

    def _count(self, number: int) -> int:
        with passed(self._folder, number).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(b".")
            file.flush()
            return file.tell()

    def _strike(self, number: int, fault: Fault) -> None:
        struck(self._folder, number).write_text(str(os.getpid()))
        if fault.victim == "process":
            _die(os.getpid())
        elif fault.victim == "main":
            # The leader of its group; a child goes on, for as long as it can.
            os.kill(os.getpgrp(), signal.SIGKILL)
        elif fault.victim == "machine":
            os.killpg(os.getpgrp(), signal.SIGKILL)
        else:
            self._stand_still(released(self._folder, number))

    def _stand_still(self, until: Path) -> None:
        end = time.monotonic() + STILL
        while not until.exists():
            if time.monotonic() > end:
                raise TimeoutError(until)
            time.sleep(0.01)

    def _wrap_method(self, place: str) -> None:
        module, _, path = place.partition(":")
        class_name, _, name = path.partition(".")
        owner = getattr(import_module(module), class_name)
        function = getattr(owner, name)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.passing(place, "before")
            result = function(*args, **kwargs)
            self.passing(place, "after")
            return result

        setattr(owner, name, call)

    def _wrap_transactions(self, name: str, at: int) -> None:
        """Wrap a method of all stores whose argument ``at`` is what runs in the transaction."""
        method = getattr(Store, name)

        @functools.wraps(method)
        def call(store: Store, *args: Any, **kwargs: Any) -> Any:
            function = args[at]
            place = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
            self.passing(place, "before")
            within = self._within(function, place)
            result = method(store, *args[:at], within, *args[at + 1 :], **kwargs)
            self.passing(place, "after", result)
            return result

        setattr(Store, name, call)

    def _within(self, function: Callable[..., Any], place: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def within(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.passing(place, "inside", result)
            return result

        return within


def _die(pid: int) -> NoReturn:
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("SIGKILL cannot be survived")
