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
