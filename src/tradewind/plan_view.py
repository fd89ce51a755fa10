"""A plan and the registry of techniques as tables for a terminal.

Knows: columns and widths. Refuses to know: how anything was decided. Nothing is printed here; the caller has the console.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tradewind.config.conflicts import option
from tradewind.config.hardware import Hardware
from tradewind.config.plan import Plan
from tradewind.config.sizes import show_bytes
from tradewind.config.techniques import Technique


def plan_text(plan: Plan) -> RenderableType:
    """Model and machine, the memory ledger with its sum, and every choice with its reason."""
    return Group(facts_table(plan), Text(), ledger_table(plan), Text(), reasons_table(plan))


def facts_table(plan: Plan) -> Table:
    """What was planned for what."""
    card, machine = plan.card, plan.hardware
    window_layers = sum(window is not None for window in card.layer_windows)
    windowed = "in chunks" if card.windows_restart else "with a window"
    windows = f", {window_layers} {windowed}" if window_layers else ""
    scaling = "" if card.rope.kind == "none" else f", rope {card.rope.kind} x{card.rope.factor:g}"
    table = Table.grid(padding=(0, 2))
    table.add_row(
        Text("model", style="bold"),
        Text(
            f"{card.name} ({card.family}, {card.parameters / 1e6:.0f}M parameters in {show_bytes(card.weight_bytes)})"
        ),
    )
    table.add_row(
        "",
        Text(
            f"{card.layers} layers{windows}, {card.heads} heads on {card.kv_heads}, hidden {card.hidden}, vocabulary {card.vocab_size}, "
            f"{card.max_positions} positions{scaling}"
        ),
    )
    table.add_row(Text("machine", style="bold"), Text(machine_text(machine)))
    table.add_row(Text("scenario", style="bold"), Text(plan.scenario))
    return table


def machine_text(machine: Hardware) -> str:
    """What computes, its memory and its speeds; for a GPU the host beside it too."""
    cores = f"{machine.cores} {'core' if machine.cores == 1 else 'cores'}"
    memory = f"{show_bytes(machine.memory_free_bytes)} of {show_bytes(machine.memory_bytes)} free"
    if machine.kind == "cpu":
        return (
            f"{machine.name}, {cores}, {memory}, reads {machine.memory_bytes_per_s / 1e9:.0f} GB/s, "
            f"{machine.matmul_flops_per_s / 1e9:.0f} GFLOP/s in float32"
        )
    fp8 = f", {machine.fp8_flops_per_s / 1e12:.0f} in fp8" if machine.fp8_flops_per_s else ""
    return (
        f"{machine.name}, {machine.multiprocessors} multiprocessors, {memory}, reads {machine.memory_bytes_per_s / 1e12:.1f} TB/s, "
        f"{machine.matmul_flops_per_s / 1e12:.0f} TFLOP/s in bf16{fp8}; host: {cores}, "
        f"{show_bytes(machine.host_memory_free_bytes)} of {show_bytes(machine.host_memory_bytes)} free"
    )


def ledger_table(plan: Plan) -> Table:
    """The memory ledger; its last row is the sum of the others."""
    table = Table(title="Memory", title_justify="left", show_footer=True, footer_style="bold")
    table.add_column("for", footer="together", no_wrap=True)
    table.add_column("bytes", justify="right", footer=show_bytes(sum(line.bytes for line in plan.ledger)), no_wrap=True)
    gpu = plan.hardware.kind == "cuda"
    footer = (
        "on the GPU, taken at start; the host's memory is not in it"
        if gpu
        else "at most; pages and tables that no request touches take nothing"
    )
    table.add_column("how", footer=footer, overflow="fold")
    for line in plan.ledger:
        table.add_row(Text(line.name), show_bytes(line.bytes), Text(line.how))
    return table


def reasons_table(plan: Plan) -> Table:
    """Every choice; those that the user pinned are marked."""
    table = Table(title="Choices", title_justify="left")
    table.add_column("choice", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("why", overflow="fold", ratio=3)
    table.add_column("rejected", overflow="fold", ratio=2)
    for reason in plan.reasons:
        value = Text(reason.value, style="bold")
        if reason.pinned:
            value.append(" (pinned)", style="dim")
        table.add_row(Text(reason.choice), value, Text(reason.why), Text(reason.rejected, style="dim"))
    return table


def techniques_text(techniques: Mapping[str, Technique]) -> RenderableType:
    """The registry: one table of goals helped (+) and hurt (-), then a paragraph for each technique, readable at any width."""
    overview = Table(title="Techniques", title_justify="left")
    overview.add_column("technique", no_wrap=True)
    overview.add_column("layer")
    for head in GOAL_HEADS.values():
        overview.add_column(head, justify="center")
    overview.add_column("measured", justify="center")
    blocks: list[RenderableType] = []
    for name, row in techniques.items():
        signs = [
            "+" * (goal in row.goals_helped)
            + "-" * (goal in row.goals_hurt)  # both: one request's gain is another's wait
            for goal in GOAL_HEADS
        ]
        overview.add_row(name, row.layer, *signs, "yes" if row.effect else "")
        block = Table.grid(padding=(0, 2))
        block.add_column(no_wrap=True, style="dim", min_width=10)
        block.add_column(overflow="fold")
        block.add_row(Text(name, style="bold not dim"), Text(row.layer))
        facts = (
            ("switch", row.switch),
            ("on", _pins(row.on)),
            ("off", _pins(row.off)),
            ("helps", row.helps),
            ("hurts", row.hurts),
            ("needs", ", ".join(row.prerequisites)),
            ("not with", ", ".join(row.conflicts)),
            ("metric", row.metric),
            ("test", row.test),
            ("measured", row.effect or "not yet"),
        )
        for label, fact in facts:
            if fact:
                block.add_row(f"  {label}", Text(fact))
        blocks += [block, Text()]
    return Group(overview, Text(), *blocks)


GOAL_HEADS = {"ttft": "TTFT", "tpot": "TPOT", "throughput": "through-\nput", "memory": "memory"}


def _pins(pins: Mapping[str, str | int | bool]) -> str:
    """Pins as options of the command line."""
    return " ".join(option(name, str(value)) for name, value in pins.items())
