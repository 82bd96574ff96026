"""The commands of lanes, the facade beneath them, and lanes in ``budgets.toml``."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from celery_budget import Lane, QueueFull, budgeted
from celery_budget.errors import InvalidBudget, InvalidLane, UnknownLane
from celery_budget.store import preflight
from tests.integration.commands import Run, runner
from tests.integration.support import Shop

TASK = "laned.draft"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def draft(shop: Shop) -> Callable[..., object]:
    task = shop.app.tasks.get(TASK)
    if task is None:
        task = budgeted(budget="tenant:a", estimate=6)(
            shop.app.task(name=TASK, shared=False)(_draft)
        )
    return task.delay  # type: ignore[no-any-return]


def _draft(*args: object, **kwargs: object) -> None:
    pass


def test_a_lane_is_made_changed_shown_and_deleted(on_both: Shop, run: Run) -> None:
    app = on_both.app
    assert "no lanes: what is admitted is published at once" in run(app, "lane", "list").out
    assert run(app, "lane", "list", "--json").json == {"lanes": []}
    queue = app.conf.task_default_queue
    done = run(
        app,
        *("lane", "set", "llm", "--queue", queue, "--queue", "more"),
        *("--budget", "free", "--budget", "calls=1"),
        *("--max-running-units", "10_000", "--max-wait", "2h", "--no-preflight", "--json"),
    )
    assert (done.code, done.err) == (0, "")
    assert done.json == {
        "name": "llm",
        "queues": sorted([queue, "more"]),
        "budgets": ["free", "calls=1"],
        "max_queued_jobs": None,
        "max_queued_units": None,
        "max_running_jobs": None,
        "max_running_units": 10_000,
        "burst_units": None,
        "max_waiting_jobs": None,
        "max_waiting_units": None,
        "max_wait_seconds": 7200,
        "preflight": False,
        "ageing": 100,
        "paused": False,
        "waiting": {"jobs": 0, "units": 0},
        "queued": {"jobs": 0, "units": 0},
        "running": {"jobs": 0, "units": 0},
        "oldest_seconds": 0.0,
        "why": None,
        "awake": None,
        "asked_seconds": None,
        "asleep": None,
    }
    # Only what is given changes.
    assert run(app, "lane", "set", "llm", "--max-running-jobs", "1").code == 0
    assert run(app, "lane", "set", "llm", "--max-running-units", "none").code == 0
    assert "free, calls=1" in run(app, "lane", "show", "llm").out
    assert run(app, "lane", "set", "llm", "--budget", "free=x").failed(1, "NAME=AMOUNT")
    assert run(app, "lane", "set", "llm", "--budget", "none", "--json").json["budgets"] == []
    [lane] = [one.lane for one in on_both.budget.lanes.list()]
    assert (lane.max_running_jobs, lane.max_running_units, len(lane.queues)) == (1, None, 2)
    assert run(app, "lane", "delete", "llm", "--json").json == {"lane": "llm", "deleted": True}
    assert run(app, "lane", "show", "llm").failed(1, "no lane is called 'llm'")
    assert run(app, "lane", "set", "llm").failed(2, "nothing is to be changed")
    assert run(app, "lane", "set", "llm", "--ageing", "1").failed(1, "feeds no queue")
    wrong = run(app, "lane", "set", "llm", "--max-wait", "long")
    assert wrong.failed(2, "'--max-wait': 'long' is not a duration")
    assert wrong.failed(2, "12h, 7d or 2w; or 'none' for ever")
    assert run(app, "lane", "pause", "llm").failed(1, "no lane is called 'llm'")


def test_a_lane_takes_the_terms_of_the_page_from_python_too(on_both: Shop) -> None:
    lanes = on_both.budget.lanes
    for wait, kept in ((90, 90_000_000), (timedelta(hours=2), 7_200_000_000), (None, None)):
        assert lanes.set("llm", queues=["llm"], max_wait_seconds=wait).max_wait_us == kept
    before = lanes.show("llm").lane
    for wrong in ("2h", True, -1, float("nan"), float("inf")):
        with pytest.raises(InvalidLane, match="give a number of seconds, a timedelta, or None"):
            lanes.set("llm", max_wait_seconds=wrong)
    for term, hint in (
        ("max_runing_jobs", "did you mean 'max_running_jobs'"),
        ("paused", "pause it by lanes.pause"),
        ("colour", "there are queues, "),
    ):
        with pytest.raises(InvalidLane, match=f"no such term: {term!r}; {hint}"):
            lanes.set("llm", **{term: 1})
    assert lanes.show("llm").lane == before


def test_why_a_lane_holds_work_back_is_shown(on_both: Shop, run: Run) -> None:
    app, publish = on_both.app, draft(on_both)
    on_both.budget.set("tenant:a", limit=1000, unit="tokens")
    queue = app.conf.task_default_queue
    on_both.budget.lanes.set("llm", queues=[queue], max_running_jobs=1, preflight=True)
    publish()
    publish()

    def why() -> tuple[list[str], object]:
        [_, _, row] = run(app, "lane", "list").out.splitlines()
        return row.split()[2:], run(app, "lane", "show", "llm", "--json").json["why"]

    words, reason = why()
    assert words[:6] == ["2", "(12)", "0", "(0)", "0", "(0)"]
    assert " ".join(words[8:]) == "asleep: its workers were not asked lately"
    assert reason == "asleep"
    on_both.budget.store.run(
        preflight.note_answer, on_both.budget.settings.root, "llm", False, "gone"
    )
    assert " ".join(why()[0][8:]) == "asleep: gone"
    on_both.budget.lanes.set("llm", preflight=False)
    assert why()[1] is None
    assert on_both.relay().published == 1
    words, reason = why()
    assert words[:6] == ["1", "(6)", "1", "(6)", "0", "(0)"]
    assert (" ".join(words[8:]), reason) == ("full: running", "running")
    on_both.budget.lanes.set("llm", max_running_jobs=None, max_queued_jobs=1)
    assert why()[1] == "queued"
    assert run(app, "lane", "pause", "llm").code == 0
    assert (" ".join(why()[0][8:]), why()[1]) == ("paused", "paused")
    assert run(app, "lane", "resume", "llm").code == 0
    assert why()[1] == "queued"
    on_both.budget.lanes.set("llm", max_waiting_jobs=1)
    with pytest.raises(QueueFull, match="'llm' is full: 1 jobs wait"):
        publish()
    assert on_both.budget.balance("tenant:a").reserved == 12


FILE = """
[[budget]]
name = "tenant:a"
unit = "tokens"

[lane.llm]
queues = ["llm", "big"]
max_running_units = 200_000
max_wait_seconds = 90.5

[lane."free lane"]
queues = ["free"]
max_waiting_jobs = "none"
preflight = false
root = "elsewhere"
"""


def test_lanes_are_applied_and_exported_beside_budgets(on_both: Shop, run: Run) -> None:
    app, budget = on_both.app, on_both.budget
    done = run(app, "apply", "-", "--json", stdin=FILE.encode())
    changes = {(one["root"], one["what"], one["name"]): one for one in done.json["changes"]}
    root = budget.settings.root
    assert set(changes) == {
        (root, "budget", "tenant:a"),
        (root, "lane", "llm"),
        ("elsewhere", "lane", "free lane"),
    }
    assert changes[root, "lane", "llm"]["changed"] == [
        "queues",
        "max_running_units",
        "max_wait_seconds",
    ]
    assert budget.lanes.show("llm").lane == Lane(
        "llm", ("big", "llm"), max_running_units=200_000, max_wait_us=90_500_000
    )
    # Again it changes nothing, paused or not.
    budget.lanes.pause("llm")
    assert run(app, "apply", "-", "--json", stdin=FILE.encode()).json["changes"] == []
    exported = run(app, "export").out
    assert '[lane."llm"]\nqueues = ["big", "llm"]\nmax_running_units = 200_000\n' in exported
    assert budget.difference(exported) == ()
    assert [one["name"] for one in run(app, "export", "--json").json["lanes"]] == ["llm"]
    # A queue goes from one to another, and what is not named is deleted with --prune only.
    moved = '[lane.llm]\nqueues = ["big"]\n[lane.other]\nqueues = ["llm"]\n'
    table = run(app, "apply", "-", stdin=moved.encode())
    assert "lane llm" in table.out
    assert "queues" in table.out
    assert "1 added, 1 changed" in table.out
    assert budget.lanes.show("llm").lane.paused
    pruned = '[lane.other]\nqueues = ["llm", "big"]\n'
    taken = run(app, "apply", "-", "--json", stdin=pruned.encode())
    assert taken.failed(1, "is fed by lane 'llm'")
    assert run(app, "apply", "-", "--prune", stdin=pruned.encode()).code == 0
    with pytest.raises(UnknownLane):
        budget.lanes.show("llm")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[lane.a]", "feeds no queue"),
        ("[lane]\na = 1", "begin each lane with a table"),
        ('[lane.a]\nqueues = "q"', "queues is 'q' (str); give a list"),
        ('[lane.a]\nqueues = ["q"]\nmax_queued = 1', "did you mean 'max_queued_jobs'?"),
        ('[lane.a]\nqueues = ["q"]\nmax_queued_jobs = "all"', "give an integer, or"),
        ('[lane.a]\nqueues = ["q"]\nmax_queued_jobs = -1', "max_queued_jobs of lane 'a' is -1"),
        ('[lane.a]\nqueues = ["q"]\n[lane.b]\nqueues = ["q"]', "fed by lanes 'a' and 'b'"),
    ],
)
def test_a_file_that_declares_no_lane_changes_nothing(on_both: Shop, text: str, said: str) -> None:
    with pytest.raises(InvalidBudget) as caught:
        on_both.budget.apply(text)
    assert said in str(caught.value)
    assert on_both.budget.lanes.list() == []
