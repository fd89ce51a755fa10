"""The table of tuned constants answers every shape with something its kernel accepts."""

from __future__ import annotations

import itertools

import pytest

from tradewind.kernels.triton.tuning import TUNINGS, tuned


def is_power_of_two(value):
    return value > 0 and value & (value - 1) == 0


@pytest.mark.parametrize("gpu", [*TUNINGS, "a card nobody measured"])
def test_every_answer_is_valid(gpu):
    tuning = tuned(gpu)
    for outputs, depth, fp8 in itertools.product(
        (576, 1024, 4096, 14336, 151936), (576, 1024, 1536, 4096, 14336), (False, True)
    ):
        gemv = tuning.gemv(outputs, depth, fp8=fp8)
        assert all(is_power_of_two(value) for value in (gemv.rows, gemv.block_k, gemv.warps))
        for rows in (2, 16, 17, 32, 64, 65):
            tile = tuning.tile(rows, outputs, depth, fp8=fp8)
            if tile is None:
                assert rows > tuning.tile_rows or depth % 128
                continue
            assert rows <= tile.bm and depth % tile.bk == 0 and (depth // tile.bk) % tile.split == 0
            stage = (tile.bm + tile.bn) * tile.bk * (1 if fp8 else 2)
            assert stage * tile.stages <= 160 * 1024
    for (outputs, depth, fp8), ways in tuning.wide_shapes.items():
        assert gpu in TUNINGS, "only what was measured"
        for above, most, tile in ways:
            assert tuning.tile_rows <= above < most <= 256 and tile.split == 1 and not tile.tma
            assert (
                tuning.wide(above, outputs, depth, fp8=fp8) != tile
                and tuning.wide(most, outputs, depth, fp8=fp8) == tile
            )
            assert depth % tile.bk == 0 and (tile.bm + tile.bn) * tile.bk * (1 if fp8 else 2) * tile.stages < 227 * 1024
    assert tuning.wide(257, 4096, 4096, fp8=True) is None and tuning.wide(64, 4096, 4096, fp8=True) is None
    for rows, longest in itertools.product((1, 2, 8, 32, 256), (128, 4096, 131072)):
        decode = tuning.decode(rows, longest)
        assert is_power_of_two(decode.splits) and is_power_of_two(decode.block_n)
    for dim, page in itertools.product((64, 96, 128, 256), (16, 32, 64)):
        config = tuning.prefill(dim, page)
        assert not config.tma or page % config.block_n == 0
