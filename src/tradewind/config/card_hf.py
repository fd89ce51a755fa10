"""From a Hugging Face `config.json` to a `ModelCard`.

Knows: the field names, old and new spellings, and what each family leaves out. Refuses to know: files (weights) and arithmetic (models).
What is missing, ill-typed, impossible or not supported is refused by name; nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from tradewind.config.card import ModelCard, RopeFacts
from tradewind.config.card_encoder import card_from_bert, sentence_facts
from tradewind.config.card_parts import FAMILIES, Tensors, check_heads, every_nth_full, with_weights, yarn_factor
from tradewind.config.fields import CardError, Fields, shown

HF_MODEL_TYPES = {
    "bert": "bert",
    "gemma3_text": "gemma3",
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
GEMMA3_OMITTED: dict[str, object] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
"""Published Gemma 3 files leave out what equals the default of their library's configuration class."""

HF_FORMATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def card_from_hf(
    config: Mapping[str, Any],
    *,
    name: str,
    tensors: Tensors | None = None,
    generation_config: Mapping[str, Any] | None = None,
    sentence: Mapping[str, Any] | None = None,
) -> ModelCard:
    """Reads a `config.json`; changes nothing. Raises CardError naming the field.

    tensors: name -> facts, for the bytes on disk; without them they are computed from the shapes and the stated dtype.
    generation_config: content of `generation_config.json`, whose end-of-text ids count too.
    sentence: the files that sentence-transformers adds, see `card_encoder.sentence_facts`.
    """
    card = _plain_card(config, name=name, tensors=tensors, generation_config=generation_config)
    return msgspec.structs.replace(card, **sentence_facts(card, sentence)) if sentence else card


def _plain_card(
    config: Mapping[str, Any],
    *,
    name: str,
    tensors: Tensors | None,
    generation_config: Mapping[str, Any] | None,
) -> ModelCard:
    """The card without what sentence-transformers adds."""
    if not isinstance(config, Mapping):
        raise CardError(f"config.json of '{name}' is {shown(config)}; it must be an object")
    outer = Fields(config, origin=f"config.json of '{name}'")
    fields, family = hf_family(outer)
    quantised = outer.mapping("quantization_config") or fields.mapping("quantization_config")
    if quantised is not None:
        method = quantised.values.get("quant_method", "unknown")
        raise CardError(
            f"{outer.origin}: weights quantised by {shown(method)} are not supported; use an unquantised checkpoint or a GGUF file"
        )

    stated = fields.values.get(
        "dtype", fields.values.get("torch_dtype", config.get("dtype", config.get("torch_dtype")))
    )
    assumed = HF_FORMATS.get(str(stated).removeprefix("torch."), "F32" if family == "bert" else "BF16")
    if family == "bert":
        return card_from_bert(fields, name=name, tensors=tensors, assumed=assumed)

    heads = fields.whole("num_attention_heads")
    hidden = fields.whole("hidden_size")
    layers = fields.whole("num_hidden_layers", high=4096)
    kv_heads = fields.whole("num_key_value_heads", default=8 if family == "mistral" else heads)
    if not fields.has("head_dim") and family != "qwen3" and hidden % heads:
        raise fields.refuse("hidden_size", f"a multiple of num_attention_heads, {heads}, where head_dim is not given")
    head_dim = fields.whole("head_dim", default=128 if family == "qwen3" else hidden // heads)
    check_heads(fields, heads=heads, kv_heads=kv_heads, head_dim=head_dim, names=HF_HEAD_NAMES)
    vocab_size = fields.whole("vocab_size")
    positions = fields.whole("max_position_embeddings")
    rope, rope_local = hf_ropes(fields, family=family, positions=positions, head_dim=head_dim)
    bias = fields.flag("attention_bias", default=False)
    gemma = family == "gemma3"
    activation_field = "hidden_activation" if gemma else "hidden_act"
    activation = fields.word(activation_field, default="gelu_pytorch_tanh" if gemma else "silu")
    if activation != ("gelu_pytorch_tanh" if gemma else "silu"):
        raise fields.refuse(activation_field, f"'{'gelu_pytorch_tanh' if gemma else 'silu'}' for {FAMILIES[family]}")
    if fields.flag("use_bidirectional_attention", default=False):
        raise fields.refuse("use_bidirectional_attention", "false: this engine generates text, left to right")
    eos = fields.ids("eos_token_id", below=vocab_size) or outer.ids("eos_token_id", below=vocab_size)
    if generation_config is not None:
        more = Fields(generation_config, origin=f"generation_config.json of '{name}'")
        eos = more.ids("eos_token_id", below=vocab_size) + eos
    bos = fields.ids("bos_token_id", below=vocab_size)
    if rope.kind == "yarn" and rope.original_max_positions:
        # Files that switch YaRN on by hand often leave the unstretched limit in max_position_embeddings.
        positions = max(positions, int(rope.original_max_positions * rope.factor))

    card = ModelCard(
        name=name,
        family=family,
        source="hf",
        vocab_size=vocab_size,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=fields.whole("intermediate_size"),
        max_positions=positions,
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        tied_embeddings=fields.flag("tie_word_embeddings", default=outer.flag("tie_word_embeddings", default=gemma)),
        activation="gelu_tanh" if gemma else "silu",
        rope=rope,
        rope_local=rope_local,
        layer_windows=hf_windows(fields, family=family, layers=layers),
        qkv_bias=family == "qwen2" or (family != "mistral" and bias),
        output_bias=family not in ("qwen2", "mistral") and bias,
        mlp_bias=family == "llama" and fields.flag("mlp_bias", default=False),
        qk_norm=family in ("qwen3", "gemma3"),
        sandwich_norms=gemma,
        norm_offset=1.0 if gemma else 0.0,
        embedding_scale=math.sqrt(hidden) if gemma else 1.0,
        attention_scale=fields.number("query_pre_attn_scalar", default=256.0) ** -0.5 if gemma else None,
        attention_softcap=fields.optional_number("attn_logit_softcapping") if gemma else None,
        logit_softcap=fields.optional_number("final_logit_softcapping") if gemma else None,
        bos_id=bos[0] if bos else None,
        eos_ids=tuple(dict.fromkeys(eos)),
    )
    return with_weights(card, tensors=tensors, assumed=assumed)


HF_HEAD_NAMES = ("num_attention_heads", "num_key_value_heads", "head_dim")


def hf_family(outer: Fields) -> tuple[Fields, str]:
    """The fields of the text decoder (with what its family leaves out filled in) and the family they describe."""
    model_type = outer.word("model_type")
    inner = outer
    if model_type == "gemma3":
        # The vision-and-text model; its decoder is a Gemma 3 text model.
        text = outer.mapping("text_config")
        if text is None:
            raise outer.refuse("text_config", "an object that describes the text decoder")
        inner, model_type = text, "gemma3_text"
    family = HF_MODEL_TYPES.get(model_type)
    if family is None:
        known = ", ".join(sorted([*HF_MODEL_TYPES, "gemma3"]))
        raise CardError(f"{outer.origin}: model_type '{shown(model_type)[1:-1]}' is not supported; known are {known}")
    if family == "gemma3":
        given = {key: value for key, value in inner.values.items() if value is not None}
        inner = Fields({**GEMMA3_OMITTED, **given}, origin=inner.origin)
    return inner, family


def hf_windows(fields: Fields, *, family: str, layers: int) -> tuple[int | None, ...]:
    """The attention window of each layer: `layer_types` when given, else the family's rule."""
    window: int | None = None
    if family == "mistral":
        # null says no window; a missing field says the library's default, as in the first Mistral files.
        window = fields.whole("sliding_window") if fields.has("sliding_window") else None
        if "sliding_window" not in fields.values:
            window = 4096
    elif family == "gemma3":
        window = fields.whole("sliding_window", default=4096)
    elif family in ("qwen2", "qwen3") and fields.flag("use_sliding_window", default=False):
        window = (
            fields.whole("sliding_window", default=4096) if fields.values.get("sliding_window", 0) is not None else None
        )

    kinds = fields.values.get("layer_types")
    if kinds is not None and family not in ("llama", "mistral"):
        if not isinstance(kinds, list | tuple) or len(kinds) != layers:
            raise fields.refuse("layer_types", f"a list of {layers} words, one for each layer")
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise CardError(
                    f"{fields.origin}: layer_types has {shown(kind)}; known are full_attention, sliding_attention"
                )
        if window is None and "sliding_attention" in kinds:
            raise CardError(f"{fields.origin}: layer_types has sliding_attention, but the sliding window is off")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if family == "gemma3":
        pattern = fields.whole("sliding_window_pattern", default=fields.whole("_sliding_window_pattern", default=6))
        return every_nth_full(layers, window=window, pattern=pattern)
    if family in ("qwen2", "qwen3"):
        first = fields.whole("max_window_layers", default=28, low=0)
        return tuple(window if index >= first else None for index in range(layers))
    return (window,) * layers


def hf_ropes(fields: Fields, *, family: str, positions: int, head_dim: int) -> tuple[RopeFacts, RopeFacts | None]:
    """Rope of the full layers and, for Gemma 3, of the windowed ones.

    Three spellings: `rope_theta` + `rope_scaling` (with "type" or "rope_type"), `rope_parameters` flat, and the same by layer type.
    """
    gemma = family == "gemma3"
    theta = fields.number("rope_theta", default=1e6 if gemma else 1e4)
    partial = fields.number("partial_rotary_factor", default=1.0)
    parameters = fields.mapping("rope_parameters")
    old = fields.mapping("rope_scaling")
    empty = Fields({}, origin=fields.origin)

    def read(source: Fields | None, default_theta: float) -> RopeFacts:
        source = empty if source is None else source
        return rope_from_hf(source, theta=default_theta, partial=partial, positions=positions, head_dim=head_dim)

    if not gemma:
        return read(old or parameters, parameters.number("rope_theta", default=theta) if parameters else theta), None
    local_theta = fields.number("rope_local_base_freq", default=1e4)
    nested = parameters is not None and any(key in parameters.values for key in ("full_attention", "sliding_attention"))
    if parameters is not None and nested:
        full = parameters.mapping("full_attention")
        return read(old if old and full is None else full, theta), read(
            parameters.mapping("sliding_attention"), local_theta
        )
    return read(old or parameters, theta), read(None, local_theta)


def rope_from_hf(source: Fields, *, theta: float, partial: float, positions: int, head_dim: int) -> RopeFacts:
    """One rope description; `theta` and `partial` are the defaults from outside it."""
    theta = source.number("rope_theta", default=theta)
    partial = source.number("partial_rotary_factor", default=partial)
    if partial > 1.0:
        raise source.refuse("partial_rotary_factor", "a number over 0 and up to 1")
    rotary = None if partial == 1.0 else int(head_dim * partial)
    kind = source.word("rope_type", default=source.word("type", default="default"))
    if kind == "default":
        return RopeFacts(theta=theta, rotary_dims=rotary)
    if kind == "linear":
        return RopeFacts(theta=theta, kind="linear", factor=source.number("factor"), rotary_dims=rotary)
    original = source.whole("original_max_position_embeddings", default=positions)
    if kind == "llama3":
        low, high = source.number("low_freq_factor"), source.number("high_freq_factor")
        if low >= high:
            raise source.refuse("low_freq_factor", f"under high_freq_factor, {high:g}")
        return RopeFacts(
            theta=theta,
            kind="llama3",
            factor=source.number("factor"),
            original_max_positions=original,
            low_freq_factor=low,
            high_freq_factor=high,
            rotary_dims=rotary,
        )
    if kind == "yarn":
        if not source.flag("truncate", default=True):
            raise source.refuse("truncate", "true; YaRN without whole correction bounds is not supported")
        factor = source.number("factor", default=positions / original)
        attention = source.optional_number("attention_factor")
        mscale, mscale_all = source.optional_number("mscale"), source.optional_number("mscale_all_dim")
        if attention is None and mscale and mscale_all:
            attention = yarn_factor(factor, mscale) / yarn_factor(factor, mscale_all)
        return RopeFacts(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_positions=original,
            beta_fast=source.number("beta_fast", default=32.0),
            beta_slow=source.number("beta_slow", default=1.0),
            attention_factor=attention,
            rotary_dims=rotary,
        )
    raise CardError(
        f"{source.origin}: rope scaling {shown(kind)} is not supported; known are default, linear, llama3, yarn"
    )
