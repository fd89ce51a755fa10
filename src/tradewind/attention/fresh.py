"""The optional backend `fa3`: prompts that begin in this step go through FlashAttention 3, everything else as in `triton`.

Knows: when the package `fa3-fwd` can serve. Refuses to know: its calling convention (kernels/triton/library.py).
A prompt whose first token is in this step has all of its keys in this step, so contiguous keys and values are enough; the package was
built without pages. Keys still go to the pages as ever, for later steps.
"""

from __future__ import annotations

from importlib.util import find_spec

from tradewind.attention.paged import PagedAttention
from tradewind.config.hardware import Hardware
from tradewind.contract.kv import KVGroup
from tradewind.kernels.ops import KVLayer, LatentUp, Ops, PagedRows, Tensor

HEAD_DIMS = (64, 128, 256)
"""Head sizes that it was built for and this wing measured or uses."""
LATENT_WIDTH = 576
"""Latents (512 numbers and a rotated key of 64) whose heads it may fit: keys of 192, values of 128. Others have the op set's own kernel."""


class FreshAttention(PagedAttention):
    """`triton`, with FlashAttention 3 (Shah et al. 2024) for prompts that begin in the step."""

    def __init__(self, ops: Ops) -> None:
        super().__init__(ops, name="fa3", formats=("bf16",), op_set="cuda", device="cuda")

    def why_not(self, group: KVGroup, hardware: Hardware) -> str | None:
        reason = super().why_not(group, hardware)
        if reason is not None:
            return reason
        if "sm_90" not in hardware.features:
            return f"was built for sm_90, not for {hardware.name}"
        if find_spec("fa3_fwd") is None:
            return "the package fa3-fwd is not installed (pip install 'tradewind[fa3]')"
        if getattr(self._ops, "deterministic", False):
            return "its sums depend on the step, and deterministic answers are asked for"
        if group.kind == "latent":
            if group.head_dim != LATENT_WIDTH:
                return f"serves heads made of latents of {LATENT_WIDTH} numbers, not {group.head_dim}"
            return None
        if group.kind != "full":
            return "was built without windows"
        if group.head_dim not in HEAD_DIMS:
            return f"serves heads of {', '.join(map(str, HEAD_DIMS))}, not {group.head_dim}"
        return None

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
        ops: object = self._ops
        ops.attention(  # type: ignore[attr-defined] # `fresh` is the op set cuda's own
            q,
            kv,
            rows,
            heads=heads,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            out=out,
            causal=causal,
            chunked=chunked,
            fresh=True,
        )

    def run_latents(self, q: Tensor, kv: KVLayer, rows: PagedRows, up: LatentUp, *, scale: float, out: Tensor) -> None:
        ops: object = self._ops
        ops.latent_attention(q, kv, rows, up, scale=scale, out=out, fresh=True)  # type: ignore[attr-defined] # as above
