"""Attention over keys that rows share, and of prompts that begin in a step beside others that go on: against the ordinary kernels' truth.

Without a GPU it is skipped unless TRITON_INTERPRET=1 is set before Python starts; test_triton_interpreter.py does that.
"""

from __future__ import annotations

import os
import sys
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

from tradewind.contract.kv import KVGroup  # noqa: E402
from tradewind.kernels import reference  # noqa: E402
from tradewind.kernels.triton import decode, library, prefill, shared, step  # noqa: E402
from tradewind.kernels.triton.tuning import DecodeConfig, PrefillConfig, Tuning  # noqa: E402
from tradewind.runner.sharing import SharedPages  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
BF16, FP8, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
TOLERANCE = 6e-3


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=source).to(dtype).to(DEVICE)


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(values).tolist(), dtype=torch.int32, device=DEVICE)


def difference(found: torch.Tensor, truth: torch.Tensor) -> float:
    """||a - b|| / ||b||; a NaN never passes."""
    found, truth = found.double().cpu(), truth.double().cpu()
    return ((found - truth).norm() / truth.norm()).item()


class Step:
    """Rows with `common` leading pages in common: a page table, keys and values, and what `lay_out` would say of them."""

    def __init__(
        self, lengths: list[int], *, common: int, counts: list[int] | None = None, page: int = 16, heads: int = 4, groups: int = 2,
        dim: int = 16, kv: torch.dtype = BF16, spare_rows: int = 1,
    ) -> None:  # fmt: skip
        self.heads, self.page = heads, page
        self.counts = counts or [1] * len(lengths)
        width = -(-max(-(-length // page) for length in lengths) // 4) * 4
        table = np.zeros((len(lengths) + spare_rows, width), np.int32)
        following = iter(1 + np.random.default_rng(3).permutation(common + len(lengths) * width))
        table[: len(lengths), :common] = [[next(following) for _ in range(common)]]
        for row, length in enumerate(lengths):
            for place in range(min(common, -(-length // page)), -(-length // page)):
                table[row, place] = next(following)
        self.plain_table = table
        self.table = ints(table)
        self.lengths = ints([*lengths, *[0] * spare_rows])
        ends = np.cumsum(self.counts)
        self.starts = ints([0, *ends, *[ends[-1]] * spare_rows])
        self.rows = ints([len(lengths)])
        pages = 1 + int(table.max())
        self.k, self.v = (normal(pages, groups, page, dim, seed=seed).to(kv) for seed in (1, 2))
        self.q = normal(int(ends[-1]), heads * dim, seed=4)

    def truth(self, *, softcap: float | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        logical = [pages.float().double().cpu().transpose(1, 2) for pages in (self.k, self.v)]
        live = len(self.counts)
        return reference.attention(
            self.q.double().cpu(), *logical, self.starts.cpu()[: live + 1], self.lengths.cpu()[:live], self.table.cpu(), heads=self.heads,
            scale=0.3, window=None, softcap=softcap, sinks=None if sinks is None else sinks.double().cpu(),
        )  # fmt: skip

    def found(self, *, least_rows: int = 2, least_keys: int = 1) -> torch.Tensor:
        found = ints([-1] * 4)
        shared.find_shared(
            self.table, self.lengths, self.starts, self.rows, page_tokens=self.page, least_rows=least_rows, least_keys=least_keys,
            found=found,
        )  # fmt: skip
        return found

    def singles(self) -> list[int]:
        """Tokens of the one-token rows."""
        return [int(first) for first, end in pairwise(self.starts.tolist()) if end - first == 1]

    def run(
        self, *, config: DecodeConfig, splits: int, tile: PrefillConfig, found: torch.Tensor | None = None, mixed: bool = False,
        softcap: float | None = None, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The pass over shared keys, then the ordinary kernel behind them."""
        dim, rows = self.q.shape[1] // self.heads, len(self.lengths)
        need = shared.shared_parts_floats(rows, heads=self.heads, head_dim=dim, splits=splits)
        keys = decode.SharedKeys(
            found=self.found() if found is None else found,
            parts=torch.full((need,), float("nan"), device=DEVICE),
            splits=splits,
            block_n=tile.block_n,
        )
        common: dict[str, Any] = {
            "page_table": self.table,
            "heads": self.heads,
            "scale": 0.3,
            "softcap": softcap,
            "rows": self.rows,
        }
        common["query_start"] = self.starts if mixed else None
        shared.shared_attention(self.q, self.k, self.v, keys=keys, config=tile, **common)
        out = torch.full_like(self.q, float("nan"))
        need = decode.decode_workspace_floats(rows, heads=self.heads, head_dim=dim, splits=config.splits)
        arrived = torch.zeros(rows * self.k.shape[1], dtype=torch.int32, device=DEVICE)
        decode.paged_decode(
            self.q, self.k, self.v, lengths=self.lengths, out=out, config=config, shared=keys, sinks=sinks,
            workspace=torch.empty(need, dtype=F32, device=DEVICE), arrived=arrived, **common,
        )  # fmt: skip
        assert arrived.count_nonzero() == 0
        self.parts = keys.parts.view(rows, -1)
        return out


TILE = PrefillConfig(16, 16, 4, 2)
ONE, FOUR = DecodeConfig(1, 16, 4, 2), DecodeConfig(4, 16, 4, 2)


# ------------------------------------------------------------------------------------------------- how many are shared


@pytest.mark.parametrize("rows", [2, 5, 70])
def test_shared_keys_are_counted_in_full_pages_of_older_keys(rows):
    draw = np.random.default_rng(rows)
    for common, shortest in ((0, 40), (3, 90), (3, 48), (3, 49), (3, 33), (20, 330), (16, 257), (40, 2000)):
        lengths = [shortest, *(shortest + draw.integers(0, 40, rows - 1)).tolist()]
        made = Step(lengths, common=common, spare_rows=int(draw.integers(0, 3)))
        # The page of a row's newest key is written in this very step.
        assert made.found()[0] == min(common, (shortest - 1) // 16) * 16, (common, shortest)


def test_sharing_ends_where_pages_part_even_if_they_meet_again():
    made = Step([130, 140, 150], common=8)
    made.table[1, 5] = 77
    assert made.found().tolist()[:2] == [80, 0]
    made.table[2, 0] = 77
    assert made.found()[0] == 0


def test_too_little_sharing_is_none():
    made = Step([130, 140, 150], common=4)
    assert made.found(least_rows=3, least_keys=64)[0] == 64
    assert made.found(least_rows=4)[0] == 0, "too few rows"
    assert made.found(least_keys=65)[0] == 0, "too few keys"
    assert Step([130], common=4).found()[0] == 0, "one row shares with nobody"
    empty = Step([130, 140], common=4)
    empty.rows = ints([0])
    assert empty.found()[0] == 0


def test_rows_of_several_tokens_have_no_say():
    made = Step([20, 130, 140, 9], common=0, counts=[20, 1, 1, 9])
    made.table[2, :5] = made.table[1, :5]
    assert made.found().tolist()[:2] == [80, 1]
    assert Step([130, 140], common=4, counts=[1, 2]).found()[0] == 0


# ------------------------------------------------------------------------------------------------------ the attention


@pytest.mark.parametrize("config", [ONE, FOUR], ids=["one split", "four splits"])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("kv", [BF16, FP8])
def test_rows_behind_shared_keys(config, splits, kv):
    made = Step([100, 81, 97, 300, 128], common=5, kv=kv)
    assert made.found()[0] == 80
    out = made.run(config=config, splits=splits, tile=TILE)
    assert difference(out, made.truth()) < TOLERANCE


@pytest.mark.parametrize(
    "tile",
    [PrefillConfig(32, 32, 4, 2), PrefillConfig(16, 64, 4, 2), PrefillConfig(16, 16, 4, 2, True)],
    ids=["32", "64", "tma"],
)
def test_tiles_need_not_divide_the_shared_keys(tile):
    made = Step([100, 81, 97, 120, 90, 83, 99, 110, 85], common=5, heads=6)  # 80 keys; three heads packed into four
    out = made.run(config=DecodeConfig(1, 32, 4, 2), splits=2, tile=tile)
    assert difference(out, made.truth()) < TOLERANCE


def test_one_head_a_group_softcap_and_sinks():
    sinks = normal(4, seed=9, dtype=F32)
    made = Step([100, 81, 97], common=4, groups=4)
    for config in (ONE, FOUR):
        out = made.run(config=config, splits=2, tile=TILE, softcap=4.0, sinks=sinks)
        assert difference(out, made.truth(softcap=4.0, sinks=sinks)) < TOLERANCE


@pytest.mark.parametrize("config", [ONE, FOUR], ids=["one split", "four splits"])
def test_with_nothing_shared_bits_are_those_of_the_ordinary_kernel(config):
    made = Step([100, 81, 97], common=0)
    out = made.run(config=config, splits=4, tile=TILE)  # parts are NaN: nothing of them may be read
    need = decode.decode_workspace_floats(4, heads=4, head_dim=16, splits=config.splits)
    plain = torch.full_like(made.q, float("nan"))
    decode.paged_decode(
        made.q, made.k, made.v, lengths=made.lengths, page_table=made.table, heads=4, scale=0.3, out=plain, rows=made.rows, config=config,
        workspace=torch.empty(need, dtype=F32, device=DEVICE), arrived=torch.zeros(8, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    assert torch.equal(out, plain) and difference(out, made.truth()) < TOLERANCE


def test_one_row_and_more_shared_than_is_asked_about():
    """The pass does what it is told: one row may be told of shared keys as well."""
    made = Step([100], common=4)
    out = made.run(config=ONE, splits=2, tile=TILE, found=ints([64, 0, 0, 0]))
    assert difference(out, made.truth()) < TOLERANCE


@pytest.mark.parametrize("config", [ONE, FOUR], ids=["one split", "four splits"])
def test_mixed_steps_touch_one_token_rows_alone(config):
    made = Step([100, 20, 97, 130, 40, 99], common=0, counts=[1, 20, 1, 1, 9, 1])
    for row in (2, 3, 5):
        made.table[row, :4] = made.table[0, :4]
    assert made.found()[0] == 64
    out = made.run(config=config, splits=2, tile=TILE, mixed=True)
    own = made.singles()
    assert difference(out[own], made.truth()[own]) < TOLERANCE
    others = [token for token in range(len(out)) if token not in own]
    assert torch.isnan(out[others].float()).all(), "rows of several tokens are another kernel's"
    assert torch.isnan(made.parts[[1, 4]]).all() and torch.isfinite(made.parts[[0, 2, 3, 5]]).all()


def test_the_same_bits_twice():
    made = Step([100, 81, 97, 300], common=5)
    assert torch.equal(*(made.run(config=FOUR, splits=4, tile=TILE) for _ in range(2)))


def test_splits_fill_the_card():
    table = Tuning(multiprocessors=132)
    tiles = (1, 8, 16, 32, 64, 128, 500)
    assert [table.shared_splits(count, block_m=128) for count in tiles] == [8, 8, 8, 4, 2, 1, 1]
    assert [table.shared_splits(count, block_m=64) for count in tiles] == [8, 8, 8, 8, 4, 2, 1]


def test_the_host_guesses_from_one_page_of_each_slot():
    groups = [
        KVGroup(index=i, kind=kind, layers=(i,), kv_heads=1, head_dim=16, page_tokens=16, format="bf16", window=window)
        for i, (kind, window) in enumerate((("window", 32), ("full", None)))
    ]
    pages = SharedPages(groups, slots=8, least_keys=33)  # whole from the third page on
    slots = np.array([1, 4, 6], np.int32)
    for slot in slots:
        pages.enter(1, np.array([[slot] * 4, [0, 1, 2, 3], [7, 8, 9, 20 + slot]], np.int32))
    assert pages.possible(slots, least_rows=3) and not pages.possible(slots, least_rows=4)
    assert not pages.possible(np.array([1, 4, 2], np.int32), least_rows=2), "slot 2 has no third page"
    pages.enter(0, np.array([[4], [2], [11]], np.int32))
    assert pages.possible(slots, least_rows=3), "another group's pages"
    pages.leave(4)
    assert not pages.possible(slots, least_rows=3) and pages.possible(slots[[0, 2]], least_rows=2)
    never = SharedPages(groups, slots=8, least_keys=None)
    never.enter(1, np.array([[1, 2], [0, 0], [7, 7]], np.int32))
    assert not never.wanted and not never.possible(slots, least_rows=1)


# ---------------------------------------------------------------------------------- prompts that begin, prompts that go on


@pytest.mark.parametrize(
    "tile", [PrefillConfig(16, 16, 4, 2), PrefillConfig(16, 16, 4, 2, True, pairs=True)], ids=["pointers", "tma"]
)
def test_each_row_has_one_kernel(tile):
    counts, lengths = [12, 7, 1, 20, 1], [12, 40, 30, 20, 1]
    made = Step(lengths, common=0, counts=counts)
    begun = ints([12, 0, 0, 20, 0, 0])
    qkv = normal(sum(counts), (4 + 2 * 2) * 16, seed=6)
    for row, (first, end) in enumerate(
        pairwise(made.starts.tolist()[:6])
    ):  # this step's keys are in the pages and in qkv
        for token in range(first, end):
            position = lengths[row] - (end - first) + token - first
            page = int(made.table[row, position // 16])
            for part, pages in ((1, made.k), (2, made.v)):
                at = slice((2 + 2 * part) * 16, (4 + 2 * part) * 16)
                pages[page, :, position % 16] = qkv[token, at].view(2, 16)
    out = torch.full_like(made.q, float("nan"))
    library.fresh_attention(
        made.q, qkv, made.starts, heads=4, kv_heads=2, scale=0.3, softcap=None, begun=begun, out=out
    )
    rows = [slice(a, b) for a, b in pairwise(made.starts.tolist()[:6])]
    blank = [bool(torch.isnan(out[row].float()).all()) for row in rows]
    assert blank == [False, True, True, False, True]
    here = out.clone()
    common: dict[str, Any] = {
        "lengths": made.lengths,
        "page_table": made.table,
        "heads": 4,
        "scale": 0.3,
        "rows": made.rows,
    }
    common |= {"query_start": made.starts, "out": out}
    prefill.paged_prefill(made.q, made.k, made.v, singles=False, begun=False, config=tile, **common)
    assert torch.equal(out[rows[0]], here[rows[0]]) and torch.equal(out[rows[3]], here[rows[3]])
    blank = [bool(torch.isnan(out[row].float()).all()) for row in rows]
    assert blank == [False, False, True, False, True]
    decode.paged_decode(made.q, made.k, made.v, config=ONE, **common)
    assert difference(out, made.truth()) < TOLERANCE


def test_lay_out_says_which_rows_begin():
    start, count = [0, 5, 0, 0, 64], [3, 2, 1, 17, 1]
    rows, capacity = 8, 32
    new = lambda *shape: torch.zeros(shape, dtype=torch.int32, device=DEVICE)  # noqa: E731
    for given in (None, ints([9] * rows)):
        lengths = new(rows)
        step.lay_out(
            ints([4, 3, 2, 1, 0, 0, 0, 0]), ints([*start, 0, 0, 0]), ints([*count, 0, 0, 0]), ints([5]), new(6, 96), new(6, 8),
            page_tokens=16, ids=new(capacity), positions=new(capacity), query_start=new(rows + 1), lengths=lengths,
            write_slots=new(capacity), page_table=new(rows, 8), total=new(1), begun=given,
        )  # fmt: skip
        assert lengths.tolist() == [3, 7, 1, 17, 65, 0, 0, 0]
        if given is not None:
            assert given.tolist() == [3, 0, 0, 17, 0, 0, 0, 0]
