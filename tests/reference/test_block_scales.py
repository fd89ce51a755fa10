"""FP8 checkpoints with scales by blocks, and layers beyond the model's: the tiny DeepSeek-V3 as its published files are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.reference import tiny
from tests.reference.driver import Driver
from tests.reference.op_sets import OP_SETS, load, open_ops
from tradewind.weights.block_scales import BLOCK, BlockScalesError, dequantised, e4m3_values
from tradewind.weights.load import WeightsError, beyond_layers
from tradewind.weights.tensor import RawTensor

NAMES = ("deepseek_v3", "qwen3", "qwen3_moe")


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as e4m3 with a scale for each block, by torch."""
    blocks = [-(-size // BLOCK) for size in weight.shape]
    stored, scales = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(*blocks)
    for row in range(blocks[0]):
        for column in range(blocks[1]):
            at = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
            scales[row, column] = weight[at].abs().max() / 448
            stored[at] = (weight[at] / scales[row, column]).to(torch.float8_e4m3fn)
    return stored, scales


def as_float(stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What such a matrix means."""
    each = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return stored.float() * each[: stored.shape[0], : stored.shape[1]]


def fp8_checkpoint(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tiny model, wide enough for several blocks, its matrices in fp8; returns the oracle with the same values."""
    monkeypatch.setitem(tiny.BASE, "hidden_size", 192)
    monkeypatch.setitem(tiny.BASE, "intermediate_size", 160)
    make_model, make_config, values = tiny.TINY[name]
    monkeypatch.setitem(tiny.TINY, name, (make_model, make_config, {**values, "hidden_size": 192}))
    tiny.make_tiny(name, folder)
    tensors, exact = load_file(folder / "model.safetensors"), {}
    for key in list(tensors):
        if key.endswith("_proj.weight") or "kv_a_proj" in key:
            tensors[key], tensors[f"{key}_scale_inv"] = quantised(tensors[key])
            exact[key] = as_float(tensors[key], tensors[f"{key}_scale_inv"])
    plain = {key: exact.get(key, tensor) for key, tensor in tensors.items() if not key.endswith("_scale_inv")}
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    oracle = make_model.from_pretrained(folder, attn_implementation="eager").eval().float()
    if name == "deepseek_v3":  # one more layer, which guesses further tokens
        for key in [key for key in tensors if key.startswith("model.layers.2.")]:
            tensors[key.replace("layers.2.", "layers.3.")] = tensors[key].clone()
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(192, 384)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return oracle


@pytest.mark.parametrize("name", NAMES)
def test_fp8_blocks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle, ids = fp8_checkpoint(name, tmp_path, monkeypatch), tiny.token_ids(count=60)
    wanted = tiny.oracle_logits(oracle, ids)
    for op_set in OP_SETS:
        ops = open_ops(op_set)
        try:
            model, card = load(tmp_path, ops)
            got = Driver(model, card=card, ops=ops).step([(0, ids)])[0]
        finally:
            getattr(ops, "close", lambda: None)()
        assert tiny.difference(got, wanted) < 1e-4
    assert card.weight_formats["F8_E4M3"] > 0.8 * card.parameters


def test_every_e4m3_number() -> None:
    bytes_ = torch.arange(256, dtype=torch.uint8)
    assert np.array_equal(e4m3_values(), bytes_.view(torch.float8_e4m3fn).float().numpy(), equal_nan=True)


def raw(name: str, values: torch.Tensor) -> RawTensor:
    format = "F8_E4M3" if values.dtype == torch.float8_e4m3fn else "F32"
    return RawTensor(name, tuple(values.shape), format, values.view(torch.uint8).numpy().reshape(-1))


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (130, 257), (300, 64)])
def test_values_of_any_shape(shape: tuple[int, int]) -> None:
    stored, scales = quantised(torch.from_numpy(np.random.default_rng(0).standard_normal(shape).astype(np.float32)))
    made: Any = dequantised({"w": raw("w", stored), "w_scale_inv": raw("w_scale_inv", scales)})
    assert list(made) == ["w"]
    assert (made["w"].shape, made["w"].format) == (shape, "F32")
    got = made["w"].made().data.view(np.float32).reshape(shape)
    assert np.array_equal(got, as_float(stored, scales).numpy())


def test_scales_that_do_not_fit_are_refused() -> None:
    stored, scales = quantised(torch.ones(130, 64))
    matrix, beside = raw("w", stored), raw("w_scale_inv", scales)
    with pytest.raises(BlockScalesError, match="'w' is F8_E4M3 without scales"):
        dequantised({"w": matrix})
    with pytest.raises(BlockScalesError, match="'w_scale_inv' has no matrix"):
        dequantised({"w_scale_inv": beside})
    with pytest.raises(BlockScalesError, match="F32 with one scale for 128 x 128"):
        dequantised({"w": matrix, "w_scale_inv": raw("w_scale_inv", scales[:1])})
    with pytest.raises(BlockScalesError, match="are F32 of"):
        dequantised({"w": raw("w", torch.ones(130, 64)), "w_scale_inv": beside})


def test_layers_beyond_the_models_are_those_of_that_prefix() -> None:
    assert beyond_layers("model.layers.61.mlp.w", "model.layers.", layers=61)
    assert not beyond_layers("model.layers.60.mlp.w", "model.layers.", layers=61)
    assert not beyond_layers("model.layers.61.mlp.w", "", layers=61)
    assert not beyond_layers("model.norm.weight", "model.layers.", layers=0)


def test_a_layer_too_many_is_refused_elsewhere(tmp_path: Path) -> None:
    """Only the family that publishes such layers leaves them alone."""
    tiny.make_tiny("deepseek_v2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.3.input_layernorm.weight"] = torch.ones(64)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"no place for: 'model.layers.3.input_layernorm.weight'"):
        load(tmp_path, open_ops("plain"))
