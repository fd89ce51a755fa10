"""Families that vary the decoder, through the whole engine: planned, taped, beside other requests; greedy tokens are the oracle's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.tiny_engine import answers, engine_of, write_checkpoint
from tests.reference.driver import Driver
from tests.reference.op_sets import load, open_ops
from tests.reference.tiny import make_tiny, oracle_logits, token_ids
from tradewind.contract.request import SamplingParams
from tradewind.quantization.numerics import Numerics
from tradewind.serving.intake import Intake, Limits

NAMES = (
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "gemma2",
    "gpt_oss",
    "granite",
    "llama4",
    "mixtral",
    "olmo2",
    "phi3_short",
    "qwen2_moe_some",
    "qwen3_moe",
)
NEW = 12


@pytest.fixture(scope="module", params=NAMES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.set_num_threads(1)  # two threads that wait for each other on busy cores are slower than one by far
    folder = tmp_path_factory.mktemp(request.param)
    oracle = make_tiny(request.param, folder)
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = None
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    other = write_checkpoint("full", tmp_path_factory.mktemp("tokenizer"))
    shutil.copy(other / "tokenizer.json", folder)  # must be there; nothing is turned into text
    return folder, oracle


def greedy(oracle: Any, prompt: list[int]) -> list[int]:
    """The oracle's greedy answer, its whole text computed anew for each token."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(NEW):
            ids.append(int(oracle(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_greedy_is_the_oracles(tiny: tuple[Path, Any]) -> None:
    folder, oracle = tiny
    prompts = [token_ids(seed, count=count) for seed, count in ((1, 70), (2, 5), (3, 33))]
    with engine_of(folder) as engine:
        limits = Limits(vocab_size=163, max_context=engine.plan.schedule.max_context, eos_ids=())
        intake = Intake(limits, prefix="r")
        sampling = SamplingParams(temperature=0.0, max_tokens=NEW)
        asked = [request for prompt in prompts for request in intake.requests(prompt, sampling, now_s=0.0)]
        got = answers(engine, asked)
    assert [list(answer) for answer in got] == [greedy(oracle, prompt) for prompt in prompts]


@pytest.mark.parametrize(("quantization", "bound"), [("int8", 0.15), ("none", 0.15), ("int4", 2.0)])
def test_quantised_weights(tiny: tuple[Path, Any], quantization: Any, bound: float) -> None:
    """With weights packed small and activations in two int8 terms, both op sets say the same, and nearly what the oracle says.

    bound: on the mean deviation from the oracle, in units of the logits' deviation. A token sent to another expert deviates as a whole.
    """
    folder, oracle = tiny
    ids, logits = token_ids(4, count=40), []
    for name in ("cpu", "plain"):
        ops = open_ops(name, activation_terms=2)
        model, card = load(folder, ops, numerics=Numerics(compute="int8", quantization=quantization))
        logits.append(Driver(model, card=card, ops=ops).step([(0, ids)])[0])
        getattr(ops, "close", lambda: None)()
    wanted = oracle_logits(oracle, ids)
    assert np.abs(logits[0] - logits[1]).mean() / wanted.std() < 1e-3
    assert np.abs(logits[0] - wanted).mean() / wanted.std() < bound
