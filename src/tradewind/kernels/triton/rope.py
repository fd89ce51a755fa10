"""From one qkv row: head norms, rotation, q out, k and v into their pages. One launch.

Knows: the half-split rotation and the physical KV layout. Refuses to know: frequencies (the table comes ready) and who owns a page.

    qkv row    [ q head 0 .. H-1 | k head 0 .. G-1 | v head 0 .. G-1 ]   each D wide
    program    (block of HEADS heads, token); a block lies wholly in q, k or v because HEADS divides H and G
    k, v       [pages, G, B, D]; token t goes to page = write_slots[t] // B, offset = write_slots[t] % B
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from tradewind.kernels.triton.launch import launch_options, let_next_start, pow2, wait_for_previous


@triton.jit
def stored(value, scale, pages_ptr):
    """value / scale in the pages' type, saturated when that is FP8."""
    if pages_ptr.dtype.element_ty == tl.float8e4nv:
        value = tl.clamp(value / scale, -448.0, 448.0)
    return value.to(pages_ptr.dtype.element_ty)


@triton.jit
def _rope_store_kernel(
    qkv_ptr, angles_ptr, positions_ptr, slots_ptr, q_weight_ptr, k_weight_ptr, q_ptr, k_ptr, v_ptr, count_ptr,
    eps, k_scale, v_scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, B: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    NORM: tl.constexpr, BY_POSITION: tl.constexpr, COUNTED: tl.constexpr, BACK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(1).to(tl.int64)
    if COUNTED:
        if token >= tl.load(count_ptr):
            return
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    first = tl.program_id(0) * HEADS
    slot = tl.load(slots_ptr + token).to(tl.int64)
    row = qkv_ptr + token * ((H + 2 * G) * D) + head[:, None] * D
    if first >= H + G:  # v: stored as it is
        d = tl.arange(0, 2 * HALF)
        value = tl.load(row + d[None, :], mask=(d < D)[None, :], other=0.0).to(tl.float32)
        at = ((slot // B) * G + (head - H - G)[:, None]) * (B * D) + (slot % B) * D + d[None, :]
        tl.store(v_ptr + at, stored(value, v_scale, v_ptr), mask=(d < D)[None, :])
        return

    i = tl.arange(0, HALF)
    live = (i < W // 2)[None, :]
    angle_row = token
    if BY_POSITION:
        angle_row = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(angles_ptr + angle_row * W + i[None, :], mask=live, other=0.0)
    sin = tl.load(angles_ptr + angle_row * W + W // 2 + i[None, :], mask=live, other=0.0)
    x1 = tl.load(row + i[None, :], mask=live, other=0.0).to(tl.float32)
    x2 = tl.load(row + W // 2 + i[None, :], mask=live, other=0.0).to(tl.float32)
    is_q = first < H
    if NORM:
        squares = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
        weight_ptr = k_weight_ptr
        if is_q:
            weight_ptr = q_weight_ptr
        w1 = tl.load(weight_ptr + i[None, :], mask=live, other=0.0).to(tl.float32)
        w2 = tl.load(weight_ptr + W // 2 + i[None, :], mask=live, other=0.0).to(tl.float32)
    if W < D:
        rest = W + tl.arange(0, REST)
        rest_live = (rest < D)[None, :]
        x3 = tl.load(row + rest[None, :], mask=rest_live, other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(x3 * x3, 1)
    if NORM:
        factor = tl.rsqrt(squares / D + eps)[:, None]
        x1 = x1 * factor * w1
        x2 = x2 * factor * w2
        if W < D:
            x3 = x3 * factor * tl.load(weight_ptr + rest[None, :], mask=rest_live, other=0.0).to(tl.float32)
    y1 = x1 * cos - x2 * sin
    y2 = x2 * cos + x1 * sin
    if is_q:
        target = q_ptr + token * (H * D) + head[:, None] * D
        tl.store(target + i[None, :], y1.to(q_ptr.dtype.element_ty), mask=live)
        tl.store(target + W // 2 + i[None, :], y2.to(q_ptr.dtype.element_ty), mask=live)
        if W < D:
            tl.store(target + rest[None, :], x3.to(q_ptr.dtype.element_ty), mask=rest_live)
    else:
        place = k_ptr + ((slot // B) * G + (head - H)[:, None]) * (B * D) + (slot % B) * D
        tl.store(place + i[None, :], stored(y1, k_scale, k_ptr), mask=live)
        tl.store(place + W // 2 + i[None, :], stored(y2, k_scale, k_ptr), mask=live)
        if W < D:
            tl.store(place + rest[None, :], stored(x3, k_scale, k_ptr), mask=rest_live)
        if BACK:  # this program alone reads and writes these heads of the row
            tl.store(row + i[None, :], y1.to(qkv_ptr.dtype.element_ty), mask=live)
            tl.store(row + W // 2 + i[None, :], y2.to(qkv_ptr.dtype.element_ty), mask=live)
            if W < D:
                tl.store(row + rest[None, :], x3.to(qkv_ptr.dtype.element_ty), mask=rest_live)


def rope_store(
    qkv: Tensor,
    angles: Tensor,
    write_slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    heads: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    positions: Tensor | None = None,
    out: Tensor,
    count: Tensor | None = None,
    back: bool = False,
    pdl: bool = False,
    heads_per_program: int | None = None,
    warps: int | None = None,
) -> None:
    """qkv [T, (H + 2G) D] -> out q [T, H D]; k and v are written to k_pages, v_pages [pages, G, B, D] (bf16 or e4m3, value / scale).

    angles float32 [T, W] (cos half, sin half of the first W dims), or a table [positions, W] read at positions int32 [T] when given.
    write_slots int32 [T] = page * B + offset. q_weight and k_weight [D]: RMS norm per head before the rotation, both or neither.
    back: k as it is after norm and rotation also replaces k in qkv.
    """
    tokens = qkv.shape[0]
    kv_heads, page_tokens, dim = k_pages.shape[1:]
    width = angles.shape[1]
    assert (q_weight is None) == (k_weight is None), "head norms of q and k come together"
    both = math.gcd(heads, kv_heads)
    block = heads_per_program or min(8, both & -both)
    assert both % block == 0, f"{block} heads a program do not divide {heads} and {kv_heads} heads"
    half = pow2(max(width // 2, -(-dim // 2)))
    _rope_store_kernel[((heads + 2 * kv_heads) // block, tokens)](
        qkv, angles, positions if positions is not None else write_slots, write_slots,
        q_weight if q_weight is not None else qkv, k_weight if k_weight is not None else qkv,
        out, k_pages, v_pages, count if count is not None else write_slots, eps, k_scale, v_scale,
        H=heads, G=kv_heads, D=dim, W=width, B=page_tokens, HEADS=block, HALF=half, REST=pow2(max(1, dim - width)),
        NORM=q_weight is not None, BY_POSITION=positions is not None, COUNTED=count is not None, BACK=back,
        **launch_options(pdl=pdl, warps=warps or max(1, min(4, block * half * 2 // 256))),
    )  # fmt: skip
