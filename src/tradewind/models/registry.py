"""The one table of model families.

Knows: which class computes a family and how its checkpoints name things. Refuses to know: files and op sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tradewind.config.card import ModelCard
from tradewind.contract.errors import UserError
from tradewind.device.batch import ForwardBatch
from tradewind.layers.adapters import Adapters
from tradewind.layers.build import Backend, Build, Count, Ops, Tensor, Weights
from tradewind.models import (
    bert,
    deepseek_v2,
    deepseek_v3,
    gemma2,
    gemma3,
    gpt_oss,
    granite,
    llama,
    llama4,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen2_5_vl,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)


class Model(Protocol):
    """What a runner sees of a model."""

    backend: Backend
    """Attention; its `plan` is called once before each forward."""
    ends_by_row: bool
    """Whether there are `body` and `ending`."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, E] after the final norm."""

    def body(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """What `ending` takes: the stream [T, E] float32, and the values of the last attention [T, W]."""

    def ending(self, batch: ForwardBatch, x: Tensor, mixed: Tensor) -> Tensor:
        """Hidden states [L, E] of L rows of these; `forward` is both for all rows."""

    def logits(self, hidden_rows: Tensor, *, out: Tensor, count: Count) -> None:
        """hidden_rows [L, E] -> out [L, V]."""


class MakeModel(Protocol):
    """A model's constructor."""

    def __call__(self, build: Build) -> Model: ...


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row: the class, and its checkpoints' names as data (explained in models/llama.py)."""

    model: MakeModel
    hf_places: Mapping[str, str]
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    """Empty: this family is not read from GGUF files."""
    gguf_interleaved: Mapping[str, str] = field(default_factory=dict)
    hf_interleaved: Mapping[str, str] = field(default_factory=dict)
    """Places whose rows lie with the two halves of each rotated pair side by side, in either kind of file."""
    fused: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Tensors that hold several matrices, and how they are cut (weights/split.py)."""
    regroup: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    """Tensors in another form than the model wants, and what is made of them (weights/regroup.py)."""
    hf_renames: Mapping[str, str] = field(default_factory=dict)
    """Prefix of a name -> what stands for it in hf_places."""
    layers_in_file: str = ""
    """Prefix of numbered layers in files that hold more of them than the card has, for another head; those are not read. "": none do."""
    ignored: tuple[str, ...] = ("rope_freqs.weight",)
    """Prefixes of tensors that a checkpoint may hold and this model does not read. The card has Llama 3's rope_freqs as a formula."""

    def build(
        self, *, card: ModelCard, ops: Ops, weights: Weights, attention: Backend, adapters: Adapters | None = None
    ) -> Model:
        """The model, with every weight asked for once."""
        return self.model(Build(card=card, ops=ops, weights=weights, attention=attention, adapters=adapters))


FAMILIES: dict[str, Family] = {
    "bert": Family(
        model=bert.Bert,
        hf_places=bert.HF_PLACES,
        hf_renames=bert.HF_RENAMES,
        ignored=bert.HF_IGNORED,
    ),
    "deepseek_v2": Family(model=deepseek_v2.DeepseekV2, hf_places=deepseek_v2.HF_PLACES),
    "deepseek_v3": Family(
        model=deepseek_v3.DeepseekV3, hf_places=deepseek_v3.HF_PLACES, layers_in_file=deepseek_v3.LAYERS_IN_FILE
    ),
    "gemma2": Family(model=gemma2.Gemma2, hf_places=gemma2.HF_PLACES, gguf_names=gemma2.GGUF_NAMES),
    "gemma3": Family(
        model=gemma3.Gemma3,
        hf_places=gemma3.HF_PLACES,
        gguf_names=gemma3.GGUF_NAMES,
        hf_renames=gemma3.HF_RENAMES,
        ignored=gemma3.HF_IGNORED,
    ),
    "gpt_oss": Family(model=gpt_oss.GptOss, hf_places=gpt_oss.HF_PLACES, regroup=gpt_oss.REGROUP),
    "granite": Family(
        model=granite.Granite,
        hf_places=granite.HF_PLACES,
        gguf_names=granite.GGUF_NAMES,
        gguf_interleaved=granite.GGUF_INTERLEAVED,
    ),
    "llama": Family(
        model=llama.Llama,
        hf_places=llama.HF_PLACES,
        gguf_names=llama.GGUF_NAMES,
        gguf_interleaved=llama.GGUF_INTERLEAVED,
    ),
    "llama4": Family(
        model=llama4.Llama4,
        hf_places=llama4.HF_PLACES,
        gguf_names=llama4.GGUF_NAMES,
        gguf_interleaved=llama4.INTERLEAVED,
        hf_interleaved=llama4.INTERLEAVED,
        fused=llama4.FUSED,
        hf_renames=llama4.HF_RENAMES,
        regroup=llama4.REGROUP,
        ignored=llama4.IGNORED,
    ),
    "mistral": Family(
        model=mistral.Mistral,
        hf_places=mistral.HF_PLACES,
        gguf_names=mistral.GGUF_NAMES,
        gguf_interleaved=mistral.GGUF_INTERLEAVED,
    ),
    "mixtral": Family(
        model=mixtral.Mixtral,
        hf_places=mixtral.HF_PLACES,
        gguf_names=mixtral.GGUF_NAMES,
        gguf_interleaved=mixtral.GGUF_INTERLEAVED,
        fused=mixtral.FUSED,
    ),
    "olmo2": Family(model=olmo2.Olmo2, hf_places=olmo2.HF_PLACES, gguf_names=olmo2.GGUF_NAMES),
    "phi3": Family(
        model=phi3.Phi3,
        hf_places=phi3.HF_PLACES,
        gguf_names=phi3.GGUF_NAMES,
        fused=phi3.FUSED,
        ignored=phi3.IGNORED,
    ),
    "qwen2": Family(
        model=qwen2.Qwen2,
        hf_places=qwen2.HF_PLACES,
        gguf_names=qwen2.GGUF_NAMES,
        hf_renames=llama.HF_RENAMES_BARE,
    ),
    "qwen2_5_vl": Family(model=qwen2_5_vl.Qwen25VL, hf_places=qwen2_5_vl.HF_PLACES, hf_renames=qwen2_5_vl.HF_RENAMES),
    "qwen2_moe": Family(
        model=qwen2_moe.Qwen2Moe,
        hf_places=qwen2_moe.HF_PLACES,
        gguf_names=qwen2_moe.GGUF_NAMES,
        fused=qwen2_moe.FUSED,
        regroup=qwen2_moe.REGROUP,
    ),
    "qwen3": Family(
        model=qwen3.Qwen3,
        hf_places=qwen3.HF_PLACES,
        gguf_names=qwen3.GGUF_NAMES,
        hf_renames=llama.HF_RENAMES_BARE,
    ),
    "qwen3_moe": Family(
        model=qwen3_moe.Qwen3Moe,
        hf_places=qwen3_moe.HF_PLACES,
        gguf_names=qwen3_moe.GGUF_NAMES,
        fused=qwen3_moe.FUSED,
    ),
}


def family_of(card: ModelCard) -> Family:
    """The row of the card's family; raises UserError naming those that are known."""
    family = FAMILIES.get(card.family)
    if family is None:
        raise UserError(f"No model of the family '{card.family}'; known are {', '.join(FAMILIES)}.")
    return family
