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
from tiny_gpu_engine import gpu_engine_of

from tests.engine.tiny_engine import answers, write_checkpoint
from tests.reference.test_block_scales import fp8_checkpoint
from tests.reference.test_regroup import mxfp4_checkpoint
from tests.reference.tiny import make_tiny, token_ids
from tradewind.contract.request import SamplingParams
from tradewind.kernels.triton.ops import CudaOps
from tradewind.serving.intake import Intake, Limits

NEW = 2
NEAR = 0.1
"""Logits nearer than this may change places in bf16."""


@pytest.fixture(params=["gpt_oss", "gpt_oss with 4 bits", "qwen3_moe"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "_"))
    if request.param == "gpt_oss with 4 bits":
        return finished(folder, mxfp4_checkpoint(folder), tmp_path_factory)
    return finished(folder, make_tiny(request.param, folder), tmp_path_factory)


def finished(folder: Path, oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint that an engine opens, and its oracle."""
    torch.set_num_threads(1)
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = None
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    other = write_checkpoint("full", tmp_path_factory.mktemp("tokenizer"))
    shutil.copy(other / "tokenizer.json", folder)  # must be there; nothing is turned into text
    return folder, oracle


def agrees(oracle: Any, prompt: list[int], answer: list[int], *, near: float = NEAR) -> bool:
    """Whether every token is the oracle's best after those before it, or nearly so."""
    ids = list(prompt)
    for token in answer:
        with torch.no_grad():
            logits = oracle(torch.tensor([ids]), use_cache=False).logits[0, -1]
        if float(logits.max() - logits[token]) > near:
            return False
        ids.append(token)
    return True


def test_greedy_is_the_oracles(tiny: tuple[Path, Any]) -> None:
    """One row, few rows, and a step in which pairs are sorted by expert."""
    folder, oracle = tiny
    deterministic = folder.name.startswith("gpt_oss0")  # sinks, windows and biases by both kinds of kernels
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


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_fp8_blocks_are_kept_packed(
    name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A published FP8 checkpoint: nothing is widened but on the way through the kernels, and answers are those of its values."""
    folder = tmp_path_factory.mktemp(name)
    _, oracle = finished(folder, fp8_checkpoint(name, folder, monkeypatch), tmp_path_factory)
    prompts = [token_ids(seed, count=count) for seed, count in ((1, 9), (2, 1))]
    packed: list[str] = []
    pack = CudaOps.pack_stored_blocks
    monkeypatch.setattr(
        CudaOps,
        "pack_stored_blocks",
        lambda self, parts, *, gated=False: packed.append("") or pack(self, parts, gated=gated),
    )
    with gpu_engine_of(folder) as engine:
        numerics = {reason.choice: reason.why for reason in engine.plan.reasons}
        assert "FP8 with a scale for each 128 x 128 weights stays" in numerics["quantization"]
        limits = Limits(vocab_size=163, max_context=engine.plan.schedule.max_context, eos_ids=())
        intake, sampling = Intake(limits, prefix="r"), SamplingParams(temperature=0.0, max_tokens=NEW)
        asked = [request for prompt in prompts for request in intake.requests(prompt, sampling, now_s=0.0)]
        said = [list(answer) for answer in answers(engine, asked)]
    experts = 2 * 16 if name == "qwen3_moe" else 2
    assert len(packed) == 3 * (2 + experts)  # qkv and output of each layer, gate_up and down of each expert
    for prompt, answer in zip(prompts, said, strict=True):
        assert agrees(oracle, prompt, answer, near=0.5)  # tokens are rounded to four bits
