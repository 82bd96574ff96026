"""A short soak, and whether its verdict sees what is wrong."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from celery_budget.store.schema import balances, lines, reservations
from tests.soak.app import WORK
from tests.soak.cli import told
from tests.soak.plan import FATES, STAGES, TENANTS, plan
from tests.soak.run import Soak

JOBS = 40
SEED = 1


def test_a_plan_has_every_tenant_stage_and_fate() -> None:
    jobs = plan(100, SEED)
    assert jobs == plan(100, SEED)
    assert jobs != plan(100, SEED + 1)
    assert {job.tenant for job in jobs} == {tenant.name for tenant in TENANTS}
    assert {job.fate for job in jobs} == set(FATES)
    assert {job.stage for job in jobs} == set(STAGES)
    assert all(500 <= job.estimate <= 9500 for job in jobs)
    assert max(job.actual / job.estimate for job in jobs) > 1.5


@pytest.mark.fault
@pytest.mark.parametrize("stripes", [1, 4])
def test_a_short_soak_ends_as_planned_and_its_verdict_sees_what_does_not(stripes: int) -> None:
    with Soak(JOBS, SEED, stripes=stripes) as soaked:
        soaked.run()
        verdict = soaked.judge()
        assert verdict.problems == []
        assert sum(verdict.ended.values()) == JOBS
        assert {one.stage for one in verdict.drift} == set(STAGES)
        assert len(verdict.waits) == len(TENANTS)
        assert "all ended as planned" in told(verdict, JOBS, SEED)
        done = next(job for job in soaked.planned if job.fate == "fine" and job.tenant != "flood")
        mine = reservations.c.request_id == done.request_id
        of_mine = lines.c.reservation_id.in_(sa.select(reservations.c.reservation_id).where(mine))
        meddling = {
            "effects twice": WORK.insert().values(job=done.number),
            f"charged {done.charged + 1} of {done.charged}": lines.update()
            .where(of_mine)
            .values(settled=lines.c.settled + 1),
            f"{done.request_id} (fine) is released": reservations.update()
            .where(mine)
            .values(state="released"),
            "still held": balances.update().values(reserved=7),
        }
        for word, statement in meddling.items():
            with soaked.cluster.budget.store.transaction() as connection:
                connection.execute(statement)
            assert any(word in problem for problem in soaked.judge().problems), word
