"""Attention over latents on the op set "cuda": every kernel and every plan of a step against kernels/reference_mla.py.

Runs as test_triton_ops.py does (TRITON_INTERPRET=1, or a GPU).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from itertools import pairwise
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

from tests.kernels.test_triton_ops import buffer, difference, live, make_ops, normal, seen  # noqa: E402
from tradewind.kernels import reference_mla  # noqa: E402
from tradewind.kernels.ops import KVLayer, LatentUp, PagedRows  # noqa: E402
from tradewind.kernels.triton import latent, latent_prefill, library  # noqa: E402
from tradewind.kernels.triton.ops import CudaOps  # noqa: E402
from tradewind.kernels.triton.planning import kernels_change_at, plan  # noqa: E402
from tradewind.kernels.triton.program import (  # noqa: E402
    Bucket,
    Fresh,
    Program,
)
from tradewind.kernels.triton.tuning import (  # noqa: E402
    LatentDecodeConfig,
    LatentPrefillConfig,
    LatentTileConfig,
    PrefillConfig,
    Tuning,
)

TOLERANCE = 1e-2
Size = tuple[int, int, int, int, int]
SIZES: dict[str, Size] = {
    "no powers of two": (3, 48, 16, 24, 40),
    "one head": (1, 16, 16, 8, 16),
    "powers of two": (4, 64, 16, 32, 32),
    "deepseek": (16, 512, 64, 128, 128),
    "more heads than a tile": (20, 32, 16, 16, 16),
}
"""Name -> heads, numbers of a latent, rotated dims, other dims of a query, dims of a value."""
MIXED = [(1, 1), (1, 17), (7, 7), (1, 100), (19, 90), (1, 65), (64, 64), (3, 130), (20, 20), (2, 9)]
"""(new tokens, length) of each row: of one token, that begin, that go on; lengths at and across the ends of pages."""
BEGIN = [(1, 1), (7, 7), (1, 100), (33, 33), (64, 64), (1, 30)]
"""The same without rows of several tokens that go on."""


@dataclass(frozen=True)
class Case:
    """Rows over random pages."""

    ops: CudaOps
    q: Any
    kv: KVLayer
    rows: PagedRows
    up: LatentUp
    k_up: torch.Tensor
    v_up: torch.Tensor
    shapes: list[tuple[int, int]]

    @property
    def rope(self) -> int:
        return self.kv.head_dim - self.up.rank

    @property
    def scale(self) -> float:
        return float(self.q.shape[1] // self.up.heads) ** -0.5

    @property
    def ones(self) -> Any:
        return np.repeat([n == 1 for n, _ in self.shapes], [n for n, _ in self.shapes])

    def wanted(self) -> Any:
        rows = self.rows
        return reference_mla.latent_attention(
            seen(self.q).float(), seen(self.kv.k), rows.query_start.cpu(), rows.lengths.cpu()[: len(self.shapes)],
            rows.page_table.cpu(), self.k_up.float(), self.v_up.float(), scale=self.scale,
        ).numpy()  # fmt: skip

    def choice(self, limit: int) -> tuple[Any, Any, Any]:
        """key_start, used of `choose_rows`; and by token, whether its row's keys are made."""
        count, device = len(self.rows.lengths), self.q.device
        key_start, used = (torch.full((n,), -1, dtype=torch.int32, device=device) for n in (count + 1, count))
        latent_prefill.choose_rows(
            key_start, used, query_start=self.rows.query_start, lengths=self.rows.lengths, rows=self.rows.rows, up=self.up,
            rope=self.rope, limit=limit,
        )  # fmt: skip
        made = np.repeat(used.cpu().numpy()[: len(self.shapes)] > 0, [n for n, _ in self.shapes])
        return key_start, used, made

    def paged(self) -> dict[str, Any]:
        return {"lengths": self.rows.lengths, "page_table": self.rows.page_table, "rows": self.rows.rows}

    def wide(self, lines: int) -> Any:
        return torch.full(
            (lines, self.up.heads, self.kv.head_dim), float("nan"), dtype=torch.bfloat16, device=self.q.device
        )

    def out(self) -> Any:
        shape = (len(self.q), self.up.heads * self.up.value)
        return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=self.q.device)


def make(
    shapes: list[tuple[int, int]],
    *,
    size: str = "powers of two",
    page: int = 16,
    spare: int = 0,
    seed: int = 0,
    **options: Any,
) -> Case:
    """spare: rows and tokens of the buffers beyond the live ones."""
    rng = np.random.default_rng(seed)
    heads, rank, rope, nope, value = SIZES[size]
    ops = make_ops(**options)
    pages = [-(-length // page) for _, length in shapes]
    kv = ops.latent_layer(pages=sum(pages) + 1, page_tokens=page, width=rank + rope, format="bf16")
    held = np.full(kv.k.shape, np.nan, np.float32)  # whoever reads what was not written is seen
    free = iter(rng.permutation(np.arange(1, sum(pages) + 1)))
    table = np.zeros((len(shapes) + spare, max(pages) + 1), np.int32)
    for row, (_, length) in enumerate(shapes):
        table[row, : pages[row]] = [next(free) for _ in range(pages[row])]
        position = np.arange(length)
        held[table[row, position // page], position % page] = rng.standard_normal((length, rank + rope))
    kv.k.copy_(torch.from_numpy(held))
    counts = [n for n, _ in shapes] + [0] * spare
    rows = PagedRows(
        query_start=ops.constant(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
        lengths=ops.constant(np.array([length for _, length in shapes] + [0] * spare, np.int32)),
        page_table=ops.constant(table),
        rows=ops.constant(live(len(shapes))),
    )
    k_up, v_up = (rng.standard_normal((heads, n, rank)).astype(np.float32) * rank**-0.5 for n in (nope, value))
    up = ops.pack_latent(k_up, v_up)
    assert up.nbytes == 2 * heads * (nope + value) * rank
    q = buffer(ops, rng.standard_normal((sum(counts) + spare, heads * (nope + rope))).astype(np.float32))
    rounded = [torch.from_numpy(each).bfloat16().double() for each in (k_up, v_up)]
    return Case(ops, q, kv, rows, up, *rounded, shapes)


IN, OUT = LatentTileConfig(16, 32, 4, 1), LatentTileConfig(16, 16, 4, 2, 16)


# ----------------------------------------------------------------------------------------------------------- one kernel


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("by_position", [False, True])
def test_store_and_enter(size: str, by_position: bool) -> None:
    """Both write the same latents; enter's queries are those that store turned, absorbed."""
    heads, rank, rope, nope, value = SIZES[size]
    ops, count = make_ops(), 5
    rng = np.random.default_rng(3)
    q, x = normal(7, heads * (nope + rope)), normal(7, rank + rope, seed=1)
    positions = np.array([3, 0, 9, 1, 2, 8, 8], np.int32)
    angle = rng.standard_normal((10, rope // 2)).astype(np.float32)
    table = np.concatenate([np.cos(angle), np.sin(angle)], 1)
    slots, weight = np.array([17, 3, 40, 18, 63, 1, 2], np.int32), normal(rank, seed=2)
    angles = ops.constant(table if by_position else table[positions])
    where = ops.constant(positions) if by_position else None
    common = {"weight": ops.constant(weight), "eps": 1e-6, "positions": where, "count": ops.constant(live(count))}
    up = ops.pack_latent(normal(heads, nope, rank, scale=rank**-0.5), normal(heads, value, rank))

    stored, latents = buffer(ops, q), buffer(ops, x)
    kv = [ops.latent_layer(pages=4, page_tokens=16, width=rank + rope, format="bf16") for _ in range(2)]
    turned, pages = reference_mla.latent_store(
        *(seen(each)[:count] for each in (stored, latents)), torch.from_numpy(table[positions])[:count].double(),
        torch.from_numpy(slots)[:count], seen(kv[0].k), heads=heads, weight=torch.from_numpy(weight).double(), eps=1e-6,
    )  # fmt: skip
    latent.latent_store(stored, latents, angles, ops.constant(slots), kv[0].k, heads=heads, **common)
    assert difference(ops.host(stored)[:count], turned) < TOLERANCE / 2
    assert np.array_equal(ops.host(stored)[count:], ops.host(buffer(ops, q))[count:]), "beyond the live tokens"
    assert difference(ops.host(kv[0].k), pages) < TOLERANCE / 2
    assert (ops.host(kv[0].k) != 0).any(-1).sum() == count

    asked = buffer(ops, q)
    out = ops.empty((7, heads, rank + rope), "bf16")
    for config in (IN, LatentTileConfig(64, 16, 4, 1)):
        latent.enter(asked, latents, angles, ops.constant(slots), kv[1].k, up, out=out.zero_(), config=config, **common)
        assert torch.equal(kv[1].k, kv[0].k) and torch.equal(asked, buffer(ops, q))
        each = turned.unflatten(-1, (heads, -1))
        wanted = torch.einsum("thn,hnc->thc", each[..., :nope], up.data[0][:, :nope].double().cpu())
        assert difference(ops.host(out)[:count, :, :rank], wanted) < TOLERANCE / 2
        assert difference(ops.host(out)[:count, :, rank:], each[..., nope:]) < TOLERANCE / 2


@pytest.mark.parametrize("size", SIZES)
def test_absorb_and_leave(size: str) -> None:
    """Every token; tiles in which some row goes on; one-token rows by row. What is not meant is left alone."""
    case = make(MIXED if size != "deepseek" else [*MIXED[:3], (3, 9), (2, 9), (4, 20), (48, 48)], size=size, spare=3)
    nope, rank, heads = case.up.nope, case.up.rank, case.up.heads
    key_start, _, made = case.choice(300)
    q, ones = seen(case.q).unflatten(-1, (heads, -1)), case.ones
    absorbed = torch.cat([torch.einsum("thn,hnc->thc", q[..., :nope], case.k_up), q[..., nope:]], -1)
    starts = case.rows.query_start.cpu().numpy()
    records = {"query_start": case.rows.query_start, "key_start": key_start, "rows": case.rows.rows}
    tokens = len(ones)
    ways = [(IN, OUT), (LatentTileConfig(64, 64, 4, 1), LatentTileConfig(32, 64, 4, 2, 64))]
    if size == "deepseek":
        ways = [(LatentTileConfig(16, 128, 4, 1), LatentTileConfig(16, 64, 4, 2, 128))]
    for into, back in ways:
        for whose, lone in ((latent.EVERY, False), (latent.LATER, False), (latent.LATER, True)):
            wide, out = case.wide(len(case.q)), case.out()
            given = records if whose == latent.LATER else {}
            latent.absorb(case.q, case.up, rope=case.rope, out=wide, whose=whose, lone=lone, config=into, **given)
            mine = ~made & (lone | ~ones) if whose == latent.LATER else np.ones(tokens, bool)
            assert difference(seen(wide)[:tokens][mine], absorbed[:tokens][mine]) < TOLERANCE / 2
            latent.leave(wide, case.up, out=out, whose=whose, lone=lone, config=back, **given)
            wanted = torch.einsum("thc,hvc->thv", seen(wide)[..., :rank], case.v_up).flatten(-2)
            assert difference(seen(out)[:tokens][mine], wanted[:tokens][mine]) < TOLERANCE / 2
            if whose == latent.LATER and into.block_t == 16:
                first = -(-int(starts[6]) // 16) * 16  # whole tiles of the row of 64 that begins
                assert seen(wide)[first : first + 32].isnan().all() and seen(out)[first : first + 32].isnan().all()

        wide, out = case.wide(len(case.shapes) + 3), case.out()
        alone = {"whose": latent.ALONE, "query_start": case.rows.query_start, "count": case.rows.rows}
        latent.absorb(case.q, case.up, rope=case.rope, out=wide, config=into, **alone)
        single = [row for row, (n, _) in enumerate(case.shapes) if n == 1]
        assert difference(seen(wide)[single], absorbed[starts[single]]) < TOLERANCE / 2
        latent.leave(wide, case.up, out=out, config=back, **alone)
        wanted = torch.einsum("rhc,hvc->rhv", seen(wide)[single][..., :rank], case.v_up).flatten(-2)
        assert difference(seen(out)[starts[single]], wanted) < TOLERANCE / 2
        assert seen(out)[:tokens][~ones].isnan().all() and seen(out)[tokens:].isnan().all()


@pytest.mark.parametrize(
    ("size", "page"),
    [
        ("powers of two", 16),
        ("powers of two", 64),
        ("no powers of two", 48),
        ("deepseek", 64),
        ("more heads than a tile", 16),
    ],
)
def test_decode(size: str, page: int) -> None:
    """Every number of splits, more of them than keys too; merged by tiles and token by token; among other rows."""
    big = size == "deepseek"
    lengths = [1, 16, 17, 64, 65, 200, 129] if not big else [1, 200]
    alone = make([(1, length) for length in lengths], size=size, page=page, spare=2)
    among = make(MIXED if not big else [(1, 90), (3, 3), (1, 4)], size=size, page=page, spare=2, seed=1)
    for case in (alone, among):
        starts = case.rows.query_start[: len(case.shapes) + 3]
        tokens = len(case.ones)
        mixed = case is among
        wanted = case.wanted()[:tokens]
        configs = [(1, 16), (2, 32), (8, 16), (32, 64)] if not big else [(1, 64), (4, 32)]
        for splits, block_n in configs:
            lines = len(case.shapes) + 2
            wide, out = case.wide(lines), case.out()
            given = {"whose": latent.ALONE, "query_start": starts} if mixed else {}
            given["count"] = case.rows.rows
            latent.absorb(
                case.q[:lines] if not mixed else case.q,
                case.up,
                rope=case.rope,
                out=wide,
                config=IN if not big else LatentTileConfig(16, 128, 4, 1),
                **given,
            )
            floats = latent.parts_floats(lines, case.up.heads, case.up.rank, splits)
            parts = torch.full((floats,), float("nan"), dtype=torch.float32, device=case.q.device) if floats else None
            latent.latent_decode(
                wide, case.kv.k, scale=case.scale, rope=case.rope, query_start=starts if mixed else None, parts=parts,
                config=LatentDecodeConfig(splits, 16, block_n, 4, 2), **case.paged(),
            )  # fmt: skip
            ways = [OUT] if mixed else [OUT, LatentTileConfig(1, 8, 4, 1, 64), LatentTileConfig(1, 16, 4, 1, 512)]
            for config in ways:
                out.fill_(float("nan"))
                target = out if mixed else out[:lines]
                latent.leave(wide, case.up, out=target, parts=parts, splits=splits, config=config, **given)
                mine = case.ones if mixed else np.ones(tokens, bool)
                assert difference(seen(out)[:tokens][mine], wanted[mine]) < TOLERANCE, (splits, block_n, config)
                if mixed:
                    assert seen(out)[:tokens][~mine].isnan().all()


@pytest.mark.parametrize("size", ["powers of two", "no powers of two"])
@pytest.mark.parametrize("splits", [2, 8, 16, 32, 64])
def test_splits_leave_token_by_token(size: str, splits: int) -> None:
    """More splits than are under way at once; tops far apart; splits that left nothing, as all of the last row; dead tokens."""
    heads, rank, rope, nope, value = SIZES[size]
    ops, rows, live_rows = make_ops(), 4, 3
    up = ops.pack_latent(normal(heads, nope, rank), normal(heads, value, rank, seed=1, scale=rank**-0.5))
    sums, totals = normal(rows, heads, splits, rank, seed=2), np.abs(normal(rows, heads, splits, seed=3)) + 0.5
    tops = normal(rows, heads, splits, seed=4, scale=30.0)
    left = np.random.default_rng(5).random(tops.shape) < 0.4
    left[:, :, 0], left[2] = False, True
    tops[left], totals[left] = -np.inf, 0.0
    top = np.where(left.all(-1, keepdims=True), 0.0, tops.max(-1, keepdims=True))
    share = np.exp2(tops - top)
    whole = np.maximum((share * totals).sum(-1), 1e-30)
    mixed = torch.from_numpy((share[..., None] * sums).sum(2) / whole[..., None])
    wanted = torch.einsum("rhc,hvc->rhv", mixed.double(), up.data[0][:, nope:].double().cpu()).flatten(1)
    sums[left] = np.nan  # was never written
    parts = ops.constant(np.concatenate([each.ravel() for each in (sums, tops, totals)]).astype(np.float32))
    assert parts.numel() == latent.parts_floats(rows, heads, rank, splits)
    wide = torch.full((rows, heads, rank + rope), float("nan"), dtype=torch.bfloat16, device=parts.device)
    for config in (LatentTileConfig(1, 16, 4, 1, 512), LatentTileConfig(1, 8, 4, 1, 16)):
        out = torch.full((rows, heads * value), 7.0, dtype=torch.bfloat16, device=parts.device)
        count = ops.constant(live(live_rows))
        latent.leave(wide, up, out=out, parts=parts, splits=splits, count=count, config=config)
        assert difference(seen(out)[:live_rows], wanted[:live_rows]) < TOLERANCE / 2
        assert (seen(out)[2] == 0).all() and (seen(out)[live_rows:] == 7).all()


@pytest.mark.parametrize(("size", "page", "config"), [
    ("powers of two", 16, LatentPrefillConfig(16, 4, 16, 4, 2)), ("powers of two", 64, LatentPrefillConfig(64, 16, 32, 8, 2)),
    ("no powers of two", 48, LatentPrefillConfig(32, 16, 32, 8, 2)), ("deepseek", 64, LatentPrefillConfig(64, 16, 32, 8, 2)),
    ("more heads than a tile", 16, LatentPrefillConfig(32, 16, 16, 4, 2)), ("one head", 16, LatentPrefillConfig(16, 16, 16, 4, 2)),
])  # fmt: skip
def test_prefill(size: str, page: int, config: LatentPrefillConfig) -> None:
    shapes = MIXED if size != "deepseek" else [(1, 70), (3, 70), (9, 9)]
    case = make(shapes, size=size, page=page, spare=2)
    tokens, wanted = len(case.ones), case.wanted()[: len(case.ones)]
    key_start, _, made = case.choice(100)
    for singles, some in ((True, False), (False, True), (True, True)):
        wide, out = case.wide(len(case.q)), case.out()
        latent.absorb(case.q, case.up, rope=case.rope, out=wide, config=IN)
        before = wide.clone()
        latent_prefill.latent_prefill(
            wide, case.kv.k, query_start=case.rows.query_start, scale=case.scale, rope=case.rope, singles=singles,
            key_start=key_start if some else None, config=config, **case.paged(),
        )  # fmt: skip
        latent.leave(wide, case.up, out=out, config=OUT)
        mine = (~made | (not some)) & (singles | ~case.ones)
        assert difference(seen(out)[:tokens][mine], wanted[mine]) < TOLERANCE
        assert torch.equal(seen(wide)[:tokens][~mine], seen(before)[:tokens][~mine])


def test_whose_keys_are_made() -> None:
    """Rows of several tokens that begin, and others where the reference's count says so, as far as there is room."""
    shapes = [(1, 90), (30, 100), (2, 100), (7, 7), (99, 100), (60, 200), (1, 1), (50, 50)]
    for size in ("deepseek", "powers of two", "one head"):
        case = make(shapes, size=size, page=64, spare=3)
        facts = {"rank": case.up.rank, "rope": case.rope, "nope": case.up.nope, "value": case.up.value}
        for limit in (10_000, 240, 100, 6):
            start, wanted = [0], []
            for n, length in shapes:
                cheap = n > 1 and (n == length or reference_mla.naive_is_cheaper(n, length, **facts))
                wanted.append((length if cheap else 0, n if cheap else 0))
            reach = np.cumsum([length for length, _ in wanted])
            kept = [(length, n) if end <= limit else (0, 0) for (length, n), end in zip(wanted, reach, strict=True)]
            start = np.concatenate([[0], np.cumsum([length for length, _ in kept]), [sum(x for x, _ in kept)] * 3])
            key_start, used, _ = case.choice(limit)
            assert key_start.tolist() == start.tolist(), (size, limit)
            assert used.tolist() == [n for _, n in kept] + [0] * 3


@pytest.mark.parametrize("size", SIZES)
def test_naive_form(size: str) -> None:
    """Keys and values made of latents, and attention over them: rows that begin; others are left alone."""
    case = make(MIXED if size != "deepseek" else [(1, 9), (66, 66), (3, 9), (60, 70)], size=size, page=64, spare=2)
    tokens, wanted = len(case.ones), case.wanted()
    each = case.up.nope + case.rope + case.up.value
    for block in (16, 64) if size != "deepseek" else (64,):
        for limit in (400, 30):
            key_start, _, mine = case.choice(limit)
            made = int(key_start[-1])
            kv = torch.full((limit, case.up.heads, each), float("nan"), dtype=torch.bfloat16, device=case.q.device)
            out = case.out()
            given = {"key_start": key_start, "rows": case.rows.rows, "rope": case.rope}
            latent_prefill.make_keys(
                case.kv.k,
                case.up,
                page_table=case.rows.page_table,
                out=kv,
                config=LatentTileConfig(block, 128, 4, 2, 16),
                **given,
            )
            assert seen(kv)[made:].isnan().all() and not seen(kv)[:made].isnan().any() and made <= limit
            latent_prefill.fresh_latents(
                case.q, kv, query_start=case.rows.query_start, value=case.up.value, scale=case.scale, out=out,
                config=PrefillConfig(block, 16 if block == 16 else 64, 4, 2), **given,
            )  # fmt: skip
            assert not mine.any() or difference(seen(out)[:tokens][mine], wanted[:tokens][mine]) < TOLERANCE
            assert seen(out)[:tokens][~mine].isnan().all()
            assert mine.any() == (limit == 400 or size != "deepseek")


def test_the_library_takes_keys_made_of_latents() -> None:
    """What stands for FlashAttention 3 on a CPU; on a GPU the package itself, where it is installed."""
    case = make([(70, 70), (60, 75)], size="deepseek", page=64)
    if case.q.device.type == "cuda":
        pytest.importorskip("fa3_fwd")
    assert library.serves_latents(192, 128) and not library.serves_latents(128, 128)
    kv, out = torch.zeros(160, 16, 320, dtype=torch.bfloat16, device=case.q.device), case.out()
    key_start, used, made = case.choice(160)
    assert made.all()
    latent_prefill.make_keys(
        case.kv.k, case.up, key_start=key_start, page_table=case.rows.page_table, rows=case.rows.rows, rope=64, out=kv,
        config=LatentTileConfig(64, 128, 4, 2, 64),
    )  # fmt: skip
    for some in (None, used):
        library.fresh_latents(
            case.q, kv, case.rows.query_start, key_start, heads=16, value=128, scale=case.scale, used=some, out=out
        )
        assert difference(seen(out), case.wanted()) < TOLERANCE


# ---------------------------------------------------------------------------------------------------------------- steps


def program_of(
    case: Case,
    *,
    fresh: Fresh = "none",
    tokens: int | None = None,
    rows: int | None = None,
    fuse: bool = True,
    library: bool = False,
) -> tuple[Program, Any]:
    """store and attention of a step, planned; and where the answer will be. The latents of the step's tokens are in `case.kv` already:
    they are put there again by the store."""
    ops, n = case.ops, len(case.q)
    out = case.out()
    with ops.record() as tape:
        ops.latent_attention(
            case.q, case.kv, case.rows, case.up, scale=case.scale, out=out, **({"fresh": True} if library else {})
        )
    bucket = Bucket(tokens=tokens or n, rows=rows or len(case.rows.lengths), singles=False, longest=256, fresh=fresh)
    return plan(tape, bucket, fuse=fuse), out


@pytest.mark.parametrize("size", ["powers of two", "no powers of two"])
@pytest.mark.parametrize("fresh", ["none", "all"])
def test_steps_with_prompts(size: str, fresh: Fresh) -> None:
    for page in (16, 64):
        for shapes in ([BEGIN] if fresh == "all" else [MIXED, BEGIN, [(19, 90)], [(1, 40)]]) + [[(40, 40)]]:
            case = make(shapes, size=size, page=page)
            program, out = program_of(case, fresh=fresh)
            program.run()
            assert difference(seen(out), case.wanted()) < TOLERANCE, (shapes, page)
            lines = program.describe()
            assert ("prefill" in lines) == (fresh == "none") and "fresh" in lines and "choose" in lines
            assert ("decode" in lines) == (len(shapes) > 1)


def test_steps_with_the_library() -> None:
    """FlashAttention 3 where all prompts begin: its answers for one-token rows are written over."""
    for shapes in ([(1, 70), (9, 9), (1, 3)], [(12, 12)]):
        case = make(shapes, size="deepseek", page=64)
        if case.q.device.type == "cuda":
            pytest.importorskip("fa3_fwd")
        program, out = program_of(case, fresh="all", library=True)
        assert program.describe().count("fa3") == 1 and "fresh latents" not in program.describe()
        program.run()
        assert difference(seen(out), case.wanted()) < TOLERANCE
        program, out = program_of(case, fresh="none", library=True)
        assert ("decode" in program.describe()) == (len(shapes) > 1) and "some rows" in program.describe()
        program.run()
        assert difference(seen(out), case.wanted()) < TOLERANCE


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_decode_step(fuse: bool, deterministic: bool) -> None:
    """From raw queries and latents: one launch stores and absorbs where that is planned; padding rows write nothing."""
    shapes = [(1, length) for length in (1, 16, 17, 100, 64)]
    case = make(shapes, page=16, spare=3, deterministic=deterministic)
    ops, up, heads = case.ops, case.up, case.up.heads
    x, weight = buffer(ops, normal(8, case.kv.head_dim, seed=5)), ops.constant(normal(up.rank, seed=6))
    table = case.rows.page_table.cpu().numpy()
    slots = np.array(
        [table[row, (length - 1) // 16] * 16 + (length - 1) % 16 for row, (_, length) in enumerate(shapes)] + [1, 2, 3],
        np.int32,
    )
    positions = np.array([length - 1 for _, length in shapes] + [0] * 3, np.int32)
    inv_freq = ops.constant(normal(case.rope // 2, seed=7))
    angles = ops.empty((8, case.rope), "f32")
    query = case.q.clone()
    out = case.out()
    count = case.rows.rows
    with ops.record() as tape:
        ops.rope_angles(
            ops_positions := torch.from_numpy(positions).to(case.q.device), inv_freq, scale=1.0, out=angles, count=count
        )
        ops.latent_store(
            case.q,
            x,
            angles,
            torch.from_numpy(slots).to(case.q.device),
            case.kv,
            heads=heads,
            weight=weight,
            eps=1e-6,
            count=count,
        )
        ops.latent_attention(case.q, case.kv, case.rows, up, scale=case.scale, out=out)
    program = plan(tape, Bucket(tokens=8, rows=8, singles=True, longest=256), fuse=fuse)
    assert ("enter" in program.describe()) == (fuse and not deterministic)
    angle = seen(ops_positions)[:, None] * seen(inv_freq)
    turned, pages = reference_mla.latent_store(
        seen(query)[:5], seen(x)[:5], torch.cat([angle.cos(), angle.sin()], 1)[:5], torch.from_numpy(slots)[:5], seen(case.kv.k),
        heads=heads, weight=seen(weight), eps=1e-6,
    )  # fmt: skip
    program.run()
    assert difference(np.nan_to_num(ops.host(case.kv.k)), torch.nan_to_num(pages)) < TOLERANCE
    assert np.isnan(ops.host(case.kv.k)[0]).all(), "padding rows"
    wanted = reference_mla.latent_attention(
        turned.float(), seen(case.kv.k), case.rows.query_start.cpu(), case.rows.lengths.cpu()[:5], case.rows.page_table.cpu(),
        case.k_up.float(), case.v_up.float(), scale=case.scale,
    )  # fmt: skip
    assert difference(seen(out)[:5], wanted) < TOLERANCE


def test_deterministic_rows_are_the_same_in_any_company() -> None:
    """Bit for bit: a token alone, in a step of others, in pieces of other lengths."""
    shapes = [(1, 100), (5, 70), (33, 33), (1, 17), (12, 90)]
    case = make(shapes, page=16, deterministic=True)
    program, out = program_of(case)
    program.run()
    whole = out.clone()
    assert difference(seen(whole), case.wanted()) < TOLERANCE
    starts = case.rows.query_start.tolist()
    for row, (n, length) in enumerate(shapes):
        for piece in {1, n, min(n, 3)}:
            done = 0
            while done < n:
                size = min(piece, n - done)
                rows = PagedRows(
                    query_start=case.ops.constant(np.array([0, size], np.int32)),
                    lengths=case.ops.constant(np.array([length - n + done + size], np.int32)),
                    page_table=case.rows.page_table[row : row + 1].clone(),
                    rows=case.ops.constant(live(1)),
                )
                begin = starts[row] + done
                alone = Case(
                    case.ops,
                    case.q[begin : begin + size].clone(),
                    case.kv,
                    rows,
                    case.up,
                    case.k_up,
                    case.v_up,
                    [(size, length - n + done + size)],
                )
                program, answer = program_of(alone)
                program.run()
                assert torch.equal(answer, whole[begin : begin + size]), (row, piece, done)
                done += size


def test_no_rows_and_empty_rows() -> None:
    """Nothing is written where no row is live; rows without tokens stand between others."""
    case = make([(3, 40), (0, 0), (1, 9), (0, 0), (5, 5)], page=16)
    program, out = program_of(case)
    program.run()
    assert difference(seen(out), case.wanted()) < TOLERANCE
    case.rows.rows.zero_()
    for again in (program, program_of(case, fresh="all")[0]):
        out.fill_(7.0)
        again.run()
        assert (seen(out) == 7).all()


def test_rows_at_once_eagerly() -> None:
    """Outside a recording the ops run by themselves."""
    case = make(MIXED, page=16)
    out = case.out()
    case.ops.latent_attention(case.q, case.kv, case.rows, case.up, scale=case.scale, out=out)
    assert difference(seen(out), case.wanted()) < TOLERANCE
    source, target = (case.rows.page_table[row, :1].cpu().numpy() for row in (4, 9))
    before = case.ops.host(case.kv.k)
    case.ops.copy_pages(case.kv, source, target)
    assert np.array_equal(case.ops.host(case.kv.k)[target], before[source], equal_nan=True)


def test_constants_change_where_kernels_do() -> None:
    case = make([(1, 9)])
    with case.ops.record() as tape:
        case.ops.latent_attention(case.q, case.kv, case.rows, case.up, scale=1.0, out=case.out())
    sizes = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512)
    changes = kernels_change_at(tape, sizes)
    tuning = Tuning(multiprocessors=132)
    for low, high in pairwise(sizes):
        if tuning.latent_decode(low, 512, heads=4) != tuning.latent_decode(high, 512, heads=4):
            assert high in changes
