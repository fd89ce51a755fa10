"""What each decoder family says in its own way in `config.json`: one row for each `model_type`.

Knows: defaults that files leave out, fields that only one family has, which layers are windowed. Refuses to know: what all families share
(card_hf) and arithmetic (models). What would give another model than the one computed here is refused by name.

A new family is one function here that gives the card's fields it decides, and one row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tradewind.config.card import LatentFacts, MoeFacts, RopeFacts, TemperFacts
from tradewind.config.card_parts import every_nth_full, yarn_factor
from tradewind.config.card_vision import mrope_sections
from tradewind.config.fields import CardError, Fields, plain_int, shown


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What a family's own facts may depend on."""

    hidden: int
    layers: int
    heads: int
    head_dim: int
    rope: RopeFacts


class HFFamily(msgspec.Struct, frozen=True, kw_only=True):
    """One row: how files of one `model_type` are read."""

    family: str
    """Row of the model registry."""
    facts: Callable[[Fields, Shape], Mapping[str, Any]]
    """Fields of the card that this family decides, also in place of what was read for all; changes nothing."""
    kv_heads: int | None = None
    """Where the file does not say; None: as many as heads."""
    head_dim: int | None = None
    """Where the file does not say; None: hidden / heads."""
    theta: float = 1e4
    norm_eps: float = 1e-6
    tied: bool = False
    activation_field: str = "hidden_act"
    activation: str = "silu"
    """The only one that this family is computed with."""
    quantised: tuple[str, ...] = ()
    """Ways of quantising (`quant_method`) whose tensors this family reads."""
    own_local_rope: bool = False
    """Windowed layers have a rope of their own."""
    text_of: str = ""
    """The `model_type` of files that describe such a decoder as the `text_config` of a model that reads more than text; "": none."""
    vision: bool = False
    """The file describes an image tower too."""
    omitted: Mapping[str, object] = msgspec.field(default_factory=dict)
    """What published files leave out because it equals the default of their library's configuration class."""


# ------------------------------------------------------------------------------------------------------- one function a family


def llama(fields: Fields, shape: Shape) -> dict[str, Any]:
    """Biases where the file says so."""
    return {**attention_biases(fields), "mlp_bias": fields.flag("mlp_bias", default=False)}


def llama4(fields: Fields, shape: Shape) -> dict[str, Any]:
    """Chunks in layers with rope, none in the others, which are full and temper their queries; experts of which one is chosen."""
    ropes = llama4_ropes(fields, layers=shape.layers)
    chunk = fields.values.get("attention_chunk_size", 8192)
    chunk = None if chunk is None else fields.whole("attention_chunk_size", default=8192)
    kinds = ["full_attention" if chunk is None or not rope else "chunked_attention" for rope in ropes]
    windows = listed_windows(
        Fields({"layer_types": kinds, **fields.values}, origin=fields.origin),
        layers=shape.layers,
        window=chunk,
        windowed="chunked_attention",
    )
    # The first files have 4 where later ones have true.
    tempered = fields.values.get("attn_temperature_tuning")
    if tempered is None or isinstance(tempered, bool) or not plain_int(tempered):
        tempered = fields.flag("attn_temperature_tuning", default=True)
    norms = fields.flag("use_qk_norm", default=True)
    rope = shape.rope
    if norms and rope.kind in ("longrope", "yarn"):
        # Queries and keys are normed when they are turned, so no factor on them is left.
        rope = msgspec.structs.replace(rope, attention_factor=1.0)
    inner = fields.whole("intermediate_size", default=8192)
    moe = MoeFacts(
        **experts_and_chosen(fields, ("num_local_experts",), experts=16, per_token=1),
        intermediate=inner,
        layers=llama4_mixtures(fields, layers=shape.layers),
        score="sigmoid",
        normalised=False,
        weigh_input=True,
        shared_intermediate=inner,
    )
    return {
        **attention_biases(fields),
        "intermediate": fields.whole("intermediate_size_mlp", default=16384),
        "layer_windows": windows,
        "windows_restart": True,
        "layer_ropes": ropes,
        "temper": TemperFacts(
            every=fields.whole("floor_scale", default=8192), slope=fields.number("attn_scale", default=0.1)
        )
        if tempered
        else None,
        "rope": rope,
        "qk_norm": norms,
        "qk_norm_weights": not norms,
        "moe": moe if any(moe.layers) else None,
    }


def mistral(fields: Fields, shape: Shape) -> dict[str, Any]:
    """The same window everywhere. null says none; a missing field says the library's default, as in the first files."""
    window = fields.whole("sliding_window") if fields.has("sliding_window") else None
    if "sliding_window" not in fields.values:
        window = 4096
    return {"layer_windows": (window,) * shape.layers}


def phi3(fields: Fields, shape: Shape) -> dict[str, Any]:
    """The same window everywhere, where there is one."""
    return {"layer_windows": (optional_whole(fields, "sliding_window"),) * shape.layers}


def olmo2(fields: Fields, shape: Shape) -> dict[str, Any]:
    """Norms over all heads together."""
    return {**attention_biases(fields), "qk_norm_whole": True}


def granite(fields: Fields, shape: Shape) -> dict[str, Any]:
    """Llama with four multipliers."""
    return {
        **llama(fields, shape),
        "embedding_scale": fields.number("embedding_multiplier", default=1.0),
        "attention_scale": fields.number("attention_multiplier", default=1.0),
        "residual_scale": fields.number("residual_multiplier", default=1.0),
        "logit_scale": 1.0 / fields.number("logits_scaling", default=1.0),
    }


def qwen2(fields: Fields, shape: Shape) -> dict[str, Any]:
    """Biases on q, k, v always."""
    return {"qkv_bias": True, "layer_windows": qwen_windows(fields, shape)}


def qwen2_5_vl(fields: Fields, shape: Shape) -> dict[str, Any]:
    """Qwen 2 whose heads turn by three positions; the tower is read by card_vision."""
    sections = mrope_sections(fields, pairs=shape.head_dim // 2)
    return {**qwen2(fields, shape), "rope": msgspec.structs.replace(shape.rope, sections=sections)}


def qwen3(fields: Fields, shape: Shape) -> dict[str, Any]:
    """Norms on q and k."""
    return {**attention_biases(fields), "qk_norm": True, "layer_windows": qwen_windows(fields, shape)}


def mixtral(fields: Fields, shape: Shape) -> dict[str, Any]:
    """Experts in every layer, each as large as the stated MLP; a window only where the file says so."""
    moe = MoeFacts(
        **experts_and_chosen(fields, ("num_local_experts", "num_experts"), experts=8, per_token=2),
        intermediate=fields.whole("intermediate_size"),
        layers=(True,) * shape.layers,
    )
    return {"layer_windows": (optional_whole(fields, "sliding_window"),) * shape.layers, "moe": moe}


def qwen2_moe(fields: Fields, shape: Shape) -> dict[str, Any]:
    """Qwen 2 with experts and a gated shared expert. Windows, where they are on, are those of every second layer."""
    moe = MoeFacts(
        **qwen_experts(fields, shape, experts=60, per_token=4, intermediate=1408),
        shared_intermediate=fields.whole("shared_expert_intermediate_size", default=5632),
        shared_gate=True,
    )
    window = qwen_window(fields)
    windows = listed_windows(fields, layers=shape.layers, window=window)
    if windows is None:
        first = fields.whole("max_window_layers", default=28, low=0)
        windows = tuple(window if index % 2 == 0 and index < first else None for index in range(shape.layers))
    return {"qkv_bias": fields.flag("qkv_bias", default=True), "layer_windows": windows, "moe": moe}


def qwen3_moe(fields: Fields, shape: Shape) -> dict[str, Any]:
    """Qwen 3 with experts. A window, where it is on, is everywhere."""
    return {
        **attention_biases(fields),
        "qk_norm": True,
        "layer_windows": (qwen_window(fields),) * shape.layers,
        "moe": MoeFacts(**qwen_experts(fields, shape, experts=128, per_token=8, intermediate=768)),
    }


def deepseek_v2(fields: Fields, shape: Shape) -> dict[str, Any]:
    """Latent attention; softmax routing, within the best groups where `topk_method` says so."""
    grouped = chosen_word(fields, "topk_method", ("greedy", "group_limited_greedy")) == "group_limited_greedy"
    chosen_word(fields, "scoring_func", ("softmax",))
    if fields.flag("norm_topk_prob", default=False):
        raise fields.refuse(
            "norm_topk_prob",
            "false for this family: no checkpoint has it, and published code differs about its meaning",
        )
    moe = MoeFacts(
        **deepseek_experts(fields, shape, dense=0, scale=1.0),
        **(deepseek_groups(fields) if grouped else {}),
        normalised=False,
    )
    return {**deepseek_attention(fields, shape), "moe": moe}


def deepseek_v3(fields: Fields, shape: Shape) -> dict[str, Any]:
    """Latent attention; sigmoid routing within the best groups, with a bias that decides but does not weigh."""
    chosen_word(fields, "topk_method", ("noaux_tc",))
    chosen_word(fields, "scoring_func", ("sigmoid",))
    moe = MoeFacts(
        **deepseek_experts(fields, shape, dense=3, scale=2.5),
        **deepseek_groups(fields, usual=(8, 4)),
        score="sigmoid",
        normalised=fields.flag("norm_topk_prob", default=True),
        group_top=2,
        correction=True,
    )
    return {**deepseek_attention(fields, shape), "moe": moe}


def gpt_oss(fields: Fields, shape: Shape) -> dict[str, Any]:
    """Biases and sinks everywhere, windows in every second layer."""
    for field, only in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if fields.number(field, default=only) != only:
            raise fields.refuse(field, f"{only:g}, the only one that is supported")
    if not fields.has("rope_scaling") and not fields.has("rope_parameters"):
        raise fields.refuse("rope_scaling", "an object: no file of this family goes without it")
    bias = fields.flag("attention_bias", default=True)
    moe = MoeFacts(
        **experts_and_chosen(fields, ("num_local_experts", "num_experts"), experts=128, per_token=4),
        intermediate=fields.whole("intermediate_size"),
        layers=(True,) * shape.layers,
        biases=True,
    )
    return {
        "activation": "swiglu_clamped",
        "qkv_bias": bias,
        "output_bias": bias,
        "attention_sinks": True,
        "layer_windows": every_second_full(fields, shape, default=128),
        "moe": moe,
    }


def gemma2(fields: Fields, shape: Shape) -> dict[str, Any]:
    """Every second layer full, both caps on where the file does not say otherwise (null says none)."""
    facts = gemma(fields, shape)
    for field, name, usual in (
        ("attn_logit_softcapping", "attention_softcap", 50.0),
        ("final_logit_softcapping", "logit_softcap", 30.0),
    ):
        facts[name] = fields.optional_number(field) if field in fields.values else usual
    return {**facts, "layer_windows": every_second_full(fields, shape, default=4096)}


def gemma3(fields: Fields, shape: Shape) -> dict[str, Any]:
    """Every sixth layer full, norms on q and k."""
    window = fields.whole("sliding_window", default=4096)
    pattern = fields.whole("sliding_window_pattern", default=fields.whole("_sliding_window_pattern", default=6))
    listed = listed_windows(fields, layers=shape.layers, window=window)
    return {
        **gemma(fields, shape),
        "qk_norm": True,
        "layer_windows": every_nth_full(shape.layers, window=window, pattern=pattern) if listed is None else listed,
        "attention_softcap": fields.optional_number("attn_logit_softcapping"),
        "logit_softcap": fields.optional_number("final_logit_softcapping"),
    }


# ---------------------------------------------------------------------------------------------------------------- shared parts


def llama4_ropes(fields: Fields, *, layers: int) -> tuple[bool, ...]:
    """`no_rope_layers` lists 1 for a layer with rope; an empty list says every fourth has none, as a missing one does."""
    listed = fields.values.get("no_rope_layers")
    if listed is None or (isinstance(listed, list | tuple) and not listed):
        every = fields.whole("no_rope_layer_interval", default=4)
        return tuple((index + 1) % every != 0 for index in range(layers))
    flags = [plain_int(flag) for flag in listed] if isinstance(listed, list | tuple) else []
    if len(flags) < layers or any(flag not in (0, 1) for flag in flags):
        raise fields.refuse(
            "no_rope_layers", f"a list of {layers} numbers, 1 for a layer with rope and 0 for one without"
        )
    return tuple(flag == 1 for flag in flags[:layers])


def llama4_mixtures(fields: Fields, *, layers: int) -> tuple[bool, ...]:
    """Layers of `moe_layers`, else every `interleave_moe_layer_step`-th."""
    listed = fields.values.get("moe_layers")
    if listed is None:
        step = fields.whole("interleave_moe_layer_step", default=1)
        return tuple((index + 1) % step == 0 for index in range(layers))
    chosen = [plain_int(layer) for layer in listed] if isinstance(listed, list | tuple) else [None]
    if any(layer is None or not 0 <= layer < layers for layer in chosen):
        raise fields.refuse("moe_layers", f"a list of layers from 0 to {layers - 1}")
    return tuple(index in chosen for index in range(layers))


def deepseek_attention(fields: Fields, shape: Shape) -> dict[str, Any]:
    """Sizes of latents and heads, and YaRN's growth of attention, which this family keeps in the softmax scale (`mscale_all_dim`)."""
    for field, only in (("attention_bias", False), ("mlp_bias", False), ("rope_interleave", True)):
        if fields.flag(field, default=only) != only:
            raise fields.refuse(field, f"{str(only).lower()}, the only one that is supported for this family")
    no_query_rank = "q_lora_rank" in fields.values and not fields.has("q_lora_rank")
    latent = LatentFacts(
        rank=fields.whole("kv_lora_rank", default=512),
        rope=fields.whole("qk_rope_head_dim", default=64),
        nope=fields.whole("qk_nope_head_dim", default=128),
        value=fields.whole("v_head_dim", default=128),
        query_rank=0 if no_query_rank else fields.whole("q_lora_rank", default=1536),
    )
    for field, size, multiple in (
        ("kv_lora_rank", latent.rank, 16),
        ("qk_rope_head_dim", latent.rope, 16),
        ("v_head_dim", latent.value, 16),
        ("qk_nope_head_dim", latent.nope, 2),
    ):
        if size % multiple:
            raise fields.refuse(field, f"a multiple of {multiple}")
    head_dim = latent.nope + latent.rope
    scale = head_dim**-0.5
    scaling = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    if scaling is not None and shape.rope.kind == "yarn":
        grown = scaling.number("mscale_all_dim", default=0.0, above=False)
        scale *= yarn_factor(shape.rope.factor, grown) ** 2
    return {
        "latent": latent,
        "head_dim": head_dim,
        "rope": msgspec.structs.replace(shape.rope, rotary_dims=latent.rope),
        "attention_scale": scale,
    }


def deepseek_experts(fields: Fields, shape: Shape, *, dense: int, scale: float) -> dict[str, Any]:
    """Experts in all layers but the first, one shared expert as large as several."""
    if fields.whole("moe_layer_freq", default=1) != 1:
        raise fields.refuse("moe_layer_freq", "1, the only one that is supported")
    first = fields.whole("first_k_dense_replace", default=dense, low=0)
    inner = fields.whole("moe_intermediate_size")
    return {
        **experts_and_chosen(fields, ("n_routed_experts",), experts=64, per_token=8),
        "intermediate": inner,
        "layers": tuple(index >= first for index in range(shape.layers)),
        "scale": fields.number("routed_scaling_factor", default=scale),
        "shared_intermediate": inner * fields.whole("n_shared_experts", default=0, low=0),
    }


def deepseek_groups(fields: Fields, *, usual: tuple[int, int] | None = None) -> dict[str, Any]:
    """Groups of experts, and how many of them a token may be sent to; `usual` where the file does not say."""
    groups = fields.whole("n_group", default=usual[0] if usual else None)
    kept = fields.whole("topk_group", default=usual[1] if usual else None, high=groups)
    experts, chosen = fields.whole("n_routed_experts"), fields.whole("num_experts_per_tok", default=8)
    if experts % groups:
        raise fields.refuse("n_group", f"a divisor of n_routed_experts, {experts}")
    if chosen > experts // groups * kept:
        raise fields.refuse(
            "topk_group", f"large enough for num_experts_per_tok, {chosen}, experts of {experts // groups} a group"
        )
    return {"groups": groups, "groups_kept": kept}


def chosen_word(fields: Fields, field: str, known: tuple[str, ...]) -> str:
    """One of the known words; the first where the file does not say."""
    word = fields.word(field, default=known[0])
    if word not in known:
        raise fields.refuse(field, f"{' or '.join(known)} for this family")
    return word


def attention_biases(fields: Fields) -> dict[str, Any]:
    """`attention_bias` means all four matrices."""
    bias = fields.flag("attention_bias", default=False)
    return {"qkv_bias": bias, "output_bias": bias}


def gemma(fields: Fields, shape: Shape) -> dict[str, Any]:
    """What Gemma 2 and 3 share. Files store norm weights as w - 1."""
    return {
        **attention_biases(fields),
        "activation": "gelu_tanh",
        "sandwich_norms": True,
        "norm_offset": 1.0,
        "embedding_scale": math.sqrt(shape.hidden),
        "attention_scale": fields.number("query_pre_attn_scalar", default=256.0) ** -0.5,
    }


def every_second_full(fields: Fields, shape: Shape, *, default: int) -> tuple[int | None, ...]:
    """`layer_types`, else a window in the first layer, none in the second, and so on."""
    window = fields.whole("sliding_window", default=default)
    listed = listed_windows(fields, layers=shape.layers, window=window)
    return every_nth_full(shape.layers, window=window, pattern=2) if listed is None else listed


def qwen_window(fields: Fields) -> int | None:
    """The window of windowed layers; none unless `use_sliding_window`."""
    if fields.flag("use_sliding_window", default=False) and fields.values.get("sliding_window", 0) is not None:
        return fields.whole("sliding_window", default=4096)
    return None


def qwen_windows(fields: Fields, shape: Shape) -> tuple[int | None, ...]:
    """`layer_types`, else the layers from `max_window_layers` on."""
    window = qwen_window(fields)
    listed = listed_windows(fields, layers=shape.layers, window=window)
    first = fields.whole("max_window_layers", default=28, low=0)
    return tuple(window if index >= first else None for index in range(shape.layers)) if listed is None else listed


def listed_windows(
    fields: Fields, *, layers: int, window: int | None, windowed: str = "sliding_attention"
) -> tuple[int | None, ...] | None:
    """Windows as `layer_types` lists them; None where it does not."""
    kinds = fields.values.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list | tuple) or len(kinds) != layers:
        raise fields.refuse("layer_types", f"a list of {layers} words, one for each layer")
    for kind in kinds:
        if kind not in ("full_attention", windowed):
            raise CardError(f"{fields.origin}: layer_types has {shown(kind)}; known are full_attention, {windowed}")
    if window is None and windowed in kinds:
        raise CardError(f"{fields.origin}: layer_types has {windowed}, but the window is off")
    return tuple(window if kind == windowed else None for kind in kinds)


def experts_and_chosen(fields: Fields, names: tuple[str, ...], *, experts: int, per_token: int) -> dict[str, Any]:
    """How many experts there are (under the first of `names` that is there) and to how many a token is sent."""
    name = next((name for name in names if fields.has(name)), names[0])
    count = fields.whole(name, default=experts, high=MOST_EXPERTS)
    chosen = fields.whole("num_experts_per_tok", default=per_token)
    if chosen > count:
        raise fields.refuse("num_experts_per_tok", f"at most {name}, {count}")
    return {"experts": count, "per_token": chosen}


def qwen_experts(fields: Fields, shape: Shape, *, experts: int, per_token: int, intermediate: int) -> dict[str, Any]:
    """Experts of Qwen 2 and 3: softmax over all, weights normalised where the file says so, in every `decoder_sparse_step`-th layer but
    those of `mlp_only_layers`."""
    step = fields.whole("decoder_sparse_step", default=1)
    listed = fields.values.get("mlp_only_layers", ())
    listed = () if listed is None else listed
    dense = [plain_int(item) for item in listed] if isinstance(listed, list | tuple) else [None]
    if any(layer is None or not 0 <= layer < shape.layers for layer in dense):
        raise fields.refuse("mlp_only_layers", f"a list of layers from 0 to {shape.layers - 1}")
    return {
        **experts_and_chosen(fields, ("num_experts", "num_local_experts"), experts=experts, per_token=per_token),
        "intermediate": fields.whole("moe_intermediate_size", default=intermediate),
        "normalised": fields.flag("norm_topk_prob", default=False),
        "layers": tuple(index not in dense and (index + 1) % step == 0 for index in range(shape.layers)),
    }


def optional_whole(fields: Fields, field: str) -> int | None:
    """A whole number from 1, or None where the field is missing or null."""
    return fields.whole(field) if fields.has(field) else None


MOST_EXPERTS = 1024
"""What the op sets route to."""

GEMMA2_OMITTED: dict[str, object] = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
}
GEMMA3_OMITTED: dict[str, object] = {
    **GEMMA2_OMITTED,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
}
GEMMA: dict[str, Any] = {"tied": True, "activation_field": "hidden_activation", "activation": "gelu_pytorch_tanh"}

HF_FAMILIES: dict[str, HFFamily] = {
    "deepseek_v2": HFFamily(family="deepseek_v2", facts=deepseek_v2, quantised=("fp8",)),
    "deepseek_v3": HFFamily(family="deepseek_v3", facts=deepseek_v3, quantised=("fp8",)),
    "gemma2": HFFamily(family="gemma2", facts=gemma2, omitted=GEMMA2_OMITTED, **GEMMA),
    "gemma3_text": HFFamily(
        family="gemma3", facts=gemma3, omitted=GEMMA3_OMITTED, theta=1e6, own_local_rope=True, text_of="gemma3", **GEMMA
    ),
    "gpt_oss": HFFamily(
        family="gpt_oss", facts=gpt_oss, kv_heads=8, head_dim=64, theta=150000.0, norm_eps=1e-5, quantised=("mxfp4",)
    ),
    "granite": HFFamily(family="granite", facts=granite),
    "llama": HFFamily(family="llama", facts=llama),
    "llama4_text": HFFamily(
        family="llama4", facts=llama4, kv_heads=8, head_dim=128, theta=5e5, norm_eps=1e-5, text_of="llama4"
    ),
    "mistral": HFFamily(family="mistral", facts=mistral, kv_heads=8),
    "mixtral": HFFamily(family="mixtral", facts=mixtral, kv_heads=8, theta=1e6, norm_eps=1e-5),
    "olmo2": HFFamily(family="olmo2", facts=olmo2, norm_eps=1e-5),
    "phi3": HFFamily(family="phi3", facts=phi3, norm_eps=1e-5),
    "qwen2": HFFamily(family="qwen2", facts=qwen2),
    "qwen2_5_vl": HFFamily(family="qwen2_5_vl", facts=qwen2_5_vl, theta=1e6, norm_eps=1e-5, vision=True),
    "qwen2_moe": HFFamily(family="qwen2_moe", facts=qwen2_moe),
    "qwen3": HFFamily(family="qwen3", facts=qwen3, head_dim=128, quantised=("fp8",)),
    "qwen3_moe": HFFamily(family="qwen3_moe", facts=qwen3_moe, kv_heads=4, quantised=("fp8",)),
}
"""By `model_type`, sorted."""

TEXT_CONFIGS: dict[str, str] = {row.text_of: name for name, row in HF_FAMILIES.items() if row.text_of}
"""`model_type` of files that hold more than a decoder -> the `model_type` of the decoder that their `text_config` describes."""
