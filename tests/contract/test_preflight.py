"""Preflight: which lanes are asked about, how often, and what is kept of the answer."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from celery_budget import reconcile
from celery_budget.preflight import Preflight
from tests.contract.support import Ledger
from tests.contract.test_lanes import lane


@dataclass
class Said:
    """Workers that answer as they are told to, and what was asked for."""

    missing_from: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, tuple[str, ...], bool]] = field(default_factory=list)

    def missing(self, broker: str, queues: tuple[str, ...], works: bool) -> str | None:
        self.asked.append((broker, queues, works))
        return self.missing_from.get(broker)


@pytest.fixture
def funded(ledger: Ledger) -> Ledger:
    ledger.set("b", 10_000)
    return ledger


def ask(ledger: Ledger, said: Said) -> int:
    return Preflight(ledger.store, ledger.settings, said).run_once()


def test_only_lanes_that_hold_work_are_asked_about(funded: Ledger) -> None:
    lane(funded, preflight=True)
    lane(funded, "quiet", queues=("quiet",), preflight=True)
    lane(funded, "trusted", queues=("trusted",), preflight=False)
    said = Said()
    assert ask(funded, said) == 0
    funded.reserve(1)
    funded.reserve(1, queue="trusted")
    assert ask(funded, said) == 1
    assert said.asked == [("", ("celery",), False)]
    # Not again within a second, by whichever process.
    assert ask(funded, said) == 0
    assert funded.relay().published == 2


def test_every_broker_that_work_goes_to_is_asked(funded: Ledger) -> None:
    lane(funded, preflight=True)
    funded.reserve(1)
    funded.reserve(1, broker="eu")
    said = Said({"eu": "no worker consumes queue 'celery'"})
    assert ask(funded, said) == 1
    assert [broker for broker, _, _ in said.asked] == ["", "eu"]
    assert funded.relay().published == 0
    [stands] = reconcile.lane_standings(funded.store, funded.settings)
    assert (stands.why, stands.awake) == ("asleep", False)
    assert stands.asleep == "no worker consumes queue 'celery'"
    assert (stands.waiting.jobs, stands.queued.jobs) == (2, 0)
    # They wake.
    said.missing_from.clear()
    funded.put("lanes", {"checked_us": 1})
    assert ask(funded, said) == 1
    [stands] = reconcile.lane_standings(funded.store, funded.settings)
    assert (stands.why, stands.awake, stands.asleep) == (None, True, None)


def test_why_a_lane_sleeps_is_logged_once_and_that_it_is_awake(
    funded: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    lane(funded, preflight=True)
    funded.reserve(1)
    said = Said({"": "nobody is there"})
    asking = Preflight(funded.store, funded.settings, said)
    caplog.set_level("INFO", "celery_budget.preflight")
    for missing in ("nobody is there", "nobody is there", "still nobody", None, None):
        said.missing_from = {} if missing is None else {"": missing}
        funded.put("lanes", {"checked_us": 1})
        assert asking.run_once() == 1
    assert [one.getMessage() for one in caplog.records] == [
        "lane 'llm' releases nothing: nobody is there",
        "lane 'llm' releases nothing: still nobody",
        "lane 'llm' is awake: its workers answer",
    ]


def test_what_runs_under_a_lease_that_is_kept_shows_that_a_worker_lives(funded: Ledger) -> None:
    lane(funded, preflight=True, max_running_jobs=1)
    said = Said()
    first = funded.reserve(1)
    assert ask(funded, said) == 1
    assert funded.relay().published == 1
    funded.run(first)
    funded.reserve(1)
    funded.put("lanes", {"checked_us": 1})
    assert ask(funded, said) == 1
    assert said.asked[-1] == ("", ("celery",), True)
    funded.lapse(first)
    funded.put("lanes", {"checked_us": 1})
    assert ask(funded, said) == 1
    assert said.asked[-1] == ("", ("celery",), False)
