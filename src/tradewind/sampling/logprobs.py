"""Log-probabilities as records, from the arrays that the logprobs op fills.

Knows: their shape at the border. Refuses to know: how they are computed (kernels).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tradewind.contract.step import TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class LogprobArrays:
    """Host arrays of one call of the logprobs op: L rows, the `top` best of each, sorted descending."""

    logprob: npt.NDArray[np.float32]
    rank: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top: npt.NDArray[np.float32]

    def record(self, row: int, *, token: int, top: int) -> TokenLogprobs:
        """Row `row` for `token`, cut to the `top` best: lists of 1, 4 and 10 are prefixes of each other."""
        return TokenLogprobs(
            token=token,
            logprob=float(self.logprob[row]),
            rank=int(self.rank[row]),
            top_ids=tuple(int(i) for i in self.top_ids[row, :top]),
            top_logprobs=tuple(float(v) for v in self.top[row, :top]),
        )
