"""Room for adapters in goals, plan and ledger: what it takes, that it is told, and how it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.host.plans import LLAMA_8B, SMOLLM2, MiB, machine
from tradewind.config.adapter_files import AdapterFile
from tradewind.config.goals import AdapterRoom, Goals, Means
from tradewind.config.goals_file import parse_goals
from tradewind.config.ledger_adapters import bank_bytes
from tradewind.config.plan import Plan
from tradewind.config.resolve import resolve
from tradewind.contract.errors import LimitError, RequestError, UserError
from tradewind.serving.adapters import AdapterBook, room_for


def planned(room: AdapterRoom | None, *, limit: int | None = None) -> Plan:
    means = Means(max_running=8, max_tokens_per_step=128)
    return resolve(Goals(model="m", adapters=room, memory_limit_bytes=limit, means=means), SMOLLM2, machine())


def file(name: str, rank: int) -> AdapterFile:
    return AdapterFile(folder=Path(name), version="0", rank=rank, alpha=1.0)


def test_banks_by_hand() -> None:
    """Rank 16 of SmolLM2: q, o 576 + 576; k, v 576 + 192; gate, up, down 576 + 1536, for 30 layers; bf16 is 2 bytes."""
    each = 30 * 16 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536))
    assert bank_bytes(SMOLLM2, AdapterRoom(slots=8, rank=16), exact=False) == 8 * each * 2
    assert bank_bytes(SMOLLM2, AdapterRoom(slots=1, rank=16), exact=True) == each * 4
    assert bank_bytes(SMOLLM2, AdapterRoom(slots=1, rank=17), exact=True) == 2 * each * 4, "whole vectors"
    # The published adapters of rank 16 of Llama 3.1 8B have 41,943,040 parameters.
    assert bank_bytes(LLAMA_8B, AdapterRoom(slots=1, rank=16), exact=False) == 2 * 41_943_040


def test_the_plan_tells_the_room_and_what_it_takes() -> None:
    alone, plan = planned(None), planned(AdapterRoom(slots=3, rank=8))
    assert alone.adapters is None and "adapters" not in {line.name for line in alone.ledger}
    assert plan.adapters == AdapterRoom(slots=3, rank=8)
    (line,) = [line for line in plan.ledger if line.name == "adapters"]
    assert line.bytes >= bank_bytes(SMOLLM2, plan.adapters, exact=False)
    assert "3 adapters x rank 8 in bf16" in line.how
    assert [reason.value for reason in plan.reasons if reason.choice == "adapters"] == ["3 of rank 8"]


def test_too_much_room_is_refused_with_less() -> None:
    with pytest.raises(LimitError, match=r"\(adapters .* --adapter-slots (\d+)") as caught:
        planned(AdapterRoom(slots=100), limit=400 * MiB)
    slots = int(str(caught.value).partition("--adapter-slots ")[2].split()[0])
    assert 1 < slots < 100
    planned(AdapterRoom(slots=slots), limit=400 * MiB)
    for room, told in ((AdapterRoom(slots=0), "adapter slots is 0"), (AdapterRoom(rank=513), "adapter rank is 513")):
        with pytest.raises(UserError, match=told):
            planned(room)


def test_a_file_of_goals_makes_room() -> None:
    assert parse_goals('model = "m"').adapters is None
    assert parse_goals('model = "m"\n[adapters]\nslots = 4').adapters == AdapterRoom(slots=4, rank=16)
    assert parse_goals('model = "m"\n[adapters]\nrank = 64').adapters == AdapterRoom(slots=8, rank=64)
    with pytest.raises(UserError, match=r"line 3: adapters.slot is not known .* did you mean slots"):
        parse_goals('model = "m"\n[adapters]\nslot = 4')
    with pytest.raises(UserError, match=r"line 3: adapters.rank is 0; it must be a whole number"):
        parse_goals('model = "m"\n[adapters]\nrank = 0')


def test_room_follows_what_is_given() -> None:
    two = [file("a", 4), file("b", 32)]
    stated = AdapterRoom(slots=5, rank=64)
    assert room_for([]) is None
    assert room_for(two) == AdapterRoom(slots=2, rank=32)
    assert room_for(two, more=True) == AdapterRoom(slots=8, rank=32)
    assert room_for([file("a", 4)], more=True) == AdapterRoom(slots=8, rank=16)
    assert room_for([], more=True) == AdapterRoom()
    assert room_for([], slots=3) == AdapterRoom(slots=3, rank=16)
    assert room_for(two, slots=1, rank=40) == AdapterRoom(slots=1, rank=40)
    assert room_for([], stated=stated) == room_for(two, stated=stated) == stated
    assert room_for(two, rank=32, stated=stated) == AdapterRoom(slots=5, rank=32)


def test_names_of_a_book() -> None:
    book = AdapterBook(largest_rank=16, taken=("own",))
    book.take("a", file("x", 16))
    book.take("b", file("x", 4))
    assert book.names == ("a", "b") and book.keys == {"a": "x@0", "b": "x@0"}
    for name in ("", "own", "a\n", "x" * 201):
        with pytest.raises(UserError, match="an adapter cannot be called"):
            book.take(name, file("x", 1))
    with pytest.raises(UserError, match=r"'c' has rank 17; the largest that this engine has room for is 16"):
        book.take("c", file("x", 17))
    book.unload("a")
    with pytest.raises(RequestError, match="there is no adapter 'a'; loaded are: b"):
        book.unload("a")
