"""Matmuls in a program: which kernel or library call multiplies, and what it does besides. A part of planning.py.

Knows: constants by size, splits, quantised inputs, and what cuBLAS cannot do. Refuses to know: what has been folded into a matmul, and why
(passes.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tradewind.kernels.ops import PackedMatrix
from tradewind.kernels.triton import blocks, elementwise, library, low_rank_tile, mixture, norm, skinny
from tradewind.kernels.triton.planner import Planner, is_matmul, shape
from tradewind.kernels.triton.tape import Call
from tradewind.kernels.triton.tuning import GemvConfig, TileConfig

FP8_LAYOUTS = ("fp8", "fp8_block")


def wants_fp8(planner: Planner, call: Call) -> str | None:
    """For whose layout of weights a matmul's input is quantised: FP8 ones, but for the one-row way, which widens them; else None."""
    if call.op == "experts":
        layout, widens = call["gate_up"].layout, mixture.way(planner, call) == "one"
    elif is_matmul(call):
        layout, widens = call["weight"].layout, planner.way(call) == "gemv"
    else:
        return None
    return None if widens or layout not in FP8_LAYOUTS else str(layout)


def emit_linear(planner: Planner, call: Call) -> None:
    """Appends the launch of a `linear` call."""
    _matmul(planner, call, gated=False)


def emit_gated(planner: Planner, call: Call) -> None:
    """Appends the launch of a `gated_linear` call."""
    _matmul(planner, call, gated=True)


def _matmul(planner: Planner, call: Call, *, gated: bool) -> None:
    weight: PackedMatrix = call["weight"]
    way = planner.way(call)
    x, out = planner.cut(call["x"]), planner.cut(call["out"])
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
    wanted = wants_fp8(planner, call)
    if wanted is not None:
        small, scales = planner.workspace.quantised(call["x"], wanted)
        x, x_scale = planner.cut(small), planner.cut(scales)
    if way == "library":
        _library(planner, call, x, x_scale, out, text, gated=gated)
        return
    common = {
        "out": out, "scale": weight.data[1] if weight.layout in FP8_LAYOUTS else None, "bias": call["bias"], "gated": gated,
        "activation": call["activation"] or "silu", "residual": planner.cut(call["residual"]),
    }  # fmt: skip
    if way == "fixed":
        planner.own(skinny.fixed_linear, text, x, weight.data[0], x_scale=x_scale, count=planner.count(call), **common)
        return
    if way == "wide":
        form = planner.tile(weight)
        assert form is not None
        planner.own(
            skinny.fixed_linear, f"{text}, {form}", x, weight.data[0], x_scale=x_scale, count=planner.count(call), tile=form, **common
        )  # fmt: skip
        return
    config: GemvConfig | TileConfig | None
    if way == "gemv":
        config = planner.tuning.gemv(features, weight.k, fp8=weight.layout in FP8_LAYOUTS)
        common |= {"norm": call["norm"], "eps": call["eps"] or 0.0}
    else:
        config = planner.tile(weight)
        assert config is not None
        common |= {"x_scale": x_scale}
        if config.split > 1:
            outputs = config.bn // 2 if gated else config.bn
            need = skinny.workspace_floats(features, config=config, gated=gated)
            common |= {
                "workspace": planner.partial_sums(need),
                "arrived": planner.arrivals(-(-features // outputs)),
            }
    kernel: Callable[..., None] = skinny.skinny_linear
    if call["low_rank"] is not None:
        assert isinstance(config, TileConfig)
        kernel = low_rank_tile.adapted_linear
        common |= low_rank_tile.arguments(planner, call, config)
    planner.own(kernel, f"{text}, {config}", x, weight.data[0], config=config, **common)


def _library(
    planner: Planner, call: Call, x: Tensor, x_scale: Tensor | None, out: Tensor, text: str, *, gated: bool
) -> None:
    """cuBLAS, and around it what it cannot do."""
    weight: PackedMatrix = call["weight"]
    bias = call["bias"]
    assert call["residual"] is None and call["norm"] is None, "the library folds nothing in"
    if x_scale is None and x.dtype != torch.bfloat16:
        x = planner.cut(planner.workspace.rounded(call["x"]))
        planner.launch(library.copy, f"copy {shape(x)} -> bf16", planner.cut(call["x"]), out=x)
    target = out
    if gated:
        planner.workspace.both(len(call["out"]), weight.n)  # at its full size at once
        target = planner.workspace.both(planner.bucket.tokens, weight.n)
    in_matmul = bias is not None and not gated and x_scale is None and out.dtype == torch.bfloat16
    if x_scale is not None:
        wide = target if target.dtype == torch.bfloat16 else planner.workspace.both(planner.bucket.tokens, weight.n)
        planner.launch(library.scaled_matmul, text, x, x_scale, weight.data[0], weight.data[1], out=wide)
        if wide is not target:
            planner.launch(library.copy, f"copy {shape(target)}", wide, out=target)
    elif in_matmul:
        small = planner.workspace.rounded(bias)
        small.copy_(bias)
        planner.launch(library.matmul, f"{text} + bias", x, weight.data[0], small, out=target)
    else:
        planner.launch(library.matmul, text, x, weight.data[0], out=target)
    if gated:
        scale, text = (
            None,
            f"{call['activation']} of gate, by up {shape(out)}" + (" + bias" if bias is not None else ""),
        )
        if call["quantised"]:
            small, scales = planner.workspace.quantised(call["out"])
            out, scale, text = planner.cut(small), planner.cut(scales), text + " -> fp8"
        planner.own(
            elementwise.gated_activation, text, target, out=out, activation=call["activation"], bias=bias, scale=scale,
            count=planner.count(call),
        )  # fmt: skip
    elif bias is not None and not in_matmul:
        planner.own(elementwise.add_bias, f"bias {shape(out)}", out, bias, count=planner.count(call))


def emit_quantise(planner: Planner, call: Call) -> None:
    """Appends the launch of a `quantise` call."""
    x, (small, scales) = planner.cut(call["x"]), planner.workspace.quantised(call["x"], call["layout"])
    planner.own(
        quantiser(call["layout"]), f"quantise {shape(x)} -> {call['layout']}", x,
        out=planner.cut(small), scale=planner.cut(scales), count=planner.count(call),
    )  # fmt: skip


def quantiser(layout: str) -> Callable[..., None]:
    """What rounds tokens to meet FP8 weights of a layout."""
    return blocks.quantise_columns if layout == "fp8_block" else norm.quantise_tokens
