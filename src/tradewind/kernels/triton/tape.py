"""A step as data: op calls in order, written down once.

Knows: which buffers each op reads and writes. Refuses to know: kernels and their constants (planning.py), and what the calls compute.
Buffers are told apart by address. The results of a tape are what its last call writes, what was handed to `keep`, and the pages of keys and
values; every other buffer is scratch, and a program may leave it unwritten.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tradewind.kernels.ops import KVLayer, LatentUp, LowRankBank, PackedExperts, PackedMatrix, Routing
from tradewind.kernels.triton.program import SideStreams
from tradewind.kernels.triton.tuning import Tuning
from tradewind.kernels.triton.workspace import Workspace, address

READS: dict[str, tuple[str, ...]] = {
    "add": ("x", "delta", "gate"),
    "add_layer_norm": ("x", "delta"),
    "add_low_rank": ("x", "adapters", "out"),
    "add_rms_norm": ("x", "delta", "beside", "beside_gate"),
    "attention": ("q",),
    "embed": ("ids",),
    "experts": ("x", "ids", "weights", "residual"),
    "gated_linear": ("x", "residual"),
    "gather_rows": ("x", "index"),
    "gelu": ("x",),
    "glue": ("x",),
    "latent_attention": ("q", "latent", "angles", "positions", "write_slots"),
    "latent_store": ("q", "latent", "angles", "positions", "write_slots"),
    "linear": ("x", "residual"),
    "quantise": ("x",),
    "rms_norm_span": ("x",),
    "rope_angles": ("positions",),
    "rope_store": ("qkv", "angles", "positions", "write_slots"),
    "route": ("logits",),
    "scale": ("x",),
    "softcap": ("x",),
    "temper": ("x", "positions"),
}
"""Op -> arguments that it reads. Weights and pages are left out: no call of a tape changes weights, and pages are written in order."""

WRITES: dict[str, tuple[str, ...]] = {
    "add": ("x", "out"),
    "add_layer_norm": ("x", "out"),
    "add_low_rank": ("out",),
    "add_rms_norm": ("x", "out"),
    "attention": ("out",),
    "embed": ("out",),
    "experts": ("out",),
    "gated_linear": ("out",),
    "gather_rows": ("out",),
    "gelu": ("x",),
    "glue": ("out",),
    "latent_attention": ("out",),
    "latent_store": ("q",),
    "linear": ("out",),
    "quantise": (),
    "rms_norm_span": ("x",),
    "rope_angles": ("out",),
    "rope_store": ("out",),
    "route": ("ids", "weights"),
    "scale": ("x",),
    "softcap": ("x",),
    "temper": ("x",),
}
"""Op -> arguments that it writes; the x of an op that takes a delta only when there is one."""

LAYERS_OWN = (
    "weight", "bias", "q_weight", "k_weight", "sinks", "up", "gate_up", "down", "gate_up_bias", "down_bias", "bank", "kv",
)  # fmt: skip
"""Arguments of which every layer has its own: layers are alike where these are alike in kind and size."""
TURNS_KEPT = 3
"""Of layers that are alike a short tape has so many: what is fused over a border is there at the first, in between and at the last."""

ADDERS = ("add", "add_layer_norm", "add_rms_norm")
"""Ops that first do x += delta, when there is one."""


@dataclass
class Call:
    """One op call. A program plans on copies: the tape's own calls are never changed."""

    op: str
    arguments: dict[str, Any]
    _told: dict[str, frozenset[int]] = field(default_factory=dict, repr=False, compare=False)
    """What `reads` and `writes` have answered: a plan of 48 layers asks some million times."""

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.arguments[name] = value
        self._told.clear()

    def become(self, op: str) -> None:
        """From now on it is a call of another op, with the same arguments."""
        self.op = op
        self._told.clear()

    def copy(self) -> Call:
        """A call of its own, to be changed."""
        return Call(self.op, dict(self.arguments), dict(self._told))

    def reads(self) -> frozenset[int]:
        """Addresses of the buffers it reads."""
        found = self._told.get("reads")
        if found is None:
            found = self._told["reads"] = addresses(self[name] for name in READS[self.op])
        return found

    def writes(self) -> frozenset[int]:
        """Addresses of the buffers it writes, live rows whole."""
        found = self._told.get("writes")
        if found is None:
            names = ("out",) if self.op in ADDERS and self["delta"] is None else WRITES[self.op]
            found = self._told["writes"] = addresses(self[name] for name in names)
        return found

    def likeness(self) -> tuple[Hashable, ...]:
        """The same of two calls that differ at most in whose weights and pages they take."""
        values = sorted(self.arguments.items())
        return (self.op, *((name, _likeness(value, own=name in LAYERS_OWN)) for name, value in values))


def _likeness(value: Any, *, own: bool) -> Hashable:
    """What `Call.likeness` says of one argument; own: it is a layer's own."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), *value.shape, *value.stride(), 0 if own else address(value))
    if isinstance(value, tuple | list):
        return tuple(_likeness(one, own=own) for one in value)
    if own and isinstance(value, PackedMatrix | PackedExperts | LatentUp | LowRankBank | KVLayer):
        return (type(value).__name__, *(_likeness(one, own=True) for one in vars(value).values()))
    if value is None or isinstance(value, bool | int | float | str | Routing):
        return (type(value).__name__, value)
    return (type(value).__name__, id(value))


def repetition(marks: Sequence[Hashable]) -> slice:
    """What may be left out of a sequence of which a part comes again and again: all of its turns but TURNS_KEPT. The longest such."""
    best = slice(0, 0)
    for period in range(1, len(marks) // TURNS_KEPT):
        alike = 0
        for i in range(len(marks) - period):
            alike = alike + 1 if marks[i] == marks[i + period] else 0
            dropped = ((alike + period) // period - TURNS_KEPT) * period
            if alike and dropped > best.stop - best.start:
                first = i + 1 - alike + period  # after the first turn
                best = slice(first, first + dropped)
    return best


def addresses(tensors: Iterable[Any]) -> frozenset[int]:
    return frozenset(address(tensor) for tensor in tensors if tensor is not None)


class OpSet(Protocol):
    """What plans of a tape rest on."""

    tuning: Tuning
    workspace: Workspace
    deterministic: bool
    pdl: bool

    def side_streams(self) -> SideStreams | None: ...


@dataclass
class Tape:
    """Recorded calls over buffers that have room for the largest step."""

    ops: OpSet
    calls: list[Call] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)

    def add(self, op: str, arguments: dict[str, Any]) -> None:
        """Writes a call down."""
        self.calls.append(Call(op, arguments))

    def keep(self, tensor: Any) -> None:
        """Makes a buffer a result, so that programs leave in it what the calls say."""
        self.kept.add(address(tensor))

    def results(self) -> set[int]:
        """Addresses of the buffers that somebody outside may read."""
        return self.kept | (self.calls[-1].writes() if self.calls else set())

    def short(self) -> Tape:
        """The same with a few of those layers that are alike. Its programs compute nothing sensible, and launch every kernel that those of
        all layers launch: planning one takes a tenth."""
        numbers: dict[Hashable, int] = {}
        out = repetition([numbers.setdefault(call.likeness(), len(numbers)) for call in self.calls])
        return Tape(self.ops, self.calls[: out.start] + self.calls[out.stop :], set(self.kept))
