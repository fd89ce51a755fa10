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
Knows: which candidates are open. Refuses to know: how to time and record (rounds.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import rounds
import torch
from kernel_rounds import BY_NAME, EIGHT
from kernel_shapes import Shape
from rounds import BF16, F32, FP8, Bench, Case, difference, tag, written

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
            own_pages = order[:, pages_common:].view(COPIES, rows, pages_own)
            self.tables[:, :, pages_common : pages_common + pages_own] = own_pages
        shape = (COPIES * each + 1, model.kv_heads, PAGE, dim)
        self.k, self.v = (bench.normal(*shape, dtype=kv) for _ in range(2))
        self.q, self.out = bench.normal(rows, model.heads * dim), bench.empty(rows, model.heads * dim)
        lengths = common + torch.arange(rows) % own + 1  # rows have different numbers of keys of their own
        self.lengths = lengths.to(torch.int32).to(bench.device)
        self.starts = torch.arange(rows + 1, dtype=torch.int32, device=bench.device)
        self.live = bench.full(1, rows)
        self.found = torch.tensor([common, 0, 0, 0], dtype=torch.int32, device=bench.device)
        self.token_bytes = 2 * model.kv_heads * dim * (1 if kv == FP8 else 2)
        self.bytes_off = float(lengths.sum()) * self.token_bytes
        self.bytes_on = self.bytes_off - (rows - 1) * common * self.token_bytes

    def keys(self, splits: int, block_n: int) -> decode.SharedKeys:
        m = self.model
        need = shared.shared_parts_floats(self.rows, heads=m.heads, head_dim=m.head_dim, splits=splits)
        parts = self.bench.empty(need, dtype=F32)
        return decode.SharedKeys(found=self.found, parts=parts, splits=splits, block_n=block_n)

    def first(self, copy: int, keys: decode.SharedKeys, tile: PrefillConfig) -> None:
        """The pass over shared keys."""
        shared.shared_attention(
            self.q, self.k, self.v, keys=keys, page_table=self.tables[copy], rows=self.live, heads=self.model.heads,
            scale=self.model.head_dim**-0.5, config=tile, pdl=True,
        )  # fmt: skip

    def rest(
        self, copy: int, keys: decode.SharedKeys | None, form: DecodeConfig, scratch: dict[str, Any], out: torch.Tensor
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


REST = [
    DecodeConfig(1, 64, 4, 3), DecodeConfig(1, 64, 4, 2), DecodeConfig(1, 32, 2, 3), DecodeConfig(2, 64, 4, 3), DecodeConfig(1, 128, 8, 3),
]  # fmt: skip


def shared_tiles(now: PrefillConfig) -> list[PrefillConfig]:
    """Others for the pass over shared keys."""
    narrow = PrefillConfig(64, 64, 4, 3, True)
    return [replace(now, registers=0), replace(now, stages=3), narrow, replace(narrow, stages=2)]


def shared_cases(bench: Bench) -> Iterator[Case]:
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
        case = partial(Case, "shared", op, bytes=made.bytes_on)
        calls = [partial(made.rest, i, None, form, scratch, made.out) for i in range(COPIES)]
        yield Case("shared", op, f"off: {tag(form)}", calls, bytes=made.bytes_off, off=True)
        wanted = None
        if not bench.dry:
            wanted = torch.empty_like(made.out)
            made.rest(0, None, form, scratch, wanted)
        now = table.shared_pass(model.head_dim, PAGE)
        if kv == FP8:
            now = replace(now, registers=0)  # as the planner does

        def ways(tile, splits, form, which=("both",), made=made, case=case, wanted=wanted):
            """The pass and what is behind it, or each alone; both are checked."""
            keys, scratch = made.keys(splits, tile.block_n), made.scratch(form)

            def first(copy):
                made.first(copy, keys, tile)

            def rest(copy, out=made.out):
                made.rest(copy, keys, form, scratch, out)

            def both(copy, out=made.out):
                first(copy)
                rest(copy, out)

            told = {
                "both": (f"on: {tag(tile)} / {splits} / {tag(form)}", both),
                "first": (f"on, the pass: {tag(tile)} / {splits} splits", first),
                "rest": (f"on, behind it: {tag(form)}", rest),
            }
            for name, call in (told[way] for way in which):
                check = partial(written, partial(both, 0), made.out, wanted)
                yield case(name, [partial(call, i) for i in range(COPIES)], error=check)

        tiles = model.kv_heads * -(-rows * packed // now.block_m)
        best = table.shared_splits(tiles, block_m=now.block_m)
        if common == 0:  # what the empty pass costs, and the folding of nothing
            yield from ways(now, best, form, ("both", "first"))
            continue
        yield from ways(now, best, form, ("both", "first", "rest"))
        for tile in shared_tiles(now):
            yield from ways(tile, best, form, ("first",))
        for splits in {1, 2, 4, 8} - {best}:
            yield from ways(now, splits, form)
        for other in REST:
            if other != form:
                yield from ways(now, best, other)
        found = bench.zeros(4)

        def find(copy, made=made, found=found):
            shared.find_shared(
                made.tables[copy], made.lengths, made.starts, made.live, page_tokens=PAGE, least_rows=24, least_keys=512, found=found,
                pdl=True,
            )  # fmt: skip

        def right(find=find, found=found, common=common):
            find(0)
            return 0.0 if int(found[0]) == common else 1.0

        name = "on: how many are shared (once a step)"
        yield Case("shared", op, name, [partial(find, i) for i in range(COPIES)], error=right)
        del made


def fresh_cases(bench: Bench) -> Iterator[Case]:
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
                "query_start": starts[: classes + 1], "lengths": long[:classes], "page_table": page_table[:classes], "rows": live,
                "heads": heads, "scale": dim**-0.5, "pdl": True,
            }  # fmt: skip
            decoding = partial(decode.paged_decode, q, k, v, config=form, workspace=work, arrived=arrived, **rows)
            paged = partial(prefill.paged_prefill, q, k, v, singles=False, config=tile, **rows)
            fresh = partial(
                library.fresh_attention,
                q,
                qkv,
                rows["query_start"],
                heads=heads,
                kv_heads=groups,
                scale=dim**-0.5,
                softcap=None,
            )

            def run(way, out, fresh=fresh, paged=paged, decoding=decoding, begun=begun[:classes]):
                if way != "paged":
                    fresh(begun=begun if way == "some" else None, out=out)
                if way != "all":
                    paged(begun=way == "paged", out=out)
                decoding(out=out)

            def error(way, run=run, q=q, found=found):
                """Against the paged kernels in a grid for all rows; FlashAttention gives p to the second product as bf16, as ours does."""
                out = torch.full_like(q, float("nan"))
                run(way, out)
                return difference(out, found.setdefault("off", out))

            target, name = bench.empty(*q.shape), f"grid of {classes} rows"
            case = partial(Case, "fresh", op, flops=flops)
            calls, check = [partial(run, "paged", target)], partial(error, "paged")
            yield case(f"off: paged, {name}", calls, error=check, off=classes == most)
            if bench.dry:
                yield Case("fresh", op, name, [partial(paged, begun=False, out=target)])
            if there:
                yield case(f"on: FA3 for a part, {name}", [partial(run, "some", target)], error=partial(error, "some"))
                yield case(f"wrong, for scale: FA3 for all, {name}", [partial(run, "all", target)])


def grids_cases(bench: Bench) -> Iterator[Case]:
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
                    call = partial(
                        decode.paged_decode, q, k, v, lengths=lengths[:classes], page_table=page_table[:classes],
                        query_start=starts[: classes + 1], rows=live, heads=heads, scale=dim**-0.5, out=out, config=form,
                        workspace=bench.empty(floats, dtype=F32), arrived=bench.zeros(classes * groups), pdl=True,
                    )  # fmt: skip
                    amount = 2.0 * 2 * live_rows * length * groups * dim
                    op, name = f"{model.name} {live_rows} rows of {length}", f"grid of {classes}, {tag(form)}"
                    yield Case("grids", op, name, [call] * 4, bytes=amount, off=classes == 512)


LENGTHS_FORMS = [
    DecodeConfig(*form)
    for form in (
        (1, 64, 4, 2), (1, 64, 4, 3), (1, 64, 4, 4), (1, 64, 2, 3), (1, 64, 8, 3), (1, 32, 2, 3), (1, 32, 2, 4), (1, 32, 4, 4),
        (1, 128, 4, 3), (1, 128, 8, 2), (1, 128, 8, 3), (2, 64, 4, 3),
    )
]  # fmt: skip


def lengths_cases(bench: Bench) -> Iterator[Case]:
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
            # What comes again is not in the L2.
            copies = max(1, min(8, (300 << 20) // (4 * int(drawn.sum()) * groups * dim)))
            total = copies * count * pages + 1
            tables = bench.zeros(copies, count, width)
            if not bench.dry:
                order = torch.randperm(total - 1, device=bench.device).int() + 1
                tables[:, :, :pages] = order.view(copies, count, pages)
            k, v = (bench.normal(total, groups, PAGE, dim) for _ in range(2))
            q, out = bench.normal(count, heads * dim), bench.empty(count, heads * dim)
            lengths = drawn.to(bench.device)
            rows = bench.full(1, count)
            off = table.decode(count, 4096, packed=heads // groups)
            op = f"{model.name} B={count} of {least if least == most else f'{least}-{most}'}"
            amount = 2.0 * 2 * float(drawn.sum()) * groups * dim
            for form in dict.fromkeys([off, *LENGTHS_FORMS]):
                floats = decode.decode_workspace_floats(count, heads=heads, head_dim=dim, splits=form.splits)
                call = partial(
                    decode.paged_decode, q, k, v, lengths=lengths, heads=heads, scale=dim**-0.5, out=out, rows=rows, config=form,
                    workspace=bench.empty(floats, dtype=F32), arrived=bench.zeros(count * groups), pdl=True,
                )  # fmt: skip
                calls = [partial(call, page_table=tables[copy % copies]) for copy in range(max(4, copies))]
                yield Case("lengths", op, tag(form), calls, bytes=amount, off=form == off)


GROUPS: dict[str, Callable[[Bench], Iterator[Case]]] = {
    "fresh": fresh_cases,
    "grids": grids_cases,
    "lengths": lengths_cases,
    "shared": shared_cases,
}


def main() -> int:
    args = rounds.parser(__doc__, groups=GROUPS, default="shared,fresh,grids,lengths", best=99).parse_args()
    if find_spec("fa3_fwd") is None:
        print("# fa3-fwd is not installed: FlashAttention 3 is left out", flush=True)
    return rounds.run(args, partial(rounds.of_groups, GROUPS, args.only))


if __name__ == "__main__":
    sys.exit(main())
