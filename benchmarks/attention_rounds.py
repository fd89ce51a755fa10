"""Ways of attention in steps of mixed work, each "off" and "on", with the error of on against off.

    PYTHONPATH=src python benchmarks/attention_rounds.py --shards 14 --out attention-rounds.json     everything (under 2 minutes on an H200)
    PYTHONPATH=src python benchmarks/attention_rounds.py --only shared                               one group
    PYTHONPATH=src python benchmarks/attention_rounds.py --dry                                       no GPU: compiles all for sm_90

    shared    decoding rows with 2,048 keys in common: each for itself, or one pass for all (kernels/triton/shared.py); nothing in common
    fresh     a step with one prompt that goes on, prompts that begin and decoding rows: the paged kernel, or FlashAttention 3 for a part
    grids     the decoding rows of a step with prompts: grids for 16, 64 or 512 rows where 16 or 40 are live
    lengths   many decoding rows of 192 to 1,280 keys: the constants of the kernel

In a whole engine: benchmarks/gpu_suite.py --workloads W4,W5, and the same with --way shared_prefix=null --way partly_fresh=null
--way mixed_rows=[].
Knows: which candidates are open. Refuses to know: how to time (benchmarks/kernels.py).
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kernels as base
import torch
import triton
from kernel_rounds import BY_NAME, EIGHT, Candidate
from kernels import BF16, F32, FP8, Bench, Case, Shape, difference, tag

from tradewind.kernels.triton import decode, library, prefill, shared
from tradewind.kernels.triton.tuning import DEFAULT, DecodeConfig, PrefillConfig, tuned

PAGE = 64
LONG = 16384
"""The engine's longest context: what steps with prompts are planned for."""
COPIES = 3
"""Of pages: what one call leaves in the L2 is gone when its pages come again."""


class Rows:
    """One-token rows with keys in common, `COPIES` times over: queries, pages, tables."""

    def __init__(self, bench: Bench, model: Shape, *, rows: int, common: int, own: int, kv: torch.dtype) -> None:
        self.model, self.rows, self.common, self.own = model, rows, common, own
        self.bench, dim = bench, model.head_dim
        pages_common, pages_own = common // PAGE, -(-own // PAGE)
        width = -(-(pages_common + pages_own) // 4) * 4
        each = pages_common + rows * pages_own
        self.tables = bench.zeros(COPIES, rows, width)
        if not bench.dry:
            order = (torch.randperm(COPIES * each, device=bench.device) + 1).int().view(COPIES, each)
            self.tables[:, :, :pages_common] = order[:, None, :pages_common]
            self.tables[:, :, pages_common : pages_common + pages_own] = order[:, pages_common:].view(
                COPIES, rows, pages_own
            )
        shape = (COPIES * each + 1, model.kv_heads, PAGE, dim)
        self.k, self.v = (bench.normal(*shape, dtype=kv) for _ in range(2))
        self.q, self.out = bench.normal(rows, model.heads * dim), bench.empty(rows, model.heads * dim)
        lengths = common + torch.arange(rows) % own + 1  # rows have different numbers of keys of their own
        self.lengths = lengths.to(torch.int32).to(bench.device)
        self.starts = torch.arange(rows + 1, dtype=torch.int32, device=bench.device)
        self.live = torch.full((1,), rows, dtype=torch.int32, device=bench.device)
        self.found = torch.tensor([common, 0, 0, 0], dtype=torch.int32, device=bench.device)
        self.token_bytes = 2 * model.kv_heads * dim * (1 if kv == FP8 else 2)
        self.bytes_off = float(lengths.sum()) * self.token_bytes
        self.bytes_on = self.bytes_off - (rows - 1) * common * self.token_bytes

    def keys(self, splits: int, block_n: int) -> decode.SharedKeys:
        m = self.model
        need = shared.shared_parts_floats(self.rows, heads=m.heads, head_dim=m.head_dim, splits=splits)
        return decode.SharedKeys(
            found=self.found, parts=self.bench.empty(need, dtype=F32), splits=splits, block_n=block_n
        )

    def first(self, copy: int, keys: decode.SharedKeys, tile: PrefillConfig) -> None:
        """The pass over shared keys."""
        shared.shared_attention(
            self.q, self.k, self.v, keys=keys, page_table=self.tables[copy], rows=self.live, heads=self.model.heads,
            scale=self.model.head_dim**-0.5, config=tile, pdl=True,
        )  # fmt: skip

    def rest(
        self, copy: int, keys: decode.SharedKeys | None, form: DecodeConfig, out: torch.Tensor, scratch: dict[str, Any]
    ) -> None:
        """The ordinary kernel, behind shared keys or over all."""
        decode.paged_decode(
            self.q, self.k, self.v, lengths=self.lengths, page_table=self.tables[copy], heads=self.model.heads,
            scale=self.model.head_dim**-0.5, out=out, rows=self.live, config=form, pdl=True, shared=keys, **scratch,
        )  # fmt: skip

    def scratch(self, form: DecodeConfig) -> dict[str, Any]:
        m = self.model
        need = decode.decode_workspace_floats(self.rows, heads=m.heads, head_dim=m.head_dim, splits=form.splits)
        return {"workspace": self.bench.empty(need, dtype=F32), "arrived": self.bench.zeros(self.rows * m.kv_heads)}


def shared_tiles(now: PrefillConfig) -> list[PrefillConfig]:
    return [
        now, replace(now, registers=0), replace(now, stages=3), PrefillConfig(64, 64, 4, 3, True), PrefillConfig(64, 64, 4, 2, True),
    ]  # fmt: skip


REST = [
    DecodeConfig(1, 64, 4, 3),
    DecodeConfig(1, 64, 4, 2),
    DecodeConfig(1, 32, 2, 3),
    DecodeConfig(2, 64, 4, 3),
    DecodeConfig(1, 128, 8, 3),
]


def shared_candidates(bench: Bench) -> Iterator[Candidate]:
    table = tuned(DEFAULT)
    small = BY_NAME["qwen3-0.6b"]
    for model, rows, common, own, kv in (
        (EIGHT, 128, 2048, 256, BF16), (EIGHT, 128, 2048, 256, FP8), (EIGHT, 32, 2048, 256, BF16), (EIGHT, 256, 2048, 256, BF16),
        (EIGHT, 128, 512, 512, BF16), (small, 128, 2048, 256, BF16), (EIGHT, 128, 0, 1024, BF16), (small, 128, 0, 1024, BF16),
    ):  # fmt: skip
        made = Rows(bench, model, rows=rows, common=common, own=own, kv=kv)
        op = f"{model.name} B={rows} {common}+{own}" + (" fp8 kv" if kv == FP8 else "")
        packed = model.heads // model.kv_heads
        form = table.decode(rows, 4096, packed=packed, fp8=kv == FP8)
        scratch = made.scratch(form)
        calls = [
            lambda i=i, made=made, form=form, s=scratch: made.rest(i, None, form, made.out, s) for i in range(COPIES)
        ]
        yield Candidate(Case("shared", op, f"off: {tag(form)}", calls, bytes=made.bytes_off), off=True)
        wanted = None
        if not bench.dry:
            wanted = torch.empty_like(made.out)
            made.rest(0, None, form, wanted, scratch)
        now = table.shared_pass(model.head_dim, PAGE)
        if kv == FP8:
            now = replace(now, registers=0)  # as the planner does

        def both(tile, splits, form, made=made, op=op, wanted=wanted, part="both"):
            keys, scratch = made.keys(splits, tile.block_n), made.scratch(form)

            def call(i, out):
                if part != "rest":
                    made.first(i, keys, tile)
                if part != "first":
                    made.rest(i, keys, form, out, scratch)

            def error():
                out = torch.full_like(made.out, float("nan"))
                made.first(0, keys, tile)
                made.rest(0, keys, form, out, scratch)
                return difference(out, wanted)

            calls = [lambda i=i: call(i, made.out) for i in range(COPIES)]
            name = {"both": "on: ", "first": "on, the pass: ", "rest": "on, behind it: "}[part]
            name += (
                f"{tag(tile)} / {splits} splits"
                if part == "first"
                else f"{tag(form)}"
                if part == "rest"
                else f"{tag(tile)} / {splits} / {tag(form)}"
            )
            return Candidate(Case("shared", op, name, calls, bytes=made.bytes_on, error=error))

        tiles = model.kv_heads * -(-rows * packed // now.block_m)
        best = table.shared_splits(tiles, block_m=now.block_m)
        yield both(now, best, form)
        if common == 0:  # what the empty pass costs, and the folding of nothing
            yield both(now, best, form, part="first")
            continue
        yield both(now, best, form, part="first")
        yield both(now, best, form, part="rest")
        for tile in shared_tiles(now)[1:]:
            yield both(tile, best, form, part="first")
        for splits in {1, 2, 4, 8} - {best}:
            yield both(now, splits, form)
        for other in REST:
            if other != form:
                yield both(now, best, other)
        lengths, starts = made.lengths, made.starts
        found = bench.zeros(4)

        def find(i, made=made, lengths=lengths, starts=starts, found=found):
            shared.find_shared(
                made.tables[i], lengths, starts, made.live, page_tokens=PAGE, least_rows=24, least_keys=512, found=found, pdl=True
            )  # fmt: skip

        def right(find=find, found=found, common=common):
            find(0)
            return 0.0 if int(found[0]) == common else 1.0

        yield Candidate(
            Case(
                "shared",
                op,
                "on: how many are shared (once a step)",
                [lambda i=i, f=find: f(i) for i in range(COPIES)],
                error=right,
            )
        )
        del made


def fresh_candidates(bench: Bench) -> Iterator[Candidate]:
    table = tuned(DEFAULT)
    there = find_spec("fa3_fwd") is not None and not bench.dry
    for model in (EIGHT, BY_NAME["qwen3-0.6b"]):
        heads, groups, dim = model.heads, model.kv_heads, model.head_dim
        # As in the middle of W4 with 16 output tokens: 24 rows decode, 512 tokens end a prompt, one is whole, of another the first part.
        counts = [*[1] * 24, 512, 4096, 8192 - 24 - 512 - 4096]
        lengths = [*[4100] * 24, 4096, 4096, counts[-1]]
        most = 512
        spare = most - len(counts)
        need = -(-max(lengths) // PAGE)
        width = -(-need // 4) * 4
        pages, total = bench.table(len(counts), width)
        page_table = bench.zeros(most, width)
        page_table[: len(counts)] = pages
        k, v = (bench.normal(total, groups, PAGE, dim) for _ in range(2))
        qkv = bench.normal(8192, model.qkv)
        q = qkv[:, : heads * dim].contiguous()
        ends = torch.tensor(counts).cumsum(0)
        to = {"dtype": torch.int32, "device": bench.device}
        starts = torch.tensor([0, *ends.tolist(), *[8192] * spare], **to)
        long = torch.tensor([*lengths, *[0] * spare], **to)
        begun = torch.tensor(
            [n if n == m and n > 1 else 0 for n, m in zip(counts, lengths, strict=True)] + [0] * spare, **to
        )
        live = torch.tensor([len(counts)], **to)
        if not bench.dry:  # this step's keys lie in the pages as well
            k_new, v_new = (part.view(8192, groups, dim) for part in qkv[:, heads * dim :].split(groups * dim, 1))
            for row, (first, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=False)):
                at = torch.arange(lengths[row] - (end - first), lengths[row], device=bench.device)
                where = page_table[row].long()[at // PAGE]
                k[where, :, at % PAGE], v[where, :, at % PAGE] = k_new[first:end], v_new[first:end]
        tile = table.prefill(dim, PAGE)
        squares = sum(n * (2 * m - n + 1) / 2 for n, m in zip(counts, lengths, strict=True) if n > 1)
        flops = 4.0 * squares * heads * dim
        op = f"{model.name} 512 go on, 2 begin, 24 decode"
        found: dict[str, torch.Tensor] = {}
        for classes in (most, 64):
            form = table.decode(classes, LONG, packed=heads // groups)
            floats = decode.decode_workspace_floats(classes, heads=heads, head_dim=dim, splits=form.splits)
            work, arrived = bench.empty(floats, dtype=F32), bench.zeros(classes * groups)
            rows: dict[str, Any] = {
                "query_start": starts[: classes + 1],
                "lengths": long[:classes],
                "page_table": page_table[:classes],
                "rows": live,
            }
            rows |= {"heads": heads, "scale": dim**-0.5}

            def run(
                out,
                way,
                rows=rows,
                form=form,
                work=work,
                arrived=arrived,
                q=q,
                k=k,
                v=v,
                qkv=qkv,
                begun=begun,
                groups=groups,
                tile=tile,
            ):
                if way != "paged":
                    library.fresh_attention(
                        q, qkv, rows["query_start"], heads=rows["heads"], kv_heads=groups, scale=rows["scale"], softcap=None,
                        begun=begun[: len(rows["lengths"])] if way == "some" else None, out=out,
                    )  # fmt: skip
                if way != "all":
                    prefill.paged_prefill(
                        q, k, v, singles=False, begun=way == "paged", config=tile, out=out, pdl=True, **rows
                    )
                decode.paged_decode(q, k, v, config=form, workspace=work, arrived=arrived, out=out, pdl=True, **rows)

            def again(run=run, q=q, found=found):
                """Against the paged kernels in a grid for all rows; FlashAttention gives p to the second product as bf16, as ours does."""
                out = torch.full_like(q, float("nan"))
                run(out, "some")
                return difference(out, found["off"])

            def alike(run=run, q=q, found=found):
                out = torch.full_like(q, float("nan"))
                run(out, "paged")
                found.setdefault("off", out)
                return difference(out, found["off"])

            target = bench.empty(*q.shape)
            name = f"grid of {classes} rows"
            case = Case(
                "fresh",
                op,
                f"off: paged, {name}",
                [lambda run=run, o=target: run(o, "paged")],
                flops=flops,
                error=alike,
            )
            yield Candidate(case, off=classes == most)
            if bench.dry:
                yield Candidate(
                    Case(
                        "fresh",
                        op,
                        name,
                        [
                            lambda r=rows, q=q, k=k, v=v, o=target, t=tile: prefill.paged_prefill(
                                q, k, v, singles=False, begun=False, config=t, out=o, pdl=True, **r
                            )
                        ],
                    )
                )
            if there:
                case = Case(
                    "fresh",
                    op,
                    f"on: FA3 for a part, {name}",
                    [lambda run=run, o=target: run(o, "some")],
                    flops=flops,
                    error=again,
                )
                yield Candidate(case)
                case = Case(
                    "fresh",
                    op,
                    f"wrong, for scale: FA3 for all, {name}",
                    [lambda run=run, o=target: run(o, "all")],
                    flops=flops,
                )
                yield Candidate(case)


def grids_candidates(bench: Bench) -> Iterator[Candidate]:
    table = tuned(DEFAULT)
    for model in (EIGHT, BY_NAME["qwen3-0.6b"]):
        heads, groups, dim = model.heads, model.kv_heads, model.head_dim
        for live_rows, length in ((16, 600), (16, 4100), (40, 4100)):
            pages = -(-length // PAGE)
            page_table, total = bench.table(512, -(-pages // 4) * 4)
            total = live_rows * page_table.shape[1] + 1
            page_table = page_table % total if not bench.dry else page_table
            k, v = (bench.normal(total, groups, PAGE, dim) for _ in range(2))
            q, out = bench.normal(8192, heads * dim), bench.empty(8192, heads * dim)
            to = {"dtype": torch.int32, "device": bench.device}
            starts = torch.tensor([min(i, live_rows) for i in range(513)], **to)
            lengths = torch.tensor([length if i < live_rows else 0 for i in range(512)], **to)
            live = torch.tensor([live_rows], **to)
            for classes in (512, 64, 16):
                if classes < live_rows:
                    continue
                forms = [table.decode(classes, LONG, packed=heads // groups)]
                if classes == 64:
                    forms += [DecodeConfig(8, 64, 4, 3), DecodeConfig(16, 64, 4, 3)]
                for form in forms:
                    floats = decode.decode_workspace_floats(classes, heads=heads, head_dim=dim, splits=form.splits)
                    work, arrived = bench.empty(floats, dtype=F32), bench.zeros(classes * groups)

                    def run(
                        q=q,
                        k=k,
                        v=v,
                        form=form,
                        work=work,
                        arrived=arrived,
                        classes=classes,
                        out=out,
                        dim=dim,
                        heads=heads,
                        starts=starts,
                        lengths=lengths,
                        table=page_table,
                        live=live,
                    ):
                        decode.paged_decode(
                            q, k, v, lengths=lengths[:classes], page_table=table[:classes], query_start=starts[: classes + 1], rows=live,
                            heads=heads, scale=dim**-0.5, out=out, config=form, workspace=work, arrived=arrived, pdl=True,
                        )  # fmt: skip

                    amount = 2.0 * 2 * live_rows * length * groups * dim
                    op = f"{model.name} {live_rows} rows of {length}"
                    yield Candidate(
                        Case("grids", op, f"grid of {classes}, {tag(form)}", [run] * 4, bytes=amount),
                        off=classes == 512,
                    )


LENGTHS_FORMS = (
    DecodeConfig(1, 64, 4, 2),
    DecodeConfig(1, 64, 4, 3),
    DecodeConfig(1, 64, 4, 4),
    DecodeConfig(1, 64, 2, 3),
    DecodeConfig(1, 64, 8, 3),
    DecodeConfig(1, 32, 2, 3),
    DecodeConfig(1, 32, 2, 4),
    DecodeConfig(1, 32, 4, 4),
    DecodeConfig(1, 128, 4, 3),
    DecodeConfig(1, 128, 8, 2),
    DecodeConfig(1, 128, 8, 3),
    DecodeConfig(2, 64, 4, 3),
)


def lengths_candidates(bench: Bench) -> Iterator[Candidate]:
    """Decoding rows of one length, and of all lengths up to one: a short row gives a program little to hide its beginning and end."""
    table = tuned(DEFAULT)
    for model in (BY_NAME["qwen3-0.6b"], EIGHT):
        heads, groups, dim = model.heads, model.kv_heads, model.head_dim
        for count, least, most in (
            (64, 384, 384), (128, 192, 192), (128, 384, 384), (128, 1024, 1024), (256, 192, 192), (256, 384, 384), (256, 640, 640),
            (256, 1024, 1024), (256, 64, 1280), (512, 384, 384), (512, 64, 1280),
        ):  # fmt: skip
            drawn = torch.linspace(least, most, count).round().int()[torch.randperm(count)]
            pages = -(-most // PAGE)
            width = -(-pages // 4) * 4
            copies = max(
                1, min(8, (300 << 20) // (4 * int(drawn.sum()) * groups * dim))
            )  # what comes again is not in the L2
            total = copies * count * pages + 1
            tables = bench.zeros(copies, count, width)
            if not bench.dry:
                order = torch.randperm(total - 1, device=bench.device).int() + 1
                tables[:, :, :pages] = order.view(copies, count, pages)
            k, v = (bench.normal(total, groups, PAGE, dim) for _ in range(2))
            q, out = bench.normal(count, heads * dim), bench.empty(count, heads * dim)
            lengths = drawn.to(bench.device)
            rows = torch.full((1,), count, dtype=torch.int32, device=bench.device)
            off = table.decode(count, 4096, packed=heads // groups)
            for form in (off, *(form for form in LENGTHS_FORMS if form != off)):
                floats = decode.decode_workspace_floats(count, heads=heads, head_dim=dim, splits=form.splits)
                work, arrived = bench.empty(floats, dtype=F32), bench.zeros(count * groups)

                def run(copy, q=q, k=k, v=v, out=out, form=form, work=work, arrived=arrived, tables=tables, lengths=lengths, rows=rows,
                        heads=heads, dim=dim):  # fmt: skip
                    decode.paged_decode(
                        q, k, v, lengths=lengths, page_table=tables[copy], heads=heads, scale=dim**-0.5, out=out, rows=rows,
                        config=form, workspace=work, arrived=arrived, pdl=True,
                    )  # fmt: skip

                runs = [functools.partial(run, copy % copies) for copy in range(max(4, copies))]
                amount = 2.0 * 2 * float(drawn.sum()) * groups * dim
                op = f"{model.name} B={count} of {least if least == most else f'{least}-{most}'}"
                yield Candidate(Case("lengths", op, tag(form), runs, bytes=amount), off=form == off)


GROUPS: dict[str, Callable[[Bench], Iterator[Candidate]]] = {
    "fresh": fresh_candidates,
    "grids": grids_candidates,
    "lengths": lengths_candidates,
    "shared": shared_candidates,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="shared,fresh,grids,lengths")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--shards", type=int, default=0)
    parser.add_argument("--shard", type=int, default=None, help="(internal) compile every n-th candidate and leave")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    if args.dry:
        base.dry_driver()
    compiling = args.dry or args.shard is not None
    bench = Bench(device="cpu" if args.dry else "cuda", dry=compiling)
    candidates = (candidate for group in args.only.split(",") for candidate in GROUPS[group](bench))
    if compiling:
        failed = seen = 0
        for index, candidate in enumerate(candidates):
            if args.shard is not None and index % args.shards != args.shard:
                continue
            seen += 1
            try:
                candidate.case.calls[0]()
            except Exception as problem:
                failed += 1
                print(
                    f"{candidate.case.op} {candidate.case.candidate}: {type(problem).__name__}: {str(problem)[:300]}",
                    flush=True,
                )
        print(f"compiled {seen} candidates, {failed} failed, in {time.perf_counter() - began:.0f} s", flush=True)
        sys.exit(1 if failed else 0)
    if args.shards:
        words = [sys.executable, __file__, *sys.argv[1:]]
        running = [subprocess.Popen([*words, "--shard", str(i)], stdout=subprocess.DEVNULL) for i in range(args.shards)]
        for process in running:
            process.wait()
        print(f"# compiled in {time.perf_counter() - began:.0f} s", flush=True)
    limits = base.ceilings()
    print("# ceilings: " + ", ".join(f"{name} {value / 1e12:.3f} T/s" for name, value in limits.items()), flush=True)
    if find_spec("fa3_fwd") is None:
        print("# fa3-fwd is not installed: FlashAttention 3 is left out", flush=True)
    rows: list[dict[str, Any]] = []
    off: dict[str, float] = {}
    for candidate in candidates:
        row = asdict(base.measured(candidate.case, limits)) | {"off": candidate.off}
        if candidate.off:
            off[row["op"]] = row["us"]
        row["times_faster"] = off[row["op"]] / row["us"] if row["us"] and row["op"] in off else None
        rows.append(row)
        faster = "" if candidate.off or row["times_faster"] is None else f"{row['times_faster']:6.2f}x"
        error = "" if row["error"] is None else f"error {row['error']:.1e}"
        print(
            f"{row['op']:44} {row['candidate']:62} {row['us']:9.2f} us {faster:8} {row['gb_per_s']:6.0f} GB/s "
            f"{row['tflop_per_s']:6.1f} TF/s {error} {row['note']}",
            flush=True,
        )
        if args.out:
            record = {
                "card": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
                "command": " ".join(["python", "benchmarks/attention_rounds.py", *sys.argv[1:]]), "ceilings": limits, "ops": rows,
                "seconds": time.perf_counter() - began,
            }  # fmt: skip
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"# {len(rows)} candidates in {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
