"""A chord's body that one process may publish for a while, and a replay that comes meanwhile."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context

from celery_budget.core.reservations import StoredOutcome
from celery_budget.integration.context import attach
from celery_budget.integration.execution import AttemptBackend
from celery_budget.settlement import Attempt

pytestmark = pytest.mark.redis

ERROR = ValueError("stored before")


@pytest.mark.parametrize("kind", ["returned", "raised"])
@pytest.mark.parametrize("replayed", [True, False])
def test_a_replay_is_counted_when_nobody_claims_the_body(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, kind: str, replayed: bool
) -> None:
    """One that runs first need not wait: who has the claim is another member, and will be back."""
    app = Celery("claims", backend=redis_url, set_as_current=False)
    backend = app.backend
    key = backend.get_key_for_group("group", ".c")
    backend.client.set(key, "somebody", px=300)
    claims: list[Any] = []
    monkeypatch.setattr(
        backend, "on_chord_part_return", lambda *args: claims.append(backend.client.get(key))
    )
    request = Context(id="member", group="group", group_index=0, chord={"task": "body"})
    nobody: Any = None
    attempt = Attempt(nobody, nobody, "default", uuid.uuid4(), 1, uuid.uuid4(), called=True)
    attempt.replay = StoredOutcome(kind, None) if replayed else None
    attempt.error = ERROR if kind == "raised" else None
    attach(request, attempt)
    if kind == "returned":
        AttemptBackend(backend).mark_as_done("member", 1, request)
    else:
        AttemptBackend(backend).mark_as_failure("member", ERROR, request=request)
    assert claims == [None if replayed else b"somebody"]
    app.close()
