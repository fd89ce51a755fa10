"""The GPU's ledger against what the op set and the runner allocate: the same code with its tensors in host memory, nothing launched."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.host.plans import GEMMA_270M, SMOLLM2, MiB, bf16, gpu  # noqa: E402
from tradewind.attention.backend import choose_backend  # noqa: E402
from tradewind.config import ledger_cuda  # noqa: E402
from tradewind.config.card import LatentFacts, ModelCard, MoeFacts  # noqa: E402
from tradewind.config.card_parts import every_nth_full, with_weights  # noqa: E402
from tradewind.config.goals import Goals, Means  # noqa: E402
from tradewind.config.resolve import resolve  # noqa: E402
from tradewind.device.kv import KVStorage  # noqa: E402
from tradewind.kernels.triton.graphs import Gpu, Pinned  # noqa: E402
from tradewind.kernels.triton.ops import CudaOps  # noqa: E402
from tradewind.kernels.triton.tape import Bucket  # noqa: E402
from tradewind.models.registry import family_of  # noqa: E402
from tradewind.runner.graph_runner import GraphRunner  # noqa: E402
from tradewind.weights.dummy import load_dummy  # noqa: E402

SMALL = {"vocab_size": 4096, "hidden": 256, "layers": 3, "heads": 8, "kv_heads": 2, "head_dim": 64, "intermediate": 768}
CARDS = {
    "untied": bf16(
        msgspec.structs.replace(
            SMOLLM2, **SMALL, tied_embeddings=False, max_positions=4096, layer_windows=(None,) * 3, source="hf"
        )
    ),
    "gemma": bf16(
        msgspec.structs.replace(
            GEMMA_270M, **SMALL, max_positions=4096, layer_windows=every_nth_full(3, window=512, pattern=3), source="hf"
        )
    ),
}
EXPERTS = MoeFacts(experts=16, per_token=4, intermediate=128, layers=(True, True, True))
CARDS["mixture"] = bf16(
    msgspec.structs.replace(
        CARDS["untied"], family="qwen3_moe", qk_norm=True, qkv_bias=False, moe=EXPERTS, name="mixture"
    )
)
CARDS["shared"] = bf16(
    msgspec.structs.replace(
        CARDS["untied"], family="qwen2_moe", name="shared",
        moe=msgspec.structs.replace(EXPERTS, shared_intermediate=256, shared_gate=True, layers=(False, True, True)),
    )
)  # fmt: skip
for kind in ("untied", "shared"):
    CARDS[f"{kind}, fp8 by blocks"] = with_weights(CARDS[kind], tensors=None, assumed="BF16", fp8_blocks=True)
CARDS["latent"] = bf16(
    msgspec.structs.replace(
        CARDS["untied"], family="deepseek_v2", qkv_bias=False, name="latent", kv_heads=8, head_dim=48,
        latent=LatentFacts(rank=128, rope=16, nope=32, value=32, query_rank=64),
        rope=msgspec.structs.replace(CARDS["untied"].rope, rotary_dims=16),
        moe=msgspec.structs.replace(EXPERTS, shared_intermediate=256, layers=(False, True, True)),
    )
)  # fmt: skip
NOT_TENSORS = {"CUDA", "graphs", "rounding"}
"""Lines that are the driver's and the allocator's own, known from a card only."""


def storages() -> dict[int, int]:
    """Address -> bytes of the memory of every living tensor that is not pinned memory of the host."""
    gc.collect()
    objects = gc.get_objects()
    pinned = {item.device.untyped_storage().data_ptr() for item in objects if type(item) is Pinned}
    found = {}
    for item in objects:
        if type(item) is torch.Tensor:
            storage = item.untyped_storage()
            if storage.data_ptr() not in pinned:
                found[storage.data_ptr()] = storage.nbytes()
    return found


@contextmanager
def built(card: ModelCard, **means: Any) -> Iterator[tuple[Any, dict[str, int]]]:
    """A plan, and bytes by part of an engine that was built from it: weights, pages, everything else."""
    goals = Goals(
        model=card.name,
        memory_limit_bytes=1200 * MiB,
        means=Means(max_running=64, max_tokens_per_step=2048, load_format="dummy", **means),
    )
    plan = resolve(goals, card, gpu())
    before = storages()

    def new() -> dict[int, int]:
        return {place: size for place, size in storages().items() if place not in before}

    ops = CudaOps(device="cpu")
    backend = choose_backend(plan.cache.groups, plan.hardware, ops=ops)
    model = load_dummy(family=family_of(card), card=card, ops=ops, numerics=plan.numerics, attention=backend)
    weights = new()
    kv = KVStorage(ops, plan.cache.groups, plan.cache.pages).layers
    pages = {place: size for place, size in new().items() if place not in weights}
    runner = GraphRunner(
        model=model,
        ops=ops,
        gpu=Gpu("cpu"),
        groups=plan.cache.groups,
        kv=kv,
        max_running=plan.schedule.max_running,
        max_tokens_per_step=plan.schedule.max_tokens_per_step,
        max_context=plan.schedule.max_context,
        vocab_size=card.vocab_size,
        hidden=card.hidden,
        graphs=True,
    )
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
