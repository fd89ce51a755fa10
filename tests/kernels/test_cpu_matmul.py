"""The packed matmuls of the CPU library against float64 numpy: every format, instruction set and odd shape; exactness of packing;
and that a row's result does not depend on its neighbours, its place, or the number of threads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tests.kernels.cpu_support import open_library
from tradewind.kernels.cpu import matrix
from tradewind.kernels.ops import PackedMatrix
from tradewind.quantization.blocks import BLOCKS, as_scale_min, dequantise

PORTABLE, AVX2, AVX512, AVX512_BF16 = range(4)
ISA_NAMES = {PORTABLE: "portable", AVX2: "avx2", AVX512: "avx512", AVX512_BF16: "avx512_bf16"}
QUANT_FORMATS = [name for name, block in BLOCKS.items() if block.group]


@pytest.fixture(scope="session")
def lib() -> ctypes.CDLL:
    return open_library().handle


@dataclass
class Runner:
    """A team of threads at one instruction set, and the ops by name."""

    lib: ctypes.CDLL
    team: ctypes.c_void_p
    ids: dict[str, int]
    terms: int = 1

    def linear(self, x: Any, packed: PackedMatrix, *, bias: Any = None, pad: int = 0) -> Any:
        return self._run("linear", x, packed, bias, packed.n, pad)

    def gated(self, x: Any, packed: PackedMatrix, activation: str, *, bias: Any = None, pad: int = 0) -> Any:
        return self._run("gated_linear", x, packed, bias, packed.n // 2, pad, activation)

    def _run(self, op: str, x: Any, packed: PackedMatrix, bias: Any, outputs: int, pad: int, *activation: Any) -> Any:
        rows, k = x.shape
        wide = np.full((rows + 1, k + pad), 7.0, np.float32)
        wide[:rows, :k] = x
        out = np.full((rows + 1, outputs + pad), -77.0, np.float32)
        count = np.array([rows], np.int32)
        size = matrix.scratch_bytes(self.lib, packed, rows, terms=self.terms)
        scratch = matrix.aligned_bytes(size + 64)
        scratch[size:] = 171
        build: Any = matrix.gated_linear_words if activation else matrix.linear_words
        bias_at = 0 if bias is None else bias.ctypes.data
        words = build(
            wide.ctypes.data,
            k + pad,
            packed,
            bias_at,
            out.ctypes.data,
            outputs + pad,
            count.ctypes.data,
            scratch.ctypes.data,
            *activation,
            terms=self.terms,
        )
        assert self.lib.tw_op_args(self.ids[op]) == len(words)
        tape = np.array([self.ids[op], len(words), *words], np.int64)
        self.lib.tw_team_run(self.team, ctypes.c_void_p(tape.ctypes.data), ctypes.c_int64(1))
        assert (scratch[size:] == 171).all(), "wrote behind the scratch"
        assert (out[rows] == -77).all() and (out[:, outputs:] == -77).all(), "wrote beside the output"
        return out[:rows, :outputs].copy()


@pytest.fixture(scope="session")
def runners(lib: ctypes.CDLL) -> Iterator[dict[tuple[int, int], Runner]]:
    """By (isa, threads); only what this machine has."""
    lib.tw_team_new.restype = ctypes.c_void_p
    lib.tw_op_name.restype = ctypes.c_char_p
    ids = {lib.tw_op_name(i).decode(): i for i in range(lib.tw_op_count())}
    best = lib.tw_detect_isa()
    made = {
        (isa, threads): Runner(lib, ctypes.c_void_p(lib.tw_team_new(threads, isa)), ids)
        for isa in range(best + 1)
        for threads in (1, 2, 3)
    }
    yield made
    for runner in made.values():
        lib.tw_team_free(runner.team)


def pick(runners: dict[tuple[int, int], Runner], isa: int, threads: int = 2) -> Runner:
    if (isa, threads) not in runners:
        pytest.skip(f"this machine has no {ISA_NAMES[isa]}")
    return runners[isa, threads]


isas = pytest.mark.parametrize("isa", list(ISA_NAMES), ids=ISA_NAMES.values())


def difference(a: Any, b: Any) -> float:
    return float(np.linalg.norm(np.float64(a) - b) / (np.linalg.norm(np.float64(b)) + 1e-30))


def random_blocks(format: str, n: int, k: int, seed: int) -> Any:
    """Random bytes of a format with sane float16 scales."""
    rng = np.random.default_rng(seed)
    block = BLOCKS[format]
    raw = rng.integers(0, 256, (n * k // block.values_per_block, block.bytes_per_block), np.uint8)
    halves = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}.get(format, (0, 2))
    for at in halves:
        raw[:, at : at + 2] = (rng.normal(size=(len(raw), 1)) * 0.01).astype(np.float16).view(np.uint8)
    return raw.reshape(-1)


def quantised(x: Any, group: int) -> Any:
    """What int8 compute sees of x, as float64: groups of 32 whatever the weights' group."""
    rows, k = x.shape
    padded = np.zeros((rows, -(-k // 32) * 32), np.float32)
    padded[:, :k] = x
    grouped = padded.reshape(rows, -1, 32)
    top = np.abs(grouped).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top >= 1e-30)
    q = np.rint(grouped * inverse)
    return (np.float64(q) * (top / np.float32(127))).reshape(rows, -1)[:, :k]


def random_quants(
    n: int, k: int, bits: int, group: int, seed: int, *, half: bool, symmetric: bool
) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    q = rng.integers(0, 1 << bits, (n, k)).astype(np.uint8)
    scale = (rng.normal(size=(n, k // group)) * 0.02).astype(np.float32)
    minimum = (rng.normal(size=(n, k // group)) * 0.1).astype(np.float32)
    if half:
        scale, minimum = (values.astype(np.float16).astype(np.float32) for values in (scale, minimum))
    if symmetric:
        minimum = np.float32(-(1 << (bits - 1))) * scale
    return q, scale, minimum


def values_of(q: Any, scale: Any, minimum: Any) -> Any:
    grouped = q.reshape(*scale.shape, -1).astype(np.float64)
    return (grouped * np.float64(scale)[..., None] + np.float64(minimum)[..., None]).reshape(q.shape)


def activations(rows: int, k: int, seed: int = 5) -> Any:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(rows, k)) * np.exp(rng.normal(size=(rows, 1)))).astype(np.float32)


# ------------------------------------------------------------------------------------------------------------ packing


@pytest.mark.parametrize("format", QUANT_FORMATS)
@pytest.mark.parametrize("n", [1, 16, 17, 48])
def test_packed_blocks_keep_every_value(lib: ctypes.CDLL, format: str, n: int) -> None:
    for k in (256, 768) if BLOCKS[format].values_per_block == 256 else (32, 64, 96, 576):
        raw = random_blocks(format, n, k, seed=n + k)
        packed = matrix.pack_blocks(lib, raw, format, n, k, threads=2)
        np.testing.assert_array_equal(matrix.unpack(lib, packed), dequantise(raw, format, (n, k)))
        quants, scale, minimum, group = as_scale_min(raw, format)
        bits = packed.bits
        other = matrix.pack_quant(lib, quants.reshape(n, k), scale.reshape(n, -1), minimum.reshape(n, -1), bits)
        assert (other.bits, other.group, other.layout) == (packed.bits, group, "quant")
        np.testing.assert_array_equal(matrix.unpack(lib, other), matrix.unpack(lib, packed))


@pytest.mark.parametrize("format", QUANT_FORMATS)
def test_a_packed_matrix_is_as_small_as_the_file(lib: ctypes.CDLL, format: str) -> None:
    raw = random_blocks(format, 64, 2048, seed=0)
    # Q4_K and Q5_K: a byte where the file has six bits for a scale or minimum.
    steps = 64 * 2048 // 32 * 2 * 2 // 8 if format in ("Q4_K", "Q5_K") else 0
    assert matrix.pack_blocks(lib, raw, format, 64, 2048).nbytes == raw.nbytes + steps + 64


@pytest.mark.parametrize("source", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("layout", ["f32", "bf16"])
def test_packed_floats(lib: ctypes.CDLL, source: str, layout: Any) -> None:
    for n, k in ((1, 1), (17, 40), (16, 33), (48, 64)):
        values = np.random.default_rng(k).normal(size=(n, k)).astype(np.float32)
        values.reshape(-1)[0] = 6e-8  # a float16 denormal
        stored = {"F32": values, "F16": values.astype(np.float16), "BF16": as_bf16(values)}[source]
        exact = {
            "F32": values,
            "F16": values.astype(np.float16).astype(np.float32),
            "BF16": from_bf16(as_bf16(values)),
        }[source]
        packed = matrix.pack_blocks(lib, stored.view(np.uint8), source, n, k, float_layout=layout)
        expected = exact if layout == "f32" else from_bf16(as_bf16(exact))
        np.testing.assert_array_equal(matrix.unpack(lib, packed), expected)


def as_bf16(values: Any) -> Any:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("group", [16, 32, 64, 96])
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("half", [True, False])
def test_packed_quants_keep_every_value(lib: ctypes.CDLL, bits: int, group: int, half: bool) -> None:
    for symmetric in (True, False):
        for n, k in ((1, 192), (33, 576)):
            q, scale, minimum = random_quants(n, k, bits, group, 3, half=half, symmetric=symmetric)
            packed = matrix.pack_quant(lib, q, scale, minimum, bits)
            expected = (q.reshape(n, -1, group).astype(np.float32) * scale[..., None] + minimum[..., None]).reshape(
                n, k
            )
            np.testing.assert_array_equal(matrix.unpack(lib, packed), expected)


def test_stacked_and_gated_keep_the_order(lib: ctypes.CDLL) -> None:
    parts = [matrix.pack_blocks(lib, random_blocks("Q5_1", n, 96, n), "Q5_1", n, 96) for n in (32, 16, 9)]
    stacked = matrix.pack_stacked(lib, parts)
    np.testing.assert_array_equal(
        matrix.unpack(lib, stacked), np.concatenate([matrix.unpack(lib, part) for part in parts])
    )
    gate, up = (matrix.pack_blocks(lib, random_blocks("Q4_0", 40, 64, seed), "Q4_0", 40, 64) for seed in (1, 2))
    gated = matrix.pack_gated(lib, gate, up)
    assert gated.gated and gated.n == 80
    np.testing.assert_array_equal(
        matrix.unpack(lib, gated), np.concatenate([matrix.unpack(lib, gate), matrix.unpack(lib, up)])
    )


def test_bad_matrices_are_refused(lib: ctypes.CDLL) -> None:
    q, scale, minimum = random_quants(16, 64, 4, 32, 0, half=True, symmetric=False)
    with pytest.raises(ValueError, match="7 bits"):
        matrix.pack_quant(lib, q, scale, minimum, 7)
    with pytest.raises(ValueError, match="groups along K"):
        matrix.pack_quant(lib, q, scale[:, :1], minimum, 4)
    with pytest.raises(ValueError, match="groups along K"):
        matrix.pack_quant(lib, q, np.repeat(scale, 4, 1), np.repeat(minimum, 4, 1), 4)  # groups of 8
    with pytest.raises(ValueError, match="does not fit in 4 bits"):
        matrix.pack_quant(lib, q + np.uint8(1), scale, minimum, 4)
    with pytest.raises(ValueError, match="needs 640 bytes"):
        matrix.pack_blocks(lib, np.zeros(639, np.uint8), "Q4_1", 16, 64)
    with pytest.raises(ValueError, match="not a multiple"):
        matrix.pack_blocks(lib, np.zeros(640, np.uint8), "Q4_1", 16, 40)
    with pytest.raises(KeyError):
        matrix.pack_blocks(lib, np.zeros(640, np.uint8), "Q9_9", 16, 64)
    four, floats = matrix.pack_quant(lib, q, scale, minimum, 4), matrix.pack_f32(lib, np.zeros((16, 64)))
    odd = matrix.pack_f32(lib, np.zeros((17, 64)))
    for parts in ([four, floats], [odd, floats], []):
        assert not parts or not matrix.can_combine(parts)
        with pytest.raises(ValueError, match="cannot"):
            matrix.pack_stacked(lib, parts)
    with pytest.raises(ValueError, match="interleaved"):
        matrix.pack_gated(lib, floats, odd)


# ------------------------------------------------------------------------------------------------------------- linear

ROWS = (1, 2, 3, 7, 8, 9, 17, 64, 130)


@isas
@pytest.mark.parametrize("format", QUANT_FORMATS)
def test_linear_of_every_format(runners: Any, lib: ctypes.CDLL, isa: int, format: str) -> None:
    runner = pick(runners, isa)
    for k in (256, 768) if BLOCKS[format].values_per_block == 256 else (32, 64, 96, 576):
        for n in (1, 16, 17, 48, 576):
            raw = random_blocks(format, n, k, seed=n + k)
            packed = matrix.pack_blocks(lib, raw, format, n, k)
            weights = np.float64(dequantise(raw, format, (n, k)))
            x = activations(ROWS[-1], k)
            seen, full = quantised(x, 32) @ weights.T, np.float64(x) @ weights.T
            for rows in ROWS if n in (17, 48) or isa else (1, 7, 17):
                out = runner.linear(x[:rows], packed, pad=n % 3)
                assert difference(out, seen[:rows]) <= 1e-5, (format, n, k, rows)
            if n >= 16:
                assert difference(out, full[:rows]) <= 1.5e-2


@isas
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("group", [16, 32, 64])
def test_linear_of_every_kind_of_scale(runners: Any, lib: ctypes.CDLL, isa: int, bits: int, group: int) -> None:
    runner, (n, k) = pick(runners, isa), (49, 192)
    x, bias = activations(11, k), activations(1, n)[0]
    for half in (True, False):
        for symmetric in (True, False):
            q, scale, minimum = random_quants(n, k, bits, group, 3, half=half, symmetric=symmetric)
            packed = matrix.pack_quant(lib, q, scale, minimum, bits)
            expected = quantised(x, 32) @ values_of(q, scale, minimum).T + bias
            assert difference(runner.linear(x, packed, bias=bias), expected) <= 1e-5, (half, symmetric)


@isas
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_extreme_quants_do_not_overflow(runners: Any, lib: ctypes.CDLL, isa: int, bits: int) -> None:
    # All quants at their ends and all activations at +-127: what 16-bit sums would saturate on.
    runner, (n, k) = pick(runners, isa), (16, 64)
    x = np.ones((3, k), np.float32)
    x[1] = -1
    x[2, ::2] = -1
    for end in (0, (1 << bits) - 1):
        q = np.full((n, k), end, np.uint8)
        scale, minimum = np.ones((n, k // 32), np.float32), np.full((n, k // 32), -3.0, np.float32)
        expected = np.float64(x) @ values_of(q, scale, minimum).T
        packed = matrix.pack_quant(lib, q, scale, minimum, bits)
        np.testing.assert_allclose(runner.linear(x, packed), expected, rtol=1e-6, atol=1e-3)


@isas
@pytest.mark.parametrize("layout", ["f32", "bf16"])
def test_linear_of_floats(runners: Any, lib: ctypes.CDLL, isa: int, layout: str) -> None:
    runner = pick(runners, isa)
    for k in (1, 32, 33, 40, 96, 576):
        for n in (1, 16, 17, 48, 576):
            weights = np.random.default_rng(n).normal(size=(n, k)).astype(np.float32)
            x, bias = activations(ROWS[-1], k), activations(1, n)[0]
            if layout == "f32":
                packed, seen, kept = matrix.pack_f32(lib, weights), np.float64(x), np.float64(weights)
            else:
                packed = matrix.pack_bf16(lib, weights)
                seen, kept = (np.float64(from_bf16(as_bf16(values))) for values in (x, weights))
            expected = seen @ kept.T + bias
            size = np.abs(seen) @ np.abs(kept).T + np.abs(bias)  # sums that cancel are no worse than their terms
            for rows in ROWS if n in (17, 48) or isa else (1, 7, 17):
                out = runner.linear(x[:rows], packed, bias=bias, pad=n % 3)
                assert (np.abs(out - expected[:rows]) <= 2e-6 * size[:rows]).all(), (n, k, rows)


@isas
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("layout", ["f32", "bf16", "Q4_1", "Q6_K"])
def test_gated_linear(runners: Any, lib: ctypes.CDLL, isa: int, activation: str, layout: str) -> None:
    runner, k = pick(runners, isa), 256
    for features in (1, 16, 40, 96):
        if layout in BLOCKS:
            raws = [random_blocks(layout, features, k, seed) for seed in (1, 2)]
            parts = [matrix.pack_blocks(lib, raw, layout, features, k) for raw in raws]
        else:
            pack = matrix.pack_f32 if layout == "f32" else matrix.pack_bf16
            parts = [pack(lib, activations(features, k, seed) * 0.1) for seed in (1, 2)]
        packed, x, bias = matrix.pack_gated(lib, *parts), activations(19, k), activations(1, 2 * features)[0]
        seen = {"f32": np.float64(x), "bf16": np.float64(from_bf16(as_bf16(x)))}.get(layout, quantised(x, 32))
        both = seen @ np.float64(matrix.unpack(lib, packed)).T + bias
        gate, up = both[:, :features], both[:, features:]
        inner = gate if activation == "silu" else 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        expected = gate / (1 + np.exp(-np.clip(inner, -700, 700))) * up
        for rows in (1, 6, 7, 19):
            out = runner.gated(x[:rows], packed, activation, bias=bias, pad=features % 3)
            assert difference(out, expected[:rows]) <= 1e-5, (features, rows)
        no_bias = runner.gated(x, packed, activation)
        assert np.isfinite(no_bias).all()


@isas
def test_the_activation_is_accurate_over_its_whole_range(runners: Any, lib: ctypes.CDLL, isa: int) -> None:
    runner = pick(runners, isa)
    gate = np.concatenate(
        [np.linspace(-87, 100, 4001), np.logspace(-30, 2, 333), -np.logspace(-30, 1.9, 333), [0.0]]
    ).astype(np.float32)
    packed = matrix.pack_gated(
        lib, matrix.pack_f32(lib, np.array([[1.0, 0.0]])), matrix.pack_f32(lib, np.array([[0.0, 1.0]]))
    )
    x = np.stack([gate, np.ones_like(gate)], axis=1)
    exact = np.float64(gate)
    np.testing.assert_allclose(
        runner.gated(x, packed, "silu")[:, 0], exact / (1 + np.exp(-exact)), rtol=2e-6, atol=1e-37
    )
    inner = 2 * np.sqrt(2 / np.pi) * (exact + 0.044715 * exact**3)
    expected = exact / (1 + np.exp(-np.clip(inner, -700, 700)))
    # exp magnifies the rounding of its argument: relative 1e-7 of |inner| <= 87.
    np.testing.assert_allclose(runner.gated(x, packed, "gelu_tanh")[:, 0], expected, rtol=2e-5, atol=1e-36)
    far = np.array([[-1000.0, 1.0], [1000.0, 1.0], [np.nan, 1.0]], np.float32)
    for activation in ("silu", "gelu_tanh"):
        low, high, nan = runner.gated(far, packed, activation)[:, 0]
        assert abs(low) < 1e-30 and high == 1000 and np.isnan(nan)


# -------------------------------------------------------------------------------------------- one row, always the same

KINDS = ["f32", "bf16", "Q4_1", "Q5_0", "Q6_K", "Q8_0"]


def packed_of(lib: ctypes.CDLL, kind: str, n: int, k: int, seed: int = 1) -> PackedMatrix:
    if kind in BLOCKS:
        return matrix.pack_blocks(lib, random_blocks(kind, n, k, seed), kind, n, k)
    return (matrix.pack_f32 if kind == "f32" else matrix.pack_bf16)(lib, activations(n, k, seed))


@isas
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_batch_place_or_threads(runners: Any, lib: ctypes.CDLL, isa: int, kind: str) -> None:
    pick(runners, isa)
    n, k, rows = 144, 768, 41
    packed = packed_of(lib, kind, n, k)
    gated = matrix.pack_gated(lib, packed, packed_of(lib, kind, n, k, seed=2))
    x = activations(rows, k)
    whole, whole_gated = runners[isa, 1].linear(x, packed), runners[isa, 1].gated(x, gated, "silu")
    for threads in (1, 2, 3):
        runner = runners[isa, threads]
        for start, stop in ((0, 1), (5, 7), (3, 12), (17, 18), (20, 41), (0, 41)):
            np.testing.assert_array_equal(runner.linear(x[start:stop], packed), whole[start:stop])
            np.testing.assert_array_equal(runner.gated(x[start:stop], gated, "silu"), whole_gated[start:stop])
    big = np.tile(x, (15, 1))  # more than one band of rows
    np.testing.assert_array_equal(runners[isa, 2].linear(big, packed), np.tile(whole, (15, 1)))


@isas
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_spoils_itself_only(runners: Any, lib: ctypes.CDLL, isa: int, kind: str) -> None:
    runner, packed = pick(runners, isa), packed_of(lib, kind, 33, 256)
    x = activations(9, 256)
    good = runner.linear(x, packed)
    for row, value in ((0, np.nan), (4, np.inf), (7, -np.inf), (8, -np.nan)):
        x[row, 37 * row % 256] = value
    out = runner.linear(x, packed)
    bad = [0, 4, 7, 8]
    assert not np.isfinite(out[bad]).any()
    np.testing.assert_array_equal(np.delete(out, bad, axis=0), np.delete(good, bad, axis=0))


@isas
@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_tiny_rows(runners: Any, lib: ctypes.CDLL, isa: int, kind: str) -> None:
    runner, packed = pick(runners, isa), packed_of(lib, kind, 33, 256)
    x = np.zeros((4, 256), np.float32)
    x[1] = 1e-38
    x[2] = np.float32(1e-45)
    x[3, 40] = 3e38
    out = runner.linear(x, packed)
    assert (out[0] == 0).all() and (np.abs(out[1:3]) < 1e-30).all()
    assert not np.isnan(out[3]).any() or kind in ("f32", "bf16")


@isas
def test_no_rows(runners: Any, lib: ctypes.CDLL, isa: int) -> None:
    assert pick(runners, isa).linear(np.zeros((0, 64), np.float32), packed_of(lib, "Q8_0", 16, 64)).shape == (0, 16)


def test_instruction_sets_agree(runners: Any, lib: ctypes.CDLL) -> None:
    x = activations(13, 768)
    for kind in KINDS:
        packed = packed_of(lib, kind, 96, 768)
        outs = [runners[isa, 2].linear(x, packed) for isa in range(lib.tw_detect_isa() + 1)]
        assert all(difference(out, outs[0]) <= 2e-6 for out in outs), kind


@isas
@pytest.mark.parametrize("format", ["Q4_0", "Q4_1", "Q5_1", "Q6_K", "Q8_0"])
def test_two_terms_leave_next_to_no_error_and_rows_stay_alone(
    lib: ctypes.CDLL, runners: dict[tuple[int, int], Runner], isa: int, format: str
) -> None:
    """Compute int16: against float activations, 100 times closer than one term, also when a row has outliers; and bit-equal for any M."""
    rng = np.random.default_rng(isa)
    n, k = 49, 2048 + 256  # more than the piece in which remainders are made
    packed = matrix.pack_blocks(lib, random_blocks(format, n, k, 5), format, n, k)
    weights = np.float64(matrix.unpack(lib, packed))
    x = (rng.standard_normal((17, k)) * np.exp(rng.standard_normal((17, k)))).astype(np.float32)
    x[3, ::97] *= 200
    x[5, 64:128] = 0
    exact = x @ weights.T
    one, two = (replace(pick(runners, isa), terms=terms) for terms in (1, 2))
    coarse, fine = one.linear(x, packed), two.linear(x, packed)
    assert difference(fine, exact) <= 1e-4
    assert difference(fine, exact) * 50 <= difference(coarse, exact)
    for m in (0, 3, 16):
        assert np.array_equal(two.linear(x[m : m + 1], packed)[0], fine[m])
    for threads in (1, 3):
        assert np.array_equal(replace(pick(runners, isa, threads), terms=2).linear(x, packed), fine)
    x[7, 100] = np.nan
    spoiled = two.linear(x, packed)
    assert np.isnan(spoiled[7]).all() and np.array_equal(np.delete(spoiled, 7, 0), np.delete(fine, 7, 0))
