"""Mixtures of experts through the whole engine on the `cuda` op set, from checkpoints: greedy tokens are the oracle's but at near ties.

On a GPU, elsewhere through Triton's interpreter (test_gpu_interpreter.py).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_engine import gpu_engine_of

from tests.engine.tiny_engine import answers, write_checkpoint
from tests.reference.tiny import make_tiny, token_ids
from tradewind.contract.request import SamplingParams
from tradewind.serving.intake import Intake, Limits

NEW = 2
NEAR = 0.1
"""Logits nearer than this may change places in bf16."""


@pytest.fixture(params=["gpt_oss", "qwen3_moe"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    oracle = make_tiny(request.param, folder)
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = None
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    other = write_checkpoint("full", tmp_path_factory.mktemp("tokenizer"))
    shutil.copy(other / "tokenizer.json", folder)  # must be there; nothing is turned into text
    return folder, oracle


def agrees(oracle: Any, prompt: list[int], answer: list[int]) -> bool:
    """Whether every token is the oracle's best after those before it, or nearly so."""
    ids = list(prompt)
    for token in answer:
        with torch.no_grad():
            logits = oracle(torch.tensor([ids]), use_cache=False).logits[0, -1]
        if float(logits.max() - logits[token]) > NEAR:
            return False
        ids.append(token)
    return True


def test_greedy_is_the_oracles(tiny: tuple[Path, Any]) -> None:
    """One row, few rows, and a step in which pairs are sorted by expert."""
    folder, oracle = tiny
    deterministic = "gpt_oss" in folder.name
    prompts = [token_ids(seed, count=count) for seed, count in ((1, 13), (2, 4), (3, 1))]
    with gpu_engine_of(folder, deterministic=deterministic) as engine:
        limits = Limits(vocab_size=163, max_context=engine.plan.schedule.max_context, eos_ids=())
        sampling = SamplingParams(temperature=0.0, max_tokens=NEW)

        def said(some: list[list[int]], prefix: str) -> list[list[int]]:
            intake = Intake(limits, prefix=prefix)
            asked = [request for prompt in some for request in intake.requests(prompt, sampling, now_s=0.0)]
            return [list(answer) for answer in answers(engine, asked)]

        together = said(prompts, "r")
        alone = said(prompts[:1], "x")
    for prompt, answer in zip(prompts, together, strict=True):
        assert agrees(oracle, prompt, answer)
    assert agrees(oracle, prompts[0], alone[0])
    if deterministic:
        assert alone[0] == together[0]
