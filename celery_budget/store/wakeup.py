"""How a relay that has nothing to do waits for the next message.

Whatever it is told, it looks by itself every ``budget_poll_seconds``: that finds what becomes due
by time. What is here only makes it look sooner:

- On PostgreSQL it says that it sleeps, looks once more, then waits for a notification, which an
  admission sends only to a relay that has said so. Who sends it takes that word back: of all that
  commit meanwhile one notifies. Who had begun to write when the relay looked may have seen that it
  was awake, and commit afterwards: until all of those have ended it looks again every few
  milliseconds. Whether notifications arrive at all is found out by sending one to itself: behind a
  proxy that pools transactions none does. Then it never says that it sleeps, and nobody sends any.
- On SQLite it watches for commits of others, a look that takes no lock.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from celery_budget.core.backoff import backoff_seconds
from celery_budget.core.identity import new_id
from celery_budget.errors import BudgetError, StoreError
from celery_budget.events import Logger
from celery_budget.settings import Settings
from celery_budget.store import relays
from celery_budget.store.engine import Store

__all__ = ["Listening", "Sleeper", "Watching", "sleeper"]

logger = Logger(__name__)

#: How often a relay is seen, at least, and renews its word; it is believed for ten seconds.
SEEN_SECONDS = 3.0
#: How soon a relay that waits for something else sees that it is to stop.
STOP_SECONDS = 0.25
#: After which time those who may not have seen that it sleeps are looked for again; then doubled.
AGAIN_SECONDS = 0.001
#: How often a SQLite file is looked at for commits.
WATCH_SECONDS = 0.01
#: How long the notification of a relay to itself may take.
ARRIVE_SECONDS = 2.0
#: How often it is sent again: a connection may be dead without a sign of it.
PROVE_SECONDS = 60.0
#: Between two tries to listen.
FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 60.0


class Sleeper(Protocol):
    """Waits on behalf of a relay, and keeps the row by which it is seen."""

    def sleep(self, stop: threading.Event) -> None:
        """Return when something is due, or may be, or soon after ``stop`` is set.

        :raises StoreError: where the ledger cannot be reached.
        """

    def stay_awake(self) -> None:
        """Note that the relay is busy, or could not publish: it waits for no notification.

        :raises StoreError: where the ledger cannot be reached.
        """

    def close(self) -> None:
        """End it: the relay is not seen any more.

        :raises StoreError: where the ledger cannot be reached.
        """


def sleeper(store: Store, settings: Settings) -> Sleeper:
    """Return what waits on this store. It is for one relay, used by one thread."""
    presence = Presence(store, settings.root)
    if store.dialect == "sqlite":
        return Watching(store, settings, presence)
    return Listening(store, settings, presence, Listener(store, settings, presence))


class Presence:
    """A relay's row: written where it has something else to say, and every few seconds.

    By the relay's thread and the one that listens for it, one at a time.
    """

    def __init__(self, store: Store, root: str) -> None:
        self._store = store
        self._root = root
        self._relay_id = new_id()
        self._lock = threading.Lock()
        # None: nobody knows what was written last.
        self._sleeping: bool | None = None
        self._until = 0.0

    @property
    def sleeping(self) -> bool:
        """Whether the row says that the relay sleeps."""
        return bool(self._sleeping)

    def tell(self, sleeping: bool) -> None:
        """See to it that the row says so, and was written not long ago."""
        with self._lock:
            now = time.monotonic()
            if sleeping is self._sleeping and now < self._until:
                return
            self._sleeping = None
            if not self._write(sleeping):
                self._store.run(
                    relays.announce, self._root, self._relay_id, socket.gethostname(), os.getpid()
                )
                if sleeping:
                    self._write(True)
            self._sleeping, self._until = sleeping, now + SEEN_SECONDS

    def forget(self) -> None:
        """Believe no more that the row says what was written last: who wakes a relay changes it."""
        self._sleeping = None

    def leave(self) -> None:
        """Delete the row."""
        self._sleeping = None
        self._store.run_statement(relays.leave, self._root, self._relay_id)

    def _write(self, sleeping: bool) -> bool:
        return self._store.run_statement(relays.tell, self._root, self._relay_id, sleeping)


class Watching:
    """On SQLite: looks whether the file was changed, then whether anything is due."""

    def __init__(self, store: Store, settings: Settings, presence: Presence) -> None:
        self._store = store
        self._settings = settings
        self._presence = presence

    def sleep(self, stop: threading.Event) -> None:
        self._presence.tell(False)
        end = time.monotonic() + self._settings.poll_seconds
        while (left := end - time.monotonic()) > 0 and not stop.wait(min(left, WATCH_SECONDS)):
            if self._store.changed() and self._store.read(relays.anything_due, self._settings.root):
                return

    def stay_awake(self) -> None:
        self._presence.tell(False)

    def close(self) -> None:
        self._presence.leave()


class Listening:
    """On PostgreSQL: says that it sleeps, and waits for a notification while it does.

    Its word is written when it goes to sleep, and taken back by who wakes it. Where that was a
    caller's transaction, or the relay has more to do than one pass, it does so itself.
    """

    def __init__(
        self, store: Store, settings: Settings, presence: Presence, listener: Listener
    ) -> None:
        self._store = store
        self._settings = settings
        self._presence = presence
        self._listener = listener
        # The transaction before which all may not have seen that the relay sleeps; none is known
        # before the first look, and none is left once all of them have ended.
        self._unseeing: int | None = None
        self._pause = settings.poll_seconds
        listener.start()

    def sleep(self, stop: threading.Event) -> None:
        hears = self._listener.hears
        says_so = hears and not self._presence.sleeping
        if says_so:
            self._listener.rung.clear()
        self._presence.tell(hears)
        # Who committed before that was seen has told nobody.
        if says_so and self._looks(anew=True):
            return
        while not stop.is_set() and self._listener.hears is hears:
            if self._is_rung(hears, stop):
                self._listener.rung.clear()
                self._presence.forget()
                return
            if not stop.is_set() and self._looks():
                return
            self._presence.tell(hears)

    def _is_rung(self, hears: bool, stop: threading.Event) -> bool:
        """Wait for a notification; false where none came in time, or whether any would changed."""
        end = time.monotonic() + self._pause
        while (left := end - time.monotonic()) > 0 and not stop.is_set():
            if self._listener.rung.wait(min(left, STOP_SECONDS)):
                return True
            if self._listener.hears is not hears:
                break
        return False

    def _looks(self, anew: bool = False) -> bool:
        """Tell whether anything is due, and find out when to look again if nobody rings.

        :param anew: the relay has just said that it sleeps.
        """
        seen = self._store.run_statement(relays.look, self._settings.root)
        if anew:
            self._unseeing = seen.following
            self._pause = AGAIN_SECONDS / 2
        if self._unseeing is not None and seen.oldest >= self._unseeing:
            self._unseeing = None
        longest = self._settings.poll_seconds
        self._pause = longest if self._unseeing is None else min(2 * self._pause, longest)
        return seen.due

    def stay_awake(self) -> None:
        self._presence.tell(False)

    def close(self) -> None:
        self._listener.stop()
        self._presence.leave()


class Listener:
    """A connection that listens, in a thread of its own: nothing that befalls it delays the relay.

    It counts as hearing once a notification that it sent itself, by another connection, has
    arrived. One that is lost, or hears nothing, is closed and opened again with back-off.

    :ivar rung: set with each notification of something due; cleared by who waits for it.
    """

    def __init__(self, store: Store, settings: Settings, presence: Presence) -> None:
        self.rung = threading.Event()
        self._presence = presence
        self._store = store
        self._settings = settings
        self._hears = False
        self._trouble: str | None = None
        self._noted = False
        self._failures = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="budget-listen", daemon=True)

    @property
    def hears(self) -> bool:
        """Whether notifications are known to arrive."""
        return self._hears

    def start(self) -> None:
        """Start to listen."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; the thread ends soon."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._store.apart(self._settings.listen_url) as connection:
                    self._listen(connection)
            except BudgetError as error:
                if not self._stop.is_set():
                    self._note(str(error))
            except Exception:
                logger.exception("step.failed", step="listening for notifications")
            finally:
                self._hears = False
            self._failures += 1
            self._stop.wait(
                backoff_seconds(self._failures, FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS)
            )

    def _listen(self, connection: Connection) -> None:
        """Listen until the relay stops.

        :raises StoreError: where the connection is lost, or hears nothing.
        """
        connection.exec_driver_sql(f'LISTEN "{relays.channel(self._settings.root)}"')
        try:
            while self._is_proved(connection):
                self._hears, self._failures = True, 0
                self._note(None)
                self._hear(connection, PROVE_SECONDS)
        finally:
            # The session may be the proxy's, and go on.
            with suppress(sa.exc.SQLAlchemyError):
                connection.exec_driver_sql("UNLISTEN *")

    def _is_proved(self, connection: Connection) -> bool:
        """Find out whether notifications arrive; false where the relay stops meanwhile.

        Sent by a connection of the pool, since a proxy may answer with it who sent it.

        :raises StoreError: where none does.
        """
        proof = new_id().hex
        self._store.run_statement(relays.notify, self._settings.root, proof)
        if not self._hear(connection, ARRIVE_SECONDS, proof) and not self._stop.is_set():
            url = connection.engine.url.render_as_string(hide_password=True)
            raise StoreError(f"no notification arrives over {url}", retryable=True)
        return not self._stop.is_set()

    def _hear(self, connection: Connection, seconds: float, proof: str | None = None) -> bool:
        """Take in notifications for some time, or until ``proof`` arrives; tell whether it did."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._stop.is_set():
            payloads = _arrived(connection, min(left, STOP_SECONDS))
            # What has a payload is a proof, ours or another relay's.
            for _ in range(payloads.count("")):
                self._ring()
            if proof in payloads:
                return True
        return False

    def _ring(self) -> None:
        """Wake the relay; where it has not come back since it was woken, have no more sent.

        It rings afterwards: should the relay be asleep again by then, it says so anew.
        """
        if self.rung.is_set():
            # Where it cannot be written it is believed for ten seconds at most.
            with suppress(BudgetError):
                self._presence.tell(False)
        self.rung.set()

    def _note(self, trouble: str | None) -> None:
        """Log when it begins to hear and when it ends, not each try between."""
        if trouble is None and (self._trouble is not None or not self._noted):
            logger.event("relay.woken")
        elif trouble is not None and (self._trouble is None or not self._noted):
            logger.event("relay.unwoken", error=trouble, seconds=self._settings.poll_seconds)
        self._trouble, self._noted = trouble, True


def _arrived(connection: Connection, seconds: float) -> list[str]:
    """Return the payloads of notifications, as soon as there are any, or none after this time."""
    driver: Any = connection.connection.driver_connection
    try:
        return [one.payload for one in driver.notifies(timeout=seconds, stop_after=1)]
    except connection.dialect.loaded_dbapi.Error as error:
        said = " ".join(str(error).split())
        raise StoreError(f"the connection that listens was lost: {said}", retryable=True) from error
