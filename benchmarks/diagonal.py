"""Plans for opposed goals on each other's traffic: does each win on its own, on traffic that it was not made from?

    python benchmarks/diagonal.py [GOALS.toml ...] [--times int16=FILE --times int8=FILE] [--out diagonal.json --plot diagonal.png]

Each file of goals (default: examples/goals) gets a plan for this machine: what `tradewind plan GOALS.toml` prints, with the alternatives
simulated on one made-up trace of the goals (seed 0). Every plan then serves held-out traces of all goals: other seeds, and of each seed
traffic as it was planned, in bursts, more of it, and with wider lengths. Judged by the goals of the traffic: the share of requests that
meet all targets, or the rate of output tokens where there are none. A plan that costs more quality than they allow has lost; its figures
are shown all the same. A simulation: production scheduler, policies and cache on a virtual clock, no noise. Step times: a roofline of the
machine, or what `simulate_check.py --save-times` fitted to the engine for each way to compute.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tradewind.assemble import make_plan
from tradewind.config.goals import Goals
from tradewind.config.goals_file import read_goals
from tradewind.config.plan import Plan
from tradewind.simulate.choosing import choose
from tradewind.simulate.crossing import SHAPES, Duel, Score, cross, duels, made_up
from tradewind.simulate.forecast import planned_times
from tradewind.simulate.steptime import StepTime

EXAMPLES = sorted((Path(__file__).parents[1] / "examples" / "goals").glob("*.toml"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("goals", nargs="*", type=Path, default=EXAMPLES)
    parser.add_argument("--seeds", type=int, default=10, help="held-out seeds, from 1 on (default 10)")
    parser.add_argument("--requests", type=int, default=300, help="of each trace (default 300)")
    parser.add_argument("--times", action="append", default=[], metavar="COMPUTE=FILE", help="fitted step times")
    parser.add_argument(
        "--lossless", action="store_true", help="no goals may spend quality: only sizes and policies differ"
    )
    parser.add_argument("--no-search", action="store_true", help="take the first plan, without a trace")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    logging.getLogger("tradewind").setLevel(logging.ERROR)  # what a simulated engine gives up under overload is no news
    fitted = {name: StepTime.load(Path(file)) for name, _, file in (each.partition("=") for each in arguments.times)}

    def times_of(plan: Plan) -> StepTime:
        return fitted.get(plan.numerics.compute) or planned_times(plan)

    goals = {path.stem: read_goals(path) for path in arguments.goals}
    if arguments.lossless:
        goals = {name: msgspec.structs.replace(own, quality_loss_percent=0.0) for name, own in goals.items()}
    began = time.monotonic()
    console = Console(width=140)
    plans: dict[str, Plan] = {}
    with Progress(console=Console(stderr=True)) as progress:
        total = len(goals) ** 2 * arguments.seeds * len(SHAPES)
        bar = progress.add_task("plans", total=total)
        for name, own in goals.items():
            plans[name] = choose(
                own,
                trace=made_up(own, requests=arguments.requests, seed=0),
                make=lambda asked: make_plan(asked).plan,
                times_of=times_of,
                search=not arguments.no_search,
                progress=lambda what, name=name: progress.update(bar, description=f"plan of {name}: {what}"),
            ).plan

        def told(what: str) -> None:
            progress.update(bar, description=what, advance=1)

        scores = cross(
            goals,
            plans,
            seeds=range(1, 1 + arguments.seeds),
            times_of=times_of,
            requests=arguments.requests,
            told=told,
        )
    found = duels(scores, goals)
    print_plans(console, plans)
    print_duels(console, found)
    took_s = time.monotonic() - began
    console.print(f"{total} simulations, {took_s:.0f} s")
    if arguments.out is not None:
        facts = {
            "machine": next(iter(plans.values())).hardware.name,
            "step_times": {name: times_of(plan).described() for name, plan in plans.items()},
            "requests": arguments.requests,
            "seeds": arguments.seeds,
            "shapes": [vars(shape) for shape in SHAPES],
            "plans": {name: sizes(plan) for name, plan in plans.items()},
            "duels": msgspec.to_builtins(found),
            "means": {f"{traffic} under {plan}": value for (traffic, plan), value in means(scores, goals).items()},
            "scores": msgspec.to_builtins(scores),
        }
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")
    if arguments.plot is not None:
        draw(scores, found, goals, arguments.plot)


def sizes(plan: Plan) -> dict[str, object]:
    """What differs between the plans."""
    return {
        "policy": plan.schedule.policy,
        "max_tokens_per_step": plan.schedule.max_tokens_per_step,
        "max_running": plan.schedule.max_running,
        "pages": list(plan.cache.pages),
        "compute": plan.numerics.compute,
    }


def means(scores: list[Score], goals: dict[str, Goals]) -> dict[tuple[str, str], float]:
    """(traffic, plan) -> mean over traces."""
    return {
        (traffic, plan): float(np.mean([s.value for s in scores if (s.traffic, s.plan) == (traffic, plan)]))
        for traffic in goals
        for plan in goals
    }


def print_plans(console: Console, plans: dict[str, Plan]) -> None:
    """The plans' differences."""
    table = Table(title="Plans")
    for column in ("goals", *sizes(next(iter(plans.values())))):
        table.add_column(column)
    for name, plan in plans.items():
        table.add_row(name, *(str(value) for value in sizes(plan).values()))
    console.print(table)


def print_duels(console: Console, found: list[Duel]) -> None:
    """Who won how often, and by how much."""
    table = Table(title="The plan made for the traffic against another, on the same held-out traces")
    for column in ("traffic", "against the plan of", "won", "better figures", "margin (95 %)", "least"):
        table.add_column(column)
    for one in found:
        margin = f"{100 * one.margin:+.1f} % ({100 * one.margin_low:+.1f} to {100 * one.margin_high:+.1f})"
        drawn = f", {one.drawn} drawn" if one.drawn else ""
        why = "" if one.won == one.better else ", costs quality"
        won, better = f"{one.won} of {one.of}{why}", f"{one.better} of {one.of}{drawn}"
        table.add_row(one.traffic, one.other, won, better, margin, f"{100 * one.least:+.1f} %")
    console.print(table)


def draw(scores: list[Score], found: list[Duel], goals: dict[str, Goals], path: Path) -> None:
    """A heat map: rows are traffic, columns plans, colour is the part of the best in the row."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(goals)
    mean = means(scores, goals)
    table = np.array([[mean[traffic, plan] for plan in names] for traffic in names])
    figure, axes = plt.subplots(figsize=(7.2, 5.2), layout="constrained")
    image = axes.imshow(table / table.max(axis=1, keepdims=True), cmap="viridis", vmin=0, vmax=1)
    for row, traffic in enumerate(names):
        rate = all(s.value > 1 for s in scores if s.traffic == traffic and s.plan == traffic)
        for column, plan in enumerate(names):
            value = table[row, column]
            text = f"{value:.0f} tokens/s" if rate else f"{100 * value:.0f} % in time"
            if row != column:
                duel = next(one for one in found if (one.traffic, one.other) == (traffic, plan))
                text += f"\nown plan better on\n{duel.better} of {duel.of} traces"
                if any(not one.allowed for one in scores if (one.traffic, one.plan) == (traffic, plan)):
                    text += "\n(not allowed: int8)"
            bright = value > 0.6 * table[row].max()
            axes.text(column, row, text, ha="center", va="center", color="black" if bright else "white", fontsize=9)
        axes.add_patch(plt.Rectangle((row - 0.48, row - 0.48), 0.96, 0.96, fill=False, edgecolor="crimson", lw=2.5))
    axes.set_xticks(range(len(names)), [f"plan of\n{name}" for name in names])
    axes.set_yticks(range(len(names)), [f"{name}\ntraffic" for name in names])
    axes.set_title("Each plan on held-out traffic of each kind (mean of all traces)", fontsize=11)
    figure.colorbar(image, label="part of the best in the row")
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    main()
