"""Snipz, in its own environment: a hold that is settled at once, with a history and without."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from decimal import Decimal

import asyncpg
from snipz import Budget, Scope

CONF = json.loads(sys.argv[1])
SCOPE = Scope("user", "bench")

#: As its own reserve and commit leave them.
SETTLED = """
    INSERT INTO snipz_ledger (id, reservation_id, scope_type, scope_id, state, late,
        estimated_cents, actual_cents, expires_at, settled_at)
    SELECT gen_random_uuid(), gen_random_uuid(), $1, $2, 'committed', false, 5, 5,
           now() + interval '1 hour', now()
      FROM generate_series(1, $3)
"""


async def hold(budget: Budget) -> float:
    """Hold and settle so often; a second."""
    begin = time.perf_counter()
    for _ in range(CONF["calls"]):
        one = await budget.reserve(SCOPE, Decimal(5))
        await one.commit(Decimal(5))
    return CONF["calls"] / (time.perf_counter() - begin)


async def main() -> None:
    budget = Budget(CONF["dsn"])
    await budget.migrate()
    await budget.set_limit(SCOPE, Decimal(10) ** 12)
    connection = await asyncpg.connect(CONF["dsn"])
    await connection.execute(SETTLED, "user", "bench", CONF["settled"])
    await hold(budget)
    # As autovacuum does within a minute: no plan is of an empty table.
    await connection.execute("VACUUM ANALYZE snipz_ledger")
    await connection.close()
    for _ in sys.stdin:
        print(json.dumps([await hold(budget)]), flush=True)
    await budget.close()


asyncio.run(main())
