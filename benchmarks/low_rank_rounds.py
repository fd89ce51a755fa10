"""What adapters add to a layer's matmuls, launch by launch: norms and matmuls of four layers of Llama 3.1 8B in one graph, no attention.

    PYTHONPATH=src python benchmarks/low_rank_rounds.py --out low_rank.json      at most 60 s on an H200, see --seconds
    PYTHONPATH=src python benchmarks/low_rank_rounds.py --dry                    no GPU: compiles every candidate for sm_90

Arms: nobody has room ("none"), all tokens have one adapter, the next of all adapters each, nobody has one though some might ("nobody").
Ways: in the matmul's tiles (kernels/triton/low_rank_tile.py), candidates of its constants, and sorted by adapter (low_rank.py). Every way
is checked against the sorted one. Knows: candidates. Refuses to know: how to time (benchmarks/kernels.py). Written after every figure.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kernels as base
import numpy as np
import torch

from tradewind.kernels.ops import PackedMatrix
from tradewind.kernels.triton import low_rank_tile
from tradewind.kernels.triton.ops import CudaOps
from tradewind.kernels.triton.tape import Bucket, Tape
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
    "tiles, A beside 3 programs": {"PROGRAMS_EACH": 3},
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
            plain = tape.program(Bucket(**bucket))
            none = None if options.dry else base.graph_us([plain.run])
            with constants(CANDIDATES["sorted"]):
                program = tape.program(Bucket(**bucket, adapted=True))
            truths = {}
            for arm in ("mixed", "one", "nobody"):
                layers.adapters.copy_(torch.from_numpy(layers.ids(arm)))
                truths[arm] = layers.answer(program)
            for name, changed in CANDIDATES.items():
                if time.perf_counter() - began > options.seconds:
                    return
                with constants(changed):
                    program = tape.program(Bucket(**bucket, adapted=True))
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
                        took = base.graph_us([program.run])
                        row[f"{arm}_adds_us"] = round((took - none) / count, 2)
                results.append(row)
                print(row, flush=True)
                if options.out is not None:
                    options.out.write_text(json.dumps({"kind": "low_rank_rounds", "rows": results}, indent=2) + "\n")
            del layers, tape, plain, program


def main() -> None:
    """Measures and prints, and writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=55.0, help="no new figure after so many")
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    parser.add_argument("--dry", action="store_true", help="no GPU: compile for sm_90")
    options = parser.parse_args()
    if options.dry:
        base.dry_driver()
        options.seconds = 1e9
    rounds(options)


if __name__ == "__main__":
    main()
