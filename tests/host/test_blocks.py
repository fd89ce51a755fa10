"""Block formats against the gguf package, as scales and minima, and there and back."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tradewind.quantization import blocks
from tradewind.quantization.blocks import BLOCKS, as_scale_min, dequantise

gguf = pytest.importorskip("gguf")

QUANTISED = [name for name, block in BLOCKS.items() if block.unpack is not None]
# Byte positions of the float16 fields in a block: random bytes there would be infinities and NaN.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q8_0": (0,),
}


def random_blocks(name: str, count: int, seed: int) -> NDArray[np.uint8]:
    """Random bytes, all finite where the format has floats; subnormal and negative scales among them."""
    rng = np.random.default_rng(seed)
    block = BLOCKS[name]
    raw = rng.integers(0, 256, (count, block.bytes_per_block), dtype=np.uint8)
    for at in HALVES.get(name, ()):
        bits = rng.integers(0, 0x7C00, count, dtype=np.uint16) | (rng.integers(0, 2, count, dtype=np.uint16) << 15)
        raw[:, at : at + 2] = bits.astype(np.uint16)[:, None].view(np.uint8)
    if block.widen is not None:
        values = (rng.standard_normal(count) * 100).astype(np.float32)
        as_type = values.astype(np.float16) if name == "F16" else values
        raw = as_type[:, None].view(np.uint8)[:, -block.bytes_per_block :].copy()
    return raw


@pytest.mark.parametrize("name", sorted(BLOCKS))
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 70))
def test_equals_the_gguf_package_exactly(name: str, seed: int, count: int) -> None:
    raw = random_blocks(name, count, seed)
    oracle = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    ours = BLOCKS[name].dequantise(raw)
    assert ours.dtype == np.float32
    assert ours.shape == (count, BLOCKS[name].values_per_block)
    np.testing.assert_array_equal(ours, oracle.reshape(ours.shape))  # no tolerance: equal bits but for the sign of 0


@pytest.mark.parametrize("name", QUANTISED)
def test_all_scales_and_quants_at_their_extremes(name: str) -> None:
    """The exactness claim of the module at its limits: all bits of q and sub-scales set, largest and smallest d."""
    block = BLOCKS[name]
    for fill in (0x00, 0x7F, 0x80, 0xFF):
        for half in (0x7BFF, 0xFBFF, 0x0001, 0x8001, 0x03FF, 0x0000):
            raw = np.full((1, block.bytes_per_block), fill, np.uint8)
            for at in HALVES[name]:
                raw[:, at : at + 2] = np.array([[half]], np.uint16).view(np.uint8)
            oracle = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
            np.testing.assert_array_equal(block.dequantise(raw), oracle)


@pytest.mark.parametrize("name", QUANTISED)
def test_scale_times_quant_plus_minimum_is_the_value(name: str) -> None:
    raw = random_blocks(name, 37, seed=5)
    quants, scale, minimum, group = as_scale_min(raw, name)
    block = BLOCKS[name]
    assert group == block.group
    assert quants.dtype == np.uint8
    assert quants.shape == (37, block.values_per_block)
    assert scale.shape == minimum.shape == (37, block.values_per_block // group)
    assert scale.dtype == minimum.dtype == np.float32
    wide = np.repeat(scale, group, 1).astype(np.float64) * quants + np.repeat(minimum, group, 1)
    np.testing.assert_allclose(block.dequantise(raw), wide, rtol=2e-7, atol=0)
    limit = {"Q4_0": 15, "Q4_1": 15, "Q4_K": 15, "Q5_0": 31, "Q5_1": 31, "Q5_K": 31, "Q6_K": 63, "Q8_0": 255}[name]
    assert quants.max() == limit
    offset = {"Q4_0": 8, "Q5_0": 16, "Q6_K": 32, "Q8_0": 128}.get(name)
    if offset is not None:
        np.testing.assert_array_equal(minimum, -offset * scale)


@pytest.mark.parametrize(
    ("pack", "name"),
    [(blocks.quantise_q4_0, "Q4_0"), (blocks.quantise_q4_1, "Q4_1"), (blocks.quantise_q8_0, "Q8_0")],
)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 5), width=st.integers(1, 4), spread=st.floats(-6, 4))
def test_quantised_bytes_equal_the_gguf_package(pack, name, seed, rows, width, spread) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((rows, 32 * width)) * 10.0**spread).astype(np.float32)
    values[0, :32] = 0
    packed = pack(values)
    oracle = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(packed, oracle)


@pytest.mark.parametrize(
    ("pack", "name", "steps"),
    [(blocks.quantise_q4_0, "Q4_0", 16), (blocks.quantise_q4_1, "Q4_1", 15), (blocks.quantise_q8_0, "Q8_0", 254)],
)
def test_round_trip_error_is_within_a_step(pack, name, steps) -> None:  # type: ignore[no-untyped-def]
    values = np.random.default_rng(3).standard_normal((4, 6, 96)).astype(np.float32)
    packed = pack(values)
    assert packed.shape == (4, 6, BLOCKS[name].nbytes((96,)))
    back = dequantise(packed, name, values.shape)
    spread = np.abs(values).max() * 2
    # Half a step of rounding; a whole one at the clipped end of Q4_0; the scale's own rounding to float16.
    assert np.abs(back - values).max() <= spread / steps * 1.01


def test_round_half_away_from_zero_near_a_half() -> None:
    values = np.zeros((1, 32), np.float32)
    values[0, :4] = 127, np.nextafter(np.float32(0.5), np.float32(0)), 0.5, -0.5
    assert blocks.quantise_q8_0(values)[0, 2:6].view(np.int8).tolist() == [127, 0, 1, -1]


def test_bad_input_is_refused_with_numbers() -> None:
    with pytest.raises(ValueError, match="33 bytes are not a whole number of Q8_0 blocks of 34"):
        dequantise(np.zeros(33, np.uint8), "Q8_0", (32,))
    with pytest.raises(ValueError, match=r"\(2, 32\) in Q8_0 needs 68 bytes, not 34"):
        dequantise(np.zeros(34, np.uint8), "Q8_0", (2, 32))
    with pytest.raises(ValueError, match="a row of 48 values is not a multiple of the 32 of Q4_1"):
        dequantise(np.zeros(40, np.uint8), "Q4_1", (2, 48))
    with pytest.raises(ValueError, match="no scales"):
        as_scale_min(np.zeros(4, np.uint8), "F32")
    with pytest.raises(ValueError, match="not a multiple of 32"):
        blocks.quantise_q4_1(np.zeros((2, 31), np.float32))
    with pytest.raises(ValueError, match="finite"):
        blocks.quantise_q8_0(np.full((1, 32), np.nan, np.float32))
    with pytest.raises(KeyError):
        dequantise(np.zeros(4, np.uint8), "Q3_K", (4,))


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_sizes_agree_with_the_gguf_package(name: str) -> None:
    block = BLOCKS[name]
    values, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert (block.values_per_block, block.bytes_per_block) == (values, nbytes)
    assert block.nbytes((3, 512)) == 3 * 512 // values * nbytes
    assert block.bits_per_value == 8 * nbytes / values


def test_an_empty_tensor_and_a_view_that_is_not_contiguous() -> None:
    assert dequantise(np.zeros(0, np.uint8), "Q4_0", (0, 32)).shape == (0, 32)
    raw = random_blocks("Q4_1", 6, seed=1)
    np.testing.assert_array_equal(BLOCKS["Q4_1"].dequantise(raw[::2]), BLOCKS["Q4_1"].dequantise(raw)[::2])


def test_importing_weights_brings_no_torch_and_is_cheap() -> None:
    code = (
        "import sys, numpy, time; start = time.thread_time()\n"
        "import tradewind.weights, tradewind.weights.checkpoint, tradewind.weights.lookup, tradewind.quantization.blocks\n"
        "print(time.thread_time() - start, *[m for m in ('torch', 'rich', 'huggingface_hub') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert len(shown) == 1, f"imported {shown[1:]}"
    assert float(shown[0]) < 0.25  # about 0.03 s; the limit allows for a machine without compiled bytecode
