"""Which of the things a user asked for cannot be had together: the smallest sets of them, each with the reason.

Knows: what was asked for, and that a decision about less of it can be made again. Refuses to know: any rule; the rules are those that
`resolve` follows, so that there is no second list of them that could be wrong.

      asked for        a  b  c  d  e        refused: "b needs c off"
      drop in turn     -  b  c  -  -        still refused, and neither b nor c can be dropped: {b, c} is minimal
      without it       a  -  -  d  e        decided again, until nothing is refused any more
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from tradewind.config.goals import Goals, Means
from tradewind.config.sizes import option_bytes, show_bytes
from tradewind.contract.errors import LimitError, UserError

Decide = Callable[[Goals], Any]
"""Makes a plan or raises UserError; `resolve` without this module."""

ASKED = tuple(name for name in Goals.__struct_fields__ if name not in ("model", "means"))
"""What can be asked for beside means."""
WORDS = {
    "max_context": ("max_context", "--max-context", "a context of"),
    "memory_limit_bytes": ("memory_limit", "--memory-limit", "memory limit"),
    "ttft_ms": ("ttft_ms", "target ttft"),
    "tpot_ms": ("tpot_ms", "target tpot"),
    "adapters": ("adapters", "--adapter", "--adapter-slots"),
}
"""How a reason names what was asked for, where it is not by the field's own name."""


class Conflict(msgspec.Struct, frozen=True, kw_only=True):
    """Things that were asked for and cannot be had together; without any one of them the others can."""

    asked: tuple[tuple[str, str], ...]
    """(field of Goals or Means, what was asked), sorted. Empty: nothing that was asked for is to blame, model and machine do not fit."""
    reason: str
    """One sentence."""

    @property
    def fields(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.asked)

    def shown(self) -> str:
        """The set for the end of a sentence; not as options, which in a refusal are settings to try."""
        return ", ".join(_word(name, value) for name, value in self.asked)


def conflicts(goals: Goals, decide: Decide) -> tuple[Conflict, ...]:
    """Minimal conflicting sets that have nothing in common; without all of them `decide` succeeds. Empty when it does anyway.

    Costs one decision for each thing asked for and set. Pure as far as `decide` is.
    """
    return tuple(conflict for conflict, _ in _found(goals, decide, _refusal(goals, decide)))


def explained(error: UserError, goals: Goals, decide: Decide) -> UserError:
    """The refusal, of the same kind, made to name every flag that takes part and every further conflict; the same one when it does."""
    found = _found(goals, decide, error)
    if not found or not found[0][0].asked:
        return error
    first, own = found[0]
    said = str(error)
    if not isinstance(error, LimitError) and not all(names(said, name) for name in first.fields):
        # What was asked for beside may have stood in front of the reason: the one for the set alone is about the set. Not where
        # memory is short: the settings that are advised there were tried together with everything else that was asked for.
        said = str(own)
    if not all(names(said, name) for name in first.fields):
        said = f"{said.rstrip('.')}. What cannot be had together: {first.shown()}."
    for conflict, _ in found[1:]:
        if conflict.asked:
            reason = conflict.reason.partition(" Use ")[0]  # advice for one conflict was not tried beside another
            named = all(names(reason, name) for name in conflict.fields)
            besides = reason if named else f"{conflict.shown()}: {reason}"
            said = f"{said.rstrip('.')}. Besides, {besides}"
    return error if said == str(error) else _same_kind(error, said)


def _found(goals: Goals, decide: Decide, error: UserError | None) -> list[tuple[Conflict, UserError]]:
    """The sets, with the error of each alone; `error` is the one of all that was asked for."""
    found: list[tuple[Conflict, UserError]] = []
    left = goals
    while error is not None:
        conflict, own = _smallest(left, error, decide)
        found.append((conflict, own))
        if not conflict.asked:
            break
        left = _without(left, conflict.fields)
        error = _refusal(left, decide)
    return found


def _smallest(goals: Goals, error: UserError, decide: Decide) -> tuple[Conflict, UserError]:
    """Drops one thing after the other for as long as the rest is refused: first those that the error does not name, so that it stays."""
    asked = asked_for(goals)
    for name in sorted(asked, key=lambda name: (names(str(error), name), name)):
        less = _without(goals, {name})
        refused = _refusal(less, decide)
        if refused is not None:
            goals, error = less, refused
    rest = asked_for(goals)
    return Conflict(asked=tuple(sorted((name, str(value)) for name, value in rest.items())), reason=str(error)), error


def asked_for(goals: Goals) -> dict[str, Any]:
    """What was asked for, by field; what has its default was not."""
    plain = Goals(model=goals.model)
    asked = {name: getattr(goals, name) for name in ASKED if getattr(goals, name) != getattr(plain, name)}
    return asked | {
        name: value for name in Means.__struct_fields__ if (value := getattr(goals.means, name)) is not None
    }


def _without(goals: Goals, fields: set[str] | frozenset[str]) -> Goals:
    plain = Goals(model=goals.model)
    means = msgspec.structs.replace(goals.means, **{name: None for name in fields if name in Means.__struct_fields__})
    own = {name: getattr(plain, name) for name in fields if name in ASKED}
    return msgspec.structs.replace(goals, means=means, **own)


def _refusal(goals: Goals, decide: Decide) -> UserError | None:
    try:
        decide(goals)
    except UserError as error:
        return error
    return None


def option(name: str, value: str) -> str:
    """A field as it is written on the command line."""
    word = name.removesuffix("_bytes").replace("_", "-")
    if name == "memory_limit_bytes" and value.isdecimal():
        return f"--{word} {option_bytes(int(value))}"
    if value in ("True", "False"):
        return f"--{word}" if value == "True" else f"--no-{word}"
    return f"--{word} {value}"


def _word(name: str, value: str) -> str:
    if name == "memory_limit_bytes" and value.isdecimal():
        return f"memory_limit {show_bytes(int(value))}"
    if name in ("classes", "tenants"):
        return name
    return f"{name} {({'True': 'on', 'False': 'off'}).get(value, value)}"


def names(text: str, field: str) -> bool:
    """Whether a sentence names a field, or its option."""
    words = (*WORDS.get(field, ()), field, field.replace("_", "-"))
    return any(re.search(rf"(?<![a-z_]){re.escape(word)}(?![a-z_])", text, re.IGNORECASE) for word in words)


def _same_kind(error: UserError, text: str) -> UserError:
    made = type(error).__new__(type(error))
    made.args = (text,)
    return made
