"""How many pages each pool of the KV cache gets.

Knows: groups of layers that keep the same tokens, and how many pages a sequence needs in each. Refuses to know: other memory (ledger).

    full layers      pages 0 .......................... ceil(length / page)        everything is kept
    window layers                    [ window | chunk ]                            what lies before the window is given back
"""

from __future__ import annotations

from dataclasses import dataclass

from tradewind.config.card import ModelCard
from tradewind.contract.kv import KVFormat, KVGroup, KVKind

SPARE_PAGES = 2
"""The null page, and one more for a copy-on-write while a sequence fills all others."""


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """What the pages should hold: `sequences` of `tokens_each` at once, and in any case one of `max_context`."""

    max_context: int
    max_tokens_per_step: int
    sequences: int
    tokens_each: int


@dataclass(frozen=True, kw_only=True)
class Pools:
    """Groups, pages of each, and how many sequences of the sized-for length they hold (0: only the one of max_context)."""

    groups: tuple[KVGroup, ...]
    pages: tuple[int, ...]
    sequences: int


def groups_of(card: ModelCard, *, page_tokens: int, format: KVFormat) -> tuple[KVGroup, ...]:
    """Full layers first, then one group per window size; of a model with latents, one group of them."""
    windowed: KVKind = "chunk" if card.windows_restart else "window"
    windows = sorted({window for window in card.layer_windows if window is not None})
    kinds: list[int | None] = [None, *windows]
    groups: list[KVGroup] = []
    latent = card.latent
    for window in kinds:
        layers = tuple(index for index, mine in enumerate(card.layer_windows) if mine == window)
        if layers:
            groups.append(
                KVGroup(
                    index=len(groups),
                    kind="latent" if latent is not None else "full" if window is None else windowed,
                    layers=layers,
                    kv_heads=card.kv_heads if latent is None else 1,
                    head_dim=card.head_dim if latent is None else latent.width,
                    page_tokens=page_tokens,
                    format=format,
                    window=window,
                )
            )
    return tuple(groups)


def sequence_pages(group: KVGroup, *, tokens: int, max_tokens_per_step: int) -> int:
    """Most pages that one sequence of `tokens` holds at any time in this group."""
    size = group.page_tokens
    whole = -(-tokens // size)
    if group.window is None:
        return whole
    return min(whole, -(-group.window // size) + -(-max_tokens_per_step // size) + 1)


def pool_pages(group: KVGroup, *, sizing: Sizing, sequences: int) -> int:
    """Pages of the group's pool for `sequences` of the usual length, and at least for one of the longest."""
    step = sizing.max_tokens_per_step
    longest = sequence_pages(group, tokens=sizing.max_context, max_tokens_per_step=step)
    usual = sequence_pages(group, tokens=sizing.tokens_each, max_tokens_per_step=step)
    return max(longest, sequences * usual) + SPARE_PAGES


def pool_bytes(groups: tuple[KVGroup, ...], *, sizing: Sizing, sequences: int) -> int:
    """Bytes of all pools."""
    return sum(pool_pages(group, sizing=sizing, sequences=sequences) * group.bytes_per_page for group in groups)


def fit(groups: tuple[KVGroup, ...], *, sizing: Sizing, budget: int) -> Pools | None:
    """The pools for as many sequences as `budget` bytes hold, at most `sizing.sequences`; None when not even the longest one fits."""
    if pool_bytes(groups, sizing=sizing, sequences=0) > budget:
        return None
    low, high = 0, sizing.sequences
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if pool_bytes(groups, sizing=sizing, sequences=middle) <= budget else (low, middle - 1)
        )
    pages = tuple(pool_pages(group, sizing=sizing, sequences=low) for group in groups)
    return Pools(groups=groups, pages=pages, sequences=low)


def fill(pools: Pools, *, budget: int, most: Sizing) -> Pools:
    """The pools, with what the budget leaves added to the first, up to what `most.sequences` of `most.tokens_each` can use.

    For memory that nothing else wants: pages that no running sequence needs keep prefixes.
    """
    if len(pools.groups) != 1:
        return pools
    (group,), (pages,) = pools.groups, pools.pages
    ceiling = pool_pages(group, sizing=most, sequences=most.sequences)
    return Pools(
        groups=pools.groups,
        pages=(max(pages, min(budget // group.bytes_per_page, ceiling)),),
        sequences=pools.sequences,
    )
