"""Relays that run, as the ledger knows them, and how one that is idle finds the next message."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import pytest

from celery_budget import reconcile, relay
from celery_budget.core.messages import WireMessage
from celery_budget.errors import StoreError
from celery_budget.store import relays, wakeup
from tests.cluster import eventually
from tests.contract.sleepers import NEVER, age, announced, relaying, sleeping, tell
from tests.contract.support import Ledger

# Their rows.


def test_a_relay_is_seen_from_its_first_word_to_its_last(ledger: Ledger) -> None:
    first, second = announced(ledger, 1), announced(ledger, 2)
    assert tell(ledger, first, True)
    shown = reconcile.relays(ledger.store, ledger.settings)
    assert [(one.host, one.pid, one.sleeping) for one in shown] == [
        ("host", 1, True),
        ("host", 2, False),
    ]
    assert all(0 <= one.seconds < 60 and one.seen_us >= one.started_us for one in shown)
    ledger.store.run_statement(relays.leave, ledger.root, first)
    assert not tell(ledger, first, False)
    assert [one.relay_id for one in ledger.store.read(relays.seen, ledger.root)] == [second]


def test_announcing_twice_changes_nothing(ledger: Ledger) -> None:
    relay_id = announced(ledger)
    ledger.store.run(relays.announce, ledger.root, relay_id, "host", 7)
    assert len(ledger.store.read(relays.seen, ledger.root)) == 1


def test_what_was_not_seen_for_an_hour_is_forgotten(ledger: Ledger) -> None:
    old = announced(ledger, 1)
    age(ledger, relays.FORGET_US + 1_000_000)
    announced(ledger, 2)
    assert [one.pid for one in ledger.store.read(relays.seen, ledger.root)] == [2]
    presence = wakeup.Presence(ledger.store, ledger.root)
    presence._relay_id = old
    presence.tell(False)
    assert {one.pid for one in ledger.store.read(relays.seen, ledger.root)} == {2, os.getpid()}


def test_the_row_is_written_when_there_is_something_to_say_or_now_and_then(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    presence = wakeup.Presence(ledger.store, ledger.root)
    written: list[bool] = []
    write = presence._write
    monkeypatch.setattr(presence, "_write", lambda word: (written.append(word), write(word))[1])
    for word in (False, False, True, True, False):
        presence.tell(word)
    assert written == [False, True, False]
    monkeypatch.setattr(presence, "_until", 0.0)
    presence.tell(False)
    assert written == [False, True, False, False]
    presence.leave()
    assert not ledger.store.read(relays.seen, ledger.root)


def test_what_could_not_be_written_is_written_again(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    presence = wakeup.Presence(ledger.store, ledger.root)
    presence.tell(True)

    def fail(*_: Any) -> bool:
        raise StoreError("away", retryable=True)

    with monkeypatch.context() as patched:
        patched.setattr(presence, "_write", fail)
        with pytest.raises(StoreError):
            presence.tell(False)
    # Nobody knows whether that was committed.
    presence.tell(True)
    assert [one.sleeping for one in ledger.store.read(relays.seen, ledger.root)] == [True]


# A relay at work.


def test_an_idle_relay_finds_what_others_commit_without_looking_often(funded: Ledger) -> None:
    with relaying(funded, poll_seconds=NEVER) as published:
        for _ in range(3):
            if funded.store.dialect == "postgresql":
                eventually(lambda: sleeping(funded), lambda found: found == [True])
            request = funded.reserve(1)
            eventually(lambda: published, lambda found, one=request: one.task_id in found)
    assert len(published) == 3
    assert sleeping(funded) == []


def test_it_stops_within_half_a_second_though_it_looks_seldom(ledger: Ledger) -> None:
    with relaying(ledger, poll_seconds=NEVER):
        eventually(lambda: sleeping(ledger))
        if ledger.store.dialect == "postgresql":
            eventually(lambda: sleeping(ledger), lambda found: found == [True])
        begin = time.monotonic()
    assert time.monotonic() - begin < 1.5


class Waits(threading.Event):
    """Is set after some waits, none of which takes any time."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.waits: list[float] = []
        self._count = count

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0.0)
        if len(self.waits) == self._count:
            self.set()
        return self.is_set()


@dataclass
class Asleep:
    """A sleeper that only notes what it is told."""

    slept: int = 0
    awake: int = 0

    def sleep(self, stop: threading.Event) -> None:
        self.slept += 1
        stop.set()

    def stay_awake(self) -> None:
        self.awake += 1

    def close(self) -> None:
        """Nothing to close."""


def test_while_there_is_work_pass_follows_pass(funded: Ledger) -> None:
    for _ in range(7):
        funded.reserve(1)
    settings = replace(funded.settings, batch_size=2)
    one = relay.Relay(funded.store, settings, funded.broker, funded.results.ended)
    sleeper, stop = Asleep(), threading.Event()
    relay.run(one, settings, sleeper, stop)
    assert (len(funded.broker.published), sleeper.awake, sleeper.slept) == (7, 4, 1)


def test_while_no_broker_answers_the_relay_is_not_to_be_woken(funded: Ledger) -> None:
    def down(message: WireMessage) -> None:
        raise relay.BrokerDown("refused")

    funded.broker.on_publish = down
    request = funded.reserve(1)
    settings = replace(funded.settings, poll_seconds=1.0)
    one = relay.Relay(funded.store, settings, funded.broker, funded.results.ended)
    sleeper, stop = Asleep(), Waits(3)
    relay.run(one, settings, sleeper, stop)
    assert (stop.waits, sleeper.awake, sleeper.slept) == ([1.0] * 3, 3, 0)
    assert funded.state(request) == "reserved"


def test_a_store_that_is_down_is_waited_out_longer_and_longer(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> relay.Relayed:
        raise StoreError("away", retryable=True)

    monkeypatch.setattr(relay.Relay, "run_once", away)
    one = relay.Relay(funded.store, funded.settings, funded.broker, funded.results.ended)
    stop = Waits(12)
    relay.run(one, funded.settings, Asleep(), stop)
    first, longest = funded.settings.poll_seconds, relay.LONGEST_OUTAGE_SECONDS
    bounds = [min(longest, first * 2**number) for number in range(12)]
    assert all(bound / 2 <= wait <= bound for wait, bound in zip(stop.waits, bounds, strict=True))


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True, scope="session")
def test_a_fork_between_two_looks_loses_no_change(funded: Ledger) -> None:
    store = funded.store
    store.changed()
    assert not store.changed()
    funded.reserve(1)
    assert store.changed()
    assert not store.changed()
    store.before_fork()
    store.after_fork_in_parent()
    # Another connection: what it counts says nothing beside the last.
    assert store.changed()
    assert not store.changed()
