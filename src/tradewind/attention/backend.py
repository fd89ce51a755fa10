"""Attention backends: the protocol, the one table, and the chooser that says why.

Knows: which backend can serve which KV group on which hardware. Refuses to know: schedules, pages' owners, layers' weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tradewind.attention.fresh import FreshAttention
from tradewind.attention.paged import PagedAttention
from tradewind.config.hardware import Hardware
from tradewind.contract.errors import UserError
from tradewind.contract.kv import KVGroup
from tradewind.device.batch import ForwardBatch
from tradewind.kernels.ops import KVLayer, LatentUp, Ops, PagedRows, Tensor


class Backend(Protocol):
    """One way to compute attention over pages."""

    name: str

    def why_not(self, group: KVGroup, hardware: Hardware) -> str | None:
        """Why this backend cannot serve the group on this hardware; None when it can."""

    def plan(self, batch: ForwardBatch) -> None:
        """Host work for one step, before any layer runs; not recorded by tapes and graphs."""

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
        """Attention of one layer, ops only: q, out [T, H * D]. Arguments as in `Ops.attention`."""

    def run_latents(self, q: Tensor, kv: KVLayer, rows: PagedRows, up: LatentUp, *, scale: float, out: Tensor) -> None:
        """The same over pages of latents. Arguments as in `LatentOps.latent_attention`."""


BACKENDS: dict[str, Callable[[Ops], Backend]] = {
    "cpu": lambda ops: PagedAttention(ops, name="cpu", formats=("f32", "f16", "bf16")),
    "plain": lambda ops: PagedAttention(ops, name="plain", formats=("f32", "f16", "bf16")),
    "fa3": FreshAttention,
    "triton": lambda ops: PagedAttention(ops, name="triton", formats=("bf16", "fp8"), op_set="cuda", device="cuda"),
}
"""By name, in the order in which they are asked."""


def choose_backend(
    groups: Sequence[KVGroup],
    hardware: Hardware,
    *,
    ops: Ops,
    pinned: str | None = None,
    report: Callable[[str], None] | None = None,
) -> Backend:
    """The first backend that serves every group, or the pinned one; `report` gets one line per decision.

    Raises UserError with all reasons when none fits.
    """
    if pinned is not None and pinned not in BACKENDS:
        raise UserError(f"Unknown attention backend '{pinned}'; known are {', '.join(BACKENDS)}.")
    reasons: list[str] = []
    for name, make in BACKENDS.items():
        if pinned is not None and name != pinned:
            continue
        backend = make(ops)
        reason = next((f"group {g.index}: {why}" for g in groups if (why := backend.why_not(g, hardware))), None)
        if reason is None:
            if report is not None:
                report(f"attention: {name}" + (f" ({'; '.join(reasons)})" if reasons else ""))
            return backend
        reasons.append(f"not {name}: {reason}")
    raise UserError(f"No attention backend fits: {'; '.join(reasons)}.")
