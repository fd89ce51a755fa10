"""W1-W6 and the start on our engine, in this process: the work that the peers' record in gpu_figures.py was measured with.

    PYTHONPATH=src python benchmarks/gpu_suite.py --model llama-3.1-8b --out benchmarks/results/gpu-llama-3.1-8b.json
    ... --model llama-3.1-8b --quantization fp8 --out ...      ... --model qwen3-0.6b --ablate --out ...
    ... --model deepseek-v2-lite --load-format dummy-one-route --out benchmarks/results/gpu-deepseek-v2-lite-one-route.json
    ... --model llama-3.1-8b --load-format dummy-flat --out benchmarks/results/gpu-llama-3.1-8b-flat.json
    ... --workloads W6,W1 --settle 10 ...        what matters most comes first, on an engine that has had 10 s to compile and capture
    python benchmarks/gpu_suite.py --report benchmarks/results --into docs/performance.md

Weights are dummy (random), prompts random token ids from fixed seeds, answers greedy, of the asked length (end of text ignored) and never
made text. One engine with default goals serves all workloads; its prefix cache is emptied before every timed call but
the cached half of W5.
Knows: what is measured when, and what goes on when a part fails. JSON is written after every workload, so that a run that is cut loses
nothing. Refuses to know: the works themselves (gpu_works), the engine (gpu_engine, gpu_options), starts (gpu_start), ceilings and memory
(gpu_card), how results are kept (gpu_results), peers and demands (gpu_figures).

    ceilings (a process) -> start cold, warm (two processes) -> engine -> settled, warm -> W1, W3, W2, W4, W6, W5 -> table, JSON, picture
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu_card import ceilings_only, compared_memory, others_bytes
from gpu_engine import Driven, opened, settled_text
from gpu_options import SHORT_ROWS, config_of, go_ways, goals_of, known_switches, parsed, same_engine
from gpu_places import SUITE
from gpu_results import new_result, report, save, say
from gpu_start import child, measure_start, start_only
from gpu_works import ORDER, SCALES, Scale, Suite, sizes_of

from tradewind.config.plan import Plan
from tradewind.contract.errors import UserError
from tradewind.engine.client import LocalClient
from tradewind.phases import Phases


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the arguments ask for; returns the exit code."""
    arguments = parsed(argv)
    if arguments.way:
        go_ways(arguments.way)
    if arguments.start_only or arguments.ceilings_only:
        print(
            json.dumps(
                start_only(arguments) if arguments.start_only else ceilings_only(backend=arguments.backend),
                default=float,
            ),
            flush=True,
        )
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    import gpu_figures

    if arguments.report is not None:
        return report(arguments.report, into=arguments.into)
    result = new_result(arguments)
    try:
        (ablate if arguments.ablate else measure)(arguments, result)
    except UserError as error:
        print(f"gpu_suite: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        result["skipped"].append("everything after an interruption")
    save(result, arguments.out)
    if arguments.ablate:
        print(gpu_figures.ablation_table(result))
    else:
        print(gpu_figures.section(result))
        if arguments.out is not None:
            try:
                gpu_figures.draw(result, arguments.out.with_suffix(".png"))
            except Exception as error:  # a picture less is no reason to lose the figures
                say(f"no picture: {type(error).__name__}: {error}")
    return 0


# ----------------------------------------------------------------------------------------------------------- one engine


def measure(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Everything of one model, most telling first; fills `result` and saves it after every part."""
    began = time.perf_counter()
    deadline_s = began + 60 * arguments.minutes
    # Where a step never ends nothing else can end it: where it stands is printed, and what was measured is saved already.
    faulthandler.dump_traceback_later(60 * arguments.minutes + 15, exit=True)

    def done(what: str) -> None:
        say(f"[{time.perf_counter() - began:6.1f} s] {what}")
        save(result, arguments.out)

    if not arguments.no_ceilings:
        found = child(arguments, "--ceilings-only", timeout_s=120)
        if "error" in found:
            result["skipped"].append(f"ceilings: {found['error']}")
        else:
            result["card"] = found.pop("card")
            result["ceilings"] = found
        done(f"ceilings: {json.dumps(found)}")
    if not arguments.no_start:
        result["start"] = measure_start(arguments)
        result["skipped"] += [f"start, {k}: {v['error']}" for k, v in result["start"].items() if "error" in v]
        done("start")
    before = others_bytes() if arguments.backend == "cuda" else 0
    phases = Phases()
    plan, client = opened(goals_of(arguments), phases=phases)
    result["phases"] = [(phase.name, phase.seconds) for phase in phases.done]
    try:
        describe(plan, arguments, result)
        done(f"engine: {phases.text()}")
        suite = suite_of(plan, client, arguments, result, deadline_s=deadline_s)
        run_works(suite, arguments, result, done=done)
        result["memory"] = compared_memory(plan, before=before)
    finally:
        with contextlib.suppress(Exception):
            client.close()
    done("all")
    faulthandler.cancel_dump_traceback_later()


def describe(plan: Plan, arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Puts the plan into the result, and the name of the device that it is for."""
    if plan.numerics.backend == "cuda":
        result["card"] = plan.hardware.name
    result["reasons"] = {reason.choice: f"{reason.value}: {reason.why}" for reason in plan.reasons}
    result["ledger"] = [[line.name, line.bytes, line.how] for line in plan.ledger]
    result["sizes"] = sizes_of(
        config_of(arguments.model),
        quantization=arguments.quantization,
        kv_format=plan.numerics.kv_format,
        load_format=plan.load_format,
    )
    for reason in plan.reasons:
        say(f"    {reason.choice} = {reason.value}")


def suite_of(
    plan: Plan, client: LocalClient, arguments: argparse.Namespace, result: dict[str, Any], *, deadline_s: float
) -> Suite:
    """The workloads over an engine."""
    scale = SCALES[arguments.scale]
    scale = Scale(
        divide=scale.divide,
        batches=tuple(map(int, arguments.rows.split(","))) if arguments.rows else scale.batches,
        repeats=arguments.repeats or scale.repeats,
    )
    driven = Driven(client.loop, deadline_s=deadline_s)
    copy = result.get("ceilings", {}).get("copy_bytes_per_s")
    suite = Suite(driven, vocab_size=plan.card.vocab_size, sizes=result["sizes"], scale=scale, copy=copy)
    suite.once = arguments.once
    return suite


def run_works(
    suite: Suite, arguments: argparse.Namespace, result: dict[str, Any], *, done: Callable[[str], None]
) -> None:
    """Lets the engine settle and warms up, then runs the asked workloads into `result`, in the order in which they are named.

    One that fails is said there, and the others go on; what comes last is lost when time runs out.
    """
    gc.collect()
    result["settle"] = suite.driven.settle(arguments.settle)
    done(settled_text(result["settle"]))
    names = [name for name in arguments.workloads.split(",") if name]
    for name in ["warm", *names]:
        base, _, mode = name.partition(":")
        began, captured = time.perf_counter(), suite.driven.captures
        if began > suite.driven.deadline_s:
            result["skipped"].append(f"{name}: no time left")
            continue
        try:
            if name == "warm":
                result["warm_s"] = suite.warm()
                done(f"warm-up {result['warm_s']:.2f} s")
                continue
            record = getattr(suite, base)(1.0 if mode == "t1" else 0.0)
            record.setdefault("steps", suite.steps)
        except Exception as error:
            result["skipped"].append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
            done(result["skipped"][-1])
            if suite.driven.loop.dead is not None:
                break
            continue
        record["graphs_captured"] = suite.driven.captures - captured
        record["took_s"] = round(time.perf_counter() - began, 2)
        result["workloads"][name] = record
        shown = {key: value for key, value in record.items() if isinstance(value, float)}
        done(f"{name}: " + ", ".join(f"{key} {value:.5g}" for key, value in shown.items()))


# ---------------------------------------------------------------------------------------------- switches, one at a time


def ablate(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """The short workloads with everything on and with each switch turned, each in its own process: none leaves memory behind."""
    switches = known_switches()
    chosen = arguments.switches.split(",") if arguments.switches else list(switches)
    every = [name for name in ORDER if any(name in switches[switch].works for switch in chosen)]
    result["runs"] = {}
    deadline_s = time.perf_counter() + 60 * arguments.minutes
    rows = arguments.rows or (SHORT_ROWS if arguments.scale == "full" else "1,8")
    for name in ("none", *chosen):
        left_s = deadline_s - time.perf_counter()
        if left_s < 20:
            result["skipped"].append(f"{name}: no time left")
            continue
        with tempfile.TemporaryDirectory(prefix="tradewind-off-") as folder:
            out = Path(folder) / "run.json"
            options = ["--workloads", ",".join(every if name == "none" else switches[name].works), "--out", str(out)]
            options += ["--rows", rows, "--repeats", str(arguments.repeats or 1), "--no-start", "--no-ceilings"]
            options += ["--settle", str(arguments.settle)]
            options += ["--minutes", f"{left_s / 60 - 0.1:.3f}", *(["--off", name] if name != "none" else [])]
            began = time.perf_counter()
            command = [sys.executable, str(SUITE), *same_engine(arguments), *options]
            try:
                done = subprocess.run(
                    command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=left_s, check=False
                )
                last = (done.stderr.strip().splitlines() or ["no message"])[-1][:300]
                failed = f"exit code {done.returncode}: {last}" if done.returncode else None
            except subprocess.TimeoutExpired:
                failed = f"not done after {left_s:.0f} s"
            run: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {}
            if failed:
                run["error"] = failed
            run["turned"] = {} if name == "none" else switches[name].means | switches[name].tuning
            result["runs"][name] = {
                key: run[key]
                for key in ("turned", "settle", "workloads", "reasons", "skipped", "phases", "error")
                if key in run
            }
        say(f"{name}: {time.perf_counter() - began:.1f} s, {failed or 'done'} {'; '.join(run.get('skipped', ()))}")
        save(result, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
