"""Attention over keys that all one-token rows of a step share (a common prefix): read once for all rows instead of once for each.

Knows: which leading keys are shared (on the device), and the pass over them. Refuses to know: the keys behind them, which decode.py reads
row by row before it folds in what this pass left; why rows share pages.

    found      [keys, row]: leading keys in the same full pages for every one-token row (0 where it does not pay), a row that has them
    program    (split, kv head, tile of rows): BM = rows x packed query heads of a kv head against the split's keys
    parts      of one (row, kv head): [SPLITS, H / G, D] sums, then [SPLITS, H / G] tops, then totals, as in decode.py

Splits are cut by the number of shared keys alone, and decode.py folds them in their order, so that no result depends on timing.
Source: the shared-prefix decoding of Juravsky et al. 2024 (Hydragen), with the merge of FlashAttention 2's split-KV decode.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tradewind.kernels.triton.decode import SharedKeys, multiplied_as, narrowed, shared_chunk
from tradewind.kernels.triton.launch import launch_options, let_next_start, pow2, wait_for_previous
from tradewind.kernels.triton.prefill import _block
from tradewind.kernels.triton.step import width
from tradewind.kernels.triton.tuning import PrefillConfig


@triton.jit(do_not_specialize=["table_stride", "least_rows", "least_keys"])
def _find_shared_kernel(
    table_ptr, lengths_ptr, starts_ptr, rows_ptr, found_ptr, table_stride, least_rows, least_keys,
    B: tl.constexpr, R_P2: tl.constexpr, BP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    r = tl.arange(0, R_P2)
    live = r < tl.load(rows_ptr)
    begin = tl.load(starts_ptr + r, mask=live, other=0)
    one = live & (tl.load(starts_ptr + r + 1, mask=live, other=0) - begin == 1)
    length = tl.load(lengths_ptr + r, mask=one, other=1 << 30)
    most = (tl.min(length, 0) - 1) // B  # pages that older keys fill in every row: nobody writes them any more
    most = tl.where(tl.sum(one.to(tl.int32), 0) >= least_rows, most, 0)
    first = tl.min(tl.where(one, r, R_P2), 0)
    p = tl.arange(0, BP)
    start = most * 0
    pages = most * 0
    while start < most:
        column = start + p
        inside = column < most
        mine = tl.load(table_ptr + first.to(tl.int64) * table_stride + column, mask=inside, other=0)
        both = one[:, None] & inside[None, :]
        entry = tl.load(table_ptr + r.to(tl.int64)[:, None] * table_stride + column[None, :], mask=both, other=0)
        differs = tl.max((both & (entry != mine[None, :])).to(tl.int32), 0)
        alike = tl.min(tl.where((differs > 0) | (column >= most), p, BP), 0)
        pages += alike
        start = tl.where(alike == BP, start + BP, most)
    keys = pages * B
    tl.store(found_ptr, tl.where(keys >= least_keys, keys, 0))
    tl.store(found_ptr + 1, first)


def find_shared(
    page_table: Tensor,
    lengths: Tensor,
    query_start: Tensor,
    rows: Tensor,
    *,
    page_tokens: int,
    least_rows: int,
    least_keys: int,
    found: Tensor,
    pdl: bool = False,
) -> None:
    """found int32 [>= 2] = (shared keys, a row that has them) of the one-token rows; 0 keys for fewer rows than least_rows (2 or more) or
    fewer keys than least_keys. page_table int32 [R, P], lengths int32 [R], query_start int32 [R + 1] and rows int32 [1] as by `lay_out`.

    Only full pages count, and never the one that holds a row's newest key.
    """
    assert least_rows >= 2, "one row shares with nobody"
    _find_shared_kernel[(1,)](
        page_table, lengths, query_start, rows, found, page_table.stride(0), least_rows, least_keys,
        B=page_tokens, R_P2=width(lengths.shape[0]), BP=16, **launch_options(pdl=pdl, warps=8),
    )  # fmt: skip


@triton.jit
def _shared_kernel(
    q_ptr, k_ptr, v_ptr, parts_ptr, table_ptr, starts_ptr, rows_ptr, found_ptr, table_stride, scale, cap, k_scale, v_scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr,
    BR: tl.constexpr, PACKED: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, DOT: tl.constexpr,
    CAP: tl.constexpr, TMA: tl.constexpr, STARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    split = tl.program_id(0)
    g = tl.program_id(1)
    tile = tl.program_id(2)
    shared = tl.load(found_ptr)
    chunk = shared_chunk(shared, BN, SPLITS)
    begin = split * chunk
    rows = tl.load(rows_ptr)
    if (begin >= shared) | (tile * BR >= rows):
        return
    end = tl.minimum(begin + chunk, shared)
    RATIO: tl.constexpr = H // G
    j = tl.arange(0, BR * PACKED)
    row = tile * BR + j // PACKED
    h = j % PACKED
    live = row < rows
    token = row
    if STARTS:  # rows of several tokens are another kernel's
        token = tl.load(starts_ptr + row, mask=live, other=0)
        live = live & (tl.load(starts_ptr + row + 1, mask=live, other=0) - token == 1)
        if tl.max(live.to(tl.int32), 0) == 0:
            return
    live = live & (h < RATIO)
    d = tl.arange(0, DP)
    mask = live[:, None] & (d < D)[None, :]
    q_at = token.to(tl.int64)[:, None] * (H * D) + (g * RATIO + h)[:, None] * D + d[None, :]
    q = narrowed(tl.load(q_ptr + q_at, mask=mask, other=0.0), DOT)
    top = tl.full([BR * PACKED], float("-inf"), tl.float32)
    total = tl.zeros([BR * PACKED], tl.float32)
    acc = tl.zeros([BR * PACKED, DP], tl.float32)
    table = table_ptr + tl.load(found_ptr + 1).to(tl.int64) * table_stride
    factor_k = scale * k_scale
    position = tl.full([BR * PACKED], 0, tl.int32) + (end - 1)  # every query sees every shared key
    whole = begin + (end - begin) // BN * BN
    for start in range(begin, whole, BN):
        top, total, acc = _block(
            q, k_ptr, v_ptr, table, start, 0, end, position, top, total, acc, g, 0, factor_k, cap,
            G, D, DP, B, BN, DOT, False, False, CAP, TMA,
        )  # fmt: skip
    for start in range(whole, end, BN):
        top, total, acc = _block(
            q, k_ptr, v_ptr, table, start, 0, end, position, top, total, acc, g, 0, factor_k, cap,
            G, D, DP, B, BN, DOT, True, False, CAP, TMA,
        )  # fmt: skip
    PART: tl.constexpr = SPLITS * RATIO * (D + 2)
    part = parts_ptr + (row * G + g).to(tl.int64) * PART
    place = split * RATIO + h
    tl.store(part[:, None] + place[:, None] * D + d[None, :], acc * v_scale, mask=mask)
    tl.store(part + SPLITS * RATIO * D + place, top, mask=live)
    tl.store(part + SPLITS * RATIO * (D + 1) + place, total, mask=live)


def shared_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    keys: SharedKeys,
    page_table: Tensor,
    rows: Tensor,
    query_start: Tensor | None = None,
    heads: int,
    scale: float,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    config: PrefillConfig,
    pdl: bool = False,
) -> None:
    """keys.parts = sums, tops and totals of every one-token row over the shared keys; leaves at once where keys.found says 0.

    q [T, H D] rotated; without query_start int32 [R + 1] row r is token r, and all rows have one. page_table int32 [R, P], rows int32 [1].
    Pages as in `paged_decode`. config.block_n is keys.block_n.
    """
    count = page_table.shape[0]
    kv_heads, page_tokens, dim = k_pages.shape[1:]
    packed = pow2(heads // kv_heads)
    assert config.block_m % packed == 0, f"{config.block_m} rows a tile, {packed} heads packed"
    assert config.block_n == keys.block_n, (config.block_n, keys.block_n)
    rows_each = config.block_m // packed
    tma = config.tma and page_tokens % config.block_n == 0 and dim == pow2(dim, 16)
    key_pages, value_pages = k_pages, v_pages
    if tma:
        flat = (-1, dim)
        key_pages = TensorDescriptor.from_tensor(k_pages.view(flat), [config.block_n, dim])
        value_pages = TensorDescriptor.from_tensor(v_pages.view(flat), [config.block_n, dim])
    _shared_kernel[(keys.splits, kv_heads, triton.cdiv(count, rows_each))](
        q, key_pages, value_pages, keys.parts, page_table, query_start if query_start is not None else rows, rows, keys.found,
        page_table.stride(0), scale, softcap or 0.0, k_scale, v_scale,
        H=heads, G=kv_heads, D=dim, DP=pow2(dim, 16), B=page_tokens,
        BR=rows_each, PACKED=packed, BN=config.block_n, SPLITS=keys.splits, DOT=multiplied_as(k_pages),
        CAP=softcap is not None, TMA=tma, STARTS=query_start is not None,
        **launch_options(pdl=pdl, warps=config.warps, stages=config.stages), **({"maxnreg": config.registers} if config.registers else {}),
    )  # fmt: skip


def shared_parts_floats(rows: int, *, heads: int, head_dim: int, splits: int) -> int:
    """How many floats `SharedKeys.parts` needs."""
    return rows * heads * splits * (head_dim + 2)
