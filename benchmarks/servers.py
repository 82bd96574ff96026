"""The servers of one run, each started when a benchmark first asks for it."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

from tests.services.postgres import PostgresServer
from tests.services.rabbitmq import RabbitServer
from tests.services.redis import RedisServer

__all__ = ["Servers"]


class Servers(ExitStack):
    """Servers and a folder, gone when the stack is left; so is whatever else was put on it."""

    @cached_property
    def postgres(self) -> PostgresServer:
        """Durable: a commit is on disk before it is answered."""
        return self.enter_context(PostgresServer())

    @cached_property
    def redis(self) -> RedisServer:
        """Without an append-only file: a broker at its fastest, which keeps nothing in a crash."""
        return self.enter_context(RedisServer(appendonly=False))

    @cached_property
    def rabbitmq(self) -> RabbitServer:
        """As installed; Celery's messages are persistent and its queues durable."""
        return self.enter_context(RabbitServer())

    @cached_property
    def folder(self) -> Path:
        return Path(self.enter_context(tempfile.TemporaryDirectory(prefix="budget-bench-")))
