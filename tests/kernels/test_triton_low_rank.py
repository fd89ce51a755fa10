"""Low-rank adapters on the op set "cuda": against kernels/reference_lora.py, in recordings, and what a step without any becomes.

Runs as test_triton_ops.py does (TRITON_INTERPRET=1, or a GPU).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    sys.path.insert(0, str(Path(__file__).parent))
    import triton_interpreter  # noqa: F401
elif not torch.cuda.is_available():
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 set before Python starts", allow_module_level=True)

from tests.kernels.test_triton_ops import (  # noqa: E402
    BF16_TOLERANCE,
    DEVICE,
    TILES,
    buffer,
    difference,
    live,
    make_ops,
    normal,
    seen,
)
from tradewind.kernels import reference, reference_lora  # noqa: E402
from tradewind.kernels.ops import LowRankBank  # noqa: E402
from tradewind.kernels.triton import low_rank, low_rank_tile, skinny  # noqa: E402
from tradewind.kernels.triton.ops import CudaOps  # noqa: E402
from tradewind.kernels.triton.planning import plan  # noqa: E402
from tradewind.kernels.triton.program import Bucket  # noqa: E402
from tradewind.kernels.triton.tuning import TileConfig, tuned  # noqa: E402

SLOTS, RANK = 5, 24
SIZES = (70, 16, 33)
WIDTH = sum(SIZES)
RANKS = ((1, 8, 0), (8, 0, 3), (RANK, RANK, RANK), (0, 0, 0), (3, 16, 17))


def filled(ops: CudaOps, k: int, sizes: tuple[int, ...] = SIZES, most: int = RANK) -> tuple[Any, Any, Any]:
    """A bank, and its A [S, P, R, K] and B [S, N, R] as they were rounded."""
    bank = ops.low_rank_bank(slots=SLOTS, rank=most, sizes=sizes, k=k, exact=False)
    a, b = torch.zeros(SLOTS, len(sizes), most, k).double(), torch.zeros(SLOTS, sum(sizes), most).double()
    starts = np.cumsum([0, *sizes])
    for slot, ranks in enumerate(RANKS):
        for part, (n, rank) in enumerate(zip(sizes, ranks[: len(sizes)], strict=True)):
            ops.set_low_rank(bank, slot, part, normal(most, k), normal(n, most))
            down, up = normal(rank, k, seed=slot, scale=k**-0.5), normal(n, rank, seed=part)
            ops.set_low_rank(bank, slot, part, down, up)  # nothing of who was here before is left
            a[slot, part, :rank] = torch.from_numpy(down).bfloat16().double()
            b[slot, starts[part] : starts[part + 1], :rank] = torch.from_numpy(up).bfloat16().double()
    return bank, a, b


@pytest.mark.parametrize("k", [48, 1100])
@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (9, 9), (40, 33), (70, 70), (5, 0)])
def test_add_low_rank(tokens: int, count: int, k: int) -> None:
    """Ranks unlike each other, parts that an adapter leaves alone, tokens without one, K in one piece and in two."""
    ops = make_ops()
    bank, a, b = filled(ops, k)
    ids = np.random.default_rng(tokens).integers(-1, SLOTS, tokens).astype(np.int32)
    x, out = buffer(ops, normal(tokens, k)), buffer(ops, normal(tokens, WIDTH, seed=1))
    before = seen(out)
    wanted = reference_lora.add_low_rank(seen(x), a, b, torch.from_numpy(ids), before, sizes=SIZES)
    ops.add_low_rank(x, bank, ops.constant(ids), out=out, count=live(count))
    got = seen(out)
    assert count == 0 or difference(got[:count], wanted[:count]) < BF16_TOLERANCE
    assert torch.equal(got[count:], before[count:])
    assert torch.equal(got[ids < 0], before[ids < 0]), "tokens without an adapter"


def test_a_token_is_the_same_in_any_company() -> None:
    ops, k, tokens = make_ops(), 200, 25
    bank, _, _ = filled(ops, k)
    ids = np.random.default_rng(0).integers(-1, SLOTS, tokens).astype(np.int32)
    x, together = buffer(ops, normal(tokens, k)), buffer(ops, normal(tokens, WIDTH, seed=1))
    rows = [together[i : i + 1].clone() for i in range(tokens)]
    ops.add_low_rank(x, bank, ops.constant(ids), out=together, count=live(tokens))
    for i, row in enumerate(rows):
        ops.add_low_rank(x[i : i + 1].clone(), bank, ops.constant(ids[i : i + 1]), out=row, count=live(1))
        assert torch.equal(row[0], together[i])


@dataclass(frozen=True)
class Case:
    """Of both products with the constants of many tokens."""

    form: low_rank.Form
    k: int
    sizes: tuple[int, ...] = SIZES
    most: int = RANK
    tokens: int = 150
    count: int = 141


FORMS = [
    Case(low_rank.MANY, 192),  # parts meet in the middle of a tile, and of a program's columns
    Case(replace(low_rank.MANY, pieces=16), 1100),  # two pieces of K, the last step not whole
    Case(low_rank.MIDDLE, 1024),  # two whole pieces
    Case(
        replace(low_rank.MIDDLE, bn=16, blocks_first=True), 48, (32, 64, 16), 80
    ),  # tiles of one part, unequal pieces of columns
    Case(replace(low_rank.MIDDLE, columns=32), 64, (128,), 40),
    Case(replace(low_rank.MANY, bm=128, columns=64), 64, (128, 256), 64, count=0),
]


def uneven(tokens: int) -> np.ndarray:
    """Most tokens are of adapters 4 and 2, one is of 0, none of 1, some of 3, which adds nothing, and some have none."""
    ids = np.random.default_rng(tokens).choice(np.array([4, 2, 3, -1], np.int32), tokens, p=[0.5, 0.3, 0.1, 0.1])
    ids[tokens // 2] = 0
    return ids


@pytest.mark.parametrize("case", FORMS, ids=range(len(FORMS)))
def test_constants_of_many_tokens(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups and ranks unlike each other, one token's group, empty ones, and live tokens fewer than there is room for; scratch is NaN."""
    monkeypatch.setattr(low_rank, "FORMS", ((0, case.form),))
    ops, (tokens, count) = make_ops(), (case.tokens, case.count)
    bank, a, b = filled(ops, case.k, case.sizes, case.most)
    ids = uneven(tokens)
    x, out = buffer(ops, normal(tokens, case.k)), buffer(ops, normal(tokens, sum(case.sizes), seed=1))
    before = seen(out)
    wanted = reference_lora.add_low_rank(seen(x), a, b, torch.from_numpy(ids), before, sizes=case.sizes)
    ops.workspace.piece("adapter inner", 8 * tokens * bank.data[0].shape[1], dtype=torch.float32).fill_(torch.nan)
    ops.add_low_rank(x, bank, ops.constant(ids), out=out, count=live(count))
    got = seen(out)
    assert count == 0 or difference(got[:count], wanted[:count]) < BF16_TOLERANCE
    assert torch.equal(got[count:], before[count:])
    assert torch.equal(got[(ids < 0) | (ids == 3)], before[(ids < 0) | (ids == 3)]), "tokens to which nothing is added"


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_and_up_made_one_where_they_are_added_to(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one launch: adapters of one of both alone, of ranks of several steps; tokens beyond the live ones are left alone."""
    monkeypatch.setattr(low_rank, "FORMS", ((0, replace(low_rank.MANY, glue_bn=32)),))
    ops, k, f, tokens, count = make_ops(), 64, 40, 90, 81
    bank, a, b = filled(ops, k, (f, f), 40)
    down, up = normal(20, k, seed=3, scale=k**-0.5), normal(f, 20, seed=4)
    ops.set_low_rank(bank, 3, 1, down, up)  # nothing for gate
    a[3, 1, :20], b[3, f:, :20] = (torch.from_numpy(values).bfloat16().double() for values in (down, up))
    ids = np.resize(np.array([0, 1, -1, 2, 2, 4, 3, 2], np.int32), tokens)
    x, both = buffer(ops, normal(tokens, k, scale=0.2)), buffer(ops, normal(tokens, 2 * f, seed=1))
    out = ops.empty((tokens, f), "bf16")
    whose, live_ = ops.constant(ids), ops.constant(live(count))
    with ops.record() as tape:
        ops.add_low_rank(x, bank, whose, out=both, count=live_)
        ops.glue(both, activation=activation, out=out, count=live_)
    program = plan(tape, Bucket(tokens=tokens, rows=3, singles=False, longest=64, adapted=True))
    assert kinds(program) == ["adapters", "sort", "shrink", "expand"]
    before = seen(both)
    program.run()
    added = reference_lora.add_low_rank(seen(x), a, b, torch.from_numpy(ids), before, sizes=(f, f))
    wanted = reference.glue(*added.chunk(2, -1), activation)
    assert difference(seen(out)[:count], wanted[:count]) < BF16_TOLERANCE
    assert not seen(out)[count:].any() and torch.equal(seen(both), before)


def test_which_constants() -> None:
    """They change where the table says, never in deterministic mode, and no step needs more scratch than was made at once."""
    many = [low_rank.form_of(tokens, deterministic=False) for tokens in (1, 255, 256, 1023, 1024, 8192)]
    assert many == [low_rank.FEW] * 2 + [low_rank.MIDDLE] * 3 + [low_rank.MANY]
    assert {low_rank.form_of(tokens, deterministic=True) for tokens in (1, 256, 8192)} == {low_rank.FEW}
    splits = [
        low_rank.splits_of(4096, form=low_rank.form_of(t, deterministic=False), tokens=t)
        for t in (80, 512, 1024, 2048, 4096, 8192)
    ]
    assert splits == [8, 8, 8, 4, 2, 1]
    assert low_rank.splits_of(512, form=low_rank.MANY, tokens=1024) == low_rank.splits_of(48) == 1
    for most in (100, 256, 512, 8704):
        sizes = [t for t in range(1, most + 1, 5) if t < 300 or t % 16 == 1] + [most]
        for exact in (False, True):
            forms = [low_rank.form_of(t, deterministic=exact) for t in sizes]
            need = [t * low_rank.splits_of(4096, form=form, tokens=t) for t, form in zip(sizes, forms, strict=True)]
            assert max(need) <= low_rank._most_lines(4096, most, exact) <= 8 * most


def test_on_both_sides_of_a_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    """39 tokens and 40, of which the last is new: the same answers but for rounding; in deterministic mode the same bits."""
    monkeypatch.setattr(low_rank, "FORMS", ((0, low_rank.FEW), (40, low_rank.MIDDLE)))
    for exact in (False, True):
        ops, k = make_ops(deterministic=exact), 1100
        bank, a, b = filled(ops, k)
        ids = uneven(40)
        x, start = buffer(ops, normal(40, k)), buffer(ops, normal(40, WIDTH, seed=1))
        outs = [start.clone(), start.clone()]
        for tokens, out in zip((39, 40), outs, strict=True):
            ops.add_low_rank(x[:tokens], bank, ops.constant(ids[:tokens]), out=out[:tokens], count=live(tokens))
        wanted = reference_lora.add_low_rank(seen(x), a, b, torch.from_numpy(ids), seen(start), sizes=SIZES)
        assert difference(seen(outs[0])[:39], wanted[:39]) < BF16_TOLERANCE
        assert difference(seen(outs[1]), wanted) < BF16_TOLERANCE
        assert torch.equal(outs[0][:39], outs[1][:39]) or not exact


def test_glue() -> None:
    ops = make_ops()
    for activation in ("silu", "gelu_tanh"):
        x, out = buffer(ops, normal(7, 100)), ops.empty((7, 50), "bf16")
        ops.glue(x, activation=activation, out=out, count=live(7))
        wanted = reference.glue(*seen(x).chunk(2, -1), activation)
        assert difference(seen(out), wanted) < BF16_TOLERANCE


def lines(program: Any) -> list[str]:
    return program.describe().splitlines()  # type: ignore[no-any-return]


@pytest.mark.parametrize("fp8", [False, True])
def test_recorded_for_all_matmuls_and_left_out_where_nobody_has_one(fp8: bool) -> None:
    """Tokens are sorted once for a whole step; a step without adapters is that of a model without room for any."""
    ops, e, f = make_ops(), 64, 48
    pack, tolerance = (ops.pack_fp8, 0.06) if fp8 else (ops.pack_matrix, BF16_TOLERANCE)
    gate, up, down = (pack(normal(*shape, seed=s, scale=0.2)) for s, shape in enumerate(((f, e), (f, e), (e, f))))
    both = ops.pack_stacked((gate, up))
    wide = ops.low_rank_bank(slots=2, rank=16, sizes=(f, f), k=e, exact=False)
    narrow = ops.low_rank_bank(slots=2, rank=16, sizes=(e,), k=f, exact=False)
    for bank in (wide, narrow):
        for part, n in enumerate(bank.sizes):
            ops.set_low_rank(bank, 1, part, normal(4, bank.k, scale=0.2), normal(n, 4, seed=part))
    x, adapters, count = buffer(ops, normal(20, e)), ops.constant(np.full(20, -1, np.int32)), ops.constant(live(20))
    made, inner, out = ops.empty((20, 2 * f), "bf16"), ops.empty((20, f), "bf16"), ops.empty((20, e), "bf16")
    with ops.record() as tape:
        ops.linear(x, both, bias=None, out=made, count=count)
        ops.add_low_rank(x, wide, adapters, out=made, count=count)
        ops.glue(made, activation="silu", out=inner, count=count)
        ops.linear(inner, down, bias=None, out=out, count=count)
        ops.add_low_rank(inner, narrow, adapters, out=out, count=count)
    with ops.record() as plain:
        ops.gated_linear(x, ops.pack_gated(gate, up), activation="silu", bias=None, out=inner, count=count)
        ops.linear(inner, down, bias=None, out=out, count=count)
    bucket = Bucket(tokens=20, rows=20, singles=False, longest=64)
    for fuse in (False, True):
        alone, program = plan(plain, bucket, fuse=fuse), plan(tape, bucket, fuse=fuse)
        assert lines(program) == lines(alone)
        alone.run()
        wanted = seen(out)
        out.zero_()
        program.run()
        assert torch.equal(seen(out), wanted)
    adapted = plan(tape, Bucket(tokens=20, rows=20, singles=False, longest=64, adapted=True))
    kinds = [line.split()[0] for line in lines(adapted)]
    assert [kinds.count(kind) for kind in ("adapters", "sort", "shrink", "expand")] == [1, 1, 2, 2]
    adapted.run()
    assert difference(seen(out), wanted) < tolerance, "nobody has one"
    ids = np.array([1, -1] * 10, np.int32)
    adapters.copy_(torch.from_numpy(ids))
    adapted.run()
    got = seen(out)
    assert difference(got[1::2], wanted[1::2]) < tolerance
    assert difference(got[::2], wanted[::2]) > 0.1


def test_adapters_of_tokens_follow_their_rows() -> None:
    ops = make_ops()
    of_slot = ops.constant(np.array([[3], [-1], [0], [2]], np.int32))
    slot, start = ops.constant(np.array([2, 0, 1, 9], np.int32)), ops.constant(np.array([0, 3, 4, 6, 6], np.int32))
    out = ops.constant(np.full(9, 7, np.int32))
    low_rank.lay_out_adapters(slot, start, ops.constant(live(3)), of_slot, out=out)
    assert ops.host(out).tolist() == [0, 0, 0, 3, -1, -1, -1, -1, -1]


# ------------------------------------------------------------------------------------------------- in the matmul's tiles


@dataclass(frozen=True)
class Shape:
    """Of a matmul with additions: who is in the step, how K is cut for W (`split`) and for A (`pieces`)."""

    tokens: int
    k: int
    sizes: tuple[int, ...]
    slots: int
    rank: int
    split: int = 1
    pieces: int = 1
    gated: bool = False
    fp8: bool = False
    only: int | None = None
    """The adapter of all tokens; else mixed, with tokens that have none."""
    tile: tuple[int, int, int] = (16, 32, 32)


SMALL = [
    Shape(9, 64, (70, 16, 33), slots=5, rank=24, split=2, pieces=2),  # parts meet in the middle of a tile
    Shape(16, 64, (48, 48), slots=2, rank=16, gated=True),
    Shape(13, 96, (48, 48), slots=12, rank=20, pieces=3, gated=True),  # more columns than registers hold
    Shape(13, 96, (100,), slots=12, rank=20, pieces=3),
    Shape(13, 96, (100,), slots=12, rank=20, only=4),
    Shape(13, 96, (100,), slots=12, rank=20, only=-1),
    Shape(1, 128, (48, 48, 32), slots=9, rank=16, split=2, pieces=2, fp8=True),
    Shape(13, 128, (64, 64), slots=3, rank=20, split=2, gated=True, fp8=True),
    Shape(33, 256, (64, 64), slots=4, rank=16, split=2, pieces=2, gated=True, tile=(64, 64, 128)),
]
LARGE = [  # more programs than run at once, on a GPU
    Shape(64, 4096, (4096, 1024, 1024), slots=8, rank=16, pieces=8, tile=(64, 64, 128)),
    Shape(64, 2048, (14336, 14336), slots=8, rank=16, pieces=4, gated=True, tile=(64, 64, 128)),
    Shape(61, 8192, (4096,), slots=16, rank=64, split=4, pieces=4, tile=(64, 64, 128)),
]


@pytest.mark.parametrize("case", SMALL if INTERPRETED else SMALL + LARGE, ids=str)
def test_adapted_linear(case: Shape) -> None:
    """Against the reference, with bias and residual; scratch starts as NaN and counters end as zeros; again, and it is the same."""
    ops, n, draw = make_ops(), sum(case.sizes), np.random.default_rng(7)
    bank = ops.low_rank_bank(slots=case.slots, rank=case.rank, sizes=case.sizes, k=case.k, exact=False)
    a = torch.zeros(case.slots, len(case.sizes), case.rank, case.k, dtype=torch.float64)
    b = torch.zeros(case.slots, n, case.rank, dtype=torch.float64)
    starts = np.cumsum([0, *case.sizes])
    for slot in range(case.slots):
        for part, size in enumerate(case.sizes):
            rank = int(draw.integers(0, case.rank + 1))
            down = normal(rank, case.k, seed=slot + part, scale=case.k**-0.5)
            up = normal(size, rank, seed=slot * 7 + part)
            ops.set_low_rank(bank, slot, part, down, up)
            a[slot, part, :rank] = torch.from_numpy(down).bfloat16().double()
            b[slot, starts[part] : starts[part + 1], :rank] = torch.from_numpy(up).bfloat16().double()
    ids = draw.integers(-1, case.slots, case.tokens).astype(np.int32)
    if case.only is not None:
        ids[:] = case.only
    matrix = normal(n, case.k, seed=5, scale=case.k**-0.5)
    weight = ops.pack_fp8(matrix) if case.fp8 else ops.pack_matrix(matrix)
    plain, bias = buffer(ops, normal(case.tokens, case.k, seed=3)), ops.constant(normal(n, seed=8))
    x, w = seen(plain), seen(weight.data[0])
    x_scale = small = None
    if case.fp8:
        x_scale = plain.float().abs().amax(1) / 448
        small = (plain.float() / x_scale[:, None]).to(torch.float8_e4m3fn)
        x, w = seen(small) * seen(x_scale)[:, None], w * seen(weight.data[1])[:, None]
    made = x @ w.T + seen(bias)
    wanted = reference_lora.add_low_rank(seen(plain), a, b, torch.from_numpy(ids), made, sizes=case.sizes)
    features = n // 2 if case.gated else n
    if case.gated:
        wanted = reference.glue(*wanted.chunk(2, -1), "silu")
    residual = ops.constant(normal(case.tokens, features, seed=9))
    wanted = wanted + seen(residual)

    bm, bn, bk = case.tile
    config = TileConfig(bm, bn, bk, case.split, 4, 2)
    tiles = low_rank_tile.tiles_of_a(bank, config)
    met = torch.zeros(2 + tiles, dtype=torch.int32, device=DEVICE)
    arrived = torch.zeros(-(-n // 16), dtype=torch.int32, device=DEVICE)
    need = skinny.workspace_floats(features, config=config, gated=case.gated)
    answers = []
    for _ in range(2 if INTERPRETED else 20):
        out = torch.full((case.tokens, features), torch.nan, dtype=torch.float32, device=DEVICE)
        lines = bank.data[0].shape[0] * bank.data[0].shape[1]
        low_rank_tile.adapted_linear(
            small if small is not None else plain, weight.data[0], bank, ops.constant(ids), plain=plain, out=out,
            inner=torch.full((case.tokens, lines), torch.nan, dtype=torch.bfloat16, device=DEVICE),
            sums=torch.full((tiles * case.pieces * bn * bm,), torch.nan, device=DEVICE), met=met, pieces=case.pieces,
            scale=weight.data[1] if case.fp8 else None, x_scale=x_scale, bias=bias, gated=case.gated, residual=residual,
            config=config, workspace=torch.full((need,), torch.nan, device=DEVICE), arrived=arrived,
        )  # fmt: skip
        answers.append(seen(out))
        assert not met.any() and not arrived.any()
    assert difference(answers[0], wanted) < BF16_TOLERANCE
    assert all(torch.equal(answer, answers[0]) for answer in answers)


class Block:
    """A layer's matmuls with room for adapters: x -> qkv -> o added to the stream, normed, gate and up -> down added, normed."""

    def __init__(self, *, fp8: bool = False, rank: int = 16, tokens: int = 12, **options: Any) -> None:
        self.ops = ops = make_ops(**options)
        self.tokens = tokens
        e, f, q = 64, 96, (64, 32, 32)
        pack = ops.pack_fp8 if fp8 else ops.pack_matrix
        shapes = {"qkv": (q, e), "o": ((e,), sum(q)), "both": ((f, f), e), "down": ((e,), f)}
        self.weights, self.banks = {}, {}
        for at, (name, (sizes, k)) in enumerate(shapes.items()):
            self.weights[name] = pack(normal(sum(sizes), k, seed=at, scale=0.2))
            self.banks[name] = bank = ops.low_rank_bank(slots=3, rank=rank, sizes=sizes, k=k, exact=False)
            for slot in range(2):
                for part, n in enumerate(sizes):
                    given = normal(4, k, seed=slot, scale=0.2), normal(n, 4, seed=part + slot)
                    ops.set_low_rank(bank, slot, part, *given)
        self.gain = ops.constant(np.ones(e, np.float32))
        self.start = normal(tokens, e)
        self.x, self.adapters = ops.empty((tokens, e), "f32"), ops.constant(np.full(tokens, -1, np.int32))
        widths = {"h": e, "qkv": sum(q), "delta": e, "both": 2 * f, "inner": f, "last": e}
        self.made = {name: ops.empty((tokens, width), "bf16") for name, width in widths.items()}

    def record(self, *, keep: str | None = None) -> Any:
        """The tape; `keep` names a buffer that somebody outside reads."""
        ops, made, count = self.ops, self.made, self.ops.constant(live(self.tokens))

        def linear(name: str, x: str, out: str) -> None:
            ops.linear(made[x], self.weights[name], bias=None, out=made[out], count=count)
            ops.add_low_rank(made[x], self.banks[name], self.adapters, out=made[out], count=count)

        with ops.record() as tape:
            ops.add_rms_norm(self.x, None, self.gain, eps=1e-5, out=made["h"], count=count)
            linear("qkv", "h", "qkv")
            linear("o", "qkv", "delta")
            ops.add_rms_norm(self.x, made["delta"], self.gain, eps=1e-5, out=made["h"], count=count)
            linear("both", "h", "both")
            ops.glue(made["both"], activation="silu", out=made["inner"], count=count)
            linear("down", "inner", "delta")
            ops.add_rms_norm(self.x, made["delta"], self.gain, eps=1e-5, out=made["last"], count=count)
        if keep is not None:
            tape.keep(made[keep])
        return tape

    def run(self, program: Any, ids: np.ndarray) -> torch.Tensor:
        self.x.copy_(torch.from_numpy(self.start))
        self.adapters.copy_(torch.from_numpy(ids))
        program.run()
        return seen(self.made["last"])


def step(tokens: int, *, adapted: bool) -> Bucket:
    return Bucket(tokens=tokens, rows=tokens, singles=True, longest=64, adapted=adapted)


def kinds(program: Any) -> list[str]:
    return [line.split()[0] for line in lines(program)]


@pytest.mark.parametrize(("fp8", "tokens"), [(False, 12), (False, 1), (True, 12)])
def test_few_tokens_cost_no_launch_of_their_own(fp8: bool, tokens: int) -> None:
    """The step with adapters is launch by launch the one without, and says what the plain way says."""
    block = Block(fp8=fp8, tokens=tokens, tuning=TILES)
    tape = block.record()
    adapted, without = (plan(tape, step(tokens, adapted=there)) for there in (True, False))
    said = [line for line in lines(adapted) if line.startswith("tile")]
    assert len(said) == 4 and all("+ adapters" in line for line in said)
    assert "+ silu + adapters" in said[2] and all("+ residual" in said[i] for i in (1, 3))
    if tokens > 1:
        assert [kind for kind in kinds(adapted) if kind != "quantise"] == [k for k in kinds(without) if k != "quantise"]
    naive = plan(tape, step(tokens, adapted=True), fuse=False)
    assert {"sort", "shrink", "expand", "silu"} <= set(kinds(naive))
    ids = np.resize(np.array([1, -1, 0, 1, 0], np.int32), tokens)
    tolerance = 0.06 if fp8 else 2 * BF16_TOLERANCE
    wanted = block.run(naive, ids)
    got = block.run(adapted, ids)
    assert difference(got, wanted) < tolerance
    assert torch.equal(block.run(adapted, ids), got)
    nobody = block.run(adapted, np.full(tokens, -1, np.int32))
    assert difference(nobody, block.run(without, ids)) < tolerance
    assert difference(nobody, got) > 0.1
    free = ids < 0
    assert torch.equal(nobody[free], got[free]), "tokens without an adapter"


def test_when_additions_are_launches_of_their_own() -> None:
    """More tokens, deterministic mode, large banks, and values between that somebody else reads."""
    ids = np.resize(np.array([1, -1, 0], np.int32), 20)
    block = Block(tuning=TILES, tokens=20)  # more than these tiles serve
    program = plan(block.record(), step(20, adapted=True))
    assert kinds(program).count("shrink") == kinds(program).count("expand") == 4
    block.run(program, ids)

    exact = Block(tuning=TILES, deterministic=True)
    tape = exact.record()
    program = plan(tape, step(12, adapted=True))
    assert kinds(program).count("shrink") == 4 and kinds(program).count("fixed") == 4
    together = exact.run(program, ids[:12])
    exact.start = np.roll(exact.start, 5, 0)
    assert torch.equal(exact.run(program, np.roll(ids[:12], 5)), torch.roll(together, 5, 0))

    wide = Block(tuning=TILES, rank=low_rank_tile.MOST_COLUMNS)
    assert kinds(plan(wide.record(), step(12, adapted=True))).count("shrink") == 4

    read = Block(tuning=TILES)
    program = plan(read.record(keep="both"), step(12, adapted=True))
    assert kinds(program).count("silu") == 1 and "shrink" not in kinds(program)
    read.run(program, ids[:12])
    between = seen(read.made["both"])
    apart = plan(read.record(keep="both"), step(12, adapted=True), fuse=False)
    read.run(apart, ids[:12])
    assert difference(between, seen(read.made["both"])) < 2 * BF16_TOLERANCE


@pytest.mark.parametrize("fp8", [False, True])
def test_many_tokens_make_gate_and_up_one_where_they_are_added_to(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch fewer, and what both say; not where somebody reads what is between, nor in deterministic mode."""
    most = 20
    form = (
        replace(low_rank.MIDDLE, glue_bn=64) if fp8 else replace(low_rank.MANY, glue_bn=32)
    )  # of 96: whole tiles or not
    monkeypatch.setattr(low_rank, "FORMS", ((0, low_rank.FEW), (most, form)))
    block = Block(fp8=fp8, tokens=most, tuning=TILES)
    tape = block.record()
    step_ = Bucket(tokens=most, rows=4, singles=False, longest=64, adapted=True)
    program, naive = plan(tape, step_), plan(tape, step_, fuse=False)
    assert kinds(program).count("shrink") == kinds(program).count("expand") == 4 and "silu" not in kinds(program)
    assert sum("silu of gate, by up" in line for line in lines(program)) == 1 and kinds(program).count("sort") == 1
    assert kinds(naive).count("expand") == 4 and kinds(naive).count("silu") == 1
    ids = np.resize(np.array([1, -1, 0, 1, 2], np.int32), most)
    tolerance = 0.06 if fp8 else 2 * BF16_TOLERANCE
    wanted = block.run(naive, ids)
    block.made["inner"].fill_(torch.nan)
    got = block.run(program, ids)
    assert difference(got, wanted) < tolerance
    nobody = block.run(program, np.full(most, -1, np.int32))
    assert torch.equal(nobody[(ids < 0) | (ids == 2)], got[(ids < 0) | (ids == 2)]), "tokens to which nothing is added"
    assert difference(nobody, got) > 0.1
    if not fp8:
        assert kinds(plan(block.record(keep="both"), step_)).count("silu") == 1
        exact = plan(Block(tokens=most, tuning=TILES, deterministic=True).record(), step_)
        assert kinds(exact).count("silu") == 1 and kinds(exact).count("expand") == 4


def test_pieces_of_a_run_beside_all_of_w() -> None:
    """Llama 3.1 8B at 64 tokens on an H200: where W's programs all run at once, A's find room beside them. Five stages of 64 rows leave
    room for one program a multiprocessor, three for two."""
    tuning = tuned("NVIDIA H200")
    device = torch.device("meta")
    found = {}
    for name, sizes, k in (("qkv", (4096, 1024, 1024), 4096), ("o", (4096,), 4096), ("both", (14336,) * 2, 4096)):
        config = tuning.tile(64, sum(sizes), k, fp8=False)
        assert config is not None
        assert (
            low_rank_tile.shared_bytes(config, fp8=False) * (2 if name == "both" else 1) <= low_rank_tile.SHARED_BYTES
        )
        a = torch.empty(8, 16 * len(sizes), k, device=device)
        bank = LowRankBank(slots=8, rank=16, sizes=sizes, k=k, data=(a,), nbytes=0)
        pieces = low_rank_tile.pieces_of(bank, config, outputs=sum(sizes), multiprocessors=tuning.multiprocessors)
        found[name] = low_rank_tile.tiles_of_a(bank, config) * pieces, -(-sum(sizes) // config.bn) * config.split
    assert found == {"qkv": (36, 96), "o": (4, 128), "both": (32, 448)}
    assert all(sum(found[name]) <= tuning.multiprocessors for name in ("qkv", "o"))
