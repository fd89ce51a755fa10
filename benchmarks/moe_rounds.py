"""Open questions about mixtures of experts: candidates of every kernel at the shape of one model, in minutes on one card.

    PYTHONPATH=src python benchmarks/moe_rounds.py --shards 14 --out moe.json      all groups (at most 140 s on an H200, see --seconds)
    PYTHONPATH=src python benchmarks/moe_rounds.py --model deepseek-v2-lite ...    of another model
    PYTHONPATH=src python benchmarks/moe_rounds.py --only one,layer                some groups
    PYTHONPATH=src python benchmarks/moe_rounds.py --dry                           no GPU: compiles every candidate for sm_90

    layer    a whole layer's mixture, from the router to the next norm         one     one token: GEMVs over the chosen experts
    shared   four layers' programs with a shared expert, one stream or two     tiles   2 tokens and more, by size of step
    dense    matmuls by FP8 weights with scales by blocks                      route   routing, counting and sorting

FP8 ones come by output ("fp8") and by blocks ("fp8_block"). In this order, which is that of importance; what the time does not suffice for
is left out, and the record says so.

Off: what the table of constants says now. Knows: which candidates are open. Refuses to know: how to time and record (rounds.py).
Routing is uniform and random, which reads the most weights: a trained router's tokens share experts more often.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import rounds
import torch
import triton
from rounds import BF16, F32, FP8, Bench, Case, copies, difference, settle, tag, written

from tradewind.kernels import reference_fp8, reference_moe
from tradewind.kernels.ops import PackedExperts, PackedMatrix, Routing
from tradewind.kernels.triton import blocks, moe, norm, route, skinny
from tradewind.kernels.triton.ops import CudaOps
from tradewind.kernels.triton.planning import plan
from tradewind.kernels.triton.program import Bucket
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
    dense: tuple[tuple[str, int, int, bool], ...]
    """Matrices of a layer beside the experts: name, outputs, depth, whether its input is normed."""
    shared: int = 0
    """Inner size of the shared expert."""


MODELS = {
    mixture.name: mixture
    for mixture in (
        Mixture(
            "deepseek-v2-lite", 64, 6, 2048, 1408, shared=2816,
            dense=(("q", 3072, 2048, True), ("latent", 576, 2048, True), ("o", 2048, 2048, False), ("router", 64, 2048, True)),
        ),
        Mixture(
            "qwen3-30b-a3b", 128, 8, 2048, 768, dense=(("qkv", 5120, 2048, True), ("o", 2048, 4096, False), ("router", 128, 2048, True))
        ),
    )
}  # fmt: skip


def asked_model() -> Mixture:
    """The model that the command line names: everything below is of its shape."""
    words = [word.removeprefix("--model=") for word in sys.argv if word.startswith("--model=")]
    words += [after for word, after in zip(sys.argv, sys.argv[1:], strict=False) if word == "--model"]
    return MODELS.get(words[-1] if words else "qwen3-30b-a3b", MODELS["qwen3-30b-a3b"])


MODEL = asked_model()
ROUTING = Routing(top_k=MODEL.chosen)
SIZES = (2, 8, 16, 32, 64, 128, 256, 1024, 8192)
LAYOUTS = ("bf16", "fp8", "fp8_block")
GROUPS = ("shared", "layer", "one", "dense", "tiles", "route")


class Layer:
    """A layer's weights; the whole of them is several times the L2, so steps of many tokens need no second."""

    def __init__(self, bench: Bench, *, layout: str) -> None:
        m = MODEL
        self.bench, self.layout, self.fp8 = bench, layout, layout != "bf16"
        self.gate_up, self.gate_up_scale = self._drawn(2 * m.inner, m.hidden)
        self.down, self.down_scale = self._drawn(m.hidden, m.inner)
        self.router = bench.normal(m.experts, m.hidden, scale=m.hidden**-0.5)
        self.gain = bench.normal(m.hidden, dtype=F32)

    def _drawn(self, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = (MODEL.experts, n, k)
        if not self.fp8:
            return self.bench.normal(*shape, scale=k**-0.5), None
        by = (n,) if self.layout == "fp8" else (n // blocks.ROWS, blocks.parts(k))
        scale = torch.full((MODEL.experts, *by), k**-0.5 / 100, dtype=F32, device=self.bench.device)
        return self.bench.normal(*shape, dtype=FP8, scale=100.0), scale

    def values(self, which: str, experts: torch.Tensor) -> torch.Tensor:
        """float64 weights of some experts."""
        part, scale = getattr(self, which), getattr(self, f"{which}_scale")
        if scale is None:
            return part[experts].double()
        if self.layout == "fp8_block":
            return reference_fp8.weight_values(part[experts], scale[experts], rows=blocks.ROWS)
        return part[experts].double() * scale[experts].double()[..., None]

    def token_scale(self, rows: int, width: int) -> torch.Tensor | None:
        """Scales of rounded tokens: ones."""
        if not self.fp8:
            return None
        shape = (rows,) if self.layout == "fp8" else (rows, blocks.parts(width))
        return torch.ones(shape, dtype=F32, device=self.bench.device)

    @property
    def suffix(self) -> str:
        return f" {self.layout}" if self.fp8 else ""

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
        self.x_scale = layer.token_scale(tokens, m.hidden)
        self.logits = bench.normal(tokens, m.experts, dtype=F32)
        self.ids, self.weights = bench.zeros(tokens, m.chosen), bench.empty(tokens, m.chosen, dtype=F32)
        self.inner = bench.normal(self.pairs, m.inner)
        self.inner_small = self.inner.to(FP8) if layer.fp8 else self.inner
        self.inner_scale = layer.token_scale(self.pairs, m.inner)
        self.answers = bench.empty(self.pairs, m.hidden)
        self.stream, self.normed = bench.normal(tokens, m.hidden, dtype=F32), bench.empty(tokens, m.hidden)
        self.each = each or (1 if tokens == 1 else 16 if tokens <= 512 else 32)
        programs = triton.cdiv(tokens, self.each)
        self.counts, self.base = (bench.zeros(programs, m.experts) for _ in range(2))
        self.order, self.used = bench.zeros(self.pairs), bench.zeros(1)
        self.count = bench.full(1, tokens)
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
        if way == "few":
            return {"count": self.count}
        return {"order": self.order, "blocks": self.table(config.bm), "used": self.used}

    def run_tiles(self, config: TileConfig, way: str, *, gated: bool, out: torch.Tensor | None = None) -> None:
        """Gate and up, or down; without `out` into the step's own buffers."""
        layer, own = self.layer, self.inner if gated else self.answers
        x, x_scale = (self.small, self.x_scale) if gated else (self.inner_small, self.inner_scale)
        weight, scale = (layer.gate_up, layer.gate_up_scale) if gated else (layer.down, layer.down_scale)
        moe.expert_tiles(
            x, weight, self.ids, out=own if out is None else out, gated=gated, scale=scale, x_scale=x_scale, config=config, pdl=True,
            **self.places(config, way),
        )  # fmt: skip

    def distinct(self) -> int:
        """Experts that are read."""
        return MODEL.experts if self.layer.bench.dry else int(self.ids.unique().numel())


# --------------------------------------------------------------------------------------------------------------- groups


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


def route_cases(bench: Bench) -> Iterator[Case]:
    layer = Layer(bench, layout="bf16")
    for tokens, each in ((1, 1), (16, 16), (256, 16), (8192, 32), (8192, 16), (8192, 64)):
        step = Step(bench, layer, tokens, each=each)
        amount, off = tokens * (MODEL.experts * 4.0 + MODEL.chosen * 8), each < 64 and (tokens, each) != (8192, 16)
        case = partial(Case, "route", candidate=f"{each} tokens a program", bytes=amount, off=off)
        yield case(f"route T={tokens}", calls=[step.run_route], error=partial(route_error, step))
        if tokens > 1:
            yield case(f"sort T={tokens}", calls=[partial(step.run_sort, 32)], error=partial(sort_error, step))


def gemv_cases(bench: Bench) -> Iterator[Case]:
    """The dense matrices of a layer for one token."""
    for name, features, depth, normed in MODEL.dense:
        weights = [bench.normal(features, depth, scale=depth**-0.5) for _ in range(copies(features * depth * 2))]
        gain = bench.normal(depth, dtype=F32) if normed else None
        x = bench.normal(1, depth, dtype=F32 if normed else BF16)
        out = bench.normal(1, features, dtype=F32)
        now = TABLE.gemv(features, depth, fp8=False)
        found = [
            GemvConfig(4, 1024, 8, narrow=True), GemvConfig(2, 1024, 4, narrow=True), GemvConfig(4, 1024, 4, narrow=True),
            GemvConfig(1, 2048, 2),
            GemvConfig(2, 2048, 4), GemvConfig(1, 1024, 4, narrow=True), GemvConfig(1, 2048, 4, narrow=True), GemvConfig(2, 4096, 8),
        ]  # fmt: skip
        truth = None
        if not bench.dry:
            y = x.double()
            if gain is not None:
                y = y * torch.rsqrt(y.square().mean(1, keepdim=True) + 1e-6) * gain.double()
            truth = y @ weights[0].double().T
        for config in (now, *(c for c in found if c != now)):
            call = partial(gemv, x, gain=gain, config=config)
            error = partial(gemv_error, partial(call, weights[0]), out, truth)
            calls = [partial(call, weight, out=out) for weight in weights]
            amount = 2.0 * features * depth
            yield Case("one", f"one {name}", tag(config), calls, bytes=amount, error=error, off=config == now)


def gemv(
    x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor, gain: torch.Tensor | None, config: GemvConfig
) -> None:
    """Behind a norm, or added to what is there."""
    residual = None if gain is not None else out
    skinny.skinny_linear(x, weight, out=out, norm=gain, eps=1e-6, residual=residual, config=config, pdl=True)


def gemv_error(call: Callable[..., object], like: torch.Tensor, truth: torch.Tensor) -> float:
    """Added to zeros, it is the product."""
    out = torch.zeros_like(like)
    call(out=out)
    return difference(out, truth)


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
        ExpertGemvConfig(1, 512, 2, 9), ExpertGemvConfig(2, 512, 2, 9), ExpertGemvConfig(4, 512, 4, 6), ExpertGemvConfig(1, 256, 1, 12),
        ExpertGemvConfig(2, 256, 1, 12),
    ],
    (True, True): [
        ExpertGemvConfig(4, 512, 4, 4, narrow=True), ExpertGemvConfig(8, 512, 4, 2, narrow=True),
        ExpertGemvConfig(4, 1024, 4, 2, narrow=True),
        ExpertGemvConfig(4, 1024, 4, 2),
    ],
    (False, True): [
        ExpertGemvConfig(4, 256, 4, 4, narrow=True), ExpertGemvConfig(4, 256, 4, 12, narrow=True),
        ExpertGemvConfig(8, 256, 4, 4, narrow=True),
        ExpertGemvConfig(4, 256, 4, 12), ExpertGemvConfig(8, 128, 4, 8, narrow=True), ExpertGemvConfig(4, 512, 4, 3, narrow=True),
    ],
}  # fmt: skip
"""(gated, FP8) -> candidates."""


def one_cases(bench: Bench, layer: Layer) -> Iterator[Case]:
    m, count = MODEL, MODEL.experts // MODEL.chosen
    order = (torch.arange if bench.dry else torch.randperm)(m.experts, device=bench.device).int()
    # Disjoint: nothing is found in the L2.
    sets = [order[i * m.chosen : (i + 1) * m.chosen][None] for i in range(count)]
    stream, inner = bench.normal(1, m.hidden, dtype=F32), bench.normal(m.chosen, m.inner)
    held, weights = bench.normal(1, m.hidden, dtype=F32), bench.normal(1, m.chosen, dtype=F32)

    def call(ids: torch.Tensor, *, out: torch.Tensor, gated: bool, config: ExpertGemvConfig) -> None:
        if gated:
            moe.one_gate_up(
                stream, ids, layer.gate_up, out=out, scale=layer.gate_up_scale, norm=layer.gain, eps=1e-6, config=config, pdl=True
            )  # fmt: skip
        else:
            moe.one_down(
                inner, ids, weights, layer.down, out=out, scale=layer.down_scale, residual=held, config=config, pdl=True
            )

    def truth(gated: bool) -> torch.Tensor:
        if gated:
            x = stream.double()
            x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6) * layer.gain.double()
            both = layer.values("gate_up", sets[0][0].long()) @ x[0]
            return torch.nn.functional.silu(both[:, : m.inner]) * both[:, m.inner :]
        each = torch.einsum("knf,kf->kn", layer.values("down", sets[0][0].long()), inner.double())
        return held.double() + weights.double() @ each

    for gated in (True, False):
        name = ("gate_up" if gated else "down") + layer.suffix
        now = TABLE.expert_gemv(*((m.inner, m.hidden) if gated else (m.hidden, m.inner)), gated=gated, fp8=layer.fp8)
        amount = layer.read_bytes(m.chosen) * (2 / 3 if gated else 1 / 3)
        target = inner if gated else bench.empty(1, m.hidden, dtype=F32)
        for config in (now, *(c for c in GEMV[gated, layer.fp8] if c != now)):

            def error(gated=gated, target=target, config=config) -> float:
                return written(partial(call, sets[0], gated=gated, config=config), target, truth(gated))

            calls = [partial(call, ids, out=target, gated=gated, config=config) for ids in sets]
            yield Case("one", f"one {name}", tag(config), calls, bytes=amount, error=error, off=config == now)


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


def tile_cases(bench: Bench, layer: Layer, sizes: tuple[int, ...]) -> Iterator[Case]:
    m = MODEL
    for tokens in sizes:
        step = Step(bench, layer, tokens)
        read = layer.read_bytes(step.distinct())
        for gated in (True, False):
            name = f"{'gate_up' if gated else 'down'}{layer.suffix} T={tokens}"
            depth = m.hidden if gated else m.inner
            now = TABLE.expert_tile(tokens, m.chosen, m.experts, depth, fp8=layer.fp8)
            flops = 2.0 * step.pairs * m.hidden * m.inner * (2 if gated else 1)
            usual = "few" if tokens <= TABLE.few_expert_tokens else "sorted"
            case = partial(Case, "tiles", name, bytes=read * (2 / 3 if gated else 1 / 3), flops=flops)
            if not bench.dry and not layer.fp8 and tokens >= 32 and gated:
                yield case("torch._grouped_mm, rows gathered, no SwiGLU", [library_call(step)])
            for config in (now, *tile_configs(tokens, now, fp8=layer.fp8)):
                for way in ("few", "sorted") if tokens in (8, 16) else (usual,):
                    call = partial(step.run_tiles, config, way, gated=gated)
                    error = partial(tile_error, step, call, config, gated=gated, way=way)
                    off = config == now and way == usual
                    yield case(f"{way} {tag(config)}", [call], error=error, off=off)


def tile_error(step: Step, call: Callable[..., object], config: TileConfig, *, gated: bool, way: str) -> float:
    """Of some pairs, among them the first and the last."""
    m, layer = MODEL, step.layer
    if way == "sorted":
        step.run_sort(config.bm)
    target = torch.full_like(step.inner if gated else step.answers, float("nan"))
    call(out=target)
    some = torch.tensor(sorted({0, 1, step.pairs // 2, step.pairs - 1}), device=target.device)
    place = some
    pair = step.order.long()[some] if way == "sorted" else some
    expert = step.ids.view(-1)[pair].long()
    values = layer.values("gate_up" if gated else "down", expert)
    source = pair // m.chosen if gated else place
    x = (step.small if gated else step.inner_small)[source].double()
    y = torch.einsum("pnk,pk->pn", values, x)
    if gated:
        y = torch.nn.functional.silu(y[:, : m.inner]) * y[:, m.inner :]
        return difference(target[place], y)
    return difference(target[pair], y)


def library_call(step: Step) -> Callable[[], object]:
    """torch's grouped matmul on rows that are gathered already, without SwiGLU."""
    ends = torch.bincount(step.ids.view(-1).long(), minlength=MODEL.experts).cumsum(0).int()
    rows = step.x.repeat_interleave(MODEL.chosen, 0)
    return partial(torch._grouped_mm, rows, step.layer.gate_up.transpose(1, 2), offs=ends)


def layer_cases(bench: Bench, layer: Layer) -> Iterator[Case]:
    m = MODEL
    for tokens in (1, *SIZES):
        step = Step(bench, layer, tokens)
        read = layer.read_bytes(step.distinct())
        flops = 6.0 * step.pairs * m.hidden * m.inner
        few = tokens <= TABLE.few_expert_tokens
        name = f"layer{layer.suffix} T={tokens} ({step.distinct()} experts)"
        case = partial(Case, "layer", name, bytes=read, flops=flops)
        yield case("as planned", [partial(whole_layer, bench, step, sort=not few, early=True)] * 4, off=True)
        if few:
            text = "not early" if tokens == 1 else "sorted"
            yield case(text, [partial(whole_layer, bench, step, sort=True, early=False)] * 4)


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
            config=TABLE.expert_gemv(m.inner, m.hidden, gated=True, fp8=layer.fp8), pdl=True, late=early,
        )  # fmt: skip
        moe.one_down(
            inner, step.ids, step.weights, layer.down, out=step.stream, scale=layer.down_scale, residual=step.stream,
            config=TABLE.expert_gemv(m.hidden, m.inner, gated=False, fp8=layer.fp8), pdl=True, early=early,
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
        quantise(layer)(step.x, out=step.small, scale=step.x_scale, pdl=True)
    step.run_tiles(configs[0], way, gated=True)
    if layer.fp8:
        quantise(layer)(step.inner, out=step.inner_small, scale=step.inner_scale, pdl=True)
    step.run_tiles(configs[1], way, gated=False)
    moe.combine_norm(
        step.stream, step.answers, step.weights, layer.gain, eps=1e-6, out=step.normed, count=step.count, pdl=True
    )


def quantise(layer: Layer) -> Callable[..., None]:
    return blocks.quantise_columns if layer.layout == "fp8_block" else norm.quantise_tokens


def router_out(bench: Bench, step: Step) -> torch.Tensor:
    if not hasattr(step, "router_out"):
        step.router_out = bench.empty(step.tokens, MODEL.experts, dtype=F32)
    return step.router_out


def router_scratch(bench: Bench, step: Step, tile: TileConfig) -> tuple[torch.Tensor, torch.Tensor]:
    if not hasattr(step, "router_work"):
        need = skinny.workspace_floats(MODEL.experts, config=tile, gated=False)
        step.router_work = (bench.empty(need, dtype=F32), bench.zeros(64))
    return step.router_work


# ----------------------------------------------------------------------------------------------- blocks, dense; two lanes

DENSE_SIZES = (1, 8, 32, 64, 128, 512, 2048, 8192)


def dense_configs(rows: int, now: TileConfig) -> list[TileConfig]:
    if rows <= 64:
        bm = now.bm
        found = [
            TileConfig(bm, 64, 128, 1, 4, 4), TileConfig(bm, 64, 128, 2, 4, 4), TileConfig(bm, 64, 128, 4, 4, 4),
            TileConfig(bm, 128, 128, 1, 4, 4), TileConfig(bm, 128, 128, 2, 4, 3), TileConfig(bm, 64, 128, 1, 4, 6),
        ]  # fmt: skip
    else:
        found = [
            TileConfig(64, 64, 128, 1, 4, 4), TileConfig(64, 128, 128, 1, 4, 4), TileConfig(64, 128, 128, 1, 8, 4),
            TileConfig(128, 128, 128, 1, 8, 3), TileConfig(128, 128, 128, 1, 8, 4), TileConfig(128, 128, 128, 1, 4, 3),
            TileConfig(128, 64, 128, 1, 4, 4), TileConfig(256, 128, 128, 1, 8, 3),
        ]  # fmt: skip
    return [now, *(config for config in found if config != now)]


def dense_cases(bench: Bench) -> Iterator[Case]:
    """The largest matrix of a layer by blocks, beside the library's FP8 matmul with a scale for each output."""
    _, n, k, _ = MODEL.dense[0]
    count = copies(n * k)
    weights = [bench.normal(n, k, dtype=FP8, scale=100.0) for _ in range(count)]
    scale = torch.rand((n // blocks.ROWS, blocks.parts(k)), device=bench.device) * (0.02 * k**-0.5)
    for rows in DENSE_SIZES:
        x, out = bench.normal(rows, k), bench.empty(rows, n)
        small, by_token = bench.empty(rows, k, dtype=FP8), bench.empty(rows, blocks.parts(k), dtype=F32)
        if not bench.dry:
            blocks.quantise_columns(x, out=small, scale=by_token)

        def truth(weight=weights[0], small=small, by_token=by_token, x=x, rows=rows) -> torch.Tensor:
            tokens = x.double() if rows == 1 else reference_fp8.token_values(small, by_token)
            return tokens @ reference_fp8.weight_values(weight, scale, rows=blocks.ROWS).T

        amount, flops = 1.0 * n * k + 3.0 * rows * (n + k), 2.0 * rows * n * k
        name = f"fp8_block [{n}, {k}] T={rows}"
        case = partial(Case, "dense", name, bytes=amount, flops=flops)
        now = TABLE.gemv(n, k, fp8=True) if rows == 1 else TABLE.block_tile(rows, n, k)
        if isinstance(now, GemvConfig):
            configs: list = [
                now, GemvConfig(8, 512, 4, narrow=True, half=True, ahead=4), GemvConfig(4, 512, 4, narrow=True, half=True, ahead=4),
                GemvConfig(8, 512, 4, narrow=True), GemvConfig(4, 1024, 4, narrow=True),
                GemvConfig(8, 256, 4, narrow=True, half=True, ahead=8),
            ]  # fmt: skip
        else:
            configs = dense_configs(rows, now)
        work, arrived = dense_scratch(bench)
        for config in configs:
            if rows == 1:
                call = partial(skinny.skinny_linear, x, scale=scale, config=config, pdl=True)
            elif rows <= 64:
                call = partial(
                    skinny.skinny_linear, small, scale=scale, x_scale=by_token, config=config, workspace=work, arrived=arrived, pdl=True
                )  # fmt: skip
            else:
                call = partial(skinny.fixed_linear, small, scale=scale, x_scale=by_token, tile=config, pdl=True)

            def error(call=call, out=out, truth=truth) -> float:
                return written(partial(call, weights[0]), out, truth())

            calls = [partial(call, weight, out=out) for weight in weights]
            yield case(tag(config), calls, error=error, off=config == now)
        if bench.dry or rows < 16:
            continue
        scales = torch.ones(rows, 1, device=bench.device), torch.ones(1, n, device=bench.device)
        given = {"out_dtype": BF16, "use_fast_accum": True, "out": out}
        calls = [partial(torch._scaled_mm, small, weight.T, *scales, **given) for weight in weights]
        yield case("torch._scaled_mm, a scale an output", calls)


def dense_scratch(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    if not hasattr(bench, "dense_scratch"):
        bench.dense_scratch = (bench.empty(1 << 22, dtype=F32), bench.zeros(1 << 12))
    return bench.dense_scratch


SHARED_LAYERS = 4
SHARED_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def shared_cases(bench: Bench, layout: str) -> Iterator[Case]:
    """Programs as the engine plans them: norm, mixture and shared expert of four layers, and the last norm."""
    m = MODEL
    if not m.shared:
        return
    tunings = {
        "one stream": replace(TABLE, side_tokens=0),
        "two streams": replace(TABLE, side_tokens=max(SHARED_SIZES)),
    }
    sets = {name: CudaOps(device=bench.device, tuning=tuning, pdl=True) for name, tuning in tunings.items()}
    # To compile two are enough, and every shard has its own.
    layers = [Layer(bench, layout=layout) for _ in range(2 if bench.dry else SHARED_LAYERS)]
    dense = [
        (dense_matrix(bench, 2 * m.shared, m.hidden, layout), dense_matrix(bench, m.hidden, m.shared, layout))
        for _ in layers
    ]
    most = max(SHARED_SIZES)
    start = bench.normal(most, m.hidden, dtype=F32)
    stream = bench.empty(most, m.hidden, dtype=F32)
    out, normed, delta, beside = (bench.empty(most, m.hidden) for _ in range(4))
    gated = bench.empty(most, m.shared)
    logits, weights = bench.empty(most, m.experts, dtype=F32), bench.empty(most, m.chosen, dtype=F32)
    ids, count = bench.zeros(most, m.chosen), bench.full(1, most)

    def record(ops: CudaOps):
        with ops.record() as tape:
            for layer, (gate_up, down) in zip(layers, dense, strict=True):
                routed = [
                    PackedExperts(
                        experts=m.experts, n=part.shape[1], k=part.shape[2], layout=layout, gated=part is layer.gate_up,
                        data=(part,) if scale is None else (part, scale), nbytes=part.nbytes,
                    )
                    for part, scale in ((layer.gate_up, layer.gate_up_scale), (layer.down, layer.down_scale))
                ]  # fmt: skip
                router = PackedMatrix(
                    layout="bf16", n=m.experts, k=m.hidden, bits=16, group=0, gated=False, data=(layer.router,),
                    nbytes=layer.router.nbytes,
                )  # fmt: skip
                ops.add_rms_norm(
                    stream, None if layer is layers[0] else delta, layer.gain, eps=1e-6, out=normed, count=count
                )
                ops.linear(normed, router, bias=None, out=logits, count=count)
                ops.route(logits, ROUTING, bias=None, ids=ids, weights=weights, count=count)
                ops.experts(
                    normed, ids, weights, *routed, activation="silu", gate_up_bias=None, down_bias=None, out=delta, count=count
                )  # fmt: skip
                ops.gated_linear(normed, gate_up, activation="silu", bias=None, out=gated, count=count)
                ops.linear(gated, down, bias=None, out=beside, count=count)
                ops.add(delta, beside, gate=None, out=None, count=count)
            ops.add_rms_norm(stream, delta, layers[0].gain, eps=1e-6, out=out, count=count)
        return tape

    tapes = {name: record(ops) for name, ops in sets.items()}
    for tokens in SHARED_SIZES:
        bucket = Bucket(tokens=tokens, rows=tokens, singles=True, longest=64)
        programs = {name: plan(tape, bucket) for name, tape in tapes.items()}
        distinct = m.experts * (1 - (1 - m.chosen / m.experts) ** tokens)
        each = 2 if layout == "bf16" else 1
        read = layers[0].read_bytes(1) * distinct + 3.0 * m.shared * m.hidden * each + 2.0 * m.experts * m.hidden

        def both(programs=programs, tokens=tokens) -> float:
            """Two streams against one: the same bits are wanted."""
            found = []
            for program in programs.values():
                stream.copy_(start)
                program.run()
                torch.cuda.synchronize()
                found.append(out[:tokens].clone())
            return difference(found[1], found[0])

        text = f"shared {layout} T={tokens}, {SHARED_LAYERS} layers"
        for name, program in programs.items():

            def call(program=program, tokens=tokens) -> None:
                if bench.dry:
                    for launch in program.launches:
                        if "pdl" in launch.options:
                            launch.run()
                    return
                stream[:tokens].copy_(start[:tokens])
                program.run()

            error = both if name == "two streams" else None
            off, amount = name == "one stream", SHARED_LAYERS * read
            yield Case("shared", text, name, [call], bytes=amount, error=error, off=off)


def dense_matrix(bench: Bench, n: int, k: int, layout: str) -> PackedMatrix:
    """A matrix of a layer beside the experts; gated where it is wider than deep."""
    if layout == "bf16":
        data: tuple[torch.Tensor, ...] = (bench.normal(n, k, scale=k**-0.5),)
    else:
        by = (n,) if layout == "fp8" else (n // blocks.ROWS, blocks.parts(k))
        data = (
            bench.normal(n, k, dtype=FP8, scale=100.0),
            torch.full(by, k**-0.5 / 100, dtype=F32, device=bench.device),
        )
    return PackedMatrix(
        layout=layout, n=n, k=k, bits=16, group=0, gated=n > k, data=data, nbytes=sum(part.nbytes for part in data)
    )


def all_cases(bench: Bench, groups: list[str]) -> Iterator[Case]:
    """The most telling first: what comes last is lost when time runs out."""
    if "shared" in groups:
        for layout in ("bf16", "fp8_block"):
            yield from shared_cases(bench, layout)
            settle(bench)
    for group in ("layer", "one"):
        for layout in LAYOUTS:
            if group in groups:
                yield from (layer_cases if group == "layer" else one_cases)(bench, Layer(bench, layout=layout))
                settle(bench)
    if "one" in groups:
        yield from gemv_cases(bench)
    if "dense" in groups:
        yield from dense_cases(bench)
        settle(bench)
    for layout in LAYOUTS:
        if "tiles" in groups:
            sizes = SIZES if layout == "bf16" else (8, 128, 1024)
            yield from tile_cases(bench, Layer(bench, layout=layout), sizes)
            settle(bench)
    if "route" in groups:
        yield from route_cases(bench)


# ----------------------------------------------------------------------------------------------------------------- main


def main() -> int:
    parser = rounds.parser(__doc__, groups=GROUPS, seconds=140.0)
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3-30b-a3b")
    args = parser.parse_args()
    return rounds.run(args, partial(all_cases, groups=args.only), head={"model": MODEL.name})


if __name__ == "__main__":
    sys.exit(main())
