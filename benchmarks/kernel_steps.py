"""A whole decode step without an engine, for kernels.py and kernel_rounds.py: all layers of a model in one graph.

Knows: which kernels a step is made of, and with which constants. Refuses to know: candidates of single ops (kernels.py).
"""

# ruff: noqa: E731 - a candidate is a lambda that holds its buffers

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import rounds
import torch
from kernel_shapes import MODELS, PEERS, Shape, fp8_weight
from rounds import BF16, F32, FP8, Bench, Round, difference, graph_us, tag

from tradewind.kernels.triton import decode, elementwise, norm, rope, skinny
from tradewind.kernels.triton import sample as sampling
from tradewind.kernels.triton.tuning import DEFAULT, DecodeConfig, GemvConfig, TileConfig, tuned


class DecodeStep:
    """The whole layer stack of a model for M rows at a context: what a graph of one decode step replays.

    path "fused": skinny kernels with norm, SiLU-mul and residual folded in (M <= 16). path "matmul": cuBLAS between own kernels.
    """

    def __init__(
        self, bench: Bench, model: Shape, *, rows: int, context: int, path: str, fp8: bool, config: dict, page: int = 64
    ) -> None:
        self.bench, self.model, self.rows, self.path, self.fp8, self.config, self.page = (
            bench,
            model,
            rows,
            path,
            fp8,
            config,
            page,
        )
        m, e, f = model, model.hidden, model.intermediate
        q = m.heads * m.head_dim
        self.early = True
        self.layers = []
        depth = 1 if bench.dry else m.layers
        for _ in range(depth):
            layer = {
                "qkv": bench.normal(m.qkv, e, scale=e**-0.5), "o": bench.normal(e, q, scale=0.2 * q**-0.5),
                "gate_up": bench.normal(2 * f, e, scale=e**-0.5), "down": bench.normal(e, f, scale=0.5 * f**-0.5),
            }  # fmt: skip
            layer = {name: fp8_weight(bench, w) if fp8 else (w, None) for name, w in layer.items()}
            layer["norms"] = (bench.normal(e, scale=0.1) + 1, bench.normal(e, scale=0.1) + 1)
            layer["head_norms"] = (
                (bench.normal(m.head_dim, scale=0.1) + 1, bench.normal(m.head_dim, scale=0.1) + 1)
                if m.head_norm
                else (None, None)
            )
            self.layers.append(layer)
        self.embedding = bench.normal(m.vocabulary, e)
        self.head = self.embedding if m.tied else bench.normal(m.vocabulary, e, scale=e**-0.5)
        self.final_norm = bench.normal(e, scale=0.1) + 1
        self.angles = bench.angles(m.head_dim)
        self.table, pages = bench.table(rows, context // page + 4)
        shape = (pages, m.kv_heads, page, m.head_dim)
        self.k, self.v = ([bench.normal(*shape) for _ in range(depth)] for _ in range(2))
        at = lambda value: torch.full((rows,), value, dtype=torch.int32, device=bench.device)
        self.ids, self.lengths, self.positions = at(17), at(context), at(context - 1)
        self.slots = (self.table[:, (context - 1) // page] * page + (context - 1) % page).int().contiguous()
        self.x = bench.empty(rows, e, dtype=F32)
        self.qkv, self.q, self.attended = bench.empty(rows, m.qkv), bench.empty(rows, q), bench.empty(rows, q)
        self.normed, self.delta = bench.empty(rows, e), bench.empty(rows, e)
        self.both, self.inner = bench.empty(rows, 2 * f), bench.empty(rows, f)
        if fp8:
            self.normed8, self.inner8, self.attended8 = (bench.empty(rows, n, dtype=FP8) for n in (e, f, q))
            self.token_scale = bench.empty(rows, dtype=F32)
        self.logits = bench.empty(rows, m.vocabulary, dtype=F32)
        self.work = sampling.SampleWorkspace.allocate(rows, m.vocabulary, device=bench.device, penalties=False)
        self.sampled = bench.zeros(rows)
        splits = config["decode"].splits
        self.part = bench.empty(
            decode.decode_workspace_floats(rows, heads=m.heads, head_dim=m.head_dim, splits=splits), dtype=F32
        )
        self.arrived = bench.zeros(rows * m.kv_heads)
        need = max(
            skinny.workspace_floats(n, config=TileConfig(64 if rows > 16 else 16, 64, 128, 4, 4, 4), gated=True)
            for n in (m.qkv, e, f)
        )
        self.tile_work, self.tile_arrived = bench.empty(need, dtype=F32), bench.zeros(max(m.qkv, e, f) // 8)

    def run(self, *, pdl: bool = True, fuse_rope: bool = True) -> None:
        """One decode step, tokens in self.ids to tokens in self.sampled."""
        elementwise.embed(self.ids, self.embedding, out=self.x, pdl=pdl)
        (self._fused if self.path == "fused" else self._matmul)(pdl, fuse_rope)
        sampling.sample(self.logits, None, out=self.sampled, workspace=self.work, pdl=pdl)

    def _attention(self, layer, index: int, pdl: bool, fuse_rope: bool) -> None:
        m = self.model
        q_norm, k_norm = layer["head_norms"]
        common = {
            "lengths": self.lengths, "page_table": self.table, "heads": m.heads, "scale": m.head_dim**-0.5, "out": self.attended,
            "config": self.config["decode"], "workspace": self.part, "arrived": self.arrived, "pdl": pdl,
        }  # fmt: skip
        k, v = self.k[index], self.v[index]
        if fuse_rope:
            early = pdl and self.path == "fused" and self.early
            decode.paged_decode(
                self.qkv, k, v, angles=self.angles, q_weight=q_norm, k_weight=k_norm, eps=1e-6, early=early, **common
            )
            return
        rope.rope_store(
            self.qkv, self.angles, self.slots, k, v, heads=m.heads, q_weight=q_norm, k_weight=k_norm, eps=1e-6, positions=self.positions,
            out=self.q, pdl=pdl,
        )  # fmt: skip
        decode.paged_decode(self.q, k, v, **common)

    def _quantised(self, x, pdl: bool) -> tuple:
        """Input and options of a tile matmul with FP8 weights."""
        if not self.fp8 or self.rows == 1:
            return x, {}
        small = self.attended8 if x is self.attended else self.inner8
        norm.quantise_tokens(x, out=small, scale=self.token_scale, pdl=pdl)
        return small, {"x_scale": self.token_scale}

    def _fused(self, pdl: bool, fuse_rope: bool) -> None:
        def linear(name, x, weight, out, **more):
            skinny.skinny_linear(
                x, weight[0], scale=weight[1], out=out, eps=1e-5, config=self.config[name], workspace=self.tile_work,
                arrived=self.tile_arrived, pdl=pdl, **more,
            )  # fmt: skip

        def normed(name, gain, *, quantise):
            """Input and options of a matmul behind a norm: a GEMV folds the norm in, tiles have it apart."""
            if isinstance(self.config[name], GemvConfig):
                return self.x, {"norm": gain}
            if quantise:
                norm.add_rms_norm(self.x, None, gain, eps=1e-5, out=self.normed8, scale=self.token_scale, pdl=pdl)
                return self.normed8, {"x_scale": self.token_scale}
            norm.add_rms_norm(self.x, None, gain, eps=1e-5, out=self.normed, pdl=pdl)
            return self.normed, {}

        for index, layer in enumerate(self.layers):
            x, more = normed("qkv", layer["norms"][0], quantise=self.fp8)
            linear("qkv", x, layer["qkv"], self.qkv, late=self.early, **more)
            self._attention(layer, index, pdl, fuse_rope)
            x, more = self._quantised(self.attended, pdl)
            linear("o", x, layer["o"], self.x, residual=self.x, **more)
            x, more = normed("gate_up", layer["norms"][1], quantise=self.fp8)
            linear("gate_up", x, layer["gate_up"], self.inner, gated=True, **more)
            x, more = self._quantised(self.inner, pdl)
            linear("down", x, layer["down"], self.x, residual=self.x, **more)
        x, more = normed("head", self.final_norm, quantise=False)
        linear("head", x, (self.head, None), self.logits, **more)

    def _matmul(self, pdl: bool, fuse_rope: bool) -> None:
        if self.bench.dry:
            mm = lambda *args: None
        elif self.fp8:
            mm = lambda x, scale, w, out: torch._scaled_mm(
                x, w[0].T, scale[:, None], w[1][None, :], out_dtype=BF16, use_fast_accum=True, out=out
            )
        else:
            mm = lambda x, scale, w, out: torch.mm(x, w[0].T, out=out)
        delta = None
        scale = self.token_scale if self.fp8 else None
        normed, inner = (self.normed8, self.inner8) if self.fp8 else (self.normed, self.inner)
        for index, layer in enumerate(self.layers):
            norm.add_rms_norm(self.x, delta, layer["norms"][0], eps=1e-5, out=normed, scale=scale, pdl=pdl)
            mm(normed, scale, layer["qkv"], self.qkv)
            self._attention(layer, index, pdl, fuse_rope)
            attended = self.attended
            if self.fp8:
                norm.quantise_tokens(attended, out=self.attended8, scale=scale, pdl=pdl)
                attended = self.attended8
            mm(attended, scale, layer["o"], self.delta)
            norm.add_rms_norm(self.x, self.delta, layer["norms"][1], eps=1e-5, out=normed, scale=scale, pdl=pdl)
            mm(normed, scale, layer["gate_up"], self.both)
            elementwise.gated_activation(self.both, out=inner, scale=scale, pdl=pdl)
            mm(inner, scale, layer["down"], self.delta)
            delta = self.delta
        norm.add_rms_norm(self.x, delta, self.final_norm, eps=1e-5, out=self.normed, pdl=pdl)
        if not self.bench.dry:
            torch.mm(self.normed, self.head.T, out_dtype=F32, out=self.logits)  # bf16 logits would tie

    def truth(self) -> torch.Tensor:
        """Logits by plain torch in float32, from the same weights and pages (call it before `run` writes the new keys, or after: equal)."""
        m = self.model
        x = self.embedding[self.ids.long()].float()
        rms = lambda x, w, eps: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w.float()
        plain = lambda w: w[0].float() if w[1] is None else w[0].float() * w[1][:, None]
        length = int(self.lengths[0])
        cos, sin = self.angles[length - 1].chunk(2)
        turn = lambda x: torch.cat(
            [x[..., : len(cos)] * cos - x[..., len(cos) :] * sin, x[..., len(cos) :] * cos + x[..., : len(cos)] * sin],
            -1,
        )
        for index, layer in enumerate(self.layers):
            qkv = (rms(x, layer["norms"][0], 1e-5) @ plain(layer["qkv"]).T).view(self.rows, -1, m.head_dim)
            q, k, v = qkv.split([m.heads, m.kv_heads, m.kv_heads], 1)
            if m.head_norm:
                q, k = rms(q, layer["head_norms"][0], 1e-6), rms(k, layer["head_norms"][1], 1e-6)
            q, k = turn(q), turn(k)
            attended = []
            for row in range(self.rows):
                pages = self.table[row, : -(-length // self.page)].long()
                keys, values = (
                    y[index][pages].float().transpose(1, 2).flatten(0, 1)[:length].clone() for y in (self.k, self.v)
                )
                keys[-1], values[-1] = k[row], v[row]
                score = torch.einsum("grd,lgd->grl", q[row].view(m.kv_heads, -1, m.head_dim), keys) * m.head_dim**-0.5
                attended.append(torch.einsum("grl,lgd->grd", score.softmax(-1), values).flatten())
            x = x + torch.stack(attended) @ plain(layer["o"]).T
            gate, up = (rms(x, layer["norms"][1], 1e-5) @ plain(layer["gate_up"]).T).chunk(2, -1)
            x = x + (torch.nn.functional.silu(gate) * up) @ plain(layer["down"]).T
        return rms(x, self.final_norm, 1e-5) @ self.head.float().T

    def floor_bytes(self) -> float:
        """Weights and keys read once."""
        m = self.model
        weights = m.layers * m.layer_weights * (1 if self.fp8 else 2) + m.vocabulary * m.hidden * 2
        return (
            weights
            + self.rows * int(self.lengths[0]) * m.layers * 2 * m.kv_heads * m.head_dim * self.k[0].element_size()
        )


def matrices(model: Shape) -> dict[str, tuple[int, int, int]]:
    """(outputs, weight rows, depth) of each matmul of a layer and of the head."""
    e, f, q = model.hidden, model.intermediate, model.heads * model.head_dim
    return {
        "qkv": (model.qkv, model.qkv, e),
        "o": (e, e, q),
        "gate_up": (f, 2 * f, e),
        "down": (e, e, f),
        "head": (model.vocabulary, model.vocabulary, e),
    }


def constants(model: Shape, rows: int, fp8: bool) -> dict:
    """The tuned constants of every matmul of a step; {} where none of ours is used."""
    table = tuned(DEFAULT)
    found = {}
    for name, (outputs, weight_rows, depth) in matrices(model).items():
        small = fp8 and name != "head"
        found[name] = (
            table.gemv(outputs, depth, fp8=small) if rows == 1 else table.tile(rows, weight_rows, depth, fp8=small)
        )
    return {name: config for name, config in found.items() if config is not None}


@dataclass(frozen=True)
class StepRun:
    """A whole step as it stands now: the step's constants may change after it was run."""

    step: DecodeStep
    candidate: str
    options: dict = field(default_factory=dict)
    """Of `DecodeStep.run`."""
    off: bool = False

    @property
    def model(self) -> str:
        return self.step.model.name + (" fp8" if self.step.fp8 else "")


def step_runs(bench: Bench, *, models: list[str], quick: bool, batches: set[int]) -> Iterator[StepRun]:
    """Whole steps."""
    table = tuned(DEFAULT)
    for model in MODELS:
        if model.name not in models:
            continue
        for fp8 in (False, True) if model.name == "llama-3.1-8b" else (False,):
            for context in (256, 1024) if 1 in batches else ():
                best = constants(model, 1, fp8)
                forms = {"tuned": table.decode(1, context)}
                if not quick:
                    forms |= {
                        tag(c): c for c in (DecodeConfig(8, 64, 4, 2), DecodeConfig(4, 64, 4, 2)) if context == 256
                    }
                    forms |= {tag(c): c for c in (DecodeConfig(16, 64, 4, 2),) if context == 1024}
                most = DecodeConfig(32, 64, 4, 2)
                made = DecodeStep(
                    bench, model, rows=1, context=context, path="fused", fp8=fp8, config=best | {"decode": most}
                )
                for name, form in forms.items():
                    made.config = best | {"decode": form}
                    yield StepRun(made, f"fused, {name}")
                made.config = best | {"decode": forms["tuned"]}
                if fp8:  # tiles multiply FP8 by FP8 without converting weights, but want the input quantised
                    made.config |= {"gate_up": TileConfig(16, 128, 128, 1, 4, 3)}
                    yield StepRun(made, "fused, gate_up by tiles")
                    made.config |= {"qkv": TileConfig(16, 64, 256, 4, 4, 3)}
                    yield StepRun(made, "fused, qkv and gate_up by tiles")
                    made.config = best | {"decode": forms["tuned"]}
                made.early = False
                yield StepRun(made, "fused, tuned, keys not early")
                made.early = True
                yield StepRun(made, "fused, tuned, rope apart", {"fuse_rope": False})
                yield StepRun(made, "fused, tuned, no dependent launch", {"pdl": False})
                del made
            for rows in (8, 32, 64, 128, 256):
                if rows not in batches:
                    continue
                config = constants(model, rows, fp8) | {"decode": table.decode(rows, 1024)}
                made = DecodeStep(bench, model, rows=rows, context=1024, path="matmul", fp8=fp8, config=config)
                if not quick:
                    yield StepRun(made, "matmul, rope in attention")
                yield StepRun(made, "matmul, rope apart", {"fuse_rope": False})
                if rows <= 64:
                    made.path = "fused"
                    yield StepRun(made, "tiles, rope in attention")
                    yield StepRun(made, "tiles, rope apart", {"fuse_rope": False})
                del made


def measure_steps(runs: Iterable[StepRun], on: Round) -> None:
    """Checks small steps against plain torch and times all; printed, and recorded beside the ops."""
    steps: list[dict] = []
    truth = previous = None
    for each in runs:
        step = each.step
        row = {"model": each.model, "rows": step.rows, "context": int(step.lengths[0]), "candidate": each.candidate}
        row["off"] = each.off
        try:
            if step.rows <= 8:
                if previous is not step:
                    truth, previous = step.truth(), step
                step.run(**each.options)
                row["error"] = difference(step.logits, truth)
                row["same_token"] = bool((step.sampled.long() == step.logits.argmax(1)).all())
            row["ms"] = graph_us([partial(step.run, **each.options)], budget_ms=120) / 1e3
            row["floor_ms"] = step.floor_bytes() / on.limits["read"] * 1e3
            row["peers"] = PEERS.get(each.model, {}).get(step.rows, "")
            row["constants"] = {
                name: tag(c).replace("True", "T").replace("False", "F") for name, c in step.config.items()
            }
        except Exception as problem:
            row["note"] = rounds.told(problem)
        steps.append(row)
        on.save(steps=steps)
        short = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items() if k != "constants"}
        print("step", short, flush=True)
        previous = step if step.rows <= 8 else None  # a large step that is kept leaves less room for the next
        del each, step
        torch.cuda.empty_cache()
    on.save(steps=steps)
