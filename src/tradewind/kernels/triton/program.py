"""From a tape's calls to launches: constants chosen for a bucket, neighbours fused where the data flow allows.

Knows: which kernel serves which call at which size, and what may be folded into what. Refuses to know: models (it sees calls and buffers),
graphs, the arithmetic of kernels. A plan allocates; a run launches on the current stream, allocates nothing and waits for nothing.

    matmul of M tokens      M = 1                gemv      norm of the input, bias, SiLU-mul and residual folded in
                            up to tile_rows      tile      bias, SiLU-mul, residual; FP8: input quantised per token
                            up to 256, or more   wide      the same: shapes that were measured, and FP8 by blocks (blocks.py) of any size
                            more                 library   torch.mm / _scaled_mm, the rest in kernels of their own
                            deterministic        fixed     one tile for every M: a row's bits do not depend on its neighbours

    x, delta -> norm        a matmul that writes delta, which nothing but the next norm reads, adds to x itself
    norm, delta -> norm     one launch (norms on both sides of a block)
    add_low_rank            few tokens: a part of the matmul's own tiles (low_rank_tile.py), which are gated themselves then; else tokens
                            sorted by adapter once a step and two launches, of which for gate and up the second is `glue` as well where
                            tokens are many (low_rank.py); nothing where nobody has an adapter
    experts                 1 token, few tokens, or pairs sorted by expert (moe.py); their weighted sum in the next norm, or added to x;
                            the shared expert's answer goes the same way, and is computed on a second stream in small steps (lanes.py)
    norm -> matmuls         gemv, experts of one token: the norm is folded in; FP8 tiles, library, fixed: the norm quantises
    rope_store, attention   prompts by kind, one-token rows; one launch where these are few; angles from a table (attention_program.py)
    latents                 queries in and answers out of their space; one-token rows, or naive and absorbed forms (latent_program.py)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tradewind.kernels.ops import PackedMatrix
from tradewind.kernels.triton import (
    attention_program,
    blocks,
    elementwise,
    lanes,
    latent_program,
    library,
    low_rank,
    low_rank_tile,
    mixture,
    moe,
    norm,
    skinny,
)
from tradewind.kernels.triton.launch import AFTER_ALL
from tradewind.kernels.triton.tape import ADDERS, Bucket, Call, Tape, address
from tradewind.kernels.triton.tuning import GemvConfig, TileConfig, Tuning
from tradewind.kernels.triton.workspace import Workspace

FP8_LAYOUTS = ("fp8", "fp8_block")
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
        low_rank.fold(planner)
        attention_program.take_angles_from_tables(planner)
        attention_program.fold_rope(planner)
        latent_program.fold_stores(planner)
        attention_program.take_fresh_keys(planner)
        lanes.arrange(planner)
        planner.fold_residuals()
        planner.fold_norms_of_deltas()
        planner.fold_combines()
        planner.fold_norms()
        planner.count_while_routing()
        attention_program.drop_unread_angles(planner)
    planner.quantise_inputs()
    lanes.settle(planner)
    planner.weighed = frozenset(id(call["mixture"]) for call in planner.calls)
    for call in planner.calls:
        planner.emit(call)
    side = tape.ops.side_streams() if any(launch.lane for launch in planner.launches) else None
    return Program(bucket, tuple(planner.launches), side)


class Planner:
    """Works on copies of a tape's calls, pass by pass; then emits launches."""

    def __init__(self, tape: Tape, bucket: Bucket, *, fuse: bool) -> None:
        ops = tape.ops
        self.tuning: Tuning = ops.tuning
        self.workspace: Workspace = ops.workspace
        self.deterministic, self.pdl = ops.deterministic, ops.pdl
        self.bucket, self.fuse = bucket, fuse
        self.calls = [call.copy() for call in tape.calls]
        self.results = tape.results()
        self.launches: list[Launch] = []
        self.sorted_tokens: dict[tuple[int, int], dict[str, Any]] = {}
        """By adapters' buffer and slots: where the step's tokens lie, sorted by adapter."""
        self.beside: list[Call] = []
        """Calls of lane 1 that lane 0 has not waited for."""
        self.weighed: frozenset[int] = frozenset()
        """Calls of experts whose weighted sum another call computes; known when launches are emitted."""
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
        if weight.layout != "fp8_block" and weight.n * weight.k >= 1 << 31:
            return "library"
        if self.bucket.tokens == 1:
            return "gemv"
        if self.tile(weight) is None:
            return "library"
        return "tile" if self.bucket.tokens <= self.tuning.tile_rows else "wide"

    def tile(self, weight: PackedMatrix) -> TileConfig | None:
        if weight.layout == "fp8_block":
            return self.tuning.block_tile(self.bucket.tokens, weight.n, weight.k)
        choose = self.tuning.tile if self.bucket.tokens <= self.tuning.tile_rows else self.tuning.wide
        return choose(self.bucket.tokens, weight.n, weight.k, fp8=weight.layout == "fp8")

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
        elsewhere = EMITTERS.get(call.op)
        if elsewhere is not None:
            elsewhere(self, call)
        else:
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
            assert form is not None
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


EMITTERS: dict[str, Callable[[Planner, Call], None]] = {
    "add_low_rank": low_rank.emit,
    "attention": attention_program.emit_attention,
    "experts": mixture.emit_experts,
    "glue": low_rank.emit_glue,
    "latent_attention": latent_program.emit_attention,
    "latent_store": latent_program.emit_store,
    "rope_angles": attention_program.emit_angles,
    "rope_store": attention_program.emit_store,
    "route": mixture.emit_route,
}
"""Op -> what appends its launches, where a file of its own plans it; for every other op a method of the planner does."""


def quantiser(layout: str) -> Callable[..., None]:
    """What rounds tokens to meet FP8 weights of a layout."""
    return blocks.quantise_columns if layout == "fp8_block" else norm.quantise_tokens


def is_matmul(call: Call) -> bool:
    return call.op in ("linear", "gated_linear")


def shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
