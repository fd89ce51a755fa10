"""`CpuOps`: the op protocol on the C++ library, with numpy memory.

Knows: buffers, the argument words of every op, recording. Refuses to know: what the words do (csrc/), packed layouts (matrix.py), models.
An op called outside a recording runs at once as a tape of one; inside one it is only written down.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from tradewind.kernels.cpu import low_rank, matrix
from tradewind.kernels.cpu.library import Library
from tradewind.kernels.cpu.tape import Tape, Word
from tradewind.kernels.ops import (
    Activation,
    Compute,
    Count,
    KVLayer,
    LatentUp,
    LowRankBank,
    PackedExperts,
    PackedMatrix,
    PagedRows,
    Routing,
    RowTable,
    SampleColumns,
)

Array = npt.NDArray[Any]

DTYPES: dict[str, npt.DTypeLike] = {
    "bf16": np.uint16,
    "f16": np.float16,
    "f32": np.float32,
    "i32": np.int32,
    "i64": np.int64,
    "u8": np.uint8,
}
"""numpy has no bfloat16: its bits are held as uint16."""

KV_FORMATS = {"f32": 0, "f16": 1, "bf16": 2}
UP_FORMATS = {"float32": 0, "uint16": 2}
"""What makes keys and values of latents, by the type of its array (bf16 is held as uint16)."""
ROW_FORMATS = {
    name: code
    for code, name in enumerate(("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"))
}
LARGE_BYTES = 1 << 20
"""From here on memory comes straight from the system: untouched pages cost nothing. Huge pages are not asked for: attention got no faster
with them (it prefetches), and 60 KV buffers of which a short prompt touches the start would hold 2 MB each."""
MOST_EXPERTS = 1024
"""As in csrc/moe.cpp."""
MOST_ROPE = 1024
"""As in csrc/latent.cpp."""
SAMPLE_PIECE = 4096
SAMPLE_PIECE_BYTES = 272
"""One record per piece of the vocabulary in the scratch of `sample`; the same constants as in csrc/sample.cpp."""
PART_SCRATCH_BYTES = 64 << 20
"""Room for the parts of long rows that several threads share (`attention`); only what is used is ever touched."""


class CpuOps:
    """Op set "cpu". Owns a team of threads; not for use by two Python threads at once. Call `close` when done."""

    name = "cpu"
    activation = "f32"

    def __init__(self, library: Library, *, threads: int, isa: int | None = None, activation_terms: int = 1) -> None:
        """threads: of the team, the caller included. isa: an index of library.ISAS to stay at or below; None takes the machine's best.

        activation_terms: int8 terms of an activation that meets quantised weights, 1 (compute int8) or 2 (int16).
        """
        assert activation_terms in (1, 2), activation_terms
        self._terms = activation_terms
        self.library = library
        self.team = library.team(threads=threads, isa=isa)
        self._recording: Tape | None = None
        self._parts = self.empty((PART_SCRATCH_BYTES,), "u8")
        self._matmul_scratch = self.empty((matrix.LINE,), "u8")
        self._sample_scratch = self.empty((matrix.LINE,), "u8")

    def close(self) -> None:
        """Ends the team's threads; buffers stay. Calling it again does nothing."""
        self.team.close()

    @contextmanager
    def record(self) -> Iterator[Tape]:
        """Records the compute ops of the block on a new tape instead of running them."""
        assert self._recording is None, "a recording is open already"
        self._recording = tape = Tape(self.library, self.team)
        try:
            yield tape
        finally:
            self._recording = None

    def _call(self, name: str, *arguments: Word, label: str = "", alive: tuple[Any, ...] = ()) -> None:
        if self._recording is not None:
            self._recording.add(name, arguments, label=label, alive=alive)
            return
        tape = Tape(self.library, self.team)
        tape.add(name, arguments, alive=alive)
        tape.run()

    # ------------------------------------------------------------------------------------------------------------ memory

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Zeros on a cache line. Large ones are untouched pages of the system."""
        kind = np.dtype(DTYPES[dtype])
        nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        if nbytes < LARGE_BYTES:
            memory = np.zeros(nbytes + matrix.LINE, np.uint8)
            start = -memory.ctypes.data % matrix.LINE
            return memory[start : start + nbytes].view(kind).reshape(shape)
        # Python's default is shared memory, which a container may count and limit apart.
        if hasattr(mmap, "MAP_PRIVATE"):
            pages = mmap.mmap(
                -1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            )
        else:
            pages = mmap.mmap(-1, nbytes)
        return np.frombuffer(pages, np.uint8, nbytes).view(kind).reshape(shape)

    def release(self, memory: Array) -> None:
        """Gives the system back what a large array of `empty` occupies: it is untouched zeros again. Small ones stay as they are."""
        if memory.nbytes < LARGE_BYTES or not hasattr(mmap, "MADV_DONTNEED"):
            return
        base: Any = memory
        while isinstance(base, np.ndarray):
            base = base.base
        pages = base.obj if isinstance(base, memoryview) else base
        assert isinstance(pages, mmap.mmap), f"this array lies in {type(pages).__name__}, not in pages of its own"
        pages.madvise(mmap.MADV_DONTNEED)

    def constant(self, values: npt.NDArray[Any]) -> Array:
        self._outside_recording("constant")
        copy = matrix.aligned_bytes(values.nbytes).view(values.dtype).reshape(values.shape)
        copy[...] = values
        return copy

    def host(self, values: Array) -> npt.NDArray[Any]:
        """The array itself; bf16 (held as uint16) as float32."""
        self._outside_recording("host")
        if values.dtype == np.uint16:
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values

    def _outside_recording(self, what: str) -> None:
        assert self._recording is None, f"{what} is not part of a step: it cannot be recorded"

    # ----------------------------------------------------------------------------------------------------------- packing

    def pack_matrix(self, weights: npt.NDArray[np.float32], *, compute: Compute) -> PackedMatrix:
        self._outside_recording("pack_matrix")
        if compute == "f32":
            return matrix.pack_f32(self.library.handle, weights, threads=self.team.threads)
        if compute == "bf16":
            return matrix.pack_bf16(self.library.handle, weights, threads=self.team.threads)
        n, k = weights.shape
        assert k % 32 == 0, f"int8 compute needs K in whole groups of 32, not {k}"
        groups = np.ascontiguousarray(weights, np.float32).reshape(n, k // 32, 32)
        # The scale is rounded to float16 (with it 8-bit quants take 8.5 bits a value); the quants are chosen for the rounded one.
        largest = np.abs(groups).max(-1)
        scale = np.minimum(largest / np.float32(127), np.float32(65504)).astype(np.float16).astype(np.float32)
        quants = np.rint(groups / np.where(scale > 0, scale, np.float32(1))[..., None]).clip(-127, 127)
        return self.pack_quant((quants + 128).astype(np.uint8).reshape(n, k), scale, np.float32(-128) * scale, bits=8)

    def pack_quant(
        self,
        quants: npt.NDArray[np.uint8],
        scale: npt.NDArray[np.float32],
        minimum: npt.NDArray[np.float32],
        *,
        bits: int,
    ) -> PackedMatrix:
        self._outside_recording("pack_quant")
        return matrix.pack_quant(self.library.handle, quants, scale, minimum, bits, threads=self.team.threads)

    def pack_blocks(self, raw: npt.NDArray[np.uint8], format: str, *, n: int, k: int) -> PackedMatrix:
        self._outside_recording("pack_blocks")
        return matrix.pack_blocks(self.library.handle, raw, format, n, k, threads=self.team.threads)

    def pack_gated(self, gate: PackedMatrix, up: PackedMatrix) -> PackedMatrix:
        self._outside_recording("pack_gated")
        return matrix.pack_gated(self.library.handle, gate, up, threads=self.team.threads)

    def pack_stacked(self, parts: tuple[PackedMatrix, ...]) -> PackedMatrix:
        self._outside_recording("pack_stacked")
        return matrix.pack_stacked(self.library.handle, parts, threads=self.team.threads)

    def pack_experts(self, parts: Iterable[PackedMatrix], *, experts: int) -> PackedExperts:
        self._outside_recording("pack_experts")
        matrices = tuple(parts)
        assert len(matrices) == experts, (len(matrices), experts)
        return matrix.pack_experts(matrices)

    def row_table(self, raw: npt.NDArray[np.uint8], format: str, *, rows: int, cols: int) -> RowTable:
        """Keeps the bytes as they are (a view of a mapped file stays one). Raises ValueError for a wrong number of bytes."""
        assert format in ROW_FORMATS, f"no rows of format {format}"
        data = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
        if rows * cols == 0 or data.nbytes % rows:
            raise ValueError(f"{data.nbytes} bytes are not {rows} rows of {cols} values in {format}")
        return RowTable(format=format, rows=rows, cols=cols, data=data, nbytes=data.nbytes)

    def kv_layer(self, *, pages: int, page_tokens: int, kv_heads: int, head_dim: int, format: str) -> KVLayer:
        assert page_tokens % 16 == 0, f"a page holds whole vectors of 16 keys, not {page_tokens}"
        assert head_dim % 16 == 0, f"a head has whole vectors of 16 dims, not {head_dim}"
        assert format in KV_FORMATS, f"no KV pages of format {format}"
        return KVLayer(
            k=self.empty((pages, kv_heads, page_tokens // 16, head_dim, 16), format),
            v=self.empty((pages, kv_heads, page_tokens, head_dim), format),
            pages=pages,
            page_tokens=page_tokens,
            kv_heads=kv_heads,
            head_dim=head_dim,
            format=format,
        )

    def latent_layer(self, *, pages: int, page_tokens: int, width: int, format: str) -> KVLayer:
        assert page_tokens % 16 == 0, f"a page holds whole vectors of 16 latents, not {page_tokens}"
        assert width % 16 == 0, f"a latent has whole vectors of 16 numbers, not {width}"
        assert format in KV_FORMATS, f"no KV pages of format {format}"
        return KVLayer(
            k=self.empty((pages, page_tokens, width), format), v=self.empty((pages, 0), format), pages=pages, page_tokens=page_tokens,
            kv_heads=1, head_dim=width, format=format,
        )  # fmt: skip

    def pack_latent(self, keys: npt.NDArray[np.float32], values: npt.NDArray[np.float32]) -> LatentUp:
        """float32, or bf16 where that holds every value exactly (a checkpoint in bf16)."""
        self._outside_recording("pack_latent")
        (heads, nope, rank), value = keys.shape, values.shape[1]
        assert rank % 16 == value % 16 == 0, f"latents of {rank} and values of {value} must be whole vectors of 16"
        parts = [np.ascontiguousarray(each, np.float32) for each in (keys, values.swapaxes(1, 2))]
        if not any((part.view(np.uint32) & 0xFFFF).any() for part in parts):
            data = tuple(self.constant((part.view(np.uint32) >> 16).astype(np.uint16)) for part in parts)
        else:
            data = tuple(self.constant(part) for part in parts)
        nbytes = sum(part.nbytes for part in data)
        return LatentUp(heads=heads, nope=nope, value=value, rank=rank, data=data, nbytes=nbytes)

    def low_rank_bank(self, *, slots: int, rank: int, sizes: tuple[int, ...], k: int, exact: bool) -> LowRankBank:
        return low_rank.new_bank(self.empty, slots=slots, rank=rank, sizes=sizes, k=k, exact=exact)

    def set_low_rank(
        self, bank: LowRankBank, slot: int, part: int, a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]
    ) -> None:
        self._outside_recording("set_low_rank")
        low_rank.write(bank, slot, part, a, b)

    # ----------------------------------------------------------------------------------------------------------- compute

    def embed(self, ids: Array, table: RowTable, *, scale: float, out: Array, count: Count) -> None:
        _check(out, count, ids)
        self._call(
            "embed", ids, table.data, ROW_FORMATS[table.format], table.cols, table.nbytes // table.rows, table.rows, float(scale), out,
            count,
            label=f"embed {table.format} [{len(ids)}, {table.cols}]",
        )  # fmt: skip

    def add_rms_norm(
        self, x: Array, delta: Array | None, weight: Array, *, eps: float, out: Array, count: Count
    ) -> None:
        _check(x, delta, weight, out, count)
        self._call(
            "add_rms_norm", x, delta, weight, x.shape[1], float(eps), out, count, label=f"add_rms_norm {list(x.shape)}"
        )

    def add_layer_norm(
        self, x: Array, delta: Array | None, weight: Array, bias: Array, *, eps: float, out: Array, count: Count
    ) -> None:
        _check(x, delta, weight, bias, out, count)
        self._call(
            "add_layer_norm", x, delta, weight, bias, x.shape[1], float(eps), out, count,
            label=f"add_layer_norm {list(x.shape)}",
        )  # fmt: skip

    def add(self, x: Array, delta: Array | None, *, gate: Array | None, out: Array | None, count: Count) -> None:
        _check(x, delta, gate, out, count)
        assert gate is None or (delta is not None and gate.shape[1] == 1), "a gate is one number a row, for a delta"
        self._call("add", x, delta, gate, x.shape[1], out, count, label=f"add {list(x.shape)}")

    def rms_norm_span(self, x: Array, weight: Array, *, start: int, eps: float, count: Count) -> None:
        _check(x, weight, count)
        assert 0 <= start <= start + len(weight) <= x.shape[1], (start, weight.shape, x.shape)
        self._call(
            "rms_norm_span", x, x.shape[1], start, weight, len(weight), float(eps), count,
            label=f"rms_norm_span {list(x.shape)} {start}+{len(weight)}",
        )  # fmt: skip

    def scale(self, x: Array, *, factor: float, count: Count) -> None:
        _check(x, count)
        self._call("scale", x, x.shape[1], float(factor), count, label=f"scale {list(x.shape)}")

    def temper(self, x: Array, positions: Array, *, every: int, slope: float, count: Count) -> None:
        _check(x, positions, count)
        assert every >= 1, every
        self._call(
            "temper", x, x.shape[1], positions, every, float(slope), count, label=f"temper {list(x.shape)}"
        )  # fmt: skip

    def gelu(self, x: Array, *, count: Count) -> None:
        _check(x, count)
        self._call("gelu", x, x.shape[1], count, label=f"gelu {list(x.shape)}")

    def linear(self, x: Array, weight: PackedMatrix, *, bias: Array | None, out: Array, count: Count) -> None:
        _check(x, bias, out, count)
        assert x.shape[1] == weight.k, f"{x.shape} by a matrix [{weight.n}, {weight.k}]"
        assert out.shape[1] == weight.n, f"{out.shape} from a matrix [{weight.n}, {weight.k}]"
        scratch = self._scratch_for(weight, len(x))
        words = matrix.linear_words(
            _address(x),
            x.shape[1],
            weight,
            _address(bias),
            _address(out),
            out.shape[1],
            _address(count),
            _address(scratch),
            self._terms,
        )
        self._call(
            "linear", *words, label=f"linear {_kind(weight)} [{len(x)}, {weight.k}] -> {weight.n}",
            alive=(x, weight, bias, out, count, scratch),
        )  # fmt: skip

    def gated_linear(
        self, x: Array, weight: PackedMatrix, *, activation: Activation, bias: Array | None, out: Array, count: Count
    ) -> None:
        _check(x, bias, out, count)
        assert x.shape[1] == weight.k, f"{x.shape} by a matrix [{weight.n}, {weight.k}]"
        assert 2 * out.shape[1] == weight.n, f"{out.shape} from a gated matrix [{weight.n}, {weight.k}]"
        scratch = self._scratch_for(weight, len(x))
        words = matrix.gated_linear_words(
            _address(x),
            x.shape[1],
            weight,
            _address(bias),
            _address(out),
            out.shape[1],
            _address(count),
            _address(scratch),
            activation,
            self._terms,
        )
        self._call(
            "gated_linear", *words, label=f"gated_linear {_kind(weight)} [{len(x)}, {weight.k}] -> {weight.n // 2}",
            alive=(x, weight, bias, out, count, scratch),
        )  # fmt: skip

    def _scratch_for(self, weight: PackedMatrix, rows: int) -> Array:
        return self._scratch_of(matrix.scratch_bytes(self.library.handle, weight, rows, terms=self._terms))

    def _scratch_of(self, needed: int) -> Array:
        """Scratch that every matmul shares, since ops run in turn. Growing leaves the old one to the tapes that know it."""
        if needed > self._matmul_scratch.nbytes:
            self._matmul_scratch = self.empty((needed,), "u8")
        return self._matmul_scratch

    def route(
        self, logits: Array, routing: Routing, *, bias: Array | None, ids: Array, weights: Array, count: Count
    ) -> None:
        _check(logits, bias, ids, weights, count)
        experts, r = logits.shape[1], routing
        assert experts <= MOST_EXPERTS, experts
        assert experts % r.groups == 0, (experts, r)
        assert 0 < r.groups_kept <= r.groups, r
        assert 0 < r.top_k <= experts // r.groups * r.groups_kept, (experts, r)
        assert ids.shape[1] == weights.shape[1] == r.top_k, (ids.shape, weights.shape, r)
        self._call(
            "route", logits, experts, bias, ids, weights, r.top_k, int(r.score == "sigmoid"), int(r.normalise), float(r.scale), r.groups,
            r.groups_kept, r.group_top, count, label=f"route {r.top_k} of {experts}",
        )  # fmt: skip

    def experts(
        self,
        x: Array,
        ids: Array,
        weights: Array,
        gate_up: PackedExperts,
        down: PackedExperts,
        *,
        activation: Activation,
        gate_up_bias: Array | None,
        down_bias: Array | None,
        out: Array,
        count: Count,
        weigh_input: bool = False,
    ) -> None:
        _check(x, ids, weights, gate_up_bias, down_bias, out, count)
        assert gate_up.gated, "gate and up of an expert are one gated matrix"
        assert (x.shape[1], gate_up.n, down.n) == (gate_up.k, 2 * down.k, out.shape[1]), (x.shape, gate_up.n, down.n)
        assert gate_up.experts == down.experts, (gate_up.experts, down.experts)
        chosen = ids.shape[1]
        scratch = self._scratch_of(
            matrix.experts_scratch_bytes(self.library.handle, gate_up, down, len(x) * chosen, terms=self._terms)
        )
        self._call(
            "experts", x, ids, weights, chosen, gate_up.experts, gate_up.data[0], down.data[0], gate_up_bias, down_bias,
            matrix.activation_code(activation), int(weigh_input), out, scratch, self._terms, count,
            label=f"experts {gate_up.layout} [{len(x)}, {gate_up.k}] -> {chosen} of {gate_up.experts} x {down.k}",
            alive=(gate_up, down),
        )  # fmt: skip

    def rope_angles(self, positions: Array, inv_freq: Array, *, scale: float, out: Array, count: Count) -> None:
        _check(positions, inv_freq, out, count)
        assert out.shape[1] == 2 * len(inv_freq), (out.shape, inv_freq.shape)
        self._call(
            "rope_angles",
            positions,
            inv_freq,
            len(inv_freq),
            float(scale),
            out,
            count,
            label=f"rope_angles {list(out.shape)}",
        )

    def rope_angles_axes(
        self, positions: Array, axes: Array, inv_freq: Array, *, scale: float, out: Array, count: Count
    ) -> None:
        _check(positions, axes, inv_freq, out, count)
        assert out.shape == (positions.shape[1], 2 * len(inv_freq)), (out.shape, positions.shape, inv_freq.shape)
        assert axes.shape == inv_freq.shape, (axes.shape, inv_freq.shape)
        self._call(
            "rope_angles_axes", positions, positions.shape[1], axes, inv_freq, len(inv_freq), float(scale), out, count,
            label=f"rope_angles_axes {list(out.shape)}",
        )  # fmt: skip

    def rope_store(
        self,
        qkv: Array,
        angles: Array,
        write_slots: Array,
        kv: KVLayer,
        *,
        heads: int,
        q_weight: Array | None,
        k_weight: Array | None,
        eps: float,
        out: Array,
        count: Count,
    ) -> None:
        _check(qkv, angles, write_slots, q_weight, k_weight, out, count)
        assert qkv.shape[1] == (heads + 2 * kv.kv_heads) * kv.head_dim, (qkv.shape, heads, kv.kv_heads, kv.head_dim)
        assert angles.shape[1] <= kv.head_dim <= 1024, (angles.shape, kv.head_dim)
        self._call(
            "rope_store", qkv, angles, angles.shape[1], write_slots, kv.k, kv.v, KV_FORMATS[kv.format], kv.page_tokens, kv.kv_heads,
            kv.head_dim, heads, q_weight, k_weight, float(eps), out, count, label=f"rope_store {kv.format} {list(qkv.shape)}",
        )  # fmt: skip

    def attention(
        self,
        q: Array,
        kv: KVLayer,
        rows: PagedRows,
        *,
        heads: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Array | None,
        out: Array,
        causal: bool = True,
        chunked: bool = False,
    ) -> None:
        _check(q, rows.query_start, rows.lengths, rows.page_table, rows.rows, sinks, out)
        assert q.shape[1] == heads * kv.head_dim, (q.shape, heads, kv.head_dim)
        assert heads % kv.kv_heads == 0, (heads, kv.kv_heads)
        assert causal or window is None, "a window looks back: it is for causal attention"
        assert window is not None or not chunked, "chunks are windows"
        self._call(
            "attention", q, kv.k, kv.v, KV_FORMATS[kv.format], kv.page_tokens, kv.kv_heads, heads, kv.head_dim, rows.query_start,
            rows.lengths, rows.page_table, rows.page_table.shape[1], rows.rows, float(scale), (window or 0) if causal else -1,
            int(chunked), float(softcap or 0), sinks, out, self._parts, self._parts.nbytes,
            label=f"attention {kv.format} {list(q.shape)} x{rows.page_table.shape[1] * kv.page_tokens}",
        )  # fmt: skip

    def latent_store(
        self,
        q: Array,
        latent: Array,
        angles: Array,
        write_slots: Array,
        kv: KVLayer,
        *,
        heads: int,
        weight: Array,
        eps: float,
        count: Count,
    ) -> None:
        _check(q, latent, angles, write_slots, weight, count)
        rank, rope = len(weight), angles.shape[1]
        assert latent.shape[1] == kv.head_dim == rank + rope, (latent.shape, kv.head_dim, rank, rope)
        assert rope <= MOST_ROPE, rope
        self._call(
            "latent_store", q, latent, angles, rope, write_slots, kv.k, KV_FORMATS[kv.format], kv.head_dim, heads, q.shape[1] // heads,
            weight, rank, float(eps), count, label=f"latent_store {kv.format} {list(latent.shape)}",
        )  # fmt: skip

    def latent_attention(
        self, q: Array, kv: KVLayer, rows: PagedRows, up: LatentUp, *, scale: float, out: Array
    ) -> None:
        _check(q, rows.query_start, rows.lengths, rows.page_table, rows.rows, out)
        tokens, rope = len(q), kv.head_dim - up.rank
        assert q.shape[1] == up.heads * (up.nope + rope), (q.shape, up.heads, up.nope, rope)
        assert out.shape[1] == up.heads * up.value, (out.shape, up.heads, up.value)
        absorbed = tokens * up.heads * kv.head_dim * 4
        scratch = self._scratch_of(absorbed + tokens * up.heads * up.rank * 4)
        self._call(
            "latent_attention", q, kv.k, KV_FORMATS[kv.format], kv.page_tokens, up.heads, up.rank, rope, up.nope, up.value, up.data[0],
            up.data[1], UP_FORMATS[up.data[0].dtype.name], rows.query_start, rows.lengths, rows.page_table, rows.page_table.shape[1],
            rows.rows, float(scale), out, scratch[:absorbed], scratch[absorbed:], self._parts, self._parts.nbytes,
            label=f"latent_attention {kv.format} {list(q.shape)} x{rows.page_table.shape[1] * kv.page_tokens}",
            alive=(up,),
        )  # fmt: skip

    def add_low_rank(self, x: Array, bank: LowRankBank, adapters: Array, *, out: Array, count: Count) -> None:
        _check(x, adapters, out, count)
        assert x.shape[1] == bank.k, (x.shape, bank.k)
        assert out.shape[1] == sum(bank.sizes), (bank.sizes, out.shape)
        a, b, sizes, used = bank.data
        rank, parts = b.shape[2], len(bank.sizes)
        inner = self._scratch_of(len(x) * parts * rank * 4)
        self._call(
            "add_low_rank", x, bank.k, a, b, int(a.dtype != np.float32), rank, parts, sizes, used, adapters, bank.slots, out,
            out.shape[1], inner, count,
            label=f"add_low_rank [{len(x)}, {bank.k}] -> {bank.rank} -> {list(bank.sizes)}, {bank.slots} adapters",
        )  # fmt: skip

    def glue(self, x: Array, *, activation: Activation, out: Array, count: Count) -> None:
        _check(x, out, count)
        assert x.shape[1] == 2 * out.shape[1], (x.shape, out.shape)
        self._call(
            "glue", x, out.shape[1], matrix.activation_code(activation), out, count, label=f"glue {activation} {list(out.shape)}"
        )  # fmt: skip

    def gather_rows(self, x: Array, index: Array, *, out: Array, count: Count) -> None:
        _check(x, index, out, count)
        assert x.shape[1] == out.shape[1], (x.shape, out.shape)
        self._call("gather_rows", x, index, x.shape[1], out, count, label=f"gather_rows {list(out.shape)}")

    def softcap(self, x: Array, *, cap: float, count: Count) -> None:
        _check(x, count)
        self._call("softcap", x, x.shape[1], float(cap), count, label=f"softcap {list(x.shape)}")

    def sample(self, logits: Array, columns: SampleColumns, *, out: Array, count: Count) -> None:
        c = columns
        fields = (
            c.temperature, c.top_k, c.top_p, c.min_p, c.repetition, c.presence, c.frequency, c.seed, c.position, c.history,
            c.history_prompt, c.history_length, c.bias_start, c.bias_token, c.bias_value, c.mask,
        )  # fmt: skip
        _check(logits, *fields, out, count)
        rows, vocab = logits.shape
        needed = rows * -(-vocab // SAMPLE_PIECE) * SAMPLE_PIECE_BYTES
        if needed > self._sample_scratch.nbytes:
            self._sample_scratch = self.empty((needed,), "u8")
        self._call(
            "sample",
            logits,
            vocab,
            *fields,
            out,
            self._sample_scratch,
            count,
            label=f"sample {list(logits.shape)}",
            alive=(columns,),
        )

    def logprobs(
        self,
        logits: Array,
        tokens: Array,
        *,
        top: int,
        out_logprob: Array,
        out_rank: Array,
        out_ids: Array,
        out_top: Array,
        count: Count,
    ) -> None:
        _check(logits, tokens, out_logprob, out_rank, out_ids, out_top, count)
        assert 0 <= top <= logits.shape[1], (top, logits.shape)
        self._call(
            "logprobs", logits, logits.shape[1], tokens, top, out_logprob, out_rank, out_ids, out_top, count,
            label=f"logprobs {list(logits.shape)} top {top}",
        )  # fmt: skip

    def copy_pages(self, kv: KVLayer, source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> None:
        self._outside_recording("copy_pages")
        source, target = (np.ascontiguousarray(ids, np.int32) for ids in (source, target))
        assert len(source) == len(target), (source, target)
        assert not np.isin(source, target).any(), "a page cannot be source and target of one copy"
        for pages in (kv.k, kv.v):
            self._call("copy_pages", pages, pages[0].nbytes, source, target, len(source))


def _kind(weight: PackedMatrix) -> str:
    return f"quant{weight.bits}" if weight.layout == "quant" else weight.layout


def _address(array: Array | None) -> int:
    address: int = 0 if array is None else array.__array_interface__["data"][0]
    return address


def _check(*arrays: Array | None) -> None:
    """The library reads plain memory: a strided view would be read wrongly."""
    for array in arrays:
        assert array is None or array.flags.c_contiguous, (
            f"an array with strides {array.strides} and shape {array.shape}"
        )
