"""An engine's device wing for the op set "cuda" with its tensors in host memory: the same code, planned, and nothing is launched."""

from __future__ import annotations

import gc
from typing import Any

import msgspec
import torch

from tests.host.plans import GEMMA_270M, SMOLLM2, MiB, bf16, gpu
from tradewind.attention.backend import choose_backend
from tradewind.config.card import LatentFacts, ModelCard, MoeFacts
from tradewind.config.card_parts import every_nth_full, with_weights
from tradewind.config.goals import Goals, Means
from tradewind.config.plan import Plan
from tradewind.config.resolve import resolve
from tradewind.device.kv import KVStorage
from tradewind.kernels.ops import KVLayer
from tradewind.kernels.triton.graphs import Gpu, Pinned
from tradewind.kernels.triton.ops import CudaOps
from tradewind.models.registry import Model, family_of
from tradewind.runner.graph_runner import GraphRunner
from tradewind.weights.dummy import load_dummy

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
CARDS["biased"] = bf16(msgspec.structs.replace(CARDS["untied"], family="qwen2", qkv_bias=True, name="biased"))
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


def plan_of(card: ModelCard, **means: Any) -> Plan:
    """For 64 sequences and steps of 2,048 tokens on a GPU, of which it may have 1.2 GiB."""
    chosen = Means(max_running=64, max_tokens_per_step=2048, load_format="dummy", **means)
    return resolve(Goals(model=card.name, memory_limit_bytes=1200 * MiB, means=chosen), card, gpu())


def model_of(plan: Plan, card: ModelCard, ops: CudaOps) -> Model:
    backend = choose_backend(plan.cache.groups, plan.hardware, ops=ops)
    return load_dummy(family=family_of(card), card=card, ops=ops, numerics=plan.numerics, attention=backend)


def pages_of(plan: Plan, ops: CudaOps) -> tuple[KVLayer, ...]:
    return KVStorage(ops, plan.cache.groups, plan.cache.pages).layers


def runner_of(plan: Plan, card: ModelCard, ops: CudaOps, *, model: Model, kv: tuple[KVLayer, ...]) -> GraphRunner:
    return GraphRunner(
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
