"""add, rms_norm_span, scale and temper: reference, plain and C++ against float64 numpy, at every instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.cpu_support import LEVELS, count, cpu_ops, error, floats
from tradewind.kernels import reference
from tradewind.kernels.plain import PlainOps
from tradewind.kernels.table import OPS

COLUMNS = [1, 15, 16, 48, 97, 576]


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def span_norm(x: Any, weight: Any, start: int, eps: float) -> Any:
    x = x.astype(np.float64)
    span = x[:, start : start + len(weight)]
    x[:, start : start + len(weight)] = span / np.sqrt((span * span).mean(-1, keepdims=True) + eps) * weight
    return x


def test_reference_says_what_is_meant() -> None:
    rng = np.random.default_rng(0)
    x, delta, gate, weight = floats(rng, 3, 33), floats(rng, 3, 33), floats(rng, 3, 1), floats(rng, 7)
    tx, td, tg, tw = (torch.from_numpy(values).double() for values in (x, delta, gate, weight))
    assert error(reference.add(tx, td, tg), x + sigmoid(gate) * delta) < 1e-15
    assert torch.equal(reference.add(tx, td), tx + td)
    assert torch.equal(reference.add(tx, None), tx)
    got = reference.rms_norm_span(tx, tw, start=5, eps=1e-3)
    assert error(got, span_norm(x, weight, 5, 1e-3)) < 1e-12
    assert torch.equal(got[:, :5], tx[:, :5])
    assert torch.equal(got[:, 12:], tx[:, 12:])
    assert torch.equal(reference.scale(tx, factor=0.25), tx / 4)
    tempered = reference.temper(tx, torch.tensor([6, 7, 79]), every=8, slope=0.5)
    assert torch.equal(tempered[0], tx[0]), "the first seven positions are left as they are"
    assert error(tempered[1:], x[1:] * (1 + 0.5 * np.log([[2.0], [11.0]]))) < 1e-12


@pytest.mark.parametrize("isa", [*LEVELS, "plain"])
@pytest.mark.parametrize("columns", COLUMNS)
def test_add(isa: int | str, columns: int) -> None:
    rng = np.random.default_rng(columns)
    for threads, rows, live in ((1, 1, 1), (2, 5, 3), (3, 7, 7), (2, 4, 0)):
        x, delta, gate = floats(rng, rows, columns), floats(rng, rows, columns), floats(rng, rows, 1, scale=4)
        with op_set(isa, threads) as ops:
            for use_delta, use_gate, use_out in ((1, 0, 0), (1, 1, 1), (0, 0, 1), (1, 0, 1)):
                new, out = x.copy(), np.full_like(x, 7)
                ops.add(
                    new, delta if use_delta else None, gate=gate if use_gate else None, out=out if use_out else None, count=count(live)
                )  # fmt: skip
                wanted = x + (sigmoid(gate) if use_gate else 1) * delta if use_delta else x
                assert error(new[:live], wanted[:live]) < OPS["add"].tolerance
                assert (new[live:] == x[live:]).all()
                if use_out:
                    assert (out[:live] == new[:live]).all()
                assert (out[live if use_out else 0 :] == 7).all()


@pytest.mark.parametrize("isa", [*LEVELS, "plain"])
def test_a_gate_shuts_and_opens(isa: int | str) -> None:
    x, delta = np.ones((4, 20), np.float32), np.full((4, 20), 3, np.float32)
    gate = np.array([[-200], [200], [0], [-np.inf]], np.float32)
    with op_set(isa, 1) as ops:
        ops.add(x, delta, gate=gate, out=None, count=count(4))
    assert x[:, 0].tolist() == [1, 4, 2.5, 1]


@pytest.mark.parametrize("isa", [*LEVELS, "plain"])
@pytest.mark.parametrize("span", [(0, 96), (0, 64), (64, 32), (7, 13), (95, 1)])
def test_rms_norm_span(isa: int | str, span: tuple[int, int]) -> None:
    rng = np.random.default_rng(sum(span))
    x, weight = floats(rng, 6, 96, scale=3), floats(rng, span[1])
    for threads, live in ((1, 6), (3, 4), (2, 0)):
        got = x.copy()
        with op_set(isa, threads) as ops:
            ops.rms_norm_span(got, weight, start=span[0], eps=1e-5, count=count(live))
        assert error(got[:live], span_norm(x[:live], weight, span[0], 1e-5)) < OPS["rms_norm_span"].tolerance
        got[:live, span[0] : sum(span)] = x[:live, span[0] : sum(span)]
        assert (got == x).all(), "columns beside the span, and rows that are not live, are untouched"


@pytest.mark.parametrize("isa", [*LEVELS, "plain"])
@pytest.mark.parametrize("columns", COLUMNS)
def test_scale(isa: int | str, columns: int) -> None:
    rng = np.random.default_rng(columns)
    x = floats(rng, 5, columns)
    for threads, live in ((1, 5), (3, 2), (2, 0)):
        got = x.copy()
        with op_set(isa, threads) as ops:
            ops.scale(got, factor=0.22, count=count(live))
        assert error(got[:live], x[:live].astype(np.float64) * 0.22) < OPS["scale"].tolerance
        assert (got[live:] == x[live:]).all()


@pytest.mark.parametrize("isa", [*LEVELS, "plain"])
@pytest.mark.parametrize("columns", COLUMNS)
def test_temper(isa: int | str, columns: int) -> None:
    rng = np.random.default_rng(columns)
    x = floats(rng, 6, columns)
    positions = np.array([0, 62, 63, 64, 8191, 10_485_759], np.int32)
    factor = 1 + 0.1 * np.log1p((positions.astype(np.float64) + 1) // 64)
    for threads, live in ((1, 6), (3, 4), (2, 0)):
        got = x.copy()
        with op_set(isa, threads) as ops:
            ops.temper(got, positions, every=64, slope=0.1, count=count(live))
        assert error(got[:live], x[:live] * factor[:live, None]) < OPS["temper"].tolerance
        assert (got[:2] == x[:2]).all(), "before the first step nothing changes"
        assert (got[live:] == x[live:]).all()


def op_set(isa: int | str, threads: int) -> Any:
    """The op set "plain", or the C++ one at an instruction set, as a context."""
    return PlainContext() if isa == "plain" else cpu_ops(threads=threads, isa=int(isa))


class PlainContext:
    def __enter__(self) -> PlainOps:
        return PlainOps()

    def __exit__(self, *_: object) -> None:
        return None
