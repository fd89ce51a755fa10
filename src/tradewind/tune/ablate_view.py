"""An attribution for people: one table of figures for each way it was made.

Knows: units and signs. Refuses to know: how the figures came about.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tradewind.simulate.report import show_s
from tradewind.tune.ablate import Ablation, Amount, Share

MiB = 1 << 20
HEADS = {"ttft_s": "TTFT", "tpot_s": "TPOT", "tokens_per_s": "tokens/s", "memory_bytes": "memory"}


def ablation_text(ablations: Sequence[Ablation]) -> RenderableType:
    """Tables for a terminal; nothing is printed here."""
    parts: list[RenderableType] = []
    for one in ablations:
        all_on = one.with_all
        parts += [
            Text(one.how.capitalize(), style="bold"),
            Text(one.about + "."),
            Text(
                f"With all: TTFT {show_s(all_on.ttft_s)}, TPOT {show_s(all_on.tpot_s)}, {all_on.tokens_per_s:.0f} tokens/s, "
                f"{all_on.memory_bytes / MiB:.0f} MiB."
            ),
            _table("What each adds (leave one out)", one.leave_one_out, one),
        ]
        if one.shapley:
            whole = (one.whole,) if one.whole is not None else ()
            parts.append(_table("Shared out among the foremost (Shapley)", (*one.shapley, *whole), one))
        if one.left_out:
            by_reason: dict[str, list[str]] = {}
            for name, why in one.left_out.items():
                by_reason.setdefault(why, []).append(name)
            parts += [Text(f"Not told: {', '.join(own)}: {why}.") for why, own in by_reason.items()]
        parts.append(Text())
    if parts:
        parts.append(
            Text("Seconds and bytes with a minus are a gain, tokens/s with a plus. ± is the interval at 95 %.")
        )
    return Group(*parts)


def _table(title: str, shares: Sequence[Share], ablation: Ablation) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("technique", no_wrap=True)
    for head in HEADS.values():
        table.add_column(head, justify="right")
    for share in shares:
        last = share is ablation.whole
        cells = [show_amount(goal, share.amounts[goal]) for goal in HEADS]
        table.add_row(share.technique, *cells, style="bold" if last else None)
    return table


def show_amount(goal: str, amount: Amount) -> str:
    """A difference with its sign, unit and interval; "0" where there is none."""
    value, off = amount.value, amount.off_by
    if value == 0 and not off:
        return "0"
    if goal == "memory_bytes":
        unit, scale = " MiB", 1 / MiB
    elif goal == "tokens_per_s":
        unit, scale = "", 1.0
    else:
        unit, scale = (" s", 1.0) if max(abs(value), off or 0.0) >= 1 else (" ms", 1e3)
    said = f"{'+' if value >= 0 else '-'}{_digits(abs(value) * scale)}"
    return f"{said}{unit}" if off is None else f"{said} ±{_digits(off * scale)}{unit}"


def _digits(value: float) -> str:
    """Three digits where they tell something, no exponents."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 0.1 else f"{value:.2f}"
