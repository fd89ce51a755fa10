"""A whole engine on a tiny random checkpoint, with its plan bent as a test wants it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tradewind.assemble import Engine, build_planned, make_plan
from tradewind.config.goals import AdapterRoom, Goals, Means
from tradewind.contract.events import Event, Sink, TokensOut
from tradewind.contract.request import Request, SamplingParams
from tradewind.kernels.cpu import library
from tradewind.llm import LLM, AsyncLLM
from tradewind.serving.intake import Intake, Limits

VOCAB = 260
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 259,
    "torch_dtype": "float32",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "full": {**SHAPE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False},
    "windowed": {
        **SHAPE,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 16,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "tie_word_embeddings": True,
    },
}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def write_checkpoint(kind: str, folder: Path) -> Path:
    """A folder in the Hugging Face layout: random weights, and a tokenizer of single bytes."""
    config = CONFIGS[kind]
    draw = np.random.default_rng(sum(kind.encode()))
    hidden, inner, width, kv = 64, 96, 64, 32
    gemma = kind == "windowed"

    def matrix(n: int, k: int) -> np.ndarray:
        return (draw.standard_normal((n, k)) * 1.5 / k**0.5).astype(np.float32)

    def norm(size: int = hidden) -> np.ndarray:
        return (draw.uniform(0.5, 1.5, size) - (1.0 if gemma else 0.0)).astype(np.float32)

    # Tied embeddings that outweigh the layers would repeat the token that came in, whatever was drawn before.
    scale = 0.4 if gemma else 4.0
    tensors = {"model.embed_tokens.weight": matrix(VOCAB, hidden) * scale, "model.norm.weight": norm()}
    if not gemma:
        tensors["lm_head.weight"] = matrix(VOCAB, hidden) * 2
    for layer in range(3):
        at = f"model.layers.{layer}."
        norms = ["input_layernorm", "post_attention_layernorm"]
        if gemma:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
            tensors[at + "self_attn.q_norm.weight"] = norm(16)
            tensors[at + "self_attn.k_norm.weight"] = norm(16)
        for name in norms:
            tensors[f"{at}{name}.weight"] = norm()
        for name, n, k in (
            ("self_attn.q_proj", width, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, width),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            tensors[f"{at}{name}.weight"] = matrix(n, k)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    vocab |= {f"<{index}>": index for index in range(len(vocab), VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@contextmanager
def engine_of(
    folder: Path,
    *,
    pages: int | None = None,
    backend: str = "cpu",
    schedule: dict[str, Any] | None = None,
    sinks: Sequence[Sink] = (),
    adapters: AdapterRoom | None = None,
    **means: Any,
) -> Iterator[Engine]:
    """An engine on the checkpoint; `pages` (of the full group; the others in proportion) and `schedule` overrule the plan."""
    if backend == "cpu" and (why := library.why_not()):
        pytest.skip(why)
    defaults: dict[str, Any] = {"threads": 2, "kv_format": "f32", "compute": "f32"}
    goals = Goals(model=str(folder), adapters=adapters, means=Means(backend=backend, **{**defaults, **means}))  # type: ignore[arg-type]
    planned = make_plan(goals)
    plan = planned.plan
    if pages is not None:
        plan = msgspec.structs.replace(
            plan, cache=msgspec.structs.replace(plan.cache, pages=tuple(min(pages, own) for own in plan.cache.pages))
        )
    plan = msgspec.structs.replace(plan, schedule=msgspec.structs.replace(plan.schedule, **(schedule or {})))
    planned = type(planned)(path=planned.path, checkpoint=planned.checkpoint, plan=plan)
    engine = build_planned(planned, sinks=sinks)
    try:
        yield engine
    finally:
        engine.client.close()


class Listener:
    """A sink that keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def take(self, event: Event) -> None:
        self.events.append(event)


def requests(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams], **facts: Any
) -> list[Request]:
    """One request (or n) per prompt."""
    limits = Limits(vocab_size=VOCAB, max_context=engine.plan.schedule.max_context, eos_ids=engine.plan.card.eos_ids)
    intake = Intake(limits, prefix=facts.pop("prefix", "r"))
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    return [r for p, s in zip(prompts, each, strict=True) for r in intake.requests(p, s, now_s=0.0, **facts)]


def answers(engine: Engine, asked: Sequence[Request]) -> list[tuple[int, ...]]:
    """Every request's tokens, all submitted at once."""
    handles = engine.client.run(asked)
    for handle in handles:
        last = handle.last
        assert isinstance(last, TokensOut) and last.error is None, last
    return [tuple(handle.tokens) for handle in handles]


def prompts(count: int, *, seed: int = 0, low: int = 3, high: int = 90) -> list[list[int]]:
    """Random prompts of mixed lengths."""
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 256, draw.integers(low, high)).tolist() for _ in range(count)]


def open_llm(folder: Path, *, asynchronous: bool = False, **options: Any) -> Any:
    """The Python face (LLM, or AsyncLLM when `asynchronous`) on the checkpoint; the caller closes it."""
    if why := library.why_not():
        pytest.skip(why)
    return (AsyncLLM if asynchronous else LLM)(
        str(folder), **{"threads": 1, "kv_format": "f32", "compute": "f32", **options}
    )


def nothing_is_held(llm: LLM) -> bool:
    """Whether no request is open and every page is free or kept by the prefix cache alone."""
    return nothing_is_held_by(llm.engine)


def nothing_is_held_by(engine: Engine) -> bool:
    """The same for an engine without its Python face."""
    scheduler = engine.client._loop.scheduler
    engine.client.forget()
    pools = scheduler.cache.pools
    return scheduler.idle and scheduler.unfinished == 0 and all(pool.free == pool.total - 1 for pool in pools)
