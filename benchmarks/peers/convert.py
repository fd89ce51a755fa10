"""The embedded model's GGUF as other engines want it: a bf16 GGUF, and a Hugging Face folder in bf16.

Knows: the Llama layout in both. Writes only where it is told, and only what is not there yet. Every engine thus computes with the same
numbers: the dequantised 4-bit weights, rounded to bf16.
"""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tradewind.quantization.blocks import dequantise
from tradewind.serving.tokenizer import TextTokenizer
from tradewind.weights.gguf import GGUFFile, open_gguf, write_gguf
from tradewind.weights.tensor import RawTensor

FILE_TYPE_BF16 = 32
"""`general.file_type` of the GGUF specification: mostly bf16."""

HF_NAMES = {
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
}


def bf16_gguf(source: Path, folder: Path) -> Path:
    """Path of the bf16 GGUF, written when it is not there; norms stay float32 as that format's own tools leave them."""
    target = folder / f"{source.stem}.bf16.gguf"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    file = open_gguf(source)
    metadata = dict(file.metadata) | {"general.file_type": FILE_TYPE_BF16}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    tensors = {
        name: tensor if len(tensor.shape) == 1 else bf16(name, dequantise(tensor.data, tensor.format, tensor.shape))
        for name, tensor in file.tensors.items()
    }
    write_gguf(target, metadata, tensors)
    return target


def hf_folder(source: Path, folder: Path) -> Path:
    """Path of the Hugging Face folder (config, weights, tokenizer), written when it is not there."""
    target = folder / f"{source.stem}.hf"
    if (target / "config.json").is_file():
        return target
    target.mkdir(parents=True, exist_ok=True)
    file = open_gguf(source)
    meta = file.metadata
    if meta["general.architecture"] != "llama":
        raise SystemExit(
            f"{source.name} is of the architecture {meta['general.architecture']!r}; only llama is converted here"
        )
    write_safetensors(target / "model.safetensors", list(hf_tensors(file)))
    tokenizer = TextTokenizer.from_gguf(meta)
    (target / "tokenizer.json").write_text(tokenizer.to_json())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.eos_token,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta.get("tokenizer.chat_template"),
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": meta["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": meta["llama.vocab_size"],
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.eos_id,
    }
    # Last, because its presence says that the rest is whole.
    (target / "config.json").write_text(json.dumps(config, indent=1))
    return target


def hf_tensors(file: GGUFFile) -> Iterator[RawTensor]:
    """The tensors under their Hugging Face names, all bf16."""
    heads = {"attn_q.weight": "llama.attention.head_count", "attn_k.weight": "llama.attention.head_count_kv"}
    plain = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    for name, tensor in file.tensors.items():
        values = dequantise(tensor.data, tensor.format, tensor.shape)
        if name in plain:
            yield bf16(plain[name], values)
            continue
        _, layer, kind = name.split(".", 2)
        if kind in heads:
            values = unpermuted(values, heads=int(file.metadata[heads[kind]]))
        yield bf16(f"model.layers.{layer}.{HF_NAMES[kind]}", values)


def unpermuted(values: np.ndarray, *, heads: int) -> np.ndarray:
    """Rows of q or k from pairs that lie side by side (GGUF's llama) back to halves (i and i + d/2), head by head."""
    rows, inputs = values.shape
    return values.reshape(heads, rows // heads // 2, 2, inputs).swapaxes(1, 2).reshape(rows, inputs)


def bf16(name: str, values: np.ndarray) -> RawTensor:
    """Rounded to bf16, ties to even; the values are finite."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return RawTensor(name, tuple(values.shape), "BF16", rounded.reshape(-1).view(np.uint8))


def write_safetensors(path: Path, tensors: list[RawTensor]) -> None:
    """Header length u64, header JSON, data; replaces `path` only when it is whole."""
    header, offset = {}, 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.format,
            "shape": tensor.shape,
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    header["__metadata__"] = {"format": "pt"}
    text = json.dumps(header).encode()
    text += b" " * (math.ceil(len(text) / 8) * 8 - len(text))
    partial = path.with_name(f".{path.name}.part")
    with partial.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            stream.write(tensor.data.data)
    os.replace(partial, path)
