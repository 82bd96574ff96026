"""Weighted fair shares of a lane, by virtual time, along the tree of budgets.

What a tenant has had of a lane, in units over its weight, is its virtual time. Whose is smallest
goes next (start-time fair queueing). Budgets under one parent are served from the parent's share:
where one of them has no work, its siblings have its share before anybody outside the parent has.

::

    the lane ── acme ─────── acme/ann
             │            ├─ acme/bob
             │            └─ (acme's own work)
             └─ initech

Everything is in integers. Of each division the remainder is kept, so that a million jobs of one
unit count as much as one of a million.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

__all__ = ["LANE", "MOST_COUNTED", "Account", "Key", "Order", "Shares"]

#: What one job counts at most, in units. Virtual times stay below 2^63 for eight million of them.
MOST_COUNTED = 2**40

#: In how many parts of a unit of virtual time remainders are compared.
_PARTS = 1_000_000


class Key(NamedTuple):
    """A place in the tree of a lane.

    :ivar name: a budget's, or another tenant's; empty for the lane itself.
    :ivar own: the work of a budget that has others with work below it, beside these.
    """

    name: str
    own: bool = False


#: The top of the tree.
LANE = Key("")


@dataclass(frozen=True)
class Account:
    """What a place in the tree has had, in the virtual time of the one above it.

    :ivar finish: its virtual time.
    :ivar rest: what is left of its units, undivided by its weight.
    :ivar floor: the virtual time of those below it. Who comes or comes back begins there: being
        idle gives no credit.
    """

    finish: int = 0
    rest: int = 0
    floor: int = 0


@dataclass(frozen=True)
class Shares:
    """Who shares a lane, and what each has had.

    :ivar parents: the parents of budgets that have one. What is no budget has none.
    :ivar weights: of budgets, where they are not 1. Those with weight 0 go only where none beside
        them has work; what is no budget has weight 1.
    :ivar accounts: what is not in it has had nothing.
    """

    parents: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, int] = field(default_factory=dict)
    accounts: Mapping[Key, Account] = field(default_factory=dict)

    def corrected(self, units: Mapping[str, int]) -> dict[Key, Account]:
        """Return the accounts as they are once tenants are given back what they did not use.

        :param units: of each; negative where it has used more than was counted.
        """
        accounts: dict[Key, Account] = {}
        for tenant, given in units.items():
            for key in _path(self, tenant):
                before = accounts.get(key, self.accounts.get(key, Account()))
                weight = _weight(self, key) or 1
                back = max(-MOST_COUNTED, min(given, MOST_COUNTED))
                more, rest = divmod(before.rest - back, weight)
                after = replace(before, finish=before.finish + more, rest=rest)
                # Who has had less than nothing begins where the others are, as everybody does.
                accounts[key] = after if after.finish >= 0 else replace(before, finish=0, rest=0)
        return accounts


class Order:
    """In which order tenants that have work have their turns, from one snapshot of their shares.

    :param waits: for how long the first of each has waited, in microseconds: of several with the
        same virtual time the one that has waited longest goes first.

    Tenants of weight 0, and all below a budget of weight 0, are left out where anybody beside them
    has work.
    """

    def __init__(self, shares: Shares, waits: Mapping[str, int]) -> None:
        self._shares = shares
        self._leaves: dict[str, _Node] = {}
        inner = {above for tenant in waits for above in _above(shares.parents, tenant)}
        self._top = self._node(LANE, None)
        nodes = {LANE: self._top}
        for tenant in sorted(waits):
            node = self._top
            for key in _path(shares, tenant, has_others=tenant in inner):
                below = nodes.get(key)
                if below is None:
                    below = nodes[key] = self._node(key, node)
                    node.below.append(below)
                below.wait = max(below.wait, waits[tenant])
                node = below
            node.tenant = tenant
            self._leaves[tenant] = node
        self._top.settle()

    def _node(self, key: Key, above: _Node | None) -> _Node:
        account = self._shares.accounts.get(key, Account())
        weight = _weight(self._shares, key)
        return _Node(key, weight, 0 if above is None else above.floor, account, above)

    def next(self) -> str | None:
        """Return whose turn it is; none where nobody is left."""
        node = self._top
        while node.turns:
            node = node.turns[0][-1]
        return node.tenant

    def serve(self, tenant: str, units: int) -> None:
        """Count ``units``, one at least, to the tenant whose turn it is and to all above it."""
        counted = min(max(units, 1), MOST_COUNTED)
        node = self._leaves[tenant]
        while node.above is not None:
            node.advance(counted)
            heapq.heapreplace(node.above.turns, node.turn())
            node = node.above

    def leave(self, tenant: str) -> None:
        """Take no more of the tenant whose turn it is."""
        node = self._leaves[tenant]
        while node.above is not None and not node.turns:
            heapq.heappop(node.above.turns)
            node = node.above

    def changed(self) -> dict[Key, Account]:
        """Return the accounts as they are now, of those that were served and of all above them.

        The floor of each is the virtual time of the one below it that is the furthest back. It
        never falls.
        """
        accounts: dict[Key, Account] = {}
        stack = [self._top]
        while stack:
            node = stack.pop()
            if not node.served and node is not self._top:
                continue
            floor = min((one.finish for one in node.below), default=node.floor)
            account = Account(node.finish, node.rest, max(floor, node.floor))
            if account != self._shares.accounts.get(node.key, Account()):
                accounts[node.key] = account
            stack += node.below
        return accounts


class _Node:
    """A place in the tree while turns are given.

    :ivar turns: a heap of those below it that may still have turns.
    """

    def __init__(
        self, key: Key, weight: int, floor: int, account: Account, above: _Node | None = None
    ) -> None:
        self.key = key
        self.background = weight == 0
        self.weight = weight or 1
        self.finish, self.rest = account.finish, account.rest % self.weight
        if self.finish < floor:
            self.finish, self.rest = floor, 0
        self.floor = account.floor
        self.above = above
        self.below: list[_Node] = []
        self.turns: list[tuple[int, int, int, Key, _Node]] = []
        self.tenant: str | None = None
        self.wait = 0
        self.served = False

    def settle(self) -> None:
        """Leave out what goes last, and put the others in order."""
        first = [one for one in self.below if not one.background]
        self.below = first or self.below
        for one in self.below:
            one.settle()
        self.turns = [one.turn() for one in self.below]
        heapq.heapify(self.turns)

    def turn(self) -> tuple[int, int, int, Key, _Node]:
        return self.finish, self.rest * _PARTS // self.weight, -self.wait, self.key, self

    def advance(self, units: int) -> None:
        more, self.rest = divmod(self.rest + units, self.weight)
        self.finish += more
        self.served = True


def _path(shares: Shares, tenant: str, has_others: bool = False) -> list[Key]:
    """Return where a tenant stands, the highest place first.

    :param has_others: whether others with work are below it: beside them stands its own.
    """
    path = [Key(name) for name in (*_above(shares.parents, tenant), tenant)]
    own = Key(tenant, own=True)
    return [*path, own] if has_others or own in shares.accounts else path


def _weight(shares: Shares, key: Key) -> int:
    return 1 if key.own else shares.weights.get(key.name, 1)


def _above(parents: Mapping[str, str], tenant: str) -> list[str]:
    """Return the budgets above one, the highest first."""
    names: list[str] = []
    above = parents.get(tenant)
    while above is not None and above not in names and above != tenant:
        names.append(above)
        above = parents.get(above)
    return names[::-1]
