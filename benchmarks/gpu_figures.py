"""What the GPU suite's figures are compared with, and how they are shown: peers, demands, floors, tables, a picture.

Knows: the recorded figures of vLLM and SGLang on one H200, what is demanded of ours, and the floors that follow from a card's ceilings.
Refuses to know: how anything is measured (gpu_suite). A result is the plain JSON that gpu_suite writes; missing parts are shown as "–".
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from tradewind.bench.report import figure, matplotlib_figure, quiet_axis

BATCHES = (1, 8, 32, 128, 256)
W6_CONTEXT = 1024
"""Tokens in the middle of W6's measured steps: 896 in, then the 64th to the 192nd token."""

PEER_VERSIONS = (
    "vLLM 0.26.0 and SGLang 0.5.16, their defaults, dummy weights, recorded on 2026-11-30 on one H200 (not in this run)"
)


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of the table."""

    key: str
    title: str
    unit: str
    better: Literal["higher", "lower"]


FIGURES: tuple[Figure, ...] = (
    Figure(key="W1.tpot_ms", title="W1 time per token, batch 1", unit="ms", better="lower"),
    Figure(key="W1.ttft_ms", title="W1 time to first token, 128 in", unit="ms", better="lower"),
    Figure(key="W2.out_tok_s", title="W2 512 requests at once", unit="tok/s out", better="higher"),
    Figure(key="W3.out_tok_s", title="W3 256 x (128 in, 512 out)", unit="tok/s out", better="higher"),
    Figure(key="W4.in_tok_s_out1", title="W4 64 x 4096 in, 1 out", unit="tok/s in", better="higher"),
    Figure(key="W4.in_tok_s", title="W4 64 x 4096 in, 16 out", unit="tok/s in", better="higher"),
    Figure(key="W5.out_tok_s", title="W5 shared prefix, cold", unit="tok/s out", better="higher"),
    Figure(key="W5.out_tok_s_warm", title="W5 shared prefix, cached", unit="tok/s out", better="higher"),
    *(
        Figure(key=f"W6.{b}", title=f"W6 step of {b} row{'s' * (b > 1)} at 1k", unit="ms", better="lower")
        for b in BATCHES
    ),
    Figure(key="start.cold_s", title="start to ready, cold", unit="s", better="lower"),
    Figure(key="start.warm_s", title="start to ready, warm", unit="s", better="lower"),
)


def _six(*steps_ms: float) -> dict[str, float]:
    return {f"W6.{batch}": value for batch, value in zip(BATCHES, steps_ms, strict=True)}


PEERS: dict[str, dict[str, dict[str, float]]] = {
    "llama-3.1-8b": {
        "vLLM": {
            "W1.ttft_ms": 10.7,
            "W1.tpot_ms": 4.97,
            "W2.out_tok_s": 9810,
            "W3.out_tok_s": 18354,
            "W4.in_tok_s": 39248,
            "W4.in_tok_s_out1": 40797,
            "W5.out_tok_s": 7844,
            **_six(5.03, 5.25, 6.30, 10.39, 17.69),
            "start.cold_s": 62.6,
            "start.warm_s": 55.8,
        },
        "SGLang": {
            "W1.ttft_ms": 12.4,
            "W1.tpot_ms": 4.78,
            "W2.out_tok_s": 9720,
            "W3.out_tok_s": 19294,
            "W4.in_tok_s": 39945,
            "W4.in_tok_s_out1": 41137,
            "W5.out_tok_s": 7161,
            "W5.out_tok_s_warm": 8397,
            **_six(4.79, 5.15, 6.11, 10.33, 16.64),
            "start.cold_s": 117,
            "start.warm_s": 56,
        },
    },
    "llama-3.1-8b fp8": {
        "vLLM": {
            "W1.ttft_ms": 11.9,
            "W1.tpot_ms": 3.50,
            "W2.out_tok_s": 12739,
            "W3.out_tok_s": 23327,
            "W4.in_tok_s": 58703,
            "W4.in_tok_s_out1": 61642,
            **_six(3.52, 3.76, 5.28, 8.59, 15.13),
            "start.cold_s": 94,
        }
    },
    "qwen3-0.6b": {
        "vLLM": {
            "W1.ttft_ms": 10.6,
            "W1.tpot_ms": 2.15,
            "W2.out_tok_s": 28111,
            "W3.out_tok_s": 33683,
            "W4.in_tok_s": 287785,
            "W4.in_tok_s_out1": 346409,
            "W5.out_tok_s": 14585,
            **_six(2.15, 1.53, 2.78, 5.53, 9.71),
            # Of the start the record names no engine: 85 s cold, 53 s warm.
            "start.cold_s": 85,
            "start.warm_s": 53,
        },
        "SGLang": {
            "W1.ttft_ms": 12.8,
            "W1.tpot_ms": 1.68,
            "W2.out_tok_s": 20565,
            "W3.out_tok_s": 44589,
            "W4.in_tok_s": 291728,
            "W4.in_tok_s_out1": 333370,
        },
    },
    "qwen3-30b-a3b": {
        "vLLM": {
            "W1.ttft_ms": 21.6,
            "W1.tpot_ms": 4.09,
            "W2.out_tok_s": 8492,
            "W3.out_tok_s": 10939,
            "W4.in_tok_s_out1": 62617,
            "start.cold_s": 113,
        },
        "SGLang": {
            "W1.ttft_ms": 23.8,
            "W1.tpot_ms": 4.08,
            "W2.out_tok_s": 4706,
            "W3.out_tok_s": 11322,
        },
    },
    "deepseek-v2-lite": {
        "vLLM": {
            "W1.ttft_ms": 15.9,
            "W1.tpot_ms": 3.36,
            "W2.out_tok_s": 15478,
            "W3.out_tok_s": 31040,
            "W4.in_tok_s": 82602,
            "W4.in_tok_s_out1": 86512,
        },
    },
}
"""By model (with " fp8" where weights are quantised online), engine and figure."""

MUST: dict[str, dict[str, float]] = {
    "llama-3.1-8b": {
        "W1.tpot_ms": 4.25,
        "W1.ttft_ms": 8,
        "W2.out_tok_s": 11300,
        "W3.out_tok_s": 21200,
        "W4.in_tok_s_out1": 41200,
        "W5.out_tok_s": 10000,
        **_six(4.3, 4.6, 5.4, 9.4, 15.5),
        "start.cold_s": 12,
        "start.warm_s": 8,
    },
    "llama-3.1-8b fp8": {
        "W1.tpot_ms": 2.5,
        "W1.ttft_ms": 8,
        "W2.out_tok_s": 14600,
        "W3.out_tok_s": 26800,
        "W4.in_tok_s_out1": 62000,
    },
    "llama-3.2-1b": {"W1.tpot_ms": 0.95},
    "qwen3-0.6b": {
        "W1.tpot_ms": 0.85,
        "W1.ttft_ms": 4,
        "W2.out_tok_s": 42000,
        "W3.out_tok_s": 58000,
        "W4.in_tok_s_out1": 350000,
        "W5.out_tok_s": 17500,
    },
    "qwen3-30b-a3b": {
        "W1.tpot_ms": 2.4,
        "W1.ttft_ms": 12,
        "W2.out_tok_s": 9800,
        "W3.out_tok_s": 12500,
        "W4.in_tok_s_out1": 63000,
        "start.cold_s": 20,
    },
    "deepseek-v2-lite": {
        "W1.tpot_ms": 2.0,
        "W2.out_tok_s": 17800,
        "W3.out_tok_s": 34000,
        "W4.in_tok_s_out1": 86000,
        "start.cold_s": 15,
    },
}
AIM: dict[str, dict[str, float]] = {
    "llama-3.1-8b": {
        "W1.tpot_ms": 3.9,
        "W1.ttft_ms": 6,
        "W2.out_tok_s": 12500,
        "W3.out_tok_s": 24000,
        "W4.in_tok_s_out1": 43000,
        "W5.out_tok_s": 12000,
        "start.cold_s": 6,
        "start.warm_s": 4,
    },
    "llama-3.1-8b fp8": {
        "W1.tpot_ms": 2.2,
        "W1.ttft_ms": 6,
        "W2.out_tok_s": 17000,
        "W3.out_tok_s": 32000,
        "W4.in_tok_s_out1": 72000,
    },
    "llama-3.2-1b": {"W1.tpot_ms": 0.74},
    "qwen3-0.6b": {
        "W1.tpot_ms": 0.55,
        "W1.ttft_ms": 2.5,
        "W2.out_tok_s": 55000,
        "W3.out_tok_s": 75000,
        "W4.in_tok_s_out1": 450000,
        "W5.out_tok_s": 25000,
    },
    "qwen3-30b-a3b": {"W1.tpot_ms": 1.8},
    "deepseek-v2-lite": {"W1.tpot_ms": 1.5},
}
AIM_OF_FLOOR = 1.15
"""W6 of the 8B: the aim is this multiple of the floor of the run."""

Result = Mapping[str, Any]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table."""

    key: str
    title: str
    unit: str
    ours: float | None
    peers: dict[str, float]
    ratio: float | None
    """How many times better than the better peer; above 1 is faster, for times too."""
    must: float | None
    aim: float | None
    fraction: float | None
    """Of the ceiling that binds the figure, measured in the same run."""
    verdict: Literal["aim", "must", "missed", "–"]


def case_of(result: Result) -> str:
    """The key of PEERS, MUST and AIM that a result belongs to."""
    quantised = f" {result['quantization']}" if result.get("quantization") not in (None, "none") else ""
    return f"{result['model']}{quantised}"


LOADED = {"auto": "weights of the file", "dummy-flat": "flat weights", "dummy-one-route": "one route"}
"""How results of another load format than dummy are told apart from those that count; peers and demands are the same."""


def title_of(result: Result) -> str:
    """What a result is called: its case and, where weights were not the usual random ones, which they were."""
    return ", ".join(filter(None, (case_of(result), LOADED.get(result.get("load_format", "dummy")))))


def ours_of(result: Result) -> dict[str, float]:
    """The result's figures by key; what was not measured, or failed, is absent."""
    found: dict[str, float] = {}
    for name, record in result.get("workloads", {}).items():
        if name == "W6":
            found |= {f"W6.{row['batch']}": row["step_ms"] for row in record.get("rows", ())}
        else:
            found |= {f"{name}.{key}": value for key, value in record.items() if isinstance(value, int | float)}
    for name, record in result.get("start", {}).items():
        if "ready_s" in record:
            found[f"start.{name}_s"] = record["ready_s"]
    return found


def fractions_of(result: Result) -> dict[str, float]:
    """By figure, the part of the measured ceiling that was reached: the least time that the card could take, over ours.

    Bytes of weights and keys are counted once a step at copy bandwidth (read + written), as in the peers' record; operations of the
    matmuls at the bf16 or (quantised) fp8 rate, those of attention at the bf16 rate.
    """
    card, sizes = result.get("ceilings", {}), result.get("sizes", {})
    ours, found = ours_of(result), {}
    copy, bf16 = card.get("copy_bytes_per_s"), card.get("bf16_flops_per_s")
    rate = card.get("fp8_flops_per_s") if result.get("quantization") == "fp8" else bf16
    if copy and sizes:
        weights, kv = sizes["weight_bytes_per_token"], sizes["kv_bytes_per_token"]
        if "W1.tpot_ms" in ours:
            found["W1.tpot_ms"] = weights / copy / (ours["W1.tpot_ms"] / 1e3)
        for batch in BATCHES:
            key = f"W6.{batch}"
            if ours.get(key, 0) > 0:
                found[key] = floor_ms(result, batch=batch) / ours[key]
        third = result.get("workloads", {}).get("W3", {})
        if rate and "requests" in third:
            requests, before, new = third["requests"], third["in_each"], third["out_each"]
            prefill = 2 * sizes["linear_params"] * requests * before / rate
            cached = requests * sum(range(before + 1, before + new))
            found["W3.out_tok_s"] = (
                prefill + ((new - 1) * weight_bytes(sizes, requests) + cached * kv) / copy
            ) / third["wall_s"]
    fourth = result.get("workloads", {}).get("W4", {})
    if rate and bf16 and "linear_flops" in fourth:
        least = fourth["linear_flops"] / rate + fourth["attention_flops"] / bf16
        found["W4.in_tok_s"] = least / fourth["wall_s"]
        found["W4.in_tok_s_out1"] = least / fourth["wall_out1_s"]
    return found


def weight_bytes(sizes: Mapping[str, float], tokens: int) -> float:
    """Bytes of weights that a step of so many tokens reads: of a mixture the experts that uniform routing sends any of them to."""
    chosen, each = sizes.get("expert_bytes_per_token", 0), sizes.get("experts_each", 0)
    if not chosen:
        return sizes["weight_bytes_per_token"]
    return sizes["weight_bytes_per_token"] + chosen * (each * (1 - (1 - 1 / each) ** tokens) - 1)


def floor_ms(result: Result, *, batch: int) -> float:
    """The least time of a decode step of `batch` rows at about 1k context: weights and keys read once at copy bandwidth."""
    sizes = result["sizes"]
    read = weight_bytes(sizes, batch) + batch * W6_CONTEXT * sizes["kv_bytes_per_token"]
    return 1e3 * read / result["ceilings"]["copy_bytes_per_s"]


def rows_of(result: Result) -> list[Row]:
    """The table of one result: every figure that we, a peer or a demand know of."""
    case = case_of(result)
    ours, fractions = ours_of(result), fractions_of(result)
    rows = []
    for spec in FIGURES:
        peers = {name: table[spec.key] for name, table in PEERS.get(case, {}).items() if spec.key in table}
        must, aim, mine = MUST.get(case, {}).get(spec.key), AIM.get(case, {}).get(spec.key), ours.get(spec.key)
        if mine is None and must is None:
            continue
        if aim is None and must is not None and spec.key.startswith("W6.") and "ceilings" in result:
            aim = AIM_OF_FLOOR * floor_ms(result, batch=int(spec.key.removeprefix("W6.")))
        best = (min if spec.better == "lower" else max)(peers.values(), default=None)
        ratio = None
        if mine and best:
            ratio = best / mine if spec.better == "lower" else mine / best
        rows.append(
            Row(
                key=spec.key,
                title=spec.title,
                unit=spec.unit,
                ours=mine,
                peers=peers,
                ratio=ratio,
                must=must,
                aim=aim,
                fraction=fractions.get(spec.key),
                verdict=judged(mine, must=must, aim=aim, better=spec.better),
            )
        )
    return rows


def judged(
    value: float | None, *, must: float | None, aim: float | None, better: Literal["higher", "lower"]
) -> Literal["aim", "must", "missed", "–"]:
    """The best demand that a figure meets; "–" where nothing is demanded or nothing was measured."""
    if value is None or must is None:
        return "–"
    sign = 1 if better == "higher" else -1
    if aim is not None and sign * value >= sign * aim:
        return "aim"
    return "must" if sign * value >= sign * must else "missed"


# ---------------------------------------------------------------------------------------------------------------- tables


def show(value: float | None) -> str:
    """A figure with three digits that count, or whole from a thousand on; "–" for none."""
    return "–" if value is None else figure(value)


def table(result: Result) -> str:
    """A result as a Markdown table; of a result that stands beside the usual one only what was measured."""
    names = list(PEERS.get(case_of(result), {}))
    beside = title_of(result) != case_of(result)
    lines = [
        "| work | ours | "
        + "".join(f"{name} | " for name in names)
        + "better by | must | aim | of the ceiling | verdict |",
        "|---|" + "---|" * (len(names) + 6),
    ]
    for row in rows_of(result):
        if beside and row.ours is None:
            continue
        ours = f"**{show(row.ours)}** {row.unit}" if row.ours is not None else "–"
        ratio = f"{row.ratio:.2f}x" if row.ratio is not None else "–"
        fraction = f"{row.fraction:.0%}" if row.fraction is not None else "–"
        theirs = "".join(f"{show(row.peers.get(name))} | " for name in names)
        lines.append(
            f"| {row.title} | {ours} | {theirs}{ratio} | {show(row.must)} | {show(row.aim)} | {fraction} | {row.verdict} |"
        )
    return "\n".join(lines)


def ceilings_line(result: Result) -> str:
    """What the card reached in this run."""
    card = result.get("ceilings", {})
    parts = []
    for key, title, scale, unit in (
        ("copy_bytes_per_s", "copy", 1e12, "TB/s"),
        ("read_bytes_per_s", "read", 1e12, "TB/s"),
        ("bf16_flops_per_s", "bf16 matmul", 1e12, "TFLOP/s"),
        ("fp8_flops_per_s", "fp8 matmul", 1e12, "TFLOP/s"),
    ):
        if card.get(key):
            parts.append(f"{title} {show(card[key] / scale)} {unit}")
    return "Ceilings measured in the same run: " + (", ".join(parts) or "none") + "."


def section(result: Result) -> str:
    """A result as a part of a page: heading, table, ceilings, start-up, memory, where a step's time goes."""
    lines = [f"### {title_of(result)}", "", table(result), "", ceilings_line(result)]
    for name, record in result.get("start", {}).items():
        if "ready_s" in record:
            parts = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in record["phases"] if seconds >= 0.05)
            lines.append(
                f"Start, {name}: {record['ready_s']:.2f} s to ready ({parts}); first answer after {record['first_answer_s']:.2f} s."
            )
    memory = result.get("memory")
    if memory:
        lines.append(memory_line(memory))
    steps = [
        f"{name} {record['steps']['host_us']:.0f} of {1e3 * record['steps']['turn_ms']:.0f} us"
        for name, record in result.get("workloads", {}).items()
        if record.get("steps")
    ]
    if steps:
        lines.append("The scheduler's part of a step (decide + absorb, median): " + ", ".join(steps) + ".")
    lines += [f"Not measured: {sentence}." for sentence in result.get("skipped", ())]
    lines += [f"From another run: {sentence}." for sentence in result.get("merged", ())]
    lines.append(
        f"{result['card']}, {result['date'][:10]}, {', '.join(f'{k} {v}' for k, v in result['versions'].items())}: "
        f"`python benchmarks/{' '.join(result['command'])}`."
    )
    return "\n".join(lines)


def memory_line(memory: Mapping[str, Any]) -> str:
    """The ledger against the device's own figure."""
    planned, used = memory["planned_bytes"], memory["used_bytes"]
    return f"Memory: planned {planned / 2**30:.2f} GiB, the device says {used / 2**30:.2f} GiB ({used / planned - 1:+.1%})."


def short_table(results: Sequence[Result]) -> str:
    """The README's table: the figure that each workload is known by, ours beside the better peer. Flat weights, which made no difference
    to speed, are left to the long tables."""
    results = [result for result in results if result.get("load_format") != "dummy-flat"]
    keys = ("W1.tpot_ms", "W2.out_tok_s", "W3.out_tok_s", "W4.in_tok_s_out1", "W5.out_tok_s", "start.warm_s")
    lines = [
        "| one H200 | " + " | ".join(title_of(result) for result in results) + " |",
        "|---|" + "---|" * len(results),
    ]
    tables = [{row.key: row for row in rows_of(result)} for result in results]
    for spec in FIGURES:
        if spec.key not in keys:
            continue
        cells = []
        for found in tables:
            row = found.get(spec.key)
            if row is None or row.ours is None:
                cells.append("–")
            else:
                cells.append(f"{show(row.ours)}" + (f" ({row.ratio:.2f}x)" if row.ratio is not None else ""))
        lines.append(f"| {spec.title}, {spec.unit} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ablation_table(result: Result) -> str:
    """Every switch turned against the plan as it is: the factor says how much better the plan is."""
    runs = result["runs"]
    base = ours_of(runs.get("none", {}))
    specs = {spec.key: spec for spec in FIGURES}
    lines = ["| switch | figure | switch turned | as planned | the plan is better by |", "|---|---|---|---|---|"]
    for name, run in runs.items():
        if name == "none":
            continue
        title = ", ".join(f"{key} = {value}" for key, value in run.get("turned", {}).items()) or name
        if "error" in run:
            lines.append(f"| {title} | not run: {run['error'][:160]} | – | – | – |")
        for key, turned in ours_of(run).items():
            planned, spec = base.get(key), specs.get(key)
            if spec is None or not planned or not turned:
                continue
            factor = turned / planned if spec.better == "lower" else planned / turned
            lines.append(f"| {title} | {spec.title}, {spec.unit} | {show(turned)} | {show(planned)} | {factor:.2f}x |")
    return "\n".join(lines)


def check_section(result: Result) -> str:
    """What gpu_check judged, line by line."""
    verdicts = [line["verdict"] for line in result["lines"]]
    head = f"{verdicts.count('PASS')} passed, {verdicts.count('FAIL')} failed, {verdicts.count('skip')} could not be looked at"
    load = {line["part"] for line in result["lines"]} == {"load"}
    lines = [
        f"### {'A random load' if load else 'Correctness'}",
        "",
        f"{result['card']}, {result['date'][:10]}: {head}.",
        "",
    ]
    lines += ["| | part | what | found |", "|---|---|---|---|"]
    for line in result["lines"]:
        detail = line["detail"].replace("|", "/").replace("\n", " ")
        lines.append(f"| {line['verdict']} | {line['part']} | {line['name']} | {detail} |")
    return "\n".join(lines)


def trace_section(result: Result, *, picture: str | None) -> str:
    """What gpu_trace saw of a steady decode."""
    device, plain = result["device"], result.get("plain")
    if not device.get("events"):
        return f"### A steady decode of {result['model']}\n\nThe trace has no device events."
    text = f"{result['rows']} rows, {result['steps']} steps: the device stands still {device['idle_share']:.1%} of a traced decode"
    if plain and "idle_share_untraced" in device:
        text += (
            f" and {device['idle_share_untraced']:.1%} of an untraced one ({plain['wall_us_per_step']:.0f} us a step)"
        )
    kinds = ", ".join(f"{kind} {us:.0f}" for kind, us in device["by_kind_us_per_step"].items())
    lines = [
        f"### A steady decode of {result['model']}",
        "",
        f"{text}. Microseconds of a step by kind of kernel: {kinds}.",
    ]
    if picture is not None:
        lines += ["", f"![kernels of six steps]({picture})"]
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------- plot

OURS, MUST_COLOUR = "#2f6fb0", "#c0392b"
PEER_COLOURS = {"vLLM": "#8a97a5", "SGLang": "#c3ccd5"}


def draw(result: Result, path: Path) -> None:
    """Draws a result as PNG: a bar for us and each peer in every panel, a line where the demand is. Raises MissingExtraError."""
    rows = {row.key: row for row in rows_of(result)}
    panels = [
        ("W1.tpot_ms",),
        ("W1.ttft_ms",),
        ("W2.out_tok_s",),
        ("W3.out_tok_s",),
        ("W4.in_tok_s_out1",),
        ("W5.out_tok_s",),
        tuple(f"W6.{batch}" for batch in BATCHES),
        ("start.cold_s", "start.warm_s"),
    ]
    drawn = matplotlib_figure(width=13, height=6.4)
    drawn.suptitle(
        f"{title_of(result)} on {result['card']} ({result['date'][:10]})",
        x=0.01,
        ha="left",
        fontsize=11,
        fontweight="bold",
    )
    for axis, keys in zip(drawn.subplots(2, 4).ravel(), panels, strict=True):
        _panel(axis, [rows[key] for key in keys if key in rows])
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    legend = [Patch(color=OURS, label="tradewind, this run")]
    legend += [Patch(color=PEER_COLOURS[name], label=f"{name}, recorded") for name in PEERS.get(case_of(result), {})]
    legend.append(Line2D([], [], color=MUST_COLOUR, label="must"))
    drawn.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False, fontsize=8.5)
    drawn.savefig(path)


def _panel(axis: Any, rows: Sequence[Row]) -> None:
    quiet_axis(axis)
    if not rows:
        axis.set_axis_off()
        return
    single = len(rows) == 1
    title = rows[0].title if single else rows[0].title.split(" of ")[0].split(",")[0]
    axis.set_title(f"{title}, {rows[0].unit}", fontsize=9, loc="left")
    names = sorted({name for row in rows for name in row.peers}, reverse=True)
    width = 0.8 / (1 + len(names))
    highest = max([v for row in rows for v in (row.ours, row.must, *row.peers.values()) if v] or [1])
    for place, row in enumerate(rows):
        bars = [(row.ours, OURS), *((row.peers.get(name), PEER_COLOURS[name]) for name in names)]
        for offset, (value, colour) in enumerate(bars):
            if value is None:
                continue
            x = place - 0.4 + width * (offset + 0.5)
            axis.bar(x, value, width=width * 0.92, color=colour)
            axis.text(x, value + highest * 0.01, figure(value), ha="center", va="bottom", fontsize=7 if single else 5)
        if row.must is not None:
            axis.plot([place - 0.42, place + 0.42], [row.must] * 2, color=MUST_COLOUR, linewidth=1.2)
    axis.set_ylim(0, highest * 1.15)
    axis.set_xticks(range(len(rows)))
    labels = [""] if single else [row.key.partition(".")[2].removesuffix("_s") for row in rows]
    axis.set_xticklabels(labels, fontsize=8)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and ends of repeated measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
