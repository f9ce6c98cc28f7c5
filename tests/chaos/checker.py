"""The checker: follows what a trainer did and saw, and finds what cannot have happened to a hub that keeps its word.

It holds a model of every row's ``ChainEnv``. Each outcome must be the one that exactly one more step or reset of the
row's incarnation gives; or a truncation that says that the incarnation has ended, after which a new one begins with a
reset. A request that got no answer may have been carried out, once, or not at all.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from chaos.chain_env import HEAD, RESET, UNOWNED, advance, reward_of, token

NEXT_STEP, SAME_STEP, DISABLED = "NextStep", "SameStep", "Disabled"
FINDINGS_MAX = 10  # the rest is counted
TRAIL = 4  # requests before a finding that it tells of

Head = tuple[int, int, int, int]


class Kind(enum.Enum):
    """What is wrong with an outcome."""

    LOST = "lost"  # of what was answered before, something has not happened
    DOUBLED = "doubled"  # something happened more than once
    REORDERED = "reordered"  # other actions, or in another order
    TORN = "torn"  # an observation of two moments
    CROSSED = "crossed"  # another row's
    BROKEN = "broken"  # reward, flags or infos are not those of the step
    HUNG = "hung"  # no answer at all


@dataclass(frozen=True)
class Finding:
    """One thing that was wrong."""

    kind: Kind
    row: int
    text: str


class Batch(NamedTuple):
    """What one step returned; observations of noted chains are dicts."""

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
        """After a reset."""
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
    batches: int = 0
    resets: int = 0
    incarnations: int = 0
    unanswered: int = 0
    inherited: int = 0  # sessions of trainers that were killed
    standins: int = 0  # truncations of rows that were down already
    truncations: Counter[str] = field(default_factory=Counter)  # by cause
    wrong: Counter[str] = field(default_factory=Counter)  # by kind
    findings: list[Finding] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Count what another one counted, too."""
        for name in ("acknowledged", "batches", "resets", "incarnations", "unanswered", "inherited", "standins"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.truncations += other.truncations
        self.wrong += other.wrong
        self.findings = [*self.findings, *other.findings][:FINDINGS_MAX]


class Checker:
    """Follows the rows of one trainer, over all its sessions."""

    def __init__(self, rows: int, mode: str = NEXT_STEP, length: int = 50) -> None:
        self.tally = Tally()
        self._rows = rows
        self._mode = mode
        self._length = length
        self._owners: dict[int, int] = {}  # the row of every incarnation that was seen
        self._chains = [Chain() for _ in range(rows)]
        self._trail: deque[tuple[Any, ...]] = deque(maxlen=TRAIL)

    def session(self, rows: int | None = None) -> None:
        """A new session begins, of so many rows: what stood in the old one has ended, and must not come back."""
        self._rows = self._rows if rows is None else rows
        self._chains = [Chain() for _ in range(self._rows)]

    @property
    def memory(self) -> Any:
        """All that another checker needs to know to go on from here, as it is at this moment."""
        return self._chains, self._owners

    def recall(self, memory: Any) -> None:
        """Go on from where another checker was."""
        self._chains, self._owners = memory
        self._rows = len(self._chains)

    def reset(self, observations: Any, infos: Mapping[str, Any], mask: Sequence[bool] | None = None) -> None:
        """A reset of all rows, or of those of the mask, returned this."""
        observations = self._chain_of(observations)
        self._trail.append(("reset", mask, _heads(observations), infos))
        self._check_tails(observations)
        for row, head in enumerate(_heads(observations)):
            chain = self._chains[row]
            if mask is not None and not mask[row]:
                if head != chain.head:
                    self._find(Kind.BROKEN, row, f"left out of a reset, it shows {head} instead of {chain.head}")
            elif chain.candidates and head[1] == chain.candidates[0].head[1]:
                self._match(row, chain, [state.reset() for state in chain.candidates], head)
            else:
                self._begin(row, chain, head, None)
            self.tally.resets += 1

    def step(self, numbers: Sequence[int], batch: Batch) -> None:
        """A step with the actions ``[row, numbers[row]]`` returned this."""
        batch = batch._replace(observations=self._chain_of(batch.observations))
        self._trail.append(("step", numbers, _heads(batch.observations), batch.infos))
        self._check_tails(batch.observations)
        failed = _mask(batch.infos, "env_failure", self._rows)
        invalid = _mask(batch.infos, "invalid_transition", self._rows)
        for row, head in enumerate(_heads(batch.observations)):
            chain = self._chains[row]
            if failed[row] or invalid[row]:
                self._stand_in(row, chain, head, batch)
            elif chain.down or (chain.unanswered and head[1] not in self._owners):
                last = self._begin(row, chain, head, numbers[row])
                self._expect_last(row, batch, last)
            else:
                self._advance(row, chain, numbers[row], head, batch)
        self.tally.acknowledged += self._rows
        self.tally.batches += 1

    def unanswered(self, numbers: Sequence[int | None]) -> None:
        """A step was begun, or a reset if the numbers are None, and nobody knows whether it was carried out."""
        self.tally.unanswered += 1
        for row, chain in enumerate(self._chains):
            after = [self._stepped(state, row, numbers[row])[0] for state in chain.candidates]
            chain.candidates = list(dict.fromkeys([*chain.candidates, *after]))
            chain.unanswered.append(numbers[row])

    def inherited(self, numbers: Sequence[int | None]) -> None:
        """A session was taken over from a trainer that was killed at, or after, a request of these numbers."""
        self.tally.inherited += 1
        self.unanswered(numbers)

    def hung(self, text: str) -> None:
        """No answer came in any time that could be meant."""
        self._find(Kind.HUNG, -1, text)

    def broke(self, text: str) -> None:
        """Something was raised that no fault explains."""
        self._find(Kind.BROKEN, -1, text)

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def _stand_in(self, row: int, chain: Chain, head: Head, batch: Batch) -> None:
        """The hub finished the step of a worker that is dead, or of an env that is not rebuilt yet."""
        if head not in (chain.head, *(state.head for state in chain.candidates)):
            self._find(Kind.LOST, row, f"truncated with {head} instead of the last observation {chain.head}")
        self._expect_outcome(row, batch, 0.0, False, True)
        if not _mask(batch.infos, "invalid_transition", self._rows)[row]:
            self._find(Kind.BROKEN, row, "a failure that is not marked as an invalid transition")
        if self._mode == SAME_STEP:
            final = _final(batch, row)
            if final is None or tuple(final[:HEAD].tolist()) != head:
                self._find(Kind.BROKEN, row, f"final_obs is not the last observation: {final}")
        if chain.down:
            self.tally.standins += 1
        else:
            self.tally.truncations[_cause(batch.infos, row)] += 1
        chain.down, chain.head, chain.candidates = True, head, []

    def _advance(self, row: int, chain: Chain, number: int, head: Head, batch: Batch) -> None:
        if not chain.candidates:
            self._find(Kind.BROKEN, row, "stepped before it was reset")
            return
        if self._mode == NEXT_STEP and chain.candidates[0].owes_reset and head[1] not in self._owners:
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
        if number is None or (state.owes_reset and self._mode == NEXT_STEP):
            return state.reset(), None
        last = state.step(row, number, self._length)
        if last.owes_reset and self._mode == SAME_STEP:
            return last.reset(), last
        return last, last

    def _expect_last(self, row: int, batch: Batch, last: State | None) -> None:
        if last is None:
            self._expect_outcome(row, batch, 0.0, False, False)
            return
        odd = last.resets % 2 == 1
        self._expect_outcome(row, batch, reward_of(last.head[3]), last.owes_reset and odd, last.owes_reset and not odd)
        if last.owes_reset and self._mode == SAME_STEP:
            final = _final(batch, row)
            if final is None or tuple(final[:HEAD].tolist()) != last.head or (final[HEAD:] != last.head[2]).any():
                self._find(Kind.BROKEN, row, f"final_obs is {final} instead of {last.head}")

    def _expect_outcome(self, row: int, batch: Batch, reward: float, terminated: bool, truncated: bool) -> None:
        found = (float(batch.rewards[row]), bool(batch.terminations[row]), bool(batch.truncations[row]))
        if found != (reward, terminated, truncated):
            wanted = (reward, terminated, truncated)
            self._find(Kind.BROKEN, row, f"reward and flags {found} instead of {wanted}")

    # --- chains -------------------------------------------------------------------------------------------------------

    def _begin(self, row: int, chain: Chain, head: Head, number: int | None) -> State | None:
        """The row shows an incarnation that it did not show before; returns whose the reward and the flags are.

        That one has seen nothing but resets, and what of the requests without an answer came after its first.
        """
        owner = self._owners.get(head[1])
        possible = list(self._beginnings(row, chain, head[1], number))
        for state, last in possible:
            if owner is None and state.head == head:
                self.tally.incarnations += 1
                self._adopt(row, chain, state)
                return last
        if owner is not None and owner != row:
            self._find(Kind.CROSSED, row, f"shows {head}, an incarnation of row {owner}")
        elif owner is not None:
            self._find(Kind.LOST, row, f"shows {head}, of an incarnation that had ended")
        else:
            self._find(Kind.DOUBLED, row, f"begins with {head}, which has seen more than a reset")
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
        self._find(self._difference(row, expected[0].head, head), row, f"shows {head} instead of {expected[0].head}")
        anew = State((UNOWNED, head[1], 0, 0), 0).reset()
        state = anew if head == anew.head else replace(expected[0], head=head)
        self._adopt(row, chain, state)
        return state

    def _adopt(self, row: int, chain: Chain, state: State) -> None:
        self._owners.setdefault(state.head[1], row)
        chain.candidates, chain.head, chain.down = [state], state.head, False
        chain.unanswered = []

    def _difference(self, row: int, expected: Head, head: Head) -> Kind:
        if head[1] != expected[1]:
            return Kind.CROSSED if self._owners.get(head[1], row) != row else Kind.LOST
        if head[0] not in (row, UNOWNED):
            return Kind.CROSSED
        if head[2] != expected[2]:
            return Kind.DOUBLED if head[2] > expected[2] else Kind.LOST
        return Kind.REORDERED

    def _chain_of(self, observations: Any) -> np.ndarray:
        """The arrays of a batch, each of whose notes must be of the same moment."""
        if not isinstance(observations, dict):
            return np.asarray(observations)
        chains: np.ndarray = observations["chain"]
        for row, (counter, note) in enumerate(zip(chains[:, 2].tolist(), observations["note"], strict=True)):
            if note != str(counter):
                self._find(Kind.TORN, row, f"step {counter}, and the note of step {note!r}")
        return chains

    def _check_tails(self, observations: np.ndarray) -> None:
        whole = (observations[:, HEAD:] == observations[:, 2:3]).all(axis=1)
        for row in np.flatnonzero(~whole).tolist():
            parts = np.unique(observations[row, HEAD:])[:4].tolist()
            self._find(Kind.TORN, row, f"step {observations[row, 2]}, and parts of {parts}")

    def _find(self, kind: Kind, row: int, text: str) -> None:
        self.tally.wrong[kind.value] += 1
        if len(self.tally.findings) < FINDINGS_MAX:
            trail = [f"{what} {told}: {heads[row]} {_failures(infos)}" for what, told, heads, infos in self._trail]
            text = f"at batch {self.tally.batches}: {text}; before and then: {'; '.join(trail)}"
            self.tally.findings.append(Finding(kind, row, text))


def _heads(observations: np.ndarray) -> list[Head]:
    return [tuple(head) for head in observations[:, :HEAD].tolist()]


def _mask(infos: Mapping[str, Any], name: str, rows: int) -> Any:
    return infos.get(f"_{name}", [False] * rows)


def _cause(infos: Mapping[str, Any], row: int) -> str:
    failures = infos.get("env_failure")
    return "unsaid" if failures is None or failures[row] is None else str(failures[row]["cause"])


def _failures(infos: Mapping[str, Any]) -> str:
    return ", ".join(str(failure) for failure in infos.get("env_failure", ()) if failure is not None)


def _final(batch: Batch, row: int) -> np.ndarray | None:
    found = batch.infos.get("final_obs", [None] * len(batch.rewards))[row]
    if isinstance(found, dict):
        return found["chain"] if found["note"] == str(found["chain"][2]) else None
    return None if found is None else np.asarray(found)
