"""Two matrices by one token in one launch: the numbers, and where a plan of attention over latents makes it of two.

Runs as test_triton_ops.py does (TRITON_INTERPRET=1, or a GPU).
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    sys.path.insert(0, str(Path(__file__).parent))
    import triton_interpreter  # noqa: F401
elif not torch.cuda.is_available():
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 set before Python starts", allow_module_level=True)

from tests.kernels.test_triton_ops import DEVICE, TILES, buffer, difference, live, make_ops, normal, seen  # noqa: E402
from tradewind.kernels.ops import PagedRows  # noqa: E402
from tradewind.kernels.triton import pair, skinny  # noqa: E402
from tradewind.kernels.triton.launch import AFTER_ALL  # noqa: E402
from tradewind.kernels.triton.planning import plan  # noqa: E402
from tradewind.kernels.triton.program import Bucket  # noqa: E402
from tradewind.kernels.triton.tuning import GemvConfig  # noqa: E402


@pytest.mark.parametrize(("n", "m", "k"), [(24, 8, 64), (7, 5, 48), (1, 9, 40), (16, 16, 160)])
@pytest.mark.parametrize("normed", [False, True])
def test_both_products(n: int, m: int, k: int, normed: bool) -> None:
    """Sides that no block divides, blocks of a part of a row, and nothing written beside either result."""
    ops = make_ops()
    first, second = (torch.from_numpy(normal(rows, k, seed=rows)).bfloat16().to(DEVICE) for rows in (n, m))
    x, weight = ops.constant(normal(1, k, seed=3)), ops.constant(normal(k, seed=4))
    value = x.double().cpu()
    if normed:
        value = value * (value.square().mean() + 1e-5).rsqrt() * weight.double().cpu()
    for config in (GemvConfig(4, 64, 4), GemvConfig(2, 32, 1), GemvConfig(1, 1024, 2)):
        room = torch.full((n + m + 2,), 7.0, dtype=torch.bfloat16, device=x.device)
        out = room[:n].view(1, n), room[n + 1 : n + 1 + m].view(1, m)
        pair.pair_linear(
            x, first, second, out=out, norm=weight if normed else None, eps=1e-5 if normed else 0.0, config=config
        )
        for made, matrix in zip(out, (first, second), strict=True):
            assert difference(seen(made), value @ matrix.double().cpu().T) < 5e-3
        assert room[n] == 7 and room[-1] == 7


def program_of(*, tokens: int = 1, fp8: bool = False, same: bool = True, **options: Any) -> tuple[Any, list[Any]]:
    """norm, q, latent, store, attention of a step of one-token rows; and the texts of the launches that make q and latent."""
    heads, rank, rope, nope, value, hidden = 2, 32, 16, 16, 16, 64
    ops = make_ops(**options)
    rng = np.random.default_rng(1)
    kv = ops.latent_layer(pages=tokens + 1, page_tokens=16, width=rank + rope, format="bf16")
    kv.k.copy_(torch.from_numpy(rng.standard_normal(kv.k.shape).astype(np.float32)))
    rows = PagedRows(
        query_start=ops.constant(np.arange(tokens + 1, dtype=np.int32)),
        lengths=ops.constant(np.full(tokens, 9, np.int32)),
        page_table=ops.constant(np.arange(1, tokens + 1, dtype=np.int32)[:, None]),
        rows=ops.constant(live(tokens)),
    )
    up = ops.pack_latent(normal(heads, nope, rank, scale=0.2), normal(heads, value, rank, seed=1, scale=0.2))
    pack = ops.pack_fp8 if fp8 else ops.pack_matrix
    to_q = pack(normal(heads * (nope + rope), hidden, seed=2, scale=0.2))
    to_latent = pack(normal(rank + rope, hidden, seed=3, scale=0.2))
    stream = ops.constant(normal(tokens, hidden, seed=4))
    other = stream if same else ops.constant(normal(tokens, hidden, seed=5))
    weight, latent_weight = ops.constant(np.ones(hidden, np.float32)), ops.constant(np.ones(rank, np.float32))
    x, q, latent, out = (
        buffer(ops, np.zeros((tokens, size), np.float32)) for size in (hidden, to_q.n, to_latent.n, heads * value)
    )
    angles = ops.constant(
        np.repeat([[1.0, 0.0]], rope // 2, 1).repeat(tokens, 0).reshape(tokens, rope).astype(np.float32)
    )
    slots = ops.constant((16 * np.arange(1, tokens + 1) + 8).astype(np.int32))
    count = rows.rows
    with ops.record() as tape:
        ops.add_rms_norm(stream, None, weight, eps=1e-6, out=x, count=count)
        ops.linear(x, to_q, bias=None, out=q, count=count)
        ops.linear(x if same else other, to_latent, bias=None, out=latent, count=count)
        ops.latent_store(q, latent, angles, slots, kv, heads=heads, weight=latent_weight, eps=1e-6, count=count)
        ops.latent_attention(q, kv, rows, up, scale=0.2, out=out)
    program = plan(tape, Bucket(tokens=tokens, rows=tokens, singles=True, longest=64))
    program.run()
    kernels = [launch for launch in program.launches if launch.kernel in (pair.pair_linear, skinny.skinny_linear)]
    return seen(out).clone(), kernels


def test_a_plan_makes_one_of_two() -> None:
    together, launches = program_of(tuning=TILES, pdl=True if not INTERPRETED else None)
    assert [launch.kernel for launch in launches] == [pair.pair_linear] and "+ norm" in launches[0].text
    assert launches[0].options["pdl"] != AFTER_ALL
    apart, launches = program_of(tuning=replace(TILES, stack_latents=False))
    assert [launch.kernel for launch in launches] == [skinny.skinny_linear] * 2
    assert difference(together, apart) < 1e-2


@pytest.mark.parametrize("case", [{"fp8": True}, {"same": False}, {"tokens": 2}, {"deterministic": True}])
def test_others_stay_two(case: dict[str, Any]) -> None:
    """FP8 weights, inputs that differ, more tokens, deterministic mode."""
    out, launches = program_of(tuning=TILES, **case)
    assert not any(launch.kernel is pair.pair_linear for launch in launches)
    assert not out.isnan().any()
