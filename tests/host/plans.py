"""Cards and machines for tests of planning: real shapes, no files."""

from __future__ import annotations

import msgspec

from tradewind.config.card import ModelCard, RopeFacts
from tradewind.config.card_parts import count_parameters, every_nth_full
from tradewind.config.hardware import Hardware

MiB = 1 << 20
GiB = 1 << 30

SMOLLM2 = ModelCard(
    name="smollm2",
    family="llama",
    source="gguf",
    vocab_size=49152,
    hidden=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate=1536,
    max_positions=8192,
    norm_eps=1e-5,
    tied_embeddings=True,
    layer_windows=(None,) * 30,
    weight_bytes=96576768,
    parameters=134515008,
    weight_formats={"F32": 35136, "Q4_1": 106168320, "Q8_0": 28311552},
    embedding_format="Q8_0",
    bos_id=1,
    eos_ids=(2,),
)


def bf16(card: ModelCard) -> ModelCard:
    """The same shapes as an unquantised bf16 checkpoint."""
    count = count_parameters(card)
    formats = {"BF16": count}
    return msgspec.structs.replace(
        card, parameters=count, weight_bytes=2 * count, weight_formats=formats, embedding_format="BF16"
    )


SMOLLM2_BF16 = bf16(SMOLLM2)
LLAMA_8B = bf16(
    msgspec.structs.replace(
        SMOLLM2,
        name="llama-3.1-8b",
        vocab_size=128256,
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14336,
        max_positions=131072,
        tied_embeddings=False,
        layer_windows=(None,) * 32,
        rope=RopeFacts(theta=5e5, kind="llama3", factor=8.0, original_max_positions=8192),
    )
)
GEMMA_270M = bf16(
    msgspec.structs.replace(
        SMOLLM2,
        name="gemma3-270m",
        family="gemma3",
        vocab_size=262144,
        hidden=640,
        layers=18,
        heads=4,
        kv_heads=1,
        head_dim=256,
        intermediate=2048,
        max_positions=32768,
        layer_windows=every_nth_full(18, window=512, pattern=6),
        qk_norm=True,
        sandwich_norms=True,
    )
)
CARDS = (SMOLLM2, SMOLLM2_BF16, LLAMA_8B, GEMMA_270M)


def machine(
    *, total: int = 24 * GiB, free: int = 22 * GiB, cores: int = 2, features: tuple[str, ...] | None = None
) -> Hardware:
    """A CPU with round numbers."""
    return Hardware(
        kind="cpu",
        name="Test CPU",
        cores=cores,
        memory_bytes=total,
        memory_free_bytes=free,
        memory_bytes_per_s=50e9,
        matmul_flops_per_s=200e9,
        features=("avx2", "avx512", "avx512_bf16", "avx512_vnni") if features is None else features,
    )


def gpu(
    *,
    total: int = 140 * GiB,
    free: int = 139 * GiB,
    features: tuple[str, ...] = ("fp8", "sm_90"),
    name: str = "Test GPU",
) -> Hardware:
    """A GPU with round numbers and a host of 16 cores."""
    return Hardware(
        kind="cuda",
        name=name,
        cores=16,
        memory_bytes=total,
        memory_free_bytes=free,
        memory_bytes_per_s=4e12,
        matmul_flops_per_s=700e12,
        features=features,
        fp8_flops_per_s=1300e12 if "fp8" in features else 0.0,
        multiprocessors=132,
        host_memory_bytes=128 * GiB,
        host_memory_free_bytes=100 * GiB,
    )
