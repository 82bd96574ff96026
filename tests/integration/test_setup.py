"""Every order in which an application, its configuration, its tasks and its budget may come."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
from celery import Celery
from kombu.utils.objects import cached_property

from celery_budget import (
    BudgetedTask,
    BudgetError,
    CeleryBudget,
    budgeted,
    parking,
    recovery,
)
from celery_budget.errors import ConfigurationError
from celery_budget.integration.context import installed_on
from celery_budget.upkeep import Upkeep
from tests.integration.placements import BUDGET, NAME, above_task, fresh
from tests.integration.support import Shop, current, make_app, received


def test_without_being_current(shop: Shop) -> None:
    assert not shop.app.set_as_current
    above_task(shop.app).delay(4, "a")
    assert shop.amounts("tenant:a") == (4, 0, 6)


def test_a_configuration_object_after_the_budget(sqlite_url: str) -> None:
    class Config:
        broker_url = "memory://"
        task_default_queue = "config-object"
        budget_database_url = sqlite_url
        budget_root = "elsewhere"
        budget_lease_seconds = 37

    app = Celery("configured", set_as_current=False)
    budget = CeleryBudget(app)
    app.config_from_object(Config)
    assert budget.settings.database_url == sqlite_url
    assert (budget.settings.root, budget.settings.lease_seconds) == ("elsewhere", 37.0)
    app.close()


def test_a_configuration_object_that_comes_late_is_read(sqlite_url: str) -> None:
    """The settings are read at first use, not when the gate or a task is made."""
    app = Celery("late", set_as_current=False)
    task = budgeted(**BUDGET)(app.task(name=NAME)(fresh()))
    CeleryBudget(app)
    app.config_from_object(
        {"broker_url": "memory://", "task_default_queue": "late", "budget_database_url": sqlite_url}
    )
    shop = Shop(app, installed_on(app))
    shop.budget.init()
    shop.budget.set("tenant:a", limit=10, unit="tokens")
    task.delay(4, "a")
    assert shop.amounts("tenant:a") == (4, 0, 6)
    shop.close()


@pytest.mark.parametrize("first", ["budget", "configuration"])
def test_the_celery_namespace(first: str, sqlite_url: str) -> None:
    configuration = {
        "CELERY_BROKER_URL": "memory://",
        "CELERY_TASK_DEFAULT_QUEUE": f"namespace-{first}",
        "CELERY_BUDGET_DATABASE_URL": sqlite_url,
        "CELERY_BUDGET_MAX_PUBLISHES": 3,
    }
    app = Celery("namespaced", set_as_current=False)
    if first == "budget":
        CeleryBudget(app)
    app.config_from_object(configuration, namespace="CELERY")
    if first == "configuration":
        CeleryBudget(app)
    shop = Shop(app, installed_on(app))
    assert shop.budget.settings.database_url == sqlite_url
    assert shop.budget.settings.max_publishes == 3
    shop.budget.init()
    shop.budget.set("tenant:a", limit=10, unit="tokens")
    above_task(app).delay(4, "a")
    assert shop.amounts("tenant:a") == (4, 0, 6)
    shop.close()


def test_a_missing_database_url_is_named_with_both_forms() -> None:
    app = make_app()
    task = above_task(app)
    with pytest.raises(ConfigurationError, match=r"budget_database_url.*postgresql.*sqlite"):
        task.delay(1, "a")
    assert received(app, app.conf.task_default_queue) == []
    app.close()


def test_a_second_budget_on_one_application_is_an_error(shop: Shop) -> None:
    with pytest.raises(BudgetError, match="already"):
        CeleryBudget(shop.app)


def test_an_amqp_class_of_its_own_is_kept(sqlite_url: str) -> None:
    from celery.app.amqp import AMQP

    class Own(AMQP):
        @cached_property
        def mine(self) -> bool:
            return True

    app = Celery("own", set_as_current=False, amqp=Own)
    CeleryBudget(app)
    assert app.amqp.mine
    app.close()


def test_tasks_found_by_autodiscovery(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "found_shop"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "tasks.py").write_text(
        textwrap.dedent(
            """
            from celery import shared_task
            from celery_budget import BudgetedTask, budgeted

            @budgeted(budget="tenant:{tenant}", estimate=1)
            @shared_task
            def above(tenant):
                pass

            @shared_task
            @budgeted(budget="tenant:{tenant}", estimate=1)
            def beneath(tenant):
                pass

            @budgeted(budget="tenant:{tenant}", estimate=1)
            def alone(tenant):
                pass

            @shared_task(base=BudgetedTask, budget="tenant:{tenant}", estimate=1)
            def spelled(tenant):
                pass
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with current(shop.app):
        shop.app.autodiscover_tasks(["found_shop"])
        shop.app.loader.import_default_modules()
        names = [f"found_shop.tasks.{name}" for name in ("above", "beneath", "alone", "spelled")]
        for name in names:
            assert isinstance(shop.task(name), BudgetedTask), name
            shop.app.send_task(name, ("a",))
        module = sys.modules["found_shop.tasks"]
        for name in ("above", "beneath", "alone", "spelled"):
            getattr(module, name).delay("a")
    assert shop.amounts("tenant:a") == (8, 0, 2)
    del sys.modules["found_shop.tasks"], sys.modules["found_shop"]


def test_a_step_of_the_sweep_that_fails_does_not_stop_the_others(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def fail(upkeep: Upkeep) -> None:
        raise RuntimeError("no windows")

    monkeypatch.setattr(Upkeep, "run_once", fail)
    monkeypatch.setattr(parking, "run_once", lambda *args: done.append("parked"))
    monkeypatch.setattr(recovery, "run_once", lambda *args: done.append("recovery"))
    with pytest.raises(RuntimeError, match="no windows"):
        shop.sweep()
    assert done == ["parked", "recovery"]
