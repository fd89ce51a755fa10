"""Every Triton kernel on one GPU: checked against a plain reference, then timed against the ceilings of the same card in the same run.

    PYTHONPATH=src python benchmarks/kernels.py --out results.json                 everything (a Hopper card; under 9 minutes)
    PYTHONPATH=src python benchmarks/kernels.py --only skinny,decode               some groups
    PYTHONPATH=src python benchmarks/kernels.py --dry                              no GPU: compiles every candidate for sm_90, runs none

Open questions only, in minutes: benchmarks/kernel_rounds.py.

Knows: shapes of three dense models, the bytes and operations an op cannot avoid, candidates of each op, and whole decode steps.
Refuses to know: how to compile, time and record (rounds.py, where `--shards n` and the other options are told).
"""

# ruff: noqa: E731 - a candidate is a lambda that holds its buffers

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import rounds
import torch
import triton
from rounds import BF16, F32, FP8, Bench, Case, Round, copies, difference, graph_us, tag
from rounds import ceilings as ceilings  # these are had from here too, by low_rank_rounds.py among others
from rounds import dry_driver as dry_driver
from rounds import measured as measured

from tradewind.kernels.triton import decode, elementwise, norm, prefill, rope, skinny, step
from tradewind.kernels.triton import sample as sampling
from tradewind.kernels.triton.tuning import DEFAULT, DecodeConfig, GemvConfig, PrefillConfig, TileConfig, tuned


@dataclass(frozen=True)
class Shape:
    """What a dense decoder looks like, from its config.json."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    head_norm: bool
    tied: bool

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def layer_weights(self) -> int:
        """Elements of one layer's matrices."""
        e, f, q = self.hidden, self.intermediate, self.heads * self.head_dim
        return e * self.qkv + q * e + 3 * e * f


MODELS = (
    Shape("qwen3-0.6b", 1024, 3072, 28, 16, 8, 128, 151936, True, True),
    Shape("llama-3.2-1b", 2048, 8192, 16, 32, 8, 64, 128256, False, True),
    Shape("llama-3.1-8b", 4096, 14336, 32, 32, 8, 128, 128256, False, False),
)
PEERS = {
    # W6 of the peers' table: ms per decode step at ~1k context by batch; W1: TPOT at batch 1 with 128..384 tokens.
    "llama-3.1-8b": {
        1: "vLLM 5.03 SGLang 4.79 (W1 4.97/4.78)",
        8: "5.25 / 5.15",
        32: "6.30 / 6.11",
        128: "10.39 / 10.33",
        256: "17.69 / 16.64",
    },
    "qwen3-0.6b": {1: "vLLM 2.15 (W1 2.15/1.68)", 8: "1.53", 32: "2.78", 128: "5.53", 256: "9.71"},
    "llama-3.1-8b fp8": {1: "vLLM 3.52 (W1 3.50)", 8: "3.76", 32: "5.28", 128: "8.59", 256: "15.13"},
}


# --------------------------------------------------------------------------------------------------------------- cases

GEMV = [
    GemvConfig(4, 1024, 4),
    GemvConfig(4, 2048, 8),
    GemvConfig(2, 1024, 2),
    GemvConfig(2, 2048, 4),
    GemvConfig(2, 4096, 8),
    GemvConfig(1, 2048, 2),
    GemvConfig(1, 4096, 4),
    GemvConfig(4, 512, 2),
    GemvConfig(8, 512, 4),
    GemvConfig(8, 1024, 8),
    GemvConfig(8, 512, 2),
    GemvConfig(16, 256, 4),
]
"""Candidates of one input row."""
TILES = {
    8: [
        TileConfig(16, 64, 128, 1, 4, 4),
        TileConfig(16, 64, 128, 4, 4, 4),
        TileConfig(8, 64, 128, 4, 4, 4),
        TileConfig(16, 64, 256, 4, 4, 3),
        TileConfig(16, 128, 128, 1, 4, 3),
        TileConfig(16, 64, 256, 1, 4, 3),
        TileConfig(16, 64, 128, 4, 4, 6),
    ],
    16: [TileConfig(16, 64, 128, 1, 4, 4), TileConfig(16, 64, 128, 4, 4, 4)],
    32: [TileConfig(32, 64, 128, 1, 4, 4), TileConfig(32, 64, 128, 4, 4, 4), TileConfig(32, 128, 128, 1, 4, 3)],
    64: [TileConfig(64, 64, 128, 1, 4, 3), TileConfig(64, 64, 128, 4, 4, 3), TileConfig(64, 128, 64, 1, 4, 4)],
}
"""Candidates by number of input rows."""


def fp8_weight(bench: Bench, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-channel e4m3 of a weight matrix [N, K]."""
    if bench.dry:
        return bench.empty(*weight.shape, dtype=FP8), bench.empty(len(weight), dtype=F32)
    scale = (weight.float().abs().amax(1) / 448).clamp(min=1e-12)
    return (weight.float() / scale[:, None]).clamp_(-448, 448).to(FP8), scale


def skinny_cases(bench: Bench) -> Iterator[Case]:
    for model in MODELS:
        e, f, q = model.hidden, model.intermediate, model.heads * model.head_dim
        ops = [
            ("qkv", model.qkv, e, {"norm": True}), ("o", e, q, {"residual": True}), ("gate_up", f, e, {"norm": True, "gated": True}),
            ("down", e, f, {"residual": True}), ("head", model.vocabulary, e, {"norm": True, "logits": True}),
        ]  # fmt: skip
        for fp8 in (False, True):
            if fp8 and model.name != "llama-3.1-8b":
                continue
            for op, features, depth, flags in ops:
                if fp8 and op == "head":
                    continue
                gated = flags.get("gated", False)
                rows_w = features * (2 if gated else 1)
                count = copies(rows_w * depth * (1 if fp8 else 2))
                weights = [bench.normal(rows_w, depth, scale=depth**-0.5) for _ in range(count)]
                scales: list[torch.Tensor | None] = [None] * count
                if fp8:
                    pairs = [fp8_weight(bench, w) for w in weights]
                    weights, scales = [p[0] for p in pairs], [p[1] for p in pairs]
                norm_weight = bench.normal(depth) if flags.get("norm") else None
                for rows, configs in ((1, GEMV), *TILES.items()):
                    # One row: the norm is folded in. More: the input comes normed, for FP8 weights also quantised.
                    normed = norm_weight if rows == 1 else None
                    x = bench.normal(rows, depth, dtype=F32 if normed is not None else BF16)
                    x_scale = None
                    if fp8 and rows > 1 and op in ("qkv", "gate_up"):
                        x, x_scale = fp8_weight(bench, x)
                    out = bench.normal(
                        rows, features, dtype=F32 if flags.get("residual") or flags.get("logits") else BF16
                    )
                    amount = weights[0].numel() * weights[0].element_size()
                    truth = None
                    if not bench.dry:
                        w0 = weights[0].float() if scales[0] is None else weights[0].float() * scales[0][:, None]
                        xs = x.float() if x_scale is None else x.float() * x_scale[:, None]
                        if normed is not None:
                            xs = xs * torch.rsqrt(xs.square().mean(1, keepdim=True) + 1e-5) * normed.float()
                        truth = xs.double() @ w0.double().T if w0.numel() < 3e8 else xs @ w0.T
                        if gated:
                            truth = torch.nn.functional.silu(truth[:, :features]) * truth[:, features:]
                        del w0
                    name = f"{model.name} {op} M={rows}" + (" fp8" if fp8 else "")
                    if rows > 1 and not bench.dry and fp8 and x_scale is not None:
                        ob = bench.empty(rows, rows_w)
                        calls = [
                            lambda w=w, s=s, x=x, xs=x_scale, ob=ob: torch._scaled_mm(
                                x, w.T, xs[:, None], s[None, :], out_dtype=BF16, use_fast_accum=True, out=ob
                            )
                            for w, s in zip(weights, scales, strict=True)
                        ]
                        yield Case("skinny", name, "cublas, no epilogue", calls, bytes=amount)
                    if rows > 1 and not fp8 and not bench.dry:
                        xb = x.to(BF16)
                        ob = bench.empty(rows, rows_w)
                        calls = [lambda w=w, xb=xb, ob=ob: torch.mm(xb, w.T, out=ob) for w in weights]
                        yield Case("skinny", name, "cublas, no epilogue", calls, bytes=amount)
                    for config in configs:
                        if isinstance(config, GemvConfig) and config.block_k > 2 * depth:
                            continue
                        if isinstance(config, TileConfig) and (
                            depth // config.bk < config.split or depth % (config.bk * config.split)
                        ):
                            continue
                        if op == "head" and isinstance(config, TileConfig) and config.split > 1:
                            continue
                        work = arrived = None
                        if isinstance(config, TileConfig) and config.split > 1:
                            work = bench.empty(skinny.workspace_floats(features, config=config, gated=gated), dtype=F32)
                            arrived = bench.zeros(triton.cdiv(features, config.bn // 2))

                        def call(
                            w,
                            s,
                            target,
                            residual,
                            config=config,
                            work=work,
                            arrived=arrived,
                            x=x,
                            x_scale=x_scale,
                            normed=normed,
                            gated=gated,
                            pdl=True,
                        ):
                            skinny.skinny_linear(
                                x,
                                w,
                                out=target,
                                scale=s,
                                x_scale=x_scale,
                                norm=normed,
                                eps=1e-5,
                                gated=gated,
                                residual=residual,
                                config=config,
                                workspace=work,
                                arrived=arrived,
                                pdl=pdl,
                            )

                        residual = out if flags.get("residual") else None

                        def error(call=call, w=weights[0], s=scales[0], truth=truth, residual=residual, out=out):
                            target = torch.full_like(out, float("nan"))
                            begin = None if residual is None else torch.randn_like(out)
                            call(w, s, target, begin)
                            return difference(target, truth if begin is None else truth + begin.double())

                        calls = [
                            lambda w=w, s=s, call=call, out=out, r=residual: call(w, s, out, r)
                            for w, s in zip(weights, scales, strict=True)
                        ]
                        yield Case(
                            "skinny",
                            name,
                            tag(config),
                            calls,
                            bytes=amount,
                            flops=2.0 * rows * weights[0].numel(),
                            error=error,
                        )


def attention_truth(q, k, v, starts, lengths, table, *, heads, scale, rows):
    """Plain float32 attention of a few rows: [n, H D] for each."""
    found = []
    kv_heads, page, dim = k.shape[1:]
    for row in rows:
        begin, end, length = int(starts[row]), int(starts[row + 1]), int(lengths[row])
        pages = table[row, : -(-length // page)].long()
        keys, values = (x[pages].float().transpose(1, 2).flatten(0, 1)[:length] for x in (k, v))
        query = q[begin:end].float().view(end - begin, kv_heads, -1, dim)
        score = torch.einsum("ngrd,lgd->grnl", query, keys) * scale
        position = torch.arange(length - (end - begin), length, device=q.device)
        seen = torch.arange(length, device=q.device)[None, :] <= position[:, None]
        weight = score.masked_fill(~seen, float("-inf")).softmax(-1)
        found.append(torch.einsum("grnl,lgd->ngrd", weight, values).reshape(end - begin, -1))
    return found


def decode_cases(bench: Bench) -> Iterator[Case]:
    for model in MODELS:
        for batch, context in ((1, 384), (1, 1024), (8, 1024), (32, 1024), (128, 1024), (256, 1024)):
            if model.name == "llama-3.2-1b" and batch > 32:
                continue
            for page, kv in ((64, BF16), (16, BF16), (64, FP8)):
                if ((page == 16 or kv == FP8) and batch not in (1, 256)) or (page, context) == (16, 384):
                    continue
                each = 2 * context * model.kv_heads * model.head_dim * (1 if kv == FP8 else 2)
                count = copies(each * batch, most=32)
                table, total = bench.table(batch * count, context // page)
                shape = (total, model.kv_heads, page, model.head_dim)
                k, v = bench.normal(*shape, dtype=kv), bench.normal(*shape, dtype=kv)
                q = bench.normal(batch, model.heads * model.head_dim)
                lengths = torch.full((batch,), context - 3, dtype=torch.int32, device=bench.device)
                starts = torch.arange(batch + 1, dtype=torch.int32, device=bench.device)
                out = bench.empty(batch, model.heads * model.head_dim)
                scale = model.head_dim**-0.5
                truth = None
                rows = sorted({0, batch // 2, batch - 1})
                if not bench.dry:
                    truth = torch.cat(
                        attention_truth(
                            q, k, v, starts, lengths, table[:batch], heads=model.heads, scale=scale, rows=rows
                        )
                    )
                splits = {1: (8, 16, 32), 8: (4, 8), 32: (1, 2, 4), 128: (1, 2), 256: (1,)}[batch]
                forms = [(64, 4, 2), (32, 2, 3), (128, 4, 2), (64, 4, 3), (128, 8, 3)]
                for split in splits:
                    for form in forms if batch > 8 else forms[:3]:
                        config = DecodeConfig(split, *form)
                        work = bench.empty(
                            decode.decode_workspace_floats(
                                batch, heads=model.heads, head_dim=model.head_dim, splits=split
                            ),
                            dtype=F32,
                        )
                        arrived = bench.zeros(batch * model.kv_heads)

                        def call(
                            i,
                            target=out,
                            config=config,
                            work=work,
                            arrived=arrived,
                            q=q,
                            k=k,
                            v=v,
                            lengths=lengths,
                            table=table,
                            scale=scale,
                            heads=model.heads,
                            batch=batch,
                        ):
                            decode.paged_decode(
                                q,
                                k,
                                v,
                                lengths=lengths,
                                page_table=table[i * batch : (i + 1) * batch],
                                heads=heads,
                                scale=scale,
                                out=target,
                                config=config,
                                workspace=work,
                                arrived=arrived,
                                pdl=True,
                            )

                        def error(call=call, out=out, truth=truth, rows=rows):
                            target = torch.full_like(out, float("nan"))
                            call(0, target)
                            return difference(target[rows], truth)

                        name = f"{model.name} B={batch} ctx={context} page={page}" + (" fp8 kv" if kv == FP8 else "")
                        calls = [lambda i=i, call=call: call(i) for i in range(count)]
                        yield Case("decode", name, tag(config), calls, bytes=each * batch, error=error, tolerance=1e-2)


def chain_cases(bench: Bench) -> Iterator[Case]:
    """One row: qkv matmul, then attention on its output, as in a layer; what attention adds to the matmul is its price in a step."""
    for model in MODELS:
        for context in (256, 1024):
            count = 28
            weight = [bench.normal(model.qkv, model.hidden, scale=model.hidden**-0.5) for _ in range(count)]
            table, total = bench.table(count, context // 64 + 4)
            shape = (total, model.kv_heads, 64, model.head_dim)
            k, v = bench.normal(*shape), bench.normal(*shape)
            x, gain = bench.normal(1, model.hidden, dtype=F32), bench.normal(model.hidden)
            qkv, q, out = (
                bench.empty(1, model.qkv),
                bench.empty(1, model.heads * model.head_dim),
                bench.empty(1, model.heads * model.head_dim),
            )
            lengths = torch.full((1,), context, dtype=torch.int32, device=bench.device)
            positions = lengths - 1
            angles = bench.angles(model.head_dim)
            weights = (bench.normal(model.head_dim), bench.normal(model.head_dim)) if model.head_norm else (None, None)
            gemv = GemvConfig(4, 2048, 8) if model.hidden > 2048 else GemvConfig(4, 1024, 4)

            def linear(i, late, weight=weight, x=x, gain=gain, qkv=qkv, gemv=gemv):
                skinny.skinny_linear(x, weight[i], out=qkv, norm=gain, eps=1e-5, config=gemv, pdl=True, late=late)

            bare = [lambda i=i, linear=linear: linear(i, False) for i in range(count)]
            name = f"{model.name} qkv + attention ctx={context}"
            yield Case("chain", name, "qkv alone", bare)
            for split, block_n, warps, stages in ((1, 128, 8, 2), (8, 32, 2, 2), (8, 64, 4, 2), (32, 32, 2, 2)):
                config = DecodeConfig(split, block_n, warps, stages)
                work = bench.empty(
                    decode.decode_workspace_floats(1, heads=model.heads, head_dim=model.head_dim, splits=split),
                    dtype=F32,
                )
                arrived = bench.zeros(model.kv_heads)

                def attend(
                    i,
                    mode,
                    config=config,
                    work=work,
                    arrived=arrived,
                    linear=linear,
                    k=k,
                    v=v,
                    table=table,
                    lengths=lengths,
                    positions=positions,
                    angles=angles,
                    weights=weights,
                    qkv=qkv,
                    q=q,
                    out=out,
                    model=model,
                ):
                    linear(i, mode == "early")
                    common = {
                        "lengths": lengths,
                        "page_table": table[i : i + 1],
                        "heads": model.heads,
                        "scale": 0.1,
                        "out": out,
                        "config": config,
                        "workspace": work,
                        "arrived": arrived,
                        "pdl": True,
                    }
                    if mode == "apart":
                        rope.rope_store(
                            qkv,
                            angles,
                            positions,
                            k,
                            v,
                            heads=model.heads,
                            q_weight=weights[0],
                            k_weight=weights[1],
                            eps=1e-6,
                            positions=positions,
                            out=q,
                            pdl=True,
                        )
                        decode.paged_decode(q, k, v, **common)
                    else:
                        decode.paged_decode(
                            qkv,
                            k,
                            v,
                            angles=angles,
                            q_weight=weights[0],
                            k_weight=weights[1],
                            eps=1e-6,
                            early=mode == "early",
                            **common,
                        )

                for mode in ("early", "fused") if split > 1 and block_n == 32 else ("early",):
                    yield Case(
                        "chain",
                        name,
                        f"{mode} {tag(config)}",
                        [lambda i=i, m=mode, attend=attend: attend(i, m) for i in range(count)],
                    )
            yield Case("chain", name, "apart", [lambda i=i, attend=attend: attend(i, "apart") for i in range(count)])


def prefill_cases(bench: Bench) -> Iterator[Case]:
    forms = [
        (128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 64, 4, 3, True), (128, 64, 8, 3, True), (128, 64, 4, 2, True),
    ]  # fmt: skip
    for model in MODELS:
        if model.name == "llama-3.2-1b":
            continue
        for rows, new, context in ((2, 4096, 4096), (1, 2048, 8192)):
            for page in (64, 16) if new == 4096 else (64,):
                table, total = bench.table(rows, context // page)
                shape = (total, model.kv_heads, page, model.head_dim)
                k, v, q = (
                    bench.normal(*shape),
                    bench.normal(*shape),
                    bench.normal(rows * new, model.heads * model.head_dim),
                )
                starts = torch.arange(rows + 1, dtype=torch.int32, device=bench.device) * new
                lengths = torch.full((rows,), context, dtype=torch.int32, device=bench.device)
                out = bench.empty(*q.shape)
                scale = model.head_dim**-0.5
                pairs = new * (context - new) + new * (new + 1) / 2
                flops = 4.0 * rows * pairs * model.heads * model.head_dim
                truth = None
                if not bench.dry:  # the last 256 tokens of the last row
                    tail = torch.tensor([0, 256], dtype=torch.int32)
                    truth = attention_truth(
                        q[-256:], k, v, tail, lengths[-1:], table[-1:], heads=model.heads, scale=scale, rows=[0]
                    )[0]
                for form in forms if page == 64 else forms[:3]:
                    config = PrefillConfig(*form)

                    def call(
                        target=out,
                        config=config,
                        q=q,
                        k=k,
                        v=v,
                        starts=starts,
                        lengths=lengths,
                        table=table,
                        heads=model.heads,
                        scale=scale,
                    ):
                        prefill.paged_prefill(
                            q,
                            k,
                            v,
                            query_start=starts,
                            lengths=lengths,
                            page_table=table,
                            heads=heads,
                            scale=scale,
                            out=target,
                            config=config,
                            pdl=True,
                        )

                    def error(call=call, out=out, truth=truth):
                        target = torch.full_like(out, float("nan"))
                        call(target)
                        assert target.isfinite().all()
                        return difference(target[-256:], truth)

                    yield Case(
                        "prefill",
                        f"{model.name} {rows}x{new} of {context} page={page}",
                        tag(config),
                        [call],
                        flops=flops,
                        error=error,
                    )
                if page == 64 and new == context and not bench.dry:
                    shapes = (rows, new, -1, model.head_dim)
                    qc = q.view(shapes).transpose(1, 2)
                    kc, vc = (
                        torch.randn(rows, model.heads, new, model.head_dim, device="cuda", dtype=BF16) for _ in range(2)
                    )
                    run = lambda qc=qc, kc=kc, vc=vc: torch.nn.functional.scaled_dot_product_attention(
                        qc, kc, vc, is_causal=True
                    )
                    yield Case(
                        "prefill",
                        f"{model.name} {rows}x{new} of {context} page={page}",
                        "torch SDPA, contiguous",
                        [run],
                        flops=flops,
                    )


def small_cases(bench: Bench) -> Iterator[Case]:
    for model in (MODELS[0], MODELS[2]):
        e, f, heads, kv_heads, dim = model.hidden, model.intermediate, model.heads, model.kv_heads, model.head_dim
        for tokens in (1, 8, 64, 256, 8192):
            each = tokens * e
            count = copies(each * 8, most=16)
            xs, ds = (
                [bench.normal(tokens, e, dtype=F32) for _ in range(count)],
                [bench.normal(tokens, e) for _ in range(count)],
            )
            weight, out = bench.normal(e), bench.empty(tokens, e)
            out8, scale8 = bench.empty(tokens, e, dtype=FP8), bench.empty(tokens, dtype=F32)

            def norm_error(x=xs[0], d=ds[0], weight=weight):
                x, out = x.clone(), torch.full_like(d, float("nan"))
                truth = x.double() + d.double()
                truth = truth * torch.rsqrt(truth.square().mean(1, keepdim=True) + 1e-5) * weight.double()
                norm.add_rms_norm(x, d, weight, eps=1e-5, out=out)
                return difference(out, truth)

            for warps in (None, 4, 16):
                calls = [
                    lambda x=x, d=d, w=weight, o=out, n=warps: norm.add_rms_norm(
                        x, d, w, eps=1e-5, out=o, pdl=True, warps=n
                    )
                    for x, d in zip(xs, ds, strict=True)
                ]
                yield Case(
                    "small",
                    f"{model.name} add_rms_norm T={tokens}",
                    f"warps {warps}",
                    calls,
                    bytes=each * 12,
                    error=norm_error,
                )
            calls = [
                lambda x=x, d=d, w=weight, o=out8, s=scale8: norm.add_rms_norm(
                    x, d, w, eps=1e-5, out=o, scale=s, pdl=True
                )
                for x, d in zip(xs, ds, strict=True)
            ]
            yield Case("small", f"{model.name} add_rms_norm fp8 T={tokens}", "", calls, bytes=each * 11)

            gs = [bench.normal(tokens, 2 * f) for _ in range(copies(tokens * f * 6, most=16))]
            so = bench.empty(tokens, f)

            def silu_error(g=gs[0], f=f):
                out = torch.full((len(g), f), float("nan"), device=g.device, dtype=BF16)
                elementwise.gated_activation(g, out=out)
                return difference(out, torch.nn.functional.silu(g[:, :f].double()) * g[:, f:].double())

            for block, warps in ((1024, 4), (2048, 4), (512, 2)):
                calls = [
                    lambda g=g, o=so, b=block, n=warps: elementwise.gated_activation(
                        g, out=o, pdl=True, block=b, warps=n
                    )
                    for g in gs
                ]
                yield Case(
                    "small",
                    f"{model.name} silu_mul T={tokens}",
                    f"block {block} warps {warps}",
                    calls,
                    bytes=tokens * f * 6,
                    error=silu_error,
                )

            qkvs = [bench.normal(tokens, model.qkv) for _ in range(copies(tokens * model.qkv * 4, most=16))]
            k, v = (bench.zeros(tokens // 64 + 2, kv_heads, 64, dim, dtype=BF16) for _ in range(2))
            slots = torch.arange(64, 64 + tokens, dtype=torch.int32, device=bench.device)
            weights = (bench.normal(dim), bench.normal(dim)) if model.head_norm else (None, None)
            table, qo = bench.angles(dim), bench.empty(tokens, heads * dim)
            for block, warps in ((8, 4), (8, 8), (4, 2), (2, 1), (1, 1)):
                calls = [
                    lambda x=x, k=k, v=v, s=slots, t=table, w=weights, o=qo, b=block, n=warps, h=heads: rope.rope_store(
                        x,
                        t,
                        s,
                        k,
                        v,
                        heads=h,
                        q_weight=w[0],
                        k_weight=w[1],
                        eps=1e-6,
                        positions=s,
                        out=o,
                        pdl=True,
                        heads_per_program=b,
                        warps=n,
                    )
                    for x in qkvs
                ]
                yield Case(
                    "small",
                    f"{model.name} rope_store T={tokens}",
                    f"heads {block} warps {warps}",
                    calls,
                    bytes=tokens * model.qkv * 4,
                )
        for rows in (1, 8, 64, 256):
            logits = bench.normal(rows, model.vocabulary, dtype=F32, scale=3.0)
            work = sampling.SampleWorkspace.allocate(rows, model.vocabulary, device=bench.device, penalties=True)
            out = bench.zeros(rows)
            device = bench.device

            def columns(device=device, rows=rows, **values):
                base = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5, "position": 9} | values
                kind = {"top_k": torch.int32, "seed": torch.int64, "position": torch.int64}
                return sampling.DeviceColumns(
                    **{n: torch.full((rows,), v, dtype=kind.get(n, F32), device=device) for n, v in base.items()}
                )

            for name, made, filtered in (
                ("greedy", None, False), ("temperature", columns(), False), ("top-p 0.9", columns(top_p=0.9), True),
                ("top-k 50 top-p 0.95", columns(top_k=50, top_p=0.95), True), ("top-k 50", columns(top_k=50), True),
            ):  # fmt: skip
                run = lambda x=logits, c=made, o=out, w=work, f=filtered: sampling.sample(
                    x, c, out=o, workspace=w, filtered=f, pdl=True
                )
                yield Case("sample", f"{model.name} {name} L={rows}", "", [run] * 4, bytes=rows * model.vocabulary * 4)
            lp = [
                bench.empty(rows, dtype=F32),
                bench.zeros(rows),
                bench.zeros(rows, 20),
                bench.empty(rows, 20, dtype=F32),
            ]
            blocks = triton.cdiv(model.vocabulary, sampling.BLOCK)
            wf, wi, arrived = (
                bench.empty(rows * blocks * 22, dtype=F32),
                bench.zeros(rows * blocks * 21),
                bench.zeros(rows),
            )
            run = lambda x=logits, t=out, lp=lp, wf=wf, wi=wi, a=arrived: sampling.logprobs(
                x,
                t,
                top=20,
                out_logprob=lp[0],
                out_rank=lp[1],
                out_ids=lp[2],
                out_top=lp[3],
                workspace=wf,
                workspace_ids=wi,
                arrived=a,
                pdl=True,
            )
            yield Case(
                "sample", f"{model.name} logprobs top 20 L={rows}", "", [run] * 4, bytes=rows * model.vocabulary * 4
            )
            table, tokens = bench.zeros(rows, 32), bench.zeros(rows, 2048)
            made = {
                n: bench.zeros(*s)
                for n, s in {
                    "ids": (rows,),
                    "positions": (rows,),
                    "query_start": (rows + 1,),
                    "lengths": (rows,),
                    "write_slots": (rows,),
                    "page_table": (rows, 32),
                    "total": (1,),
                }.items()
            }
            slot, start, one = (
                torch.arange(rows, dtype=torch.int32, device=device),
                bench.zeros(rows) + 1000,
                bench.zeros(rows) + 1,
            )
            live = bench.zeros(1) + rows
            run = lambda a=(slot, start, one, live, tokens, table), m=made: step.lay_out(
                *a, page_tokens=64, **m, pdl=True
            )
            yield Case("sample", f"{model.name} lay_out R={rows}", "", [run] * 4)


GROUPS = {
    "skinny": skinny_cases,
    "chain": chain_cases,
    "decode": decode_cases,
    "prefill": prefill_cases,
    "small": small_cases,
}


# ------------------------------------------------------------------------------------------------- a whole decode step


class DecodeStep:
    """The whole layer stack of a model for M rows at a context: what a graph of one decode step replays.

    path "fused": skinny kernels with norm, SiLU-mul and residual folded in (M <= 16). path "matmul": cuBLAS between own kernels.
    """

    def __init__(
        self, bench: Bench, model: Shape, *, rows: int, context: int, path: str, fp8: bool, config: dict, page: int = 64
    ) -> None:
        self.bench, self.model, self.rows, self.path, self.fp8, self.config, self.page = (
            bench,
            model,
            rows,
            path,
            fp8,
            config,
            page,
        )
        m, e, f = model, model.hidden, model.intermediate
        q = m.heads * m.head_dim
        self.early = True
        self.layers = []
        depth = 1 if bench.dry else m.layers
        for _ in range(depth):
            layer = {
                "qkv": bench.normal(m.qkv, e, scale=e**-0.5), "o": bench.normal(e, q, scale=0.2 * q**-0.5),
                "gate_up": bench.normal(2 * f, e, scale=e**-0.5), "down": bench.normal(e, f, scale=0.5 * f**-0.5),
            }  # fmt: skip
            layer = {name: fp8_weight(bench, w) if fp8 else (w, None) for name, w in layer.items()}
            layer["norms"] = (bench.normal(e, scale=0.1) + 1, bench.normal(e, scale=0.1) + 1)
            layer["head_norms"] = (
                (bench.normal(m.head_dim, scale=0.1) + 1, bench.normal(m.head_dim, scale=0.1) + 1)
                if m.head_norm
                else (None, None)
            )
            self.layers.append(layer)
        self.embedding = bench.normal(m.vocabulary, e)
        self.head = self.embedding if m.tied else bench.normal(m.vocabulary, e, scale=e**-0.5)
        self.final_norm = bench.normal(e, scale=0.1) + 1
        self.angles = bench.angles(m.head_dim)
        self.table, pages = bench.table(rows, context // page + 4)
        shape = (pages, m.kv_heads, page, m.head_dim)
        self.k, self.v = ([bench.normal(*shape) for _ in range(depth)] for _ in range(2))
        at = lambda value: torch.full((rows,), value, dtype=torch.int32, device=bench.device)
        self.ids, self.lengths, self.positions = at(17), at(context), at(context - 1)
        self.slots = (self.table[:, (context - 1) // page] * page + (context - 1) % page).int().contiguous()
        self.x = bench.empty(rows, e, dtype=F32)
        self.qkv, self.q, self.attended = bench.empty(rows, m.qkv), bench.empty(rows, q), bench.empty(rows, q)
        self.normed, self.delta = bench.empty(rows, e), bench.empty(rows, e)
        self.both, self.inner = bench.empty(rows, 2 * f), bench.empty(rows, f)
        if fp8:
            self.normed8, self.inner8, self.attended8 = (bench.empty(rows, n, dtype=FP8) for n in (e, f, q))
            self.token_scale = bench.empty(rows, dtype=F32)
        self.logits = bench.empty(rows, m.vocabulary, dtype=F32)
        self.work = sampling.SampleWorkspace.allocate(rows, m.vocabulary, device=bench.device, penalties=False)
        self.sampled = bench.zeros(rows)
        splits = config["decode"].splits
        self.part = bench.empty(
            decode.decode_workspace_floats(rows, heads=m.heads, head_dim=m.head_dim, splits=splits), dtype=F32
        )
        self.arrived = bench.zeros(rows * m.kv_heads)
        need = max(
            skinny.workspace_floats(n, config=TileConfig(64 if rows > 16 else 16, 64, 128, 4, 4, 4), gated=True)
            for n in (m.qkv, e, f)
        )
        self.tile_work, self.tile_arrived = bench.empty(need, dtype=F32), bench.zeros(max(m.qkv, e, f) // 8)

    def run(self, *, pdl: bool = True, fuse_rope: bool = True) -> None:
        """One decode step, tokens in self.ids to tokens in self.sampled."""
        elementwise.embed(self.ids, self.embedding, out=self.x, pdl=pdl)
        (self._fused if self.path == "fused" else self._matmul)(pdl, fuse_rope)
        sampling.sample(self.logits, None, out=self.sampled, workspace=self.work, pdl=pdl)

    def _attention(self, layer, index: int, pdl: bool, fuse_rope: bool) -> None:
        m = self.model
        q_norm, k_norm = layer["head_norms"]
        common = {
            "lengths": self.lengths, "page_table": self.table, "heads": m.heads, "scale": m.head_dim**-0.5, "out": self.attended,
            "config": self.config["decode"], "workspace": self.part, "arrived": self.arrived, "pdl": pdl,
        }  # fmt: skip
        k, v = self.k[index], self.v[index]
        if fuse_rope:
            early = pdl and self.path == "fused" and self.early
            decode.paged_decode(
                self.qkv, k, v, angles=self.angles, q_weight=q_norm, k_weight=k_norm, eps=1e-6, early=early, **common
            )
            return
        rope.rope_store(
            self.qkv, self.angles, self.slots, k, v, heads=m.heads, q_weight=q_norm, k_weight=k_norm, eps=1e-6, positions=self.positions,
            out=self.q, pdl=pdl,
        )  # fmt: skip
        decode.paged_decode(self.q, k, v, **common)

    def _quantised(self, x, pdl: bool) -> tuple:
        """Input and options of a tile matmul with FP8 weights."""
        if not self.fp8 or self.rows == 1:
            return x, {}
        small = self.attended8 if x is self.attended else self.inner8
        norm.quantise_tokens(x, out=small, scale=self.token_scale, pdl=pdl)
        return small, {"x_scale": self.token_scale}

    def _fused(self, pdl: bool, fuse_rope: bool) -> None:
        def linear(name, x, weight, out, **more):
            skinny.skinny_linear(
                x, weight[0], scale=weight[1], out=out, eps=1e-5, config=self.config[name], workspace=self.tile_work,
                arrived=self.tile_arrived, pdl=pdl, **more,
            )  # fmt: skip

        def normed(name, gain, *, quantise):
            """Input and options of a matmul behind a norm: a GEMV folds the norm in, tiles have it apart."""
            if isinstance(self.config[name], GemvConfig):
                return self.x, {"norm": gain}
            if quantise:
                norm.add_rms_norm(self.x, None, gain, eps=1e-5, out=self.normed8, scale=self.token_scale, pdl=pdl)
                return self.normed8, {"x_scale": self.token_scale}
            norm.add_rms_norm(self.x, None, gain, eps=1e-5, out=self.normed, pdl=pdl)
            return self.normed, {}

        for index, layer in enumerate(self.layers):
            x, more = normed("qkv", layer["norms"][0], quantise=self.fp8)
            linear("qkv", x, layer["qkv"], self.qkv, late=self.early, **more)
            self._attention(layer, index, pdl, fuse_rope)
            x, more = self._quantised(self.attended, pdl)
            linear("o", x, layer["o"], self.x, residual=self.x, **more)
            x, more = normed("gate_up", layer["norms"][1], quantise=self.fp8)
            linear("gate_up", x, layer["gate_up"], self.inner, gated=True, **more)
            x, more = self._quantised(self.inner, pdl)
            linear("down", x, layer["down"], self.x, residual=self.x, **more)
        x, more = normed("head", self.final_norm, quantise=False)
        linear("head", x, (self.head, None), self.logits, **more)

    def _matmul(self, pdl: bool, fuse_rope: bool) -> None:
        if self.bench.dry:
            mm = lambda *args: None
        elif self.fp8:
            mm = lambda x, scale, w, out: torch._scaled_mm(
                x, w[0].T, scale[:, None], w[1][None, :], out_dtype=BF16, use_fast_accum=True, out=out
            )
        else:
            mm = lambda x, scale, w, out: torch.mm(x, w[0].T, out=out)
        delta = None
        scale = self.token_scale if self.fp8 else None
        normed, inner = (self.normed8, self.inner8) if self.fp8 else (self.normed, self.inner)
        for index, layer in enumerate(self.layers):
            norm.add_rms_norm(self.x, delta, layer["norms"][0], eps=1e-5, out=normed, scale=scale, pdl=pdl)
            mm(normed, scale, layer["qkv"], self.qkv)
            self._attention(layer, index, pdl, fuse_rope)
            attended = self.attended
            if self.fp8:
                norm.quantise_tokens(attended, out=self.attended8, scale=scale, pdl=pdl)
                attended = self.attended8
            mm(attended, scale, layer["o"], self.delta)
            norm.add_rms_norm(self.x, self.delta, layer["norms"][1], eps=1e-5, out=normed, scale=scale, pdl=pdl)
            mm(normed, scale, layer["gate_up"], self.both)
            elementwise.gated_activation(self.both, out=inner, scale=scale, pdl=pdl)
            mm(inner, scale, layer["down"], self.delta)
            delta = self.delta
        norm.add_rms_norm(self.x, delta, self.final_norm, eps=1e-5, out=self.normed, pdl=pdl)
        if not self.bench.dry:
            torch.mm(self.normed, self.head.T, out_dtype=F32, out=self.logits)  # bf16 logits would tie

    def truth(self) -> torch.Tensor:
        """Logits by plain torch in float32, from the same weights and pages (call it before `run` writes the new keys, or after: equal)."""
        m = self.model
        x = self.embedding[self.ids.long()].float()
        rms = lambda x, w, eps: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w.float()
        plain = lambda w: w[0].float() if w[1] is None else w[0].float() * w[1][:, None]
        length = int(self.lengths[0])
        cos, sin = self.angles[length - 1].chunk(2)
        turn = lambda x: torch.cat(
            [x[..., : len(cos)] * cos - x[..., len(cos) :] * sin, x[..., len(cos) :] * cos + x[..., : len(cos)] * sin],
            -1,
        )
        for index, layer in enumerate(self.layers):
            qkv = (rms(x, layer["norms"][0], 1e-5) @ plain(layer["qkv"]).T).view(self.rows, -1, m.head_dim)
            q, k, v = qkv.split([m.heads, m.kv_heads, m.kv_heads], 1)
            if m.head_norm:
                q, k = rms(q, layer["head_norms"][0], 1e-6), rms(k, layer["head_norms"][1], 1e-6)
            q, k = turn(q), turn(k)
            attended = []
            for row in range(self.rows):
                pages = self.table[row, : -(-length // self.page)].long()
                keys, values = (
                    y[index][pages].float().transpose(1, 2).flatten(0, 1)[:length].clone() for y in (self.k, self.v)
                )
                keys[-1], values[-1] = k[row], v[row]
                score = torch.einsum("grd,lgd->grl", q[row].view(m.kv_heads, -1, m.head_dim), keys) * m.head_dim**-0.5
                attended.append(torch.einsum("grl,lgd->grd", score.softmax(-1), values).flatten())
            x = x + torch.stack(attended) @ plain(layer["o"]).T
            gate, up = (rms(x, layer["norms"][1], 1e-5) @ plain(layer["gate_up"]).T).chunk(2, -1)
            x = x + (torch.nn.functional.silu(gate) * up) @ plain(layer["down"]).T
        return rms(x, self.final_norm, 1e-5) @ self.head.float().T

    def floor_bytes(self) -> float:
        """Weights and keys read once."""
        m = self.model
        weights = m.layers * m.layer_weights * (1 if self.fp8 else 2) + m.vocabulary * m.hidden * 2
        return (
            weights
            + self.rows * int(self.lengths[0]) * m.layers * 2 * m.kv_heads * m.head_dim * self.k[0].element_size()
        )


def matrices(model: Shape) -> dict[str, tuple[int, int, int]]:
    """(outputs, weight rows, depth) of each matmul of a layer and of the head."""
    e, f, q = model.hidden, model.intermediate, model.heads * model.head_dim
    return {
        "qkv": (model.qkv, model.qkv, e),
        "o": (e, e, q),
        "gate_up": (f, 2 * f, e),
        "down": (e, e, f),
        "head": (model.vocabulary, model.vocabulary, e),
    }


def constants(model: Shape, rows: int, fp8: bool) -> dict:
    """The tuned constants of every matmul of a step; {} where none of ours is used."""
    table = tuned(DEFAULT)
    found = {}
    for name, (outputs, weight_rows, depth) in matrices(model).items():
        small = fp8 and name != "head"
        found[name] = (
            table.gemv(outputs, depth, fp8=small) if rows == 1 else table.tile(rows, weight_rows, depth, fp8=small)
        )
    return {name: config for name, config in found.items() if config is not None}


@dataclass(frozen=True)
class StepRun:
    """A whole step as it stands now: the step's constants may change after it was run."""

    step: DecodeStep
    candidate: str
    options: dict = field(default_factory=dict)
    """Of `DecodeStep.run`."""
    off: bool = False

    @property
    def model(self) -> str:
        return self.step.model.name + (" fp8" if self.step.fp8 else "")


def step_runs(bench: Bench, *, models: list[str], quick: bool, batches: set[int]) -> Iterator[StepRun]:
    """Whole steps."""
    table = tuned(DEFAULT)
    for model in MODELS:
        if model.name not in models:
            continue
        for fp8 in (False, True) if model.name == "llama-3.1-8b" else (False,):
            for context in (256, 1024) if 1 in batches else ():
                best = constants(model, 1, fp8)
                forms = {"tuned": table.decode(1, context)}
                if not quick:
                    forms |= {
                        tag(c): c for c in (DecodeConfig(8, 64, 4, 2), DecodeConfig(4, 64, 4, 2)) if context == 256
                    }
                    forms |= {tag(c): c for c in (DecodeConfig(16, 64, 4, 2),) if context == 1024}
                most = DecodeConfig(32, 64, 4, 2)
                made = DecodeStep(
                    bench, model, rows=1, context=context, path="fused", fp8=fp8, config=best | {"decode": most}
                )
                for name, form in forms.items():
                    made.config = best | {"decode": form}
                    yield StepRun(made, f"fused, {name}")
                made.config = best | {"decode": forms["tuned"]}
                if fp8:  # tiles multiply FP8 by FP8 without converting weights, but want the input quantised
                    made.config |= {"gate_up": TileConfig(16, 128, 128, 1, 4, 3)}
                    yield StepRun(made, "fused, gate_up by tiles")
                    made.config |= {"qkv": TileConfig(16, 64, 256, 4, 4, 3)}
                    yield StepRun(made, "fused, qkv and gate_up by tiles")
                    made.config = best | {"decode": forms["tuned"]}
                made.early = False
                yield StepRun(made, "fused, tuned, keys not early")
                made.early = True
                yield StepRun(made, "fused, tuned, rope apart", {"fuse_rope": False})
                yield StepRun(made, "fused, tuned, no dependent launch", {"pdl": False})
                del made
            for rows in (8, 32, 64, 128, 256):
                if rows not in batches:
                    continue
                config = constants(model, rows, fp8) | {"decode": table.decode(rows, 1024)}
                made = DecodeStep(bench, model, rows=rows, context=1024, path="matmul", fp8=fp8, config=config)
                if not quick:
                    yield StepRun(made, "matmul, rope in attention")
                yield StepRun(made, "matmul, rope apart", {"fuse_rope": False})
                if rows <= 64:
                    made.path = "fused"
                    yield StepRun(made, "tiles, rope in attention")
                    yield StepRun(made, "tiles, rope apart", {"fuse_rope": False})
                del made


# ---------------------------------------------------------------------------------------------------------------- main


def measure_steps(runs: Iterable[StepRun], on: Round) -> None:
    """Checks small steps against plain torch and times all; printed, and recorded beside the ops."""
    steps: list[dict] = []
    truth = previous = None
    for each in runs:
        step = each.step
        row = {"model": each.model, "rows": step.rows, "context": int(step.lengths[0]), "candidate": each.candidate}
        row["off"] = each.off
        try:
            if step.rows <= 8:
                if previous is not step:
                    truth, previous = step.truth(), step
                step.run(**each.options)
                row["error"] = difference(step.logits, truth)
                row["same_token"] = bool((step.sampled.long() == step.logits.argmax(1)).all())
            row["ms"] = graph_us([partial(step.run, **each.options)], budget_ms=120) / 1e3
            row["floor_ms"] = step.floor_bytes() / on.limits["read"] * 1e3
            row["peers"] = PEERS.get(each.model, {}).get(step.rows, "")
            row["constants"] = {
                name: tag(c).replace("True", "T").replace("False", "F") for name, c in step.config.items()
            }
        except Exception as problem:
            row["note"] = rounds.told(problem)
        steps.append(row)
        on.save(steps=steps)
        short = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items() if k != "constants"}
        print("step", short, flush=True)
        previous = step if step.rows <= 8 else None  # a large step that is kept leaves less room for the next
        del each, step
        torch.cuda.empty_cache()
    on.save(steps=steps)


def run(
    args: argparse.Namespace,
    cases: Callable[[Bench], Iterator[Case]],
    steps: Callable[[Bench, dict[tuple, list]], Iterator[StepRun]],
) -> int:
    """Compiles or measures the cases, then the group "steps", which may choose among the best constants of the cases."""
    bench, asked = rounds.bench_for(args), "steps" in args.only
    if bench.dry:
        compiled = (
            Case("steps", each.model, each.candidate, [partial(each.step.run, **each.options)])
            for each in (steps(bench, {}) if asked else ())
        )
        every = itertools.chain(cases(bench), compiled)
        return min(1, rounds.compile_all(every, shard=args.shard, shards=args.shards))
    on = Round.begin(args)
    on.measure(cases(bench))
    rounds.settle(bench)
    measure_steps(steps(bench, on.best()) if asked else (), on)
    print(f"# done in {on.spent():.0f} s", flush=True)
    return 0


def main() -> int:
    parser = rounds.parser(__doc__, groups=(*GROUPS, "steps"))
    parser.add_argument("--models", default=",".join(m.name for m in MODELS))
    parser.add_argument("--batches", default="1,8,32,64,128,256", help="rows of the whole steps")
    parser.add_argument("--match", default="", help="only ops whose name contains this")
    parser.add_argument("--quick", action="store_true", help="one set of constants per whole step")
    args = parser.parse_args()
    models, batches = args.models.split(","), {int(n) for n in args.batches.split(",")}

    def cases(bench: Bench) -> Iterator[Case]:
        for case in rounds.of_groups(GROUPS, args.only, bench):
            if args.match in case.op and any(name in case.op for name in models):
                yield case

    def steps(bench: Bench, best: dict[tuple, list]) -> Iterator[StepRun]:
        return step_runs(bench, models=models, quick=args.quick, batches=batches)

    return run(args, cases, steps)


if __name__ == "__main__":
    sys.exit(main())
