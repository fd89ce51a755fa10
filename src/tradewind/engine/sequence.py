"""One request's life as a state machine.

Knows: the legal transitions and what a state may hold. Refuses to know: when a transition should happen (scheduler).

      WAITING  --admit-->  RUNNING  --drain-->  DRAINING  --pause-->  PAUSED  --requeue-->  WAITING
      WAITING  --block-->  BLOCKED  --wake--->  WAITING                  (or --admit--> RUNNING)
                           RUNNING  --pause-->  PAUSED                   nothing of it flies
      any      ---end--->  DONE                                          nothing of it flies
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from tradewind.cache.lease import PageLease, chunk_keys
from tradewind.cache.radix import Namespace
from tradewind.contract.events import FinishReason
from tradewind.contract.request import Request
from tradewind.contract.step import Ints, TokenLogprobs
from tradewind.engine.accounts import Account


class State(Enum):
    """Where a sequence is; see the table in docs/architecture.md."""

    WAITING = "waiting"
    BLOCKED = "blocked"
    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"
    DONE = "done"


MAY_BECOME: dict[State, frozenset[State]] = {
    State.BLOCKED: frozenset({State.RUNNING, State.WAITING, State.DRAINING, State.DONE}),
    State.DONE: frozenset(),
    State.DRAINING: frozenset({State.PAUSED, State.DONE}),
    State.PAUSED: frozenset({State.WAITING, State.DONE}),
    State.RUNNING: frozenset({State.PAUSED, State.DRAINING, State.DONE}),
    State.WAITING: frozenset({State.BLOCKED, State.RUNNING, State.DONE}),
}


class IllegalTransition(Exception):
    """The scheduler asked for a transition that the table does not have: a bug, never a user's fault."""


class Sequence:
    """One request and what became of it so far. Written by the scheduler only.

    While it runs, its counters live in the scheduler's columns (`Rows`) and are copied here when it leaves its slot; `tokens` may
    lag behind by what the columns still hold.
    """

    __slots__ = (
        "_chunks",
        "account",
        "arrived_s",
        "cached_tokens",
        "computed",
        "epoch",
        "error",
        "finish",
        "first_s",
        "flying",
        "generated",
        "held_pages",
        "known",
        "late",
        "lease",
        "lost_tokens",
        "namespace",
        "need",
        "order",
        "place",
        "preemptions",
        "prompt_logprobs",
        "request",
        "slot",
        "state",
        "tokens",
        "waiters",
        "waits_on",
    )

    def __init__(self, request: Request, *, arrived_s: float, place: int) -> None:
        prompt = len(request.tokens)
        self.request = request
        self.state = State.WAITING
        self.tokens: Ints = np.empty(prompt + min(request.max_tokens, 64), dtype=np.int32)
        """Token buffer, grown when full; the first `known` are certain."""
        self.tokens[:prompt] = request.tokens
        self.known = prompt
        self.computed = 0
        self.flying = 0
        self.generated = 0
        self.slot = -1
        self.epoch = -1
        self.lease: PageLease | None = None
        self.finish: FinishReason | None = None
        self.error: str | None = None
        self.arrived_s = arrived_s
        self.place = place
        """Counts arrivals; breaks ties of the queue's order."""
        self.order = 0.0
        """Its place among those that run; smaller was sooner."""
        self.late = False
        """It cannot meet its target, as was found when it came, and so waits behind those that can."""
        self.first_s: float | None = None
        """When its first token came, where somebody paces it."""
        self.account: Account | None = None
        """Its tenant's, where the queue's policy has accounts."""
        self.preemptions = 0
        self.lost_tokens = 0
        """How many tokens were computed when it was preempted last."""
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.namespace: Namespace = (request.cache_salt, request.adapter)
        self.need: tuple[list[int], list[int]] | None = None
        """Pages wanted at admission, kept by `Admission` while the sequence waits."""
        self.waits_on: Sequence | None = None
        self.held_pages = 0
        """While BLOCKED on another sequence: how many of its pages must be published first."""
        self.waiters: list[Sequence] = []
        self._chunks: list[bytes] = []

    def __repr__(self) -> str:
        return f"<Sequence {self.request.id} {self.state.value} known={self.known} computed={self.computed} slot={self.slot}>"

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.tokens)

    @property
    def capacity(self) -> int:
        """Upper bound of tokens it can ever hold."""
        return len(self.request.tokens) + self.request.max_tokens

    @property
    def positions(self) -> int:
        """Upper bound of positions it can ever compute: those of all its tokens but the last, of which nothing follows. A prompt that
        is pooled is computed to its end."""
        return self.capacity - (self.request.pooling is None)

    def chunks(self, page_tokens: int) -> list[bytes]:
        """Radix keys of every whole page of the known tokens; computed once and continued as tokens come."""
        whole = self.known // page_tokens
        if len(self._chunks) < whole:
            if self.request.image_keys:
                self._chunks = chunk_keys(
                    self.tokens[: whole * page_tokens].tobytes(),
                    page_tokens=page_tokens,
                    images=self.request.image_keys,
                )
            else:
                start = len(self._chunks)
                part = self.tokens[start * page_tokens : whole * page_tokens].tobytes()
                self._chunks.extend(chunk_keys(part, page_tokens=page_tokens))
        return self._chunks

    def append(self, tokens: Ints) -> None:
        """Adds tokens that are certain."""
        end = self.known + len(tokens)
        if end > len(self.tokens):
            grown = np.empty(min(max(end, 2 * len(self.tokens)), max(end, self.capacity)), dtype=np.int32)
            grown[: self.known] = self.tokens[: self.known]
            self.tokens = grown
        self.tokens[self.known : end] = tokens
        self.known = end

    # -- transitions -------------------------------------------------------------------------------------------------

    def _become(self, state: State) -> None:
        if state not in MAY_BECOME[self.state]:
            raise IllegalTransition(f"{self.id}: {self.state.value} may not become {state.value}")
        self.state = state

    def block(self, on: Sequence, *, pages: int) -> None:
        """Waits until another sequence published so many pages, or left."""
        self._become(State.BLOCKED)
        self.waits_on = on
        self.held_pages = pages
        on.waiters.append(self)

    def await_grammar(self) -> None:
        """Waits until its grammar is compiled."""
        self._become(State.BLOCKED)

    def wake(self) -> None:
        """Goes back to the queue, at its old place."""
        self._become(State.WAITING)
        self._unhook()

    def admit(self, lease: PageLease, *, slot: int, epoch: int) -> None:
        """Gets a slot and a lease."""
        self._become(State.RUNNING)
        assert self.lease is None and self.slot < 0
        self.lease, self.slot, self.epoch = lease, slot, epoch

    def drain(self) -> None:
        """Leaves, but keeps slot and pages until the steps that touch them are collected."""
        self._become(State.DRAINING)

    def pause(self) -> None:
        """Was evicted: holds nothing but its tokens; the lease must have been released."""
        self._become(State.PAUSED)
        self._let_go()
        self.preemptions += 1

    def requeue(self) -> None:
        """Waits again, with the tokens generated so far."""
        self._become(State.WAITING)
        self.need = None

    def end(self) -> None:
        """Is over: holds nothing; the lease must have been released."""
        self._become(State.DONE)
        self._unhook()
        self._let_go()

    def _let_go(self) -> None:
        assert self.lease is None or self.lease.released, "a sequence left without releasing its lease"
        self.lease, self.slot, self.computed, self.flying = None, -1, 0, 0

    def _unhook(self) -> None:
        if self.waits_on is not None:
            self.waits_on.waiters.remove(self)
            self.waits_on = None
