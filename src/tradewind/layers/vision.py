"""The image tower of Qwen2.5-VL: patches in, one vector for each square of patches out (Bai et al. 2025).

Knows: the order of its bricks, windows and full layers, its own small memory. Refuses to know: prompts, steps, and how colors become
patches (vision_order).

    x = embed(patches)                     a matmul; both frames of a still image are one picture, so their weights add up
    for each layer:  x += attention(norm(x));  x += mlp(norm(x))
    token = down(gelu(up(norm(x) of merge x merge patches)))

It is a decoder's bricks with another card, run eagerly, image by image. Keys and values are written to pages and read at once by the same
layer, so all layers share one `KVLayer`; windows begin on pages of their own. Attention is of every patch to all of its window, or, in the
card's full layers, to all of the image. Weights are never quantised.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from tradewind.config.card import ModelCard, RopeFacts
from tradewind.config.card_vision import VisionFacts
from tradewind.device.batch import ForwardBatch, Scratch
from tradewind.kernels.ops import KVLayer, Ops, PagedRows
from tradewind.layers.build import Build, Tensor, Weights
from tradewind.layers.linear import Linear
from tradewind.layers.mlp import GatedMLP
from tradewind.layers.norm import RMSNorm
from tradewind.layers.vision_order import patch_places, patches_of, window_order

PAGE_TOKENS = 16
FULL, WINDOWS = 0, 1
"""KV groups of the tower's batch."""


class VisionTower:
    """Owner of its buffers, which grow with the largest image. Called by one thread, between steps."""

    def __init__(self, build: Build, weights: Weights) -> None:
        assert build.card.vision is not None
        self.facts = facts = build.card.vision
        self.ops = build.ops
        own = Build(card=tower_card(build.card, facts), ops=build.ops, weights=weights, attention=build.attention)
        shape = (facts.hidden, 3, facts.frames, facts.patch, facts.patch)
        frames = weights.floats("patch", shape).sum(axis=2, dtype=np.float64).reshape(facts.hidden, -1)
        self.patch = build.ops.pack_matrix(frames.astype(np.float32), compute=weights.compute)
        self.blocks = [VisionBlock(own, layer=layer) for layer in range(facts.layers)]
        self.norm = RMSNorm(own, weights.at("merger"), "norm")
        wide = facts.hidden * facts.merge**2
        self.up = Linear(own, weights.at("merger"), {"0": wide}, k=wide, bias=True)
        self.down = Linear(own, weights.at("merger"), {"2": facts.out}, k=wide, bias=True)
        # Half of a head's pairs turn by the row, half by the column.
        dims = facts.hidden // facts.heads // 2
        self.inv_freq = (facts.theta ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)).astype(np.float32)
        self._room: _Room | None = None

    def __call__(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Colors [height, width, 3], whole squares -> features [tokens, out], row by row; a new array."""
        facts, ops = self.facts, self.ops
        rows, columns = pixels.shape[0] // facts.edge, pixels.shape[1] // facts.edge
        unit = facts.merge**2
        order, sizes = window_order(rows, columns, size=facts.window // facts.edge)
        patches = (order[:, None] * unit + np.arange(unit, dtype=np.int32)).reshape(-1)
        cut = patches_of(pixels, facts)[patches]
        batch, merged = self._batch(len(patches), sizes * unit)
        down, across = patch_places(rows, columns, facts.merge)
        batch.angles["global"] = ops.constant(
            self._padded(self._angles(down[patches], across[patches]), batch.capacity)
        )

        x = batch.scratch.take("x", (batch.capacity, facts.hidden), "f32")
        ops.linear(ops.constant(self._padded(cut, batch.capacity)), self.patch, bias=None, out=x, count=batch.tokens)
        delta = None
        for block in self.blocks:
            delta = block(batch, x, delta)
        normed = self.norm(batch, x, delta, out="normed")
        squares = normed.reshape(merged.capacity, unit * facts.hidden)
        inner = self.up(merged, squares, out="merged")
        ops.gelu(inner, count=merged.tokens)
        features = ops.host(self.down(merged, inner, out="features"))
        out = np.empty((rows * columns, facts.out), np.float32)
        out[order] = features[: len(order)]
        return out

    def release(self) -> None:
        """Gives the buffers back; the next image makes new ones."""
        self._room = None

    def _angles(self, down: NDArray[np.int32], across: NDArray[np.int32]) -> NDArray[np.float32]:
        """cos | sin of each patch: the pairs of its row, then those of its column. float32 steps, as the model was trained."""
        turns = [place.astype(np.float32)[:, None] * self.inv_freq for place in (down, across)]
        angle = np.concatenate(turns, axis=1).astype(np.float64)
        return np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)

    @staticmethod
    def _padded(values: NDArray[np.float32], capacity: int) -> NDArray[np.float32]:
        if len(values) == capacity:
            return values
        out = np.zeros((capacity, values.shape[1]), np.float32)
        out[: len(values)] = values
        return out

    def _batch(self, patches: int, windows: NDArray[np.int32]) -> tuple[ForwardBatch, ForwardBatch]:
        """The batch of one image's patches, and the one of its squares."""
        facts, ops = self.facts, self.ops
        full = _Layout.of(np.array([patches], np.int32))
        parts = _Layout.of(windows)
        pages = max(full.pages, parts.pages)
        if self._room is None or patches > self._room.capacity or pages > self._room.kv.pages:
            self._room = None  # the old buffers go before the new ones come
            self._room = _Room(
                capacity=patches,
                scratch=Scratch(ops),
                kv=ops.kv_layer(
                    pages=pages, page_tokens=PAGE_TOKENS, kv_heads=facts.heads, head_dim=facts.hidden // facts.heads, format="f32"
                ),
            )  # fmt: skip
        room = self._room
        none = ops.constant(np.zeros(1, np.int32))
        batch = ForwardBatch(
            capacity=room.capacity,
            tokens=np.array([patches], np.int32),
            ids=none,
            positions=none,
            rows=tuple(layout.rows(ops) for layout in (full, parts)),
            write_slots=tuple(ops.constant(layout.slots) for layout in (full, parts)),
            kv=(room.kv,) * facts.layers,
            layer_group=tuple(FULL if layer in facts.full_layers else WINDOWS for layer in range(facts.layers)),
            scratch=room.scratch,
        )
        unit = facts.merge**2
        squares = replace(batch, capacity=room.capacity // unit, tokens=np.array([patches // unit], np.int32))
        return batch, squares


@dataclass(frozen=True, kw_only=True)
class _Room:
    """Buffers for images of up to `capacity` patches."""

    capacity: int
    scratch: Scratch
    kv: KVLayer


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Where keys and values of consecutive groups of patches lie; each group begins on a page."""

    sizes: NDArray[np.int32]
    slots: NDArray[np.int32]
    first: NDArray[np.int32]
    """First page of each group; page 0 is the null page."""
    pages: int

    @staticmethod
    def of(sizes: NDArray[np.int32]) -> _Layout:
        each = -(-sizes // PAGE_TOKENS)
        first = (1 + np.cumsum(each) - each).astype(np.int32)
        within = np.arange(int(sizes.sum()), dtype=np.int32) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        slots = np.repeat(first * PAGE_TOKENS, sizes) + within
        return _Layout(sizes=sizes, slots=slots.astype(np.int32), first=first, pages=int(1 + each.sum()))

    def rows(self, ops: Ops) -> PagedRows:
        most = int(-(-self.sizes.max() // PAGE_TOKENS))
        table = self.first[:, None] + np.arange(most, dtype=np.int32)
        used = np.arange(most) * PAGE_TOKENS < self.sizes[:, None]
        starts = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int32)
        return PagedRows(
            query_start=ops.constant(starts),
            lengths=ops.constant(np.ascontiguousarray(self.sizes, np.int32)),
            page_table=ops.constant(np.where(used, table, 0).astype(np.int32)),
            rows=np.array([len(self.sizes)], np.int32),
        )


class VisionBlock:
    """Pre-norm attention and gated MLP, with biases everywhere."""

    def __init__(self, build: Build, *, layer: int) -> None:
        weights = build.weights.at(f"layers.{layer}")
        self.attention_norm = RMSNorm(build, weights, "attention_norm")
        self.attention = VisionAttention(build, weights.at("attention"), layer=layer)
        self.mlp_norm = RMSNorm(build, weights, "mlp_norm")
        self.mlp = GatedMLP(build, weights.at("mlp"))

    def __call__(self, batch: ForwardBatch, x: Tensor, delta: Tensor | None) -> Tensor:
        """Adds the layer before (delta) to x and returns what this layer's MLP wants added."""
        delta = self.attention(batch, self.attention_norm(batch, x, delta, out="normed"), out="delta")
        return self.mlp(batch, self.mlp_norm(batch, x, delta, out="normed"), out="delta")


class VisionAttention:
    """Attention of every patch to all of its group; q, k and v are one matrix in the file."""

    def __init__(self, build: Build, weights: Weights, *, layer: int) -> None:
        card = build.card
        self.ops, self.layer, self.heads, self.width = build.ops, layer, card.heads, card.hidden
        self.scale = card.head_dim**-0.5
        self.qkv = Linear(build, weights, {"qkv": 3 * card.hidden}, k=card.hidden, bias=True)
        self.output = Linear(build, weights, {"output": card.hidden}, k=card.hidden, bias=True)

    def __call__(self, batch: ForwardBatch, x: Tensor, *, out: str) -> Tensor:
        """x [T, E] -> [T, E] in the scratch buffer `out`."""
        group, kv = batch.layer_group[self.layer], batch.kv[self.layer]
        qkv = self.qkv(batch, x, out="qkv")
        q = batch.scratch.take("q", (batch.capacity, self.width))
        self.ops.rope_store(
            qkv, batch.angles["global"], batch.write_slots[group], kv, heads=self.heads, q_weight=None, k_weight=None, eps=0.0, out=q,
            count=batch.tokens,
        )  # fmt: skip
        mixed = batch.scratch.take("mixed", (batch.capacity, self.width))
        self.ops.attention(
            q, kv, batch.rows[group], heads=self.heads, scale=self.scale, window=None, softcap=None, sinks=None, out=mixed, causal=False
        )  # fmt: skip
        return self.output(batch, mixed, out=out)


def tower_card(card: ModelCard, facts: VisionFacts) -> ModelCard:
    """The card that the bricks of the tower are built with."""
    return msgspec.structs.replace(
        card,
        hidden=facts.hidden,
        layers=facts.layers,
        heads=facts.heads,
        kv_heads=facts.heads,
        head_dim=facts.hidden // facts.heads,
        intermediate=facts.intermediate,
        norm_eps=facts.norm_eps,
        norm_offset=0.0,
        activation="silu",
        rope=RopeFacts(kind="absent"),
        layer_windows=(None,) * facts.layers,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        causal=False,
        latent=None,
        moe=None,
        vision=None,
    )
