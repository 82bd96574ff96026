"""One run of the simulator, from a seed."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from celery_budget.settings import Settings
from celery_budget.store import Store
from tests.simulation.clients import ROLES, drain, found, playing
from tests.simulation.scheduler import NoMonitor, PostgresMonitor, Scheduler, Stuck
from tests.simulation.world import World

__all__ = ["Run", "simulate"]

FAULTS = 5


@dataclass
class Run:
    """What a seed led to.

    :ivar trace: who went on with what, in order, and how it broke down.
    :ivar problems: what was wrong; empty where all held.
    """

    seed: int
    dialect: str
    trace: list[tuple[str, str, str | None]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        steps = (
            f"{number:5} {name}: {kind}{'' if fault is None else f', and it {fault}'}"
            for number, (name, kind, fault) in enumerate(self.trace, 1)
        )
        return "\n".join(
            [
                *steps,
                f"seed {self.seed} on {self.dialect} went wrong:",
                *(f"  {problem}" for problem in self.problems[:20]),
                f"replay it with: make simulate SEEDS={self.seed} ARGS='-k {self.dialect}'",
            ]
        )


def simulate(seed: int, store: Store) -> Run:
    """Run the clients of one new root to their ends, in the order of ``seed``, and check all."""
    url = store._engine.url.render_as_string(False)
    run = Run(seed, store.dialect)
    settings = Settings(
        database_url=url,
        root=f"sim-{seed}-{uuid.uuid4().hex[:8]}",
        lease_seconds=3600,
        lock_seconds=600,
        batch_size=3,
    )
    monitor = PostgresMonitor(url) if store.dialect == "postgresql" else NoMonitor()
    world = World(store, settings, run.problems)
    scheduler = Scheduler(seed, monitor, world.at_commit, FAULTS)
    scheduler.problems, scheduler.trace = run.problems, run.trace
    try:
        with _seeded(scheduler):
            found(world)
            for name, role, turns in ROLES:
                scheduler.start(name, playing(role, turns, world))
            scheduler.run()
            run.counts["steps"] = len(run.trace)
            drain(world)
            world.at_commit()
            world.at_end()
            run.counts["admitted"] = sum(world.heard.values())
    except Stuck as stuck:
        run.problems.append(str(stuck))
    finally:
        if isinstance(monitor, PostgresMonitor):
            monitor.close()
    return run


@contextmanager
def _seeded(scheduler: Scheduler) -> Iterator[None]:
    """Ids come from who makes them and when, as the seed orders it; nobody waits to try again."""
    last = itertools.count(1)

    def new_id() -> uuid.UUID:
        client = scheduler.client_of(threading.current_thread())
        if client is None:
            return uuid.UUID(int=(1 << 100) + next(last))
        client.ids += 1
        return uuid.UUID(int=(client.granted << 64) + (client.number << 32) + client.ids)

    with ExitStack() as stack:
        # Hundreds of warnings of what is broken on purpose.
        logging.disable(logging.CRITICAL)
        stack.callback(logging.disable, logging.NOTSET)
        for name, module in sorted(sys.modules.items()):
            if name.startswith(("celery_budget.", "tests.simulation.")) and "new_id" in vars(
                module
            ):
                stack.enter_context(patch.object(module, "new_id", new_id))
        stack.enter_context(patch("celery_budget.store.engine.backoff_seconds", lambda *_: 0.0))
        yield
