"""Every op of the protocol: where its truth stands, what it is called in the C++ library, how close it must be.

Knows: names and tolerances. Refuses to know: implementations; references are named as text so that reading this table imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from tradewind.kernels.ops import OpSpec

EXACT = 0.0
ROUNDING = 1e-5
"""Float32 sums in another order."""


def _row(name: str, *, tolerance: float, cpu: str | None, module: str = "reference") -> OpSpec:
    return OpSpec(name=name, reference=f"tradewind.kernels.{module}:{name}", cpu=cpu, tolerance=tolerance)


OPS: dict[str, OpSpec] = {
    spec.name: spec
    for spec in (
        _row("add", tolerance=ROUNDING, cpu="add"),
        _row("add_layer_norm", tolerance=ROUNDING, cpu="add_layer_norm"),
        _row("add_low_rank", tolerance=ROUNDING, cpu="add_low_rank", module="reference_lora"),
        _row("add_rms_norm", tolerance=ROUNDING, cpu="add_rms_norm"),
        _row("attention", tolerance=ROUNDING, cpu="attention"),
        _row("copy_pages", tolerance=EXACT, cpu=None),
        _row("embed", tolerance=EXACT, cpu="embed"),
        _row("experts", tolerance=ROUNDING, cpu="experts", module="reference_moe"),
        _row("gated_linear", tolerance=ROUNDING, cpu="gated_linear"),
        _row("gather_rows", tolerance=EXACT, cpu="gather_rows"),
        _row("gelu", tolerance=ROUNDING, cpu="gelu"),
        _row("glue", tolerance=ROUNDING, cpu="glue"),
        _row("latent_attention", tolerance=ROUNDING, cpu="latent_attention", module="reference_mla"),
        _row("latent_store", tolerance=ROUNDING, cpu="latent_store", module="reference_mla"),
        _row("linear", tolerance=ROUNDING, cpu="linear"),
        _row("logprobs", tolerance=ROUNDING, cpu="logprobs"),
        _row("rms_norm_span", tolerance=ROUNDING, cpu="rms_norm_span"),
        _row("rope_angles", tolerance=ROUNDING, cpu="rope_angles"),
        _row("rope_angles_axes", tolerance=ROUNDING, cpu="rope_angles_axes", module="reference_axes"),
        _row("rope_store", tolerance=ROUNDING, cpu="rope_store"),
        _row("route", tolerance=ROUNDING, cpu="route", module="reference_moe"),
        _row("sample", tolerance=EXACT, cpu="sample"),
        _row("scale", tolerance=ROUNDING, cpu="scale"),
        _row("softcap", tolerance=ROUNDING, cpu="softcap"),
        _row("temper", tolerance=ROUNDING, cpu="temper"),
    )
}
"""By name, sorted. copy_pages runs outside recordings and is a plain memory copy in every op set."""


def reference_of(name: str) -> Callable[..., Any]:
    """The reference function of an op; imports torch."""
    module, _, function = OPS[name].reference.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found
