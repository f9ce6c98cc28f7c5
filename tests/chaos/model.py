"""What a program may see, as the pages promise it: a model of every row of a vector env.

For each row it holds the places at which the row may stand. A result must be what one of them allows. Most of the time
there is only one. Faults that the program or the test has caused allow more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from chaos.model_env import CRASH, DICT, HANG, RAISE, State, heads, observation
from gymnasium.vector import VectorEnv
from same import assert_same

NEXT_STEP, SAME_STEP, DISABLED = MODES = ("NextStep", "SameStep", "Disabled")
LIVE, GONE, DOWN = "live", "gone", "down"  # it steps; it was lost, which is not told yet; that was told
NEW = -1  # a life that nobody has seen
ANY = -2  # a seed that the hub has derived
POLICIES = {RAISE: ("on_exception", "exception"), CRASH: ("on_crash", "crash"), HANG: ("on_timeout", "timeout")}
ERRORS = {"exception": "ArithmeticError", "crash": "WorkerDied", "timeout": "EnvTimeout"}


class Wrong(Exception):
    """Something was seen that the pages do not allow."""


class Place(NamedTuple):
    """Where a row may stand: of one that is gone or down, ``state`` is its next life before its first reset."""

    kind: str
    state: State
    cause: str = ""


class Outcome(NamedTuple):
    """What a row may show next; ``state`` is None for a truncation by a failure, and for an error."""

    after: Place
    state: State | None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    final: State | None = None
    cause: str = ""
    raised: str = ""


class Rows:
    """The rows of one vector env."""

    def __init__(self, kind: str, count: int, mode: str, policies: dict[str, str]) -> None:
        self.kind, self.mode, self.policies = kind, mode, policies
        self.attrs = [{0} for _ in range(count)]
        self.places = [{Place(DOWN, State(row, NEW))} for row in range(count)]
        self.shown: list[set[tuple[int, ...]]] = [set() for _ in range(count)]
        self.seeds: list[set[int]] = [set() for _ in range(count)]
        self.lives: dict[int, int] = {}
        self.mates: list[set[int]] = [{row} for row in range(count)]
        self.lossy: set[int] = set()  # rows whose hub may be lost at any moment
        self.dying: dict[int, set[str]] = {}  # rows whose process may end at any moment, and by which causes

    # --- places -------------------------------------------------------------------------------------------------------

    def lost(self, place: Place, causes: Iterable[str]) -> Iterable[Place]:
        """Where it may stand after the end of its process or hub."""
        for attr in self.attrs[place.state.row]:
            state = State(place.state.row, NEW, attr=attr)
            for cause in causes if place.kind != GONE else {*causes, place.cause}:
                if place.kind != DOWN:
                    yield Place(GONE, state, cause)
                if place.kind != LIVE or place.state.ended:  # between two episodes none is cut short
                    yield Place(DOWN, state, cause)
                    yield Place(GONE, state, cause)

    def possible(self, row: int) -> set[Place]:
        """Where it may stand by now."""
        found = set(self.places[row])
        for causes in ({"hub_lost"} if row in self.lossy else set(), self.dying.get(row, set())):
            found |= {after for place in tuple(found) if causes for after in self.lost(place, causes)}
        return found

    def stepped(self, row: int, place: Place, command: int, number: int) -> Iterable[Outcome]:
        state = place.state
        told = Place(DOWN, State(row, NEW, attr=state.attr), place.cause)
        if place.kind == GONE:
            yield from self._failed(place._replace(kind=DOWN), place.cause, state)
        elif place.kind == DOWN:
            if self.mode == DISABLED:  # until a reset names it
                yield Outcome(place, None, truncated=True, cause=place.cause)
                return
            after = state.reset(ANY)
            yield Outcome(Place(LIVE, after), after)
            yield from self._failed(place, place.cause, state)
        elif (command in POLICIES and not state.ended) or (state.ended and state.armed):
            cause = "exception" if state.ended else POLICIES[command][1]
            for attr in self.attrs[row]:
                after = Place(DOWN, State(row, NEW, attr=attr), cause)
                if cause == "exception" and self.policies["on_exception"] == "raise":  # it is not made again
                    after = Place(LIVE, state._replace(armed=state.armed and not state.ended))
                yield from self._failed(after, cause, state)
        elif state.ended:
            after = state.reset()
            yield Outcome(Place(LIVE, after), after)
        else:
            last, *outcome = state.step(command, number)
            after = last
            if last.ended and self.mode == SAME_STEP:
                if last.armed:
                    after = told._replace(cause="exception")
                    if self.policies["on_exception"] == "raise":
                        after = Place(LIVE, last._replace(armed=False, ended=False))  # its next step steps it
                    yield from self._failed(after, "exception", last)
                    return
                after = last.reset()
            yield Outcome(Place(LIVE, after), after, *outcome, final=last if after is not last else None)

    def _failed(self, after: Place, cause: str, state: State) -> Iterable[Outcome]:
        policy = next((key for key, each in POLICIES.values() if each == cause), "")
        if self.policies.get(policy) == "raise":
            yield Outcome(after, None, cause=cause, raised=ERRORS[cause])
        else:
            yield Outcome(after, None, truncated=True, cause=cause)

    def reset(self, row: int, place: Place, seed: int | None, option: int) -> Iterable[Outcome]:
        if place.kind == LIVE and place.state.armed:
            for after in (
                Place(DOWN, State(row, NEW, attr=place.state.attr)),
                Place(LIVE, place.state._replace(armed=False)),
            ):
                yield Outcome(after, None, cause="exception", raised="ArithmeticError")
        else:
            given = ANY if seed is None and place.kind != LIVE else seed
            after = place.state.reset(given, option)
            yield Outcome(Place(LIVE, after), after)

    # --- results ------------------------------------------------------------------------------------------------------

    def fits(self, head: tuple[int, ...], state: State) -> bool:
        """Whether an observation says what it would of this state."""
        if len(head) != 7 or head[:1] + head[2:5] + head[6:] != (state.row, *state.head[2:5], state.attr):
            return False
        seeds = self.seeds[state.row]  # of a new life it is derived from that of the one before, if that had any
        derived = state.life != NEW or (head[5] not in seeds and (head[5] >= 0 or not seeds))
        lives = head[1] not in self.lives if state.life == NEW else head[1] == state.life
        return lives and (derived if state.seed == ANY else head[5] == state.seed)

    def shows_last(self, row: int, head: tuple[int, ...]) -> bool:
        """Whether this may be the row's last observation."""
        return head in self.shown[row] or any(self.fits(head, State(*seen)) for seen in self.shown[row])

    def take(
        self, row: int, head: tuple[int, ...], options: list[Outcome], of: Callable[[Outcome], bool] = lambda each: True
    ) -> Outcome:
        """The outcome that a row shows."""
        found = []
        for each in options:
            if each.raised or not of(each):
                continue
            if each.state is None:
                if self.shows_last(row, head):
                    found.append(each)
            elif self.fits(head, each.state):
                bound = each.state._replace(life=head[1], seed=head[5])
                found.append(each._replace(state=bound, after=each.after._replace(state=bound)))
        if not found:
            raise Wrong(f"row {row} shows {head}, expected one of {options}, shown before {self.shown[row]}")
        self.places[row], self.shown[row] = {each.after for each in found}, {head}
        self._know(row, head)
        return found[0]

    def _know(self, row: int, head: tuple[int, ...]) -> None:
        self.lives[head[1]] = row
        self.attrs[row] = {head[6]} if len(self.attrs[row]) > 1 and head[6] in self.attrs[row] else self.attrs[row]
        if head[5] >= 0:
            self.seeds[row].add(head[5])

    def unseen(self, row: int, options: Iterable[Outcome]) -> None:
        """One of these has come, and was not returned."""
        options = [*options]
        self.places[row] = {each.after for each in options}
        self.shown[row] |= {each.state.head for each in options if each.state is not None}

    def batch(self, rows: Sequence[int], options: dict[int, list[Outcome]], result: Any, by_env: bool) -> None:
        """A step, or a part, returned this of these rows."""
        observations, rewards, terminations, truncations, infos = result[:5]
        wanted = Infos(len(rows), by_env)
        invalid = [wanted.told(infos, index, row, "invalid_transition") for index, row in enumerate(rows)]
        failures = [wanted.told(infos, index, row, "env_failure") for index, row in enumerate(rows)]
        for index, (row, head) in enumerate(zip(rows, heads(self.kind, observations), strict=True)):
            flags = (float(rewards[index]), bool(terminations[index]), bool(truncations[index]))
            failure = failures[index]

            def of(each: Outcome, flags: Any = flags, index: int = index, failure: Any = failure) -> bool:
                causes = {each.cause, "crash" if each.cause == "timeout" else each.cause}
                known = failure is None if each.state is not None else failure is None or failure.cause in causes
                marked = bool(invalid[index]) == (each.state is None)
                return known and marked and flags == (each.reward, each.terminated, each.truncated)

            try:
                taken = self.take(row, head, options[row], of)
            except Wrong as error:
                raise Wrong(f"{error}; {flags}, {failure!r}, invalid {invalid[index]}") from None
            if taken.state is None:
                if self.mode == SAME_STEP:
                    wanted.add(index, row, {"final_obs": observation(self.kind, head), "final_info": {}})
                wanted.add(
                    index, row, {"invalid_transition": True, **({} if failure is None else {"env_failure": failure})}
                )
            else:
                if taken.final is not None:
                    final = taken.final._replace(life=head[1])
                    if final.seed == ANY:  # its first observation was lost with a step that raised
                        seen = wanted.told(infos, index, row, "final_obs")
                        seen = seen["head"] if self.kind == DICT else seen
                        final = final._replace(seed=int(np.ravel(seen).view(np.int64)[5]))
                    wanted.add(
                        index, row, {"final_obs": observation(self.kind, final.head), "final_info": final.info()}
                    )
                wanted.add(index, row, taken.state.info())
        wanted.check(infos)

    def reset_batch(self, rows: Sequence[int], options: dict[int, list[Outcome]], result: Any, by_env: bool) -> None:
        """A reset, or a part of one, returned this of these rows, of which those in ``options`` were reset."""
        wanted = Infos(len(rows), by_env)
        for index, (row, head) in enumerate(zip(rows, heads(self.kind, result[0]), strict=True)):
            if row in options:
                wanted.add(index, row, self.take(row, head, options[row]).state.info())
            elif not self.shows_last(row, head):
                raise Wrong(f"row {row}, left out of a reset, shows {head}, expected {self.shown[row]}")
        wanted.check(result[1])

    def called(self, rows: Sequence[int], results: Sequence[Any], token: int | None = None) -> None:
        """Each env has said where it stands, after it was told the token if there is one."""
        for row, result in zip(rows, map(tuple, results), strict=True):
            found = set()
            for place in self.possible(row):
                state = place.state if token is None else place.state.told(token)
                if self.fits(result, state):
                    found.add(place._replace(state=state._replace(life=result[1])))
            if not found:
                raise Wrong(f"row {row}, called, says {result}, expected one of {self.possible(row)}")
            self.places[row] = found
            self._know(row, result)

    def raised(self, error: BaseException, options: dict[int, list[Outcome]], alone: bool) -> int:
        """A request raised this; ``alone`` in a part, where other rows are not concerned."""
        index = getattr(error, "env_index", getattr(error.__cause__, "env_index", None))
        name = type(error).__name__
        fitting = {row for row, each in options.items() if any(one.raised == name for one in each)}
        if index not in fitting:
            raise Wrong(f"{name} of env {index}: {error}; expected of {fitting}")
        for row, each in options.items():
            told = {
                after._replace(kind=DOWN)
                for place in self.places[row]
                for after in self.lost(place, self.dying.get(row, ()))
            }
            if row == index:
                self.places[row] = {one.after for one in each if one.raised == name}
            elif not alone:
                calm = [one for one in each if not one.raised or row > index or row in self.mates[index]]
                if not calm:
                    raise Wrong(f"{name} of env {index} was raised before that of env {row}")
                self.unseen(row, calm)
            if not alone:  # its process may have ended in this step, too, of which this error tells
                self.places[row] |= told
        return index


class Infos:
    """The infos that Gymnasium makes of those of each env."""

    def __init__(self, count: int, by_env: bool) -> None:
        self.by_env, self.wanted = by_env, {}
        self._adder = VectorEnv()
        self._adder.num_envs = count

    def add(self, index: int, row: int, info: dict[str, Any]) -> None:
        if not self.by_env:
            self.wanted = self._adder._add_info(self.wanted, info, index)
        elif info:
            self.wanted.setdefault(row, {}).update(info)

    def told(self, infos: dict[Any, Any], index: int, row: int, name: str) -> Any:
        if self.by_env:
            return infos.get(row, {}).get(name)
        return infos[name][index] if infos.get(f"_{name}", np.zeros(self._adder.num_envs))[index] else None

    def check(self, infos: dict[Any, Any]) -> None:
        found = {row: info for row, info in infos.items() if info} if self.by_env else infos
        try:
            assert_same(found, self.wanted, "infos")
        except AssertionError as error:
            raise Wrong(f"{str(error)[:300]}; keys {[*found]}, expected {[*self.wanted]}") from None
