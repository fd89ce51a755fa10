"""Attention against many keys on one card: a chunk of a long prompt, whole ("off") or cut over its keys ("on"), and decoding rows.

    PYTHONPATH=src python benchmarks/long_rounds.py --shards 14 --out long-rounds.json     everything (under 60 s on an H200)
    PYTHONPATH=src python benchmarks/long_rounds.py --only chunk                           one group
    PYTHONPATH=src python benchmarks/long_rounds.py --dry                                  no GPU: compiles all for sm_90

    chunk     64 to 8,192 tokens that go on at 32k or 128k keys: pieces, tiles, and FlashAttention 3 on contiguous keys for scale
    mixed     the same 32 or 64 tokens at the end of a step in which 16 rows decode at 1k
    few       16 to 64 tokens that go on at 32k, 64k or 128k keys beside running answers: tiles, and what the second launch takes
    decode    1, 4 and 8 rows of 128k keys, and one of them among 15 or 31 of 1k: pieces and tiles

The floor of each is in its own line: the greater of operations at the measured matmul rate and the pages' bytes, read once, at the measured
read rate (`fraction` is of the nearer). The shape is Llama-3.1-8B's; one layer.
Knows: which candidates are open. Refuses to know: how to time (benchmarks/kernels.py).
"""

from __future__ import annotations

import argparse
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
from kernel_rounds import EIGHT, Candidate
from kernels import F32, Bench, Case, difference, tag

from tradewind.kernels.triton import decode, prefill
from tradewind.kernels.triton.tuning import DEFAULT, DecodeConfig, PrefillConfig, tuned

PAGE = 64
HEADS, GROUPS, DIM = EIGHT.heads, EIGHT.kv_heads, EIGHT.head_dim
PACKED = HEADS // GROUPS
SHORT, LONG = 32768, 131072
CHECKED = 16
"""Last tokens of a chunk that are compared with float32."""


class Text:
    """Keys of one text and its last tokens, at the end of a step that `singles` decoding rows of 1,024 keys begin."""

    def __init__(self, bench: Bench, *, keys: int, most: int, singles: int = 0) -> None:
        self.bench, self.singles, self.keys = bench, singles, keys
        pages = keys // PAGE
        self.width = pages
        rows = singles + 1
        self.table = bench.zeros(rows, pages)
        total = pages + singles * 16 + 1
        if not bench.dry:
            order = (torch.randperm(total - 1, device=bench.device) + 1).int()
            self.table[-1] = order[:pages]
            for row in range(singles):
                self.table[row, :16] = order[pages + 16 * row : pages + 16 * (row + 1)]
        self.k, self.v = (bench.normal(total, GROUPS, PAGE, DIM) for _ in range(2))
        self.q = bench.normal(most + singles, HEADS * DIM)
        self.out = bench.empty(most + singles, HEADS * DIM)
        self.to: dict[str, Any] = {"dtype": torch.int32, "device": bench.device}
        self.lengths = torch.tensor([*[1024] * singles, keys], **self.to)
        self.live = torch.full((1,), rows, **self.to)

    def starts(self, tokens: int) -> torch.Tensor:
        return torch.tensor([*range(self.singles + 1), self.singles + tokens], **self.to)

    def flops(self, tokens: int) -> float:
        return 4.0 * HEADS * DIM * (tokens * (self.keys - tokens) + tokens * (tokens + 1) / 2)

    @property
    def bytes(self) -> float:
        return 4.0 * GROUPS * DIM * self.keys

    def candidate(self, tokens: int, config: PrefillConfig, *, note: str = "", off: bool = False) -> Candidate:
        """The paged kernel on the last `tokens`; checked against float32, and every token written."""
        n = self.singles + tokens
        need = prefill.prefill_workspace_floats(n, heads=HEADS, head_dim=DIM, splits=config.splits)
        work = self.bench.empty(need, dtype=F32) if need else None
        starts = self.starts(tokens)

        def call(out: torch.Tensor = self.out) -> None:
            prefill.paged_prefill(
                self.q[:n], self.k, self.v, query_start=starts, lengths=self.lengths, page_table=self.table, heads=HEADS,
                scale=DIM**-0.5, out=out[:n], rows=self.live, singles=self.singles == 0, last=0 if off else 1, config=config,
                workspace=work, pdl=True,
            )  # fmt: skip

        def error() -> float:
            out = torch.full_like(self.out, float("nan"))
            call(out)
            assert out[self.singles : n].isfinite().all(), "a token was not written"
            tail = torch.tensor([0, CHECKED], dtype=torch.int32)
            truth = base.attention_truth(
                self.q[n - CHECKED : n], self.k, self.v, tail, self.lengths[-1:], self.table[-1:], heads=HEADS, scale=DIM**-0.5, rows=[0]
            )[0]  # fmt: skip
            return difference(out[n - CHECKED : n], truth)

        form = tag(config).replace("prefill", "")
        name = ("off: " if off else "on: ") + (f"{note} " if note else "") + f"{config.splits} pieces {form}"
        op = f"chunk {tokens} of {self.keys}" + (f" beside {self.singles} rows" if self.singles else "")
        group = "mixed" if self.singles else "chunk"
        return Candidate(
            Case(group, op, name, [call], bytes=self.bytes, flops=self.flops(tokens), error=error), off=off
        )


def wanted_splits(tokens: int) -> list[int]:
    """Pieces that are tried: those of about 100 to 2,000 programs."""
    programs = -(-tokens * PACKED // 128) * GROUPS
    return [splits for splits in (2, 3, 4, 6, 8, 12, 16, 24, 32) if 100 <= programs * splits <= 2200]


def chunk_candidates(bench: Bench) -> Iterator[Candidate]:
    table = tuned(DEFAULT)
    whole = table.prefill(DIM, PAGE)
    narrow = PrefillConfig(64, 64, 4, 3, True)
    for keys in (LONG, SHORT):
        text = Text(bench, keys=keys, most=8192)
        for tokens in (16, 32, 64, 128, 256, 512, 1024, 1280, 2048, 8192):
            if keys == SHORT and tokens in (16, 32, 1280, 8192):
                continue
            yield text.candidate(tokens, whole, off=True)
            if tokens == 16:
                for splits in (16, 32):
                    yield text.candidate(tokens, replace(narrow, splits=splits))
                    yield text.candidate(tokens, replace(narrow, splits=splits, stages=2))
            own = table.prefill_splits(-(-tokens * PACKED // 128) * GROUPS)
            tried = wanted_splits(tokens) if keys == LONG or tokens in (64, 256) else []
            for splits in sorted({own, *tried} - {1}):
                yield text.candidate(
                    tokens,
                    replace(whole, splits=splits, least_keys=table.split_keys),
                    note="the table's," if splits == own else "",
                )
            if tokens in (64, 256) and keys == LONG:
                for other in (
                    replace(whole, registers=0, splits=own),
                    replace(whole, stages=3, registers=0, splits=own),
                    replace(whole, pairs=True, splits=own),
                    replace(narrow, splits=table.prefill_splits(-(-tokens * PACKED // 64) * GROUPS)),
                    replace(whole, splits=own, warps=4, registers=0),
                ):
                    yield text.candidate(tokens, other)
            if tokens in (64, 512, 2048, 8192):
                yield from library_candidates(bench, text, tokens)
        del text


def library_candidates(bench: Bench, text: Text, tokens: int) -> Iterator[Candidate]:
    """FlashAttention 3 on keys that lie one behind the other; what gathering them costs is not in it: 2 x 537 MB at 128k."""
    if bench.dry or find_spec("fa3_fwd") is None:
        return
    import fa3_fwd._C  # noqa: F401 - brings torch.ops.fa3_fwd

    pages = text.table[-1].long()
    k, v = (side[pages].transpose(1, 2).reshape(text.keys, GROUPS, DIM).contiguous() for side in (text.k, text.v))
    q, out = text.q[:tokens].view(tokens, HEADS, DIM), text.out[:tokens].view(tokens, HEADS, DIM)
    starts, ends = text.starts(tokens), torch.tensor([0, text.keys], **text.to)
    for splits in (1,) if tokens > 512 else (1, 8):

        def call(splits: int = splits) -> None:
            torch.ops.fa3_fwd.fwd(
                q, k, v, out=out, cu_seqlens_q=starts, cu_seqlens_k=ends, max_seqlen_q=tokens, max_seqlen_k=text.keys,
                softmax_scale=DIM**-0.5, is_causal=True, softcap=0.0, num_splits=splits,
            )  # fmt: skip

        name = f"for scale: FlashAttention 3, contiguous, {splits} pieces"
        yield Candidate(
            Case("chunk", f"chunk {tokens} of {text.keys}", name, [call], bytes=text.bytes, flops=text.flops(tokens))
        )


def mixed_candidates(bench: Bench) -> Iterator[Candidate]:
    table = tuned(DEFAULT)
    whole = table.prefill(DIM, PAGE)
    text = Text(bench, keys=LONG, most=64, singles=16)
    for tokens in (32, 64):
        yield text.candidate(tokens, whole, off=True)
        for splits in (8, 16, 32):
            yield text.candidate(tokens, replace(whole, splits=splits, least_keys=table.split_keys))


def few_candidates(bench: Bench) -> Iterator[Candidate]:
    """What bounds a long prompt beside running answers."""
    table = tuned(DEFAULT)
    whole, narrow = table.prefill(DIM, PAGE), PrefillConfig(64, 64, 4, 3, True)
    for keys in (LONG, LONG // 2, SHORT):
        text = Text(bench, keys=keys, most=64)
        for tokens in (16, 32, 48, 64):
            usual = table.few_prefill(tokens * PACKED, whole)
            programs = -(-tokens * PACKED // usual.block_m) * GROUPS
            splits = table.prefill_splits(programs)
            yield text.candidate(
                tokens, replace(usual, splits=splits, least_keys=table.split_keys), note="the table's,", off=True
            )
            if keys != LONG:
                continue
            slim = table.prefill_splits(-(-tokens * PACKED // 64) * GROUPS)
            for other in (
                replace(usual, splits=max(2, splits // 2)),
                replace(narrow, splits=slim),
                replace(narrow, splits=slim, stages=2),
                replace(narrow, splits=min(32, 2 * slim)),
                replace(whole, block_n=32, stages=4, splits=splits),
                replace(whole, block_n=128, registers=0, splits=max(2, splits // 2)),
            ):
                if other != replace(usual, splits=splits):
                    yield text.candidate(tokens, other)
        del text


FORMER = {1: DecodeConfig(32, 64, 4, 2), 4: DecodeConfig(8, 32, 2, 3), 17: DecodeConfig(4, 128, 4, 2)}
"""By rows, at least so many: what the table said of 128k keys before this."""
DECODE = [
    DecodeConfig(16, 32, 2, 3), DecodeConfig(32, 32, 2, 3), DecodeConfig(16, 64, 4, 2, 512), DecodeConfig(32, 64, 4, 2),
    DecodeConfig(64, 64, 4, 2), DecodeConfig(64, 32, 2, 3), DecodeConfig(32, 64, 4, 3), DecodeConfig(32, 128, 4, 2),
    DecodeConfig(16, 128, 8, 3), DecodeConfig(128, 64, 4, 2),
]  # fmt: skip
BESIDE = [
    DecodeConfig(8, 64, 4, 2, 512), DecodeConfig(16, 64, 4, 2, 512), DecodeConfig(16, 64, 4, 2), DecodeConfig(32, 64, 4, 2, 512),
    DecodeConfig(16, 64, 4, 3, 512), DecodeConfig(16, 128, 4, 2, 512), DecodeConfig(16, 64, 4, 2, 1024), DecodeConfig(32, 64, 4, 2, 1024),
    DecodeConfig(32, 128, 4, 2, 1024), DecodeConfig(32, 64, 4, 3, 1024), DecodeConfig(64, 64, 4, 2, 1024),
]  # fmt: skip


def decode_candidates(bench: Bench) -> Iterator[Candidate]:
    for rows in (1, 4, 8):
        yield from decode_of(bench, [LONG] * rows, DECODE)
    yield from decode_of(bench, [SHORT], DECODE[3:6])
    yield from decode_of(bench, [SHORT] * 8, DECODE[:4])
    yield from decode_of(bench, [*[1024] * 15, LONG], BESIDE)
    yield from decode_of(bench, [*[1024] * 31, LONG], BESIDE)


def decode_of(bench: Bench, lengths: list[int], forms: list[DecodeConfig]) -> Iterator[Candidate]:
    """One-token rows of these lengths; the longest is the last, and is checked."""
    rows, most = len(lengths), max(lengths) // PAGE
    needed = [length // PAGE for length in lengths]
    order = (torch.randperm(sum(needed)) + 1).int()
    pages = torch.zeros(rows, most, dtype=torch.int32)
    for row, (count, part) in enumerate(zip(needed, order.split(needed), strict=True)):
        pages[row, :count] = part
    pages = pages.to(bench.device)
    k, v = (bench.normal(sum(needed) + 1, GROUPS, PAGE, DIM) for _ in range(2))
    q, out = bench.normal(rows, HEADS * DIM), bench.empty(rows, HEADS * DIM)
    long = torch.tensor(lengths, dtype=torch.int32, device=bench.device)
    former = next(form for least, form in reversed(FORMER.items()) if rows >= least)
    now = tuned(DEFAULT).decode(rows, max(lengths), packed=PACKED)
    truth: list[torch.Tensor] = []
    for form in dict.fromkeys([former, now, *forms]):
        need = decode.decode_workspace_floats(rows, heads=HEADS, head_dim=DIM, splits=form.splits)
        work, arrived = bench.empty(need, dtype=F32), bench.zeros(rows * GROUPS)

        def call(
            target: torch.Tensor = out, form: DecodeConfig = form, work: torch.Tensor = work, arrived: torch.Tensor = arrived
        ) -> None:  # fmt: skip
            decode.paged_decode(
                q, k, v, lengths=long, page_table=pages, heads=HEADS, scale=DIM**-0.5, out=target, config=form, workspace=work,
                arrived=arrived, pdl=True,
            )  # fmt: skip

        def error(call: Callable[..., None] = call) -> float:
            target = torch.full_like(out, float("nan"))
            call(target)
            if not truth:
                one = torch.tensor([0, 1], dtype=torch.int32)
                truth.append(
                    base.attention_truth(
                        q[-1:], k, v, one, long[-1:], pages[-1:], heads=HEADS, scale=DIM**-0.5, rows=[0]
                    )[0]
                )
            assert target.isfinite().all()
            return difference(target[-1:], truth[0])

        same = f"decode {rows} rows of {lengths[0]}" + (f", one of {LONG}" if lengths[0] != lengths[-1] else "")
        name = ("off: " if form == former else "on, the table: " if form == now else "on: ") + tag(form)
        amount = 4.0 * GROUPS * DIM * sum(lengths)
        yield Candidate(Case("decode", same, name, [call], bytes=amount, error=error), off=form == former)


GROUPS_OF: dict[str, Callable[[Bench], Iterator[Candidate]]] = {
    "chunk": chunk_candidates,
    "decode": decode_candidates,
    "few": few_candidates,
    "mixed": mixed_candidates,
}


def compiled(candidates: Iterator[Candidate], *, shard: int | None, shards: int) -> int:
    """Compiles them (each shard a part) and says what failed; returns how many did."""
    began, failed, seen = time.perf_counter(), 0, 0
    for index, candidate in enumerate(candidates):
        if shard is not None and index % shards != shard:
            continue
        seen += 1
        try:
            candidate.case.calls[0]()
        except Exception as problem:
            failed += 1
            text = f"{type(problem).__name__}: {str(problem)[:300]}"
            print(f"{candidate.case.op} {candidate.case.candidate}: {text}", flush=True)
    print(f"compiled {seen} candidates, {failed} failed, in {time.perf_counter() - began:.0f} s", flush=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="mixed,decode,chunk", help="groups, in this order (default %(default)s)")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--shards", type=int, default=0)
    parser.add_argument("--shard", type=int, default=None, help="(internal) compile every n-th candidate and leave")
    parser.add_argument("--seconds", type=float, default=75, help="nothing is begun after this (default %(default)s)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    if args.dry:
        base.dry_driver()
    compiling = args.dry or args.shard is not None
    bench = Bench(device="cpu" if args.dry else "cuda", dry=compiling)
    candidates = (candidate for group in args.only.split(",") for candidate in GROUPS_OF[group](bench))
    if compiling:
        sys.exit(1 if compiled(candidates, shard=args.shard, shards=args.shards) else 0)
    if args.shards:
        words = [sys.executable, __file__, *sys.argv[1:]]
        running = [subprocess.Popen([*words, "--shard", str(i)], stdout=subprocess.DEVNULL) for i in range(args.shards)]
        for process in running:
            process.wait()
        print(f"# compiled in {time.perf_counter() - began:.0f} s", flush=True)
    limits = base.ceilings()
    print("# ceilings: " + ", ".join(f"{name} {value / 1e12:.3f} T/s" for name, value in limits.items()), flush=True)
    rows: list[dict[str, Any]] = []
    off: dict[str, float] = {}
    for candidate in candidates:
        if time.perf_counter() - began > args.seconds:
            print("# no time left", flush=True)
            break
        case = candidate.case
        row = asdict(base.measured(case, limits)) | {"off": candidate.off}
        row["floor_us"] = 1e6 * max(case.bytes / limits["read"], case.flops / limits["bf16"])
        if candidate.off:
            off[row["op"]] = row["us"]
        row["times_faster"] = off[row["op"]] / row["us"] if row["us"] and row["op"] in off else None
        rows.append(row)
        faster = "" if candidate.off or row["times_faster"] is None else f"{row['times_faster']:6.2f}x"
        error = "" if row["error"] is None else f"error {row['error']:.1e}"
        print(
            f"{row['op']:34} {row['candidate']:66} {row['us']:9.1f} us, floor {row['floor_us']:8.1f} {faster:8} {row['fraction']:5.2f} "
            f"{row['tflop_per_s']:6.1f} TF/s {error} {row['note']}",
            flush=True,
        )
        if args.out:
            record = {
                "card": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
                "command": " ".join(["python", "benchmarks/long_rounds.py", *sys.argv[1:]]), "ceilings": limits, "ops": rows,
                "seconds": time.perf_counter() - began,
            }  # fmt: skip
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"# {len(rows)} candidates in {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
