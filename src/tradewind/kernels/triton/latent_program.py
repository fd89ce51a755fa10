"""How attention over latents is planned for a bucket: the form, the constants, the scratch, the launches. A part of planning.py.

Knows: which kernels of latent.py and latent_prefill.py serve which rows. Refuses to know: the data flow around attention (passes.py).

    one-token rows     enter (store and absorb in one), decode, leave with the merge of splits; one row: q and latent of one launch before
    other steps        store; rows chosen once a step; then, each for its own rows:
      absorbed         absorb, prefill over pages, leave
      one token        absorb, decode, leave, by row
      naive            keys and values made, causal attention over them (FlashAttention 3 where the backend `fa3` is and heads fit it)
    deterministic      store, absorb, prefill, leave for every row, with one tile for all sizes of step

What leaves the space of latents in tiles may overwrite tokens of rows whose keys are made, so these come last, unless all begin.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tradewind.kernels.triton import latent, latent_prefill, library, pair, skinny
from tradewind.kernels.triton.launch import AFTER_ALL
from tradewind.kernels.triton.planner import Planner
from tradewind.kernels.triton.tape import Call, OpSet
from tradewind.kernels.triton.tuning import LatentTileConfig
from tradewind.kernels.triton.workspace import address

FIXED_IN = LatentTileConfig(64, 64, 4, 1)
FIXED_OUT = LatentTileConfig(64, 64, 4, 2, 64)
"""The tiles into the space of latents and out of it in deterministic mode."""


def changes_at(ops: OpSet, call: Call, sizes: Iterable[int]) -> list[int]:
    """Of ascending numbers of one-token rows those whose constants are others than of the number before."""
    found: list[int] = []
    before: Any = None
    tuning, heads = ops.tuning, call["up"].heads
    for size in sizes if not ops.deterministic else ():
        splits = [tuning.latent_decode(size, longest, heads=heads) for longest in (512, 4096, 1 << 20)]
        leaving = [tuning.latent_leave(size, splits=each.splits) for each in splits]
        now = (splits, leaving, tuning.latent_absorb(size))
        if now != before:
            found.append(size)
        before = now
    return found


def fold_stores(planner: Planner) -> None:
    """One-token rows: what `latent_store` does happens in the first launch of the attention behind it, which then reads q as it came."""
    if planner.deterministic or not planner.bucket.singles:
        return
    gone = set()
    for i, call in enumerate(planner.calls):
        if call.op != "latent_store":
            continue
        readers = planner.readers(i, address(call["q"]))
        if readers is None or len(readers) != 1:
            continue
        reader = planner.calls[readers[0]]
        if (
            reader.op == "latent_attention"
            and reader["kv"] is call["kv"]
            and all(
                planner.untouched(address(call[name]), i, readers[0], reads=False)
                for name in ("latent", "angles", "write_slots")
            )
        ):
            for name in ("latent", "angles", "positions", "write_slots", "weight", "eps", "count"):
                reader[name] = call[name]
            gone.add(i)
    planner.calls = [call for i, call in enumerate(planner.calls) if i not in gone]


def emit_store(planner: Planner, call: Call) -> None:
    """Appends the launch of a `latent_store` call."""
    q, kv, by_position = planner.cut(call["q"]), call["kv"], call["positions"] is not None
    planner.own(
        latent.latent_store, f"latent_store {list(q.shape)}", q, planner.cut(call["latent"]),
        call["angles"] if by_position else planner.cut(call["angles"]), planner.cut(call["write_slots"]), kv.k, heads=call["heads"],
        weight=call["weight"], eps=call["eps"], positions=planner.cut(call["positions"]), count=planner.count(call, always=True),
    )  # fmt: skip


def _stack(planner: Planner, call: Call) -> None:
    """One token: the last two launches, where they make q and latent of one input, become one. Its latency is that of the larger."""
    if not planner.fuse or len(planner.launches) < 2 or not planner.tuning.stack_latents:
        return
    one, other = planner.launches[-2:]
    makes = [address(launch.options.get("out")) for launch in (one, other)]
    same = ("norm", "eps")
    if (
        makes != [address(planner.cut(call[name])) for name in ("q", "latent")]
        or any(
            launch.kernel is not skinny.skinny_linear or launch.lane or launch.options.get("late")
            for launch in (one, other)
        )
        or other.join
        or address(one.arguments[0]) != address(other.arguments[0])
        or any(launch.options[name] is not None for launch in (one, other) for name in ("scale", "bias", "residual"))
        or any(launch.options["gated"] or launch.arguments[1].dtype != torch.bfloat16 for launch in (one, other))
        or any(
            one.options[name] is not other.options[name] and one.options[name] != other.options[name] for name in same
        )
        or one.options["out"].dtype != other.options["out"].dtype
    ):
        return
    (x, first), (_, second) = one.arguments, other.arguments
    config = planner.tuning.gemv(len(first) + len(second), x.shape[1], fp8=False)
    del planner.launches[-2:]
    waiting = planner.after_all, planner.join  # of the launch that comes next
    planner.after_all, planner.join = one.options["pdl"] == AFTER_ALL, one.join
    text = f"gemv {list(x.shape)} -> {len(first)} | {len(second)} bf16" + (
        " + norm" if one.options["norm"] is not None else ""
    )
    planner.own(
        pair.pair_linear, f"{text}, {config}", x, first, second, out=(one.options["out"], other.options["out"]), config=config,
        **{name: one.options[name] for name in same},
    )  # fmt: skip
    planner.after_all, planner.join = waiting


def emit_attention(planner: Planner, call: Call) -> None:
    """Appends the launches of a `latent_attention` call."""
    if planner.deterministic:
        _emit_fixed(planner, call)
    elif planner.bucket.singles:
        _emit_singles(planner, call)
    else:
        _emit_mixed(planner, call)


def _scratch_values(call: Call) -> int:
    """Values of the scratch of the largest step."""
    up, width = call["up"], call["kv"].head_dim
    return len(call["q"]) * up.heads * max(width, width - up.rank + up.nope + up.value)  # type: ignore[no-any-return]


def _scratch(planner: Planner, call: Call, lines: int, size: int) -> Tensor:
    """bf16 [lines, H, size]: wide queries, or keys and values; one piece of memory for both, of the largest step at once."""
    heads = call["up"].heads
    flat = planner.workspace.piece("latent wide", _scratch_values(call), dtype=torch.bfloat16)
    return flat[: lines * heads * size].view(lines, heads, size)


def _paged(planner: Planner, call: Call) -> dict[str, Any]:
    """Arguments about rows and pages."""
    rows, count = call["rows"], planner.bucket.rows
    return {"lengths": rows.lengths[:count], "page_table": rows.page_table[:count], "rows": rows.rows}


def _emit_fixed(planner: Planner, call: Call) -> None:
    kv, up, paged = call["kv"], call["up"], _paged(planner, call)
    query_start = call["rows"].query_start[: planner.bucket.rows + 1]
    q, out, rope = planner.cut(call["q"]), planner.cut(call["out"]), kv.head_dim - up.rank
    wide = _scratch(planner, call, len(q), kv.head_dim)
    config = planner.tuning.latent_prefill()
    planner.own(latent.absorb, f"absorb fixed {list(wide.shape)}", q, up, rope=rope, out=wide, config=FIXED_IN)
    planner.own(
        latent_prefill.latent_prefill, f"latent prefill fixed {list(wide.shape)}, {config}", wide, kv.k, query_start=query_start,
        scale=call["scale"], rope=rope, config=config, **paged,
    )  # fmt: skip
    planner.own(latent.leave, f"leave fixed {list(wide.shape)}", wide, up, out=out, config=FIXED_OUT)


def _emit_singles(planner: Planner, call: Call) -> None:
    kv, up, bucket = call["kv"], call["up"], planner.bucket
    q, out, rope = planner.cut(call["q"]), planner.cut(call["out"]), kv.head_dim - up.rank
    wide = _scratch(planner, call, len(q), kv.head_dim)
    config = planner.tuning.latent_absorb(bucket.tokens)
    if call["latent"] is not None:
        if bucket.tokens == 1:
            _stack(planner, call)
        by_position = call["positions"] is not None
        planner.own(
            latent.enter, f"enter {list(wide.shape)}, {config}", q, planner.cut(call["latent"]),
            call["angles"] if by_position else planner.cut(call["angles"]), planner.cut(call["write_slots"]), kv.k, up,
            weight=call["weight"], eps=call["eps"], positions=planner.cut(call["positions"]), out=wide,
            count=planner.count(call, always=True), config=config,
        )  # fmt: skip
    else:
        planner.own(latent.absorb, f"absorb {list(wide.shape)}, {config}", q, up, rope=rope, out=wide, config=config)
    _emit_decode(planner, call, wide, out)


def _emit_decode(planner: Planner, call: Call, wide: Tensor, out: Tensor, *, query_start: Tensor | None = None) -> None:
    """From wide queries of one-token rows to their answers; query_start: among other rows."""
    kv, up, bucket = call["kv"], call["up"], planner.bucket
    paged = _paged(planner, call)
    config = planner.tuning.latent_decode(bucket.rows, bucket.longest, heads=up.heads)
    parts = None
    if config.splits > 1:
        parts = planner.workspace.floats(latent.parts_floats(bucket.rows, up.heads, up.rank, config.splits))
    if bucket.rows == 1:
        paged["rows"] = None
    among = "" if query_start is None else " among others"
    planner.own(
        latent.latent_decode, f"latent decode {bucket.rows} rows{among}, {config}", wide, kv.k, scale=call["scale"],
        rope=kv.head_dim - up.rank, query_start=query_start, parts=parts, config=config, **paged,
    )  # fmt: skip
    leaving = planner.tuning.latent_leave(bucket.rows, splits=config.splits)
    whose: dict[str, Any] = {"count": paged["rows"]}
    if query_start is not None:
        whose |= {"whose": latent.ALONE, "query_start": query_start}
        if leaving.block_t == 1:
            leaving = planner.tuning.latent_leave(16, splits=config.splits)
    planner.own(
        latent.leave, f"leave {bucket.rows} rows{among} of {config.splits} splits, {leaving}", wide, up, out=out, parts=parts,
        splits=config.splits, config=leaving, **whose,
    )  # fmt: skip


NAIVE_FROM = 192
"""Steps of fewer tokens make no keys of earlier latents: few rows of theirs would gain, and all would launch for the largest scratch."""


def _choice(planner: Planner, call: Call, query_start: Tensor) -> tuple[Tensor, Tensor, int]:
    """(key_start, used, most keys) of `choose_rows`, which the first layer of a program launches for all."""
    up, bucket, paged, lengths = call["up"], planner.bucket, _paged(planner, call), call["rows"].lengths
    key_start = planner.workspace.beside(lengths, "latent key start", len(lengths) + 1)[: bucket.rows + 1]
    used = planner.workspace.beside(lengths, "latent rows used", len(lengths))[: bucket.rows]
    each = up.nope + call["kv"].head_dim - up.rank + up.value
    limit = bucket.tokens
    if bucket.fresh != "all" and bucket.tokens >= NAIVE_FROM:
        limit = _scratch_values(call) // (up.heads * each)
    if not any(
        launch.kernel is latent_prefill.choose_rows and address(launch.arguments[0]) == address(key_start)
        for launch in planner.launches
    ):
        planner.own(
            latent_prefill.choose_rows, f"choose among {bucket.rows} rows for {limit} keys", key_start, used, query_start=query_start,
            lengths=paged["lengths"], rows=paged["rows"], up=up, rope=call["kv"].head_dim - up.rank, limit=limit,
        )  # fmt: skip
    return key_start, used, limit


def _emit_mixed(planner: Planner, call: Call) -> None:
    kv, up, bucket, paged = call["kv"], call["up"], planner.bucket, _paged(planner, call)
    query_start = call["rows"].query_start[: bucket.rows + 1]
    q, out, rope = planner.cut(call["q"]), planner.cut(call["out"]), kv.head_dim - up.rank
    alone = bucket.rows == 1
    by_library = bool(call["fresh"]) and library.serves_latents(up.nope + rope, up.value)
    choice = _choice(planner, call, query_start)
    if bucket.fresh == "all" and by_library:  # rows of one token come out wrong here and are written again below
        _emit_naive(planner, call, choice, by_library=True)
    if bucket.fresh != "all":
        wide, config = _scratch(planner, call, len(q), kv.head_dim), planner.tuning.latent_prefill()
        into = planner.tuning.latent_absorb(bucket.tokens)
        leaving = planner.tuning.latent_leave(max(16, bucket.tokens), splits=1)
        later = {
            "whose": latent.LATER, "lone": alone, "query_start": query_start, "key_start": choice[0], "rows": paged["rows"],
        }  # fmt: skip
        shown = f"{list(wide.shape)} of rows without keys, {bucket.rows} rows"
        planner.own(latent.absorb, f"absorb {shown}, {into}", q, up, rope=rope, out=wide, config=into, **later)
        planner.own(
            latent_prefill.latent_prefill, f"latent prefill {shown}, {config}", wide, kv.k, query_start=query_start, scale=call["scale"],
            rope=rope, singles=alone, key_start=choice[0], config=config, **paged,
        )  # fmt: skip
        planner.own(latent.leave, f"leave {shown}, {leaving}", wide, up, out=out, config=leaving, **later)
    if not alone:
        wide, into = _scratch(planner, call, bucket.rows, kv.head_dim), planner.tuning.latent_absorb(bucket.rows)
        planner.own(
            latent.absorb, f"absorb {bucket.rows} rows among others, {into}", q, up, rope=rope, out=wide, whose=latent.ALONE,
            query_start=query_start, count=paged["rows"], config=into,
        )  # fmt: skip
        _emit_decode(planner, call, wide, out, query_start=query_start)
    if not (bucket.fresh == "all" and by_library):
        _emit_naive(planner, call, choice, by_library=by_library)


def _emit_naive(planner: Planner, call: Call, choice: tuple[Tensor, Tensor, int], *, by_library: bool) -> None:
    """Rows whose keys are made."""
    kv, up, bucket, paged = call["kv"], call["up"], planner.bucket, _paged(planner, call)
    query_start, (key_start, used, limit) = call["rows"].query_start[: bucket.rows + 1], choice
    q, out, rope = planner.cut(call["q"]), planner.cut(call["out"]), kv.head_dim - up.rank
    keys, making = _scratch(planner, call, limit, up.nope + rope + up.value), planner.tuning.latent_keys()
    planner.own(
        latent_prefill.make_keys, f"make keys {list(keys.shape)}, {bucket.rows} rows, {making}", kv.k, up, key_start=key_start,
        page_table=paged["page_table"], rows=paged["rows"], rope=rope, out=keys, config=making,
    )  # fmt: skip
    if by_library:
        part = bucket.fresh != "all"
        planner.launch(
            library.fresh_latents, f"fa3 {list(q.shape)} over made keys{', some rows' if part else ''}", q, keys, query_start, key_start,
            heads=up.heads, value=up.value, scale=call["scale"], used=used if part else None, out=out,
        )  # fmt: skip
        return
    config = planner.tuning.latent_fresh()
    planner.own(
        latent_prefill.fresh_latents, f"fresh latents {list(q.shape)}, {bucket.rows} rows, {config}", q, keys, query_start=query_start,
        key_start=key_start, rope=rope, value=up.value, scale=call["scale"], out=out, rows=paged["rows"], config=config,
    )  # fmt: skip
