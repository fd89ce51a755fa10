"""From nothing to the first answer: what a start takes, measured in processes of their own.

Knows: how gpu_suite.py is run again as another process that prints one line of JSON, and what cold and warm mean: empty caches on
disk, and those that the start before has left. Refuses to know: workloads.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from gpu_card import compared_memory, device_memory, others_bytes
from gpu_engine import Driven, opened
from gpu_options import goals_of, same_engine
from gpu_places import SOURCES, SUITE
from gpu_results import say

from tradewind.phases import Phases, process_began_s

START_TIMEOUT_S = 90.0


# ------------------------------------------------------------------------------------------------- in the other process


def start_only(arguments: argparse.Namespace) -> dict[str, Any]:
    """Builds the engine and answers one request; times are from the start of this process."""
    before = others_bytes() if arguments.compare_memory else None
    phases = Phases(began_s=process_began_s())
    plan, client = opened(goals_of(arguments), phases=phases)
    ready_s = time.perf_counter() - process_began_s()
    vocab = plan.card.vocab_size
    try:
        Driven(client.loop).generate([[100 + i % (vocab - 2100) for i in range(128)]], [1])
        answer_s = time.perf_counter() - process_began_s()
        memory = device_memory() if before is None else compared_memory(plan, before=before)
    finally:
        client.close()
    return {
        "ready_s": ready_s,
        "first_answer_s": answer_s,
        "phases": [(phase.name, phase.seconds) for phase in phases.done],
        "besides": [(phase.name, phase.seconds) for phase in phases.besides],
        "memory": memory,
    }


# ---------------------------------------------------------------------------------------------------------- in this one


def child(
    arguments: argparse.Namespace, *options: str, timeout_s: float, environment: dict[str, str] | None = None
) -> Any:
    """Runs gpu_suite.py in a process of its own and returns the JSON line that it prints last; {"error": ...} when it fails."""
    command = [sys.executable, str(SUITE), *same_engine(arguments), *options]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, **(environment or {})},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout_s:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        last = [line.strip() for line in done.stderr.splitlines() if line.strip()][-12:]
        say("\n".join(f"    | {line[:300]}" for line in last))
        return {"error": f"exit code {done.returncode}: {last[-1][:300] if last else 'no message'}"}
    return json.loads(lines[-1])


def measure_start(arguments: argparse.Namespace, *, cold_only: bool = False) -> dict[str, Any]:
    """Start to ready in two processes: with empty caches on disk, then with what the first has left there."""
    # As an installer does: where Python may write no bytecode, every process would compile our sources again.
    compileall.compile_dir(SOURCES, quiet=2, workers=0)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tradewind-cold-") as folder:
        fresh = {"TRITON_CACHE_DIR": f"{folder}/triton", "XDG_CACHE_HOME": f"{folder}/cache"}
        for name in ("cold",) if cold_only else ("cold", "warm"):
            found[name] = child(arguments, "--start-only", timeout_s=START_TIMEOUT_S, environment=fresh)
            record = found[name]
            say(
                f"  {name}: "
                + (
                    record.get("error")
                    or f"ready in {record['ready_s']:.2f} s, answered in {record['first_answer_s']:.2f} s"
                )
            )
    return found
