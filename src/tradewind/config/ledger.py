"""The memory ledger: what each part of an engine will take, before anything is loaded.

Knows: bytes per weight by format and compute, sizes of workspaces, prices of pages. Refuses to know: which choices are good (resolve).
Every line shows its arithmetic, and the lines add up to the whole. On a GPU they are the device's memory only, all of it taken at start
(ledger_cuda); on a CPU the process's.
"""

from __future__ import annotations

from dataclasses import dataclass

from tradewind.config import choices_images, ledger_adapters, ledger_cuda
from tradewind.config.card import ModelCard
from tradewind.config.card_parts import active_parameters, mlp_matrices
from tradewind.config.goals import AdapterRoom
from tradewind.config.plan import LedgerLine
from tradewind.config.sizes import MiB
from tradewind.contract.kv import KVGroup

FILE_BITS: dict[str, float] = {
    "BF16": 16,
    "F16": 16,
    "F32": 32,
    "Q4_0": 4.5,
    "Q4_1": 5,
    "Q4_K": 4.5,
    "Q5_0": 5.5,
    "Q5_1": 6,
    "Q5_K": 5.5,
    "Q6_K": 6.5625,
    "Q8_0": 8.5,
}
"""Bits of a value as it lies in the file, scales included."""

PACKED_BITS: dict[str, float] = {
    "Q4_0": 4.5,
    "Q4_1": 5,
    "Q4_K": 6,
    "Q5_0": 5.5,
    "Q5_1": 6,
    "Q5_K": 7,
    "Q6_K": 8,
    "Q8_0": 8.5,
}
"""Bits of a value packed for int8 compute: the quants' own bits, a scale and (unless symmetric) a minimum for 32 values, of 16 bits each;
of 32 bits for the K formats, whose scales are products, and for 16 values in Q6_K."""

QUANTISED_BITS = {"int4": 6.0, "int8": 9.0}
"""The same for weights quantised at load, in groups of 32 with float32 scales."""

FLOAT_BITS = {"f32": 32.0, "bf16": 16.0}

HEAD_ROWS = 32
"""Rows of logits that are computed at a time."""

PROCESS_BYTES = 48 * MiB
"""Interpreter, numpy, tokenizers, this package, thread stacks: measured 43 MiB after the imports of a CPU run, rounded up."""

TORCH_BYTES = 220 * MiB
"""What importing torch adds (measured, CPU build)."""

TOKENIZER_BYTES_PER_TOKEN = 600
"""Measured 530 for a BPE vocabulary of 49,152."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The choices that decide how much memory is taken, apart from pages."""

    backend: str
    compute: str
    quantization: str
    max_tokens_per_step: int
    max_running: int
    max_context: int
    page_tokens: int
    kv_groups: int = 1
    graphs: bool = False
    adapters: AdapterRoom | None = None


def is_quantised(name: str) -> bool:
    """Whether a storage format holds quants with scales."""
    return name in PACKED_BITS


def block_quantised(card: ModelCard) -> float:
    """Part of the parameters that the file stores as quantised blocks."""
    quantised = sum(count for name, count in card.weight_formats.items() if is_quantised(name))
    return quantised / max(1, sum(card.weight_formats.values()))


def bits_in_memory(name: str, *, compute: str, quantization: str) -> float:
    """Bits of a matmul weight in memory, for a file format and the chosen compute."""
    if compute in FLOAT_BITS:
        return FLOAT_BITS[compute]
    if is_quantised(name):
        return PACKED_BITS[name]
    return QUANTISED_BITS.get(quantization, FLOAT_BITS["bf16"])


def matmul_parameters(card: ModelCard) -> int:
    """Weights that each token of a prompt is multiplied with: the layers', without embedding table and output head; of a mixture of
    experts those that a token is sent to."""
    if card.moe is not None:
        return active_parameters(card)
    tables = card.vocab_size * card.hidden * (1 if card.tied_embeddings else 2)
    return max(1, card.parameters - tables - tower_parameters(card))


def tower_parameters(card: ModelCard) -> int:
    """Of the image tower, which has a line of its own."""
    return 0 if card.vision is None else card.vision.parameters


def matmul_bytes(card: ModelCard, *, compute: str, quantization: str, backend: str = "cpu") -> int:
    """All weights as they will lie in memory, but for an embedding table that no matmul reads."""
    if quantization == "fp8" or (backend == "cuda" and ledger_cuda.kept_fp8(card, quantization=quantization)):
        return ledger_cuda.weight_bytes(card, quantization=quantization)
    total = 0.0
    for name, count in card.weight_formats.items():
        rows_only = 0 if card.tied_embeddings or name != card.embedding_format else card.vocab_size * card.hidden
        tower = tower_parameters(card) if name == card.embedding_format else 0
        total += (
            max(0, count - rows_only - tower) * bits_in_memory(name, compute=compute, quantization=quantization) / 8
        )
    return int(total)


def read_bytes(card: ModelCard, *, compute: str, quantization: str, backend: str = "cpu") -> int:
    """Bytes of weights that one token reads: all but the experts that it is not sent to."""
    idle = sum(mlp_matrices(card, layer) - mlp_matrices(card, layer, active=True) for layer in range(card.layers))
    part = idle / max(1, card.parameters)
    return int(matmul_bytes(card, compute=compute, quantization=quantization, backend=backend) * (1 - part))


def embedding_bytes(card: ModelCard) -> int:
    """The embedding table in the format of the file."""
    return int(card.vocab_size * card.hidden * FILE_BITS.get(card.embedding_format, 16) / 8)


def workspace_bytes(card: ModelCard, *, max_tokens: int) -> int:
    """Activations of one step, reused from layer to layer: float32, and the int8 copies that matmuls make."""
    heads = card.heads * card.head_dim
    qkv = heads + 2 * card.kv_heads * card.head_dim
    if card.latent is not None:  # queries and what they bring back, also in the space of latents
        latent = card.latent
        qkv = latent.width + latent.query_rank + card.heads * (latent.value + latent.width + latent.rank)
    floats = 3 * card.hidden + qkv + heads + card.intermediate + 2 * card.head_dim
    return max_tokens * (4 * floats + 2 * max(card.hidden, card.intermediate, heads))


def fixed_lines(card: ModelCard, shape: Shape) -> tuple[LedgerLine, ...]:
    """Everything but the pages."""
    return (*_model_lines(card, shape), *_image_lines(card, shape), *_adapter_lines(card, shape))


def _image_lines(card: ModelCard, shape: Shape) -> tuple[LedgerLine, ...]:
    """The tower and its memory, where the model reads images."""
    return choices_images.image_lines(
        card, max_context=shape.max_context, max_tokens_per_step=shape.max_tokens_per_step, compute=shape.compute
    )


def _adapter_lines(card: ModelCard, shape: Shape) -> tuple[LedgerLine, ...]:
    """The banks, where adapters are asked for."""
    if shape.adapters is None:
        return ()
    exact = shape.backend == "plain" or (shape.backend == "cpu" and shape.compute == "f32")
    return (ledger_adapters.line(card, shape.adapters, exact=exact, max_tokens=shape.max_tokens_per_step),)


def _model_lines(card: ModelCard, shape: Shape) -> tuple[LedgerLine, ...]:
    if shape.backend == "cuda":
        sizes = ledger_cuda.Sizes(
            quantization=shape.quantization,
            max_tokens_per_step=shape.max_tokens_per_step,
            max_running=shape.max_running,
            max_context=shape.max_context,
            page_tokens=shape.page_tokens,
            kv_groups=shape.kv_groups,
            graphs=shape.graphs,
        )
        return ledger_cuda.fixed_lines(card, sizes)
    weights = matmul_bytes(card, compute=shape.compute, quantization=shape.quantization)
    large = [(name, count) for name, count in card.weight_formats.items() if count * 100 >= card.parameters]
    stored = " + ".join(f"{count / 1e6:.1f}M {name}" for name, count in large)
    bits = 8 * weights / max(1, card.parameters)
    step, head = shape.max_tokens_per_step, min(HEAD_ROWS, max(1, shape.max_running))
    slot_tables = shape.max_running * shape.max_context * (4 + 2 * 4 / shape.page_tokens)
    process = PROCESS_BYTES + (TORCH_BYTES if shape.backend == "plain" else 0)
    lines = (
        ("weights", weights, f"{stored}; {bits:.1f} bits each packed for {shape.compute}"),
        (
            "embedding table",
            embedding_bytes(card),
            f"{card.vocab_size} x {card.hidden} {card.embedding_format}, rows read from the file",
        ),
        (
            "workspace",
            workspace_bytes(card, max_tokens=step + head),
            f"activations of {step} tokens, reused by every layer, and of {head} rows at its end",
        ),
        ("logits", head * card.vocab_size * 4, f"{head} rows x {card.vocab_size} float32"),
        (
            "slots",
            int(slot_tables),
            f"token and page tables of {shape.max_running} sequences x {shape.max_context} tokens, touched lazily",
        ),
        (
            "tokenizer",
            card.vocab_size * TOKENIZER_BYTES_PER_TOKEN,
            f"{card.vocab_size} tokens x {TOKENIZER_BYTES_PER_TOKEN} bytes",
        ),
        (
            "process",
            process,
            "Python and libraries" + (", torch among them" if shape.backend == "plain" else "") + ", measured",
        ),
    )
    return tuple(LedgerLine(name=name, bytes=size, how=how) for name, size, how in lines)


def kv_line(group: KVGroup, *, pages: int, at_start: bool = False) -> LedgerLine:
    """The line of one pool. at_start: all of it is taken at start, as on a GPU."""
    kind = group.kind if group.window is None else f"{group.kind} {group.window}"
    kept = f"{group.head_dim}" if group.kind == "latent" else f"2 x {group.kv_heads} heads x {group.head_dim}"
    when = "taken at start" if at_start else "a page costs memory from its first use on"
    return LedgerLine(
        name=f"KV pages, {kind}",
        bytes=pages * group.bytes_per_page,
        how=f"{pages} pages x {group.page_tokens} tokens x {len(group.layers)} layers x {kept} {group.format}; {when}",
    )


def total_bytes(lines: tuple[LedgerLine, ...]) -> int:
    """Sum of the ledger."""
    return sum(line.bytes for line in lines)
