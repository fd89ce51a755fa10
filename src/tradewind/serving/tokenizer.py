"""Text to token ids and back, for one model's vocabulary.

Knows: how a vocabulary from `tokenizer.json` or from GGUF metadata becomes a tokenizer, which ids are special, which end a
text, where a beginning-of-text id belongs, and which bytes each id stands for.
Refuses to know: files of weights (metadata arrives as a plain mapping), chat roles (chat_template.py), streams (detokenize.py).

The merging itself is done by the `tokenizers` library, imported when a tokenizer is built. Decoding is done here, by joining
bytes, so that a whole text and a stream of it can never differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from tradewind.contract.errors import RequestError, UserError
from tradewind.serving.pretokenizers import build_normalizer, build_pre_tokenizer, recipe_for

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

# Values of `tokenizer.ggml.token_type` (the GGUF specification).
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

_SPACE_MARK = "\u2581"
"""SentencePiece writes a space as this character (LOWER ONE EIGHTH BLOCK)."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")

# Control tokens that end an answer, by their text. A GGUF file names one end token, models often have two or three.
_END_TEXTS = frozenset(
    {
        "</s>",
        "<EOT>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<eos>",
        "<|call|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|end|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|im_end|>",
        "<|return|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "[EOS]",
        "[EOT]",
    }
)

Kind = Literal["byte_level", "spm", "other"]

LONG_CHARACTERS = 2048
"""Texts up to this size take under a millisecond or two; longer ones are encoded so that other threads run meanwhile."""


class _TokenBytes(dict[int, bytes]):
    """id -> the bytes it stands for, found when first asked for; `blank` ids stand for nothing."""

    def __init__(self, backend: Tokenizer, *, kind: Kind, added: Mapping[int, str], blank: Iterable[int] = ()) -> None:
        super().__init__()
        self._backend = backend
        self._kind = kind
        self._added = added
        self.update((token_id, b"") for token_id in blank)

    def __missing__(self, token_id: int) -> bytes:
        value = self._spell(token_id)
        self[token_id] = value
        return value

    def _spell(self, token_id: int) -> bytes:
        # Ids past the vocabulary exist: embedding tables are padded, and a model may draw one. They have no text.
        text = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if text is None:
            return b""
        if self._kind == "spm":
            byte = _BYTE_PIECE.match(text)
            return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE_MARK, " ").encode()
        if self._kind == "other":
            return self._backend.decode([token_id], skip_special_tokens=False).encode()
        if token_id in self._added:
            return text.encode()
        try:
            return bytes([_BYTE_OF_CHARACTER[character] for character in text])
        except KeyError:
            return text.encode()


def _byte_characters() -> dict[str, int]:
    """The spelling of bytes as printable characters used by byte-level BPE (GPT-2, Radford et al. 2019): character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    table.update((chr(0x100 + place), byte) for place, byte in enumerate(rest))
    return table


_BYTE_OF_CHARACTER = _byte_characters()


class TextTokenizer:
    """One vocabulary: text to ids, ids to bytes and text. Changes nothing after it is built; safe to share among threads.

    Build it with `from_gguf` or `from_tokenizer_json`.
    """

    def __init__(
        self,
        backend: Tokenizer,
        *,
        kind: Kind,
        bos_id: int | None,
        eos_id: int | None,
        eos_ids: frozenset[int],
        prefix_ids: Sequence[int] = (),
        suffix_ids: Sequence[int] = (),
        strips_leading_space: bool = False,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self.kind: Kind = kind
        self.vocab_size: int = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        """One more than the largest id. The model's embedding table may be larger (padding)."""
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.eos_ids = eos_ids
        """Every id that ends a generation."""
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Ids that `skip_special` leaves out of the text."""
        self.prefix_ids = tuple(prefix_ids)
        self.suffix_ids = tuple(suffix_ids)
        """What `add_special` puts before and after a text (usually BOS and nothing)."""
        self.strips_leading_space = strips_leading_space
        """The vocabulary writes a space before the first word that is not part of the text."""
        self.chat_templates: dict[str, str] = dict(chat_templates or {})
        """Template source by name; the usual one is `default`."""
        texts = {token_id: token.content for token_id, token in added.items()}
        self._bytes = _TokenBytes(backend, kind=kind, added=texts)
        self._visible_bytes = _TokenBytes(backend, kind=kind, added=texts, blank=self.special_ids)

    # -- text to ids

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of a text; changes nothing. Raises RequestError when `text` is not valid text.

        With `add_special` the ids begin with BOS where the model wants one. A text that already begins with it gets no second.
        """
        return self._dress(self._encode(text), add_special=add_special)

    def encode_batch(self, texts: Sequence[str], *, add_special: bool) -> list[list[int]]:
        """Token ids of many texts, on all cores; otherwise as `encode`."""
        for text in texts:
            _check_text(text)
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._dress(encoding.ids, add_special=add_special) for encoding in encodings]

    def encode_chat(self, rendered: str) -> list[int]:
        """Token ids of a rendered chat template; the one place where templates and BOS meet.

        A template writes its own special tokens, so none are added, except BOS when the model wants one and the template did
        not begin with it. Nothing is added at the end: an answer is to follow.
        """
        ids = self._encode(rendered)
        return ids if self._begins_with_prefix(ids) else [*self.prefix_ids, *ids]

    def _encode(self, text: str) -> list[int]:
        _check_text(text)
        if len(text) > LONG_CHARACTERS:
            # The library lets other threads run only while it encodes a batch, and streams must go on meanwhile.
            return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return self._backend.encode(text, add_special_tokens=False).ids

    def _begins_with_prefix(self, ids: Sequence[int]) -> bool:
        return tuple(ids[: len(self.prefix_ids)]) == self.prefix_ids

    def _dress(self, ids: list[int], *, add_special: bool) -> list[int]:
        if not add_special or not (self.prefix_ids or self.suffix_ids):
            return ids
        head = () if self._begins_with_prefix(ids) else self.prefix_ids
        return [*head, *ids, *self.suffix_ids]

    # -- ids to text

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of a whole sequence of ids; changes nothing. Bytes that are no UTF-8 become U+FFFD, ids without text nothing."""
        if self.kind == "other":
            return self._backend.decode([i for i in ids if 0 <= i < self.vocab_size], skip_special_tokens=skip_special)
        joined = b"".join(map(self.byte_table(skip_special=skip_special).__getitem__, ids))
        if self.strips_leading_space and joined.startswith(b" "):
            joined = joined[1:]
        return joined.decode("utf-8", "replace")

    def byte_table(self, *, skip_special: bool) -> Mapping[int, bytes]:
        """id -> bytes as they appear in a text; special ids are empty with `skip_special`. For the detokenizer's inner loop."""
        return self._visible_bytes if skip_special else self._bytes

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one id stands for (special ids: their spelling); empty past the vocabulary. A piece of a character is normal."""
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """One id as text for people (logprobs, logs): half a character shows as U+FFFD."""
        return self._bytes[token_id].decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """The id whose vocabulary entry is spelled exactly so, or None."""
        return self._backend.token_to_id(token)

    @property
    def bos_token(self) -> str:
        """BOS as a template writes it; empty when the model has none."""
        return "" if self.bos_id is None else self._backend.id_to_token(self.bos_id) or ""

    @property
    def eos_token(self) -> str:
        """EOS as a template writes it; empty when the model has none."""
        return "" if self.eos_id is None else self._backend.id_to_token(self.eos_id) or ""

    def to_json(self) -> str:
        """The library's `tokenizer.json` text, for tools that want the vocabulary whole (a grammar compiler)."""
        return self._backend.to_str(pretty=False)

    # -- constructors

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, object], *, generation_config: Mapping[str, object] | None = None
    ) -> TextTokenizer:
        """Builds a tokenizer from the `tokenizer.*` keys of a GGUF file; raises UserError when they are missing or odd.

        `tokenizer.ggml.model` may be `gpt2` (byte-level BPE, cut by `tokenizer.ggml.pre`) or `llama` (SentencePiece BPE).
        Arrays may be lists or numpy arrays. `generation_config` adds end tokens.
        """
        model = metadata.get("tokenizer.ggml.model")
        tokens = cast("Sequence[str]", _array(metadata, "tokenizer.ggml.tokens"))
        types = cast("Sequence[int]", _array(metadata, "tokenizer.ggml.token_type", default=[]))
        types = types or [1] * len(tokens)
        if len(types) != len(tokens):
            raise UserError(f"the GGUF file has {len(tokens)} tokens but {len(types)} token types; it is damaged")
        vocab = {token: place for place, token in enumerate(tokens)}
        if "" in vocab:
            tokens = [token or f"[EMPTY_{place}]" for place, token in enumerate(tokens)]
            vocab = {token: place for place, token in enumerate(tokens)}
        if len(vocab) != len(tokens):
            twice = next(token for place, token in enumerate(tokens) if vocab[token] != place)
            raise UserError(f"the GGUF file's vocabulary has the token {twice!r} twice; it is damaged")

        if model == "gpt2":
            recipe_name = str(metadata.get("tokenizer.ggml.pre", "default"))
            backend = _build_byte_level(metadata, vocab=vocab, pre=recipe_name)
            kind: Kind = "byte_level"
            adds_bos = recipe_for(recipe_name).adds_bos
            space_prefix = False
            default_bos, default_eos = None, None
        elif model == "llama":
            space_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
            default_bos, default_eos = 1, 2
            backend, tokens = _build_spm(metadata, vocab=vocab, tokens=tokens, types=types, space_prefix=space_prefix)
            kind = "spm"
            adds_bos = True
        else:
            raise UserError(
                f"this GGUF file's tokenizer is of the kind {model!r}; known are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE)"
            )
        _add_tokens(backend, tokens=tokens, types=types)

        def named(key: str, default: int | None) -> int | None:
            value = metadata.get(f"tokenizer.ggml.{key}_token_id", default)
            return int(cast("int", value)) if value is not None and 0 <= int(cast("int", value)) < len(tokens) else None

        bos_id, eos_id = named("bos", default_bos), named("eos", default_eos)
        adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
        adds_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
        ends = {end for end in (eos_id, named("eot", None), named("eom", None)) if end is not None}
        control = {
            token: place for place, (token, kind_) in enumerate(zip(tokens, types, strict=True)) if kind_ == _CONTROL
        }
        return cls(
            backend,
            kind=kind,
            bos_id=bos_id,
            eos_id=eos_id,
            eos_ids=_end_ids(ends, control=control, generation_config=generation_config),
            prefix_ids=(bos_id,) if adds_bos and bos_id is not None else (),
            suffix_ids=(eos_id,) if adds_eos and eos_id is not None else (),
            strips_leading_space=space_prefix,
            chat_templates=_gguf_templates(metadata),
        )

    @classmethod
    def from_tokenizer_json(
        cls,
        source: str | bytes | Path,
        *,
        tokenizer_config: Mapping[str, object] | None = None,
        generation_config: Mapping[str, object] | None = None,
        chat_template: str | None = None,
    ) -> TextTokenizer:
        """Builds a tokenizer from a `tokenizer.json` (path, or its text); raises UserError when it cannot be read.

        `tokenizer_config` (that file's content) names BOS and EOS, may switch them on or off, and may hold templates;
        `chat_template` (the content of `chat_template.jinja`) wins over those.
        """
        from tokenizers import Tokenizer

        name, data = _read_source(source)
        try:
            backend = Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{name} cannot be read as a tokenizer: {_one_line(error)}") from None
        backend.no_truncation()
        backend.no_padding()
        config = tokenizer_config or {}
        kind, strips = _decoder_kind(backend)
        prefix, suffix = _template_ids(backend)
        bos_id, eos_id = _config_id(backend, config, "bos_token"), _config_id(backend, config, "eos_token")
        if bos_id is None and len(prefix) == 1:
            bos_id = prefix[0]
        if isinstance(wish := config.get("add_bos_token"), bool) and bos_id is not None:
            prefix = (bos_id,) if wish else ()
        if isinstance(wish := config.get("add_eos_token"), bool) and eos_id is not None:
            suffix = (eos_id,) if wish else ()
        control = {t.content: i for i, t in backend.get_added_tokens_decoder().items() if t.special}
        templates = _config_templates(config)
        if chat_template is not None:
            templates["default"] = chat_template
        return cls(
            backend,
            kind=kind,
            bos_id=bos_id,
            eos_id=eos_id,
            eos_ids=_end_ids(
                {eos_id} if eos_id is not None else set(), control=control, generation_config=generation_config
            ),
            prefix_ids=prefix,
            suffix_ids=suffix,
            strips_leading_space=strips,
            chat_templates=templates,
        )


# -- GGUF


def _build_byte_level(metadata: Mapping[str, object], *, vocab: dict[str, int], pre: str) -> Tokenizer:
    """A byte-level BPE from a vocabulary and its merge list."""
    from tokenizers import Tokenizer, decoders, models

    recipe = recipe_for(pre)
    pairs = [tuple(merge.split(" ")) for merge in cast("Sequence[str]", _array(metadata, "tokenizer.ggml.merges"))]
    # Handing vocabulary and merges over as objects takes half the time of the same as JSON text, cached or not.
    try:
        model = models.BPE(vocab=vocab, merges=cast("Any", pairs), ignore_merges=recipe.ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"the GGUF file's merge list does not fit its vocabulary: {_one_line(error)}") from None
    backend = Tokenizer(model)
    if (normalizer := build_normalizer(recipe)) is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = build_pre_tokenizer(recipe)
    backend.decoder = decoders.ByteLevel()
    return backend


def _build_spm(
    metadata: Mapping[str, object],
    *,
    vocab: dict[str, int],
    tokens: Sequence[str],
    types: Sequence[int],
    space_prefix: bool,
) -> tuple[Tokenizer, Sequence[str]]:
    """A SentencePiece BPE from pieces and scores; also returns the tokens as spelled in text.

    SentencePiece joins the neighbouring pair whose joined piece has the best score, leftmost first. The same as a merge list:
    every way to cut a piece into two pieces is a merge, and the merges stand in order of the joined piece's score.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = cast("Sequence[float]", _array(metadata, "tokenizer.ggml.scores"))
    if len(scores) != len(tokens):
        raise UserError(f"the GGUF file has {len(tokens)} tokens but {len(scores)} scores; it is damaged")
    merging = dict(vocab)
    plain, plain_vocab = tokens, vocab
    apart = {place: kind for place, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE)}
    for place in apart:
        del merging[tokens[place]]
    merges = spm_merges(tokens, scores=scores, vocab=merging)
    if _USER_DEFINED in apart.values():
        # These are taken out of the text before merging, so they must be spelled as text is, with spaces.
        plain = [t.replace(_SPACE_MARK, " ") if apart.get(i) == _USER_DEFINED else t for i, t in enumerate(tokens)]
        plain_vocab = {token: place for place, token in enumerate(plain)}
    unknown = int(cast("int", metadata.get("tokenizer.ggml.unknown_token_id", 0)))
    model = models.BPE(
        vocab=plain_vocab,
        merges=cast("Any", merges),
        unk_token=plain[unknown] if 0 <= unknown < len(plain) else None,
        byte_fallback=True,
        fuse_unk=True,
    )
    backend = Tokenizer(model)
    to_mark: list[Any] = [normalizers.Replace(" ", _SPACE_MARK)]
    from_mark: list[Any] = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        to_mark.insert(0, normalizers.Prepend(_SPACE_MARK))
        from_mark.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = cast("Any", normalizers.Sequence(to_mark))
    backend.decoder = cast("Any", decoders.Sequence(from_mark))
    return backend, plain


def spm_merges(tokens: Sequence[str], *, scores: Sequence[float], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merge list that does what SentencePiece does with these scores; `vocab` holds the pieces that may take part.

    Equal to SentencePiece as long as no two pieces share a score (trainers give each its own). The order of the cuts of one
    piece is free: what happens inside a stretch of text that becomes one piece does not depend on its surroundings, so only
    one of them is ever used.
    """
    merges: list[tuple[str, str]] = []
    for place in sorted(vocab.values(), key=scores.__getitem__, reverse=True):
        piece = tokens[place]
        for cut in range(1, len(piece)):
            left = piece[:cut]
            if left in vocab:
                right = piece[cut:]
                if right in vocab:
                    merges.append((left, right))
    return merges


def _add_tokens(backend: Tokenizer, *, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Marks the pieces that are found in a text before any merging; changes `backend`."""
    from tokenizers import AddedToken

    special: list[AddedToken] = []
    ordinary: list[AddedToken] = []
    for place, kind in enumerate(types):
        if kind in (_CONTROL, _UNKNOWN):
            special.append(AddedToken(tokens[place], special=True, normalized=False))
        elif kind == _USER_DEFINED:
            ordinary.append(AddedToken(tokens[place], special=False, normalized=False))
    # One call each: the library rebuilds its matcher on every call.
    if special:
        backend.add_special_tokens(cast("Any", special))
    if ordinary:
        backend.add_tokens(cast("Any", ordinary))


def _gguf_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    start = "tokenizer.chat_template"
    templates: dict[str, str] = {}
    # Key by key: a mapping over a file may decode a value when asked for it, and the vocabulary is among them.
    for key in metadata:
        if key == start or key.startswith(start + "."):
            value = metadata[key]
            if isinstance(value, str):
                templates[key[len(start) + 1 :] or "default"] = value
    return templates


def _array(metadata: Mapping[str, object], key: str, *, default: Sequence[Any] | None = None) -> Sequence[Any]:
    value = metadata.get(key, default)
    if value is None:
        raise UserError(f"the GGUF file has no {key}, so its text cannot be read or written")
    if hasattr(value, "tolist"):
        return cast("Sequence[Any]", value.tolist())
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise UserError(f"the GGUF file's {key} is not a list; it is damaged")
    return value


# -- tokenizer.json


def _read_source(source: str | bytes | Path) -> tuple[str, bytes]:
    """(what to call it, its bytes) of a path or a text."""
    if isinstance(source, bytes):
        return "the tokenizer", source
    if isinstance(source, str) and source.lstrip()[:1] == "{":
        return "the tokenizer", source.encode()
    path = Path(source)
    try:
        return str(path), path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def _decoder_kind(backend: Tokenizer) -> tuple[Kind, bool]:
    """How ids spell bytes, and whether the first space is not part of the text, read from the decoder's own description."""
    if backend.decoder is None:
        return "other", False
    described = json.loads(backend.decoder.__getstate__())
    steps = described["decoders"] if described["type"] == "Sequence" else [described]
    names = {step["type"] for step in steps}
    if names == {"ByteLevel"}:
        return "byte_level", False
    if not names <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return "other", False
    strips = False
    for step in steps:
        if step["type"] == "Replace" and (step.get("pattern"), step.get("content")) != ({"String": _SPACE_MARK}, " "):
            return "other", False
        if step["type"] == "Strip":
            if (step["content"], step["start"], step["stop"]) != (" ", 1, 0):
                return "other", False
            strips = True
        if step["type"] == "Metaspace":
            if step.get("replacement") != _SPACE_MARK:
                return "other", False
            strips = strips or step.get("prepend_scheme", "always") != "never"
    if not names & {"Replace", "Metaspace"}:
        return "other", False
    return "spm", strips


def _template_ids(backend: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids the file's own post-processor puts around a text, found by trying it on one."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    return (), ()


def _config_id(backend: Tokenizer, config: Mapping[str, object], key: str) -> int | None:
    """The id of a token named in tokenizer_config.json, as text or as an object with `content`."""
    value = config.get(key)
    if isinstance(value, Mapping):
        value = value.get("content")
    return backend.token_to_id(value) if isinstance(value, str) else None


def _config_templates(config: Mapping[str, object]) -> dict[str, str]:
    """Templates in tokenizer_config.json: one text, or a list of {name, template}."""
    value = config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, Sequence):
        return {
            str(entry["name"]): str(entry["template"])
            for entry in value
            if isinstance(entry, Mapping) and "name" in entry and "template" in entry
        }
    return {}


# -- both


def _end_ids(
    ends: set[int], *, control: Mapping[str, int], generation_config: Mapping[str, object] | None
) -> frozenset[int]:
    """All ids that end a generation: those named, and the generation config's; without one, the known end texts."""
    named = (generation_config or {}).get("eos_token_id")
    if isinstance(named, int):
        return frozenset(ends | {named})
    if isinstance(named, Sequence) and not isinstance(named, str):
        return frozenset(ends | {int(end) for end in named})
    found = {text: control[text] for text in _END_TEXTS if text in control}
    if {"<|return|>", "<|call|>"} <= found.keys():
        found.pop("<|end|>", None)  # in the harmony format this ends a message, not the answer
    return frozenset(ends | set(found.values()))


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise RequestError(f"text to encode must be a string, not {type(text).__name__}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has half a character (a lone surrogate) at position {error.start}; send valid Unicode"
            ) from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
