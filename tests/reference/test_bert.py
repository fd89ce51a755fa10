"""The BERT encoder against `transformers` on tiny random checkpoints, in float32: hidden states of every token, alone and side by side.

The tolerance is on the largest deviation of any value, in units of the hidden states' standard deviation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, BertModel

from tests.reference.driver import Driver
from tests.reference.op_sets import OP_SETS, load, open_ops
from tests.reference.tiny import difference
from tradewind.config.card_reader import CardError, card_from_hf, count_parameters
from tradewind.weights.checkpoint import open_checkpoint
from tradewind.weights.load import WeightsError

TOLERANCE = 2e-5
BASE: dict[str, Any] = {
    "vocab_size": 163,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 320,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}


def make_bert(folder: Path, *, make: Any = BertModel, **values: Any) -> Any:
    """Writes a random checkpoint and returns the oracle; weights are drawn so that every table, bias and norm matters."""
    torch.manual_seed(7)
    model = make(BertConfig(**{**BASE, **values}, attn_implementation="eager")).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=1.0 if "embeddings" in name else 1.5 / parameter.shape[1] ** 0.5)
            elif "LayerNorm.weight" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.5)
    model.save_pretrained(folder)
    return model


def hidden_of(oracle: Any, ids: Sequence[int]) -> np.ndarray:
    """The oracle's last hidden states of one text, [tokens, E]."""
    with torch.no_grad():
        return oracle(torch.tensor([list(ids)])).last_hidden_state[0].numpy()


@dataclass(frozen=True)
class Tiny:
    folder: Path
    oracle: Any
    texts: list[list[int]]
    wanted: list[np.ndarray]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("bert")
    oracle = make_bert(folder)
    draw = np.random.default_rng(1)
    texts = [draw.integers(0, BASE["vocab_size"], size).tolist() for size in (1, 2, 17, 64, 111, 320)]
    return Tiny(folder, oracle, texts, [hidden_of(oracle, ids) for ids in texts])


class Encoder(Driver):
    """The test runner with hidden states where it has logits."""

    def encode(self, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Hidden states of whole texts, computed in one step."""
        first = len(self.lengths)
        self.model.logits = lambda rows, *, out, count: None
        self.step([(first + place, text) for place, text in enumerate(texts)])
        ends = np.cumsum([len(text) for text in texts])
        return np.split(self.ops.host(self.gathered)[: ends[-1]].copy(), ends[:-1])


@pytest.fixture(params=OP_SETS)
def encoder(request: pytest.FixtureRequest, tiny: Tiny) -> Iterator[Encoder]:
    ops = open_ops(request.param)
    model, card = load(tiny.folder, ops)
    yield Encoder(model, card=card, ops=ops, capacity=640, rows=16, max_context=320)
    getattr(ops, "close", lambda: None)()


def test_hidden_states(tiny: Tiny, encoder: Encoder) -> None:
    for ids, wanted in zip(tiny.texts, tiny.wanted, strict=True):
        assert difference(encoder.encode([ids])[0], wanted) < TOLERANCE


def test_texts_side_by_side(tiny: Tiny, encoder: Encoder) -> None:
    for order in ([0, 1, 2, 3, 4, 5], [5, 2, 0, 4], [1, 1, 1]):
        for place, got in zip(order, encoder.encode([tiny.texts[i] for i in order]), strict=True):
            assert difference(got, tiny.wanted[place]) < TOLERANCE


def test_every_token_sees_those_behind_it(tiny: Tiny, encoder: Encoder) -> None:
    """A test of the test: a causal run would pass nothing here."""
    ids = tiny.texts[3]
    changed = [*ids[:-1], (ids[-1] + 1) % BASE["vocab_size"]]
    one, other = encoder.encode([ids])[0], encoder.encode([changed])[0]
    assert np.abs(one[0] - other[0]).max() > 1e-3
    assert difference(other, hidden_of(tiny.oracle, changed)) < TOLERANCE


def test_a_checkpoint_with_a_masked_language_head(tiny: Tiny, tmp_path: Path) -> None:
    oracle = make_bert(tmp_path, make=BertForMaskedLM, num_hidden_layers=2)
    ops = open_ops("plain")
    model, card = load(tmp_path, ops)
    assert card.layers == 2
    got = Encoder(model, card=card, ops=ops).encode([tiny.texts[2]])[0]
    assert difference(got, hidden_of(oracle.bert, tiny.texts[2])) < TOLERANCE


# -- the card and the loader


def test_card(tiny: Tiny) -> None:
    checkpoint = open_checkpoint(tiny.folder)
    card = card_from_hf(checkpoint.metadata, name="b", tensors=checkpoint.tensors)
    assert (card.family, card.causal, card.pooling, card.activation) == ("bert", False, "mean", "gelu")
    assert (card.heads, card.kv_heads, card.head_dim, card.max_positions, card.position_rows) == (6, 6, 16, 320, 320)
    assert card.embedding_format == "F32"
    pooler = sum(p.numel() for n, p in tiny.oracle.named_parameters() if n.startswith("pooler."))
    assert count_parameters(card) == sum(p.numel() for p in tiny.oracle.parameters()) - pooler


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("hidden_act", "relu", "hidden_act"),
        ("is_decoder", True, "is_decoder"),
        ("position_embedding_type", "relative_key", "position_embedding_type"),
        ("hidden_size", 100, "multiple of num_attention_heads"),
        ("hidden_size", 48, "multiple of 16 dims"),
        ("vocab_size", None, "vocab_size"),
    ],
)
def test_other_berts_are_refused_by_name(field: str, value: Any, said: str) -> None:
    with pytest.raises(CardError, match=said):
        card_from_hf({"model_type": "bert", **BASE, field: value}, name="b")


def test_what_sentence_transformers_says() -> None:
    config = {"model_type": "bert", **BASE}

    def card(**sentence: Any) -> Any:
        return card_from_hf(
            config, name="b", sentence={name.replace("__", "."): value for name, value in sentence.items()}
        )

    flags = dict.fromkeys(("pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_max_tokens"), False)
    assert card(pooling__json={**flags, "pooling_mode_cls_token": True}).pooling == "cls"
    assert card(pooling__json={**flags, "pooling_mode_lasttoken": True}).pooling == "last"
    assert card(pooling__json={"pooling_mode": "mean"}).pooling == "mean"
    assert card(sentence_bert_config__json={"max_seq_length": 128}).max_positions == 128
    assert card(sentence_bert_config__json={"max_seq_length": 999}).max_positions == 320
    with pytest.raises(CardError, match="pooling_mode_max_tokens"):
        card(pooling__json={**flags, "pooling_mode_max_tokens": True})
    with pytest.raises(CardError, match="no pooling"):
        card(pooling__json=flags)
    with pytest.raises(CardError, match="pooling_mode_mean_tokens \\+ pooling_mode_max_tokens"):
        card(pooling__json={**flags, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True})
    with pytest.raises(CardError, match="'Dense', which is not supported"):
        card(modules__json=[{"type": "sentence_transformers.models.Dense"}])


def test_a_decoder_may_state_its_pooling_too(tmp_path: Path) -> None:
    make_bert(tmp_path)
    (tmp_path / "3_Pool").mkdir()
    (tmp_path / "modules.json").write_text(
        '[{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "3_Pool"}]'
    )
    (tmp_path / "3_Pool" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    checkpoint = open_checkpoint(tmp_path)
    card = card_from_hf(checkpoint.metadata, name="b", tensors=checkpoint.tensors, sentence=checkpoint.sentence)
    assert (card.pooling, card.max_positions, card.position_rows) == ("cls", 100, 320)
    decoder = {
        "model_type": "llama", "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "intermediate_size": 64, "max_position_embeddings": 512,
    }  # fmt: skip
    assert card_from_hf(decoder, name="l").pooling == "last"
    assert card_from_hf(decoder, name="l", sentence={"pooling.json": {"pooling_mode": "mean"}}).pooling == "mean"
    assert msgspec.json.decode(msgspec.json.encode(card), type=type(card)) == card


def test_wrong_weights_are_refused_by_name(tiny: Tiny, tmp_path: Path) -> None:
    tensors = load_file(tiny.folder / "model.safetensors")
    (tmp_path / "config.json").write_text((tiny.folder / "config.json").read_text())
    ops = open_ops("plain")
    for change, said in (
        ({"classifier.weight": torch.zeros(2, 96)}, "classifier.weight"),
        ({"encoder.layer.1.output.LayerNorm.bias": None}, r"encoder.layer.1.output.LayerNorm.bias"),
        ({"embeddings.position_embeddings.weight": torch.zeros(8, 96)}, r"\(8, 96\)"),
    ):
        save_file({k: v for k, v in {**tensors, **change}.items() if v is not None}, tmp_path / "model.safetensors")
        with pytest.raises(WeightsError, match=said):
            load(tmp_path, ops)
