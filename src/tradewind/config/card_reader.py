"""From a model's description on disk to a `ModelCard`: Hugging Face `config.json` and GGUF metadata.

Knows: the field names of both worlds, old and new spellings, and each family's defaults. Refuses to know: files (weights) and
arithmetic (models). What is missing, ill-typed, impossible or not supported is refused by name; nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from tradewind.config.card import ModelCard, RopeFacts
from tradewind.config.fields import CardError, Fields, plain_int, shown

__all__ = ["FAMILIES", "CardError", "TensorFacts", "card_from_gguf", "card_from_hf"]

FAMILIES: dict[str, str] = {
    "gemma3": "Gemma 3",
    "llama": "Llama 2 and 3, SmolLM2",
    "mistral": "Mistral",
    "qwen2": "Qwen 2 and 2.5",
    "qwen3": "Qwen 3",
}
"""Families that a card can describe; each is a row of the model registry."""

HF_MODEL_TYPES = {"gemma3_text": "gemma3", "llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}
GGUF_ARCHITECTURES = {"gemma3": "gemma3", "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

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
BYTES_PER_VALUE = {"F32": 4, "F16": 2, "BF16": 2}

END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>")
"""Tokens that end an answer in the chat formats of these families, also where a GGUF names only the end of text."""


class TensorFacts(Protocol):
    """What is asked of a tensor in a file: never its values."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def format(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


Tensors = Mapping[str, TensorFacts]


# --------------------------------------------------------------------------------------------------------- Hugging Face


def card_from_hf(
    config: Mapping[str, Any],
    *,
    name: str,
    tensors: Tensors | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> ModelCard:
    """Reads a `config.json`; changes nothing. Raises CardError naming the field.

    tensors: name -> facts, for the bytes on disk; without them they are computed from the shapes and the stated dtype.
    generation_config: content of `generation_config.json`, whose end-of-text ids count too.
    """
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
    stated = fields.values.get(
        "dtype", fields.values.get("torch_dtype", config.get("dtype", config.get("torch_dtype")))
    )
    return with_weights(card, tensors=tensors, assumed=HF_FORMATS.get(str(stated).removeprefix("torch."), "BF16"))


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


def every_nth_full(layers: int, *, window: int | None, pattern: int) -> tuple[int | None, ...]:
    """Windows for layers of which each `pattern`-th sees everything."""
    return tuple(window if (index + 1) % pattern else None for index in range(layers))


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


def yarn_factor(factor: float, scale: float) -> float:
    """YaRN's growth of attention with the stretch (Peng et al. 2023, section 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


# ----------------------------------------------------------------------------------------------------------------- GGUF


def card_from_gguf(metadata: Mapping[str, Any], *, name: str, tensors: Tensors | None = None) -> ModelCard:
    """Reads GGUF metadata; changes nothing. Raises CardError naming the key.

    tensors: name -> facts. Without them biases and tying follow the family's custom. A tensor `rope_freqs.weight` must have its bytes
    at `.data`: Llama 3's rope scaling is stored there and nowhere else.
    """
    whole = Fields(metadata, origin=f"GGUF metadata of '{name}'")
    arch = whole.word("general.architecture")
    family = GGUF_ARCHITECTURES.get(arch)
    if family is None:
        known = ", ".join(sorted(GGUF_ARCHITECTURES))
        raise CardError(f"{whole.origin}: architecture '{shown(arch)[1:-1]}' is not supported; known are {known}")
    gemma = family == "gemma3"

    def key(field: str) -> str:
        return f"{arch}.{field}"

    names = (key("attention.head_count"), key("attention.head_count_kv"), key("attention.key_length"))
    layers = whole.whole(key("block_count"), high=4096)
    heads = same_in_all_layers(whole, names[0], default=None)
    kv_heads = same_in_all_layers(whole, names[1], default=heads)
    hidden = whole.whole(key("embedding_length"))
    if not whole.has(names[2]) and hidden % heads:
        raise whole.refuse(key("embedding_length"), f"a multiple of {names[0]}, {heads}, where {names[2]} is not given")
    head_dim = whole.whole(names[2], default=hidden // heads)
    check_heads(whole, heads=heads, kv_heads=kv_heads, head_dim=head_dim, names=names)
    if whole.whole(key("attention.value_length"), default=head_dim) != head_dim:
        raise whole.refuse(key("attention.value_length"), f"the key length, {head_dim}")
    vocab_size = gguf_vocab(whole, arch=arch, hidden=hidden, tensors=tensors)
    positions = whole.whole(key("context_length"))
    rope = gguf_rope(whole, arch=arch, head_dim=head_dim, positions=positions, tensors=tensors)
    window = whole.whole(key("attention.sliding_window"), default=0, low=0) or None
    if gemma:
        if window is None:
            raise whole.refuse(key("attention.sliding_window"), "a whole number from 1")
        pattern = whole.whole(key("attention.sliding_window_pattern"), default=6)
        windows = every_nth_full(layers, window=window, pattern=pattern)
    else:
        windows = (window if family == "llama" else None,) * layers
    bos = whole.ids("tokenizer.ggml.bos_token_id", below=vocab_size)

    card = ModelCard(
        name=name,
        family=family,
        source="gguf",
        vocab_size=vocab_size,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=same_in_all_layers(whole, key("feed_forward_length"), default=None),
        max_positions=positions,
        norm_eps=whole.number(key("attention.layer_norm_rms_epsilon")),
        tied_embeddings="output.weight" not in tensors if tensors is not None else gemma,
        activation="gelu_tanh" if gemma else "silu",
        rope=rope,
        rope_local=RopeFacts(theta=whole.number(key("rope.freq_base_swa"), default=1e4)) if gemma else None,
        layer_windows=windows,
        qkv_bias="blk.0.attn_q.bias" in tensors if tensors is not None else family == "qwen2",
        output_bias="blk.0.attn_output.bias" in tensors if tensors is not None else False,
        mlp_bias="blk.0.ffn_up.bias" in tensors if tensors is not None else False,
        qk_norm=family in ("qwen3", "gemma3"),
        sandwich_norms=gemma,
        norm_offset=0.0,  # converters store w already as factor
        embedding_scale=math.sqrt(hidden) if gemma else 1.0,
        # Gemma 3 27B divides by the square root of hidden / heads, the others by that of the head.
        attention_scale=(hidden / heads if layers == 62 else head_dim) ** -0.5 if gemma else None,
        attention_softcap=whole.optional_number(key("attn_logit_softcapping")),
        logit_softcap=whole.optional_number(key("final_logit_softcapping")),
        bos_id=bos[0] if bos else None,
        eos_ids=gguf_eos(whole, vocab_size=vocab_size),
    )
    return with_weights(card, tensors=tensors, assumed="F16")


def same_in_all_layers(fields: Fields, field: str, *, default: int | None) -> int:
    """A size that GGUF may give once or per layer; layers that differ are refused."""
    value = fields.values.get(field)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        sizes = {plain_int(item) for item in value}
        size = next(iter(sizes), None)
        if len(sizes) != 1 or size is None or size < 1:
            raise fields.refuse(field, "the same whole number for every layer")
        return size
    return fields.whole(field, default=default)


def gguf_vocab(fields: Fields, *, arch: str, hidden: int, tensors: Tensors | None) -> int:
    """Rows of the embedding table; without tensors the number of tokens in the vocabulary."""
    embedding = tensors.get("token_embd.weight") if tensors is not None else None
    tokens = fields.values.get("tokenizer.ggml.tokens")
    count = len(tokens) if hasattr(tokens, "__len__") and not isinstance(tokens, str | bytes) else None
    if embedding is None:
        return count or fields.whole(f"{arch}.vocab_size")
    shape = tuple(embedding.shape)
    if len(shape) != 2 or shape[1] != hidden:
        raise CardError(f"{fields.origin}: token_embd.weight has the shape {shape}; it must be (vocabulary, {hidden})")
    if count is not None and count > shape[0]:
        raise CardError(
            f"{fields.origin}: the vocabulary has {count} tokens, but token_embd.weight only {shape[0]} rows"
        )
    return shape[0]


def gguf_eos(fields: Fields, *, vocab_size: int) -> tuple[int, ...]:
    """Ids that end an answer: end of text, end of turn, and the chat tokens of the supported families."""
    ids = fields.ids("tokenizer.ggml.eos_token_id", below=vocab_size)
    ids += fields.ids("tokenizer.ggml.eot_token_id", below=vocab_size)
    tokens = fields.values.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Sequence) and not isinstance(tokens, str | bytes):
        wanted = set(END_OF_TURN)
        ids += tuple(index for index, token in enumerate(tokens) if token in wanted)
    return tuple(dict.fromkeys(ids))


def gguf_rope(fields: Fields, *, arch: str, head_dim: int, positions: int, tensors: Tensors | None) -> RopeFacts:
    """Rope of the full layers."""
    theta = fields.number(f"{arch}.rope.freq_base", default=1e6 if arch == "gemma3" else 1e4)
    rotary = fields.whole(f"{arch}.rope.dimension_count", default=head_dim)
    if rotary > head_dim or rotary % 2:
        raise fields.refuse(f"{arch}.rope.dimension_count", f"an even number up to the head's {head_dim}")
    dims = None if rotary == head_dim else rotary
    if tensors is not None and "rope_freqs.weight" in tensors:
        return llama3_from_factors(fields, tensors["rope_freqs.weight"], theta=theta, rotary=rotary, dims=dims)
    prefix = f"{arch}.rope.scaling"
    kind = fields.word(f"{prefix}.type", default="linear" if fields.has(f"{arch}.rope.scale_linear") else "none")
    factor_key = (
        f"{prefix}.factor" if kind != "linear" or fields.has(f"{prefix}.factor") else f"{arch}.rope.scale_linear"
    )
    if kind == "none":
        return RopeFacts(theta=theta, rotary_dims=dims)
    if kind == "linear":
        return RopeFacts(theta=theta, kind="linear", factor=fields.number(factor_key), rotary_dims=dims)
    if kind == "yarn":
        attention = fields.optional_number(f"{prefix}.attn_factor")
        factor = fields.number(factor_key)
        return RopeFacts(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_positions=fields.whole(f"{prefix}.original_context_length", default=positions),
            beta_fast=fields.number(f"{prefix}.yarn_beta_fast", default=32.0),
            beta_slow=fields.number(f"{prefix}.yarn_beta_slow", default=1.0),
            # GGUF's factor multiplies YaRN's own.
            attention_factor=None if attention is None else attention * yarn_factor(factor, 1.0),
            rotary_dims=dims,
        )
    raise CardError(f"{fields.origin}: {prefix}.type {shown(kind)} is not supported; known are none, linear, yarn")


def llama3_from_factors(
    fields: Fields, tensor: TensorFacts, *, theta: float, rotary: int, dims: int | None
) -> RopeFacts:
    """Finds Llama 3's rope scaling in the per-frequency factors that converters store in its place.

    The factors are recomputed from the only published settings (low 1, high 4, original 8192) and compared; others are refused.
    """
    raw = getattr(tensor, "data", None)
    if raw is None or tensor.format != "F32" or tensor.nbytes != 2 * rotary:
        raise CardError(f"{fields.origin}: rope_freqs.weight must be {rotary // 2} F32 values")
    stored = memoryview(bytes(raw)).cast("f").tolist()
    rope = RopeFacts(theta=theta, kind="llama3", factor=max(stored), original_max_positions=8192, rotary_dims=dims)
    expected = llama3_factors(rope, rotary=rotary)
    if not all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(stored, expected, strict=True)):
        raise CardError(
            f"{fields.origin}: the factors in rope_freqs.weight are not those of Llama 3; other ones are not supported"
        )
    return rope


def llama3_factors(rope: RopeFacts, *, rotary: int) -> list[float]:
    """What each frequency is divided by, `rotary / 2` numbers (Llama 3.1's scaling)."""
    original = float(rope.original_max_positions or 0)
    factors = []
    for index in range(rotary // 2):
        turns = original / (2 * math.pi * rope.theta ** (2 * index / rotary))
        smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(1.0 / ((1.0 - smooth) / rope.factor + smooth))
    return factors


# --------------------------------------------------------------------------------------------------------------- common


def check_heads(fields: Fields, *, heads: int, kv_heads: int, head_dim: int, names: tuple[str, str, str]) -> None:
    """Raises CardError when the head counts cannot go together."""
    if heads % kv_heads:
        raise CardError(
            f"{fields.origin}: {names[0]} is {heads} and {names[1]} {kv_heads}; the first must be a multiple of the second"
        )
    if head_dim % 2:
        raise CardError(f"{fields.origin}: {names[2]} is {head_dim}; rotary embedding needs an even number")


def with_weights(card: ModelCard, *, tensors: Tensors | None, assumed: str) -> ModelCard:
    """The card with parameters, bytes and formats; without tensors they follow from the shapes and the `assumed` format."""
    if tensors is None:
        count = count_parameters(card)
        size = count * BYTES_PER_VALUE[assumed]
        return msgspec.structs.replace(
            card, parameters=count, weight_bytes=size, weight_formats={assumed: count}, embedding_format=assumed
        )
    embedding = next((tensors[name] for name in EMBEDDING_NAMES if name in tensors), None)
    formats: dict[str, int] = {}
    for tensor in tensors.values():
        formats[tensor.format] = formats.get(tensor.format, 0) + math.prod(tensor.shape)
    return msgspec.structs.replace(
        card,
        parameters=sum(formats.values()),
        weight_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        weight_formats=dict(sorted(formats.items())),
        embedding_format=assumed if embedding is None else embedding.format,
    )


EMBEDDING_NAMES = ("token_embd.weight", "model.embed_tokens.weight", "language_model.model.embed_tokens.weight")


def layer_matrices(card: ModelCard) -> int:
    """Weights of the matmuls of one layer."""
    attention = card.hidden * card.head_dim * (2 * card.heads + 2 * card.kv_heads)
    return attention + 3 * card.hidden * card.intermediate


def count_parameters(card: ModelCard) -> int:
    """Parameters that follow from the shapes: embeddings, matmuls, norms, biases."""
    norms = card.hidden * (4 if card.sandwich_norms else 2) + (2 * card.head_dim if card.qk_norm else 0)
    biases = (card.heads + 2 * card.kv_heads) * card.head_dim * card.qkv_bias + card.hidden * card.output_bias
    biases += (2 * card.intermediate + card.hidden) * card.mlp_bias
    tables = card.vocab_size * card.hidden * (1 if card.tied_embeddings else 2)
    return tables + card.layers * (layer_matrices(card) + norms + biases) + card.hidden
