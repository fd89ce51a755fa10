"""What each decoder family says in its own way in GGUF metadata: one function and one row for each architecture.

Knows: keys that only some families have, what converters leave out, tensors that tell what metadata does not. Refuses to know: what all
share (card_gguf) and arithmetic (models).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from tradewind.config.card import MoeFacts, RopeFacts, TemperFacts
from tradewind.config.card_families import MOST_EXPERTS, Shape
from tradewind.config.card_parts import Tensors, every_nth_full
from tradewind.config.fields import Fields


class GGUFFamily(msgspec.Struct, frozen=True, kw_only=True):
    """One row: how files of one architecture are read."""

    family: str
    """Row of the model registry."""
    facts: Callable[[Fields, Shape, Tensors | None], Mapping[str, Any]]
    """Fields of the card that this family decides; changes nothing. The fields' keys come without the architecture in front."""
    tied: bool = False
    """Whether the head is the embedding, where no tensors can be asked."""
    qkv_bias: bool = False
    theta: float = 1e4
    turn_ends: tuple[str, ...] = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>")
    """Tokens that end an answer in chat formats, also where a file names only the end of text."""


def llama(fields: Fields, shape: Shape, tensors: Tensors | None) -> dict[str, Any]:
    """Llama, Mistral (a window everywhere) and, where experts are counted, Mixtral: all are "llama" in GGUF."""
    facts: dict[str, Any] = {"layer_windows": (window_of(fields),) * shape.layers}
    if fields.whole("expert_count", default=0, low=0):
        facts |= {"family": "mixtral", "moe": experts_of(fields, shape, inner="feed_forward_length", normalised=True)}
    return facts


def llama4(fields: Fields, shape: Shape, tensors: Tensors | None) -> dict[str, Any]:
    """Chunks of 8192, every fourth layer full, without rope and with tempered queries, unless the file states a window of 0; no key says
    any of it. Norms of q and k in all published sizes but that of 128 experts."""
    window = fields.whole("attention.sliding_window", default=LLAMA4_CHUNK, low=0)
    if window not in (0, LLAMA4_CHUNK):
        raise fields.refuse("attention.sliding_window", f"{LLAMA4_CHUNK}, or 0 where all layers are full")
    ropes = tuple(not window or (index + 1) % 4 != 0 for index in range(shape.layers))
    step = fields.whole("interleave_moe_layer_step", default=1)
    moe = experts_of(fields, shape, inner="expert_feed_forward_length", normalised=False)
    return {
        "layer_windows": tuple(window if window and rope else None for rope in ropes),
        "windows_restart": True,
        "layer_ropes": ropes,
        "temper": TemperFacts(every=8192, slope=0.1) if window else None,
        "qk_norm": moe.experts != 128,
        "qk_norm_weights": moe.experts == 128,
        "moe": msgspec.structs.replace(
            moe,
            layers=tuple((index + 1) % step == 0 for index in range(shape.layers)),
            score="sigmoid",
            weigh_input=True,
            shared_intermediate=moe.intermediate,
        ),
    }


def qwen2(fields: Fields, shape: Shape, tensors: Tensors | None) -> dict[str, Any]:
    """Nothing of its own."""
    return {}


def qwen2_moe(fields: Fields, shape: Shape, tensors: Tensors | None) -> dict[str, Any]:
    """Weights are not normalised in any published file, and no key says so."""
    shared = fields.whole("expert_shared_feed_forward_length", default=fields.whole("feed_forward_length"))
    moe = experts_of(fields, shape, inner="expert_feed_forward_length", normalised=False)
    return {"moe": msgspec.structs.replace(moe, shared_intermediate=shared, shared_gate=True)}


def qwen3(fields: Fields, shape: Shape, tensors: Tensors | None) -> dict[str, Any]:
    """Norms on q and k."""
    return {"qk_norm": True}


def qwen3_moe(fields: Fields, shape: Shape, tensors: Tensors | None) -> dict[str, Any]:
    """Weights are normalised in every published file."""
    moe = experts_of(fields, shape, inner="expert_feed_forward_length", normalised=True)
    return {"qk_norm": True, "moe": moe}


def gemma2(fields: Fields, shape: Shape, tensors: Tensors | None) -> dict[str, Any]:
    """Every second layer full."""
    window = window_of(fields, default=4096)
    return {
        # Gemma 2 27B divides by the square root of hidden / heads, the others by that of the head.
        **gemma(fields, shape, divisor=shape.hidden / shape.heads if shape.layers == 46 else shape.head_dim),
        "layer_windows": every_nth_full(shape.layers, window=window, pattern=2),
    }


def gemma3(fields: Fields, shape: Shape, tensors: Tensors | None) -> dict[str, Any]:
    """Every sixth layer full unless stated, norms on q and k, a rope for windowed layers."""
    window = window_of(fields)
    if window is None:
        raise fields.refuse("attention.sliding_window", "a whole number from 1")
    return {
        # As with Gemma 2: the 27B is the exception.
        **gemma(fields, shape, divisor=shape.hidden / shape.heads if shape.layers == 62 else shape.head_dim),
        "qk_norm": True,
        "rope_local": RopeFacts(theta=fields.number("rope.freq_base_swa", default=1e4)),
        "layer_windows": windows_by_pattern(fields, layers=shape.layers, window=window),
    }


def granite(fields: Fields, shape: Shape, tensors: Tensors | None) -> dict[str, Any]:
    """Four multipliers, each written only where it is there."""
    return {
        "attention_scale": fields.number("attention.scale", default=shape.head_dim**-0.5),
        "embedding_scale": fields.number("embedding_scale", default=1.0),
        "residual_scale": fields.number("residual_scale", default=1.0),
        "logit_scale": 1.0 / fields.number("logit_scale", default=1.0),
    }


def olmo2(fields: Fields, shape: Shape, tensors: Tensors | None) -> dict[str, Any]:
    """Norms over all heads. OLMo 3 calls itself olmo2 too; its windows tell."""
    if fields.has("attention.sliding_window"):
        raise fields.refuse("attention.sliding_window", "absent: OLMo 3 is not supported")
    return {"qk_norm_whole": True}


def phi3(fields: Fields, shape: Shape, tensors: Tensors | None) -> dict[str, Any]:
    """The same window everywhere where the file has one (0: none)."""
    return {"layer_windows": (window_of(fields),) * shape.layers}


# ---------------------------------------------------------------------------------------------------------------- shared parts


def gemma(fields: Fields, shape: Shape, *, divisor: float) -> dict[str, Any]:
    """What Gemma 2 and 3 share. Converters store norm weights already as factors."""
    return {
        "activation": "gelu_tanh",
        "sandwich_norms": True,
        "embedding_scale": math.sqrt(shape.hidden),
        "attention_scale": divisor**-0.5,
        "attention_softcap": fields.optional_number("attn_logit_softcapping"),
        "logit_softcap": fields.optional_number("final_logit_softcapping"),
    }


def experts_of(fields: Fields, shape: Shape, *, inner: str, normalised: bool) -> MoeFacts:
    """Experts in every layer."""
    experts = fields.whole("expert_count", high=MOST_EXPERTS)
    chosen = fields.whole("expert_used_count")
    if chosen > experts:
        raise fields.refuse("expert_used_count", f"at most expert_count, {experts}")
    return MoeFacts(
        experts=experts,
        per_token=chosen,
        intermediate=fields.whole(inner),
        layers=(True,) * shape.layers,
        normalised=normalised,
    )


def window_of(fields: Fields, *, default: int = 0) -> int | None:
    """The window, 0 or none at all being none."""
    return fields.whole("attention.sliding_window", default=default, low=0) or None


def windows_by_pattern(fields: Fields, *, layers: int, window: int) -> tuple[int | None, ...]:
    """Every n-th layer full (n = 6 unless stated), or a flag for each layer, true for a window."""
    field = "attention.sliding_window_pattern"
    value = fields.values.get(field)
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        return every_nth_full(layers, window=window, pattern=fields.whole(field, default=6))
    flags = list(value)
    if len(flags) != layers:
        raise fields.refuse(field, f"a whole number, or {layers} flags, one for each layer")
    return tuple(window if flag else None for flag in flags)


LLAMA4_CHUNK = 8192

GGUF_FAMILIES: dict[str, GGUFFamily] = {
    "gemma2": GGUFFamily(family="gemma2", facts=gemma2, tied=True),
    "gemma3": GGUFFamily(family="gemma3", facts=gemma3, tied=True, theta=1e6),
    "granite": GGUFFamily(family="granite", facts=granite),
    "llama": GGUFFamily(family="llama", facts=llama),
    "llama4": GGUFFamily(family="llama4", facts=llama4, theta=5e5, turn_ends=("<|eot|>", "<|eom|>")),
    "olmo2": GGUFFamily(family="olmo2", facts=olmo2),
    "phi3": GGUFFamily(family="phi3", facts=phi3, turn_ends=("<|end|>", "<|im_end|>")),
    "qwen2": GGUFFamily(family="qwen2", facts=qwen2, qkv_bias=True),
    "qwen2moe": GGUFFamily(family="qwen2_moe", facts=qwen2_moe, qkv_bias=True),
    "qwen3": GGUFFamily(family="qwen3", facts=qwen3),
    "qwen3moe": GGUFFamily(family="qwen3_moe", facts=qwen3_moe),
}
"""By `general.architecture`, sorted."""
