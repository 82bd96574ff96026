"""What can be done with an application's ledger: budgets set, granted and closed, work requeued.

Every method is one transaction or a series of them; none needs the broker.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, Final, Literal

from celery_budget import reconcile as shown
from celery_budget.core import declarations
from celery_budget.core.alerts import parse_thresholds
from celery_budget.core.budgets import Budget, Limit, Share, check_text, parts_per_million
from celery_budget.core.declarations import Change
from celery_budget.core.identity import new_id
from celery_budget.core.lane_files import LaneChange, written_lanes
from celery_budget.core.lanes import Lane
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import Missing, Refused
from celery_budget.errors import InvalidBudget, NotQuarantined
from celery_budget.integration.capture import with_header
from celery_budget.integration.context import HEADER, header
from celery_budget.integration.lanes import Lanes
from celery_budget.integration.results import BackendResults
from celery_budget.integration.retries import TOLD
from celery_budget.integration.views import Views
from celery_budget.store import (
    Connection,
    budgets,
    declaring,
    grants,
    lanes,
    migrate,
    quarantine,
)
from celery_budget.store import distributed as spread

__all__ = ["KEEP", "Ledger", "Receipt"]

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)


class _Keep(enum.Enum):
    KEEP = "keep"

    def __repr__(self) -> str:
        return "<keep>"


#: Stands for a term that is not given, where none means something.
KEEP: Final = _Keep.KEEP


@dataclass(frozen=True)
class Receipt:
    """What became of a grant or an adjustment.

    :ivar key: its key; the same one again changes nothing.
    :ivar repeated: whether it had been made before, and nothing was changed.
    """

    key: str
    repeated: bool


class _Tried(Exception):
    """Ends a transaction that was only tried, with what it would have changed."""

    def __init__(self, changes: tuple[Change | LaneChange, ...]) -> None:
        super().__init__()
        self.changes = changes


class Ledger(Views):
    """The ledger of one application: all that is seen of it, and all that changes it."""

    @property
    def lanes(self) -> Lanes:
        """The lanes of this ledger: :class:`~celery_budget.integration.lanes.Lanes`."""
        return Lanes(self)

    def init(self, *, distributed: bool = False) -> str:
        """Create the ledger's tables or bring them up to date; return their version.

        :param distributed: distribute them by root over the nodes of a Citus cluster, to whose
            coordinator ``budget_database_url`` leads. What was distributed once stays so.
        :raises DistributionError: where that cannot be. Nothing was changed.
        """
        return self.store.run(_init, distributed)

    def check(self) -> None:
        """Check that the ledger can be reached and has the tables this release needs.

        :raises SchemaError: where :meth:`init` is due.
        :raises StoreError: where it cannot be reached.
        """
        self.store.read(migrate.check)

    def set(
        self,
        name: str,
        *,
        limit: Limit | str | Literal[_Keep.KEEP] = KEEP,
        unit: str | None = None,
        parent: str | Literal[_Keep.KEEP] | None = KEEP,
        period: str | None = None,
        timezone: str | None = None,
        anchor_day: int | None = None,
        soft_stop: float | Decimal | str | None = None,
        hard_stop: float | Decimal | str | None = None,
        weight: int | None = None,
        stripes: int | Literal[_Keep.KEEP] | None = KEEP,
        alert_at: Iterable[float | Decimal | str] | str | Literal[_Keep.KEEP] | None = KEEP,
        reopen: bool = False,
    ) -> Budget:
        """Create the budget ``name`` or change it; with a ``*`` in its name, a template.

        Only the terms that are given change, and what was reserved and spent stays. A limit below
        that leaves a negative balance and admits nothing more.

        :param limit: in ``unit``; 0 blocks everything, none is unlimited, ``"10%"`` (or a
            :class:`~celery_budget.core.budgets.Share`) is a part of the parent's limit. A new
            budget needs one.
        :param unit: what it counts (``"tokens"``, ``"micro-usd"``); needed for a new budget
            without a parent, and fixed once it was drawn on.
        :param parent: the budget that every request on this one draws on as well; none for no
            parent.
        :param period: how long a window is: ``total``, ``minute``, ``hour``, ``day``, ``week`` or
            ``month``. Another one begins a new window now.
        :param timezone: the IANA name of the zone whose clock cuts the windows.
        :param anchor_day: where a week (1 is Monday) or a month begins.
        :param soft_stop: up to which part of the limit new work is admitted: 0.8 or ``"0.8"``.
        :param hard_stop: up to which part work is admitted that continues what was started.
        :param weight: its share of a lane beside that of others, 1 unless given; with 0 its work
            goes last.
        :param stripes: over how many rows its counters are spread, so that many may draw on it at
            once; none for as many as turn out to be of use. Without effect on SQLite.
        :param alert_at: at which parts of its limit it gives an alert: ``(0.8,
            0.95)`` or ``"80%,95%"``; none for no alert, ``"default"`` for those of
            ``budget_alert_at``.
        :param reopen: let it take requests again, where it is closed or draining.
        :return: the budget as it is declared then.
        :raises InvalidName, InvalidAmount, InvalidPeriod, InvalidBudget: for terms that cannot be.
            Nothing was changed.
        """
        terms: dict[str, Any] = {
            "unit": unit,
            "period": period,
            "timezone": timezone,
            "anchor_day": anchor_day,
            "soft_stop": _stop(soft_stop, f"the soft stop of {name!r}"),
            "hard_stop": _stop(hard_stop, f"the hard stop of {name!r}"),
            "weight": weight,
        }
        terms = {term: value for term, value in terms.items() if value is not None}
        if limit is not KEEP:
            written = isinstance(limit, str)
            terms["limit"] = Share.parse(str(limit), f"the limit of {name!r}") if written else limit
        if parent is not KEEP:
            terms["parent"] = parent
        if stripes is not KEEP:
            terms["stripes"] = stripes
        if alert_at is not KEEP:
            terms["alert_at"] = parse_thresholds(alert_at, f"the thresholds of {name!r}")
        return self.store.run(_set, self.settings.root, name, terms, reopen)

    def apply(
        self,
        text: str,
        *,
        source: str = "budgets.toml",
        prune: bool = False,
        dry_run: bool = False,
    ) -> tuple[Change | LaneChange, ...]:
        """Make budgets and lanes what a file of ``[[budget]]`` and ``[lane.NAME]`` tables says.

        In one transaction. A lane's keys are its terms, with ``max_wait_seconds``; whether it is
        paused is not among them. A budget's keys are ``name, unit, limit, parent, root, period,
        timezone, anchor_day, soft_stop, hard_stop, stripes, weight, alert_at``. The same file again
        changes nothing. What it names is open afterwards, closed as it may have been.

        :param text: what the file says, in TOML.
        :param source: what the file is called in errors.
        :param prune: close what it does not name, except for what templates made.
        :param dry_run: change nothing; where the ledger would refuse a change, say so as without.
        :return: what changed, or would change.
        :raises InvalidBudget: for what is no such file, and for terms that cannot be.
        :raises HoldsOpen: where a budget is to be closed that requests still draw on.
            Nothing was changed.
        """
        wanted = self._wanted(text, source)
        if not dry_run:
            return self.store.run(_apply, *wanted, prune)
        try:
            self.store.run(_try_apply, *wanted, prune)
        except _Tried as tried:
            return tried.changes
        raise AssertionError("a trial has no other end")  # pragma: no cover

    def difference(
        self, text: str, *, source: str = "budgets.toml", prune: bool = False
    ) -> tuple[Change | LaneChange, ...]:
        """Return what :meth:`apply` would change, whether the ledger would refuse it or not.

        :raises InvalidBudget: for what is no such file.
        """
        return self.store.run(_apply, *self._wanted(text, source), prune, True)

    def _wanted(
        self, text: str, source: str
    ) -> tuple[dict[str, tuple[Budget, ...]], dict[str, tuple[Lane, ...]]]:
        root = self.settings.root
        wanted = declarations.parse(text, root, source)
        return wanted, declarations.parse_lanes_of(text, root, source)

    def export(self, roots: Iterable[str] | None = None, *, everything: bool = False) -> str:
        """Return the file that :meth:`apply` would make these budgets from; empty without any.

        Budgets that are closed or draining are left out. Where one of those is a parent, its
        children are not: they can be applied to this ledger, and elsewhere once they have another
        parent.

        :param roots: whose budgets; by default those of this application's root.
        :param everything: also those that templates made.
        """
        own = self.settings.root
        budgets = declarations.written(self.declared(roots, everything=everything), own)
        lanes = written_lanes(self.declared_lanes(roots), own)
        return "\n".join(filter(None, (budgets, lanes)))

    def declared_lanes(self, roots: Iterable[str] | None = None) -> dict[str, list[Lane]]:
        """Return the lanes of :meth:`export` as they are declared, by root."""
        own = self.settings.root
        names = [own] if roots is None else [check_text(root, "a root") for root in roots]
        return {root: list(self.store.read(lanes.find, root).values()) for root in names}

    def declared(
        self, roots: Iterable[str] | None = None, *, everything: bool = False
    ) -> dict[str, list[Budget]]:
        """Return the budgets and templates of :meth:`export` as they are declared, by root."""
        own = self.settings.root
        names = [own] if roots is None else [check_text(root, "a root") for root in roots]
        return self.store.read(_declared, names, everything)

    def grant(
        self,
        name: str,
        amount: int,
        *,
        key: str | None = None,
        until: datetime | timedelta | None = None,
        reason: str | None = None,
    ) -> Receipt:
        """Raise the limit of the budget ``name`` by ``amount``, in every window until it ends.

        What has no limit is not changed by it, and a limit of 0 blocks in spite of it.

        :param amount: an integer from 1 to 2^63-1 in the budget's unit.
        :param key: the same key again changes nothing; without one each call counts.
        :param until: when it ends, with a time zone, or how long from now; by default never.
        :param reason: for those who look at it later.
        :raises InvalidAmount: for what is no such integer.
        :raises InvalidBudget: for an end without a time zone, or one that has passed.
        :raises UnknownBudget: where there is no such budget.
        :raises KeyConflict: where the key is that of another grant.
        """
        until_us, lasts_us = _end(until)
        mine = str(new_id()) if key is None else key
        made = self.store.run(
            grants.grant, self.settings.root, mine, name, amount, until_us, reason, lasts_us
        )
        # A key made here can be found only where this very grant was committed and its answer lost.
        return Receipt(mine, key is not None and not made)

    def adjust(self, name: str, amount: int, *, reason: str, key: str | None = None) -> Receipt:
        """Correct what the budget ``name`` has spent in its present window.

        :param amount: what is added to it, in the budget's unit; negative to give back.
        :param reason: why, for the journal.
        :param key: the same key again changes nothing; without one each call counts.
        :raises InvalidAmount: for no integer, for 0, and where less than nothing would be spent.
        :raises InvalidName: where the reason is no text of 1 to 255 characters.
        :raises UnknownBudget: where there is no such budget.
        :raises KeyConflict: where the key is that of another adjustment.
        """
        mine = str(new_id()) if key is None else key
        made = self.store.run(grants.adjust, self.settings.root, mine, name, amount, reason)
        return Receipt(mine, key is not None and not made)

    def close(self, name: str, drain: bool = False) -> str:
        """Close the budget ``name``: it takes nothing new, nor does what is below it.

        What was reserved and spent stays; ``set(name, reopen=True)`` opens it again. A template
        that is closed makes no budgets any more.

        :param drain: where requests that draw on it have not ended, take nothing new, let those
            end and close it then.
        :return: the state it is in: ``closed`` or ``draining``.
        :raises HoldsOpen: where some have not ended and it is not to be drained.
        :raises UnknownBudget: where there is no such budget.
        """
        return self.store.run(budgets.close, self.settings.root, name, drain)

    def fold_journal(
        self, older_than: timedelta, told: Callable[[int, int], None] | None = None
    ) -> int:
        """Fold entries of all journals that are older than this into a checkpoint for each balance.

        Balances stay as they are and provable; what led to them before is forgotten.

        :param told: called after each balance with how many are done, and how many there are.
        :return: how many entries went.
        """
        return shown.fold(self.store, self.settings, older_than // _MICROSECOND, told)

    def requeue(self, some_id: str) -> None:
        """Publish a message of the quarantine again: the same request, admitted anew.

        What has failed begins anew, with no attempt and no retry, and is charged again; its result
        is taken back. It goes on with what its message brings: its callbacks and the later steps of
        its chain. Its chord has been told that it failed, and hears no more of it.

        One transaction. What refuses it leaves it in quarantine. A message that drew on no budget
        just goes to the outbox.

        :param some_id: its id there, or that of its task.
        :raises NotQuarantined: where there is none.
        :raises BudgetExceeded: where the request does not fit its budget now.
        :raises RequestConflict: where the request was admitted again meanwhile.
        :raises RequestEnding: where it has failed just now, and its result is still to be stored.
        :raises OutboxFull, QueueFull, UnknownBudget: as where it is admitted for the first time.
        """
        root = self.settings.root
        outcome = self.store.run(
            quarantine.requeue,
            root,
            some_id,
            lambda message, reservation_id: with_header(
                message, HEADER, header(root, reservation_id)
            ),
            again=quarantine.Again(_from_the_start, BackendResults(self.app).forget),
            lock_ms=self.settings.lock_ms,
            bound=self.settings.max_outbox,
        )
        if isinstance(outcome, Missing):
            raise NotQuarantined(some_id)
        if isinstance(outcome, Refused):
            raise outcome.error()

    def discard(self, some_id: str) -> None:
        """Delete a message of the quarantine; how its request ended stays known.

        :param some_id: its id there, or that of its task.
        :raises NotQuarantined: where there is none.
        """
        if not self.store.run(quarantine.discard, self.settings.root, some_id):
            raise NotQuarantined(some_id)

    def repair(self) -> tuple[str, ...]:
        """Make every balance and its journal what its requests add up to.

        :return: one sentence for each that was not so; what is wrong elsewhere stays.
        """
        return shown.repair(self.store, self.settings)


def _init(connection: Connection, distributed: bool) -> str:
    version = migrate.upgrade(connection)
    if distributed or spread.is_distributed(connection):
        spread.distribute(connection)
    return version


def _from_the_start(message: WireMessage) -> WireMessage:
    """Return a message whose task has failed as that of a first attempt, that no chord hears of."""
    return with_header(with_header(message, "retries", 0), TOLD, 1)


def _set(
    connection: Connection, root: str, name: str, terms: dict[str, Any], reopen: bool
) -> Budget:
    """As the store's, but no budget becomes unlimited by leaving its limit out."""
    if "limit" not in terms and budgets.find(connection, root, name) is None:
        raise InvalidBudget(
            f"budget {name!r} is new; say how much it allows with limit= (--limit N, or none for "
            "unlimited)"
        )
    return declaring.set_budget(connection, root, name, terms, reopen)


def _apply(
    connection: Connection,
    wanted: dict[str, tuple[Budget, ...]],
    lanes_wanted: dict[str, tuple[Lane, ...]],
    prune: bool,
    only_compare: bool = False,
) -> tuple[Change | LaneChange, ...]:
    spread.check_one_root(connection, {*wanted, *lanes_wanted})
    both = {root: lanes_wanted.get(root, ()) for root in wanted} if prune else {}
    return (
        *declaring.apply(connection, wanted, prune, only_compare),
        *lanes.apply(connection, both | lanes_wanted, prune, only_compare),
    )


def _try_apply(
    connection: Connection,
    wanted: dict[str, tuple[Budget, ...]],
    lanes_wanted: dict[str, tuple[Lane, ...]],
    prune: bool,
) -> tuple[Change | LaneChange, ...]:
    raise _Tried(_apply(connection, wanted, lanes_wanted, prune))


def _declared(
    connection: Connection, roots: list[str], everything: bool
) -> dict[str, list[Budget]]:
    return {root: budgets.open_budgets(connection, root, everything) for root in roots}


def _stop(value: float | Decimal | str | None, what: str) -> int | None:
    return None if value is None else parts_per_million(value, what)


def _end(until: Any) -> tuple[int | None, int | None]:
    """Return when a grant ends, or how long it lasts, in microseconds."""
    if until is None:
        return None, None
    if isinstance(until, timedelta):
        return None, until // _MICROSECOND
    if not isinstance(until, datetime) or until.utcoffset() is None:
        raise InvalidBudget(
            f"the end of a grant is {until!r}; give a datetime with a time zone, or a timedelta "
            "from now"
        )
    return max((until - _EPOCH) // _MICROSECOND, 0), None
