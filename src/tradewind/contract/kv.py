"""What a layer must keep between steps, as one record per kind of layer.

Knows: the shape and price of a page. Refuses to know: where pages live (cache decides, device stores).
"""

from __future__ import annotations

from typing import Literal

import msgspec

KVKind = Literal["full", "window", "chunk", "latent", "state"]
KVFormat = Literal["f32", "f16", "bf16", "fp8"]

BYTES_PER_ELEMENT: dict[str, int] = {"bf16": 2, "f16": 2, "f32": 4, "fp8": 1}


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share one page table because they keep the same tokens.

    A page holds `page_tokens` consecutive tokens of one sequence for *all* layers of the group. With kind "window" the
    layer at position p reads positions p - window + 1 .. p, so pages wholly before that are dropped; with kind "chunk" it reads from the
    last multiple of `window` on. With kind "latent" a token has one vector of `head_dim` numbers, which keys and values of all heads are
    made of, and `kv_heads` is 1.
    """

    index: int
    kind: KVKind
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    page_tokens: int
    format: KVFormat
    window: int | None = None

    @property
    def values_per_token(self) -> int:
        """Numbers that a layer keeps of a token: keys and values of all heads, or one latent."""
        return (1 if self.kind == "latent" else 2) * self.kv_heads * self.head_dim

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers of the group, keys and values together."""
        return len(self.layers) * self.page_tokens * self.values_per_token * BYTES_PER_ELEMENT[self.format]
