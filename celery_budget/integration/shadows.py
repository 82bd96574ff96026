"""Shadow estimators: asked where a call is admitted, and kept from doing it any harm.

They run in the caller's thread, as the estimator itself does, and Python can stop neither. What can
be done about a slow one is not to ask it again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from celery_budget.core.estimators import Estimator, is_thrown_in
from celery_budget.core.policies import BudgetPolicy
from celery_budget.core.prices import Pricing
from celery_budget.errors import BudgetError
from celery_budget.events import Logger

__all__ = ["SLOW_SECONDS", "Watch", "ask_shadows"]

logger = Logger(__name__)

#: A shadow that takes longer than this is slow; one that is so often slow in a row is set aside:
#: the first call may load what the later ones need.
SLOW_SECONDS = 0.05
SLOW_CALLS = 3


class Watch:
    """What this process knows of its shadows: which it has told of, and which are set aside."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._slow: dict[str, int] = {}

    def is_aside(self, name: str) -> bool:
        """Tell whether a shadow is not asked any more."""
        return self._slow.get(name, 0) >= SLOW_CALLS

    def took(self, name: str, seconds: float) -> None:
        """Note how long a shadow took; one that is slow once more may be set aside by that."""
        if seconds <= SLOW_SECONDS:
            self._slow.pop(name, None)
            return
        self._slow[name] = self._slow.get(name, 0) + 1
        if self.is_aside(name):
            logger.event("shadow.slow", shadow=name, seconds=SLOW_SECONDS, count=SLOW_CALLS)

    def failed(self, name: str, task_name: str, error: BaseException) -> None:
        """Log that a shadow failed, once for each of them."""
        if name in self._told:
            return
        self._told.add(name)
        # Our own errors say it all, but for what an estimator raised itself.
        ours = isinstance(error, BudgetError) and not error.__cause__
        logger.event(
            "shadow.failed",
            shadow=name,
            task=task_name,
            error_type=type(error).__name__,
            error=error if ours else "see the traceback",
            exc_info=None if ours else error,
        )


#: That of this process.
watch = Watch()


def ask_shadows(
    policy: BudgetPolicy,
    task_name: str,
    arguments: Mapping[str, object],
    unknown: type | None = None,
    pricing: Pricing | None = None,
    watch: Watch = watch,
) -> dict[str, int]:
    """Return what the shadows of a policy would have promised, by name and version.

    One that fails, in whatever way, is left out, as is one that asks for an argument that is not
    known yet.

    :param unknown: the type of what stands for arguments that are not known yet.
    """
    answers: dict[str, int] = {}
    for shadow in policy.shadows:
        name = shadow.key if isinstance(shadow, Estimator) else shadow
        if watch.is_aside(name):
            continue
        begun = time.monotonic()
        try:
            key, amount = policy.shadow(shadow, task_name, arguments, unknown, pricing)
            answers[key] = amount
        except BaseException as error:
            if is_thrown_in(error):
                raise
            if unknown is None:
                watch.failed(name, task_name, error)
        watch.took(name, time.monotonic() - begun)
    return answers
