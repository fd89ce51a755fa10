"""Tensors in another form than the model wants: cut, transposed, alternating, 4-bit floats; and a gpt-oss checkpoint as it is published."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.reference.driver import Driver
from tests.reference.op_sets import OP_SETS, load, open_ops
from tests.reference.tiny import difference, make_tiny, oracle_logits, token_ids
from tradewind.config.card import ModelCard, MoeFacts
from tradewind.config.card_reader import card_from_hf
from tradewind.models.registry import FAMILIES
from tradewind.weights.checkpoint import open_checkpoint
from tradewind.weights.load import WeightsError
from tradewind.weights.regroup import RegroupError, fp4_values, pairs_by_exponent, regrouped
from tradewind.weights.split import SplitError, parts_of
from tradewind.weights.tensor import RawTensor

CARD = ModelCard(
    name="x", family="x", source="hf", vocab_size=8, hidden=8, layers=1, heads=4, kv_heads=2, head_dim=2, intermediate=6,
    max_positions=8, norm_eps=1e-5, tied_embeddings=False, moe=MoeFacts(experts=3, per_token=1, intermediate=5, layers=(True,)),
)  # fmt: skip


def raw(values: Any, format: str = "F32") -> RawTensor:
    return RawTensor("it", values.shape, format, np.ascontiguousarray(values).view(np.uint8).reshape(-1))


def floats(tensor: RawTensor) -> Any:
    return tensor.data.view(np.float32).reshape(tensor.shape)


# ------------------------------------------------------------------------------------------------------------------------- cut


def test_rows_are_cut_in_proportion() -> None:
    whole = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    fused = {"layers.{}.qkv.weight": {"layers.{}.q": "heads", "layers.{}.k": "kv_heads", "layers.{}.v": "kv_heads"}}
    parts = parts_of(raw(whole), "layers.7.qkv.weight", fused=fused, card=CARD)
    assert list(parts) == ["layers.7.q", "layers.7.k", "layers.7.v"]
    assert np.array_equal(np.concatenate([floats(part) for part in parts.values()]), whole)
    assert [part.shape for part in parts.values()] == [(8, 8), (4, 8), (4, 8)]
    assert all(np.shares_memory(part.data, next(iter(parts.values())).data.base) for part in parts.values())
    # a vector too, and a place without a row
    assert [p.shape for p in parts_of(raw(whole[:, 0]), "layers.0.qkv.weight", fused=fused, card=CARD).values()] == [
        (8,),
        (4,),
        (4,),
    ]
    assert list(parts_of(raw(whole), "layers.0.other", fused=fused, card=CARD)) == ["layers.0.other"]
    with pytest.raises(SplitError, match=r"shape \(15, 8\), which cannot be cut into 3 parts of 4 : 2 : 2 rows"):
        parts_of(raw(whole[:15]), "layers.0.qkv.weight", fused=fused, card=CARD)


def test_a_part_knows_where_it_lies_in_the_file(tmp_path: Path) -> None:
    """So that it can be read without the mapping."""
    file = tmp_path / "bytes"
    whole = np.arange(12 * 4, dtype=np.float32).reshape(12, 4)
    file.write_bytes(b"head" + whole.tobytes())
    tensor = replace(raw(whole), file=file, offset=4)
    fused = {"layers.{}.gate_up": {"layers.{}.gate": "intermediate", "layers.{}.up": "intermediate"}}
    for part in parts_of(tensor, "layers.1.gate_up", fused=fused, card=CARD).values():
        assert part.file is not None
        assert part.file.read_bytes()[part.offset : part.offset + part.nbytes] == part.data.tobytes()


def test_experts_are_cut_from_their_stack() -> None:
    stack = np.arange(3 * 10 * 4, dtype=np.float32).reshape(3, 10, 4)
    fused = {"l.{}.gate_up.w": {"l.{}.e.{}.gate.w": "moe.intermediate", "l.{}.e.{}.up.w": "moe.intermediate"}}
    parts = parts_of(raw(stack), "l.2.gate_up.w", fused=fused, card=CARD)
    assert len(parts) == 6
    for expert in range(3):
        assert np.array_equal(floats(parts[f"l.2.e.{expert}.gate.w"]), stack[expert, :5])
        assert np.array_equal(floats(parts[f"l.2.e.{expert}.up.w"]), stack[expert, 5:])


# -------------------------------------------------------------------------------------------------------------------- regrouped


def test_columns_and_alternating_vectors() -> None:
    rng = np.random.default_rng(0)
    matrix, vector = rng.normal(size=(3, 4, 10)).astype(np.float32), rng.normal(size=(3, 10)).astype(np.float32)
    table = {
        "l.{}.m": ("columns", ("l.{}.e.{}.gate.w", "l.{}.e.{}.up.w")),
        "l.{}.v": ("alternate", ("l.{}.e.{}.gate.b", "l.{}.e.{}.up.b")),
    }
    at = regrouped({"l.5.m": raw(matrix), "l.5.v": raw(vector), "l.5.n": raw(vector)}, table)
    assert len(at) == 13
    for expert in range(3):
        for index, part in enumerate(("gate", "up")):
            made: Any = at[f"l.5.e.{expert}.{part}.w"]
            assert made.shape == (5, 4)
            assert np.array_equal(floats(made.made()), matrix[expert, :, index::2].T)
            made = at[f"l.5.e.{expert}.{part}.b"]
            assert np.array_equal(floats(made.made()), vector[expert, index::2])
    spans = regrouped({"l.5.m": raw(matrix)}, {"l.{}.m": ("spans", table["l.{}.m"][1])})
    for expert in range(3):
        for index, part in enumerate(("gate", "up")):
            made = spans[f"l.5.e.{expert}.{part}.w"]
            assert made.shape == (5, 4)
            assert made.nbytes == matrix.nbytes // 6
            assert np.array_equal(floats(made.made()), matrix[expert, :, 5 * index : 5 * index + 5].T)
    for form in ("columns", "spans"):
        with pytest.raises(RegroupError, match="in 3 axes, the last a multiple of 2"):
            regrouped({"l.5.m": raw(matrix[..., :9])}, {"l.{}.m": (form, table["l.{}.m"][1])})
    with pytest.raises(RegroupError, match="is U8 of shape"):
        regrouped({"l.5.v": raw(np.zeros((3, 4), np.uint8), "U8")}, table)


def test_fp4_is_the_published_table() -> None:
    """Every code under every scale, against `transformers`; and every value is exact."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    exponents = np.random.default_rng(0).integers(100, 150, (1, 16)).astype(np.uint8)
    got = fp4_values(codes, exponents).view(np.uint16).astype(np.uint32) << 16
    wanted = convert_moe_packed_tensors(
        torch.from_numpy(codes)[None], torch.from_numpy(exponents)[None], dtype=torch.float32
    )[0]  # [K, N]: as the model multiplies
    assert np.array_equal(got.view(np.float32).reshape(1, 512), wanted.numpy().T)
    table = (pairs_by_exponent()[1:253].astype(np.uint64) & 0xFFFF).astype(np.uint32) << 16
    # from 1 on no value is too small for 8 significant bits, up to 252 none is too large
    ratio = table.view(np.float32)[:, 7].astype(np.float64) / 2.0 ** (np.arange(1, 253) - 127)
    assert (ratio == 6).all()


def mxfp4_checkpoint(folder: Path) -> Any:
    """The tiny gpt-oss with experts as random 4-bit floats, as the published files have them; returns the oracle with the same values."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    oracle = make_tiny("gpt_oss", folder)
    tensors = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(1)
    for layer, block in enumerate(oracle.model.layers):
        for part in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{part}"
            experts, k, n = tensors.pop(name).shape
            codes = rng.integers(0, 256, (experts, n, k // 32, 16), np.uint8)
            exponents = rng.integers(122, 126, (experts, n, k // 32)).astype(np.uint8)
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = codes, exponents
            values = convert_moe_packed_tensors(
                torch.from_numpy(codes), torch.from_numpy(exponents), dtype=torch.float32
            )
            getattr(block.mlp.experts, part).data = values
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return oracle


@pytest.mark.parametrize("name", OP_SETS)
def test_gpt_oss_with_4_bit_experts(name: str, tmp_path: Path) -> None:
    oracle, ids = mxfp4_checkpoint(tmp_path), token_ids(count=60)
    ops = open_ops(name)
    try:
        model, card = load(tmp_path, ops)
        got = Driver(model, card=card, ops=ops).step([(0, ids)])[0]
    finally:
        getattr(ops, "close", lambda: None)()
    assert difference(got, oracle_logits(oracle, ids)) < 1e-4
    assert card.moe is not None
    assert card.weight_formats["MXFP4"] == 3 * 5 * 3 * 64 * 96  # layers, experts, matrices
    assert card.parameters == sum(parameter.numel() for parameter in oracle.parameters())


def test_what_is_missing_is_named_as_in_the_file(tmp_path: Path) -> None:
    mxfp4_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.experts.down_proj_"
    ops = open_ops("plain")
    for missing, error, message in (
        ("scales", RegroupError, f"tensor '{name}blocks' has no scales beside it"),
        ("bias", WeightsError, f"has no tensor '{name}bias'"),
    ):
        save_file({key: value for key, value in tensors.items() if key != name + missing}, path)
        with pytest.raises(error, match=message):
            load(tmp_path, ops)


def test_other_quantisations_stay_refused(tmp_path: Path) -> None:
    make_tiny("gpt_oss", tmp_path)
    config = dict(open_checkpoint(tmp_path).metadata)
    assert card_from_hf({**config, "quantization_config": {"quant_method": "mxfp4"}}, name="x").family == "gpt_oss"
    with pytest.raises(Exception, match="'awq' are not supported"):
        card_from_hf({**config, "quantization_config": {"quant_method": "awq"}}, name="x")
    with pytest.raises(Exception, match="'mxfp4' are not supported"):
        card_from_hf({**config, "model_type": "llama", "quantization_config": {"quant_method": "mxfp4"}}, name="x")


def test_tables_name_places_that_models_ask_for() -> None:
    """Every whole is a place, and no part is cut again."""
    for name, family in FAMILIES.items():
        places = set(family.hf_places.values())
        for whole, parts in [*family.fused.items(), *((at, parts) for at, (_, parts) in family.regroup.items())]:
            assert whole in places, name
            assert not set(family.fused) & set(parts), name
        assert msgspec.json.encode({"fused": family.fused, "regroup": family.regroup}), "tables are data"
