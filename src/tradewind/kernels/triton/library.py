"""What torch's library computes for the op set "cuda": large matmuls, and angles once per engine.

Knows: which call of the library serves which types. Refuses to know: who wants it. All write to `out` and are safe in a graph capture.
On a CPU (Triton's interpreter, for tests) the same functions are plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_angles(positions: Tensor, inv_freq: Tensor, *, scale: float, out: Tensor, angle: Tensor) -> None:
    """out [T, D] = scale * (cos | sin) of positions [T] * inv_freq [D / 2]; angle [T, D / 2] is scratch."""
    half = len(inv_freq)
    angle.copy_(positions[:, None].expand(-1, half))
    angle.mul_(inv_freq)
    torch.cos(angle, out=out[:, :half])
    torch.sin(angle, out=out[:, half:])
    if scale != 1.0:
        out.mul_(scale)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor) -> None:
    """out = x @ weight.T + bias by the library; x, weight, bias bf16, out bf16 or float32."""
    if x.device.type != "cuda":
        value = x.float() @ weight.float().T
        out.copy_(value if bias is None else value + bias.float())
    elif bias is not None:
        torch.addmm(bias, x, weight.T, out=out)
    elif out.dtype == torch.float32:
        torch.mm(x, weight.T, out_dtype=torch.float32, out=out)
    else:
        torch.mm(x, weight.T, out=out)


def scaled_matmul(x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, *, out: Tensor) -> None:
    """out = (x_scale x) @ (scale weight).T by the library; x and weight e4m3, a scale per row of each, out bf16."""
    if x.device.type != "cuda":
        out.copy_((x.float() * x_scale[:, None]) @ (weight.float() * scale[:, None]).T)
    else:
        torch._scaled_mm(
            x, weight.T, x_scale[:, None], scale[None, :], out_dtype=torch.bfloat16, use_fast_accum=True, out=out
        )


def copy(source: Tensor, *, out: Tensor) -> None:
    """out = source in out's type."""
    out.copy_(source)
