"""What one usage record tells."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

__all__ = ["MONEY", "REQUESTS", "TOKENS", "Used"]

#: Units that a provider's reply is counted in, beside the names of its own numbers.
TOKENS = "tokens"
REQUESTS = "requests"

#: The unit of money unless ``budget_money_unit`` says otherwise: millionths of a dollar.
MONEY = "micro-usd"


@dataclass(frozen=True)
class Used:
    """What one record tells.

    :ivar amounts: by unit; under none in the unit of the first budget that is charged by use.
    :ivar of_reply: whether it was read from a provider's reply, which tells of more units than the
        task draws on: the others are left out.
    :ivar incomplete: the units in which more may have been used than it tells: the attempt is
        charged the estimate at least.
    :ivar details: what it was read from, in JSON.
    """

    amounts: Mapping[str | None, int]
    of_reply: bool = False
    incomplete: Collection[str] = ()
    details: str | None = None
