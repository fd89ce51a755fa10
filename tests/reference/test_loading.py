"""Loading: what is refused and how it is said, quantising at load, and the choice of schemes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.reference.driver import Driver
from tests.reference.op_sets import OP_SETS, load, open_ops
from tests.reference.tiny import difference, make_tiny, oracle_logits, token_ids
from tradewind.contract.errors import UserError
from tradewind.kernels.plain import PlainOps
from tradewind.layers.rotary import frequencies
from tradewind.models.registry import FAMILIES, family_of
from tradewind.quantization.blocks import (
    BLOCKS,
    as_scale_min,
    dequantise,
    quantise_q4_0,
    quantise_q4_1,
    quantise_q8_0,
)
from tradewind.quantization.gguf import BITS, SYMMETRIC, quants_of
from tradewind.quantization.online import quantise
from tradewind.quantization.scheme import Numerics, choose_scheme
from tradewind.weights.checkpoint import open_checkpoint
from tradewind.weights.load import WeightsError, place_of
from tradewind.weights.tensor import RawTensor


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny("llama2", tmp_path)
    return tmp_path


def rewrite(folder: Path, change: Any) -> None:
    """Applies `change` to the dict of tensors in the folder's file."""
    file = folder / "model.safetensors"
    tensors = dict(load_file(file))
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_missing_tensor(folder: Path) -> None:
    rewrite(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(WeightsError, match=r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load(folder, PlainOps())


def test_wrong_shape(folder: Path) -> None:
    name = "model.layers.2.self_attn.k_proj.weight"
    rewrite(folder, lambda t: t.update({name: t[name][:48].copy()}))
    with pytest.raises(WeightsError, match=r"k_proj\.weight' has the shape \(48, 64\); .* asks for \(64, 64\)"):
        load(folder, PlainOps())


def test_surplus_tensors(folder: Path) -> None:
    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.0.self_attn.sinks"] = np.zeros(4, np.float32)
        tensors["model.layers.3.input_layernorm.weight"] = np.ones(64, np.float32)

    rewrite(folder, add)
    with pytest.raises(WeightsError, match=r"holds 2 tensors .*'model\.layers\.0.*sinks', 'model\.layers\.3"):
        load(folder, PlainOps())


def test_a_stored_copy_of_a_tied_head_is_no_surplus(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert "lm_head.weight" in load_file(folder / "model.safetensors")
    load(folder, PlainOps())


def test_unreadable_format(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.norm.weight": np.ones(64, np.int32)}))
    with pytest.raises(UserError, match=r"model\.norm\.weight.*I32"):
        load(folder, PlainOps())
    rewrite(folder, lambda t: t.update({"model.norm.weight": np.ones(64, np.float32)}))
    rewrite(folder, lambda t: t.update({"lm_head.weight": np.ones((163, 64), np.int8)}))
    with pytest.raises(UserError, match="I8"):
        load(folder, PlainOps())


def test_progress_ends_at_all_bytes(folder: Path) -> None:
    from tradewind.attention.backend import BACKENDS
    from tradewind.config.card_reader import card_from_hf
    from tradewind.weights.load import load_model

    checkpoint, ops = open_checkpoint(folder), PlainOps()
    card = card_from_hf(checkpoint.metadata, name="tiny", tensors=checkpoint.tensors)
    seen: list[tuple[int, int]] = []
    load_model(
        checkpoint,
        family=family_of(card),
        card=card,
        ops=ops,
        numerics=Numerics(compute="f32", quantization="none"),
        attention=BACKENDS["plain"](ops),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen)
    assert seen[-1] == (checkpoint.nbytes, checkpoint.nbytes)


def rms(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got - wanted) ** 2)) / wanted.std())


@pytest.mark.parametrize("op_set", OP_SETS)
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_numerics(tmp_path: Path, op_set: str, quantization: Any) -> None:
    """f32 compute: the oracle on weights that went through the quantiser, exactly. int8 and bf16: near it, and near `plain`."""
    oracle = make_tiny("llama2", tmp_path)
    with torch.no_grad():
        for name, weight in oracle.named_parameters():
            if weight.dim() == 2 and "embed" not in name and quantization != "none":
                bits = 4 if quantization == "int4" and "lm_head" not in name else 8
                quants, scale, minimum = quantise(weight.numpy(), bits=bits)
                weight.copy_(torch.from_numpy(np.repeat(scale, 32, 1) * quants + np.repeat(minimum, 32, 1)))
    ids = token_ids(count=64)
    wanted = oracle_logits(oracle, ids)

    def logits(op_set: str, compute: Any) -> np.ndarray:
        ops = open_ops(op_set)
        model, card = load(tmp_path, ops, numerics=Numerics(compute=compute, quantization=quantization))
        found = Driver(model, card=card, ops=ops).step([(0, ids)])[0]
        getattr(ops, "close", lambda: None)()
        return found

    assert difference(logits(op_set, "f32"), wanted) < 1e-4
    for compute in ("bf16", "int8"):
        got = logits(op_set, compute)
        assert 1e-4 < rms(got, wanted) < 0.12, compute
        if op_set != "plain":
            assert rms(got, logits("plain", compute)) < 0.03, compute


# ------------------------------------------------------------------------------------------------------------- schemes


def test_choice_of_schemes() -> None:
    def chosen(formats: list[str], compute: Any, quantization: Any = "none") -> str:
        return choose_scheme(formats, Numerics(compute=compute, quantization=quantization)).name

    assert chosen(["Q4_1"], "int8") == "gguf"
    assert chosen(["Q4_K", "Q6_K"], "int8", "int4") == "gguf"
    assert chosen(["Q4_1"], "f32") == "plain"
    assert chosen(["Q4_1", "F32"], "int8") == "plain"
    assert chosen(["BF16"], "int8", "int4") == "int4"
    assert chosen(["F16"], "f32", "int8") == "int8"
    assert chosen(["BF16"], "bf16") == "plain"
    with pytest.raises(UserError, match=r"F8_E4M3.*plain: F8_E4M3 is not read"):
        chosen(["F8_E4M3"], "int8")


@pytest.mark.parametrize(("bits", "most"), [(4, 0.09), (8, 0.006)])
def test_quantising_at_load(bits: int, most: float) -> None:
    weights = np.random.default_rng(0).standard_normal((70, 96)).astype(np.float32)
    weights[0, :32], weights[1, :32] = 0.0, 0.25
    quants, scale, minimum = quantise(weights, bits=bits)
    assert (quants.shape, scale.shape, minimum.shape) == ((70, 96), (70, 3), (70, 3))
    assert quants.max() < 1 << bits
    back = np.repeat(scale, 32, 1) * quants + np.repeat(minimum, 32, 1)
    assert np.linalg.norm(back - weights) / np.linalg.norm(weights) < most
    np.testing.assert_allclose(back[:2, :32], weights[:2, :32], rtol=1e-3)  # groups of one value
    again = quantise(weights, bits=bits)
    assert np.array_equal(scale, scale.astype(np.float16))
    assert bits == 8 or np.array_equal(minimum, minimum.astype(np.float16))
    assert all(np.array_equal(a, b) for a, b in zip(again, (quants, scale, minimum), strict=True))


def test_int4_search_beats_the_plain_range() -> None:
    weights = np.random.default_rng(1).standard_t(3, (64, 256)).astype(np.float32)
    quants, scale, minimum = quantise(weights, bits=4)
    found = np.repeat(scale, 32, 1) * quants + np.repeat(minimum, 32, 1)
    groups = weights.reshape(-1, 32)
    low, step = groups.min(1, keepdims=True), (groups.max(1, keepdims=True) - groups.min(1, keepdims=True)) / 15
    plain = np.rint((groups - low) / step) * step + low
    assert np.square(found - weights).sum() < 0.97 * np.square(plain.reshape(weights.shape) - weights).sum()


@pytest.mark.parametrize(
    ("quantiser", "format"), [(quantise_q4_0, "Q4_0"), (quantise_q4_1, "Q4_1"), (quantise_q8_0, "Q8_0")]
)
def test_common_layout_of_unlike_blocks_is_exact(quantiser: Any, format: str) -> None:
    weights = np.random.default_rng(2).standard_normal((4, 64)).astype(np.float32)
    raw = quantiser(weights).reshape(-1)
    quants, scale, minimum = quants_of(RawTensor("w", (4, 64), format, raw), bits=8, group=16)
    assert (quants.dtype, scale.shape) == (np.uint8, (4, 4))
    back = np.repeat(scale, 16, 1) * quants + np.repeat(minimum, 16, 1)
    np.testing.assert_array_equal(back, dequantise(raw, format, (4, 64)))
    assert np.array_equal(minimum, -128 * scale) == (format in SYMMETRIC)


def test_symmetric_formats_are_those_whose_minimum_follows_from_the_scale() -> None:
    random = np.random.default_rng(3)
    for format, bits in BITS.items():
        block = BLOCKS[format]
        raw = random.integers(0, 120, 8 * block.bytes_per_block).astype(np.uint8)
        _, scale, minimum, group = as_scale_min(raw, format)
        assert group == block.group
        assert np.array_equal(minimum, np.float32(-(1 << (bits - 1))) * scale) == (format in SYMMETRIC), format


# --------------------------------------------------------------------------------------------------------------- names


def test_names_are_tables_without_gaps() -> None:
    for name, family in FAMILIES.items():
        places = list(family.hf_places.values())
        assert len(set(places)) == len(places), name
        if family.gguf_names:  # encoders are not read from GGUF files
            only_hf = {hf for hf, place in family.hf_places.items() if place in family.regroup}
            assert set(family.gguf_names.values()) | only_hf == set(family.hf_places), name
        assert set(family.gguf_interleaved) | set(family.hf_interleaved) <= set(places), name


def test_place_of_a_name() -> None:
    gemma, llama = FAMILIES["gemma3"], FAMILIES["llama"]
    assert place_of("blk.17.attn_q.weight", family=llama, gguf=True) == "layers.17.attention.q.weight"
    assert place_of("model.layers.3.mlp.up_proj.weight", family=llama, gguf=False) == "layers.3.mlp.up.weight"
    assert place_of("model.layers.3.mlp.up_proj.weight", family=llama, gguf=True) is None
    assert place_of("blk.3.attn_q_norm.weight", family=llama, gguf=True) is None
    for inner in ("model.language_model.", "language_model.model."):
        name = f"{inner}layers.2.post_feedforward_layernorm.weight"
        assert place_of(name, family=gemma, gguf=False) == "layers.2.mlp_out_norm.weight"


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize(("theta", "dims"), [(10000.0, 64), (500000.0, 128)])
def test_rope_frequencies_are_transformers(kind: str, theta: float, dims: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from tradewind.config.card_reader import card_from_hf

    values: dict[str, Any] = {"rope_type": kind, "rope_theta": theta}
    if kind != "default":
        values["factor"] = 8.0
    if kind == "llama3":
        values |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = 4096
    config = LlamaConfig(
        hidden_size=2 * dims, num_attention_heads=2, max_position_embeddings=32768, rope_parameters=values
    )
    card = card_from_hf(config.to_dict(), name="rope")
    got, scale = frequencies(card.rope, head_dim=dims)
    if kind == "default":
        wanted, factor = theta ** -(np.arange(0, dims, 2) / dims), 1.0
    else:
        wanted, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    np.testing.assert_allclose(got, np.asarray(wanted), rtol=2e-6)
    assert scale == pytest.approx(factor)
