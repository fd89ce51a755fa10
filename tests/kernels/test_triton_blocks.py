"""FP8 with scales by blocks on the op set "cuda": matmuls and experts of every way against kernels/reference_fp8.py, and whole tiny models.

Runs as test_triton_ops.py does (TRITON_INTERPRET=1, or a GPU).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    sys.path.insert(0, str(Path(__file__).parent))
    import triton_interpreter  # noqa: F401
elif not torch.cuda.is_available():
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 set before Python starts", allow_module_level=True)

from tests.kernels import test_triton_ops  # noqa: E402
from tests.kernels.test_triton_moe import CARDS as MIXTURES  # noqa: E402
from tests.kernels.test_triton_moe import CHOSEN, EXPERTS, WAYS, Weights, choices  # noqa: E402
from tests.kernels.test_triton_ops import (  # noqa: E402
    CARDS,
    LIBRARY,
    MIXED,
    RandomWeights,
    Runner,
    answers,
    buffer,
    difference,
    exact_sums,  # noqa: F401
    lines,
    live,
    make_ops,
    normal,
    seen,
)
from tradewind.config.card import ModelCard  # noqa: E402
from tradewind.kernels import reference, reference_fp8, reference_moe  # noqa: E402
from tradewind.kernels.ops import PackedExperts, PackedMatrix  # noqa: E402
from tradewind.kernels.plain import PlainOps  # noqa: E402
from tradewind.kernels.triton import blocks, moe, norm, skinny  # noqa: E402
from tradewind.kernels.triton.ops import CudaOps  # noqa: E402
from tradewind.kernels.triton.tuning import GemvConfig, TileConfig, Tuning  # noqa: E402

DEPTH = 208
"""One whole block of columns, and a part of one."""
ROUNDED, EXACT = 0.06, 8e-3
"""Tolerances: activations keep four significant bits, or eight."""


def values(packed: PackedMatrix | PackedExperts) -> torch.Tensor:
    return reference_fp8.weight_values(packed.data[0].cpu(), packed.data[1].cpu(), rows=blocks.ROWS)


def uneven(*shape: int, seed: int) -> np.ndarray:
    """Normal values of which each piece of 64 columns and 40 rows has a size of its own, so that a scale taken elsewhere is seen."""
    made = normal(*shape, seed=seed, scale=shape[-1] ** -0.5)
    made *= (1 + np.arange(shape[-1]) // 64 % 7).astype(np.float32)
    return made * (1 + np.arange(shape[-2]) // 40 % 5).astype(np.float32)[:, None]


# ------------------------------------------------------------------------------------------------------------ rounding


def test_packing_and_stacking() -> None:
    """Parts whose rows are no multiples of 128, as q, k, v or a latent have them."""
    ops = make_ops()
    parts = [uneven(n, DEPTH, seed=n) for n in (160, 48, 16)]
    packed = [ops.pack_fp8_block(part) for part in parts]
    whole = ops.pack_stacked(tuple(packed))
    assert (whole.layout, whole.n, whole.k, whole.group) == ("fp8_block", 224, DEPTH, 128)
    assert whole.data[1].shape == (14, 2) and whole.nbytes == 224 * DEPTH + 4 * 28
    assert difference(values(whole), np.concatenate(parts)) < 0.04
    scales = packed[0].data[1]
    assert torch.equal(scales[:8], scales[:1].expand(8, 2)) and torch.equal(scales[8:], scales[8:9].expand(2, 2))
    assert torch.allclose(scales[0, 0].cpu(), torch.from_numpy(np.abs(parts[0][:128, :128]).max()[None])[0] / 448)
    gated = ops.pack_gated(packed[1], packed[1])
    assert gated.gated and gated.n == 96 and torch.equal(gated.data[1][3:], packed[1].data[1])
    assert ops.pack_fp8_block(normal(24, 64)).layout == "bf16", "rows that share no scale"
    assert ops.random_matrix(64, 192, layout="fp8_block", gated=True, seed=1, scale=0.1).data[1].shape == (4, 2)


@dataclass(frozen=True)
class Stored:
    """A tensor in memory, as the uploader takes it."""

    values: torch.Tensor
    format: str
    file: None = None
    offset: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def data(self) -> np.ndarray:
        return self.values.contiguous().view(torch.uint8).numpy().reshape(-1)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_stored_matrices_are_kept_as_they_are(dtype: str) -> None:
    ops, draw = make_ops(), torch.Generator().manual_seed(0)
    parts = []
    for n in (160, 48):
        stored = torch.randn(n, DEPTH, generator=draw).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-n // 128), 2, generator=draw).to(torch.bfloat16 if dtype == "BF16" else torch.float32)
        parts.append((stored, scale))
    sources = [(Stored(stored, "F8_E4M3"), Stored(scale, dtype)) for stored, scale in parts]
    packed = ops.pack_stored_blocks(sources, gated=False)
    experts = ops.pack_experts((ops.pack_stored_blocks([source]) for source in (sources[1], sources[1])), experts=2)
    ops.uploader.finish()
    truth = torch.cat([reference_fp8.weight_values(*part) for part in parts])
    assert torch.equal(values(packed), truth)
    assert experts.layout == "fp8_block" and torch.equal(values(experts)[1], truth[160:])


@pytest.mark.parametrize("width", [48, 128, 208])
def test_tokens_are_rounded_as_the_reference_says(width: int) -> None:
    ops = make_ops()
    x = normal(5, width) * (1 + np.arange(width) // 100)
    x[2] = 0
    source, out = buffer(ops, x), ops.empty((5, width), "fp8")
    scale = ops.constant(np.full((5, blocks.parts(width)), -1, np.float32))
    count = ops.constant(live(4))
    blocks.quantise_columns(source, out=out, scale=scale, count=count, pdl=ops.pdl)
    stored, wanted = reference_fp8.quantise_columns(seen(source).float())
    assert torch.allclose(scale[:4].cpu(), wanted[:4]) and (scale[4] == -1).all()
    found = reference_fp8.token_values(out.cpu(), scale.cpu())[:4]
    assert difference(found, reference_fp8.token_values(stored, wanted)[:4]) < 0.01  # some round the other way on a GPU
    assert difference(found, seen(source)[:4]) < 0.04


def test_norms_round_what_they_make() -> None:
    ops = make_ops()
    x, delta, gain = buffer(ops, normal(3, DEPTH), "f32"), buffer(ops, normal(3, DEPTH, seed=1)), normal(DEPTH, seed=2)
    weight = ops.constant(gain)
    _, normed = reference.add_rms_norm(seen(x), seen(delta), torch.from_numpy(gain).double(), eps=1e-5)
    out, scale = ops.empty((3, DEPTH), "fp8"), ops.empty((3, 2), "f32")
    norm.add_rms_norm(x, delta, weight, eps=1e-5, out=out, scale=scale, pdl=ops.pdl)
    assert difference(reference_fp8.token_values(out.cpu(), scale.cpu()), normed) < 0.04
    assert torch.allclose(scale.cpu(), reference_fp8.quantise_columns(normed)[1], rtol=1e-3)
    answered, share = buffer(ops, normal(6, DEPTH, seed=3)), ops.constant(np.abs(normal(3, 2, seed=4)))
    mixed = (seen(answered).view(3, 2, DEPTH) * seen(share)[..., None]).sum(1)
    _, normed = reference.add_rms_norm(seen(x), mixed, torch.from_numpy(gain).double(), eps=1e-5)
    moe.combine_norm(x, answered, share, weight, eps=1e-5, out=out, scale=scale, pdl=ops.pdl)
    assert difference(reference_fp8.token_values(out.cpu(), scale.cpu()), normed) < 0.04


# ------------------------------------------------------------------------------------------------------------- matmuls


@pytest.mark.parametrize(("rows", "way"), [(1, "gemv"), (3, "tile"), (19, "wide"), (1, "fixed"), (19, "fixed")])
@pytest.mark.parametrize("gated", [False, True])
def test_linear(rows: int, way: str, gated: bool) -> None:
    """Of 224 outputs from parts of 160 and 64 rows, as a tile and as gate and up."""
    ops = make_ops(tuning=replace(LIBRARY, tile_rows=16), deterministic=way == "fixed")
    parts = [ops.pack_fp8_block(uneven(n, DEPTH, seed=s)) for s, n in ((1, 160), (2, 160 if gated else 64))]
    weight = ops.pack_gated(*parts) if gated else ops.pack_stacked(tuple(parts))
    truth, bias = values(weight), ops.constant(normal(weight.n, seed=3))
    x = buffer(ops, normal(rows, DEPTH, seed=5))
    tolerance = EXACT if way == "gemv" else ROUNDED
    for dtype, b in (("bf16", None), ("f32", bias)):
        out = ops.empty((rows, weight.n // 2 if gated else weight.n), dtype)
        if gated:
            ops.gated_linear(x, weight, activation="silu", bias=b, out=out, count=live(rows))
            wanted = reference.gated_linear(
                seen(x), *truth.chunk(2), activation="silu", bias=None if b is None else seen(b)
            )
        else:
            ops.linear(x, weight, bias=b, out=out, count=live(rows))
            wanted = reference.linear(seen(x), truth, None if b is None else seen(b))
        assert difference(seen(out), wanted) < (2 if gated else 1) * tolerance


def test_the_product_is_the_references_but_for_rounding() -> None:
    """Tokens that are rounded already: what is left is the order of sums."""
    ops = make_ops()
    weight = ops.pack_fp8_block(uneven(96, DEPTH, seed=1))
    stored, scale = reference_fp8.quantise_columns(torch.from_numpy(uneven(19, DEPTH, seed=2)))
    truth = reference_fp8.token_values(stored, scale) @ values(weight).T
    small, by_token = ops.empty((19, DEPTH), "fp8"), ops.constant(scale.numpy())
    small.copy_(stored)
    for config in (TileConfig(32, 64, 128, 1, 4, 2), TileConfig(32, 32, 64, 2, 4, 2)):
        out = ops.empty((19, 96), "f32")
        work, arrived = ops.workspace.floats(1 << 14), ops.workspace.counters(16)
        skinny.skinny_linear(
            small, weight.data[0], out=out, scale=weight.data[1], x_scale=by_token, config=config, workspace=work, arrived=arrived,
            pdl=ops.pdl,
        )  # fmt: skip
        assert difference(seen(out), truth) < 4e-3
        out.zero_()
        skinny.fixed_linear(
            small, weight.data[0], out=out, scale=weight.data[1], x_scale=by_token, tile=config, pdl=ops.pdl
        )
        assert difference(seen(out), truth) < 4e-3
    assert ops.workspace.counters(1).count_nonzero() == 0


GEMVS = (
    GemvConfig(4, 256, 4),
    GemvConfig(8, 128, 4, narrow=True),
    GemvConfig(8, 128, 4, narrow=True, half=True, ahead=2),
    GemvConfig(16, 512, 4),
)


@pytest.mark.parametrize("config", GEMVS)
@pytest.mark.parametrize("depth", [384, 4224])
def test_one_row(config: GemvConfig, depth: int) -> None:
    """With norm, residual, gate and up; also where neither scales nor the input stay in registers."""
    ops = make_ops()
    weight, gated = (ops.pack_fp8_block(uneven(96, depth, seed=s)) for s in (1, 2))
    x, gain, residual = (
        buffer(ops, normal(1, depth, seed=3), "f32"),
        normal(depth, seed=4),
        buffer(ops, normal(1, 96, seed=5)),
    )
    plain = reference.add_rms_norm(seen(x), None, torch.from_numpy(gain).double(), eps=1e-5)[1]
    out = ops.empty((1, 96), "f32")
    skinny.skinny_linear(
        x, weight.data[0], out=out, scale=weight.data[1], norm=ops.constant(gain), eps=1e-5, residual=residual, config=config, pdl=ops.pdl
    )  # fmt: skip
    assert difference(seen(out), plain @ values(weight).T + seen(residual)) < 5e-3
    out = ops.empty((1, 48), "f32")
    skinny.skinny_linear(x, gated.data[0], out=out, scale=gated.data[1], gated=True, config=config, pdl=ops.pdl)
    gate, up = values(gated).chunk(2)
    assert difference(seen(out), reference.gated_linear(seen(x), gate, up, activation="silu", bias=None)) < 5e-3


# ------------------------------------------------------------------------------------------------------------- experts


@dataclass(frozen=True, kw_only=True)
class ByCopyEngine(Tuning):
    """Weights of tiles by TMA; tiles that do not divide the matrices."""

    def expert_tile(self, tokens: int, chosen: int, experts: int, depth: int, *, fp8: bool) -> TileConfig:
        return TileConfig(16, 64, 64, 1, 4, 3, tma=True)


def run(ops: CudaOps, way: str, table: np.ndarray, *, biased: bool, weigh_input: bool) -> tuple[Any, Any]:
    hidden, inner = DEPTH, 144
    w = Weights(
        gate=uneven(EXPERTS, inner, hidden, seed=1),
        up=uneven(EXPERTS, inner, hidden, seed=2),
        down=uneven(EXPERTS, hidden, inner, seed=3),
        gate_up_bias=normal(EXPERTS, 2 * inner, seed=4),
        down_bias=normal(EXPERTS, hidden, seed=5),
    )
    pack = ops.pack_fp8_block
    gate_up = ops.pack_experts(
        (ops.pack_gated(pack(gate), pack(up)) for gate, up in zip(w.gate, w.up, strict=True)), experts=EXPERTS
    )
    down = ops.pack_experts((pack(each) for each in w.down), experts=EXPERTS)
    tokens = len(table)
    x, weights = buffer(ops, normal(tokens, hidden, seed=7)), np.abs(normal(tokens, CHOSEN, seed=8))
    out = ops.empty((tokens, hidden), "bf16")
    biases = {name: ops.constant(getattr(w, name)) if biased else None for name in ("gate_up_bias", "down_bias")}
    ops.experts(
        x, ops.constant(table), ops.constant(weights), gate_up, down, activation="silu", out=out, count=live(tokens),
        weigh_input=weigh_input, **biases,
    )  # fmt: skip
    truth = reference_moe.experts(
        seen(x), torch.from_numpy(table), torch.from_numpy(weights).double(), *values(gate_up).chunk(2, 1), values(down),
        activation="silu", weigh_input=weigh_input, **{name: None if b is None else seen(b) for name, b in biases.items()},
    )  # fmt: skip
    return ops.host(out), truth.numpy()


@pytest.mark.parametrize("way", WAYS)
def test_experts(way: str) -> None:
    table = choices(WAYS[way], experts=EXPERTS, chosen=CHOSEN)
    ops = make_ops(deterministic=way.startswith("fixed"))
    for name, biased, weigh_input in (("random", True, False), ("one hot expert", False, True)):
        found, truth = run(ops, way, table[name], biased=biased, weigh_input=weigh_input)
        assert difference(found, truth) < (EXACT if way == "one" else ROUNDED)


@pytest.mark.parametrize("way", ["few", "sorted"])
def test_experts_by_the_copy_engine(way: str) -> None:
    ops = make_ops(tuning=ByCopyEngine(multiprocessors=132))
    table = choices(WAYS[way], experts=EXPERTS, chosen=CHOSEN)["random"]
    found, truth = run(ops, way, table, biased=True, weigh_input=False)
    assert difference(found, truth) < ROUNDED


# --------------------------------------------------------------------------------------------------------- whole models


class BlockWeights(RandomWeights):
    """Matrices rounded by blocks, for those that have none to what they mean then."""

    def at(self, place: str) -> BlockWeights:
        return BlockWeights(self.ops, fp8=self.fp8, inside=f"{self.inside}{place}.")

    def _pack(self, matrix: np.ndarray, *, fp8: bool) -> Any:
        if not fp8:
            return super()._pack(matrix, fp8=False)
        small = make_ops().pack_fp8_block(matrix)
        if isinstance(self.ops, CudaOps):
            return self.ops.pack_fp8_block(matrix)
        return self.ops.pack_matrix(
            values(small).float().numpy() if small.layout == "fp8_block" else matrix, compute="f32"
        )


@pytest.fixture
def by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_triton_ops, "RandomWeights", BlockWeights)


WIDE = {"hidden": 144, "intermediate": 176}


@pytest.mark.usefixtures("by_blocks")
@pytest.mark.parametrize(
    ("family", "way"), [("qwen3", "tiles"), ("qwen3", "wide"), ("qwen3_moe", "tiles"), ("qwen3_moe", "fixed")]
)
def test_programs_compute_the_model(family: str, way: str) -> None:
    card: ModelCard = msgspec.structs.replace((CARDS | MIXTURES)[family], **WIDE)
    truth = answers(Runner(card, PlainOps(), fp8=True), planned=False)
    ops = make_ops(
        tuning=Tuning(multiprocessors=132, tile_rows=2 if way == "wide" else 64), deterministic=way == "fixed"
    )
    runner = Runner(card, ops, fp8=True)
    for found, wanted in zip(answers(runner, planned=True), truth, strict=True):
        assert difference(found, wanted) < 0.25  # a near tie of the router sends a token elsewhere
    text = lines(runner, MIXED)
    assert any(line.endswith("-> fp8_block") and line.startswith("rms_norm") for line in text), text
    assert not any("library" in line for line in text if "fp8" in line)
    assert any(line.startswith({"tiles": "tile", "wide": "wide", "fixed": "fixed"}[way]) for line in text)


@pytest.mark.usefixtures("exact_sums", "by_blocks")
def test_deterministic_rows_do_not_depend_on_their_neighbours() -> None:
    ops = make_ops(deterministic=True)
    weight = ops.pack_fp8_block(uneven(96, DEPTH, seed=1))
    x = normal(22, DEPTH, seed=7)

    def said(rows: slice) -> np.ndarray:
        out = ops.empty((len(x[rows]), 96), "f32")
        ops.linear(buffer(ops, x[rows]), weight, bias=None, out=out, count=live(len(x[rows])))
        return ops.host(out)

    whole = said(slice(None))
    for row in (0, 9, 21):
        assert np.array_equal(said(slice(row, row + 1))[0], whole[row])
