"""Runs each Triton kernel once at small sizes, for compute-sanitizer (which makes everything many times slower).

    PYTHONPATH=src python benchmarks/sanitize.py                                            compiles into Triton's cache first
    PYTHONPATH=src compute-sanitizer --tool memcheck python benchmarks/sanitize.py          out-of-bounds and misaligned accesses
    PYTHONPATH=src compute-sanitizer --tool racecheck python benchmarks/sanitize.py --only matmuls,attention
    PYTHONPATH=src compute-sanitizer --tool initcheck python benchmarks/sanitize.py         reads of memory that nothing wrote

Set PYTORCH_NO_CUDA_MEMORY_CACHING=1 as well: then every tensor is allocated by itself, and what lies beyond it is nobody's.
Sizes are ragged on purpose: rows, columns and keys that are no multiple of a tile. Results are checked for NaN only; tests/gpu and
tests/kernels know the truth. `latent` and `blocks` are those tests themselves, run in this process: their kernels have no group here.
With --budget no group begins after so many seconds, and those left out are named.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tradewind.kernels.ops import LowRankBank, PackedMatrix, Routing
from tradewind.kernels.triton import decode, elementwise, low_rank, norm, prefill, rope, shared, skinny, step
from tradewind.kernels.triton import sample as sampling
from tradewind.kernels.triton.ops import CudaOps
from tradewind.kernels.triton.planning import plan
from tradewind.kernels.triton.program import Bucket
from tradewind.kernels.triton.tuning import DecodeConfig, GemvConfig, PrefillConfig, TileConfig

BF16, FP8, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32


class CutError(Exception):
    """A group was begun and not ended: no time was left."""


class Small:
    """Small tensors on one device; by time.perf_counter nothing begins after `deadline`."""

    def __init__(self, device: str, *, deadline: float) -> None:
        self.device, self.deadline = device, deadline

    def normal(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def checked(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        assert torch.isfinite(tensor.float()).all(), "a kernel wrote a NaN or an infinity"


def small_kernels(make: Small) -> None:
    x, delta, weight = make.normal(3, 200, dtype=F32), make.normal(3, 200), make.normal(200, dtype=F32)
    out, small, scale = make.normal(3, 200), make.zeros(3, 200, dtype=FP8), make.zeros(3, dtype=F32)
    norm.add_rms_norm(x, delta, weight, eps=1e-5, out=out, count=make.ints([2]))
    norm.add_rms_norm(x, delta, weight, eps=1e-5, out=small, scale=scale)
    norm.quantise_tokens(delta, out=small, scale=scale)
    both, gated, gated8 = make.normal(3, 2 * 300), make.normal(3, 300), make.zeros(3, 300, dtype=FP8)
    elementwise.gated_activation(both, out=gated)
    elementwise.gated_activation(both, out=gated8, scale=scale)
    elementwise.embed(make.ints([3, 9]), make.normal(10, 200), out=x[:2].contiguous())
    elementwise.gather_rows(delta, make.ints([2, 0]), out=make.normal(2, 200))
    checked(x, out, small, scale, gated, gated8)


def matmuls(make: Small) -> None:
    features, depth = 100, 384
    configs = [
        GemvConfig(4, 128, 2), GemvConfig(4, 128, 2, narrow=True), GemvConfig(8, 128, 2, narrow=True, half=True),
        GemvConfig(4, 128, 4, narrow=True, half=True, ahead=1),
        TileConfig(16, 64, 128, 1, 4, 3), TileConfig(16, 64, 128, 3, 4, 3), TileConfig(8, 64, 128, 1, 4, 3),
    ]  # fmt: skip
    for fp8 in (False, True):
        for gated in (False, True):
            rows_w = features * (2 if gated else 1)
            weight = make.normal(rows_w, depth, dtype=FP8 if fp8 else BF16)
            scale = make.normal(rows_w, dtype=F32) if fp8 else None
            for config in configs:
                tiles = isinstance(config, TileConfig)
                rows = 5 if tiles else 1
                work = arrived = None
                if tiles and config.split > 1:
                    need = skinny.workspace_floats(features, config=config, gated=gated)
                    work, arrived = make.zeros(need, dtype=F32), make.zeros(-(-features // 32))
                x, out = make.normal(rows, depth), make.normal(rows, features)
                skinny.skinny_linear(
                    x, weight, scale=scale, out=out, norm=None if tiles else make.normal(depth, dtype=F32), eps=1e-5, gated=gated,
                    residual=out, bias=make.normal(rows_w), config=config, workspace=work, arrived=arrived,
                )  # fmt: skip
                checked(out)
            for rows, columns in ((1, depth), (70, 200)):
                x, out = make.normal(rows, columns), make.normal(rows, features)
                w = weight[:, :columns].contiguous()
                skinny.fixed_linear(x, w, scale=scale, out=out, gated=gated, residual=out, count=make.ints([rows]))
                if fp8:
                    x8, x_scale = x.to(FP8), make.normal(rows, dtype=F32)
                    skinny.fixed_linear(x8, w, scale=scale, x_scale=x_scale, out=out, gated=gated)
                checked(out)


def paged(make: Small, lengths: list[int], *, heads: int, groups: int, dim: int, kv: torch.dtype) -> tuple:
    """k, v, lengths, page table with exactly as many pages as needed, of 64 tokens."""
    need = [-(-length // 64) for length in lengths]
    table, page = make.zeros(len(lengths), max(need) + (-max(need)) % 4), 1
    for row, amount in enumerate(need):
        table[row, :amount] = torch.arange(page, page + amount, dtype=torch.int32)
        page += amount
    k, v = (make.normal(page, groups, 64, dim).to(kv) for _ in range(2))
    return k, v, make.ints(lengths), table


def together(make: Small, *, heads: int, groups: int, dim: int, kv: torch.dtype) -> None:
    """Rows with two pages in common, one pass for them and the rest row by row."""
    k, v, lengths, table = paged(make, [200, 129, 300], heads=heads, groups=groups, dim=dim, kv=kv)
    table[:, :2] = table[0, :2]
    starts, rows, found = make.ints([0, 1, 2, 3]), make.ints([3]), make.zeros(4)
    shared.find_shared(table, lengths, starts, rows, page_tokens=64, least_rows=2, least_keys=1, found=found)
    q, out = make.normal(3, heads * dim), make.normal(3, heads * dim)
    tiles = (PrefillConfig(64, 64, 4, 2), PrefillConfig(128, 64, 8, 2, True, registers=128 if kv == BF16 else 0))
    for tile, query_start in ((tiles[0], None), (tiles[1], starts)):
        parts = make.zeros(shared.shared_parts_floats(3, heads=heads, head_dim=dim, splits=4), dtype=F32)
        keys = decode.SharedKeys(found=found, parts=parts, splits=4, block_n=64)
        common = {"page_table": table, "heads": heads, "scale": 0.1, "rows": rows, "query_start": query_start}
        shared.shared_attention(q, k, v, keys=keys, config=tile, **common)
        for config in (DecodeConfig(1, 128, 4, 2), DecodeConfig(2, 64, 4, 3)):
            work = make.zeros(
                decode.decode_workspace_floats(3, heads=heads, head_dim=dim, splits=config.splits), dtype=F32
            )
            decode.paged_decode(
                q, k, v, lengths=lengths, out=out, shared=keys, config=config, workspace=work, arrived=make.zeros(3 * groups), **common
            )  # fmt: skip
            checked(out)


def attention(make: Small) -> None:
    heads, groups, dim = 8, 2, 128
    for kv in (BF16, FP8):
        k, v, lengths, table = paged(make, [1, 64, 300], heads=heads, groups=groups, dim=dim, kv=kv)
        out = make.normal(3, heads * dim)
        work = make.zeros(decode.decode_workspace_floats(3, heads=heads, head_dim=dim, splits=8), dtype=F32)
        angles = make.normal(320, dim, dtype=F32)
        common = {"lengths": lengths, "page_table": table, "heads": heads, "scale": 0.1, "out": out, "workspace": work}
        for config in (DecodeConfig(1, 64, 4, 5), DecodeConfig(1, 64, 4, 7), DecodeConfig(8, 32, 2, 3)):
            arrived = make.zeros(3 * groups)
            decode.paged_decode(make.normal(3, heads * dim), k, v, config=config, arrived=arrived, **common)
            for early in (False, True):
                qkv = make.normal(3, (heads + 2 * groups) * dim)
                gain = make.normal(dim, dtype=F32)
                decode.paged_decode(
                    qkv, k, v, angles=angles, q_weight=gain, k_weight=gain, eps=1e-6, early=early, config=config, arrived=arrived, **common
                )  # fmt: skip
            checked(out)
        starts, tokens = make.ints([0, 1, 41, 141]), 141
        q, many = make.normal(tokens, heads * dim), make.normal(tokens, heads * dim)
        configs = [
            PrefillConfig(64, 64, 4, 2), PrefillConfig(64, 64, 4, 3, True), PrefillConfig(128, 64, 8, 3, True, pairs=True),
            PrefillConfig(128, 64, 8, 3, True, registers=128),
        ]  # fmt: skip
        for config in configs:
            prefill.paged_prefill(
                q,
                k,
                v,
                query_start=starts,
                lengths=lengths,
                page_table=table,
                heads=heads,
                scale=0.1,
                out=many,
                config=config,
            )
            checked(many)
        prefill.paged_prefill(
            q, k, v, query_start=starts, lengths=lengths, page_table=table, heads=heads, scale=0.1, out=many, begun=False, config=config
        )  # fmt: skip
        checked(many)
    qkv, slots = make.normal(3, (heads + 2 * groups) * dim), make.ints([64, 130, 255])
    k, v = (make.zeros(4, groups, 64, dim, dtype=BF16) for _ in range(2))
    q = make.normal(3, heads * dim)
    rope.rope_store(qkv, angles[:3].contiguous(), slots, k, v, heads=heads, out=q)
    checked(q, k, v)


def sampler(make: Small) -> None:
    rows, vocabulary = 3, 5001
    logits = make.normal(rows, vocabulary, dtype=F32)
    work = sampling.SampleWorkspace.allocate(rows, vocabulary, device=make.device, penalties=True)
    out = make.zeros(rows)
    sampling.sample(logits.clone(), None, out=out, workspace=work)
    full = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 5, "position": 9}
    kind = {"top_k": torch.int32, "seed": torch.int64, "position": torch.int64}
    columns = sampling.DeviceColumns(
        **{n: torch.full((rows,), v, dtype=kind.get(n, F32), device=make.device) for n, v in full.items()},
        repetition=make.normal(rows, dtype=F32).abs() + 1, presence=make.normal(rows, dtype=F32), frequency=make.normal(rows, dtype=F32),
        history=make.ints([7, 9, 7, 4000]).repeat(rows, 1), history_row=make.ints([0, 1, 2]), history_prompt=make.ints([1, 1, 1]),
        history_length=make.ints([4, 0, 3]), bias_start=make.ints([0, 2, 2, 3]), bias_token=make.ints([1, 5000, 17]),
        bias_value=make.normal(3, dtype=F32), mask=make.zeros(rows, -(-vocabulary // 32)) - 1,
    )  # fmt: skip
    sampling.sample(logits.clone(), columns, out=out, workspace=work)
    assert (out >= 0).all()
    blocks = -(-vocabulary // sampling.BLOCK)
    sampling.logprobs(
        logits, out, top=5, out_logprob=make.zeros(rows, dtype=F32), out_rank=make.zeros(rows), out_ids=make.zeros(rows, 5),
        out_top=make.zeros(rows, 5, dtype=F32), workspace=make.zeros(rows * blocks * 7, dtype=F32),
        workspace_ids=make.zeros(rows * blocks * 6), arrived=make.zeros(rows),
    )  # fmt: skip
    slots = 4
    tokens, table = make.zeros(slots, 128), make.zeros(slots, 4)
    made = {
        "ids": make.zeros(10), "positions": make.zeros(10), "query_start": make.zeros(rows + 1), "lengths": make.zeros(rows),
        "write_slots": make.zeros(10), "page_table": make.zeros(rows, 4), "total": make.zeros(1),
    }  # fmt: skip
    step.lay_out(
        make.ints([0, 2, 3]),
        make.ints([5, 0, 100]),
        make.ints([1, 7, 2]),
        make.ints([3]),
        tokens,
        table,
        page_tokens=64,
        **made,
    )
    step.store_sampled(
        out, make.ints([0, 2, 3]), make.ints([6, 7, 102]), make.ints([3]), tokens=tokens, known=make.zeros(slots)
    )


def shared_prefix(make: Small) -> None:
    for kv in (BF16, FP8):
        together(make, heads=8, groups=2, dim=128, kv=kv)


def numbers(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def eagerly_and_recorded(ops: CudaOps, call: Callable[[], None], *, tokens: int, adapted: bool = False) -> None:
    """The call at once, and as a program of a bucket, where neighbours are fused."""
    call()
    with ops.record() as tape:
        call()
    plan(tape, Bucket(tokens=tokens, rows=tokens, singles=True, longest=64, adapted=adapted)).run()


def mixture(make: Small) -> None:
    """Routing, sorting and experts; one token, few, and so many that they are sorted; live tokens fewer than there is room for."""
    experts, hidden, inner = 8, 96, 80
    routings = (
        (Routing(top_k=3), None),
        (Routing(top_k=3, score="sigmoid", scale=2.5, groups=4, groups_kept=2, group_top=2), numbers(1, experts)),
    )
    for fp8, deterministic in ((False, False), (True, False), (False, True)):
        ops = CudaOps(device=make.device, deterministic=deterministic)

        def pack(values: np.ndarray, ops: CudaOps = ops, fp8: bool = fp8) -> object:
            return ops.pack_fp8(values) if fp8 else ops.pack_matrix(values, compute="bf16")

        pairs = [[pack(numbers(seed + 50 * n, inner, hidden, scale=0.1)) for n in (0, 1)] for seed in range(experts)]
        gate_up = ops.pack_experts((ops.pack_gated(*pair) for pair in pairs), experts=experts)
        down = ops.pack_experts(
            (pack(numbers(seed, hidden, inner, scale=0.1)) for seed in range(experts)), experts=experts
        )
        biases = {"gate_up_bias": ops.constant(numbers(2, experts, 2 * inner)), "down_bias": None}
        for tokens, live in ((1, 1), (5, 3), (37, 30)):
            for routing, shift in routings:
                bias = None if shift is None else ops.constant(shift)
                sent(make, ops, (gate_up, down), (routing, bias), biases, sizes=(tokens, live, experts, hidden))


def sent(
    make: Small, ops: CudaOps, packed: tuple, router: tuple[Routing, torch.Tensor | None], biases: dict, *, sizes: tuple[int, ...]
) -> None:  # fmt: skip
    """So many tokens through a router and its experts."""
    tokens, live, experts, hidden = sizes
    routing, bias = router
    x, out, logits = make.normal(tokens, hidden), make.normal(tokens, hidden), make.normal(tokens, experts, dtype=F32)
    ids, weights, count = (
        make.zeros(tokens, routing.top_k),
        make.zeros(tokens, routing.top_k, dtype=F32),
        make.ints([live]),
    )

    def call() -> None:
        ops.route(logits, routing, bias=bias, ids=ids, weights=weights, count=count)
        ops.experts(x, ids, weights, *packed, activation="silu", out=out, count=count, **biases)

    eagerly_and_recorded(ops, call, tokens=tokens)
    checked(out, weights)


def adapters(make: Small) -> None:
    """Low-rank changes of mixed ranks, tokens of several adapters and of none, inner sums in one piece and in two."""
    ops, sizes, slots, rank = CudaOps(device=make.device), (70, 16, 33), 5, 24
    for k in (48, 1100):
        bank = ops.low_rank_bank(slots=slots, rank=rank, sizes=sizes, k=k, exact=False)
        for slot in range(slots):
            for part, n in enumerate(sizes):
                own = (1, 8, rank, 0, 17)[slot]
                ops.set_low_rank(bank, slot, part, numbers(slot, own, k, scale=k**-0.5), numbers(part, n, own))
        weight = ops.pack_matrix(numbers(9, sum(sizes), k, scale=k**-0.5), compute="bf16")
        for tokens, live in ((1, 1), (9, 7), (70, 70)):
            changed(make, ops, bank, weight, tokens=tokens, live=live)
    of_slot, slot, start = make.ints([3, -1, 0, 2]).view(4, 1), make.ints([2, 0, 1, 9]), make.ints([0, 3, 4, 6, 6])
    low_rank.lay_out_adapters(slot, start, make.ints([3]), of_slot, out=make.zeros(9))


def changed(make: Small, ops: CudaOps, bank: LowRankBank, weight: PackedMatrix, *, tokens: int, live: int) -> None:
    """So many tokens, of every adapter in turn and of none, through a matmul and what is added to it."""
    x, out, count = make.normal(tokens, bank.k), make.normal(tokens, weight.n), make.ints([live])
    whose = make.ints([token % (bank.slots + 1) - 1 for token in range(tokens)])

    def call() -> None:
        ops.linear(x, weight, bias=None, out=out, count=count)
        ops.add_low_rank(x, bank, whose, out=out, count=count)

    eagerly_and_recorded(ops, call, tokens=tokens, adapted=True)
    checked(out)


def tests_of(name: str) -> Callable[[Small], None]:
    """The kernel tests of that name, in this process, up to the first failure."""

    def run(make: Small) -> None:
        import pytest

        root = Path(__file__).resolve().parents[1]
        files = sorted(str(path) for path in (root / "tests" / "kernels").glob(f"test_triton_{name}*.py"))
        if not files:
            print(f"{name}: there are no such tests", flush=True)
            return
        words = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={root}"]
        if make.deadline < float("inf"):
            words.append(f"--session-timeout={max(1.0, make.deadline - time.perf_counter()):.0f}")
        code = pytest.main([*words, *files])
        if code and time.perf_counter() > make.deadline:
            raise CutError
        assert code == 0, f"pytest ended with {code!r}"

    return run


GROUPS: dict[str, Callable[[Small], None]] = {
    "attention": attention,
    "matmuls": matmuls,
    "mixture": mixture,
    "adapters": adapters,
    "sampler": sampler,
    "shared": shared_prefix,
    "small": small_kernels,
    "latent": tests_of("latent"),
    "blocks": tests_of("blocks"),
    "low_rank": tests_of("low_rank"),
}
"""In the order in which they are run."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(GROUPS))
    parser.add_argument("--device", default="cuda", help="cpu: through the interpreter, to try this script")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no group is begun")
    args = parser.parse_args()
    torch.manual_seed(0)
    deadline, left_out = time.perf_counter() + args.budget, []
    for name in args.only.split(","):
        began = time.perf_counter()
        if began > deadline:
            left_out.append(name)
            continue
        try:
            GROUPS[name](Small(args.device, deadline=deadline))
        except CutError:
            left_out.append(f"a part of {name}")
        if args.device == "cuda":
            torch.cuda.synchronize()
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
    if left_out:
        print(f"not run, no time was left: {', '.join(left_out)}", flush=True)
    return 3 if left_out else 0


if __name__ == "__main__":
    sys.exit(main())
