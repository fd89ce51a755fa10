"""A whole engine on the `cuda` op set: on a GPU where there is one, else through Triton's interpreter (set before Python starts)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import triton_interpreter  # noqa: F401
elif not torch.cuda.is_available():
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 set before Python starts", allow_module_level=True)

from tradewind.assemble import Engine, Planned, make_executor, read_card, read_tokenizer, vocabulary_of  # noqa: E402
from tradewind.config.goals import AdapterRoom, Goals, Means  # noqa: E402
from tradewind.config.hardware import Hardware  # noqa: E402
from tradewind.config.resolve import resolve  # noqa: E402
from tradewind.contract.errors import UserError  # noqa: E402
from tradewind.contract.events import Sink  # noqa: E402
from tradewind.engine.client import LocalClient  # noqa: E402
from tradewind.engine.loop import EngineLoop  # noqa: E402
from tradewind.engine.scheduler import Scheduler  # noqa: E402
from tradewind.kernels.triton.ops import CudaOps  # noqa: E402
from tradewind.kernels.triton.tuning import AttentionWays, Tuning  # noqa: E402
from tradewind.phases import Phases  # noqa: E402
from tradewind.quantization.blocks import dequantise  # noqa: E402
from tradewind.sampling.grammar_compile import GrammarCompiler  # noqa: E402
from tradewind.weights.checkpoint import open_checkpoint  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
HARDWARE = Hardware(
    kind="cuda",
    name="NVIDIA H200",
    cores=2,
    memory_bytes=16 << 30,
    memory_free_bytes=16 << 30,
    memory_bytes_per_s=4.4e12,
    matmul_flops_per_s=7e14,
    features=("sm_90", "fp8"),
    fp8_flops_per_s=1.3e15,
    multiprocessors=132,
    host_memory_bytes=64 << 30,
    host_memory_free_bytes=64 << 30,
)


@contextmanager
def gpu_engine_of(
    folder: Path,
    *,
    pages: int | None = 200,
    schedule: dict[str, Any] | None = None,
    sinks: Sequence[Sink] = (),
    ways: AttentionWays | None = None,
    tuning: Tuning | None = None,
    adapters: AdapterRoom | None = None,
    **means: Any,
) -> Iterator[Engine]:
    """An engine on the checkpoint with small steps; `pages` and `schedule` overrule the plan, `ways` and `tuning` are the op set's."""
    small = {"max_running": 6, "max_tokens_per_step": 48, "page_tokens": 16}
    goals = Goals(model=str(folder), adapters=adapters, means=Means(backend="cuda", **{**small, **means}))
    checkpoint = open_checkpoint(folder)
    plan = resolve(goals, read_card(checkpoint, name=str(folder)), HARDWARE, missing={})
    cache = plan.cache
    if pages is not None:
        cache = msgspec.structs.replace(cache, pages=tuple(min(pages, own) for own in cache.pages))
    plan = msgspec.structs.replace(
        plan, cache=cache, schedule=msgspec.structs.replace(plan.schedule, **(schedule or {}))
    )
    ops = CudaOps(
        device=DEVICE, deterministic=plan.numerics.deterministic, read_blocks=dequantise, ways=ways, tuning=tuning
    )
    tokenizer = read_tokenizer(checkpoint)
    grammars = GrammarCompiler(lambda: vocabulary_of(tokenizer, plan), vocab_size=plan.card.vocab_size)
    planned = Planned(path=folder, checkpoint=checkpoint, plan=plan)
    executor = make_executor(planned, ops, phases=Phases(), grammars=grammars)
    scheduler = Scheduler(schedule=plan.schedule, cache=plan.cache, clock=time.monotonic, grammars=grammars)
    client = LocalClient(EngineLoop(scheduler=scheduler, executor=executor, clock=time.monotonic, sinks=sinks))
    engine = Engine(
        plan=plan,
        tokenizer=tokenizer,
        template=UserError("not asked for"),
        client=client,
        phases=Phases(),
        checkpoint_path=folder,
    )
    try:
        yield engine
    finally:
        client.close()
