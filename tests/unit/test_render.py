"""Tables and documents: exact, complete when piped, literal about what they show."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import RenderableType

from celery_budget.core.budgets import Balance, Budget, Share
from celery_budget.core.declarations import Change
from celery_budget.core.periods import Period
from celery_budget.reconcile import (
    Drift,
    Entry,
    Grant,
    Reconciliation,
    RelaySeen,
    Report,
    Standing,
    Story,
    Suggestion,
    Template,
)
from celery_budget.render.budgets import (
    balances_table,
    budgets_view,
    changes_table,
    journal_table,
    standing_view,
)
from celery_budget.render.documents import json_document
from celery_budget.render.grids import Grid
from celery_budget.render.reports import report_view
from celery_budget.render.stories import stories_view
from celery_budget.render.tables import (
    drift_table,
    grid_table,
    relays_table,
    suggestions_table,
    verdict,
)
from celery_budget.render.text import as_text, instant, literal, moment, number
from tests.unit import sample

BIG = 2**63 - 1
ACME = Balance("acme", "tokens", 1_000_000, 250_000, 1234)
DRIFT = Drift("draft", "tokens_of", "2", 3, 1000, 1000, ceiling=1.5)
RELAY = RelaySeen("host-1", 4711, 0, 0, 1.25, True)
SECOND = 1_000_000


def lines(view: RenderableType, **options: Any) -> list[str]:
    return as_text(view, **options).splitlines()


def test_numbers_have_separators_and_none_is_unlimited() -> None:
    assert number(BIG) == "9,223,372,036,854,775,807"
    assert number(-1234) == "-1,234"
    assert number(None) == "unlimited"


@pytest.mark.parametrize(
    ("microseconds", "written"),
    [
        (0, "1970-01-01T00:00:00.000000Z"),
        (1_700_000_000_123_457, "2023-11-14T22:13:20.123457Z"),
        (BIG, str(BIG)),
    ],
)
def test_times_are_utc_to_the_microsecond(microseconds: int, written: str) -> None:
    assert moment(microseconds) == written


def test_times_for_people_are_days_and_seconds() -> None:
    assert instant(1_700_000_000_123_457) == "2023-11-14 22:13:20"
    assert instant(86_400_000_000) == "1970-01-02"
    assert instant(BIG) == str(BIG)


def test_a_balance_is_one_row_of_right_aligned_numbers() -> None:
    heading, _, acme, free = lines(
        balances_table([ACME, Balance("free", "micro-usd", None, 0, BIG)])
    )
    assert heading.split() == ["budget", "unit", "limit", "reserved", "spent", "available"]
    assert acme.split() == ["acme", "tokens", "1,000,000", "250,000", "1,234", "748,766"]
    assert free.split() == ["free", "micro-usd", "unlimited", "0", number(BIG), "unlimited"]
    assert {line.rindex(end) + len(end) for line, end in ((acme, "1,234"), (free, ",807"))} == {
        heading.index("spent") + len("spent")
    }


def test_more_used_than_allowed_is_marked() -> None:
    *_, row = lines(balances_table([replace(ACME, limit=1000)]))
    assert row.split()[-2:] == ["-250,234", "overcommitted"]
    assert "overcommitted" not in as_text(balances_table([replace(ACME, limit=251_234)]))


def test_no_budgets_tells_how_to_create_one() -> None:
    assert "budget set NAME" in as_text(balances_table([]))


@pytest.mark.parametrize(
    ("estimated", "actual", "shown"),
    [
        (1000, 1000, ["1.00"]),
        (1000, 1500, ["1.50"]),
        (1000, 1501, ["1.50", "estimated", "too", "low"]),
        (1000, 500, ["0.50"]),
        (1000, 499, ["0.50", "estimated", "too", "high"]),
        (0, 0, ["-"]),
        (0, 7, ["-", "estimated", "too", "low"]),
        (BIG, BIG, ["1.00"]),
    ],
)
def test_drift_is_marked_where_it_is_far_off(estimated: int, actual: int, shown: list[str]) -> None:
    shows = lines(drift_table([replace(DRIFT, estimated=estimated, actual=actual)]))
    [row] = [line for line in shows if line.split()[0] == "draft"]
    assert row.split() == [
        "draft",
        "tokens_of:2",
        "3",
        number(estimated),
        number(actual),
        *shown,
    ]


def test_above_its_ceiling_an_estimator_is_to_be_mended_before_a_limit() -> None:
    far = replace(DRIFT, stage="my draft", actual=1801)
    shadow = replace(far, version="3", shadow=True, ceiling=None)
    *_, row, advice = lines(drift_table([DRIFT, far, shadow]))
    assert row.split()[-1] == "shadow"
    assert advice == (
        "stage my draft used 1.80 times what estimator tokens_of (version 2) promised, above 1.5: "
        "mend the estimator before you change a limit; see "
        "'celery -A PROJ budget suggest --stage 'my draft''"
    )
    *_, advice = lines(drift_table([replace(DRIFT, estimated=0)]))
    assert "did not promise at all: mend the estimator" in advice


def test_suggestions_are_shown_with_how_many_they_are_of() -> None:
    one = Suggestion("draft", "tokens", 1200, 0.95, 4000, 1500, BIG, 900)
    *_, row, said = lines(suggestions_table([one]))
    assert row.split() == ["draft", "tokens", "1,200", "4,000", "1,500", number(BIG), "75%"]
    assert "what 0.95 of the last requests" in said
    assert "Nothing has been measured yet: no success" in lines(suggestions_table([]))[0]
    assert "measured yet of stage [b]: no" in lines(suggestions_table([], "[b]"))[0]


@pytest.mark.parametrize(
    ("relay", "shown"),
    [
        (RELAY, ["1.2", "s", "ago", "sleeping"]),
        (replace(RELAY, sleeping=False), ["1.2", "s", "ago"]),
        (replace(RELAY, seconds=1500.0), ["1,500.0", "s", "ago", "gone"]),
    ],
)
def test_a_relay_is_shown_with_what_it_does(relay: RelaySeen, shown: list[str]) -> None:
    *_, row = lines(relays_table([relay]))
    assert row.split() == ["host-1", "4711", *shown]


def test_the_verdict_is_one_line_where_the_ledger_adds_up() -> None:
    nothing = {"reserved": 0, "due": 0, "parked": 0}
    assert lines(verdict(Reconciliation((), nothing), 1200)) == [
        "the ledger adds up: 1,200 requests, nothing open"
    ]
    some = {"untold": 2, "parked": 1, "due": 1, "unclosed": 2, "running": 1, "reserved": 3}
    some["cancelling"] = 1
    [line] = lines(verdict(Reconciliation((), some), 1))
    assert line == (
        "the ledger adds up: 1 request, open: 1 parked, 3 reserved, 1 running, "
        "1 cancellation requested, 2 attempts not closed, 1 message to publish, "
        "2 results not stored"
    )


def test_the_verdict_lists_each_mismatch() -> None:
    assert lines(verdict(Reconciliation(("budget 'a' is off", "task [b] is off"), {}), 2)) == [
        "the ledger does not add up: 2 mismatches",
        "- budget 'a' is off",
        "- task [b] is off",
    ]
    assert lines(verdict(Reconciliation(("x",), {}), 2))[0].endswith("1 mismatch")


def test_a_report_has_all_parts_in_order() -> None:
    counts = {"admitted": 2, "refused": 1, "settled": 2, "over": 1}
    report = Report((ACME,), counts, (DRIFT,), (RELAY,))
    text = as_text(report_view(report))
    parts = ["Budgets", "acme", "Requests", "admitted", "refused", "settled", "over",
             "Estimated and actual", "draft", "Relays", "host-1",
             "2 requests, nothing open"]  # fmt: skip
    assert [text.index(part) for part in parts] == sorted(text.index(part) for part in parts)


def test_an_empty_report_says_so() -> None:
    text = as_text(report_view(Report((), {"admitted": 0})))
    assert "There are no budgets yet" in text
    assert "Nothing has been measured yet" in text
    assert "No relay runs" in text
    assert "0 requests, nothing open" in text


def test_piped_text_is_neither_cut_nor_coloured_nor_padded() -> None:
    name = "tenant:" + "x" * 248
    text = as_text(balances_table([replace(ACME, budget=name, limit=1)]))
    assert name in text
    assert "\x1b" not in text
    assert "…" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_a_narrow_terminal_folds_names_and_keeps_numbers_whole() -> None:
    balance = Balance("tenant:" + "x" * 50, "tokens", BIG, 0, 0)
    found = lines(balances_table([balance]), width=40)
    assert any(number(BIG) in line for line in found)
    assert sum(line.count("x") for line in found) == 50
    assert max(map(len, found)) <= 40


def test_a_terminal_gets_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in as_text(verdict(Reconciliation((), {}), 0), colour=True)


@pytest.mark.parametrize("name", ["[red]x[/red]", ":smile:", "tenant:[bold]", "naïve", "日本"])
def test_names_are_shown_as_they_are(name: str) -> None:
    assert name in as_text(balances_table([replace(ACME, budget=name)]))


def test_what_could_move_a_terminal_is_escaped() -> None:
    assert literal("a\x1b[2Jb\nc\u202ed").plain == "a\\x1b[2Jb\\nc\\u202ed"


def test_a_stream_that_is_not_unicode_gets_ascii() -> None:
    text = as_text(balances_table([replace(ACME, budget="naïve")]), encoding="ascii")
    assert text.isascii()
    assert "na\\xefve" in text


def test_json_is_exact_sorted_and_ascii() -> None:
    written = json_document({"b": BIG, "a": {"d": None, "c": "ï"}})
    assert json.loads(written) == {"a": {"c": "ï", "d": None}, "b": BIG}
    assert str(BIG) in written
    assert written.isascii()
    assert [written.index(f'"{key}"') for key in "acdb"] == sorted(
        written.index(f'"{key}"') for key in "acdb"
    )
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_document({"a": float("nan")})


def names(view: RenderableType) -> list[str]:
    """The first column of a table of balances, with its indentation."""
    return [line.split(" tokens")[0].rstrip() for line in lines(view)[2:]]


def test_balances_are_a_tree_by_name() -> None:
    def of(name: str, parent: str | None = None) -> Balance:
        return replace(ACME, budget=name, parent=parent)

    tree = [of("b/2", "b"), of("b"), of("a"), of("b/1/x", "b/1"), of("b/1", "b")]
    assert names(balances_table(tree)) == ["a", "b", "  b/1", "    b/1/x", "  b/2"]
    assert names(balances_table([of("lone", "elsewhere")])) == ["lone"]
    deep = [of(str(at), str(at - 1) if at > 1000 else None) for at in range(1000, 3000)]
    assert names(balances_table(deep))[-1] == " " * 2 * 1999 + "2999"


def test_state_and_period_are_shown_where_there_is_something_to_show() -> None:
    plain = lines(balances_table([ACME]))
    assert "period" not in plain[0]
    odd = replace(ACME, budget="b", limit=5, period="hour", state="draining")
    heading, _, acme, row = lines(balances_table([ACME, odd]))
    assert "period" in heading
    assert acme.split()[:3] == ["acme", "tokens", "1,000,000"]
    assert row.split()[:3] == ["b", "tokens", "hour"]
    assert row.endswith("draining, overcommitted")


TEMPLATE = Template(Budget("user:*", "tokens", Share(125_000), "acme", Period("week")), "open", 1)


def test_templates_are_a_section_of_their_own() -> None:
    found = lines(budgets_view([ACME], [TEMPLATE, replace(TEMPLATE, state="closed")]))
    assert found[found.index("") + 1] == "Templates, for budgets yet unseen"
    words = ["user:*", "tokens", "12.5%", "acme", "week", "in", "UTC,", "from", "day", "1", "1"]
    assert found[-2].split() == words
    assert found[-1].split() == [*words, "closed"]
    assert "Templates" not in as_text(budgets_view([ACME], []))
    assert lines(budgets_view([], [TEMPLATE]))[0].startswith("Templates")
    assert "12.5% of the parent's" in as_text(standing_view(TEMPLATE))


def test_a_budget_in_full() -> None:
    budget = Budget("b", "tokens", 0, "acme", Period("month", "Asia/Tokyo", 5), 500_000)
    balance = Balance("b", "tokens", BIG, 0, 0, "acme", "month", SECOND, 2 * SECOND)
    grant = Grant("k[1]", "b", BIG, SECOND, None, "me@host", 0)
    text = as_text(standing_view(Standing(budget, balance, "*", True, (grant,), (ACME,), 0, "b")))
    facts = dict(line.split("  ", 1) for line in text.split("\n\n")[0].splitlines())
    assert {name: fact.strip() for name, fact in facts.items()} == {
        "budget": "b",
        "state": "open",
        "unit": "tokens",
        "limit": f"{number(BIG)} (0 and {number(BIG)} granted), blocks everything",
        "parent": "acme",
        "period": "month in Asia/Tokyo, from day 5",
        "window": "1970-01-01T00:00:01.000000Z to 1970-01-01T00:00:02.000000Z",
        "soft stop": f"50%: {number(BIG // 2)}",
        "new work": "0",
        "template": "*",
    }
    assert text.index("acme  ") < text.index("  b ") < text.index("k[1]")
    assert "1970-01-01T00:00:01.000000Z   me@host" in text


def test_changes_are_told_term_by_term() -> None:
    before, after = Budget("b", "tokens", 5), Budget("b", "tokens", BIG, soft_stop=800_000)
    changes = [
        Change("r", "a", "add", None, Budget("a", "usd", 0)),
        Change("r", "b", "change", before, after),
        Change("other", "c", "close", before, None),
    ]
    found = [line.split() for line in lines(changes_table(changes, "r"))]
    assert found[0] == ["budget", "root", "term", "before", "after"]
    assert found[2:] == [
        ["add", "a", "unit", "usd"],
        ["limit", "0"],
        ["change", "b", "limit", "5", f"{BIG:_}"],
        ["soft_stop", "1", "0.8"],
        ["close", "c", "other"],
    ]
    assert "root" not in as_text(changes_table(changes[:2], "r"))


def test_a_journal_is_signed_and_exact() -> None:
    entry = Entry("b", 0, 1200, SECOND, "adjust", "me@h", None, 0, -BIG, 0, 0, "x [y]")
    heading, _, row = lines(journal_table([entry]))
    assert heading.split()[:4] == ["entry", "when", "what", "reserved"]
    assert row.split()[:5] == ["1,200", "1970-01-01T00:00:01.000000Z", "adjust", "0", f"-{BIG:,}"]
    assert row.endswith("x [y]")
    assert "window" not in heading
    assert "reservation" not in heading
    windowed = replace(entry, window_us=SECOND, reservation_id="r-1", reserved=5)
    assert "window" in lines(journal_table([windowed]))[0]
    assert "r-1" in as_text(journal_table([windowed]))
    assert "+5" in as_text(journal_table([windowed]))
    assert as_text(journal_table([])) == "Nothing was drawn on it yet.\n"


def a_story(**changes: Any) -> Story:
    reservation: dict[str, Any] = {
        "task_id": "t-1", "task_name": "shop.draft", "state": "settled", "reason": None,
        "owner": "acme", "request_id": "order-1", "reservation_id": "r-1", "parent_id": None,
        "stage": "draft", "estimator": "tokens_of", "estimator_version": "2", "over": True,
        "unmetered": False, "unreserved": False, "created_us": SECOND, "ended_us": 5 * SECOND,
        "cancelled_us": None, "parked": [],
    }  # fmt: skip
    attempt = {
        "attempt": 1, "worker": "w@h", "started_us": 3 * SECOND, "ended_us": 5 * SECOND + 9,
        "outcome": "returned", "lease_until_us": None,
    }  # fmt: skip
    record = {"attempt": 1, "amount": 12_000, "key": "resp-1", "late": False}
    line = {"budget": "acme", "estimate": 10_000, "reserved": 0, "used": 12_000, "settled": 12_000}
    return Story(
        {**reservation, **changes.pop("reservation", {})},
        changes.pop("lines", (line,)),
        changes.pop("messages", ()),
        changes.pop("attempts", (attempt,)),
        changes.pop("usage", ({**record, "recorded_us": 4 * SECOND},)),
        changes.pop("effects", ()),
    )


def events(story: Story) -> list[str]:
    found = lines(stories_view([story]))
    return [line.split("Z", 1)[1].strip() for line in found if line.startswith("1970-")]


def test_a_story_tells_facts_amounts_and_events_in_order() -> None:
    found = lines(stories_view([a_story()]))
    facts = dict(line.split(None, 1) for line in found[: found.index("")])
    assert facts["task"] == "shop.draft[t-1]"
    assert facts["request"] == "order-1"
    assert facts["flags"] == "over: used more than estimated"
    assert "parent" not in facts
    assert ["acme", "10,000", "0", "12,000", "12,000"] in [line.split() for line in found]
    assert "1970-01-01T00:00:03.000000Z   attempt 1 started on w@h" in found
    assert events(a_story()) == [
        "admitted",
        "attempt 1 started on w@h",
        "attempt 1 used 12,000 (resp-1)",
        "attempt 1 returned",
        "settled",
    ]


def message(**changes: Any) -> dict[str, Any]:
    return {
        "state": "due", "created_us": SECOND, "due_us": 2 * SECOND, "published_us": None,
        "publishes": 0, "failures": 0, "last_error": None, "queue": "celery", "after_attempt": None,
        **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "message due at 1970-01-01T00:00:02.000000Z"),
        ({"state": "blocked", "after_attempt": 2}, "message held back until attempt 2 ends"),
        ({"published_us": SECOND, "publishes": 1}, "published to celery"),
        ({"published_us": SECOND, "publishes": 3}, "published to celery, 3 times so far"),
        (
            {"state": "blocked", "after_attempt": 1, "last_error": "GONE\n- no queue"},
            (
                "message held back until attempt 1 ends; "
                "publishing failed, last with: GONE\\n- no queue"
            ),
        ),
    ],
)
def test_a_story_tells_where_its_message_is(changes: dict[str, Any], told: str) -> None:
    open_ = {"state": "reserved", "ended_us": None}
    story = a_story(reservation=open_, messages=(message(**changes),), attempts=(), usage=())
    assert events(story) == ["admitted", told]


def test_a_story_tells_that_it_was_cancelled_while_it_ran() -> None:
    story = a_story(reservation={"cancelled_us": 4 * SECOND, "reason": "cancelled"})
    assert "cancelled while it ran" in events(story)
    assert lines(stories_view([story]))[1].split() == ["state", "settled:", "cancelled"]


def test_a_story_tells_its_deadline() -> None:
    told = [line.split() for line in lines(stories_view([a_story()]))]
    assert not any(line[:1] == ["deadline"] for line in told)
    bound = a_story(reservation={"deadline_us": 9 * SECOND})
    told = [line.split() for line in lines(stories_view([bound]))]
    assert ["deadline", "1970-01-01T00:00:09.000000Z"] in told


def test_a_story_tells_open_attempts_and_late_usage() -> None:
    attempt = a_story().attempts[0]
    running = {**attempt, "ended_us": None, "lease_until_us": 9 * SECOND}
    assert events(a_story(attempts=(running,), reservation={"ended_us": None}))[1] == (
        "attempt 1 started on w@h, lease until 1970-01-01T00:00:09.000000Z"
    )
    unclosed = {**attempt, "lease_until_us": 9 * SECOND}
    assert "attempt 1 returned, not closed yet" in events(a_story(attempts=(unclosed,)))
    late = {**a_story().usage[0], "late": True, "recorded_us": 6 * SECOND}
    assert events(a_story(usage=(late,)))[-1] == (
        "attempt 1 used 12,000 (resp-1), after the request had ended"
    )


def test_a_story_tells_effects() -> None:
    effect = {"attempt": 1, "key": "mail", "value": '"sent"', "created_us": 4 * SECOND}
    assert "attempt 1 had effect mail" in events(a_story(effects=(effect,)))


def test_a_story_tells_why_it_ended_and_what_it_waits_for() -> None:
    ended = a_story(reservation={"state": "released", "reason": "expired"})
    assert any(
        line.split() == ["state", "released:", "expired"] for line in lines(stories_view([ended]))
    )
    wait = {"created_us": SECOND, "deadline_us": 2 * SECOND, "task_name": "t", "owner": "acme"}
    wait |= {"budget": "acme", "amount": 1200}
    waits = (
        "for 1,200 of budget acme since 1970-01-01T00:00:01.000000Z, "
        "given up at 1970-01-01T00:00:02.000000Z"
    )
    parked = Story({**wait, "state": "parked"}, (), (), (), ())
    assert waits in as_text(stories_view([parked]))
    assert waits in as_text(stories_view([a_story(reservation={"parked": [wait]})]))


def test_what_was_given_up_was_never_admitted() -> None:
    ended = {"state": "released", "reason": "park_expired", "created_us": 2 * SECOND}
    ended |= {"ended_us": 2 * SECOND + 1, "admitted": False}
    given_up = a_story(attempts=(), usage=(), reservation=ended)
    assert events(given_up) == ["given up: it waited too long for budget"]
    # One that was admitted first, and parked later.
    late = a_story(attempts=(), usage=(), reservation={**ended, "admitted": True})
    assert events(late) == ["admitted", "released"]


def test_two_stories_are_apart() -> None:
    found = lines(stories_view([a_story(), a_story()]))
    assert found[found.index("task         shop.draft[t-1]", 1) - 1] == ""


def test_a_story_tells_what_shadows_would_have_promised() -> None:
    story = a_story(reservation={"shadows": '{"draft:3": 1, "draft:2": 1200}'})
    shown = [line.split() for line in lines(stories_view([story]))]
    assert ["shadows", "draft:2:", "1,200,", "draft:3:", "1"] in shown


def test_a_report_has_every_section_and_fits_eighty_columns() -> None:
    named = replace(
        sample.BY_TENANT,
        balances=sample.BALANCES[:4],
        amounts=sample.BY_TENANT.amounts[:2],
        groups=tuple(replace(one, amounts=one.amounts[:2]) for one in sample.groups()[:2]),
        drift=sample.DRIFT[:4],
    )
    found = lines(report_view(named), width=80)
    titles = ["Budgets", "Windows", "Requests", "Refused", "Parked", "Failures", "Lanes",
              "Estimated and charged", "Estimated and actual", "Times", "Requests by tenant",
              "Failures by tenant", "Times by tenant", "Estimated and charged by tenant",
              "Relays", "Quarantine"]  # fmt: skip
    assert [line for line in found if line in titles] == titles
    assert found[0] == "Requests admitted since 2029-12-27 (UTC)"
    text = "\n".join(found)
    assert "month    2030-01-01   2030-02-01   org, tenant:acme, tenant:initech" in text
    assert "tenant:acme       31   20.8 min" in text
    assert ["tenant:initech", "exhausted", "1,100"] in [line.split()[:3] for line in found]
    assert max(map(len, found)) <= 80


def test_a_grid_that_is_too_wide_is_several() -> None:
    columns = ["name", *(f"figure {at}" for at in range(6))]
    rows = [("x" * 20, *["1,000,000,000"] * 6), ("y", *["2"] * 6)]
    grid = Grid.of("t", columns, rows, columns[1:])
    wide, narrow = as_text(grid_table(grid)), lines(grid_table(grid), width=60)
    assert len(wide.splitlines()) == 4
    assert max(map(len, narrow)) <= 60
    for at in range(6):
        assert sum(f"figure {at}" in line for line in narrow) == 1
    assert sum(line.count("1,000,000,000") for line in narrow) == 6
    assert sum(line.startswith("name") for line in narrow) == 3
    assert as_text(grid_table(Grid.of("t", ["a"], [], ["a"]))).split() == ["a", "─"]


def test_a_row_without_room_for_its_words_is_a_list() -> None:
    task = "shop.review[8b40fa8a-32fd-46b9-92d3-91e567b87994]"
    rows = [("300", task, "tenant:initech", "until its end"), ("20", task, "", "none")]
    grid = Grid.of("t", ["held", "by", "owner", "next"], rows, ["held"])
    wide, narrow = as_text(grid_table(grid)), lines(grid_table(grid), width=60)
    assert len(wide.splitlines()) == 4
    assert max(map(len, narrow)) <= 60
    assert narrow == [
        "held   300",
        f"by     {task}",
        "owner  tenant:initech",
        "next   until its end",
        "",
        "held   20",
        f"by     {task}",
        "next   none",
    ]


def test_a_table_is_not_split_where_its_parts_would_not_say_what_they_are_of() -> None:
    rows = [("7", "x" * 10, "1,000"), ("8", "y" * 10, "2,000")]
    grid = Grid.of("t", ["entry", "what", "spent"], rows, ["entry", "spent"])
    assert len(as_text(grid_table(grid)).splitlines()) == 4
    narrow = lines(grid_table(grid), width=20)
    assert narrow[:4] == ["entry  7", f"what   {'x' * 10}", "spent  1,000", ""]
