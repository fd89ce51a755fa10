"""Embedding, norms and what is computed number by number, in a program. A part of planning.py.

Knows: what a norm does besides (quantise, add experts' answers). Refuses to know: what was folded into it, and why (passes.py).
"""

from __future__ import annotations

from tradewind.kernels.triton import elementwise, mixture, moe, norm
from tradewind.kernels.triton.planner import Planner, shape
from tradewind.kernels.triton.tape import Call


def emit_embed(planner: Planner, call: Call) -> None:
    """Appends the launch of an `embed` call."""
    out, table = planner.cut(call["out"]), call["table"]
    planner.own(
        elementwise.embed, f"embed {shape(out)}", planner.cut(call["ids"]), table.data,
        scale=call["scale"], out=out, count=planner.count(call, always=True),
    )  # fmt: skip


def emit_add_rms_norm(planner: Planner, call: Call) -> None:
    """Appends the launch of an `add_rms_norm` call."""
    x, delta, out, scale = planner.cut(call["x"]), planner.cut(call["delta"]), planner.cut(call["out"]), None
    text = f"rms_norm {shape(x)}" + (" + delta" if delta is not None else "")
    text += " normed" if call["delta_weight"] is not None else ""
    if call["quantised"]:
        small, scales = planner.workspace.quantised(call["out"], call["quantised"])
        out, scale, text = planner.cut(small), planner.cut(scales), f"{text} -> {call['quantised']}"
    if call["mixture"] is not None:
        source = call["mixture"]
        answers, weights = mixture.answers_of(planner, source), mixture.shares(planner, source)
        text += f" of {weights.shape[1]} experts" + (" and a shared one" if call["beside"] is not None else "")
        planner.own(
            moe.combine_norm, text, x, answers, weights, call["weight"], eps=call["eps"], out=out,
            scale=scale, beside=planner.cut(call["beside"]), gate=planner.cut(call["beside_gate"]), count=planner.count(call),
        )  # fmt: skip
        return
    planner.own(
        norm.add_rms_norm, text, x, delta, call["weight"], eps=call["eps"], out=out,
        delta_weight=call["delta_weight"], delta_eps=call["delta_eps"] or 0.0, scale=scale, count=planner.count(call),
    )  # fmt: skip


def emit_add_layer_norm(planner: Planner, call: Call) -> None:
    """Appends the launch of an `add_layer_norm` call."""
    x, delta = planner.cut(call["x"]), planner.cut(call["delta"])
    text = f"layer_norm {shape(x)}" + (" + delta" if delta is not None else "")
    planner.own(
        norm.add_layer_norm, text, x, delta, call["weight"], call["bias"],
        eps=call["eps"], out=planner.cut(call["out"]), count=planner.count(call),
    )  # fmt: skip


def emit_add(planner: Planner, call: Call) -> None:
    """Appends the launch of an `add` call."""
    x, delta, out = planner.cut(call["x"]), planner.cut(call["delta"]), planner.cut(call["out"])
    if delta is None and out is None:
        return  # a matmul has added it
    text = f"stream {shape(x)}" + (" + delta" if delta is not None else "")
    planner.own(elementwise.add, text, x, delta, gate=planner.cut(call["gate"]), out=out, count=planner.count(call))


def emit_rms_norm_span(planner: Planner, call: Call) -> None:
    """Appends the launch of a `rms_norm_span` call."""
    x = planner.cut(call["x"])
    planner.own(
        norm.rms_norm_span, f"rms_norm {len(call['weight'])} columns of {shape(x)}", x, call["weight"],
        start=call["start"], eps=call["eps"], count=planner.count(call),
    )  # fmt: skip


def emit_scale(planner: Planner, call: Call) -> None:
    """Appends the launch of a `scale` call."""
    x = planner.cut(call["x"])
    planner.own(elementwise.scale, f"scale {shape(x)}", x, factor=call["factor"], count=planner.count(call))


def emit_temper(planner: Planner, call: Call) -> None:
    """Appends the launch of a `temper` call."""
    x = planner.cut(call["x"])
    planner.own(
        elementwise.temper, f"temper {shape(x)}", x, planner.cut(call["positions"]), every=call["every"], slope=call["slope"],
        count=planner.count(call),
    )  # fmt: skip


def emit_gelu(planner: Planner, call: Call) -> None:
    """Appends the launch of a `gelu` call."""
    x = planner.cut(call["x"])
    planner.own(elementwise.gelu, f"gelu {shape(x)}", x, count=planner.count(call))


def emit_softcap(planner: Planner, call: Call) -> None:
    """Appends the launch of a `softcap` call."""
    x = planner.cut(call["x"])
    planner.own(elementwise.softcap, f"softcap {shape(x)}", x, cap=call["cap"], count=planner.count(call))


def emit_gather_rows(planner: Planner, call: Call) -> None:
    """Appends the launch of a `gather_rows` call."""
    out = planner.cut(call["out"])
    planner.own(
        elementwise.gather_rows, f"gather_rows {shape(out)}", call["x"], planner.cut(call["index"]),
        out=out, count=planner.count(call, always=True),
    )  # fmt: skip
