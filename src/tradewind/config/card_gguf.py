"""From GGUF metadata to a `ModelCard`.

Knows: the keys that all families share, and what only tensors tell (biases, tying, factors of ropes). Refuses to know: what is
particular to a family (card_gguf_families), files and arithmetic.
What is missing, ill-typed, impossible or not supported is refused by name; nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tradewind.config.card import ModelCard, RopeFacts
from tradewind.config.card_families import Shape
from tradewind.config.card_gguf_families import GGUF_FAMILIES
from tradewind.config.card_parts import TensorFacts, Tensors, check_heads, llama3_factors, with_weights, yarn_factor
from tradewind.config.fields import CardError, Fields, plain_int, shown


def card_from_gguf(metadata: Mapping[str, Any], *, name: str, tensors: Tensors | None = None) -> ModelCard:
    """Reads GGUF metadata; changes nothing. Raises CardError naming the key.

    tensors: name -> facts. Without them biases and tying follow the family's custom. A tensor `rope_freqs.weight` must have its bytes
    at `.data`: Llama 3's rope scaling is stored there and nowhere else.
    """
    whole = Fields(metadata, origin=f"GGUF metadata of '{name}'")
    arch = whole.word("general.architecture")
    row = GGUF_FAMILIES.get(arch)
    if row is None:
        known = ", ".join(GGUF_FAMILIES)
        raise CardError(f"{whole.origin}: architecture '{shown(arch)[1:-1]}' is not supported; known are {known}")

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
    bos = whole.ids("tokenizer.ggml.bos_token_id", below=vocab_size)

    shared: dict[str, Any] = {
        "family": row.family,
        "rope": gguf_rope(whole, arch=arch, theta=row.theta, head_dim=head_dim, positions=positions, tensors=tensors),
        "layer_windows": (None,) * layers,
    }
    shape = Shape(hidden=hidden, layers=layers, heads=heads, head_dim=head_dim, rope=shared["rope"])
    own = row.facts(Prefixed(whole, arch), shape, tensors)
    card = ModelCard(
        name=name,
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
        tied_embeddings="output.weight" not in tensors if tensors is not None else row.tied,
        qkv_bias="blk.0.attn_q.bias" in tensors if tensors is not None else row.qkv_bias,
        output_bias="blk.0.attn_output.bias" in tensors if tensors is not None else False,
        mlp_bias="blk.0.ffn_up.bias" in tensors if tensors is not None else False,
        bos_id=bos[0] if bos else None,
        eos_ids=gguf_eos(whole, vocab_size=vocab_size, turn_ends=row.turn_ends),
        **{**shared, **own},
    )
    return with_weights(card, tensors=tensors, assumed="F16")


class Prefixed(Fields):
    """The fields of one architecture, asked for without it and named with it."""

    def __init__(self, whole: Fields, arch: str) -> None:
        prefix = f"{arch}."
        # By key: asking for every value would decode the token lists.
        keys = [key for key in whole.values if key.startswith(prefix)]
        super().__init__({key.removeprefix(prefix): whole.values[key] for key in keys}, origin=whole.origin)
        self._prefix = prefix

    def refuse(self, field: str, must: str) -> CardError:
        return Fields({self._prefix + key: value for key, value in self.values.items()}, origin=self.origin).refuse(
            self._prefix + field, must
        )


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


def gguf_eos(fields: Fields, *, vocab_size: int, turn_ends: Sequence[str]) -> tuple[int, ...]:
    """Ids that end an answer: end of text, end of turn, and the family's chat tokens, by name."""
    ids = fields.ids("tokenizer.ggml.eos_token_id", below=vocab_size)
    ids += fields.ids("tokenizer.ggml.eot_token_id", below=vocab_size)
    tokens = fields.values.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Sequence) and not isinstance(tokens, str | bytes):
        wanted = set(turn_ends)
        ids += tuple(index for index, token in enumerate(tokens) if token in wanted)
    return tuple(dict.fromkeys(ids))


def gguf_rope(
    fields: Fields, *, arch: str, theta: float, head_dim: int, positions: int, tensors: Tensors | None
) -> RopeFacts:
    """Rope of the full layers; `theta` is the base where none is stated."""
    theta = fields.number(f"{arch}.rope.freq_base", default=theta)
    rotary = fields.whole(f"{arch}.rope.dimension_count", default=head_dim)
    if rotary > head_dim or rotary % 2:
        raise fields.refuse(f"{arch}.rope.dimension_count", f"an even number up to the head's {head_dim}")
    dims = None if rotary == head_dim else rotary
    if tensors is not None and "rope_freqs.weight" in tensors:
        return llama3_from_factors(fields, tensors["rope_freqs.weight"], theta=theta, rotary=rotary, dims=dims)
    prefix = f"{arch}.rope.scaling"
    if tensors is not None and "rope_factors_long.weight" in tensors:
        original = fields.whole(f"{prefix}.original_context_length", default=positions, low=2)
        return RopeFacts(
            theta=theta,
            kind="longrope",
            factor=positions / original,
            original_max_positions=original,
            attention_factor=fields.optional_number(f"{prefix}.attn_factor"),
            short_factors=floats_of(fields, "rope_factors_short.weight", tensors, count=rotary // 2),
            long_factors=floats_of(fields, "rope_factors_long.weight", tensors, count=rotary // 2),
            rotary_dims=dims,
        )
    kind = fields.word(f"{prefix}.type", default="linear" if fields.has(f"{arch}.rope.scale_linear") else "none")
    factor_key = (
        f"{prefix}.factor" if kind != "linear" or fields.has(f"{prefix}.factor") else f"{arch}.rope.scale_linear"
    )
    if kind == "none":
        return RopeFacts(theta=theta, rotary_dims=dims)
    if kind == "linear":
        return RopeFacts(theta=theta, kind="linear", factor=fields.number(factor_key), rotary_dims=dims)
    if kind == "yarn":
        attention = fields.optional_number(f"{prefix}.attn_factor") or fields.optional_number(
            f"{prefix}.yarn_attn_factor"
        )
        if fields.number(f"{prefix}.yarn_ext_factor", default=1.0, above=False) != 1.0:
            raise fields.refuse(f"{prefix}.yarn_ext_factor", "1: a partial YaRN is not supported")
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


def floats_of(fields: Fields, name: str, tensors: Tensors, *, count: int) -> tuple[float, ...]:
    """The values of a small F32 tensor, whose bytes must be at `.data`: `count` numbers over 0."""
    tensor = tensors.get(name)
    raw = getattr(tensor, "data", None)
    if tensor is None or raw is None or tensor.format != "F32" or tensor.nbytes != 4 * count:
        raise CardError(f"{fields.origin}: {name} must be {count} F32 values")
    values = tuple(float(value) for value in memoryview(bytes(raw)).cast("f"))
    if not all(0 < value < math.inf for value in values):
        raise CardError(f"{fields.origin}: {name} must be {count} numbers over 0")
    return values


def llama3_from_factors(
    fields: Fields, tensor: TensorFacts, *, theta: float, rotary: int, dims: int | None
) -> RopeFacts:
    """Finds Llama 3's rope scaling in the per-frequency factors that converters store in its place.

    The factors are recomputed from the only published settings (low 1, high 4, in Llama 4 1; original 8192) and compared; others are
    refused.
    """
    raw = getattr(tensor, "data", None)
    if raw is None or tensor.format != "F32" or tensor.nbytes != 2 * rotary:
        raise CardError(f"{fields.origin}: rope_freqs.weight must be {rotary // 2} F32 values")
    stored = memoryview(bytes(raw)).cast("f").tolist()
    for high in (4.0, 1.0):
        rope = RopeFacts(
            theta=theta,
            kind="llama3",
            factor=max(stored),
            original_max_positions=8192,
            high_freq_factor=high,
            rotary_dims=dims,
        )
        expected = llama3_factors(rope, rotary=rotary)
        if all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(stored, expected, strict=True)):
            return rope
    raise CardError(
        f"{fields.origin}: the factors in rope_freqs.weight are not those of Llama 3; other ones are not supported"
    )
