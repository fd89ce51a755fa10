"""rope_angles and rope_store of the CPU library: angles, rotation, the norm before it and the pages after it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.cpu_support import LEVELS, count, cpu_ops, error, floats


def inv_freq(dim: int, base: float = 10000.0) -> Any:
    return (1.0 / base ** (np.arange(0, dim, 2) / dim)).astype(np.float32)


def normed(x: Any, weight: Any, eps: float) -> Any:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotated(x: Any, angles: Any) -> Any:
    """x [T, heads, D] by angles [T, W]."""
    half = angles.shape[1] // 2
    cos, sin = angles[:, None, :half].astype(np.float64), angles[:, None, half:].astype(np.float64)
    first, second = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], -1)


def test_angles_use_the_float32_product() -> None:
    positions = np.array([0, 1, 2, 777, 100_000, 131_071], np.int32)
    frequencies = inv_freq(64, 500_000.0)
    for threads in (1, 3):
        with cpu_ops(threads=threads) as ops:
            out = np.full((6, 64), 7, np.float32)
            ops.rope_angles(positions, frequencies, scale=1.25, out=out, count=count(5))
            angle = (positions[:, None].astype(np.float32) * frequencies).astype(np.float64)
            assert error(out[:5], 1.25 * np.concatenate([np.cos(angle), np.sin(angle)], -1)[:5]) < 1e-7
            assert (out[5] == 7).all()


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("format", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "width"),
    [(9, 3, 64, 64), (4, 1, 32, 16), (2, 2, 80, 40), (3, 1, 256, 256), (1, 1, 16, 0)],
)
def test_store(isa: int, format: str, heads: int, kv_heads: int, dim: int, width: int) -> None:
    rng = np.random.default_rng(dim + width)
    page_tokens, tokens = 32, 70
    for threads, live, norm in ((1, 70, False), (2, 69, True), (3, 2, True)):
        with cpu_ops(threads=threads, isa=isa) as ops:
            kv = ops.kv_layer(pages=8, page_tokens=page_tokens, kv_heads=kv_heads, head_dim=dim, format=format)
            slots = rng.permutation(np.arange(page_tokens, 8 * page_tokens))[:tokens].astype(np.int32)
            qkv = floats(rng, tokens, (heads + 2 * kv_heads) * dim)
            angles = floats(rng, tokens, width)
            q_weight, k_weight = (floats(rng, dim), floats(rng, dim)) if norm else (None, None)
            out = np.full((tokens, heads * dim), 7, np.float32)
            before = (kv.k.copy(), kv.v.copy())
            ops.rope_store(
                qkv,
                angles,
                slots,
                kv,
                heads=heads,
                q_weight=q_weight,
                k_weight=k_weight,
                eps=1e-6,
                out=out,
                count=count(live),
            )
            parts = qkv.reshape(tokens, -1, dim)
            q, k, v = (
                parts[:, :heads].astype(np.float64),
                parts[:, heads : heads + kv_heads].astype(np.float64),
                parts[:, heads + kv_heads :],
            )
            if norm:
                q, k = normed(q, q_weight, 1e-6), normed(k, k_weight, 1e-6)
            assert error(out[:live], rotated(q, angles).reshape(tokens, -1)[:live]) < 3e-7
            assert (out[live:] == 7).all()
            limit = {"f32": 3e-7, "f16": 4e-4, "bf16": 3e-3}[format]
            page, at = slots // page_tokens, slots % page_tokens
            got_k, got_v = ops.host(kv.k)[page, :, at // 16, :, at % 16], ops.host(kv.v)[page, :, at]
            assert error(got_k[:live], rotated(k, angles)[:live]) < limit
            assert error(got_v[:live], v[:live]) < limit
            assert (kv.k[page, :, at // 16, :, at % 16] == before[0][page, :, at // 16, :, at % 16])[live:].all()
            untouched = np.setdiff1d(np.arange(8 * page_tokens), slots)
            assert (kv.v[untouched // page_tokens, :, untouched % page_tokens] == 0).all()


@pytest.mark.parametrize("isa", LEVELS)
def test_values_are_rounded_to_even_and_saturate(isa: int) -> None:
    rng = np.random.default_rng(3)
    bits = np.concatenate(
        [
            rng.integers(0, 1 << 32, 4000),
            np.arange(0x33000000, 0x33000000 + 200),
            np.arange(0x38700000, 0x38900000, 1 << 11),
        ]
    )
    special = np.array(
        [0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, 1e30, -1e30, 3.4e38, -3.4e38, 2**-24, 2**-25, 6e-8],
        np.float32,
    )
    values = np.concatenate([bits.astype(np.uint32).view(np.float32), special])
    values = np.resize(values, (-(-len(values) // 16), 16)).astype(np.float32)
    tokens = len(values)
    qkv = np.concatenate([np.zeros((tokens, 32), np.float32), values], 1)
    with cpu_ops(isa=isa) as ops, np.errstate(over="ignore", invalid="ignore"):
        for format in ("f16", "bf16"):
            kv = ops.kv_layer(pages=-(-tokens // 16), page_tokens=16, kv_heads=1, head_dim=16, format=format)
            ops.rope_store(
                qkv, np.zeros((tokens, 0), np.float32), np.arange(tokens, dtype=np.int32), kv, heads=1, q_weight=None, k_weight=None,
                eps=0.0, out=np.empty((tokens, 16), np.float32), count=count(tokens),
            )  # fmt: skip
            got = ops.host(kv.v).reshape(-1, 16)[:tokens].astype(np.float32)
            if format == "f16":
                expected = np.clip(values, -65504, 65504).astype(np.float16).astype(np.float32)
            else:
                u = values.view(np.uint32).astype(np.uint64)
                rounded = ((u + 0x7FFF + (u >> 16 & 1)) >> 16 << 16).astype(np.uint32)
                largest = np.uint32(0x7F7F0000).view(np.float32)
                expected = np.where(np.abs(values) >= largest, np.copysign(largest, values), rounded.view(np.float32))
            nan = np.isnan(values)
            assert np.isnan(got[nan]).all()
            assert (got[~nan] == expected[~nan]).all()
