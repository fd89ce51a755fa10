"""One round of open questions about the GPU kernels: what is tuned now ("off") against candidates ("on"), in minutes on one card.

    PYTHONPATH=src python benchmarks/kernel_rounds.py --shards 14 --out round.json     all groups (about 3 minutes on an H200)
    PYTHONPATH=src python benchmarks/kernel_rounds.py --only onerow,steps              some groups, each under 2 minutes
    PYTHONPATH=src python benchmarks/kernel_rounds.py --dry                            no GPU: compiles every candidate for sm_90

    fixed     the batch-invariant matmul against cuBLAS          rows      attention of one-token rows, bf16 and FP8 keys
    onerow    one input row, FP8 weights and norms                longrows  attention of long rows
    sampler   flat and peaked logits                             steps     whole decode steps, with the best constants found just before
    medium    128 and 256 input rows: tiles against cuBLAS and what must follow it
    few       8 to 64 input rows: tiles with more or fewer blocks under way

Knows: which candidates are open. Refuses to know: how to time and check (benchmarks/kernels.py, which also measures everything else).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import kernels as base
import torch
import triton
from kernels import BF16, F32, FP8, MODELS, Bench, Case, Shape, difference, tag

from tradewind.kernels.triton import decode, elementwise, library, prefill, skinny
from tradewind.kernels.triton import sample as sampling
from tradewind.kernels.triton.tuning import DEFAULT, DecodeConfig, GemvConfig, PrefillConfig, TileConfig, tuned

BY_NAME = {model.name: model for model in MODELS}
EIGHT = BY_NAME["llama-3.1-8b"]


@dataclass
class Candidate:
    """A case with its constants, so that the whole steps can use the best ones. off: what the table of constants says now."""

    case: Case
    config: object = None
    off: bool = False
    key: tuple = field(default=())


# ------------------------------------------------------------------------------------------------------------- matmuls


def layer_matrices(model: Shape) -> list[tuple[str, int, int, bool]]:
    """(name, outputs, depth, gated) of a layer."""
    e, f, q = model.hidden, model.intermediate, model.heads * model.head_dim
    return [("qkv", model.qkv, e, False), ("o", e, q, False), ("gate_up", f, e, True), ("down", e, f, False)]


def weights_of(bench: Bench, rows: int, depth: int, *, fp8: bool, most: int = 64) -> list[tuple]:
    """Enough (weight, scale) pairs to defeat the L2."""
    count = base.copies(rows * depth * (1 if fp8 else 2), most=most)
    made = [bench.normal(rows, depth, scale=depth**-0.5) for _ in range(count)]
    return [base.fp8_weight(bench, w) if fp8 else (w, None) for w in made]


def product(x: torch.Tensor, pair: tuple, *, gated: bool) -> torch.Tensor:
    """The truth in float32 from the same stored weights."""
    weight = pair[0].float() if pair[1] is None else pair[0].float() * pair[1][:, None]
    y = x.double() @ weight.double().T
    half = len(weight) // 2
    return torch.nn.functional.silu(y[:, :half]) * y[:, half:] if gated else y


def fixed_candidates(bench: Bench) -> Iterator[Candidate]:
    tiles = [
        skinny.FIXED,
        TileConfig(64, 64, 64, 1, 4, 4),
        TileConfig(64, 128, 64, 1, 4, 4),
        TileConfig(64, 128, 128, 1, 8, 3),
        TileConfig(32, 64, 128, 1, 4, 4),
    ]
    for name, features, depth, gated in layer_matrices(EIGHT):
        if name == "qkv":
            continue
        rows_w = features * (2 if gated else 1)
        pairs = weights_of(bench, rows_w, depth, fp8=False, most=8)
        for rows in (1, 32, 256, 4096):
            x = bench.normal(rows, depth)
            out = bench.empty(rows, features)
            truth = None if bench.dry or rows > 256 else product(x.float(), pairs[0], gated=gated)
            op = f"fixed {name} M={rows}"
            amount, flops = rows_w * depth * 2.0, 2.0 * rows * rows_w * depth
            if not bench.dry:
                both = bench.empty(rows, rows_w)
                calls = [lambda w=w, x=x, o=both: torch.mm(x, w.T, out=o) for w, _ in pairs]
                yield Candidate(Case("fixed", op, "cublas, no epilogue", calls, bytes=amount, flops=flops), off=True)
            for tile in tiles:

                def call(w, target, x=x, gated=gated, tile=tile):
                    skinny.fixed_linear(x, w, out=target, gated=gated, tile=tile, pdl=True)

                def error(call=call, w=pairs[0][0], out=out, truth=truth):
                    target = torch.full_like(out, float("nan"))
                    call(w, target)
                    return difference(target, truth)

                calls = [lambda w=w, call=call, out=out: call(w, out) for w, _ in pairs]
                check = error if truth is not None else None
                yield Candidate(Case("fixed", op, tag(tile), calls, bytes=amount, flops=flops, error=check), tile)


def medium_matrices() -> list[tuple[str, str, int, int, bool, bool]]:
    """(model, name, outputs, depth, gated, FP8): what a step of many rows multiplies by, of the shapes in benchmarks/models."""
    found = [(m.name, *matrix, False) for m in (BY_NAME["qwen3-0.6b"], EIGHT) for matrix in layer_matrices(m)]
    found += [(EIGHT.name, *matrix, True) for matrix in layer_matrices(EIGHT)]
    for name, outputs, depth, gated in (
        ("qwen3-30b-a3b qkv", 5120, 2048, False), ("qwen3-30b-a3b o", 2048, 4096, False), ("deepseek-v2-lite q", 3072, 2048, False),
        ("deepseek-v2-lite o", 2048, 2048, False), ("deepseek-v2-lite shared gate_up", 2816, 2048, True),
        ("deepseek-v2-lite shared down", 2048, 2816, False),
    ):  # fmt: skip
        found.append((*name.split(" ", 1), outputs, depth, gated, False))
    return found


def medium_tiles(rows: int, outputs: int, *, gated: bool, fp8: bool) -> list[TileConfig]:
    """Those with at least two programs for three multiprocessors, and no more than three a multiprocessor."""
    shapes = [
        (64, 64, 64, 4, 6), (64, 64, 128, 4, 5), (64, 64, 128, 4, 6), (64, 128, 128, 8, 4), (64, 128, 64, 4, 6), (128, 64, 64, 4, 6),
        (128, 64, 128, 8, 4), (128, 128, 64, 8, 6), (128, 128, 128, 8, 3), (256, 64, 64, 8, 5), (256, 128, 64, 8, 4), (128, 256, 64, 8, 4),
    ]  # fmt: skip
    if fp8:  # half the bytes: blocks of K twice as long
        shapes = [(bm, bn, min(2 * bk, 128), warps, stages) for bm, bn, bk, warps, stages in shapes]
    tiles = []
    for bm, bn, bk, warps, stages in dict.fromkeys(shapes):
        programs = -(-rows // bm) * -(-outputs // (bn // 2 if gated else bn))
        if bm <= rows and 88 <= programs <= 132 * (8 if gated or outputs > 4096 else 4):
            tiles.append(TileConfig(bm, bn, bk, 1, warps, stages))
    return tiles


def medium_candidates(bench: Bench) -> Iterator[Candidate]:
    for model, name, features, depth, gated, fp8 in medium_matrices():
        rows_w = features * (2 if gated else 1)
        pairs = weights_of(bench, rows_w, depth, fp8=fp8, most=24)
        for rows in (128, 256):
            x, x_scale = bench.normal(rows, depth), None
            if fp8:
                x, x_scale = base.fp8_weight(bench, x)
            out, both = bench.empty(rows, features), bench.empty(rows, rows_w)
            truth = None
            if not bench.dry:
                wide = x.float() if x_scale is None else x.float() * x_scale[:, None]
                truth = product(wide, pairs[0], gated=gated)
            op = f"{model} {name} M={rows}" + (" fp8" if fp8 else "")
            amount, flops = pairs[0][0].numel() * pairs[0][0].element_size(), 2.0 * rows * rows_w * depth
            if not bench.dry:

                def whole(pair, x=x, x_scale=x_scale, out=out, both=both, gated=gated):
                    target = both if gated else out
                    if x_scale is None:
                        library.matmul(x, pair[0], out=target)
                    else:
                        library.scaled_matmul(x, x_scale, pair[0], pair[1], out=target)
                    if gated:
                        elementwise.gated_activation(both, out=out, activation="silu", pdl=True)

                calls = [lambda pair=pair, whole=whole: whole(pair) for pair in pairs]
                how = "cublas and activation" if gated else "cublas"
                yield Candidate(Case("medium", op, how, calls, bytes=amount, flops=flops), off=True)
            for tile in medium_tiles(rows, features, gated=gated, fp8=fp8):
                residual = None if gated or name == "qkv" else torch.zeros_like(out)

                def call(pair, target, x=x, x_scale=x_scale, gated=gated, tile=tile, residual=residual):
                    skinny.fixed_linear(
                        x, pair[0], scale=pair[1], x_scale=x_scale, out=target, gated=gated, residual=residual, tile=tile, pdl=True
                    )  # fmt: skip

                def error(call=call, pair=pairs[0], out=out, truth=truth):
                    target = torch.full_like(out, float("nan"))
                    call(pair, target)
                    return difference(target, truth)

                calls = [lambda pair=pair, call=call, out=out: call(pair, out) for pair in pairs]
                yield Candidate(Case("medium", op, tag(tile), calls, bytes=amount, flops=flops, error=error), tile)


def few_tiles(now: TileConfig, depth: int, *, fp8: bool) -> list[TileConfig]:
    """Today's, and others with more blocks of weights under way."""
    shapes = [(64, 128, 4, 4), (64, 128, 4, 5), (64, 128, 4, 6), (64, 256, 4, 3), (128, 128, 4, 4)]
    if fp8:
        shapes = [
            (64, 128, 4, 6),
            (64, 128, 4, 8),
            (64, 256, 4, 4),
            (64, 256, 4, 5),
            (128, 128, 4, 4),
            (128, 128, 4, 6),
        ]
    found = [
        TileConfig(now.bm, bn, bk, split, warps, stages)
        for bn, bk, warps, stages in shapes
        for split in (1, 2, 4)
        if depth % (bk * split) == 0 and (now.bm + bn) * bk * stages * (1 if fp8 else 2) < 220 << 10
    ]
    return [now, *(tile for tile in found if tile != now)]


def few_candidates(bench: Bench) -> Iterator[Candidate]:
    for model, fp8, sizes in (
        (EIGHT, False, (64,)), (EIGHT, True, (8, 32, 64)), (BY_NAME["qwen3-0.6b"], False, (8, 64)),
    ):  # fmt: skip
        for name, features, depth, gated in layer_matrices(model):
            rows_w = features * (2 if gated else 1)
            pairs = weights_of(bench, rows_w, depth, fp8=fp8, most=24)
            for rows in sizes:
                now = tuned(DEFAULT).tile(rows, rows_w, depth, fp8=fp8)
                if now is None:
                    continue
                x, x_scale = bench.normal(rows, depth), None
                if fp8:
                    x, x_scale = base.fp8_weight(bench, x)
                out = bench.empty(rows, features)
                truth = None
                if not bench.dry:
                    truth = product(
                        x.float() if x_scale is None else x.float() * x_scale[:, None], pairs[0], gated=gated
                    )
                residual = None if gated or name == "qkv" else torch.zeros_like(out)
                for tile in few_tiles(now, depth, fp8=fp8):
                    need = skinny.workspace_floats(features, config=tile, gated=gated)
                    work, arrived = bench.empty(need, dtype=F32), bench.zeros(-(-rows_w // tile.bn))

                    def call(
                        pair,
                        target,
                        x=x,
                        x_scale=x_scale,
                        gated=gated,
                        tile=tile,
                        residual=residual,
                        work=work,
                        arrived=arrived,
                    ):
                        skinny.skinny_linear(
                            x, pair[0], scale=pair[1], x_scale=x_scale, out=target, gated=gated, residual=residual, config=tile,
                            workspace=work, arrived=arrived, pdl=True,
                        )  # fmt: skip

                    def error(call=call, pair=pairs[0], out=out, truth=truth):
                        target = torch.full_like(out, float("nan"))
                        call(pair, target)
                        return difference(target, truth)

                    calls = [lambda pair=pair, call=call, out=out: call(pair, out) for pair in pairs]
                    amount, flops = pairs[0][0].numel() * pairs[0][0].element_size(), 2.0 * rows * rows_w * depth
                    op = f"{model.name} {name} M={rows}" + (" fp8" if fp8 else "")
                    case = Case("few", op, tag(tile), calls, bytes=amount, flops=flops, error=error)
                    yield Candidate(case, tile, tile == now)


def onerow_configs(name: str) -> list[GemvConfig]:
    def narrow(*shape):
        return GemvConfig(*shape, narrow=True)

    def half(rows, block, warps, ahead):
        return GemvConfig(rows, block, warps, narrow=True, half=True, ahead=ahead)

    if name == "gate_up":
        return [
            narrow(2, 512, 4), narrow(4, 512, 4), narrow(2, 1024, 4), narrow(4, 1024, 8), narrow(8, 512, 4),
            half(2, 512, 4, 4), half(4, 512, 4, 2), half(4, 512, 4, 4), half(4, 256, 2, 4), half(8, 1024, 8, 2), half(8, 512, 4, 4),
        ]  # fmt: skip
    found = [
        narrow(4, 512, 4), narrow(8, 512, 4), narrow(2, 1024, 4), narrow(4, 1024, 4), narrow(8, 1024, 8), narrow(2, 512, 4),
        half(4, 512, 4, 4), half(8, 512, 4, 2), half(8, 512, 4, 4), half(2, 1024, 4, 4), half(8, 1024, 8, 2),
    ]  # fmt: skip
    return [*found, half(16, 1024, 8, 2) if name == "down" else half(8, 256, 2, 4)]


def normed_configs(now: GemvConfig) -> list[GemvConfig]:
    """bf16 weights that meet a float32 input: with narrow loads they are held alike."""
    return [
        replace(now, narrow=True), GemvConfig(now.rows, 512, 4, narrow=True), GemvConfig(2 * now.rows, 512, 4, narrow=True),
        GemvConfig(now.rows, 1024, 4, narrow=True), GemvConfig(now.rows, 1024, 8, narrow=True),
    ]  # fmt: skip


def onerow_candidates(bench: Bench) -> Iterator[Candidate]:
    every = [(EIGHT, True, matrix) for matrix in layer_matrices(EIGHT)]
    every += [(m, False, matrix) for m in MODELS for matrix in layer_matrices(m) if matrix[0] in ("qkv", "gate_up")]
    for model, fp8, (name, features, depth, gated) in every:
        pairs = weights_of(bench, features * (2 if gated else 1), depth, fp8=fp8)
        gain = bench.normal(depth, dtype=F32) if name in ("qkv", "gate_up") else None
        x = bench.normal(1, depth, dtype=F32 if gain is not None else BF16)
        out = bench.normal(1, features, dtype=F32 if gain is None else BF16)
        truth = None
        if not bench.dry:
            xs = x.double()
            if gain is not None:
                xs = xs * torch.rsqrt(xs.square().mean(1, keepdim=True) + 1e-5) * gain.double()
            truth = product(xs, pairs[0], gated=gated)
        now = tuned(DEFAULT).gemv(features, depth, fp8=fp8)
        for config in (now, *(c for c in (onerow_configs(name) if fp8 else normed_configs(now)) if c != now)):

            def call(pair, target, residual, config=config, x=x, gain=gain, gated=gated):
                skinny.skinny_linear(
                    x, pair[0], scale=pair[1], out=target, norm=gain, eps=1e-5, gated=gated, residual=residual, config=config, pdl=True
                )  # fmt: skip

            def error(call=call, pair=pairs[0], truth=truth, out=out, gain=gain):
                target = torch.full_like(out, float("nan"))
                begin = torch.randn_like(out) if gain is None else None
                call(pair, target, begin)
                return difference(target, truth if begin is None else truth + begin.double())

            residual = out if gain is None else None
            calls = [lambda pair=pair, call=call, out=out, r=residual: call(pair, out, r) for pair in pairs]
            amount = pairs[0][0].numel() * pairs[0][0].element_size()
            case = Case(
                "onerow",
                f"{model.name} {name}" + (" fp8" if fp8 else ""),
                tag(config),
                calls,
                bytes=amount,
                error=error,
            )
            yield Candidate(case, config, config == now, ("onerow", model.name, fp8, name))


# ----------------------------------------------------------------------------------------------------------- attention


def rows_configs(batch: int, *, fp8: bool) -> list[DecodeConfig]:
    """More stages than before: the page look-up takes half of them, so 3 stages hold one tile, 5 two, 7 three."""
    if batch == 1:
        shapes = [(32, 32, 2, 2), (16, 64, 4, 2), (16, 32, 2, 5)]
    elif batch == 8:
        shapes = [
            (8, 32, 2, 5), (8, 32, 2, 7), (4, 32, 2, 7), (4, 64, 4, 5), (8, 64, 4, 5), (8, 64, 4, 3), (4, 32, 4, 7), (16, 32, 2, 5),
        ]  # fmt: skip
    elif batch == 32:
        shapes = [
            (1, 64, 4, 5), (1, 64, 4, 7), (1, 64, 8, 5), (1, 64, 8, 7), (1, 128, 8, 5), (2, 64, 4, 5), (2, 64, 4, 7), (2, 32, 2, 7),
            (1, 32, 4, 9), (4, 64, 4, 5), (2, 64, 4, 3), (1, 128, 4, 5),
        ]  # fmt: skip
    else:
        shapes = [(1, 64, 4, 3), (1, 64, 4, 5), (1, 64, 4, 7), (1, 128, 8, 5), (1, 32, 2, 7)]
    if fp8 and batch > 1:
        shapes = [
            (1, 64, 4, 3),
            (1, 64, 4, 5),
            (1, 64, 4, 7),
            (1, 64, 8, 5),
            (1, 128, 8, 5),
            (1, 128, 4, 5),
            (1, 32, 2, 7),
            (1, 32, 4, 7),
        ]
    return [DecodeConfig(*shape) for shape in shapes]


def rows_candidates(bench: Bench) -> Iterator[Candidate]:
    context, page = 1024, 64
    for model, batches in ((EIGHT, (1, 8, 32, 64, 256)), (BY_NAME["qwen3-0.6b"], (8, 32, 256))):
        for batch, kv in [(b, kv) for b in batches for kv in (BF16, FP8)]:
            if kv == FP8 and (batch not in (1, 32, 256) or model is not EIGHT):
                continue
            heads, groups, dim = model.heads, model.kv_heads, model.head_dim
            each = 2 * context * groups * dim * (1 if kv == FP8 else 2)
            count = base.copies(each * batch, most=32)
            table, total = bench.table(batch * count, context // page)
            k, v = (bench.normal(total, groups, page, dim, dtype=kv) for _ in range(2))
            q, out = bench.normal(batch, heads * dim), bench.empty(batch, heads * dim)
            lengths = torch.full((batch,), context - 3, dtype=torch.int32, device=bench.device)
            starts = torch.arange(batch + 1, dtype=torch.int32, device=bench.device)
            some = sorted({0, batch // 2, batch - 1})
            truth = None
            if not bench.dry:
                found = base.attention_truth(
                    q, k, v, starts, lengths, table[:batch], heads=heads, scale=dim**-0.5, rows=some
                )
                truth = torch.cat(found)
            now = tuned(DEFAULT).decode(batch, context)
            for config in (now, *(c for c in rows_configs(batch, fp8=kv == FP8) if c != now)):
                need = decode.decode_workspace_floats(batch, heads=heads, head_dim=dim, splits=config.splits)
                work, arrived = bench.empty(need, dtype=F32), bench.zeros(batch * groups)

                def call(
                    i, target, config=config, work=work, arrived=arrived, q=q, k=k, v=v, lengths=lengths, table=table, batch=batch,
                    heads=heads, dim=dim,
                ):  # fmt: skip
                    decode.paged_decode(
                        q, k, v, lengths=lengths, page_table=table[i * batch : (i + 1) * batch], heads=heads, scale=dim**-0.5, out=target,
                        config=config, workspace=work, arrived=arrived, pdl=True,
                    )  # fmt: skip

                def error(call=call, out=out, truth=truth, some=some):
                    target = torch.full_like(out, float("nan"))
                    call(0, target)
                    return difference(target[some], truth)

                op = f"{model.name} B={batch} ctx={context}" + (" fp8 kv" if kv == FP8 else "")
                calls = [lambda i=i, call=call, out=out: call(i, out) for i in range(count)]
                case = Case("rows", op, tag(config), calls, bytes=each * batch, error=error)
                yield Candidate(case, config, config == now, ("rows", model.name, batch, kv == FP8))


LONG = [
    PrefillConfig(128, 64, 8, 3, True, pairs=True),
    PrefillConfig(128, 64, 8, 2, True, pairs=True),
    PrefillConfig(64, 64, 4, 2, True, pairs=True),
    PrefillConfig(64, 64, 4, 3, True),
    PrefillConfig(64, 64, 4, 4, True),
    PrefillConfig(128, 64, 8, 3, True),
    PrefillConfig(128, 64, 8, 4, True),
    PrefillConfig(128, 64, 8, 3, True, registers=128),
    PrefillConfig(128, 64, 8, 2, True, registers=128),
    PrefillConfig(128, 32, 4, 4, True),
    PrefillConfig(128, 128, 8, 2),
]


def longrows_candidates(bench: Bench) -> Iterator[Candidate]:
    for model, rows, new, context in (
        (EIGHT, 2, 4096, 4096),
        (BY_NAME["qwen3-0.6b"], 2, 4096, 4096),
        (EIGHT, 1, 2048, 8192),
    ):
        heads, groups, dim = model.heads, model.kv_heads, model.head_dim
        table, total = bench.table(rows, context // 64)
        k, v = (bench.normal(total, groups, 64, dim) for _ in range(2))
        q = bench.normal(rows * new, heads * dim)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=bench.device) * new
        lengths = torch.full((rows,), context, dtype=torch.int32, device=bench.device)
        out = bench.empty(*q.shape)
        flops = 4.0 * rows * (new * (context - new) + new * (new + 1) / 2) * heads * dim
        truth = None
        if not bench.dry:
            tail = torch.tensor([0, 256], dtype=torch.int32)
            truth = base.attention_truth(
                q[-256:], k, v, tail, lengths[-1:], table[-1:], heads=heads, scale=dim**-0.5, rows=[0]
            )[0]
        op = f"{model.name} {rows}x{new} of {context}"
        now = tuned(DEFAULT).prefill(dim, 64)
        for config in (now, *(c for c in LONG if c != now)):

            def call(
                target, config=config, q=q, k=k, v=v, starts=starts, lengths=lengths, table=table, heads=heads, dim=dim
            ):
                prefill.paged_prefill(
                    q, k, v, query_start=starts, lengths=lengths, page_table=table, heads=heads, scale=dim**-0.5, out=target,
                    config=config, pdl=True,
                )  # fmt: skip

            def error(call=call, out=out, truth=truth):
                target = torch.full_like(out, float("nan"))
                call(target)
                assert target.isfinite().all()
                return difference(target[-256:], truth)

            case = Case("longrows", op, tag(config), [lambda call=call, out=out: call(out)], flops=flops, error=error)
            yield Candidate(case, config, config == now, ("longrows", op))
        if new == context and not bench.dry:
            qc = q.view(rows, new, -1, dim).transpose(1, 2)
            kc, vc = (bench.normal(rows, heads, new, dim) for _ in range(2))

            def sdpa(qc=qc, kc=kc, vc=vc):
                torch.nn.functional.scaled_dot_product_attention(qc, kc, vc, is_causal=True)

            yield Candidate(Case("longrows", op, "torch SDPA, contiguous", [sdpa], flops=flops))


# ------------------------------------------------------------------------------------------------------------- sampler


def sampler_candidates(bench: Bench) -> Iterator[Candidate]:
    vocabulary = EIGHT.vocabulary
    for rows in (1, 64, 256):
        flat = bench.normal(rows, vocabulary, dtype=F32, scale=3.0)
        peaked = bench.normal(rows, vocabulary, dtype=F32, scale=2.0)
        if not bench.dry:  # as a language model answers: a bulk far below, and a few dozen tokens that matter
            peaked[:, : vocabulary // 400] += 10.0 * torch.rand(rows, vocabulary // 400, device=bench.device) ** 4
        work = sampling.SampleWorkspace.allocate(rows, vocabulary, device=bench.device, penalties=False)
        out = bench.zeros(rows)

        def columns(rows=rows, **values):
            all_values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5, "position": 9} | values
            kind = {"top_k": torch.int32, "seed": torch.int64, "position": torch.int64}
            return sampling.DeviceColumns(
                **{
                    n: torch.full((rows,), v, dtype=kind.get(n, F32), device=bench.device)
                    for n, v in all_values.items()
                }
            )

        for form, logits in (("flat", flat), ("peaked", peaked)):
            for name, made, filtered in (
                ("greedy", None, False), ("temperature", columns(), False), ("top-p 0.9", columns(top_p=0.9), True),
                ("top-k 50 top-p 0.95", columns(top_k=50, top_p=0.95), True),
            ):  # fmt: skip

                def run(x=logits, c=made, o=out, w=work, f=filtered):
                    sampling.sample(x, c, out=o, workspace=w, filtered=f, pdl=True)

                case = Case("sampler", f"{name} L={rows}", form, [run] * 4, bytes=rows * vocabulary * 4.0)
                yield Candidate(case, off=form == "flat")


GROUPS: dict[str, Callable[[Bench], Iterator[Candidate]]] = {
    "few": few_candidates,
    "fixed": fixed_candidates,
    "longrows": longrows_candidates,
    "medium": medium_candidates,
    "onerow": onerow_candidates,
    "rows": rows_candidates,
    "sampler": sampler_candidates,
}


# --------------------------------------------------------------------------------------------------------- whole steps


def one_row_sets(best: dict[tuple, list]) -> dict[str, dict]:
    """Constants of the four matmuls by how they multiply: the best of each kind, and of all."""
    sets: dict[str, dict] = {"narrow": {}, "half": {}, "best": {}}
    for name, *_ in layer_matrices(EIGHT):
        ranked = best.get(("onerow", EIGHT.name, True, name)) or onerow_configs(name)
        sets["narrow"][name] = next(c for c in ranked if c.narrow and not c.half)
        sets["half"][name] = next(c for c in ranked if c.half)
        sets["best"][name] = ranked[0]
    return sets


def step_candidates(bench: Bench, best: dict[tuple, list]) -> Iterator[tuple]:
    """(step, candidate, run arguments, off): whole decode steps with today's constants, then with the best of this run."""
    table = tuned(DEFAULT)
    most = DecodeConfig(32, 64, 4, 2)

    def built(model: Shape, rows: int, context: int, fp8: bool) -> tuple:
        config = base.constants(model, rows, fp8)
        step = base.DecodeStep(
            bench, model, rows=rows, context=context, path="fused", fp8=fp8, config=config | {"decode": most}
        )
        config["decode"] = table.decode(rows, context)
        step.config = config
        return step, config

    for context in (256, 1024):
        step, config = built(EIGHT, 1, context, True)
        yield step, "tuned now", {}, True
        for name, matmuls in one_row_sets(best).items():
            step.config = config | matmuls
            yield step, name, {}, False
        del step
    for model in (BY_NAME["qwen3-0.6b"], EIGHT):
        for context in (256, 1024):
            step, config = built(model, 1, context, False)
            yield step, "tuned now", {}, True
            for splits, block_n, warps in (
                ((8, 32, 4), (8, 64, 4), (4, 64, 4))
                if context == 256
                else ((16, 64, 4), (16, 32, 4), (32, 32, 4), (8, 64, 4))
            ):
                step.config = config | {"decode": DecodeConfig(splits, block_n, warps, 2)}
                yield step, tag(step.config["decode"]), {}, False
            step.config = config | {
                name: best[key][0]
                for name in ("qkv", "gate_up")
                if (key := ("onerow", model.name, False, name)) in best
            }
            yield step, "best qkv and gate_up", {}, False
            del step
    for model, fp8, rows in (
        (EIGHT, False, 8), (EIGHT, False, 32), (EIGHT, True, 32), (BY_NAME["qwen3-0.6b"], False, 8), (BY_NAME["qwen3-0.6b"], False, 32),
    ):  # fmt: skip
        step, config = built(model, rows, 1024, fp8)
        options = {"fuse_rope": rows <= table.fuse_rope_rows}
        yield step, "tuned now", options, True
        ranked = best.get(("rows", model.name, rows, False)) or rows_configs(rows, fp8=False)
        for decoder in ranked[:3]:
            step.config = config | {"decode": decoder}
            yield step, tag(decoder), options, False
        del step


# ---------------------------------------------------------------------------------------------------------------- main


def shown(config: object) -> str:
    return tag(config).replace("True", "T").replace("False", "F")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="fixed,onerow,rows,longrows,sampler,steps")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--shards", type=int, default=0)
    parser.add_argument("--shard", type=int, default=None, help="(internal) compile every n-th candidate and leave")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    groups = args.only.split(",")
    began = time.perf_counter()
    if args.dry:
        base.dry_driver()
    compiling = args.dry or args.shard is not None
    bench = Bench(device="cpu" if args.dry else "cuda", dry=compiling)
    candidates = (c for group in groups if group in GROUPS for c in GROUPS[group](bench))
    if compiling:
        seen = 0
        for index, candidate in enumerate(candidates):
            if args.shard is None or index % args.shards == args.shard:
                try:
                    candidate.case.calls[0]()
                except Exception as problem:
                    print(
                        f"{candidate.case.op} {candidate.case.candidate}: {type(problem).__name__}: {str(problem)[:300]}",
                        flush=True,
                    )
                seen += 1
        if "steps" in groups:
            for index, (step, _, options, _) in enumerate(step_candidates(bench, {})):
                if args.shard is None or index % args.shards == args.shard:
                    step.run(**options)
                    seen += 1
        print(f"compiled {seen} candidates in {time.perf_counter() - began:.0f} s", flush=True)
        return

    if args.shards:
        words = [sys.executable, __file__, *sys.argv[1:]]
        running = [subprocess.Popen([*words, "--shard", str(i)], stdout=subprocess.DEVNULL) for i in range(args.shards)]
        for process in running:
            process.wait()
        print(f"# compiled in {time.perf_counter() - began:.0f} s", flush=True)
    limits = base.ceilings()
    print("# ceilings: " + ", ".join(f"{name} {value / 1e12:.3f} T/s" for name, value in limits.items()), flush=True)
    rows: list[dict] = []
    steps: list[dict] = []
    timed: dict[tuple, list[tuple[float, object]]] = {}

    def save() -> None:
        if args.out:
            record = {
                "card": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
                "command": " ".join(sys.argv), "ceilings": limits, "ops": rows, "steps": steps, "seconds": time.perf_counter() - began,
            }  # fmt: skip
            Path(args.out).write_text(json.dumps(record, indent=1))

    def report(op: str) -> None:
        """Off, the two best, and the library, of one op."""
        of_op = [r for r in rows if r["op"] == op]
        good = sorted((r for r in of_op if not r["note"]), key=lambda r: r["us"])
        kept = good[:2] + [r for r in good[2:] if r["off"] or "torch" in r["candidate"] or r["group"] == "sampler"]
        for r in kept:
            error = "" if r["error"] is None else f"{r['error']:.1e}"
            print(
                f"{'off' if r['off'] else 'on ':3} {op:34} {r['candidate']:44} {r['us']:9.2f} us {r['gb_per_s']:6.0f} GB/s "
                f"{r['tflop_per_s']:6.1f} TF/s {r['fraction']:5.2f} {error}",
                flush=True,
            )
        for r in of_op:
            if r["note"]:
                print(f"!   {op} {r['candidate']}: {r['note']}", flush=True)

    last = None
    for candidate in candidates:
        result = asdict(base.measured(candidate.case, limits)) | {"off": candidate.off}
        if last is not None and last != result["op"]:
            report(last)
            save()
        last = result["op"]
        rows.append(result)
        if candidate.key and not result["note"]:
            timed.setdefault(candidate.key, []).append((result["us"], candidate.config))
    if last is not None:
        report(last)
    save()
    print(f"# {len(rows)} candidates by {time.perf_counter() - began:.0f} s", flush=True)
    candidates = None
    torch.cuda.empty_cache()
    if "steps" in groups:
        best = {key: [config for _, config in sorted(found, key=lambda pair: pair[0])] for key, found in timed.items()}
        truth = previous = None
        for step, candidate, options, off in step_candidates(bench, best):
            context = int(step.lengths[0])
            row = {
                "model": step.model.name + (" fp8" if step.fp8 else ""),
                "rows": step.rows,
                "context": context,
                "candidate": candidate,
            }
            row["off"] = off
            try:
                if step.rows <= 8:
                    if previous is not step:
                        truth, previous = step.truth(), step
                    step.run(**options)
                    row["error"] = difference(step.logits, truth)
                    row["same_token"] = bool((step.sampled.long() == step.logits.argmax(1)).all())
                row["ms"] = base.graph_us([lambda step=step, options=options: step.run(**options)], budget_ms=120) / 1e3
                row["floor_ms"] = step.floor_bytes() / limits["read"] * 1e3
                row["constants"] = {name: shown(c) for name, c in step.config.items()}
            except Exception as problem:
                row["note"] = f"{type(problem).__name__}: {str(problem)[:200]}"
            steps.append(row)
            save()
            short = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items() if k != "constants"}
            print("step", short, flush=True)
            previous = step if step.rows <= 8 else None
            del step
    print(f"# done in {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
