"""A tiny random checkpoint of Qwen 2.5 VL, made by `transformers`, and pictures; sizes are unlike each other on purpose."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from tests.engine.tiny_engine import write_checkpoint
from tradewind.contract.image import Image, image_key

VOCAB = 300
IMAGE, VIDEO, START, END = 280, 281, 282, 283
"""Ids beyond those of the tokenizer's bytes."""
EDGE = 28
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' or 'image' in part or 'image_url' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
"""As the published one, shortened."""
MARKS = {
    "<|image_pad|>": IMAGE,
    "<|video_pad|>": VIDEO,
    "<|vision_start|>": START,
    "<|vision_end|>": END,
    "<|im_start|>": 284,
    "<|im_end|>": 285,
}
PREPROCESSOR: dict[str, Any] = {
    "min_pixels": 28 * 28,
    "max_pixels": 28 * 28 * 60,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def make_tiny_vision(folder: Path, **text: Any) -> Any:
    """Writes the checkpoint with its tokenizer into the folder and returns the oracle, in float32."""
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 299,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}, **text,
        },
        vision_config={
            "depth": 3, "hidden_size": 96, "intermediate_size": 44, "num_heads": 3, "window_size": 84, "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    torch.manual_seed(7)
    model = Qwen2_5_VLForConditionalGeneration(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=1.5 / float(np.prod(parameter.shape[1:])) ** 0.5)
            elif "norm" in name or "ln_q" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    write_tokenizer(folder)
    return model


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of single bytes with the marks of this family."""
    plain = write_checkpoint("full", folder / "bytes")
    content = json.loads((plain / "tokenizer.json").read_text())
    for text, token in MARKS.items():
        content["added_tokens"].append(
            {"id": token, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        )  # fmt: skip
    vocab = content["model"]["vocab"]
    vocab.update({f"<{index}>": index for index in range(len(vocab), VOCAB) if index not in MARKS.values()})
    vocab.update(MARKS)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


def picture(seed: int, *, rows: int, columns: int) -> np.ndarray:
    """Colors [height, width, 3] of whole squares: waves, which look unlike each other in every place."""
    draw = np.random.default_rng(seed)
    y, x = np.mgrid[: rows * EDGE, : columns * EDGE]
    waves = [np.sin(x / draw.uniform(3, 20) + y / draw.uniform(3, 20) + draw.uniform(0, 6)) for _ in range(3)]
    noise = draw.uniform(-0.2, 0.2, (rows * EDGE, columns * EDGE, 3))
    return ((np.stack(waves, -1) + noise).clip(-1, 1) * 127 + 128).astype(np.uint8)


def image_of(pixels: np.ndarray, *, first: int = 0) -> Image:
    """The image record of colors."""
    rows, columns = pixels.shape[0] // EDGE, pixels.shape[1] // EDGE
    data = pixels.tobytes()
    return Image(key=image_key(data, rows=rows, columns=columns), first=first, rows=rows, columns=columns, pixels=data)


def with_images(parts: Sequence[int | np.ndarray]) -> tuple[list[int], tuple[Image, ...]]:
    """Token ids and pictures -> the whole prompt and its images."""
    ids: list[int] = []
    images: list[Image] = []
    for part in parts:
        if isinstance(part, np.ndarray):
            image = image_of(part, first=len(ids))
            images.append(image)
            ids += [IMAGE] * image.count
        else:
            ids.append(int(part))
    return ids, tuple(images)


def words(seed: int, count: int) -> list[int]:
    """Random tokens of text."""
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def oracle_inputs(images: Sequence[Image], ids: Sequence[int]) -> dict[str, Any]:
    """What the oracle wants, its pixels made by its own image processor."""
    out: dict[str, Any] = {"input_ids": torch.tensor([list(ids)])}
    out["mm_token_type_ids"] = (out["input_ids"] == IMAGE).int()
    if images:
        pixels = [np.frombuffer(i.pixels, np.uint8).reshape(i.rows * EDGE, i.columns * EDGE, 3).copy() for i in images]
        made = oracle_processor()(images=pixels, return_tensors="pt")
        out["pixel_values"], out["image_grid_thw"] = made["pixel_values"], made["image_grid_thw"]
    return out


def oracle_processor() -> Any:
    """The image processor of `transformers` with the checkpoint's numbers."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(**PREPROCESSOR)


def oracle_logits(oracle: Any, ids: Sequence[int], images: Sequence[Image]) -> np.ndarray:
    """Logits of every position, float32 [tokens, V]."""
    with torch.no_grad():
        return oracle(**oracle_inputs(images, ids), use_cache=False).logits[0].numpy()


def oracle_greedy(oracle: Any, ids: Sequence[int], images: Sequence[Image], *, count: int) -> list[int]:
    """The oracle's greedy answer, the whole text computed anew for each token."""
    known = list(ids)
    for _ in range(count):
        known.append(int(oracle_logits(oracle, known, images)[-1].argmax()))
    return known[len(ids) :]
