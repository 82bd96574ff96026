"""Putting right what the ledger can work out anew, each behind its row's lock."""

from __future__ import annotations

from contextlib import suppress

from celery_budget.errors import InvalidAmount
from celery_budget.reconcile.proof import balance_name, wrong_balances, wrong_tallies
from celery_budget.reconcile.totals import day_name
from celery_budget.settings import Settings
from celery_budget.store import Store, derived, repairs, reports, tallies
from celery_budget.store.balances import Key

__all__ = ["repair"]

#: How many messages are looked up at a time.
PAGE = 1000


def repair(store: Store, settings: Settings) -> tuple[str, ...]:
    """Make what is derived what it is derived from; return a sentence for each that was not.

    Each in a transaction of its own, behind its row's lock. Balances are rebuilt from their lines,
    with an entry in the journal; messages that are passed by for good are let go; tallies, and
    counts from a time to come, are made anew.

    What is wrong between requests and their lines is not put right by this: nobody can know which
    of them is. Nor is a balance that its journal leads to and its lines do not (a line is wrong),
    or whose lines add up to what none can be; it is left, and told again.
    """
    steps = (_balances, _shares, _behind, _tallies, _counts)
    return tuple(told for step in steps for told in step(store, settings))


def _balances(store: Store, settings: Settings) -> list[str]:
    rebuilt = []
    for key in store.read(wrong_balances, settings.root):
        with suppress(InvalidAmount):
            if store.run(repairs.rebuild, settings.root, key, "budget reconcile --repair"):
                rebuilt.append(f"{balance_name(key)} was rebuilt from its lines")
    return rebuilt


def _shares(store: Store, settings: Settings) -> list[str]:
    told = []
    for row in store.read(reports.mismatched_shares, settings.root):
        key = Key(row.budget, row.window_us)
        store.run(repairs.share_anew, settings.root, key)
        told.append(f"what is left of {balance_name(key)} is shared anew by the next admission")
    return told


def _behind(store: Store, settings: Settings) -> list[str]:
    told = []
    while True:
        page = store.read(derived.stuck_behind, settings.root, PAGE)
        freed = [
            task_id
            for outbox_id, task_id in page
            if store.run(derived.let_go, settings.root, outbox_id)
        ]
        told += [f"the message of task {task_id} is passed by no more" for task_id in freed]
        if len(page) < PAGE or not freed:
            return told


def _tallies(store: Store, settings: Settings) -> list[str]:
    told = []
    for day, _ in store.read(wrong_tallies, settings.root):
        changed = store.run(tallies.rebuild, settings.root, day)
        if changed:
            some = "1 tally" if changed == 1 else f"{changed} tallies"
            told.append(f"{some} of {day_name(day)} made anew from its requests")
    return told


def _counts(store: Store, settings: Settings) -> list[str]:
    told = []
    for lane, _ in store.read(derived.misdated, settings.root):
        if store.run(derived.recount, settings.root, lane):
            whose = "of the outbox" if lane is None else f"of lane {lane!r}"
            told.append(f"the count of what waits {whose} is made anew by the next admission")
    return told
