"""An Executor that says what a script file says, fast enough to load a server with, and fails where the file says so.

Knows: the tokens to force, delays and faults. Refuses to know: pages and the scheduler's contract; `ScriptedExecutor` checks those, at a
price per token that a load test cannot pay.

      a row's first new token is its answer's token number   start + count - drafts - prompt
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tradewind.contract.errors import EngineDeadError
from tradewind.contract.step import Enter, Floats, Ints, RowLogprobs, Step, StepResult, TokenLogprobs, Wants
from tradewind.simulate import made_up
from tradewind.simulate.script_file import Answers, Drafts, Fault, Forced, ScriptFile

MADE_UP_LOGPROB = -0.125
NAN = "logits are not finite"


class ForcedExecutor:
    """Implements `contract.Executor` on the real clock. Its one owner is the engine loop; `throw` may be called from any thread."""

    def __init__(self, script: ScriptFile, answers: Answers, *, slots: int, vocab_size: int, end_token: int) -> None:
        """`end_token` follows each answer that is not repeated."""
        self._answers = answers
        self._vocab_size, self._end_token = vocab_size, end_token
        self._step_s, self._prompt_token_s = script.step_ms / 1e3, script.prompt_token_ms / 1e3
        self._drafts: Drafts | None = script.drafts
        self._by_step: dict[int, list[Fault]] = {}
        for fault in script.faults:
            assert fault.at_step is not None
            self._by_step.setdefault(fault.at_step, []).append(fault)
        self._thrown: deque[Fault] = deque()
        self._spent: set[int] = set()
        """Faults at a token that have happened and happen only once, by identity."""
        self._said: list[Forced] = [answers.default] * slots
        self._enter: list[Enter | None] = [None] * slots
        self._table: Ints = np.full((slots, 16), end_token, np.int32)
        self._length: Ints = np.zeros(slots, np.int32)
        self._repeats: npt.NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self._prompt: Ints = np.zeros(slots, np.int32)
        self._rounds: Ints = np.zeros(slots, np.int32)
        self._slow: npt.NDArray[np.float64] = np.zeros(slots)
        self._mask_s: npt.NDArray[np.float64] = np.zeros(slots)
        self._masking = False
        """Whether a mask has ever taken any time."""
        self._special: npt.NDArray[np.bool_] = np.zeros(slots, np.bool_)
        """Rows that are looked at one by one: with faults or logprobs."""
        self._flying: deque[tuple[StepResult, float, list[Fault]]] = deque()
        self._due_s = 0.0
        self.waits_on = ""
        """What it waits for besides computing; read by the loop, from any thread."""

    # -- Executor

    def submit(self, step: Step) -> None:
        for enter in step.enter:
            self._take(enter)
        slot = step.slot
        first = step.start + step.count - step.drafts - self._prompt[slot]
        samples = (step.wants == Wants.LAST) | (step.wants == Wants.ALL)
        number = samples.astype(np.int32)
        if self._drafts is not None:
            pattern = np.array(self._drafts.accepted, dtype=np.int32)
            guessing = step.drafts > 0
            right = np.minimum(pattern[self._rounds[slot] % len(pattern)], step.drafts)
            number += np.where(guessing, right, 0)
            self._rounds[slot] += guessing
        offset = np.concatenate((np.zeros(1, np.int32), np.cumsum(number, dtype=np.int32)))
        row = np.repeat(np.arange(len(slot)), number)
        at = np.arange(len(row), dtype=np.int32) - offset[row] + first[row]
        tokens = self._tokens(slot[row], at)
        logprobs: dict[int, RowLogprobs] = {}
        failed: dict[int, str] = {}
        faults = self._by_step.pop(step.number, [])
        special = np.flatnonzero(self._special[slot])
        for place in special.tolist():
            self._special_row(
                step, place, int(first[place]), tokens[offset[place] : offset[place + 1]], logprobs, failed, faults
            )
        if failed:
            keep = ~np.isin(row, list(failed))
            number[list(failed)] = 0
            tokens, offset = tokens[keep], np.concatenate((np.zeros(1, np.int32), np.cumsum(number, dtype=np.int32)))
        while self._thrown:
            faults.append(self._thrown.popleft())
        prompt_tokens = int(step.count[step.start < self._prompt[slot]].sum()) if self._prompt_token_s else 0
        takes = self._step_s + prompt_tokens * self._prompt_token_s
        if len(slot):
            takes = max(takes, float(self._slow[slot].max()))
        masks: dict[int, float] = {}
        if self._masking:
            mask_s = np.where(samples, self._mask_s[slot], 0.0)
            masks = {place: float(mask_s[place]) for place in np.flatnonzero(mask_s).tolist()}
        grammar_s = sum(masks.values())
        draft_s = self._drafts.make_ms / 1e3 if self._drafts is not None and step.drafts.any() else 0.0
        takes += grammar_s + draft_s
        self._due_s = max(self._due_s, time.monotonic()) + takes
        result = StepResult(
            number=step.number,
            slot=slot,
            epoch=step.epoch,
            offset=offset,
            tokens=tokens,
            logprobs=logprobs,
            hidden={}
            if not (pooled := step.wants == Wants.HIDDEN).any()
            else self._hidden(step, np.flatnonzero(pooled)),
            failed=failed,
            device_s=takes,
            grammar_s=grammar_s,
            grammar_rows=masks,
            draft_s=draft_s,
        )
        self._flying.append((result, self._due_s, faults))

    def collect(self) -> StepResult:
        result, due_s, faults = self._flying.popleft()
        wait = due_s - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        for fault in faults:
            self._happen(fault, result.number)
        return result

    def close(self) -> None:
        self._flying.clear()

    # -- faults

    def _happen(self, fault: Fault, step: int) -> None:
        if fault.do == "disk":
            self.waits_on = f"disk: a page of step {step} is being read"
            time.sleep(fault.seconds)
            self.waits_on = ""
        elif fault.do == "stall":
            time.sleep(fault.seconds)
        elif fault.do == "die":
            raise EngineDeadError(f"the scripted device died in step {step}")
        elif fault.do == "bug":
            raise RuntimeError(f"a scripted bug in step {step}")
        elif fault.do == "oom":
            raise MemoryError(f"step {step} needs 3.0 GiB more than there are, says the script")
        elif fault.do == "exit":
            os._exit(3)
        elif fault.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    def throw(self, do: str, seconds: float) -> None:
        """The next step has this fault; names that are not known are ignored."""
        if do in ("stall", "disk", "die", "bug", "oom", "exit", "kill"):
            self._thrown.append(Fault(do=do, seconds=seconds))  # type: ignore[arg-type]

    # -- inside

    def _take(self, enter: Enter) -> None:
        slot = enter.slot
        said = self._answers.of(tuple(enter.tokens[: enter.prompt_tokens].tolist()))
        length = len(said.tokens)
        if length > self._table.shape[1]:
            wider = np.full((len(self._table), max(length, 2 * self._table.shape[1])), self._end_token, np.int32)
            wider[:, : self._table.shape[1]] = self._table
            self._table = wider
        self._table[slot, :length] = said.tokens
        self._length[slot], self._repeats[slot] = length, said.repeat
        self._prompt[slot] = enter.prompt_tokens
        self._rounds[slot] = 0
        self._slow[slot] = said.step_s
        self._mask_s[slot] = said.mask_s if enter.grammar is not None else 0.0
        self._masking |= bool(self._mask_s[slot] > 0)
        sampling = enter.sampling
        self._special[slot] = bool(said.faults) or sampling.logprobs is not None or sampling.prompt_logprobs is not None
        self._said[slot], self._enter[slot] = said, enter

    def _hidden(self, step: Step, rows: npt.NDArray[np.intp]) -> dict[int, Floats]:
        """Made-up embeddings of the prompts that end in this step."""
        entered = {row: self._enter[int(step.slot[row])] for row in rows.tolist()}
        return {row: made_up.embedding(enter) for row, enter in entered.items() if enter is not None}

    def _tokens(self, slot: Ints, at: Ints) -> Ints:
        length = self._length[slot]
        inside = at < length
        place = np.where(self._repeats[slot], at % np.maximum(length, 1), np.where(inside, at, 0))
        return np.where(inside | self._repeats[slot], self._table[slot, place], np.int32(self._end_token)).astype(
            np.int32
        )

    def _special_row(
        self,
        step: Step,
        place: int,
        first: int,
        tokens: Ints,
        logprobs: dict[int, RowLogprobs],
        failed: dict[int, str],
        faults: list[Fault],
    ) -> None:
        slot = int(step.slot[place])
        said, enter = self._said[slot], self._enter[slot]
        assert enter is not None
        for fault in said.faults:
            assert fault.at_token is not None
            if first <= fault.at_token < first + len(tokens) and id(fault) not in self._spent:
                if fault.once:
                    self._spent.add(id(fault))
                if fault.do == "nan":
                    failed[place] = NAN
                    return
                faults.append(fault)
        sampling = enter.sampling
        sampled: tuple[TokenLogprobs, ...] = ()
        prompt: tuple[TokenLogprobs, ...] = ()
        if sampling.logprobs is not None:
            sampled = tuple(
                self._spoken(token, sampling.logprobs, said, first + index)
                for index, token in enumerate(tokens.tolist())
            )
        if sampling.prompt_logprobs is not None and step.wants[place] in (Wants.ALL, Wants.ALL_NO_SAMPLE):
            start = int(step.start[place])
            last = min(start + int(step.count[place]) + 1, enter.prompt_tokens)
            known = enter.tokens[start + 1 : last].tolist() if start < enter.prompt_tokens else []
            prompt = tuple(self._spoken(token, sampling.prompt_logprobs, None, 0) for token in known)
        if sampled or prompt:
            logprobs[place] = RowLogprobs(sampled=sampled, prompt=prompt)

    def _spoken(self, token: int, wanted: int, said: Forced | None, at: int) -> TokenLogprobs:
        """The script's logprobs at this place of the answer, or made-up ones in which the forced token is the best."""
        given: Sequence[tuple[int, float]] = ()
        if said is not None and said.logprobs:
            at = at % len(said.tokens) if said.repeat else at
            given = said.logprobs[at] if at < len(said.logprobs) else ()
        if not given:
            given = [((token + i) % self._vocab_size, MADE_UP_LOGPROB - i) for i in range(max(1, wanted))]
        # A token that is not among the given ones is one place and one unit behind the last of them.
        rank = next((place for place, (other, _) in enumerate(given, 1) if other == token), len(given) + 1)
        logprob = given[rank - 1][1] if rank <= len(given) else given[-1][1] - 1.0
        best = given[:wanted]
        return TokenLogprobs(
            token=token,
            logprob=logprob,
            rank=rank,
            top_ids=tuple(other for other, _ in best),
            top_logprobs=tuple(value for _, value in best),
        )


class AnyGrammar:
    """contract.GrammarGate of a device whose tokens are forced: every grammar is let in, and none changes anything."""

    def open(self, text: str) -> None:
        """See GrammarGate."""

    def ready(self, text: str) -> bool:
        """See GrammarGate."""
        return True

    def close(self, text: str) -> None:
        """See GrammarGate."""

    def wait(self, timeout_s: float) -> None:
        """See GrammarGate."""
