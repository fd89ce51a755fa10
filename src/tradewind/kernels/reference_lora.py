"""The truth about adapters: low-rank additions to a matmul (LoRA, Hu et al. 2021), as a pure function of torch tensors.

Knows: which addition a row gets. Refuses to know: speed, where adapters lie. As in kernels/reference.py, whose sibling this is.
"""

from __future__ import annotations

from torch import Tensor


def add_low_rank(x: Tensor, a: Tensor, b: Tensor, adapters: Tensor, out: Tensor, *, start: int) -> Tensor:
    """out with B_s A_s x[t] added to the columns from `start` on, s = adapters[t], where that is not under 0.

    x [T, K], a [S, R, K], b [S, N, R], adapters [T], out [T, at least start + N]; changes nothing.
    """
    result = out.clone()
    for row, adapter in enumerate(adapters.tolist()):
        if adapter >= 0:
            result[row, start : start + b.shape[1]] += b[adapter] @ (a[adapter] @ x[row])
    return result
