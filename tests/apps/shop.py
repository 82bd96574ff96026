"""The application most tests use: built from a dictionary of settings, in any process.

Workers get the dictionary as JSON in ``SHOP_CONF``. Bodies write a line to the file named by
``shop_journal`` for each thing they do, so that a test sees what ran, in whichever process.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from celery import Celery

from celery_budget import CeleryBudget, budgeted, settlement, usage
from celery_budget.integration.publisher import KombuPublisher

TENANT = "tenant:{tenant}"
#: What processes get the settings in.
CONF = "SHOP_CONF"


def make_app(conf: dict[str, Any]) -> Celery:
    """Return the application with its budget and tasks, under the given configuration."""
    app = Celery("shop", set_as_current=False)
    app.conf.update(conf)
    CeleryBudget(app)
    journal = conf["shop_journal"]

    def note(what: str) -> None:
        with open(journal, "a") as file:
            file.write(what + "\n")

    @budgeted(budget=TENANT, estimate=lambda size, tenant: size, stage="draft")
    @app.task(name="shop.draft", shared=False, acks_late=True)
    def draft(size: int, tenant: str, used: int | None = None) -> int:
        """Use ``used`` (by default ``size``) units."""
        note(f"draft {size}")
        actual = size if used is None else used
        usage.record(actual, key="reply")
        return actual

    @budgeted(budget=TENANT, estimate=6)
    @app.task(name="shop.quiet", shared=False, acks_late=True)
    def quiet(tenant: str) -> str:
        """Record nothing."""
        note("quiet")
        return "quiet"

    @budgeted(budget=TENANT, estimate=6)
    @app.task(name="shop.held", shared=False, bind=True, acks_late=True)
    def held(self: Any, name: str, tenant: str) -> str:
        """Run until the file ``name`` appears beside the journal; note start and end."""
        note(f"start {name}")
        usage.record(2, key=f"{name}:{self.request.id}")
        wait_for(Path(journal).parent / name)
        usage.record(3)
        note(f"end {name}")
        return name

    @budgeted(budget=TENANT, estimate=6)
    @app.task(name="shop.held_early", shared=False, acks_late=False)
    def held_early(name: str, tenant: str) -> str:
        """The same, acknowledged before it runs."""
        note(f"start {name}")
        usage.record(2)
        wait_for(Path(journal).parent / name)
        note(f"end {name}")
        return name

    @budgeted(budget=TENANT, estimate=6)
    @app.task(name="shop.done", shared=False, acks_late=True)
    def done(name: str, tenant: str) -> str:
        """Record first, then run until the file ``name`` appears: nothing is left but to end."""
        note(f"start {name}")
        usage.record(4)
        wait_for(Path(journal).parent / name)
        note(f"end {name}")
        return name

    @budgeted(budget=TENANT, estimate=6)
    @app.task(name="shop.busy", shared=False, bind=True, acks_late=True)
    def busy(self: Any, number: int, seconds: float, tenant: str) -> int:
        """Take some time and use 5 units."""
        note(f"start {number}")
        time.sleep(seconds)
        usage.record(5, key=f"busy:{number}")
        note(f"end {number}")
        return number

    @budgeted(budget=TENANT, estimate=6)
    @app.task(name="shop.fail", shared=False, acks_late=True)
    def fail(message: str, tenant: str, used: int = 0) -> None:
        """Use ``used`` units, then raise ``ValueError(message)``."""
        note(f"fail {message}")
        if used:
            usage.record(used)
        raise ValueError(message)

    @budgeted(budget=TENANT, estimate=6)
    @app.task(name="shop.flaky", shared=False, bind=True, acks_late=True, max_retries=5)
    def flaky(self: Any, failures: int, tenant: str, countdown: float = 0) -> int:
        """Use 1 unit and retry ``failures`` times."""
        note(f"flaky {self.request.retries}")
        usage.record(1)
        if self.request.retries < failures:
            raise self.retry(countdown=countdown)
        return int(self.request.retries)

    @budgeted(budget=TENANT, estimate=6)
    @app.task(name="shop.early_retry", shared=False, bind=True, acks_late=True)
    def early_retry(self: Any, name: str, tenant: str) -> int:
        """Publish its retry, then run on until the file ``name`` appears."""
        note(f"run {self.request.retries}")
        usage.record(1)
        if self.request.retries == 0:
            retry = self.retry(countdown=0, throw=False)
            wait_for(Path(journal).parent / name)
            note("first done")
            raise retry
        return int(self.request.retries)

    @app.task(name="shop.plain", shared=False)
    def plain(value: Any) -> Any:
        """No budget at all."""
        note(f"plain {value}")
        return value

    @app.task(name="shop.notice", shared=False)
    def notice(*args: Any) -> None:
        """An errback or callback without a budget."""
        note("notice")

    del draft, quiet, held, held_early, done, busy, fail, flaky, early_retry, plain, notice
    return app


def wait_for(path: Path, seconds: float = 120) -> None:
    """Wait until ``path`` exists."""
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(path)
        time.sleep(0.02)


def die_once_after(point: str, marker: Path) -> None:
    """Have the first process that gets past ``point`` kill itself there, as SIGKILL would.

    :param point: ``claim``, ``end`` or ``close`` of an attempt; ``publish`` of the relay's batch.
    """
    owner, name = {
        "claim": (settlement, "claim"),
        "end": (settlement.Attempt, "end"),
        "close": (settlement.Attempt, "close"),
        "publish": (KombuPublisher, "publish_all"),
    }[point]
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            return result
        os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, call)


def wait_after(point: str, folder: Path) -> None:
    """Have each attempt that gets past ``point`` wait for the file ``on``, once ``at`` is there."""
    function = getattr(settlement.Attempt, point)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        (folder / "at").touch()
        wait_for(folder / "on")
        return result

    setattr(settlement.Attempt, point, call)


def deaf_once(name: str, marker: Path) -> None:
    """Have the first call of what a worker tells the ledger fail, as if its database was away."""
    function = getattr(settlement, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            return function(*args, **kwargs)
        raise ConnectionError(f"{name}: the ledger is away")

    setattr(settlement, name, call)


def break_once(app: Celery, name: str, marker: Path) -> None:
    """Have the first call of a method of the result backend fail, as if its server was away."""
    function = getattr(app.backend, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            return function(*args, **kwargs)
        raise ConnectionError(f"{name}: the backend is away")

    setattr(app.backend, name, call)


if CONF in os.environ:
    _conf = json.loads(os.environ[CONF])
    if "shop_die_after" in _conf:
        die_once_after(_conf["shop_die_after"], Path(_conf["shop_journal"] + ".died"))
    if "shop_wait_after" in _conf:
        wait_after(_conf["shop_wait_after"], Path(_conf["shop_journal"]).parent)
    if "shop_deaf" in _conf:
        deaf_once(_conf["shop_deaf"], Path(_conf["shop_journal"] + ".deaf"))
    app = make_app(_conf)
    if "shop_break" in _conf:
        break_once(app, _conf["shop_break"], Path(_conf["shop_journal"] + ".broke"))
