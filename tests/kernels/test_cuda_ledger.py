"""The GPU's ledger against what the op set and the runner allocate: the same code with its tensors in host memory, nothing launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from cuda_on_host import CARDS, model_of, pages_of, plan_of, runner_of, storages  # noqa: E402

from tradewind.config import ledger_cuda  # noqa: E402
from tradewind.config.card import ModelCard  # noqa: E402
from tradewind.kernels.triton.ops import CudaOps  # noqa: E402
from tradewind.kernels.triton.program import Bucket  # noqa: E402

NOT_TENSORS = {"CUDA", "graphs", "rounding"}
"""Lines that are the driver's and the allocator's own, known from a card only."""


@contextmanager
def built(card: ModelCard, **means: Any) -> Iterator[tuple[Any, dict[str, int]]]:
    """A plan, and bytes by part of an engine that was built from it: weights, pages, everything else."""
    plan = plan_of(card, **means)
    before = storages()

    def new() -> dict[int, int]:
        return {place: size for place, size in storages().items() if place not in before}

    ops = CudaOps(device="cpu")
    model = model_of(plan, card, ops)
    weights = new()
    kv = pages_of(plan, ops)
    pages = {place: size for place, size in new().items() if place not in weights}
    runner = runner_of(plan, card, ops, model=model, kv=kv)
    # Plans of the largest steps take the largest workspaces; nothing runs.
    longest = plan.schedule.max_context
    for tokens, rows, singles in ((2048, 64, False), (64, 64, True), (16, 16, True), (1, 1, True)):
        bucket = Bucket(tokens=tokens, rows=rows, singles=singles, longest=longest)
        runner._programs.program("body", bucket)
    if runner._sharing.wanted:
        runner._programs.program("body", Bucket(tokens=64, rows=64, singles=True, longest=longest, shared=True))
    head = Bucket(tokens=64, rows=64, singles=True, longest=1)
    runner._programs.program("head", head)
    rest = {place: size for place, size in new().items() if place not in weights and place not in pages}
    try:
        yield plan, {"weights": sum(weights.values()), "pages": sum(pages.values()), "rest": sum(rest.values())}
    finally:
        runner.close()


@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("name", sorted(CARDS))
def test_the_ledger_is_what_is_allocated(name: str, quantization: Any) -> None:
    with built(CARDS[name], quantization=quantization) as (plan, real):
        lines = {line.name: line.bytes for line in plan.ledger if line.name not in NOT_TENSORS}
    weights = lines.pop("weights") + lines.pop("embedding table", 0)
    pages = sum(lines.pop(key) for key in list(lines) if key.startswith("KV"))
    assert real["weights"] == pytest.approx(weights, rel=0.01)
    assert real["pages"] == pages
    lines["workspaces"] -= ledger_cuda.CUBLAS_BYTES  # its own
    # The ledger has bounds of workspaces and what making a rope table leaves with the allocator, so it is over, and never under.
    assert 0.86 * sum(lines.values()) <= real["rest"] <= sum(lines.values())
