"""What is folded into what between recorded calls and launches, where the data flow allows: pass by pass over a planner's calls.

Knows: norms, residuals, mixtures' weighted sums, adapters that nobody has, quantised inputs. Refuses to know: kernels, and what attention,
latents, adapters and lanes fold (files of their own).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tradewind.kernels.triton import mixture
from tradewind.kernels.triton.matmul_program import wants_fp8
from tradewind.kernels.triton.planner import Planner, is_matmul
from tradewind.kernels.triton.tape import ADDERS, Call
from tradewind.kernels.triton.workspace import address


def leave_adapters_out(planner: Planner) -> None:
    """Nobody has one: nothing is added, and a matmul that only `glue` reads is gated itself."""
    planner.calls = [call for call in planner.calls if call.op != "add_low_rank"]
    gone = set()
    for i, call in enumerate(planner.calls):
        if call.op != "glue":
            continue
        source = planner.last_write(i, address(call["x"]))
        made = planner.calls[source] if source >= 0 else None
        if made is None or made.op != "linear" or planner.readers(source, address(call["x"])) != [i]:
            continue
        planner.calls[i] = Call(
            "gated_linear",
            {
                "x": made["x"], "weight": replace(made["weight"], gated=True), "bias": made["bias"],
                "activation": call["activation"], "out": call["out"], "count": call["count"],
            },
        )  # fmt: skip
        gone.add(source)
    planner.calls = [call for i, call in enumerate(planner.calls) if i not in gone]


def fold_residuals(planner: Planner) -> None:
    """A matmul whose result is only added to the residual stream by the next norm adds it itself."""
    for i, call in enumerate(planner.calls):
        if call["residual"] is not None or not adds_residual(planner, call):
            continue
        out = address(call["out"])
        readers = planner.readers(i, out)
        if readers is None or len(readers) != 1:
            continue
        adder = planner.calls[readers[0]]
        if adder.op not in ADDERS or adder["delta"] is None or adder["gate"] is not None:
            continue
        x = adder["x"]
        if (
            address(adder["delta"]) == out
            and address(x) != out
            and address(x) != address(call["x"])  # other programs of the matmul read all of its input
            and x.dtype == torch.float32
            and planner.untouched(address(x), i, readers[0], reads=True)
        ):
            call["residual"] = call["out"] = x
            adder["delta"] = None


def adds_residual(planner: Planner, call: Call) -> bool:
    """Whether its kernel can add to the stream."""
    if call.op == "experts":
        return mixture.way(planner, call) == "one"
    return is_matmul(call) and planner.way(call) != "library"


def fold_combines(planner: Planner) -> None:
    """The weighted sum of experts' answers, where only the next norm adds it, is computed there; with it what a shared expert adds."""
    gone: list[Call] = []
    for i, call in enumerate(planner.calls):
        if call.op != "experts" or mixture.way(planner, call) == "one":
            continue
        out = address(call["out"])
        readers = planner.readers(i, out)
        if readers is None or len(readers) != 1:
            continue
        place, shared = readers[0], None
        if planner.calls[place].op == "add" and planner.calls[place]["out"] is None:  # of a shared expert's answer
            shared, added = planner.calls[place], place
            readers = planner.readers(place, out)
            if shared["delta"] is None or address(shared["x"]) != out or readers is None or len(readers) != 1:
                continue
            place = readers[0]
        adder = planner.calls[place]
        if (
            adder.op == "add_rms_norm"
            and adder["delta"] is not None
            and address(adder["delta"]) == out
            and adder["delta_weight"] is None
            and planner.untouched(address(call["weights"]), i, place, reads=False)
            and not any(between.op == "experts" for between in planner.calls[i + 1 : place])
        ):
            adder["mixture"] = call
            if shared is not None:
                if not all(
                    planner.untouched(address(b), added, place, reads=False)
                    for b in (shared["delta"], shared["gate"])
                    if b is not None
                ):
                    adder["mixture"] = None
                    continue
                adder["beside"], adder["beside_gate"] = shared["delta"], shared["gate"]
                gone.append(shared)
    planner.calls = [call for call in planner.calls if not any(call is one for one in gone)]


def count_while_routing(planner: Planner) -> None:
    """route counts pairs for the sorting behind it."""
    for i, call in enumerate(planner.calls):
        if call.op != "experts" or mixture.way(planner, call) != "sorted":
            continue
        source = planner.last_write(i, address(call["ids"]))
        made = planner.calls[source] if source >= 0 else None
        if made is not None and made.op == "route" and all(c.op != "experts" for c in planner.calls[source:i]):
            made["experts"], call["counted"] = call, True


def fold_norms_of_deltas(planner: Planner) -> None:
    """A norm whose result only the next norm adds (norms on both sides of a block) becomes a part of that one."""
    gone = set()
    for i, call in enumerate(planner.calls):
        if call.op != "add_rms_norm" or call["delta"] is not None:
            continue
        source, out = address(call["x"]), address(call["out"])
        readers = planner.readers(i, out)
        if readers is None or len(readers) != 1 or source == out:
            continue
        adder = planner.calls[readers[0]]
        if (
            adder.op == "add_rms_norm"
            and adder["delta"] is not None
            and address(adder["delta"]) == out
            and source != address(adder["x"]) != out
            and planner.untouched(source, i, readers[0], reads=False)
        ):
            adder["delta"] = call["x"]
            adder["delta_weight"], adder["delta_eps"] = call["weight"], call["eps"]
            gone.add(i)
    planner.calls = [call for i, call in enumerate(planner.calls) if i not in gone]


def fold_norms(planner: Planner) -> None:
    """One row: a norm whose result only matmuls read is computed by each of them on the way."""
    gone = set()
    for i, call in enumerate(planner.calls):
        if call.op != "add_rms_norm" or call["delta"] is not None:
            continue
        x = address(call["x"])
        readers = planner.readers(i, address(call["out"]))
        if not readers or x == address(call["out"]):
            continue
        if all(takes_norm(planner, planner.calls[j], x) and planner.untouched(x, i, j, reads=False) for j in readers):
            for j in readers:
                planner.calls[j]["x"] = call["x"]
                planner.calls[j]["norm"], planner.calls[j]["eps"] = call["weight"], call["eps"]
            gone.add(i)
    planner.calls = [call for i, call in enumerate(planner.calls) if i not in gone]


def takes_norm(planner: Planner, call: Call, x: int) -> bool:
    """Whether its kernel can norm its input, which it then reads from x."""
    if call.op == "experts":  # may add to x: its first launch has read x by then
        return mixture.way(planner, call) == "one"
    return is_matmul(call) and planner.way(call) == "gemv" and address(call["out"]) != x and call["residual"] is None


def quantise_inputs(planner: Planner) -> None:
    """FP8 matmuls read e4m3: the call before writes it, where only such matmuls read its result; else a call of its own does."""
    known: set[tuple[int, int, str]] = set()  # (writer, buffer, layout) whose quantised twin is there
    insert: list[tuple[int, str]] = []
    for i, call in enumerate(planner.calls):
        layout = wants_fp8(planner, call)
        if layout is None:
            continue
        buffer = address(call["x"])
        writer = planner.last_write(i, buffer)
        if (writer, buffer, layout) in known:
            continue
        known.add((writer, buffer, layout))
        made = planner.calls[writer] if writer >= 0 else None
        if planner.fuse and made is not None:
            foldable = made.op == "add_rms_norm" or (
                layout == "fp8" and made.op == "gated_linear" and planner.way(made) == "library"
            )
            readers = planner.readers(writer, buffer)
            if (
                foldable
                and readers is not None
                and all(wants_fp8(planner, planner.calls[j]) == layout for j in readers)
                and not any(planner.calls[j]["low_rank"] for j in readers)  # adapters see the input as it is
            ):
                made["quantised"] = layout
                continue
        insert.append((i, layout))
    for i, layout in reversed(insert):
        wanted = planner.calls[i]
        planner.calls.insert(i, Call("quantise", {"x": wanted["x"], "count": wanted["count"], "layout": layout}))
