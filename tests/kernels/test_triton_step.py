"""The kernels at a step's two ends: header from host memory, sample rows, tokens back, changes of slots."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    import triton_interpreter  # noqa: F401
elif not torch.cuda.is_available():
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

from tradewind.kernels.triton import step
from tradewind.kernels.triton.graphs import Gpu

DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
ROWS, SLOTS, CONTEXT = 40, 48, 64


@pytest.fixture
def gpu():
    return Gpu(DEVICE)


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def device(gpu, values):
    return torch.from_numpy(np.ascontiguousarray(values)).to(gpu.device)


def test_header_of_the_turn_arrives_and_no_other(gpu, rng):
    ring = gpu.pinned((step.RING, step.HEADER_FIELDS, ROWS))
    ring.host[...] = rng.integers(1, 1000, ring.host.shape)
    turn, header = gpu.zeros(4)[:1], gpu.zeros(step.HEADER_FIELDS, ROWS)
    for place in range(step.RING):
        turn.fill_(place)
        step.fetch_header(ring.device, turn, header, rows=17)
        gpu.settle()
        assert np.array_equal(header.cpu().numpy()[:, :17], ring.host[place][:, :17])
        assert (header.cpu().numpy()[:, 17:] == 0).all()
    step.fetch_header(ring.device, turn, header, rows=1)  # both counts come even for one row
    assert int(header[0, step.SAMPLES_AT]) == ring.host[step.RING - 1, 0, step.SAMPLES_AT]


def test_sample_rows_name_the_last_token_and_carry_their_slots_values(gpu, rng):
    count = np.array([3, 1, 5, 1], np.int32)
    slot, start = np.array([7, 2, 30, 11], np.int32), np.array([0, 9, 20, 40], np.int32)
    wanted = np.array([1, 2, 3], np.int32)  # row 0 is a chunk that wants nothing
    header = np.zeros((step.HEADER_FIELDS, ROWS), np.int32)
    header[0, 0], header[0, step.SAMPLES_AT] = 4, 3
    header[1, :4], header[2, :4], header[3, :4], header[4, :3] = slot, start, count, wanted
    query_start = np.zeros(ROWS + 1, np.int32)
    query_start[1:5] = np.cumsum(count)
    values = np.zeros((SLOTS, step.VALUE_WORDS), np.int32)
    reals = rng.uniform(0.1, 2, (SLOTS, 6)).astype(np.float32)
    values[:, :6] = reals.view(np.int32)
    values[:, 6], values[:, 7], values[:, 8] = (
        rng.integers(0, 50, SLOTS),
        rng.integers(1, 9, SLOTS),
        np.arange(SLOTS) % 2,
    )
    seeds = rng.integers(0, 1 << 63, SLOTS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    values[:, 9:11] = seeds.view(np.int32).reshape(SLOTS, 2)
    out = step.SampleRows.allocate(8, device=gpu.device)
    step.lay_out_samples(device(gpu, header), device(gpu, query_start), device(gpu, values), out=out, columns=True)
    gpu.settle()
    live, slots, positions = slice(0, 3), slot[wanted], (start + count)[wanted]
    found = {name: getattr(out, name).cpu().numpy()[live] for name in step.SampleRows.__dataclass_fields__}
    assert found["index"].tolist() == [3, 8, 9]
    assert found["slot"].tolist() == slots.tolist()
    assert found["position"].tolist() == positions.tolist()
    for i, name in enumerate(("temperature", "top_p", "min_p", "repetition", "presence", "frequency")):
        assert np.array_equal(found[name], reals[slots, i]), name
    assert np.array_equal(found["top_k"], values[slots, 6])
    assert np.array_equal(found["prompt"], values[slots, 7])
    assert found["length"].tolist() == [int(p) if s % 2 else 0 for s, p in zip(slots, positions, strict=True)]
    assert np.array_equal(found["seed"].view(np.uint64), seeds[slots])
    assert out.index.cpu().numpy()[3:].tolist() == [0] * 5


def test_published_tokens_reach_slots_and_host_and_the_turn_moves_on(gpu):
    rows = step.SampleRows.allocate(8, device=gpu.device)
    rows.slot[:3] = torch.tensor([4, 9, 1], dtype=torch.int32, device=gpu.device)
    rows.position[:3] = torch.tensor([5, 6, 7], device=gpu.device)
    header = gpu.zeros(step.HEADER_FIELDS, ROWS)
    header[0, step.SAMPLES_AT] = 3
    tokens, ring, turn = gpu.zeros(SLOTS, CONTEXT), gpu.pinned((step.RING, ROWS)), gpu.zeros(4)[:1]
    sampled = torch.tensor([11, -1, 13, 99, 99, 99, 99, 99], dtype=torch.int32, device=gpu.device)
    for place in range(step.RING + 1):
        step.publish(sampled, rows, header, tokens=tokens, ring=ring.device, turn=turn)
        gpu.settle()
        assert ring.host[place % step.RING, :4].tolist() == [11, -1, 13, 0]
        assert int(turn[0]) == (place + 1) % step.RING
    written = tokens.cpu().numpy()
    assert written[4, 5] == 11 and written[1, 7] == 13
    assert written.sum() == 24, "a refused row writes nothing"


def test_changes_of_slots_are_written_where_they_belong(gpu, rng):
    table = gpu.zeros(SLOTS, 1000)
    truth = np.zeros((SLOTS, 1000), np.int32)
    counts = np.array([700, 1, 0, 33], np.int32)
    where = np.stack([np.array([3, 0, 9, 47], np.int32), np.cumsum(counts, dtype=np.int32) - counts, counts])
    data = rng.integers(1, 9999, counts.sum(), dtype=np.int32)
    for row, first, count in where.T:
        truth[row, :count] = data[first : first + count]
    step.write_rows(table, device(gpu, where), device(gpu, data))
    places = rng.choice(SLOTS * 1000, 600, replace=False)
    entries = np.stack([places // 1000, places % 1000, rng.integers(1, 9999, 600)]).astype(np.int32)
    truth[entries[0], entries[1]] = entries[2]
    step.write_entries(table, device(gpu, entries))
    gpu.settle()
    assert np.array_equal(table.cpu().numpy(), truth)
