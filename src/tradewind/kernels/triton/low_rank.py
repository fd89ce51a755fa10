"""Low-rank additions to a matmul (LoRA, Hu et al. 2021) for tokens of many adapters at once: banks, kernels, and their place in a program.

Knows: how tokens are grouped by adapter, and two products for each group. Refuses to know: who lies in which slot of a bank.

    once a step      adapter of each token -> tokens sorted by adapter, cut into blocks of BM of one adapter      (route.py sorts)
    each matmul      shrink    inner[block, part, split] = x[tokens of the block] A[adapter, part]                 over a piece of K
                     expand    out[tokens of the block] += (sum over splits of inner) B[adapter]                   16 bits, in place

This is for prompts, large banks and deterministic mode: few tokens' additions are a part of the matmul's own launch (low_rank_tile.py).
Everything is on the device, inside the graph: programs of blocks that a step has not, of tokens without an adapter, and of parts that an
adapter leaves as they are end at once. A step in which nobody has an adapter has programs without any of this (`Bucket.adapted`).
Splits and tiles follow from the matrix alone, so that a token's bits depend on no other token.

A [S, parts R, K] and B [S, outputs of all parts, R] are bf16, R a multiple of 16. Grouping as in S-LoRA (Sheng et al. 2023) and Punica
(Chen et al. 2023).
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from tradewind.kernels.ops import LowRankBank
from tradewind.kernels.triton import elementwise, route
from tradewind.kernels.triton.launch import launch_options, let_next_start, pow2, wait_for_previous
from tradewind.kernels.triton.step import width
from tradewind.kernels.triton.tape import Call, address

if TYPE_CHECKING:
    from tradewind.kernels.triton.program import Planner

BM = 16
"""Tokens of a block."""
BN = 64
"""Outputs of a tile."""
BK = 128
SPLIT_DEPTH, MOST_SPLITS = 512, 8
"""Inputs are cut into pieces of so many, so that few blocks keep many multiprocessors busy."""
TOKENS_EACH = 16
"""Tokens of a program that sorts."""


# ---------------------------------------------------------------------------------------------------------------- banks


def new_bank(device: torch.device, *, slots: int, rank: int, sizes: tuple[int, ...], k: int) -> LowRankBank:
    """Data: A, B; ranks in use int32 [S, parts]; tiles int32 [3, T]: part, first output, end of the part's outputs."""
    ranks, parts = _whole(rank), len(sizes)
    a = torch.zeros(slots, parts * ranks, k, dtype=torch.bfloat16, device=device)
    b = torch.zeros(slots, sum(sizes), ranks, dtype=torch.bfloat16, device=device)
    used = torch.zeros(slots, parts, dtype=torch.int32, device=device)
    ends = np.cumsum(sizes)
    tiles = [
        (part, first, end)
        for part, (end, n) in enumerate(zip(ends.tolist(), sizes, strict=True))
        for first in range(end - n, end, BN)
    ]
    where = torch.tensor(tiles, dtype=torch.int32, device=device).T.contiguous()
    return LowRankBank(slots=slots, rank=rank, sizes=sizes, k=k, data=(a, b, used, where), nbytes=a.nbytes + b.nbytes)


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
    block, piece, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait_for_previous(PDL)
    if block >= tl.load(block_count_ptr):
        return
    adapter = tl.load(blocks_ptr + block)
    if adapter == S:
        return
    part = piece * BR // R
    if piece * BR - part * R >= tl.load(used_ptr + adapter * PARTS + part):
        return
    place = tl.load(blocks_ptr + MOST + block) + tl.arange(0, BM)
    live = place < tl.load(blocks_ptr + 2 * MOST + block)
    token = tl.load(order_ptr + place, mask=live, other=0).to(tl.int64)
    line = adapter.to(tl.int64) * PARTS * R + piece * BR + tl.arange(0, BR)
    sums = tl.zeros([BM, BR], tl.float32)
    end = tl.minimum((split + 1) * DEPTH, K)
    for first in range(split * DEPTH, end, BK):
        k = first + tl.arange(0, BK)
        inside = k < end
        x = tl.load(x_ptr + token[:, None] * K + k[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        a = tl.load(a_ptr + line[:, None] * K + k[None, :], mask=inside[None, :], other=0.0)
        sums = tl.dot(x.to(tl.bfloat16), tl.trans(a), sums)
    column = piece * BR + tl.arange(0, BR)
    target = inner_ptr + (split * T + place)[:, None] * (PARTS * R) + column[None, :]
    tl.store(target, sums, mask=live[:, None])


def shrink(
    x: Tensor, bank: LowRankBank, *, order: Tensor, blocks: Tensor, used: Tensor, inner: Tensor, pdl: bool = False
) -> None:
    """inner float32 [splits, T, parts R], by place in `order`: x [T, K] times A of each token's adapter."""
    a, _, ranks, _ = bank.data
    parts, rank, depth = len(bank.sizes), a.shape[1] // len(bank.sizes), bank.k
    br = rank & -rank if rank < 64 else min(64, rank & -rank)
    _shrink_kernel[(blocks.shape[1], parts * rank // br, inner.shape[0])](
        x, a, ranks, order, blocks, used, inner, blocks.shape[1], inner.shape[1],
        K=depth, S=bank.slots, PARTS=parts, R=rank, DEPTH=split_depth(depth), BM=BM, BR=br, BK=min(BK, pow2(depth, 16)),
        **launch_options(pdl=pdl, warps=4, stages=3),
    )  # fmt: skip


@triton.jit(do_not_specialize=["MOST", "T", "N"])
def _expand_kernel(
    inner_ptr, b_ptr, used_ptr, tiles_ptr, order_ptr, blocks_ptr, block_count_ptr, out_ptr, MOST, T, N, TILES,
    S: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    block, tile = tl.program_id(0), tl.program_id(1)
    part = tl.load(tiles_ptr + tile)
    column = tl.load(tiles_ptr + TILES + tile) + tl.arange(0, BN)
    inside = column < tl.load(tiles_ptr + 2 * TILES + tile)
    wait_for_previous(PDL)
    if block >= tl.load(block_count_ptr):
        return
    adapter = tl.load(blocks_ptr + block)
    if adapter == S:
        return
    rank = tl.load(used_ptr + adapter * PARTS + part)
    if rank == 0:
        return
    place = tl.load(blocks_ptr + MOST + block) + tl.arange(0, BM)
    live = place < tl.load(blocks_ptr + 2 * MOST + block)
    token = tl.load(order_ptr + place, mask=live, other=0).to(tl.int64)
    line = adapter.to(tl.int64) * N + column
    sums = tl.zeros([BM, BN], tl.float32)
    for first in range(0, rank, BR):
        r = first + tl.arange(0, BR)
        few = r < rank
        inner = tl.zeros([BM, BR], tl.float32)
        for split in tl.static_range(SPLITS):
            source = inner_ptr + (split * T + place)[:, None] * (PARTS * R) + (part * R + r)[None, :]
            inner += tl.load(source, mask=live[:, None] & few[None, :], other=0.0)
        b = tl.load(b_ptr + line[:, None] * R + r[None, :], mask=inside[:, None] & few[None, :], other=0.0)
        sums = tl.dot(inner.to(tl.bfloat16), tl.trans(b), sums)
    both = live[:, None] & inside[None, :]
    target = out_ptr + token[:, None] * N + column[None, :]
    old = tl.load(target, mask=both, other=0.0).to(tl.float32)
    tl.store(target, (old + sums).to(out_ptr.dtype.element_ty), mask=both)


def expand(
    inner: Tensor, bank: LowRankBank, *, order: Tensor, blocks: Tensor, used: Tensor, out: Tensor, pdl: bool = False
) -> None:
    """out [T, N of all parts] += what `shrink` left, times B of each token's adapter."""
    _, b, ranks, tiles = bank.data
    rank = b.shape[2]
    _expand_kernel[(blocks.shape[1], tiles.shape[1])](
        inner, b, ranks, tiles, order, blocks, used, out, blocks.shape[1], inner.shape[1], out.shape[1], tiles.shape[1],
        S=bank.slots, PARTS=len(bank.sizes), R=rank, SPLITS=inner.shape[0], BM=BM, BN=BN,
        BR=rank & -rank if rank < 64 else min(64, rank & -rank), **launch_options(pdl=pdl, warps=4, stages=2),
    )  # fmt: skip


def splits_of(depth: int) -> int:
    """Pieces that K inputs are cut into."""
    return max(1, min(MOST_SPLITS, depth // SPLIT_DEPTH))


def split_depth(depth: int) -> int:
    """Inputs of a piece, a multiple of BK where there are several."""
    return depth if splits_of(depth) == 1 else -(-depth // splits_of(depth) // BK) * BK


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


def emit(planner: Planner, call: Call) -> None:
    """Appends the launches of an `add_low_rank` call; the first one of a program sorts the step's tokens for all."""
    bank: LowRankBank = call["bank"]
    x, out = planner.cut(call["x"]), planner.cut(call["out"])
    places = planner.sorted_tokens.get((address(call["adapters"]), bank.slots))
    if places is None:
        places = planner.sorted_tokens[address(call["adapters"]), bank.slots] = _emit_sort(planner, call)
    splits, columns = splits_of(bank.k), bank.data[0].shape[1]
    whole = planner.workspace.piece("adapter inner", splits * len(call["out"]) * columns, dtype=torch.float32)
    inner = whole[: splits * len(x) * columns].view(splits, len(x), columns)
    text = f"{list(x.shape)} -> {bank.rank} -> {list(bank.sizes)}, {bank.slots} adapters"
    planner.own(shrink, f"shrink {text}", x, bank, inner=inner, **places)
    planner.own(expand, f"expand {text}", inner, bank, out=out, **places)


def _emit_sort(planner: Planner, call: Call) -> dict[str, Any]:
    tokens, slots, most = planner.bucket.tokens, call["bank"].slots, len(call["adapters"])
    new = planner.workspace.piece
    programs = -(-most // TOKENS_EACH)
    groups = new("adapter groups", most, dtype=torch.int32)[:tokens]
    scratch = {
        "counts": new("adapter counts", programs, slots + 1, dtype=torch.int32),
        "base": new("adapter base", programs, slots + 1, dtype=torch.int32),
        "order": new("adapter order", most, dtype=torch.int32),
        "blocks": new("adapter blocks", 3, route.most_blocks(tokens, experts=slots + 1, block=BM), dtype=torch.int32),
        "used": new("adapter blocks used", 1, dtype=torch.int32),
    }
    adapters, count = planner.cut(call["adapters"]), planner.count(call, always=True)
    planner.own(
        group_tokens, f"adapters of {tokens} tokens", adapters, slots=slots, groups=groups, counts=scratch["counts"], count=count
    )  # fmt: skip
    planner.own(
        route.sort_pairs, f"sort {tokens} tokens by {slots} adapters", groups.view(-1, 1), experts=slots + 1, block=BM,
        tokens_each=TOKENS_EACH, count=count, **scratch,
    )  # fmt: skip
    return {name: scratch[name] for name in ("order", "blocks", "used")}


def emit_glue(planner: Planner, call: Call) -> None:
    """Appends the launch of a `glue` call."""
    x, out = planner.cut(call["x"]), planner.cut(call["out"])
    planner.own(
        elementwise.gated_activation, f"{call['activation']} of gate, by up {list(out.shape)}", x, out=out,
        activation=call["activation"], count=planner.count(call),
    )  # fmt: skip
