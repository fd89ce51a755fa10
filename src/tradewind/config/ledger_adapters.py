"""Memory of the banks that low-rank adapters are kept in.

Knows: which matrices of a model may be changed, in which shapes. Refuses to know: other memory (ledger), and who writes the banks.
"""

from __future__ import annotations

from tradewind.config.card import ModelCard
from tradewind.config.goals import AdapterRoom
from tradewind.config.plan import LedgerLine

VECTOR = 16
"""Ranks and outputs are rounded up to whole vectors of so many values."""

Stack = tuple[tuple[int, ...], int]
"""Outputs of matrices that are multiplied together, and their inputs."""


def stacks_of(card: ModelCard, layer: int) -> tuple[Stack, ...]:
    """The matmuls of one layer that adapters may change: all but those of experts and routers, and what makes keys of latents."""
    hidden, queries = card.hidden, card.heads * card.head_dim
    found: list[Stack] = []
    latent = card.latent
    if latent is not None:
        if latent.query_rank:
            found += [((latent.query_rank,), hidden), ((queries,), latent.query_rank)]
        else:
            found.append(((queries,), hidden))
        found += [((latent.width,), hidden), ((hidden,), card.heads * latent.value)]
    else:
        keys = card.kv_heads * card.head_dim
        found += [((queries, keys, keys), hidden), ((hidden,), queries)]
    moe = card.moe
    inner = card.intermediate if moe is None or not moe.layers[layer] else moe.shared_intermediate
    if inner:
        found += [((inner, inner) if card.causal else (inner,), hidden), ((hidden,), inner)]
    return tuple(found)


def bank_bytes(card: ModelCard, room: AdapterRoom, *, exact: bool) -> int:
    """Bytes of all banks: A and B of every matrix for each slot, float32 (`exact`) or bfloat16."""
    rank, each = _whole(room.rank), 4 if exact else 2
    values = 0
    for layer in range(card.layers):
        for sizes, k in stacks_of(card, layer):
            values += sum(k + _whole(n) for n in sizes)
    return room.slots * rank * values * each


def line(card: ModelCard, room: AdapterRoom, *, exact: bool, max_tokens: int) -> LedgerLine:
    """The ledger's entry: the banks, and gate and up of one step side by side, which a model without adapters never writes."""
    banks, kind = bank_bytes(card, room, exact=exact), "float32" if exact else "bf16"
    both = max_tokens * 4 * (2 * card.intermediate + 3 * _whole(room.rank)) if card.causal else 0
    how = f"{room.slots} adapters x rank {room.rank} in {kind}, and gate and up of {max_tokens} tokens"
    return LedgerLine(name="adapters", bytes=banks + both, how=how)


def _whole(size: int) -> int:
    return -(-size // VECTOR) * VECTOR
