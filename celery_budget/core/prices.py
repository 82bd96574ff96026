"""What work costs in money, asked without knowing any price: those are looked up elsewhere.

Amounts of money are micro-dollars: integers, rounded up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from celery_budget.core.amounts import check_amount
from celery_budget.core.calls import call, parameters_of
from celery_budget.errors import PolicyError

__all__ = ["Cost", "Priced", "Pricing", "Unpriced", "cost"]

#: A value, or a callable of the arguments that it names.
Given = Any


@dataclass(frozen=True)
class Unpriced:
    """What is to be paid for.

    :ivar counts: by the names that the genai-prices package has: ``input_tokens`` and so on.
    :ivar provider: whose price; none for the one that the model's name tells.
    """

    model: str
    counts: Mapping[str, int]
    provider: str | None = None


@dataclass(frozen=True)
class Priced:
    """What it costs, and by which prices: their version, their date and whose they are."""

    amount: int
    prices: str


#: Looks a price up.
Pricing = Callable[[Unpriced], Priced]


@dataclass(frozen=True, eq=False)
class Cost:
    """An estimator in money; see :func:`cost`."""

    model: str | Callable[..., str]
    counts: Mapping[str, int | Callable[..., int]]
    provider: str | Callable[..., str] | None = None
    #: What tells which of the task's arguments it wants.
    __signature__: inspect.Signature = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.model) and not _is_name(self.model):
            raise PolicyError(f"model= is {self.model!r}; give a model's name")
        of = self.provider
        if of is not None and not callable(of) and not _is_name(of):
            raise PolicyError(f"provider= is {of!r}; give a provider's id, or leave it out")
        if not self.counts:
            raise PolicyError(
                "cost() has nothing to price; give input_tokens=, output_tokens= and the like"
            )
        for name, count in self.counts.items():
            if not callable(count):
                check_amount(count, f"{name}=")
        parts = [one for one in (self.model, self.provider, *self.counts.values()) if callable(one)]
        object.__setattr__(self, "__signature__", inspect.Signature(parameters_of(parts)))

    def __call__(self, /, **arguments: object) -> Unpriced:
        """Return what a call with these arguments is estimated to use.

        :raises PolicyError: where the model, or the provider, is no name.
        :raises InvalidAmount: where a number is no amount.
        """
        model, provider = _of(self.model, arguments), _of(self.provider, arguments)
        for what, name in (("model", model), ("provider", provider)):
            if not _is_name(name) and (what == "model" or name is not None):
                raise PolicyError(f"the {what} of a cost is {name!r}; give its name")
        counts = {
            name: check_amount(_of(count, arguments), f"{name} of a cost")
            for name, count in self.counts.items()
        }
        return Unpriced(model, counts, provider)


def cost(
    *,
    model: str | Callable[..., str],
    provider: str | Callable[..., str] | None = None,
    **counts: int | Callable[..., int],
) -> Cost:
    """Estimate in micro-dollars, by the dated prices of the genai-prices package.

    For ``estimate=`` of a budget in money::

        cost(model="gpt-4o-mini", input_tokens=lambda prompt: len(prompt) // 3, output_tokens=800)

    Each value is given, or a callable of those of the task's arguments that it names. The prices in
    force when the task is published count; which they were is kept with its reservation.

    :param provider: whose price, by the package's id; needed where the model's name does not tell.
    :param counts: by the package's names: ``input_tokens``, ``output_tokens``,
        ``cache_read_tokens`` and so on.
    :raises PolicyError: for what cannot be priced. Where it is evaluated also ``UnknownPrice`` for
        a model without one, and ``MissingExtra`` where the package is not installed.
    """
    return Cost(model, counts, provider)


def _of(value: Given, arguments: Mapping[str, object]) -> Any:
    return call(value, arguments) if callable(value) else value


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""
