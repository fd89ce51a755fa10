"""Low-rank adapters on the op set "cuda": against kernels/reference_lora.py, in recordings, and what a step without any becomes.

Runs as test_triton_ops.py does (TRITON_INTERPRET=1, or a GPU).
"""

from __future__ import annotations

import os
import sys
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

from tests.kernels.test_triton_ops import (  # noqa: E402
    BF16_TOLERANCE,
    buffer,
    difference,
    live,
    make_ops,
    normal,
    seen,
)
from tradewind.kernels import reference, reference_lora  # noqa: E402
from tradewind.kernels.triton import low_rank  # noqa: E402
from tradewind.kernels.triton.ops import CudaOps  # noqa: E402
from tradewind.kernels.triton.tape import Bucket  # noqa: E402

SLOTS, RANK = 5, 24
SIZES = (70, 16, 33)
WIDTH = sum(SIZES)
RANKS = ((1, 8, 0), (8, 0, 3), (RANK, RANK, RANK), (0, 0, 0), (3, 16, 17))


def filled(ops: CudaOps, k: int) -> tuple[Any, Any, Any]:
    """A bank, and its A [S, P, R, K] and B [S, N, R] as they were rounded."""
    bank = ops.low_rank_bank(slots=SLOTS, rank=RANK, sizes=SIZES, k=k, exact=False)
    a, b = torch.zeros(SLOTS, 3, RANK, k).double(), torch.zeros(SLOTS, WIDTH, RANK).double()
    starts = np.cumsum([0, *SIZES])
    for slot, ranks in enumerate(RANKS):
        for part, (n, rank) in enumerate(zip(SIZES, ranks, strict=True)):
            ops.set_low_rank(bank, slot, part, normal(RANK, k), normal(n, RANK))
            down, up = normal(rank, k, seed=slot, scale=k**-0.5), normal(n, rank, seed=part)
            ops.set_low_rank(bank, slot, part, down, up)  # nothing of who was here before is left
            a[slot, part, :rank] = torch.from_numpy(down).bfloat16().double()
            b[slot, starts[part] : starts[part + 1], :rank] = torch.from_numpy(up).bfloat16().double()
    return bank, a, b


@pytest.mark.parametrize("k", [48, 1100])
@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (9, 9), (40, 33), (70, 70), (5, 0)])
def test_add_low_rank(tokens: int, count: int, k: int) -> None:
    """Ranks unlike each other, parts that an adapter leaves alone, tokens without one, K in one piece and in two."""
    ops = make_ops()
    bank, a, b = filled(ops, k)
    ids = np.random.default_rng(tokens).integers(-1, SLOTS, tokens).astype(np.int32)
    x, out = buffer(ops, normal(tokens, k)), buffer(ops, normal(tokens, WIDTH, seed=1))
    before = seen(out)
    wanted = reference_lora.add_low_rank(seen(x), a, b, torch.from_numpy(ids), before, sizes=SIZES)
    ops.add_low_rank(x, bank, ops.constant(ids), out=out, count=live(count))
    got = seen(out)
    assert count == 0 or difference(got[:count], wanted[:count]) < BF16_TOLERANCE
    assert torch.equal(got[count:], before[count:])
    assert torch.equal(got[ids < 0], before[ids < 0]), "tokens without an adapter"


def test_a_token_is_the_same_in_any_company() -> None:
    ops, k = make_ops(), 200
    bank, _, _ = filled(ops, k)
    ids = np.random.default_rng(0).integers(-1, SLOTS, 37).astype(np.int32)
    x, together = buffer(ops, normal(37, k)), buffer(ops, normal(37, WIDTH, seed=1))
    rows = [together[i : i + 1].clone() for i in range(37)]
    ops.add_low_rank(x, bank, ops.constant(ids), out=together, count=live(37))
    for i, row in enumerate(rows):
        ops.add_low_rank(x[i : i + 1].clone(), bank, ops.constant(ids[i : i + 1]), out=row, count=live(1))
        assert torch.equal(row[0], together[i])


def test_glue() -> None:
    ops = make_ops()
    for activation in ("silu", "gelu_tanh"):
        x, out = buffer(ops, normal(7, 100)), ops.empty((7, 50), "bf16")
        ops.glue(x, activation=activation, out=out, count=live(7))
        wanted = reference.glue(*seen(x).chunk(2, -1), activation)
        assert difference(seen(out), wanted) < BF16_TOLERANCE


def lines(program: Any) -> list[str]:
    return program.describe().splitlines()  # type: ignore[no-any-return]


@pytest.mark.parametrize("fp8", [False, True])
def test_recorded_for_all_matmuls_and_left_out_where_nobody_has_one(fp8: bool) -> None:
    """Tokens are sorted once for a whole step; a step without adapters is that of a model without room for any."""
    ops, e, f = make_ops(), 64, 48
    pack, tolerance = (ops.pack_fp8, 0.06) if fp8 else (ops.pack_matrix, BF16_TOLERANCE)
    gate, up, down = (pack(normal(*shape, seed=s, scale=0.2)) for s, shape in enumerate(((f, e), (f, e), (e, f))))
    both = ops.pack_stacked((gate, up))
    wide = ops.low_rank_bank(slots=2, rank=16, sizes=(f, f), k=e, exact=False)
    narrow = ops.low_rank_bank(slots=2, rank=16, sizes=(e,), k=f, exact=False)
    for bank in (wide, narrow):
        for part, n in enumerate(bank.sizes):
            ops.set_low_rank(bank, 1, part, normal(4, bank.k, scale=0.2), normal(n, 4, seed=part))
    x, adapters, count = buffer(ops, normal(20, e)), ops.constant(np.full(20, -1, np.int32)), ops.constant(live(20))
    made, inner, out = ops.empty((20, 2 * f), "bf16"), ops.empty((20, f), "bf16"), ops.empty((20, e), "bf16")
    with ops.record() as tape:
        ops.linear(x, both, bias=None, out=made, count=count)
        ops.add_low_rank(x, wide, adapters, out=made, count=count)
        ops.glue(made, activation="silu", out=inner, count=count)
        ops.linear(inner, down, bias=None, out=out, count=count)
        ops.add_low_rank(inner, narrow, adapters, out=out, count=count)
    with ops.record() as plain:
        ops.gated_linear(x, ops.pack_gated(gate, up), activation="silu", bias=None, out=inner, count=count)
        ops.linear(inner, down, bias=None, out=out, count=count)
    bucket = Bucket(tokens=20, rows=20, singles=False, longest=64)
    for fuse in (False, True):
        alone, program = plain.program(bucket, fuse=fuse), tape.program(bucket, fuse=fuse)
        assert lines(program) == lines(alone)
        alone.run()
        wanted = seen(out)
        out.zero_()
        program.run()
        assert torch.equal(seen(out), wanted)
    adapted = tape.program(Bucket(tokens=20, rows=20, singles=False, longest=64, adapted=True))
    kinds = [line.split()[0] for line in lines(adapted)]
    assert [kinds.count(kind) for kind in ("adapters", "sort", "shrink", "expand")] == [1, 1, 2, 2]
    adapted.run()
    assert difference(seen(out), wanted) < tolerance, "nobody has one"
    ids = np.array([1, -1] * 10, np.int32)
    adapters.copy_(torch.from_numpy(ids))
    adapted.run()
    got = seen(out)
    assert difference(got[1::2], wanted[1::2]) < tolerance
    assert difference(got[::2], wanted[::2]) > 0.1


def test_adapters_of_tokens_follow_their_rows() -> None:
    ops = make_ops()
    of_slot = ops.constant(np.array([[3], [-1], [0], [2]], np.int32))
    slot, start = ops.constant(np.array([2, 0, 1, 9], np.int32)), ops.constant(np.array([0, 3, 4, 6, 6], np.int32))
    out = ops.constant(np.full(9, 7, np.int32))
    low_rank.lay_out_adapters(slot, start, ops.constant(live(3)), of_slot, out=out)
    assert ops.host(out).tolist() == [0, 0, 0, 3, -1, -1, -1, -1, -1]
