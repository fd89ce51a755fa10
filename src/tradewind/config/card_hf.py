"""From a Hugging Face `config.json` to a `ModelCard`.

Knows: the fields that all decoders share, old and new spellings. Refuses to know: what is particular to a family (card_families), rope
(card_rope), files (weights) and arithmetic (models). What is missing, ill-typed, impossible or not supported is refused by name; nothing
is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tradewind.config.card import ModelCard
from tradewind.config.card_encoder import card_from_bert, sentence_facts
from tradewind.config.card_families import HF_FAMILIES, TEXT_CONFIGS, HFFamily, Shape
from tradewind.config.card_parts import FAMILIES, Tensors, check_heads, with_weights
from tradewind.config.card_rope import hf_ropes
from tradewind.config.card_vision import vision_facts
from tradewind.config.fields import CardError, Fields, shown

HF_FORMATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def card_from_hf(
    config: Mapping[str, Any],
    *,
    name: str,
    tensors: Tensors | None = None,
    generation_config: Mapping[str, Any] | None = None,
    sentence: Mapping[str, Any] | None = None,
    preprocessor: Mapping[str, Any] | None = None,
) -> ModelCard:
    """Reads a `config.json`; changes nothing. Raises CardError naming the field.

    tensors: name -> facts, for the bytes on disk; without them they are computed from the shapes and the stated dtype.
    generation_config: content of `generation_config.json`, whose end-of-text ids count too.
    sentence: the files that sentence-transformers adds, see `card_encoder.sentence_facts`.
    preprocessor: content of `preprocessor_config.json`, for models that read images.
    """
    card = _plain_card(
        config, name=name, tensors=tensors, generation_config=generation_config, preprocessor=preprocessor
    )
    return msgspec.structs.replace(card, **sentence_facts(card, sentence)) if sentence else card


def _plain_card(
    config: Mapping[str, Any],
    *,
    name: str,
    tensors: Tensors | None,
    generation_config: Mapping[str, Any] | None,
    preprocessor: Mapping[str, Any] | None,
) -> ModelCard:
    """The card without what sentence-transformers adds."""
    if not isinstance(config, Mapping):
        raise CardError(f"config.json of '{name}' is {shown(config)}; it must be an object")
    outer = Fields(config, origin=f"config.json of '{name}'")
    fields, row = hf_family(outer)
    quantised = outer.mapping("quantization_config") or fields.mapping("quantization_config")
    method = quantised.values.get("quant_method", "unknown") if quantised is not None else None
    if quantised is not None and method == "fp8" and quantised.values.get("weight_block_size") != [128, 128]:
        raise quantised.refuse("weight_block_size", "[128, 128], the only blocks of fp8 weights that are read")
    if method is not None and (row is None or method not in row.quantised):
        raise CardError(
            f"{outer.origin}: weights quantised by {shown(method)} are not supported; use an unquantised checkpoint or a GGUF file"
        )

    stated = fields.values.get(
        "dtype", fields.values.get("torch_dtype", config.get("dtype", config.get("torch_dtype")))
    )
    assumed = HF_FORMATS.get(str(stated).removeprefix("torch."), "F32" if row is None else "BF16")
    if row is None:
        return card_from_bert(fields, name=name, tensors=tensors, assumed=assumed)

    heads = fields.whole("num_attention_heads")
    hidden = fields.whole("hidden_size")
    layers = fields.whole("num_hidden_layers", high=4096)
    kv_heads = fields.whole("num_key_value_heads", default=row.kv_heads or heads)
    if not fields.has("head_dim") and row.head_dim is None and hidden % heads:
        raise fields.refuse("hidden_size", f"a multiple of num_attention_heads, {heads}, where head_dim is not given")
    head_dim = fields.whole("head_dim", default=row.head_dim or hidden // heads)
    check_heads(fields, heads=heads, kv_heads=kv_heads, head_dim=head_dim, names=HF_HEAD_NAMES)
    vocab_size = fields.whole("vocab_size")
    positions = fields.whole("max_position_embeddings")
    rope, rope_local = hf_ropes(
        fields, theta=row.theta, local=row.own_local_rope, positions=positions, head_dim=head_dim
    )
    if fields.word(row.activation_field, default=row.activation) != row.activation:
        raise fields.refuse(row.activation_field, f"'{row.activation}' for {FAMILIES[row.family]}")
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

    shared: dict[str, Any] = {
        "intermediate": fields.whole("intermediate_size"),
        "layer_windows": (None,) * layers,
        "head_dim": head_dim,
        "rope": rope,
        "tied_embeddings": fields.flag(
            "tie_word_embeddings", default=outer.flag("tie_word_embeddings", default=row.tied)
        ),
    }
    own = row.facts(fields, Shape(hidden=hidden, layers=layers, heads=heads, head_dim=head_dim, rope=rope))
    card = ModelCard(
        name=name,
        family=row.family,
        source="hf",
        vocab_size=vocab_size,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        max_positions=positions,
        norm_eps=fields.number("rms_norm_eps", default=row.norm_eps),
        rope_local=rope_local,
        bos_id=bos[0] if bos else None,
        eos_ids=tuple(dict.fromkeys(eos)),
        vision=vision_facts(outer, hidden=hidden, preprocessor=preprocessor) if row.vision else None,
        **{**shared, **own},
    )
    return with_weights(card, tensors=tensors, assumed=assumed, fp8_blocks=method == "fp8")


HF_HEAD_NAMES = ("num_attention_heads", "num_key_value_heads", "head_dim")


def hf_family(outer: Fields) -> tuple[Fields, HFFamily | None]:
    """The fields of the text decoder (with what its family leaves out filled in) and its row; None is the encoder, BERT."""
    model_type = outer.word("model_type")
    if model_type == "bert":
        return outer, None
    inner = outer
    if model_type in TEXT_CONFIGS:
        # A vision-and-text model, whose decoder is one of ours.
        text = outer.mapping("text_config")
        if text is None:
            raise outer.refuse("text_config", "an object that describes the text decoder")
        inner, model_type = text, TEXT_CONFIGS[model_type]
    row = HF_FAMILIES.get(model_type)
    if row is not None and row.vision:
        # Old files describe the decoder beside the tower, new ones in an object of its own.
        inner = outer.mapping("text_config") or outer
    if row is None:
        known = ", ".join(sorted([*HF_FAMILIES, *TEXT_CONFIGS, "bert"]))
        raise CardError(f"{outer.origin}: model_type '{shown(model_type)[1:-1]}' is not supported; known are {known}")
    if row.omitted:
        given = {key: value for key, value in inner.values.items() if value is not None or key not in row.omitted}
        inner = Fields({**row.omitted, **given}, origin=inner.origin)
    return inner, row
