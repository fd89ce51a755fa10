"""`CudaOps`: the op protocol on one NVIDIA GPU, with torch tensors.

Knows: memory, packing, recording. Refuses to know: kernels and fusion (planning.py), models, files. Weights are bf16, or e4m3 with a
float32 scale per output; gated ones are gate's rows, then up's. Under Triton's interpreter the same runs on the CPU (device="cpu").

Inside `record` compute ops are written down; outside one runs at once, by itself. Memory and packing never belong to a recording.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
from tradewind.kernels.triton import blocks, low_rank, upload
from tradewind.kernels.triton import sample as sampling
from tradewind.kernels.triton.compilers import Compilers
from tradewind.kernels.triton.launch import FP8
from tradewind.kernels.triton.planning import plan
from tradewind.kernels.triton.program import Bucket, SideStreams
from tradewind.kernels.triton.tape import Tape
from tradewind.kernels.triton.tuning import AttentionWays, Tuning, tuned
from tradewind.kernels.triton.workspace import Workspace

DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "fp8": FP8,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
}
KV_FORMATS = ("bf16", "f16", "f32", "fp8")
PLAIN_FORMATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Formats that the device widens or rounds by itself, without passing through float32 on the host."""


class CudaOps:
    """Op set "cuda" of one device. Not for use by two threads at once, and its programs never run side by side: they share scratch."""

    name = "cuda"
    activation = "bf16"
    compilers: Compilers | None = None
    """Processes that compile kernels; whoever prepares kernels with them closes them."""
    keeps_fp8_blocks = True
    """Loaders hand FP8 with scales by blocks over as it is stored (`pack_stored_blocks`)."""

    def __init__(
        self,
        *,
        device: str = "cuda",
        deterministic: bool = False,
        read_blocks: upload.ReadBlocks | None = None,
        tuning: Tuning | None = None,
        pdl: bool | None = None,
        ways: AttentionWays | None = None,
    ) -> None:
        """deterministic: a row's bits do not depend on the other rows of a step. read_blocks: how block formats become float32; without
        it only F32, F16 and BF16 are read. pdl: dependent launches, by default on a GPU. ways: attention in steps of
        mixed work, by default as measured."""
        self.device = torch.device(device)
        self.deterministic = deterministic
        self.pdl = self.device.type == "cuda" if pdl is None else pdl
        self.tuning = tuning or tuned(
            torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "no GPU"
        )
        self.ways = ways or AttentionWays()
        self.workspace = Workspace(self.device)
        self._read_blocks = read_blocks or _no_blocks
        self.uploader = upload.Uploader(self.device, read_blocks=self._read_blocks)
        self._recording: Tape | None = None
        self._side = SideStreams(self.device) if self.device.type == "cuda" else None

    # --------------------------------------------------------------------------------------------------------- recording

    @contextmanager
    def record(self) -> Iterator[Tape]:
        """Writes the compute ops of the block on a new tape instead of running them."""
        assert self._recording is None, "a recording is open already"
        self._recording = tape = Tape(self)
        try:
            yield tape
        finally:
            self._recording = None

    def _call(self, op: str, *, tokens: int, **arguments: Any) -> None:
        if self._recording is not None:
            self._recording.add(op, arguments)
            return
        if isinstance(arguments.get("count"), np.ndarray):
            arguments["count"] = self.constant(arguments["count"])
        rows, kv = arguments.get("rows"), arguments.get("kv")
        sequences = longest = 1
        if rows is not None:
            if isinstance(rows.rows, np.ndarray):
                arguments["rows"] = rows = replace(rows, rows=self.constant(rows.rows))
            sequences, longest = len(rows.lengths), rows.page_table.shape[1] * kv.page_tokens
        tape = Tape(self)
        tape.add(op, arguments)
        bucket = Bucket(tokens=tokens, rows=sequences, singles=False, longest=longest, adapted=True)
        plan(tape, bucket, fuse=False).run()

    def _outside_recording(self, what: str) -> None:
        assert self._recording is None, f"{what} is not part of a step: it cannot be recorded"

    def side_streams(self) -> SideStreams | None:
        """Where lane 1 of programs runs; None where there is one stream only."""
        return self._side

    def workspace_bytes(self) -> int:
        """Scratch that programs have asked for so far."""
        return self.workspace.bytes

    # ------------------------------------------------------------------------------------------------------------ memory

    def empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Zeros on the device."""
        return torch.zeros(shape, dtype=DTYPES[dtype], device=self.device)

    def constant(self, values: npt.NDArray[Any]) -> Tensor:
        self._outside_recording("constant")
        return torch.from_numpy(np.array(values, order="C")).to(self.device)

    def host(self, values: Any) -> npt.NDArray[Any]:
        """A copy in the host's memory; bf16 and fp8 as float32. Waits for the device."""
        self._outside_recording("host")
        if isinstance(values, np.ndarray):
            return values
        wide = values.float() if values.dtype in (torch.bfloat16, FP8) else values
        found: npt.NDArray[Any] = wide.to("cpu", copy=True).numpy()
        return found

    def kv_layer(self, *, pages: int, page_tokens: int, kv_heads: int, head_dim: int, format: str) -> KVLayer:
        """Pages [pages, G, B, D]: one head of a page is one contiguous piece."""
        assert format in KV_FORMATS, f"no KV pages of format {format}"
        shape = (pages, kv_heads, page_tokens, head_dim)
        return KVLayer(
            k=self.empty(shape, format),
            v=self.empty(shape, format),
            pages=pages,
            page_tokens=page_tokens,
            kv_heads=kv_heads,
            head_dim=head_dim,
            format=format,
        )

    def latent_layer(self, *, pages: int, page_tokens: int, width: int, format: str) -> KVLayer:
        """Pages [pages, B, C + R], bf16; v is empty."""
        assert format == "bf16", f"no pages of latents of format {format}"
        return KVLayer(
            k=self.empty((pages, page_tokens, width), format),
            v=self.empty((pages, 0), format),
            pages=pages,
            page_tokens=page_tokens,
            kv_heads=1,
            head_dim=width,
            format=format,
        )

    def copy_pages(self, kv: KVLayer, source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> None:
        self._outside_recording("copy_pages")
        places = [torch.from_numpy(np.array(ids, np.int64)).to(self.device) for ids in (source, target)]
        for pages in (kv.k, kv.v) if kv.v.numel() else (kv.k,):
            raw = _raw(pages)
            raw.index_copy_(0, places[1], raw.index_select(0, places[0]))

    # ----------------------------------------------------------------------------------------------------------- packing

    def _moved(self, values: npt.NDArray[Any] | Tensor) -> Tensor:
        """The values on the device, in their own type."""
        self._outside_recording("packing")
        if isinstance(values, np.ndarray):
            # torch warns of arrays that it could write to and should not: mapped files.
            values = torch.from_numpy(values if values.flags.writeable else np.array(values, order="C"))
        return values.to(self.device)

    def _values(self, raw: npt.NDArray[np.uint8], format: str, shape: tuple[int, int]) -> Tensor:
        """bf16 values of a tensor as it lies in a file."""
        kind = PLAIN_FORMATS.get(format)
        if kind is not None:
            flat = self._moved(np.ascontiguousarray(raw).reshape(-1).view(np.uint8))
            return flat.view(kind).view(shape).to(torch.bfloat16)
        return self._moved(self._read_blocks(raw, format, shape)).to(torch.bfloat16)

    def pack_matrix(self, weights: npt.NDArray[np.float32] | Tensor, *, compute: Compute = "bf16") -> PackedMatrix:
        """Rounds an [N, K] matrix to bf16."""
        assert compute == "bf16", f"the GPU multiplies in bf16 (or fp8, see pack_fp8), not {compute}"
        return packed(self._moved(weights).to(torch.bfloat16))

    def pack_fp8(self, weights: npt.NDArray[np.float32] | Tensor) -> PackedMatrix:
        """Quantises an [N, K] matrix to e4m3 with one scale per output, absmax / 448. Sides that are no multiples of 16 (the library's
        rule) leave it bf16."""
        values = self._moved(weights)
        if any(side % 16 for side in values.shape):
            return packed(values.to(torch.bfloat16))
        return upload.pack_fp8(values)

    def pack_fp8_block(self, weights: npt.NDArray[np.float32] | Tensor) -> PackedMatrix:
        """Quantises an [N, K] matrix to e4m3 with one scale for each block of 128 x 128. Sides that are no multiples of 16 leave it
        bf16."""
        values = self._moved(weights)
        if not blocks.fits(*values.shape):
            return packed(values.to(torch.bfloat16))
        n, k = values.shape
        stored = torch.empty(n, k, dtype=FP8, device=self.device)
        scale = torch.empty(n // blocks.ROWS, blocks.parts(k), dtype=torch.float32, device=self.device)
        blocks.quantise_blocks(values, stored, scale)
        return upload.block_matrix(stored, scale, gated=False)

    def pack_quant(
        self,
        quants: npt.NDArray[np.uint8],
        scale: npt.NDArray[np.float32],
        minimum: npt.NDArray[np.float32],
        *,
        bits: int,
    ) -> PackedMatrix:
        """Dequantises to bf16."""
        n, k = quants.shape
        groups = self._moved(quants).view(*scale.shape, -1).float()
        values = groups * self._moved(scale)[..., None] + self._moved(minimum)[..., None]
        return packed(values.view(n, k).to(torch.bfloat16))

    def pack_blocks(self, raw: npt.NDArray[np.uint8], format: str, *, n: int, k: int) -> PackedMatrix:
        """Dequantises to bf16."""
        return packed(self._values(raw, format, (n, k)))

    def pack_gated(self, gate: PackedMatrix, up: PackedMatrix) -> PackedMatrix:
        """Gate's rows, then up's."""
        assert (gate.layout, gate.n, gate.k) == (up.layout, up.n, up.k), (
            f"gate [{gate.n}, {gate.k}] {gate.layout} and up [{up.n}, {up.k}] {up.layout} make no pair"
        )
        return replace(self.pack_stacked((gate, up)), gated=True)

    def pack_stacked(self, parts: tuple[PackedMatrix, ...]) -> PackedMatrix:
        first = parts[0]
        assert all((part.layout, part.k) == (first.layout, first.k) for part in parts), "parts of different layouts"
        # e4m3 is joined as bytes: torch does not concatenate it everywhere.
        whole = torch.cat([_raw(part.data[0]) for part in parts])
        if first.layout == "bf16":
            return packed(whole)
        scales = torch.cat([part.data[1] for part in parts])
        if first.layout == "fp8_block":
            return upload.block_matrix(whole.view(FP8), scales, gated=False)
        return packed(whole.view(FP8), scales)

    def pack_experts(self, parts: Iterable[PackedMatrix], *, experts: int) -> PackedExperts:
        """Tensors [X, N, K] (fp8: and scales [X, N], by blocks [X, N / 16, K / 128]). Parts that are still being uploaded have been given
        their place here from the start; others are copied to it."""
        self._outside_recording("pack_experts")
        first: PackedMatrix | None = None
        number = 0
        with self.uploader.stacking(experts) as stacks:
            source = iter(parts)
            stacks.begin(0)
            while (part := next(source, None)) is not None:
                first = first or part
                alike = (part.layout, part.n, part.k, part.gated) == (first.layout, first.n, first.k, first.gated)
                assert number < experts and alike, f"expert {number} of {experts}: [{part.n}, {part.k}] {part.layout}"
                for index, values in enumerate(part.data):
                    place = stacks.place(index, tuple(values.shape), values.dtype)
                    if place.data_ptr() != values.data_ptr():
                        _raw(place).copy_(_raw(values))
                number += 1
                stacks.begin(number)
        assert first is not None and number == experts, f"{number} of {experts} experts"
        return PackedExperts(
            experts=experts, n=first.n, k=first.k, layout=first.layout, gated=first.gated, data=tuple(stacks.wholes),
            nbytes=sum(whole.nbytes for whole in stacks.wholes),
        )  # fmt: skip

    def pack_latent(self, keys: npt.NDArray[np.float32], values: npt.NDArray[np.float32]) -> LatentUp:
        """bf16 [H, N + V, C]: of each head what makes keys, then what makes values."""
        (heads, nope, rank), value = keys.shape, values.shape[1]
        up = torch.empty((heads, nope + value, rank), dtype=torch.bfloat16, device=self.device)
        up[:, :nope], up[:, nope:] = self._moved(keys), self._moved(values)
        return LatentUp(heads=heads, nope=nope, value=value, rank=rank, data=(up,), nbytes=up.nbytes)

    def row_table(self, raw: npt.NDArray[np.uint8], format: str, *, rows: int, cols: int) -> RowTable:
        """bf16 rows, whatever the file has."""
        values = self._values(raw, format, (rows, cols))
        return RowTable(format="BF16", rows=rows, cols=cols, data=values, nbytes=values.nbytes)

    def pack_stored(
        self, parts: Sequence[upload.Stored], *, layout: Literal["bf16", "fp8"], gated: bool = False
    ) -> PackedMatrix:
        """Tensors as they lie in files, stacked along N (gated: gate, then up); the values are there after `uploader.finish()`."""
        self._outside_recording("packing")
        return upload.pack_stored(self.uploader, parts, layout=layout, gated=gated)

    def pack_stored_blocks(
        self, parts: Sequence[tuple[upload.Stored, upload.Stored]], *, gated: bool = False
    ) -> PackedMatrix:
        """FP8 matrices and their scales by blocks as they lie in files, stacked along N (gated: gate, then up); nothing is rounded. The
        values are there after `uploader.finish()`."""
        self._outside_recording("packing")
        return upload.pack_blocks_fp8(self.uploader, parts, gated=gated)

    def stored_rows(self, table: upload.Stored) -> RowTable:
        """A stored matrix whose rows are gathered; the values are there after `uploader.finish()`."""
        self._outside_recording("packing")
        return upload.stored_rows(self.uploader, table)

    def matrix_of_rows(self, table: RowTable) -> PackedMatrix:
        """The table's own memory as a matrix: a tied head."""
        return upload.matrix_of_rows(table)

    # ------------------------------------------------------------------------------------- weights without a checkpoint

    def _drawn(
        self,
        shape: tuple[int, ...],
        *,
        seed: int,
        scale: float,
        uniform: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """Normal values times scale, or uniform ones within scale of 0."""
        self._outside_recording("drawing weights")
        source = torch.Generator(device=self.device).manual_seed(seed)
        if uniform:
            return torch.empty(shape, device=self.device, dtype=dtype).uniform_(-scale, scale, generator=source)
        return torch.randn(shape, generator=source, device=self.device, dtype=dtype).mul_(scale)

    def random_matrix(
        self,
        n: int,
        k: int,
        *,
        layout: str = "bf16",
        gated: bool = False,
        seed: int,
        scale: float,
        uniform: bool = False,
    ) -> PackedMatrix:
        """A matrix [N, K] of normal values times scale (uniform: within scale of 0), drawn on the device; gated: N counts gate and up."""
        values = self._drawn((n, k), seed=seed, scale=scale, uniform=uniform)
        pack = {"bf16": packed, "fp8": self.pack_fp8, "fp8_block": self.pack_fp8_block}[layout]
        return replace(pack(values), gated=gated)

    def random_rows(self, rows: int, cols: int, *, seed: int, scale: float, uniform: bool = False) -> RowTable:
        """A row table of normal values times scale (uniform: within scale of 0), drawn on the device."""
        values = self._drawn((rows, cols), seed=seed, scale=scale, uniform=uniform)
        return RowTable(format="BF16", rows=rows, cols=cols, data=values, nbytes=values.nbytes)

    def random_vector(self, size: int, *, seed: int, scale: float, mean: float = 0.0) -> Tensor:
        """mean + scale * normal values, float32 [size]."""
        return self._drawn((size,), seed=seed, scale=scale, dtype=torch.float32).add_(mean)

    # ----------------------------------------------------------------------------------------------------------- compute

    def embed(self, ids: Tensor, table: RowTable, *, scale: float, out: Tensor, count: Count) -> None:
        self._call("embed", tokens=len(out), ids=ids, table=table, scale=scale, out=out, count=count)

    def add_rms_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, *, eps: float, out: Tensor, count: Count
    ) -> None:
        self._call("add_rms_norm", tokens=len(x), x=x, delta=delta, weight=weight, eps=eps, out=out, count=count)

    def add_layer_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, *, eps: float, out: Tensor, count: Count
    ) -> None:
        self._call(
            "add_layer_norm", tokens=len(x), x=x, delta=delta, weight=weight, bias=bias, eps=eps, out=out, count=count
        )

    def add(self, x: Tensor, delta: Tensor | None, *, gate: Tensor | None, out: Tensor | None, count: Count) -> None:
        self._call("add", tokens=len(x), x=x, delta=delta, gate=gate, out=out, count=count)

    def rms_norm_span(self, x: Tensor, weight: Tensor, *, start: int, eps: float, count: Count) -> None:
        self._call("rms_norm_span", tokens=len(x), x=x, weight=weight, start=start, eps=eps, count=count)

    def scale(self, x: Tensor, *, factor: float, count: Count) -> None:
        self._call("scale", tokens=len(x), x=x, factor=factor, count=count)

    def temper(self, x: Tensor, positions: Tensor, *, every: int, slope: float, count: Count) -> None:
        self._call("temper", tokens=len(x), x=x, positions=positions, every=every, slope=slope, count=count)

    def gelu(self, x: Tensor, *, count: Count) -> None:
        self._call("gelu", tokens=len(x), x=x, count=count)

    def linear(self, x: Tensor, weight: PackedMatrix, *, bias: Tensor | None, out: Tensor, count: Count) -> None:
        assert x.shape[1] == weight.k, f"x {list(x.shape)} by a matrix [{weight.n}, {weight.k}]"
        assert out.shape[1] == weight.n and not weight.gated, f"out {list(out.shape)} of [{weight.n}, {weight.k}]"
        self._call("linear", tokens=len(x), x=x, weight=weight, bias=bias, out=out, count=count)

    def gated_linear(
        self, x: Tensor, weight: PackedMatrix, *, activation: Activation, bias: Tensor | None, out: Tensor, count: Count
    ) -> None:
        assert x.shape[1] == weight.k, f"x {list(x.shape)} by a gated matrix [{weight.n}, {weight.k}]"
        assert 2 * out.shape[1] == weight.n and weight.gated, f"out {list(out.shape)} of [{weight.n}, {weight.k}]"
        self._call(
            "gated_linear", tokens=len(x), x=x, weight=weight, activation=activation, bias=bias, out=out, count=count
        )

    def rope_angles(self, positions: Tensor, inv_freq: Tensor, *, scale: float, out: Tensor, count: Count) -> None:
        self._call(
            "rope_angles", tokens=len(out), positions=positions, inv_freq=inv_freq, scale=scale, out=out, count=count
        )

    def rope_store(
        self,
        qkv: Tensor,
        angles: Tensor,
        write_slots: Tensor,
        kv: KVLayer,
        *,
        heads: int,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        out: Tensor,
        count: Count,
    ) -> None:
        assert qkv.shape[1] == (heads + 2 * kv.kv_heads) * kv.head_dim, (qkv.shape, heads, kv.kv_heads, kv.head_dim)
        self._call(
            "rope_store", tokens=len(qkv), qkv=qkv, angles=angles, write_slots=write_slots, kv=kv, heads=heads,
            q_weight=q_weight, k_weight=k_weight, eps=eps, out=out, count=count,
        )  # fmt: skip

    def attention(
        self,
        q: Tensor,
        kv: KVLayer,
        rows: PagedRows,
        *,
        heads: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        out: Tensor,
        causal: bool = True,
        chunked: bool = False,
        fresh: bool = False,
    ) -> None:
        """fresh: in buckets of that kind, rows of several tokens may be computed from this step's keys alone, by FlashAttention 3."""
        assert q.shape[1] == heads * kv.head_dim, (q.shape, heads, kv.head_dim)
        assert causal or window is None, "a window looks back: it is for causal attention"
        assert window is not None or not chunked, "chunks are windows"
        self._call(
            "attention", tokens=len(q), q=q, kv=kv, rows=rows, heads=heads, scale=scale, window=window, softcap=softcap,
            sinks=sinks, out=out, causal=causal, chunked=chunked, fresh=fresh,
        )  # fmt: skip

    def latent_store(
        self,
        q: Tensor,
        latent: Tensor,
        angles: Tensor,
        write_slots: Tensor,
        kv: KVLayer,
        *,
        heads: int,
        weight: Tensor,
        eps: float,
        count: Count,
    ) -> None:
        assert latent.shape[1] == kv.head_dim and q.shape[1] % heads == 0, (q.shape, latent.shape, kv.head_dim)
        self._call(
            "latent_store", tokens=len(q), q=q, latent=latent, angles=angles, write_slots=write_slots, kv=kv, heads=heads,
            weight=weight, eps=eps, count=count,
        )  # fmt: skip

    def latent_attention(
        self,
        q: Tensor,
        kv: KVLayer,
        rows: PagedRows,
        up: LatentUp,
        *,
        scale: float,
        out: Tensor,
        fresh: bool = False,
    ) -> None:
        """fresh: rows of several tokens that begin in the step may be computed by FlashAttention 3, where it was built for such heads."""
        rope = kv.head_dim - up.rank
        assert q.shape[1] == up.heads * (up.nope + rope) and out.shape[1] == up.heads * up.value, (q.shape, out.shape)
        self._call("latent_attention", tokens=len(q), q=q, kv=kv, rows=rows, up=up, scale=scale, out=out, fresh=fresh)

    def route(
        self, logits: Tensor, routing: Routing, *, bias: Tensor | None, ids: Tensor, weights: Tensor, count: Count
    ) -> None:
        self._call(
            "route",
            tokens=len(logits),
            logits=logits,
            routing=routing,
            bias=bias,
            ids=ids,
            weights=weights,
            count=count,
        )

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: PackedExperts,
        down: PackedExperts,
        *,
        activation: Activation,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        out: Tensor,
        count: Count,
        weigh_input: bool = False,
    ) -> None:
        assert gate_up.gated and not down.gated and gate_up.n == 2 * down.k, (gate_up.n, down.k)
        assert x.shape[1] == gate_up.k and out.shape[1] == down.n, (x.shape, gate_up.k, out.shape, down.n)
        self._call(
            "experts", tokens=len(x), x=x, ids=ids, weights=weights, gate_up=gate_up, down=down, activation=activation,
            gate_up_bias=gate_up_bias, down_bias=down_bias, out=out, count=count, weigh_input=weigh_input,
        )  # fmt: skip

    def low_rank_bank(self, *, slots: int, rank: int, sizes: tuple[int, ...], k: int, exact: bool) -> LowRankBank:
        """Always bf16."""
        self._outside_recording("low_rank_bank")
        return low_rank.new_bank(self.device, slots=slots, rank=rank, sizes=sizes, k=k)

    def set_low_rank(
        self, bank: LowRankBank, slot: int, part: int, a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]
    ) -> None:
        self._outside_recording("set_low_rank")
        low_rank.write(bank, slot, part, a, b)

    def add_low_rank(self, x: Tensor, bank: LowRankBank, adapters: Tensor, *, out: Tensor, count: Count) -> None:
        assert x.shape[1] == bank.k and out.shape[1] == sum(bank.sizes), (x.shape, bank.k, out.shape, bank.sizes)
        self._call("add_low_rank", tokens=len(x), x=x, bank=bank, adapters=adapters, out=out, count=count)

    def glue(self, x: Tensor, *, activation: Activation, out: Tensor, count: Count) -> None:
        assert activation in ("silu", "gelu_tanh"), f"no kernel makes gate and up one by {activation}"
        self._call("glue", tokens=len(x), x=x, activation=activation, out=out, count=count)

    def gather_rows(self, x: Tensor, index: Tensor, *, out: Tensor, count: Count) -> None:
        self._call("gather_rows", tokens=len(out), x=x, index=index, out=out, count=count)

    def softcap(self, x: Tensor, *, cap: float, count: Count) -> None:
        self._call("softcap", tokens=len(x), x=x, cap=cap, count=count)

    def sample(self, logits: Tensor, columns: SampleColumns, *, out: Tensor, count: Count) -> None:
        """As the protocol says, from columns on the host; the runner of this op set keeps columns on the device (sample.py)."""
        self._outside_recording("sample with columns on the host")
        rows, vocabulary = logits.shape
        live = len(columns.temperature)
        device, penalised = self._device_columns(columns)
        workspace = sampling.SampleWorkspace.allocate(rows, vocabulary, device=self.device, penalties=penalised)
        counted = self.constant(count) if isinstance(count, np.ndarray) else count
        sampling.sample(logits[:live], device, out=out[:live], workspace=workspace, count=counted, pdl=self.pdl)

    def _device_columns(self, c: SampleColumns) -> tuple[sampling.DeviceColumns, bool]:
        """The columns on the device, and whether any row has penalties."""
        move = self.constant
        values: dict[str, Any] = {
            name: move(np.asarray(getattr(c, name))) for name in ("temperature", "top_k", "top_p", "min_p", "position")
        }
        values["seed"] = move(np.asarray(c.seed, np.uint64).view(np.int64))
        longest = int(max(c.history_length, default=0))
        if longest:
            table = np.zeros((len(c.history_length), longest), np.int32)
            for row, (start, known) in enumerate(zip(c.history, c.history_length, strict=True)):
                if known:
                    table[row, :known] = (ctypes.c_int32 * int(known)).from_address(int(start))
            values |= {name: move(np.asarray(getattr(c, name))) for name in ("repetition", "presence", "frequency")}
            values |= {
                "history": move(table),
                "history_row": move(np.arange(len(table), dtype=np.int32)),
                "history_prompt": move(c.history_prompt),
                "history_length": move(c.history_length),
            }
        if len(c.bias_token):
            values |= {name: move(getattr(c, name)) for name in ("bias_start", "bias_token", "bias_value")}
        if c.mask is not None:
            values["mask"] = move(c.mask.view(np.int32))
        return sampling.DeviceColumns(**values), bool(longest)

    def logprobs(
        self,
        logits: Tensor,
        tokens: Tensor,
        *,
        top: int,
        out_logprob: Tensor,
        out_rank: Tensor,
        out_ids: Tensor,
        out_top: Tensor,
        count: Count,
    ) -> None:
        self._outside_recording("logprobs by itself")
        rows, blocks = len(tokens), -(-logits.shape[1] // sampling.BLOCK)
        sampling.logprobs(
            logits[:rows],
            tokens,
            top=top,
            out_logprob=out_logprob,
            out_rank=out_rank,
            out_ids=out_ids,
            out_top=out_top,
            workspace=self.empty((rows * blocks * (2 + top),), "f32"),
            workspace_ids=self.empty((rows * blocks * (1 + top),), "i32"),
            arrived=self.empty((rows,), "i32"),
            count=self.constant(count) if isinstance(count, np.ndarray) else count,
            pdl=self.pdl,
        )


def packed(values: Tensor, scale: Tensor | None = None) -> PackedMatrix:
    """A matrix [N, K] in bf16, or in e4m3 with a scale per output."""
    n, k = values.shape
    data = (values.contiguous(),) if scale is None else (values.contiguous(), scale.contiguous())
    return PackedMatrix(
        layout="bf16" if scale is None else "fp8",
        n=n,
        k=k,
        bits=16 if scale is None else 8,
        group=0,
        gated=False,
        data=data,
        nbytes=sum(part.nbytes for part in data),
    )


def _raw(values: Tensor) -> Tensor:
    """e4m3 as bytes: torch moves it nowhere by itself."""
    return values.view(torch.uint8) if values.dtype == FP8 else values


def _no_blocks(raw: npt.NDArray[np.uint8], format: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    raise ValueError(f"CudaOps was made without read_blocks and cannot read {format}")
