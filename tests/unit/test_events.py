"""What is logged is the list of events, and nothing else; the page says what the list says."""

from __future__ import annotations

import ast
import json
import logging
import re
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_budget import events
from celery_budget.events import EVENTS, FIELDS, PREFIX, Event, Logger
from tests.messages import phrases

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "celery_budget").rglob("*.py"))
TOLD = {"event", "exception"}
#: Where handlers and levels are set, and nothing is logged.
SETS_UP = [ROOT / "celery_budget" / "cli" / "streams.py"]
#: What a logger of logging's own is asked.
LOGS = {"debug", "info", "warning", "warn", "error", "critical", "fatal", "log"}

NOT_YET = "not yet raised by a test"
#: Events at WARNING or above that no test sees, and why.
UNSEEN: dict[str, str] = {
    "delivery.unreserved": NOT_YET,
    "usage.unrecorded": NOT_YET,
}


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def calls(path: Path) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]


def emissions(path: Path) -> list[ast.Call]:
    """Return the calls of a module that tell an event."""
    return [
        call
        for call in calls(path)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in TOLD
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "logger"
    ]


def faults(path: Path) -> list[str]:
    """Return what in a module logs past the list, or with other fields than the list has."""
    found = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Import)
            and any(one.name == "logging" for one in node.names)
            and path not in SETS_UP
        ):
            found.append(f"{node.lineno}: imports logging")
        if isinstance(node, ast.ImportFrom) and node.module in ("logging", "celery.utils.log"):
            found.append(f"{node.lineno}: imports from {node.module}")
    for call in calls(path):
        assert isinstance(call.func, ast.Attribute)
        if call.func.attr in LOGS and "log" in ast.unparse(call.func.value).lower():
            found.append(f"{call.lineno}: {ast.unparse(call.func)}")
    for call in emissions(path):
        if len(call.args) != 1 or not isinstance(call.args[0], ast.Constant):
            found.append(f"{call.lineno}: gives its event otherwise than by a literal name")
            continue
        event = EVENTS.get(call.args[0].value)
        given = sorted(str(one.arg) for one in call.keywords if one.arg != "exc_info")
        if event is None:
            found.append(f"{call.lineno}: {call.args[0].value!r} is not in the list")
        elif given != list(event.fields):
            found.append(f"{call.lineno}: {event.name} has {given}, not {list(event.fields)}")
    return found


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name != "events.py"], ids=named)
def test_a_module_tells_events_of_the_list_and_logs_nothing_else(path: Path) -> None:
    assert faults(path) == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("import logging", "imports logging"),
        ("from logging import getLogger", "imports from logging"),
        ("logger.warning('x')", "logger.warning"),
        ("self._log.info('x')", "self._log.info"),
        ("logger.event('no.such')", "is not in the list"),
        ("logger.event(name)", "otherwise than by a literal"),
        ("logger.event('lane.awake')", "has [], not ['lane']"),
        ("logger.event('lane.awake', lane=1, task_id=2)", "has ['lane', 'task_id']"),
        ("logger.exception('lane.awake', **all)", "has ['None']"),
    ],
)
def test_what_bypasses_the_list_is_found(line: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(line)
    [found] = faults(path)
    assert fault in found


def test_every_event_of_the_list_is_told_somewhere() -> None:
    told = {
        call.args[0].value
        for path in SOURCES
        for call in emissions(path)
        if isinstance(call.args[0], ast.Constant)
    }
    assert told == set(EVENTS)


def test_every_field_means_something_and_is_used() -> None:
    assert {field for event in EVENTS.values() for field in event.fields} == set(FIELDS)
    assert all(FIELDS.values())


@pytest.mark.parametrize("event", EVENTS.values(), ids=lambda event: event.name)
def test_an_event_reaches_any_formatter_with_all_its_fields(event: Event) -> None:
    """By the record's own attributes, which is what formatters for machines write."""
    logger = Logger("celery_budget.of_this_test")
    records: list[logging.LogRecord] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    beneath = logging.getLogger("celery_budget.of_this_test")
    handler = Kept()
    beneath.addHandler(handler)
    beneath.setLevel(logging.DEBUG)
    try:
        logger.event(event.name, **dict.fromkeys(event.fields, 7))
    finally:
        beneath.removeHandler(handler)
        beneath.setLevel(logging.NOTSET)
    [record] = records
    assert record.levelno == event.level
    assert "%" not in record.getMessage()
    own = {key: value for key, value in vars(record).items() if key.startswith(PREFIX)}
    assert own == {"budget_event": event.name} | {f"budget_{one}": 7 for one in event.fields}
    assert record.funcName == "test_an_event_reaches_any_formatter_with_all_its_fields"
    assert not set(own) & set(vars(logging.makeLogRecord({})))


def test_values_are_plain_so_that_json_has_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    one = uuid.UUID(int=1)
    Logger("celery_budget.x").event(
        "request.admitted",
        task="t",
        task_id="1",
        reservation_id=one,
        stage="s",
        estimated=lambda: {"tenant:a": 2**63 - 1},
        seconds=0.5,
    )
    Logger("celery_budget.x").event("usage.unrecorded", error=ValueError("no"), reservation_id=one)
    first, second = caplog.records
    told = {key: value for key, value in vars(first).items() if key.startswith(PREFIX)}
    assert json.loads(json.dumps(told)) == told
    assert told["budget_reservation_id"] == str(one)
    assert told["budget_estimated"] == {"tenant:a": 2**63 - 1}
    assert vars(second)["budget_error"] == "no"


def test_nothing_is_made_of_an_event_whose_level_is_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    asked: list[Any] = []
    logger = Logger("celery_budget.x")
    logger.event("spool.opened", path=lambda: asked.append(1))
    assert asked == []
    caplog.set_level(logging.DEBUG)
    logger.event("spool.opened", path=lambda: asked.append(1))
    assert asked == [1]


def test_a_traceback_comes_with_an_exception(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("why")
    except ValueError:
        Logger("celery_budget.x").exception("step.failed", step="the sweep")
    assert "ValueError: why" in caplog.text


@pytest.mark.parametrize(
    "event",
    [event for event in EVENTS.values() if event.level >= logging.ERROR],
    ids=lambda event: event.name,
)
def test_an_error_says_to_what_it_happened_and_what_follows(event: Event) -> None:
    happened, *follows = event.text.split("; ")
    assert "%(" in happened
    assert follows
    assert event.text[-1] not in ".;,:!"


def words(text: str) -> set[str]:
    """Each three words of it in a row, between its fields."""
    template = re.sub(r"%\(\w+\)[.\d]*[a-z]", "…", text)
    return {one.rstrip(";,:") for one in phrases(template)}


def seen(tree: ast.Module) -> Iterator[str]:
    """What a test looks for: its literals, but its documentation, and lists of events.

    Neither is an event that it tells by itself.
    """
    left_out = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in TOLD:
            left_out |= set(map(id, node.args))
        if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict):
            beneath = node.values if isinstance(node, ast.Dict) else node.elts
            names = [one for one in beneath if getattr(one, "value", None) in EVENTS]
            if len(names) > 2:
                left_out |= set(map(id, names))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in left_out:
            # A pattern without its escapes.
            yield str(node.value).replace("\\", "")


def unseen(sources: Iterator[str]) -> set[str]:
    """Return the events at WARNING or above that these tests do not look for.

    An event is looked for by its name, or by three words of its text that no other event has.
    """
    everything = "\n".join({one for source in sources for one in seen(ast.parse(source))})
    shared = Counter(row for event in EVENTS.values() for row in words(event.text))
    return {
        event.name
        for event in EVENTS.values()
        if event.level >= logging.WARNING
        and not re.search(rf"(?<![\w.]){re.escape(event.name)}(?![\w.])", everything)
        and not any(shared[row] == 1 and row in everything for row in words(event.text))
    }


def test_every_event_that_somebody_should_look_at_is_raised_by_a_test() -> None:
    tests = (path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
    assert unseen(path.read_text(encoding="utf-8") for path in tests) == set(UNSEEN)


@pytest.mark.parametrize(
    ("source", "is_seen"),
    [
        ("assert told(caplog) == ['lane.failed']", True),
        ("assert 'could not be dispatched' in caplog.text", True),
        ("assert text.match(r'lane .* could not be dispatched\\;')", True),
        ("assert 'lane.failed_over' in text", False),
        ("assert 'tries it again' in caplog.text", True),
        ("assert 'task %s could not be ended' in caplog.text", False),
        ("'lane.failed could not be dispatched'", False),
        ("logger.exception('lane.failed', lane='x')", False),
        ("EVENTS = ['lane.failed', 'lane.overdue', 'lane.end_failed']", False),
        ("LEVELS = {'a': 'lane.failed', 'b': 'lane.overdue', 'c': 'lane.end_failed'}", False),
    ],
)
def test_what_a_test_looks_for(source: str, is_seen: bool) -> None:
    assert ("lane.failed" not in unseen(iter([source]))) is is_seen


def rows(title: str) -> list[list[str]]:
    """Return the cells of a table's rows, from one heading of the page on."""
    page = (ROOT / "docs" / "log-events.md").read_text(encoding="utf-8")
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in page[page.index(title) :].splitlines()
        if re.match(r"^\| `", line)
    ]


def test_the_page_lists_the_events() -> None:
    listed = [
        (name.strip("` "), level, text, fields.rstrip(" |"))
        for name, level, text, fields in (row for row in rows("## Requests") if len(row) == 4)
    ]
    wanted = {
        (
            event.name,
            logging.getLevelName(event.level),
            event.text,
            ", ".join(f"`{field}`" for field in event.fields) or "none",
        )
        for event in EVENTS.values()
    }
    assert len(listed) == len(EVENTS)
    assert set(listed) == wanted


def test_the_page_says_what_the_fields_mean() -> None:
    listed = {name.strip("` "): meaning.rstrip(" |") for name, meaning in rows("## Fields")}
    assert listed == dict(FIELDS)


def test_the_list_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        events.EVENTS["x"] = EVENTS["lane.awake"]  # type: ignore[index]
