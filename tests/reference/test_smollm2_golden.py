"""The real SmolLM2-135M-Instruct (GGUF, Q4_1) against the answers of `transformers` in float32 on the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.reference.driver import Driver
from tests.reference.op_sets import EXACT, OP_SETS, load, open_ops
from tradewind.quantization.scheme import Numerics

GOLDEN = json.loads(Path(__file__).with_name("smollm2_golden.json").read_text())
NEAR_TIE = 0.05
"""Top-2 margin below which another summation order may turn the answer."""

pytestmark = pytest.mark.weights


def logits_of(path: Path, op_set: str, numerics: Numerics, *, terms: int = 1) -> list[np.ndarray]:
    """Per prompt: logits [answer tokens, V] at the positions that choose the golden answer.

    Prompts are prefilled in one step and the answers decoded side by side, the golden token fed whatever was computed: so one near tie
    does not spoil what follows.
    """
    ops = open_ops(op_set, activation_terms=terms)
    try:
        model, card = load(path, ops, numerics=numerics)
        prompts = GOLDEN["prompts"]
        driver = Driver(model, card=card, ops=ops, rows=len(prompts), max_context=128, capacity=256)
        found = [[logits[-1]] for logits in driver.step([(i, p["prompt_ids"]) for i, p in enumerate(prompts)])]
        for turn in range(max(len(p["ids"]) for p in prompts) - 1):
            live = [i for i, p in enumerate(prompts) if turn < len(p["ids"]) - 1]
            rows = driver.step([(i, [prompts[i]["ids"][turn]]) for i in live])
            for i, logits in zip(live, rows, strict=True):
                found[i].append(logits[-1])
        return [np.stack(rows) for rows in found]
    finally:
        getattr(ops, "close", lambda: None)()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("op_set", OP_SETS)
def test_exact_compute_gives_the_golden_ids(smollm2_gguf: Path, op_set: str) -> None:
    for prompt, logits in zip(GOLDEN["prompts"], logits_of(smollm2_gguf, op_set, EXACT), strict=True):
        ids, margin = np.array(prompt["ids"]), np.array(prompt["top2_margin"])
        clear = margin >= NEAR_TIE
        assert logits.argmax(-1)[clear].tolist() == ids[clear].tolist(), prompt["prompt"]
        logprob = log_softmax(logits)[np.arange(len(ids)), ids]
        np.testing.assert_allclose(logprob, prompt["logprob"], atol=5e-4)
        best, second = np.array(prompt["top2_ids"]).T
        own_margin = logits[np.arange(len(ids)), best] - logits[np.arange(len(ids)), second]
        np.testing.assert_allclose(own_margin, margin, atol=1e-3)


@pytest.mark.parametrize("op_set", OP_SETS)
def test_int8_compute_agrees_where_the_answer_is_clear(smollm2_gguf: Path, op_set: str) -> None:
    int8 = Numerics(compute="int8", quantization="none")
    agree = total = 0
    for prompt, logits in zip(GOLDEN["prompts"], logits_of(smollm2_gguf, op_set, int8), strict=True):
        ids, margin = np.array(prompt["ids"]), np.array(prompt["top2_margin"])
        same = logits.argmax(-1) == ids
        assert same[margin > 1.0].all(), prompt["prompt"]
        agree, total = agree + int(same.sum()), total + len(ids)
    print(f"int8 on {op_set}: {agree} of {total} greedy ids as in float32")
    assert agree >= 0.9 * total


@pytest.mark.parametrize("op_set", OP_SETS)
def test_int16_compute_gives_the_golden_ids(smollm2_gguf: Path, op_set: str) -> None:
    """Two int8 terms for each activation lose nothing that a greedy answer could show."""
    packed = Numerics(compute="int8", quantization="none")
    for prompt, logits in zip(GOLDEN["prompts"], logits_of(smollm2_gguf, op_set, packed, terms=2), strict=True):
        ids, margin = np.array(prompt["ids"]), np.array(prompt["top2_margin"])
        clear = margin >= NEAR_TIE
        assert logits.argmax(-1)[clear].tolist() == ids[clear].tolist(), prompt["prompt"]
        logprob = log_softmax(logits)[np.arange(len(ids)), ids]
        np.testing.assert_allclose(logprob, prompt["logprob"], atol=2e-3)
