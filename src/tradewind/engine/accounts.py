"""What each tenant was served, in virtual tokens.

Knows: counters and the rule by which an idle tenant comes back. Refuses to know: who waits and what runs (queue, scheduler).

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): a prompt token that is computed counts 1,
a generated token 2. While two tenants both have requests waiting, and none of them is passed because it does not fit, with M the tokens
that the running requests can hold together:

      counters differ by at most      2 M           the one that starts was behind; what runs of it can add no more
      service differs by at most      4 M           over any such time, however much more one of them asks for

With weights a counter grows by tokens / weight, so that who has twice the weight is served twice as much while both wait; counters then
differ by at most 2 M / the least weight.

What the prefix cache had is known only when a request starts, after the turns of its step were given out: the first bound grows by what the
starts of one step found there.

Idle time is not saved up: who comes back is lifted to the lowest counter of those that wait, or, when nobody waits, to the counter of the
last that did. Whoever was above that stays there, so that leaving and coming back pays nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

GENERATED = 2
"""What a generated token counts, where a computed prompt token counts 1."""
REMEMBERED = 4096
"""So many tenants are remembered; of more, those that came longest ago and have nobody waiting are forgotten."""


class Account:
    """One tenant's counter."""

    __slots__ = ("served", "tenant", "weight")

    def __init__(self, tenant: str, *, weight: float = 1.0) -> None:
        self.tenant = tenant
        self.weight = weight
        self.served = 0.0
        """Virtual tokens, divided by the weight."""

    def charge(self, tokens: int) -> None:
        """Counts virtual tokens."""
        self.served += tokens / self.weight


class Accounts:
    """Every tenant's counter; written by the scheduler and its queue only."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights` by tenant, over 0; 1 for who is not in it."""
        self._weights = weights or {}
        self._by_tenant: dict[str, Account] = {}
        """In order of the last request that came."""
        self.last: Account | None = None
        """The last that had somebody waiting, and has nobody any more."""

    def __len__(self) -> int:
        return len(self._by_tenant)

    def of(self, tenant: str) -> Account:
        """The tenant's account, opened if it has none."""
        account = self._by_tenant.pop(tenant, None) or Account(tenant, weight=self._weights.get(tenant, 1.0))
        self._by_tenant[tenant] = account
        return account

    def lift(self, account: Account, *, among: Iterable[Account]) -> None:
        """Brings a tenant that had nobody waiting up to the level of those that have; forgets who is remembered too long."""
        floor = min((other.served for other in among), default=self.last.served if self.last is not None else 0.0)
        account.served = max(account.served, floor)
        if len(self._by_tenant) > REMEMBERED:
            waiting = set(among)
            oldest = next(iter(self._by_tenant.values()))
            del self._by_tenant[oldest.tenant]
            if oldest in waiting:  # its counter is needed: it goes to the end
                self._by_tenant[oldest.tenant] = oldest

    def generated(self, account: Account | None, tokens: int) -> None:
        """Charges for tokens that were generated."""
        assert account is not None, "a sequence runs that was never in the queue"
        account.charge(GENERATED * tokens)
