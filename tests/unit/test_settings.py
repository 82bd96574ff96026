"""Settings, read and checked."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from decimal import Decimal
from typing import Any

import pytest

from celery_budget.errors import ConfigurationError
from celery_budget.settings import PREFIX, Settings

URL = "sqlite:////tmp/budget.db"
LISTEN = "postgresql+psycopg://budget@direct/budget"
REPLICA = "postgresql+psycopg://b:secret@replica/ledger"


def read(**values: Any) -> Settings:
    configuration = {f"{PREFIX}{name}": value for name, value in values.items()}
    return Settings.read(configuration.get)


def test_only_the_url_is_required() -> None:
    assert read(database_url=URL) == Settings(database_url=URL)


def test_without_a_url_both_forms_are_shown() -> None:
    with pytest.raises(ConfigurationError) as caught:
        read()
    assert "budget_database_url is not set" in str(caught.value)
    for form in ("postgresql+psycopg://user@host/name", "sqlite:////absolute/path.db"):
        assert form in str(caught.value)


def test_every_setting_can_be_set_and_none_is_read_beside_them() -> None:
    values: dict[str, Any] = {
        "str": "reject", "bool": False, "int": 7, "float": 7.5,
        "Mapping[str, str]": {"eu": "amqp://eu//"},
        "Mapping[str, float]": {"*": 1.5, "draft": 1.2},
        "tuple[float, ...]": (0.5, 1.2), "Callable[..., Any] | str | None": "shop.alerts:notify",
        "Mapping[str, Mapping[str, Decimal]]": {"m-1": {"input_mtok": Decimal("0.15")}},
    }  # fmt: skip
    wanted: dict[str, Any] = {field.name: values[str(field.type)] for field in fields(Settings)}
    wanted |= {"database_url": LISTEN, "listen_url": LISTEN, "report_url": REPLICA}
    settings = read(**wanted)
    assert {field.name: getattr(settings, field.name) for field in fields(Settings)} == wanted
    asked: list[str] = []

    def get(key: str) -> Any:
        asked.append(key)
        return URL if key == "budget_database_url" else None

    Settings.read(get)
    assert asked == [f"budget_{field.name}" for field in fields(Settings)]


def test_every_setting_is_documented() -> None:
    for field in fields(Settings):
        assert f":ivar {field.name}:" in str(Settings.__doc__)


async def _notify(alert: Any) -> None:
    """Cannot be called from a thread."""


class _Notifier:
    async def __call__(self, alert: Any) -> None:
        """Nor can this."""


@pytest.mark.parametrize("given", [(0.95, 0.8), [0.8, 0.95, 0.8], "80%, 95%", ("80%", "0.95")])
def test_thresholds_are_written_in_several_ways(given: Any) -> None:
    settings = read(database_url=URL, alert_at=given)
    assert settings.alert_at == (0.8, 0.95)
    assert settings.alert_parts == (800_000, 950_000)


@pytest.mark.parametrize("given", [(), [], "none"])
def test_no_thresholds_are_none(given: Any) -> None:
    assert read(database_url=URL, alert_at=given).alert_parts == ()


@pytest.mark.parametrize(
    "name",
    [
        "alert_parked_seconds",
        "alert_quarantine",
        "alert_drift_requests",
        "alert_overdue_seconds",
        "alert_reconcile_seconds",
    ],
)
def test_alerts_can_be_switched_off(name: str) -> None:
    assert getattr(read(database_url=URL, **{name: 0}), name) == 0


BAD: list[Any] = [
    ("database_url", "budget.db", "sqlite:////absolute"),
    ("database_url", 7, "give text"),
    ("database_url", "", "give text"),
    ("listen_url", "direct", "postgresql+psycopg://"),
    ("listen_url", URL, "the ledger's PostgreSQL"),
    ("report_url", "replica", "postgresql+psycopg://"),
    ("report_url", REPLICA, "a replica of the ledger's PostgreSQL"),  # of a ledger in SQLite
    ("root", "", "give text"),
    ("root", "a\nb", "control characters"),
    ("money_unit", "a\nb", "control characters"),
    ("alert_at", 0.8, "give shares of the limit"),
    ("alert_at", (0.8, 0), "give shares of the limit"),
    ("alert_at", (True,), "give shares of the limit"),
    ("alert_at", (10.1,), "up to 1000%"),
    ("alert_at", "default", "give shares such as"),
    ("alert_at", [one / 20 for one in range(1, 12)], "at most 10"),
    ("on_alert", "notify", "module:name"),
    ("on_alert", 7, "module:name"),
    ("on_alert", _notify, "a coroutine function"),
    ("on_alert", _Notifier(), "a coroutine function"),
    ("alert_seconds", 0, "above 0"),
    ("alert_quarantine", -1, "above 0"),
    ("drift_ceilings", 1.5, "no mapping of stages"),
    ("drift_ceilings", {"draft": 0}, "a number above 0"),
    ("drift_ceilings", {"draft": True}, "a number above 0"),
    ("drift_ceilings", {"draft": float("nan")}, "a number above 0"),
    ("drift_ceilings", {7: 1.5}, "give a stage"),
    ("tracing", "yes", "give True or False"),
    ("tracing", 1, "give True or False"),
    ("prices", "m-1", "no mapping of models"),
    ("prices", {"m-1": 0.15}, "input_mtok"),
    ("prices", {"m-1": {}}, "input_mtok"),
    ("prices", {"m-1": {"input_mtok": -1}}, "a number of dollars"),
    ("prices", {"m-1": {"input_mtok": "much"}}, "a number of dollars"),
    ("prices", {"m-1": {"input_mtok": float("nan")}}, "a number of dollars"),
    ("prices", {"m-1": {"input_mtok": True}}, "a number of dollars"),
    ("unreserved", "maybe", "'admit' or 'reject'"),
    ("effect_retention_seconds", 0, "above 0"),
    ("effect_retention_seconds", 86_399, "by budget_park_seconds a message may come again"),
    ("lease_seconds", 0.5, "shorter than a second"),
    ("lease_seconds", 29, "shorter than budget_publish_seconds (30.0)"),
    ("lease_seconds", 0, "above 0"),
    ("lease_seconds", -1, "above 0"),
    ("lease_seconds", "60", "a number"),
    ("lease_seconds", True, "a number"),
    ("lease_seconds", float("nan"), "a number"),
    ("lease_seconds", float("inf"), "a number"),
    ("batch_size", 1.5, "an integer"),
    ("batch_size", 0, "an integer"),
    ("batch_size", "many", "an integer"),
    ("batch_size", 10_001, "at most 10000"),
    ("max_deliveries", -3, "an integer"),
    ("metrics_port", 65_536, "at most 65535, or 0 for none"),
    ("metrics_port", -1, "an integer"),
    ("metrics_port", False, "an integer"),
    ("metrics_labels", 0, "above 0"),
    ("metrics_labels", 10_001, "at most 10000"),
    ("metrics_host", "", "text"),
    ("brokers", "amqp://eu//", "no mapping"),
    ("brokers", {"": "amqp://eu//"}, "the name ''"),
    ("brokers", {"e u": "amqp://eu//"}, "the name 'e u'"),
    ("brokers", {7: "amqp://eu//"}, "the name 7"),
    ("brokers", {"eu": "secret"}, "no URL for 'eu'"),
]


@pytest.mark.parametrize(("name", "value", "said"), BAD)
def test_a_value_that_cannot_work_is_named(name: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(**{"database_url": URL, name: value})
    assert str(caught.value).startswith(f"budget_{name}")
    assert said in str(caught.value)


def test_a_port_may_be_none() -> None:
    assert read(database_url=URL, metrics_port=0).metrics_port == 0


@pytest.mark.parametrize(("name", "value"), [("batch_size", 20.0), ("lease_seconds", 90)])
def test_numbers_take_the_type_of_their_setting(name: str, value: Any) -> None:
    read_back = getattr(read(**{"database_url": URL, name: value}), name)
    assert read_back == value
    assert type(read_back) is (int if name == "batch_size" else float)


def test_times_are_told_in_the_units_of_the_store() -> None:
    settings = read(
        database_url=URL,
        lease_seconds=1.5,
        park_seconds=2,
        publish_seconds=1.25,
        republish_seconds=4,
        effect_retention_seconds=5,
        lookup_seconds=6,
        lock_seconds=0.25,
    )
    assert settings.lease_us == 1_500_000
    assert settings.park_us == 2_000_000
    assert settings.publish_us == 1_250_000
    assert settings.lookup_us == 6_000_000
    assert (settings.renew_seconds, settings.renew_us) == (0.375, 375_000)
    assert settings.republish_us == 4_000_000
    assert settings.effect_retention_us == 5_000_000
    assert settings.lock_ms == 250


def test_a_lease_is_longer_than_a_renewal_may_take() -> None:
    with pytest.raises(ConfigurationError, match="shorter than budget_lock_seconds"):
        read(database_url=URL, lock_seconds=61)
    assert read(database_url=URL, lock_seconds=60).lock_ms == 60_000


def test_no_lock_time_is_so_short_that_it_means_for_ever() -> None:
    assert read(database_url=URL, lock_seconds=0.0001).lock_ms == 1


def test_settings_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        read(database_url=URL).root = "other"  # type: ignore[misc]
