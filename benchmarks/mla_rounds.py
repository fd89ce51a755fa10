"""Open questions about latent attention: candidates of every kernel at the shape of DeepSeek-V2-Lite, in minutes on one card.

    PYTHONPATH=src python benchmarks/mla_rounds.py --shards 14 --out mla.json      all groups (under 2 minutes on an H200)
    PYTHONPATH=src python benchmarks/mla_rounds.py --only decode,step              some groups
    PYTHONPATH=src python benchmarks/mla_rounds.py --dry                           no GPU: compiles every candidate for sm_90

    decode   one-token rows over pages, and the way back, where splits are merged     around   into the space of latents and out of it
    naive    prompts that begin: keys and values made, attention over them            absorbed rows that go on, over pages
    step     a layer's attention of one-token rows, as planned

Off: what the table of constants says now. Knows: which candidates are open. Refuses to know: how to time and record (rounds.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import rounds
import torch
from rounds import F32, Bench, Case, copies, difference, tag, written

from tradewind.kernels import reference_mla
from tradewind.kernels.ops import LatentUp
from tradewind.kernels.triton import latent, latent_prefill, library
from tradewind.kernels.triton.tuning import (
    DEFAULT,
    LatentDecodeConfig,
    LatentPrefillConfig,
    LatentTileConfig,
    PrefillConfig,
    tuned,
)

TABLE = tuned(DEFAULT)
HEADS, NOPE, ROPE, VALUE, RANK, PAGE = 16, 128, 64, 128, 512, 64
KEY, WIDTH = NOPE + ROPE, RANK + ROPE
SCALE = KEY**-0.5
UP_BYTES = 2.0 * HEADS * (NOPE + VALUE) * RANK


class Rows:
    """Rows of a step over scattered pages: (new tokens, length) of each."""

    def __init__(self, bench: Bench, shapes: list[tuple[int, int]], *, times: int) -> None:
        self.bench, self.shapes = bench, shapes
        counts = torch.tensor([0] + [n for n, _ in shapes], dtype=torch.int32)
        self.query_start = counts.cumsum(0).int().to(bench.device)
        self.lengths = torch.tensor([length for _, length in shapes], dtype=torch.int32, device=bench.device)
        self.tokens = sum(n for n, _ in shapes)
        self.table, pages = bench.table(len(shapes), -(-max(length for _, length in shapes) // PAGE))
        self.pages = [bench.normal(pages, PAGE, WIDTH) for _ in range(times)]
        self.count = bench.full(1, len(shapes))
        self.q = bench.normal(self.tokens, HEADS * KEY)
        self.wide, self.out = bench.normal(self.tokens, HEADS, WIDTH), bench.empty(self.tokens, HEADS * VALUE)

    def paged(self) -> dict:
        return {"lengths": self.lengths, "page_table": self.table, "rows": self.count}

    def error(self, up: LatentUp, found: torch.Tensor) -> float:
        """Of the last tokens of the first and the last row, by the absorbed form in float64."""
        k_up, v_up = up.data[0][:, :NOPE].double(), up.data[0][:, NOPE:].double()
        worst = 0.0
        for row in {0, len(self.shapes) - 1}:
            n, length = self.shapes[row]
            last, end = min(n, 16), int(self.query_start[row + 1])
            latents = self.pages[0][self.table[row, : -(-length // PAGE)].long()].flatten(0, 1)[:length].double()
            q = self.q[end - last : end].double().unflatten(-1, (HEADS, -1))
            longer = torch.cat([torch.einsum("qhn,hnc->qhc", q[..., :NOPE], k_up), q[..., NOPE:]], -1)
            score = torch.einsum("qhc,lc->hql", longer, latents) * SCALE
            sight = torch.ones(last, length, dtype=torch.bool, device=score.device).tril(length - last)
            mixed = torch.einsum("hql,lc->qhc", score.masked_fill(~sight, -torch.inf).softmax(-1), latents[:, :RANK])
            truth = torch.einsum("qhc,hvc->qhv", mixed, v_up).flatten(1)
            worst = max(worst, difference(found[end - last : end], truth))
        return worst


def make_up(bench: Bench) -> LatentUp:
    data = bench.normal(HEADS, NOPE + VALUE, RANK, scale=RANK**-0.5)
    return LatentUp(heads=HEADS, nope=NOPE, value=VALUE, rank=RANK, data=(data,), nbytes=data.nbytes)


# --------------------------------------------------------------------------------------------------------------- decode


def decode_configs(rows: int, length: int) -> list[LatentDecodeConfig]:
    now = TABLE.latent_decode(rows, length, heads=HEADS)
    splits = sorted({now.splits, max(1, now.splits // 2), min(64, 2 * now.splits)})
    found = [now, *(replace(now, splits=each) for each in splits)]
    shapes = [
        (32, 4, 2),
        (32, 4, 6),
        (64, 4, 2),
        (64, 4, 5),
        (64, 8, 5),
        (32, 8, 5),
        (16, 4, 6),
        (16, 4, 8),
        (16, 2, 6),
    ]
    found += [LatentDecodeConfig(now.splits, 16, block, warps, stages) for block, warps, stages in shapes]
    return list(dict.fromkeys(found))


def decode_cases(bench: Bench) -> Iterator[Case]:
    up = make_up(bench)
    for rows, length in (
        (1, 384), (1, 4096), (1, 16384), (4, 1024), (16, 1024), (64, 1024), (128, 640), (256, 400), (256, 1024),
    ):  # fmt: skip
        amount, flops = 2.0 * rows * length * WIDTH, 2.0 * rows * length * HEADS * (WIDTH + RANK)
        step = Rows(bench, [(1, length)] * rows, times=copies(amount, most=16))
        case = partial(Case, "decode", f"decode R={rows} L={length}", bytes=amount + UP_BYTES / 2, flops=flops)
        for config in decode_configs(rows, length):
            floats = latent.parts_floats(rows, HEADS, RANK, config.splits)
            parts = bench.empty(floats, dtype=F32) if floats else None

            def call(pages, config=config, parts=parts, step=step, rows=rows):
                latent.latent_decode(
                    step.wide, pages, scale=SCALE, rope=ROPE, parts=parts, config=config, pdl=True, **step.paged()
                )
                leaving = TABLE.latent_leave(rows, splits=config.splits)
                latent.leave(step.wide, up, out=step.out, parts=parts, splits=config.splits, config=leaving, pdl=True)

            def error(call=call, step=step, rows=rows):
                latent.absorb(step.q, up, rope=ROPE, out=step.wide, config=TABLE.latent_absorb(rows))
                call(step.pages[0])
                return step.error(up, step.out)

            calls = [partial(call, pages) for pages in step.pages]
            yield case(tag(config), calls, error=error, off=config == TABLE.latent_decode(rows, length, heads=HEADS))
        del step


# --------------------------------------------------------------------------------------------------------------- around


INTO: dict[int, list[tuple[int, int, int]]] = {
    1: [(16, 64, 4), (16, 32, 4), (16, 128, 4), (16, 64, 2), (16, 32, 2)],
    64: [(16, 64, 4), (64, 64, 4), (32, 64, 4), (16, 128, 4), (64, 128, 4)],
    8192: [(64, 128, 4), (128, 128, 8), (128, 256, 8), (64, 256, 8), (128, 128, 4)],
}
"""Steps up to so many tokens -> candidates (block_t, block, warps)."""
OUT_OF: dict[int, list[tuple[int, int, int, int, int]]] = {
    1: [(1, 8, 4, 1, 128), (1, 16, 4, 1, 128), (1, 4, 2, 1, 128), (1, 8, 4, 1, 256), (16, 16, 4, 3, 128), (16, 32, 4, 2, 256)],
    64: [(16, 64, 4, 3, 64), (16, 128, 4, 3, 64), (16, 32, 4, 3, 128), (64, 64, 4, 3, 64), (32, 128, 4, 3, 64), (64, 32, 4, 3, 128)],
    8192: [(128, 128, 8, 3, 64), (128, 128, 8, 4, 64), (64, 128, 4, 3, 64), (128, 128, 4, 3, 64)],
}  # fmt: skip
"""The same, with stages and block_k."""


def size_class(tokens: int) -> int:
    return next(size for size in (1, 64, 8192) if tokens <= size or size == 8192)


def around_cases(bench: Bench) -> Iterator[Case]:
    ups = [make_up(bench) for _ in range(copies(UP_BYTES, most=48))]
    angles, weight = bench.angles(ROPE), bench.normal(RANK, dtype=F32)
    for tokens in (1, 16, 64, 256, 8192):
        some = ups if tokens <= 256 else ups[:4]
        q, out = bench.normal(tokens, HEADS * KEY), bench.empty(tokens, HEADS * VALUE)
        x, wide = bench.normal(tokens, WIDTH), bench.normal(tokens, HEADS, WIDTH)
        pages = bench.empty(tokens // PAGE + 2, PAGE, WIDTH)
        slots, positions = torch.arange(tokens, device=bench.device).int() + PAGE, bench.zeros(tokens)
        count = bench.full(1, tokens)
        amount = UP_BYTES / 2 + 2.0 * tokens * HEADS * (KEY + WIDTH)
        flops = 2.0 * tokens * HEADS * NOPE * RANK
        op = f"{'enter' if tokens <= 256 else 'absorb'} T={tokens}"
        case = partial(Case, "around", op, bytes=amount, flops=flops)
        given = {"weight": weight, "eps": 1e-6, "positions": positions, "count": count, "pdl": True}
        now = TABLE.latent_absorb(tokens)
        for config in dict.fromkeys([now, *(LatentTileConfig(*each, 1) for each in INTO[size_class(tokens)])]):

            def entering(up, config=config, q=q, x=x, wide=wide, slots=slots, pages=pages, given=given):
                if len(q) <= 256:
                    latent.enter(q, x, angles, slots, pages, up, out=wide, config=config, **given)
                else:
                    latent.absorb(q, up, rope=ROPE, out=wide, config=config, pdl=True)

            def into_error(call=entering, q=q, wide=wide):
                call(ups[0])
                each = q[-8:].double().unflatten(-1, (HEADS, -1))[..., :NOPE]
                truth = torch.einsum("thn,hnc->thc", each, ups[0].data[0][:, :NOPE].double())
                return difference(wide[-8:, :, :RANK], truth)

            yield case(tag(config), [partial(entering, up) for up in some], error=into_error, off=config == now)
        if tokens == 8192:
            by_head = q.view(tokens, HEADS, KEY)[..., :NOPE].transpose(0, 1)
            library = partial(torch.bmm, by_head, ups[0].data[0][:, :NOPE], out=bench.empty(HEADS, tokens, RANK))
            yield case("torch.bmm, by head, rope not copied", [(lambda: None) if bench.dry else library])
            store = partial(latent.latent_store, q, x, angles, slots, pages, heads=HEADS, **given)
            moved = 2.0 * tokens * (2 * HEADS * ROPE + 2 * WIDTH)
            yield Case("around", f"store T={tokens}", "", [store], bytes=moved, off=True)
        for splits in {1: (1, 8, 64), 16: (1, 8), 64: (1, 4)}.get(tokens, (1,)):
            yield from leave_cases(bench, some, wide, splits=splits, out=out)


def leave_cases(
    bench: Bench, ups: list[LatentUp], wide: torch.Tensor, *, splits: int, out: torch.Tensor
) -> Iterator[Case]:
    """The way out of the space of latents, from `wide` or from parts of it over splits."""
    tokens, parts = len(wide), None
    floats = latent.parts_floats(tokens, HEADS, RANK, splits)
    if floats:
        parts = bench.empty(floats, dtype=F32) if bench.dry else bench.normal(floats, dtype=F32).abs_()

    def truth() -> torch.Tensor:
        """Of the last tokens."""
        if parts is None:
            came = wide[-8:, :, :RANK].double()
        else:
            cut = tokens * HEADS * splits
            sums = parts[: cut * RANK].view(tokens, HEADS, splits, RANK).double()
            most, total = (
                part.view(tokens, HEADS, splits, 1).double() for part in (parts[cut * RANK : -cut], parts[-cut:])
            )
            share = torch.exp2(most - most.amax(2, keepdim=True))
            came = ((share * sums).sum(2) / (share * total).sum(2))[-8:]
        return torch.einsum("thc,hvc->thv", came, ups[0].data[0][:, NOPE:].double()).flatten(1)

    def error(call: Callable[..., object]) -> float:
        return written(call, out, truth(), slice(-8, None))

    read = UP_BYTES / 2 + (4.0 * floats if floats else 2.0 * tokens * HEADS * RANK) + 2.0 * tokens * HEADS * VALUE
    flops = 2.0 * tokens * HEADS * VALUE * RANK
    case = partial(Case, "around", f"leave T={tokens} S={splits}", bytes=read, flops=flops)
    now = TABLE.latent_leave(tokens, splits=splits)
    for config in dict.fromkeys([now, *(LatentTileConfig(*each) for each in OUT_OF[size_class(tokens)])]):
        given = {"parts": parts, "splits": splits, "config": config, "pdl": True}
        calls = [partial(latent.leave, wide, up, out=out, **given) for up in ups]
        check = partial(error, partial(latent.leave, wide, ups[0], **given))
        yield case(tag(config), calls, error=check, off=config == now)


# -------------------------------------------------------------------------------------------------------------- prompts


PROMPTS = {
    "2 x 4096": [(4096, 4096)] * 2, "16 x 512": [(512, 512)] * 16, "1 x 128": [(128, 128)], "3584 of 4096": [(3584, 4096)],
}  # fmt: skip
GOING_ON = {
    "1 x 2048 of 4096": [(2048, 4096)], "4 x 512 of 2048": [(512, 2048)] * 4, "1 x 256 of 16384": [(256, 16384)],
    "1 x 16 of 512": [(16, 512)],
}  # fmt: skip


def pairs_of(shapes: list[tuple[int, int]]) -> float:
    """Queries times the keys they see."""
    return sum(n * (length - n) + n * (n + 1) / 2 for n, length in shapes)


def naive_cases(bench: Bench) -> Iterator[Case]:
    up = make_up(bench)
    for name, shapes in PROMPTS.items():
        step = Rows(bench, shapes, times=1)
        lengths = torch.tensor([0] + [length for _, length in shapes], dtype=torch.int32, device=bench.device)
        keys, key_start = sum(length for _, length in shapes), lengths.cumsum(0).int()
        kv = bench.empty(keys, HEADS, KEY + VALUE)
        given = {"key_start": key_start, "rows": step.count, "rope": ROPE, "pdl": True}

        def making(config: LatentTileConfig, step=step, kv=kv, given=given) -> None:
            latent_prefill.make_keys(step.pages[0], up, page_table=step.table, out=kv, config=config, **given)

        def keys_error(call: Callable[[], None], step=step, kv=kv) -> float:
            call()
            length = step.shapes[-1][1]
            latents = step.pages[0][step.table[-1, : -(-length // PAGE)].long()].flatten(0, 1)[:length][-8:].double()
            made = torch.einsum("lc,hnc->lhn", latents[:, :RANK], up.data[0].double())
            shared = latents[:, None, RANK:].expand(-1, HEADS, -1)
            return difference(kv[-8:], torch.cat([made[..., :NOPE], shared, made[..., NOPE:]], -1))

        now = TABLE.latent_keys()
        others = [
            LatentTileConfig(64, 128, 4, 3, 64), LatentTileConfig(64, 128, 4, 4, 64), LatentTileConfig(128, 128, 8, 4, 64),
            LatentTileConfig(128, 128, 8, 3, 32), LatentTileConfig(128, 128, 4, 3, 64), LatentTileConfig(64, 128, 8, 3, 64),
        ]  # fmt: skip
        amount = 2.0 * keys * (WIDTH + HEADS * (KEY + VALUE)) + UP_BYTES
        flops = 2.0 * keys * RANK * HEADS * (NOPE + VALUE)
        case = partial(Case, "naive", f"make keys {name}", bytes=amount, flops=flops)
        for config in dict.fromkeys([now, *others]):
            call = partial(making, config)
            yield case(tag(config), [call], error=partial(keys_error, call), off=config == now)

        def attending(config: PrefillConfig | None, step=step, kv=kv, given=given) -> None:
            if config is None:
                starts = (step.query_start, given["key_start"])
                library.fresh_latents(step.q, kv, *starts, heads=HEADS, value=VALUE, scale=SCALE, out=step.out)
                return
            latent_prefill.fresh_latents(
                step.q, kv, query_start=step.query_start, value=VALUE, scale=SCALE, out=step.out, config=config, **given
            )

        def attention_error(call: Callable[[], None], step=step, making=making) -> float:
            making(TABLE.latent_keys())
            call()
            return step.error(up, step.out)

        flops = 2.0 * HEADS * (KEY + VALUE) * pairs_of(shapes)
        table = TABLE.latent_fresh()
        own = [
            table, PrefillConfig(128, 64, 8, 3), PrefillConfig(128, 128, 8, 2), PrefillConfig(64, 64, 4, 2), PrefillConfig(64, 64, 4, 3),
            PrefillConfig(128, 32, 8, 3), PrefillConfig(128, 64, 4, 2),
        ]  # fmt: skip
        with_library = find_spec("fa3_fwd") is not None and not bench.dry
        for config in [*dict.fromkeys(own), *([None] if with_library else [])]:
            call = partial(attending, config)
            text = "FlashAttention 3" if config is None else tag(config)
            check = partial(attention_error, call)
            yield Case("naive", f"fresh {name}", text, [call], flops=flops, error=check, off=config == table)
        del step, kv, given


def absorbed_cases(bench: Bench) -> Iterator[Case]:
    up = make_up(bench)
    now = TABLE.latent_prefill()
    others = [
        LatentPrefillConfig(64, 16, 64, 8, 2), LatentPrefillConfig(64, 16, 32, 8, 3), LatentPrefillConfig(64, 8, 32, 8, 2),
        LatentPrefillConfig(64, 4, 32, 8, 2), LatentPrefillConfig(64, 1, 32, 8, 2), LatentPrefillConfig(64, 16, 16, 8, 3),
        LatentPrefillConfig(32, 16, 32, 8, 2), LatentPrefillConfig(32, 16, 32, 4, 3), LatentPrefillConfig(16, 16, 32, 4, 5),
    ]  # fmt: skip
    for name, shapes in GOING_ON.items():
        step = Rows(bench, shapes, times=1)
        for config in dict.fromkeys([now, *others]):

            def call(config=config, step=step):
                latent_prefill.latent_prefill(
                    step.wide, step.pages[0], query_start=step.query_start, scale=SCALE, rope=ROPE, singles=False,
                    config=config, pdl=True, **step.paged(),
                )  # fmt: skip

            def error(call=call, step=step):
                latent.absorb(step.q, up, rope=ROPE, out=step.wide, config=TABLE.latent_absorb(step.tokens))
                call()
                latent.leave(step.wide, up, out=step.out, config=TABLE.latent_leave(max(16, step.tokens), splits=1))
                return step.error(up, step.out)

            flops = 2.0 * HEADS * (WIDTH + RANK) * pairs_of(shapes)
            op = f"absorbed {name}"
            yield Case("absorbed", op, tag(config), [call], flops=flops, error=error, off=config == now)
        del step


# ----------------------------------------------------------------------------------------------------------------- step


def step_cases(bench: Bench) -> Iterator[Case]:
    """enter, decode and leave of one-token rows with the constants of the table, back to back."""
    angles, weight = bench.angles(ROPE, 1 << 15), bench.normal(RANK, dtype=F32)
    for rows, length in ((1, 384), (1, 4096), (8, 1024), (32, 1024), (64, 640), (128, 640), (256, 400)):
        amount = 2.0 * rows * length * WIDTH
        times = copies(amount + UP_BYTES, most=27)
        step, ups = Rows(bench, [(1, length)] * rows, times=times), [make_up(bench) for _ in range(times)]
        config = TABLE.latent_decode(rows, length, heads=HEADS)
        floats = latent.parts_floats(rows, HEADS, RANK, config.splits)
        parts = bench.empty(floats, dtype=F32) if floats else None
        x, positions = bench.normal(rows, WIDTH), step.lengths - 1
        last = step.table[:, (length - 1) // PAGE]
        slots = (last * PAGE + (length - 1) % PAGE).int()

        def call(pages, up, step=step, config=config, parts=parts, x=x, positions=positions, slots=slots, rows=rows):
            latent.enter(
                step.q, x, angles, slots, pages, up, weight=weight, eps=1e-6, positions=positions, out=step.wide, count=step.count,
                config=TABLE.latent_absorb(rows), pdl=True,
            )  # fmt: skip
            latent.latent_decode(
                step.wide, pages, scale=SCALE, rope=ROPE, parts=parts, config=config, pdl=True, **step.paged()
            )
            latent.leave(
                step.wide, up, out=step.out, parts=parts, splits=config.splits, count=step.count,
                config=TABLE.latent_leave(rows, splits=config.splits), pdl=True,
            )  # fmt: skip

        def error(call=call, step=step, x=x, slots=slots, positions=positions, ups=ups):
            turned, pages = reference_mla.latent_store(
                step.q.double(), x.double(), angles[positions.long()].double(), slots, step.pages[0], heads=HEADS,
                weight=weight.double(), eps=1e-6,
            )  # fmt: skip
            call(step.pages[0], ups[0])
            truth = Rows.__new__(Rows)
            truth.__dict__ = {**step.__dict__, "q": turned, "pages": [pages]}
            return truth.error(ups[0], step.out)

        calls = [partial(call, pages, up) for pages, up in zip(step.pages, ups, strict=True)]
        op, amount = f"step R={rows} L={length}", amount + UP_BYTES
        yield Case("step", op, tag(config), calls, bytes=amount, error=error, off=True)
        del step, ups


GROUPS: dict[str, Callable[[Bench], Iterator[Case]]] = {
    "decode": decode_cases,
    "around": around_cases,
    "naive": naive_cases,
    "absorbed": absorbed_cases,
    "step": step_cases,
}
"""In the order of a plain run."""


def main() -> int:
    args = rounds.parser(__doc__, groups=GROUPS).parse_args()
    return rounds.run(args, partial(rounds.of_groups, GROUPS, args.only))


if __name__ == "__main__":
    sys.exit(main())
