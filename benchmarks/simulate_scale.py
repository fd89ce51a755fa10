"""How much can be simulated: a fleet of H200s behind each router, then a million requests. Needs no GPU, no weights and one core.

    python benchmarks/simulate_scale.py [--requests 1000000] [--replicas 256] [--compare 50000] [--out FILE.json]

The engines are Llama-3.1-8B on one H200 each, planned as `tradewind plan` does it from the card's and the GPU's figures; step times are the
roofline of those. Requests begin with one of 2,000 common prefixes of 512 tokens (popular ones more often), 40 a second for each engine.
Printed are processor seconds of this process, so that neighbours do not count.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tradewind.config.card import ModelCard, RopeFacts
from tradewind.config.goals import Goals
from tradewind.config.hardware import Hardware
from tradewind.config.plan import Plan
from tradewind.config.resolve import resolve
from tradewind.simulate.report import show_s, summarise
from tradewind.simulate.router import ROUTERS
from tradewind.simulate.simulator import SimulateOptions, simulate_plan
from tradewind.simulate.steptime import roofline
from tradewind.simulate.trace_columns import Trace, poisson_trace

GiB = 1 << 30
LLAMA_8B = ModelCard(
    name="llama-3.1-8b",
    family="llama",
    source="hf",
    vocab_size=128256,
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    max_positions=131072,
    norm_eps=1e-5,
    tied_embeddings=False,
    layer_windows=(None,) * 32,
    rope=RopeFacts(theta=5e5, kind="llama3", factor=8.0, original_max_positions=8192),
    weight_bytes=16060522496,
    parameters=8030261248,
    weight_formats={"BF16": 8030261248},
    embedding_format="BF16",
    bos_id=128000,
    eos_ids=(128009,),
)
H200 = Hardware(
    kind="cuda",
    name="NVIDIA H200",
    cores=16,
    memory_bytes=140 * GiB,
    memory_free_bytes=139 * GiB,
    memory_bytes_per_s=4.27e12,  # as gpu-llama-3.1-8b.json has measured
    matmul_flops_per_s=675e12,
    fp8_flops_per_s=1268e12,
    features=("fp8", "sm_90"),
    multiprocessors=132,
    host_memory_bytes=128 * GiB,
    host_memory_free_bytes=100 * GiB,
)
PREFIXES, PREFIX_BLOCKS, BLOCK = 2000, 8, 64


def traffic(requests: int, *, per_s: float) -> Trace:
    """Chat with common prefixes."""
    return poisson_trace(
        requests=requests,
        per_s=per_s,
        prompt=(200, 1.0),
        output=(100, 0.8),
        prefixes=PREFIXES,
        prefix_blocks=PREFIX_BLOCKS,
        block_tokens=BLOCK,
        name=f"{PREFIXES} prefixes of {PREFIX_BLOCKS * BLOCK} tokens",
    )


def measured(trace: Trace, plan: Plan, *, replicas: int, router: str, progress: Progress) -> dict[str, Any]:
    """One simulation, and the processor seconds that it took."""
    bar = progress.add_task(f"{len(trace):,} requests, {replicas} engines, {router}", total=len(trace))
    began = time.process_time()
    outcome = simulate_plan(
        trace,
        plan,
        times=roofline(plan),
        options=SimulateOptions(replicas=replicas, router=router),
        progress=lambda done: progress.update(bar, completed=done),
    )
    took_s = time.process_time() - began
    progress.update(bar, completed=len(trace))
    report = summarise(outcome)
    return {
        "requests": len(trace),
        "finished": report.finished,
        "replicas": replicas,
        "router": router,
        "processor_s": took_s,
        "requests_per_processor_s": len(trace) / took_s,
        "simulated_s": report.duration_s,
        "steps": report.steps,
        "cache_hit_rate": report.cache_hit_rate,
        "ttft_p50_s": report.ttft_s.p50,
        "ttft_p99_s": report.ttft_s.p99,
        "tpot_p50_s": report.tpot_s.p50,
        "device_busy": report.device_busy,
        "load_spread": report.load_spread,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=256)
    parser.add_argument("--compare", type=int, default=50_000, help="requests for each router (default 50000)")
    parser.add_argument("--per-engine", type=float, default=40.0, help="requests per second and engine (default 40)")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logging.getLogger("tradewind").setLevel(logging.ERROR)
    plan = resolve(Goals(model="llama-3.1-8b", max_context=8192), LLAMA_8B, H200)
    per_s = arguments.per_engine * arguments.replicas
    rows: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True)) as progress:
        few = traffic(arguments.compare, per_s=per_s)
        for router in ROUTERS if arguments.compare else ():
            rows += [measured(few, plan, replicas=arguments.replicas, router=router, progress=progress)]
        if arguments.requests:
            many = traffic(arguments.requests, per_s=per_s)
            rows.append(measured(many, plan, replicas=arguments.replicas, router="prefix_aware", progress=progress))
    table = Table(title=f"{plan.card.name} on {arguments.replicas} H200, {per_s:g} requests/s")
    for column in (
        "requests",
        "router",
        "processor time",
        "requests/s",
        "cached",
        "TTFT p50",
        "TTFT p99",
        "most loaded",
    ):
        table.add_column(column)
    for row in rows:
        table.add_row(
            f"{row['requests']:,}",
            row["router"],
            f"{row['processor_s']:.0f} s",
            f"{row['requests_per_processor_s']:.0f}",
            f"{100 * row['cache_hit_rate']:.0f} %",
            show_s(row["ttft_p50_s"]),
            show_s(row["ttft_p99_s"]),
            f"{row['load_spread']:.2f} times the mean",
        )
    Console(width=130).print(table)
    if arguments.out is not None:
        facts = {"model": plan.card.name, "device": H200.name, "step_times": roofline(plan).described(), "runs": rows}
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
