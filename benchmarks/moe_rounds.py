"""Open questions about mixtures of experts: candidates of every kernel at the shape of one model, in minutes on one card.

    PYTHONPATH=src python benchmarks/moe_rounds.py --shards 14 --out moe.json      all groups (under 3 minutes on an H200)
    PYTHONPATH=src python benchmarks/moe_rounds.py --only one,layer                some groups
    PYTHONPATH=src python benchmarks/moe_rounds.py --dry                           no GPU: compiles every candidate for sm_90

    route    routing, counting and sorting              one     one token: GEMVs over the chosen experts
    tiles    2 tokens and more, by size of step         layer   a whole layer's mixture, from the router to the next norm

Off: what the table of constants says now. Knows: which candidates are open. Refuses to know: how to time and check (benchmarks/kernels.py).
Routing is uniform and random, which reads the most weights: a trained router's tokens share experts more often.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import kernels as base
import torch
import triton
from kernels import BF16, F32, FP8, Bench, Case, difference, tag

from tradewind.kernels import reference_moe
from tradewind.kernels.ops import Routing
from tradewind.kernels.triton import moe, norm, route, skinny
from tradewind.kernels.triton.tuning import DEFAULT, ExpertGemvConfig, GemvConfig, TileConfig, tuned

TABLE = tuned(DEFAULT)


@dataclass(frozen=True)
class Mixture:
    """The shape of a layer's experts, from a config.json."""

    name: str
    experts: int
    chosen: int
    hidden: int
    inner: int


MODEL = Mixture("qwen3-30b-a3b", 128, 8, 2048, 768)
ROUTING = Routing(top_k=MODEL.chosen)
SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)


class Layer:
    """A layer's weights; the whole of them is several times the L2, so steps of many tokens need no second."""

    def __init__(self, bench: Bench, *, fp8: bool) -> None:
        m = MODEL
        self.bench, self.fp8 = bench, fp8
        self.gate_up, self.gate_up_scale = self._drawn(2 * m.inner, m.hidden)
        self.down, self.down_scale = self._drawn(m.hidden, m.inner)
        self.router = bench.normal(m.experts, m.hidden, scale=m.hidden**-0.5)
        self.gain = bench.normal(m.hidden, dtype=F32)

    def _drawn(self, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = (MODEL.experts, n, k)
        if not self.fp8:
            return self.bench.normal(*shape, scale=k**-0.5), None
        return self.bench.normal(*shape, dtype=FP8, scale=100.0), torch.full(
            shape[:2], k**-0.5 / 100, dtype=F32, device=self.bench.device
        )

    def read_bytes(self, experts: int) -> float:
        """Weights of so many experts."""
        return 3.0 * experts * MODEL.hidden * MODEL.inner * (1 if self.fp8 else 2)


class Step:
    """A step's buffers and its routing."""

    def __init__(self, bench: Bench, layer: Layer, tokens: int, *, each: int | None = None) -> None:
        m = MODEL
        self.layer, self.tokens = layer, tokens
        self.pairs = tokens * m.chosen
        self.x = bench.normal(tokens, m.hidden)
        self.small = self.x.to(FP8) if layer.fp8 else self.x
        self.x_scale = torch.ones(tokens, dtype=F32, device=bench.device) if layer.fp8 else None
        self.logits = bench.normal(tokens, m.experts, dtype=F32)
        self.ids, self.weights = bench.zeros(tokens, m.chosen), bench.empty(tokens, m.chosen, dtype=F32)
        self.inner = bench.normal(self.pairs, m.inner)
        self.inner_small = self.inner.to(FP8) if layer.fp8 else self.inner
        self.inner_scale = torch.ones(self.pairs, dtype=F32, device=bench.device) if layer.fp8 else None
        self.answers = bench.empty(self.pairs, m.hidden)
        self.stream, self.normed = bench.normal(tokens, m.hidden, dtype=F32), bench.empty(tokens, m.hidden)
        self.each = each or (1 if tokens == 1 else 16 if tokens <= 512 else 32)
        programs = triton.cdiv(tokens, self.each)
        self.counts, self.base = (bench.zeros(programs, m.experts) for _ in range(2))
        self.order, self.used = bench.zeros(self.pairs), bench.zeros(1)
        self.count = torch.full((1,), tokens, dtype=torch.int32, device=bench.device)
        self.blocks = bench.zeros(3, route.most_blocks(self.pairs, experts=m.experts, block=16))
        self.run_route()

    def run_route(self) -> None:
        route.route(
            self.logits, ROUTING, bias=None, ids=self.ids, weights=self.weights, tokens_each=self.each, counts=self.counts,
            count=self.count, pdl=True,
        )  # fmt: skip

    def table(self, block: int) -> torch.Tensor:
        most = route.most_blocks(self.pairs, experts=MODEL.experts, block=block)
        return self.blocks.view(-1)[: 3 * most].view(3, most)

    def run_sort(self, block: int) -> None:
        route.sort_pairs(
            self.ids, experts=MODEL.experts, block=block, tokens_each=self.each, counts=self.counts, base=self.base, order=self.order,
            blocks=self.table(block), used=self.used, count=self.count, pdl=True,
        )  # fmt: skip

    def places(self, config: TileConfig, way: str) -> dict:
        return (
            {"count": self.count}
            if way == "few"
            else {"order": self.order, "blocks": self.table(config.bm), "used": self.used}
        )

    def run_gate_up(self, config: TileConfig, way: str, out: torch.Tensor | None = None) -> None:
        moe.expert_tiles(
            self.small, self.layer.gate_up, self.ids, out=self.inner if out is None else out, gated=True, scale=self.layer.gate_up_scale,
            x_scale=self.x_scale, config=config, pdl=True, **self.places(config, way),
        )  # fmt: skip

    def run_down(self, config: TileConfig, way: str, out: torch.Tensor | None = None) -> None:
        moe.expert_tiles(
            self.inner_small, self.layer.down, self.ids, out=self.answers if out is None else out, gated=False,
            scale=self.layer.down_scale, x_scale=self.inner_scale, config=config, pdl=True, **self.places(config, way),
        )  # fmt: skip

    def distinct(self) -> int:
        """Experts that are read."""
        return MODEL.experts if self.layer.bench.dry else int(self.ids.unique().numel())


# --------------------------------------------------------------------------------------------------------------- groups


@dataclass
class Candidate:
    case: Case
    off: bool = False


def sort_error(step: Step) -> float:
    """How many pairs lie elsewhere than in the reference."""
    step.run_route()
    step.run_sort(32)
    wanted, _ = reference_moe.dispatch(step.ids.cpu(), experts=MODEL.experts)
    return float((wanted.to(step.order.device) != step.order).sum())


def route_error(step: Step) -> float:
    """How many experts differ, and by how much weights do."""
    step.run_route()
    wanted, weights = reference_moe.route(step.logits, ROUTING)
    return float((wanted != step.ids).sum()) + difference(step.weights, weights)


def route_candidates(bench: Bench) -> Iterator[Candidate]:
    layer = Layer(bench, fp8=False)
    for tokens, each in ((1, 1), (16, 16), (256, 16), (8192, 32), (8192, 16), (8192, 64)):
        step = Step(bench, layer, tokens, each=each)
        amount, off = tokens * (MODEL.experts * 4.0 + MODEL.chosen * 8), each < 64 and (tokens, each) != (8192, 16)
        text = f"{each} tokens a program"
        case = Case(
            "route", f"route T={tokens}", text, [step.run_route], bytes=amount, error=partial(route_error, step)
        )
        yield Candidate(case, off)
        if tokens > 1:
            call = partial(step.run_sort, 32)
            case = Case("route", f"sort T={tokens}", text, [call], bytes=amount, error=partial(sort_error, step))
            yield Candidate(case, off)


def gemv_candidates(bench: Bench) -> Iterator[Candidate]:
    """The dense matrices of a layer for one token."""
    for name, features, depth, normed in (
        ("qkv", 5120, 2048, True),
        ("o", 2048, 4096, False),
        ("router", 128, 2048, True),
    ):
        weights = [bench.normal(features, depth, scale=depth**-0.5) for _ in range(base.copies(features * depth * 2))]
        gain = bench.normal(depth, dtype=F32) if normed else None
        x = bench.normal(1, depth, dtype=F32 if normed else BF16)
        out = bench.normal(1, features, dtype=F32)
        now = TABLE.gemv(features, depth, fp8=False)
        found = [
            GemvConfig(4, 1024, 8, narrow=True), GemvConfig(2, 1024, 4, narrow=True), GemvConfig(4, 1024, 4, narrow=True),
            GemvConfig(1, 2048, 2),
            GemvConfig(2, 2048, 4), GemvConfig(1, 1024, 4, narrow=True), GemvConfig(1, 2048, 4, narrow=True), GemvConfig(2, 4096, 8),
        ]  # fmt: skip
        for config in (now, *(c for c in found if c != now)):

            def call(weight, target, x=x, gain=gain, config=config, normed=normed):
                residual = None if normed else target
                skinny.skinny_linear(
                    x, weight, out=target, norm=gain, eps=1e-6, residual=residual, config=config, pdl=True
                )

            def error(call=call, weight=weights[0], x=x, gain=gain, out=out):
                target = torch.zeros_like(out)
                call(weight, target)
                y = x.double()
                if gain is not None:
                    y = y * torch.rsqrt(y.square().mean(1, keepdim=True) + 1e-6) * gain.double()
                return difference(target, y @ weight.double().T)

            calls = [partial(call, weight, out) for weight in weights]
            case = Case("one", f"one {name}", tag(config), calls, bytes=2.0 * features * depth, error=error)
            yield Candidate(case, config == now)


GEMV = {
    (True, False): [
        ExpertGemvConfig(4, 1024, 4, 2), ExpertGemvConfig(2, 1024, 4, 2), ExpertGemvConfig(2, 2048, 4, 1), ExpertGemvConfig(4, 2048, 8, 1),
        ExpertGemvConfig(8, 512, 4, 2), ExpertGemvConfig(8, 512, 4, 4), ExpertGemvConfig(4, 512, 4, 4), ExpertGemvConfig(2, 1024, 2, 2),
        ExpertGemvConfig(1, 2048, 2, 1), ExpertGemvConfig(4, 1024, 4, 2, narrow=True), ExpertGemvConfig(2, 1024, 4, 2, narrow=True),
        ExpertGemvConfig(2, 2048, 4, 1, narrow=True), ExpertGemvConfig(4, 1024, 8, 2, narrow=True),
        ExpertGemvConfig(8, 512, 4, 2, narrow=True),
        ExpertGemvConfig(2, 1024, 2, 2, narrow=True), ExpertGemvConfig(4, 512, 4, 4, narrow=True),
    ],
    (False, False): [
        ExpertGemvConfig(4, 256, 4, 12), ExpertGemvConfig(4, 256, 4, 6), ExpertGemvConfig(4, 256, 4, 24), ExpertGemvConfig(2, 256, 2, 12),
        ExpertGemvConfig(2, 256, 2, 24), ExpertGemvConfig(2, 1024, 4, 8), ExpertGemvConfig(2, 1024, 4, 4), ExpertGemvConfig(1, 1024, 2, 8),
        ExpertGemvConfig(8, 256, 4, 6), ExpertGemvConfig(1, 256, 1, 24), ExpertGemvConfig(4, 256, 4, 12, narrow=True),
    ],
    (True, True): [
        ExpertGemvConfig(4, 512, 4, 4, narrow=True), ExpertGemvConfig(8, 512, 4, 2, narrow=True),
        ExpertGemvConfig(4, 1024, 4, 2, narrow=True),
        ExpertGemvConfig(4, 1024, 4, 2),
    ],
    (False, True): [
        ExpertGemvConfig(4, 256, 4, 4, narrow=True), ExpertGemvConfig(4, 256, 4, 12, narrow=True),
        ExpertGemvConfig(8, 256, 4, 4, narrow=True),
        ExpertGemvConfig(4, 256, 4, 12),
    ],
}  # fmt: skip
"""(gated, FP8) -> candidates."""


def one_candidates(bench: Bench, layer: Layer) -> Iterator[Candidate]:
    m, count = MODEL, MODEL.experts // MODEL.chosen
    order = (
        torch.arange(m.experts, device=bench.device).int()
        if bench.dry
        else torch.randperm(m.experts, device=bench.device).int()
    )
    sets = [
        order[i * m.chosen : (i + 1) * m.chosen][None] for i in range(count)
    ]  # disjoint: nothing is found in the L2
    stream, inner = bench.normal(1, m.hidden, dtype=F32), bench.normal(m.chosen, m.inner)
    out, weights = bench.normal(1, m.hidden, dtype=F32), bench.normal(1, m.chosen, dtype=F32)

    def stored(part: torch.Tensor, scale: torch.Tensor | None, chosen: torch.Tensor) -> torch.Tensor:
        values = part[chosen[0].long()].double()
        return values if scale is None else values * scale[chosen[0].long()].double()[..., None]

    for gated in (True, False):
        name = ("gate_up" if gated else "down") + (" fp8" if layer.fp8 else "")
        now = TABLE.expert_gemv(m.hidden if gated else m.inner, gated=gated, fp8=layer.fp8)
        for config in (now, *(c for c in GEMV[gated, layer.fp8] if c != now)):

            def call(ids, target, gated=gated, config=config):
                if gated:
                    moe.one_gate_up(
                        stream, ids, layer.gate_up, out=target, scale=layer.gate_up_scale, norm=layer.gain, eps=1e-6,
                        config=config, pdl=True
                    )  # fmt: skip
                else:
                    moe.one_down(
                        inner, ids, weights, layer.down, out=target, scale=layer.down_scale, residual=out, config=config, pdl=True
                    )  # fmt: skip

            def error(gated=gated, call=call):
                target = bench.empty(m.chosen, m.inner) if gated else bench.empty(1, m.hidden, dtype=F32)
                call(sets[0], target)
                if gated:
                    x = (
                        stream.double()
                        * torch.rsqrt(stream.double().square().mean(1, keepdim=True) + 1e-6)
                        * layer.gain.double()
                    )
                    both = stored(layer.gate_up, layer.gate_up_scale, sets[0]) @ x[0]
                    truth = torch.nn.functional.silu(both[:, : m.inner]) * both[:, m.inner :]
                else:
                    each = torch.einsum("knf,kf->kn", stored(layer.down, layer.down_scale, sets[0]), inner.double())
                    truth = out.double() + weights.double() @ each
                return difference(target, truth)

            target = inner if gated else bench.empty(1, m.hidden, dtype=F32)
            calls = [lambda ids=ids, call=call, target=target: call(ids, target) for ids in sets]
            amount = layer.read_bytes(m.chosen) * (2 / 3 if gated else 1 / 3)
            yield Candidate(Case("one", f"one {name}", tag(config), calls, bytes=amount, error=error), config == now)


def tile_configs(tokens: int, now: TileConfig, *, fp8: bool) -> list[TileConfig]:
    if tokens <= 64:
        found = [
            TileConfig(16, 64, 128, 1, 4, 3), TileConfig(16, 128, 64, 1, 4, 4), TileConfig(16, 128, 128, 1, 4, 3),
            TileConfig(16, 64, 64, 1, 4, 6), TileConfig(16, 64, 256, 1, 4, 2),
        ]  # fmt: skip
    elif tokens <= 512:
        found = [
            TileConfig(16, 64, 128, 1, 4, 4), TileConfig(16, 128, 64, 1, 4, 4), TileConfig(32, 64, 128, 1, 4, 4),
            TileConfig(32, 64, 128, 1, 4, 3),
            TileConfig(32, 128, 64, 1, 4, 4), TileConfig(32, 128, 64, 1, 4, 3), TileConfig(32, 128, 128, 1, 4, 3),
            TileConfig(32, 128, 64, 1, 8, 4),
            TileConfig(16, 128, 64, 1, 4, 3), TileConfig(64, 64, 128, 1, 4, 3), TileConfig(64, 128, 64, 1, 4, 3),
            TileConfig(64, 128, 64, 1, 8, 4),
        ]  # fmt: skip
    else:
        found = [
            TileConfig(64, 128, 64, 1, 4, 4), TileConfig(64, 128, 64, 1, 4, 3), TileConfig(64, 256, 64, 1, 8, 3),
            TileConfig(128, 128, 64, 1, 4, 3),
            TileConfig(128, 128, 64, 1, 8, 3), TileConfig(128, 128, 64, 1, 8, 4), TileConfig(128, 256, 64, 1, 8, 3),
            TileConfig(256, 128, 64, 1, 8, 3),
        ]  # fmt: skip
    found += [replace(c, tma=True) for c in engine_configs(tokens)]
    if fp8:
        found = found[:4] + [replace(c, bk=128) for c in found[-3:] if c.bm < 256]
    return list(dict.fromkeys(c for c in found if c != now))


def engine_configs(tokens: int) -> list[TileConfig]:
    """Weights by the tensor copy engine: for the sizes that the speed rows ask about."""
    if tokens in (16, 128):
        return [TileConfig(16, 128, 64, 1, 4, 4), TileConfig(16, 128, 128, 1, 4, 3)]
    if tokens in (256, 512):
        return [TileConfig(32, 128, 64, 1, 4, 4), TileConfig(32, 128, 64, 1, 4, 3), TileConfig(32, 128, 128, 1, 4, 3)]
    if tokens in (1024, 8192):
        return [
            TileConfig(64, 128, 64, 1, 4, 4), TileConfig(128, 128, 64, 1, 8, 4), TileConfig(128, 256, 64, 1, 8, 3),
            TileConfig(128, 256, 64, 1, 8, 4), TileConfig(256, 128, 64, 1, 8, 3),
        ]  # fmt: skip
    return []


def tile_candidates(bench: Bench, layer: Layer, sizes: tuple[int, ...]) -> Iterator[Candidate]:
    m = MODEL
    for tokens in sizes:
        step = Step(bench, layer, tokens)
        read = layer.read_bytes(step.distinct())
        for gated in (True, False):
            name = f"{'gate_up' if gated else 'down'}{' fp8' if layer.fp8 else ''} T={tokens}"
            depth = m.hidden if gated else m.inner
            now = TABLE.expert_tile(tokens, m.chosen, m.experts, depth, fp8=layer.fp8)
            flops = 2.0 * step.pairs * m.hidden * m.inner * (2 if gated else 1)
            ways = (
                ["few", "sorted"] if tokens in (8, 16) else ["few" if tokens <= TABLE.few_expert_tokens else "sorted"]
            )
            if not bench.dry and not layer.fp8 and tokens >= 32 and gated:
                yield from library_candidate(step, layer, name, read * 2 / 3, flops)
            for config in (now, *tile_configs(tokens, now, fp8=layer.fp8)):
                for way in ways:

                    def prepare(step=step, config=config, way=way):
                        if way == "sorted":
                            step.run_sort(config.bm)

                    def call(target=None, step=step, config=config, way=way, gated=gated):
                        (step.run_gate_up if gated else step.run_down)(config, way, target)

                    def error(step=step, gated=gated, way=way, call=call, prepare=prepare):
                        prepare()
                        target = torch.full_like(step.inner if gated else step.answers, float("nan"))
                        call(target)
                        return tile_error(step, layer, target, gated=gated, way=way)

                    off = config == now and way == ("few" if tokens <= TABLE.few_expert_tokens else "sorted")
                    case = Case(
                        "tiles", name, f"{way} {tag(config)}", [call], bytes=read * (2 / 3 if gated else 1 / 3), flops=flops, error=error
                    )  # fmt: skip
                    yield Candidate(case, off)


def tile_error(step: Step, layer: Layer, target: torch.Tensor, *, gated: bool, way: str) -> float:
    """Of some pairs, among them the first and the last."""
    m = MODEL
    some = torch.tensor(sorted({0, 1, step.pairs // 2, step.pairs - 1}), device=target.device)
    place = some
    pair = step.order.long()[some] if way == "sorted" else some
    expert = step.ids.view(-1)[pair].long()
    part, scale = (layer.gate_up, layer.gate_up_scale) if gated else (layer.down, layer.down_scale)
    values = part[expert].double() if scale is None else part[expert].double() * scale[expert].double()[..., None]
    source = pair // m.chosen if gated else place
    x = (step.small if gated else step.inner_small)[source].double()
    y = torch.einsum("pnk,pk->pn", values, x)
    if gated:
        y = torch.nn.functional.silu(y[:, : m.inner]) * y[:, m.inner :]
        return difference(target[place], y)
    return difference(target[pair], y)


def library_candidate(step: Step, layer: Layer, name: str, amount: float, flops: float) -> Iterator[Candidate]:
    """torch's grouped matmul on rows that are gathered already, without SwiGLU."""
    ends = torch.bincount(step.ids.view(-1).long(), minlength=MODEL.experts).cumsum(0).int()
    rows = step.x.repeat_interleave(MODEL.chosen, 0)

    def call() -> None:
        torch._grouped_mm(rows, layer.gate_up.transpose(1, 2), offs=ends)

    yield Candidate(
        Case("tiles", name, "torch._grouped_mm, rows gathered, no SwiGLU", [call], bytes=amount, flops=flops)
    )


def layer_candidates(bench: Bench, layer: Layer) -> Iterator[Candidate]:
    m = MODEL
    for tokens in (1, *SIZES):
        step = Step(bench, layer, tokens)
        read = layer.read_bytes(step.distinct())
        flops = 6.0 * step.pairs * m.hidden * m.inner
        for pdl_text, sorted_too in (("as planned", False), ("not early" if tokens == 1 else "sorted", True)):
            if sorted_too and tokens > TABLE.few_expert_tokens:
                continue

            def call(step=step, tokens=tokens, sorted_too=sorted_too):
                whole_layer(bench, step, sort=sorted_too or tokens > TABLE.few_expert_tokens, early=not sorted_too)

            name = f"layer{' fp8' if layer.fp8 else ''} T={tokens} ({step.distinct()} experts)"
            yield Candidate(Case("layer", name, pdl_text, [call] * 4, bytes=read, flops=flops), not sorted_too)


def whole_layer(bench: Bench, step: Step, *, sort: bool, early: bool) -> None:
    """Router to next norm. What the router says is not used: the routing stays uniform."""
    m, layer = MODEL, step.layer
    if step.tokens == 1:
        router = TABLE.gemv(m.experts, m.hidden, fp8=False)
        skinny.skinny_linear(
            step.stream, layer.router, out=router_out(bench, step), norm=layer.gain, eps=1e-6, config=router, pdl=True
        )
        step.run_route()
        inner = step.inner
        moe.one_gate_up(
            step.stream, step.ids, layer.gate_up, out=inner, scale=layer.gate_up_scale, norm=layer.gain, eps=1e-6,
            config=TABLE.expert_gemv(m.hidden, gated=True, fp8=layer.fp8), pdl=True, late=early,
        )  # fmt: skip
        moe.one_down(
            inner, step.ids, step.weights, layer.down, out=step.stream, scale=layer.down_scale, residual=step.stream,
            config=TABLE.expert_gemv(m.inner, gated=False, fp8=layer.fp8), pdl=True, early=early,
        )  # fmt: skip
        return
    tile = TABLE.tile(step.tokens, m.experts, m.hidden, fp8=False)
    out = router_out(bench, step)
    if tile is not None:
        work, arrived = router_scratch(bench, step, tile)
        skinny.skinny_linear(step.x, layer.router, out=out, config=tile, workspace=work, arrived=arrived, pdl=True)
    elif not bench.dry:
        torch.mm(step.x, layer.router.T, out_dtype=F32, out=out)
    step.run_route()
    way = "sorted" if sort else "few"
    configs = [TABLE.expert_tile(step.tokens, m.chosen, m.experts, k, fp8=layer.fp8) for k in (m.hidden, m.inner)]
    if sort:
        step.run_sort(configs[0].bm)
    if layer.fp8:
        norm.quantise_tokens(step.x, out=step.small, scale=step.x_scale, pdl=True)
    step.run_gate_up(configs[0], way)
    if layer.fp8:
        norm.quantise_tokens(step.inner, out=step.inner_small, scale=step.inner_scale, pdl=True)
    step.run_down(configs[1], way)
    moe.combine_norm(
        step.stream, step.answers, step.weights, layer.gain, eps=1e-6, out=step.normed, count=step.count, pdl=True
    )


def router_out(bench: Bench, step: Step) -> torch.Tensor:
    if not hasattr(step, "router_out"):
        step.router_out = bench.empty(step.tokens, MODEL.experts, dtype=F32)
    return step.router_out


def router_scratch(bench: Bench, step: Step, tile: TileConfig) -> tuple[torch.Tensor, torch.Tensor]:
    if not hasattr(step, "router_work"):
        need = skinny.workspace_floats(MODEL.experts, config=tile, gated=False)
        step.router_work = (bench.empty(need, dtype=F32), bench.zeros(64))
    return step.router_work


def all_candidates(bench: Bench, groups: list[str]) -> Iterator[Candidate]:
    if "route" in groups:
        yield from route_candidates(bench)
    if "one" in groups:
        yield from gemv_candidates(bench)
    for fp8 in (False, True):
        layer = Layer(bench, fp8=fp8)
        if "one" in groups:
            yield from one_candidates(bench, layer)
        if "tiles" in groups:
            yield from tile_candidates(bench, layer, SIZES if not fp8 else (8, 128, 1024))
        if "layer" in groups:
            yield from layer_candidates(bench, layer)
        del layer
        if not bench.dry and bench.device == "cuda":
            torch.cuda.empty_cache()


# ----------------------------------------------------------------------------------------------------------------- main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="route,one,layer,tiles")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--shards", type=int, default=0)
    parser.add_argument("--shard", type=int, default=None, help="(internal) compile every n-th candidate and leave")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    groups = args.only.split(",")
    began = time.perf_counter()
    if args.dry:
        base.dry_driver()
    compiling = args.dry or args.shard is not None
    bench = Bench(device="cpu" if args.dry else "cuda", dry=compiling)
    if compiling:
        seen = failed = 0
        for index, candidate in enumerate(all_candidates(bench, groups)):
            if args.shard is None or index % args.shards == args.shard:
                try:
                    candidate.case.calls[0]()
                except Exception as problem:
                    failed += 1
                    print(
                        f"{candidate.case.op} {candidate.case.candidate}: {type(problem).__name__}: {str(problem)[:300]}",
                        flush=True,
                    )
                seen += 1
        print(f"compiled {seen} candidates, {failed} failed, in {time.perf_counter() - began:.0f} s", flush=True)
        return
    if args.shards:
        words = [sys.executable, __file__, *sys.argv[1:]]
        running = [subprocess.Popen([*words, "--shard", str(i)], stdout=subprocess.DEVNULL) for i in range(args.shards)]
        for process in running:
            process.wait()
        print(f"# compiled in {time.perf_counter() - began:.0f} s", flush=True)
    limits = base.ceilings()
    print("# ceilings: " + ", ".join(f"{name} {value / 1e12:.3f} T/s" for name, value in limits.items()), flush=True)
    rows: list[dict] = []

    def save() -> None:
        if args.out:
            record = {
                "card": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
                "command": " ".join(sys.argv), "ceilings": limits, "ops": rows, "seconds": time.perf_counter() - began,
            }  # fmt: skip
            Path(args.out).write_text(json.dumps(record, indent=1))

    def report(op: str) -> None:
        """Off, the library, and the two best of one op."""
        of_op = [r for r in rows if r["op"] == op]
        good = sorted((r for r in of_op if not r["note"]), key=lambda r: r["us"])
        for r in good[:2] + [r for r in good[2:] if r["off"] or "torch" in r["candidate"]]:
            error = "" if r["error"] is None else f"{r['error']:.1e}"
            print(
                f"{'off' if r['off'] else 'on ':3} {r['op']:34} {r['candidate']:52} {r['us']:9.2f} us {r['gb_per_s']:6.0f} GB/s "
                f"{r['tflop_per_s']:6.1f} TF/s {r['fraction']:5.2f} {error}",
                flush=True,
            )
        for r in of_op:
            if r["note"]:
                print(f"!   {r['op']} {r['candidate']}: {r['note']}", flush=True)

    last = None
    for candidate in all_candidates(bench, groups):
        result = asdict(base.measured(candidate.case, limits)) | {"off": candidate.off}
        if last is not None and last != result["op"]:
            report(last)
            save()
        last = result["op"]
        rows.append(result)
    if last is not None:
        report(last)
    save()
    print(f"# {len(rows)} candidates, done in {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
