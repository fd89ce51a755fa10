"""The one place that knows everybody: from goals to a working engine.

Knows: which part needs which. Refuses to know: how any part works, and what people want to do with the engine (llm, cli, bench).

    goals -> find_model -> open_checkpoint -> card --+
                          hardware (measured once) --+-> resolve -> plan -> ops, model, KV -> runner -> executor -> client
                          tokenizer, chat template ------------------------------------------------------> Engine
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tradewind.config import env
from tradewind.config.card import ModelCard
from tradewind.config.card_reader import card_from_gguf, card_from_hf
from tradewind.config.choices import device_wanted, reads_weights
from tradewind.config.goals import Goals
from tradewind.config.gpu_probe import hold_context, why_no_cuda
from tradewind.config.hardware_probe import measure
from tradewind.config.plan import Plan
from tradewind.config.resolve import resolve
from tradewind.contract.errors import UserError
from tradewind.contract.events import Sink
from tradewind.contract.executor import Executor
from tradewind.engine.client import LocalClient
from tradewind.engine.loop import EngineLoop
from tradewind.engine.scheduler import Scheduler
from tradewind.kernels.ops import KVLayer, Ops
from tradewind.phases import Phases
from tradewind.sampling.grammar_compile import GrammarCompiler, Vocabulary
from tradewind.serving.chat_template import ChatTemplate
from tradewind.serving.tokenizer import TextTokenizer
from tradewind.weights.checkpoint import Checkpoint, open_checkpoint
from tradewind.weights.fetch import Progress
from tradewind.weights.lookup import find_model

if TYPE_CHECKING:
    from tradewind.runner.adapters import AdapterSlots

FIRST_ROWS, FIRST_TOKENS = (1,), (128,)
"""Steps that are captured at start: decode steps of so many rows, prompt steps of so many tokens. All others when they are first met."""

SHOWN_BYTES = 400_000_000
"""Loading less than this takes under a second, too short for a progress bar."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan and the files it was made for; no weight has been read."""

    path: Path
    checkpoint: Checkpoint
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A working engine. Whoever made it calls `client.close()` in the end."""

    plan: Plan
    tokenizer: TextTokenizer
    template: ChatTemplate | UserError
    """How to speak to the model in turns, or why that is not known."""
    client: LocalClient
    phases: Phases
    checkpoint_path: Path
    notices: tuple[str, ...] = ()
    """Things the user should know, one sentence each."""


def make_plan(goals: Goals, *, progress: Progress | None = None, phases: Phases | None = None) -> Planned:
    """Goals -> plan; reads file headers and measures the machine once, loads no weights. Raises UserError with advice."""
    phases = phases or Phases()
    cache = env.cache_dir()
    with phases("find"):
        path = find_model(goals.model, cache_dir=cache, progress=progress)
        checkpoint = open_checkpoint(path, weights=reads_weights(goals.means.load_format))
        card = read_card(checkpoint, name=goals.model)
    with phases("plan"):
        missing = missing_backends()
        prefer = device_wanted(goals.means, card=card)
        plan = resolve(goals, card, measure(cache, prefer=prefer, missing=missing), missing=missing)
    return Planned(path=path, checkpoint=checkpoint, plan=plan)


def missing_backends() -> dict[str, str]:
    """Backend -> why it cannot be used here; empty on a whole installation."""
    from tradewind.kernels.cpu import library

    missing = {
        "cpu": library.why_not(),
        "cuda": why_no_cuda(),
        "plain": None if find_spec("torch") else "torch is not installed",
    }
    return {name: reason for name, reason in missing.items() if reason is not None}


def read_card(checkpoint: Checkpoint, *, name: str) -> ModelCard:
    """The card of either kind of checkpoint."""
    if checkpoint.kind == "gguf":
        return card_from_gguf(checkpoint.metadata, name=name, tensors=checkpoint.tensors)
    return card_from_hf(
        checkpoint.metadata,
        name=name,
        tensors=checkpoint.tensors or None,  # none are open where weights are drawn at random
        generation_config=checkpoint.generation_config,
        sentence=checkpoint.sentence,
        preprocessor=checkpoint.preprocessor,
    )


def read_tokenizer(checkpoint: Checkpoint) -> TextTokenizer:
    """The tokenizer of either kind of checkpoint. Raises UserError when the folder has none."""
    if checkpoint.kind == "gguf":
        return TextTokenizer.from_gguf(checkpoint.metadata, generation_config=checkpoint.generation_config)
    _check_tokenizer(checkpoint)
    assert checkpoint.tokenizer_json is not None
    return TextTokenizer.from_tokenizer_json(
        checkpoint.tokenizer_json,
        tokenizer_config=checkpoint.tokenizer_config,
        generation_config=checkpoint.generation_config,
        chat_template=(checkpoint.chat_template or {}).get("default"),
    )


def make_ops(plan: Plan, *, phases: Phases | None = None) -> tuple[Ops, tuple[str, ...]]:
    """The op set that the plan names, and what the user should know: that torch computes because the C++ library is not there, or that the
    weights are random."""
    ops, notice = _ops_of(plan, phases or Phases())
    dummy = f"The weights are random (load format {plan.load_format}): answers mean nothing."
    return ops, tuple(text for text in (notice, None if reads_weights(plan.load_format) else dummy) if text is not None)


def _ops_of(plan: Plan, phases: Phases) -> tuple[Ops, str | None]:
    numerics = plan.numerics
    if numerics.backend == "cuda":
        # Importing torch takes a second of Python's lock; what does without the lock goes on beside it.
        _beside(phases, "context", hold_context)
        with phases("triton"):
            from tradewind.kernels.triton import compilers, early

        sm = next((int(name[3:]) for name in plan.hardware.features if name.startswith("sm_")), 0)
        _beside(phases, "compiler", lambda: early.warm(sm))
        shapes = repr((plan.card, numerics, plan.schedule, plan.cache.groups, plan.hardware.name)).encode()
        processes = compilers.wanted(shapes, cores=plan.hardware.cores, architecture=sm)
        with phases("torch"):
            from tradewind.kernels.triton.ops import CudaOps
            from tradewind.quantization.blocks import dequantise
        with phases("card"):
            ops = CudaOps(device="cuda", deterministic=numerics.deterministic, read_blocks=dequantise)
        ops.compilers = processes
        return ops, None
    terms = 2 if numerics.compute == "int16" else 1
    from tradewind.kernels.cpu import library

    if numerics.backend == "cpu":
        from tradewind.kernels.cpu.ops import CpuOps

        found = library.load()
        assert found is not None, "the plan names a backend that is missing"
        return CpuOps(found, threads=numerics.threads, activation_terms=terms), None
    from tradewind.kernels.plain import PlainOps
    from tradewind.quantization.blocks import dequantise

    why = library.why_not()
    pinned = any(reason.choice == "backend" and reason.pinned for reason in plan.reasons)
    notice = f"{why[0].upper()}{why[1:]}; until then torch computes, many times slower." if why and not pinned else None
    return PlainOps(read_blocks=dequantise, activation_terms=terms), notice


def _beside(phases: Phases, name: str, work: Callable[[], object]) -> None:
    """Does the work in a thread that nobody waits for."""

    def run() -> None:
        with phases.beside(name):
            work()

    threading.Thread(target=run, name=f"tradewind-{name}", daemon=True).start()


@contextmanager
def uncollected() -> Iterator[None]:
    """The block makes a million objects that stay (modules, programs): looking for garbage among them again and again is a tenth of it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def make_executor(
    planned: Planned,
    ops: Ops,
    *,
    phases: Phases,
    progress: Progress | None = None,
    grammars: GrammarCompiler | None = None,
    adapters: Mapping[str, str] | None = None,
) -> Executor:
    """Weights, pages and the runner: the whole device wing behind its protocol. `adapters`: name -> key of those to begin with; where the
    plan has room for any, others may follow at run time. Raises UserError naming an adapter that this model cannot take."""
    plan = planned.plan
    room = plan.adapters
    with phases("imports"):
        from tradewind.attention.backend import choose_backend
        from tradewind.device.kv import KVStorage
        from tradewind.layers.adapters import Adapters
        from tradewind.models.registry import family_of
        from tradewind.weights.dummy import load_dummy
        from tradewind.weights.load import load_model
    with phases("weights"):
        backend = choose_backend(plan.cache.groups, plan.hardware, ops=ops)
        family = family_of(plan.card)
        # Some ropes are stretched only for contexts longer than the model was first trained on: no sequence here is longer than the plan's.
        card = msgspec.structs.replace(plan.card, max_positions=min(plan.card.max_positions, plan.schedule.max_context))
        shown = progress if planned.checkpoint.nbytes >= SHOWN_BYTES else None
        if shown is not None:
            shown.start(f"loading {plan.model}", planned.checkpoint.nbytes)
        banks = None
        if room is not None:
            exact = plan.numerics.backend == "plain" or plan.numerics.compute == "f32"
            banks = Adapters(ops, slots=room.slots, rank=room.rank, exact=exact)
        try:
            if not reads_weights(plan.load_format):
                model = load_dummy(
                    family=family,
                    card=card,
                    ops=ops,
                    numerics=plan.numerics,
                    attention=backend,
                    adapters=banks,
                    load_format=plan.load_format,
                )
            else:
                model = load_model(
                    planned.checkpoint,
                    family=family,
                    card=card,
                    ops=ops,
                    numerics=plan.numerics,
                    attention=backend,
                    adapters=banks,
                    progress=None if shown is None else lambda done, total: shown.advance_to(done),
                )
        finally:
            if shown is not None:
                shown.finish()
        planned.checkpoint.let_go()

    def close() -> None:
        if grammars is not None:
            grammars.shut()
        getattr(ops, "close", _nothing)()

    with phases("pages"):
        kv = KVStorage(ops, plan.cache.groups, plan.cache.pages).layers
    adapter_slots: AdapterSlots | None = None
    if banks is not None:
        from tradewind.config.adapter_files import by_key
        from tradewind.runner.adapters import AdapterSlots
        from tradewind.weights.adapters import read_adapter

        adapter_slots = AdapterSlots(
            banks,
            read=lambda key: read_adapter(by_key(key), family=family, card=card),
            slots=plan.schedule.max_running,
        )
        with phases("adapters"):
            adapter_slots.begin(adapters or {})
    if plan.numerics.backend == "cuda":
        return _on_gpu(plan, model, ops, kv, phases=phases, grammars=grammars, close=close, adapters=adapter_slots)
    from tradewind.runner.executor import LocalExecutor
    from tradewind.runner.runner import StepRunner

    images = None
    if plan.card.vision is not None:
        from tradewind.runner.encoder import ImageSlots

        images = ImageSlots(
            model.tower,  # type: ignore[attr-defined]
            ops,
            facts=plan.card.vision,
            slots=plan.schedule.max_running,
            capacity=plan.schedule.max_tokens_per_step,
        )
    runner = StepRunner(
        model=model,
        ops=ops,
        groups=plan.cache.groups,
        kv=kv,
        max_running=plan.schedule.max_running,
        max_tokens_per_step=plan.schedule.max_tokens_per_step,
        max_context=plan.schedule.max_context,
        vocab_size=plan.card.vocab_size,
        hidden=plan.card.hidden,
        tape=plan.numerics.tape and hasattr(ops, "record"),
        grammars=grammars,
        adapters=adapter_slots,
        images=images,
    )
    return LocalExecutor(runner, overlap=plan.schedule.steps_in_flight > 1, at_close=close, adapters=adapter_slots)


def _on_gpu(
    plan: Plan,
    model: Any,
    ops: Any,
    kv: tuple[KVLayer, ...],
    *,
    phases: Phases,
    grammars: GrammarCompiler | None,
    close: Callable[[], None],
    adapters: AdapterSlots | None,
) -> Executor:
    """The runner of one GPU, with the graphs that most first requests need."""
    from tradewind.kernels.triton.graphs import Gpu
    from tradewind.runner.executor import DeviceExecutor
    from tradewind.runner.graph_runner import GraphRunner

    with phases("buffers"):
        runner = GraphRunner(
            model=model,
            ops=ops,
            gpu=Gpu(ops.device),
            groups=plan.cache.groups,
            kv=kv,
            max_running=plan.schedule.max_running,
            max_tokens_per_step=plan.schedule.max_tokens_per_step,
            max_context=plan.schedule.max_context,
            vocab_size=plan.card.vocab_size,
            hidden=plan.card.hidden,
            graphs=plan.numerics.graphs,
            grammars=grammars,
            adapters=adapters,
        )
    rows = [rows for rows in FIRST_ROWS if rows <= plan.schedule.max_running]
    tokens = [tokens for tokens in FIRST_TOKENS if tokens <= plan.schedule.max_tokens_per_step]
    with phases("kernels"):
        runner.prepare(rows, prompt_sizes=tokens, threads=min(16, plan.hardware.cores), measure=phases)
    with phases("graphs"):
        runner.warm(rows, prompt_sizes=tokens)
    runner.prepare_rest()
    return DeviceExecutor(runner, at_close=close, adapters=adapters)


def make_loop(
    plan: Plan,
    executor: Executor,
    *,
    grammars: GrammarCompiler | None = None,
    sinks: Sequence[Sink] = (),
    step_times: Path | None = None,
) -> EngineLoop:
    """The host's side of an engine: the scheduler as planned, with step times fitted to its steps where the plan wants that.

    `step_times`: a file that they are kept in and begin with. Raises UserError where that cannot be used.
    """
    scheduler = Scheduler(schedule=plan.schedule, cache=plan.cache, clock=time.monotonic, grammars=grammars)
    watch = None
    if plan.schedule.fit_steps or step_times is not None:
        from tradewind.simulate.live_times import live_times_of

        watch = live_times_of(
            plan,
            clock=time.monotonic,
            pace=scheduler.pace_by,
            prepared=lambda: bool(getattr(executor, "prepared", True)),
            file=step_times,
        )
    return EngineLoop(scheduler=scheduler, executor=executor, clock=time.monotonic, sinks=sinks, watch=watch)


def build_engine(
    goals: Goals,
    *,
    progress: Progress | None = None,
    sinks: Sequence[Sink] = (),
    phases: Phases | None = None,
    adapters: Mapping[str, str] | None = None,
) -> Engine:
    """Everything from goals, ready to take requests. `phases` takes the times; its last phase ends where the imports began."""
    phases = phases or Phases()
    with phases("imports"):
        pass
    planned = make_plan(goals, progress=progress, phases=phases)
    return build_planned(planned, progress=progress, sinks=sinks, phases=phases, adapters=adapters)


def build_planned(
    planned: Planned,
    *,
    progress: Progress | None = None,
    sinks: Sequence[Sink] = (),
    phases: Phases | None = None,
    adapters: Mapping[str, str] | None = None,
) -> Engine:
    """Everything from a plan. Starts no thread of the engine; the client does when it is asked to. A failure leaves no thread behind."""
    phases = phases or Phases()
    plan = planned.plan
    _check_tokenizer(planned.checkpoint)
    # Tokenizer and weights load side by side: the one is the tokenizers library's work, the other C++.
    made: list[TextTokenizer | BaseException] = []
    reading = threading.Thread(
        target=lambda: made.append(_caught(planned.checkpoint)), name="tradewind-tokenizer", daemon=True
    )
    with uncollected(), ExitStack() as undo:
        reading.start()
        # Not for ever: Ctrl-C in the middle of an import can leave Python's lock of that module held, which the thread then waits for.
        undo.callback(reading.join, 5.0)
        ops, notices = make_ops(plan, phases=phases)
        undo.callback(getattr(ops, "close", _nothing))
        grammars = GrammarCompiler(lambda: vocabulary_of(_tokenizer_of(made), plan), vocab_size=plan.card.vocab_size)
        executor = make_executor(planned, ops, phases=phases, progress=progress, grammars=grammars, adapters=adapters)
        undo.callback(executor.close)
        with phases("tokenizer"):
            reading.join()
            tokenizer = made[0]
            if isinstance(tokenizer, BaseException):
                raise tokenizer
            template = _template(tokenizer)
        with phases("engine"):
            client = LocalClient(make_loop(plan, executor, grammars=grammars, sinks=sinks))
        undo.pop_all()
    return Engine(
        plan=plan,
        tokenizer=tokenizer,
        template=template,
        client=client,
        phases=phases,
        checkpoint_path=planned.path,
        notices=notices,
    )


def build_client(planned: Planned, *, sinks: Sequence[Sink] = (), phases: Phases | None = None) -> LocalClient:
    """The engine without a tokenizer, for token ids only: what a folder with nothing but a config.json allows. No grammars."""
    phases = phases or Phases()
    plan = planned.plan
    with uncollected(), ExitStack() as undo:
        ops, _ = make_ops(plan, phases=phases)
        undo.callback(getattr(ops, "close", _nothing))
        executor = make_executor(planned, ops, phases=phases)
        undo.callback(executor.close)
        with phases("engine"):
            client = LocalClient(make_loop(plan, executor, sinks=sinks))
        undo.pop_all()
    return client


def _nothing() -> None:
    """What an op set without threads does to close."""


def _check_tokenizer(checkpoint: Checkpoint) -> None:
    """Raises UserError when the folder has no tokenizer: said before minutes of loading, not after."""
    if checkpoint.kind != "gguf" and checkpoint.tokenizer_json is None:
        raise UserError(
            f"{checkpoint.path} has no tokenizer.json; put the model's tokenizer.json beside its config.json"
        )


def _caught(checkpoint: Checkpoint) -> TextTokenizer | BaseException:
    try:
        return read_tokenizer(checkpoint)
    except BaseException as error:
        return error


def _tokenizer_of(made: Sequence[TextTokenizer | BaseException]) -> TextTokenizer:
    """What the thread has read; asked for with the first grammar, long after the thread's end."""
    assert isinstance(made[0], TextTokenizer)
    return made[0]


def vocabulary_of(tokenizer: TextTokenizer, plan: Plan) -> Vocabulary:
    """The tokenizer as grammars see it; takes about 50 ms for 50,000 tokens."""
    return Vocabulary(
        tokens=[tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)],
        special_ids=tokenizer.special_ids,
        eos_ids=tuple(sorted({*tokenizer.eos_ids, *plan.card.eos_ids})),
        encode=lambda text: tokenizer.encode(text, add_special=False),
    )


def _template(tokenizer: TextTokenizer) -> ChatTemplate | UserError:
    try:
        return ChatTemplate.for_tokenizer(tokenizer)
    except UserError as error:
        return error
