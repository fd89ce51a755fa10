"""Attention over latents for rows of one token (MLA), and what surrounds it for rows of any length: store, absorb, leave.

Knows: pages of latents, the two matrices of each head, how one sum is split and merged. Refuses to know: schedules, page owners, rows of
several tokens (latent_prefill.py). The truth is in kernels/reference_mla.py.

    pages    [pages, B, C + R]: of a token the normed latent, then the rotated key; the latent is key and value, so a tile is read once
    up       [H, N + V, C]: of each head what makes keys (N rows), then what makes values, as checkpoints have it
    wide     [T, H, C + R]: queries in the space of latents. Attention writes what it brings back over the first C numbers of each

    store    q's last R dims turned in place, the latent normed and turned into its page
    absorb   q_nope W_k[h] -> wide. For one-token rows the same launch turns and stores too, and q stays as it is (`enter`)
    decode   program (split, BH heads, row): its heads against tiles of BN latents; sums of splits go to parts, each split's own
    leave    W_v[h] times what came back -> out [T, H V]; with splits it is where they are merged, so that no launch is added

Only a row's own length and SPLITS decide how its sum is cut: batch mates change nothing.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from tradewind.kernels.ops import LatentUp
from tradewind.kernels.triton.launch import launch_options, let_next_start, pow2, wait_for_previous
from tradewind.kernels.triton.step import width
from tradewind.kernels.triton.tuning import LatentDecodeConfig, LatentTileConfig

EVERY, LATER, ALONE = 0, 1, 2
"""Whose queries `absorb` and `leave` take: of every token, of tiles where no keys are made for some row, of one-token rows (by row)."""
STORED_AT_ONCE = 4
"""Tokens whose latents one program norms."""
MERGED_AT_ONCE = 16
"""Splits whose sums a thread has under way where a token's answer leaves: 4 registers each."""


@triton.jit
def turned(x, cos, sin, M: tl.constexpr, RP: tl.constexpr):
    """Pairs (2i, 2i + 1) of x [M, RP] turned, float32."""
    first, second = tl.split(tl.reshape(x.to(tl.float32), (M, RP // 2, 2)))
    return tl.interleave(first * cos - second * sin, second * cos + first * sin)


@triton.jit
def angles_of(angles_ptr, positions_ptr, token, live, R: tl.constexpr, RP: tl.constexpr, BY_POSITION: tl.constexpr):
    """cos and sin [M, RP / 2] of tokens."""
    i = tl.arange(0, RP // 2)
    line = token
    if BY_POSITION:
        line = tl.load(positions_ptr + token, mask=live, other=0).to(tl.int64)
    at = angles_ptr + line[:, None] * R + i[None, :]
    mask = live[:, None] & (i < R // 2)[None, :]
    return tl.load(at, mask=mask, other=1.0), tl.load(at + R // 2, mask=mask, other=0.0)


@triton.jit
def _store_latents(
    latent_ptr, norm_ptr, angles_ptr, positions_ptr, slots_ptr, pages_ptr, token, live, eps,
    C: tl.constexpr, CP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, M: tl.constexpr, BY_POSITION: tl.constexpr,
):  # fmt: skip
    """The latents of M tokens into their pages."""
    W: tl.constexpr = C + R
    c = tl.arange(0, CP)
    r = tl.arange(0, RP)
    mask_c = live[:, None] & (c < C)[None, :]
    mask_r = live[:, None] & (r < R)[None, :]
    row = latent_ptr + token[:, None] * W
    x = tl.load(row + c[None, :], mask=mask_c, other=0.0).to(tl.float32)
    key = tl.load(row + C + r[None, :], mask=mask_r, other=0.0)
    weight = tl.load(norm_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    cos, sin = angles_of(angles_ptr, positions_ptr, token, live, R, RP, BY_POSITION)
    slot = tl.load(slots_ptr + token, mask=live, other=0).to(tl.int64)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / C + eps)[:, None] * weight[None, :]
    place = pages_ptr + slot[:, None] * W
    tl.store(place + c[None, :], y.to(pages_ptr.dtype.element_ty), mask=mask_c)
    tl.store(place + C + r[None, :], turned(key, cos, sin, M, RP).to(pages_ptr.dtype.element_ty), mask=mask_r)


@triton.jit(do_not_specialize=["T"])
def _store_kernel(
    q_ptr, latent_ptr, norm_ptr, angles_ptr, positions_ptr, slots_ptr, pages_ptr, count_ptr, T, eps,
    H: tl.constexpr, N: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BY_POSITION: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    count = T
    if COUNTED:
        count = tl.minimum(tl.load(count_ptr), T)
    first = tl.program_id(1).to(tl.int64) * BT
    if first >= count:
        return
    part = tl.program_id(0)
    if part == 0:
        token = first + tl.arange(0, BT)
        _store_latents(
            latent_ptr, norm_ptr, angles_ptr, positions_ptr, slots_ptr, pages_ptr, token, token < count, eps,
            C, CP, R, RP, BT, BY_POSITION,
        )  # fmt: skip
        return
    j = tl.arange(0, BT * BH)
    token = first + j // BH
    head = (part - 1) * BH + j % BH
    live = (token < count) & (head < H)
    r = tl.arange(0, RP)
    at = q_ptr + token[:, None] * (H * (N + R)) + head[:, None] * (N + R) + N + r[None, :]
    mask = live[:, None] & (r < R)[None, :]
    x = tl.load(at, mask=mask, other=0.0)
    cos, sin = angles_of(angles_ptr, positions_ptr, token, token < count, R, RP, BY_POSITION)
    tl.store(at, turned(x, cos, sin, BT * BH, RP).to(q_ptr.dtype.element_ty), mask=mask)


def latent_store(
    q: Tensor,
    latent: Tensor,
    angles: Tensor,
    write_slots: Tensor,
    pages: Tensor,
    *,
    heads: int,
    weight: Tensor,
    eps: float,
    positions: Tensor | None = None,
    count: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Turns the last R dims of each head of q [T, H (N + R)] in place; stores latent [T, C + R] into pages [pages, B, C + R] at
    write_slots int32 [T], its first C numbers RMS normed with weight [C], its last R turned.

    angles float32 [T, R] (cos half, sin half), or a table [positions, R] read at positions int32 [T] when given. count int32 [1] on the
    device: tokens beyond it are left alone.
    """
    tokens, rope, rank = len(q), angles.shape[1], len(weight)
    heads_each = min(16, pow2(heads))
    _store_kernel[(1 + triton.cdiv(heads, heads_each), triton.cdiv(tokens, STORED_AT_ONCE))](
        q, latent, weight, angles, positions if positions is not None else write_slots, write_slots, pages,
        count if count is not None else write_slots, tokens, eps,
        H=heads, N=q.shape[1] // heads - rope, R=rope, RP=pow2(rope, 2), C=rank, CP=pow2(rank), BT=STORED_AT_ONCE, BH=heads_each,
        BY_POSITION=positions is not None, COUNTED=count is not None, **launch_options(pdl=pdl, warps=4),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ into the space and out of it


@triton.jit
def some_row_goes_on(starts_ptr, keys_ptr, rows, first, last, R_P2: tl.constexpr, SINGLES: tl.constexpr):
    """Whether a token of [first, last) belongs to a row for which no keys are made; SINGLES: rows of one token count too."""
    r = tl.arange(0, R_P2)
    there = r < rows
    begin = tl.load(starts_ptr + r, mask=there, other=0)
    end = tl.load(starts_ptr + r + 1, mask=there, other=0)
    made = tl.load(keys_ptr + r + 1, mask=there, other=0) > tl.load(keys_ptr + r, mask=there, other=0)
    absorbed = there & (end > begin) & ~made
    if not SINGLES:
        absorbed = absorbed & (end - begin > 1)
    return tl.max((absorbed & (begin < last) & (end > first)).to(tl.int32), 0) > 0


@triton.jit
def _tokens_of(starts_ptr, count_ptr, first, T, WHOSE: tl.constexpr, BT: tl.constexpr, COUNTED: tl.constexpr):
    """(line of `wide`, token, live, whether any is) of a tile; T counts rows where WHOSE is ALONE."""
    line = first + tl.arange(0, BT)
    count = T
    if COUNTED:
        count = tl.minimum(tl.load(count_ptr), T)
    token = line
    live = line < count
    some = first < count
    if WHOSE == 2:
        token = tl.load(starts_ptr + line, mask=live, other=0)
        live = live & (tl.load(starts_ptr + line + 1, mask=live, other=0) - token == 1)
        some = tl.max(live.to(tl.int32), 0) > 0
    return line.to(tl.int64), token.to(tl.int64), live, some


@triton.jit(do_not_specialize=["T", "rows_capacity"])
def _absorb_kernel(
    q_ptr, up_ptr, out_ptr, latent_ptr, norm_ptr, angles_ptr, positions_ptr, slots_ptr, pages_ptr,
    starts_ptr, keys_ptr, rows_ptr, count_ptr, T, rows_capacity, eps,
    H: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, V: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    C: tl.constexpr, CP: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, STORERS: tl.constexpr, SB: tl.constexpr,
    WHOSE: tl.constexpr, LONE: tl.constexpr, R_P2: tl.constexpr, BY_POSITION: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    BLOCKS: tl.constexpr = (C + BC - 1) // BC
    ENTER: tl.constexpr = STORERS > 0
    first = tl.program_id(1) * BT
    part = tl.program_id(0) - STORERS
    if part < 0:  # norms and stores a few latents
        wait_for_previous(PDL)
        count = T
        if COUNTED:
            count = tl.minimum(tl.load(count_ptr), T)
        stored = (first + tl.program_id(0) * SB + tl.arange(0, SB)).to(tl.int64)
        _store_latents(
            latent_ptr, norm_ptr, angles_ptr, positions_ptr, slots_ptr, pages_ptr, stored, stored < count, eps,
            C, CP, R, RP, SB, BY_POSITION,
        )  # fmt: skip
        return
    head = part // BLOCKS
    n = tl.arange(0, NP)
    c = part % BLOCKS * BC + tl.arange(0, BC)
    up = up_ptr + head.to(tl.int64) * ((N + V) * C)
    w = tl.load(up + n[:, None] * C + c[None, :], mask=(n < N)[:, None] & (c < C)[None, :], other=0.0)
    wait_for_previous(PDL)
    line, token, live, some = _tokens_of(starts_ptr, count_ptr, first, T, WHOSE, BT, COUNTED)
    if WHOSE == 1:
        rows = tl.minimum(tl.load(rows_ptr), rows_capacity)
        some = some & some_row_goes_on(starts_ptr, keys_ptr, rows, first, first + BT, R_P2, LONE)
    if not some:
        return
    q = q_ptr + token[:, None] * (H * (N + R)) + head * (N + R)
    x = tl.load(q + n[None, :], mask=live[:, None] & (n < N)[None, :], other=0.0)
    y = tl.dot(x, w.to(x.dtype))
    out = out_ptr + line[:, None] * (H * (C + R)) + head * (C + R)
    tl.store(out + c[None, :], y.to(out_ptr.dtype.element_ty), mask=live[:, None] & (c < C)[None, :])
    if part % BLOCKS == 0:
        r = tl.arange(0, RP)
        mask = live[:, None] & (r < R)[None, :]
        z = tl.load(q + N + r[None, :], mask=mask, other=0.0)
        if ENTER:
            cos, sin = angles_of(angles_ptr, positions_ptr, token, live, R, RP, BY_POSITION)
            z = turned(z, cos, sin, BT, RP).to(z.dtype)
        tl.store(out + C + r[None, :], z, mask=mask)


def absorb(
    q: Tensor,
    up: LatentUp,
    *,
    rope: int,
    out: Tensor,
    whose: int = EVERY,
    lone: bool = False,
    query_start: Tensor | None = None,
    key_start: Tensor | None = None,
    rows: Tensor | None = None,
    count: Tensor | None = None,
    config: LatentTileConfig,
    pdl: bool = False,
) -> None:
    """out [T, H, C + R] = q [T, H (N + R)] with each head's first N numbers in the space of latents, the last R copied.

    whose: EVERY; LATER (needs query_start, key_start, rows: tiles of tokens whose rows, of several tokens each, all have their keys made by
    `choose_rows` are left alone; lone: rows of one token count too); ALONE: out [R, H, C + R] of rows with one token, by row (needs
    query_start; count: live rows). count int32 [1] on the device: tokens beyond it are left alone.
    """
    assert key_start is not None or whose != LATER, "rows are told apart by whether keys are made for them"
    assert query_start is not None or whose == EVERY
    tokens, blocks = len(out), triton.cdiv(up.rank, config.block)
    _absorb_kernel[(up.heads * blocks, triton.cdiv(tokens, config.block_t))](
        q, up.data[0], out, q, q, q, q, q, q,
        query_start if query_start is not None else q, key_start if key_start is not None else q, rows if rows is not None else q,
        count if count is not None else q, tokens, 0 if key_start is None else len(key_start) - 1, 0.0,
        BT=config.block_t, BC=config.block, STORERS=0, SB=1, WHOSE=whose, LONE=lone,
        R_P2=1 if key_start is None else width(len(key_start) - 1), BY_POSITION=False, COUNTED=count is not None,
        **_sizes(up, rope), **launch_options(pdl=pdl, warps=config.warps, stages=config.stages),
    )  # fmt: skip


def enter(
    q: Tensor,
    latent: Tensor,
    angles: Tensor,
    write_slots: Tensor,
    pages: Tensor,
    up: LatentUp,
    *,
    weight: Tensor,
    eps: float,
    positions: Tensor | None = None,
    out: Tensor,
    count: Tensor | None = None,
    config: LatentTileConfig,
    pdl: bool = False,
) -> None:
    """`latent_store` and `absorb` of every token in one launch: out [T, H, C + R] has the turned part too, and q is left as it is."""
    tokens, blocks, rope = len(q), triton.cdiv(up.rank, config.block), angles.shape[1]
    each = min(STORED_AT_ONCE, pow2(tokens))
    storers = triton.cdiv(min(config.block_t, tokens), each)
    _absorb_kernel[(storers + up.heads * blocks, triton.cdiv(tokens, config.block_t))](
        q, up.data[0], out, latent, weight, angles, positions if positions is not None else write_slots, write_slots, pages,
        q, q, q, count if count is not None else q, tokens, 0, eps,
        BT=config.block_t, BC=config.block, STORERS=storers, SB=each, WHOSE=EVERY, LONE=False, R_P2=1,
        BY_POSITION=positions is not None, COUNTED=count is not None,
        **_sizes(up, rope), **launch_options(pdl=pdl, warps=config.warps, stages=config.stages),
    )  # fmt: skip


def _sizes(up: LatentUp, rope: int) -> dict[str, int]:
    return {
        "H": up.heads, "N": up.nope, "NP": pow2(up.nope, 16), "V": up.value, "R": rope, "RP": pow2(rope, 2), "C": up.rank,
        "CP": pow2(up.rank),
    }  # fmt: skip


@triton.jit(do_not_specialize=["T", "capacity"])
def _leave_kernel(
    x_ptr, part_ptr, up_ptr, out_ptr, starts_ptr, keys_ptr, rows_ptr, count_ptr, T, capacity,
    H: tl.constexpr, N: tl.constexpr, V: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    BT: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr,
    WHOSE: tl.constexpr, LONE: tl.constexpr, R_P2: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    head = tl.program_id(0) // BLOCKS
    first = tl.program_id(1) * BT
    v = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    k = tl.arange(0, BK)
    up = up_ptr + head.to(tl.int64) * ((N + V) * C) + (N + v)[:, None] * C + k[None, :]
    wait_for_previous(PDL)
    line, token, live, some = _tokens_of(starts_ptr, count_ptr, first, T, WHOSE, BT, COUNTED)
    if WHOSE == 1:
        rows = tl.minimum(tl.load(rows_ptr), capacity)
        some = some & some_row_goes_on(starts_ptr, keys_ptr, rows, first, first + BT, R_P2, LONE)
    if not some:
        return
    acc = tl.zeros([BT, BV], tl.float32)
    if SPLITS == 1:
        row = x_ptr + line[:, None] * (H * (C + R)) + head * (C + R) + k[None, :]
        for start in range(0, C, BK):
            x = tl.load(row + start, mask=live[:, None] & (start + k < C)[None, :], other=0.0)
            w = tl.load(up + start, mask=(v < V)[:, None] & (start + k < C)[None, :], other=0.0)
            acc = tl.dot(x, tl.trans(w).to(x.dtype), acc)
    else:  # parts: [R, H, SPLITS, C] sums, then tops, then totals [R, H, SPLITS]; a top of -inf is a split without keys
        place = (line * H + head) * SPLITS
        tops = part_ptr + capacity.to(tl.int64) * (H * SPLITS * C)
        totals = tops + capacity.to(tl.int64) * (H * SPLITS)
        s = tl.arange(0, SP)
        there = live[:, None] & (s < SPLITS)[None, :]
        top = tl.load(tops + place[:, None] + s[None, :], mask=there, other=float("-inf"))
        total = tl.load(totals + place[:, None] + s[None, :], mask=there, other=0.0)
        best = tl.max(top, 1)
        best = tl.where(best == float("-inf"), 0.0, best)
        weight = tl.exp2(top - best[:, None])
        whole = tl.sum(weight * total, 1)
        share = weight / tl.maximum(whole, 1e-30)[:, None]
        for start in range(0, C, BK):
            x = tl.zeros([BT, BK], tl.float32)
            for split in tl.static_range(SPLITS):
                mine = tl.sum(tl.where((s == split)[None, :], share, 0.0), 1)
                at = part_ptr + (place + split)[:, None] * C + start + k[None, :]
                seen = (live & (mine > 0))[:, None] & (start + k < C)[None, :]
                x += mine[:, None] * tl.load(at, mask=seen, other=0.0)
            w = tl.load(up + start, mask=(v < V)[:, None] & (start + k < C)[None, :], other=0.0)
            acc = tl.dot(x.to(w.dtype), tl.trans(w), acc)
    out = out_ptr + token[:, None] * (H * V) + head * V + v[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (v < V)[None, :])


@triton.jit(do_not_specialize=["capacity"])
def _leave_one_kernel(
    x_ptr, part_ptr, up_ptr, out_ptr, count_ptr, capacity,
    H: tl.constexpr, N: tl.constexpr, V: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, TOGETHER: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token a program, without tensor cores: what it takes is how often one load waits for another, hardly how much is read.

    Weights are there before the wait. Behind it tops, totals and sums of TOGETHER splits are loaded at once, none masked by what another
    has brought; each thread adds the splits of its own numbers, so that only the finished sum goes through shared memory.
    """
    let_next_start(PDL)
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    head = tl.program_id(0) // BLOCKS
    token = tl.program_id(1).to(tl.int64)
    v = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    k = tl.arange(0, BK)
    up = up_ptr + head.to(tl.int64) * ((N + V) * C) + (N + v)[:, None] * C + k[None, :]
    ws = ()
    for start in tl.static_range(0, C, BK):
        ws = ws + (tl.load(up + start, mask=(v < V)[:, None] & (start + k < C)[None, :], other=0.0),)  # noqa: RUF005
    wait_for_previous(PDL)
    if COUNTED:
        if token >= tl.load(count_ptr):
            return
    if SPLITS > 1:
        place = (token * H + head) * SPLITS
        tops_ptr = part_ptr + capacity.to(tl.int64) * (H * SPLITS * C) + place
        totals_ptr = tops_ptr + capacity.to(tl.int64) * (H * SPLITS)
        best = float("-inf")
        whole = 0.0
        sums = ()
        for _ in tl.static_range(0, C, BK):
            sums = sums + (tl.zeros([BK], tl.float32),)  # noqa: RUF005
        for first in range(0, SPLITS, TOGETHER):
            parts = ()
            for start in tl.static_range(0, C, BK):
                for s in tl.static_range(TOGETHER):
                    at = part_ptr + (place + first + s) * C + start + k
                    parts = parts + (tl.load(at, mask=start + k < C, other=0.0, volatile=True),)  # noqa: RUF005
            tops = ()
            totals = ()
            for s in tl.static_range(TOGETHER):
                tops = tops + (tl.load(tops_ptr + first + s, volatile=True),)  # noqa: RUF005
                totals = totals + (tl.load(totals_ptr + first + s, volatile=True),)  # noqa: RUF005
            new = best
            for s in tl.static_range(TOGETHER):
                new = tl.maximum(new, tops[s])
            safe = tl.where(new == float("-inf"), 0.0, new)
            shrink = tl.exp2(best - safe)
            best = new
            whole = whole * shrink
            weights = ()
            for s in tl.static_range(TOGETHER):
                weights = weights + (tl.exp2(tops[s] - safe),)  # noqa: RUF005
                whole += weights[s] * totals[s]
            added = ()
            for start in tl.static_range(0, C, BK):
                x = sums[start // BK] * shrink
                for s in tl.static_range(TOGETHER):  # one without keys has left nothing that may be read
                    x += tl.where(weights[s] > 0, parts[start // BK * TOGETHER + s] * weights[s], 0.0)
                added = added + (x,)  # noqa: RUF005
            sums = added
        part = 1.0 / tl.maximum(whole, 1e-30)
    acc = tl.zeros([BV, BK], tl.float32)
    for start in tl.static_range(0, C, BK):
        if SPLITS > 1:
            x = sums[start // BK] * part
        else:
            at = x_ptr + (token * H + head) * (C + R) + start + k
            x = tl.load(at, mask=start + k < C, other=0.0).to(tl.float32)
        acc += ws[start // BK].to(tl.float32) * x[None, :]
    y = tl.sum(acc, 1)
    tl.store(out_ptr + token * (H * V) + head * V + v, y.to(out_ptr.dtype.element_ty), mask=v < V)


def leave(
    wide: Tensor,
    up: LatentUp,
    *,
    out: Tensor,
    whose: int = EVERY,
    lone: bool = False,
    parts: Tensor | None = None,
    splits: int = 1,
    query_start: Tensor | None = None,
    key_start: Tensor | None = None,
    rows: Tensor | None = None,
    count: Tensor | None = None,
    config: LatentTileConfig,
    pdl: bool = False,
) -> None:
    """out [T, H V] = of each head W_v times the first C numbers of wide [T, H, C + R], or (splits > 1) of what the splits of `decode`
    left in parts, merged. whose, lone, query_start, key_start, rows, count: as for `absorb`; ALONE: wide and parts are by row. With LATER
    tokens of other rows that share a tile with one that goes on come out wrong: their own kernels must write them afterwards.
    """
    assert splits == 1 or parts is not None, "splits are merged from parts"
    assert key_start is not None or whose != LATER, "rows are told apart by whether keys are made for them"
    tokens, rope = len(wide), wide.shape[2] - up.rank
    sizes = _sizes(up, rope)
    options = launch_options(pdl=pdl, warps=config.warps, stages=1 if splits > 1 else config.stages)
    if config.block_t == 1:
        assert whose == EVERY, "a token a program is for steps of one-token rows"
        _leave_one_kernel[(up.heads * triton.cdiv(up.value, config.block), tokens)](
            wide, parts if parts is not None else wide, up.data[0], out, count if count is not None else wide, tokens,
            **{name: sizes[name] for name in ("H", "N", "V", "R", "C")},
            BV=config.block, BK=min(config.block_k, pow2(up.rank)), SPLITS=splits, TOGETHER=math.gcd(splits, MERGED_AT_ONCE),
            COUNTED=count is not None, **options,
        )  # fmt: skip
        return
    _leave_kernel[(up.heads * triton.cdiv(up.value, config.block), triton.cdiv(tokens, config.block_t))](
        wide, parts if parts is not None else wide, up.data[0], out,
        query_start if query_start is not None else wide, key_start if key_start is not None else wide, rows if rows is not None else wide,
        count if count is not None else wide, tokens, tokens if whose != LATER or key_start is None else len(key_start) - 1,
        **{name: sizes[name] for name in ("H", "N", "V", "R", "C")},
        BT=config.block_t, BV=config.block, BK=min(config.block_k, pow2(up.rank, 16)), SPLITS=splits, SP=pow2(splits),
        WHOSE=whose, LONE=lone, R_P2=1 if key_start is None else width(len(key_start) - 1), COUNTED=count is not None, **options,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- decode


@triton.jit(do_not_specialize=["table_stride", "capacity"])
def _decode_kernel(
    q_ptr, pages_ptr, part_ptr, table_ptr, lengths_ptr, rows_ptr, starts_ptr, table_stride, capacity, scale,
    H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, B: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, STARTS: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    split = tl.program_id(0)
    row = tl.program_id(2)
    W: tl.constexpr = C + R
    wait_for_previous(PDL)
    if COUNTED:
        if row >= tl.load(rows_ptr):
            return
    if STARTS:  # rows of several tokens are another kernel's
        if tl.load(starts_ptr + row + 1) - tl.load(starts_ptr + row) != 1:
            return
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    live = head < H
    length = tl.load(lengths_ptr + row)
    chunk = tl.cdiv(tl.cdiv(length, BN), SPLITS) * BN
    begin = split * chunk
    stop = tl.minimum(begin + chunk, length)
    if SPLITS > 1:
        mine = (row.to(tl.int64) * H + head) * SPLITS + split
        tops = part_ptr + capacity.to(tl.int64) * (H * SPLITS * C)
        if begin >= length:
            tl.store(tops + mine, tl.full([BH], float("-inf"), tl.float32), mask=live)
            tl.store(tops + capacity.to(tl.int64) * (H * SPLITS) + mine, tl.zeros([BH], tl.float32), mask=live)
            return
    c = tl.arange(0, CP)
    r = tl.arange(0, RP)
    n = tl.arange(0, BN)
    mask_c = live[:, None] & (c < C)[None, :]
    q_at = q_ptr + (row.to(tl.int64) * H + head)[:, None] * W
    q = tl.load(q_at + c[None, :], mask=mask_c, other=0.0)
    q_rope = tl.load(q_at + C + r[None, :], mask=live[:, None] & (r < R)[None, :], other=0.0)
    table = table_ptr + row.to(tl.int64) * table_stride
    factor = scale * 1.4426950408889634
    top = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    acc = tl.zeros([BH, CP], tl.float32)
    for start in range(begin, stop, BN):
        position = start + n
        seen = position < stop
        if B % BN == 0:  # a tile lies in one page: one scalar look-up
            at = (tl.load(table + start // B).to(tl.int64) * B + start % B + n) * W
        else:
            at = (tl.load(table + position // B, mask=seen, other=0).to(tl.int64) * B + position % B) * W
        if CP == C:
            latent = tl.load(pages_ptr + at[:, None] + c[None, :], mask=seen[:, None], other=0.0)
        else:
            latent = tl.load(pages_ptr + at[:, None] + c[None, :], mask=seen[:, None] & (c < C)[None, :], other=0.0)
        if RP == R:
            key = tl.load(pages_ptr + at[:, None] + C + r[None, :], mask=seen[:, None], other=0.0)
        else:
            key = tl.load(pages_ptr + at[:, None] + C + r[None, :], mask=seen[:, None] & (r < R)[None, :], other=0.0)
        score = tl.dot(q_rope, tl.trans(key), tl.dot(q, tl.trans(latent)))
        score = tl.where(seen[None, :], score * factor, float("-inf"))
        new = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - new)
        p = tl.exp2(score - new[:, None])
        acc = tl.dot(p.to(latent.dtype), latent, acc * shrink[:, None])
        total = total * shrink + tl.sum(p, 1)
        top = new
    if SPLITS == 1:
        result = acc / tl.maximum(total, 1e-30)[:, None]  # every live row sees a latent; an empty step has none
        tl.store(q_at + c[None, :], result.to(q_ptr.dtype.element_ty), mask=mask_c)
    else:
        tl.store(part_ptr + mine[:, None] * C + c[None, :], acc, mask=mask_c)
        tl.store(tops + mine, top, mask=live)
        tl.store(tops + capacity.to(tl.int64) * (H * SPLITS) + mine, total, mask=live)


def latent_decode(
    wide: Tensor,
    pages: Tensor,
    *,
    lengths: Tensor,
    page_table: Tensor,
    scale: float,
    rope: int,
    rows: Tensor | None = None,
    query_start: Tensor | None = None,
    parts: Tensor | None = None,
    config: LatentDecodeConfig,
    pdl: bool = False,
) -> None:
    """Attention of each one-token row over its latents: wide [R, H, C + R] holds queries and, with one split, what they bring back
    afterwards (over the first C numbers); with more, parts (float32, `parts_floats`) hold the sums that `leave` merges.

    pages [pages, B, C + R]; lengths int32 [R] counts the new token, whose latent is in its page; page_table int32 [R, P]; rows int32 [1]
    on the device, live rows. With query_start int32 [R + 1] rows of several tokens are left alone. Source: split-KV decode as in
    FlashAttention 2 (Dao 2023) over the absorbed form of MLA (DeepSeek-V2 2024).
    """
    count, heads, size = wide.shape
    rank = size - rope
    assert config.splits == 1 or (
        parts is not None and parts.numel() >= parts_floats(count, heads, rank, config.splits)
    )
    heads_each = min(config.block_h, pow2(heads, 16))
    _decode_kernel[(config.splits, triton.cdiv(heads, heads_each), count)](
        wide, pages, parts if parts is not None else wide, page_table, lengths, rows if rows is not None else lengths,
        query_start if query_start is not None else lengths, page_table.stride(0), count, scale,
        H=heads, C=rank, CP=pow2(rank, 16), R=rope, RP=pow2(rope, 16), B=pages.shape[1], BH=heads_each, BN=config.block_n,
        SPLITS=config.splits, STARTS=query_start is not None, COUNTED=rows is not None,
        **launch_options(pdl=pdl, warps=config.warps, stages=config.stages),
    )  # fmt: skip


def parts_floats(rows: int, heads: int, rank: int, splits: int) -> int:
    """Floats that splits of `latent_decode` leave for `leave`."""
    return rows * heads * splits * (rank + 2) if splits > 1 else 0
