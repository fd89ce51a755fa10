"""From a tape's calls to launches: constants chosen for a bucket, neighbours fused where the data flow allows.

Knows: which kernel serves which call at which size, and what may be folded into what. Refuses to know: models (it sees calls and buffers),
graphs, the arithmetic of kernels. A plan allocates; a run launches on the current stream, allocates nothing and waits for nothing.

    matmul of M tokens      M = 1                gemv      norm of the input, bias, SiLU-mul and residual folded in
                            up to tile_rows      tile      bias, SiLU-mul, residual; FP8: input quantised per token
                            more, FP8 by blocks  wide      the same: blocks.py
                            more, odd shapes     library   torch.mm / _scaled_mm, the rest in kernels of their own
                            deterministic        fixed     one tile for every M: a row's bits do not depend on its neighbours

    x, delta -> norm        a matmul that writes delta, which nothing but the next norm reads, adds to x itself
    norm, delta -> norm     one launch (norms on both sides of a block)
    add_low_rank            few tokens: a part of the matmul's own tiles (low_rank_tile.py), which are gated themselves then; else tokens
                            sorted by adapter once a step and two launches (low_rank.py); nothing where nobody has an adapter
    experts                 1 token, few tokens, or pairs sorted by expert (moe.py); their weighted sum in the next norm, or added to x;
                            the shared expert's answer goes the same way, and is computed on a second stream in small steps (lanes.py)
    norm -> matmuls         gemv, experts of one token: the norm is folded in; FP8 tiles, library, fixed: the norm quantises
    attention               prefill, then decode of one-token rows; prompts that begin by FlashAttention 3; keys shared by all in one pass
    latents                 queries in and answers out of their space; one-token rows, or naive and absorbed forms (latent_program.py)
    rope_store, attention   one-token rows, few: one launch; the angles come from a table by position, so rope_angles is dead
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tradewind.kernels.ops import KVLayer, PackedMatrix, PagedRows
from tradewind.kernels.triton import (
    blocks,
    decode,
    elementwise,
    encode,
    lanes,
    latent_program,
    library,
    low_rank,
    low_rank_tile,
    mixture,
    moe,
    norm,
    prefill,
    rope,
    shared,
    skinny,
)
from tradewind.kernels.triton.launch import AFTER_ALL
from tradewind.kernels.triton.tape import ADDERS, Bucket, Call, Tape, address
from tradewind.kernels.triton.tuning import DecodeConfig, GemvConfig, PrefillConfig, TileConfig, Tuning
from tradewind.kernels.triton.workspace import Workspace

FP8_LAYOUTS = ("fp8", "fp8_block")
CAN_BE_LATE = (skinny.skinny_linear, low_rank_tile.adapted_linear)
COUNTED_FROM = 65
"""From so many tokens on kernels read how many are live; below, they compute the padding too: it costs less than waiting for the number."""


@dataclass
class Launch:
    """One kernel (or library call) with its arguments."""

    kernel: Callable[..., None]
    text: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    lane: int = 0
    """1: on the second stream (lanes.py)."""
    join: bool = False
    """The first in lane 0 that must wait for lane 1."""

    def run(self) -> None:
        self.kernel(*self.arguments, **self.options)


@dataclass(frozen=True)
class Program:
    """Launches of one bucket, in order. The first run compiles kernels: do it before capturing a graph."""

    bucket: Bucket
    launches: tuple[Launch, ...]
    held: tuple[Any, ...] = ()
    """Scratch that the launches name."""
    side: lanes.SideStreams | None = None
    """Where lane 1 runs; None: all in one stream, in order."""

    def run(self) -> None:
        """Launches everything on the current stream, or lane 1 beside it."""
        if self.side is not None:
            self.side.run(self.launches)
            return
        for launch in self.launches:
            launch.run()

    def describe(self) -> str:
        """One line per launch."""
        late = {True: ", late", False: ""}
        lane = {0: "", 1: ", beside"}
        return "\n".join(
            launch.text + late[bool(launch.options.get("late"))] + lane[launch.lane] + (", join" if launch.join else "")
            for launch in self.launches
        )


# ------------------------------------------------------------------------------------------------------------ planning


def plan(tape: Tape, bucket: Bucket, *, fuse: bool) -> Program:
    """The program of a tape for a bucket; allocates in the op set's workspace."""
    planner = Planner(tape, bucket, fuse=fuse)
    if not bucket.adapted:
        planner.leave_adapters_out()
    if fuse:
        low_rank_tile.fold(planner)
        planner.take_angles_from_tables()
        planner.fold_rope_into_attention()
        latent_program.fold_stores(planner)
        planner.take_fresh_keys()
        lanes.arrange(planner)
        planner.fold_residuals()
        planner.fold_norms_of_deltas()
        planner.fold_combines()
        planner.fold_norms()
        planner.count_while_routing()
        planner.drop_unread_angles()
    planner.quantise_inputs()
    lanes.settle(planner)
    for call in planner.calls:
        planner.emit(call)
    side = tape.ops.side_streams() if any(launch.lane for launch in planner.launches) else None
    return Program(bucket, tuple(planner.launches), tuple(planner.held), side)


class Planner:
    """Works on copies of a tape's calls, pass by pass; then emits launches."""

    def __init__(self, tape: Tape, bucket: Bucket, *, fuse: bool) -> None:
        ops = tape.ops
        self.tuning: Tuning = ops.tuning
        self.workspace: Workspace = ops.workspace
        self.deterministic, self.pdl = ops.deterministic, ops.pdl
        self.bucket, self.fuse = bucket, fuse
        self.calls = [Call(call.op, dict(call.arguments)) for call in tape.calls]
        self.results = tape.results()
        self.launches: list[Launch] = []
        self.held: list[Any] = []
        self.sorted_tokens: dict[tuple[int, int], dict[str, Any]] = {}
        """By adapters' buffer and slots: where the step's tokens lie, sorted by adapter."""
        self.beside: list[Call] = []
        """Calls of lane 1 that lane 0 has not waited for."""
        self.lane = 0
        self.after_all = self.join = False
        """The next launch is the first of lane 1, or waits for it."""

    # -------------------------------------------------------------------------------------------------- the data flow

    def last_write(self, before: int, buffer: int) -> int:
        """Index of the call whose value of the buffer the call `before` sees; -1 when it comes from outside."""
        return next((i for i in range(before - 1, -1, -1) if buffer in self.calls[i].writes()), -1)

    def readers(self, writer: int, buffer: int) -> list[int] | None:
        """Calls that read the value which `writer` left in the buffer; None when somebody outside may."""
        found = []
        for i in range(writer + 1, len(self.calls)):
            if buffer in self.calls[i].reads():
                found.append(i)
            if buffer in self.calls[i].writes():
                return found
        return None if buffer in self.results else found

    def untouched(self, buffer: int, first: int, last: int, *, reads: bool) -> bool:
        """Whether no call strictly between writes the buffer (or, with reads, reads it)."""
        return all(
            buffer not in call.writes() and not (reads and buffer in call.reads())
            for call in self.calls[first + 1 : last]
        )

    def way(self, call: Call) -> str:
        """How a matmul of this bucket is computed: "fixed", "gemv", "tile", "wide" or "library"."""
        weight: PackedMatrix = call["weight"]
        if self.deterministic:
            return "fixed"
        if call["low_rank"] is not None:
            return "tile"
        if weight.layout == "fp8_block":
            tokens = self.bucket.tokens
            return "gemv" if tokens == 1 else "tile" if tokens <= self.tuning.tile_rows else "wide"
        if weight.n * weight.k >= 1 << 31:
            return "library"
        if self.bucket.tokens == 1:
            return "gemv"
        return "tile" if self.tile(weight) is not None else "library"

    def tile(self, weight: PackedMatrix) -> TileConfig | None:
        if weight.layout == "fp8_block":
            return self.tuning.block_tile(self.bucket.tokens, weight.n, weight.k)
        return self.tuning.tile(self.bucket.tokens, weight.n, weight.k, fp8=weight.layout == "fp8")

    def wants_fp8(self, call: Call) -> str | None:
        """For whose layout of weights a matmul's input is quantised: FP8 ones, but for the one-row way, which widens them; else None."""
        if call.op == "experts":
            layout, widens = call["gate_up"].layout, mixture.way(self, call) == "one"
        elif is_matmul(call):
            layout, widens = call["weight"].layout, self.way(call) == "gemv"
        else:
            return None
        return None if widens or layout not in FP8_LAYOUTS else str(layout)

    # ---------------------------------------------------------------------------------------------------------- passes

    def leave_adapters_out(self) -> None:
        """Nobody has one: nothing is added, and a matmul that only `glue` reads is gated itself."""
        self.calls = [call for call in self.calls if call.op != "add_low_rank"]
        gone = set()
        for i, call in enumerate(self.calls):
            if call.op != "glue":
                continue
            source = self.last_write(i, address(call["x"]))
            made = self.calls[source] if source >= 0 else None
            if made is None or made.op != "linear" or self.readers(source, address(call["x"])) != [i]:
                continue
            self.calls[i] = Call(
                "gated_linear",
                {
                    "x": made["x"], "weight": replace(made["weight"], gated=True), "bias": made["bias"],
                    "activation": call["activation"], "out": call["out"], "count": call["count"],
                },
            )  # fmt: skip
            gone.add(source)
        self.calls = [call for i, call in enumerate(self.calls) if i not in gone]

    def take_angles_from_tables(self) -> None:
        """rope_store reads its angles from a table by position instead of from what rope_angles wrote in this step."""
        readers = ("attention", "latent_attention")
        reach = [c["rows"].page_table.shape[1] * c["kv"].page_tokens for c in self.calls if c.op in readers]
        if not reach:
            return
        for i, call in enumerate(self.calls):
            if call.op not in ("rope_store", "latent_store"):
                continue
            source = self.last_write(i, address(call["angles"]))
            if source >= 0 and self.calls[source].op == "rope_angles":
                made = self.calls[source]
                call["angles"] = self.workspace.angle_table(made["inv_freq"], scale=made["scale"], positions=max(reach))
                call["positions"] = made["positions"]

    def fold_rope_into_attention(self) -> None:
        """Few rows of one token: attention rotates and writes its own key, and reads the raw qkv row."""
        bucket = self.bucket
        if self.deterministic or not bucket.singles or bucket.rows > self.tuning.fuse_rope_rows:
            return
        gone = set()
        for i, call in enumerate(self.calls):
            if call.op != "rope_store" or call["positions"] is None:
                continue
            q = address(call["out"])
            readers = self.readers(i, q)
            if readers is None or len(readers) != 1:
                continue
            reader = self.calls[readers[0]]
            if (
                reader.op == "attention"
                and reader["causal"]
                and reader["kv"] is call["kv"]
                and call["angles"].shape[1] == call["kv"].head_dim
                and self.untouched(address(call["qkv"]), i, readers[0], reads=False)
            ):
                reader["q"] = call["qkv"]
                reader["rope"] = dict(call.arguments)
                gone.add(i)
        self.calls = [call for i, call in enumerate(self.calls) if i not in gone]

    def take_fresh_keys(self) -> None:
        """Where all keys of the long rows are in this step, attention reads them from the qkv buffer, rotated in place."""
        if self.bucket.fresh == "none" or self.deterministic:
            return
        for i, call in enumerate(self.calls):
            if call.op != "attention" or not call["fresh"] or call["window"] is not None or call["sinks"] is not None:
                continue
            source = self.last_write(i, address(call["q"]))
            made = self.calls[source] if source >= 0 else None
            if (
                made is not None
                and made.op == "rope_store"
                and made["kv"] is call["kv"]
                and self.untouched(address(made["qkv"]), source, i, reads=True)
                and self.readers(self.last_write(source, address(made["qkv"])), address(made["qkv"])) == [source]
            ):
                made["back"] = True
                call["qkv"] = made["qkv"]

    def fold_residuals(self) -> None:
        """A matmul whose result is only added to the residual stream by the next norm adds it itself."""
        for i, call in enumerate(self.calls):
            if call["residual"] is not None or not self.adds_residual(call):
                continue
            out = address(call["out"])
            readers = self.readers(i, out)
            if readers is None or len(readers) != 1:
                continue
            adder = self.calls[readers[0]]
            if adder.op not in ADDERS or adder["delta"] is None or adder["gate"] is not None:
                continue
            x = adder["x"]
            if (
                address(adder["delta"]) == out
                and address(x) != out
                and address(x) != address(call["x"])  # other programs of the matmul read all of its input
                and x.dtype == torch.float32
                and self.untouched(address(x), i, readers[0], reads=True)
            ):
                call["residual"] = call["out"] = x
                adder["delta"] = None

    def adds_residual(self, call: Call) -> bool:
        """Whether its kernel can add to the stream."""
        if call.op == "experts":
            return mixture.way(self, call) == "one"
        return is_matmul(call) and self.way(call) != "library"

    def fold_combines(self) -> None:
        """The weighted sum of experts' answers, where only the next norm adds it, is computed there; with it what a shared expert adds."""
        gone: list[Call] = []
        for i, call in enumerate(self.calls):
            if call.op != "experts" or mixture.way(self, call) == "one":
                continue
            out = address(call["out"])
            readers = self.readers(i, out)
            if readers is None or len(readers) != 1:
                continue
            place, shared = readers[0], None
            if self.calls[place].op == "add" and self.calls[place]["out"] is None:  # of a shared expert's answer
                shared, added = self.calls[place], place
                readers = self.readers(place, out)
                if shared["delta"] is None or address(shared["x"]) != out or readers is None or len(readers) != 1:
                    continue
                place = readers[0]
            adder = self.calls[place]
            if (
                adder.op == "add_rms_norm"
                and adder["delta"] is not None
                and address(adder["delta"]) == out
                and adder["delta_weight"] is None
                and self.untouched(address(call["weights"]), i, place, reads=False)
                and not any(between.op == "experts" for between in self.calls[i + 1 : place])
            ):
                adder["mixture"] = call
                if shared is not None:
                    if not all(
                        self.untouched(address(b), added, place, reads=False)
                        for b in (shared["delta"], shared["gate"])
                        if b is not None
                    ):
                        adder["mixture"] = None
                        continue
                    adder["beside"], adder["beside_gate"] = shared["delta"], shared["gate"]
                    gone.append(shared)
        self.calls = [call for call in self.calls if not any(call is one for one in gone)]

    def count_while_routing(self) -> None:
        """route counts pairs for the sorting behind it."""
        for i, call in enumerate(self.calls):
            if call.op != "experts" or mixture.way(self, call) != "sorted":
                continue
            source = self.last_write(i, address(call["ids"]))
            made = self.calls[source] if source >= 0 else None
            if made is not None and made.op == "route" and all(c.op != "experts" for c in self.calls[source:i]):
                made["experts"], call["counted"] = call, True

    def fold_norms_of_deltas(self) -> None:
        """A norm whose result only the next norm adds (norms on both sides of a block) becomes a part of that one."""
        gone = set()
        for i, call in enumerate(self.calls):
            if call.op != "add_rms_norm" or call["delta"] is not None:
                continue
            source, out = address(call["x"]), address(call["out"])
            readers = self.readers(i, out)
            if readers is None or len(readers) != 1 or source == out:
                continue
            adder = self.calls[readers[0]]
            if (
                adder.op == "add_rms_norm"
                and adder["delta"] is not None
                and address(adder["delta"]) == out
                and source != address(adder["x"]) != out
                and self.untouched(source, i, readers[0], reads=False)
            ):
                adder["delta"] = call["x"]
                adder["delta_weight"], adder["delta_eps"] = call["weight"], call["eps"]
                gone.add(i)
        self.calls = [call for i, call in enumerate(self.calls) if i not in gone]

    def fold_norms(self) -> None:
        """One row: a norm whose result only matmuls read is computed by each of them on the way."""
        gone = set()
        for i, call in enumerate(self.calls):
            if call.op != "add_rms_norm" or call["delta"] is not None:
                continue
            x = address(call["x"])
            readers = self.readers(i, address(call["out"]))
            if not readers or x == address(call["out"]):
                continue
            if all(self.takes_norm(self.calls[j], x) and self.untouched(x, i, j, reads=False) for j in readers):
                for j in readers:
                    self.calls[j]["x"] = call["x"]
                    self.calls[j]["norm"], self.calls[j]["eps"] = call["weight"], call["eps"]
                gone.add(i)
        self.calls = [call for i, call in enumerate(self.calls) if i not in gone]

    def takes_norm(self, call: Call, x: int) -> bool:
        """Whether its kernel can norm its input, which it then reads from x."""
        if call.op == "experts":  # may add to x: its first launch has read x by then
            return mixture.way(self, call) == "one"
        return is_matmul(call) and self.way(call) == "gemv" and address(call["out"]) != x and call["residual"] is None

    def drop_unread_angles(self) -> None:
        """rope_angles whose result nobody reads any more."""
        self.calls = [
            call
            for i, call in enumerate(self.calls)
            if call.op != "rope_angles" or self.readers(i, address(call["out"])) != []
        ]

    def quantise_inputs(self) -> None:
        """FP8 matmuls read e4m3: the call before writes it, where only such matmuls read its result; else a call of its own does."""
        known: set[tuple[int, int, str]] = set()  # (writer, buffer, layout) whose quantised twin is there
        insert: list[tuple[int, str]] = []
        for i, call in enumerate(self.calls):
            layout = self.wants_fp8(call)
            if layout is None:
                continue
            buffer = address(call["x"])
            writer = self.last_write(i, buffer)
            if (writer, buffer, layout) in known:
                continue
            known.add((writer, buffer, layout))
            made = self.calls[writer] if writer >= 0 else None
            if self.fuse and made is not None:
                foldable = made.op == "add_rms_norm" or (
                    layout == "fp8" and made.op == "gated_linear" and self.way(made) == "library"
                )
                readers = self.readers(writer, buffer)
                if (
                    foldable
                    and readers is not None
                    and all(self.wants_fp8(self.calls[j]) == layout for j in readers)
                    and not any(self.calls[j]["low_rank"] for j in readers)  # adapters see the input as it is
                ):
                    made["quantised"] = layout
                    continue
            insert.append((i, layout))
        for i, layout in reversed(insert):
            wanted = self.calls[i]
            self.calls.insert(i, Call("quantise", {"x": wanted["x"], "count": wanted["count"], "layout": layout}))

    # -------------------------------------------------------------------------------------------------------- emission

    def cut(self, buffer: Tensor | None) -> Any:
        """The bucket's part of a buffer [T, ...]."""
        return None if buffer is None else buffer[: self.bucket.tokens]

    def count(self, call: Call, *, always: bool = False) -> Tensor | None:
        """The live count, where a kernel should read it."""
        tokens = self.bucket.tokens
        return call["count"] if tokens >= COUNTED_FROM or (always and tokens > 1) else None

    def launch(self, kernel: Callable[..., None], text: str, *arguments: Any, **options: Any) -> None:
        self.launches.append(Launch(kernel, text, arguments, options, self.lane, self.join))
        self.after_all = self.join = False

    def own(self, kernel: Callable[..., None], text: str, *arguments: Any, **options: Any) -> None:
        """A kernel of ours: it joins the chain of dependent launches."""
        pdl: bool | int = AFTER_ALL if self.pdl and (self.after_all or self.join) else self.pdl
        self.launch(kernel, text, *arguments, **options, pdl=pdl)

    def emit(self, call: Call) -> None:
        """Appends the launches of one call."""
        self.lane = 1 if call["side"] else 0
        if self.lane:
            self.after_all = self.after_all or not self.beside
            self.beside.append(call)
        elif lanes.conflict(call, self.beside):
            self.join, self.beside = True, []
        getattr(self, f"_{call.op}")(call)

    def partial_sums(self, count: int) -> Tensor:
        """float32 scratch of a split matmul; each lane has its own."""
        if not self.lane:
            return self.workspace.floats(count)
        return self.workspace.piece("side sums", count, dtype=torch.float32)

    def arrivals(self, count: int) -> Tensor:
        """int32 arrival counters of a split matmul."""
        if not self.lane:
            return self.workspace.counters(count)
        return self.workspace.piece("side arrivals", count, dtype=torch.int32)

    def _embed(self, call: Call) -> None:
        out, table = self.cut(call["out"]), call["table"]
        self.own(
            elementwise.embed, f"embed {shape(out)}", self.cut(call["ids"]), table.data,
            scale=call["scale"], out=out, count=self.count(call, always=True),
        )  # fmt: skip

    def _add_rms_norm(self, call: Call) -> None:
        x, delta, out, scale = self.cut(call["x"]), self.cut(call["delta"]), self.cut(call["out"]), None
        text = f"rms_norm {shape(x)}" + (" + delta" if delta is not None else "")
        text += " normed" if call["delta_weight"] is not None else ""
        if call["quantised"]:
            small, scales = self.workspace.quantised(call["out"], call["quantised"])
            out, scale, text = self.cut(small), self.cut(scales), f"{text} -> {call['quantised']}"
        if call["mixture"] is not None:
            source = call["mixture"]
            answers, weights = mixture.answers_of(self, source), mixture.shares(self, source)
            text += f" of {weights.shape[1]} experts" + (" and a shared one" if call["beside"] is not None else "")
            self.own(
                moe.combine_norm, text, x, answers, weights, call["weight"], eps=call["eps"], out=out,
                scale=scale, beside=self.cut(call["beside"]), gate=self.cut(call["beside_gate"]), count=self.count(call),
            )  # fmt: skip
            return
        self.own(
            norm.add_rms_norm, text, x, delta, call["weight"], eps=call["eps"], out=out,
            delta_weight=call["delta_weight"], delta_eps=call["delta_eps"] or 0.0, scale=scale, count=self.count(call),
        )  # fmt: skip

    def _add_layer_norm(self, call: Call) -> None:
        x, delta = self.cut(call["x"]), self.cut(call["delta"])
        text = f"layer_norm {shape(x)}" + (" + delta" if delta is not None else "")
        self.own(
            norm.add_layer_norm, text, x, delta, call["weight"], call["bias"],
            eps=call["eps"], out=self.cut(call["out"]), count=self.count(call),
        )  # fmt: skip

    def _add(self, call: Call) -> None:
        x, delta, out = self.cut(call["x"]), self.cut(call["delta"]), self.cut(call["out"])
        if delta is None and out is None:
            return  # a matmul has added it
        text = f"stream {shape(x)}" + (" + delta" if delta is not None else "")
        self.own(elementwise.add, text, x, delta, gate=self.cut(call["gate"]), out=out, count=self.count(call))

    def _rms_norm_span(self, call: Call) -> None:
        x = self.cut(call["x"])
        self.own(
            norm.rms_norm_span, f"rms_norm {len(call['weight'])} columns of {shape(x)}", x, call["weight"],
            start=call["start"], eps=call["eps"], count=self.count(call),
        )  # fmt: skip

    def _scale(self, call: Call) -> None:
        x = self.cut(call["x"])
        self.own(elementwise.scale, f"scale {shape(x)}", x, factor=call["factor"], count=self.count(call))

    def _temper(self, call: Call) -> None:
        x = self.cut(call["x"])
        self.own(
            elementwise.temper, f"temper {shape(x)}", x, self.cut(call["positions"]), every=call["every"], slope=call["slope"],
            count=self.count(call),
        )  # fmt: skip

    def _gelu(self, call: Call) -> None:
        x = self.cut(call["x"])
        self.own(elementwise.gelu, f"gelu {shape(x)}", x, count=self.count(call))

    def _softcap(self, call: Call) -> None:
        x = self.cut(call["x"])
        self.own(elementwise.softcap, f"softcap {shape(x)}", x, cap=call["cap"], count=self.count(call))

    def _gather_rows(self, call: Call) -> None:
        out = self.cut(call["out"])
        self.own(
            elementwise.gather_rows, f"gather_rows {shape(out)}", call["x"], self.cut(call["index"]),
            out=out, count=self.count(call, always=True),
        )  # fmt: skip

    def _quantise(self, call: Call) -> None:
        x, (small, scales) = self.cut(call["x"]), self.workspace.quantised(call["x"], call["layout"])
        self.own(
            quantiser(call["layout"]), f"quantise {shape(x)} -> {call['layout']}", x,
            out=self.cut(small), scale=self.cut(scales), count=self.count(call),
        )  # fmt: skip

    def _rope_angles(self, call: Call) -> None:
        out, inv_freq = self.cut(call["out"]), call["inv_freq"]
        angle = torch.zeros(len(out), len(inv_freq), dtype=torch.float32, device=out.device)
        self.launch(
            library.rope_angles, f"rope_angles {shape(out)} by the library", self.cut(call["positions"]), inv_freq,
            scale=call["scale"], out=out, angle=angle,
        )  # fmt: skip

    def _linear(self, call: Call) -> None:
        self._matmul(call, gated=False)

    def _gated_linear(self, call: Call) -> None:
        self._matmul(call, gated=True)

    def _matmul(self, call: Call, *, gated: bool) -> None:
        weight: PackedMatrix = call["weight"]
        way = self.way(call)
        x, out = self.cut(call["x"]), self.cut(call["out"])
        features = weight.n // 2 if gated else weight.n
        text = f"{way} {shape(x)} -> {weight.n if way == 'library' else features} {weight.layout}" + "".join(
            f" + {name}"
            for name, there in (
                ("norm", call["norm"] is not None),
                ("bias", call["bias"] is not None and way != "library"),
                (call["activation"], gated and way != "library"),
                ("adapters", call["low_rank"] is not None),
                ("residual", call["residual"] is not None),
            )
            if there
        )
        x_scale = None
        wanted = self.wants_fp8(call)
        if wanted is not None:
            small, scales = self.workspace.quantised(call["x"], wanted)
            x, x_scale = self.cut(small), self.cut(scales)
        if way == "library":
            self._library(call, x, x_scale, out, text, gated=gated)
            return
        common = {
            "out": out, "scale": weight.data[1] if weight.layout in FP8_LAYOUTS else None, "bias": call["bias"], "gated": gated,
            "activation": call["activation"] or "silu", "residual": self.cut(call["residual"]),
        }  # fmt: skip
        if way == "fixed":
            self.own(skinny.fixed_linear, text, x, weight.data[0], x_scale=x_scale, count=self.count(call), **common)
            return
        if way == "wide":
            form = self.tile(weight)
            self.own(
                skinny.fixed_linear, f"{text}, {form}", x, weight.data[0], x_scale=x_scale, count=self.count(call), tile=form, **common
            )  # fmt: skip
            return
        config: GemvConfig | TileConfig | None
        if way == "gemv":
            config = self.tuning.gemv(features, weight.k, fp8=weight.layout in FP8_LAYOUTS)
            common |= {"norm": call["norm"], "eps": call["eps"] or 0.0}
        else:
            config = self.tile(weight)
            assert config is not None
            common |= {"x_scale": x_scale}
            if config.split > 1:
                outputs = config.bn // 2 if gated else config.bn
                need = skinny.workspace_floats(features, config=config, gated=gated)
                common |= {
                    "workspace": self.partial_sums(need),
                    "arrived": self.arrivals(-(-features // outputs)),
                }
        kernel: Callable[..., None] = skinny.skinny_linear
        if call["low_rank"] is not None:
            assert isinstance(config, TileConfig)
            kernel = low_rank_tile.adapted_linear
            common |= low_rank_tile.arguments(self, call, config)
        self.own(kernel, f"{text}, {config}", x, weight.data[0], config=config, **common)

    def _library(self, call: Call, x: Tensor, x_scale: Tensor | None, out: Tensor, text: str, *, gated: bool) -> None:
        """cuBLAS, and around it what it cannot do."""
        weight: PackedMatrix = call["weight"]
        bias = call["bias"]
        assert call["residual"] is None and call["norm"] is None, "the library folds nothing in"
        if x_scale is None and x.dtype != torch.bfloat16:
            x = self.cut(self.workspace.rounded(call["x"]))
            self.launch(library.copy, f"copy {shape(x)} -> bf16", self.cut(call["x"]), out=x)
        target = out
        if gated:
            self.workspace.both(len(call["out"]), weight.n)  # at its full size at once
            target = self.workspace.both(self.bucket.tokens, weight.n)
        in_matmul = bias is not None and not gated and x_scale is None and out.dtype == torch.bfloat16
        if x_scale is not None:
            wide = target if target.dtype == torch.bfloat16 else self.workspace.both(self.bucket.tokens, weight.n)
            self.launch(library.scaled_matmul, text, x, x_scale, weight.data[0], weight.data[1], out=wide)
            if wide is not target:
                self.launch(library.copy, f"copy {shape(target)}", wide, out=target)
        elif in_matmul:
            small = self.workspace.rounded(bias)
            small.copy_(bias)
            self.launch(library.matmul, f"{text} + bias", x, weight.data[0], small, out=target)
        else:
            self.launch(library.matmul, text, x, weight.data[0], out=target)
        if gated:
            scale, text = (
                None,
                f"{call['activation']} of gate, by up {shape(out)}" + (" + bias" if bias is not None else ""),
            )
            if call["quantised"]:
                small, scales = self.workspace.quantised(call["out"])
                out, scale, text = self.cut(small), self.cut(scales), text + " -> fp8"
            self.own(
                elementwise.gated_activation, text, target, out=out, activation=call["activation"], bias=bias, scale=scale,
                count=self.count(call),
            )  # fmt: skip
        elif bias is not None and not in_matmul:
            self.own(elementwise.add_bias, f"bias {shape(out)}", out, bias, count=self.count(call))

    def _route(self, call: Call) -> None:
        mixture.emit_route(self, call)

    def _experts(self, call: Call) -> None:
        mixture.emit_experts(self, call)

    def _add_low_rank(self, call: Call) -> None:
        low_rank.emit(self, call)

    def _glue(self, call: Call) -> None:
        low_rank.emit_glue(self, call)

    def _latent_store(self, call: Call) -> None:
        latent_program.emit_store(self, call)

    def _latent_attention(self, call: Call) -> None:
        latent_program.emit_attention(self, call)

    def _rope_store(self, call: Call) -> None:
        kv, qkv = call["kv"], self.cut(call["qkv"])
        by_position = call["positions"] is not None
        text = f"rope_store {shape(qkv)}" + (", k back" if call["back"] else "")
        self.own(
            rope.rope_store, text, qkv, call["angles"] if by_position else self.cut(call["angles"]),
            self.cut(call["write_slots"]), kv.k, kv.v, heads=call["heads"], q_weight=call["q_weight"], k_weight=call["k_weight"],
            eps=call["eps"], positions=self.cut(call["positions"]), out=self.cut(call["out"]), count=self.count(call, always=True),
            back=bool(call["back"]),
        )  # fmt: skip

    def _attention(self, call: Call) -> None:
        bucket, kv, rows = self.bucket, call["kv"], call["rows"]
        q, out = self.cut(call["q"]), self.cut(call["out"])
        query_start = rows.query_start[: bucket.rows + 1]
        common = {
            "lengths": rows.lengths[: bucket.rows], "page_table": rows.page_table[: bucket.rows], "heads": call["heads"],
            "scale": call["scale"], "softcap": call["softcap"], "sinks": call["sinks"], "out": out, "rows": rows.rows,
        }  # fmt: skip
        if not call["causal"]:
            self.own(encode.paged_encode, f"encode {shape(q)}", q, kv.k, kv.v, query_start=query_start, **common)
            return
        common |= {"window": call["window"], "chunked": bool(call["chunked"])}
        part = call["qkv"] is not None and bucket.fresh == "some"
        if call["qkv"] is not None:
            # All fresh: rows of one token, whose older keys are in the pages, come out wrong here and are written again below.
            self.launch(
                library.fresh_attention, f"fa3 {shape(q)}{' of rows that begin' if part else ''}", q, self.cut(call["qkv"]), query_start,
                heads=call["heads"], kv_heads=kv.kv_heads, scale=call["scale"], softcap=call["softcap"],
                begun=self.begun(rows) if part else None, out=out,
            )  # fmt: skip
            if bucket.rows == 1 and not part:
                return
            common["query_start"] = query_start
        if part or (call["qkv"] is None and (self.deterministic or not bucket.singles)):
            # A lone row is this kernel's alone, so that a chunk costs one launch; it may have one token.
            alone = self.deterministic or bucket.rows == 1
            ratio = call["heads"] // kv.kv_heads
            config = prefill_config(self.tuning, kv.head_dim, kv.page_tokens, ratio)
            if self.deterministic:  # which tiles make a pair depends on where a chunk begins
                config = replace(config, pairs=False)
            if bucket.deep and not self.deterministic:
                seen = bucket.longest if call["window"] is None else call["window"] + bucket.deep_tokens
                if seen >= 2 * self.tuning.split_keys:
                    config = split_config(self.tuning, bucket, kv, call["heads"], config)
                need = split_floats(bucket, kv, call["heads"], config)
                common |= {
                    "last": bucket.deep,
                    "last_tokens": bucket.deep_tokens,
                    "workspace": self.workspace.floats(need) if need else None,
                }
            common["query_start"] = query_start
            self.own(
                prefill.paged_prefill, f"prefill {shape(q)}{' of rows that go on' if part else ''}, {config}", q, kv.k, kv.v,
                singles=alone, begun=not part, config=config, **common,
            )  # fmt: skip
            for name in ("last", "last_tokens", "workspace"):
                common.pop(name, None)
            if alone:
                return
        if bucket.rows == 1:
            common["rows"] = None
        form = decode_config(self.tuning, bucket, kv, call["heads"] // kv.kv_heads)
        if form.splits > 1:
            need = decode.decode_workspace_floats(
                bucket.rows, heads=call["heads"], head_dim=kv.head_dim, splits=form.splits
            )
            common |= {
                "workspace": self.workspace.floats(need),
                "arrived": self.workspace.counters(bucket.rows * kv.kv_heads),
            }
        text = f"decode {bucket.rows} rows, {form}"
        if call["rope"] is not None:
            fused = call["rope"]
            # Old keys are read before the wait, if the launch before lets us start only after its own (package docstring).
            before = self.launches[-1] if self.launches else None
            early = self.pdl and before is not None and before.kernel in CAN_BE_LATE and not before.lane
            if early:
                self.launches[-1].options["late"] = True
            common |= {
                "angles": fused["angles"], "q_weight": fused["q_weight"], "k_weight": fused["k_weight"], "eps": fused["eps"],
                "early": early,
            }  # fmt: skip
            text += " + rope" + (", early" if early else "")
        elif bucket.shared and not self.deterministic and call["window"] is None:
            common["shared"] = self.shared_keys(call, common)
            text += " behind shared keys"
        self.own(decode.paged_decode, text, q, kv.k, kv.v, config=form, **common)

    def begun(self, rows: PagedRows) -> Tensor:
        """int32 [R]: tokens of rows that begin in the step, filled where it is laid out."""
        return self.workspace.beside(rows.lengths, "begun", len(rows.lengths))[: self.bucket.rows]

    def shared_keys(self, call: Call, common: dict[str, Any]) -> decode.SharedKeys:
        """Launches the pass over keys that all one-token rows share; what it leaves is folded in by the kernel behind it."""
        bucket, kv, heads = self.bucket, call["kv"], call["heads"]
        packed = 1 << (heads // kv.kv_heads - 1).bit_length()
        config = whole_groups(self.tuning.shared_pass(kv.head_dim, kv.page_tokens), heads // kv.kv_heads)
        if kv.format == "fp8":  # conversions want more registers than two programs a multiprocessor leave
            config = replace(config, registers=0)
        splits = self.tuning.shared_splits(
            kv.kv_heads * -(-bucket.rows * packed // config.block_m), block_m=config.block_m
        )
        # At once as much as any number of rows may need: tiles times splits are at most what runs at once, or splits are 1.
        programs = self.tuning.shared_programs(config.block_m)
        most = max(len(call["rows"].lengths), programs * config.block_m // (kv.kv_heads * packed))
        need = shared.shared_parts_floats(most, heads=heads, head_dim=kv.head_dim, splits=1)
        assert bucket.rows * splits <= most
        keys = decode.SharedKeys(
            found=self.workspace.beside(call["rows"].page_table, "shared", 4),
            parts=self.workspace.piece("shared parts", need, dtype=torch.float32),
            splits=splits,
            block_n=config.block_n,
        )
        q, query_start = self.cut(call["q"]), common.get("query_start")
        self.own(
            shared.shared_attention, f"shared keys {shape(q)}, {splits} splits, {config}", q, kv.k, kv.v, keys=keys,
            page_table=common["page_table"], rows=call["rows"].rows, query_start=query_start, heads=heads, scale=call["scale"],
            softcap=call["softcap"], config=config,
        )  # fmt: skip
        return keys


def quantiser(layout: str) -> Callable[..., None]:
    """What rounds tokens to meet FP8 weights of a layout."""
    return blocks.quantise_columns if layout == "fp8_block" else norm.quantise_tokens


def is_matmul(call: Call) -> bool:
    return call.op in ("linear", "gated_linear")


def shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def decode_config(tuning: Tuning, bucket: Bucket, kv: KVLayer, packed: int) -> DecodeConfig:
    """The tuned constants; wide heads get narrower tiles, so that keys and values fit into shared memory."""
    config = tuning.decode(bucket.rows, bucket.longest, packed=packed, fp8=kv.format == "fp8")
    return replace(config, block_n=min(config.block_n, 32), stages=2) if kv.head_dim > 128 else config


def split_config(tuning: Tuning, bucket: Bucket, kv: KVLayer, heads: int, config: PrefillConfig) -> PrefillConfig:
    """The constants of attention that may be cut over its keys: by the programs that the rows of several tokens make."""
    packed = 1 << (heads // kv.kv_heads - 1).bit_length()
    config = tuning.few_prefill(bucket.deep_tokens * packed, config)
    programs = -(-bucket.deep_tokens * packed // config.block_m) * kv.kv_heads
    return replace(config, splits=tuning.prefill_splits(programs), least_keys=tuning.split_keys)


def split_floats(bucket: Bucket, kv: KVLayer, heads: int, config: PrefillConfig) -> int:
    """Workspace of that, in floats."""
    tokens = bucket.tokens if bucket.deep >= bucket.rows else min(bucket.deep_tokens + bucket.deep - 1, bucket.tokens)
    return prefill.prefill_workspace_floats(tokens, heads=heads, head_dim=kv.head_dim, splits=config.splits)


def reserve_for_splits(tape: Tape, buckets: Iterable[Bucket]) -> None:
    """Grows the workspace to what cut attention needs in the largest of these steps: a capture must not."""
    ops = tape.ops
    for call in tape.calls:
        if call.op == "attention":
            kv, heads = call["kv"], call["heads"]
            whole = prefill_config(ops.tuning, kv.head_dim, kv.page_tokens, heads // kv.kv_heads)
            each = [(b, split_config(ops.tuning, b, kv, heads, whole)) for b in buckets]
            ops.workspace.floats(max((split_floats(b, kv, heads, config) for b, config in each), default=0))
            return


def prefill_config(tuning: Tuning, head_dim: int, page_tokens: int, ratio: int) -> PrefillConfig:
    """The tuned constants; a tile holds whole groups of packed heads."""
    return whole_groups(tuning.prefill(head_dim, page_tokens), ratio)


def whole_groups(config: PrefillConfig, ratio: int) -> PrefillConfig:
    """The constants with tiles of whole groups of packed heads."""
    packed = 1 << (ratio - 1).bit_length()
    return config if config.block_m % packed == 0 else replace(config, block_m=packed)
