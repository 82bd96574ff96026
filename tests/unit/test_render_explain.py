"""How one request's life, one budget's holds and a lane's shares are written for people."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from celery_budget.core.backpressure import Outlook
from celery_budget.core.budgets import Balance, Budget
from celery_budget.core.lanes import Lane, Load
from celery_budget.errors import BudgetExceeded
from celery_budget.reconcile import (
    Asking,
    BudgetStory,
    HeldWindow,
    Hold,
    LaneStanding,
    Next,
    RefusedFor,
    Standing,
    TenantShare,
    Waiting,
)
from celery_budget.render.holdings import budget_view
from celery_budget.render.lanes import lane_view
from celery_budget.render.stories import stories_view
from celery_budget.render.timeline import events_of
from tests.unit.test_render import SECOND, a_story, events, lines, message

ACME = Balance("acme", "tokens", 1000, 250, 100)
LATE = "which its worker did not renew so far"
AT = "1970-01-01T00:00:0{}.000000Z"
TO_THE_SECOND = "1970-01-01 00:00:0{}"


def words(view: Any) -> list[list[str]]:
    return [line.split() for line in lines(view)]


def facts(story: Any) -> dict[str, str]:
    found = lines(stories_view([story]))
    return dict(line.split("  ", 1) for line in found[: [*found, ""].index("")])


def test_a_story_tells_each_balance_before_and_after() -> None:
    change = {
        "budget": "acme", "window_us": 0, "at_us": SECOND, "what": "reserve",
        "reserved": 1200, "spent": 0, "reserved_after": 2200, "spent_after": 7,
    }  # fmt: skip
    found = words(stories_view([replace(a_story(), changes=(change,))]))
    assert ["reserve", "acme", "1,000", "->", "2,200", "7", AT.format(1)] in found
    # Windows are told apart where one budget has two.
    both = (change, {**change, "window_us": 2 * SECOND})
    found = words(stories_view([replace(a_story(), changes=both)]))
    assert ["reserve", "acme", AT.format(2), "1,000", "->", "2,200", "7", AT.format(1)] in found
    told = lines(stories_view([replace(a_story(), folded=("acme", "all"))]))
    assert "older changes of acme, all are folded and gone" in told


def test_of_a_long_life_the_first_and_the_last_is_told_and_how_much_more() -> None:
    change = {
        "budget": "acme", "window_us": 0, "at_us": SECOND, "what": "raise",
        "reserved": 1, "spent": 0, "reserved_after": 2, "spent_after": 7,
    }  # fmt: skip
    effects = tuple({"created_us": 9 * SECOND, "attempt": 1, "key": str(n)} for n in range(5000))
    story = replace(a_story(), changes=(change,) * 5000, effects=effects)
    found = lines(stories_view([story]))
    assert len(found) < 500
    assert "and 4,800 more" in found
    assert sum(line.startswith("raise") for line in found) == 200
    [told] = [line for line in found if "more, which --json tells" in line]
    known = len(events_of(replace(story, effects=()))) + len(effects)
    assert f"and {known - 200:,} more" in told
    assert found.index(told) < next(i for i, line in enumerate(found) if line.endswith(" 4999"))


def test_a_story_tells_units_windows_and_extensions_where_there_are_any() -> None:
    line = {**a_story().lines[0], "unit": "tokens", "window_us": SECOND, "extended": 5}
    found = words(stories_view([a_story(lines=(line,))]))
    assert ["budget", "unit", "window", "estimate", "extended", "reserved", "used", "settled"] in (
        found
    )
    assert ["acme", "tokens", AT.format(1), "10,000", "5", "0", "12,000", "12,000"] in found
    extension = {
        "attempt": 1, "amount": 5, "unit": "tokens", "key": "more", "extended_us": 4 * SECOND,
    }  # fmt: skip
    told = events(replace(a_story(), extensions=(extension,)))
    assert "attempt 1 extended its hold by 5 tokens (more)" in told


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"unit": "tokens"}, "attempt 1 used 12,000 tokens (resp-1)"),
        ({"details": '{"model": "m-1"}'}, "attempt 1 used 12,000 (resp-1), model m-1"),
        ({"details": "no JSON"}, "attempt 1 used 12,000 (resp-1)"),
        ({"details": "[1]"}, "attempt 1 used 12,000 (resp-1)"),
        ({"assumed": 1000}, "attempt 1 used 12,000 (resp-1), of which 1,000 are assumed"),
        ({"repeated_by": 2}, "attempt 1 used 12,000 (resp-1), told again by attempt 2"),
    ],
    ids=["unit", "model", "no details", "other details", "assumed", "repeated"],
)
def test_a_story_tells_what_is_known_of_a_record(changes: dict[str, Any], told: str) -> None:
    record = {**a_story().usage[0], **changes}
    assert told in events(a_story(usage=(record,)))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"outcome": "raised", "error": "shop.Broken"}, "attempt 1 raised shop.Broken"),
        ({"outcome": "retried", "error": "ValueError"}, "attempt 1 retried by ValueError"),
        ({"pid": 47}, "attempt 1 started on w@h, process 47"),
        (
            {"ended_us": None, "lease_until_us": 9 * SECOND, "suspected_us": 8 * SECOND},
            f"attempt 1 started on w@h, lease until {AT.format(9)}, {LATE}",
        ),
    ],
    ids=["raised", "retried", "pid", "suspected"],
)
def test_a_story_tells_who_ran_it_and_what_it_raised(changes: dict[str, Any], told: str) -> None:
    attempt = {**a_story().attempts[0], **changes}
    assert told in events(a_story(attempts=(attempt,)))


@pytest.mark.parametrize(
    ("published_us", "publishes", "told"),
    [
        (2 * SECOND, 1, (AT.format(2), "published to work")),
        (None, 0, (AT.format(3), "published to work")),
        (8 * SECOND, 2, (AT.format(3), "published to work, 2 times")),
    ],
    ids=["before it started", "not marked yet", "marked once more since"],
)
def test_a_story_tells_of_a_message_that_is_gone(
    published_us: int | None, publishes: int, told: tuple[str, str]
) -> None:
    attempt = {
        **a_story().attempts[0], "retries": 0, "queue": "work", "publishes": publishes,
        "published_us": published_us,
    }  # fmt: skip
    found = lines(stories_view([a_story(attempts=(attempt,))]))
    assert "   ".join(told) in found
    # One that is there tells it itself.
    sent = {**message(published_us=SECOND, publishes=1), "retries": 0}
    assert "published to work" not in events(a_story(attempts=(attempt,), messages=(sent,)))


def test_a_story_tells_how_long_it_waited() -> None:
    waited = {"parked_us": 0, "unparked_us": SECOND, "parked_budget": "acme"}
    waited |= {"parked_reason": "held"}
    story = a_story(reservation=waited)
    assert facts(story)["waited"].strip() == "1.000 s for budget acme"
    assert events(story)[:3] == [
        "parked: waits for budget acme (held)",
        "admitted",
        "parked no longer",
    ]


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("park_expired", "given up: it waited too long for budget"),
        ("deadline", "given up: deadline"),
    ],
)
def test_what_was_never_admitted_is_said_to_be_given_up(reason: str, told: str) -> None:
    ended = {
        "state": "released", "reason": reason, "parked_us": 0, "unparked_us": 9 * SECOND,
        "created_us": 9 * SECOND, "ended_us": 9 * SECOND, "parked_budget": "acme",
        "parked_reason": "held", "admitted": False,
    }  # fmt: skip
    found = events(a_story(attempts=(), usage=(), reservation=ended))
    assert found[-1] == told
    assert "admitted" not in found
    admitted = {**ended, "admitted": True}
    assert "admitted" in events(a_story(attempts=(), usage=(), reservation=admitted))


def test_a_story_tells_its_kin_and_where_it_is_reused() -> None:
    child = {"task_name": "shop.b", "task_id": "t-2", "state": "running", "reservation_id": "r-2"}
    step = {**child, "task_id": "t-3", "state": "planned", "reservation_id": "r-3"}
    free = {"task_name": "shop.free", "task_id": "t-4", "state": "due"}
    story = replace(
        a_story(reservation={"step": 0, "plan_id": "p-1"}),
        parent={**child, "task_id": "t-0"},
        children=(child,),
        followed=4,
        steps=(step,),
        followers=(free,),
        reused=({"owner": "acme", "until_us": SECOND},),
    )
    assert facts(story)["parent"].strip() == "shop.b[t-0], running, r-2"
    assert facts(story)["plan"].strip() == "step 1 of plan p-1"
    assert facts(story)["reused"].strip() == f"by calls of acme, until {AT.format(1)} at the least"
    found = words(stories_view([story]))
    assert ["shop.b[t-2]", "running", "r-2"] in found
    assert ["shop.b[t-3]", "planned", "r-3"] in found
    assert ["shop.free[t-4]", "due,", "no", "budget", "-"] in found
    assert ["and", "3", "more"] in found


def test_a_story_tells_what_comes_next_and_what_was_refused() -> None:
    refusal = {
        "budget": "acme", "reason": "held", "requested": 1200, "reserved": 10, "spent": 0,
        "limit_amount": 1000, "refused_us": SECOND,
    }  # fmt: skip
    story = replace(
        a_story(),
        next=(Next("it is published", 9 * SECOND), Next("something else")),
        refusals=(refusal, {**refusal, "reserved": None}),
    )
    found = lines(stories_view([story]))
    assert f"{AT.format(9)}   it is published" in found
    assert "something else" in [line.strip() for line in found]
    told = "budget acme: held, 1,200 requested"
    assert f"{AT.format(1)}   {told}, 10 reserved and 0 spent of 1,000" in found
    assert f"{AT.format(1)}   {told}" in found


# A budget.


def a_budget(**changes: Any) -> BudgetStory:
    budget = Budget("acme", "tokens", 1000)
    standing = Standing(budget, ACME, None, False, (), (), 650, "acme")
    plain: dict[str, Any] = {
        "standing": standing, "rooms": {"acme": 650}, "windows": (), "holding": {}, "held": {},
        "holds": (), "frees": (), "parked": 0, "oldest_us": None, "waiting": (), "refusals": (),
        "asking": None, "now_us": SECOND,
    }  # fmt: skip
    return BudgetStory(**{**plain, **changes})


def test_a_budget_and_those_above_it_tell_what_they_leave() -> None:
    assert ["acme", "tokens", "1,000", "250", "100", "650"] in words(budget_view(a_budget()))
    above = (Balance("all", "tokens", 350, 250, 100), Balance("top", "tokens", None, 9, 0))
    standing = replace(a_budget().standing, above=above)
    found = words(
        budget_view(a_budget(standing=standing, rooms={"acme": 650, "all": 0, "top": None}))
    )
    assert ["all", "tokens", "350", "250", "100", "0", "short"] in found
    assert ["top", "tokens", "unlimited", "9", "0", "unlimited"] in found


def test_a_budget_tells_its_largest_holds_and_the_rest() -> None:
    hold = Hold(
        "r-1", "t-1", "shop.draft", "acme", "running", 200, SECOND, "w@h",
        (Next("it ends", 9 * SECOND),),
    )  # fmt: skip
    told = a_budget(holding={"running": 1, "reserved": 2}, held={"running": 200, "reserved": 50})
    found = lines(budget_view(replace(told, holds=(hold, replace(hold, held=30, next=())))))
    assert "3 requests hold 250: 1 running (200), 2 reserved (50)" in found
    since, by = TO_THE_SECOND.format(1), TO_THE_SECOND.format(9)
    row = f"200 shop.draft[t-1] acme running on w@h {since} it ends, by {by} (UTC)"
    rows = [line.split() for line in found]
    assert row.split() in rows
    assert ["20", "1", "more,", "each", "of", "them", "less"] in rows
    one = a_budget(holding={"running": 1}, held={"running": 7})
    assert "1 request holds 7: 1 running (7)" in lines(budget_view(one))


def test_a_budget_tells_what_frees_it_waits_for_it_and_was_refused() -> None:
    waits = Waiting(
        "p-1", "t-1", "shop.draft", "acme", "held", 1200, SECOND, 9 * SECOND, True, True
    )
    told = a_budget(
        frees=(Next("the window ends", 9 * SECOND),),
        parked=3,
        waiting=(waits,),
        refusals=(RefusedFor("held", 1200, SECOND, 7, "shop.draft"),),
        windows=(HeldWindow(SECOND, 2 * SECOND, 5, 6, False), HeldWindow(0, None, 1, 2, True)),
    )
    found = words(budget_view(told))
    assert [AT.format(9), "the", "window", "ends"] in found
    since, until = TO_THE_SECOND.format(1), TO_THE_SECOND.format(9)
    marks = "goes ahead of all, has run before"
    assert f"1,200 shop.draft[t-1] acme {since} {until} {marks}".split() in found
    assert ["3", "requests", "wait", "for", "it,", "in", "the", "order"] in [
        line[:8] for line in found
    ]
    assert ["2", "more", "after", "these"] in found
    assert f"held 1,200 {since} 7 shop.draft".split() in found
    assert [*since.split(), "5", "6"] in found
    assert ["1970-01-01", "1", "2"] not in found


def test_a_budget_tells_what_a_request_would_meet() -> None:
    fits = a_budget(asking=Asking(1200, Outlook(True)))
    assert "A new request of 1,200 would be admitted now." in lines(budget_view(fits))
    error = BudgetExceeded("acme", "tokens", 1200, 650, 1000, 250, 100, "exhausted", 1000, 60.0)
    [told] = [
        line
        for line in lines(budget_view(a_budget(asking=Asking(1200, Outlook(False, error)))))
        if line.startswith("A new request")
    ]
    assert told.startswith("A new request of 1,200 would be refused: budget 'acme' can never hold")
    assert told.endswith("; it could fit in 60 s at the earliest")


# A lane.


def test_a_lane_tells_whose_turn_is_next_and_what_each_has_had() -> None:
    share = TenantShare("acme/ann", 1, "acme", 3, Load(2, 1200), 61.0, 0, SECOND)
    idle = TenantShare("initech", None, None, 1, Load(), 0.0, 4000, None)
    one = LaneStanding(
        Lane("llm", ("celery",)), Load(), Load(), Load(), 0.0, None, None, None, None, (share, idle)
    )
    found = words(lane_view(one))
    assert ["1", "acme/ann", "acme", "3", "2", "(1,200)", "61", "s", "0", AT.format(1)] in found
    assert ["-", "initech", "1", "0", "(0)", "-", "4,000", "-"] in found
    assert "turn" not in str(words(lane_view(replace(one, shares=()))))
