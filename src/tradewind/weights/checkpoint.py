"""A checkpoint: everything that lies on disk for one model, opened and checked, nothing copied.

Knows which files of a folder belong to a model (Hugging Face layout or one GGUF). Refuses to know what the
metadata means: that is the model card's, the tokenizer's and the chat template's work.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from tradewind.weights.gguf import open_gguf
from tradewind.weights.safetensors import INDEX_NAME, open_sharded, parse_json
from tradewind.weights.tensor import CheckpointError, RawTensor, shown

__all__ = ["Checkpoint", "CheckpointError", "RawTensor", "holds_model", "open_checkpoint"]

_TEMPLATE_KEY = "tokenizer.chat_template"


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """One model's files. Tensors are views of mapped files.

    path: the folder (hf) or the .gguf file. metadata: config.json's content, or the GGUF metadata (a `GGUFMetadata`,
    whose arrays decode when asked). tensors: by the names in the files. chat_template: template name -> text, the usual
    one named "default". sentence: what sentence-transformers adds, by file name. preprocessor: how images are made ready.
    Where a file is absent the field is None.
    """

    path: Path
    kind: Literal["hf", "gguf"]
    metadata: Mapping[str, object]
    tensors: Mapping[str, RawTensor]
    tokenizer_json: Path | None = None
    tokenizer_config: Mapping[str, object] | None = None
    generation_config: Mapping[str, object] | None = None
    chat_template: Mapping[str, str] | None = None
    sentence: Mapping[str, object] | None = None
    preprocessor: Mapping[str, object] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they lie in the files."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def let_go(self) -> None:
        """Tells the system that the mapped pages are not needed now, so that they stop counting as this process's memory.

        Nothing is lost: a tensor that is read again (the embedding's rows) comes back from the file, page by page.
        """
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        maps: dict[int, mmap.mmap] = {}
        for tensor in self.tensors.values():
            owner: object = tensor.data
            while isinstance(owner, np.ndarray | memoryview):
                owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
            if isinstance(owner, mmap.mmap):
                maps[id(owner)] = owner
        for mapped in maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)


def holds_model(path: Path) -> bool:
    """Whether a path looks like a model at a glance: a .gguf file, or a folder with config.json or a .gguf."""
    if path.is_dir():
        return (path / "config.json").is_file() or next(path.glob("*.gguf"), None) is not None
    return path.is_file() and path.suffix == ".gguf"


def open_checkpoint(path: Path | str, *, weights: bool = True) -> Checkpoint:
    """Opens a .gguf file, or a folder with config.json and *.safetensors or with exactly one .gguf; changes nothing.

    Without `weights` the description alone is opened: config.json is enough, safetensors that lie there are left alone, and `tensors`
    is empty (a .gguf is its own description and is opened as ever). Raises CheckpointError with file, byte where there is one, and reason.
    """
    path = Path(path)
    if path.is_dir():
        if not weights and (path / "config.json").is_file():
            return _open_hf(path, weights=False)
        return _open_folder(path)
    if path.is_file():
        return _open_gguf(path)
    raise CheckpointError(path, "there is no such file or folder")


def _open_folder(folder: Path) -> Checkpoint:
    weights = (folder / INDEX_NAME).is_file() or next(folder.glob("*.safetensors"), None) is not None
    if weights:
        if not (folder / "config.json").is_file():
            raise CheckpointError(folder, "holds safetensors but no config.json, which says what model they are")
        return _open_hf(folder)
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return _open_gguf(ggufs[0])
    if ggufs:
        names = ", ".join(file.name for file in ggufs[:4]) + (", …" if len(ggufs) > 4 else "")
        raise CheckpointError(folder, f"holds {len(ggufs)} GGUF files; name one of them: {names}")
    other = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in sorted(folder.glob(pattern))]
    if other:
        raise CheckpointError(
            folder, f"holds weights as {other[0]}, a format that can run code when read; convert it to safetensors"
        )
    raise CheckpointError(folder, "holds neither config.json with *.safetensors nor a .gguf file")


def _open_hf(folder: Path, *, weights: bool = True) -> Checkpoint:
    config = _json(folder / "config.json")
    assert config is not None
    tokenizer_config = _json(folder / "tokenizer_config.json")
    tokenizer_json = folder / "tokenizer.json"
    return Checkpoint(
        path=folder,
        kind="hf",
        metadata=config,
        tensors=open_sharded(folder) if weights else {},
        tokenizer_json=tokenizer_json if tokenizer_json.is_file() else None,
        tokenizer_config=tokenizer_config,
        generation_config=_json(folder / "generation_config.json"),
        chat_template=_hf_templates(folder, tokenizer_config or {}) or None,
        sentence=_sentence_files(folder) or None,
        preprocessor=_json(folder / "preprocessor_config.json"),
    )


def _sentence_files(folder: Path) -> dict[str, object]:
    """What a sentence-transformers folder says about embeddings: its modules, the pooling of the module that pools, its limits."""
    found: dict[str, object] = {}
    modules = folder / "modules.json"
    pooling = "1_Pooling"
    if modules.is_file():
        # A list, where every other description is an object.
        listed = parse_json(modules, b'{"modules":' + _bytes(modules) + b"}", base=-len('{"modules":'))["modules"]
        found["modules.json"] = listed
        for module in listed if isinstance(listed, list) else ():
            if isinstance(module, dict) and str(module.get("type", "")).endswith(".Pooling"):
                pooling = Path(str(module.get("path", pooling))).name
    for name, path in (
        ("pooling.json", folder / pooling / "config.json"),
        ("sentence_bert_config.json", folder / "sentence_bert_config.json"),
    ):
        content = _json(path)
        if content is not None:
            found[name] = content
    return found


def _open_gguf(path: Path) -> Checkpoint:
    file = open_gguf(path)
    parts = file.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise CheckpointError(
            path, f"is one of {parts} parts; merge them into one file first (llama-gguf-split --merge)"
        )
    templates = {}
    # By key, not by item: asking for every value would decode the token lists.
    for key in file.metadata:
        if key == _TEMPLATE_KEY or key.startswith(f"{_TEMPLATE_KEY}."):
            template = file.metadata[key]
            if isinstance(template, str):
                templates["default" if key == _TEMPLATE_KEY else key.removeprefix(f"{_TEMPLATE_KEY}.")] = template
    return Checkpoint(
        path=path, kind="gguf", metadata=file.metadata, tensors=file.tensors, chat_template=templates or None
    )


def _hf_templates(folder: Path, tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    """Chat templates by name; a later source of the same name wins, as in the library that writes these files.

    Sources: tokenizer_config.json (text, or a list of name and template), chat_template.json, chat_template.jinja,
    additional_chat_templates/NAME.jinja.
    """
    templates: dict[str, str] = {}
    for given in (
        tokenizer_config.get("chat_template"),
        (_json(folder / "chat_template.json") or {}).get("chat_template"),
    ):
        if isinstance(given, str):
            templates["default"] = given
        elif isinstance(given, list):
            for entry in given:
                if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                    templates[str(entry.get("name", "default"))] = entry["template"]
    files = [("default", folder / "chat_template.jinja")]
    files += [(file.stem, file) for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    for name, file in files:
        if file.is_file():
            templates[name] = _text(file)
    return templates


def _json(path: Path) -> dict[str, object] | None:
    if not path.is_file():
        return None
    return parse_json(path, _bytes(path))


def _text(path: Path) -> str:
    try:
        return _bytes(path).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(path, f"is not UTF-8 ({shown(path.name)})", offset=error.start) from None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from None
