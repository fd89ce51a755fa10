"""A low-rank adapter on disk, without its weights: where it lies, what it says of itself, and its version.

Knows: the description that the library PEFT writes, and what of it is served. Refuses to know: tensors (weights/adapters.py) and who asks.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tradewind.config.fields import plain_float, plain_int, shown
from tradewind.contract.errors import UserError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
SEPARATOR = "@"
SERVED: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("peft_type", ("LORA",)),
    ("bias", ("none", None)),
    ("use_dora", (False, None)),
    ("fan_in_fan_out", (False, None)),
    ("modules_to_save", (None, [])),
    ("alpha_pattern", (None, {})),
    ("layer_replication", (None, [])),
)
"""Fields whose other values would mean more than low-rank additions to matrices."""


class AdapterError(UserError):
    """An adapter that cannot be read, or that changes more than low-rank additions to matrices can say."""


class AdapterFile(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter's folder and the version of what lay there when it was looked at."""

    folder: Path
    version: str
    """A hash of the files: it changes when they do."""
    rank: int
    """As stated; a matrix may have another."""
    alpha: float
    rank_stabilised: bool = False

    @property
    def key(self) -> str:
        """What `Request.adapter` says: requests of equal keys share prefixes, and the device wing finds the files by it."""
        return f"{self.folder}{SEPARATOR}{self.version}"

    def scale(self, rank: int) -> float:
        """The factor on a change of that rank: alpha / r, or alpha / sqrt(r) (rank-stabilised, Kalajdzievski 2023)."""
        return self.alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


def look_at(folder: Path | str) -> AdapterFile:
    """The adapter in a folder; reads both files whole. Raises AdapterError naming the file or the field."""
    folder = Path(folder)
    digest = hashlib.sha256()
    for name in (CONFIG, TENSORS):
        try:
            with (folder / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise AdapterError(f"'{folder}' is no adapter: {name} cannot be read ({error.strerror or error})") from None
    config = _config(folder)
    alpha, rank = plain_float(config.get("lora_alpha")), plain_int(config.get("r"))
    if alpha is None:
        raise AdapterError(f"'{folder}': lora_alpha is {shown(config.get('lora_alpha'))}; it must be a number")
    if rank is None or rank < 1:
        raise AdapterError(f"'{folder}': r is {shown(config.get('r'))}; it must be a whole number from 1")
    return AdapterFile(
        folder=folder.resolve(),
        version=digest.hexdigest()[:16],
        rank=rank,
        alpha=alpha,
        rank_stabilised=bool(config.get("use_rslora")),
    )


def by_key(key: str) -> AdapterFile:
    """The adapter of a key; raises AdapterError where its files have changed since."""
    folder, _, version = key.rpartition(SEPARATOR)
    found = look_at(folder)
    if found.version != version:
        raise AdapterError(f"the files of the adapter in '{folder}' have changed since it was loaded; load it again")
    return found


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise AdapterError(f"'{folder}': {CONFIG} cannot be read ({error})") from None
    if not isinstance(config, dict):
        raise AdapterError(f"'{folder}': {CONFIG} must be an object")
    for field, served in SERVED:
        if config.get(field) not in served:
            raise AdapterError(f"'{folder}': {field} is {shown(config.get(field))}; it must be {json.dumps(served[0])}")
    return config
