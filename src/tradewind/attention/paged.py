"""Attention by the op set's own paged kernel: the backends `cpu`, `plain` and `triton`.

Knows: which KV formats the kernel reads. Refuses to know: how it works inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from tradewind.config.hardware import Hardware
from tradewind.contract.kv import KVGroup
from tradewind.device.batch import ForwardBatch
from tradewind.kernels.ops import KVLayer, LatentOps, LatentUp, Ops, PagedRows, Tensor


class PagedAttention:
    """Hands everything to `ops.attention`; rows of any length, nothing to plan."""

    def __init__(
        self, ops: Ops, *, name: str, formats: Sequence[str], op_set: str | None = None, device: str = "cpu"
    ) -> None:
        """op_set: whose kernel it is, by default the one of the backend's own name; device: the kind of hardware it computes on."""
        self.name = name
        self._ops = ops
        self._formats = tuple(formats)
        self._op_set = op_set or name
        self._device = device

    def why_not(self, group: KVGroup, hardware: Hardware) -> str | None:
        if self._ops.name != self._op_set:
            return f"the op set in use is {self._ops.name}"
        if hardware.kind != self._device:
            return f"computes on {self._device}, not on {hardware.kind}"
        if group.kind == "latent":
            if not hasattr(self._ops, "latent_attention"):
                return "has no kernel for latents"
        elif group.kind not in ("full", "window", "chunk"):
            return f"keeps keys and values, not {group.kind} states"
        if group.format not in self._formats:
            return f"reads KV as {', '.join(self._formats)}, not {group.format}"
        return None

    def plan(self, batch: ForwardBatch) -> None:
        """Nothing: the kernel reads lengths and page tables itself."""

    def run(
        self,
        q: Tensor,
        kv: KVLayer,
        rows: PagedRows,
        *,
        heads: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        out: Tensor,
        causal: bool = True,
        chunked: bool = False,
    ) -> None:
        self._ops.attention(
            q, kv, rows, heads=heads, scale=scale, window=window, softcap=softcap, sinks=sinks, out=out, causal=causal,
            chunked=chunked,
        )  # fmt: skip

    def run_latents(self, q: Tensor, kv: KVLayer, rows: PagedRows, up: LatentUp, *, scale: float, out: Tensor) -> None:
        cast("LatentOps", self._ops).latent_attention(q, kv, rows, up, scale=scale, out=out)
