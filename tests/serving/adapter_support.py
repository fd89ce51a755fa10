"""Tiny adapters of the tiny model, and the same model with one merged into its weights, for tests that compare the two."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

EVERY = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
         "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
LAYERS = 3


def write_adapter(
    folder: Path, model: Path, *, seed: int, rank: int = 4, targets: tuple[str, ...] = EVERY, **config: Any
) -> Path:
    """A random adapter of the matrices of a checkpoint that end in `targets`, strong enough to change what is said."""
    draw = np.random.default_rng(seed)
    weights = load_file(model / "model.safetensors")
    tensors = {}
    for layer in range(LAYERS):
        for name in targets:
            n, k = weights[f"model.layers.{layer}.{name}.weight"].shape
            at = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{at}.lora_A.weight"] = (draw.standard_normal((rank, k)) / k**0.5).astype(np.float32)
            tensors[f"{at}.lora_B.weight"] = (draw.standard_normal((n, rank)) / rank**0.5).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), **config}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def merge(model: Path, adapter: Path, folder: Path) -> Path:
    """The checkpoint with the adapter's changes added to its weights."""
    shutil.copytree(model, folder)
    weights, changes = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    for name, a in changes.items():
        if ".lora_A." not in name:
            continue
        place = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
        b = changes[name.replace(".lora_A.", ".lora_B.")]
        weights[place] = (weights[place] + scale * b.astype(np.float64) @ a).astype(np.float32)
    save_file(weights, folder / "model.safetensors")
    return folder
