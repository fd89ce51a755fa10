"""Low-rank additions to a matmul (LoRA, Hu et al. 2021) for tokens of many adapters at once: banks, kernels, and their place in a program.

Knows: how tokens are grouped by adapter, and two products for each group. Refuses to know: who lies in which slot of a bank.

    once a step      adapter of each token -> tokens sorted by adapter, cut into blocks of `bm` of one adapter    (route.py sorts)
    each matmul      shrink    inner[split, place, parts R] = x[tokens of the block] A[adapter]                   over a piece of K
                     expand    out[tokens of the block] += (sum over splits of inner) B[adapter]                  16 bits, in place
    gate and up      expand_glue    activation(gate + ...) * (up + ...): what `expand` adds is never written where many tokens are

This is for prompts, large banks and deterministic mode: few tokens' additions are a part of the matmul's own launch (low_rank_tile.py).
Everything is on the device, inside the graph: programs of blocks that a step has not, of tokens without an adapter, and of parts that an
adapter leaves as they are end at once. A step in which nobody has an adapter has programs without any of this (`Bucket.adapted`).

Constants follow from the step's number of tokens (`form_of`). In deterministic mode they are those of few tokens for all, and splits follow
from the matrix alone, so that a token's bits depend on no other token.

A layer of Llama 3.1 8B at 8,192 tokens and rank 16, in MB from memory (4,300 a ms), with the constants of few tokens and of many:

                 programs               x or out, once      besides, few                       besides, many
    shrink qkv   520 x 3 x 8 -> 136      67                 x 3 times; inner 12.6, float32     inner 0.8, bf16
    shrink both  520 x 2 x 8 -> 136      67                 x twice; inner 8.4                 0.5
    shrink o     520 x 8     -> 136      67                 inner 4.2                          0.3
    shrink down  520 x 8     -> 136     235                 inner 4.2                          0.3
    expand qkv   520 x 96  -> 136 x 96  201                 inner for each tile: 403 from L2   26 from L2
    expand o     520 x 64  -> 136 x 64  134                 268 from L2                        17
    expand down  520 x 64  -> 136 x 64  134                 268 from L2                        17
    expand both  520 x 448 -> 136 x 224 940, 705 for glue   1,879 from L2                      117; 705 with `glue` in it: nothing added

Few: 2,080 and 3,500 from L2 (inner, B), all of `expand` 2 bytes at a time: 1.45 ms measured beside what `glue` alone takes. Many: 905 that
nobody avoids (0.21 ms), and A from L2 as it was, 170: 0.37 ms measured (shrink 24, 22, 22, 60 us; expand 68, 44, 44; 90 more than `glue`).

A [S, parts R, K] and B [S, outputs of all parts, R] are bf16, R a multiple of 16; both are zero beyond an adapter's own rank. Grouping
as in S-LoRA (Sheng et al. 2023) and Punica (Chen et al. 2023).
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from tradewind.kernels.ops import LowRankBank
from tradewind.kernels.triton import elementwise, route
from tradewind.kernels.triton.elementwise import activated
from tradewind.kernels.triton.launch import launch_options, let_next_start, pow2, wait_for_previous
from tradewind.kernels.triton.planner import Planner
from tradewind.kernels.triton.step import width
from tradewind.kernels.triton.tape import Call
from tradewind.kernels.triton.workspace import address


@dataclass(frozen=True, kw_only=True)
class Form:
    """Constants of both products."""

    bm: int
    """Tokens of a block."""
    columns: int
    """Columns (part, rank) of a program of `shrink` at most, 0: of one part at most. Programs of a block all read its x."""
    bk: int
    pieces: int
    """K is cut until there are so many programs, 0: as `splits_of` says, whatever the number of tokens."""
    shrink_warps: int
    shrink_stages: int
    bn: int
    """Outputs of a tile."""
    expand_warps: int
    glue_bn: int = 0
    """The same of gate and of up where both become one; 0: never."""
    glue_warps: int = 4
    blocks_first: bool = False
    """Neighbouring programs are of one tile (B is theirs together), else of one block (they write whole lines of `out`)."""


FEW = Form(
    bm=16, columns=0, bk=128, pieces=0, shrink_warps=4, shrink_stages=3, bn=64, expand_warps=4, blocks_first=True
)
SPLIT_DEPTH, MOST_SPLITS = 512, 8
"""Inputs are cut into pieces of so many at least, and into so many pieces at most, so that few blocks keep many multiprocessors busy."""
MIDDLE = Form(
    bm=64, columns=128, bk=128, pieces=128, shrink_warps=4, shrink_stages=4, bn=128, expand_warps=8, glue_bn=128, glue_warps=8
)  # fmt: skip
MANY = replace(MIDDLE, bn=64, expand_warps=4, glue_bn=64, glue_warps=4)
FORMS: tuple[tuple[int, Form], ...] = ((0, FEW), (256, MIDDLE), (4096, MANY))
"""From so many tokens on. Of eight adapters each has a block that is not full: half of all at eight times a block's tokens.

A block of 64 is what one warp group multiplies at once. On an H200, a layer of Llama 3.1 8B with eight adapters of rank 16, us at 512 /
2,048 / 8,192 tokens: blocks of 16 123 / 390 / 1,454, of 32 72 / 155 / 427, of 64 67 / 134 / 372, of 128 139 / 269 / 502. Narrow tiles of
outputs are best where there are many blocks (o: 44 us against 52 at 8,192 tokens), wide ones of eight warps where there are few (6.3
against 8.8 at 512); between 512 and 8,192 the border is not measured.
"""
ACTIVATIONS = ("silu", "gelu_tanh")
TOKENS_EACH = 16
"""Tokens of a program that sorts."""


# ---------------------------------------------------------------------------------------------------------------- banks


def new_bank(device: torch.device, *, slots: int, rank: int, sizes: tuple[int, ...], k: int) -> LowRankBank:
    """Data: A, B; ranks in use int32 [S, parts]; where each part's outputs end, int32 [parts]."""
    ranks, parts = _whole(rank), len(sizes)
    a = torch.zeros(slots, parts * ranks, k, dtype=torch.bfloat16, device=device)
    b = torch.zeros(slots, sum(sizes), ranks, dtype=torch.bfloat16, device=device)
    used = torch.zeros(slots, parts, dtype=torch.int32, device=device)
    ends = torch.tensor([*accumulate(sizes)], dtype=torch.int32, device=device)
    return LowRankBank(slots=slots, rank=rank, sizes=sizes, k=k, data=(a, b, used, ends), nbytes=a.nbytes + b.nbytes)


def write(bank: LowRankBank, slot: int, part: int, a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> None:
    """Writes A [r, K] and B [N, r] of one part, in the stream; rounds to bf16."""
    all_a, all_b, used, _ = bank.data
    rank, ranks, start = len(a), _whole(bank.rank), sum(bank.sizes[:part])
    assert rank <= bank.rank and a.shape == (rank, bank.k) and b.shape == (bank.sizes[part], rank), (a.shape, b.shape)
    down = all_a[slot, part * ranks : (part + 1) * ranks]
    up = all_b[slot, start : start + bank.sizes[part]]
    down.zero_()
    up.zero_()
    used[slot, part] = _whole(rank) if rank else 0
    if rank:
        down[:rank].copy_(torch.from_numpy(np.array(a, np.float32)))
        up[:, :rank].copy_(torch.from_numpy(np.array(b, np.float32)))


def _whole(rank: int) -> int:
    return -(-rank // 16) * 16


# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=["T"])
def _group_kernel(
    adapters_ptr, groups_ptr, counts_ptr, count_ptr, T,
    S: tl.constexpr, X: tl.constexpr, X_P2: tl.constexpr, BT: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    group = tl.arange(0, X_P2)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    wait_for_previous(PDL)
    rows = T
    if COUNTED:
        rows = tl.minimum(tl.load(count_ptr), T)
    live = t < rows
    mine = tl.load(adapters_ptr + t, mask=live, other=-1)
    mine = tl.where(mine < 0, S, mine)
    tl.store(groups_ptr + t, mine, mask=live)
    found = tl.sum(((mine[:, None] == group[None, :]) & live[:, None]).to(tl.int32), 0)
    tl.store(counts_ptr + tl.program_id(0) * X + group, found, mask=group < X)


def group_tokens(
    adapters: Tensor, *, slots: int, groups: Tensor, counts: Tensor, count: Tensor | None = None, pdl: bool = False
) -> None:
    """groups int32 [T]: the adapter of each token, `slots` where it has none (under 0); counts int32 [programs, slots + 1] of TOKENS_EACH
    tokens each, as `route.sort_pairs` reads them."""
    tokens = len(adapters)
    _group_kernel[(triton.cdiv(tokens, TOKENS_EACH),)](
        adapters, groups, counts, count if count is not None else adapters, tokens,
        S=slots, X=slots + 1, X_P2=pow2(slots + 1), BT=TOKENS_EACH, COUNTED=count is not None, **launch_options(pdl=pdl, warps=4),
    )  # fmt: skip


@triton.jit(do_not_specialize=["MOST", "T"])
def _shrink_kernel(
    x_ptr, a_ptr, used_ptr, order_ptr, blocks_ptr, block_count_ptr, inner_ptr, MOST, T,
    K: tl.constexpr, S: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr, DEPTH: tl.constexpr,
    BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    COLUMNS: tl.constexpr = PARTS * R
    EVEN: tl.constexpr = K % BK == 0 and DEPTH % BK == 0
    piece, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column = piece * BR + tl.arange(0, BR)
    wait_for_previous(PDL)
    if block >= tl.load(block_count_ptr):
        return
    adapter = tl.load(blocks_ptr + block)
    if adapter == S:
        return
    # All columns of a program are written if it has any that is in use: `expand` masks none.
    if R % BR == 0:
        part = piece * BR // R
        if piece * BR - part * R >= tl.load(used_ptr + adapter * PARTS + part):
            return
    else:
        ranks = tl.load(used_ptr + adapter * PARTS + column // R, mask=column < COLUMNS, other=0)
        if tl.max((column % R < ranks).to(tl.int32), 0) == 0:
            return
    place = tl.load(blocks_ptr + MOST + block) + tl.arange(0, BM)
    live = place < tl.load(blocks_ptr + 2 * MOST + block)
    token = tl.load(order_ptr + place, mask=live, other=0).to(tl.int64)
    line = adapter.to(tl.int64) * COLUMNS + tl.minimum(column, COLUMNS - 1)
    sums = tl.zeros([BM, BR], tl.float32)
    end = tl.minimum((split + 1) * DEPTH, K)
    for first in range(split * DEPTH, end, BK):
        k = first + tl.arange(0, BK)
        if EVEN:  # no mask along K: it would keep loads narrow
            x = tl.load(x_ptr + token[:, None] * K + k[None, :], mask=live[:, None], other=0.0)
            a = tl.load(a_ptr + line[:, None] * K + k[None, :])
        else:
            inside = k < end
            x = tl.load(x_ptr + token[:, None] * K + k[None, :], mask=live[:, None] & inside[None, :], other=0.0)
            a = tl.load(a_ptr + line[:, None] * K + k[None, :], mask=inside[None, :], other=0.0)
        sums = tl.dot(x.to(tl.bfloat16), tl.trans(a), sums)
    target = inner_ptr + (split * T + place)[:, None] * COLUMNS + column[None, :]
    stored = live[:, None]
    if COLUMNS % BR != 0:
        stored = stored & (column < COLUMNS)[None, :]
    tl.store(target, sums.to(inner_ptr.dtype.element_ty), mask=stored)


def shrink(
    x: Tensor, bank: LowRankBank, *, order: Tensor, blocks: Tensor, used: Tensor, inner: Tensor, form: Form, pdl: bool = False
) -> None:  # fmt: skip
    """inner [splits, T, parts R], by place in `order`: x [T, K] times A of each token's adapter; float32, or bf16 of one piece."""
    a, _, ranks, _ = bank.data
    splits, _, columns = inner.shape
    parts, depth = len(bank.sizes), bank.k
    rank = columns // parts
    assert splits == 1 or inner.dtype == torch.float32, "pieces are added up in float32"
    br = min(form.columns, pow2(columns)) if form.columns else step_of(rank)
    _shrink_kernel[(triton.cdiv(columns, br), blocks.shape[1], splits)](
        x, a, ranks, order, blocks, used, inner, blocks.shape[1], inner.shape[1],
        K=depth, S=bank.slots, PARTS=parts, R=rank, DEPTH=split_depth(depth, splits), BM=form.bm, BR=br, BK=min(form.bk, pow2(depth, 16)),
        **launch_options(pdl=pdl, warps=form.shrink_warps, stages=form.shrink_stages),
    )  # fmt: skip


@triton.jit
def _product(
    sums, inner_ptr, b_ptr, line, place, live, wanted, part, rank, T,
    PARTS: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """sums [BM, outputs] and what a part adds to the outputs of B's lines that are `wanted` (ALL: all are); nothing of rank 0."""
    for first in range(0, rank, BR):
        r = first + tl.arange(0, BR)
        source = inner_ptr + place[:, None] * (PARTS * R) + (part * R + r)[None, :]
        if SPLITS == 1:
            inner = tl.load(source, mask=live[:, None], other=0.0)
        else:
            inner = tl.zeros([BM, BR], tl.float32)
            for split in tl.static_range(SPLITS):
                inner += tl.load(source + split * T * (PARTS * R), mask=live[:, None], other=0.0)
        if ALL:
            b = tl.load(b_ptr + line[:, None] * R + r[None, :])
        else:
            b = tl.load(b_ptr + line[:, None] * R + r[None, :], mask=wanted[:, None], other=0.0)
        sums = tl.dot(inner.to(tl.bfloat16), tl.trans(b), sums)
    return sums


@triton.jit(do_not_specialize=["MOST", "T"])
def _expand_kernel(
    inner_ptr, b_ptr, used_ptr, ends_ptr, order_ptr, blocks_ptr, block_count_ptr, out_ptr, MOST, T,
    N: tl.constexpr, S: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, WHOLE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BLOCKS_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    if BLOCKS_FIRST:
        block, tile = tl.program_id(0), tl.program_id(1)
    else:
        tile, block = tl.program_id(0), tl.program_id(1)
    # N and a tile's first output are known to be multiples of 16 where they are, so that 16 bytes are loaded and stored at once.
    column = tile * BN + tl.arange(0, BN)
    inside = column < N
    last = tl.minimum(tile * BN + BN, N) - 1
    low, high, of = 0, 0, tl.zeros([BN], tl.int32)
    for before in tl.static_range(PARTS - 1):
        end = tl.load(ends_ptr + before)
        low += (tile * BN >= end).to(tl.int32)
        high += (last >= end).to(tl.int32)
        of += (column >= end).to(tl.int32)
    wait_for_previous(PDL)
    if block >= tl.load(block_count_ptr):
        return
    adapter = tl.load(blocks_ptr + block)
    if adapter == S:
        return
    most = 0
    for part in range(low, high + 1):
        most = tl.maximum(most, tl.load(used_ptr + adapter * PARTS + part))
    if most == 0:
        return
    place = tl.load(blocks_ptr + MOST + block) + tl.arange(0, BM)
    live = place < tl.load(blocks_ptr + 2 * MOST + block)
    token = tl.load(order_ptr + place, mask=live, other=0).to(tl.int64)
    target = out_ptr + token[:, None] * N + column[None, :]
    there = live[:, None]
    if N % BN != 0:
        there = there & inside[None, :]
    old = tl.load(target, mask=there, other=0.0)  # the longest way: asked for first
    line = adapter.to(tl.int64) * N + column
    sums = tl.zeros([BM, BN], tl.float32)
    if WHOLE:  # a tile is of one part
        sums = _product(
            sums, inner_ptr, b_ptr, line, place, live, inside, low, most, T, PARTS, R, SPLITS, BM, BR, True,
        )  # fmt: skip
    else:
        for part in range(low, high + 1):
            rank = tl.load(used_ptr + adapter * PARTS + part)
            sums = _product(
                sums, inner_ptr, b_ptr, line, place, live, inside & (of == part), part, rank, T, PARTS, R, SPLITS, BM, BR, False,
            )  # fmt: skip
    tl.store(target, (old.to(tl.float32) + sums).to(out_ptr.dtype.element_ty), mask=there)


def expand(
    inner: Tensor, bank: LowRankBank, *, order: Tensor, blocks: Tensor, used: Tensor, out: Tensor, form: Form, pdl: bool = False
) -> None:  # fmt: skip
    """out [T, N of all parts] += what `shrink` left, times B of each token's adapter."""
    _, b, ranks, ends = bank.data
    _, n, rank = b.shape
    assert out.shape[1] == n, (out.shape, n)
    grid = (blocks.shape[1], triton.cdiv(n, form.bn))
    _expand_kernel[grid if form.blocks_first else grid[::-1]](
        inner, b, ranks, ends, order, blocks, used, out, blocks.shape[1], inner.shape[1],
        N=n, S=bank.slots, PARTS=len(bank.sizes), R=rank, SPLITS=inner.shape[0], WHOLE=all(size % form.bn == 0 for size in bank.sizes),
        BM=form.bm, BN=form.bn, BR=step_of(rank), BLOCKS_FIRST=form.blocks_first,
        **launch_options(pdl=pdl, warps=form.expand_warps, stages=2),
    )  # fmt: skip


@triton.jit(do_not_specialize=["MOST", "T"])
def _expand_glue_kernel(
    x_ptr, inner_ptr, b_ptr, used_ptr, order_ptr, blocks_ptr, block_count_ptr, out_ptr, MOST, T,
    F: tl.constexpr, S: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, GELU: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BLOCKS_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    if BLOCKS_FIRST:
        block, tile = tl.program_id(0), tl.program_id(1)
    else:
        tile, block = tl.program_id(0), tl.program_id(1)
    column = tile * BN + tl.arange(0, BN)
    inside = column < F
    wait_for_previous(PDL)
    if block >= tl.load(block_count_ptr):
        return
    adapter = tl.load(blocks_ptr + block)
    place = tl.load(blocks_ptr + MOST + block) + tl.arange(0, BM)
    live = place < tl.load(blocks_ptr + 2 * MOST + block)
    token = tl.load(order_ptr + place, mask=live, other=0).to(tl.int64)
    source = x_ptr + token[:, None] * (2 * F) + column[None, :]
    there = live[:, None]
    if F % BN != 0:
        there = there & inside[None, :]
    old_gate = tl.load(source, mask=there, other=0.0)
    old_up = tl.load(source + F, mask=there, other=0.0)
    has = adapter != S  # tokens without an adapter are activated too
    slot = tl.where(has, adapter, 0)
    gate_rank = tl.where(has, tl.load(used_ptr + slot * 2), 0)
    up_rank = tl.where(has, tl.load(used_ptr + slot * 2 + 1), 0)
    line = slot.to(tl.int64) * (2 * F) + column
    gate = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    ALL: tl.constexpr = F % BN == 0
    gate = _product(gate, inner_ptr, b_ptr, line, place, live, inside, 0, gate_rank, T, 2, R, SPLITS, BM, BR, ALL)
    up = _product(up, inner_ptr, b_ptr, line + F, place, live, inside, 1, up_rank, T, 2, R, SPLITS, BM, BR, ALL)
    y = activated(old_gate.to(tl.float32) + gate, GELU) * (old_up.to(tl.float32) + up)
    tl.store(out_ptr + token[:, None] * F + column[None, :], y.to(out_ptr.dtype.element_ty), mask=there)


def expand_glue(
    x: Tensor,
    inner: Tensor,
    bank: LowRankBank,
    *,
    order: Tensor,
    blocks: Tensor,
    used: Tensor,
    out: Tensor,
    activation: str,
    form: Form,
    pdl: bool = False,
) -> None:
    """out [T, F] = activation(gate) * up of x [T, 2F] and what `expand` would add to it, which is left as it is. Tokens that are in no
    block are left alone."""
    _, b, ranks, _ = bank.data
    features, rank = out.shape[1], b.shape[2]
    assert bank.sizes == (features, features) and x.shape[1] == 2 * features, (bank.sizes, x.shape, out.shape)
    grid = (blocks.shape[1], triton.cdiv(features, form.glue_bn))
    _expand_glue_kernel[grid if form.blocks_first else grid[::-1]](
        x, inner, b, ranks, order, blocks, used, out, blocks.shape[1], inner.shape[1],
        F=features, S=bank.slots, R=rank, SPLITS=inner.shape[0], GELU=activation == "gelu_tanh", BM=form.bm, BN=form.glue_bn,
        BR=step_of(rank), BLOCKS_FIRST=form.blocks_first, **launch_options(pdl=pdl, warps=form.glue_warps, stages=2),
    )  # fmt: skip


def step_of(rank: int) -> int:
    """Columns of a step of `expand`: the largest power of two that divides the rank, up to 64."""
    return min(64, rank & -rank)


def form_of(tokens: int, *, deterministic: bool) -> Form:
    """The constants of a step of so many tokens."""
    return FEW if deterministic else next(form for least, form in reversed(FORMS) if tokens >= least)


def splits_of(depth: int, *, form: Form = FEW, tokens: int = 0) -> int:
    """Pieces that K inputs are cut into."""
    most = max(1, min(MOST_SPLITS, depth // SPLIT_DEPTH))
    if not form.pieces:
        return most
    wanted = max(1, form.pieces // triton.cdiv(tokens, form.bm))
    return min(most, 1 << (wanted.bit_length() - 1))


def split_depth(depth: int, splits: int) -> int:
    """Inputs of a piece, a multiple of 128 where there are several."""
    return depth if splits == 1 else -(-depth // splits // 128) * 128


@triton.jit(do_not_specialize=["R", "T"])
def _adapters_kernel(
    slot_ptr,
    query_start_ptr,
    rows_ptr,
    of_slot_ptr,
    out_ptr,
    R,
    T,
    R_P2: tl.constexpr,
    BT: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    rows = tl.load(rows_ptr)
    r = tl.arange(0, R_P2)
    ends = tl.load(query_start_ptr + 1 + r, mask=r < rows, other=1 << 30)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    row = tl.sum((ends[None, :] <= t[:, None]).to(tl.int32), 1)
    live = (t < T) & (row < rows)
    slot = tl.load(slot_ptr + row, mask=live, other=0)
    tl.store(out_ptr + t, tl.load(of_slot_ptr + slot, mask=live, other=-1), mask=t < T)


def lay_out_adapters(
    slot: Tensor, query_start: Tensor, rows: Tensor, of_slot: Tensor, *, out: Tensor, pdl: bool = False
) -> None:
    """out int32 [T]: the adapter of each token's sequence, -1 for none and for tokens beyond the live ones. slot int32 [R], query_start
    int32 [R + 1] and rows int32 [1] as by `step.lay_out`; of_slot int32 [slots, 1]."""
    limit = len(query_start) - 1
    _adapters_kernel[(triton.cdiv(len(out), 64),)](
        slot, query_start, rows, of_slot, out, limit, len(out), R_P2=width(limit), BT=64, **launch_options(pdl=pdl, warps=4)
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- programs


def fold(planner: Planner) -> None:
    """Many tokens: what is added to gate and up goes into what makes them one, where only `glue` reads them."""
    form = form_of(planner.bucket.tokens, deterministic=planner.deterministic)
    for i, call in enumerate(planner.calls[:-1]):
        glue, bank = planner.calls[i + 1], call["bank"]
        if (
            call.op == "add_low_rank"
            and form.glue_bn
            and glue.op == "glue"  # at once: the scratch between both is the next matmul's too
            and address(glue["x"]) == address(call["out"])
            and planner.readers(i, address(call["out"])) == [i + 1]
            and bank.sizes == (bank.sizes[0],) * 2
            and glue["activation"] in ACTIVATIONS
        ):
            call["glued"], glue["low_rank"] = True, call


def emit(planner: Planner, call: Call) -> None:
    """Appends the launches of an `add_low_rank` call; the first one of a program sorts the step's tokens for all."""
    bank: LowRankBank = call["bank"]
    x, out = planner.cut(call["x"]), planner.cut(call["out"])
    form = form_of(len(x), deterministic=planner.deterministic)
    places, inner = _places(planner, call), _inner(planner, call, form)
    text = f"{list(x.shape)} -> {bank.rank} -> {list(bank.sizes)}, {bank.slots} adapters"
    planner.own(shrink, f"shrink {text}", x, bank, inner=inner, form=form, **places)
    if not call["glued"]:
        planner.own(expand, f"expand {text}", inner, bank, out=out, form=form, **places)


def _places(planner: Planner, call: Call) -> dict[str, Any]:
    key = (address(call["adapters"]), call["bank"].slots)
    if key not in planner.sorted_tokens:
        planner.sorted_tokens[key] = _emit_sort(planner, call)
    return planner.sorted_tokens[key]


def _inner(planner: Planner, call: Call, form: Form) -> Tensor:
    """[splits, T, columns] between both products."""
    bank, tokens, most = call["bank"], planner.bucket.tokens, len(call["out"])
    splits, columns = splits_of(bank.k, form=form, tokens=tokens), bank.data[0].shape[1]
    lines = max(splits * tokens, _most_lines(bank.k, most, planner.deterministic))
    whole = planner.workspace.piece("adapter inner", lines * columns, dtype=torch.float32)
    if splits == 1 and form is not FEW:
        whole = whole.view(torch.bfloat16)
    return whole[: splits * tokens * columns].view(splits, tokens, columns)


def _emit_sort(planner: Planner, call: Call) -> dict[str, Any]:
    tokens, slots, most = planner.bucket.tokens, call["bank"].slots, len(call["adapters"])
    block = form_of(tokens, deterministic=planner.deterministic).bm
    new = planner.workspace.piece
    programs = -(-most // TOKENS_EACH)
    groups = new("adapter groups", most, dtype=torch.int32)[:tokens]
    scratch = {
        "counts": new("adapter counts", programs, slots + 1, dtype=torch.int32),
        "base": new("adapter base", programs, slots + 1, dtype=torch.int32),
        "order": new("adapter order", most, dtype=torch.int32),
        "blocks": new(
            "adapter blocks", 3, route.most_blocks(tokens, experts=slots + 1, block=block), dtype=torch.int32
        ),
        "used": new("adapter blocks used", 1, dtype=torch.int32),
    }
    adapters, count = planner.cut(call["adapters"]), planner.count(call, always=True)
    planner.own(
        group_tokens, f"adapters of {tokens} tokens", adapters, slots=slots, groups=groups, counts=scratch["counts"], count=count
    )  # fmt: skip
    planner.own(
        route.sort_pairs, f"sort {tokens} tokens by {slots} adapters", groups.view(-1, 1), experts=slots + 1, block=block,
        tokens_each=TOKENS_EACH, count=count, **scratch,
    )  # fmt: skip
    return {name: scratch[name] for name in ("order", "blocks", "used")}


def _most_lines(depth: int, most: int, deterministic: bool) -> int:
    """Pieces times tokens of any step of up to `most` tokens, so that scratch is as large at once as it ever becomes."""
    found, limit = 0, most
    for least, form in reversed(((0, FEW),) if deterministic else FORMS):
        if least <= limit:
            split = splits_of(depth) * limit
            found = max(found, max(limit, min(split, form.pieces * form.bm)) if form.pieces else split)
            limit = least - 1
    return found


def emit_glue(planner: Planner, call: Call) -> None:
    """Appends the launch of a `glue` call; with it what adapters add to gate and up (`fold`)."""
    x, out = planner.cut(call["x"]), planner.cut(call["out"])
    added = call["low_rank"]
    if added is not None:
        assert planner.launches[-1].kernel is shrink, "what lies between both is the next matmul's too"
        form = form_of(len(x), deterministic=planner.deterministic)
        bank: LowRankBank = added["bank"]
        text = f"expand {bank.rank} -> {list(bank.sizes)}, {call['activation']} of gate, by up {list(out.shape)}"
        inner, places = _inner(planner, added, form), _places(planner, added)
        planner.own(expand_glue, text, x, inner, bank, out=out, activation=call["activation"], form=form, **places)
        return
    planner.own(
        elementwise.gated_activation, f"{call['activation']} of gate, by up {list(out.shape)}", x, out=out,
        activation=call["activation"], count=planner.count(call),
    )  # fmt: skip
