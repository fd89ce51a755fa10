"""The choices as they fall on a GPU: what the Triton kernels can do, what each means costs there, and what is refused.

Knows: limits and prices of the cuda op set. Refuses to know: the CPU (choices), memory (ledger) and kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from tradewind.config import ledger, ledger_cuda
from tradewind.config.card import ModelCard
from tradewind.config.goals import Means
from tradewind.config.hardware import Hardware
from tradewind.config.plan import Reason
from tradewind.config.sizes import show_bytes
from tradewind.contract.errors import UserError

PAGE_TOKENS = 64
"""Keys of a tile that the tensor copy engine loads at once."""

PAGE_MULTIPLE = 16
"""The kernels' smallest tile of keys."""

MOST_ROWS = 1024
"""Rows that one launch of the layout kernel takes."""


def why_unable(card: ModelCard) -> str | None:
    """What a model needs and the cuda op set does not have; None when it can compute it."""
    if card.vision is not None:
        return "images are not served on the cuda backend yet"
    return None


def backend_reason(means: Means, *, card: ModelCard, hardware: Hardware, missing: Mapping[str, str]) -> Reason:
    """Why the GPU computes. Raises UserError where it cannot."""
    pinned = means.backend is not None
    why_not = missing.get("cuda") or (None if hardware.kind == "cuda" else "no usable GPU was found")
    if why_not is not None:
        raise UserError(f"backend cuda cannot be used: {why_not}; use --backend cpu")
    unable = why_unable(card)
    if unable is not None:
        raise UserError(f"backend cuda cannot compute '{card.name}': {unable}; use --backend cpu")
    why = (
        f"Triton kernels on {hardware.name} ({hardware.multiprocessors} multiprocessors, "
        f"reads {hardware.memory_bytes_per_s / 1e12:.1f} TB/s)"
    )
    rejected = "cpu: reads weights tens of times slower; plain: for comparison only"
    return Reason(choice="backend", value="cuda", why=why, rejected=rejected, pinned=pinned)


def choose_quantization(
    means: Means, *, card: ModelCard, hardware: Hardware, scenario: str
) -> tuple[Literal["none", "fp8"], Reason]:
    """Whether matmul weights are rounded to fp8 at load."""
    wanted, has_fp8 = means.quantization, "fp8" in hardware.features
    if wanted in ("int8", "int4"):
        raise UserError(f"quantization {wanted} is for the cpu backend; on a GPU use fp8 or none")
    if wanted == "fp8" and not has_fp8:
        raise UserError(f"quantization fp8 needs fp8 tensor cores, and {hardware.name} has none; use none")
    if ledger_cuda.kept_fp8(card, quantization="none") and not has_fp8:
        raise UserError(
            f"the weights of '{card.name}' are FP8 with a scale for each block, which needs fp8 tensor cores, and {hardware.name} has "
            "none; use a bf16 checkpoint or --backend cpu"
        )
    sizes = {
        name: show_bytes(ledger.matmul_bytes(card, compute="bf16", quantization=name, backend="cuda"))
        for name in ("none", "fp8")
    }
    kept = ledger_cuda.kept_fp8(card, quantization="none") > 0
    from_blocks = ledger.block_quantised(card) > 0.5
    price = "each weight keeps 4 significant bits (one scale an output channel), activations one scale a token"
    if kept and wanted is None:
        why = (
            f"the file's FP8 with a scale for each 128 x 128 weights stays as it is, {sizes['none']}; tokens are rounded to e4m3 with "
            "a scale for each 128 values"
        )
        rejected = f"fp8 {sizes['fp8']}: rounds the weights a second time, with one scale an output channel"
        return "none", Reason(choice="quantization", value="none", why=why, rejected=rejected)
    if wanted == "fp8":
        again = "; the file's blocks are expanded and rounded a second time" if from_blocks or kept else ""
        why = f"weights take {sizes['fp8']} instead of bf16's {sizes['none']}; {price}{again}"
        return "fp8", Reason(choice="quantization", value="fp8", why=why, pinned=True)
    if wanted is None and scenario == "memory" and has_fp8 and not from_blocks:
        why = f"smallest memory is the goal: weights take {sizes['fp8']}; answers may lose some quality"
        rejected = f"none {sizes['none']}: larger"
        return "fp8", Reason(choice="quantization", value="fp8", why=why, rejected=rejected)
    pinned = wanted is not None
    if from_blocks:
        formats = ", ".join(card.weight_formats)
        why = f"the file's blocks ({formats}) are expanded to bf16, {sizes['none']}: the GPU's kernels multiply no packed blocks"
        rejected = f"fp8 {sizes['fp8']}: rounds them a second time" if has_fp8 else ""
        return "none", Reason(choice="quantization", value="none", why=why, rejected=rejected, pinned=pinned)
    why = f"weights stay as published, {sizes['none']}: quality is not traded unless asked for"
    rejected = (
        f"fp8 {sizes['fp8']}: nearly twice as fast, but {price}"
        if has_fp8
        else f"fp8: {hardware.name} has no tensor cores for it"
    )
    return "none", Reason(choice="quantization", value="none", why=why, rejected=rejected, pinned=pinned)


def choose_compute(means: Means, *, card: ModelCard, quantization: str) -> tuple[Literal["bf16"], Reason]:
    """bf16: the one way the kernels compute (fp8 weights meet fp8 activations where that is faster; sums are float32 in any case)."""
    if means.compute not in (None, "bf16"):
        raise UserError(f"compute {means.compute} is for the cpu and plain backends; the cuda backend computes in bf16")
    reads = show_bytes(ledger.matmul_bytes(card, compute="bf16", quantization=quantization, backend="cuda"))
    why = f"tensor cores multiply bf16 and add in float32; the residual stream stays float32; {reads} are read for a token"
    rejected = "" if means.compute else "f32: tensor cores have no full float32; int8, int16: CPU formats"
    return "bf16", Reason(choice="compute", value="bf16", why=why, rejected=rejected, pinned=means.compute is not None)


def choose_kv_format(means: Means, *, card: ModelCard, hardware: Hardware) -> tuple[Literal["bf16", "fp8"], Reason]:
    """bf16, or fp8 for twice as many tokens."""
    if card.latent is not None:
        return _choose_latent_format(means, card=card)
    price = {bits: show_bytes(2 * card.layers * card.kv_heads * card.head_dim * bits // 8) for bits in (8, 16)}
    cost = "keys and values keep 4 significant bits; attention converts them, so it is no faster"
    if means.kv_format in ("f32", "f16"):
        raise UserError(f"kv_format {means.kv_format} is not supported by the cuda backend; use bf16 or fp8")
    if means.kv_format == "fp8":
        if "fp8" not in hardware.features:
            raise UserError(
                f"kv_format fp8 needs a GPU of compute capability 8.9, and {hardware.name} is older; use bf16"
            )
        why = f"as asked; {price[8]} a token instead of {price[16]}: twice as many fit; {cost}"
        return "fp8", Reason(choice="kv_format", value="fp8", why=why, pinned=True)
    why = f"{price[16]} a token, as the model computes them"
    rejected = f"fp8: {price[8]}, but {cost}" if "fp8" in hardware.features else "fp8: not on this GPU"
    return "bf16", Reason(
        choice="kv_format", value="bf16", why=why, rejected=rejected, pinned=means.kv_format is not None
    )


def _choose_latent_format(means: Means, *, card: ModelCard) -> tuple[Literal["bf16"], Reason]:
    """Latents are short already."""
    assert card.latent is not None
    if means.kv_format not in (None, "bf16"):
        raise UserError(
            f"kv_format {means.kv_format} is not for '{card.name}': the cuda backend keeps its latents in bf16; use bf16"
        )
    kept, instead = (2 * card.layers * numbers for numbers in (card.latent.width, 2 * card.kv_heads * card.head_dim))
    why = f"{show_bytes(kept)} of latents a token; keys and values would be {show_bytes(instead)}"
    return "bf16", Reason(
        choice="kv_format",
        value="bf16",
        why=why,
        rejected="fp8: no kernel reads latents so",
        pinned=means.kv_format is not None,
    )


def choose_page_tokens(means: Means) -> tuple[int, Reason]:
    """Tokens per page."""
    size = means.page_tokens
    if size is None:
        why = "the copy engine loads whole tiles of 64 keys; a sequence wastes half a page, 32 tokens, on average"
        rejected = "16: finer sharing of prefixes, but prompts are computed 7 to 17 % slower; larger: coarser sharing"
        return PAGE_TOKENS, Reason(choice="page_tokens", value=str(PAGE_TOKENS), why=why, rejected=rejected)
    if size % PAGE_MULTIPLE:
        nearest = max(PAGE_MULTIPLE, round(size / PAGE_MULTIPLE) * PAGE_MULTIPLE)
        raise UserError(
            f"page_tokens is {size}; the cuda backend needs a multiple of {PAGE_MULTIPLE}, for example {nearest}, and is fastest with "
            f"multiples of {PAGE_TOKENS}"
        )
    why = "as asked" if size % PAGE_TOKENS == 0 else "as asked, though prompts are computed faster with multiples of 64"
    return size, Reason(choice="page_tokens", value=str(size), why=why, pinned=True)


def choose_graphs(means: Means) -> tuple[bool, Reason]:
    """Whether steps are captured and replayed."""
    if means.graphs is False:
        why = "as asked: every kernel is launched by itself, the same tokens, slower; for debugging"
        return False, Reason(choice="graphs", value="off", why=why, pinned=True)
    why = "a step of each size is captured once and replayed in one call: the host's cost per kernel is gone"
    rejected = "off: some hundred launches a step, which take longer than the kernels of a small model"
    return True, Reason(choice="graphs", value="on", why=why, rejected=rejected, pinned=bool(means.graphs))


def choose_threads(means: Means, *, hardware: Hardware) -> tuple[int, Reason]:
    """One: the GPU computes."""
    if means.threads is not None:
        raise UserError(f"threads is {means.threads}, but with the cuda backend the GPU computes: leave threads out")
    why = f"the GPU computes; the host's {hardware.cores} cores decide, load and talk"
    return 1, Reason(choice="threads", value="1", why=why)


def choose_deterministic(means: Means) -> tuple[bool, Reason]:
    """Whether results must not depend on neighbours."""
    if means.deterministic:
        why = "as asked: one kernel order for every step size, so an answer is the same alone and in any batch; steps are slower"
        return True, Reason(choice="deterministic", value="on", why=why, pinned=True)
    why = "kernels are chosen by the size of a step, so a sum's order, and at a near tie a token, can depend on the neighbours"
    rejected = "on: one fixed kernel order for all sizes, slower"
    return False, Reason(
        choice="deterministic", value="off", why=why, rejected=rejected, pinned=means.deterministic is False
    )
