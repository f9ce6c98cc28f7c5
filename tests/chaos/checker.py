"""The checker: follows what a client did and saw, and finds what cannot have happened to a hub that keeps its word.

It holds a model of every row's ``ChainEnv``. Each outcome must be the one that exactly one more step or reset of the
row's incarnation gives; or a truncation that says that the incarnation has ended, after which a new one begins with a
reset. A request that got no answer may have been carried out, once, or not at all.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from chaos.chain_env import HEAD, RESET, UNOWNED, advance, reward_of, token

FINDINGS_MAX = 10  # the rest is counted
TRAIL = 4  # requests before a finding that it tells of
# What is wrong with an outcome:
LOST = "lost"  # of what was answered before, something has not happened
DOUBLED = "doubled"  # something happened more than once
REORDERED = "reordered"  # other actions, or in another order
TORN = "torn"  # an observation of two moments
CROSSED = "crossed"  # another row's
BROKEN = "broken"  # reward, flags or infos are not those of the step
HUNG = "hung"  # no answer at all

Head = tuple[int, int, int, int]


class Batch(NamedTuple):
    """What one step returned."""

    observations: Any
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray
    infos: Mapping[str, Any]


@dataclass(frozen=True)
class State:
    """Where one incarnation stands."""

    head: Head
    resets: int
    steps: int = 0
    owes_reset: bool = False  # its episode has ended, and its next step is the reset

    def reset(self) -> State:
        row, incarnation, counter, link = self.head
        return State((row, incarnation, counter + 1, advance(link, RESET)), self.resets + 1)

    def step(self, row: int, number: int, length: int) -> State:
        """After the action ``[row, number]``."""
        _, incarnation, counter, link = self.head
        steps = self.steps + 1
        head = (row, incarnation, counter + 1, advance(link, token(row, number)))
        return State(head, self.resets, steps, steps >= length)


@dataclass
class Chain:
    """What is known of one row.

    Attributes:
        candidates: where its incarnation may stand; more than one only after requests without an answer.
        unanswered: the numbers of these requests, None for a reset.
        down: it was truncated since its worker died, and no new incarnation was seen yet.
        head: of the last observation that was returned.
    """

    candidates: list[State] = field(default_factory=list)
    unanswered: list[int | None] = field(default_factory=list)
    down: bool = False
    head: Head | None = None


@dataclass
class Tally:
    """What was seen so far, over all rows."""

    acknowledged: int = 0  # steps of single envs
    truncations: Counter[str] = field(default_factory=Counter)  # by cause, the first of each death
    wrong: Counter[str] = field(default_factory=Counter)  # by kind
    findings: list[str] = field(default_factory=list)


class Checker:
    """Follows the rows of one client, over all its sessions."""

    def __init__(self, rows: int, length: int = 50) -> None:
        self.tally = Tally()
        self._rows = rows
        self._length = length
        self._owners: dict[int, int] = {}  # the row of every incarnation that was seen
        self._trail: deque[tuple[Any, ...]] = deque(maxlen=TRAIL)
        self.session()

    def session(self) -> None:
        """A new session begins: what stood in the old one has ended, and must not come back."""
        self._chains = [Chain() for _ in range(self._rows)]

    def reset(self, observations: np.ndarray, infos: Mapping[str, Any]) -> None:
        """A reset returned this."""
        self._trail.append(("reset", "", _heads(observations), infos))
        self._check_tails(observations)
        for row, head in enumerate(_heads(observations)):
            chain = self._chains[row]
            if chain.candidates and head[1] == chain.candidates[0].head[1]:
                self._match(row, chain, [state.reset() for state in chain.candidates], head)
            else:
                self._begin(row, chain, head, None)

    def step(self, numbers: Sequence[int], batch: Batch) -> None:
        """A step with the actions ``[row, numbers[row]]`` returned this."""
        self._trail.append(("step", numbers, _heads(batch.observations), batch.infos))
        self._check_tails(batch.observations)
        failed = _mask(batch.infos, "env_failure", self._rows)
        invalid = _mask(batch.infos, "invalid_transition", self._rows)
        for row, head in enumerate(_heads(batch.observations)):
            chain = self._chains[row]
            if failed[row] or invalid[row]:
                self._stand_in(row, chain, head, batch)
            elif chain.down or (chain.unanswered and head[1] not in self._owners):
                self._expect_last(row, batch, self._begin(row, chain, head, numbers[row]))
            else:
                self._advance(row, chain, numbers[row], head, batch)
        self.tally.acknowledged += self._rows

    def unanswered(self, numbers: Sequence[int | None]) -> None:
        """A step was begun, or a reset if the numbers are None, and nobody knows whether it was carried out."""
        for row, chain in enumerate(self._chains):
            after = [self._stepped(state, row, numbers[row])[0] for state in chain.candidates]
            chain.candidates = list(dict.fromkeys([*chain.candidates, *after]))
            chain.unanswered.append(numbers[row])

    def find(self, kind: str, row: int, text: str) -> None:
        """Count what is wrong, and tell of it."""
        self.tally.wrong[kind] += 1
        if len(self.tally.findings) < FINDINGS_MAX:
            trail = [f"{what} {told}: {heads[row]} {_failures(infos)}" for what, told, heads, infos in self._trail]
            self.tally.findings.append(
                f"{kind}, row {row}, after {self.tally.acknowledged} steps: {text}; before: {'; '.join(trail)}"
            )

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def _stand_in(self, row: int, chain: Chain, head: Head, batch: Batch) -> None:
        """The hub finished the step of a worker that is dead, or of an env that is not rebuilt yet."""
        if head not in (chain.head, *(state.head for state in chain.candidates)):
            self.find(LOST, row, f"truncated with {head} instead of the last observation {chain.head}")
        self._expect_outcome(row, batch, 0.0, False, True)
        if not _mask(batch.infos, "invalid_transition", self._rows)[row]:
            self.find(BROKEN, row, "a failure that is not marked as an invalid transition")
        if not chain.down:
            failures = batch.infos.get("env_failure")
            known = failures is not None and failures[row] is not None
            self.tally.truncations[str(failures[row]["cause"]) if known else "unsaid"] += 1
        chain.down, chain.head, chain.candidates = True, head, []

    def _advance(self, row: int, chain: Chain, number: int, head: Head, batch: Batch) -> None:
        if not chain.candidates:
            self.find(BROKEN, row, "stepped before it was reset")
            return
        if chain.candidates[0].owes_reset and head[1] not in self._owners:
            self._begin(row, chain, head, number)  # it died between two episodes, of which neither was cut short
            self._expect_outcome(row, batch, 0.0, False, False)
            return
        outcomes = [self._stepped(state, row, number) for state in chain.candidates]
        state = self._match(row, chain, [state for state, _ in outcomes], head)
        for after, last in outcomes:
            if after is state:
                self._expect_last(row, batch, last)

    def _stepped(self, state: State, row: int, number: int | None) -> tuple[State, State | None]:
        """The state after one more step, and the one that its reward and flags are of, which a reset has not."""
        if number is None or state.owes_reset:
            return state.reset(), None
        last = state.step(row, number, self._length)
        return last, last

    def _expect_last(self, row: int, batch: Batch, last: State | None) -> None:
        if last is None:
            self._expect_outcome(row, batch, 0.0, False, False)
        else:
            odd = last.resets % 2 == 1
            reward, ended = reward_of(last.head[3]), last.owes_reset
            self._expect_outcome(row, batch, reward, ended and odd, ended and not odd)

    def _expect_outcome(self, row: int, batch: Batch, *wanted: Any) -> None:
        found = (float(batch.rewards[row]), bool(batch.terminations[row]), bool(batch.truncations[row]))
        if found != wanted:
            self.find(BROKEN, row, f"reward and flags {found} instead of {wanted}")

    # --- chains -------------------------------------------------------------------------------------------------------

    def _begin(self, row: int, chain: Chain, head: Head, number: int | None) -> State | None:
        """The row shows an incarnation that it did not show before; returns whose the reward and the flags are.

        That one has seen nothing but resets, and what of the requests without an answer came after its first.
        """
        owner = self._owners.get(head[1])
        possible = list(self._beginnings(row, chain, head[1], number))
        for state, last in possible:
            if owner is None and state.head == head:
                self._adopt(row, chain, state)
                return last
        if owner is not None and owner != row:
            self.find(CROSSED, row, f"shows {head}, an incarnation of row {owner}")
        elif owner is not None:
            self.find(LOST, row, f"shows {head}, of an incarnation that had ended")
        else:
            self.find(DOUBLED, row, f"begins with {head}, which has seen more than a reset")
        self._adopt(row, chain, replace(possible[0][0], head=head))
        return None

    def _beginnings(
        self, row: int, chain: Chain, incarnation: int, number: int | None
    ) -> Iterator[tuple[State, State | None]]:
        """Where a new incarnation may stand after this request, and whose reward and flags it has then."""
        fresh = State((UNOWNED, incarnation, 0, 0), 0).reset()
        yield fresh, None
        if number is None:  # the hub may have reset it for a step, which was not to be, before it was reset by this
            yield fresh.reset(), None
        for begun in range(len(chain.unanswered)):
            state: State = fresh
            last: State | None = None
            for each in [*chain.unanswered[begun + 1 :], number]:
                state, last = self._stepped(state, row, each)
            yield state, last

    def _match(self, row: int, chain: Chain, expected: list[State], head: Head) -> State:
        """The one of the expected states that the row shows; where it shows none, it goes on from what it shows."""
        for state in expected:
            if state.head == head:
                self._adopt(row, chain, state)
                return state
        self.find(self._difference(row, expected[0].head, head), row, f"shows {head} instead of {expected[0].head}")
        anew = State((UNOWNED, head[1], 0, 0), 0).reset()
        state = anew if head == anew.head else replace(expected[0], head=head)
        self._adopt(row, chain, state)
        return state

    def _adopt(self, row: int, chain: Chain, state: State) -> None:
        self._owners.setdefault(state.head[1], row)
        chain.candidates, chain.head, chain.down, chain.unanswered = [state], state.head, False, []

    def _difference(self, row: int, expected: Head, head: Head) -> str:
        if head[1] != expected[1]:
            return CROSSED if self._owners.get(head[1], row) != row else LOST
        if head[0] not in (row, UNOWNED):
            return CROSSED
        if head[2] != expected[2]:
            return DOUBLED if head[2] > expected[2] else LOST
        return REORDERED

    def _check_tails(self, observations: np.ndarray) -> None:
        whole = (observations[:, HEAD:] == observations[:, 2:3]).all(axis=1)
        for row in np.flatnonzero(~whole).tolist():
            parts = np.unique(observations[row, HEAD:])[:4].tolist()
            self.find(TORN, row, f"step {observations[row, 2]}, and parts of {parts}")


def _heads(observations: np.ndarray) -> list[Head]:
    return [tuple(head) for head in observations[:, :HEAD].tolist()]


def _mask(infos: Mapping[str, Any], name: str, rows: int) -> Any:
    return infos.get(f"_{name}", [False] * rows)


def _failures(infos: Mapping[str, Any]) -> str:
    return ", ".join(str(failure) for failure in infos.get("env_failure", ()) if failure is not None)
