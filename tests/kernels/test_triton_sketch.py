"""Programs, planned with nothing launched: every op has what emits it; sketches have every kernel of all layers, and all its scratch."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from cuda_on_host import CARDS, model_of, pages_of, plan_of, runner_of, storages  # noqa: E402

from tradewind.config.card import ModelCard  # noqa: E402
from tradewind.config.card_parts import every_nth_full  # noqa: E402
from tradewind.kernels.triton import planning, tape  # noqa: E402
from tradewind.kernels.triton.ops import CudaOps  # noqa: E402
from tradewind.kernels.triton.program import Program  # noqa: E402
from tradewind.kernels.triton.tape import repetition  # noqa: E402
from tradewind.runner import preparing, programs  # noqa: E402


def deep(card: ModelCard) -> ModelCard:
    """With more layers, the first of a mixture without experts, windows in turns where there are any."""
    windows = every_nth_full(14, window=512, pattern=3) if any(card.layer_windows) else (None,) * 7
    moe, layers = card.moe, len(windows)
    if moe is not None:
        moe = msgspec.structs.replace(moe, layers=(False,) + (True,) * (layers - 1))
    return msgspec.structs.replace(card, layers=layers, layer_windows=windows, moe=moe)


def kernels(program: Program) -> set[tuple[Any, ...]]:
    """What tells kernels apart (runner/preparing.py)."""
    own = [launch for launch in program.launches if "pdl" in launch.options]
    return {(launch.kernel, launch.text, launch.options.get("late"), launch.options["pdl"]) for launch in own}


@pytest.mark.parametrize("name", sorted(CARDS))
def test_a_sketch_has_every_kernel_of_all_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every size that is prepared; and whole programs, planned afterwards for a graph, need no more memory, but for biases."""
    monkeypatch.setattr(preparing, "COMPILES", False)
    card, ops = deep(CARDS[name]), CudaOps(device="cpu")
    plan = plan_of(card)
    runner = runner_of(plan, card, ops, model=model_of(plan, card, ops), kv=pages_of(plan, ops))
    mine, asked = runner._programs, []
    sketch = mine.sketch

    def told(kind: str, bucket: Any) -> Program:
        asked.append((kind, bucket))
        return sketch(kind, bucket)

    monkeypatch.setattr(mine, "sketch", told)
    try:
        runner.prepare((1,), threads=1)
        runner.prepare_rest()
        runner._preparation.close()
        assert len(asked) > 20 and {"whole", "stem", "head", "ending"} <= {kind for kind, _ in asked}
        held = ops.workspace.bytes
        for kind, bucket in asked[::9]:
            assert kernels(sketch(kind, bucket)) == kernels(planning.plan(mine.tapes[kind], bucket)), (kind, bucket)
        biases = card.layers * (card.heads + 2 * card.kv_heads) * card.head_dim * card.qkv_bias
        assert held <= ops.workspace.bytes <= held + 2 * biases  # which the library wants in bf16
        for kind in ("whole", "stem"):
            assert len(mine._short[kind].calls) < 0.9 * len(mine.tapes[kind].calls)
    finally:
        runner.close()


def memory(value: Any) -> set[int]:
    """Where the memory lies that a launch's argument names; an empty tensor names none."""
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage().data_ptr()} - {0}
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    if not parts and hasattr(value, "__dataclass_fields__"):
        parts = [getattr(value, name) for name in value.__dataclass_fields__]
    return set().union(*(memory(part) for part in parts))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", sorted(CARDS))
def test_what_a_program_names_lives_on_without_it(name: str, deterministic: bool) -> None:
    """A graph has addresses only. Were a plan to allocate something for itself, its memory would go with the program."""
    card, ops = CARDS[name], CudaOps(device="cpu", deterministic=deterministic)
    plan = plan_of(card)
    runner = runner_of(plan, card, ops, model=model_of(plan, card, ops), kv=pages_of(plan, ops))
    mine, named = runner._programs, set()
    try:
        for size in (2048, 100, 16):  # larger and smaller scratch
            decode, prompts = mine.singles(min(size, 64), 4096), mine.mixed(size, 16, fresh="none")
            for kind, bucket in (("whole", decode), ("body", prompts), ("stem", prompts), ("ending", decode)):
                for fuse in (True, False):
                    for launch in planning.plan(mine.tapes[kind], bucket, fuse=fuse).launches:
                        named |= memory(launch.arguments) | memory(launch.options)
        one = planning.plan(mine.tapes["whole"], mine.singles(1, 256))
        named |= memory([launch.arguments for launch in one.launches] + [launch.options for launch in one.launches])
        del one, launch
        assert len(named) > 20 and named <= set(storages())
    finally:
        runner.close()


def test_every_op_has_what_emits_it() -> None:
    assert set(planning.EMITTERS) == set(tape.READS) == set(tape.WRITES)


def test_what_is_left_out_of_a_sequence() -> None:
    """Turns of one part, as long as others stand around them; nothing where nothing comes more than three times."""

    def short(marks: str) -> str:
        out = repetition(marks)
        return marks[: out.start] + marks[out.stop :]

    assert short("") == "" and short("abcd") == "abcd" and short("aaa") == "aaa"
    assert short("x" + 9 * "abc" + "y") == "x" + 3 * "abc" + "y"
    assert short("xbc" + 9 * "abc" + "ay") == "x" + 3 * "bca" + "y"
    assert short(5 * "aab" + "q" + 30 * "aab") == 5 * "aab" + "q" + 3 * "aab"
    assert short(12 * "ab" + 5 * "c") == 3 * "ab" + 5 * "c"


def test_few_programs_are_kept_where_graphs_are_made_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "PROGRAMS", 3)
    card, ops = CARDS["untied"], CudaOps(device="cpu")
    plan = plan_of(card)
    kv, model = pages_of(plan, ops), model_of(plan, card, ops)
    runner = runner_of(plan, card, ops, model=model, kv=kv)
    runner.close()
    common: dict[str, Any] = {"model": model, "ops": ops, "gpu": runner._gpu, "groups": plan.cache.groups, "kv": kv}
    common |= {"max_running": 64, "max_tokens_per_step": 2048, "max_context": 4096, "vocab_size": card.vocab_size}
    for graphs, most in ((True, 3), (False, 5)):
        few = programs.StepPrograms(**common, hidden=card.hidden, shared=False, graphs=graphs)
        made = [few.program("head", few.singles(rows, 1)) for rows in (1, 2, 4, 8, 16)]
        assert len(few._programs) == most
        assert few.program("head", few.singles(16, 1)) is made[-1]
        assert (few.program("head", few.singles(1, 1)) is made[0]) == (not graphs)
