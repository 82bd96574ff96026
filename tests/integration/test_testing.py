"""What applications test with: ledgers without a service, assertions, frozen budgets, a clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_budget import (
    AttemptLost,
    BudgetError,
    BudgetExceeded,
    CeleryBudget,
    ConfigurationError,
    NotInstalled,
    UnknownBudget,
    budgeted,
    testing,
    usage,
)
from celery_budget.integration import leases
from celery_budget.testing import (
    Clock,
    assert_held,
    assert_parked,
    assert_refused,
    assert_reserved,
    assert_settled,
    in_memory,
    sweep,
)
from tests.apps import shop
from tests.integration.support import make_app

ELSEWHERE = "sqlite:////nowhere/ledger.db"
EAGER = pytest.mark.budget_ledger(eager=True)


@pytest.fixture
def budget_app() -> Celery:
    """An application whose broker, results and ledger cannot be reached."""
    return make_app(
        broker_url="redis://localhost:1",
        result_backend="redis://localhost:1",
        budget_database_url=ELSEWHERE,
    )


@pytest.fixture
def draft(budget_app: Celery) -> Any:
    """A task of 10 tokens that uses what it is told."""

    @budgeted(budget="tenant:{tenant}", estimate=10)
    @budget_app.task(name="shop.draft", shared=False)
    def draft(tenant: str, used: int | None = 4) -> str:
        if used is None:
            raise LookupError("no answer")
        usage.record(used)
        return tenant.upper()

    return draft


@pytest.fixture
def ledger(budget_ledger: CeleryBudget) -> CeleryBudget:
    """The test's ledger, with a budget for two drafts."""
    budget_ledger.set("tenant:a", limit=25, unit="tokens")
    return budget_ledger


def refuses(task: Any) -> str:
    with pytest.raises(BudgetExceeded) as caught:
        task.delay("a")
    return caught.value.reason


# -- the ledger


def test_calls_are_reserved_and_refused_without_any_service(
    ledger: CeleryBudget, draft: Any
) -> None:
    draft.delay("a")
    draft.delay("a")
    assert refuses(draft) == "held"
    assert ledger.balance("tenant:a").reserved == 20


def test_each_ledger_is_empty(budget_app: Celery, draft: Any) -> None:
    for _ in range(2):
        with in_memory(budget_app) as ledger:
            assert ledger.balances() == []
            assert_reserved(count=0)
            ledger.set("tenant:a", limit=10, unit="tokens")
            draft.delay("a")


def test_it_is_gone_afterwards_and_the_application_as_it_was(
    budget_app: Celery, draft: Any
) -> None:
    budget = testing.ledgers.the_budget_of(budget_app)
    store, settings = budget.store, budget.settings
    with in_memory(budget_app, eager=True, lease_seconds=77) as ledger:
        file = Path(ledger.settings.database_url.removeprefix("sqlite:///"))
        assert ledger is budget
        assert file.is_file()
        assert ledger.settings.lease_seconds == 77
        assert budget_app.conf.task_always_eager is True
        assert "file" in type(budget_app.backend).__module__
    assert not file.parent.exists()
    assert (budget.store, budget.settings) == (store, settings)
    assert budget_app.conf.budget_database_url == ELSEWHERE
    assert budget_app.conf.task_always_eager is False
    assert "redis" in type(budget_app.backend).__module__


def test_it_is_gone_after_an_error_too(budget_app: Celery) -> None:
    with pytest.raises(LookupError), in_memory(budget_app):
        raise LookupError
    assert budget_app.conf.budget_database_url == ELSEWHERE


def test_a_configuration_with_a_prefix_is_stood_before_as_well(draft: Any) -> None:
    app = Celery("prefixed", set_as_current=False)
    app.config_from_object(
        {"CELERY_BUDGET_DATABASE_URL": ELSEWHERE, "CELERY_TASK_ALWAYS_EAGER": False},
        namespace="CELERY",
    )
    CeleryBudget(app)
    with in_memory(app, eager=True) as ledger:
        assert ledger.settings.database_url != ELSEWHERE
        assert app.conf.task_always_eager is True
    assert app.conf.budget_database_url == ELSEWHERE


def test_what_is_configured_inside_stays(budget_app: Celery) -> None:
    with in_memory(budget_app):
        budget_app.conf.task_soft_time_limit = 77
    assert budget_app.conf.task_soft_time_limit == 77


def test_a_setting_that_there_is_none_of(budget_app: Celery) -> None:
    for name, said in (("leases", "no setting budget_leases"), ("lease_seconds", "is 3")):
        with pytest.raises(ConfigurationError, match=said), in_memory(budget_app, **{name: 3}):
            pass
        assert budget_app.conf.budget_database_url == ELSEWHERE


def test_a_clock_stands_in_for_sqlite_s_alone(budget_app: Celery) -> None:
    url = "postgresql+psycopg://localhost/nowhere"
    with (
        pytest.raises(ConfigurationError, match="in postgresql"),
        in_memory(budget_app, clock=Clock(), database_url=url),
    ):
        pass
    assert budget_app.conf.budget_database_url == ELSEWHERE


def test_a_ledger_of_ones_own_stays_as_it_is(
    budget_app: Celery, draft: Any, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'rows.db'}"
    with in_memory(budget_app, database_url=url) as ledger:
        ledger.set("tenant:a", limit=25, unit="tokens")
        draft.delay("a")
    with in_memory(budget_app, database_url=url, clock=Clock()):
        assert_held("tenant:a", 10)


@pytest.mark.postgres
def test_assertions_on_postgresql(budget_app: Celery, draft: Any, postgres_url: str) -> None:
    with in_memory(budget_app, database_url=postgres_url) as ledger:
        ledger.set("tenant:a", limit=15, unit="tokens")
        draft.apply(("a",))
        draft.delay("a")
        refuses(draft)
        draft.apply_async(("a",), on_refused="park")
        assert_reserved("tenant:a", 20, count=2)
        assert_held("tenant:a", 10)
        assert_settled("tenant:a", 4, outcome="returned")
        assert_refused("tenant:a", count=1)
        assert_parked("tenant:a", count=1)
        with testing.freeze_budget():
            assert refuses(draft) == "blocked"


def test_which_application_is_meant(budget_app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = testing.ledgers.the_budget_of(budget_app)
    assert testing.ledgers.the_budget_of(budget) is budget
    monkeypatch.setattr(shop, "elsewhere", budget_app, raising=False)
    assert testing.ledgers.the_budget_of("tests.apps.shop:elsewhere") is budget
    with pytest.raises(NotInstalled):
        testing.ledgers.the_budget_of(make_app(budget=False))
    with pytest.raises(BudgetError, match="neither"):
        testing.ledgers.the_budget_of(budget.settings)
    make_app("another")
    with pytest.raises(BudgetError, match="applications have a CeleryBudget"):
        testing.ledgers.the_budget_of()


# -- runs in place


@EAGER
def test_a_run_in_place_is_settled(ledger: CeleryBudget, draft: Any) -> None:
    assert draft.delay("a").get() == "A"
    assert_settled("tenant:a", 4, task=draft, count=1, outcome="returned")
    assert_held("tenant:a", 0)


@EAGER
def test_an_error_in_place_is_raised_and_charged(ledger: CeleryBudget, draft: Any) -> None:
    with pytest.raises(LookupError):
        draft.delay("a", used=None)
    [failed] = assert_settled("tenant:a", outcome="raised")
    assert failed.settled == ledger.balance("tenant:a").spent


@EAGER
def test_a_chain_in_place(ledger: CeleryBudget, draft: Any) -> None:
    assert (draft.s("a", 1) | draft.si("a", 2)).delay().get() == "A"
    assert_settled("tenant:a", 3, count=2)


@pytest.mark.budget_ledger(eager=True, lease_seconds=77)
@pytest.mark.budget_ledger(eager=False)
def test_the_nearest_mark_counts(ledger: CeleryBudget) -> None:
    assert ledger.app.conf.task_always_eager is False
    assert ledger.settings.lease_seconds == 77


def test_leases_are_kept_in_the_ledger_where_the_run_began(
    budget_app: Celery, draft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the next one, which the application has by the thread's turn."""
    kept: list[str] = []
    begun = threading.Semaphore(0)

    def renew(place: Any, *rest: object) -> None:
        kept.append(place.store.place)
        begun.release()

    monkeypatch.setattr(leases, "renew_until", renew)
    places = []
    for _ in range(2):
        with in_memory(budget_app, eager=True) as ledger:
            ledger.set("tenant:a", limit=25, unit="tokens")
            draft.delay("a")
            draft.delay("a")
            places.append(ledger.store.place)
            assert begun.acquire(timeout=30)
    assert kept == places


# -- assertions


def test_assertions_tell_what_there_is_instead(ledger: CeleryBudget, draft: Any) -> None:
    draft.delay("a")
    draft.delay("a")
    refuses(draft)
    reserved = "shop.draft on 'tenant:a': reserved 10, holds 10, settled 0 tokens (reserved)"
    for wrong, expected, listed in (
        (lambda: assert_reserved("tenant:a", 21), "with 21 in all, found 2 with 20", reserved),
        (lambda: assert_reserved("tenant:a", count=1), "expected 1, found 2", reserved),
        (lambda: assert_reserved("tenant:b"), "expected at least one, found 0", reserved),
        (lambda: assert_reserved(task="shop.other"), "by shop.other: expected", reserved),
        (lambda: assert_reserved(count=0), "expected 0, found 2", reserved),
        (lambda: assert_held("tenant:a", 10), "with 10 in all, found 2 with 20", reserved),
        (lambda: assert_settled("tenant:a"), "requests settled on 'tenant:a'", reserved),
        (lambda: assert_settled(outcome="raised"), "settled as raised", reserved),
        (lambda: assert_refused(count=2), "expected 2, found 1", "1 refused (held)"),
        (lambda: assert_refused(reason="blocked"), "refused as blocked: expected", "asked for 10"),
        (lambda: assert_refused("tenant:b"), "found 0", "on 'tenant:a': 1 refused"),
        (assert_parked, "expected at least one, found 0", "nothing"),
    ):
        with pytest.raises(AssertionError) as caught:
            wrong()
        assert expected in str(caught.value)
        assert listed in str(caught.value)


def test_an_amount_is_one_of_a_budget(ledger: CeleryBudget) -> None:
    with pytest.raises(TypeError, match="name the budget"):
        assert_reserved(amount=3)


def test_assertions_return_what_they_found(ledger: CeleryBudget, draft: Any) -> None:
    ledger.set("all", limit=15, unit="tokens")
    ledger.set("tenant:a", parent="all")
    result = draft.apply_async(("a",), request_id="r1")
    [request] = assert_reserved("all", 10, task=draft)
    assert (request.task_id, request.request_id) == (result.id, "r1")
    assert (request.budget, request.held, request.state) == ("all", 10, "reserved")
    assert len(assert_reserved(task=draft)) == 2
    refuses(draft)
    [refusal] = assert_refused("all", task=draft, count=1)
    assert (refusal.reason, refusal.requested) == ("held", 10)
    assert_refused("tenant:a", count=0)


def test_what_is_parked(ledger: CeleryBudget, draft: Any) -> None:
    draft.delay("a")
    draft.delay("a")
    result = draft.apply_async(("a",), on_refused="park")
    [parked] = assert_parked("tenant:a", task=draft, count=1)
    assert (parked.task_id, parked.needs) == (result.id, 10)
    assert_refused(count=0)
    ledger.set("tenant:a", limit=30)
    sweep()
    assert_parked(count=0)
    assert_reserved("tenant:a", 30)


# -- frozen budgets


def test_a_frozen_budget_refuses_until_its_block_ends(ledger: CeleryBudget, draft: Any) -> None:
    with testing.freeze_budget("tenant:a"):
        assert refuses(draft) == "blocked"
    assert ledger.standing("tenant:a").budget.limit == 25
    draft.delay("a")


def test_it_has_its_limit_back_after_an_error(ledger: CeleryBudget) -> None:
    with pytest.raises(LookupError), testing.freeze_budget("tenant:a"):
        raise LookupError
    assert ledger.balance("tenant:a").limit == 25


def test_without_a_name_all_are_frozen(ledger: CeleryBudget, draft: Any) -> None:
    ledger.set("tenant:*", limit=100, unit="tokens")
    ledger.set("all", limit=None, unit="tokens")
    ledger.set("share", limit="50%", parent="all")
    draft.delay("made")
    with testing.freeze_budget():
        for tenant in ("a", "made", "unseen"):
            with pytest.raises(BudgetExceeded):
                draft.delay(tenant)
    for tenant in ("a", "made", "unseen"):
        draft.delay(tenant)
    [declared] = ledger.declared().values()
    limits = {one.name: str(one.limit) for one in declared}
    assert limits == {"all": "None", "share": "50%", "tenant:*": "100", "tenant:a": "25"}


def test_a_limit_is_pinned(
    ledger: CeleryBudget, draft: Any, freeze_budget: Callable[..., Any]
) -> None:
    freeze_budget("tenant:a", limit=10)
    draft.delay("a")
    assert refuses(draft) == "held"


def test_the_fixtures_block_ends_it_once(
    ledger: CeleryBudget, draft: Any, freeze_budget: Callable[..., Any]
) -> None:
    with freeze_budget("tenant:a"):
        assert refuses(draft) == "blocked"
    assert ledger.balance("tenant:a").limit == 25
    ledger.set("tenant:a", limit=50)
    with freeze_budget("tenant:a", limit=5):
        pass
    assert ledger.balance("tenant:a").limit == 50


def test_an_unknown_budget_is_not_frozen(ledger: CeleryBudget) -> None:
    with pytest.raises(UnknownBudget), testing.freeze_budget("tenant:a", "tenant:b"):
        pass
    assert ledger.balance("tenant:a").limit == 25


# -- time


@pytest.mark.budget_clock("2026-01-31T23:59:50Z")
def test_windows_go_by_the_clock(ledger: CeleryBudget, budget_clock: Clock, draft: Any) -> None:
    ledger.set("tenant:a", limit=10, period="month", timezone="UTC")
    draft.delay("a")
    assert refuses(draft) == "held"
    budget_clock.advance(9)
    assert refuses(draft) == "held"
    budget_clock.advance(1)
    draft.delay("a")


# So long that no thread renews it meanwhile.
@pytest.mark.budget_ledger(eager=True, lease_seconds=36_000)
def test_leases_go_by_the_clock(ledger: CeleryBudget, budget_clock: Clock) -> None:

    @budgeted(budget="tenant:a", estimate=10)
    @ledger.app.task(name="shop.long", shared=False)
    def long(seconds: float) -> None:
        budget_clock.advance(seconds)
        # What is lapsed at the first look is suspected, and lost when that time is over as well.
        for _ in range(2):
            sweep()
            budget_clock.advance(seconds)
        sweep()

    with pytest.raises(AttemptLost):
        long.delay(36_001)
    [lost] = assert_settled("tenant:a", 10)
    assert lost.state == "lost"


def test_deadlines_go_by_the_clock(ledger: CeleryBudget, budget_clock: Clock, draft: Any) -> None:
    result = draft.apply_async(("a",), deadline=60)
    budget_clock.advance(59)
    sweep()
    assert_held("tenant:a", 10)
    budget_clock.advance(timedelta(seconds=2))
    sweep()
    [request] = assert_reserved("tenant:a")
    assert (request.held, request.state) == (0, "released")
    assert result.state == "REVOKED"


def test_grants_go_by_the_clock(ledger: CeleryBudget, budget_clock: Clock, draft: Any) -> None:
    ledger.grant("tenant:a", 10, until=budget_clock.now + timedelta(hours=1))
    assert ledger.balance("tenant:a").limit == 35
    budget_clock.advance(hours=1, minutes=1)
    assert ledger.balance("tenant:a").limit == 25


def test_a_clock_stands_still_and_goes_forward() -> None:
    clock = Clock(datetime(2026, 1, 1, 1, 0, 0, 123_456, timezone(timedelta(hours=1))))
    assert clock.now == datetime(2026, 1, 1, 0, 0, 0, 123_000, timezone.utc)
    assert clock.now_us() == 1_767_225_600_123_000
    assert clock.advance(1.5, minutes=1).isoformat() == "2026-01-01T00:01:01.623000+00:00"
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1)
    with pytest.raises(ValueError, match="no time zone"):
        clock.move_to(datetime(2027, 1, 1))  # noqa: DTZ001 - what is refused
    assert clock.now.second == 1


def test_the_next_ledger_has_the_real_clock(budget_app: Celery, draft: Any) -> None:
    with in_memory(budget_app, clock=Clock(datetime(2030, 1, 1, tzinfo=timezone.utc))) as ledger:
        ledger.set("tenant:a", limit=25, unit="tokens")
        [entry] = _created(ledger, draft)
        assert entry == 2030
    before = datetime.now(timezone.utc).year
    with in_memory(budget_app) as ledger:
        ledger.set("tenant:a", limit=25, unit="tokens")
        [entry] = _created(ledger, draft)
        assert before <= entry <= datetime.now(timezone.utc).year


def _created(ledger: CeleryBudget, draft: Any) -> Iterator[int]:
    task_id = draft.delay("a").id
    for story in ledger.explain(task_id):
        yield datetime.fromtimestamp(story.reservation["created_us"] / 1_000_000, timezone.utc).year
