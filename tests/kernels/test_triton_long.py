"""Attention of few tokens against many keys, cut over the keys: against the reference, the uncut kernel, and where nothing is to cut.

Without a GPU it is skipped unless TRITON_INTERPRET=1 is set before Python starts; test_triton_interpreter.py does that.
"""

from __future__ import annotations

import os
import sys
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

from tradewind.kernels import reference  # noqa: E402
from tradewind.kernels.triton import decode, prefill  # noqa: E402
from tradewind.kernels.triton.tuning import DecodeConfig, PrefillConfig  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
BF16, FP8, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
TOLERANCE = 6e-3
PAGE = 32


def normal(*shape: int, seed: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=source).to(dtype).to(DEVICE)


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(values).tolist(), dtype=torch.int32, device=DEVICE)


def difference(found: torch.Tensor, truth: torch.Tensor) -> float:
    """||a - b|| / ||b||; a NaN never passes."""
    found, truth = found.double().cpu(), truth.double().cpu()
    return ((found - truth).norm() / truth.norm()).item()


class Rows:
    """Rows of `counts` tokens that end texts of `lengths` tokens, and an empty row behind them."""

    def __init__(
        self, counts: list[int], lengths: list[int], *, seed: int, heads: int = 4, groups: int = 2, dim: int = 16,
        kv: torch.dtype = BF16, capacity: int | None = None,
    ) -> None:  # fmt: skip
        self.heads, self.live = heads, len(counts)
        ends = np.cumsum(counts)
        width = -(-max(lengths) // PAGE)
        order = 1 + np.random.default_rng(seed).permutation(len(counts) * width)
        self.table = ints([*order.reshape(len(counts), width).tolist(), [0] * width])
        self.starts, self.lengths = ints([0, *ends, ends[-1]]), ints([*lengths, 0])
        self.k, self.v = (normal(len(order) + 1, groups, PAGE, dim, seed=seed + i).to(kv) for i in (1, 2))
        self.tokens = int(ends[-1])
        self.q = normal(capacity or self.tokens, heads * dim, seed=seed + 3)

    def truth(self, **options: Any) -> torch.Tensor:
        pages = [side.float().double().cpu().transpose(1, 2) for side in (self.k, self.v)]
        sinks = options.pop("sinks", None)
        live = self.live
        return reference.attention(
            self.q.double().cpu()[: self.tokens], *pages, self.starts.cpu()[: live + 1], self.lengths.cpu()[:live], self.table.cpu()[:live],
            heads=self.heads, scale=0.3, sinks=None if sinks is None else sinks.double().cpu(), **options,
        )  # fmt: skip

    def run(self, *, splits: int, last: int = 0, least_keys: int = 16, **options: Any) -> torch.Tensor:
        """What the kernels leave in a target that was all NaN; 16 rows a tile, 16 keys."""
        tma, pairs = options.pop("tma", False), options.pop("pairs", False)
        out = torch.full_like(self.q, float("nan"))
        tokens, dim = len(self.q), self.q.shape[1] // self.heads
        need = prefill.prefill_workspace_floats(tokens, heads=self.heads, head_dim=dim, splits=splits)
        prefill.paged_prefill(
            self.q, self.k, self.v, query_start=self.starts, lengths=self.lengths, page_table=self.table, heads=self.heads, scale=0.3,
            out=out, rows=ints([self.live]), last=last,
            config=PrefillConfig(16, 16, 4, 2, tma, pairs, splits=splits, least_keys=least_keys),
            workspace=torch.full((need,), float("nan"), device=DEVICE) if splits > 1 else None, **options,
        )  # fmt: skip
        return out[: self.tokens]


@pytest.mark.parametrize("seed", [10, 20])
@pytest.mark.parametrize(("splits", "least_keys"), [(2, 16), (5, 16), (16, 16), (16, 64), (4, 4096)])
def test_cut_attention_equals_the_reference(seed, splits, least_keys):
    rows = Rows([9, 1, 13], [9, 70, 333], seed=seed)
    found = rows.run(splits=splits, least_keys=least_keys)
    assert difference(found, rows.truth(window=None)) < TOLERANCE
    assert difference(found, rows.run(splits=1)) < TOLERANCE


@pytest.mark.parametrize("extra", ["window", "chunked", "softcap", "sinks", "fp8", "tma", "pairs", "ratio of three"])
@pytest.mark.parametrize("splits", [3, 8])
def test_cut_attention_of_every_kind(extra, splits):
    groups, heads = (1, 3) if extra == "ratio of three" else (2, 4)
    rows = Rows([1, 21, 6], [40, 190, 301], seed=splits, heads=heads, groups=groups, kv=FP8 if extra == "fp8" else BF16)
    options: dict[str, Any] = {"window": 100 if extra in ("window", "chunked") else None}
    if extra == "chunked":
        options["chunked"] = True
    if extra == "softcap":
        options["softcap"] = 2.0
    if extra == "sinks":
        options["sinks"] = normal(heads, seed=7, dtype=F32)
    truth = rows.truth(**options)
    ways = {"tma": extra in ("tma", "pairs"), "pairs": extra == "pairs"}
    assert difference(rows.run(splits=splits, **options, **ways), truth) < TOLERANCE


@pytest.mark.parametrize("last", [1, 2, 4])
def test_only_the_last_rows_are_computed(last):
    """As in a step of decoding rows and a chunk or two: those before are another kernel's."""
    counts, lengths = [1, 1, 1, 1, 1, 18], [30, 31, 200, 45, 260, 290]
    if last == 2:
        counts[4] = 11
    rows = Rows(counts, lengths, seed=last, capacity=48)
    first = 4 if last == 2 else 5  # rows of one token among the last ones are left alone, too
    found = rows.run(splits=6, last=last, singles=False)
    assert found[:first].isnan().all()
    assert difference(found[first:], rows.truth(window=None)[first:]) < TOLERANCE


def test_last_rows_uncut():
    rows = Rows([1, 1, 20], [50, 60, 150], seed=3)
    found = rows.run(splits=1, last=1, singles=False)
    assert found[:2].isnan().all() and difference(found[2:], rows.truth(window=None)[2:]) < TOLERANCE


def test_rows_that_begin_in_the_step_are_left_alone_where_asked():
    rows = Rows([17, 17], [17, 250], seed=5)
    found = rows.run(splits=4, begun=False)
    assert found[:17].isnan().all() and difference(found[17:], rows.truth(window=None)[17:]) < TOLERANCE


def test_a_cut_does_not_depend_on_neighbours():
    """The same row, alone and behind another: its own keys decide how it is cut."""
    alone = Rows([12], [280], seed=8)
    beside = Rows([12, 12], [90, 280], seed=8)
    beside.k, beside.v = (torch.cat([side, other], 0) for side, other in ((beside.k, alone.k), (beside.v, alone.v)))
    shift = len(beside.k) - len(alone.k)
    beside.table[1] = alone.table[0] + shift
    beside.q[12:24] = alone.q[:12]
    assert torch.equal(alone.run(splits=7), beside.run(splits=7)[12:])


def test_an_empty_step_writes_nothing():
    rows = Rows([8], [100], seed=1)
    rows.live = 0
    assert rows.run(splits=4).isnan().all() and rows.run(splits=4, last=1).isnan().all()


@pytest.mark.parametrize("least_keys", [0, 64, 100, 4096])
def test_decoding_rows_are_cut_into_no_crumbs(least_keys):
    """One long row among short ones; a piece is whole tiles of 16 keys."""
    rows = Rows([1, 1, 1, 1], [3, 40, 333, 64], seed=4)
    need = decode.decode_workspace_floats(4, heads=4, head_dim=16, splits=8)
    out, work = torch.full_like(rows.q, float("nan")), torch.full((need,), float("nan"), device=DEVICE)
    arrived = ints([0] * 8)
    decode.paged_decode(
        rows.q, rows.k, rows.v, lengths=rows.lengths[:4], page_table=rows.table[:4], heads=4, scale=0.3, out=out,
        config=DecodeConfig(8, 16, 4, 2, least_keys), workspace=work, arrived=arrived,
    )  # fmt: skip
    assert difference(out, rows.truth(window=None)) < TOLERANCE and not arrived.any()
    floats = 2 * 8 * 2 * (16 + 2)  # of a row: two kv heads, 8 pieces, two heads each
    assert bool(work[floats : 2 * floats].isnan().all()) == (least_keys >= 64), "40 keys in one piece need no merging"


@pytest.mark.parametrize("heads", [4, 16])
def test_rows_of_one_token_among_the_last_ones_take_no_tile_from_them(heads):
    """Two prompts where up to four are computed: tiles are for 32 tokens and three more."""
    rows = Rows([1] * 5 + [15, 17], [30] * 5 + [200, 170], seed=6, capacity=48, heads=heads, groups=1)
    found = rows.run(splits=3, last=4, last_tokens=32, singles=False)
    assert found[:5].isnan().all() and difference(found[5:], rows.truth(window=None)[5:]) < TOLERANCE


def test_no_more_tiles_than_the_last_rows_need():
    rows = Rows([1] * 9 + [12], [30] * 9 + [300], seed=6, capacity=64)
    found = rows.run(splits=5, last=1, last_tokens=16, singles=False)
    assert found[:9].isnan().all() and difference(found[9:], rows.truth(window=None)[9:]) < TOLERANCE
