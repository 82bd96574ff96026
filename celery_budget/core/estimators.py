"""Estimators: what promises how much a call will use, known by name and version.

A task's ``estimate=`` is an integer, a callable, an :class:`Estimator`, or the name of one that was
registered. A plain callable is an estimator without bounds, named after the function.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from celery_budget.core.amounts import check_amount
from celery_budget.core.calls import signature_of_callable
from celery_budget.errors import EstimateOutOfBounds, InvalidName, PolicyError

__all__ = [
    "Estimator",
    "Estimators",
    "estimator",
    "estimators",
    "is_reference",
    "is_thrown_in",
]

#: A value, or a callable that gets the task's bound arguments it names.
ByArguments = Callable[..., Any]

_NAME = re.compile(r"[^\W\d][\w.-]{0,99}")
_VERSION = re.compile(r"[\w.+/-]{1,50}")

#: Packages whose exceptions are thrown into a running thread: time-outs, and greenlets that end.
THROWING = frozenset({"billiard", "eventlet", "gevent", "greenlet"})


@dataclass(frozen=True, eq=False)
class Estimator:
    """What promises how much a call will use.

    A bound says what cannot be right: an estimate outside of it is refused, not cut to it, since
    work that needs more than it holds would pass the gate, and a number that is too low tells of
    an estimator that has failed. Where cutting is meant, ``estimate`` does it itself.

    :ivar name: by which reports and ``estimate="NAME"`` know it: a letter, then letters, digits,
        ``_``, ``.`` and ``-``.
    :ivar estimate: an amount, or a callable of those of the task's arguments that it names, as for
        :func:`~celery_budget.budgeted`. Of another estimator it is that one's, bounds included.
    :ivar version: tells it apart from others of that name.
    :ivar at_least: the least amount that can be right; none for any.
    :ivar at_most: the greatest.
    :raises InvalidName: for what can be no name, or no version.
    :raises InvalidAmount: for a constant estimate, or a bound, that is no amount.
    :raises PolicyError: for bounds that nothing is between, or an estimate that is neither.
    """

    name: str
    estimate: Any
    version: str = "1"
    at_least: int | None = None
    at_most: int | None = None
    #: What tells which of the task's arguments it wants.
    __signature__: inspect.Signature = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_text(_NAME, self.name, "name")
        _check_text(_VERSION, self.version, "version")
        inner = self.estimate
        if isinstance(inner, Estimator):
            least = inner.at_least if self.at_least is None else self.at_least
            most = inner.at_most if self.at_most is None else self.at_most
            object.__setattr__(self, "estimate", inner.estimate)
            object.__setattr__(self, "at_least", least)
            object.__setattr__(self, "at_most", most)
        for what in ("at_least", "at_most"):
            bound = getattr(self, what)
            if bound is not None:
                check_amount(bound, f"{what}= of estimator {self.key}")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise PolicyError(
                f"estimator {self.key} has at_least={self.at_least} above at_most={self.at_most}; "
                "nothing is between them"
                "; correct the bounds"
            )
        if callable(self.estimate):
            signature = signature_of_callable(self.estimate)
        else:
            self.check(check_amount(self.estimate, f"the estimate of {self.key}"), "any task")
            signature = inspect.Signature()
        object.__setattr__(self, "__signature__", signature)

    @property
    def key(self) -> str:
        """Name and version in one."""
        return f"{self.name}:{self.version}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what ``estimate`` gives; what was decorated stays what it was."""
        return self.estimate(*args, **kwargs) if callable(self.estimate) else self.estimate

    def check(self, amount: int, task_name: str) -> int:
        """Return ``amount`` if it is within the bounds.

        :raises EstimateOutOfBounds: otherwise.
        """
        below = self.at_least is not None and amount < self.at_least
        if below or (self.at_most is not None and amount > self.at_most):
            raise EstimateOutOfBounds(task_name, self.key, amount, self.at_least, self.at_most)
        return amount


class Estimators:
    """Estimators by name and version; one for each process, as Celery's shared tasks are.

    A task names one by ``"name:version"``, or by its name where one version is none of the task's
    shadows. It is looked for when the task is first used, so that it may be registered after that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, Estimator]] = {}

    def register(
        self,
        name: str,
        estimate: Any = None,
        *,
        version: str = "1",
        at_least: int | None = None,
        at_most: int | None = None,
    ) -> Any:
        """Register an estimator, and return it; without ``estimate`` return a decorator.

        :raises PolicyError: where another one has that name and version; the same function from the
            same module, as after that was loaded again, takes its place.
        :raises InvalidName, InvalidAmount: as :class:`Estimator`.
        """
        if estimate is None:

            def decorate(function: ByArguments) -> Estimator:
                return self._add(Estimator(name, function, version, at_least, at_most))

            return decorate
        return self._add(Estimator(name, estimate, version, at_least, at_most))

    def _add(self, made: Estimator) -> Estimator:
        with self._lock:
            versions = self._known.get(made.name, {})
            before = versions.get(made.version)
            if before is not None and _origin(before.estimate) != _origin(made.estimate):
                raise PolicyError(
                    f"estimator {made.key} is registered already, as {before.estimate!r}; give the "
                    "new one another version"
                )
            # Replaced and not changed: who looks takes no lock.
            self._known[made.name] = {**versions, made.version: made}
        return made

    def find(
        self, reference: str, version: str | None = None, aside: Collection[str] = ()
    ) -> Estimator:
        """Return the estimator that ``"name"`` or ``"name:version"`` stands for.

        :param version: which version of ``"name"``; none for the only one.
        :param aside: those that ``"name"`` alone does not mean, by name and version.
        :raises PolicyError: where there is none, or ``"name"`` has several versions.
        """
        name, _, written = reference.partition(":")
        if written and version not in (None, written):
            raise PolicyError(
                f"the estimator is {reference!r} and its version {version!r}; give one of the two"
            )
        versions = self._known.get(name, {})
        wanted = written or version
        known = list(versions.values())
        meant = [one for one in known if one.key not in aside] or known
        if wanted is None and len(meant) == 1:
            return meant[0]
        if wanted in versions:
            return versions[wanted]
        if not versions:
            raise PolicyError(
                f"there is no estimator {name!r}; import the module that registers it, wherever "
                "the task is published"
            )
        listed = ", ".join(f"{name}:{one}" for one in sorted(versions))
        if wanted is None:
            raise PolicyError(f"estimator {name!r} has several versions; give one of {listed}")
        raise PolicyError(
            f"there is no estimator {name}:{wanted}; there are {listed}"
            "; name one of these, or register it"
        )

    def __iter__(self) -> Iterator[Estimator]:
        """Return all that are registered, by name and version."""
        with self._lock:
            known = [one for versions in self._known.values() for one in versions.values()]
        return iter(sorted(known, key=lambda one: (one.name, one.version)))


#: Those of this process.
estimators = Estimators()


def estimator(
    name: str,
    *,
    version: str = "1",
    at_least: int | None = None,
    at_most: int | None = None,
) -> Callable[[ByArguments], Estimator]:
    """Register a function as an estimator, for ``estimate="name"``::

        @estimator("draft", version="2", at_most=200_000)
        def draft(prompt): ...

    What it makes can be called as the function could, and be given as ``estimate=`` itself.

    :param name: by which reports and tasks know it.
    :param version: tells it apart from others of that name.
    :param at_least: estimates below this are refused.
    :param at_most: estimates above this are refused.
    :raises PolicyError: where another one has that name and version.
    :raises InvalidName, InvalidAmount: for what can be no name, version or bound.
    """
    made: Callable[[ByArguments], Estimator] = estimators.register(
        name, version=version, at_least=at_least, at_most=at_most
    )
    return made


def is_reference(value: object) -> bool:
    """Tell whether ``value`` is text that can name an estimator, with or without a version."""
    if not isinstance(value, str):
        return False
    name, colon, version = value.partition(":")
    return _NAME.fullmatch(name) is not None and (
        not colon or _VERSION.fullmatch(version) is not None
    )


def is_thrown_in(error: BaseException) -> bool:
    """Tell whether an error came into the thread from outside, and is none of what was called.

    Whatever else it is, an estimator that raised it has failed: its ``sys.exit`` ends no process,
    and a library's panic that is no ``Exception`` is told as any other.
    """
    package = type(error).__module__.partition(".")[0]
    return isinstance(error, KeyboardInterrupt) or package in THROWING


def _check_text(pattern: re.Pattern[str], value: object, what: str) -> None:
    if not isinstance(value, str) or pattern.fullmatch(value) is None:
        raise InvalidName(
            f"the {what} of an estimator is {value!r}; give "
            + (
                "a letter, then up to 99 letters, digits, '_', '.' or '-'"
                if what == "name"
                else "1 to 50 letters, digits, '_', '.', '-', '+' or '/'"
            )
        )


def _origin(estimate: Any) -> Any:
    """Return what makes two estimates one: where a function was written, or the value itself."""
    module, name = getattr(estimate, "__module__", None), getattr(estimate, "__qualname__", None)
    unnamed = module is None or name is None or "<" in name
    return estimate if unnamed else (module, name)
