"""How attention over pages of keys and values is planned for a bucket: where keys come from, the kernels, the constants, the scratch, the
launches. A part of planning.py.

Knows: which kernels of rope.py, decode.py, prefill.py, shared.py, encode.py and FlashAttention 3 serve which rows of a step, and what of
rotation and KV write they take over. Refuses to know: what lies around rotation and attention (passes.py), latents but for their table of
angles (latent_program.py), and the tuned constants themselves (tuning.py).

    angles             from a table by position, made once, so that rope_angles is dead
    one-token rows     decode; few: rotation and KV write in the same launch; keys that all share in a pass before
    other steps        prompts in tiles (prefill.py), cut over their keys where few meet many; decode. A lone row is prefill's alone
    prompts that       all begin: FlashAttention 3 from the qkv buffer, rotated in place; decode
    begin in the step  some: the same for them; prefill for those that go on; decode
    an encoder         every row, all of its keys in both directions
    deterministic      prefill for every row, with one tile for all sizes of step
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tradewind.kernels.ops import KVLayer, PagedRows
from tradewind.kernels.triton import decode, encode, library, low_rank_tile, prefill, rope, shared, skinny
from tradewind.kernels.triton.planner import Planner
from tradewind.kernels.triton.program import Bucket
from tradewind.kernels.triton.tape import Call, Tape
from tradewind.kernels.triton.tuning import DecodeConfig, PrefillConfig, Tuning
from tradewind.kernels.triton.workspace import address

CAN_BE_LATE = (skinny.skinny_linear, low_rank_tile.adapted_linear)
"""Kernels that may let their successor start only after their own wait (package docstring)."""

# -------------------------------------------------------------------------------------------------------------- passes


def take_angles_from_tables(planner: Planner) -> None:
    """rope_store reads its angles from a table by position instead of from what rope_angles wrote in this step."""
    readers = ("attention", "latent_attention")
    reach = [c["rows"].page_table.shape[1] * c["kv"].page_tokens for c in planner.calls if c.op in readers]
    if not reach:
        return
    for i, call in enumerate(planner.calls):
        if call.op not in ("rope_store", "latent_store"):
            continue
        source = planner.last_write(i, address(call["angles"]))
        if source >= 0 and planner.calls[source].op == "rope_angles":
            made = planner.calls[source]
            call["angles"] = planner.workspace.angle_table(made["inv_freq"], scale=made["scale"], positions=max(reach))
            call["positions"] = made["positions"]


def fold_rope(planner: Planner) -> None:
    """Few rows of one token: attention rotates and writes its own key, and reads the raw qkv row."""
    bucket = planner.bucket
    if planner.deterministic or not bucket.singles or bucket.rows > planner.tuning.fuse_rope_rows:
        return
    gone = set()
    for i, call in enumerate(planner.calls):
        if call.op != "rope_store" or call["positions"] is None:
            continue
        q = address(call["out"])
        readers = planner.readers(i, q)
        if readers is None or len(readers) != 1:
            continue
        reader = planner.calls[readers[0]]
        if (
            reader.op == "attention"
            and reader["causal"]
            and reader["kv"] is call["kv"]
            and call["angles"].shape[1] == call["kv"].head_dim
            and planner.untouched(address(call["qkv"]), i, readers[0], reads=False)
        ):
            reader["q"] = call["qkv"]
            reader["rope"] = dict(call.arguments)
            gone.add(i)
    planner.calls = [call for i, call in enumerate(planner.calls) if i not in gone]


def take_fresh_keys(planner: Planner) -> None:
    """Where all keys of the long rows are in this step, attention reads them from the qkv buffer, rotated in place."""
    if planner.bucket.fresh == "none" or planner.deterministic:
        return
    for i, call in enumerate(planner.calls):
        if call.op != "attention" or not call["fresh"] or call["window"] is not None or call["sinks"] is not None:
            continue
        source = planner.last_write(i, address(call["q"]))
        made = planner.calls[source] if source >= 0 else None
        if (
            made is not None
            and made.op == "rope_store"
            and made["kv"] is call["kv"]
            and planner.untouched(address(made["qkv"]), source, i, reads=True)
            and planner.readers(planner.last_write(source, address(made["qkv"])), address(made["qkv"])) == [source]
        ):
            made["back"] = True
            call["qkv"] = made["qkv"]


def drop_unread_angles(planner: Planner) -> None:
    """rope_angles whose result nobody reads any more."""
    planner.calls = [
        call
        for i, call in enumerate(planner.calls)
        if call.op != "rope_angles" or planner.readers(i, address(call["out"])) != []
    ]


# ------------------------------------------------------------------------------------------------------------ emission


def emit_angles(planner: Planner, call: Call) -> None:
    """Appends the launch of a `rope_angles` call."""
    out, inv_freq = planner.cut(call["out"]), call["inv_freq"]
    angle = planner.workspace.piece("angle", len(out), len(inv_freq), dtype=torch.float32)
    planner.launch(
        library.rope_angles, f"rope_angles {list(out.shape)} by the library", planner.cut(call["positions"]), inv_freq,
        scale=call["scale"], out=out, angle=angle,
    )  # fmt: skip


def emit_store(planner: Planner, call: Call) -> None:
    """Appends the launch of a `rope_store` call."""
    kv, qkv = call["kv"], planner.cut(call["qkv"])
    by_position = call["positions"] is not None
    text = f"rope_store {list(qkv.shape)}" + (", k back" if call["back"] else "")
    planner.own(
        rope.rope_store, text, qkv, call["angles"] if by_position else planner.cut(call["angles"]),
        planner.cut(call["write_slots"]), kv.k, kv.v, heads=call["heads"], q_weight=call["q_weight"], k_weight=call["k_weight"],
        eps=call["eps"], positions=planner.cut(call["positions"]), out=planner.cut(call["out"]),
        count=planner.count(call, always=True), back=bool(call["back"]),
    )  # fmt: skip


def emit_attention(planner: Planner, call: Call) -> None:
    """Appends the launches of an `attention` call."""
    bucket, kv, rows, q = planner.bucket, call["kv"], call["rows"], planner.cut(call["q"])
    query_start = rows.query_start[: bucket.rows + 1]
    common = {
        "lengths": rows.lengths[: bucket.rows], "page_table": rows.page_table[: bucket.rows], "heads": call["heads"],
        "scale": call["scale"], "softcap": call["softcap"], "sinks": call["sinks"], "out": planner.cut(call["out"]),
        "rows": rows.rows,
    }  # fmt: skip
    if not call["causal"]:
        text = f"encode {list(q.shape)}"
        planner.own(encode.paged_encode, text, q, kv.k, kv.v, query_start=query_start, **common)
        return
    common |= {"window": call["window"], "chunked": bool(call["chunked"])}
    part = call["qkv"] is not None and bucket.fresh == "some"
    if call["qkv"] is not None:
        _emit_fresh(planner, call, query_start, part=part)
        if bucket.rows == 1 and not part:
            return
        common["query_start"] = query_start
    if part or (call["qkv"] is None and (planner.deterministic or not bucket.singles)):
        # A lone row is this kernel's alone, so that a chunk costs one launch; it may have one token.
        alone = planner.deterministic or bucket.rows == 1
        _emit_prompts(planner, call, query_start, common, alone=alone, part=part)
        if alone:
            return
        common["query_start"] = query_start
    _emit_singles(planner, call, common)


def _emit_fresh(planner: Planner, call: Call, query_start: Tensor, *, part: bool) -> None:
    """FlashAttention 3 of prompts that begin; part: others go on.
    All fresh: rows of one token, whose older keys are in the pages, come out wrong here and are written again by what comes behind."""
    q = planner.cut(call["q"])
    planner.launch(
        library.fresh_attention, f"fa3 {list(q.shape)}{' of rows that begin' if part else ''}", q, planner.cut(call["qkv"]), query_start,
        heads=call["heads"], kv_heads=call["kv"].kv_heads, scale=call["scale"], softcap=call["softcap"],
        begun=_begun(planner, call["rows"]) if part else None, out=planner.cut(call["out"]),
    )  # fmt: skip


def _begun(planner: Planner, rows: PagedRows) -> Tensor:
    """int32 [R]: tokens of rows that begin in the step, filled where it is laid out."""
    return planner.workspace.beside(rows.lengths, "begun", len(rows.lengths))[: planner.bucket.rows]


def _emit_prompts(
    planner: Planner, call: Call, query_start: Tensor, common: dict[str, Any], *, alone: bool, part: bool
) -> None:
    """Rows of several tokens; alone: of one token, too; part: only those that go on."""
    bucket, kv, q = planner.bucket, call["kv"], planner.cut(call["q"])
    given = dict(common)
    config = prefill_config(planner.tuning, kv.head_dim, kv.page_tokens, call["heads"] // kv.kv_heads)
    if planner.deterministic:  # which tiles make a pair depends on where a chunk begins
        config = replace(config, pairs=False)
    if bucket.deep and not planner.deterministic:
        seen = bucket.longest if call["window"] is None else call["window"] + bucket.deep_tokens
        if seen >= 2 * planner.tuning.split_keys:
            config = split_config(planner.tuning, bucket, kv, call["heads"], config)
        need = split_floats(bucket, kv, call["heads"], config)
        given |= {
            "last": bucket.deep,
            "last_tokens": bucket.deep_tokens,
            "workspace": planner.workspace.floats(need) if need else None,
        }
    given["query_start"] = query_start
    planner.own(
        prefill.paged_prefill, f"prefill {list(q.shape)}{' of rows that go on' if part else ''}, {config}", q, kv.k, kv.v,
        singles=alone, begun=not part, config=config, **given,
    )  # fmt: skip


def _emit_singles(planner: Planner, call: Call, common: dict[str, Any]) -> None:
    """Rows of one token, cut over their keys and merged in the same launch."""
    bucket, kv, q = planner.bucket, call["kv"], planner.cut(call["q"])
    if bucket.rows == 1:
        common["rows"] = None
    form = decode_config(planner.tuning, bucket, kv, call["heads"] // kv.kv_heads)
    if form.splits > 1:
        need = decode.decode_workspace_floats(
            bucket.rows, heads=call["heads"], head_dim=kv.head_dim, splits=form.splits
        )
        common |= {
            "workspace": planner.workspace.floats(need),
            "arrived": planner.workspace.counters(bucket.rows * kv.kv_heads),
        }
    text = f"decode {bucket.rows} rows, {form}"
    if call["rope"] is not None:
        fused = call["rope"]
        # Old keys are read before the wait, if the launch before lets us start only after its own (package docstring).
        before = planner.launches[-1] if planner.launches else None
        early = planner.pdl and before is not None and before.kernel in CAN_BE_LATE and not before.lane
        if early:
            planner.launches[-1].options["late"] = True
        common |= {
            "angles": fused["angles"], "q_weight": fused["q_weight"], "k_weight": fused["k_weight"], "eps": fused["eps"],
            "early": early,
        }  # fmt: skip
        text += " + rope" + (", early" if early else "")
    elif bucket.shared and not planner.deterministic and call["window"] is None:
        common["shared"] = shared_keys(planner, call, common)
        text += " behind shared keys"
    planner.own(decode.paged_decode, text, q, kv.k, kv.v, config=form, **common)


def shared_keys(planner: Planner, call: Call, common: dict[str, Any]) -> decode.SharedKeys:
    """Launches the pass over keys that all one-token rows share; what it leaves is folded in by the kernel behind it."""
    bucket, kv, heads = planner.bucket, call["kv"], call["heads"]
    packed = 1 << (heads // kv.kv_heads - 1).bit_length()
    config = whole_groups(planner.tuning.shared_pass(kv.head_dim, kv.page_tokens), heads // kv.kv_heads)
    if kv.format == "fp8":  # conversions want more registers than two programs a multiprocessor leave
        config = replace(config, registers=0)
    splits = planner.tuning.shared_splits(
        kv.kv_heads * -(-bucket.rows * packed // config.block_m), block_m=config.block_m
    )
    # At once as much as any number of rows may need: tiles times splits are at most what runs at once, or splits are 1.
    programs = planner.tuning.shared_programs(config.block_m)
    most = max(len(call["rows"].lengths), programs * config.block_m // (kv.kv_heads * packed))
    need = shared.shared_parts_floats(most, heads=heads, head_dim=kv.head_dim, splits=1)
    assert bucket.rows * splits <= most
    keys = decode.SharedKeys(
        found=planner.workspace.beside(call["rows"].page_table, "shared", 4),
        parts=planner.workspace.piece("shared parts", need, dtype=torch.float32),
        splits=splits,
        block_n=config.block_n,
    )
    q, query_start = planner.cut(call["q"]), common.get("query_start")
    planner.own(
        shared.shared_attention, f"shared keys {list(q.shape)}, {splits} splits, {config}", q, kv.k, kv.v, keys=keys,
        page_table=common["page_table"], rows=call["rows"].rows, query_start=query_start, heads=heads, scale=call["scale"],
        softcap=call["softcap"], config=config,
    )  # fmt: skip
    return keys


# ----------------------------------------------------------------------------------------------- constants and scratch


def decode_config(tuning: Tuning, bucket: Bucket, kv: KVLayer, packed: int) -> DecodeConfig:
    """The tuned constants; wide heads get narrower tiles, so that keys and values fit into shared memory."""
    config = tuning.decode(bucket.rows, bucket.longest, packed=packed, fp8=kv.format == "fp8")
    return replace(config, block_n=min(config.block_n, 32), stages=2) if kv.head_dim > 128 else config


def split_config(tuning: Tuning, bucket: Bucket, kv: KVLayer, heads: int, config: PrefillConfig) -> PrefillConfig:
    """The constants of attention that may be cut over its keys: by the programs that the rows of several tokens make."""
    packed = 1 << (heads // kv.kv_heads - 1).bit_length()
    config = tuning.few_prefill(bucket.deep_tokens * packed, config)
    programs = -(-bucket.deep_tokens * packed // config.block_m) * kv.kv_heads
    return replace(config, splits=tuning.prefill_splits(programs), least_keys=tuning.split_keys)


def split_floats(bucket: Bucket, kv: KVLayer, heads: int, config: PrefillConfig) -> int:
    """Workspace of that, in floats."""
    tokens = bucket.tokens if bucket.deep >= bucket.rows else min(bucket.deep_tokens + bucket.deep - 1, bucket.tokens)
    return prefill.prefill_workspace_floats(tokens, heads=heads, head_dim=kv.head_dim, splits=config.splits)


def reserve_for_splits(tape: Tape, buckets: Iterable[Bucket]) -> None:
    """Grows the workspace to what cut attention needs in the largest of these steps: a capture must not."""
    ops = tape.ops
    for call in tape.calls:
        if call.op == "attention":
            kv, heads = call["kv"], call["heads"]
            whole = prefill_config(ops.tuning, kv.head_dim, kv.page_tokens, heads // kv.kv_heads)
            each = [(b, split_config(ops.tuning, b, kv, heads, whole)) for b in buckets]
            ops.workspace.floats(max((split_floats(b, kv, heads, config) for b, config in each), default=0))
            return


def prefill_config(tuning: Tuning, head_dim: int, page_tokens: int, ratio: int) -> PrefillConfig:
    """The tuned constants; a tile holds whole groups of packed heads."""
    return whole_groups(tuning.prefill(head_dim, page_tokens), ratio)


def whole_groups(config: PrefillConfig, ratio: int) -> PrefillConfig:
    """The constants with tiles of whole groups of packed heads."""
    packed = 1 << (ratio - 1).bit_length()
    return config if config.block_m % packed == 0 else replace(config, block_m=packed)
