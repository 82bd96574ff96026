"""Every way to declare a budgeted task, and every order in which its application may be set up."""

from __future__ import annotations

import pickle
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task, chain, group, shared_task
from kombu.utils.objects import cached_property

from celery_budget import BudgetedTask, BudgetError, CeleryBudget, InvalidAmount, budgeted
from celery_budget.errors import ConfigurationError, NotInstalled, PolicyError
from celery_budget.integration.context import installed_on
from tests.integration.support import Shop, current, make_app, received, reservation_of

BUDGET: dict[str, Any] = {"budget": "tenant:{tenant}", "estimate": lambda size, tenant: size}
NAME = "declared.draft"


def fresh() -> Any:
    """A function of its own: a declaration leaves its mark on the function."""

    def draft(size: int, tenant: str, extra: int = 0) -> int:
        """Return what it was given."""
        return size + extra

    return draft


# Each placement declares one task on an application that is current, and returns what the user has.


def above_task(app: Celery) -> Any:
    return budgeted(**BUDGET)(app.task(name=NAME, acks_late=True)(fresh()))


def above_ready_task(app: Celery) -> Any:
    return budgeted(**BUDGET)(app.task(name=NAME, acks_late=True, lazy=False)(fresh()))


def beneath_task(app: Celery) -> Any:
    return app.task(name=NAME, acks_late=True)(budgeted(**BUDGET)(fresh()))


def above_shared(app: Celery) -> Any:
    return budgeted(**BUDGET)(shared_task(name=NAME, acks_late=True)(fresh()))


def beneath_shared(app: Celery) -> Any:
    return shared_task(name=NAME, acks_late=True)(budgeted(**BUDGET)(fresh()))


def alone(app: Celery) -> Any:
    return budgeted(name=NAME, acks_late=True, **BUDGET)(fresh())


def with_base(app: Celery) -> Any:
    return app.task(name=NAME, base=BudgetedTask, acks_late=True, **BUDGET)(fresh())


def with_shared_base(app: Celery) -> Any:
    return shared_task(name=NAME, base=BudgetedTask, acks_late=True, **BUDGET)(fresh())


def class_based(app: Celery) -> Any:
    class Draft(BudgetedTask):
        name = NAME
        acks_late = True
        budget = "tenant:{tenant}"
        estimate = staticmethod(lambda size, tenant: size)

        def run(self, size: int, tenant: str, extra: int = 0) -> int:
            return size + extra

    return app.register_task(Draft())


def budgeted_instance(app: Celery) -> Any:
    class Draft(Task):
        name = NAME
        acks_late = True

        def run(self, size: int, tenant: str, extra: int = 0) -> int:
            return size + extra

    return budgeted(**BUDGET)(app.register_task(Draft()))


def bound(app: Celery) -> Any:
    def draft(self: Any, size: int, tenant: str, extra: int = 0) -> int:
        assert self.name == NAME
        return size + extra

    return budgeted(**BUDGET)(app.task(name=NAME, bind=True, acks_late=True)(draft))


def bound_beneath(app: Celery) -> Any:
    def draft(self: Any, size: int, tenant: str, extra: int = 0) -> int:
        assert self.name == NAME
        return size + extra

    return app.task(name=NAME, bind=True, acks_late=True)(budgeted(**BUDGET)(draft))


def bound_alone(app: Celery) -> Any:
    def draft(self: Any, size: int, tenant: str, extra: int = 0) -> int:
        assert self.name == NAME
        return size + extra

    return budgeted(name=NAME, bind=True, acks_late=True, **BUDGET)(draft)


def own_app_task(app: Celery) -> Any:
    class Own(app.Task):
        mine = True

    task = budgeted(**BUDGET)(app.task(name=NAME, base=Own, acks_late=True)(fresh()))
    assert task.mine
    return task


def own_budgeted_base(app: Celery) -> Any:
    class Tenants(BudgetedTask):
        budget = "tenant:{tenant}"

        @staticmethod
        def estimate(size: int) -> int:
            return size

    return app.task(name=NAME, base=Tenants, acks_late=True)(fresh())


def autoretry(app: Celery) -> Any:
    return budgeted(**BUDGET)(
        app.task(name=NAME, acks_late=True, autoretry_for=(ValueError,), retry_backoff=2)(fresh())
    )


def autoretry_alone(app: Celery) -> Any:
    return budgeted(name=NAME, acks_late=True, autoretry_for=(ValueError,), **BUDGET)(fresh())


PLACEMENTS = [
    above_task,
    above_ready_task,
    beneath_task,
    above_shared,
    beneath_shared,
    alone,
    with_base,
    with_shared_base,
    class_based,
    budgeted_instance,
    bound,
    bound_beneath,
    bound_alone,
    own_app_task,
    own_budgeted_base,
    autoretry,
    autoretry_alone,
]
by_placement = pytest.mark.parametrize("declare", PLACEMENTS, ids=lambda one: one.__name__)


@by_placement
@pytest.mark.parametrize(
    "order", ["tasks first", "budget first", "after finalize", "amqp was read"]
)
def test_a_declared_task_is_reserved_wherever_it_is_published_from(
    declare: Callable[[Celery], Any], order: str, sqlite_url: str
) -> None:
    app = make_app(budget=order == "budget first", budget_database_url=sqlite_url)
    with current(app):
        task = declare(app) if order != "budget first" else None
        if order == "after finalize":
            app.finalize()
        if order == "amqp was read":
            assert app.amqp.send_task_message
        if order != "budget first":
            CeleryBudget(app)
        else:
            task = declare(app)
        shop = Shop(app, installed_on(app))
        shop.budget.init()
        shop.budget.set("tenant:a", limit=10, unit="tokens")
        assert task is not None
        task.delay(1, "a")
        task.delay(size=1, tenant="a")
        task.s("a").apply_async((1,))
        task.si(1, "a").delay()
        task.apply_async((1, "a"), {"extra": 2}, countdown=0)
        app.send_task(NAME, (1, "a"))
        group(task.s(1, "a"), task.s(1, "a")).apply_async()
        chain(task.s(1, "a"), task.s("a")).apply_async()
        assert shop.amounts("tenant:a") == (9, 0, 1)
        shop.relay()
        messages = shop.received()
        reservations = {reservation_of(message) for message in messages}
        assert len(messages) == len(reservations - {None}) == 9
        assert {message.headers["task"] for message in messages} == {NAME}
    shop.close()


@by_placement
def test_what_a_declared_task_is_otherwise_stays(
    declare: Callable[[Celery], Any], shop: Shop
) -> None:
    with current(shop.app):
        task = declare(shop.app)
        assert (task.name, task.acks_late) == (NAME, True)
        assert isinstance(shop.task(NAME), BudgetedTask)
        # Called directly it is the function, under no budget.
        assert task(3, "a", extra=4) == 7
        assert task.run(3, "a", extra=4) == 7
        assert task.s(3, "a").task == NAME
        if declare is not class_based and declare is not budgeted_instance:
            assert task.__name__ == "draft"
        assert shop.counts()["admitted"] == 0


@by_placement
def test_wrong_arguments_are_celerys_type_error(
    declare: Callable[[Celery], Any], shop: Shop
) -> None:
    with current(shop.app):
        task = declare(shop.app)
        before = shop.ledger()
        # Celery checks no arguments of class-based tasks; there it is we who find out.
        errors: tuple[type[Exception], ...] = (TypeError,)
        if declare in (class_based, budgeted_instance):
            errors = (PolicyError,)
        for args, kwargs in [((), {}), ((1,), {}), ((1, "a", 2, 3), {}), ((1, "a"), {"no": 1})]:
            with pytest.raises(errors) as found:
                task.apply_async(args, kwargs)
            if errors == (TypeError,):
                assert type(found.value) is TypeError
                assert str(found.value).startswith("draft() ")
        assert shop.ledger() == before
        assert shop.received() == []


def test_alone_is_a_shared_task_of_each_application(tmp_path: Path) -> None:
    @budgeted(name=NAME, **BUDGET)
    def draft(size: int, tenant: str) -> int:
        return size

    shops = []
    for number in range(2):
        app = make_app(f"app{number}", budget_database_url=f"sqlite:///{tmp_path}/{number}.db")
        shop = Shop(app, installed_on(app))
        shop.budget.init()
        shop.budget.set("tenant:a", limit=10, unit="tokens")
        shops.append(shop)
    for number, shop in enumerate(shops):
        with current(shop.app):
            draft.delay(3 + number, "a")
            assert draft.app is shop.app
    assert [shop.amounts("tenant:a")[0] for shop in shops] == [3, 4]
    for shop in shops:
        shop.relay()
        assert len(shop.received()) == 1
        shop.close()


@pytest.mark.parametrize("declare", [above_shared, beneath_shared, with_shared_base, alone])
def test_a_shared_task_is_budgeted_in_applications_made_before_and_after(
    declare: Callable[[Celery], Any], tmp_path: Path
) -> None:
    def make(name: str) -> Shop:
        app = make_app(name, budget_database_url=f"sqlite:///{tmp_path}/{name}.db")
        shop = Shop(app, installed_on(app))
        shop.budget.init()
        shop.budget.set("tenant:a", limit=10, unit="tokens")
        return shop

    finalized = make("finalized")
    finalized.app.finalize()
    open_ = make("open")
    with current(open_.app):
        task = declare(open_.app)
    later = make("later")
    for shop in (finalized, open_, later):
        # By the proxy, by the registry and by name.
        with current(shop.app):
            task.delay(1, "a")
        shop.task(NAME).delay(1, "a")
        shop.app.send_task(NAME, (1, "a"))
        assert shop.amounts("tenant:a") == (3, 0, 7)
        shop.close()


@pytest.mark.parametrize("declare", [above_task, beneath_task, with_base])
def test_an_apps_task_that_celery_shares_with_others_is_budgeted_there_too(
    declare: Callable[[Celery], Any], make_shop: Callable[..., Shop]
) -> None:
    # @app.task(shared=True), the default, makes the task in applications that are finalized later.
    first = make_app("first")
    declare(first)
    first.finalize()
    other = make_shop()
    other.task(NAME).delay(3, "a")
    assert other.amounts("tenant:a") == (3, 0, 7)


@by_placement
def test_without_a_celery_budget_nothing_is_published(declare: Callable[[Celery], Any]) -> None:
    app = make_app(budget=False)
    with current(app):
        task = declare(app)
        plain = app.task(name="declared.plain")(fresh())
        # Beneath @app.task the mark is seen when the application is finalized, not before.
        app.finalize()
        publications: list[Callable[[], Any]] = [
            lambda: task.delay(1, "a"),
            lambda: task.apply_async((1, "a")),
            lambda: task.s(1, "a").delay(),
            lambda: group(task.s(1, "a"), task.s(2, "a")).apply_async(),
            lambda: chain(task.s(1, "a"), plain.s("a")).apply_async(),
        ]
        for publish in publications:
            with pytest.raises(NotInstalled, match="CeleryBudget"):
                publish()
    assert received(app, app.conf.task_default_queue) == []
    app.close()


def test_a_base_class_without_a_budget_is_an_ordinary_task(shop: Shop) -> None:
    task = shop.app.task(name="declared.free", base=BudgetedTask)(fresh())
    before = shop.ledger()
    task.delay(1, "a")
    (message,) = shop.received()
    assert reservation_of(message) is None
    assert shop.ledger() == before


def test_a_call_of_its_own_stays_beneath_the_claim(shop: Shop) -> None:
    """A class's ``__call__`` that does not call the next one must not run work unclaimed."""

    class Loud(shop.app.Task):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs) + 100

    task = budgeted(**BUDGET)(shop.app.task(name=NAME, base=Loud)(fresh()))
    order = [cls.__name__ for cls in type(shop.task(NAME)).__mro__]
    assert order.index("BudgetedTask") < order.index("Loud")
    assert task(1, "a") == 101


def test_a_request_class_of_its_own_is_kept(shop: Shop) -> None:
    class Own(shop.app.Task):
        Request = "celery_budget.integration.worker:BudgetRequest"

    budgeted(**BUDGET)(shop.app.task(name=NAME, base=Own)(fresh()))
    assert shop.task(NAME).Request == Own.Request


@pytest.mark.parametrize("own", [Task, BudgetedTask], ids=["a task", "a budgeted task"])
def test_alone_takes_a_base_class(own: type[Any], shop: Shop) -> None:
    class Base(own):
        abstract = True
        mine = True

    with current(shop.app):
        task = budgeted(name=NAME, base=Base, **BUDGET)(fresh())
        task.delay(2, "a")
        assert task.mine
        assert isinstance(shop.task(NAME), BudgetedTask)
    assert shop.amounts("tenant:a") == (2, 0, 8)


def test_another_task_of_the_same_function_stays_without_a_budget(shop: Shop) -> None:
    function = fresh()
    budgeted(**BUDGET)(shop.app.task(name=NAME)(function))
    free = shop.app.task(name="declared.free")(function)
    assert isinstance(shop.task(NAME), BudgetedTask)
    free.delay(2, "a")
    assert not isinstance(shop.task("declared.free"), BudgetedTask)
    assert shop.amounts("tenant:a") == (0, 0, 10)


# Set-up of the application.


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
        budget_lease_seconds = 7

    app = Celery("configured", set_as_current=False)
    budget = CeleryBudget(app)
    app.config_from_object(Config)
    assert budget.settings.database_url == sqlite_url
    assert (budget.settings.root, budget.settings.lease_seconds) == ("elsewhere", 7.0)
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


# Wrong declarations.


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"budget": None, "estimate": 1}, PolicyError),
        ({"budget": 7, "estimate": 1}, PolicyError),
        ({"budget": "b", "estimate": -1}, InvalidAmount),
        ({"budget": "b", "estimate": 1.5}, InvalidAmount),
        ({"budget": "b", "estimate": True}, InvalidAmount),
        ({"budget": "b", "estimate": "6"}, InvalidAmount),
        ({"budget": "b", "estimate": None}, InvalidAmount),
        ({"budget": "b", "estimate": 2**63}, InvalidAmount),
        ({"budget": "b", "estimate": 1, "stage": ""}, PolicyError),
    ],
    ids=repr,
)
def test_a_wrong_declaration_fails_where_it_is_made(
    wrong: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        budgeted(**wrong)(fresh())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": "b"}, "estimate="),
        ({"estimate": 1}, "budget="),
    ],
    ids=["no estimate", "no budget"],
)
def test_half_a_declaration_on_the_base_class_is_an_error(
    shop: Shop, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(PolicyError, match=says):
        shop.app.task(base=BudgetedTask, lazy=False, name=NAME, **options)(fresh())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"budget": "tenant:{who}", "estimate": 1}, "who"),
        ({"budget": "tenant:{}", "estimate": 1}, "names"),
        ({"budget": "tenant:{", "estimate": 1}, "no template"),
        ({"budget": lambda who: who, "estimate": 1}, "who"),
        ({"budget": "b", "estimate": lambda prompt: prompt}, "prompt"),
    ],
    ids=["template", "empty field", "broken template", "callable budget", "estimator"],
)
def test_a_declaration_that_does_not_fit_its_task_fails_at_first_use(
    shop: Shop, wrong: dict[str, Any], says: str
) -> None:
    task = budgeted(**wrong)(shop.app.task(name=NAME)(fresh()))
    before = shop.ledger()
    with pytest.raises(PolicyError, match=says):
        task.delay(1, "a")
    assert shop.ledger() == before
    assert shop.received() == []


def test_only_functions_and_tasks_can_be_budgeted() -> None:
    with pytest.raises(PolicyError, match="functions and tasks"):
        budgeted(**BUDGET)(7)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("tenant:{tenant}", "tenant:a"),
        ("tenant:{tenant}:{extra:03d}", "tenant:a:004"),
        (lambda tenant: f"tenant:{tenant}", "tenant:a"),
        (lambda **arguments: f"tenant:{arguments['tenant']}", "tenant:a"),
        (lambda tenant, region="eu": f"{region}:{tenant}", "eu:a"),
        ("fixed", "fixed"),
    ],
)
def test_a_budgets_name_comes_from_the_bound_arguments(
    shop: Shop, budget: Any, expected: str
) -> None:
    shop.budget.set(expected, limit=10, unit="tokens")
    task = budgeted(budget=budget, estimate=lambda size, extra: size + extra)(
        shop.app.task(name=NAME)(fresh())
    )
    task.delay(1, tenant="a", extra=4)
    assert shop.amounts(expected) == (5, 0, 5)


def test_a_budgeted_task_can_be_pickled(shop: Shop) -> None:
    with current(shop.app):
        task = above_task(shop.app)
        signature = pickle.loads(pickle.dumps(task.s(2, "a")))  # noqa: S301 - our own bytes
        signature.apply_async()
    assert shop.amounts("tenant:a") == (2, 0, 8)
