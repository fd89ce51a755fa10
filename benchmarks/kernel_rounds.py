"""One round of open questions about the GPU kernels: what is tuned now ("off") against candidates ("on"), in minutes on one card.

    PYTHONPATH=src python benchmarks/kernel_rounds.py --shards 14 --out round.json     all groups (about 3 minutes on an H200)
    PYTHONPATH=src python benchmarks/kernel_rounds.py --only onerow,steps              some groups, each under 2 minutes
    PYTHONPATH=src python benchmarks/kernel_rounds.py --dry                            no GPU: compiles every candidate for sm_90

    fixed     the batch-invariant matmul against cuBLAS          rows      attention of one-token rows, bf16 and FP8 keys
    onerow    one input row, FP8 weights and norms                longrows  attention of long rows
    sampler   flat and peaked logits                             steps     whole decode steps, with the best constants found just before
    medium    128 and 256 input rows: tiles against cuBLAS and what must follow it
    few       8 to 64 input rows: tiles with more or fewer blocks under way

Knows: which candidates are open. Refuses to know: how to time and record (rounds.py). Everything else is measured by kernels.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import rounds
import torch
from kernel_attention import attention_truth
from kernel_shapes import MODELS, Shape, fp8_weight
from kernel_steps import DecodeStep, StepRun, constants
from kernels import run
from rounds import BF16, F32, FP8, Bench, Case, copies, tag, written

from tradewind.kernels.triton import decode, elementwise, library, prefill, skinny
from tradewind.kernels.triton import sample as sampling
from tradewind.kernels.triton.tuning import DEFAULT, DecodeConfig, GemvConfig, PrefillConfig, TileConfig, tuned

BY_NAME = {model.name: model for model in MODELS}
EIGHT = BY_NAME["llama-3.1-8b"]


# ------------------------------------------------------------------------------------------------------------- matmuls


def layer_matrices(model: Shape) -> list[tuple[str, int, int, bool]]:
    """(name, outputs, depth, gated) of a layer."""
    e, f, q = model.hidden, model.intermediate, model.heads * model.head_dim
    return [("qkv", model.qkv, e, False), ("o", e, q, False), ("gate_up", f, e, True), ("down", e, f, False)]


def weights_of(bench: Bench, rows: int, depth: int, *, fp8: bool, most: int = 64) -> list[tuple]:
    """Enough (weight, scale) pairs to defeat the L2."""
    count = copies(rows * depth * (1 if fp8 else 2), most=most)
    made = [bench.normal(rows, depth, scale=depth**-0.5) for _ in range(count)]
    return [fp8_weight(bench, w) if fp8 else (w, None) for w in made]


def inputs(bench: Bench, rows: int, depth: int, *, fp8: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(input, its scales)."""
    x = bench.normal(rows, depth)
    return fp8_weight(bench, x) if fp8 else (x, None)


def values(pair: tuple) -> torch.Tensor:
    """float32 of what is stored with or without scales by row."""
    return pair[0].float() if pair[1] is None else pair[0].float() * pair[1][:, None]


def product(x: torch.Tensor, pair: tuple, *, gated: bool) -> torch.Tensor:
    """The truth in float64 from the same stored weights."""
    y = x.double() @ values(pair).double().T
    half = len(pair[0]) // 2
    return torch.nn.functional.silu(y[:, :half]) * y[:, half:] if gated else y


def with_residual(call: Callable[..., object], like: torch.Tensor, truth: torch.Tensor) -> float:
    """The error where the call adds to what is there."""
    begin = torch.randn_like(like)
    return written(partial(call, residual=begin), like, truth + begin.double())


def fixed_cases(bench: Bench) -> Iterator[Case]:
    tiles = [
        skinny.FIXED, TileConfig(64, 64, 64, 1, 4, 4), TileConfig(64, 128, 64, 1, 4, 4), TileConfig(64, 128, 128, 1, 8, 3),
        TileConfig(32, 64, 128, 1, 4, 4),
    ]  # fmt: skip
    for name, features, depth, gated in layer_matrices(EIGHT):
        if name == "qkv":
            continue
        rows_w = features * (2 if gated else 1)
        pairs = weights_of(bench, rows_w, depth, fp8=False, most=8)
        for rows in (1, 32, 256, 4096):
            x, out = bench.normal(rows, depth), bench.empty(rows, features)
            truth = None if bench.dry or rows > 256 else product(x, pairs[0], gated=gated)
            amount, flops = rows_w * depth * 2.0, 2.0 * rows * rows_w * depth
            case = partial(Case, "fixed", f"fixed {name} M={rows}", bytes=amount, flops=flops)
            if not bench.dry:
                both = bench.empty(rows, rows_w)
                yield case("cublas, no epilogue", [partial(torch.mm, x, w.T, out=both) for w, _ in pairs], off=True)
            for tile in tiles:
                call = partial(skinny.fixed_linear, x, gated=gated, tile=tile, pdl=True)
                check = None if truth is None else partial(written, partial(call, pairs[0][0]), out, truth)
                yield case(tag(tile), [partial(call, w, out=out) for w, _ in pairs], error=check)


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


def library_whole(
    weight: torch.Tensor, scale: torch.Tensor | None, *, x: torch.Tensor, x_scale: torch.Tensor | None, out: torch.Tensor,
    both: torch.Tensor | None,
) -> None:  # fmt: skip
    """The library's matmul, and SwiGLU of it where gate and up are asked `both`."""
    target = out if both is None else both
    if x_scale is None:
        library.matmul(x, weight, out=target)
    else:
        library.scaled_matmul(x, x_scale, weight, scale, out=target)
    if both is not None:
        elementwise.gated_activation(both, out=out, activation="silu", pdl=True)


def medium_cases(bench: Bench) -> Iterator[Case]:
    for model, name, features, depth, gated, fp8 in medium_matrices():
        rows_w = features * (2 if gated else 1)
        pairs = weights_of(bench, rows_w, depth, fp8=fp8, most=24)
        for rows in (128, 256):
            x, x_scale = inputs(bench, rows, depth, fp8=fp8)
            out, both = bench.empty(rows, features), bench.empty(rows, rows_w) if gated else None
            truth = None if bench.dry else product(values((x, x_scale)), pairs[0], gated=gated)
            amount, flops = pairs[0][0].numel() * pairs[0][0].element_size(), 2.0 * rows * rows_w * depth
            case = partial(Case, "medium", f"{model} {name} M={rows}{' fp8' if fp8 else ''}", bytes=amount, flops=flops)
            if not bench.dry:
                whole = partial(library_whole, x=x, x_scale=x_scale, out=out, both=both)
                how = "cublas and activation" if gated else "cublas"
                yield case(how, [partial(whole, *pair) for pair in pairs], off=True)
            residual = None if gated or name == "qkv" else torch.zeros_like(out)
            for tile in medium_tiles(rows, features, gated=gated, fp8=fp8):
                call = partial(
                    skinny.fixed_linear, x, x_scale=x_scale, gated=gated, residual=residual, tile=tile, pdl=True
                )
                check = partial(written, partial(call, pairs[0][0], scale=pairs[0][1]), out, truth)
                yield case(tag(tile), [partial(call, w, scale=s, out=out) for w, s in pairs], error=check)


def few_tiles(now: TileConfig, depth: int, *, fp8: bool) -> list[TileConfig]:
    """Today's, and others with more blocks of weights under way."""
    shapes = [(64, 128, 4, 4), (64, 128, 4, 5), (64, 128, 4, 6), (64, 256, 4, 3), (128, 128, 4, 4)]
    if fp8:
        shapes = [
            (64, 128, 4, 6), (64, 128, 4, 8), (64, 256, 4, 4), (64, 256, 4, 5), (128, 128, 4, 4), (128, 128, 4, 6),
        ]  # fmt: skip
    found = [
        TileConfig(now.bm, bn, bk, split, warps, stages)
        for bn, bk, warps, stages in shapes
        for split in (1, 2, 4)
        if depth % (bk * split) == 0 and (now.bm + bn) * bk * stages * (1 if fp8 else 2) < 220 << 10
    ]
    return [now, *(tile for tile in found if tile != now)]


def few_cases(bench: Bench) -> Iterator[Case]:
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
                x, x_scale = inputs(bench, rows, depth, fp8=fp8)
                out = bench.empty(rows, features)
                truth = None if bench.dry else product(values((x, x_scale)), pairs[0], gated=gated)
                residual = None if gated or name == "qkv" else torch.zeros_like(out)
                op = f"{model.name} {name} M={rows}" + (" fp8" if fp8 else "")
                amount, flops = pairs[0][0].numel() * pairs[0][0].element_size(), 2.0 * rows * rows_w * depth
                for tile in few_tiles(now, depth, fp8=fp8):
                    need = skinny.workspace_floats(features, config=tile, gated=gated)
                    work, arrived = bench.empty(need, dtype=F32), bench.zeros(-(-rows_w // tile.bn))
                    call = partial(
                        skinny.skinny_linear, x, x_scale=x_scale, gated=gated, residual=residual, config=tile, workspace=work,
                        arrived=arrived, pdl=True,
                    )  # fmt: skip
                    calls = [partial(call, w, scale=s, out=out) for w, s in pairs]
                    check = partial(written, partial(call, pairs[0][0], scale=pairs[0][1]), out, truth)
                    yield Case("few", op, tag(tile), calls, bytes=amount, flops=flops, error=check, off=tile == now)


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


def onerow_cases(bench: Bench) -> Iterator[Case]:
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
        residual, judge = (out, with_residual) if gain is None else (None, written)
        amount = pairs[0][0].numel() * pairs[0][0].element_size()
        op, key = f"{model.name} {name}" + (" fp8" if fp8 else ""), ("onerow", model.name, fp8, name)
        now = tuned(DEFAULT).gemv(features, depth, fp8=fp8)
        for config in dict.fromkeys([now, *(onerow_configs(name) if fp8 else normed_configs(now))]):
            call = partial(skinny.skinny_linear, x, norm=gain, eps=1e-5, gated=gated, config=config, pdl=True)
            calls = [partial(call, w, scale=s, out=out, residual=residual) for w, s in pairs]
            check = partial(judge, partial(call, pairs[0][0], scale=pairs[0][1]), out, truth)
            yield Case(
                "onerow", op, tag(config), calls, bytes=amount, error=check, off=config == now, config=config, key=key
            )


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
            (1, 64, 4, 3), (1, 64, 4, 5), (1, 64, 4, 7), (1, 64, 8, 5), (1, 128, 8, 5), (1, 128, 4, 5), (1, 32, 2, 7), (1, 32, 4, 7),
        ]  # fmt: skip
    return [DecodeConfig(*shape) for shape in shapes]


def rows_cases(bench: Bench) -> Iterator[Case]:
    context, page = 1024, 64
    for model, batches in ((EIGHT, (1, 8, 32, 64, 256)), (BY_NAME["qwen3-0.6b"], (8, 32, 256))):
        for batch, kv in [(b, kv) for b in batches for kv in (BF16, FP8)]:
            if kv == FP8 and (batch not in (1, 32, 256) or model is not EIGHT):
                continue
            heads, groups, dim = model.heads, model.kv_heads, model.head_dim
            each = 2 * context * groups * dim * (1 if kv == FP8 else 2)
            count = copies(each * batch, most=32)
            table, total = bench.table(batch * count, context // page)
            tables = table.split(batch)
            k, v = (bench.normal(total, groups, page, dim, dtype=kv) for _ in range(2))
            q, out = bench.normal(batch, heads * dim), bench.empty(batch, heads * dim)
            lengths = bench.full(batch, context - 3)
            starts = torch.arange(batch + 1, dtype=torch.int32, device=bench.device)
            some = sorted({0, batch // 2, batch - 1})
            truth = None
            if not bench.dry:
                given = {"heads": heads, "scale": dim**-0.5, "rows": some}
                truth = torch.cat(attention_truth(q, k, v, starts, lengths, tables[0], **given))
            op = f"{model.name} B={batch} ctx={context}" + (" fp8 kv" if kv == FP8 else "")
            case = partial(Case, "rows", op, bytes=each * batch, key=("rows", model.name, batch, kv == FP8))
            now = tuned(DEFAULT).decode(batch, context)
            for config in dict.fromkeys([now, *rows_configs(batch, fp8=kv == FP8)]):
                need = decode.decode_workspace_floats(batch, heads=heads, head_dim=dim, splits=config.splits)
                call = partial(
                    decode.paged_decode, q, k, v, lengths=lengths, heads=heads, scale=dim**-0.5, config=config,
                    workspace=bench.empty(need, dtype=F32), arrived=bench.zeros(batch * groups), pdl=True,
                )  # fmt: skip
                calls = [partial(call, page_table=pages, out=out) for pages in tables]
                check = partial(written, partial(call, page_table=tables[0]), out, truth, some)
                yield case(tag(config), calls, error=check, off=config == now, config=config)


LONG = [
    PrefillConfig(128, 64, 8, 3, True, pairs=True), PrefillConfig(128, 64, 8, 2, True, pairs=True),
    PrefillConfig(64, 64, 4, 2, True, pairs=True), PrefillConfig(64, 64, 4, 3, True), PrefillConfig(64, 64, 4, 4, True),
    PrefillConfig(128, 64, 8, 3, True), PrefillConfig(128, 64, 8, 4, True), PrefillConfig(128, 64, 8, 3, True, registers=128),
    PrefillConfig(128, 64, 8, 2, True, registers=128), PrefillConfig(128, 32, 4, 4, True), PrefillConfig(128, 128, 8, 2),
]  # fmt: skip


def longrows_cases(bench: Bench) -> Iterator[Case]:
    small = BY_NAME["qwen3-0.6b"]
    for model, rows, new, context in ((EIGHT, 2, 4096, 4096), (small, 2, 4096, 4096), (EIGHT, 1, 2048, 8192)):
        heads, groups, dim = model.heads, model.kv_heads, model.head_dim
        table, total = bench.table(rows, context // 64)
        k, v = (bench.normal(total, groups, 64, dim) for _ in range(2))
        q = bench.normal(rows * new, heads * dim)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=bench.device) * new
        lengths = bench.full(rows, context)
        out = bench.empty(*q.shape)
        truth, last = None, slice(-256, None)
        if not bench.dry:
            tail, given = torch.tensor([0, 256], dtype=torch.int32), {"heads": heads, "scale": dim**-0.5, "rows": [0]}
            truth = attention_truth(q[last], k, v, tail, lengths[-1:], table[-1:], **given)[0]
        op = f"{model.name} {rows}x{new} of {context}"
        flops = 4.0 * rows * (new * (context - new) + new * (new + 1) / 2) * heads * dim
        now = tuned(DEFAULT).prefill(dim, 64)
        for config in dict.fromkeys([now, *LONG]):
            call = partial(
                prefill.paged_prefill, q, k, v, query_start=starts, lengths=lengths, page_table=table, heads=heads, scale=dim**-0.5,
                config=config, pdl=True,
            )  # fmt: skip
            check = partial(written, call, out, truth, last)
            calls = [partial(call, out=out)]
            yield Case("longrows", op, tag(config), calls, flops=flops, error=check, off=config == now)
        if new == context and not bench.dry:
            qc = q.view(rows, new, -1, dim).transpose(1, 2)
            kc, vc = (bench.normal(rows, heads, new, dim) for _ in range(2))
            sdpa = partial(torch.nn.functional.scaled_dot_product_attention, qc, kc, vc, is_causal=True)
            yield Case("longrows", op, "torch SDPA, contiguous", [sdpa], flops=flops)


# ------------------------------------------------------------------------------------------------------------- sampler


def sampler_cases(bench: Bench) -> Iterator[Case]:
    vocabulary = EIGHT.vocabulary
    for rows in (1, 64, 256):
        flat = bench.normal(rows, vocabulary, dtype=F32, scale=3.0)
        peaked = bench.normal(rows, vocabulary, dtype=F32, scale=2.0)
        if not bench.dry:  # as a language model answers: a bulk far below, and a few dozen tokens that matter
            peaked[:, : vocabulary // 400] += 10.0 * torch.rand(rows, vocabulary // 400, device=bench.device) ** 4
        work = sampling.SampleWorkspace.allocate(rows, vocabulary, device=bench.device, penalties=False)
        out = bench.zeros(rows)
        for form, logits in (("flat", flat), ("peaked", peaked)):
            for name, columns, filtered in (
                ("greedy", None, False), ("temperature", sampled(bench, rows), False), ("top-p 0.9", sampled(bench, rows, top_p=0.9), True),
                ("top-k 50 top-p 0.95", sampled(bench, rows, top_k=50, top_p=0.95), True),
            ):  # fmt: skip
                call = partial(sampling.sample, logits, columns, out=out, workspace=work, filtered=filtered, pdl=True)
                amount = rows * vocabulary * 4.0
                yield Case("sampler", f"{name} L={rows}", form, [call] * 4, bytes=amount, off=form == "flat")


def sampled(bench: Bench, rows: int, **values: float) -> sampling.DeviceColumns:
    """Every row alike."""
    every = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5, "position": 9} | values
    kind = {"top_k": torch.int32, "seed": torch.int64, "position": torch.int64}
    columns = {n: torch.full((rows,), v, dtype=kind.get(n, F32), device=bench.device) for n, v in every.items()}
    return sampling.DeviceColumns(**columns)


GROUPS: dict[str, Callable[[Bench], Iterator[Case]]] = {
    "few": few_cases,
    "fixed": fixed_cases,
    "longrows": longrows_cases,
    "medium": medium_cases,
    "onerow": onerow_cases,
    "rows": rows_cases,
    "sampler": sampler_cases,
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


def step_runs(bench: Bench, best: dict[tuple, list]) -> Iterator[StepRun]:
    """Whole decode steps with today's constants, then with the best of this run."""
    table = tuned(DEFAULT)
    most = DecodeConfig(32, 64, 4, 2)

    def built(model: Shape, rows: int, context: int, fp8: bool) -> tuple:
        config = constants(model, rows, fp8)
        step = DecodeStep(
            bench, model, rows=rows, context=context, path="fused", fp8=fp8, config=config | {"decode": most}
        )
        config["decode"] = table.decode(rows, context)
        step.config = config
        return step, config

    for context in (256, 1024):
        step, config = built(EIGHT, 1, context, True)
        yield StepRun(step, "tuned now", off=True)
        for name, matmuls in one_row_sets(best).items():
            step.config = config | matmuls
            yield StepRun(step, name)
        del step
    for model in (BY_NAME["qwen3-0.6b"], EIGHT):
        for context in (256, 1024):
            step, config = built(model, 1, context, False)
            yield StepRun(step, "tuned now", off=True)
            for splits, block_n, warps in (
                ((8, 32, 4), (8, 64, 4), (4, 64, 4))
                if context == 256
                else ((16, 64, 4), (16, 32, 4), (32, 32, 4), (8, 64, 4))
            ):
                step.config = config | {"decode": DecodeConfig(splits, block_n, warps, 2)}
                yield StepRun(step, tag(step.config["decode"]))
            step.config = config | {
                name: best[key][0]
                for name in ("qkv", "gate_up")
                if (key := ("onerow", model.name, False, name)) in best
            }
            yield StepRun(step, "best qkv and gate_up")
            del step
    for model, fp8, rows in (
        (EIGHT, False, 8), (EIGHT, False, 32), (EIGHT, True, 32), (BY_NAME["qwen3-0.6b"], False, 8), (BY_NAME["qwen3-0.6b"], False, 32),
    ):  # fmt: skip
        step, config = built(model, rows, 1024, fp8)
        options = {"fuse_rope": rows <= table.fuse_rope_rows}
        yield StepRun(step, "tuned now", options, off=True)
        ranked = best.get(("rows", model.name, rows, False)) or rows_configs(rows, fp8=False)
        for decoder in ranked[:3]:
            step.config = config | {"decode": decoder}
            yield StepRun(step, tag(decoder), options)
        del step


# ---------------------------------------------------------------------------------------------------------------- main


def main() -> int:
    plain = "fixed,onerow,rows,longrows,sampler,steps"
    args = rounds.parser(__doc__, groups=(*GROUPS, "steps"), default=plain).parse_args()
    return run(args, partial(rounds.of_groups, GROUPS, args.only), step_runs)


if __name__ == "__main__":
    sys.exit(main())
