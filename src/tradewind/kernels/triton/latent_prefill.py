"""Attention over latents for rows of several tokens: absorbed over pages, and naive for prompts that begin in the step.

Knows: both forms as tiles, and which rows each is for. Refuses to know: schedules, page owners, one-token rows (latent.py).

    absorbed   BQ tokens x BH heads against tiles of BN latents in pages
    naive      keys and values made of the row's latents (a matmul into scratch), then an ordinary causal attention over these, by the
               kernel here or by FlashAttention 3 (library.fresh_latents)
    chosen     for each row on the device, once a step (`choose_rows`): naive where it multiplies less and the keys of all fit the scratch

Multiplications of one head for a prompt of S tokens at the sizes of DeepSeek (C 512, R 64, N 128, V 128), pairs = S (S + 1) / 2:

    naive      pairs (N + R + V) = 320 pairs      + S C (N + V) = 131,072 S for keys and values
    absorbed   pairs (C + R + C) = 1,088 pairs    + S C (N + V) for queries in, values out (the same)

A prompt of 4,096 tokens in DeepSeek-V2-Lite (16 heads, 27 layers) costs 2.3 TFLOP naive and 7.9 TFLOP absorbed, and 0.5 TFLOP either way
for the matmuls around it, beside 19 TFLOP of the other weights. A piece of n tokens behind h earlier
ones makes keys of those h again, h C (N + V), and saves 768 of each pair: from 171 tokens on that is always less. Scratch has room for 1.8
times the tokens of the largest step, so pieces of very long prompts stay absorbed, at 1,088 / 320 of their pairs.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tradewind.kernels.ops import LatentUp
from tradewind.kernels.triton.launch import launch_options, let_next_start, pow2, wait_for_previous
from tradewind.kernels.triton.step import width
from tradewind.kernels.triton.tuning import LatentPrefillConfig, LatentTileConfig, PrefillConfig


@triton.jit(do_not_specialize=["capacity", "limit"])
def _choose_kernel(
    starts_ptr, lengths_ptr, rows_ptr, keys_ptr, used_ptr, capacity, limit,
    MAKE: tl.constexpr, SAVED: tl.constexpr, R_P2: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    r = tl.arange(0, R_P2)
    there = r < tl.minimum(tl.load(rows_ptr), capacity)
    tokens = tl.load(starts_ptr + r + 1, mask=there, other=0) - tl.load(starts_ptr + r, mask=there, other=0)
    length = tl.load(lengths_ptr + r, mask=there, other=0)
    n = tokens.to(tl.float32)
    earlier = (length - tokens).to(tl.float32)
    cheaper = earlier * MAKE < (n * earlier + n * (n + 1) * 0.5) * SAVED
    wanted = there & (tokens > 1) & ((length == tokens) | cheaper)
    fits = wanted & (tl.cumsum(tl.where(wanted, length, 0), 0) <= limit)
    tl.store(keys_ptr, 0)
    tl.store(keys_ptr + 1 + r, tl.cumsum(tl.where(fits, length, 0), 0), mask=r < capacity)
    tl.store(used_ptr + r, tl.where(fits, tokens, 0), mask=r < capacity)


def choose_rows(
    key_start: Tensor,
    used: Tensor,
    *,
    query_start: Tensor,
    lengths: Tensor,
    rows: Tensor,
    up: LatentUp,
    rope: int,
    limit: int,
    pdl: bool = False,
) -> None:
    """key_start int32 [R + 1]: where each row's keys are to be made, one row behind the other; no room for rows that are absorbed. used
    int32 [R]: tokens of rows whose keys are made, 0 for others.

    Made are those of rows of several tokens that begin in the step or multiply less so (reference_mla.naive_is_cheaper), in their order as
    long as all in all they are at most `limit`; the same for every layer. Records as for `latent_prefill`.
    """
    saved = 2 * up.rank + rope - (up.nope + rope + up.value)
    _choose_kernel[(1,)](
        query_start, lengths, rows, key_start, used, len(lengths), limit, MAKE=float(up.rank * (up.nope + up.value)),
        SAVED=float(max(0, saved)), R_P2=width(len(lengths)), **launch_options(pdl=pdl, warps=4),
    )  # fmt: skip


@triton.jit
def _row_of(tile, starts_ptr, rows, BQ: tl.constexpr, STEPS: tl.constexpr):
    """The last row r with query_start[r] // BQ + r <= tile: as prefill.py numbers tiles."""
    low = 0
    high = rows
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        if low < high - 1:
            if tl.load(starts_ptr + middle) // BQ + middle <= tile:
                low = middle
            else:
                high = middle
    return low


@triton.jit(do_not_specialize=["capacity", "table_stride"])
def _absorbed_kernel(
    q_ptr, pages_ptr, table_ptr, lengths_ptr, starts_ptr, keys_ptr, rows_ptr, capacity, table_stride, scale,
    H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, B: tl.constexpr,
    BQ: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, SINGLES: tl.constexpr, MADE: tl.constexpr,
    COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # late tiles see more keys: start them first
    rows = capacity
    if COUNTED:
        rows = tl.minimum(tl.load(rows_ptr), capacity)
    if rows == 0:
        return
    row = _row_of(tile, starts_ptr, rows, BQ, STEPS)
    first = tl.load(starts_ptr + row)
    tokens = tl.load(starts_ptr + row + 1) - first
    block = (tile - (first // BQ + row)) * BQ
    if block >= tokens:
        return
    length = tl.load(lengths_ptr + row)
    if not SINGLES:
        if tokens == 1:
            return
    if MADE:
        if tl.load(keys_ptr + row + 1) > tl.load(keys_ptr + row):
            return
    W: tl.constexpr = C + R
    j = tl.arange(0, BQ * BH)
    token = block + j // BH
    head = tl.program_id(0) * BH + j % BH
    live = (token < tokens) & (head < H)
    position = length - tokens + token
    c = tl.arange(0, CP)
    r = tl.arange(0, RP)
    q_at = q_ptr + ((first + token).to(tl.int64) * H + head)[:, None] * W
    mask_c = live[:, None] & (c < C)[None, :]
    q = tl.load(q_at + c[None, :], mask=mask_c, other=0.0)
    q_rope = tl.load(q_at + C + r[None, :], mask=live[:, None] & (r < R)[None, :], other=0.0)
    top = tl.full([BQ * BH], float("-inf"), tl.float32)
    total = tl.zeros([BQ * BH], tl.float32)
    acc = tl.zeros([BQ * BH, CP], tl.float32)
    table = table_ptr + row.to(tl.int64) * table_stride
    factor = scale * 1.4426950408889634
    end = tl.minimum(length - tokens + block + BQ, length)
    n = tl.arange(0, BN)
    for start in range(
        0, end, BN
    ):  # one loop: whole tiles in a loop without a mask would cost registers that there are not
        key_at = start + n
        inside = key_at < end
        if B % BN == 0:  # a tile lies in one page: one scalar look-up
            at = (tl.load(table + start // B).to(tl.int64) * B + start % B + n) * W
        else:
            at = (tl.load(table + key_at // B, mask=inside, other=0).to(tl.int64) * B + key_at % B) * W
        if CP == C:
            latent = tl.load(pages_ptr + at[:, None] + c[None, :], mask=inside[:, None], other=0.0)
        else:
            latent = tl.load(pages_ptr + at[:, None] + c[None, :], mask=inside[:, None] & (c < C)[None, :], other=0.0)
        if RP == R:
            key = tl.load(pages_ptr + at[:, None] + C + r[None, :], mask=inside[:, None], other=0.0)
        else:
            key = tl.load(pages_ptr + at[:, None] + C + r[None, :], mask=inside[:, None] & (r < R)[None, :], other=0.0)
        score = tl.dot(q_rope, tl.trans(key), tl.dot(q, tl.trans(latent))) * factor
        score = tl.where(inside[None, :] & (key_at[None, :] <= position[:, None]), score, float("-inf"))
        new = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - new)
        p = tl.exp2(score - new[:, None])
        acc = tl.dot(p.to(latent.dtype), latent, acc * shrink[:, None])
        total = total * shrink + tl.sum(p, 1)
        top = new
    tl.store(q_at + c[None, :], (acc / total[:, None]).to(q_ptr.dtype.element_ty), mask=mask_c)


def latent_prefill(
    wide: Tensor,
    pages: Tensor,
    *,
    query_start: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    scale: float,
    rope: int,
    rows: Tensor | None = None,
    singles: bool = True,
    key_start: Tensor | None = None,
    config: LatentPrefillConfig,
    pdl: bool = False,
) -> None:
    """Causal attention of every row over its latents, those of this step included: wide [T, H, C + R] holds queries and, afterwards, what
    they bring back over the first C numbers.

    query_start int32 [R + 1], lengths int32 [R], page_table int32 [R, P], rows int32 [1] live rows, all on the device; pages
    [pages, B, C + R]. singles=False leaves rows of one token to `latent_decode`; with key_start those whose keys are made (`choose_rows`)
    are left alone. A token's result does not depend on which tokens are computed beside it.
    """
    tokens, heads, size = wide.shape
    rank, count = size - rope, len(lengths)
    heads_each = min(config.block_h, pow2(heads))
    block_q = config.block_m // heads_each
    _absorbed_kernel[(triton.cdiv(heads, heads_each), tokens // block_q + count)](
        wide, pages, page_table, lengths, query_start, key_start if key_start is not None else lengths,
        rows if rows is not None else lengths, count, page_table.stride(0), scale,
        H=heads, C=rank, CP=pow2(rank, 16), R=rope, RP=pow2(rope, 16), B=pages.shape[1],
        BQ=block_q, BH=heads_each, BN=config.block_n, STEPS=max(1, count.bit_length()), SINGLES=singles, MADE=key_start is not None,
        COUNTED=rows is not None, **launch_options(pdl=pdl, warps=config.warps, stages=config.stages),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- naive


@triton.jit(do_not_specialize=["capacity", "table_stride"])
def _keys_kernel(
    pages_ptr, up_ptr, out_ptr, table_ptr, keys_ptr, rows_ptr, capacity, table_stride,
    H: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    C: tl.constexpr, B: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    head = tl.program_id(0)
    tile = tl.program_id(1)
    rows = capacity
    if COUNTED:
        rows = tl.minimum(tl.load(rows_ptr), capacity)
    if rows == 0:
        return
    row = _row_of(tile, keys_ptr, rows, BT, STEPS)
    first = tl.load(keys_ptr + row)
    tokens = tl.load(keys_ptr + row + 1) - first
    block = (tile - (first // BT + row)) * BT
    if block >= tokens:
        return
    W: tl.constexpr = C + R
    t = block + tl.arange(0, BT)
    live = t < tokens
    n = tl.arange(0, NP)
    v = tl.arange(0, VP)
    k = tl.arange(0, BK)
    r = tl.arange(0, RP)
    page = tl.load(table_ptr + row.to(tl.int64) * table_stride + t // B, mask=live, other=0).to(tl.int64)
    latent = pages_ptr + ((page * B + t % B) * W)[:, None]
    up = up_ptr + head.to(tl.int64) * ((N + V) * C)
    keys = tl.zeros([BT, NP], tl.float32)
    values = tl.zeros([BT, VP], tl.float32)
    for start in range(0, C, BK):
        inside = (start + k < C)[None, :]
        x = tl.load(latent + start + k[None, :], mask=live[:, None] & inside, other=0.0)
        w_k = tl.load(up + n[:, None] * C + start + k[None, :], mask=(n < N)[:, None] & inside, other=0.0)
        w_v = tl.load(up + (N + v)[:, None] * C + start + k[None, :], mask=(v < V)[:, None] & inside, other=0.0)
        keys = tl.dot(x, tl.trans(w_k).to(x.dtype), keys)
        values = tl.dot(x, tl.trans(w_v).to(x.dtype), values)
    shared = tl.load(latent + C + r[None, :], mask=live[:, None] & (r < R)[None, :], other=0.0)
    out = out_ptr + (((first + t).to(tl.int64) * H + head) * (N + R + V))[:, None]
    kind = out_ptr.dtype.element_ty
    tl.store(out + n[None, :], keys.to(kind), mask=live[:, None] & (n < N)[None, :])
    tl.store(out + N + r[None, :], shared.to(kind), mask=live[:, None] & (r < R)[None, :])
    tl.store(out + N + R + v[None, :], values.to(kind), mask=live[:, None] & (v < V)[None, :])


def make_keys(
    pages: Tensor,
    up: LatentUp,
    *,
    key_start: Tensor,
    page_table: Tensor,
    rope: int,
    out: Tensor,
    rows: Tensor | None = None,
    config: LatentTileConfig,
    pdl: bool = False,
) -> None:
    """out [K, H, N + R + V] = of the latents of rows that `choose_rows` has chosen, earlier ones too: keys (made, then rotated), then
    values, in the places that key_start int32 [R + 1] gives. page_table int32 [R, P], rows int32 [1] live rows, on the device.
    """
    count = len(key_start) - 1
    _keys_kernel[(up.heads, len(out) // config.block_t + count)](
        pages, up.data[0], out, page_table, key_start, rows if rows is not None else key_start, count, page_table.stride(0),
        H=up.heads, N=up.nope, NP=pow2(up.nope, 16), V=up.value, VP=pow2(up.value, 16), R=rope, RP=pow2(rope, 16), C=up.rank,
        B=pages.shape[1], BT=config.block_t, BK=min(config.block_k, pow2(up.rank, 16)), STEPS=max(1, count.bit_length()),
        COUNTED=rows is not None, **launch_options(pdl=pdl, warps=config.warps, stages=config.stages),
    )  # fmt: skip


@triton.jit
def _fresh_tile(
    q, q_rope, kv, start, length, position, top, total, acc, factor,
    N: tl.constexpr, NP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, LINE: tl.constexpr,
    BN: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    key_at = start + tl.arange(0, BN)
    n = tl.arange(0, NP)
    r = tl.arange(0, RP)
    v = tl.arange(0, VP)
    at = kv + key_at.to(tl.int64)[:, None] * LINE
    inside = (key_at < length)[:, None]
    if MASK or NP != N or RP != R or VP != V:
        key = tl.load(at + n[None, :], mask=inside & (n < N)[None, :], other=0.0)
        key_rope = tl.load(at + N + r[None, :], mask=inside & (r < R)[None, :], other=0.0)
        value = tl.load(at + N + R + v[None, :], mask=inside & (v < V)[None, :], other=0.0)
    else:
        key = tl.load(at + n[None, :])
        key_rope = tl.load(at + N + r[None, :])
        value = tl.load(at + N + R + v[None, :])
    score = tl.dot(q_rope, tl.trans(key_rope), tl.dot(q, tl.trans(key))) * factor
    if MASK:
        score = tl.where(key_at[None, :] <= position[:, None], score, float("-inf"))
    new = tl.maximum(top, tl.max(score, 1))
    shrink = tl.exp2(top - new)
    p = tl.exp2(score - new[:, None])
    acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None])
    return new, total * shrink + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=["capacity"])
def _fresh_kernel(
    q_ptr, kv_ptr, out_ptr, keys_ptr, starts_ptr, rows_ptr, capacity, scale,
    H: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    rows = capacity
    if COUNTED:
        rows = tl.minimum(tl.load(rows_ptr), capacity)
    if rows == 0:
        return
    row = _row_of(tile, starts_ptr, rows, BM, STEPS)
    first = tl.load(starts_ptr + row)
    tokens = tl.load(starts_ptr + row + 1) - first
    block = (tile - (first // BM + row)) * BM
    if block >= tokens:
        return
    first_key = tl.load(keys_ptr + row)
    length = tl.load(keys_ptr + row + 1) - first_key
    if length == 0:
        return
    earlier = length - tokens
    line = block + tl.arange(0, BM)
    live = line < tokens
    position = earlier + line
    n = tl.arange(0, NP)
    r = tl.arange(0, RP)
    v = tl.arange(0, VP)
    token = (first + line).to(tl.int64)
    q_at = q_ptr + (token * (H * (N + R)))[:, None] + head * (N + R)
    q = tl.load(q_at + n[None, :], mask=live[:, None] & (n < N)[None, :], other=0.0)
    q_rope = tl.load(q_at + N + r[None, :], mask=live[:, None] & (r < R)[None, :], other=0.0)
    LINE: tl.constexpr = H * (N + R + V)
    kv = kv_ptr + first_key.to(tl.int64) * LINE + head * (N + R + V)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, VP], tl.float32)
    factor = scale * 1.4426950408889634
    whole = (earlier + block + 1) // BN * BN  # keys that every query of the tile sees, in whole tiles
    for start in range(0, whole, BN):
        top, total, acc = _fresh_tile(
            q, q_rope, kv, start, length, position, top, total, acc, factor, N, NP, R, RP, V, VP, LINE, BN, False
        )
    for start in range(whole, tl.minimum(earlier + block + BM, length), BN):
        top, total, acc = _fresh_tile(
            q, q_rope, kv, start, length, position, top, total, acc, factor, N, NP, R, RP, V, VP, LINE, BN, True
        )
    out = out_ptr + (token * (H * V))[:, None] + head * V + v[None, :]
    tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=live[:, None] & (v < V)[None, :])


def fresh_latents(
    q: Tensor,
    kv: Tensor,
    *,
    query_start: Tensor,
    key_start: Tensor,
    rope: int,
    value: int,
    scale: float,
    out: Tensor,
    rows: Tensor | None = None,
    config: PrefillConfig,
    pdl: bool = False,
) -> None:
    """out [T, H V] = causal attention of each row whose keys are made over its keys and values kv [K, H, N + R + V] (`make_keys`), of which
    the last are its tokens' own; q [T, H (N + R)] turned. Other rows are left alone. Source: FlashAttention 2 (Dao 2023).
    """
    tokens, (_, heads, size) = len(q), kv.shape
    nope, count = size - rope - value, len(key_start) - 1
    _fresh_kernel[(heads, tokens // config.block_m + count)](
        q, kv, out, key_start, query_start, rows if rows is not None else key_start, count, scale,
        H=heads, N=nope, NP=pow2(nope, 16), R=rope, RP=pow2(rope, 16), V=value, VP=pow2(value, 16),
        BM=config.block_m, BN=config.block_n, STEPS=max(1, count.bit_length()), COUNTED=rows is not None,
        **launch_options(pdl=pdl, warps=config.warps, stages=config.stages),
    )  # fmt: skip
