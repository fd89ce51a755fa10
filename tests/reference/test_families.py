"""Every model family against `transformers` on tiny random checkpoints, in float32, for every shape that a step can have.

The tolerance is on the largest deviation of any logit at any position, in units of the logits' standard deviation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reference.driver import Driver
from tests.reference.op_sets import OP_SETS, load, open_ops
from tests.reference.tiny import TINY, TOKENS, difference, make_tiny, oracle_logits, token_ids

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Tiny:
    """A tiny checkpoint and what its oracle says to one text."""

    name: str
    folder: Path
    oracle: Any
    ids: list[int]
    wanted: np.ndarray


@pytest.fixture(scope="module", params=sorted(TINY))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp(request.param)
    oracle = make_tiny(request.param, folder)
    ids = token_ids()
    return Tiny(request.param, folder, oracle, ids, oracle_logits(oracle, ids))


@pytest.fixture(params=OP_SETS)
def driver(request: pytest.FixtureRequest, tiny: Tiny) -> Iterator[Driver]:
    ops = open_ops(request.param)
    model, card = load(tiny.folder, ops)
    yield Driver(model, card=card, ops=ops)
    getattr(ops, "close", lambda: None)()


def test_whole_prefill(tiny: Tiny, driver: Driver) -> None:
    assert difference(driver.step([(0, tiny.ids)])[0], tiny.wanted) < TOLERANCE


@pytest.mark.parametrize("chunk", [7, 16, 33])
def test_chunked_prefill(tiny: Tiny, driver: Driver, chunk: int) -> None:
    got = [driver.step([(0, tiny.ids[i : i + chunk])])[0] for i in range(0, TOKENS, chunk)]
    assert difference(np.concatenate(got), tiny.wanted) < TOLERANCE


def test_decode_token_by_token(tiny: Tiny, driver: Driver) -> None:
    got = [driver.step([(0, tiny.ids[:150])])[0]]
    got += [driver.step([(0, [token])])[0] for token in tiny.ids[150:]]
    assert difference(np.concatenate(got), tiny.wanted) < TOLERANCE


def test_few_rows_end_as_all_do(tiny: Tiny, driver: Driver) -> None:
    """What follows the last layer's attention, for the last token of each row alone: the logits that all rows together give it."""
    texts = {k: token_ids(k) for k in range(4)}
    for rows in (
        [(0, texts[0][:50]), (1, texts[1][:1]), (2, texts[2][:33])],
        [(2, texts[2][33:34]), (3, texts[3][:9]), (0, texts[0][50:71])],
    ):
        whole = driver.step(rows)
        assert difference(driver.ends(), np.stack([logits[-1] for logits in whole])) < TOLERANCE


def test_prefix_hit(tiny: Tiny, driver: Driver) -> None:
    """A text that begins in the pages of another, in which it is computed on at once or in pieces."""
    driver.step([(0, tiny.ids[:80]), (1, token_ids(1, count=100))])
    driver.share(2, of=0, tokens=64)
    got = [driver.step([(2, tiny.ids[first:last])])[0] for first, last in ((64, 65), (65, 90), (90, TOKENS))]
    assert difference(np.concatenate(got), tiny.wanted[64:]) < TOLERANCE


def test_rows_of_every_kind_in_one_step(tiny: Tiny, driver: Driver) -> None:
    """Sequences that decode, prefill, and start anew beside each other, at different positions, in changing order."""
    others = {1: token_ids(1), 2: token_ids(2)}
    texts = {0: tiny.ids, **others}
    wanted = {0: tiny.wanted, **{k: oracle_logits(tiny.oracle, ids) for k, ids in others.items()}}
    done = dict.fromkeys(texts, 0)
    got: dict[int, list[np.ndarray]] = {k: [] for k in texts}
    random = np.random.default_rng(3)
    while any(done[k] < TOKENS for k in texts):
        rows = []
        for k in random.permutation(list(texts)).tolist():
            count = min(int(random.choice([0, 1, 1, 5, 31])), TOKENS - done[k])
            if count:
                rows.append((k, texts[k][done[k] : done[k] + count]))
                done[k] += count
        for (k, _), logits in zip(rows, driver.step(rows) if rows else [], strict=True):
            got[k].append(logits)
    for k in texts:
        assert difference(np.concatenate(got[k]), wanted[k]) < TOLERANCE


def test_card_says_what_the_family_is(tiny: Tiny, driver: Driver) -> None:
    """A test of the tests: the tiny configs really have the features that they are there for."""
    name, card = tiny.name, driver.card
    if name.startswith("gemma3"):
        assert [group.kind for group in driver.groups] == ["full", "window"]
        assert card.rope_local is not None
        assert card.rope != card.rope_local
    if name.startswith("gemma2"):
        assert [group.kind for group in driver.groups] == ["full", "window"]
        assert None not in (card.attention_softcap, card.logit_softcap)
        assert card.attention_scale != card.head_dim**-0.5
    if name == "gpt_oss":
        assert [group.kind for group in driver.groups] == ["full", "window"]
        assert card.attention_sinks
        assert card.moe is not None
        assert card.moe.biases
        assert not card.rope.truncate
    if name == "granite":
        assert 1.0 not in (card.embedding_scale, card.residual_scale, card.logit_scale)
        assert card.attention_scale == 0.2
    if name.startswith("olmo2"):
        assert card.qk_norm_whole
        assert not card.qk_norm
    assert (card.moe is not None) == ("moe" in name or name.startswith(("deepseek", "gpt_oss", "llama4", "mixtral")))
    if card.moe is not None:
        assert (all(card.moe.layers)) == (not name.endswith("_some") and not name.startswith("deepseek"))
        assert (card.moe.shared_intermediate > 0) == name.startswith(("qwen2_moe", "deepseek", "llama4"))
        assert (1 if name == "llama4" else 2) <= card.moe.per_token < card.moe.experts
        assert card.moe.weigh_input == name.startswith("llama4")
    if name.startswith("llama4"):
        assert [(group.kind, group.window) for group in driver.groups] == [("full", None), ("chunk", 40)]
        assert card.layer_ropes.count(False) == 1
        assert card.temper is not None
        assert card.temper.every * 4 < TOKENS
        assert (card.qk_norm, card.qk_norm_weights) == ((True, False) if name == "llama4" else (False, True))
        assert (len(driver.groups[0].layers), sum(card.layer_ropes)) == ((1, 4) if name == "llama4" else (2, 3))
    assert (card.latent is not None) == name.startswith("deepseek")
    if card.latent is not None:
        assert [(group.kind, group.head_dim) for group in driver.groups] == [("latent", card.latent.width)]
        assert card.moe is not None
        assert card.moe.layers == (False, True, True)
        assert (card.latent.query_rank > 0) == (card.moe.groups_kept < card.moe.groups) == (name != "deepseek_v2_lite")
        assert (card.moe.correction, card.moe.group_top, card.moe.score) == (
            (True, 2, "sigmoid") if name == "deepseek_v3" else (False, 1, "softmax")
        )
        assert (card.attention_scale != card.head_dim**-0.5) == (name != "deepseek_v2")
    if name == "qwen2_moe_some":
        assert card.moe.layers == (False, False, False, True)
        assert [group.kind for group in driver.groups] == ["full", "window"]
    if name.startswith("phi"):
        assert (card.rope.kind == "longrope") == (name != "phi3")
        assert (card.rope.rotary_dims == 24) == (name == "phi4_mini")
    if name.startswith("mistral"):
        assert [group.kind for group in driver.groups] == ["window"]
    if name == "qwen3":
        assert card.qk_norm
        assert card.head_dim * card.heads != card.hidden
    assert name == "phi3_short" or (card.rope.original_max_positions or 0) < TOKENS
