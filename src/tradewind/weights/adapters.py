"""The weights of a low-rank adapter, as the library PEFT writes them: from names in its file to changes of places in the model.

Knows: names and scaling. Refuses to know: models beyond a family's tables, and who uses an adapter. What a model has no place for is
refused by name.

    base_model.model.NAME.lora_A.weight  [r, K]      NAME.weight is a matrix of the checkpoint, changed by B A * scale
    base_model.model.NAME.lora_B.weight  [N, r]      one that holds several matrices is cut with B, as at load
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tradewind.config.adapter_files import TENSORS, AdapterError, AdapterFile
from tradewind.config.card import ModelCard
from tradewind.quantization.plain import as_float
from tradewind.weights.load import FamilyRow, in_rope_order, place_of
from tradewind.weights.safetensors import open_safetensors
from tradewind.weights.split import parts_of
from tradewind.weights.tensor import RawTensor, shown

PREFIX = "base_model.model."
HALVES = ("lora_A", "lora_B")
Floats = NDArray[np.float32]


def read_adapter(adapter: AdapterFile, *, family: FamilyRow[Any], card: ModelCard) -> dict[str, tuple[Floats, Floats]]:
    """Place -> A [r, K] and B [N, r], the scale in B; raises AdapterError naming the tensor."""
    folder = adapter.folder
    halves: dict[str, dict[str, RawTensor]] = {}
    for name, tensor in open_safetensors(folder / TENSORS).items():
        module, half = _named(name)
        if half is None:
            raise AdapterError(f"'{folder}': tensor '{shown(name)}' is no half of a low-rank change of a matrix")
        halves.setdefault(module, {})[half] = tensor
    changes: dict[str, tuple[Floats, Floats]] = {}
    for module, found in halves.items():
        place = place_of(f"{module}.weight", family=family, gguf=False)
        if place is None:
            raise AdapterError(f"'{folder}' changes '{shown(module)}', which a {card.family} model does not have")
        if len(found) != 2 or any(len(each.shape) != 2 for each in found.values()):
            raise AdapterError(f"'{folder}': '{shown(module)}' needs lora_A and lora_B, two matrices")
        a = as_float([found["lora_A"]])
        for part, rows in parts_of(found["lora_B"], place, fused=family.fused, card=card).items():
            rows = in_rope_order(rows, part, family=family, card=card, gguf=False)
            changes[part] = (a, as_float([rows]) * np.float32(adapter.scale(len(a))))
    if not changes:
        raise AdapterError(f"'{folder}' changes nothing")
    return changes


def _named(name: str) -> tuple[str, str | None]:
    """Module and half of a tensor's name."""
    for half in HALVES:
        ending = f".{half}.weight"
        if name.endswith(ending):
            return name.removesuffix(ending).removeprefix(PREFIX), half
    return name, None
