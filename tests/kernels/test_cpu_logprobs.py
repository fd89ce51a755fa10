"""logprobs of the CPU library against float64 numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.cpu_support import LEVELS, count, cpu_ops, floats
from tradewind.kernels.cpu.ops import CpuOps


def run(ops: CpuOps, logits: Any, tokens: Any, top: int, live: int | None = None) -> tuple[Any, Any, Any, Any]:
    rows = len(logits)
    out = (
        np.full(rows, 7, np.float32),
        np.full(rows, 7, np.int32),
        np.full((rows, top), 7, np.int32),
        np.full((rows, top), 7, np.float32),
    )
    kept = logits.tobytes()
    ops.logprobs(
        logits,
        tokens,
        top=top,
        out_logprob=out[0],
        out_rank=out[1],
        out_ids=out[2],
        out_top=out[3],
        count=count(rows if live is None else live),
    )
    assert logits.tobytes() == kept
    return out


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("vocab", [1, 15, 100, 4096, 4097, 49152])
def test_matches(isa: int, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = floats(rng, 5, vocab, scale=4)
    logits[1] = np.round(logits[1])  # many ties
    logits[2, rng.random(vocab) < 0.5] = -np.inf
    logits[2, 0] = 1
    logits[3] = 0
    tokens = rng.integers(0, vocab, 5).astype(np.int32)
    tokens[2] = 0
    top = min(20, vocab)
    exact = logits.astype(np.float64)
    exact = exact - exact.max(-1, keepdims=True)
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    order = np.argsort(-logits.astype(np.float64), axis=-1, kind="stable")
    for threads in (1, 2, 3):
        with cpu_ops(threads=threads, isa=isa) as ops:
            logprob, rank, ids, best = run(ops, logits, tokens, top)
            np.testing.assert_allclose(logprob, exact[np.arange(5), tokens], rtol=3e-6, atol=3e-6)
            assert rank.tolist() == [int(np.flatnonzero(order[i] == tokens[i])[0]) + 1 for i in range(5)]
            assert (ids == order[:, :top]).all()
            np.testing.assert_allclose(best, np.take_along_axis(exact, order[:, :top], -1), rtol=3e-6, atol=3e-6)


def test_all_tokens_none_and_bad_rows() -> None:
    rng = np.random.default_rng(1)
    with cpu_ops() as ops:
        logits = floats(rng, 3, 5000)
        logits[1, 77] = np.nan
        tokens = np.array([3, 4, 5], np.int32)
        logprob, _, ids, _ = run(ops, logits, tokens, 5000)
        assert (ids[0] == np.argsort(-logits[0], kind="stable")).all()
        assert np.isnan(logprob[1])
        assert np.isfinite(logprob[[0, 2]]).all()
        fewer = run(ops, logits, tokens, 0, live=1)
        assert fewer[0][0] == logprob[0]
        assert (fewer[0][1:] == 7).all()
        alone = run(ops, logits[2:], tokens[2:], 7)
        assert alone[0].tobytes() == logprob[2:].tobytes()
