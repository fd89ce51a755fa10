"""embed of the CPU library: every storage format against the unpacking in quantization/blocks.py."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.cpu_support import LEVELS, count, cpu_ops
from tradewind.kernels.cpu.ops import ROW_FORMATS
from tradewind.quantization.blocks import BLOCKS


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("format", sorted(ROW_FORMATS))
def test_rows(isa: int, format: str) -> None:
    rng = np.random.default_rng(4)
    block = BLOCKS[format]
    rows, cols = 23, 3 * block.values_per_block if block.values_per_block > 1 else 37
    raw = rng.integers(0, 256, (rows * cols // block.values_per_block, block.bytes_per_block), np.uint8)
    if format in ("F32", "F16", "BF16"):
        values = rng.standard_normal(rows * cols).astype(np.float32)
        raw = {
            "F32": values.view(np.uint8),
            "F16": values.astype(np.float16).view(np.uint8),
            "BF16": (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8),
        }[format]
    else:
        # Scales must be finite: where a block has float16 numbers, their exponents are made small.
        places = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}.get(format, (0, 2))
        for place in places:
            raw[:, place + 1] &= 0xBB
    expected = block.dequantise(raw.reshape(-1, block.bytes_per_block)).reshape(rows, cols)
    ids = rng.integers(0, rows, 9).astype(np.int32)
    for threads, live in ((1, 9), (2, 5), (3, 1)):
        with cpu_ops(threads=threads, isa=isa) as ops:
            table = ops.row_table(raw.reshape(-1), format, rows=rows, cols=cols)
            out = np.full((9, cols), 7, np.float32)
            ops.embed(ids, table, scale=1.0, out=out, count=count(live))
            # Formats with a minimum may fuse its addition, which saves a rounding; the others are exact.
            assert np.abs(out[:live] - expected[ids[:live]]).max() <= np.abs(expected).max() * (
                2e-7 if "1" in format or "K" in format else 0
            )
            assert (out[live:] == 7).all()
            ops.embed(ids, table, scale=24.0, out=out, count=count(9))
            assert np.allclose(out, 24 * expected[ids], rtol=1e-6, atol=1e-6 * np.abs(expected).max() * 24)


def test_an_id_outside_the_table_reads_nothing() -> None:
    with cpu_ops() as ops:
        table = ops.row_table(np.ones(12, np.float32).view(np.uint8), "F32", rows=3, cols=4)
        out = np.full((3, 4), 7, np.float32)
        ops.embed(np.array([-1, 2, 3], np.int32), table, scale=1.0, out=out, count=count(3))
        assert out.tolist() == [[0] * 4, [1] * 4, [0] * 4]
        with pytest.raises(ValueError, match="not 3 rows"):
            ops.row_table(np.ones(13, np.uint8), "F32", rows=3, cols=4)
