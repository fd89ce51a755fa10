"""Dummy weights: a description is enough, activations stay in range, two runs are equal, and devices draw their own."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from tests.reference.driver import Driver
from tests.reference.op_sets import EXACT, OP_SETS, open_ops
from tests.reference.tiny import TINY, make_tiny, token_ids
from tradewind.assemble import make_ops, make_plan
from tradewind.attention.backend import BACKENDS
from tradewind.config.card import ModelCard
from tradewind.config.card_reader import card_from_hf
from tradewind.config.choices import reads_weights
from tradewind.config.goals import Goals, LoadFormat, Means
from tradewind.contract.errors import UserError
from tradewind.kernels.ops import Ops
from tradewind.kernels.plain import PlainOps
from tradewind.models.registry import family_of
from tradewind.quantization.scheme import Numerics
from tradewind.weights.checkpoint import CheckpointError, open_checkpoint
from tradewind.weights.dummy import FILLS, DummyWeights, load_dummy


def describe(folder: Path) -> ModelCard:
    """The card of a folder's description, without looking at weights."""
    checkpoint = open_checkpoint(folder, weights=False)
    return card_from_hf(checkpoint.metadata, name="dummy", tensors=checkpoint.tensors or None)


def only_config(folder: Path, name: str) -> ModelCard:
    make_tiny(name, folder)
    for file in folder.iterdir():
        if file.name != "config.json":
            file.unlink()
    return describe(folder)


def build(card: ModelCard, ops: Ops, numerics: Numerics = EXACT, *, seed: int = 0, load_format: str = "dummy") -> Any:
    attention = BACKENDS[ops.name](ops)
    return load_dummy(
        family=family_of(card),
        card=card,
        ops=ops,
        numerics=numerics,
        attention=attention,
        seed=seed,
        load_format=load_format,
    )


def test_config_alone_is_a_description(tmp_path: Path) -> None:
    make_tiny("smollm2", tmp_path)
    with_weights = open_checkpoint(tmp_path)
    card, whole = (
        describe(tmp_path),
        card_from_hf(with_weights.metadata, name="dummy", tensors=with_weights.tensors),
    )
    assert card.parameters == whole.parameters
    assert card.weight_bytes == whole.weight_bytes
    (tmp_path / "model.safetensors").write_bytes(b"damaged, and not looked at")
    assert describe(tmp_path) == card
    (tmp_path / "model.safetensors").unlink()
    assert describe(tmp_path) == card
    bare = open_checkpoint(tmp_path, weights=False)
    assert (bare.kind, bare.tensors, bare.nbytes, bare.tokenizer_json) == ("hf", {}, 0, None)
    bare.let_go()
    with pytest.raises(CheckpointError, match="holds neither"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        open_checkpoint(tmp_path, weights=False)


@pytest.mark.parametrize("name", ["deepseek_v2", "gemma3", "llama_biases", "mistral", "qwen2_5_tied", "qwen3"])
def test_every_family_runs_in_range(tmp_path: Path, name: str) -> None:
    assert name in TINY
    card = only_config(tmp_path, name)
    ops = open_ops("plain")
    logits = Driver(build(card, ops), card=card, ops=ops).step([(0, token_ids(count=48))])[0]
    assert np.isfinite(logits).all()
    assert 0.2 < logits.std() < 5
    again = Driver(build(card, ops), card=card, ops=ops).step([(0, token_ids(count=48))])[0]
    assert np.array_equal(logits, again)
    other = Driver(build(card, ops, seed=1), card=card, ops=ops).step([(0, token_ids(count=48))])[0]
    assert not np.allclose(logits, other)


@pytest.mark.parametrize("op_set", OP_SETS)
@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_op_sets_get_the_same_weights(tmp_path: Path, op_set: str, quantization: Any) -> None:
    card = only_config(tmp_path, "llama3")
    numerics = Numerics(compute="f32", quantization=quantization)
    ids = token_ids(count=32)
    reference = open_ops("plain")
    wanted = Driver(build(card, reference, numerics), card=card, ops=reference).step([(0, ids)])[0]
    ops = open_ops(op_set)
    got = Driver(build(card, ops, numerics), card=card, ops=ops).step([(0, ids)])[0]
    getattr(ops, "close", lambda: None)()
    np.testing.assert_allclose(got, wanted, atol=1e-4 * wanted.std())


def test_spreads() -> None:
    card = ModelCard(
        name="x", family="llama", source="hf", vocab_size=1000, hidden=256, layers=8, heads=4, kv_heads=4, head_dim=64,
        intermediate=512, max_positions=64, norm_eps=1e-5, tied_embeddings=False,
    )  # fmt: skip
    ops = PlainOps()
    weights = DummyWeights(card=card, ops=ops, numerics=EXACT)
    layer = weights.at("layers.3")
    attention = layer.at("attention")
    assert ops.host(attention.matrix({"q": 256, "k": 64}, k=256).data[0]).std() == pytest.approx(256**-0.5, rel=0.02)
    assert ops.host(attention.matrix({"output": 256}, k=256).data[0]).std() == pytest.approx(1 / 64, rel=0.02)
    assert ops.host(layer.at("mlp").matrix({"down": 256}, k=512).data[0]).std() == pytest.approx(
        (512 * 16) ** -0.5, rel=0.02
    )
    norm = ops.host(layer.vector({"attention_norm.weight": 256}, offset=1.0))
    assert norm.mean() == pytest.approx(1, abs=0.05)
    assert norm.std() == pytest.approx(0.1, rel=0.2)
    assert abs(ops.host(attention.vector({"q.bias": 256})).mean()) < 0.01
    first, other = (ops.host(weights.at(f"layers.{i}").matrix({"q": 64}, k=64).data[0]) for i in (0, 1))
    assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 0.05
    whole = ops.host(weights.rows("embedding", rows=5000, cols=256).data)  # more than one piece
    assert whole.std() == pytest.approx(1 / 16, rel=0.02)
    tied = ops.host(weights.matrix({"embedding": 5000}, k=256, sensitive=True).data[0])
    assert np.array_equal(tied, whole)


@dataclass
class Drawing(PlainOps):
    """An op set that draws for itself, and writes down what it was asked for."""

    asked: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def random_matrix(self, n: int, k: int, *, layout: str, gated: bool, seed: int, scale: float, uniform: bool) -> Any:
        assert not uniform
        self.asked.append(("matrix", n, k, layout, gated, seed, round(scale, 6)))
        values = np.random.default_rng(seed).standard_normal((n, k), np.float32) * np.float32(scale)
        if gated:
            gate, up = (self.pack_matrix(half, compute="bf16") for half in np.split(values, 2))
            return self.pack_gated(gate, up)
        return self.pack_matrix(values, compute="bf16")

    def random_rows(self, rows: int, cols: int, *, seed: int, scale: float, uniform: bool) -> Any:
        assert not uniform
        self.asked.append(("rows", rows, cols, seed))
        values = np.random.default_rng(seed).standard_normal((rows, cols), np.float32) * np.float32(scale)
        return self.row_table(values.view(np.uint8), "F32", rows=rows, cols=cols)

    def matrix_of_rows(self, table: Any) -> Any:
        self.asked.append(("tied", table.rows, table.cols))
        return self.pack_matrix(self.host(table.data), compute="bf16")


def test_a_device_draws_its_own(tmp_path: Path) -> None:
    make_tiny("qwen2_5_tied", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 165}))
    card = describe(tmp_path)
    ops = Drawing()
    model = build(card, ops, Numerics(compute="bf16", quantization="fp8"))
    kinds = [(kind, *sizes[:4]) for kind, *sizes in ops.asked]
    layer = [
        ("matrix", 128, 64, "fp8", False),  # q, k, v
        ("matrix", 64, 64, "fp8", False),
        ("matrix", 192, 64, "fp8", True),  # gate and up: n counts both
        ("matrix", 64, 96, "fp8", False),
    ]
    assert [kind[:5] for kind in kinds[1:]] == [*layer * 3, ("tied", 165, 64)]
    assert kinds[0][:3] == ("rows", 165, 64)
    seeds = [asked[5] for asked in ops.asked if asked[0] == "matrix"]
    assert len(set(seeds)) == len(seeds)
    logits = Driver(model, card=card, ops=ops).step([(0, token_ids(count=8))])[0]
    assert np.isfinite(logits).all()


def test_fp8_leaves_odd_matrices_alone() -> None:
    card = ModelCard(
        name="x", family="llama", source="hf", vocab_size=100, hidden=72, layers=1, heads=4, kv_heads=4, head_dim=16,
        intermediate=64, max_positions=64, norm_eps=1e-5, tied_embeddings=False,
    )  # fmt: skip
    ops = Drawing()
    weights = DummyWeights(card=card, ops=ops, numerics=Numerics(compute="bf16", quantization="fp8"))
    weights.matrix({"q": 64}, k=72)
    weights.matrix({"head": 112}, k=64, sensitive=True)
    weights.matrix({"q": 64, "k": 64}, k=64)
    assert [asked[3] for asked in ops.asked] == ["bf16", "bf16", "fp8"]


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_the_cuda_op_set_draws_its_own(tmp_path: Path, quantization: Any) -> None:
    cuda = pytest.importorskip("tradewind.kernels.triton.ops")
    card = only_config(tmp_path, "qwen2_5_tied")
    ops = cuda.CudaOps(device="cpu")
    numerics = Numerics(compute="bf16", quantization=quantization)
    models: list[Any] = [
        load_dummy(family=family_of(card), card=card, ops=ops, numerics=numerics, attention=None) for _ in range(2)
    ]
    for model in models:
        down = model.layers[0].mlp.down.weight
        assert (down.layout, down.n, down.k) == ("bf16" if quantization == "none" else "fp8", 64, 96)
        assert model.layers[0].mlp.gate_up.weight.gated
        assert model.head.weight.data[0].data_ptr() == model.embedding.table.data.data_ptr()
    first, second = (model.layers[2].attention.qkv.weight.data[0].float() for model in models)
    assert np.array_equal(first.numpy(), second.numpy())


def test_an_encoder(tmp_path: Path) -> None:
    config = {
        "model_type": "bert", "vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "max_position_embeddings": 40, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    card = describe(tmp_path)
    model = build(card, PlainOps())
    assert len(model.layers) == 2


# --------------------------------------------------------------------------------------------------------- other fills


def test_every_load_format_that_reads_nothing_has_a_fill() -> None:
    assert list(FILLS) == [name for name in get_args(LoadFormat) if not reads_weights(name)]
    assert reads_weights(None)


def test_flat_weights_are_uniform_everywhere() -> None:
    card = ModelCard(
        name="x", family="llama", source="hf", vocab_size=1000, hidden=256, layers=8, heads=4, kv_heads=4, head_dim=64,
        intermediate=512, max_positions=64, norm_eps=1e-5, tied_embeddings=False,
    )  # fmt: skip
    ops = PlainOps()
    weights = DummyWeights(card=card, ops=ops, numerics=EXACT, fill=FILLS["dummy-flat"])
    layer = weights.at("layers.3").unquantised()
    for values in (
        ops.host(layer.at("attention").matrix({"q": 256, "k": 64}, k=256).data[0]),
        ops.host(layer.at("mlp").matrix({"down": 256}, k=512).data[0]),
        ops.host(layer.vector({"attention_norm.weight": 2048}, offset=1.0)),
        ops.host(layer.vector({"q.bias": 2048})),
        layer.floats("router", (16, 256)),
        ops.host(weights.rows("embedding", rows=5000, cols=256).data),
    ):
        assert np.abs(values).max() <= np.float32(1e-3)
        assert values.std() == pytest.approx(1e-3 / 3**0.5, rel=0.05)
        assert abs(values.mean()) < 1e-4
    tied = ops.host(weights.matrix({"embedding": 5000}, k=256, sensitive=True).data[0])
    assert np.array_equal(tied, values)


@pytest.mark.parametrize("quantization", ["none", "int4", "int8"])
@pytest.mark.parametrize("name", ["deepseek_v3", "gemma3", "gpt_oss", "qwen3"])
def test_models_of_flat_weights_run(tmp_path: Path, name: str, quantization: Any) -> None:
    card = only_config(tmp_path, name)
    for op_set in OP_SETS:
        ops = open_ops(op_set)
        model = build(card, ops, Numerics(compute="f32", quantization=quantization), load_format="dummy-flat")
        logits = Driver(model, card=card, ops=ops).step([(0, token_ids(count=48))])[0]
        getattr(ops, "close", lambda: None)()
        assert np.isfinite(logits).all() and 0 < logits.std() < 1e-2


@pytest.mark.parametrize("layout", ["bf16", "fp8", "fp8_block"])
def test_the_cuda_op_set_draws_flat_weights(layout: str) -> None:
    cuda = pytest.importorskip("tradewind.kernels.triton.ops")
    ops = cuda.CudaOps(device="cpu")
    first, again = (
        ops.random_matrix(256, 384, layout=layout, gated=True, seed=3, scale=1e-3, uniform=True) for _ in range(2)
    )
    assert (first.layout, first.gated) == (layout, True)
    values, scales = first.data[0].float(), first.data[1].float() if len(first.data) > 1 else None
    assert values.equal(again.data[0].float())
    if layout == "fp8_block":
        values = values * scales.repeat_interleave(256 // len(scales), 0).repeat_interleave(128, 1)
    elif layout == "fp8":
        values = values * scales.reshape(-1, 1)
    assert 0.98e-3 < float(values.abs().max()) < 1.005e-3
    assert float(values.std()) == pytest.approx(1e-3 / 3**0.5, rel=0.02) and abs(float(values.mean())) < 1e-5
    rows = ops.random_rows(100, 64, seed=4, scale=1e-3, uniform=True).data.float()
    assert float(rows.abs().max()) < 1.005e-3 and len(rows.unique()) > 500


@pytest.mark.parametrize("op_set", OP_SETS)
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "gpt_oss", "qwen2_moe_some", "qwen3_moe"])
def test_one_route_sends_every_token_to_the_same_experts(
    tmp_path: Path, name: str, op_set: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = only_config(tmp_path, name)
    assert card.moe is not None
    ops: Any = open_ops(op_set)
    routes: list[Any] = []
    route = ops.route

    def watched(logits: Any, routing: Any, *, ids: Any, count: Any, **more: Any) -> None:
        route(logits, routing, ids=ids, count=count, **more)
        routes.append(np.array(ops.host(ids))[:48])

    monkeypatch.setattr(ops, "route", watched)
    logits = Driver(build(card, ops, load_format="dummy-one-route"), card=card, ops=ops).step(
        [(0, token_ids(count=48))]
    )[0]
    getattr(ops, "close", lambda: None)()
    assert len(routes) == sum(card.moe.layers)
    assert all((ids == np.arange(card.moe.per_token)).all() for ids in routes)
    assert np.isfinite(logits).all() and 0.2 < logits.std() < 5, "all else is as under dummy"


def test_plans_without_a_checkpoint(tmp_path: Path) -> None:
    only_config(tmp_path, "qwen3_moe")
    for load_format in FILLS:
        means = Means(backend="plain", load_format=load_format)  # type: ignore[arg-type]
        planned = make_plan(Goals(model=str(tmp_path), means=means))
        assert planned.plan.load_format == load_format and not planned.checkpoint.tensors
        _, notices = make_ops(planned.plan)
        assert f"The weights are random (load format {load_format}): answers mean nothing." in notices
    only_config(tmp_path, "qwen3")
    with pytest.raises(UserError, match=r"has no experts; use dummy or dummy-flat$"):
        make_plan(Goals(model=str(tmp_path), means=Means(load_format="dummy-one-route")))
