"""Decoders published as embedding models, Qwen3-Embedding's way: saved without a head or prefix, last-token pooling stated beside them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.tiny_engine import open_llm, write_checkpoint
from tests.reference.tiny import make_tiny, token_ids
from tradewind.config.card_reader import card_from_hf
from tradewind.contract.errors import UserError
from tradewind.weights.checkpoint import open_checkpoint

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


@pytest.fixture(scope="module", params=["qwen3", "qwen2_5_tied"])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder as it would be published, and the oracle without its head."""
    torch.set_num_threads(1)
    whole, folder = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp(request.param)
    oracle = make_tiny(request.param, whole)
    oracle.model.save_pretrained(folder)
    config = {**json.loads((folder / "config.json").read_text()), "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 96, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    other = write_checkpoint("full", tmp_path_factory.mktemp("tokenizer"))
    shutil.copy(other / "tokenizer.json", folder)
    return folder, oracle.model


def test_vectors_are_the_oracles(published: tuple[Path, Any]) -> None:
    folder, oracle = published
    assert "embed_tokens.weight" in open_checkpoint(folder).tensors
    texts = [token_ids(seed, count=count) for seed, count in ((1, 40), (2, 1), (3, 150))]
    with open_llm(folder, max_tokens_per_step=64) as llm:
        got = llm.embed(texts)
    for vector, ids in zip(got, texts, strict=True):
        with torch.no_grad():
            last = oracle(torch.tensor([ids])).last_hidden_state[0, -1].double().numpy()
        assert np.abs(vector - last / np.linalg.norm(last)).max() < 1e-5


def test_the_card_says_how_to_pool(published: tuple[Path, Any]) -> None:
    checkpoint = open_checkpoint(published[0])
    card = card_from_hf(checkpoint.metadata, name="x", tensors=checkpoint.tensors, sentence=checkpoint.sentence)  # type: ignore[arg-type]
    assert card.pooling == "last"
    assert card.embedding_format == "F32"


def test_a_head_that_is_neither_there_nor_tied_is_named(published: tuple[Path, Any], tmp_path: Path) -> None:
    folder = shutil.copytree(published[0], tmp_path / "untied")
    config = {**json.loads((folder / "config.json").read_text()), "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"has no tensor 'lm_head.weight'"):
        open_llm(folder)
