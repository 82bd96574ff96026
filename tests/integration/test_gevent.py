"""The ledger in a process that gevent has patched, as a worker's with ``-P gevent`` is."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: How often another greenlet gets its turn while the ledger's statement takes half a second.
SCRIPT = """
from gevent import monkey, sleep, spawn
monkey.patch_all()
import sys
import sqlalchemy as sa
from celery_budget.store import Store
store = Store(sys.argv[1])
turns = 0
def turn():
    global turns
    while True:
        turns += 1
        sleep(0.01)
spawn(turn)
store.read(lambda connection: connection.execute(sa.text("SELECT pg_sleep(0.5)")).all())
print(turns)
"""


@pytest.mark.postgres
def test_a_statement_does_not_hold_up_other_greenlets(postgres_url: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, postgres_url], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    # One where the whole process waits.
    assert int(run.stdout) > 3
