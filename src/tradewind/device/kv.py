"""The memory of keys and values: one `KVLayer` per layer, pages as many as the plan says.

Knows: which layer lies in which group. Refuses to know: who owns a page (cache) and what is written into it (ops).
"""

from __future__ import annotations

from collections.abc import Sequence

from tradewind.contract.kv import KVGroup
from tradewind.kernels.ops import KVLayer, Ops


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
                found[layer] = (
                    index,
                    ops.kv_layer(
                        pages=count,
                        page_tokens=group.page_tokens,
                        kv_heads=group.kv_heads,
                        head_dim=group.head_dim,
                        format=group.format,
                    ),
                )
        assert sorted(found) == list(range(len(found))), f"KV groups leave out layers: {sorted(found)}"
        self.layer_group: tuple[int, ...] = tuple(found[layer][0] for layer in range(len(found)))
        self.layers: tuple[KVLayer, ...] = tuple(found[layer][1] for layer in range(len(found)))
