"""Refusals name the smallest set of flags that cannot be had together, and the table of techniques agrees with what is refused."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.host.plans import CARDS, SMOLLM2, SMOLLM2_BF16, GiB, MiB, gpu, machine
from tests.host.test_resolve import pin
from tradewind.config.card import ModelCard
from tradewind.config.choices import WORDS
from tradewind.config.conflicts import asked_for, conflicts, names, option
from tradewind.config.goals import Goals, Means
from tradewind.config.hardware import Hardware
from tradewind.config.resolve import decided, resolve
from tradewind.config.techniques import NOT_TECHNIQUES, TECHNIQUES
from tradewind.contract.errors import LimitError, UserError


def goals_of(**pins: Any) -> Goals:
    own = {name: pins.pop(name) for name in ("scenario", "memory_limit_bytes", "max_context") if name in pins}
    return Goals(model="m", means=Means(**pins), **own)


def found(goals: Goals, card: ModelCard = SMOLLM2, hardware: Hardware | None = None) -> list[frozenset[str]]:
    hardware = hardware or machine()
    return [one.fields for one in conflicts(goals, lambda asked: decided(asked, card, hardware, missing={}))]


@pytest.mark.parametrize(
    ("card", "pins", "sets"),
    [
        (SMOLLM2, {}, []),
        (SMOLLM2, {"backend": "plain", "tape": True, "policy": "fair"}, [{"backend", "tape"}]),
        (SMOLLM2, {"kv_format": "fp8", "tape": True, "threads": 2}, [{"kv_format"}]),
        (SMOLLM2, {"kv_format": "fp8", "graphs": True}, [{"graphs"}, {"kv_format"}]),
        (SMOLLM2, {"max_running": 600, "max_tokens_per_step": 512}, [{"max_running", "max_tokens_per_step"}]),
        (SMOLLM2_BF16, {"quantization": "none", "compute": "int8"}, [{"quantization", "compute"}]),
        (SMOLLM2, {"memory_limit_bytes": 50 * MiB, "policy": "fair"}, [{"memory_limit_bytes"}]),
        (SMOLLM2, {"memory_limit_bytes": 300 * MiB, "max_context": 8192, "overlap": False}, [{"memory_limit_bytes", "max_context"}]),
        (SMOLLM2, {"max_context": 9000, "page_tokens": 20}, [{"max_context"}, {"page_tokens"}]),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, dict) else "",
)  # fmt: skip
def test_the_smallest_sets_are_found(card: ModelCard, pins: dict[str, Any], sets: list[set[str]]) -> None:
    assert sorted(map(sorted, found(goals_of(**pins), card))) == sorted(map(sorted, sets))


def test_all_conflicts_are_said_at_once() -> None:
    with pytest.raises(UserError) as refusal:
        resolve(goals_of(kv_format="fp8", graphs=True, page_tokens=20), SMOLLM2, machine())
    text = str(refusal.value)
    assert text.count("Besides, ") == 2
    assert all(names(text, field) for field in ("kv_format", "graphs", "page_tokens"))


def test_flags_that_only_take_part_are_named_too() -> None:
    """The reason speaks of memory; that the pinned number of slots is what needs it stands behind."""
    pins: dict[str, Any] = {
        "memory_limit_bytes": 400 * MiB,
        "max_running": 4096,
        "max_tokens_per_step": 8192,
        "max_context": 4096,
    }
    with pytest.raises(LimitError) as refusal:
        resolve(goals_of(**pins), SMOLLM2, machine())
    (one,) = conflicts(goals_of(**pins), lambda asked: decided(asked, SMOLLM2, machine(), missing={}))
    assert "memory_limit_bytes" in one.fields
    assert len(one.fields) > 1
    assert all(names(str(refusal.value), field) for field in one.fields)
    assert "What cannot be had together: " in str(refusal.value)


def test_where_nothing_asked_for_is_to_blame_nothing_is_named() -> None:
    small = machine(total=GiB, free=128 * MiB)
    (one,) = conflicts(goals_of(policy="fair"), lambda asked: decided(asked, CARDS[2], small, missing={}))
    assert one.asked == ()
    with pytest.raises(LimitError, match="weights"):
        resolve(goals_of(policy="fair"), CARDS[2], small)


def test_options_are_written_as_on_the_command_line() -> None:
    assert option("memory_limit_bytes", str(5 * MiB)) == "--memory-limit 5MiB"
    assert option("prefix_cache", "False") == "--no-prefix-cache"
    assert option("kv_format", "fp8") == "--kv-format fp8"
    assert names("use --kv-format fp8", "kv_format")
    assert not names("threads", "tape")


BOOLS = st.booleans()
MAKE_ROOM = {"backend", "compute", "kv_format", "quantization"}
"""Flags that decide how large weights and pages are, so that without one of them more may be refused."""


def any_of(field: str) -> st.SearchStrategy[Any]:
    """Values of a switch on whatever machine, some of them out of range."""
    if field in WORDS:
        return st.sampled_from(WORDS[field])
    if field in ("max_tokens_per_step", "max_running"):
        return st.integers(1, 5000) | st.sampled_from([-1, 0, 1 << 40])
    if field == "page_tokens":
        return st.sampled_from([0, 16, 20, 48, 64, 1000])
    if field == "threads":
        return st.integers(-1, 64)
    return BOOLS


FLAGS = st.builds(
    Goals,
    model=st.just("m"),
    scenario=st.sampled_from(["balanced", "latency", "memory", "throughput"]),
    memory_limit_bytes=pin(st.integers(1 << 26, 1 << 36)),
    max_context=pin(st.integers(1, 200_000)),
    means=st.builds(
        Means, **{name: st.none() | any_of(name) for name in Means.__struct_fields__ if name != "load_format"}
    ),
)
MACHINES = st.sampled_from([machine(), machine(features=("avx2",), cores=1), gpu(), gpu(features=("sm_80",))])


@settings(max_examples=250, deadline=None)
@given(goals=FLAGS, card=st.sampled_from(CARDS), hardware=MACHINES)
def test_any_flags_run_or_are_refused_with_the_smallest_set(goals: Goals, card: ModelCard, hardware: Hardware) -> None:
    def decide(asked: Goals) -> object:
        return decided(asked, card, hardware, missing={})

    sets = conflicts(goals, decide)
    try:
        resolve(goals, card, hardware)
    except UserError as error:
        text = str(error)
        assert sets
        assert "\n" not in text
    else:
        assert not sets
        return
    plain = Goals(model="m")

    def less(fields: frozenset[str]) -> Goals:
        means = msgspec.structs.replace(goals.means, **{n: None for n in fields if n in Means.__struct_fields__})
        own = {n: getattr(plain, n) for n in fields if n not in Means.__struct_fields__}
        return msgspec.structs.replace(goals, means=means, **own)

    everything = frozenset(asked_for(goals))
    try:
        resolve(less(everything), card, hardware)
        fits = True
    except UserError:
        fits = False  # some flags (int8) make room, so that less of them is not always easier to have
    for one in sets:
        assert all(names(text, field) for field in one.fields), (one, text)
        with pytest.raises(UserError):  # the set alone is refused ...
            resolve(less(everything - one.fields), card, hardware)
        for field in one.fields if fits else ():  # ... and no smaller one is
            rest = one.fields - {field}
            try:
                resolve(less(everything - rest), card, hardware)
            except LimitError:  # less of what makes room is not easier to have; nothing of it may be missing
                if MAKE_ROOM & everything <= rest:
                    raise
    if all(one.asked for one in sets):
        resolve(less(frozenset().union(*(one.fields for one in sets))), card, hardware)


# ------------------------------------------------------------------------------------------------- the technique table

ALONE = [(card, hardware) for card in CARDS for hardware in (machine(), gpu())]


def places(pins: dict[str, Any]) -> set[str]:
    """Kinds of machines on which some model can have these pins."""
    out = set()
    for card, hardware in ALONE:
        try:
            decided(goals_of(**pins), card, hardware, missing={})
        except UserError:
            continue
        out.add(hardware.kind)
    return out


SWITCHED = {name: row for name, row in TECHNIQUES.items() if row.on}


@pytest.mark.parametrize("name", sorted(SWITCHED))
def test_the_table_says_what_conflicts_and_what_is_needed(name: str) -> None:
    """Two techniques conflict when one switch would have to stand in two positions, or no machine and model takes both."""
    row = SWITCHED[name]
    found = {
        other
        for other, theirs in SWITCHED.items()
        if other != name
        and (
            any(row.on[pin] != theirs.on[pin] for pin in set(row.on) & set(theirs.on))
            or not places({**row.on, **theirs.on})
        )
    }
    assert set(row.conflicts) == found
    where = places(row.on)
    assert where, f"{name} can be had nowhere"
    if where == {"cuda"}:
        assert any("a GPU" in need for need in row.prerequisites), f"{name} needs a GPU and does not say so"


@pytest.mark.parametrize("name", sorted(TECHNIQUES))
def test_every_row_is_whole(name: str) -> None:
    row = TECHNIQUES[name]
    assert row.goals_helped or row.goals_hurt, "it has to matter to some goal"
    assert list(row.goals_helped) == sorted(set(row.goals_helped))
    assert list(row.goals_hurt) == sorted(set(row.goals_hurt))
    for pins in (row.on, row.off):
        assert set(pins) <= set(Means.__struct_fields__)
        assert not pins or any(f"means.{pin}" in row.switch for pin in pins)
    assert row.on != row.off or not row.on


@pytest.mark.parametrize("field", sorted(set(Means.__struct_fields__) - set(NOT_TECHNIQUES)))
def test_every_position_of_a_switch_is_in_the_table(field: str) -> None:
    """A new value of a switch (a policy, a format) without a row fails the build."""
    known = {row.on[field] for row in TECHNIQUES.values() if field in row.on}
    known |= {row.off[field] for row in TECHNIQUES.values() if field in row.off}
    for value in WORDS.get(field, ()):
        switches = (re.sub(r"[(),;]", " ", row.switch) for row in TECHNIQUES.values())
        said = any(f"means.{field}" in words and value in words.split() for words in switches)
        assert value in known or said, f"no technique is {field} {value}"
