"""Sampling of the CPU library: the same tokens as the reference, the exact distribution, and no dependence on neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.cpu_support import LEVELS, count, cpu_ops, floats
from tradewind.kernels import reference
from tradewind.kernels.cpu.ops import CpuOps
from tradewind.kernels.ops import SampleColumns

Row = dict[str, Any]


def columns(rows: list[Row], vocab: int) -> tuple[SampleColumns, list[Any]]:
    """Rows as keyword arguments of `reference.sample` -> columns, and the histories that must stay alive."""

    def column(name: str, default: float, kind: Any) -> Any:
        return np.array([row.get(name, default) for row in rows], kind)

    histories = [np.array(row.get("history", []), np.int32) for row in rows]
    biases = [row.get("bias", {}) for row in rows]
    masks = [row.get("allowed") for row in rows]
    mask = None
    if any(m is not None for m in masks):
        mask = np.zeros((len(rows), -(-vocab // 32)), np.uint32)
        for i, m in enumerate(masks):
            bits = np.zeros(mask.shape[1] * 32, np.uint8)
            bits[:vocab] = 1 if m is None else m
            mask[i] = np.packbits(bits, bitorder="little").view(np.uint32)
    return SampleColumns(
        temperature=column("temperature", 1, np.float32), top_k=column("top_k", 0, np.int32), top_p=column("top_p", 1, np.float32),
        min_p=column("min_p", 0, np.float32), repetition=column("repetition", 1, np.float32), presence=column("presence", 0, np.float32),
        frequency=column("frequency", 0, np.float32), seed=column("seed", 0, np.uint64), position=column("position", 0, np.int64),
        history=np.array([h.ctypes.data for h in histories], np.int64), history_prompt=column("history_prompt", 0, np.int32),
        history_length=np.array([len(h) for h in histories], np.int32),
        bias_start=np.concatenate([[0], np.cumsum([len(b) for b in biases])]).astype(np.int32),
        bias_token=np.array([t for b in biases for t in b], np.int32),
        bias_value=np.array([v for b in biases for v in b.values()], np.float32),
        mask=mask,
    ), histories  # fmt: skip


def draw(ops: CpuOps, logits: Any, rows: list[Row], live: int | None = None) -> Any:
    held, alive = columns(rows, logits.shape[1])
    out = np.full(len(logits), -7, np.int32)
    ops.sample(logits.copy(), held, out=out, count=count(len(logits) if live is None else live))
    assert alive is not None
    return out


def expected(logits: Any, row: Row) -> int:
    """The reference in float64."""
    given = dict(row)
    for name in ("temperature", "top_p", "min_p", "repetition", "presence", "frequency"):
        if name in given:
            given[name] = float(np.float32(given[name]))
    if "history" in given:
        given["history"] = torch.tensor(given["history"], dtype=torch.int64)
    if given.get("allowed") is not None:
        given["allowed"] = torch.from_numpy(given["allowed"])
    return reference.sample(torch.from_numpy(logits.astype(np.float64)), **given)


def random_row(rng: np.random.Generator, vocab: int) -> Row:
    def maybe(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.4 else default

    row: Row = {
        "temperature": float(rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 1.7])), "top_k": maybe(int(rng.integers(1, 60)), 0),
        "top_p": maybe(float(rng.uniform(0.05, 1)), 1.0), "min_p": maybe(float(rng.uniform(0, 0.5)), 0.0),
        "seed": int(rng.integers(0, 1 << 63)), "position": int(rng.integers(0, 1 << 40)),
    }  # fmt: skip
    if rng.random() < 0.4:
        length = int(rng.integers(1, 80))
        row |= {
            "history": rng.integers(0, min(vocab, 50), length).tolist(), "history_prompt": int(rng.integers(0, length + 1)),
            "repetition": maybe(1.3, 1.0), "presence": maybe(0.7, 0.0), "frequency": maybe(0.3, 0.0),
        }  # fmt: skip
    if rng.random() < 0.3:
        row["bias"] = {int(t): float(rng.choice([-np.inf, -2.0, 3.0])) for t in rng.integers(0, vocab, 5)}
    if rng.random() < 0.3:
        row["allowed"] = rng.random(vocab) < 0.5
    return row


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("vocab", [2, 33, 1000, 4096, 4099, 9001])
def test_same_tokens_as_the_reference(isa: int, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    rows = [random_row(rng, vocab) for _ in range(60)]
    logits = floats(rng, len(rows), vocab, scale=3)
    logits[::3] = np.round(logits[::3] * 2) / 2  # ties everywhere
    want = [expected(x, row) for x, row in zip(logits, rows, strict=True)]
    results = []
    for threads in (1, 2, 3):
        with cpu_ops(threads=threads, isa=isa) as ops:
            results.append(draw(ops, logits, rows))
            few = draw(ops, logits[:2], rows[:2])  # fewer rows than threads: shared by pieces of the vocabulary
            assert (few == results[-1][:2]).all()
    assert (results[0] == results[1]).all()
    assert (results[0] == results[2]).all()
    # The weights are float32 here: a draw within about 1e-7 of a border could fall on its other side. None of these does.
    assert results[0].tolist() == want


@pytest.mark.parametrize("isa", LEVELS)
def test_top_k_is_exact_for_any_k(isa: int) -> None:
    """At a high temperature every kept token is drawn sooner or later, and no other one ever is."""
    rng = np.random.default_rng(2)
    vocab = 5000
    logits = np.round(floats(rng, 1, vocab, scale=2) * 4) / 4
    order = np.argsort(-logits[0], kind="stable")
    with cpu_ops(isa=isa) as ops:
        for k in (1, 2, 15, 79, 80, 81, 500, 4999, 5000, 6000):
            rows: list[Row] = [{"temperature": 100.0, "top_k": k, "seed": 5, "position": i} for i in range(300)]
            drawn = set(draw(ops, np.repeat(logits, 300, 0), rows).tolist())
            assert drawn <= set(order[:k].tolist())
            if k <= 15:
                assert drawn == set(order[:k].tolist())


def test_philox_is_the_reference_one() -> None:
    """One logit per border: the drawn token says where u lies."""
    with cpu_ops() as ops:
        seeds = [0, 1, 2**32, 2**63 + 5, 2**64 - 1]
        rows: list[Row] = [{"seed": s, "position": p} for s in seeds for p in (0, 1, 2**33)]
        got = draw(ops, np.zeros((len(rows), 4096), np.float32), rows)
        want = [min(4095, int(reference.uniform(row["seed"], row["position"]) * 4096)) for row in rows]
        assert got.tolist() == want


SETTINGS: list[Row] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.8},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 25, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 2.0, "top_p": 0.5, "min_p": 0.02},
    {"repetition": 1.5, "history": [1, 2, 2, 3, 4, 4, 4], "history_prompt": 3, "presence": 0.5, "frequency": 0.4},
    {"bias": {0: 2.0, 3: -float("inf"), 5: -1.5}},
    {"allowed": np.arange(50) % 3 != 0, "temperature": 1.5},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_distribution(setting: Row) -> None:
    """Chi-square of 24,000 draws against the exact probabilities; the seed is fixed, so this passes always or never."""
    rng = np.random.default_rng(11)
    vocab, draws = 50, 24_000
    logits = floats(rng, 1, vocab, scale=1.5)
    given = {
        key: torch.tensor(value) if key == "history" else torch.from_numpy(value) if key == "allowed" else value
        for key, value in setting.items()
        if key in ("repetition", "presence", "frequency", "history", "history_prompt", "bias", "allowed")
    }
    steered = reference.steered(torch.from_numpy(logits[0].astype(np.float64)), **given) / setting.get(
        "temperature", 1.0
    )
    kept = {key: setting[key] for key in ("top_k", "top_p", "min_p") if key in setting}
    p = reference.kept_probabilities(steered, **kept).numpy()
    p = p / p.sum()
    with cpu_ops() as ops:
        drawn = draw(ops, np.repeat(logits, draws, 0), [setting | {"seed": i % 3, "position": i} for i in range(draws)])
    seen = np.bincount(drawn, minlength=vocab)
    assert seen[p == 0].sum() == 0
    live = p * draws >= 5
    chi2 = ((seen - p * draws)[live] ** 2 / (p * draws)[live]).sum()
    freedom = live.sum() - 1
    # The 99.99 % point (Wilson & Hilferty 1931).
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * np.sqrt(2 / (9 * freedom))) ** 3 if freedom else 1e-9
    assert chi2 <= limit, (chi2, freedom)


def test_large_vocabulary_distribution_by_bins() -> None:
    """All pieces of a real vocabulary: draws binned by 1,024 tokens."""
    rng = np.random.default_rng(12)
    vocab, draws = 49152, 600
    logits = floats(rng, 1, vocab, scale=2)
    p = np.exp(logits[0].astype(np.float64))
    p = (p / p.sum()).reshape(-1, 1024).sum(-1)
    seen = np.zeros(48)
    with cpu_ops() as ops:
        for at in range(0, 40 * draws, draws):
            drawn = draw(ops, np.repeat(logits, draws, 0), [{"seed": 9, "position": at + i} for i in range(draws)])
            seen += np.bincount(drawn // 1024, minlength=48)
    total = 40 * draws
    assert ((seen - p * total) ** 2 / (p * total)).sum() < 47 * (1 - 2 / 423 + 3.72 * np.sqrt(2 / 423)) ** 3


@pytest.mark.parametrize("isa", LEVELS)
def test_bad_rows_stay_alone(isa: int) -> None:
    rng = np.random.default_rng(13)
    vocab = 5003
    logits = floats(rng, 8, vocab)
    rows = [random_row(rng, vocab) | {"allowed": None, "bias": {}} for _ in range(8)]
    for threads in (1, 2, 5):
        with cpu_ops(threads=threads, isa=isa) as ops:
            clean = [int(draw(ops, logits[i : i + 1], rows[i : i + 1])[0]) for i in range(8)]
            spoiled = logits.copy()
            spoiled[1, 4999] = np.nan
            spoiled[3] = -np.inf
            spoiled[5, 0] = np.inf
            got = draw(ops, spoiled, rows).tolist()
            assert [got[1], got[3], got[5]] == [-1, -1, -1]
            assert [got[i] for i in (0, 2, 4, 6, 7)] == [clean[i] for i in (0, 2, 4, 6, 7)]
            assert draw(ops, logits, rows, live=3).tolist() == [*clean[:3], -7, -7, -7, -7, -7]
            everything_banned = [{"temperature": t, "allowed": np.zeros(vocab, bool)} for t in (0.0, 1.0)] * 4
            assert (draw(ops, logits, everything_banned) == -1).all()


@pytest.mark.parametrize("isa", LEVELS)
def test_greedy_takes_the_lowest_id_and_extremes_hold(isa: int) -> None:
    with cpu_ops(isa=isa) as ops:
        logits = np.zeros((5, 9000), np.float32)
        logits[0, [8999, 4096, 5000]] = 3
        logits[1] = -np.inf
        logits[1, 8999] = -3e38
        logits[2, 17] = 3e38
        logits[3, 17] = 1e-5
        rows: list[Row] = [
            {"temperature": 0},
            {},
            {"temperature": 0.01, "top_p": 0.5},
            {"temperature": 1e-45, "top_k": 5},
            {"top_p": 1e-9},
        ]
        assert draw(ops, logits, rows).tolist() == [4096, 8999, 17, 17, 0]
