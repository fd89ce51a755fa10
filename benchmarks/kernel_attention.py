"""Attention over pages, for kernels.py: what is right, and candidates of decode, of chained decode steps and of prompts.

Knows: bytes and operations that attention cannot avoid. Refuses to know: how to compile, time and record (rounds.py).
"""

# ruff: noqa: E731 - a candidate is a lambda that holds its buffers

from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_shapes import MODELS
from rounds import BF16, F32, FP8, Bench, Case, copies, difference, tag

from tradewind.kernels.triton import decode, prefill, rope, skinny
from tradewind.kernels.triton.tuning import DecodeConfig, GemvConfig, PrefillConfig


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
