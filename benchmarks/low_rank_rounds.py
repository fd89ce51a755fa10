"""What adapters add to a layer's matmuls, launch by launch: norms and matmuls of four layers of Llama 3.1 8B in one graph, no attention.

    PYTHONPATH=src python benchmarks/low_rank_rounds.py --out low_rank.json      at most 60 s on an H200, see --seconds
    PYTHONPATH=src python benchmarks/low_rank_rounds.py --prompts --out prompts.json           at most 40 s: many tokens
    PYTHONPATH=src python benchmarks/low_rank_rounds.py [--prompts] --dry        no GPU: compiles every candidate for sm_90

Arms: nobody has room ("none"), all tokens have one adapter, the next of all adapters each, nobody has one though some might ("nobody").
Ways: in the matmul's tiles (kernels/triton/low_rank_tile.py), candidates of its constants, and sorted by adapter (low_rank.py). Every way
is checked against the sorted one.

With --prompts both products of low_rank.py by themselves, for each matrix at 512, 2,048 and 8,192 tokens of all adapters: candidates of
`low_rank.Form`, of which each is checked against float32 and told beside what a copy moves in the same run. Blocks of a step have one
size, so `best` is by that: what to write into FORMS. Knows: candidates. Refuses to know: how to time (benchmarks/rounds.py). Written
after every figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rounds import dry_driver, graph_us

from tradewind.kernels.ops import PackedMatrix
from tradewind.kernels.triton import elementwise, low_rank, low_rank_tile, route
from tradewind.kernels.triton.launch import compiling
from tradewind.kernels.triton.ops import CudaOps
from tradewind.kernels.triton.planning import plan
from tradewind.kernels.triton.program import Bucket
from tradewind.kernels.triton.tape import Tape
from tradewind.kernels.triton.tuning import DEFAULT, tuned

HIDDEN, INNER = 4096, 14336
SHAPES = {
    "qkv": ((4096, 1024, 1024), HIDDEN),
    "o": ((HIDDEN,), HIDDEN),
    "both": ((INNER, INNER), HIDDEN),
    "down": ((HIDDEN,), INNER),
}
CANDIDATES: dict[str, dict[str, int]] = {
    "tiles": {},
    "sorted": {"MOST_COLUMNS": 0},
    "tiles, B not held": {"MOST_HELD": 0},
    "tiles, A in 16": {"MOST_PIECES": 16},
    "tiles, A in 4": {"MOST_PIECES": 4},
    "tiles, A beside 2 programs whatever memory they have": {"SHARED_BYTES": 1 << 20},
    "tiles, A whole": {"MOST_PIECES": 1},
}


class Layers:
    """Weights, banks and buffers; what stands for attention's answer is a buffer of its own."""

    def __init__(self, *, device: str, layers: int, tokens: int, slots: int, rank: int, fp8: bool, dry: bool) -> None:
        self.tokens, self.slots, self.dry = tokens, slots, dry
        self.ops = ops = CudaOps(device=device, pdl=True, tuning=tuned(DEFAULT))

        def random(*shape: int, scale: float) -> torch.Tensor:
            made = torch.empty(shape, dtype=torch.bfloat16, device=device)
            return made if dry else made.normal_(std=scale)

        def matrix(n: int, k: int) -> PackedMatrix:
            values = random(n, k, scale=k**-0.5)
            data: tuple[torch.Tensor, ...] = (values,)
            if fp8:
                scale = values.abs().amax(1).float() / 448
                data = ((values / scale[:, None]).to(torch.float8_e4m3fn), scale)
            nbytes = sum(part.nbytes for part in data)
            layout, bits = ("fp8", 8) if fp8 else ("bf16", 16)
            return PackedMatrix(layout=layout, n=n, k=k, bits=bits, group=0, gated=False, data=data, nbytes=nbytes)

        self.layers = []
        for _ in range(layers):
            weights = {name: matrix(sum(sizes), k) for name, (sizes, k) in SHAPES.items()}
            banks = {
                name: ops.low_rank_bank(slots=slots, rank=rank, sizes=sizes, k=k, exact=False)
                for name, (sizes, k) in SHAPES.items()
            }
            for bank in banks.values():
                a, b, used, _ = bank.data
                if not dry:
                    a.normal_(std=bank.k**-0.5)
                    b.normal_(std=0.1)
                used.fill_(rank)
            self.layers.append((weights, banks))
        self.gain = torch.ones(HIDDEN, device=device)
        self.start = random(tokens, HIDDEN, scale=1.0).float()
        self.x = torch.zeros_like(self.start)
        self.adapters = torch.full((tokens,), -1, dtype=torch.int32, device=device)
        widths = {
            "h": HIDDEN,
            "qkv": sum(SHAPES["qkv"][0]),
            "attended": HIDDEN,
            "delta": HIDDEN,
            "both": 2 * INNER,
            "inner": INNER,
            "last": HIDDEN,
        }
        self.made = {
            name: torch.zeros(tokens, width, dtype=torch.bfloat16, device=device) for name, width in widths.items()
        }
        if not dry:
            self.made["attended"].normal_()

    def tape(self) -> Tape:
        ops, made = self.ops, self.made
        count = torch.full((1,), self.tokens, dtype=torch.int32, device=self.x.device)
        delta = None
        with ops.record() as tape:
            for weights, banks in self.layers:

                def linear(name: str, x: str, out: str, weights: Any = weights, banks: Any = banks) -> None:
                    ops.linear(made[x], weights[name], bias=None, out=made[out], count=count)
                    ops.add_low_rank(made[x], banks[name], self.adapters, out=made[out], count=count)

                ops.add_rms_norm(self.x, delta, self.gain, eps=1e-5, out=made["h"], count=count)
                delta = made["delta"]
                linear("qkv", "h", "qkv")
                linear("o", "attended", "delta")
                ops.add_rms_norm(self.x, delta, self.gain, eps=1e-5, out=made["h"], count=count)
                linear("both", "h", "both")
                ops.glue(made["both"], activation="silu", out=made["inner"], count=count)
                linear("down", "inner", "delta")
            ops.add_rms_norm(self.x, delta, self.gain, eps=1e-5, out=made["last"], count=count)
        tape.keep(made["qkv"])
        return tape

    def ids(self, arm: str) -> np.ndarray:
        mixed = np.arange(self.tokens) % self.slots
        return {"one": 0 * mixed + 1 % self.slots, "mixed": mixed, "nobody": 0 * mixed - 1}[arm].astype(np.int32)

    def answer(self, program: Any) -> torch.Tensor:
        self.x.copy_(self.start)
        program.run()
        return torch.cat([self.made["last"], self.made["qkv"]], 1).float()


@contextmanager
def constants(values: dict[str, int]) -> Iterator[None]:
    """The module's constants replaced for a while."""
    before = {name: getattr(low_rank_tile, name) for name in values}
    for name, value in values.items():
        setattr(low_rank_tile, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(low_rank_tile, name, value)


def rounds(options: argparse.Namespace) -> None:
    """All sizes and candidates until the time is over."""
    began = time.perf_counter()
    device, results = "cpu" if options.dry else "cuda", []
    for fp8 in (False, True):
        for tokens in (64, 16, 1, 32):
            count = 1 if options.dry else 4
            layers = Layers(
                device=device,
                layers=count,
                tokens=tokens,
                slots=options.adapters,
                rank=options.rank,
                fp8=fp8,
                dry=options.dry,
            )
            tape = layers.tape()
            bucket = {"tokens": tokens, "rows": tokens, "singles": True, "longest": 1024}
            plain = plan(tape, Bucket(**bucket))
            none = None if options.dry else graph_us([plain.run])
            with constants(CANDIDATES["sorted"]):
                program = plan(tape, Bucket(**bucket, adapted=True))
            truths = {}
            for arm in ("mixed", "one", "nobody"):
                layers.adapters.copy_(torch.from_numpy(layers.ids(arm)))
                truths[arm] = layers.answer(program)
            for name, changed in CANDIDATES.items():
                if time.perf_counter() - began > options.seconds:
                    return
                with constants(changed):
                    program = plan(tape, Bucket(**bucket, adapted=True))
                    row: dict[str, Any] = {"weights": "fp8" if fp8 else "bf16", "tokens": tokens, "way": name}
                    row |= {"launches": len(program.launches), "launches_without": len(plain.launches)}
                    if options.dry:
                        program.run()
                        print(row, flush=True)
                        continue
                    assert none is not None
                    row["none_us"] = round(none / count, 2)
                    for arm, truth in truths.items():
                        layers.adapters.copy_(torch.from_numpy(layers.ids(arm)))
                        got = layers.answer(program)
                        row[f"{arm}_difference"] = round(float((got - truth).norm() / truth.norm()), 5)
                        took = graph_us([program.run])
                        row[f"{arm}_adds_us"] = round((took - none) / count, 2)
                results.append(row)
                print(row, flush=True)
                if options.out is not None:
                    options.out.write_text(json.dumps({"kind": "low_rank_rounds", "rows": results}, indent=2) + "\n")
            del layers, tape, plain, program


# ------------------------------------------------------------------------------------------------------------- many tokens

MANY = low_rank.MANY
SHRINK: list[dict[str, int]] = [
    {},
    {"shrink_stages": 3},
    {"shrink_stages": 5, "bk": 64},
    {"shrink_stages": 7, "bk": 64},
    {"shrink_warps": 8},
    {"pieces": 264},
    {"pieces": 264, "shrink_stages": 5, "bk": 64},
    {"bm": 32},
    {"bm": 32, "shrink_stages": 5, "bk": 64},
    {"bm": 128, "bk": 64},
    {"bm": 128, "bk": 64, "pieces": 264},
    {"bm": 128, "bk": 64, "pieces": 264, "shrink_warps": 8},
]
"""What is changed of MANY; FEW and MIDDLE are measured besides."""
EXPAND: list[dict[str, int]] = [
    {},
    {"blocks_first": 1},
    {"bn": 128},
    {"bn": 128, "expand_warps": 8},
    {"bn": 256, "expand_warps": 8},
    {"bm": 32},
    {"bm": 32, "bn": 256},
    {"bm": 128, "bn": 64},
    {"bm": 128, "expand_warps": 8},
]
GLUE: list[dict[str, int]] = [
    {},
    {"blocks_first": 1},
    {"glue_bn": 128, "glue_warps": 8},
    {"glue_warps": 8},
    {"glue_bn": 128},
    {"bm": 32},
    {"bm": 32, "glue_bn": 128},
    {"bm": 32, "glue_bn": 128, "glue_warps": 8},
    {"bm": 128},
]
MOST_ERROR = 1e-2


@dataclass
class Try:
    """One product with one candidate's constants: what runs, what is wrong with it, and the bytes that nobody avoids."""

    op: str
    form: low_rank.Form
    changed: str
    run: Callable[[], None]
    error: Callable[[], float]
    nbytes: float


class Prompts:
    """One matrix's bank, inputs and outputs of so many tokens, with what float32 says."""

    def __init__(self, name: str, *, device: str, tokens: int, slots: int, rank: int, dry: bool) -> None:
        self.name, self.tokens, self.dry, self.device = name, tokens, dry, device
        self.sizes, self.k = SHAPES[name]
        self.bank = low_rank.new_bank(torch.device(device), slots=slots, rank=rank, sizes=self.sizes, k=self.k)
        a, b, used, _ = self.bank.data
        used.fill_(rank)
        self.x, self.out = (
            torch.empty(tokens, width, dtype=torch.bfloat16, device=device) for width in (self.k, sum(self.sizes))
        )
        self.ids = (
            torch.arange(tokens, dtype=torch.int32, device=device) * slots // tokens
        )  # as prompts lie: one after the other
        self.places: dict[int, dict[str, torch.Tensor]] = {}
        if dry:
            return
        torch.manual_seed(0)
        a.normal_(std=self.k**-0.5)
        b.normal_(std=0.25)
        self.x.normal_()
        self.out.normal_()
        columns = a.shape[1]
        self.inner = torch.empty(tokens, columns, device=device)
        self.added = torch.empty(tokens, sum(self.sizes), device=device)
        starts = np.cumsum([0, *self.sizes]).tolist()
        for slot in range(slots):
            mine = (self.ids == slot).nonzero()[:, 0]
            self.inner[mine] = self.x[mine].float() @ a[slot].float().T
            for part, rank_of in enumerate(range(0, columns, columns // len(self.sizes))):
                h = self.inner[mine, rank_of : rank_of + columns // len(self.sizes)].bfloat16().float()
                lines = slice(starts[part], starts[part + 1])
                self.added[mine, lines] = h @ b[slot, lines].float().T

    def sorted(self, bm: int) -> dict[str, torch.Tensor]:
        """Tokens by adapter in blocks of so many, as a step's first launches leave them."""
        if bm not in self.places:
            slots, new = self.bank.slots, {"dtype": torch.int32, "device": self.device}
            programs = -(-self.tokens // low_rank.TOKENS_EACH)
            groups, counts, base_ = (
                torch.zeros(n, **new) for n in (self.tokens, programs * (slots + 1), programs * (slots + 1))
            )
            most = route.most_blocks(self.tokens, experts=slots + 1, block=bm)
            made = {
                "order": torch.zeros(self.tokens, **new),
                "blocks": torch.zeros(3, most, **new),
                "used": torch.zeros(1, **new),
            }
            low_rank.group_tokens(self.ids, slots=slots, groups=groups, counts=counts)
            route.sort_pairs(
                groups.view(-1, 1), experts=slots + 1, block=bm, tokens_each=low_rank.TOKENS_EACH, counts=counts, base=base_, **made
            )  # fmt: skip
            self.places[bm] = made
        return self.places[bm]

    def between(self, form: low_rank.Form) -> torch.Tensor:
        """Room for `inner`."""
        splits = low_rank.splits_of(self.k, form=form, tokens=self.tokens)
        kind = torch.bfloat16 if splits == 1 and form.pieces else torch.float32
        return torch.zeros(splits, self.tokens, self.bank.data[0].shape[1], dtype=kind, device=self.device)

    def tries(self) -> Iterator[Try]:
        """All candidates of `shrink` and of `expand`, of gate and up also in one with the activation."""
        forms = {"FEW": low_rank.FEW, "MIDDLE": low_rank.MIDDLE}
        for kind, table in (("shrink", SHRINK), ("expand", EXPAND), ("glue", GLUE)):
            if kind == "glue" and self.name != "both":
                continue
            if kind == "glue":
                yield self.one("alone", low_rank.FEW, "")
            changed = {json.dumps(c)[1:-1].replace('"', ""): replace(MANY, **c) for c in table}  # type: ignore[arg-type]
            for text, form in {**forms, **changed}.items():
                yield self.one(kind, form, text or "MANY")

    def one(self, kind: str, form: low_rank.Form, text: str) -> Try:
        places, inner, bank = self.sorted(form.bm), self.between(form), self.bank
        nbytes: float = self.x.nbytes if kind == "shrink" else 2 * self.out.nbytes

        def shrink() -> None:
            low_rank.shrink(self.x, bank, inner=inner, form=form, **places)

        if kind == "shrink":

            def error() -> float:
                inner.fill_(torch.nan)
                shrink()
                return relative(inner.float().sum(0), self.inner[places["order"].long()])

            return Try(f"shrink {self.name}", form, text, shrink, error, nbytes)
        if kind == "expand":

            def expand() -> None:
                low_rank.expand(inner, bank, out=self.out, form=form, **places)

            def error() -> float:  # of all that is there then, as a step has it
                shrink()
                before = self.out.normal_().float()
                expand()
                return relative(self.out, before + self.added)

            return Try(f"expand {self.name}", form, text, expand, error, nbytes)
        made = torch.empty(self.tokens, self.sizes[0], dtype=torch.bfloat16, device=self.device)
        if kind == "alone":

            def alone() -> None:
                elementwise.gated_activation(self.out, out=made)

            return Try("without adapters", form, text, alone, lambda: 0.0, self.out.nbytes + made.nbytes)

        def glue() -> None:
            if form.glue_bn:
                low_rank.expand_glue(self.out, inner, bank, out=made, activation="silu", form=form, **places)
            else:
                low_rank.expand(inner, bank, out=self.out, form=form, **places)
                elementwise.gated_activation(self.out, out=made)

        def error() -> float:
            shrink()
            gate, up = (self.out.normal_().float() + self.added).chunk(2, 1)
            glue()
            return relative(made, torch.nn.functional.silu(gate) * up)

        return Try(f"glue {self.name}", form, text, glue, error, self.out.nbytes + made.nbytes)


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    """||a - b|| / ||b||."""
    return float((found.float() - truth).norm() / truth.norm())


def copy_rate(device: str) -> float:
    """Bytes/s, read and written together, of a copy of 4 GB."""
    x = torch.zeros(1 << 30, device=device)
    y, found = torch.empty_like(x), []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        y.copy_(x)
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e-3)
    return 2 * x.nbytes / statistics.median(found[2:])


def prompts(options: argparse.Namespace) -> None:
    """All candidates at all sizes until the time is over, the largest first; what is already measured is written after each matrix."""
    began, device = time.perf_counter(), "cuda" if torch.cuda.is_available() and not options.dry else "cpu"
    record: dict[str, Any] = {"kind": "low_rank_rounds prompts", "adapters": options.adapters, "rank": options.rank}
    ceiling = 1.0 if options.dry else copy_rate(device)
    rows: list[dict[str, Any]] = []
    record |= {"copy_GB_s": round(ceiling / 1e9), "rows": rows}
    for tokens in (8192, 2048, 512):
        for name in SHAPES:
            if (
                time.perf_counter() - began > options.seconds - 3.0
            ):  # compiling a matrix's candidates takes about as long
                record["cut"] = True
                told(record, options)
                return
            data = Prompts(
                name, device=device, tokens=tokens, slots=options.adapters, rank=options.rank, dry=options.dry
            )
            tries = [*data.tries()]
            try:
                with compiling(threads=8) if device == "cuda" else nullcontext():
                    for candidate in tries:
                        candidate.run()
            except Exception as problem:  # it is compiled again where it is measured, and told there
                print(f"{name}: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
                if options.dry:
                    raise
            for candidate in tries:
                if time.perf_counter() - began > options.seconds:
                    record["cut"] = True
                    told(record, options)
                    return
                row = {"tokens": tokens, "op": candidate.op, "form": candidate.changed, "bm": candidate.form.bm}
                rows.append(row)
                if options.dry:
                    print(row, flush=True)
                    continue
                try:
                    row |= measured(candidate, ceiling)
                except Exception as problem:  # a candidate that does not run is a row, not the end
                    row["failed"] = f"{type(problem).__name__}: {str(problem)[:200]}"
                print(row, flush=True)
            told(record, options)
            del data, tries, candidate


def measured(candidate: Try, ceiling: float) -> dict[str, Any]:
    """A row's figures."""
    error = candidate.error()
    us = graph_us([candidate.run], budget_ms=15.0)
    rate = candidate.nbytes / us * 1e6
    row = {"us": round(us, 2), "GB_s": round(rate / 1e9), "of_copy": round(rate / ceiling, 3), "error": round(error, 5)}
    if not error < MOST_ERROR:
        row["failed"] = "WRONG"
    return row | {"constants": asdict(candidate.form)}


def told(record: dict[str, Any], options: argparse.Namespace) -> None:
    """Writes the record; with it, by tokens and size of a block, each product's best, and what a layer then takes longer than without
    adapters where all of it was measured."""
    best: dict[str, dict[str, dict[str, Any]]] = {}
    alone: dict[str, float] = {}
    for row in record["rows"]:
        size = f"{row['tokens']} tokens"
        if "us" not in row or "failed" in row:
            continue
        if row["op"] == "without adapters":
            alone[size] = row["us"]
            continue
        mine = best.setdefault(size, {}).setdefault(f"blocks of {row['bm']}", {})
        if row["us"] < mine.get(row["op"], {"us": 1e9})["us"]:
            mine[row["op"]] = {"us": row["us"], "form": row["form"], "of_copy": row["of_copy"]}
    wanted = {f"shrink {name}" for name in SHAPES} | {"expand qkv", "expand o", "expand down", "glue both"}
    layers = {
        size: {bm: round(sum(found[op]["us"] for op in wanted) - alone[size], 1) for bm, found in by.items() if wanted <= set(found)}
        for size, by in best.items()
        if size in alone
    }  # fmt: skip
    record |= {"best": best, "layer_us": layers}
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({"layer_us": layers}), flush=True)


def main() -> None:
    """Measures and prints, and writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompts", action="store_true", help="both products by themselves, of many tokens")
    parser.add_argument("--seconds", type=float, help="no new figure after so many (55; 40 with --prompts)")
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    parser.add_argument("--dry", action="store_true", help="no GPU: compile for sm_90")
    options = parser.parse_args()
    options.seconds = options.seconds or (40.0 if options.prompts else 55.0)
    if options.dry:
        dry_driver()
        options.seconds = 1e9
    (prompts if options.prompts else rounds)(options)


if __name__ == "__main__":
    main()
