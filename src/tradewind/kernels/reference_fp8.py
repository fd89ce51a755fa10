"""The truth about FP8 with scales by blocks: what stored weights mean, and how a token is rounded to meet them.

Knows: the two groupings, as pure functions of torch tensors. Refuses to know: how scales are repeated in memory, and speed.

    weights   value[n, k] = stored[n, k] * scale[n / 128, k / 128]
    tokens    128 neighbouring columns share scale = absmax / 448; stored = e4m3(x / scale)

DeepSeek-V3 report 2024, section 3.3. The last block of either side may be shorter.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
E4M3_MAX = 448.0
LEAST = 1e-10


def weight_values(stored: Tensor, scale: Tensor, *, rows: int = BLOCK) -> Tensor:
    """stored e4m3 [..., N, K], scale [..., N / rows, K / 128] -> float64 values [..., N, K]; `rows` share a scale."""
    wide = scale.double().repeat_interleave(rows, -2).repeat_interleave(BLOCK, -1)
    return stored.double() * wide[..., : stored.shape[-2], : stored.shape[-1]]


def quantise_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> stored e4m3 [T, K] and scale float32 [T, K / 128]."""
    tokens, width = x.shape
    parts = torch.nn.functional.pad(x.float(), (0, -width % BLOCK)).view(tokens, -1, BLOCK)
    scale = parts.abs().amax(2).clamp_min(LEAST) / E4M3_MAX
    stored = (parts / scale[..., None]).clamp(-E4M3_MAX, E4M3_MAX).view(tokens, -1)[:, :width]
    return stored.to(torch.float8_e4m3fn), scale


def token_values(stored: Tensor, scale: Tensor) -> Tensor:
    """What a rounded token means: float64 [T, K]."""
    return stored.double() * scale.double().repeat_interleave(BLOCK, -1)[:, : stored.shape[1]]
