"""How a kernel begins: programmatic dependent launch in two device functions, and the options that go with it.

Knows: the order "let the successor start, load weights, wait, load the rest". Refuses to know: what is computed.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """The next kernel's programs may be scheduled from here on; they still wait for our end before they read what we wrote."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Returns when every kernel before this one has ended and its writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch_lines(pointers, PDL: tl.constexpr):
    """Asks L2 for the 128-byte lines at `pointers` (a tile of pointers); changes nothing. Only useful before `wait_for_previous`."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def prefetch_share(weights_ptr, lines, share, shares, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Asks L2 for this program's share of `lines` 128-byte lines at weights_ptr (uint8): weights of the kernels to come, while memory idles."""
    i = tl.arange(0, BLOCK)
    for start in range(share * BLOCK, lines, shares * BLOCK):
        line = tl.minimum(start + i, lines - 1)
        prefetch_lines(weights_ptr + line.to(tl.int64) * 128, PDL)


def launch_options(*, pdl: bool, warps: int, stages: int | None = None) -> dict[str, Any]:
    """Keyword arguments of a launch. `launch_pdl` is passed only when wanted: older interpreters do not know it."""
    options: dict[str, Any] = {"PDL": pdl, "num_warps": warps}
    if stages is not None:
        options["num_stages"] = stages
    if pdl:
        options["launch_pdl"] = True
    return options


def pow2(value: int, least: int = 1) -> int:
    """The smallest power of two >= value, at least `least`."""
    return max(least, triton.next_power_of_2(value))


FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest finite e4m3 value; stores clamp to it."""
