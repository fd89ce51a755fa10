"""What a scenario wants where the user says nothing: a table for the CPU and one for GPUs.

Knows: usual sizes of steps, batches and sequences. Refuses to know: how they fit into memory (resolve) and what was asked for (choices).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What a scenario wants where the user says nothing."""

    max_tokens_per_step: int
    max_running: int
    tokens_each: int
    """Length of the sequences that the pages are sized for."""
    kv_share: float
    """Largest part of free memory for KV pages when no limit is stated. On a GPU 1: nothing else wants the rest of the limit."""
    why_step: str
    why_running: str


HABITS: dict[str, Habits] = {
    "balanced": Habits(
        max_tokens_per_step=512,
        max_running=64,
        tokens_each=512,
        kv_share=0.5,
        why_step="weights are read once for the whole chunk, and decoding neighbours wait for one chunk at most",
        why_running="matmuls gain little beyond 64 rows on a CPU, and each sequence wants pages",
    ),
    "latency": Habits(
        max_tokens_per_step=256,
        max_running=16,
        tokens_each=1024,
        kv_share=0.5,
        why_step="short steps: a decoding answer is held up less by somebody's prompt",
        why_running="few rows: each running answer keeps its pace",
    ),
    "memory": Habits(
        max_tokens_per_step=128,
        max_running=8,
        tokens_each=512,
        kv_share=0.25,
        why_step="small activations",
        why_running="few slots, few pages",
    ),
    "throughput": Habits(
        max_tokens_per_step=1024,
        max_running=128,
        tokens_each=1024,
        kv_share=0.8,
        why_step="large matmuls; nobody waits for a single answer",
        why_running="many rows share each reading of the weights",
    ),
}

GPU_HABITS: dict[str, Habits] = {
    "balanced": Habits(
        max_tokens_per_step=8192 + 512,
        max_running=512,
        tokens_each=1024,
        kv_share=1.0,
        why_step="8192 tokens of prompts keep every multiprocessor busy, with room for the running rows' own beside them",
        why_running="up to 512 rows share each reading of the weights; fewer, when fewer ask",
    ),
    "latency": Habits(
        max_tokens_per_step=2048,
        max_running=64,
        tokens_each=2048,
        kv_share=1.0,
        why_step="short steps: a decoding answer is held up less by somebody's prompt",
        why_running="few rows: each running answer keeps its pace",
    ),
    "memory": Habits(
        max_tokens_per_step=2048,
        max_running=32,
        tokens_each=1024,
        kv_share=1.0,
        why_step="small activations",
        why_running="few slots, few logits",
    ),
    "throughput": Habits(
        max_tokens_per_step=8192 + 1024,
        max_running=1024,
        tokens_each=1024,
        kv_share=1.0,
        why_step="beyond 8192 tokens of prompts matmuls get no faster, only the activations larger; the running rows' own come on top",
        why_running="many rows share each reading of the weights",
    ),
}


def habits_of(scenario: str, *, backend: str) -> Habits:
    """The row of a scenario for what computes."""
    return (GPU_HABITS if backend == "cuda" else HABITS)[scenario]
