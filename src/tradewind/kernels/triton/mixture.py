"""How a mixture of experts is planned for a bucket: the way, the constants, the scratch, the launches. A part of planning.py.

Knows: which kernels of route.py and moe.py serve which size of step. Refuses to know: the data flow around the mixture (passes.py).

    one      1 token       no scratch but the inner values; norm of the input and residual folded in
    few      up to 16      the same scratch by (token, expert) pair
    sorted   more          pairs sorted by expert; in deterministic mode for every size, with one tile for all
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tradewind.kernels.ops import PackedExperts
from tradewind.kernels.triton import blocks, moe, norm, route
from tradewind.kernels.triton.launch import FP8
from tradewind.kernels.triton.planner import Planner
from tradewind.kernels.triton.tape import Call, OpSet
from tradewind.kernels.triton.tuning import TileConfig

TOKENS_EACH = 16
"""Tokens of a program that routes or sorts; above MANY twice as many, because every program reads what all have counted."""
MANY = 512


def way(planner: Planner, call: Call) -> str:
    """How the experts of a bucket are computed: "one", "few" or "sorted"."""
    if planner.deterministic:
        return "sorted"
    if planner.bucket.tokens == 1:
        return "one"
    return "few" if planner.bucket.tokens <= planner.tuning.few_expert_tokens else "sorted"


def tokens_each(planner: Planner) -> int:
    """Tokens of a program that routes or sorts; in deterministic mode always as many: the order of a sum depends on it."""
    tokens = planner.bucket.tokens
    if planner.deterministic or 1 < tokens <= MANY:
        return TOKENS_EACH
    return 1 if tokens == 1 else 2 * TOKENS_EACH


def tile(planner: Planner, weight: PackedExperts, ids: Tensor) -> TileConfig:
    """Constants of a matmul of several tokens."""
    if planner.deterministic:
        return replace(moe.FIXED, bk=next((bk for bk in (64, 32) if weight.k % bk == 0), moe.FIXED.bk))
    fp8 = weight.layout != "bf16"
    return planner.tuning.expert_tile(planner.bucket.tokens, ids.shape[1], weight.experts, weight.k, fp8=fp8)


def changes_at(ops: OpSet, call: Call, sizes: Iterable[int]) -> list[int]:
    """Of ascending numbers of tokens those whose tiles are others than of the number before: more than one token, not deterministic."""
    found: list[int] = []
    before: Any = None
    chosen = call["ids"].shape[1]
    for size in sizes if not ops.deterministic else ():
        tiles = [
            ops.tuning.expert_tile(size, chosen, each.experts, each.k, fp8=each.layout != "bf16")
            for each in (call["gate_up"], call["down"])
        ]
        now = (size <= ops.tuning.few_expert_tokens, size > MANY, tiles)
        if now != before:
            found.append(size)
        before = now
    return found


def sort_scratch(planner: Planner, call: Call) -> dict[str, Tensor]:
    """Buffers of `sort_pairs`."""
    ids, experts = call["ids"], call["gate_up"].experts
    block = tile(planner, call["gate_up"], ids).bm
    programs = -(-len(ids) // TOKENS_EACH)  # of the largest step at once
    most = route.most_blocks(planner.bucket.tokens * ids.shape[1], experts=experts, block=block)
    new = planner.workspace.piece
    return {
        "counts": new("expert counts", programs, experts, dtype=torch.int32),
        "base": new("expert base", programs, experts, dtype=torch.int32),
        "order": new("expert order", ids.numel(), dtype=torch.int32),
        "blocks": new("expert blocks", 3, most, dtype=torch.int32),
        "used": new("expert blocks used", 1, dtype=torch.int32),
    }


def answers_of(planner: Planner, call: Call) -> Tensor:
    """bf16 [T K, E]: what each chosen expert says, before it is weighed."""
    chosen, width = call["ids"].shape[1], call["down"].n
    whole = planner.workspace.piece("expert answers", len(call["out"]) * chosen, width, dtype=torch.bfloat16)
    return whole[: planner.bucket.tokens * chosen]


def shares(planner: Planner, call: Call) -> Tensor:
    """float32 [T, K]: what answers are multiplied with when they are added: the routing's weights, or ones where the input is weighed."""
    if not call["weigh_input"]:
        return planner.cut(call["weights"])  # type: ignore[no-any-return]
    return planner.cut(planner.workspace.ones(*call["weights"].shape))  # type: ignore[no-any-return]


def emit_route(planner: Planner, call: Call) -> None:
    """Appends the launch of a `route` call, which counts for the sorting behind it where `call["experts"]` says so."""
    logits, routing, each = planner.cut(call["logits"]), call["routing"], tokens_each(planner)
    counts = None if call["experts"] is None else sort_scratch(planner, call["experts"])["counts"]
    text = f"route {list(logits.shape)} -> {routing.top_k}, {each} tokens each" + (
        "" if counts is None else ", counted"
    )
    planner.own(
        route.route, text, logits, routing, bias=call["bias"], ids=planner.cut(call["ids"]), weights=planner.cut(call["weights"]),
        tokens_each=each, counts=counts, count=planner.count(call, always=True),
    )  # fmt: skip


def emit_experts(planner: Planner, call: Call) -> None:
    """Appends the launches of an `experts` call, without the weighted sum where a norm has taken it."""
    if way(planner, call) == "one":
        _emit_one(planner, call)
        return
    gate_up, down = call["gate_up"], call["down"]
    x, ids, out = (planner.cut(call[name]) for name in ("x", "ids", "out"))
    chosen, rows, pairs = ids.shape[1], ids.numel(), call["ids"].numel()
    count = planner.count(call, always=True)
    places: dict[str, Any] = {"count": count}
    kind = "few"
    if way(planner, call) == "sorted":
        kind, places = "sorted", _emit_sort(planner, call, ids, count)
    x_scale = None
    if gate_up.layout != "bf16":
        x, x_scale = (planner.cut(twin) for twin in planner.workspace.quantised(call["x"], gate_up.layout))
    inner = planner.workspace.piece("expert inner", pairs, down.k, dtype=torch.bfloat16)[:rows]
    first = tile(planner, gate_up, call["ids"])
    planner.own(
        moe.expert_tiles, f"{_text(gate_up, x, ids)} {kind} + {call['activation']}, {first}", x, gate_up.data[0], ids, out=inner,
        gated=True, scale=_scale(gate_up), x_scale=x_scale, bias=call["gate_up_bias"], activation=call["activation"], config=first,
        weights=_input_weights(planner, call), **places,
    )  # fmt: skip
    if down.layout != "bf16":
        by_block = down.layout == "fp8_block"
        small = planner.workspace.piece("expert inner fp8", pairs, down.k, dtype=FP8)[:rows]
        scales = (blocks.parts(down.k),) if by_block else ()
        x_scale = planner.workspace.piece("expert inner scale", pairs, *scales, dtype=torch.float32)[:rows]
        quantise = blocks.quantise_columns if by_block else norm.quantise_tokens
        planner.own(quantise, f"quantise {list(inner.shape)} -> {down.layout}", inner, out=small, scale=x_scale)
        inner = small
    second = replace(tile(planner, down, call["ids"]), bm=first.bm)
    answers = answers_of(planner, call)
    planner.own(
        moe.expert_tiles, f"{_text(down, inner, ids)} {kind}, {second}", inner, down.data[0], ids, out=answers, gated=False,
        scale=_scale(down), x_scale=x_scale if down.layout != "bf16" else None, bias=call["down_bias"], config=second, **places,
    )  # fmt: skip
    if id(call) not in planner.weighed:
        weights = shares(planner, call)
        planner.own(moe.combine, f"combine {chosen} experts {list(out.shape)}", answers, weights, out=out, count=count)


def _emit_sort(planner: Planner, call: Call, ids: Tensor, count: Tensor | None) -> dict[str, Any]:
    """Appends the sorting, and the counting where routing has not done it; returns where the kernels find each pair's place."""
    experts, block, each = call["gate_up"].experts, tile(planner, call["gate_up"], call["ids"]).bm, tokens_each(planner)
    scratch = sort_scratch(planner, call)
    if not call["counted"]:
        planner.own(
            route.count_pairs, f"count {list(ids.shape)} by {each}", ids, experts=experts, counts=scratch["counts"], tokens_each=each,
            count=count,
        )  # fmt: skip
    planner.own(
        route.sort_pairs, f"sort {list(ids.shape)} by {each} into blocks of {block}", ids, experts=experts, block=block,
        tokens_each=each, count=count, **scratch,
    )  # fmt: skip
    return {name: scratch[name] for name in ("order", "blocks", "used")}


def _emit_one(planner: Planner, call: Call) -> None:
    gate_up, down = call["gate_up"], call["down"]
    x, ids, out = (planner.cut(call[name]) for name in ("x", "ids", "out"))
    inner = planner.workspace.piece("expert inner", call["ids"].numel(), down.k, dtype=torch.bfloat16)[: ids.numel()]
    residual = planner.cut(call["residual"])
    config = planner.tuning.expert_gemv(down.k, gate_up.k, gated=True, fp8=gate_up.layout != "bf16")
    normed = " + norm" if call["norm"] is not None else ""
    planner.own(
        moe.one_gate_up, f"{_text(gate_up, x, ids)} one + {call['activation']}{normed}, {config}", x, ids, gate_up.data[0], out=inner,
        scale=_scale(gate_up), bias=call["gate_up_bias"], norm=call["norm"], eps=call["eps"] or 0.0, activation=call["activation"],
        weights=_input_weights(planner, call), config=config, late=planner.pdl,
    )  # fmt: skip
    config = planner.tuning.expert_gemv(down.n, down.k, gated=False, fp8=down.layout != "bf16")
    added = (" + residual" if residual is not None else "") + (", early" if planner.pdl else "")
    planner.own(
        moe.one_down, f"{_text(down, inner, ids)} one{added}, {config}", inner, ids, shares(planner, call), down.data[0], out=out,
        scale=_scale(down), bias=call["down_bias"], residual=residual, config=config, early=planner.pdl,
    )  # fmt: skip


def _input_weights(planner: Planner, call: Call) -> Tensor | None:
    return planner.cut(call["weights"]) if call["weigh_input"] else None


def _text(weight: PackedExperts, x: Tensor, ids: Tensor) -> str:
    features = weight.n // 2 if weight.gated else weight.n
    return f"{ids.shape[1]} of {weight.experts} experts {list(x.shape)} -> {features} {weight.layout}"


def _scale(weight: PackedExperts) -> Tensor | None:
    return weight.data[1] if weight.layout != "bf16" else None
