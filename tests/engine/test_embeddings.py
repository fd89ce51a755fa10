"""Embeddings through the whole engine against `transformers`: decoders and a BERT encoder, chunked and not, beside generation.

Tolerance: the largest deviation of a normalised vector's value, where values are about 1 / sqrt(64).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoModel

from tests.engine.tiny_engine import (
    Listener,
    answers,
    engine_of,
    nothing_is_held,
    open_llm,
    prompts,
    requests,
    write_checkpoint,
)
from tests.reference.test_bert import make_bert
from tradewind.config.env import cache_dir
from tradewind.contract.errors import EngineDeadError, RequestError, UserError
from tradewind.contract.events import Preempted
from tradewind.contract.request import SamplingParams

TOLERANCE = 1e-5
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
WORDS = [
    "the", "a", "sea", "wind", "trade", "ship", "sails", "sail", "##s", "##ing", "far", "from", "near", "port", "night", "day", "cold",
]  # fmt: skip


@pytest.fixture(scope="module", params=["full", "windowed"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("full", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"))


def write_bert(folder: Path, **values: Any) -> Path:
    """A random encoder with a WordPiece tokenizer that frames a text with [CLS] and [SEP]."""
    make_bert(folder, **values)
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(names[:4])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=None, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(5)  # the files of sentence encoders say so; here a text is never cut
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class Oracle:
    """`transformers` on the same files."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self._model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def __call__(self, ids: Sequence[int], pooling: str, *, normalise: bool = True) -> np.ndarray:
        with torch.no_grad():
            hidden = self._model(torch.tensor([list(ids)])).last_hidden_state[0].double().numpy()
        vector = {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[pooling]
        return vector / np.linalg.norm(vector) if normalise else vector


def same(got: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Asserts that vectors agree."""
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == np.float32
        assert np.abs(one - other).max() < TOLERANCE * max(1.0, float(np.linalg.norm(other)))


# -- decoders


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("step", [512, 48])
def test_decoder_pooling(decoder: Path, pooling: Any, step: int) -> None:
    """Whole prompts, and prompts cut into chunks that share steps."""
    oracle, texts = Oracle(decoder), prompts(9, seed=2, low=1, high=150)
    with open_llm(decoder, max_tokens_per_step=step, max_running=8) as llm:
        same(llm.embed(texts, pooling=pooling), [oracle(ids, pooling) for ids in texts])
        same(
            llm.embed(texts[:2], pooling=pooling, normalise=False),
            [oracle(ids, pooling, normalise=False) for ids in texts[:2]],
        )
        assert nothing_is_held(llm)


def test_default_pooling_of_a_decoder_is_last(llama: Path) -> None:
    with open_llm(llama) as llm:
        assert np.array_equal(llm.embed("The sea")[0], llm.embed("The sea", pooling="last")[0])
        assert not np.allclose(llm.embed("The sea")[0], llm.embed("The sea", pooling="mean")[0], atol=1e-3)


def test_chunks_do_not_change_a_vector(llama: Path) -> None:
    """Sums are float64, so that a float32 value differs by its last bit at most."""
    texts = prompts(5, seed=3, low=100, high=300)
    found = []
    for step in (512, 16, 80):
        with open_llm(llama, max_tokens_per_step=step, max_running=4) as llm:
            found.append(llm.embed(texts, pooling="mean", normalise=False))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            np.testing.assert_array_max_ulp(one, two, maxulp=1)


def test_beside_generation(decoder: Path) -> None:
    """Embeddings and answers in one batch, each as if alone."""
    oracle = Oracle(decoder)
    asked = prompts(12, seed=4, low=5, high=120)
    with engine_of(decoder, max_tokens_per_step=64, max_running=8) as engine:
        alone = answers(engine, requests(engine, asked[:6], GREEDY, prefix="alone"))
        texts = [(ids, pooling) for ids, pooling in zip(asked[6:], ["mean", "last"] * 3, strict=True)]
        spoken = requests(engine, asked[:6], GREEDY, prefix="spoken")
        pooled = embeddings(engine, texts)
        mixed = [request for pair in zip(spoken, pooled, strict=True) for request in pair]
        handles = {handle.request.id: handle for handle in engine.client.run(mixed)}
        assert [tuple(handles[request.id].tokens) for request in spoken] == alone
        got = [np.frombuffer(handles[request.id].last.embedding, np.float32) for request in pooled]  # type: ignore[union-attr, arg-type]
        same(got, [oracle(ids, pooling) for ids, pooling in texts])
        assert all(handles[request.id].last.embedding is None for request in spoken)  # type: ignore[union-attr]


def embeddings(engine: Any, texts: Sequence[tuple[Sequence[int], Any]]) -> list[Any]:
    """Requests for embeddings."""
    from tradewind.serving.intake import Intake, Limits

    intake = Intake(Limits.of(engine.plan, eos_ids=()), prefix="embedding")
    return [intake.embedding(ids, now_s=0.0, pooling=pooling) for ids, pooling in texts]


def test_only_last_pooling_reads_the_prefix_cache(llama: Path) -> None:
    """Its one hidden state is computed anyway; the mean needs those of cached tokens too, and the cache has none."""
    oracle, ids = Oracle(llama), prompts(1, seed=5, low=100, high=101)[0]
    with engine_of(llama) as engine:
        for pooling, cached in (("mean", 0), ("mean", 0), ("last", 96), ("mean", 0), ("last", 96)):
            (handle,) = engine.client.run(embeddings(engine, [(ids, pooling)]))
            assert handle.last is not None and handle.last.embedding is not None
            assert handle.last.cached_tokens == cached
            same([np.frombuffer(handle.last.embedding, np.float32)], [oracle(ids, pooling)])


def test_few_pages(llama: Path) -> None:
    """More texts than fit at once wait for pages; preempted ones start again from nothing."""
    oracle, texts = Oracle(llama), prompts(12, seed=6, low=60, high=120)
    told = Listener()
    with engine_of(llama, pages=18, max_tokens_per_step=32, max_running=8, policy="priority", sinks=[told]) as engine:
        asked = embeddings(engine, [(ids, "mean") for ids in texts])
        rush = requests(engine, prompts(6, seed=7), GREEDY, priority=-5)
        handles = [engine.client.submit(request) for request in asked]
        for _ in range(5):
            engine.client.drive()
        engine.client.run(rush)
        by_id = {handle.request.id: handle.result() for handle in handles}
        got = [np.frombuffer(by_id[request.id].embedding, np.float32) for request in asked]  # type: ignore[arg-type]
        same(got, [oracle(ids, "mean") for ids in texts])
    evicted = {event.request_id for event in told.events if isinstance(event, Preempted)}
    assert evicted & {request.id for request in asked}, "a test of the test: an embedding was preempted"


def test_plain_ops_and_no_tape(llama: Path) -> None:
    oracle, texts = Oracle(llama), prompts(3, seed=8)
    for options in ({"backend": "plain"}, {"tape": False}):
        with engine_of(llama, max_tokens_per_step=32, max_running=4, **options) as engine:  # type: ignore[arg-type]
            handles = engine.client.run(embeddings(engine, [(ids, "mean") for ids in texts]))
            got = [np.frombuffer(handle.last.embedding, np.float32) for handle in handles]  # type: ignore[union-attr, arg-type]
            same(got, [oracle(ids, "mean") for ids in texts])


def test_values_that_are_not_finite_end_only_their_text(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = write_checkpoint("full", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with engine_of(folder) as engine:
        bad, good = engine.client.run(embeddings(engine, [([7, 8], "mean"), ([8, 9], "mean")]))
        assert bad.last is not None and (bad.last.finish, bad.last.embedding) == ("error", None)
        assert bad.last.error == "the model's hidden states are not finite"
        assert good.last is not None and good.last.embedding is not None
    with open_llm(folder) as llm, pytest.raises(RuntimeError, match="hidden states are not finite"):
        llm.embed([[7, 8]])


# -- an encoder


@pytest.mark.parametrize("pooling", [None, "cls", "last"])
def test_bert(bert: Path, pooling: Any) -> None:
    oracle = Oracle(bert)
    draw = np.random.default_rng(9)
    texts = [draw.integers(0, 160, size).tolist() for size in (1, 3, 40, 320, 200, 111, 319, 7, 16, 17)]
    with open_llm(bert) as llm:
        same(llm.embed(texts, pooling=pooling), [oracle(ids, pooling or "mean") for ids in texts])
        assert nothing_is_held(llm)
        assert llm.plan.schedule.whole_prompts and not llm.plan.cache.prefix_cache


def test_bert_reads_text(bert: Path) -> None:
    with open_llm(bert) as llm:
        ids = llm.tokenize("The Sea sails FAR from port, the cold night sailing")
        assert ids[0] == 2 and ids[-1] == 3 and len(ids) > 9, "framed, and neither cut nor padded"
        same(llm.embed("The Sea sails FAR from port, the cold night sailing"), [Oracle(bert)(ids, "mean")])


def test_a_step_holds_whole_texts_only(bert: Path) -> None:
    oracle = Oracle(bert)
    texts = prompts(10, seed=10, low=20, high=64)
    texts = [[token % 160 for token in ids] for ids in texts]
    with open_llm(bert, max_tokens_per_step=64, max_running=16) as llm:
        assert llm.plan.schedule.max_context == 64
        same(llm.embed(texts), [oracle(ids, "mean") for ids in texts])
        with pytest.raises(RequestError, match=r"the text has 65 tokens; the limit is 64 \(1 too many\)"):
            llm.embed([[5] * 65])
    with open_llm(bert, max_context=100) as llm:
        assert llm.plan.schedule.max_tokens_per_step >= 100
    for options, said in (
        ({"max_context": 100, "max_tokens_per_step": 64}, "raise max_tokens_per_step to 100"),
        ({"max_context": 321}, "was made for 320"),
        ({"prefix_cache": True}, "prefix_cache cannot be on"),
    ):
        with pytest.raises(UserError, match=said):
            open_llm(bert, **options)  # type: ignore[arg-type]


def test_an_encoder_generates_nothing(bert: Path) -> None:
    with open_llm(bert) as llm:
        with pytest.raises(RequestError, match="is an encoder"):
            llm.generate("the sea")
        with engine_of(bert) as engine:
            (handle,) = engine.client.run(embeddings(engine, [([5, 6], "mean")]))
            assert handle.last is not None and handle.last.embedding is not None
            with pytest.raises(RequestError, match="is an encoder"):
                engine.client.run(requests(engine, [[5, 6]], GREEDY))


# -- the face


def test_texts_are_checked_before_any_is_queued(llama: Path) -> None:
    with open_llm(llama) as llm:
        for texts, options, said in (
            ([], {}, "there is no prompt"),
            ([[]], {}, "the text is empty"),
            (["a", [1, 999]], {}, "text 2 of 2: prompt token 999"),
            ([[1] * 513], {}, r"the text has 513 tokens; the limit is 512 \(1 too many\)"),
            ("a", {"pooling": "max"}, "pooling is 'max'; it must be one of last, mean, cls"),
            ("a", {"pooling": "cls"}, "reads from left to right"),
            ("a", {"dimensions": 0}, "from 1 to 64"),
            ("a", {"dimensions": 65}, "dimensions is 65; it must be a whole number from 1 to 64"),
            ([[{"role": "user", "content": "a"}]], {}, "not of messages"),
            (7, {}, "not int"),
        ):
            with pytest.raises(RequestError, match=said):
                llm.embed(texts, **options)  # type: ignore[arg-type]
        assert nothing_is_held(llm)
        full = llm.embed([[1] * 512, "a"], dimensions=64)
        assert [v.shape for v in full] == [(64,), (64,)]
    with pytest.raises(EngineDeadError, match="closed"):
        llm.embed("a")


def test_fewer_dimensions(llama: Path) -> None:
    with open_llm(llama) as llm:
        whole, short = llm.embed("wind")[0], llm.embed("wind", dimensions=10)[0]
        assert np.linalg.norm(short) == pytest.approx(1, abs=1e-6)
        np.testing.assert_allclose(short, whole[:10] / np.linalg.norm(whole[:10]), rtol=1e-5)
        raw, cut = (llm.embed("wind", normalise=False, dimensions=d)[0] for d in (None, 10))
        assert np.array_equal(cut, raw[:10])


def test_async(llama: Path) -> None:
    texts = prompts(6, seed=11)

    async def run() -> Any:
        async with open_llm(llama, asynchronous=True) as llm:
            told = asyncio.gather(*(llm.generate(ids, GREEDY) for ids in texts[:3]))
            vectors = await asyncio.gather(*(llm.embed(ids, pooling="mean") for ids in texts))
            await told
            return vectors

    same(asyncio.run(run()), [Oracle(llama)(ids, "mean") for ids in texts])


# -- the real MiniLM


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2: named by $TRADEWIND_MINILM, or in the cache; the tests that use it are skipped without it."""
    named = os.environ.get("TRADEWIND_MINILM")
    for path in ([Path(named)] if named else []) + [cache_dir() / "models" / "all-MiniLM-L6-v2"]:
        if (path / "model.safetensors").is_file():
            return path
    pytest.skip("all-MiniLM-L6-v2 is not in the cache; name its folder in $TRADEWIND_MINILM")


def test_minilm(minilm: Path) -> None:
    texts = [
        "A man is eating food.",
        "Someone has a meal.",
        "The stock market fell sharply today.",
        "Shares dropped on Wall Street.",
        "Il pleut.",
        "x" * 90,
    ]
    oracle = Oracle(minilm)
    with open_llm(minilm) as llm:
        assert (llm.plan.card.pooling, llm.plan.schedule.max_context) == ("mean", 256)
        vectors = llm.embed(texts)
        same(vectors, [oracle(llm.tokenize(text), "mean") for text in texts])
        cosine = np.array(vectors) @ np.array(vectors).T
        assert cosine[0, 1] > 0.5 and cosine[2, 3] > 0.5
        assert np.abs(cosine[:2, 2:4]).max() < 0.2
    with open_llm(minilm, compute="bf16", kv_format="f16") as llm:
        rounded = llm.embed(texts)
        assert min(float(a @ b) for a, b in zip(vectors, rounded, strict=True)) > 0.999
