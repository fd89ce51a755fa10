"""Qwen 2.5 VL against `transformers` on a tiny random checkpoint, in float32: image processor, tower, positions, and the whole engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tests.engine.tiny_engine import answers, engine_of, open_llm
from tests.host.plans import gpu
from tests.reference.op_sets import OP_SETS, load, open_ops
from tests.reference.tiny_vision import (
    EDGE,
    END,
    IMAGE,
    PREPROCESSOR,
    START,
    image_of,
    make_tiny_vision,
    oracle_greedy,
    oracle_inputs,
    oracle_logits,
    oracle_processor,
    picture,
    with_images,
    words,
)
from tradewind.config.card_reader import card_from_hf
from tradewind.config.card_vision import VisionFacts
from tradewind.config.choices_cuda import backend_reason
from tradewind.config.choices_images import image_plan
from tradewind.config.goals import Means
from tradewind.contract.errors import RequestError, UserError
from tradewind.contract.image import ImageSpan
from tradewind.contract.request import Request, SamplingParams
from tradewind.device.axes import image_positions
from tradewind.layers.vision_order import patches_of, window_order
from tradewind.quantization.numerics import Numerics
from tradewind.serving.images import ImageReader, smart_size
from tradewind.weights.checkpoint import open_checkpoint

PIL = pytest.importorskip("PIL.Image")
NEW = 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("qwen2_5_vl")
    return folder, make_tiny_vision(folder)


@pytest.fixture(scope="module")
def facts(tiny: tuple[Path, Any]) -> VisionFacts:
    checkpoint = open_checkpoint(tiny[0])
    card = card_from_hf(checkpoint.metadata, name="tiny", preprocessor=checkpoint.preprocessor)
    assert card.vision is not None
    return card.vision


# ------------------------------------------------------------------------------------------------------------- the image


@pytest.mark.parametrize(
    ("width", "height"), [(217, 133), (140, 112), (30, 300), (1000, 700), (13, 20), (28, 28), (200, 1001)]
)
def test_pixels_are_the_processors(facts: VisionFacts, width: int, height: int) -> None:
    """Decoding aside: sizes, bicubic resizing, normalisation and the order of patches."""
    colors = np.random.default_rng(width).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), np.uint8)
    image = PIL.fromarray(colors).resize((width, height), PIL.Resampling.BICUBIC)
    wanted = oracle_processor()(images=[image], return_tensors="np")
    got = ImageReader(facts, largest=10_000).read(image, name="image 1")
    assert [[1, got.rows * 2, got.columns * 2]] == wanted["image_grid_thw"].tolist()
    pixels = np.frombuffer(got.pixels, np.uint8).reshape(got.rows * EDGE, got.columns * EDGE, 3)
    theirs = wanted["pixel_values"].reshape(-1, 3, 2, 14 * 14)
    mine = patches_of(pixels, facts).reshape(-1, 3, 14 * 14)
    for frame in range(2):  # a still image is the same picture twice
        assert np.abs(mine - theirs[:, :, frame]).max() < 1e-5


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 40), st.integers(1, 400))
def test_sizes_are_the_processors(height: int, width: int, least: int, more: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    if max(height, width) > 200 * min(height, width):
        return
    bounds = {"min_pixels": least * 784, "max_pixels": (least + more) * 784}
    wanted = smart_resize(height, width, 28, **bounds)
    got = smart_size(height, width, edge=28, least=bounds["min_pixels"], most=bounds["max_pixels"])
    assert got == wanted


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(2, 300), st.booleans())
def test_no_image_is_larger_than_allowed(height: int, width: int, largest: int, low: bool) -> None:
    reader = ImageReader(vision(), largest=largest)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(RequestError, match="its longer edge"):
            reader.size_of(width, height, name="image 1", low=low)
        return
    across, down = reader.size_of(width, height, name="image 1", low=low)
    assert across % EDGE == down % EDGE == 0
    assert 1 <= across // EDGE * (down // EDGE) <= (min(largest, 256) if low else largest)


def vision(**more: Any) -> VisionFacts:
    return VisionFacts(
        layers=1, hidden=32, heads=2, intermediate=32, patch=14, frames=2, merge=2, window=112, full_layers=(), out=32, image_token=1,
        max_pixels=28 * 28 * 16384, **more,
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 5))
def test_windows_are_the_oracles(rows: int, columns: int, size: int) -> None:
    from transformers.vision_utils import get_vision_window_index

    index, ends = get_vision_window_index(torch.tensor([[1, 2 * rows, 2 * columns]]), 2, size * 28, 14)
    order, sizes = window_order(rows, columns, size=size)
    assert order.tolist() == index.tolist()
    assert [0, *np.cumsum(sizes * 4).tolist()] == ends.tolist()


def test_positions_are_the_oracles(tiny: tuple[Path, Any]) -> None:
    """Of text and images in any order: at the beginning, at the end, side by side, alone."""
    draw = np.random.default_rng(5)
    for case in range(40):
        ids: list[int] = []
        spans: list[ImageSpan] = []
        for _ in range(draw.integers(1, 6)):
            if draw.random() < 0.5:
                ids += [9] * int(draw.integers(1, 9))
            elif not ids or ids[-1] != IMAGE:  # the library takes images side by side for one
                rows, columns = map(int, draw.integers(1, 7, 2))
                spans.append(ImageSpan(key="k", first=len(ids), rows=rows, columns=columns))
                ids += [IMAGE] * (rows * columns)
        if not spans:
            continue
        grid = torch.tensor([[1, 2 * span.rows, 2 * span.columns] for span in spans])
        tokens = torch.tensor([ids])
        wanted, shift = tiny[1].model.get_rope_index(tokens, (tokens == IMAGE).int(), image_grid_thw=grid)
        got, mine = image_positions(spans, tokens=len(ids))
        assert got.tolist() == wanted[:, 0].tolist(), case
        assert mine == int(shift), case


# ------------------------------------------------------------------------------------------------------------- the tower


@pytest.mark.parametrize("op_set", OP_SETS)
def test_tower(tiny: tuple[Path, Any], op_set: str) -> None:
    """One tower, images of many shapes in turn: smaller and larger than the one before, whole and cut windows, one window, one square."""
    folder, oracle = tiny
    ops = open_ops(op_set)
    model, _ = load(folder, ops)
    for seed, (rows, columns) in enumerate([(3, 3), (5, 7), (1, 1), (1, 20), (7, 2), (6, 9), (3, 6)]):
        pixels = picture(seed, rows=rows, columns=columns)
        inputs = oracle_inputs([image_of(pixels)], [IMAGE] * (rows * columns))
        with torch.no_grad():
            wanted = oracle.model.visual(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output.numpy()
        got = model.tower(pixels)
        assert got.shape == wanted.shape
        assert np.abs(got - wanted).max() / wanted.std() < 1e-4, (rows, columns)
    getattr(ops, "close", lambda: None)()


def test_tower_of_a_quantised_model_is_not_quantised(tiny: tuple[Path, Any]) -> None:
    pixels = picture(1, rows=3, columns=4)
    features = []
    for numerics in (
        Numerics(compute="f32", quantization="none"),
        Numerics(compute="int8", quantization="int4"),
        Numerics(compute="bf16", quantization="none"),
    ):
        ops = open_ops("cpu")
        features.append(load(tiny[0], ops, numerics=numerics)[0].tower(pixels))
        getattr(ops, "close", lambda: None)()
    exact, quantised, short = features
    assert np.array_equal(exact, quantised)
    assert 0 < np.abs(exact - short).max() / exact.std() < 0.2


# ------------------------------------------------------------------------------------------------------------ the engine

FIRST, SECOND = picture(11, rows=4, columns=5), picture(12, rows=2, columns=7)
PROMPTS: dict[str, list[Any]] = {
    "image at the end": [*words(1, 7), START, FIRST],
    "image first": [FIRST, END, *words(2, 11)],
    "one image": [*words(3, 9), START, FIRST, END, *words(4, 12)],
    "text": words(5, 40),
    "two images": [*words(6, 5), START, FIRST, END, *words(7, 6), START, SECOND, END, *words(8, 3)],
}


def asked(name: str, parts: Sequence[Any], **sampling: Any) -> Request:
    ids, images = with_images(parts)
    values = {"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True, **sampling}
    return Request(
        id=name,
        tokens=tuple(ids),
        sampling=SamplingParams(**values),
        max_tokens=values["max_tokens"],
        image_keys=tuple((image.first, image.count, image.key) for image in images),
        images=images,
    )


@pytest.fixture(scope="module")
def wanted(tiny: tuple[Path, Any]) -> dict[str, list[int]]:
    return {name: oracle_greedy(tiny[1], *with_images(parts), count=NEW) for name, parts in PROMPTS.items()}


@pytest.mark.parametrize(
    ("backend", "schedule"),
    [
        ("cpu", {}),
        ("cpu", {"max_tokens_per_step": 16, "max_running": 4}),  # chunks end within images
        ("cpu", {"max_tokens_per_step": 7, "max_running": 4}),
        ("cpu", {"steps_in_flight": 1}),
        ("plain", {"max_tokens_per_step": 24, "max_running": 4}),
    ],
)
def test_greedy_is_the_oracles(
    tiny: tuple[Path, Any], wanted: dict[str, list[int]], backend: str, schedule: dict[str, Any]
) -> None:
    """All at once, with text-only rows beside them, whole and in chunks."""
    with engine_of(tiny[0], backend=backend, schedule=schedule) as engine:
        got = answers(engine, [asked(name, parts) for name, parts in PROMPTS.items()])
        assert {name: list(tokens) for name, tokens in zip(PROMPTS, got, strict=True)} == wanted
        alone = answers(engine, [asked("alone", PROMPTS["one image"])])
        assert list(alone[0]) == wanted["one image"]


def test_tape_and_no_tape_say_the_same(tiny: tuple[Path, Any], wanted: dict[str, list[int]]) -> None:
    with engine_of(tiny[0], tape=False) as engine:
        got = answers(engine, [asked(name, parts) for name, parts in PROMPTS.items()])
    assert {name: list(tokens) for name, tokens in zip(PROMPTS, got, strict=True)} == wanted


@pytest.mark.parametrize("step", [512, 11])
def test_logprobs_of_every_token_of_the_prompt(tiny: tuple[Path, Any], step: int) -> None:
    """The logits behind them are the oracle's, text and image tokens alike."""
    parts = PROMPTS["two images"]
    ids, images = with_images(parts)
    logits = oracle_logits(tiny[1], ids, images).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    with engine_of(tiny[0], schedule={"max_tokens_per_step": step, "max_running": 4}) as engine:
        events = list(engine.client.submit(asked("a", parts, prompt_logprobs=0)))
    records = [record for event in events for record in event.prompt_logprobs]
    assert [record.token for record in records] == ids[1:]
    got = np.array([record.logprob for record in records])
    assert np.abs(got - expected[np.arange(len(ids) - 1), ids[1:]]).max() < 2e-4


def cached(engine: Any, request: Request) -> tuple[list[int], int]:
    (handle,) = engine.client.run([request])
    assert handle.last.error is None, handle.last.error
    return list(handle.tokens), handle.last.cached_tokens


def test_prefix_cache_knows_images_apart(tiny: tuple[Path, Any], wanted: dict[str, list[int]]) -> None:
    """The same image is found again; another behind the same text, of the same size, is not; nor one of the same pixels otherwise cut."""
    parts = PROMPTS["one image"]
    other = [FIRST[::-1].copy() if part is FIRST else part for part in parts]
    turned = [picture(11, rows=5, columns=4) if part is FIRST else part for part in parts]
    with engine_of(tiny[0], backend="plain", page_tokens=4) as engine:
        tokens, found = cached(engine, asked("a", parts))
        assert (tokens, found) == (wanted["one image"], 0)
        tokens, found = cached(engine, asked("b", parts))
        assert tokens == wanted["one image"]
        assert found == (len(with_images(parts)[0]) - 1) // 4 * 4
        for name, changed in (("c", other), ("d", turned)):
            tokens, found = cached(engine, asked(name, changed))
            assert found == 8, "the text before the image, and not a page more"
            assert tokens == oracle_greedy(tiny[1], *with_images(changed), count=NEW)
        # A prompt that begins with all of the image and goes on otherwise stands upon it.
        tokens, found = cached(engine, asked("e", [*parts[:13], *words(99, 6)]))
        assert found >= 9 + 1 + 20


def test_a_prefix_may_end_within_an_image(tiny: tuple[Path, Any]) -> None:
    """What is left of the image is computed from its features, which are there or made again."""
    parts = [*words(3, 9), START, FIRST, END, *words(4, 2)]
    with engine_of(
        tiny[0], backend="plain", page_tokens=4, pages=14
    ) as engine:  # 13 pages: 32 of the 33 + 8 tokens and more cannot stay
        for turn in range(3):
            short = asked(f"r{turn}", parts, max_tokens=1)
            first, _ = cached(engine, short)
            assert first == oracle_greedy(tiny[1], *with_images(parts), count=1)
            cached(engine, asked(f"t{turn}", words(turn, 12 + turn), max_tokens=2))


def test_many_requests_with_few_pages(tiny: tuple[Path, Any], wanted: dict[str, list[int]]) -> None:
    """Preempted in the middle of everything, each is still answered as alone."""
    with engine_of(
        tiny[0], backend="plain", pages=24, page_tokens=4, schedule={"max_tokens_per_step": 16, "max_running": 6}
    ) as engine:
        names = [name for _ in range(3) for name in PROMPTS]
        got = answers(engine, [asked(f"{name} {index}", PROMPTS[name]) for index, name in enumerate(names)])
        for name, tokens in zip(names, got, strict=True):
            assert list(tokens) == wanted[name], name


def test_samples_of_one_prompt(tiny: tuple[Path, Any], wanted: dict[str, list[int]]) -> None:
    one = asked("p", PROMPTS["one image"])
    more = [msgspec.structs.replace(one, id=f"p.{index}", parent="p") for index in (1, 2)]
    with engine_of(tiny[0]) as engine:
        assert [list(tokens) for tokens in answers(engine, [one, *more])] == [wanted["one image"]] * 3
    with engine_of(tiny[0], prefix_cache=False) as engine:
        assert [list(tokens) for tokens in answers(engine, [one, *more])] == [wanted["one image"]] * 3


def test_sleep_forgets_features(tiny: tuple[Path, Any], wanted: dict[str, list[int]]) -> None:
    with open_llm(tiny[0]) as llm:
        runner = llm.engine.client._loop._executor._runner
        message = [{"role": "user", "content": [{"type": "image", "image": FIRST}, {"type": "text", "text": "a"}]}]
        sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        first = llm.generate(message, sampling)[0].completions[0].tokens
        assert len(runner._images._features) == 1
        llm.sleep()
        assert not runner._images._features
        assert llm.generate(message, sampling)[0].completions[0].tokens == first


# ------------------------------------------------------------------------------------------------------- the Python face


def test_messages_with_images(tiny: tuple[Path, Any], tmp_path: Path) -> None:
    """A path, a file's bytes, a Pillow image, an array: one picture, one answer, and it is the oracle's."""
    image = PIL.fromarray(picture(21, rows=5, columns=6)).resize((217, 133))
    image.save(tmp_path / "sea.png")
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    sources = [image, np.asarray(image), str(tmp_path / "sea.png"), tmp_path / "sea.png", (tmp_path / "sea.png").read_bytes()]  # fmt: skip
    with open_llm(tiny[0]) as llm:
        prompts = [
            [{"role": "user", "content": [{"type": "image", "image": source}, {"type": "text", "text": "what is it?"}]}]
            for source in sources
        ]
        outputs = llm.generate(prompts, sampling)
        ids = list(outputs[0].prompt_tokens)
        assert llm.tokenize(prompts[0]) == ids
        assert len({(o.prompt_tokens, o.completions[0].tokens) for o in outputs}) == 1
        made = oracle_processor()(images=[image], return_tensors="pt")
        known = list(ids)
        with torch.no_grad():
            for _ in range(NEW):
                tokens = torch.tensor([known])
                logits = tiny[1](input_ids=tokens, mm_token_type_ids=(tokens == IMAGE).int(), use_cache=False, **made).logits  # fmt: skip
                known.append(int(logits[0, -1].argmax()))
        assert list(outputs[0].completions[0].tokens) == known[len(ids) :]
        with pytest.raises(RequestError, match=r"image 1 cannot be read from '.*nowhere.png': No such file"):
            llm.generate(
                [{"role": "user", "content": [{"type": "image", "image": str(tmp_path / "nowhere.png")}]}], sampling
            )
        with pytest.raises(RequestError, match="image 1 must be a URL, a file's bytes or a picture, not float"):
            llm.generate([{"role": "user", "content": [{"type": "image", "image": 1.5}]}], sampling)
        with pytest.raises(RequestError, match="it must be uint8"):
            llm.generate([{"role": "user", "content": [{"type": "image", "image": np.zeros((4, 4))}]}], sampling)


def test_without_pillow_the_extra_is_named(facts: VisionFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(
        UserError, match=r"reading images needs the package 'pillow': pip install 'tradewind\[vision\]'"
    ):
        ImageReader(facts, largest=100).read(b"x", name="image 1")


# --------------------------------------------------------------------------------------------------------------- the files


def test_old_and_new_files_are_one_model(tiny: tuple[Path, Any], wanted: dict[str, list[int]], tmp_path: Path) -> None:
    """The published files describe the decoder beside the tower; newer ones call every tensor otherwise."""
    folder = tiny[0]
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    scaling = text.pop("rope_parameters")
    config |= text
    mrope = {"type": "mrope", "mrope_section": scaling["mrope_section"]}
    config |= {"model_type": "qwen2_5_vl", "rope_theta": scaling["rope_theta"], "rope_scaling": mrope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    newer = {
        name.replace("visual.", "model.visual.", 1) if name.startswith("visual.")
        else name.replace("model.", "model.language_model.", 1): values
        for name, values in load_file(folder / "model.safetensors").items()
    }  # fmt: skip
    save_file(newer, tmp_path / "model.safetensors")
    with engine_of(tmp_path) as engine:
        assert list(answers(engine, [asked("a", PROMPTS["two images"])])[0]) == wanted["two images"]
        assert engine.plan.card.vision is not None
        assert engine.plan.card.vision.max_pixels == 28 * 28 * 1280, "without preprocessor_config.json the usual bounds"


def test_the_card(tiny: tuple[Path, Any], facts: VisionFacts) -> None:
    folder, oracle = tiny
    checkpoint = open_checkpoint(folder)
    card = card_from_hf(checkpoint.metadata, name="tiny", tensors=checkpoint.tensors)
    assert card.rope.sections == (2, 3, 3)
    assert card.parameters == sum(p.numel() for p in oracle.parameters())
    assert card_from_hf(checkpoint.metadata, name="tiny").parameters == card.parameters
    assert facts.parameters == sum(p.numel() for p in oracle.model.visual.parameters())
    assert (facts.min_pixels, facts.max_pixels) == (PREPROCESSOR["min_pixels"], PREPROCESSOR["max_pixels"])
    assert facts.full_layers == (1,)


def test_the_card_of_a_published_size() -> None:
    """As the 7B files say it, decoder beside tower; counted by `transformers` too."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    decoder = {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "max_position_embeddings": 128000, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28, "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }  # fmt: skip
    tower = {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
        "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    config = {"model_type": "qwen2_5_vl", "torch_dtype": "bfloat16", "image_token_id": 151655, **decoder}
    processor = {
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    card = card_from_hf({**config, "vision_config": tower}, name="7B", preprocessor=processor)
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**decoder, vision_config=tower))
    assert card.parameters == sum(p.numel() for p in model.parameters())
    assert (card.rope.theta, card.rope.sections, card.qkv_bias, card.head_dim) == (1e6, (16, 24, 24), True, 128)
    assert card.layer_windows == (None,) * 28
    assert card.vision is not None
    assert (card.vision.max_pixels, card.vision.image_token) == (12845056, 151655)
    plan = image_plan(card, max_context=32768, max_tokens_per_step=512)
    assert plan is not None
    assert (plan.largest, plan.tokens_per_step) == (1280, 512)
    assert plan.cache_tokens * 3584 * 4 <= 64 << 20
    small = image_plan(card, max_context=256, max_tokens_per_step=64)
    assert small is not None
    assert small.largest == 128, "half of the context"


@pytest.mark.parametrize(
    ("where", "field", "value", "says"),
    [
        ("vision_config", "out_hidden_size", 32, "out_hidden_size' is 32; it must be the decoder's hidden_size, 64"),
        ("vision_config", "fullatt_block_indexes", [9], "fullatt_block_indexes' is .*a list of layers from 0 to 2"),
        ("vision_config", "hidden_act", "gelu", "hidden_act' is 'gelu'; it must be 'silu'"),
        ("vision_config", "num_heads", 5, "each of the 5 heads has a multiple of 16 dims"),
        ("vision_config", "window_size", 10, "at least the 28 pixels that become one token"),
        ("text_config", "rope_parameters", {"rope_type": "default", "mrope_section": [2, 2, 2]}, "8 together"),
        ("text_config", "rope_parameters", {"rope_type": "default"}, "no mrope_section"),
        ("", "vision_config", None, "vision_config' is None; it must be an object"),
        ("preprocessor", "max_pixels", 100, "max_pixels' is 100; it must be at least min_pixels"),
        ("preprocessor", "image_std", [1, 0, 1], "image_std' is .*three numbers over 0"),
        ("preprocessor", "patch_size", 16, "patch_size' is 16; it must be 14"),
        ("preprocessor", "resample", 2, "resample' is 2; it must be 3"),
        ("preprocessor", "do_normalize", False, "do_normalize' is False; it must be true"),
    ],
)
def test_what_is_refused_by_name(tiny: tuple[Path, Any], where: str, field: str, value: Any, says: str) -> None:
    config = json.loads((tiny[0] / "config.json").read_text())
    preprocessor = dict(PREPROCESSOR)
    target = {"preprocessor": preprocessor, "": config}.get(where) if where in ("preprocessor", "") else config[where]
    target[field] = value
    with pytest.raises(UserError, match=says):
        card_from_hf(config, name="tiny", preprocessor=preprocessor)


def test_plan_and_ledger(tiny: tuple[Path, Any]) -> None:
    with engine_of(tiny[0]) as engine:
        plan = engine.plan
    assert plan.schedule.images is not None
    assert plan.schedule.images.largest == 60
    names = [line.name for line in plan.ledger]
    assert {"image tower", "image workspace", "image features"} <= set(names)
    assert any(reason.choice == "image tokens" for reason in plan.reasons)
    with pytest.raises(UserError, match="images are not served on the cuda backend yet"):
        backend_reason(Means(backend="cuda"), card=plan.card, hardware=gpu(), missing={})


def test_random_weights(tiny: tuple[Path, Any], tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text((tiny[0] / name).read_text())
    with engine_of(tmp_path, load_format="dummy") as engine:
        got = answers(engine, [asked("a", PROMPTS["one image"])])
    assert len(got[0]) == NEW
