"""The truth about adapters: low-rank additions to a matmul (LoRA, Hu et al. 2021), as a pure function of torch tensors.

Knows: which addition a row gets. Refuses to know: speed, where adapters lie. As in kernels/reference.py, whose sibling this is.
"""

from __future__ import annotations

from torch import Tensor


def add_low_rank(x: Tensor, a: Tensor, b: Tensor, adapters: Tensor, out: Tensor, *, sizes: tuple[int, ...]) -> Tensor:
    """out with B_sp A_sp x[t] added to the columns of each part p, s = adapters[t], where that is not under 0.

    x [T, K], a [S, P, R, K], b [S, N of all parts, R], adapters [T], out [T, N of all parts], sizes: N of each part. Changes nothing.
    """
    result = out.clone()
    for row, adapter in enumerate(adapters.tolist()):
        start = 0
        for part, n in enumerate(sizes):
            if adapter >= 0:
                result[row, start : start + n] += b[adapter, start : start + n] @ (a[adapter, part] @ x[row])
            start += n
    return result
