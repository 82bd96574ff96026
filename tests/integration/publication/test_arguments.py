"""Arguments arrive as plain Celery delivers them; what it cannot encode reserves nothing."""

from __future__ import annotations

import enum
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest

from tests.integration.publication.sides import Side, Sides


class Colour(enum.Enum):
    RED = "red"


class Size(str, enum.Enum):
    LARGE = "large"


class Rank(enum.IntEnum):
    FIRST = 1


VALUES: dict[str, Any] = {
    "datetime without zone": datetime(2031, 5, 1, 12, 0, 1, 5),  # noqa: DTZ001
    "datetime in UTC": datetime(2031, 5, 1, 12, tzinfo=timezone.utc),
    "datetime in a zone": datetime(2031, 5, 1, 12, tzinfo=ZoneInfo("Asia/Tokyo")),
    "date": date(2031, 5, 1),
    "time": time(12, 30),
    "time in a zone": time(12, 30, tzinfo=timezone(timedelta(hours=9))),
    "uuid": UUID("4bf92f35-77b3-4da6-a3ce-929d0e0e4736"),
    "bytes": b"\x00\xffraw",
    "decimal": Decimal("10.50"),
    "enum": Colour.RED,
    "text enum": Size.LARGE,
    "number enum": Rank.FIRST,
    "tuple": (1, (2, 3)),
    "text": "ä\u2028🎈",
    "large number": 2**80,
}


def send(side: Side, value: Any, serializer: str) -> str:
    """Send ``value`` through the broker; return what the task got, or the error that was raised."""
    options = {"kwargs": {"tenant": side.tasks.tenant}, "serializer": serializer}
    try:
        side.publish(lambda tasks: tasks.work.apply_async((value,), **options))
    except Exception as error:  # noqa: BLE001 - whatever it is, it must be the same on both sides
        return f"{type(error)}: {error}"
    (message,) = side.take()
    side.execute(message)
    (run,) = side.tasks.ran
    return run.value


@pytest.mark.parametrize("serializer", ["json", "pickle", "yaml", "msgpack"])
@pytest.mark.parametrize("name", VALUES)
def test_an_argument_arrives_as_by_celery(sides: Sides, serializer: str, name: str) -> None:
    before = sides.budget.shop.ledger()
    expected = send(sides.plain, VALUES[name], serializer)
    assert send(sides.budget, VALUES[name], serializer) == expected
    if not sides.budget.tasks.ran:
        assert sides.budget.shop.ledger() == before


@pytest.mark.parametrize("serializer", ["json", "pickle", "yaml", "msgpack"])
def test_what_no_serializer_takes_reserves_nothing(sides: Sides, serializer: str) -> None:
    before = sides.budget.shop.ledger()
    expected = send(sides.plain, lambda: None, serializer)
    assert "Error" in expected
    found = send(sides.budget, lambda: None, serializer)
    assert found.split(" at 0x")[0] == expected.split(" at 0x")[0]
    assert sides.budget.shop.ledger() == before
