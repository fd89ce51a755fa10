"""The memory of keys and values, or of latents: one `KVLayer` per layer, pages as many as the plan says.

Knows: which layer lies in which group. Refuses to know: who owns a page (cache) and what is written into it (ops).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from tradewind.contract.kv import KVGroup
from tradewind.kernels.ops import KVLayer, LatentOps, Ops


class KVStorage:
    """All pages of a model on one device; page 0 of every group is the null page and is never read.

    layers: KVLayer by layer of the model. layer_group: the group of each layer.
    """

    def __init__(self, ops: Ops, groups: Sequence[KVGroup], pages: Sequence[int]) -> None:
        """pages: per group, the null page counted in. Allocates at once."""
        found: dict[int, tuple[int, KVLayer]] = {}
        for index, (group, count) in enumerate(zip(groups, pages, strict=True)):
            assert group.index == index, f"KV group {group.index} stands at place {index}"
            for layer in group.layers:
                assert layer not in found, f"layer {layer} is in two KV groups"
                found[layer] = (index, layer_of(ops, group, pages=count))
        assert sorted(found) == list(range(len(found))), f"KV groups leave out layers: {sorted(found)}"
        self.layer_group: tuple[int, ...] = tuple(found[layer][0] for layer in range(len(found)))
        self.layers: tuple[KVLayer, ...] = tuple(found[layer][1] for layer in range(len(found)))


def layer_of(ops: Ops, group: KVGroup, *, pages: int) -> KVLayer:
    """Fresh pages for one layer of a group: of keys and values, or of latents."""
    size = group.page_tokens
    if group.kind == "latent":
        latents = cast("LatentOps", ops)  # resolve() chooses no op set without latents for such a card
        return latents.latent_layer(pages=pages, page_tokens=size, width=group.head_dim, format=group.format)
    return ops.kv_layer(
        pages=pages, page_tokens=size, kv_heads=group.kv_heads, head_dim=group.head_dim, format=group.format
    )
