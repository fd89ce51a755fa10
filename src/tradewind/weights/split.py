"""Tensors that hold several matrices of a model in one: q, k and v together, gate and up together, all experts of a layer.

Knows: how such a tensor is cut along its first axes. Refuses to know: which families store what so; that is a table beside each model.

    [q rows | k rows | v rows]                     rows in proportion to card fields    HF phi3
    [expert 0 | expert 1 | ...]                    one more axis in front               GGUF, and newer Hugging Face files
    [[gate 0 | up 0] | [gate 1 | up 1] | ...]      both

A cut goes between whole rows, so a part is a view of the same bytes, of any format, and can still be read from its file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter

from tradewind.config.card import ModelCard
from tradewind.contract.errors import UserError
from tradewind.weights.tensor import RawTensor, shown

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""A layer or an expert in a name; `{}` stands for it in the tables."""

Fused = Mapping[str, Mapping[str, str]]
"""Place of a tensor that holds several -> place of each part, in order -> the card's field that its share of rows is counted in.
A part whose place has one number more than the whole is there once for each expert."""


class SplitError(UserError):
    """A tensor that cannot be cut as its family's table says."""


def parts_of(tensor: RawTensor, place: str, *, fused: Fused, card: ModelCard) -> dict[str, RawTensor]:
    """Place -> tensor: the parts of a tensor at `place`, or the tensor itself where the table has no row for it. Copies nothing.

    Raises SplitError for a number of rows that does not fit the card.
    """
    parts = fused.get(NUMBER.sub("{}", place))
    if parts is None:
        return {place: tensor}
    numbers = NUMBER.findall(place)
    stacked = next(iter(parts)).count("{}") > len(numbers)
    experts = tensor.shape[0] if stacked else 1
    shape = tensor.shape[1:] if stacked else tensor.shape
    units = [attrgetter(field)(card) for field in parts.values()]
    if not shape or not experts or shape[0] % sum(units) or not shape[0]:
        wanted = " : ".join(str(unit) for unit in units)
        raise SplitError(
            f"tensor '{shown(tensor.name)}' has the shape {tensor.shape}, which cannot be cut into {len(parts)} parts of {wanted} rows"
        )
    row_bytes = tensor.nbytes // (experts * shape[0])
    found: dict[str, RawTensor] = {}
    start = 0
    for expert in range(experts):
        for part, unit in zip(parts, units, strict=True):
            rows = shape[0] // sum(units) * unit
            begin, end = start * row_bytes, (start + rows) * row_bytes
            found[part.format(*numbers, expert)] = replace(
                tensor, shape=(rows, *shape[1:]), data=tensor.data[begin:end], offset=tensor.offset + begin
            )
            start += rows
    return found
