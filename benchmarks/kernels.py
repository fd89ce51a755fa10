"""Every Triton kernel on one GPU: checked against a plain reference, then timed against the ceilings of the same card in the same run.

    PYTHONPATH=src python benchmarks/kernels.py --out results.json                 everything (a Hopper card; under 9 minutes)
    PYTHONPATH=src python benchmarks/kernels.py --only skinny,decode               some groups
    PYTHONPATH=src python benchmarks/kernels.py --dry                              no GPU: compiles every candidate for sm_90, runs none

Open questions only, in minutes: benchmarks/kernel_rounds.py.

Knows: the bytes and operations an op cannot avoid, and candidates of each; attention's are in kernel_attention.py, whole decode steps in
kernel_steps.py, models' shapes in kernel_shapes.py. Refuses to know: how to compile, time and record (rounds.py, where `--shards n` and the
other options are told).
"""

# ruff: noqa: E731 - a candidate is a lambda that holds its buffers

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial

import rounds
import torch
import triton
from kernel_attention import chain_cases, decode_cases, prefill_cases
from kernel_shapes import MODELS, fp8_weight
from kernel_steps import StepRun, measure_steps, step_runs
from rounds import BF16, F32, FP8, Bench, Case, Round, copies, difference, tag

from tradewind.kernels.triton import elementwise, norm, rope, skinny, step
from tradewind.kernels.triton import sample as sampling
from tradewind.kernels.triton.tuning import GemvConfig, TileConfig

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


# ---------------------------------------------------------------------------------------------------------------- main


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
