"""The spool: what a worker could not tell the ledger, one file an entry, beside the worker.

An entry is written when the first try to deliver it has failed, before it is waited any longer: to
a temporary name, flushed to disk, renamed, and the folder flushed. Whoever waits with it holds a
lock on its file, which ends with its process, whatever ends that. What nobody holds is to be
replayed. Any entry may be delivered more than once, and in any order but that of their kinds.

A file that cannot be read as an entry is moved aside. What cannot be written is told in the log;
its writer waits on, as it does without a spool.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery_budget.core.identity import new_id
from celery_budget.core.reservations import Again, Outcome
from celery_budget.core.retries import Keep
from celery_budget.core.usage import Used
from celery_budget.events import Logger
from celery_budget.store import Stop

__all__ = ["ASIDE", "Ended", "Entry", "Held", "Lost", "Patience", "Spool", "Usage"]

logger = Logger(__name__)

#: What follows the name of a file that was moved aside.
ASIDE = ".aside"
#: The form of an entry; another one is moved aside.
VERSION = 1
#: So often the ledger is tried also where the worker stops: most faults pass at once.
FIRST_TRIES = 4

_NAME = re.compile(r"[1-4]-[0-9a-f]{32}\.json")


@dataclass(frozen=True)
class Usage:
    """One record of what an attempt has used; its key makes it one and the same."""

    root: str
    reservation_id: uuid.UUID
    attempt: int
    key: str
    used: Used


@dataclass(frozen=True)
class Ended:
    """How an attempt ended; counts while its fence is there.

    :ivar boot_id: of the worker that ran it, as is its ``task_id``.
    """

    root: str
    reservation_id: uuid.UUID
    attempt: int
    claim_id: uuid.UUID
    outcome: Outcome
    task_id: str
    boot_id: uuid.UUID


@dataclass(frozen=True)
class Lost:
    """A task whose process is gone, or gave it back before it ran.

    :ivar reservation_id: as its message says; none where that came without.
    :ivar worker: the process, as in the attempt that it may have claimed; empty where it has
        claimed none.
    :ivar may_rerun: whether its message may come again.
    :ivar retries: Celery's count of them in the message.
    """

    root: str
    reservation_id: uuid.UUID | None
    task_id: str
    worker: str
    boot_id: uuid.UUID
    may_rerun: bool
    retries: int = 0


Entry = Usage | Ended | Lost


class Held:
    """The file of an entry, locked by this process: nobody else replays it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def drop(self) -> None:
        """Delete it: the entry was delivered, or is void."""
        with suppress(OSError):
            self._path.unlink()
        self.release()

    def put_aside(self) -> None:
        """Move it out of the way of the others; somebody has to look at it."""
        with suppress(OSError):
            self._path.rename(self._path.with_name(self._path.name + ASIDE))
        self.release()

    def release(self) -> None:
        """Leave it to whoever replays it.

        Unlocked, not only closed: a child that was forked meanwhile has the same open file.
        """
        if self._descriptor >= 0:
            with suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1


class Patience:
    """How a worker waits for the ledger: for as long as it need not stop.

    For one call of :meth:`celery_budget.store.Store.wait_out`.

    :param stop: the worker's; none to wait for ever.
    :param keep: puts on disk what the call has to tell, before anything is waited for; false where
        that failed, and then only the ledger can be told: waiting does not end.
    :param on_over: called where waiting ends.
    :ivar over: whether it has ended.
    """

    def __init__(
        self,
        stop: Stop | None,
        keep: Callable[[], bool] | None = None,
        on_over: Callable[[], None] | None = None,
    ) -> None:
        self.over = False
        self._stop = stop
        self._keep = keep
        self._on_over = on_over
        self._failures = 0

    def wait(self, timeout: float, /) -> bool:
        """Wait for the next try; true where there is none."""
        self._failures += 1
        kept = self._keep is None or self._keep()
        if self._stop is None or not kept or self._failures < FIRST_TRIES:
            time.sleep(timeout)
            return False
        self.over = self._stop.wait(timeout)
        if self.over and self._on_over is not None:
            self._on_over()
        return self.over


class Spool:
    """The spool of one ledger, for any number of processes at once.

    Its folders are made when the first entry is written, for this user alone.

    :param folder: where the spools of all ledgers are.
    :param ledger: which database, and which root in it, the entries are for.
    """

    def __init__(self, folder: str | Path, ledger: str) -> None:
        digest = hashlib.sha256(ledger.encode()).hexdigest()[:32]
        self._folder = Path(folder).absolute() / digest
        self._told: set[str] = set()

    @property
    def folder(self) -> Path:
        """Where the entries are."""
        return self._folder

    def put(self, entry: Entry) -> Held | None:
        """Write an entry, so that it outlives this process and its machine; hold it.

        The same entry once more is the same file. None where it could not be written: that is
        logged, once until one can be.
        """
        content = _written(entry)
        path = self._folder / _name(entry, content)
        part = self._folder / f".{new_id()}"
        descriptor = -1
        try:
            _make_folder(self._folder)
            descriptor = _locked(part, content)
            part.rename(path)
            _flush(self._folder)
        except OSError as error:
            if self._first(self._folder):
                logger.event("spool.unwritable", path=str(self._folder), error=error)
            Held(part, descriptor).drop()
            return None
        except BaseException:
            # Interrupted, by a soft time limit.
            Held(part, descriptor).drop()
            raise
        self._told.discard(str(self._folder))
        return Held(path, descriptor)

    def take(self) -> Iterator[tuple[Entry, Held]]:
        """Yield the entries that nobody holds, in order, and hold each; the caller lets it go."""
        try:
            names = sorted(os.listdir(self._folder))
        except FileNotFoundError:
            return
        except OSError as error:
            if self._first(self._folder):
                logger.event("spool.unreadable", path=str(self._folder), error=error)
            return
        for name in names:
            if name.endswith(".json"):
                held = self._hold(self._folder / name)
                if held is not None:
                    entry = self._read(name, held)
                    if entry is not None:
                        yield entry, held

    def _hold(self, path: Path) -> Held | None:
        """Lock a file; none where somebody else holds it, or has deleted it by now."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            if self._first(path):
                logger.event("spool.unreadable", path=str(path), error=error)
            return None
        held = Held(path, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False)):
                return held
        except OSError:
            pass
        held.release()
        return None

    def _read(self, name: str, held: Held) -> Entry | None:
        """Read an entry; one that cannot be read is moved aside."""
        path = self._folder / name
        try:
            content = path.read_bytes()
            entry = _read(content)
            if not _NAME.fullmatch(name) or name != _name(entry, content):
                raise ValueError("its content is not what its name says")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            logger.event("spool.invalid", path=str(path), error_type=type(error).__name__)
            held.put_aside()
        except OSError as error:
            if self._first(path):
                logger.event("spool.unreadable", path=str(path), error=error)
            held.release()
        else:
            return entry
        return None

    def _first(self, path: Path) -> bool:
        """Tell whether nothing was said of a path before."""
        first = str(path) not in self._told
        self._told.add(str(path))
        return first


def _make_folder(folder: Path) -> None:
    """Make a folder and the one above it, for this user alone, so that they stay."""
    for one in (folder.parent, folder):
        try:
            os.mkdir(one, 0o700)
        except FileExistsError:
            continue
        _flush(one.parent)


def _locked(path: Path, content: bytes) -> int:
    """Write a file to disk; its descriptor, which holds the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _flush(folder: Path) -> None:
    """Have the names in a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name(entry: Entry, content: bytes) -> str:
    return f"{_turn(entry)}-{hashlib.sha256(content).hexdigest()[:32]}.json"


def _turn(entry: Entry) -> int:
    """Return when an entry is replayed, beside others.

    What was used comes before anything is charged for it. A process that is lost for good takes an
    end of its own with it: Celery has stored its own for the task.
    """
    if isinstance(entry, Usage):
        return 1
    if isinstance(entry, Ended):
        return 3
    return 4 if entry.may_rerun else 2


def _written(entry: Entry) -> bytes:
    values: dict[str, Any] = dict(vars(entry))
    if isinstance(entry, Usage):
        used = entry.used
        values["used"] = {
            # Not an object: the unit may be none.
            "amounts": list(used.amounts.items()),
            "of_reply": used.of_reply,
            "incomplete": sorted(used.incomplete),
            "details": used.details,
        }
    elif isinstance(entry, Ended):
        again, keep = entry.outcome.again, entry.outcome.keep
        values["outcome"] = {
            "kind": entry.outcome.kind,
            "payload": entry.outcome.payload,
            "again": again and vars(again),
            "keep": keep and vars(keep),
            "error": entry.outcome.error,
        }
    kind = type(entry).__name__.lower()
    written = {"version": VERSION, "kind": kind, **values}
    return json.dumps(written, default=str, sort_keys=True).encode()


def _read(content: bytes) -> Entry:
    """Read an entry as :func:`_written` wrote it.

    :raises ValueError, KeyError, TypeError, AttributeError: for anything else.
    """
    values = json.loads(content)
    version, kind = values.pop("version"), values.pop("kind")
    if version != VERSION:
        raise ValueError(f"its version is {version!r}")
    for name in ("reservation_id", "claim_id", "boot_id"):
        if values.get(name) is not None:
            values[name] = uuid.UUID(values[name])
    if kind == "usage":
        used = values.pop("used")
        amounts = {unit: int(amount) for unit, amount in used.pop("amounts")}
        incomplete = tuple(used.pop("incomplete"))
        return Usage(**values, used=Used(amounts, incomplete=incomplete, **used))
    if kind == "ended":
        outcome = values.pop("outcome")
        again, keep = outcome.pop("again"), outcome.pop("keep")
        return Ended(
            **values,
            outcome=Outcome(**outcome, again=again and Again(**again), keep=keep and Keep(**keep)),
        )
    if kind == "lost":
        return Lost(**values)
    raise ValueError(f"its kind is {kind!r}")
