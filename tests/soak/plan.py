"""What each job of a soak is, by a seed: whose, how heavy, how wrong its estimate, how it ends."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FATES", "STAGES", "TENANTS", "Job", "Tenant", "plan"]

#: By stage the weights it has, in units.
STAGES = {"draft": (500, 3000), "review": (1000, 9500), "index": (500, 2000)}
#: By how much what is used may differ from what was estimated, either way.
WRONG_BY = 3
#: How jobs end, and how many of a hundred do so.
FATES = {
    # It returns.
    "fine": 78,
    # It fails twice, then returns.
    "transient": 8,
    # It fails in a way that no retry mends.
    "permanent": 5,
    # It fails until its retries are used up.
    "exhausted": 4,
    # Its process is killed between the commit of its work and the acknowledgement.
    "dies": 5,
}
#: How many of a hundred requests are made twice.
REPEATED = 5


@dataclass(frozen=True)
class Tenant:
    """A customer.

    :ivar share: how many of a hundred jobs are its.
    :ivar open: how many of its requests it has open at a time; none for as many as it can.
    :ivar funded: what part of what it will use it has, in percent.
    """

    name: str
    share: int
    open: int | None
    funded: int


TENANTS = (
    Tenant("flood", 70, None, 80),
    Tenant("steady", 20, 4, 200),
    Tenant("small", 10, 2, 200),
)


@dataclass(frozen=True)
class Job:
    """One job.

    :ivar estimate: what is reserved for it.
    :ivar actual: what it uses.
    :ivar repeated: whether it is asked for twice.
    """

    number: int
    tenant: str
    stage: str
    estimate: int
    actual: int
    fate: str
    repeated: bool

    @property
    def request_id(self) -> str:
        """By which it is asked for."""
        return f"job-{self.number}"

    @property
    def charged(self) -> int:
        """What it is charged in the end."""
        return 0 if self.fate == "exhausted" else self.actual


def plan(jobs: int, seed: int) -> list[Job]:
    """Return that many jobs; each tenant, stage and fate has its part of them."""
    chance = random.Random(seed)
    tenants = _parts(chance, {one.name: one.share for one in TENANTS}, jobs)
    fates = _parts(chance, FATES, jobs)
    return [
        _job(chance, number, tenant, fate)
        for number, (tenant, fate) in enumerate(zip(tenants, fates, strict=True))
    ]


def _job(chance: random.Random, number: int, tenant: str, fate: str) -> Job:
    stage = chance.choice(sorted(STAGES))
    estimate = chance.randint(*STAGES[stage])
    low, high = estimate // WRONG_BY, estimate * WRONG_BY
    # As often too much as too little.
    actual = chance.randint(*((low, estimate) if chance.random() < 0.6 else (estimate, high)))
    return Job(number, tenant, stage, estimate, actual, fate, chance.randrange(100) < REPEATED)


def _parts(chance: random.Random, parts: dict[str, int], jobs: int) -> Sequence[str]:
    """Return names in a random order, each as often as its part of a hundred, at least once."""
    names: list[str] = []
    for name, part in parts.items():
        names += [name] * max(1, jobs * part // 100)
    most = max(parts, key=lambda name: parts[name])
    names += [most] * (jobs - len(names))
    chance.shuffle(names)
    return names[:jobs]
