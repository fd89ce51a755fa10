"""A recorded tape does what the same calls do at once, with whatever the buffers and counts hold when it runs."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from tests.kernels.cpu_support import count, cpu_ops, floats
from tradewind.kernels.cpu.ops import CpuOps
from tradewind.kernels.ops import PagedRows

CAPACITY, HIDDEN, HEADS, KV_HEADS, DIM, FFN, VOCAB, PAGE = 24, 96, 6, 2, 32, 64, 200, 16


class Step:
    """A little transformer layer on its own buffers: every op of a forward, in order."""

    def __init__(self, ops: CpuOps) -> None:
        rng = np.random.default_rng(0)
        self.ops = ops
        take = ops.empty
        self.count, self.rows_count, self.wanted = count(1), count(1), count(1)
        self.ids, self.positions, self.slots = (take((CAPACITY,), "i32") for _ in range(3))
        self.index = take((8,), "i32")
        self.rows = PagedRows(
            query_start=take((9,), "i32"),
            lengths=take((8,), "i32"),
            page_table=take((8, 40), "i32"),
            rows=self.rows_count,
        )
        self.kv = ops.kv_layer(pages=330, page_tokens=PAGE, kv_heads=KV_HEADS, head_dim=DIM, format="f16")
        self.table = ops.row_table(floats(rng, VOCAB, HIDDEN).view(np.uint8), "F32", rows=VOCAB, cols=HIDDEN)
        self.norm = floats(rng, HIDDEN)
        self.inv_freq = (1 / 10000 ** (np.arange(0, DIM, 2) / DIM)).astype(np.float32)

        def pack(n: int, k: int, compute: Any) -> Any:
            return ops.pack_matrix(floats(rng, n, k, scale=k**-0.5), compute=compute)

        self.qkv_weight = pack((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, "f32")
        self.o_weight = pack(HIDDEN, HEADS * DIM, "bf16")
        self.gate_up = ops.pack_gated(pack(FFN, HIDDEN, "int8"), pack(FFN, HIDDEN, "int8"))
        self.down = pack(HIDDEN, FFN, "int8")
        self.head = pack(VOCAB, HIDDEN, "f32")
        self.x, self.h, self.att = (take((CAPACITY, n), "f32") for n in (HIDDEN, HIDDEN, HEADS * DIM))
        self.qkv = take((CAPACITY, (HEADS + 2 * KV_HEADS) * DIM), "f32")
        self.q, self.act = take((CAPACITY, HEADS * DIM), "f32"), take((CAPACITY, FFN), "f32")
        self.angles, self.last, self.logits = (
            take((CAPACITY, DIM), "f32"),
            take((8, HIDDEN), "f32"),
            take((8, VOCAB), "f32"),
        )

    def forward(self) -> None:
        ops, n = self.ops, self.count
        ops.embed(self.ids, self.table, scale=2.0, out=self.x, count=n)
        ops.rope_angles(self.positions, self.inv_freq, scale=1.0, out=self.angles, count=n)
        ops.add_rms_norm(self.x, None, self.norm, eps=1e-5, out=self.h, count=n)
        ops.linear(self.h, self.qkv_weight, bias=None, out=self.qkv, count=n)
        ops.rope_store(
            self.qkv,
            self.angles,
            self.slots,
            self.kv,
            heads=HEADS,
            q_weight=None,
            k_weight=None,
            eps=0.0,
            out=self.q,
            count=n,
        )
        ops.attention(
            self.q,
            self.kv,
            self.rows,
            heads=HEADS,
            scale=DIM**-0.5,
            window=None,
            softcap=None,
            sinks=None,
            out=self.att,
        )
        ops.linear(self.att, self.o_weight, bias=None, out=self.h, count=n)
        ops.add_rms_norm(self.x, self.h, self.norm, eps=1e-5, out=self.h, count=n)
        ops.gated_linear(self.h, self.gate_up, activation="silu", bias=None, out=self.act, count=n)
        ops.linear(self.act, self.down, bias=None, out=self.h, count=n)
        ops.add_rms_norm(self.x, self.h, self.norm, eps=1e-5, out=self.h, count=n)
        ops.gather_rows(self.h, self.index, out=self.last, count=self.wanted)
        ops.linear(self.last, self.head, bias=None, out=self.logits, count=self.wanted)
        ops.softcap(self.logits, cap=30.0, count=self.wanted)

    def lay_out(self, shapes: list[tuple[int, int]], seed: int) -> None:
        """Rows of (new tokens, length); keys before the new ones are whatever the pages hold."""
        rng = np.random.default_rng(seed)
        starts = np.concatenate([[0], np.cumsum([n for n, _ in shapes])])
        self.count[0], self.rows_count[0], self.wanted[0] = starts[-1], len(shapes), len(shapes)
        self.ids[: starts[-1]] = rng.integers(0, VOCAB, starts[-1])
        self.rows.query_start[: len(starts)] = starts
        for row, (new, length) in enumerate(shapes):
            self.rows.lengths[row] = length
            self.rows.page_table[row] = 1 + row * 40 + np.arange(40)
            at = np.arange(length - new, length)
            self.positions[starts[row] : starts[row + 1]] = at
            self.slots[starts[row] : starts[row + 1]] = self.rows.page_table[row][at // PAGE] * PAGE + at % PAGE
            self.index[row] = starts[row + 1] - 1


STEPS = [
    [(1, 1)],
    [(5, 5), (1, 30), (18, 18)],
    [(1, 600)],
    [(1, 7), (1, 520), (1, 300), (1, 1), (1, 33), (1, 64), (1, 65), (1, 600)],
    [(24, 24)],
]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_tape_replays_every_step(threads: int) -> None:
    with cpu_ops(threads=threads) as ops, cpu_ops(threads=2) as other:
        eager, taped = Step(other), Step(ops)
        with ops.record() as tape:
            taped.forward()
        assert len(tape) == len(tape.describe()) == 14
        assert not taped.x.any()  # recording runs nothing
        gc.collect()
        for turn in range(2):
            for seed, shapes in enumerate(STEPS):
                for step in (eager, taped):
                    step.lay_out(shapes, seed + 10 * turn)
                eager.forward()
                tape.run()
                live = len(shapes)
                assert np.isfinite(taped.logits[:live]).all()
                assert taped.logits[:live].tobytes() == eager.logits[:live].tobytes()
                assert taped.kv.k.tobytes() == eager.kv.k.tobytes()


def test_profile_gives_a_time_per_call() -> None:
    with cpu_ops() as ops:
        step = Step(ops)
        with ops.record() as tape:
            step.forward()
        step.lay_out(STEPS[1], 1)
        tape.run()
        kept = step.logits[:3].copy()
        times = tape.profile()
        assert times.shape == (14,)
        assert (times > 0).all()
        assert (step.logits[:3] == kept).all()
        assert tape.describe()[5].startswith("attention f16 [24, 192]")


def test_a_tape_keeps_its_memory_alive() -> None:
    with cpu_ops() as ops:
        with ops.record() as tape:
            x = np.full((3, 64), 2, np.float32)
            out = np.zeros((3, 64), np.float32)
            ops.add_rms_norm(x, None, np.ones(64, np.float32), eps=0.0, out=out, count=count(3))
        del x
        gc.collect()
        _ = [np.full((3, 64), 9, np.float32) for _ in range(50)]
        tape.run()
        assert (out == 1).all()


def test_what_cannot_be_recorded() -> None:
    with cpu_ops() as ops:
        x = np.ones((2, 16), np.float32)
        with ops.record():
            scratch = ops.empty((4, 4), "f32")  # a first take of scratch memory is fine
            assert scratch.shape == (4, 4)
            for call in (
                lambda: ops.host(x),
                lambda: ops.constant(x),
                lambda: ops.pack_matrix(x, compute="f32"),
                lambda: ops.copy_pages(
                    ops.kv_layer(pages=2, page_tokens=16, kv_heads=1, head_dim=16, format="f32"), x[0], x[0]
                ),
            ):
                with pytest.raises(AssertionError, match="cannot be recorded"):
                    call()
            with pytest.raises(AssertionError, match="open already"), ops.record():
                pass
        assert ops.host(x) is x
        with pytest.raises(AssertionError, match="strides"):
            ops.softcap(np.ones((4, 8), np.float32)[:, ::2], cap=1.0, count=count(1))


def test_memory() -> None:
    with cpu_ops() as ops:
        for shape, dtype in (
            ((3, 5), "f32"),
            ((0, 4), "i32"),
            ((1 << 20,), "f16"),
            ((3, 1 << 20), "u8"),
            ((2, 2), "bf16"),
            ((5,), "i64"),
        ):
            made = ops.empty(shape, dtype)
            assert made.shape == shape
            assert made.ctypes.data % 64 == 0 or made.size == 0
            assert not made.any()
            made[...] = 1
        held = ops.constant(np.arange(7))
        assert held.ctypes.data % 64 == 0
        assert held.tolist() == list(range(7))
        assert ops.host(np.array([0x3F80, 0xC000], np.uint16)).tolist() == [1.0, -2.0]
        # Two GB of pages cost nothing before they are written.
        assert ops.kv_layer(pages=1 << 15, page_tokens=16, kv_heads=4, head_dim=128, format="f32").k.nbytes == 1 << 30
