"""From a checkpoint to a model: file names -> places -> packed weights.

Knows: which tensor belongs at which place, its shape, and what is missing or left over. Refuses to know: models (they arrive as a row of
the registry, `Family`), byte layouts (quantization) and devices (ops). Imports no torch. Loading again is the same walk.

    "blk.3.attn_q.weight"                       name in the file
    "model.layers.3.self_attn.q_proj.weight"    Hugging Face name          family.gguf_names
    "layers.3.attention.q.weight"               place in the model         family.hf_places
    "layers.3.attention.qkv.weight"             q, k and v in one tensor   family.fused, cut by split.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tradewind.config.card import ModelCard
from tradewind.config.plan import NumericsPlan
from tradewind.contract.errors import UserError
from tradewind.quantization.blocks import BLOCKS
from tradewind.quantization.plain import as_float
from tradewind.quantization.scheme import Compute, Numerics, Ops, choose_scheme
from tradewind.weights.block_scales import SCALES, dequantised, kept
from tradewind.weights.checkpoint import Checkpoint
from tradewind.weights.regroup import Derived, Regroup, regrouped
from tradewind.weights.split import NUMBER, Fused, parts_of
from tradewind.weights.tensor import RawTensor, shown

Progress = Callable[[int, int], None]
"""(bytes loaded so far, bytes in all)."""

ModelT = TypeVar("ModelT", covariant=True)


class WeightsError(UserError):
    """A checkpoint whose tensors are not those of its own description."""


class FamilyRow(Protocol[ModelT]):
    """What is asked of a row of the model registry."""

    @property
    def hf_places(self) -> Mapping[str, str]: ...
    @property
    def hf_renames(self) -> Mapping[str, str]: ...
    @property
    def gguf_names(self) -> Mapping[str, str]: ...
    @property
    def gguf_interleaved(self) -> Mapping[str, str]: ...
    @property
    def hf_interleaved(self) -> Mapping[str, str]: ...
    @property
    def fused(self) -> Fused: ...
    @property
    def regroup(self) -> Regroup: ...
    @property
    def layers_in_file(self) -> str: ...
    @property
    def ignored(self) -> tuple[str, ...]: ...

    def build(self, *, card: ModelCard, ops: Any, weights: Any, attention: Any, adapters: Any = None) -> ModelT:
        """Constructs the model, which asks `weights` for all it needs."""


def load_model(
    checkpoint: Checkpoint,
    *,
    family: FamilyRow[ModelT],
    card: ModelCard,
    ops: Ops,
    numerics: NumericsPlan | Numerics,
    attention: Any,
    progress: Progress | None = None,
    adapters: Any = None,
) -> ModelT:
    """Builds the family's model with the checkpoint's weights, packed for `ops`; the checkpoint is only read. `adapters`: room for changes
    of its matrices, as the bricks ask for it (`layers.adapters.Adapters`).

    Raises WeightsError naming the tensor, what was expected and what was found: for a missing tensor, a wrong shape, an unreadable format,
    and for tensors that nothing asked for.
    """
    loading = _Loading(
        checkpoint, family=family, card=card, ops=ops,
        numerics=packing(numerics), progress=progress,
    )  # fmt: skip
    # An op set that streams has only begun when the model is built: the files are read while the last tensors are asked for.
    uploader: Any = getattr(ops, "uploader", None)
    try:
        model = family.build(card=card, ops=ops, weights=PlacedWeights(loading), attention=attention, adapters=adapters)
        loading.refuse_surplus()
        if uploader is not None:
            try:
                uploader.finish(loading.report_left)
            except OSError as error:
                raise WeightsError(f"{loading.where} cannot be read: {error}") from None
    except BaseException:
        if uploader is not None:
            uploader.cancel()
        raise
    return model


def packing(numerics: NumericsPlan | Numerics) -> Numerics:
    """How weights are packed under a plan: int16 differs from int8 only in the activations."""
    compute = "int8" if numerics.compute == "int16" else numerics.compute
    return Numerics(compute=compute, quantization=numerics.quantization)


class PlacedWeights:
    """Weights by place, as `layers.build.Weights` asks for them; a view that knows how far inside the model it is."""

    def __init__(self, loading: _Loading, inside: str = "", *, numerics: Numerics | None = None) -> None:
        """numerics: the loading's, unless others are given."""
        self._loading = loading
        self._inside = inside
        self._numerics = loading.numerics if numerics is None else numerics

    def at(self, place: str) -> PlacedWeights:
        return PlacedWeights(self._loading, f"{self._inside}{place}.", numerics=self._numerics)

    @property
    def compute(self) -> Compute:
        return self._numerics.compute

    def unquantised(self) -> PlacedWeights:
        return PlacedWeights(self._loading, self._inside, numerics=self._numerics.unquantised())

    def place(self, name: str) -> str:
        return self._inside + name

    def matrix(self, sizes: dict[str, int], *, k: int, sensitive: bool = False) -> Any:
        numerics = self._numerics
        (first, *others) = sizes
        table = None if others else self._loading.tables.get(self._inside + first)
        if table is not None and hasattr(self._loading.ops, "matrix_of_rows"):
            device: Any = self._loading.ops
            return device.matrix_of_rows(table)
        return self._pack(sizes, k=k, numerics=numerics.for_sensitive() if sensitive else numerics)

    def gated(self, gate: str, up: str, *, n: int, k: int) -> Any:
        return self._pack({gate: n, up: n}, k=k, numerics=self._numerics, gated=True)

    def _pack(self, sizes: dict[str, int], *, k: int, numerics: Numerics, gated: bool = False) -> Any:
        """Stacks (or joins as gate and up) and packs the matrices at `sizes`."""
        take, find = self._loading.take, self._loading.find
        if all(self._loading.keeps(f"{self._inside}{name}.weight", numerics) for name in sizes):
            take, find = self._loading.take_stored, self._loading.find_stored
        scheme = choose_scheme([find(f"{self._inside}{name}.weight").format for name in sizes], numerics)
        parts = [
            {suffix: take(f"{self._inside}{name}.{suffix}", shape) for suffix, shape in scheme.expects((n, k)).items()}
            for name, n in sizes.items()
        ]
        return scheme.pack(parts, ops=self._loading.ops, numerics=numerics, gated=gated)

    def vector(self, sizes: dict[str, int], *, offset: float = 0.0) -> Any:
        values = as_float([self._readable(name, (size,)) for name, size in sizes.items()])
        return self._loading.ops.constant(values + np.float32(offset))

    def floats(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        return as_float([self._readable(f"{name}.weight", shape)])

    def rows(self, name: str, *, rows: int, cols: int) -> Any:
        raw = self._readable(f"{name}.weight", (rows, cols))
        device: Any = self._loading.ops
        if hasattr(self._loading.ops, "stored_rows"):
            table = device.stored_rows(raw)
        else:
            table = self._loading.ops.row_table(raw.data, raw.format, rows=rows, cols=cols)
        self._loading.tables[self._inside + name] = table
        return table

    def _readable(self, name: str, shape: tuple[int, ...]) -> RawTensor:
        """The tensor here, in a format that can be turned into floats as it is."""
        tensor = self._loading.take(f"{self._inside}{name}", shape)
        if tensor.format not in BLOCKS:
            raise WeightsError(
                f"{self._loading.where}: tensor '{shown(tensor.name)}' is stored as {tensor.format}; readable are {', '.join(BLOCKS)}"
            )
        return tensor


class _Loading:
    """One walk through a checkpoint: what lies where, what has been asked for."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        family: FamilyRow[Any],
        card: ModelCard,
        ops: Ops,
        numerics: Numerics,
        progress: Progress | None,
    ) -> None:
        self.ops = ops
        self.numerics = numerics
        self.tables: dict[str, Any] = {}
        """Tables of rows by place: where a device can, a tied head is one of them."""
        self._streams = hasattr(ops, "uploader")
        self._checkpoint = checkpoint
        self._family = family
        self._card = card
        self._progress = progress
        self._taken: set[str] = set()
        self._loaded_bytes = 0
        at: dict[str, RawTensor] = {}
        self._unplaced: list[str] = []
        for name, tensor in checkpoint.tensors.items():
            if beyond_layers(name, family.layers_in_file, layers=card.layers):
                continue
            place = place_of(name, family=family, gguf=checkpoint.kind == "gguf")
            if place is not None:
                parts = parts_of(tensor, place, fused=family.fused, card=card)
                twice = sorted(at.keys() & parts.keys())
                if twice:
                    raise WeightsError(
                        f"{self.where}: tensors '{shown(at[twice[0]].name)}' and '{shown(name)}' both hold {twice[0]}"
                    )
                at.update(parts)
            elif not name.startswith(family.ignored):
                self._unplaced.append(name)
        whole = regrouped(at, family.regroup)
        self._at = dequantised(whole)
        self._stored: dict[str, RawTensor] = {}
        if getattr(ops, "keeps_fp8_blocks", False):
            rows = family.gguf_interleaved if checkpoint.kind == "gguf" else family.hf_interleaved
            self._stored = kept(whole, but=lambda place: NUMBER.sub("{}", place) in rows)
        self._all_bytes = sum(tensor.nbytes for tensor in self._at.values())

    def find(self, place: str) -> RawTensor | Derived:
        """The tensor at a place; its values may still have to be made."""
        tensor = self._at.get(place)
        if tensor is None:
            raise WeightsError(
                f"{self.where} has no tensor '{self._file_name(place)}', which its description asks for; the file is incomplete or "
                f"describes another model"
            )
        return tensor

    def take(self, place: str, shape: tuple[int, ...]) -> RawTensor:
        """The tensor at a place after checking its shape, with rows in half-split rope order."""
        tensor = self.find(place)
        self._check(tensor, shape)
        self._take(tensor, place)
        if isinstance(tensor, Derived):
            return tensor.made()
        return in_rope_order(
            tensor, place, family=self._family, card=self._card, gguf=self._checkpoint.kind == "gguf"
        )  # fmt: skip

    def _check(self, tensor: RawTensor | Derived, shape: tuple[int, ...]) -> None:
        if tensor.shape != shape:
            raise WeightsError(
                f"{self.where}: tensor '{shown(tensor.name)}' has the shape {tensor.shape}; its description asks for {shape}"
            )

    def _take(self, tensor: RawTensor | Derived, place: str) -> None:
        """Counts a tensor as asked for."""
        if place in self._taken:
            return
        self._taken.add(place)
        self._loaded_bytes += tensor.nbytes
        if self._progress is not None and not self._streams:
            self._progress(self._loaded_bytes, self._all_bytes)

    def keeps(self, place: str, numerics: Numerics) -> bool:
        """Whether the matrix at a place is packed as it is stored, FP8 with scales by blocks."""
        return place in self._stored and numerics.quantization == "none" and numerics.compute == "bf16"

    def find_stored(self, place: str) -> RawTensor:
        """The tensor at a place that `keeps` is true of, as it is stored."""
        return self._stored[place]

    def take_stored(self, place: str, shape: tuple[int, ...]) -> RawTensor:
        """The same, or the scales beside it, after checking the shape."""
        if not place.endswith(SCALES):
            self._check(self._at[place], shape)
            self._take(self._at[place], place)
        self._check(self._stored[place], shape)
        return self._stored[place]

    def report_left(self, left_bytes: int) -> None:
        """Progress of an op set that streams."""
        if self._progress is not None:
            self._progress(max(0, self._all_bytes - left_bytes), self._all_bytes)

    def refuse_surplus(self) -> None:
        """Raises WeightsError when the checkpoint holds tensors that nothing asked for."""
        left = [self._at[place].name for place in self._at.keys() - self._taken]
        if self._card.tied_embeddings and "head.weight" in self._at:
            left.remove(self._at["head.weight"].name)  # a copy of the embedding that some writers store
        surplus = sorted(self._unplaced + left)
        if surplus:
            names = ", ".join(f"'{shown(name)}'" for name in surplus[:3]) + (", …" if len(surplus) > 3 else "")
            raise WeightsError(
                f"{self.where} holds {len(surplus)} tensors that a {self._card.family} model of its description has no place for: "
                f"{names}; loading without them would give another model"
            )

    @property
    def where(self) -> str:
        """The checkpoint, as messages name it."""
        return shown(str(self._checkpoint.path), limit=1000)

    def _file_name(self, place: str) -> str:
        """What the file would call the tensor at a place."""
        numbers = NUMBER.findall(place)
        template = NUMBER.sub("{}", place)
        if template not in self._family.hf_places.values():
            fused = list(self._family.fused.items())
            made = [(at, parts) for at, (_, parts) in self._family.regroup.items()]
            wholes = fused + made if self._checkpoint.kind == "gguf" else made + fused
            template = next((whole for whole, parts in wholes if template in parts), template)
        name = next((name for name, held in self._family.hf_places.items() if held == template), template)
        if self._checkpoint.kind == "gguf":
            name = next((gguf for gguf, held in self._family.gguf_names.items() if held == name), name)
        return name.format(*numbers)


def beyond_layers(name: str, prefix: str, *, layers: int) -> bool:
    """Whether a name in the file is that of a layer which the card does not count; a family without such layers has the prefix ""."""
    number = name.removeprefix(prefix).partition(".")[0] if prefix and name.startswith(prefix) else ""
    return number.isdecimal() and int(number) >= layers


def place_of(name: str, *, family: FamilyRow[Any], gguf: bool) -> str | None:
    """The place in the model of a tensor, by its name in the file; None when the family has none for it. Block scales lie beside their
    matrix."""
    if name.endswith(SCALES):
        matrix = place_of(name.removesuffix(SCALES), family=family, gguf=gguf)
        return None if matrix is None else matrix + SCALES
    template = NUMBER.sub("{}", name)
    if gguf:
        template = family.gguf_names.get(template, "")
    else:
        for prefix, instead in family.hf_renames.items():
            if template.startswith(prefix):
                template = instead + template.removeprefix(prefix)
                break
    place = family.hf_places.get(template)
    return None if place is None else place.format(*NUMBER.findall(name))


def in_rope_order(tensor: RawTensor, place: str, *, family: FamilyRow[Any], card: ModelCard, gguf: bool) -> RawTensor:
    """The tensor with rows in half-split rope order, whatever the order of this kind of file."""
    heads_field = (family.gguf_interleaved if gguf else family.hf_interleaved).get(NUMBER.sub("{}", place))
    return tensor if heads_field is None else with_half_split_rows(tensor, heads=getattr(card, heads_field))


def with_half_split_rows(tensor: RawTensor, *, heads: int) -> RawTensor:
    """A q or k tensor with the rows of each head put from interleaved into half-split order: a gather of whole rows of bytes.

    in the file   a0 b0 a1 b1 a2 b2 ...        rope turns the pair (a_i, b_i)
    returned      a0 a1 a2 ... b0 b1 b2 ...
    """
    rows = tensor.shape[0]
    order = np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    data: NDArray[np.uint8] = tensor.data.reshape(rows, -1)[order].reshape(-1)
    return replace(tensor, data=data, file=None)
