"""Every rope scaling in every family: the logits of `transformers` on tiny random checkpoints, beyond the original positions, or a refusal
that names the scaling.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reference import tiny
from tests.reference.driver import Driver
from tests.reference.op_sets import OP_SETS, load, open_ops
from tests.reference.tiny import TINY, difference, oracle_logits, token_ids
from tradewind.config.card_reader import CardError, card_from_hf
from tradewind.models.registry import FAMILIES

TOLERANCE = 1e-4
LENGTH = 90
"""Tokens of the text: beyond the 64 original positions."""
ORIGINAL = 64
TAKEN = {
    "deepseek_v2": "deepseek_v2_lite", "deepseek_v3": "deepseek_v3", "gemma2": "gemma2", "gemma3": "gemma3", "gpt_oss": "gpt_oss",
    "granite": "granite", "llama": "llama2", "llama4": "llama4", "mistral": "mistral", "mixtral": "mixtral", "olmo2": "olmo2",
    "phi3": "phi3", "qwen2": "qwen2", "qwen2_5_vl": "qwen2_5_vl", "qwen2_moe": "qwen2_moe", "qwen3": "qwen3", "qwen3_moe": "qwen3_moe",
}  # fmt: skip
"""Family -> its row of tiny.TINY."""
WITHOUT_ROPE = {"bert"}


def scaling(kind: str, *, pairs: int) -> dict[str, Any]:
    """One description of rope, as a config has it."""
    values: dict[str, dict[str, Any]] = {
        "default": {},
        "dynamic": {"factor": 4.0},
        "linear": {"factor": 4.0},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL},
        "longrope": {
            "long_factor": [1.0 + 1.7 * pair for pair in range(pairs)],
            "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
            "original_max_position_embeddings": ORIGINAL,
        },
        "yarn": {"factor": 8.0, "original_max_position_embeddings": ORIGINAL},
    }  # fmt: skip
    return {"rope_type": kind, "rope_theta": 10000.0, **values[kind]}


KINDS_OF_PHI3 = ("default", "longrope")
"""The library knows no others for this family."""
KINDS = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")


def values_of(family: str, kind: str) -> dict[str, Any]:
    """The family's tiny config with that scaling of its full layers."""
    values = {**TINY[TAKEN[family]][2]}
    if family == "mixtral":  # the library's own default of None is multiplied by a number
        values["head_dim"] = 16
    sizes = {**tiny.BASE, **values}
    head = (
        sizes.get("qk_rope_head_dim") or sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    )
    old = values.pop("rope_parameters", {})
    made = scaling(kind, pairs=int(head * values.get("partial_rotary_factor", 1.0)) // 2)
    if kind == "longrope":
        values["original_max_position_embeddings"] = ORIGINAL
    if "full_attention" in old:
        made = {**old, "full_attention": made}
    if "mrope_section" in old:
        made["mrope_section"] = old["mrope_section"]
    return {**values, "rope_parameters": made}


def test_every_family_is_here() -> None:
    assert set(FAMILIES) == set(TAKEN) | WITHOUT_ROPE


@pytest.mark.parametrize(
    ("family", "kind"),
    [(family, kind) for kind in KINDS for family in sorted(TAKEN) if family != "phi3" or kind in KINDS_OF_PHI3],
)
def test_a_scaling_is_applied(family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model, make_config, _ = TINY[TAKEN[family]]
    monkeypatch.setitem(TINY, "scaled", (make_model, make_config, values_of(family, kind)))
    oracle = tiny.make_tiny("scaled", tmp_path)
    ids = token_ids(count=LENGTH)
    wanted = oracle_logits(oracle, ids)
    ops = open_ops(OP_SETS[0])
    try:
        model, card = load(tmp_path, ops)
        assert card.rope.kind == ("none" if kind in ("default", "dynamic") else kind)
        driver = Driver(model, card=card, ops=ops)
        assert difference(driver.step([(0, ids)])[0], wanted) < TOLERANCE
    finally:
        getattr(ops, "close", lambda: None)()


@pytest.mark.parametrize("family", sorted(TAKEN))
def test_any_other_scaling_is_refused_by_name(family: str) -> None:
    _, make_config, _ = TINY[TAKEN[family]]
    torch.manual_seed(0)
    config = json.loads(make_config(**{**tiny.BASE, **values_of(family, "default")}).to_json_string())
    for part in (config, config.get("text_config", {})):
        ropes = part.get("rope_parameters") or {}
        for own in (ropes, *(value for value in ropes.values() if isinstance(value, dict))):
            if "rope_type" in own:
                own["rope_type"] = "spiral"
    with pytest.raises(
        CardError,
        match="rope scaling 'spiral' is not supported; known are default, dynamic, linear, llama3, longrope, yarn",
    ):
        card_from_hf(config, name="x")
