"""Which of a worker's processes live, told without taking their end from the pool."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from celery_budget.integration import worker


@pytest.fixture
def child() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def test_a_child_that_was_killed_lives_no_more(child: subprocess.Popen[bytes]) -> None:
    parent = SimpleNamespace(pool=SimpleNamespace(_pool=SimpleNamespace(_pool=[child])))
    assert worker._living(parent) == [os.getpid(), child.pid]
    child.kill()
    # Until its end can be had, and without having it.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert worker._living(parent) == [os.getpid()]
    assert child.wait() == -signal.SIGKILL, "the pool still learns how it ended"
    assert worker._living(parent) == [os.getpid()]


@pytest.mark.parametrize("pool", [None, SimpleNamespace(), SimpleNamespace(_pool=object())])
def test_other_pools_run_tasks_in_the_main_process(pool: object) -> None:
    assert worker._living(SimpleNamespace(pool=pool)) == [os.getpid()]
