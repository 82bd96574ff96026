"""Fixtures of the migration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_budget.store import Store


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def empty(request: pytest.FixtureRequest) -> Iterator[Store]:
    """A store whose database has no tables."""
    name = "sqlite_url" if request.param == "sqlite" else "postgres_url"
    store = Store(request.getfixturevalue(name))
    yield store
    store.dispose()
