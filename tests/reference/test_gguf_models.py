"""GGUF files: the same tiny weights by the GGUF path and by the Hugging Face path, plain and in blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reference.driver import Driver
from tests.reference.op_sets import OP_SETS, load, open_ops
from tests.reference.tiny import difference, make_tiny, oracle_logits, token_ids
from tradewind.models.registry import FAMILIES
from tradewind.quantization.blocks import dequantise, quantise_q4_0, quantise_q4_1, quantise_q8_0
from tradewind.quantization.scheme import Numerics
from tradewind.weights.gguf import write_gguf
from tradewind.weights.tensor import RawTensor

QUANTISE = {"Q4_0": quantise_q4_0, "Q4_1": quantise_q4_1, "Q8_0": quantise_q8_0}
INT8 = Numerics(compute="int8", quantization="none")


def gguf_tensors(oracle: Any, *, arch: str) -> dict[str, np.ndarray]:
    """The oracle's weights under GGUF names, as converters write them: llama's q and k rows interleaved, Gemma's norms plus one."""
    config = oracle.config
    state = {name: value.detach().numpy() for name, value in oracle.state_dict().items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    names = {hf.format(i): gguf.format(i) for gguf, hf in FAMILIES[arch].gguf_names.items() for i in range(8)}
    tensors = {}
    for name, value in state.items():
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        if arch == "gemma3" and "norm" in name:
            value = value + 1
        tensors[names[name]] = np.ascontiguousarray(value)
    return tensors


def gguf_metadata(oracle: Any, *, arch: str) -> dict[str, object]:
    config = oracle.config
    values: dict[str, object] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    head_dim = getattr(config, "head_dim", None)
    if head_dim:
        values |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    values["rope.freq_base"] = float(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if arch == "gemma3":
        values |= {"attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": 3}
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in values.items()}}


def in_blocks(tensors: dict[str, np.ndarray], format_of: dict[str, str]) -> dict[str, Any]:
    """The matrices named by a part of their name in block formats ("" for the rest), vectors as float32."""
    written: dict[str, Any] = {}
    for name, value in tensors.items():
        format = next((format for part, format in format_of.items() if part in name), None)
        if value.ndim == 2 and format is not None:
            data = np.ascontiguousarray(QUANTISE[format](value)).reshape(-1)
            written[name] = RawTensor(name, value.shape, format, data)
        else:
            written[name] = value
    return written


@pytest.mark.parametrize("op_set", OP_SETS)
@pytest.mark.parametrize(
    ("tiny", "arch"),
    [
        ("gemma3_for_gguf", "gemma3"),
        ("llama2", "llama"),
        ("llama_biases", "llama"),
        ("llama_linear_rope", "llama"),
        ("llama_yarn", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("smollm2", "llama"),
    ],
)
def test_float_gguf_gives_the_oracles_logits(tmp_path: Path, tiny: str, arch: str, op_set: str) -> None:
    oracle = make_tiny(tiny, tmp_path / "hf")
    write_gguf(tmp_path / "tiny.gguf", gguf_metadata(oracle, arch=arch), gguf_tensors(oracle, arch=arch))
    ops = open_ops(op_set)
    model, card = load(tmp_path / "tiny.gguf", ops)
    ids = token_ids()
    logits = Driver(model, card=card, ops=ops).step([(0, ids)])[0]
    assert difference(logits, oracle_logits(oracle, ids)) < 1e-4


MIXTURES = {
    "all Q4_0": {"": "Q4_0"},
    "all Q8_0": {"": "Q8_0"},
    "layers Q4_1, embedding Q8_0": {"token_embd": "Q8_0", "output.weight": "Q8_0", "": "Q4_1"},
    "v and up wider than their partners": {"attn_v": "Q8_0", "ffn_up": "Q8_0", "": "Q4_0"},
    "v in floats beside blocks": {"attn_q": "Q4_0", "attn_k": "Q4_0", "ffn_gate": "Q8_0"},
}


@pytest.mark.parametrize("op_set", OP_SETS)
@pytest.mark.parametrize("mixture", sorted(MIXTURES))
def test_blocks(tmp_path: Path, mixture: str, op_set: str) -> None:
    """f32 compute: the oracle on the dequantised weights, exactly. int8 compute: near it, as far as rounded activations allow."""
    arch, oracle = "llama", make_tiny("llama_biases", tmp_path / "hf")
    tensors = gguf_tensors(oracle, arch=arch)
    blocks = in_blocks(tensors, MIXTURES[mixture])
    write_gguf(tmp_path / "blocks.gguf", gguf_metadata(oracle, arch=arch), blocks)
    floats = {
        name: dequantise(value.data, value.format, value.shape) if isinstance(value, RawTensor) else value
        for name, value in blocks.items()
    }
    write_gguf(tmp_path / "floats.gguf", gguf_metadata(oracle, arch=arch), floats)
    ids = token_ids()

    def logits(name: str, numerics: Numerics, op_set: str) -> np.ndarray:
        ops = open_ops(op_set)
        model, card = load(tmp_path / name, ops, numerics=numerics)
        return Driver(model, card=card, ops=ops).step([(0, ids)])[0]

    exact = Numerics(compute="f32", quantization="none")
    wanted = logits("floats.gguf", exact, "plain")
    assert difference(logits("blocks.gguf", exact, op_set), wanted) < 1e-4
    rounded = logits("blocks.gguf", INT8, op_set)
    rms = np.sqrt(np.mean((rounded - wanted) ** 2)) / wanted.std()
    assert rms < 0.05
    assert difference(rounded, logits("blocks.gguf", INT8, "plain")) < 0.1
