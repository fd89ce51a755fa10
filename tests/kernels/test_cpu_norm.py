"""add_rms_norm, softcap, gather_rows and copy_pages of the CPU library against float64 numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.cpu_support import LEVELS, count, cpu_ops, error, floats


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("columns", [1, 15, 16, 48, 64, 97, 576, 1536])
def test_add_rms_norm_matches(isa: int, columns: int) -> None:
    rng = np.random.default_rng(columns)
    for threads, rows, live in ((1, 1, 1), (2, 5, 3), (3, 7, 7)):
        with cpu_ops(threads=threads, isa=isa) as ops:
            x, delta, weight = floats(rng, rows, columns), floats(rng, rows, columns), floats(rng, columns)
            out = np.full_like(x, 7)
            new_x = x.copy()
            ops.add_rms_norm(new_x, delta, weight, eps=1e-5, out=out, count=count(live))
            assert (new_x[:live] == (x + delta)[:live]).all()
            assert (new_x[live:] == x[live:]).all()
            assert (out[live:] == 7).all()
            assert error(out[:live], rms_norm(new_x[:live], weight, 1e-5)) < 1e-6
            # without delta, and written over delta
            plain, over = np.empty_like(x), delta.copy()
            ops.add_rms_norm(new_x[:live].copy(), None, weight, eps=1e-5, out=plain, count=count(live))
            assert (plain[:live] == out[:live]).all()
            ops.add_rms_norm(x.copy(), over, weight, eps=1e-5, out=over, count=count(live))
            assert (over[:live] == out[:live]).all()


def test_a_row_does_not_know_its_neighbours() -> None:
    rng = np.random.default_rng(1)
    x, delta, weight = floats(rng, 9, 576), floats(rng, 9, 576), floats(rng, 576)
    x[3] = np.nan
    results = []
    for threads in (1, 2, 3):
        with cpu_ops(threads=threads) as ops:
            out = np.empty_like(x)
            ops.add_rms_norm(x.copy(), delta, weight, eps=1e-6, out=out, count=count(9))
            results.append(out)
            for i in range(9):
                alone = np.empty((1, 576), np.float32)
                ops.add_rms_norm(
                    x[i : i + 1].copy(), delta[i : i + 1].copy(), weight, eps=1e-6, out=alone, count=count(1)
                )
                assert alone.tobytes() == out[i : i + 1].tobytes()
    assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()
    assert np.isnan(results[0][3]).all()
    assert np.isfinite(np.delete(results[0], 3, 0)).all()


@pytest.mark.parametrize("isa", LEVELS)
def test_softcap_matches_over_the_whole_range(isa: int) -> None:
    x = np.concatenate(
        [np.linspace(-400, 400, 5001), np.geomspace(1e-6, 1e3, 999), [0.0, np.inf, -np.inf, np.nan]]
    ).astype(np.float32)
    x = x.reshape(4, -1)
    with cpu_ops(isa=isa) as ops:
        out = x.copy()
        ops.softcap(out, cap=30.0, count=count(3))
        expected = 30 * np.tanh(x[:3].astype(np.float64) / 30)
        assert np.abs(out[:3] / np.where(expected == 0, 1, expected) - 1).max(where=expected != 0, initial=0) < 1e-6
        assert out[3:].tobytes() == x[3:].tobytes()
        ops.softcap(out, cap=30.0, count=count(4))
        assert out[3, -3:-1].tolist() == [30, -30]
        assert np.isnan(out[3, -1])


def test_gather_rows_and_copy_pages() -> None:
    rng = np.random.default_rng(2)
    with cpu_ops() as ops:
        x, index = floats(rng, 9, 33), np.array([8, 0, 8, 3], np.int32)
        out = np.zeros((4, 33), np.float32)
        ops.gather_rows(x, index, out=out, count=count(3))
        assert (out[:3] == x[index[:3]]).all()
        assert (out[3] == 0).all()
        kv = ops.kv_layer(pages=6, page_tokens=32, kv_heads=2, head_dim=16, format="f16")
        kv.k[:] = rng.standard_normal(kv.k.shape)
        kv.v[:] = rng.standard_normal(kv.v.shape)
        k, v = kv.k.copy(), kv.v.copy()
        ops.copy_pages(kv, np.array([1, 2]), np.array([4, 5]))
        assert (kv.k[[4, 5]] == k[[1, 2]]).all()
        assert (kv.v[[4, 5]] == v[[1, 2]]).all()
        assert (kv.k[:4] == k[:4]).all()
