"""The op sets that the reference tests run on, and the loading of a checkpoint folder or file for one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tradewind.attention.backend import BACKENDS
from tradewind.config.card import ModelCard
from tradewind.config.card_reader import card_from_gguf, card_from_hf
from tradewind.kernels.ops import Ops
from tradewind.kernels.plain import PlainOps
from tradewind.layers.adapters import Adapters
from tradewind.models.registry import family_of
from tradewind.quantization.blocks import dequantise
from tradewind.quantization.scheme import Numerics
from tradewind.weights.checkpoint import open_checkpoint
from tradewind.weights.load import load_model

OP_SETS = ("cpu", "plain")
EXACT = Numerics(compute="f32", quantization="none")


def open_ops(name: str, *, activation_terms: int = 1) -> Ops:
    """The op set of that name; skips the test when the C++ library is not built."""
    if name == "plain":
        torch.set_num_threads(1)  # two threads that wait for each other on busy cores are slower than one by far
        return PlainOps(read_blocks=dequantise, activation_terms=activation_terms)
    library = pytest.importorskip("tradewind.kernels.cpu.library")
    found = library.load()
    if found is None:
        pytest.skip(f"no C++ op library: {library.why_not()}")
    from tradewind.kernels.cpu.ops import CpuOps

    return CpuOps(found, threads=2, activation_terms=activation_terms)


def load(
    path: Path, ops: Ops, *, numerics: Numerics = EXACT, adapters: Adapters | None = None
) -> tuple[Any, ModelCard]:
    """The model of a checkpoint and its card."""
    checkpoint = open_checkpoint(path)
    if checkpoint.kind == "gguf":
        card = card_from_gguf(checkpoint.metadata, name=path.name, tensors=checkpoint.tensors)
    else:
        card = card_from_hf(checkpoint.metadata, name=path.name, tensors=checkpoint.tensors)
    model = load_model(
        checkpoint,
        family=family_of(card),
        card=card,
        ops=ops,
        numerics=numerics,
        attention=BACKENDS[ops.name](ops),
        adapters=adapters,
    )
    return model, card
