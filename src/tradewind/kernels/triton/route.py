"""Mixtures of experts, first half: from a router's logits to chosen experts, and (token, expert) pairs sorted by expert.

Knows: the arithmetic of kernels/reference_moe.py (`route`, `dispatch`) on the device. Refuses to know: what experts compute (moe.py).
Nothing here waits for the host: sizes that depend on the routing are bounded by shapes and read from device memory.

    route            program = some tokens; K rounds of "the largest that is left": no sort, always K different, valid experts
    sort_pairs       program = the same tokens; order [T K] by expert, and blocks of at most `block` pairs of one expert each

    counts [programs, X]    how often each of them chose each expert; a stable sort follows from sums of columns
    blocks int32 [3, most]  expert | first place in order | end      of block b; `used` [1] of them hold anything
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tradewind.kernels.ops import Routing
from tradewind.kernels.triton.launch import launch_options, let_next_start, pow2, wait_for_previous


@triton.jit
def _key(score):
    """int32 that orders as the scores do; a NaN is as -inf. Integers: a warp finds their largest in one instruction."""
    bits = tl.where(score == score, score, float("-inf")).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score_of(key):
    """The score of a key; 0 of NOTHING."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return tl.where(key == -0x80000000, 0.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def _first(key, best, place, AXIS: tl.constexpr):
    """The lowest place whose key is the best."""
    return tl.min(tl.where(key == tl.expand_dims(best, AXIS), place, 0x7FFFFFFF), AXIS)


@triton.jit(do_not_specialize=["T"])
def _route_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, counts_ptr, count_ptr, T, stride, scale,
    X: tl.constexpr, CHOSEN: tl.constexpr, CHOSEN_P2: tl.constexpr, GROUPS: tl.constexpr, GROUPS_P2: tl.constexpr, SIZE_P2: tl.constexpr,
    KEPT: tl.constexpr, GROUP_TOP: tl.constexpr, BT: tl.constexpr, SIGMOID: tl.constexpr, NORMALISE: tl.constexpr, BIAS: tl.constexpr,
    COUNTS: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    NOTHING: tl.constexpr = -0x80000000  # below the key of -inf
    SIZE: tl.constexpr = X // GROUPS
    # Experts lie in a tile of groups side by side, each filled up to a power of two.
    column = tl.arange(0, GROUPS_P2 * SIZE_P2)
    group = column // SIZE_P2
    there = (group < GROUPS) & (column % SIZE_P2 < SIZE)
    expert = tl.where(there, group * SIZE + column % SIZE_P2, X)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    if BIAS:
        bias = tl.load(bias_ptr + expert, mask=there, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    rows = T
    if COUNTED:
        rows = tl.minimum(tl.load(count_ptr), T)
    live = t < rows
    inside = live[:, None] & there[None, :]
    logits = tl.load(logits_ptr + t.to(tl.int64)[:, None] * stride + expert[None, :], mask=inside, other=0.0).to(
        tl.float32
    )
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        logits = tl.where(there[None, :], logits, float("-inf"))
        scores = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
    deciding = scores
    if BIAS:
        deciding += bias[None, :]
    if GROUPS > 1:
        left = tl.where(there[None, :], _key(deciding), NOTHING)
        left = tl.reshape(left, (BT, GROUPS_P2, SIZE_P2))
        inner = tl.arange(0, SIZE_P2)[None, None, :]
        worth = tl.zeros([BT, GROUPS_P2], tl.float32)
        for _ in tl.static_range(GROUP_TOP):
            top = tl.max(left, 2)
            worth += _score_of(top)
            left = tl.where(inner == _first(left, top, inner, 2)[:, :, None], NOTHING, left)
        number = tl.arange(0, GROUPS_P2)[None, :]
        waiting = tl.where(number < GROUPS, _key(worth), NOTHING)
        for _ in tl.static_range(KEPT):
            best_group = _first(waiting, tl.max(waiting, 1), number, 1)
            waiting = tl.where(number == best_group[:, None], NOTHING, waiting)
        gone = (waiting != NOTHING)[:, :, None] & (inner >= 0)
        deciding = tl.where(tl.reshape(gone.to(tl.int32), (BT, GROUPS_P2 * SIZE_P2)) != 0, float("-inf"), deciding)
    choice = tl.where(there[None, :], _key(deciding), NOTHING)
    k = tl.arange(0, CHOSEN_P2)
    ids = tl.zeros([BT, CHOSEN_P2], tl.int32)
    weights = tl.zeros([BT, CHOSEN_P2], tl.float32)
    for i in tl.static_range(CHOSEN):
        best = tl.max(choice, 1)
        chosen = _first(choice, best, expert[None, :], 1)
        hit = expert[None, :] == chosen[:, None]
        weight = _score_of(best)
        if BIAS:
            weight = tl.sum(tl.where(hit, scores, 0.0), 1)
        ids = tl.where((k == i)[None, :], chosen[:, None], ids)
        weights = tl.where((k == i)[None, :], weight[:, None], weights)
        choice = tl.where(hit, NOTHING, choice)
    if NORMALISE:
        weights = weights / (tl.sum(weights, 1) + 1e-20)[:, None]
    place = t[:, None] * CHOSEN + k[None, :]
    stored = live[:, None] & (k < CHOSEN)[None, :]
    tl.store(ids_ptr + place, ids, mask=stored)
    tl.store(weights_ptr + place, weights * scale, mask=stored)
    if COUNTS:
        taken = ((choice == NOTHING) & inside).to(tl.int32)
        tl.store(counts_ptr + tl.program_id(0) * X + expert, tl.sum(taken, 0), mask=there)


def route(
    logits: Tensor,
    routing: Routing,
    *,
    bias: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    tokens_each: int,
    counts: Tensor | None = None,
    count: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """logits [T, X] float32 or bf16 -> ids int32 [T, K], weights float32 [T, K]; bias float32 [X] decides but does not weigh.

    tokens_each: tokens of a program, a power of two. counts int32 [programs, X]: how often each expert was chosen by each program's
    tokens, for `sort_pairs`. count: int32 [1] on the device, rows beyond it are left alone and not counted.
    """
    tokens, experts = logits.shape
    assert ids.shape == weights.shape == (tokens, routing.top_k), (ids.shape, weights.shape, routing.top_k)
    assert routing.top_k <= experts and experts % routing.groups == 0, (routing, experts)
    groups, size = pow2(routing.groups), pow2(experts // routing.groups)
    _route_kernel[(triton.cdiv(tokens, tokens_each),)](
        logits, bias if bias is not None else logits, ids, weights, counts if counts is not None else ids,
        count if count is not None else ids, tokens, logits.stride(0), routing.scale,
        X=experts, CHOSEN=routing.top_k, CHOSEN_P2=pow2(routing.top_k), GROUPS=routing.groups, GROUPS_P2=groups, SIZE_P2=size,
        KEPT=routing.groups_kept, GROUP_TOP=min(routing.group_top, experts // routing.groups), BT=tokens_each,
        SIGMOID=routing.score == "sigmoid", NORMALISE=routing.normalise, BIAS=bias is not None, COUNTS=counts is not None,
        COUNTED=count is not None, **launch_options(pdl=pdl, warps=max(1, min(4, tokens_each * groups * size // 256))),
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _count_kernel(
    ids_ptr, counts_ptr, count_ptr, T,
    X: tl.constexpr, X_P2: tl.constexpr, CHOSEN: tl.constexpr, BT: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    expert = tl.arange(0, X_P2)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    wait_for_previous(PDL)
    rows = T
    if COUNTED:
        rows = tl.minimum(tl.load(count_ptr), T)
    found = tl.zeros([X_P2], tl.int32)
    for k in tl.static_range(CHOSEN):
        chosen = tl.load(ids_ptr + t * CHOSEN + k, mask=t < rows, other=-1)
        found += tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + tl.program_id(0) * X + expert, found, mask=expert < X)


def count_pairs(
    ids: Tensor, *, experts: int, counts: Tensor, tokens_each: int, count: Tensor | None = None, pdl: bool = False
) -> None:
    """What `route` leaves in `counts`, from ids [T, K] that came from elsewhere."""
    tokens, chosen = ids.shape
    _count_kernel[(triton.cdiv(tokens, tokens_each),)](
        ids, counts, count if count is not None else ids, tokens,
        X=experts, X_P2=pow2(experts), CHOSEN=chosen, BT=tokens_each, COUNTED=count is not None, **launch_options(pdl=pdl, warps=4),
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "PROGRAMS", "MOST", "BLOCK"])
def _sort_kernel(
    ids_ptr, counts_ptr, base_ptr, order_ptr, blocks_ptr, used_ptr, count_ptr, T, PROGRAMS, MOST, BLOCK,
    X: tl.constexpr, X_P2: tl.constexpr, CHOSEN: tl.constexpr, BT: tl.constexpr, PAIRS_P2: tl.constexpr,
    COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    program = tl.program_id(0)
    expert = tl.arange(0, X_P2)
    inside = expert < X
    line = tl.arange(0, 32)
    pair = tl.arange(0, PAIRS_P2)
    wait_for_previous(PDL)
    rows = T
    if COUNTED:
        rows = tl.minimum(tl.load(count_ptr), T)
    # Summed over lines once, at the end: each sum over lines is a way through shared memory.
    totals = tl.zeros([32, X_P2], tl.int32)
    befores = tl.zeros([32, X_P2], tl.int32)
    for first in range(0, PROGRAMS, 32):
        number = first + line
        counts = tl.load(
            counts_ptr + number[:, None] * X + expert[None, :],
            mask=(number < PROGRAMS)[:, None] & inside[None, :],
            other=0,
        )
        totals += counts
        befores += tl.where((number < program)[:, None], counts, 0)
    total = tl.sum(totals, 0)
    before = tl.sum(befores, 0)
    begin = tl.cumsum(total, 0) - total
    blocks = (total + BLOCK - 1) // BLOCK
    block_begin = tl.cumsum(blocks, 0) - blocks
    if program == 0:
        tl.store(used_ptr, tl.sum(blocks, 0))
    for j in range(program, tl.max(blocks, 0), PROGRAMS):  # the j-th block of every expert that has so many
        at = blocks_ptr + block_begin + j
        tl.store(at, expert, mask=j < blocks)
        tl.store(at + MOST, begin + j * BLOCK, mask=j < blocks)
        tl.store(at + 2 * MOST, begin + total, mask=j < blocks)
    # A pair's place: behind all pairs of smaller experts, of programs before, and of the same expert before it here.
    tl.store(base_ptr + program * X + expert, begin + before, mask=inside)
    tl.debug_barrier()
    mine = program * (BT * CHOSEN) + pair
    live = (pair < BT * CHOSEN) & (mine < rows * CHOSEN)
    chosen = tl.load(ids_ptr + mine, mask=live, other=-1)
    rank = tl.sum(((chosen[:, None] == chosen[None, :]) & (pair[None, :] < pair[:, None])).to(tl.int32), 1)
    place = tl.load(base_ptr + program * X + chosen, mask=live, other=0) + rank
    tl.store(order_ptr + place, mine, mask=live)


def most_blocks(pairs: int, *, experts: int, block: int) -> int:
    """Upper bound of the blocks that any routing of so many pairs gives."""
    return min(pairs, (pairs + experts * (block - 1)) // block)


def sort_pairs(
    ids: Tensor,
    *,
    experts: int,
    block: int,
    tokens_each: int,
    counts: Tensor,
    base: Tensor,
    order: Tensor,
    blocks: Tensor,
    used: Tensor,
    count: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """ids int32 [T, K] -> order int32 [T K]: pairs t K + k by expert, those of one expert in the order of their tokens.

    blocks int32 [3, most_blocks(...)] and used int32 [1]: see the head of this file. counts int32 [programs, X] from `route` or
    `count_pairs` with the same tokens_each; base int32 [programs, X] is scratch. count: tokens beyond it have no pairs.
    """
    tokens, chosen = ids.shape
    programs = triton.cdiv(tokens, tokens_each)
    pairs = pow2(tokens_each * chosen)
    _sort_kernel[(programs,)](
        ids, counts, base, order, blocks, used, count if count is not None else ids, tokens, programs, blocks.shape[1], block,
        X=experts, X_P2=pow2(experts), CHOSEN=chosen, BT=tokens_each, PAIRS_P2=pairs, COUNTED=count is not None,
        **launch_options(pdl=pdl, warps=4 if pairs <= 128 else 8),
    )  # fmt: skip
