"""From the files of a BERT-type encoder and of sentence-transformers to a `ModelCard`.

Knows: BERT's field names, the pooling that a sentence-transformers folder states. Refuses to know: decoders (card_hf) and arithmetic
(models/bert.py). What would give another vector (other pooling, further modules) is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tradewind.config.card import ModelCard, RopeFacts
from tradewind.config.card_parts import Tensors, with_weights
from tradewind.config.fields import CardError, Fields, shown
from tradewind.contract.request import Pooling

POOLING_FLAGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
}
"""In 1_Pooling/config.json exactly one is true."""
OTHER_POOLING = ("pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens")
MODULES = ("Transformer", "Pooling", "Normalize")
"""Of modules.json: vectors are normalised on request, so the last one only says what people expect."""


def card_from_bert(fields: Fields, *, name: str, tensors: Tensors | None, assumed: str) -> ModelCard:
    """The card of a BERT encoder (Devlin et al. 2019) from its config.json; changes nothing. Raises CardError naming the field."""
    heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    layers = fields.whole("num_hidden_layers", high=4096)
    if hidden % heads:
        raise fields.refuse("hidden_size", f"a multiple of num_attention_heads, {heads}")
    if (hidden // heads) % 16:
        raise fields.refuse("hidden_size", f"such that each of the {heads} heads has a multiple of 16 dims")
    for field, only in (("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
        if fields.word(field, default=only) != only:
            raise fields.refuse(field, f"'{only}', the only one that is supported for BERT")
    for field in ("add_cross_attention", "is_decoder"):
        if fields.flag(field, default=False):
            raise fields.refuse(field, "false: of this family only encoders are supported")
    positions = fields.whole("max_position_embeddings")
    card = ModelCard(
        name=name,
        family="bert",
        source="hf",
        vocab_size=fields.whole("vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=fields.whole("intermediate_size"),
        max_positions=positions,
        norm_eps=fields.number("layer_norm_eps", default=1e-12),
        tied_embeddings=False,
        activation="gelu",
        rope=RopeFacts(kind="absent"),
        layer_windows=(None,) * layers,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        causal=False,
        pooling="mean",
        position_rows=positions,
        token_types=fields.whole("type_vocab_size", default=2),
    )
    return with_weights(card, tensors=tensors, assumed=assumed)


def sentence_facts(card: ModelCard, sentence: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the card that a sentence-transformers folder decides: `pooling` and `max_positions`. Raises CardError.

    sentence: file name -> its content, of those that are there: modules.json, pooling.json (1_Pooling/config.json),
    sentence_bert_config.json.
    """
    decided: dict[str, Any] = {}
    modules = sentence.get("modules.json")
    for module in modules if isinstance(modules, list) else ():
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, Mapping) else shown(module)
        if kind not in MODULES:
            raise CardError(
                f"modules.json of '{card.name}' has a module {shown(kind)}, which is not supported; known are {', '.join(MODULES)}"
            )
    given = sentence.get("pooling.json")
    if isinstance(given, Mapping):
        decided["pooling"] = pooling_from(Fields(given, origin=f"1_Pooling/config.json of '{card.name}'"))
    given = sentence.get("sentence_bert_config.json")
    if isinstance(given, Mapping):
        # Texts beyond it are cut there by the library that wrote the file; here they are refused.
        fields = Fields(given, origin=f"sentence_bert_config.json of '{card.name}'")
        decided["max_positions"] = min(card.max_positions, fields.whole("max_seq_length", default=card.max_positions))
    return decided


def pooling_from(fields: Fields) -> Pooling:
    """Which pooling a 1_Pooling/config.json states, in its old spelling (a flag each) or the new one (a word)."""
    if fields.has("pooling_mode"):
        word = fields.word("pooling_mode")
        words: dict[str, Pooling] = {"cls": "cls", "lasttoken": "last", "mean": "mean"}
        if word not in words:
            raise fields.refuse("pooling_mode", f"one of {', '.join(words)}")
        return words[word]
    on = [field for field in (*POOLING_FLAGS, *OTHER_POOLING) if fields.flag(field, default=False)]
    if len(on) != 1 or on[0] not in POOLING_FLAGS:
        raise CardError(
            f"{fields.origin}: asks for {' + '.join(on) or 'no pooling'}; exactly one of {', '.join(POOLING_FLAGS)} is supported"
        )
    return POOLING_FLAGS[on[0]]
