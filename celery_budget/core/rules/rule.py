"""What a rule is, how it is told what to look at, and when it does not look."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from celery_budget.core.checkup import LEVELS, Checkup, Facts, Finding, WorkerSeen

__all__ = [
    "RELAY_SECONDS",
    "RULES",
    "Look",
    "Rule",
    "Seen",
    "Skipped",
    "judge",
    "named",
    "of_postgresql",
    "of_sqlite",
    "of_store",
    "of_tables",
    "of_workers",
    "off",
    "rule",
]

#: A relay is seen every few seconds.
RELAY_SECONDS = 15.0
#: What a clock may be off, and from where on times are wrong: a lease is renewed within that.
CLOCK_WARN, CLOCK_WRONG = 1.0, 15.0


@dataclass(frozen=True)
class Skipped:
    """A rule that could not look, and why.

    :ivar applies: whether there is anything to look at; otherwise all is right without.
    """

    why: str
    applies: bool = True


#: A level, where it is another than the rule's, and what was seen.
Seen = str | tuple[str, str]
Look = Callable[[Facts], "Iterable[Seen] | Skipped"]


@dataclass(frozen=True)
class Rule:
    """One thing that is looked at.

    :ivar id: its name, which stays the same.
    :ivar level: ``error`` where it breaks a guarantee, else ``warning``.
    :ivar good: what is said where all is right.
    """

    id: str
    level: str
    good: str
    why: str
    remedy: str
    look: Look


RULES: list[Rule] = []


def judge(facts: Facts) -> Checkup:
    """Return what all rules find, the gravest first, then in the order of the rules."""
    found = [finding for rule in RULES for finding in _apply(rule, facts)]
    return Checkup(tuple(sorted(found, key=lambda one: LEVELS.index(one.level))))


def _apply(rule: Rule, facts: Facts) -> list[Finding]:
    looked = rule.look(facts)
    if isinstance(looked, Skipped):
        return [Finding(rule.id, "skipped" if looked.applies else "ok", looked.why)]
    found = []
    for one in looked:
        level, seen = (rule.level, one) if isinstance(one, str) else one
        found.append(Finding(rule.id, level, seen, rule.why, rule.remedy))
    return found or [Finding(rule.id, "ok", rule.good)]


def rule(id_: str, level: str, good: str, why: str, remedy: str) -> Callable[[Look], Look]:
    """Make a rule of the function below; see :class:`Rule`."""

    def add(look: Look) -> Look:
        RULES.append(Rule(id_, level, good, why, remedy, look))
        return look

    return add


def named(names: Iterable[str]) -> str:
    """Return some names, and how many more there are."""
    listed = sorted(names)
    rest = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    return ", ".join(listed[:5]) + rest


def of_store(look: Look) -> Look:
    """Skip a rule where the ledger cannot be read."""

    def looked(facts: Facts) -> Iterable[Seen] | Skipped:
        if facts.store.error:
            return Skipped("the ledger cannot be reached")
        return look(facts)

    return looked


def of_tables(look: Look) -> Look:
    """Skip a rule where the ledger's tables cannot be read."""

    def looked(facts: Facts) -> Iterable[Seen] | Skipped:
        if facts.store.error or facts.store.schema_error:
            return Skipped("the ledger's tables cannot be read")
        return look(facts)

    return looked


def of_postgresql(look: Look) -> Look:
    """Skip a rule on SQLite, or where the ledger cannot be reached."""

    def looked(facts: Facts) -> Iterable[Seen] | Skipped:
        if facts.store.dialect != "postgresql":
            return Skipped("does not apply: the ledger is in SQLite", applies=False)
        return look(facts)

    return of_store(looked)


def of_sqlite(look: Look) -> Look:
    """Skip a rule on PostgreSQL, or where the ledger cannot be reached."""

    def looked(facts: Facts) -> Iterable[Seen] | Skipped:
        if facts.store.dialect != "sqlite":
            return Skipped("does not apply: the ledger is in PostgreSQL", applies=False)
        return look(facts)

    return of_store(looked)


def of_workers(look: Callable[[Facts, tuple[WorkerSeen, ...]], Iterable[Seen] | Skipped]) -> Look:
    """Skip a rule where no worker with the extension answered; give it those that did."""

    def looked(facts: Facts) -> Iterable[Seen] | Skipped:
        if facts.workers is None:
            return Skipped(facts.workers_why)
        answered = tuple(one for one in facts.workers if one.knows and one.installed)
        if not answered:
            return Skipped("no worker with the extension answered")
        return look(facts, answered)

    return looked


def off(whose: str, seconds: float, round_trip: float) -> Iterator[Seen]:
    """Tell of a clock that is off by more than the time that it took to ask."""
    least = max(0.0, abs(seconds) - round_trip / 2)
    if least >= CLOCK_WARN:
        level = "error" if least >= CLOCK_WRONG else "warning"
        yield level, f"{whose} is {seconds:+.1f} s off this host's"
