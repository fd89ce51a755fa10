"""What low-rank adapters cost: the same decode steps without any, with room for them that nobody uses, and with many mixed in each step.

Rounds of the arms take turns, because a neighbour that disturbs one of them then disturbs them all; a figure is the median over rounds of
an arm's time against that of the first arm in the same round. Adapters are random, of every matrix they may change.

    python benchmarks/adapters.py --model smollm2 --adapters 8 --rank 16 --rows 64 --rounds 9 --out adapters.json
    python benchmarks/adapters.py --backend cuda --model benchmarks/models/llama-3.1-8b --load-format dummy --out adapters.json

The second is measured in one engine (a GPU holds no second one), in adapters_one_engine.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import adapters_one_engine
import numpy as np
from adapters_one_engine import modules_of
from safetensors.numpy import save_file

from tradewind.config.card import ModelCard
from tradewind.config.card_parts import active_parameters
from tradewind.config.goals import AdapterRoom
from tradewind.config.ledger import matmul_bytes
from tradewind.config.ledger_adapters import bank_bytes
from tradewind.contract.request import SamplingParams
from tradewind.llm import LLM

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""cpu: what this process computed; with one thread it tells two arms apart on a machine that others load, where no wall clock can."""


def write_adapter(folder: Path, card: ModelCard, *, seed: int, rank: int, targets: tuple[str, ...]) -> Path:
    """A random adapter, as PEFT writes one."""
    draw = np.random.default_rng(seed)
    tensors = {}
    for layer in range(card.layers):
        for name, (n, k) in modules_of(card, targets).items():
            at = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{at}.lora_A.weight"] = (draw.standard_normal((rank, k)) / k**0.5).astype(np.float32)
            tensors[f"{at}.lora_B.weight"] = (draw.standard_normal((n, rank)) * 0.02).astype(np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def floor(card: ModelCard, *, adapters: int, rank: int, targets: tuple[str, ...], compute: str) -> dict[str, float]:
    """What adapters add by arithmetic alone: to the multiplications of a token in the layers, and to the bytes that a step reads."""
    added = card.layers * sum(rank * (n + k) for n, k in modules_of(card, targets).values())
    weights = matmul_bytes(card, compute=compute, quantization="none")
    banks = bank_bytes(card, AdapterRoom(slots=adapters, rank=rank), exact=compute == "f32")
    return {
        "multiplications_percent": round(100 * added / active_parameters(card), 2),
        "bytes_percent": round(100 * banks / weights, 1),
        "bank_bytes": banks,
    }


def once(
    llm: LLM, *, rows: int, prompt_tokens: int, tokens: int, names: list[str | None], clock: Callable[[], float]
) -> float:
    """Seconds of one round: `rows` answers at once, each with the next of the adapters."""
    draw = np.random.default_rng(0)
    vocabulary = llm.plan.card.vocab_size
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    answers = []
    for row in range(rows):
        prompt = draw.integers(0, vocabulary, prompt_tokens).tolist()
        answers += llm.prepare([prompt], sampling, adapter=names[row % len(names)])
    llm.forget()
    began = clock()
    handles = llm.engine.client.run([answer.request for answer in answers])
    took = clock() - began
    assert all(handle.last is not None and handle.last.error is None for handle in handles)
    return took


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All arms, in turns."""
    means = {"max_running": options.rows, "threads": options.threads, "compute": options.compute}
    means = {name: value for name, value in means.items() if value is not None}
    targets = tuple(name for name in options.targets.split(",") if name)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plain = stack.enter_context(LLM(options.model, **means))
        card = plain.plan.card
        given = {
            f"a{seed}": write_adapter(folder / f"a{seed}", card, seed=seed, rank=options.rank, targets=targets)
            for seed in range(options.adapters)
        }
        adapted = stack.enter_context(
            LLM(options.model, adapters=given, max_adapters=options.adapters, max_adapter_rank=options.rank, **means)
        )
        arms: dict[str, tuple[LLM, list[str | None]]] = {
            "none": (plain, [None]),
            "room": (adapted, [None]),
            "one": (adapted, [next(iter(given))]),
            "mixed": (adapted, list(given)),
        }
        size = {"rows": options.rows, "prompt_tokens": options.prompt_tokens, "tokens": options.tokens}
        times: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(options.rounds + 1):
            for name, (llm, names) in arms.items():
                took = once(llm, names=names, clock=CLOCKS[options.clock], **size)
                if turn:  # the first warms up
                    times[name].append(took)
        compute = plain.plan.numerics.compute
    lost = {
        name: round(100 * (1 - 1 / statistics.median(t / base for t, base in zip(own, times["none"], strict=True))), 1)
        for name, own in times.items()
        if name != "none"
    }
    best = {name: options.rows * options.tokens / min(own) for name, own in times.items()}
    return {
        "model": Path(options.model).name,
        "compute": compute,
        "threads": plain.plan.numerics.threads,
        "adapters": options.adapters,
        "rank": options.rank,
        "targets": targets or "all",
        **size,
        "rounds": options.rounds,
        "clock": options.clock,
        "tokens_per_s": {
            name: round(options.rows * options.tokens / statistics.median(own), 1) for name, own in times.items()
        },
        "throughput_lost_percent": lost,
        "best_tokens_per_s": {name: round(speed, 1) for name, speed in best.items()},
        "throughput_lost_percent_of_best": {
            name: round(100 * (1 - speed / best["none"]), 1) for name, speed in best.items() if name != "none"
        },
        "floor": floor(card, adapters=options.adapters, rank=options.rank, targets=targets, compute=compute),
    }


def main() -> None:
    """Measures and prints, or writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", default="", help="comma-separated, such as q_proj,v_proj (default: all)")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, help="default 8; in one engine 128")
    parser.add_argument("--tokens", type=int, help="default 40; in one engine 160")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--compute", choices=["f32", "bf16", "int16", "int8"])
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    parser.add_argument("--backend", choices=["cuda", "cpu", "plain"], help="measures in one engine")
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"], help="with --backend")
    parser.add_argument("--quantization", default=None, help="with --backend")
    parser.add_argument(
        "--budget-s", type=float, default=85.0, help="with --backend: of everything; rounds are left out for it"
    )
    options = parser.parse_args()
    one = options.backend is not None
    options.prompt_tokens = options.prompt_tokens or (128 if one else 8)
    options.tokens = options.tokens or (160 if one else 40)
    text = json.dumps(adapters_one_engine.measure(options) if one else measure(options), indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
