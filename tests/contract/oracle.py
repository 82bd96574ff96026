"""The ledger in plain Python: what it must come to, one call after another.

Independent of ``celery_budget.core.draws``: the same rules, told once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from celery_budget.core.budgets import Share

MILLION = 1_000_000
MOST = 2**63 - 1
ENDED = ("settled", "released", "lost")

#: What a request asks of one budget: its name, the amount, the charge rule.
Asked = tuple[str, int, str]


class Mixed(Exception):
    """One budget is asked to be charged by two rules."""


@dataclass
class Pot:
    """One budget; ``window`` counts its windows."""

    unit: str
    limit: int | Share | None
    parent: str | None = None
    soft: int = MILLION
    hard: int = MILLION
    period: str = "total"
    state: str = "open"
    granted: int = 0
    window: int = 0


@dataclass
class Item:
    """What one request draws from one window of one budget."""

    budget: str
    window: int
    unit: str
    charge: str
    estimate: int
    held: int
    used: int = 0
    settled: int = 0
    extended: int = 0

    @property
    def metered(self) -> bool:
        return self.charge == "used"

    @property
    def kept(self) -> int:
        """What is held even while nothing runs."""
        return self.used if self.metered else 0

    def end(self, fresh: int = 0) -> None:
        """Charge what was used, and ``fresh`` on top of it; what is charged at the start was."""
        self.held = 0
        self.settled = self.used + fresh if self.metered else self.settled


@dataclass(frozen=True)
class Short:
    """The budget that is short, and how it stands."""

    budget: str
    reason: str
    requested: int
    limit: int
    reserved: int
    spent: int
    most: int


@dataclass
class Oracle:
    """Budgets, and every request that was ever admitted: what each holds and was charged."""

    pots: dict[str, Pot]
    template: Pot
    items: list[Item] = field(default_factory=list)
    adjusted: Counter[tuple[str, int]] = field(default_factory=Counter)

    def up(self, name: str) -> Iterator[str]:
        above: str | None = name
        while above is not None:
            yield above
            above = self.pots[above].parent

    def limit(self, name: str) -> tuple[int | None, bool]:
        """The limit in force, and whether it blocks in spite of all grants."""
        pot, own = self.pots[name], self.pots[name].limit
        if isinstance(own, Share):
            above = self.limit(str(pot.parent))[0]
            own = None if above is None else above * own.parts // MILLION
        return None if own is None else own + pot.granted, own == 0

    def balance(self, name: str, window: int) -> tuple[int, int]:
        mine = [one for one in self.items if (one.budget, one.window) == (name, window)]
        spent = sum(one.settled for one in mine) + self.adjusted[name, window]
        return sum(one.held for one in mine), spent

    def short(
        self, name: str, amount: int, finishing: bool, window: int | None = None
    ) -> Short | None:
        """Why an amount does not fit; with ``window`` for work that goes on in that one."""
        pot, (limit, blocked) = self.pots[name], self.limit(name)
        goes_on = window is not None
        held, spent = self.balance(name, pot.window if window is None else window)
        stop = pot.hard if finishing else pot.soft
        most = MOST if limit is None else limit * stop // MILLION
        if pot.state != "open" and not goes_on:
            reason = pot.state
        elif blocked:
            reason = "blocked"
        elif held + spent + amount <= most:
            return None
        else:
            reason = "exhausted" if spent + amount > most else "held"
        return Short(name, reason, amount, MOST if limit is None else limit, held, spent, most)

    def ask(self, lines: Sequence[Asked], finishing: bool) -> list[Item] | Short:
        """What a request draws on; or the first budget on its way that is short."""
        drawn: dict[str, Item] = {}
        short: Short | None = None
        for name, amount, charge in lines:
            for level in self.up(name):
                pot = self.pots[level]
                item = drawn.setdefault(level, Item(level, pot.window, pot.unit, charge, 0, 0))
                if item.charge != charge:
                    raise Mixed
                item.estimate = item.held = max(item.held, amount)
                short = short or self.short(level, amount, finishing)
        return short or list(drawn.values())

    def unknown(self, lines: Sequence[Asked]) -> str | None:
        """The first budget that does not exist; those that a template stands for are made."""
        for name, _, _ in lines:
            if name not in self.pots and name.startswith("t:") and self.template.state == "open":
                self.pots[name] = replace(self.template)
        return next((name for name, _, _ in lines if name not in self.pots), None)

    def hold_next(self, items: list[Item], wanted: Sequence[tuple[str, int]]) -> bool:
        """Hold what a next attempt wants on top of what was used; all or nothing."""
        asked: dict[str, int] = {}
        for name, amount in wanted:
            for level in self.up(name):
                asked[level] = max(amount, asked.get(level, 0))
        new = self.renewed(items)
        targets = self.targets([*items, *new], asked)
        if not self.fits_more([(one, held - one.held) for one, _, held in targets]):
            return False
        items += new
        self.items += new
        for one, estimate, held in targets:
            one.estimate, one.held, one.extended = estimate, held, 0
        return True

    def refit(self, items: list[Item]) -> None:
        """Hold what the next attempt needs, after all that the last one recorded or extended."""
        targets = self.targets(items, {})
        fits = self.fits_more([(one, held - one.held) for one, _, held in targets])
        for one, _, held in targets:
            one.held, one.extended = held if fits else min(held, one.held), 0

    def renewed(self, items: list[Item]) -> list[Item]:
        """What starts again in another window than the one it was drawn from last."""
        latest = {one.budget: one for one in items if not one.metered}
        return [
            replace(one, window=self.pots[name].window, held=0, used=0, settled=0)
            for name, one in latest.items()
            if one.window != self.pots[name].window
        ]

    def targets(self, items: list[Item], asked: dict[str, int]) -> list[tuple[Item, int, int]]:
        """What a next attempt estimates and has each hold: the latest of each budget alone."""
        latest = {one.budget: one for one in items}
        estimates = [asked.get(one.budget, one.estimate) for one in items]
        return [
            (one, new, one.kept + (new if latest[one.budget] is one else 0))
            for one, new in zip(items, estimates, strict=True)
        ]

    def fits_more(self, more: Sequence[tuple[Item, int]]) -> bool:
        return all(
            amount <= 0 or self.short(one.budget, amount, True, one.window) is None
            for one, amount in more
        )


@dataclass
class Work:
    """One admitted request as the model sees it.

    :ivar retry: whether a running attempt's retry is ``written``, ``parked`` or (empty) neither.
    :ivar parked: whether it waits for budget between two attempts.
    :ivar wanted: what the parked attempt asks for.
    :ivar open: of an ended attempt that was not closed: ``mine`` or, to be replayed, ``nobody's``.
    :ivar usage: by key and unit: the attempt, the amount, and the last attempt that repeated it.
    """

    request: Any
    items: list[Item]
    late_ack: bool = True
    state: str = "reserved"
    attempt: Any = None
    lost: list[Any] = field(default_factory=list)
    retry: str = ""
    parked: bool = False
    wanted: list[tuple[str, int]] = field(default_factory=list)
    open: str = ""
    expires: bool = False
    published: bool = False
    cancelled: bool = False
    usage: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    extensions: set[tuple[int, str, str]] = field(default_factory=set)

    def recorded(self, unit: str) -> int | None:
        """What the last attempt has recorded of a unit; none where it has not recorded any."""
        number = self.attempt.number
        found = [
            amount
            for (_, of), (attempt, amount, repeated) in self.usage.items()
            if of == unit and number in (attempt, repeated)
        ]
        return sum(found) if found else None

    def end(self, state: str) -> None:
        for one in self.items:
            one.end()
        self.state, self.parked, self.retry = state, False, ""

    def end_run(self, state: str, always: bool) -> None:
        """End what ran: what was not recorded is charged as estimated; ``always`` up to that."""
        for one in self.items:
            recorded = self.recorded(one.unit)
            promised = one.estimate + one.extended if always or recorded is None else 0
            one.end(max(0, promised - (recorded or 0)))
        self.state, self.retry = state, ""
