"""A matmul of few tokens with the low-rank additions of their adapters, in one launch: tokens in any order, nothing sorted.

Knows: both products of low_rank.py as parts of the tiles of skinny.py, and how they meet. Refuses to know: more tokens than a tile has.

    programs of A    inner[m, slot, part, r] = x[m] A[slot, part, r]    all slots densely, K in PIECES; the last of a tile to arrive adds up
    programs of W    acc = W x, pieces added up, scales, bias           as in skinny.py; the first slots' B is loaded before all of it
                     wait until every tile of A is there
                     acc += B'[outputs, slots * rank] inner'[slots * rank, m]       inner' is zero where the slot is not the token's own
                     SiLU-mul, residual

Tiles of A and of B whose slots no token of the step has are not read, but for B's first ones. A token without an adapter gets zeros added.

Why waiting inside a launch ends: programs start in the order of their numbers, as they do on every GPU so far, those of A have the first
numbers and wait for none of this launch; and the next kernel's programs start when all of this one have. `met` counts tiles of A that are
there, and tiles of W that have seen so: the last of these leaves zeros.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tradewind.kernels.ops import LowRankBank, PackedMatrix
from tradewind.kernels.triton.elementwise import activated
from tradewind.kernels.triton.launch import FP8, launch_options, let_next_start, wait_for_previous
from tradewind.kernels.triton.low_rank import ACTIVATIONS
from tradewind.kernels.triton.planner import Planner
from tradewind.kernels.triton.tape import Call
from tradewind.kernels.triton.tuning import TileConfig
from tradewind.kernels.triton.workspace import address

LAYOUTS = ("bf16", "fp8")
MOST_PARTS = 3
MOST_COLUMNS = 1024
"""Slots times rank up to which all slots are computed for all tokens; above, tokens are sorted (low_rank.py)."""
BC = 64
"""Columns (slot, rank) of a step over B."""
MOST_HELD = 2
"""Steps over B whose numbers are loaded at once, into registers."""
PIECE_DEPTH, MOST_PIECES = 512, 8
"""Inputs of a program of A, where there is room for as many programs."""
PROGRAMS_EACH = 2
"""Programs of a multiprocessor at a time at most, by their registers ..."""
SHARED_BYTES = 227 * 1024
"""... and the memory that these have together."""


# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _shrink(
    x_ptr, a_ptr, inner_ptr, sums_ptr, met_ptr, m, live_m, adapter, program,
    K: tl.constexpr, LINES: tl.constexpr, EACH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """inner [M, LINES] of BN lines of A, or what one piece of K adds; EACH lines belong to a slot."""
    PIECE: tl.constexpr = ((K + BK - 1) // BK + PIECES - 1) // PIECES * BK
    tile = program // PIECES
    piece = program % PIECES
    j = tl.arange(0, BN)
    column = tl.arange(0, BK)
    first, last = tile * BN // EACH, (tl.minimum(tile * BN + BN, LINES) - 1) // EACH
    wanted = tl.max(((adapter >= first) & (adapter <= last)).to(tl.int32), 0)
    begin = piece * PIECE
    end = tl.where(wanted > 0, tl.minimum(begin + PIECE, K), begin)
    row = a_ptr + tl.minimum(tile * BN + j, LINES - 1)[:, None] * K
    acc = tl.zeros([BN, BM], tl.float32)
    for start in range(begin, end, BK):
        a = tl.load(row + (start + column)[None, :], eviction_policy="evict_first")
        x = tl.load(x_ptr + m[:, None] * K + (start + column)[None, :], mask=live_m[:, None], other=0.0)
        acc = tl.dot(a, tl.trans(x.to(tl.bfloat16)), acc)
    before = PIECES - 1
    place = j[:, None] * BM + m[None, :]
    base = sums_ptr + tile * (PIECES * BN * BM)
    if PIECES > 1:  # sums: [tiles, PIECES, BN, BM]
        tl.store(base + piece * (BN * BM) + place, acc)
        tl.debug_barrier()
        before = tl.atomic_add(met_ptr + 2 + tile, 1, sem="acq_rel")
    if before == PIECES - 1:
        if PIECES > 1:
            tl.store(met_ptr + 2 + tile, 0)
            acc = tl.zeros([BN, BM], tl.float32)
            for other in tl.static_range(PIECES):
                acc += tl.load(base + other * (BN * BM) + place, cache_modifier=".cg")
        line = tile * BN + j
        target = inner_ptr + m[None, :] * LINES + line[:, None]
        tl.store(target, acc.to(tl.bfloat16), mask=live_m[None, :] & (line < LINES)[:, None])
        tl.debug_barrier()
        tl.atomic_add(met_ptr, 1, sem="acq_rel")


@triton.jit
def _tile_kernel(
    x_ptr, w_ptr, x_scale_ptr, scale_ptr, residual_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr,
    input_ptr, a_ptr, b_ptr, adapters_ptr, inner_ptr, sums_ptr, met_ptr, M, N, first_end, second_end,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, DOT: tl.constexpr,
    X_SCALED: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, SCALED: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
    S: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr, BKA: tl.constexpr, PIECES: tl.constexpr, BC: tl.constexpr, HELD: tl.constexpr,
    THREADS: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if not LATE:
        let_next_start(PDL)
    OUT: tl.constexpr = BN // 2 if GATED else BN  # outputs of a tile
    PIECE: tl.constexpr = (K // BK + SPLIT - 1) // SPLIT * BK
    LINES: tl.constexpr = S * PARTS * R
    SHRINKS: tl.constexpr = (LINES + BN - 1) // BN
    STEPS: tl.constexpr = (S * R + BC - 1) // BC
    m = tl.arange(0, BM)
    live_m = m < M
    if tl.program_id(0) < SHRINKS * PIECES:
        wait_for_previous(PDL)
        if LATE:
            let_next_start(PDL)
        own = tl.load(adapters_ptr + m, mask=live_m, other=-1)
        _shrink(
            input_ptr, a_ptr, inner_ptr, sums_ptr, met_ptr, m, live_m, own, tl.program_id(0),
            K, LINES, PARTS * R, BM, BN, BKA, PIECES,
        )  # fmt: skip
        return
    program = tl.program_id(0) - SHRINKS * PIECES
    tiles = tl.cdiv(N, OUT)
    tile = program % tiles
    piece = program // tiles
    begin = piece * PIECE
    end = tl.minimum(begin + PIECE, K)
    j = tl.arange(0, BN)
    column = tl.arange(0, BK)
    line = tl.minimum(tile * OUT + j % OUT, N - 1)
    if GATED:
        line += j // OUT * N
    row = w_ptr + line[:, None] * K
    c = tl.arange(0, BC)
    width = N * R * (2 if GATED else 1)  # numbers of a slot in B
    held = ()
    for step in tl.static_range(HELD):
        at = step * BC + c
        held = held + (  # noqa: RUF005
            tl.load(
                b_ptr + line[:, None] * R + (at // R * width + at % R)[None, :], mask=(at < S * R)[None, :], other=0.0
            ),
        )
    wait_for_previous(PDL)
    if LATE:
        let_next_start(PDL)
    adapter = tl.load(adapters_ptr + m, mask=live_m, other=-1)
    acc = tl.zeros([BN, BM], tl.float32)
    for start in range(begin, end, BK):
        w = tl.load(row + (start + column)[None, :], eviction_policy="evict_first")
        x = tl.load(x_ptr + m[:, None] * K + (start + column)[None, :], mask=live_m[:, None], other=0.0)
        acc = tl.dot(w.to(DOT), tl.trans(x.to(DOT)), acc)

    if SPLIT > 1:  # part: [tiles, SPLIT, BN, BM]
        inside = j[:, None] * BM + m[None, :]
        base = part_ptr + tile * (SPLIT * BN * BM)
        tl.store(base + piece * (BN * BM) + inside, acc)
        tl.debug_barrier()
        before = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel")
        if before != SPLIT - 1:
            return
        tl.store(arrived_ptr + tile, 0)
        acc = tl.zeros([BN, BM], tl.float32)
        for other in tl.static_range(SPLIT):
            acc += tl.load(base + other * (BN * BM) + inside, cache_modifier=".cg")

    if X_SCALED:
        acc *= tl.load(x_scale_ptr + m, mask=live_m, other=0.0)[None, :]
    if SCALED:
        acc *= tl.load(scale_ptr + line)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + line).to(tl.float32)[:, None]

    while tl.atomic_add(met_ptr, 0, sem="acquire") < SHRINKS:
        pass
    # A number for each thread, so that nobody waits for the answer before the end.
    thread = tl.arange(0, THREADS)
    seen = tl.atomic_add(met_ptr + 1 + 0 * thread, 1, mask=thread == 0, sem="relaxed")
    # Which part each output belongs to, and the parts that the tile has something of.
    part = (line >= first_end).to(tl.int32) + (line >= second_end).to(tl.int32)
    low, high = 0, PARTS - 1
    if PARTS > 1 and not GATED:
        ends = tl.minimum(tile * OUT + OUT, N) - 1
        low = (tile * OUT >= first_end).to(tl.int32) + (tile * OUT >= second_end).to(tl.int32)
        high = (ends >= first_end).to(tl.int32) + (ends >= second_end).to(tl.int32)
    inner_row = inner_ptr + m[:, None] * LINES
    for p in range(low, high + 1):
        for step in tl.static_range(HELD):
            at = step * BC + c
            mine = adapter[:, None] == (at // R)[None, :]
            inner = tl.load(
                inner_row + (at // R * (PARTS * R) + p * R + at % R)[None, :],
                mask=mine,
                other=0.0,
                cache_modifier=".cg",
            )
            b = held[step]
            if PARTS > 1:
                b = tl.where((part == p)[:, None], b, 0.0)
            acc = tl.dot(b, tl.trans(inner), acc)
    if STEPS > HELD:
        REST: tl.constexpr = STEPS - HELD
        for turn in range(low * REST, (high + 1) * REST):
            p = turn // REST
            at = (HELD + turn % REST) * BC + c
            mine = adapter[:, None] == (at // R)[None, :]
            there = tl.max(mine.to(tl.int32), 0) > 0
            inner = tl.load(
                inner_row + (at // R * (PARTS * R) + p * R + at % R)[None, :],
                mask=mine,
                other=0.0,
                cache_modifier=".cg",
            )
            b = tl.load(
                b_ptr + line[:, None] * R + (at // R * width + at % R)[None, :],
                mask=(part == p)[:, None] & there[None, :], other=0.0,
            )  # fmt: skip
            acc = tl.dot(b, tl.trans(inner), acc)

    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, OUT, BM)), (1, 2, 0)))
        acc = activated(gate, GELU) * up
    n = tile * OUT + tl.arange(0, OUT)
    place = m[None, :] * N + n[:, None]
    live = live_m[None, :] & (n < N)[:, None]
    if RESIDUAL:
        acc += tl.load(residual_ptr + place, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=live)
    last = (thread == 0) & (seen == tiles - 1)
    tl.store(met_ptr + 0 * thread, 0, mask=last)
    tl.store(met_ptr + 1 + 0 * thread, 0, mask=last)


def adapted_linear(
    x: Tensor,
    weight: Tensor,
    bank: LowRankBank,
    adapters: Tensor,
    *,
    plain: Tensor,
    out: Tensor,
    inner: Tensor,
    sums: Tensor,
    met: Tensor,
    pieces: int,
    scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    bias: Tensor | None = None,
    gated: bool = False,
    activation: str = "silu",
    residual: Tensor | None = None,
    config: TileConfig,
    workspace: Tensor | None = None,
    arrived: Tensor | None = None,
    pdl: bool = False,
    late: bool = False,
) -> None:
    """As `skinny.skinny_linear` with a TileConfig (no FP8 by blocks; K a multiple of its bk), and with what each token's adapter
    adds before bias, activation and residual are through.

    adapters int32 [M], under 0 for none. plain [M, K] bf16: the input, of which `x` may be the FP8 form. inner bf16 [M, slots * parts * R],
    sums float32 [tiles of A * pieces * bn * bm] and met int32 [2 + tiles of A] are scratch; met is zero, and left zero.
    """
    rows, depth = x.shape
    features = weight.shape[0] // 2 if gated else weight.shape[0]
    a, b, *_ = bank.data
    parts, rank, lines = len(bank.sizes), b.shape[2], a.shape[0] * a.shape[1]
    shrinks = tiles_of_a(bank, config)
    assert weight.shape[1] == depth == bank.k and weight.numel() < 2**31, f"weight {tuple(weight.shape)}"
    assert out.shape == (rows, features) and rows <= config.bm, f"out {tuple(out.shape)}, tile {config}"
    assert depth % config.bk == 0, f"K = {depth} is no multiple of {config.bk}"
    assert sum(bank.sizes) == weight.shape[0] and parts <= MOST_PARTS and b.numel() < 2**31, f"parts {bank.sizes}"
    assert not gated or bank.sizes == (features, features), f"gate and up are {bank.sizes}"
    assert inner.shape == (rows, lines) and len(met) >= 2 + shrinks, f"scratch {tuple(inner.shape)}, {len(met)}"
    assert pieces == 1 or sums.numel() >= shrinks * pieces * config.bn * config.bm, f"{sums.numel()} floats"
    assert (x_scale is None) == (x.dtype != FP8), "an FP8 input has a scale, others have none"
    assert (weight.dtype == FP8) == (x.dtype == FP8), f"{x.dtype} by {weight.dtype}"
    dot = tl.bfloat16 if weight.dtype != FP8 else tl.float8e4nv
    ends = [sum(bank.sizes[: part + 1]) for part in range(parts)] + [sum(bank.sizes)] * 2
    outputs = config.bn // 2 if gated else config.bn
    programs = shrinks * pieces + triton.cdiv(features, outputs) * config.split
    _tile_kernel[(programs,)](
        x, weight, x_scale if x_scale is not None else x, scale if scale is not None else x, residual if residual is not None else x,
        bias if bias is not None else x, out, workspace if workspace is not None else sums, arrived if arrived is not None else met,
        plain, a, b, adapters, inner, sums, met, rows, features, ends[0], ends[1],
        K=depth, BM=config.bm, BN=config.bn, BK=config.bk, SPLIT=config.split, DOT=dot, X_SCALED=x_scale is not None,
        GATED=gated, GELU=activation == "gelu_tanh", SCALED=scale is not None, RESIDUAL=residual is not None, BIAS=bias is not None,
        S=bank.slots, PARTS=parts, R=rank, BKA=min(config.bk, 128 if weight.dtype != FP8 else 64), PIECES=pieces, BC=BC,
        HELD=min(MOST_HELD, triton.cdiv(bank.slots * rank, BC)), THREADS=32 * config.warps, LATE=late,
        **launch_options(pdl=pdl, warps=config.warps, stages=config.stages),
    )  # fmt: skip


def tiles_of_a(bank: LowRankBank, config: TileConfig) -> int:
    """Tiles of `config.bn` lines of all slots' A."""
    return triton.cdiv(bank.data[0].shape[0] * bank.data[0].shape[1], config.bn)


def pieces_of(bank: LowRankBank, config: TileConfig, *, outputs: int, multiprocessors: int, fp8: bool = False) -> int:
    """Into how many pieces K is cut for A: where the tiles of W all run at once (`outputs` of W's lines), those of A shall too."""
    most = max(1, min(MOST_PIECES, bank.k // PIECE_DEPTH))
    each = min(PROGRAMS_EACH, max(1, SHARED_BYTES // shared_bytes(config, fp8=fp8)))
    programs, places = triton.cdiv(outputs, config.bn) * config.split, each * multiprocessors
    return max(1, min(most, (places - programs) // tiles_of_a(bank, config))) if programs <= places else most


def shared_bytes(config: TileConfig, *, fp8: bool) -> int:
    """Shared memory of a program: tiles of W and of its input under way; those of A are no larger."""
    return (config.bm + config.bn) * config.bk * (1 if fp8 else 2) * config.stages


# ------------------------------------------------------------------------------------------------------------- programs


def fold(planner: Planner) -> None:
    """Few tokens: a matmul adds what adapters add itself, and is gated itself where only `glue` reads it."""
    gone: list[Call] = []
    for i, call in enumerate(planner.calls):
        if call.op != "add_low_rank":
            continue
        out = address(call["out"])
        source = planner.last_write(i, out)
        made = planner.calls[source] if source >= 0 else None
        if (
            made is None
            or made.op != "linear"
            or not _fits(planner, made, call)
            or address(made["x"]) != address(call["x"])
            or not planner.untouched(address(call["x"]), source, i, reads=False)
            or not planner.untouched(out, source, i, reads=True)
        ):
            continue
        readers = planner.readers(i, out)
        made["low_rank"] = call
        gone.append(call)
        if readers is not None and len(readers) == 1 and planner.calls[readers[0]].op == "glue":
            glue, sizes = planner.calls[readers[0]], call["bank"].sizes
            if (
                sizes == (sizes[0],) * 2
                and glue["activation"] in ACTIVATIONS
                and planner.untouched(address(call["x"]), i, readers[0], reads=False)
                and planner.untouched(address(glue["out"]), source, readers[0], reads=True)
                and address(glue["out"]) != address(call["x"])
            ):
                made.become("gated_linear")
                made["weight"] = replace(made["weight"], gated=True)
                made["activation"], made["out"] = glue["activation"], glue["out"]
                gone.append(glue)
    planner.calls = [call for call in planner.calls if not any(call is one for one in gone)]


def _fits(planner: Planner, call: Call, added: Call) -> bool:
    weight: PackedMatrix = call["weight"]
    bank: LowRankBank = added["bank"]
    if planner.deterministic or weight.layout not in LAYOUTS or weight.n * weight.k >= 1 << 31:
        return False
    return (
        planner.bucket.tokens <= planner.tuning.tile_rows
        and planner.tile(weight) is not None
        and len(bank.sizes) <= MOST_PARTS
        and bank.slots * bank.data[1].shape[2] <= MOST_COLUMNS
        and bank.data[1].numel() < 1 << 31
    )


def arguments(planner: Planner, call: Call, config: TileConfig) -> dict[str, Any]:
    """What `adapted_linear` takes for the additions of a matmul's call; each lane has its own scratch."""
    added, weight = call["low_rank"], call["weight"]
    bank: LowRankBank = added["bank"]
    lines, shrinks = bank.data[0].shape[0] * bank.data[0].shape[1], tiles_of_a(bank, config)
    pieces = pieces_of(
        bank, config, outputs=weight.n, multiprocessors=planner.tuning.multiprocessors, fp8=weight.layout == "fp8"
    )  # fmt: skip
    x, lane = planner.cut(added["x"]), planner.lane
    new, most = (
        planner.workspace.piece,
        max(config.bm, planner.tuning.tile_rows),
    )  # at once as much as larger steps need
    return {
        "bank": bank,
        "adapters": planner.cut(added["adapters"]),
        "plain": x,
        "inner": new(f"adapter inner, lane {lane}", most, lines, dtype=torch.bfloat16)[: len(x)],
        "sums": new(f"adapter sums, lane {lane}", shrinks * MOST_PIECES * config.bn * most, dtype=torch.float32),
        "met": new(f"adapter arrivals, lane {lane}", 2 + shrinks, dtype=torch.int32),
        "pieces": pieces,
    }
