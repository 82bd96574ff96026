"""Alerts: look for what has come to a threshold, and tell it, outside of any admission.

States of an alert: ``due`` (raised, and told by the next pass of whichever relay is first) →
``told``, or ``failed`` after :data:`MOST_TRIES` calls that raised or did not return. It is deleted
when it is over, or with its window; what has still to be told stays until it is.

Each is raised once, however many relays look. It is told at least once: a process that dies between
the call and the mark leaves it to be told again, under the same id. The calls are made one at a
time in a thread of their own, so that one that hangs holds up other alerts only, and no look.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from celery_budget.core.alerts import Alert, StandingAlert
from celery_budget.core.amounts import MAX_AMOUNT
from celery_budget.core.backoff import backoff_seconds
from celery_budget.events import Logger
from celery_budget.settings import Settings
from celery_budget.store import Connection, Store, alerts

__all__ = ["MOST_TRIES", "Alerting", "Drifted", "Passed", "standing"]

logger = Logger(__name__)

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_SECOND = 1_000_000

#: How many budgets one transaction looks at, and how many of those one pass makes.
PAGE = 1000
PAGES = 5
#: How often what costs more than a row or two is looked at.
STATE_SECONDS = 30.0
DRIFT_SECONDS = 300.0
#: New in quarantine are those of so many seconds; it is filling up from this part of its size on.
GROWTH_SECONDS = 3600
FULL = 0.8
#: How often an alert is told whose callable raises or hangs, and how soon it is tried again.
MOST_TRIES = 5
FIRST_WAIT = 1.0
LONGEST_WAIT = 300.0
#: A proof that broke off is tried again after so long.
PROOF_AGAIN_SECONDS = 600.0
#: How long an alert is another process's beyond the time that its call may take.
HOLD_SECONDS = 30.0
#: How many alerts one pass tells.
AT_ONCE = 100

#: Tells an alert; the number says how often it was tried, from 1.
Tell = Callable[[Alert, int], None]


@dataclass(frozen=True)
class Drifted:
    """A stage whose measured requests use more than its ceiling lets pass."""

    subject: str
    ratio: float
    ceiling: float
    requests: int


@dataclass(frozen=True)
class Passed:
    """What one pass did.

    :ivar raised: how many alerts there are that there were not.
    :ivar over: how many are over.
    :ivar told: how many were told.
    :ivar failed: how many calls raised or did not return in time.
    """

    raised: int = 0
    over: int = 0
    told: int = 0
    failed: int = 0


class Alerting:
    """The step of a relay that looks for alerts and tells them; several may run.

    For one thread.

    :param tell: called with each alert; may raise, and hang.
    :param drifts: returns the stages whose estimators drift.
    :param prove: proves that the ledger adds up; returns how many mismatches there are.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        tell: Tell,
        drifts: Callable[[], Sequence[Drifted]] = tuple,
        prove: Callable[[], int] = int,
    ) -> None:
        self._store = store
        self._settings = settings
        self._root = settings.root
        self._tell = tell
        self._drifts = drifts
        self._prove = prove
        self._call: _Call | None = None

    def run_once(self) -> Passed:
        """Look at what is due to be looked at, and tell what has to be told.

        :raises StoreError: where the ledger cannot be read or written; nothing is lost by that.
        """
        looks = [self._look_at_budgets(), self._look_at_states(), self._look_at_drift()]
        told, failed = self._tell_due()
        # After the others are told: it may take minutes.
        looks.append(self._look_at_proof())
        if looks[-1].raised:
            late, wrong = self._tell_due()
            told, failed = told + late, failed + wrong
        return Passed(
            sum(one.raised for one in looks), sum(one.over for one in looks), told, failed
        )

    def _begins(self, what: str, seconds: float) -> bool:
        every_us = int(seconds * _SECOND)
        return self._store.run(alerts.begin_look, self._root, what, every_us) is not None

    def _look_at_budgets(self) -> alerts.Looked:
        """Look at the next pages of budgets; the rest has its turn in later passes."""
        every_us = int(self._settings.alert_seconds * _SECOND)
        whole = alerts.Looked()
        after = self._store.run(alerts.begin_look, self._root, alerts.BUDGET, every_us)
        if after is None:
            return whole
        for _ in range(PAGES):
            looked = self._store.run(
                alerts.look_at_budgets, self._root, after, PAGE, self._settings.alert_parts
            )
            if looked is None:
                break
            whole.raised += looked.raised
            whole.over += looked.over
            after = looked.after
            if not after:
                break
        return whole

    def _look_at_states(self) -> alerts.Looked:
        """Look at what is parked, in quarantine and overdue."""
        if not self._begins("states", min(STATE_SECONDS, 6 * self._settings.alert_seconds)):
            return alerts.Looked()
        done = [
            self._store.run(look, self._root, self._settings)
            for look in (_parked, _quarantine, _overdue)
        ]
        return alerts.Looked(sum(one.raised for one in done), sum(one.over for one in done))

    def _look_at_drift(self) -> alerts.Looked:
        least = self._settings.alert_drift_requests
        every = min(DRIFT_SECONDS, 60 * self._settings.alert_seconds)
        if not least or not self._begins("drift", every):
            return alerts.Looked()
        found = [
            alerts.Found(
                "drift",
                one.subject,
                0,
                {
                    "threshold": one.ceiling,
                    "value": round(one.ratio, 4),
                    "message": f"stage {one.subject} uses {one.ratio:.2f} times what is estimated, "
                    f"more than {one.ceiling:g} times, by {one.requests:,} requests",
                    "details": {"requests": one.requests},
                },
            )
            for one in self._drifts()
            if one.requests >= least
        ]
        return self._store.run(alerts.settle_kind, self._root, "drift", found)

    def _look_at_proof(self) -> alerts.Looked:
        """Have the proof made, rarely: it reads the whole ledger."""
        every = self._settings.alert_reconcile_seconds
        if not every or not self._begins("reconcile", every):
            return alerts.Looked()
        # Where this process dies over it another one tries it soon, not after the whole period.
        again = max(0, int((every - PROOF_AGAIN_SECONDS) * _SECOND))
        self._store.run(alerts.end_look, self._root, "reconcile", again)
        wrong = self._prove()
        self._store.run(alerts.end_look, self._root, "reconcile")
        said = {
            "threshold": 1,
            "value": wrong,
            "message": f"the ledger does not add up in {wrong:,} places; "
            "see 'celery -A PROJ budget reconcile'",
            "details": {},
        }
        found = [alerts.Found("reconcile", "", 0, said)] if wrong else []
        return self._store.run(alerts.settle_kind, self._root, "reconcile", found)

    def _tell_due(self) -> tuple[int, int]:
        """Tell alerts until there is none left, one does not return, or it is another's turn."""
        told = failed = 0
        for _ in range(AT_ONCE):
            if self._call is not None and not self._finished(self._call):
                break
            hold_us = int((self._settings.alert_call_seconds + HOLD_SECONDS) * _SECOND)
            row = self._store.run(alerts.take_due, self._root, hold_us)
            if row is None:
                break
            alert = _alert(row)
            if row.tries > MOST_TRIES:
                # Whoever told it last died over it.
                self._put_off(row, alert, "its process has ended while it was told")
                failed += 1
                continue
            if row.tries == 1:
                logger.event(
                    "alert.raised",
                    said=alert.message,
                    alert_id=alert.id,
                    kind=alert.kind,
                    name=alert.subject,
                )
            call = self._call = _Call(self._tell, row, alert)
            call.start()
            if not call.wait(self._settings.alert_call_seconds):
                logger.event(
                    "alert.hangs",
                    seconds=self._settings.alert_call_seconds,
                    alert_id=alert.id,
                    said=alert.message,
                    kind=alert.kind,
                )
                failed += 1
                break
            self._finished(call)
            if call.error is None:
                told += 1
            else:
                failed += 1
        return told, failed

    def _finished(self, call: _Call) -> bool:
        """Write down how a call ended; false while it has not."""
        if not call.wait(0):
            return False
        if call.error is None:
            self._store.run(alerts.mark_told, self._root, call.row)
        else:
            self._put_off(call.row, call.alert, f"it raised {type(call.error).__name__}")
        self._call = None
        return True

    def _put_off(self, row: alerts.Row, alert: Alert, why: str) -> None:
        if row.tries >= MOST_TRIES:
            logger.event(
                "alert.given_up",
                alert_id=alert.id,
                count=min(row.tries, MOST_TRIES),
                reason=why,
                said=alert.message,
                kind=alert.kind,
            )
            self._store.run(alerts.put_off, self._root, row, None)
            return
        wait = backoff_seconds(row.tries, FIRST_WAIT, LONGEST_WAIT)
        logger.event("alert.put_off", alert_id=alert.id, seconds=wait, reason=why, kind=alert.kind)
        self._store.run(alerts.put_off, self._root, row, int(wait * _SECOND))


class _Call:
    """One call of the callable, in a thread that ends with the process at the latest."""

    def __init__(self, tell: Tell, row: alerts.Row, alert: Alert) -> None:
        self._tell = tell
        self.row = row
        self.alert = alert
        self.error: BaseException | None = None
        self._done = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="budget-alert", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def _run(self) -> None:
        try:
            self._tell(self.alert, self.row.tries)
        # Also an exit: it must not end as told.
        except BaseException as error:
            self.error = error
            logger.exception(
                "alert.call_failed", alert_id=self.alert.id, error_type=type(error).__name__
            )
        finally:
            self._done.set()


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def _parked(connection: Connection, root: str, settings: Settings) -> alerts.Looked:
    most = settings.alert_parked_seconds
    oldest = alerts.find_parked(connection, root) if most else None
    found = []
    if oldest is not None and oldest.age_us >= most * _SECOND:
        age = oldest.age_us / _SECOND
        said = {
            "threshold": most,
            "value": age,
            "message": f"a request of {_on_one_line(oldest.task_name)} has waited {age:,.0f} s "
            f"for budget {oldest.budget!r}; see 'celery -A PROJ budget parked list'",
            "details": {"task_id": oldest.task_id, "budget": oldest.budget},
        }
        found.append(alerts.Found("parked", "", 0, said))
    return alerts.settle_kind(connection, root, "parked", found)


def _quarantine(connection: Connection, root: str, settings: Settings) -> alerts.Looked:
    held, fresh = alerts.fresh_in_quarantine(connection, root, GROWTH_SECONDS * _SECOND)
    most, bound = settings.alert_quarantine, settings.max_quarantine
    see = "see 'celery -A PROJ budget quarantine list'"
    growth, full = [], []
    if most and fresh > most:
        said: dict[str, Any] = {
            "threshold": most,
            "value": fresh,
            "message": f"{fresh:,} requests went into quarantine within an hour; {see}",
            "details": {"held": held},
        }
        growth.append(alerts.Found("quarantine_growth", "", 0, said))
    if held >= FULL * bound:
        said = {
            "threshold": FULL,
            "value": round(held / bound, 4),
            "message": f"quarantine has {held:,} of at most {bound:,}; beyond that requests that "
            f"fail for good are not kept; {see}",
            "details": {"held": held},
        }
        full.append(alerts.Found("quarantine_full", "", 0, said))
    done = [
        alerts.settle_kind(connection, root, "quarantine_growth", growth),
        alerts.settle_kind(connection, root, "quarantine_full", full),
    ]
    return alerts.Looked(sum(one.raised for one in done), sum(one.over for one in done))


def _overdue(connection: Connection, root: str, settings: Settings) -> alerts.Looked:
    most = settings.alert_overdue_seconds
    oldest = alerts.find_overdue(connection, root) if most else None
    found: list[alerts.Found] = []
    keep: tuple[str, ...] = ()
    if oldest is not None and oldest.age_us >= most * _SECOND:
        age = oldest.age_us / _SECOND
        why = f": {_on_one_line(oldest.last_error)}" if oldest.last_error else ""
        task = _on_one_line(oldest.task_name) if oldest.task_name else "an event"
        said = {
            "threshold": most,
            "value": age,
            "message": f"a message of {task} has been due for {age:,.0f} s and is not "
            f"published{why}",
            "details": {"task_id": oldest.task_id},
        }
        found.append(alerts.Found("overdue", "", 0, said))
    elif alerts.in_hand(connection, root):
        # It may be the one that was overdue.
        keep = ("",)
    return alerts.settle_kind(connection, root, "overdue", found, keep)


def standing(store: Store, settings: Settings) -> tuple[StandingAlert, ...]:
    """Return the alerts that are not over, the newest first."""
    return tuple(
        StandingAlert(_alert(row), row.state, row.tries, _moment(row.told_us))
        for row in store.read(alerts.standing, settings.root)
    )


def _alert(row: alerts.Row) -> Alert:
    said = json.loads(row.said)
    of_window = row.kind == alerts.BUDGET
    return Alert(
        str(row.alert_id),
        row.kind,
        row.subject,
        said["threshold"],
        said["value"],
        row.root,
        _instant(row.since_us),
        _instant(row.window_us) if of_window else None,
        _moment(row.end_us) if of_window else None,
        said["message"],
        said["details"],
    )


def _moment(at_us: int | None) -> datetime | None:
    return None if at_us is None or at_us == MAX_AMOUNT else _instant(at_us)


def _instant(at_us: int) -> datetime:
    return _EPOCH + timedelta(microseconds=at_us)
