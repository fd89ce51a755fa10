"""What low-rank adapters cost in one engine: the same decode steps without any, with one for all rows, and with many mixed in each step.

Knows: how to write random adapters fast, how to run the arms in turns, and what a figure is. Refuses to know: how adapters are computed.
Used by adapters.py where a backend is named. The engine has room for adapters in every arm, so the first arm has less memory for keys and
values than a model without, and nothing else: a step in which nobody has an adapter is the step of a model without room for any
(tests/kernels/test_triton_low_rank.py). Decode only is the difference of answers of two lengths, which leaves out prompts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gpu_engine
import gpu_options
import gpu_results
import numpy as np

from tradewind.config.adapter_files import look_at
from tradewind.config.card import ModelCard
from tradewind.config.goals import AdapterRoom, Goals, Means
from tradewind.config.ledger import matmul_bytes
from tradewind.config.ledger_adapters import bank_bytes
from tradewind.contract.events import TokensOut
from tradewind.contract.request import Request, SamplingParams
from tradewind.engine.columns import spelled_out
from tradewind.engine.loop import Add, EngineLoop, Forget
from tradewind.phases import Phases

SHORT_SHARE = 5
"""Short answers have a fifth of --tokens."""
MUST_PERCENT = 15.0
LEAST_ROUNDS = 3


def modules_of(card: ModelCard, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Names of one layer's matrices as a Llama checkpoint has them, with outputs and inputs."""
    hidden, queries, keys = card.hidden, card.heads * card.head_dim, card.kv_heads * card.head_dim
    every = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (card.intermediate, hidden),
        "mlp.up_proj": (card.intermediate, hidden),
        "mlp.down_proj": (hidden, card.intermediate),
    }
    return {name: shape for name, shape in every.items() if not targets or name.rpartition(".")[2] in targets}


def write_fast(folder: Path, card: ModelCard, *, seed: int, rank: int, targets: Sequence[str]) -> Path:
    """A random adapter in bf16, as PEFT writes one. Every matrix is a window of the same random numbers: drawing them all would take longer
    than the measurement."""
    shapes = modules_of(card, targets)
    most = rank * max(map(max, shapes.values()))
    pool = np.random.default_rng(seed).standard_normal(most + 4096, np.float32) * np.float32(0.02)
    numbers = memoryview((pool.view(np.uint32) >> 16).astype(np.uint16)).cast("B")
    header: dict[str, Any] = {}
    parts: list[memoryview] = []
    end = 0
    for layer in range(card.layers):
        for name, (n, k) in shapes.items():
            for matrix, shape in (("A", [rank, k]), ("B", [n, rank])):
                nbytes, start = 2 * shape[0] * shape[1], 2 * (61 * len(parts) % 4096)
                at = f"base_model.model.model.layers.{layer}.{name}.lora_{matrix}.weight"
                header[at] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + nbytes]}
                parts.append(numbers[start : start + nbytes])
                end += nbytes
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(parts)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


def answered(
    loop: EngineLoop, prompts: Sequence[Sequence[int]], keys: Sequence[str], *, tokens: int, name: str
) -> tuple[float, list[tuple[int, ...]]]:
    """Seconds of as many answers at once, each with the next of the adapters, and the answers. Raises RuntimeError where one fails."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    requests = [
        Request(
            id=f"{name}-{row}",
            tokens=tuple(prompt),
            sampling=sampling,
            max_tokens=tokens,
            adapter=keys[row % len(keys)],
        )
        for row, prompt in enumerate(prompts)
    ]
    loop.post(Forget())
    while loop.busy:
        loop.run_once()
    reports: list[Any] = []
    began = time.perf_counter()
    for request in requests:
        loop.check(request)
        loop.post(Add(request))
    while loop.busy:
        reports += loop.run_once()
    took = time.perf_counter() - began
    said: dict[str, list[int]] = {request.id: [] for request in requests}
    for event in spelled_out(reports):
        if isinstance(event, TokensOut):
            said[event.request_id] += event.tokens
            if event.error is not None:
                raise RuntimeError(event.error)
    assert all(len(answer) == tokens for answer in said.values())
    return took, [tuple(said[request.id]) for request in requests]


def captures_of(loop: EngineLoop) -> int | None:
    """How many graphs the runner has captured so far; None where it has none. There is no public word for it."""
    return getattr(getattr(loop._executor, "_runner", None), "captures", None)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All arms in turns; writes what is known to options.out after every round."""
    began = time.perf_counter()
    targets = tuple(name for name in options.targets.split(",") if name)
    means = {
        "backend": options.backend, "load_format": None if options.load_format == "auto" else options.load_format,
        "max_running": options.rows, "threads": options.threads, "compute": options.compute, "quantization": options.quantization,
    }  # fmt: skip
    goals = Goals(
        model=str(gpu_options.model_folder(options.model)),
        max_context=max(1024, options.prompt_tokens + options.tokens),
        adapters=AdapterRoom(slots=options.adapters, rank=options.rank),
        means=Means(**{name: value for name, value in means.items() if value is not None}),
    )
    plan, client = gpu_engine.opened(goals, phases=Phases())
    ready_s = time.perf_counter() - began
    loop, card = client.loop, plan.card
    gpu_results.say(f"    engine ready after {ready_s:.1f} s, graphs {plan.numerics.graphs}")
    result: dict[str, Any] = {
        "format": 1,
        "kind": "adapters",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": Path(options.model).name,
        "card": plan.hardware.name,
        "versions": gpu_results.versions(),
        "backend": plan.numerics.backend,
        "compute": plan.numerics.compute,
        "quantization": plan.numerics.quantization,
        "graphs": plan.numerics.graphs,
        "adapters": options.adapters,
        "rank": options.rank,
        "targets": targets or "all",
        "rows": options.rows,
        "prompt_tokens": options.prompt_tokens,
        "tokens": [options.tokens // SHORT_SHARE, options.tokens],
        "bytes_percent": round(
            100
            * bank_bytes(card, AdapterRoom(slots=options.adapters, rank=options.rank), exact=plan.numerics.compute == "f32")
            / matmul_bytes(card, compute=plan.numerics.compute, quantization=plan.numerics.quantization),
            1,
        ),
    }  # fmt: skip
    try:
        with tempfile.TemporaryDirectory() as folder:
            keys = [
                look_at(write_fast(Path(folder) / f"a{seed}", card, seed=seed, rank=options.rank, targets=targets)).key
                for seed in range(options.adapters)
            ]
            gpu_results.say(f"    adapters written after {time.perf_counter() - began:.1f} s")
            _rounds(loop, options, keys, result, began=began, vocab_size=card.vocab_size)
    finally:
        client.close()
    return result


def _rounds(
    loop: EngineLoop,
    options: argparse.Namespace,
    keys: list[str],
    result: dict[str, Any],
    *,
    began: float,
    vocab_size: int,
) -> None:
    """Warms up every arm, then as many rounds as asked for and as there is time for."""
    arms: dict[str, list[str]] = {"none": [""], "one": keys[:1], "mixed": keys}
    draw = random.Random(0)
    prompts = [[draw.randrange(vocab_size) for _ in range(options.prompt_tokens)] for _ in range(options.rows)]
    answers: dict[str, list[tuple[int, ...]]] = {}
    number, short = 0, options.tokens // SHORT_SHARE

    def seconds(arm: str, tokens: int) -> float:
        nonlocal number
        number += 1
        took, answers[arm] = answered(loop, prompts, arms[arm], tokens=tokens, name=f"{arm}-{number}")
        return took

    for arm in arms:  # adapters are loaded by the first who asks for one
        seconds(arm, short)
    while not loop.prepared and time.perf_counter() - began < options.budget_s / 2:
        time.sleep(0.05)
    for arm in arms:
        seconds(arm, options.tokens)
    gpu_results.say(f"    warm after {time.perf_counter() - began:.1f} s")
    # Adapters are in use, and each row has its own: answers part from those without, row by row.
    result["rows_changed"] = {
        arm: sum(a != b for a, b in zip(answers[arm], answers["none"], strict=True)) for arm in arms if arm != "none"
    }
    captures = captures_of(loop)
    times: dict[str, dict[str, list[float]]] = {arm: {"short": [], "long": []} for arm in arms}
    for turn in range(options.rounds):
        last = time.perf_counter()
        for arm in arms:
            times[arm]["short"].append(seconds(arm, short))
            times[arm]["long"].append(seconds(arm, options.tokens))
        result |= judged(times, rows=options.rows, short=short, long=options.tokens)
        result["captures_meanwhile"] = None if captures is None else (captures_of(loop) or 0) - captures
        gpu_results.save(result, options.out)
        gpu_results.say(
            f"    round {turn + 1}: costs {result['cost_percent']} of decode, {result['cost_percent_with_prompts']} of all"
        )
        now = time.perf_counter()
        if turn + 1 >= LEAST_ROUNDS and now + (now - last) - began > options.budget_s:
            break


def judged(times: dict[str, dict[str, list[float]]], *, rows: int, short: int, long: int) -> dict[str, Any]:
    """Figures of all rounds so far. Speeds are medians; a cost is the median of what is lost against "none" in the same round."""
    steps = {
        arm: [(b - a) / (long - short) for a, b in zip(own["short"], own["long"], strict=True)]
        for arm, own in times.items()
    }

    def lost(own: Sequence[float], base: Sequence[float]) -> float:
        return round(100 * statistics.median(1 - b / a for a, b in zip(own, base, strict=True)), 1)

    others = [arm for arm in times if arm != "none"]
    cost = {arm: lost(steps[arm], steps["none"]) for arm in others}
    return {
        "rounds": len(times["none"]["long"]),
        "step_ms": {arm: round(1e3 * statistics.median(own), 3) for arm, own in steps.items()},
        "decode_tokens_per_s": {arm: round(rows / statistics.median(own), 1) for arm, own in steps.items()},
        "tokens_per_s": {
            arm: round(rows * long / statistics.median(own["long"]), 1) for arm, own in times.items()
        },
        "cost_percent": cost,
        "cost_percent_with_prompts": {arm: lost(times[arm]["long"], times["none"]["long"]) for arm in others},
        "must_percent": MUST_PERCENT,
        "kept": cost["mixed"] <= MUST_PERCENT,
    }  # fmt: skip
