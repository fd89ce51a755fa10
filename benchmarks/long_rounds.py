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
from kernel_attention import attention_truth
from kernel_rounds import EIGHT
from rounds import F32, Bench, Case, difference, tag, written

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
        self.live = bench.full(1, rows)

    def starts(self, tokens: int) -> torch.Tensor:
        return torch.tensor([*range(self.singles + 1), self.singles + tokens], **self.to)

    def flops(self, tokens: int) -> float:
        return 4.0 * HEADS * DIM * (tokens * (self.keys - tokens) + tokens * (tokens + 1) / 2)

    @property
    def bytes(self) -> float:
        return 4.0 * GROUPS * DIM * self.keys

    def case(self, tokens: int, config: PrefillConfig, *, note: str = "", off: bool = False) -> Case:
        """The paged kernel on the last `tokens`; checked against float32, and every token written."""
        n = self.singles + tokens
        need = prefill.prefill_workspace_floats(n, heads=HEADS, head_dim=DIM, splits=config.splits)
        work = self.bench.empty(need, dtype=F32) if need else None
        starts = self.starts(tokens)

        call = partial(
            prefill.paged_prefill, self.q[:n], self.k, self.v, query_start=starts, lengths=self.lengths, page_table=self.table, heads=HEADS,
            scale=DIM**-0.5, rows=self.live, singles=self.singles == 0, last=0 if off else 1, config=config, workspace=work, pdl=True,
        )  # fmt: skip

        def error() -> float:
            out = torch.full_like(self.out[:n], float("nan"))
            call(out=out)
            assert out[self.singles :].isfinite().all(), "a token was not written"
            last, tail = slice(n - CHECKED, n), torch.tensor([0, CHECKED], dtype=torch.int32)
            given = {"heads": HEADS, "scale": DIM**-0.5, "rows": [0]}
            truth = attention_truth(self.q[last], self.k, self.v, tail, self.lengths[-1:], self.table[-1:], **given)[0]
            return difference(out[last], truth)

        form = tag(config).replace("prefill", "")
        name = ("off: " if off else "on: ") + (f"{note} " if note else "") + f"{config.splits} pieces {form}"
        op = f"chunk {tokens} of {self.keys}" + (f" beside {self.singles} rows" if self.singles else "")
        group, calls = "mixed" if self.singles else "chunk", [partial(call, out=self.out[:n])]
        return Case(group, op, name, calls, bytes=self.bytes, flops=self.flops(tokens), error=error, off=off)


def wanted_splits(tokens: int) -> list[int]:
    """Pieces that are tried: those of about 100 to 2,000 programs."""
    programs = -(-tokens * PACKED // 128) * GROUPS
    return [splits for splits in (2, 3, 4, 6, 8, 12, 16, 24, 32) if 100 <= programs * splits <= 2200]


def chunk_cases(bench: Bench) -> Iterator[Case]:
    table = tuned(DEFAULT)
    whole = table.prefill(DIM, PAGE)
    narrow = PrefillConfig(64, 64, 4, 3, True)
    for keys in (LONG, SHORT):
        text = Text(bench, keys=keys, most=8192)
        for tokens in (16, 32, 64, 128, 256, 512, 1024, 1280, 2048, 8192):
            if keys == SHORT and tokens in (16, 32, 1280, 8192):
                continue
            yield text.case(tokens, whole, off=True)
            if tokens == 16:
                for splits in (16, 32):
                    yield text.case(tokens, replace(narrow, splits=splits))
                    yield text.case(tokens, replace(narrow, splits=splits, stages=2))
            own = table.prefill_splits(-(-tokens * PACKED // 128) * GROUPS)
            tried = wanted_splits(tokens) if keys == LONG or tokens in (64, 256) else []
            for splits in sorted({own, *tried} - {1}):
                config, own_note = replace(whole, splits=splits, least_keys=table.split_keys), "the table's,"
                yield text.case(tokens, config, note=own_note if splits == own else "")
            if tokens in (64, 256) and keys == LONG:
                for other in (
                    replace(whole, registers=0, splits=own),
                    replace(whole, stages=3, registers=0, splits=own),
                    replace(whole, pairs=True, splits=own),
                    replace(narrow, splits=table.prefill_splits(-(-tokens * PACKED // 64) * GROUPS)),
                    replace(whole, splits=own, warps=4, registers=0),
                ):
                    yield text.case(tokens, other)
            if tokens in (64, 512, 2048, 8192):
                yield from library_cases(bench, text, tokens)
        del text


def library_cases(bench: Bench, text: Text, tokens: int) -> Iterator[Case]:
    """FlashAttention 3 on keys that lie one behind the other; what gathering them costs is not in it: 2 x 537 MB at 128k."""
    if bench.dry or find_spec("fa3_fwd") is None:
        return
    import fa3_fwd._C  # noqa: F401 - brings torch.ops.fa3_fwd

    pages = text.table[-1].long()
    k, v = (side[pages].transpose(1, 2).reshape(text.keys, GROUPS, DIM).contiguous() for side in (text.k, text.v))
    q, out = text.q[:tokens].view(tokens, HEADS, DIM), text.out[:tokens].view(tokens, HEADS, DIM)
    starts, ends = text.starts(tokens), torch.tensor([0, text.keys], **text.to)
    call = partial(
        torch.ops.fa3_fwd.fwd, q, k, v, out=out, cu_seqlens_q=starts, cu_seqlens_k=ends, max_seqlen_q=tokens, max_seqlen_k=text.keys,
        softmax_scale=DIM**-0.5, is_causal=True, softcap=0.0,
    )  # fmt: skip
    for splits in (1,) if tokens > 512 else (1, 8):
        op, name = f"chunk {tokens} of {text.keys}", f"for scale: FlashAttention 3, contiguous, {splits} pieces"
        yield Case("chunk", op, name, [partial(call, num_splits=splits)], bytes=text.bytes, flops=text.flops(tokens))


def mixed_cases(bench: Bench) -> Iterator[Case]:
    table = tuned(DEFAULT)
    whole = table.prefill(DIM, PAGE)
    text = Text(bench, keys=LONG, most=64, singles=16)
    for tokens in (32, 64):
        yield text.case(tokens, whole, off=True)
        for splits in (8, 16, 32):
            yield text.case(tokens, replace(whole, splits=splits, least_keys=table.split_keys))


def few_cases(bench: Bench) -> Iterator[Case]:
    """What bounds a long prompt beside running answers."""
    table = tuned(DEFAULT)
    whole, narrow = table.prefill(DIM, PAGE), PrefillConfig(64, 64, 4, 3, True)
    for keys in (LONG, LONG // 2, SHORT):
        text = Text(bench, keys=keys, most=64)
        for tokens in (16, 32, 48, 64):
            usual = table.few_prefill(tokens * PACKED, whole)
            programs = -(-tokens * PACKED // usual.block_m) * GROUPS
            splits = table.prefill_splits(programs)
            config = replace(usual, splits=splits, least_keys=table.split_keys)
            yield text.case(tokens, config, note="the table's,", off=True)
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
                    yield text.case(tokens, other)
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


def decode_cases(bench: Bench) -> Iterator[Case]:
    for rows in (1, 4, 8):
        yield from decode_of(bench, [LONG] * rows, DECODE)
    yield from decode_of(bench, [SHORT], DECODE[3:6])
    yield from decode_of(bench, [SHORT] * 8, DECODE[:4])
    yield from decode_of(bench, [*[1024] * 15, LONG], BESIDE)
    yield from decode_of(bench, [*[1024] * 31, LONG], BESIDE)


def decode_of(bench: Bench, lengths: list[int], forms: list[DecodeConfig]) -> Iterator[Case]:
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
    truth = None
    if not bench.dry:
        one, given = torch.tensor([0, 1], dtype=torch.int32), {"heads": HEADS, "scale": DIM**-0.5, "rows": [0]}
        truth = attention_truth(q[-1:], k, v, one, long[-1:], pages[-1:], **given)[0]
    op = f"decode {rows} rows of {lengths[0]}" + (f", one of {LONG}" if lengths[0] != lengths[-1] else "")
    case = partial(Case, "decode", op, bytes=4.0 * GROUPS * DIM * sum(lengths))
    for form in dict.fromkeys([former, now, *forms]):
        need = decode.decode_workspace_floats(rows, heads=HEADS, head_dim=DIM, splits=form.splits)
        call = partial(
            decode.paged_decode, q, k, v, lengths=long, page_table=pages, heads=HEADS, scale=DIM**-0.5, config=form,
            workspace=bench.empty(need, dtype=F32), arrived=bench.zeros(rows * GROUPS), pdl=True,
        )  # fmt: skip
        name = ("off: " if form == former else "on, the table: " if form == now else "on: ") + tag(form)
        check = partial(written, call, out, truth, slice(-1, None))
        yield case(name, [partial(call, out=out)], error=check, off=form == former)


GROUPS_OF: dict[str, Callable[[Bench], Iterator[Case]]] = {
    "chunk": chunk_cases,
    "decode": decode_cases,
    "few": few_cases,
    "mixed": mixed_cases,
}


def main() -> int:
    args = rounds.parser(__doc__, groups=GROUPS_OF, default="mixed,decode,chunk", seconds=75.0, best=99).parse_args()
    return rounds.run(args, partial(rounds.of_groups, GROUPS_OF, args.only))


if __name__ == "__main__":
    sys.exit(main())
