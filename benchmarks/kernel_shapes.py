"""Shapes of three dense models, and their weights, for measuring kernels without an engine.

Knows: what config.json says of them, and the peers' milliseconds a step. Refuses to know: kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rounds import F32, FP8, Bench


@dataclass(frozen=True)
class Shape:
    """What a dense decoder looks like, from its config.json."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    head_norm: bool
    tied: bool

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def layer_weights(self) -> int:
        """Elements of one layer's matrices."""
        e, f, q = self.hidden, self.intermediate, self.heads * self.head_dim
        return e * self.qkv + q * e + 3 * e * f


MODELS = (
    Shape("qwen3-0.6b", 1024, 3072, 28, 16, 8, 128, 151936, True, True),
    Shape("llama-3.2-1b", 2048, 8192, 16, 32, 8, 64, 128256, False, True),
    Shape("llama-3.1-8b", 4096, 14336, 32, 32, 8, 128, 128256, False, False),
)
PEERS = {
    # W6 of the peers' table: ms per decode step at ~1k context by batch; W1: TPOT at batch 1 with 128..384 tokens.
    "llama-3.1-8b": {
        1: "vLLM 5.03 SGLang 4.79 (W1 4.97/4.78)",
        8: "5.25 / 5.15",
        32: "6.30 / 6.11",
        128: "10.39 / 10.33",
        256: "17.69 / 16.64",
    },
    "qwen3-0.6b": {1: "vLLM 2.15 (W1 2.15/1.68)", 8: "1.53", 32: "2.78", 128: "5.53", 256: "9.71"},
    "llama-3.1-8b fp8": {1: "vLLM 3.52 (W1 3.50)", 8: "3.76", 32: "5.28", 128: "8.59", 256: "15.13"},
}


def fp8_weight(bench: Bench, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-channel e4m3 of a weight matrix [N, K]."""
    if bench.dry:
        return bench.empty(*weight.shape, dtype=FP8), bench.empty(len(weight), dtype=F32)
    scale = (weight.float().abs().amax(1) / 448).clamp(min=1e-12)
    return (weight.float() / scale[:, None]).clamp_(-448, 448).to(FP8), scale
