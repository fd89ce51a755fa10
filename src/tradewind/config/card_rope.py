"""Rotary embedding as `config.json` describes it, in all spellings, to `RopeFacts`.

Knows: field names, defaults, which scalings are applied. Refuses to know: the arithmetic (layers/rotary.py) and which family it is for.

    default, linear, llama3, yarn     applied
    longrope (also "su")              applied; one of its two lists of factors serves an engine's whole life, see layers/rotary.py
    dynamic                           has no effect up to max_position_embeddings, and longer texts are refused, so it reads as no scaling
"""

from __future__ import annotations

import math

from tradewind.config.card import RopeFacts
from tradewind.config.card_parts import yarn_factor
from tradewind.config.fields import CardError, Fields, plain_float, shown


def hf_ropes(
    fields: Fields, *, theta: float, local: bool, positions: int, head_dim: int
) -> tuple[RopeFacts, RopeFacts | None]:
    """Rope of the full layers and, where windowed ones have their own (`local`: Gemma 3), of those.

    Three spellings: `rope_theta` + `rope_scaling` (with "type" or "rope_type"), `rope_parameters` flat, and the same by layer type.
    `theta` is the base where none is stated.
    """
    theta = fields.number("rope_theta", default=theta)
    partial = fields.number("partial_rotary_factor", default=1.0)
    original = fields.whole("original_max_position_embeddings", default=positions)
    parameters = fields.mapping("rope_parameters")
    old = fields.mapping("rope_scaling")
    empty = Fields({}, origin=fields.origin)

    def read(source: Fields | None, default_theta: float) -> RopeFacts:
        source = empty if source is None else source
        return rope_from_hf(
            source, theta=default_theta, partial=partial, positions=positions, original=original, head_dim=head_dim
        )

    if not local:
        if parameters is not None:
            theta = parameters.number("rope_theta", default=theta)
            partial = parameters.number("partial_rotary_factor", default=partial)
        return read(old or parameters, theta), None
    local_theta = fields.number("rope_local_base_freq", default=1e4)
    nested = parameters is not None and any(key in parameters.values for key in ("full_attention", "sliding_attention"))
    if parameters is not None and nested:
        full = parameters.mapping("full_attention")
        return read(old if old and full is None else full, theta), read(
            parameters.mapping("sliding_attention"), local_theta
        )
    return read(old or parameters, theta), read(None, local_theta)


def rope_from_hf(
    source: Fields, *, theta: float, partial: float, positions: int, original: int, head_dim: int
) -> RopeFacts:
    """One rope description; `theta`, `partial` and `original` (positions before any stretching) are the defaults from outside it."""
    theta = source.number("rope_theta", default=theta)
    partial = source.number("partial_rotary_factor", default=partial)
    dims = int(head_dim * partial)
    if partial > 1.0 or dims % 2 or not dims:
        raise CardError(
            f"{source.origin}: partial_rotary_factor is {partial:g}; it must be a number over 0 and up to 1 that gives an even part of a "
            f"head's {head_dim} dims"
        )
    rotary = None if dims == head_dim else dims
    kind = source.word("rope_type", default=source.word("type", default="default"))
    if kind in ("default", "dynamic", "mrope"):  # the sections of mrope are read by the family that has them
        return RopeFacts(theta=theta, rotary_dims=rotary)
    if kind == "linear":
        return RopeFacts(theta=theta, kind="linear", factor=source.number("factor"), rotary_dims=rotary)
    original = source.whole("original_max_position_embeddings", default=original)
    if kind == "llama3":
        low, high = source.number("low_freq_factor"), source.number("high_freq_factor")
        if low > high:
            raise source.refuse("low_freq_factor", f"at most high_freq_factor, {high:g}")
        return RopeFacts(
            theta=theta,
            kind="llama3",
            factor=source.number("factor"),
            original_max_positions=original,
            low_freq_factor=low,
            high_freq_factor=high,
            rotary_dims=rotary,
        )
    if kind == "yarn":
        factor = source.number("factor", default=positions / original)
        attention = source.optional_number("attention_factor")
        mscale, mscale_all = source.optional_number("mscale"), source.optional_number("mscale_all_dim")
        if attention is None and mscale and mscale_all:
            attention = yarn_factor(factor, mscale) / yarn_factor(factor, mscale_all)
        return RopeFacts(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_positions=original,
            beta_fast=source.number("beta_fast", default=32.0),
            beta_slow=source.number("beta_slow", default=1.0),
            attention_factor=attention,
            truncate=source.flag("truncate", default=True),
            rotary_dims=rotary,
        )
    if kind in ("longrope", "su"):
        if original < 2:  # its logarithm divides
            raise source.refuse("original_max_position_embeddings", "a whole number from 2")
        return RopeFacts(
            theta=theta,
            kind="longrope",
            factor=source.number("factor", default=positions / original),
            original_max_positions=original,
            attention_factor=source.optional_number("attention_factor"),
            short_factors=factor_list(source, "short_factor", count=dims // 2),
            long_factors=factor_list(source, "long_factor", count=dims // 2),
            rotary_dims=rotary,
        )
    raise CardError(
        f"{source.origin}: rope scaling {shown(kind)} is not supported; known are default, dynamic, linear, llama3, longrope, yarn"
    )


def factor_list(source: Fields, field: str, *, count: int) -> tuple[float, ...]:
    """`count` numbers over 0."""
    value = source.values.get(field)
    numbers = [plain_float(item) for item in value] if isinstance(value, list | tuple) else []
    found = tuple(number for number in numbers if number is not None and number > 0)
    if len(found) != count or len(numbers) != count or not all(map(math.isfinite, found)):
        raise source.refuse(field, f"a list of {count} numbers over 0, one for each rotated pair of dims")
    return found
