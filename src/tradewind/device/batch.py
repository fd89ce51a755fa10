"""One step as the device wing sees it: `ForwardBatch`, the only thing a model's forward receives.

Knows: ids, positions, rows per KV group, scratch memory. Refuses to know: requests, sampling, why a row is there.
Never leaves the device wing. There is no current-batch global: it is passed as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tradewind.kernels.ops import Count, KVLayer, Ops, PagedRows, Tensor


class Scratch:
    """Named buffers that are reused from layer to layer and step to step.

    A buffer is known by its name; the first `take` decides its shape, and every later one must agree. Owner: one runner. Two layers
    that take the same name share the memory, which is safe because ops run in order; a value that must outlive the next layer needs a
    name of its own.
    """

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._buffers: dict[str, tuple[tuple[int, ...], str, Tensor]] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: str | None = None) -> Tensor:
        """The buffer of that name, allocated at first use; without `dtype` of the op set's activation type."""
        dtype = dtype or self._ops.activation
        held = self._buffers.get(name)
        if held is None:
            held = (shape, dtype, self._ops.empty(shape, dtype))
            self._buffers[name] = held
        assert held[:2] == (shape, dtype), f"scratch {name!r} was taken as {held[:2]}, now as {(shape, dtype)}"
        return held[2]


@dataclass(frozen=True, kw_only=True)
class ImageRows:
    """What a model that reads images is told of a step's tokens besides."""

    axes: Tensor
    """int32 [3, T]: each token's positions by time, row and column."""
    index: Tensor
    """int32 [T]: row of `stage` that each token begins with."""
    stage: Tensor
    """float32 [2T, E]: room for the tokens' embeddings, and behind them the features of those that are an image's."""


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """A step on the device. T is the capacity of the bucket, `tokens` the live count; same letters as kernels/ops.py."""

    capacity: int
    tokens: Count
    ids: Tensor
    """int32 [T]."""
    positions: Tensor
    """int32 [T]."""
    rows: tuple[PagedRows, ...]
    """By KV group."""
    write_slots: tuple[Tensor, ...]
    """By KV group: int32 [T], page * page_tokens + offset of each token."""
    kv: tuple[KVLayer, ...]
    """By layer of the model."""
    layer_group: tuple[int, ...]
    """By layer: which KV group it belongs to."""
    scratch: Scratch
    adapters: Tensor = None
    """int32 [T]: the bank slot of each token's adapter, -1 where it has none; None where the model serves no adapters."""
    images: ImageRows | None = None
    """None: the model reads text alone, or this step has nothing but text."""
    angles: dict[str, Tensor] = field(default_factory=dict)
    """Rope angles of this step by rope name, computed once per step by the model before its layers."""
