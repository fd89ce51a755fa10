"""Runs each Triton kernel once at small sizes, for compute-sanitizer (which makes everything many times slower).

    PYTHONPATH=src python benchmarks/sanitize.py                                            compiles into Triton's cache first
    PYTHONPATH=src compute-sanitizer --tool memcheck python benchmarks/sanitize.py          out-of-bounds and misaligned accesses
    PYTHONPATH=src compute-sanitizer --tool racecheck python benchmarks/sanitize.py --only matmuls,attention
    PYTHONPATH=src compute-sanitizer --tool initcheck python benchmarks/sanitize.py         reads of memory that nothing wrote

Set PYTORCH_NO_CUDA_MEMORY_CACHING=1 as well: then every tensor is allocated by itself, and what lies beyond it is nobody's.
Sizes are ragged on purpose: rows, columns and keys that are no multiple of a tile. Results are checked for NaN only; tests/gpu and
tests/kernels know the truth.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch

from tradewind.kernels.triton import decode, elementwise, norm, prefill, rope, shared, skinny, step
from tradewind.kernels.triton import sample as sampling
from tradewind.kernels.triton.tuning import DecodeConfig, GemvConfig, PrefillConfig, TileConfig

BF16, FP8, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32


class Small:
    """Small tensors on one device."""

    def __init__(self, device: str) -> None:
        self.device = device

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
        together(make, heads=heads, groups=groups, dim=dim, kv=kv)
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


GROUPS: dict[str, Callable[[Small], None]] = {
    "attention": attention,
    "matmuls": matmuls,
    "sampler": sampler,
    "small": small_kernels,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(GROUPS))
    parser.add_argument("--device", default="cuda", help="cpu: through the interpreter, to try this script")
    args = parser.parse_args()
    torch.manual_seed(0)
    for name in args.only.split(","):
        began = time.perf_counter()
        GROUPS[name](Small(args.device))
        if args.device == "cuda":
            torch.cuda.synchronize()
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
