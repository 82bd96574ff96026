"""What models charge: dated prices of the genai-prices package, or prices that were configured.

A model without a price is never free: it is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from celery_budget.core.amounts import check_amount
from celery_budget.core.prices import Priced, Unpriced
from celery_budget.core.usage import REQUESTS, TOKENS, Used
from celery_budget.errors import BudgetError, ConfigurationError, PolicyError, UnknownPrice
from celery_budget.metering.package import Package, package
from celery_budget.metering.replies import READING, Reply

__all__ = ["counted", "price"]

#: Prices of models by their names.
Configured = Mapping[str, Mapping[str, Decimal]]

MICRO = 1_000_000


def price(what: Unpriced, configured: Configured) -> Priced:
    """Return what something costs in micro-dollars, rounded up, at the prices in force now.

    :param configured: prices of models that come before those of the package.
    :raises UnknownPrice: where the model has no price, or none for all that was counted.
    :raises PolicyError: where what was counted is nothing that the package knows, or a part of it
        is more than the whole.
    :raises ConfigurationError: where a configured price has a name that the package does not know.
    :raises MissingExtra: where the package is not installed.
    """
    genai = package("a price")
    unknown = what.counts.keys() - genai.units.keys()
    if unknown:
        raise PolicyError(
            f"genai-prices {genai.version} has no price by {', '.join(sorted(unknown))}; give "
            "input_tokens=, output_tokens= and the like"
        )
    usage = genai.usage(**_completed(genai, what.counts))
    try:
        if what.model in configured:
            prices = _configured(genai, what.model, configured[what.model])
            total, version = prices.calc_price(usage)["total_price"], _written(prices, what.model)
        else:
            found = genai.calc_price(usage, what.model, provider_id=what.provider)
            prices, total = found.model_price, found.total_price
            version = _version(genai, found)
    except LookupError as exc:
        raise UnknownPrice(what.model, what.provider) from exc
    except ValueError as exc:
        raise PolicyError(
            f"what {what.model!r} is to charge for cannot be: {exc}; correct what cost() is given"
        ) from exc
    if not _covers(genai, prices, what.counts):
        raise UnknownPrice(what.model, what.provider)
    return Priced(check_amount(math.ceil(total * MICRO), "a price in micro-dollars"), version)


def counted(
    reply: Reply, money_unit: str, configured: Configured
) -> tuple[Used, BudgetError | None]:
    """Return what a reply is charged, in every unit that it can be counted in.

    ``tokens`` are what went in and what came out; the package's names stand for its numbers;
    ``requests`` is one, and the unit of money the price. The second is why there is no price: then,
    as in all units where the reply does not tell everything, it is not known how much it is.

    :raises MissingExtra: where the genai-prices package is not installed.
    """
    genai = package(READING)
    counts = reply.counts or {}
    amounts: dict[str | None, int] = {name: counts.get(name, 0) for name in genai.units}
    amounts[TOKENS] = counts.get("input_tokens", 0) + counts.get("output_tokens", 0)
    amounts[REQUESTS] = 1
    amounts[money_unit] = 0
    incomplete = set() if reply.whole and reply.counts is not None else set(amounts) - {REQUESTS}
    details: dict[str, Any] = {
        "provider": reply.provider,
        "model": reply.model,
        "api_flavor": reply.flavor,
        "usage": reply.counts,
        "whole": reply.whole,
    }
    why: BudgetError | None = None
    if reply.counts is not None:
        try:
            if reply.model is None:
                raise UnknownPrice("", reply.provider)
            priced = price(Unpriced(reply.model, reply.counts, reply.provider), configured)
            amounts[money_unit] = priced.amount
            details["prices"] = priced.prices
        except BudgetError as error:
            why = error
            incomplete.add(money_unit)
    names = frozenset(unit for unit in incomplete if unit is not None)
    return Used(amounts, True, names, json.dumps(details)), why


def _completed(genai: Package, counts: Mapping[str, int]) -> dict[str, int]:
    """Return counts with 0 for what is not told, unless parts of it are.

    The package wants to know how much of the audio came from a cache, and the like.
    """
    dimensions = {name: unit["dimensions"].items() for name, unit in genai.units.items()}
    told = [dimensions[name] for name, count in counts.items() if count]
    missing = {
        name: 0
        for name, of in dimensions.items()
        if name != REQUESTS and not any(of <= one for one in told)
    }
    return {**missing, **counts}


def _configured(genai: Package, model: str, given: Mapping[str, Decimal]) -> Any:
    known = {unit["price_key"] for unit in genai.units.values()}
    unknown = given.keys() - known
    if unknown:
        raise ConfigurationError(
            f"budget_prices has {', '.join(sorted(unknown))} for {model!r}, which genai-prices "
            f"{genai.version} does not know; give input_mtok, output_mtok, cache_read_mtok and the "
            "like"
        )
    return genai.model_price(**given)


def _written(prices: Any, model: str) -> str:
    listed = ", ".join(f"{name}={value}" for name, value in sorted(_of(prices).items()))
    return f"budget_prices {model}: {listed}"


def _version(genai: Package, found: Any) -> str:
    """Return by which prices something was calculated: their version, whose, and since when."""
    version = f"genai-prices {genai.version} {found.provider.id}/{found.model.id}"
    dated = found.model.prices if isinstance(found.model.prices, list) else []
    for one in dated:
        if one.prices is found.model_price and one.constraint is not None:
            since = getattr(one.constraint, "start_date", None)
            hours = f"{getattr(one.constraint, 'start_time', '')} on"
            version += f" from {since if since is not None else hours}"
    if found.auto_update_timestamp is not None:
        version += f", updated {found.auto_update_timestamp:%Y-%m-%dT%H:%M:%S}"
    return version


def _of(prices: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(prices).items()
        if value is not None and not name.startswith("_")
    }


def _covers(genai: Package, prices: Any, counts: Mapping[str, int]) -> bool:
    """Tell whether there is a price for what went in, and for what came out, if anything did."""
    names = _of(prices).keys()
    priced = [unit["dimensions"] for unit in genai.units.values() if unit["price_key"] in names]
    if any(dimensions["family"] not in ("tokens", "tool_calls") for dimensions in priced):
        # By the request, the second or the page.
        return True
    directions = {dimensions.get("direction") for dimensions in priced}
    return bool(priced) and all(
        direction in directions
        for direction in ("input", "output")
        if counts.get(f"{direction}_tokens")
    )
