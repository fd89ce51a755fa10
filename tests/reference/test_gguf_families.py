"""Families beyond the plain decoder from GGUF files, as converters write them: the same logits as from the Hugging Face files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.reference.driver import Driver
from tests.reference.op_sets import OP_SETS, load, open_ops
from tests.reference.test_gguf_models import gguf_metadata, in_blocks
from tests.reference.tiny import TINY, difference, make_tiny, oracle_logits, rope, token_ids
from tradewind.config.card import TemperFacts
from tradewind.config.card_reader import CardError, card_from_gguf
from tradewind.models.registry import FAMILIES
from tradewind.quantization.numerics import Numerics
from tradewind.weights.gguf import write_gguf
from tradewind.weights.load import WeightsError

# tiny checkpoint, architecture, family
CASES = (
    ("gemma2", "gemma2", "gemma2"),
    ("granite", "granite", "granite"),
    ("granite_biases", "granite", "granite"),
    ("llama4", "llama4", "llama4"),
    ("llama4_some", "llama4", "llama4"),
    ("mixtral", "llama", "mixtral"),
    ("olmo2", "olmo2", "olmo2"),
    ("phi3", "phi3", "phi3"),
    ("phi3_long", "phi3", "phi3"),
    ("phi4_mini", "phi3", "phi3"),
    ("qwen2_moe", "qwen2moe", "qwen2_moe"),
    ("qwen3_moe", "qwen3moe", "qwen3_moe"),
)
INTERLEAVED = ("granite", "mixtral")
AS_PUBLISHED: dict[str, Any] = {
    "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "no_rope_layer_interval": 4, "no_rope_layers": None,
    "layer_types": None, "use_qk_norm": True, "max_position_embeddings": 32768,
    **rope("llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=8192, rope_theta=5e5),
}  # fmt: skip


def tensors_of(folder: Path, oracle: Any, *, family: str, old: bool = False) -> dict[str, np.ndarray]:
    """The folder's tensors under GGUF names: experts stacked (or, as in old files, numbered), rotated rows interleaved, norms plus one."""
    config = oracle.config
    row = FAMILIES[family]
    hf_to_gguf = {hf: gguf for gguf, hf in row.gguf_names.items()}
    found: dict[str, Any] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        parts = name.split(".")
        numbers = [part for part in parts if part.isdigit()]
        template = ".".join("{}" if part.isdigit() else part for part in parts)
        if family in INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        if family == "gemma2" and "norm" in name:
            value = value + 1
        if family == "llama4" and ".experts." in name:  # all of them already, transposed
            value = value.swapaxes(1, 2)
            ways = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            for part, each in zip(ways, np.split(value, len(ways), axis=1), strict=True):
                place = template.rpartition(".")[0] + f".{part}.weight"
                found[hf_to_gguf[place].format(*numbers)] = np.ascontiguousarray(each)
            continue
        if "shared_expert_gate" in name:
            value = value[0]
        if len(numbers) == 2 and not old:
            stacked = template.replace(".experts.{}.", ".experts.").format(numbers[0])
            stacks.setdefault(stacked, {})[int(numbers[1])] = value
        else:
            found[hf_to_gguf[template].format(*numbers)] = np.ascontiguousarray(value)
    for name, experts in stacks.items():
        number = next(part for part in name.split(".") if part.isdigit())
        template = name.replace(f".{number}.", ".{}.", 1)
        found[hf_to_gguf[template].format(number)] = np.stack([experts[index] for index in range(len(experts))])
    scaling = config.rope_parameters
    if scaling["rope_type"] == "llama3":
        pairs = config.head_dim // 2
        turns = 8192 * scaling["rope_theta"] ** (-np.arange(pairs) / pairs) / (2 * np.pi)
        found["rope_freqs.weight"] = np.where(turns >= 1, 1, scaling["factor"]).astype(np.float32)
    if scaling["rope_type"] == "longrope":
        for length in ("long", "short"):
            found[f"rope_factors_{length}.weight"] = np.array(scaling[f"{length}_factor"], np.float32)
    return found


def metadata_of(oracle: Any, *, arch: str) -> dict[str, object]:
    config = oracle.config
    values = {key.removeprefix(f"{arch}."): value for key, value in gguf_metadata(oracle, arch=arch).items()}
    if arch == "gemma2":
        values |= {"attention.sliding_window": config.sliding_window}
        values |= {"attn_logit_softcapping": config.attn_logit_softcapping}
        values |= {"final_logit_softcapping": config.final_logit_softcapping}
    if arch == "granite":
        values |= {
            "attention.scale": float(config.attention_multiplier),
            "embedding_scale": float(config.embedding_multiplier),
            "residual_scale": float(config.residual_multiplier),
            "logit_scale": float(config.logits_scaling),
        }
    if arch == "phi3":
        head_dim = config.hidden_size // config.num_attention_heads
        values["attention.sliding_window"] = config.sliding_window or 0
        values["rope.dimension_count"] = int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        if config.rope_parameters["rope_type"] == "longrope":
            values["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    experts = getattr(config, "num_local_experts", getattr(config, "num_experts", 0))
    if experts:
        values |= {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
    if arch == "llama":
        values["attention.sliding_window"] = config.sliding_window or 0
    if arch == "llama4":
        values["feed_forward_length"] = config.intermediate_size_mlp
        values["expert_feed_forward_length"] = config.intermediate_size
        values["interleave_moe_layer_step"] = config.interleave_moe_layer_step
    if hasattr(config, "moe_intermediate_size"):
        values["expert_feed_forward_length"] = config.moe_intermediate_size
    if hasattr(config, "shared_expert_intermediate_size"):
        values["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    return {key if key.startswith("general.") else f"{arch}.{key}": value for key, value in values.items()}


def logits_of(path: Path, ids: list[int], op_set: str = "plain", **how: Any) -> tuple[np.ndarray, Any]:
    ops = open_ops(op_set)
    try:
        model, card = load(path, ops, **how)
        return Driver(model, card=card, ops=ops).step([(0, ids)])[0], card
    finally:
        getattr(ops, "close", lambda: None)()


@pytest.mark.parametrize("op_set", OP_SETS)
@pytest.mark.parametrize(("tiny", "arch", "family"), CASES, ids=[case[0] for case in CASES])
def test_gguf_gives_the_oracles_logits(
    tmp_path: Path, tiny: str, arch: str, family: str, op_set: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tiny == "gemma2":  # GGUF has no key for the scale of queries: it follows from the head
        monkeypatch.setitem(TINY[tiny][2], "query_pre_attn_scalar", 32)
    if family == "llama4":  # nor for what its published files all have
        monkeypatch.setitem(TINY, tiny, (*TINY[tiny][:2], {**TINY[tiny][2], **AS_PUBLISHED}))
    oracle = make_tiny(tiny, tmp_path)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, metadata_of(oracle, arch=arch), tensors_of(tmp_path, oracle, family=family))
    ids = token_ids()
    got, card = logits_of(path, ids, op_set)
    assert card.family == family
    assert difference(got, oracle_logits(oracle, ids)) < 1e-4


def test_experts_of_an_old_file_are_numbered(tmp_path: Path) -> None:
    oracle = make_tiny("mixtral", tmp_path)
    path, ids = tmp_path / "tiny.gguf", token_ids(count=50)
    tensors = tensors_of(tmp_path, oracle, family="mixtral", old=True)
    assert "blk.2.ffn_gate.5.weight" in tensors
    write_gguf(path, metadata_of(oracle, arch="llama"), tensors)
    assert difference(logits_of(path, ids)[0], oracle_logits(oracle, ids)) < 1e-4
    stacked = tensors_of(tmp_path, oracle, family="mixtral")
    write_gguf(path, metadata_of(oracle, arch="llama"), {**tensors, **stacked})
    with pytest.raises(WeightsError, match=r"both hold layers.0.mlp.experts.0.(down|gate|up).weight"):
        logits_of(path, ids)


@pytest.mark.parametrize("op_set", OP_SETS)
def test_experts_in_blocks_stay_blocks(tmp_path: Path, op_set: str) -> None:
    """A mixture whose experts are cut from a stack of 4-bit blocks, down wider than gate and up, multiplied as they lie."""
    oracle = make_tiny("qwen3_moe", tmp_path)
    tensors = tensors_of(tmp_path, oracle, family="qwen3_moe")
    flat = {name: value.reshape(-1, value.shape[-1]) if value.ndim == 3 else value for name, value in tensors.items()}
    blocks = in_blocks(flat, {"ffn_down_exps": "Q8_0", "_exps": "Q4_0", "attn_": "Q8_0"})
    for name, value in tensors.items():
        if value.ndim == 3:
            blocks[name] = type(blocks[name])(name, value.shape, blocks[name].format, blocks[name].data)
    path, ids = tmp_path / "blocks.gguf", token_ids(count=60)
    write_gguf(path, metadata_of(oracle, arch="qwen3moe"), blocks)
    exact = logits_of(path, ids)[0]
    got, card = logits_of(path, ids, op_set, numerics=Numerics(compute="int8", quantization="none"))
    assert card.weight_formats["Q4_0"] == 3 * 2 * 16 * 32 * 96
    assert np.abs(got - exact).mean() / exact.std() < 0.1


def test_what_llama4_files_leave_unsaid() -> None:
    base = {
        "general.architecture": "llama4",
        "llama4.block_count": 8,
        "llama4.context_length": 1 << 20,
        "llama4.embedding_length": 64,
        "llama4.feed_forward_length": 96,
        "llama4.attention.head_count": 4,
        "llama4.attention.layer_norm_rms_epsilon": 1e-5,
        "llama4.vocab_size": 100,
        "llama4.expert_count": 128,
        "llama4.expert_used_count": 1,
        "llama4.expert_feed_forward_length": 32,
        "llama4.interleave_moe_layer_step": 2,
    }
    card = card_from_gguf(base, name="x")
    assert card.layer_windows == (8192, 8192, 8192, None) * 2
    assert card.layer_ropes == (True, True, True, False) * 2
    assert card.windows_restart
    assert card.temper == TemperFacts(every=8192, slope=0.1)
    assert not card.qk_norm
    assert card.moe is not None
    assert (card.moe.layers, card.moe.shared_intermediate, card.moe.weigh_input) == ((False, True) * 4, 32, True)
    scout = card_from_gguf({**base, "llama4.expert_count": 16}, name="x")
    assert (scout.qk_norm, scout.qk_norm_weights) == (True, False)
    full = card_from_gguf({**base, "llama4.attention.sliding_window": 0}, name="x")
    assert (full.layer_windows, all(full.layer_ropes), full.temper) == ((None,) * 8, True, None)
    with pytest.raises(CardError, match=r"llama4\.attention\.sliding_window' is 4096; it must be 8192, or 0"):
        card_from_gguf({**base, "llama4.attention.sliding_window": 4096}, name="x")


def test_what_gguf_says_of_experts_is_checked() -> None:
    base = {
        "general.architecture": "qwen3moe",
        "qwen3moe.block_count": 2,
        "qwen3moe.context_length": 64,
        "qwen3moe.embedding_length": 64,
        "qwen3moe.feed_forward_length": 96,
        "qwen3moe.attention.head_count": 4,
        "qwen3moe.attention.layer_norm_rms_epsilon": 1e-5,
        "qwen3moe.vocab_size": 100,
        "qwen3moe.expert_count": 4,
        "qwen3moe.expert_used_count": 2,
        "qwen3moe.expert_feed_forward_length": 32,
    }
    assert card_from_gguf(base, name="x").family == "qwen3_moe"
    for key, value, message in (
        ("expert_used_count", 5, "'qwen3moe.expert_used_count' is 5; it must be at most expert_count, 4"),
        ("expert_count", 0, "'qwen3moe.expert_count' is 0"),
        ("expert_feed_forward_length", None, "'qwen3moe.expert_feed_forward_length' is None"),
    ):
        with pytest.raises(CardError) as refusal:
            card_from_gguf({**base, f"qwen3moe.{key}": value}, name="x")
        assert message in str(refusal.value)
    olmo3 = {key.replace("qwen3moe", "olmo2"): "olmo2" if value == "qwen3moe" else value for key, value in base.items()}
    assert card_from_gguf(olmo3, name="x").qk_norm_whole
    with pytest.raises(CardError, match="OLMo 3 is not supported"):
        card_from_gguf({**olmo3, "olmo2.attention.sliding_window": 32}, name="x")
