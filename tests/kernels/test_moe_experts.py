"""experts: the reference by hand, plain and C++ against it in every layout and instruction set, empty and hot experts included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.cpu_support import count, cpu_ops, error, floats, open_library
from tradewind.kernels import reference_moe
from tradewind.kernels.cpu import matrix
from tradewind.kernels.cpu.library import ISAS
from tradewind.kernels.cpu.ops import CpuOps
from tradewind.kernels.ops import PackedExperts
from tradewind.kernels.plain import PlainOps
from tradewind.kernels.table import OPS
from tradewind.quantization.blocks import dequantise, quantise_q4_0, quantise_q4_1

EXPERTS, CHOSEN, HIDDEN, INNER = 7, 3, 96, 160


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Two threads that wait for each other on busy cores are slower than one by far."""
    torch.set_num_threads(1)


@dataclass
class Weights:
    """One layer's experts in float32: gate, up [X, F, E], down [X, E, F], and biases."""

    gate: Any
    up: Any
    down: Any
    gate_up_bias: Any
    down_bias: Any

    def packed(self, ops: Any, compute: Any) -> tuple[PackedExperts, PackedExperts]:
        gate_up = (
            ops.pack_gated(ops.pack_matrix(gate, compute=compute), ops.pack_matrix(up, compute=compute))
            for gate, up in zip(self.gate, self.up, strict=True)
        )
        down = (ops.pack_matrix(each, compute=compute) for each in self.down)
        return ops.pack_experts(gate_up, experts=len(self.gate)), ops.pack_experts(down, experts=len(self.gate))


def made(*, experts: int = EXPERTS, hidden: int = HIDDEN, inner: int = INNER, seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    return Weights(
        gate=floats(rng, experts, inner, hidden, scale=hidden**-0.5),
        up=floats(rng, experts, inner, hidden, scale=hidden**-0.5),
        down=floats(rng, experts, hidden, inner, scale=inner**-0.5),
        gate_up_bias=floats(rng, experts, 2 * inner),
        down_bias=floats(rng, experts, hidden),
    )


def routings(tokens: int, *, experts: int = EXPERTS, chosen: int = CHOSEN) -> dict[str, Any]:
    """Name -> ids [T, K]."""
    rng = np.random.default_rng(tokens)
    return {
        "random": np.stack([rng.permutation(experts)[:chosen] for _ in range(tokens)]).astype(np.int32),
        "all to the same": np.tile(np.arange(chosen, dtype=np.int32) + 2, (tokens, 1)),
        "one is hot": np.stack(
            [np.r_[5, rng.permutation(5)[: chosen - 1]] for _ in range(tokens)]
        ).astype(np.int32),
        "only the last": np.tile(np.arange(experts - chosen, experts, dtype=np.int32)[::-1], (tokens, 1)),
    }  # fmt: skip


def run(
    ops: Any, w: Weights, packed: tuple[PackedExperts, PackedExperts], x: Any, ids: Any, weights: Any, *, live: int | None = None,
    activation: Any = "silu", biased: bool = False, weigh_input: bool = False,
) -> Any:  # fmt: skip
    out = np.full_like(x, -77)
    ops.experts(
        x, ids, weights, *packed, activation=activation,
        gate_up_bias=w.gate_up_bias if biased else None, down_bias=w.down_bias if biased else None,
        out=out, count=count(len(x) if live is None else live), weigh_input=weigh_input,
    )  # fmt: skip
    return out


def wanted(
    w: Weights, x: Any, ids: Any, weights: Any, *, activation: str = "silu", biased: bool = False, weigh_input: bool = False
) -> Any:  # fmt: skip
    t = torch.from_numpy
    return reference_moe.experts(
        t(x).double(), t(ids), t(weights).double(), t(w.gate).double(), t(w.up).double(), t(w.down).double(),
        activation=activation,
        gate_up_bias=t(w.gate_up_bias).double() if biased else None,
        down_bias=t(w.down_bias).double() if biased else None,
        weigh_input=weigh_input,
    )  # fmt: skip


def inputs(tokens: int, *, hidden: int = HIDDEN, chosen: int = CHOSEN, seed: int = 1) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return floats(rng, tokens, hidden), rng.random((tokens, chosen)).astype(np.float32)


# ---------------------------------------------------------------------------------------------------------------- reference


def test_dispatch_keeps_every_pair_once() -> None:
    for name, ids in routings(20).items():
        order, start = reference_moe.dispatch(torch.from_numpy(ids), experts=EXPERTS)
        assert sorted(order.tolist()) == list(range(20 * CHOSEN)), name
        for expert in range(EXPERTS):
            mine = order[start[expert] : start[expert + 1]]
            assert (ids.reshape(-1)[mine] == expert).all(), name
            assert mine.tolist() == sorted(mine.tolist()), "in order of tokens"
    order, start = reference_moe.dispatch(torch.zeros(0, CHOSEN, dtype=torch.int32), experts=EXPERTS)
    assert len(order) == 0
    assert start.tolist() == [0] * (EXPERTS + 1)


def test_reference_by_hand() -> None:
    w, (x, weights) = made(), inputs(9)
    for name, ids in routings(9).items():
        total = np.zeros((9, HIDDEN))
        for t in range(9):
            for k in range(CHOSEN):
                e = ids[t, k]
                gate = w.gate[e].astype(np.float64) @ x[t] + w.gate_up_bias[e, :INNER]
                up = w.up[e].astype(np.float64) @ x[t] + w.gate_up_bias[e, INNER:]
                inner = gate / (1 + np.exp(-gate)) * up
                total[t] += weights[t, k] * (w.down[e].astype(np.float64) @ inner + w.down_bias[e])
        assert error(wanted(w, x, ids, weights, biased=True), total) < 1e-12, name


def test_weighed_input_by_hand() -> None:
    w, (x, weights) = made(), inputs(9)
    ids = routings(9)["random"]
    total = np.zeros((9, HIDDEN))
    for t in range(9):
        for k in range(CHOSEN):
            e, given = ids[t, k], weights[t, k].astype(np.float64) * x[t]
            gate = w.gate[e] @ given + w.gate_up_bias[e, :INNER]
            up = w.up[e] @ given + w.gate_up_bias[e, INNER:]
            total[t] += w.down[e].astype(np.float64) @ (gate / (1 + np.exp(-gate)) * up) + w.down_bias[e]
    assert error(wanted(w, x, ids, weights, biased=True, weigh_input=True), total) < 1e-12


# ----------------------------------------------------------------------------------------------------------- against the reference


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_clamped"])
def test_plain_matches(activation: str, biased: bool) -> None:
    ops, w, (x, weights) = PlainOps(), made(), inputs(11)
    packed = w.packed(ops, "f32")
    for name, ids in routings(11).items():
        got = run(ops, w, packed, x, ids, weights, activation=activation, biased=biased)
        truth = wanted(w, x, ids, weights, activation=activation, biased=biased)
        assert error(got, truth) < OPS["experts"].tolerance, name


@pytest.mark.parametrize("isa", range(len(ISAS)), ids=ISAS)
@pytest.mark.parametrize("tokens", [1, 2, 5, 33, 200])
def test_cpp_matches(isa: int, tokens: int) -> None:
    w, (x, weights) = made(), inputs(tokens)
    for threads, biased, activation in ((1, False, "silu"), (2, True, "silu"), (3, True, "gelu_tanh")):
        with cpu_ops(threads=threads, isa=isa) as ops:
            packed = w.packed(ops, "f32")
            for name, ids in routings(tokens).items():
                got = run(ops, w, packed, x, ids, weights, activation=activation, biased=biased)
                truth = wanted(w, x, ids, weights, activation=activation, biased=biased)
                assert error(got, truth) < OPS["experts"].tolerance, (name, threads)


@pytest.mark.parametrize("isa", [*range(len(ISAS)), "plain"], ids=[*ISAS, "plain"])
def test_weighed_input(isa: int | str) -> None:
    for tokens in (1, 5, 33):
        w, (x, weights) = made(), inputs(tokens)
        for threads, biased in ((1, False), (3, True)):
            ops: Any = PlainOps() if isa == "plain" else CpuOps(open_library(), threads=threads, isa=int(isa))
            packed = w.packed(ops, "f32")
            for name, ids in routings(tokens).items():
                got = run(ops, w, packed, x, ids, weights, biased=biased, weigh_input=True)
                truth = wanted(w, x, ids, weights, biased=biased, weigh_input=True)
                assert error(got, truth) < OPS["experts"].tolerance, (name, threads)
            getattr(ops, "close", lambda: None)()


@pytest.mark.parametrize("isa", range(len(ISAS)), ids=ISAS)
def test_clamped_swiglu(isa: int) -> None:
    """With values on both sides of the cuts; a NaN passes through them."""
    w, (x, weights) = made(), inputs(20)
    ids = routings(20)["random"]
    x *= 8
    gates = np.einsum("xfe,te->txf", w.gate, x)
    assert (gates > 7).mean() > 0.05
    assert (np.abs(np.einsum("xfe,te->txf", w.up, x)) > 7).mean() > 0.1
    with cpu_ops(threads=2, isa=isa) as ops:
        packed = w.packed(ops, "f32")
        got = run(ops, w, packed, x, ids, weights, activation="swiglu_clamped", biased=True)
        truth = wanted(w, x, ids, weights, activation="swiglu_clamped", biased=True)
        assert error(got, truth) < OPS["experts"].tolerance
        x[3, 5] = np.nan
        broken = run(ops, w, packed, x, ids, weights, activation="swiglu_clamped", biased=True)
        assert np.isnan(broken[3]).all()
        assert np.delete(broken, 3, 0).tobytes() == np.delete(got, 3, 0).tobytes()


@pytest.mark.parametrize(("hidden", "inner"), [(32, 32), (48, 33), (80, 16), (64, 31), (1024, 48)])
def test_sizes_that_fill_no_strip(hidden: int, inner: int) -> None:
    w, (x, weights) = made(hidden=hidden, inner=inner), inputs(13, hidden=hidden)
    with cpu_ops(threads=2) as ops:
        packed = w.packed(ops, "f32")
        for ids in routings(13).values():
            got = run(ops, w, packed, x, ids, weights, biased=True)
            assert error(got, wanted(w, x, ids, weights, biased=True)) < OPS["experts"].tolerance


@pytest.mark.parametrize("isa", range(len(ISAS)), ids=ISAS)
@pytest.mark.parametrize(("compute", "terms", "rounding"), [("bf16", 1, 6e-3), ("int8", 1, 2e-2), ("int8", 2, 1e-4)])
def test_rounded_layouts_agree_with_plain(isa: int, compute: str, terms: int, rounding: float) -> None:
    """C++ and torch round weights and activations alike, and the rounding is small.

    Activations at the edge between two quants may fall to either side, so the two differ by more than sums in another order.
    """
    w, (x, weights) = made(), inputs(40)
    library = open_library()
    if isa > library.isa:
        pytest.skip(f"this machine has no {ISAS[isa]}")
    plain = PlainOps(activation_terms=terms)
    theirs = w.packed(plain, compute)
    ops = CpuOps(library, threads=2, isa=isa, activation_terms=terms)
    try:
        mine = w.packed(ops, compute)
        for name, ids in routings(40).items():
            got = run(ops, w, mine, x, ids, weights, biased=True)
            assert error(got, run(plain, w, theirs, x, ids, weights, biased=True)) < rounding / 2, name
            rounded = Weights(
                *(unpacked(values, compute) for values in (w.gate, w.up, w.down)), w.gate_up_bias, w.down_bias
            )
            assert error(got, wanted(rounded, x, ids, weights, biased=True)) < rounding, name
    finally:
        ops.close()


def unpacked(values: Any, compute: str) -> Any:
    """Weights as packed for a way to compute."""
    packed = (PlainOps().pack_matrix(each, compute=compute) for each in values)  # type: ignore[arg-type]
    return np.stack([each.data[0].numpy() for each in packed])


@pytest.mark.parametrize("quantise", [quantise_q4_0, quantise_q4_1])
def test_blocks_of_a_file(quantise: Any) -> None:
    """Experts that stay 4-bit blocks, in two int8 terms: nearly the dequantised weights' result."""
    w, (x, weights) = made(), inputs(17)
    name = "Q4_0" if quantise is quantise_q4_0 else "Q4_1"
    raw = {key: quantise(getattr(w, key)) for key in ("gate", "up", "down")}
    values = {key: dequantise(raw[key], name, getattr(w, key).shape) for key in raw}
    ops = CpuOps(open_library(), threads=2, activation_terms=2)
    try:
        gate_up = (
            ops.pack_gated(*(ops.pack_blocks(raw[key][e], name, n=INNER, k=HIDDEN) for key in ("gate", "up")))
            for e in range(EXPERTS)
        )
        down = (ops.pack_blocks(raw["down"][e], name, n=HIDDEN, k=INNER) for e in range(EXPERTS))
        packed = ops.pack_experts(gate_up, experts=EXPERTS), ops.pack_experts(down, experts=EXPERTS)
        for ids in routings(17).values():
            got = run(ops, w, packed, x, ids, weights)
            assert error(got, wanted(Weights(**values, gate_up_bias=None, down_bias=None), x, ids, weights)) < 1e-4
    finally:
        ops.close()


# ------------------------------------------------------------------------------------------------------------------- properties


@pytest.mark.parametrize("compute", ["f32", "bf16", "int8"])
def test_a_token_does_not_know_its_neighbours(compute: str) -> None:
    """Alone, in a batch, among a broken row, with other threads: the same bits."""
    w, (x, weights) = made(), inputs(60)
    ids = routings(60)["random"]
    x[7] = np.nan
    weights[8] = np.inf
    results = []
    for threads in (1, 2, 3):
        with cpu_ops(threads=threads) as ops:
            packed = w.packed(ops, compute)
            results.append(run(ops, w, packed, x, ids, weights))
            for t in (0, 6, 9, 59):
                alone = run(ops, w, packed, x[t : t + 1].copy(), ids[t : t + 1].copy(), weights[t : t + 1].copy())
                assert alone.tobytes() == results[-1][t : t + 1].tobytes()
    assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()
    assert np.isnan(results[0][7]).all()
    assert np.isfinite(np.delete(results[0], [7, 8], 0)).all()


def test_only_live_tokens_and_none_at_all() -> None:
    w, (x, weights) = made(), inputs(20)
    ids = routings(20)["random"]
    ids[12:] = 1 << 30  # what lies beyond the count is never read
    for ops in (PlainOps(), CpuOps(open_library(), threads=2)):
        packed = w.packed(ops, "f32")
        got = run(ops, w, packed, x, ids, weights, live=12)
        assert error(got[:12], wanted(w, x[:12], ids[:12], weights[:12])) < OPS["experts"].tolerance
        assert (got[12:] == -77).all()
        assert (run(ops, w, packed, x, ids, weights, live=0) == -77).all()
        getattr(ops, "close", lambda: None)()


def test_experts_that_nobody_asks_are_not_read() -> None:
    w, (x, weights) = made(), inputs(20)
    ids = routings(20)["all to the same"]  # experts 2, 3, 4
    with cpu_ops(threads=2) as ops:
        packed = w.packed(ops, "f32")
        before = run(ops, w, packed, x, ids, weights)
        for part in packed:
            table = part.data[0]
            table[[1, 5, 6]] = 8  # an address that nobody may read
        assert run(ops, w, packed, x, ids, weights).tobytes() == before.tobytes()


def test_scratch_is_not_overrun() -> None:
    w, (x, weights) = made(), inputs(50)
    for compute in ("f32", "bf16", "int8"):
        with cpu_ops(threads=2) as ops:
            packed = w.packed(ops, compute)
            size = matrix.experts_scratch_bytes(ops.library.handle, *packed, 50 * CHOSEN)
            scratch = matrix.aligned_bytes(size + 64)
            scratch[:] = 171
            ops._matmul_scratch = scratch[:size]
            run(ops, w, packed, x, routings(50)["random"], weights)
            assert (scratch[size:] == 171).all()
            assert (scratch[: size - 64] != 171).any()


def test_a_tape_follows_count_and_routing() -> None:
    w, (x, weights) = made(), inputs(30)
    choices = routings(30)
    with cpu_ops(threads=2) as ops:
        packed = w.packed(ops, "f32")
        ids, live, out = choices["random"].copy(), count(30), np.zeros_like(x)
        with ops.record() as tape:
            ops.experts(
                x, ids, weights, *packed, activation="silu", gate_up_bias=None, down_bias=None, out=out, count=live
            )
        for name, choice in choices.items():
            for n in (30, 4, 1):
                ids[:], live[0] = choice, n
                tape.run()
                assert error(out[:n], wanted(w, x[:n], choice[:n], weights[:n])) < OPS["experts"].tolerance, name


def test_unlike_experts_are_refused() -> None:
    w = made()
    with cpu_ops() as ops:
        parts = [ops.pack_matrix(w.down[0], compute="f32"), ops.pack_matrix(w.down[1], compute="bf16")]
        with pytest.raises(ValueError, match=r"\[96, 160\] of bf16, \[96, 160\] of f32"):
            ops.pack_experts(parts, experts=2)
