"""`PlainOps`: the op protocol in torch on the CPU, for machines without the C++ library and as the second opinion in tests.

Knows: buffers, counts, and what each packed layout means as float32. Refuses to know: the formulas (reference.py has them) and the byte
layouts of GGUF blocks (given as a function when constructed).

Weights are kept as float32 values. What the fast op sets lose on the way is imitated, so that results can be compared closely: layout
"bf16" rounds weights and activations to bf16, "quant" rounds activations to int8 per 32 values.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tradewind.kernels import reference, reference_axes, reference_lora, reference_mla, reference_moe
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

DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
}

ReadBlocks = Callable[[npt.NDArray[np.uint8], str, tuple[int, ...]], npt.NDArray[np.float32]]
"""(raw bytes, format name, shape) -> float32 values."""


class PlainOps:
    """Ops in torch on CPU memory. Buffers given as numpy arrays are used in place, so a host may write them between steps."""

    name = "plain"
    activation = "f32"

    def __init__(self, *, read_blocks: ReadBlocks | None = None, activation_terms: int = 1) -> None:
        """read_blocks: how block formats become float32 (`quantization.blocks.dequantise`); without it only F32, F16 and BF16 are read."""
        self._read_blocks = read_blocks
        self._terms = activation_terms

    # ---------------------------------------------------------------------------------------------- memory and packing

    def empty(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.zeros(shape, dtype=DTYPES[dtype])

    def constant(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.array(values, order="C"))

    def host(self, values: Any) -> npt.NDArray[Any]:
        if isinstance(values, np.ndarray):
            return values
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()

    def pack_matrix(self, weights: npt.NDArray[np.float32], *, compute: Compute) -> PackedMatrix:
        values = torch.from_numpy(np.array(weights, np.float32, order="C"))
        if compute == "int8":
            return packed(reference.round_weights(values), layout="quant", bits=8, group=reference.ACTIVATION_GROUP)
        if compute == "bf16":
            return packed(values.bfloat16().float(), layout="bf16", bits=16)
        return packed(values, layout="f32", bits=32)

    def pack_quant(
        self,
        quants: npt.NDArray[np.uint8],
        scale: npt.NDArray[np.float32],
        minimum: npt.NDArray[np.float32],
        *,
        bits: int,
    ) -> PackedMatrix:
        group = quants.shape[1] // scale.shape[1]
        values = quants.reshape(*scale.shape, group) * scale[..., None] + minimum[..., None]
        return packed(torch.from_numpy(values.reshape(quants.shape)), layout="quant", bits=bits, group=group)

    def pack_blocks(self, raw: npt.NDArray[np.uint8], format: str, *, n: int, k: int) -> PackedMatrix:
        values = torch.from_numpy(self._read(raw, format, (n, k)))
        return packed(values, layout="quant", bits=8, group=reference.ACTIVATION_GROUP)

    def pack_gated(self, gate: PackedMatrix, up: PackedMatrix) -> PackedMatrix:
        assert (gate.layout, gate.n, gate.k) == (up.layout, up.n, up.k), f"{gate} and {up} cannot be interleaved"
        values = torch.stack([gate.data[0], up.data[0]], 1).flatten(0, 1)
        return packed(values, layout=gate.layout, bits=gate.bits, group=gate.group, gated=True)

    def pack_stacked(self, parts: tuple[PackedMatrix, ...]) -> PackedMatrix:
        first = parts[0]
        assert all((part.layout, part.k) == (first.layout, first.k) for part in parts), "parts of different layouts"
        values = torch.cat([part.data[0] for part in parts])
        return packed(values, layout=first.layout, bits=first.bits, group=first.group)

    def pack_experts(self, parts: Iterable[PackedMatrix], *, experts: int) -> PackedExperts:
        matrices = list(parts)
        first = matrices[0]
        assert len(matrices) == experts, (len(matrices), experts)
        assert all((part.layout, part.gated) == (first.layout, first.gated) for part in matrices), "unlike experts"
        values = torch.stack([part.data[0] for part in matrices])
        return PackedExperts(
            experts=experts, n=first.n, k=first.k, layout=first.layout, gated=first.gated, data=(values,), nbytes=values.nbytes
        )  # fmt: skip

    def row_table(self, raw: npt.NDArray[np.uint8], format: str, *, rows: int, cols: int) -> RowTable:
        values = torch.from_numpy(self._read(raw, format, (rows, cols)))
        return RowTable(format=format, rows=rows, cols=cols, data=values, nbytes=values.nbytes)

    def kv_layer(self, *, pages: int, page_tokens: int, kv_heads: int, head_dim: int, format: str) -> KVLayer:
        shape = (pages, page_tokens, kv_heads, head_dim)
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
        return KVLayer(
            k=self.empty((pages, page_tokens, width), format), v=self.empty((pages, 0), format), pages=pages, page_tokens=page_tokens,
            kv_heads=1, head_dim=width, format=format,
        )  # fmt: skip

    def pack_latent(self, keys: npt.NDArray[np.float32], values: npt.NDArray[np.float32]) -> LatentUp:
        (heads, nope, rank), value = keys.shape, values.shape[1]
        data = tuple(torch.from_numpy(np.array(each, np.float32, order="C")) for each in (keys, values))
        nbytes = sum(each.nbytes for each in data)
        return LatentUp(heads=heads, nope=nope, value=value, rank=rank, data=data, nbytes=nbytes)

    def low_rank_bank(self, *, slots: int, rank: int, sizes: tuple[int, ...], k: int, exact: bool) -> LowRankBank:
        """Always exact."""
        data = (torch.zeros(slots, len(sizes), rank, k), torch.zeros(slots, sum(sizes), rank))
        nbytes = sum(each.nbytes for each in data)
        return LowRankBank(slots=slots, rank=rank, sizes=sizes, k=k, data=data, nbytes=nbytes)

    def set_low_rank(
        self, bank: LowRankBank, slot: int, part: int, a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]
    ) -> None:
        start = sum(bank.sizes[:part])
        down, up = bank.data[0][slot, part], bank.data[1][slot, start : start + bank.sizes[part]]
        down.zero_()
        up.zero_()
        down[: len(a)] = torch.from_numpy(np.array(a, np.float32))
        up[:, : len(a)] = torch.from_numpy(np.array(b, np.float32))

    def _read(self, raw: npt.NDArray[np.uint8], format: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """Float32 values, always in fresh memory."""
        if self._read_blocks is not None:
            return self._read_blocks(raw, format, shape)
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(format)
        if dtype is None:
            raise ValueError(f"PlainOps was made without read_blocks and cannot read {format}")
        return torch.from_numpy(np.array(raw, order="C").reshape(-1)).view(dtype).float().reshape(shape).numpy()

    # ---------------------------------------------------------------------------------------------------------- compute

    def embed(self, ids: Any, table: RowTable, *, scale: float, out: Any, count: Count) -> None:
        n = int(count[0])
        as_torch(out)[:n] = reference.embed(as_torch(ids)[:n], table.data, scale=scale)

    def add_rms_norm(self, x: Any, delta: Any | None, weight: Any, *, eps: float, out: Any, count: Count) -> None:
        n = int(count[0])
        x = as_torch(x)
        added, normed = reference.add_rms_norm(
            x[:n], None if delta is None else as_torch(delta)[:n], as_torch(weight), eps=eps
        )
        x[:n] = added
        as_torch(out)[:n] = normed

    def add_layer_norm(
        self, x: Any, delta: Any | None, weight: Any, bias: Any, *, eps: float, out: Any, count: Count
    ) -> None:
        n = int(count[0])
        x = as_torch(x)
        added, normed = reference.add_layer_norm(
            x[:n], None if delta is None else as_torch(delta)[:n], as_torch(weight), as_torch(bias), eps=eps
        )
        x[:n] = added
        as_torch(out)[:n] = normed

    def add(self, x: Any, delta: Any | None, *, gate: Any | None, out: Any | None, count: Count) -> None:
        live = as_torch(x)[: int(count[0])]
        n = len(live)
        total = reference.add(
            live, None if delta is None else as_torch(delta)[:n], None if gate is None else as_torch(gate)[:n]
        )
        live.copy_(total)
        if out is not None:
            as_torch(out)[:n] = total

    def rms_norm_span(self, x: Any, weight: Any, *, start: int, eps: float, count: Count) -> None:
        live = as_torch(x)[: int(count[0])]
        live.copy_(reference.rms_norm_span(live, as_torch(weight), start=start, eps=eps))

    def scale(self, x: Any, *, factor: float, count: Count) -> None:
        live = as_torch(x)[: int(count[0])]
        live.copy_(reference.scale(live, factor=factor))

    def temper(self, x: Any, positions: Any, *, every: int, slope: float, count: Count) -> None:
        n = int(count[0])
        live = as_torch(x)[:n]
        live.copy_(reference.temper(live, as_torch(positions)[:n], every=every, slope=slope))

    def gelu(self, x: Any, *, count: Count) -> None:
        live = as_torch(x)[: int(count[0])]
        live.copy_(reference.gelu(live))

    def linear(self, x: Any, weight: PackedMatrix, *, bias: Any | None, out: Any, count: Count) -> None:
        n = int(count[0])
        seen = as_seen(as_torch(x)[:n], weight.layout, terms=self._terms)
        as_torch(out)[:n] = reference.linear(seen, weight.data[0], None if bias is None else as_torch(bias))

    def gated_linear(
        self, x: Any, weight: PackedMatrix, *, activation: Activation, bias: Any | None, out: Any, count: Count
    ) -> None:
        n = int(count[0])
        gate, up = weight.data[0].view(-1, 2, weight.k).unbind(1)
        seen = as_seen(as_torch(x)[:n], weight.layout, terms=self._terms)
        as_torch(out)[:n] = reference.gated_linear(
            seen, gate, up, activation=activation, bias=None if bias is None else as_torch(bias)
        )

    def route(self, logits: Any, routing: Routing, *, bias: Any | None, ids: Any, weights: Any, count: Count) -> None:
        n = int(count[0])
        chosen, weighed = reference_moe.route(
            as_torch(logits)[:n], routing, bias=None if bias is None else as_torch(bias)
        )
        as_torch(ids)[:n] = chosen
        as_torch(weights)[:n] = weighed

    def experts(
        self,
        x: Any,
        ids: Any,
        weights: Any,
        gate_up: PackedExperts,
        down: PackedExperts,
        *,
        activation: Activation,
        gate_up_bias: Any | None,
        down_bias: Any | None,
        out: Any,
        count: Count,
        weigh_input: bool = False,
    ) -> None:
        # Not the reference's own function, which knows no rounding of activations and copies every expert's rows.
        n = int(count[0])
        live, chosen, weighed = as_torch(x)[:n], as_torch(ids)[:n], as_torch(weights)[:n]
        order, start = reference_moe.dispatch(chosen, experts=gate_up.experts)
        answers = torch.empty(len(order), down.n)
        for expert in range(gate_up.experts):
            mine = slice(int(start[expert]), int(start[expert + 1]))
            if mine.start == mine.stop:
                continue
            rows = as_seen(live[order[mine] // chosen.shape[1]], gate_up.layout, terms=self._terms)
            if weigh_input:
                rows = rows * weighed.flatten()[order[mine], None]
            gate, up = gate_up.data[0][expert].view(-1, 2, gate_up.k).unbind(1)
            inner = reference.gated_linear(
                rows, gate, up, activation=activation,
                bias=None if gate_up_bias is None else as_torch(gate_up_bias)[expert],
            )  # fmt: skip
            answers[mine] = reference.linear(
                as_seen(inner, down.layout, terms=self._terms), down.data[0][expert],
                None if down_bias is None else as_torch(down_bias)[expert],
            )  # fmt: skip
        as_torch(out)[:n] = reference_moe.combine(answers, torch.ones_like(weighed) if weigh_input else weighed, order)

    def rope_angles(self, positions: Any, inv_freq: Any, *, scale: float, out: Any, count: Count) -> None:
        n = int(count[0])
        as_torch(out)[:n] = reference.rope_angles(as_torch(positions)[:n], as_torch(inv_freq), scale=scale)

    def rope_angles_axes(
        self, positions: Any, axes: Any, inv_freq: Any, *, scale: float, out: Any, count: Count
    ) -> None:
        n = int(count[0])
        as_torch(out)[:n] = reference_axes.rope_angles_axes(
            as_torch(positions)[:, :n], as_torch(axes), as_torch(inv_freq), scale=scale
        )

    def rope_store(
        self,
        qkv: Any,
        angles: Any,
        write_slots: Any,
        kv: KVLayer,
        *,
        heads: int,
        q_weight: Any | None,
        k_weight: Any | None,
        eps: float,
        out: Any,
        count: Count,
    ) -> None:
        # Not the reference's own function: that one copies all pages to stay pure.
        n = int(count[0])
        heads_all = as_torch(qkv)[:n].reshape(n, -1, kv.head_dim)
        q, k, v = heads_all.split([heads, kv.kv_heads, kv.kv_heads], 1)
        q = q if q_weight is None else reference.rms_norm(q, as_torch(q_weight), eps=eps)
        k = k if k_weight is None else reference.rms_norm(k, as_torch(k_weight), eps=eps)
        slots, turn = as_torch(write_slots)[:n].long(), as_torch(angles)[:n]
        kv.k.view(-1, kv.kv_heads, kv.head_dim)[slots] = reference.rotate(k, turn).to(kv.k.dtype)
        kv.v.view(-1, kv.kv_heads, kv.head_dim)[slots] = v.to(kv.v.dtype)
        as_torch(out)[:n] = reference.rotate(q, turn).reshape(n, -1)

    def attention(
        self,
        q: Any,
        kv: KVLayer,
        rows: PagedRows,
        *,
        heads: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Any | None,
        out: Any,
        causal: bool = True,
        chunked: bool = False,
    ) -> None:
        live = int(rows.rows[0])
        start = as_torch(rows.query_start)[: live + 1]
        tokens = int(start[live])
        as_torch(out)[:tokens] = reference.attention(
            as_torch(q)[:tokens],
            kv.k,
            kv.v,
            start,
            as_torch(rows.lengths)[:live],
            as_torch(rows.page_table)[:live],
            heads=heads,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=None if sinks is None else as_torch(sinks),
            causal=causal,
            chunked=chunked,
        )

    def latent_store(
        self,
        q: Any,
        latent: Any,
        angles: Any,
        write_slots: Any,
        kv: KVLayer,
        *,
        heads: int,
        weight: Any,
        eps: float,
        count: Count,
    ) -> None:
        # Not the reference's own function: that one copies all pages to stay pure.
        n = int(count[0])
        live, turn = as_torch(q)[:n], as_torch(angles)[:n]
        kept = reference_mla.latent(as_torch(latent)[:n], turn, as_torch(weight), eps=eps)
        kv.k.view(-1, kv.head_dim)[as_torch(write_slots)[:n].long()] = kept.to(kv.k.dtype)
        live.copy_(reference_mla.turned(live, turn, heads=heads))

    def latent_attention(self, q: Any, kv: KVLayer, rows: PagedRows, up: LatentUp, *, scale: float, out: Any) -> None:
        live = int(rows.rows[0])
        start = as_torch(rows.query_start)[: live + 1]
        tokens = int(start[live])
        as_torch(out)[:tokens] = reference_mla.latent_attention(
            as_torch(q)[:tokens], kv.k, start, as_torch(rows.lengths)[:live], as_torch(rows.page_table)[:live], *up.data, scale=scale
        )  # fmt: skip

    def add_low_rank(self, x: Any, bank: LowRankBank, adapters: Any, *, out: Any, count: Count) -> None:
        n, (a, b) = int(count[0]), bank.data
        live, which = as_torch(out)[:n], as_torch(adapters)[:n]
        live.copy_(reference_lora.add_low_rank(as_torch(x)[:n], a, b, which, live, sizes=bank.sizes))

    def glue(self, x: Any, *, activation: Activation, out: Any, count: Count) -> None:
        n = int(count[0])
        gate, up = as_torch(x)[:n].chunk(2, -1)
        as_torch(out)[:n] = reference.glue(gate, up, activation)

    def gather_rows(self, x: Any, index: Any, *, out: Any, count: Count) -> None:
        n = int(count[0])
        as_torch(out)[:n] = reference.gather_rows(as_torch(x), as_torch(index)[:n])

    def softcap(self, x: Any, *, cap: float, count: Count) -> None:
        live = as_torch(x)[: int(count[0])]
        live.copy_(reference.softcap(live, cap=cap))

    def sample(self, logits: Any, columns: SampleColumns, *, out: Any, count: Count) -> None:
        logits, out = as_torch(logits), as_torch(out)
        for row in range(int(count[0])):
            out[row] = sample_row(logits[row], columns, row)

    def logprobs(
        self,
        logits: Any,
        tokens: Any,
        *,
        top: int,
        out_logprob: Any,
        out_rank: Any,
        out_ids: Any,
        out_top: Any,
        count: Count,
    ) -> None:
        n = int(count[0])
        answer = reference.logprobs(as_torch(logits)[:n], as_torch(tokens)[:n], top=top)
        for out, values in zip((out_logprob, out_rank, out_ids, out_top), answer, strict=True):
            # A buffer may be wider than what is asked this time: the first `top` columns are written.
            into = as_torch(out)[:n]
            (into if values.dim() == 1 else into[:, :top]).copy_(values)

    def copy_pages(self, kv: KVLayer, source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> None:
        for pages in (kv.k, kv.v):
            pages[torch.tensor(target.tolist())] = pages[torch.tensor(source.tolist())]


def packed(values: torch.Tensor, *, layout: str, bits: int, group: int = 0, gated: bool = False) -> PackedMatrix:
    """A PackedMatrix whose data is one float32 tensor [N, K]."""
    n, k = values.shape
    return PackedMatrix(
        layout=layout,  # type: ignore[arg-type]
        n=n,
        k=k,
        bits=bits,
        group=group,
        gated=gated,
        data=(values,),
        nbytes=values.nbytes,
    )


def as_torch(values: Any) -> torch.Tensor:
    """The same memory as a torch tensor."""
    return torch.from_numpy(values) if isinstance(values, np.ndarray) else values


def as_seen(x: torch.Tensor, layout: str, *, terms: int = 1) -> torch.Tensor:
    """Activations as a matmul of that layout sees them; `terms` int8 terms each where it multiplies quants."""
    if layout == "bf16":
        return x.bfloat16().float()
    if layout != "quant":
        return x
    seen = reference.round_activations(x)
    return seen if terms == 1 else seen + reference.round_activations(x - seen)


def sample_row(logits: torch.Tensor, columns: SampleColumns, row: int) -> int:
    """Draws one row: unpacks the columns and asks the reference."""
    c = columns
    first, last = int(c.bias_start[row]), int(c.bias_start[row + 1])
    bias: dict[int, float] = {}
    for token, value in zip(c.bias_token[first:last].tolist(), c.bias_value[first:last].tolist(), strict=True):
        bias[token] = bias.get(token, 0.0) + value
    history = None
    if known := int(c.history_length[row]):
        table = (ctypes.c_int32 * known).from_address(int(c.history[row]))
        history = torch.from_numpy(np.array(table, np.int32))
    allowed = None
    if c.mask is not None:
        bits = np.unpackbits(c.mask[row].view(np.uint8), bitorder="little")[: len(logits)]
        allowed = torch.from_numpy(bits.astype(np.bool_))
    return reference.sample(
        logits,
        temperature=float(c.temperature[row]),
        top_k=int(c.top_k[row]),
        top_p=float(c.top_p[row]),
        min_p=float(c.min_p[row]),
        repetition=float(c.repetition[row]),
        presence=float(c.presence[row]),
        frequency=float(c.frequency[row]),
        seed=int(c.seed[row]),
        position=int(c.position[row]),
        history=history,
        history_prompt=int(c.history_prompt[row]),
        bias=bias,
        allowed=allowed,
    )
