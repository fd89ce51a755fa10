"""W1-W6: the work that the peers' record in gpu_figures.py was measured with, and the formulas of its figures.

Knows: prompts, lengths and seeds of every workload, and how much a model computes and reads for them. Refuses to know: how an engine
is made (gpu_engine), when and for how long works are run (gpu_suite), peers and demands (gpu_figures).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpu_engine import Driven, OutOfTimeError
from gpu_results import say

from tradewind.contract.kv import BYTES_PER_ELEMENT

ORDER = ("W1", "W3", "W2", "W4", "W6", "W5")
"""Most telling first: what comes last is lost when time runs out."""


# ------------------------------------------------------------------------------------------------------------- how much


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is asked. `full` is the agreed work; `tiny` has the same shape and lets the script be tried anywhere."""

    divide: int = 1
    """Lengths and numbers of requests are divided by this."""
    batches: tuple[int, ...] = (1, 8, 32, 128, 256)
    repeats: int | None = None
    """Of W6's timed calls; None: three up to 32 rows, two above."""

    def length(self, tokens: int) -> int:
        return max(2, tokens // self.divide)

    def count(self, requests: int) -> int:
        return max(1, requests // self.divide)


SCALES = {"full": Scale(), "tiny": Scale(divide=16, batches=(1, 8), repeats=1)}


def sizes_of(
    config: dict[str, Any], *, quantization: str, kv_format: str, load_format: str = "dummy"
) -> dict[str, float]:
    """Parameters of a decoder's matmuls that one token meets, and the bytes that a step must read; changes nothing.

    Of a mixture the experts that a token is sent to: linear_params counts those, total_params all. MLA keeps latents.
    Where all tokens have one route, a step of any size reads the experts of one token.
    """
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    rank = config.get("kv_lora_rank")
    if rank:
        nope, rope, value = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        key, queries = nope + rope, config.get("q_lora_rank")
        attention = queries * (hidden + heads * key) if queries else hidden * heads * key
        attention += hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
        kept = rank + rope
    else:
        key = value = config.get("head_dim") or hidden // heads
        attention = 2 * hidden * heads * key + 2 * hidden * kv_heads * key
        kept = 2 * kv_heads * key
    experts = config.get("num_experts") or config.get("n_routed_experts") or 0
    sparse = layers - config.get("first_k_dense_replace", 0) if experts else 0
    linear = layers * attention + 3 * (layers - sparse) * hidden * config["intermediate_size"]
    chosen = idle = 0
    if experts:
        each, per_token = 3 * hidden * config["moe_intermediate_size"], config["num_experts_per_tok"]
        chosen, idle = sparse * per_token * each, sparse * (experts - per_token) * each
        linear += chosen + sparse * ((config.get("n_shared_experts") or 0) * each + hidden * experts)
    visited = config["num_experts_per_tok"] if experts and load_format == "dummy-one-route" else experts
    head, size = hidden * config["vocab_size"], 1 if quantization == "fp8" else 2
    return {
        "linear_params": linear,
        "total_params": linear + idle,
        "head_params": head,
        # The head stays bf16 when the rest is quantised.
        "weight_bytes_per_token": linear * size + 2 * head,
        # A step of more tokens reads more experts: see gpu_figures.weight_bytes.
        "expert_bytes_per_token": chosen * size,
        "experts_each": visited / config["num_experts_per_tok"] if experts else 0,
        "kv_bytes_per_token": layers * kept * BYTES_PER_ELEMENT[kv_format],
        # Scores and values of a causal prompt of S tokens: half of 2 * S^2 * heads * (key + value) in each layer.
        "attention_flops_per_square": layers * heads * (key + value),
    }


# ------------------------------------------------------------------------------------------------------------ the works


class Suite:
    """The workloads, in the formulas of the peers' record. Raises what Driven raises."""

    def __init__(
        self, driven: Driven, *, vocab_size: int, sizes: dict[str, float], scale: Scale, copy: float | None
    ) -> None:
        self.driven, self.vocab_size, self.sizes, self.scale, self.copy = driven, vocab_size, sizes, scale, copy
        self.steps: dict[str, float] = {}
        self.once = False
        """W2 and W3 are not run a second time."""

    def prompts(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        """Random prompts, clear of special ids at both ends of the vocabulary."""
        draw, high = random.Random(seed), self.vocab_size - 2000
        return [[draw.randrange(100, high) for _ in range(length)] for length in lengths]

    def timed(
        self, prompts: Sequence[Sequence[int]], out_lens: Sequence[int], temperature: float = 0.0, *, keep: bool = False
    ) -> float:
        """Seconds from handing all prompts over until every token is there; the cache is emptied before, unless `keep`."""
        if keep:
            self.driven.drain()
        else:
            self.driven.forget()
        began = time.perf_counter()
        made = self.driven.generate(prompts, out_lens, temperature)
        wall_s = time.perf_counter() - began
        if made != sum(out_lens):
            raise RuntimeError(f"{made} tokens were made, {sum(out_lens)} asked for")
        self.steps = self.driven.steps(wall_s)
        return wall_s

    def warm(self) -> float:
        """The agreed warm-up; returns its seconds. The engine has settled before (see Driven.settle), or shall not be waited for."""
        long, many = self.scale.length, self.scale.count
        wall_s = self.timed(self.prompts([long(128)] * 4, 1), [long(16)] * 4)
        return wall_s + self.timed(self.prompts([long(1024)] * many(32), 2), [long(16)] * many(32))

    def again(self, prompts: Sequence[Sequence[int]], out_lens: Sequence[int], temperature: float) -> dict[str, float]:
        """The same call a second time: the difference is what the first spent on graphs and kernels that it met for the first time."""
        if self.once:
            return {}
        try:
            wall_s = self.timed(prompts, out_lens, temperature)
        except OutOfTimeError:
            return {}
        return {"wall_again_s": wall_s, "out_tok_s_again": sum(out_lens) / wall_s}

    def W1(self, temperature: float = 0.0) -> dict[str, Any]:  # noqa: N802 - the workloads' agreed names
        """One request at a time: 128 in, 1 or 256 out."""
        before, new = self.scale.length(128), self.scale.length(256)
        for seed in range(3):
            self.timed(self.prompts([before], 100 + seed), [self.scale.length(32)], temperature)
        first = [self.timed(self.prompts([before], 200 + seed), [1], temperature) for seed in range(15)]
        whole = [self.timed(self.prompts([before], 300 + seed), [new], temperature) for seed in range(5)]
        first_s, whole_s = statistics.median(first), statistics.median(whole)
        per_token_s = (whole_s - first_s) / (new - 1)
        record = {
            "ttft_ms": first_s * 1e3,
            "ttft_min_ms": min(first) * 1e3,
            "tpot_ms": per_token_s * 1e3,
            "tok_s": new / whole_s,
            "decode_tok_s": 1 / per_token_s,
            "first_s": first,
            "whole_s": whole,
            "weight_bytes_per_s": self.sizes["weight_bytes_per_token"] / per_token_s,
        }
        if self.copy:
            record["of_copy"] = record["weight_bytes_per_s"] / self.copy
        return record

    def W2(self, temperature: float = 0.0) -> dict[str, Any]:  # noqa: N802
        """512 requests of mixed lengths at once."""
        draw, long = random.Random(42), self.scale.length
        many = self.scale.count(512)
        ins = [draw.randint(long(64), long(1024)) for _ in range(many)]
        outs = [draw.randint(long(64), long(512)) for _ in range(many)]
        prompts = self.prompts(ins, 43)
        wall_s = self.timed(prompts, outs, temperature)
        steps = self.steps
        return {
            "wall_s": wall_s,
            "in_tok": sum(ins),
            "out_tok": sum(outs),
            "out_tok_s": sum(outs) / wall_s,
            "total_tok_s": (sum(ins) + sum(outs)) / wall_s,
            "steps": steps,
            **self.again(prompts, outs, temperature),
        }

    def W3(self, temperature: float = 0.0) -> dict[str, Any]:  # noqa: N802
        """256 equal requests at once: 128 in, 512 out."""
        many, before, new = self.scale.count(256), self.scale.length(128), self.scale.length(512)
        prompts = self.prompts([before] * many, 50)
        wall_s = self.timed(prompts, [new] * many, temperature)
        steps = self.steps
        return {
            "wall_s": wall_s,
            "requests": many,
            "in_each": before,
            "out_each": new,
            "out_tok": many * new,
            "out_tok_s": many * new / wall_s,
            "steps": steps,
            **self.again(prompts, [new] * many, temperature),
        }

    def W4(self, temperature: float = 0.0) -> dict[str, Any]:  # noqa: N802
        """64 prompts of 4096, 16 or 1 out."""
        many, before = self.scale.count(64), self.scale.length(4096)
        prompts = self.prompts([before] * many, 60)
        wall_s = self.timed(prompts, [16] * many, temperature)
        one_s = self.timed(prompts, [1] * many, temperature)
        tokens = many * before
        linear = 2 * self.sizes["linear_params"] * tokens
        attention = self.sizes["attention_flops_per_square"] * many * before**2
        return {
            "wall_s": wall_s,
            "wall_out1_s": one_s,
            "in_tok": tokens,
            "in_tok_s": tokens / wall_s,
            "in_tok_s_out1": tokens / one_s,
            "linear_flops": linear,
            "attention_flops": attention,
            "flops_per_s": (linear + attention) / wall_s,
            "flops_per_s_out1": (linear + attention) / one_s,
        }

    def W5(self, temperature: float = 0.0) -> dict[str, Any]:  # noqa: N802
        """128 requests of a shared 2048 and 128 own: the prefix computed within the run, then cached."""
        many, before, own, new = (
            self.scale.count(128),
            self.scale.length(2048),
            self.scale.length(128),
            self.scale.length(128),
        )
        shared = self.prompts([before], 70)[0]
        wall_s = self.timed([shared + tail for tail in self.prompts([own] * many, 71)], [new] * many, temperature)
        steps = self.steps
        # The second turn finds the prefix, but none of its own tails.
        warm_s = self.timed(
            [shared + tail for tail in self.prompts([own] * many, 72)], [new] * many, temperature, keep=True
        )
        return {
            "wall_s": wall_s,
            "out_tok_s": many * new / wall_s,
            "total_tok_s": many * (new + before + own) / wall_s,
            "wall_warm_s": warm_s,
            "out_tok_s_warm": many * new / warm_s,
            "steps": steps,
        }

    def W6(self, temperature: float = 0.0) -> dict[str, Any]:  # noqa: N802
        """Time of a decode step at about 1k context: (t of 192 out - t of 64 out) / 128, 896 in."""
        before, few, more = (self.scale.length(tokens) for tokens in (896, 64, 192))
        rows = []
        for batch in self.scale.batches:
            prompts = self.prompts([before] * batch, 80 + batch)
            repeats = self.scale.repeats or (3 if batch <= 32 else 2)
            try:
                short = [self.timed(prompts, [few] * batch, temperature) for _ in range(repeats)]
                long = [self.timed(prompts, [more] * batch, temperature) for _ in range(repeats)]
            except OutOfTimeError:
                say(f"    no time left for {batch} rows")
                break
            new = more - few
            rows.append(
                {
                    "batch": batch,
                    "step_ms": (min(long) - min(short)) / new * 1e3,
                    "step_ms_median": (statistics.median(long) - statistics.median(short)) / new * 1e3,
                    "short_s": short,
                    "long_s": long,
                    "steps": self.steps,
                }
            )
            say(f"    {batch} rows: {rows[-1]['step_ms']:.3f} ms a step")
        return {"rows": rows}
