"""The truth about rope over several axes (Qwen2-VL's multimodal rope, Wang et al. 2024), as a pure function of torch tensors.

Knows: which position turns which pair of dims. Refuses to know: speed, where positions come from. As in kernels/reference.py, whose
sibling this is.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_angles_axes(positions: Tensor, axes: Tensor, inv_freq: Tensor, *, scale: float) -> Tensor:
    """scale * (cos | sin) of positions[axes[j], t] * inv_freq[j]: positions [A, T], axes and inv_freq [D/2] -> [T, D]."""
    angle = positions.to(inv_freq.dtype)[axes.long()].T * inv_freq
    return scale * torch.cat([angle.cos(), angle.sin()], -1)
