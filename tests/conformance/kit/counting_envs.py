"""The envs with which a client is tested: small, and known in advance.

The value of an env is ``(7 * seed + 101 * row + 13 * moves) % 1000``, where ``moves`` is the number of its steps since
the last RESET. An observation is two float32: the value, and the value + 0.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces as gym_spaces

from envhub.protocol.hub import Incoming
from envhub.protocol.messages import (
    Attach,
    Call,
    Done,
    EnvNames,
    Failure,
    Made,
    Make,
    Observe,
    Observed,
    Op,
    Receive,
    Send,
    Table,
    Welcome,
    pack_rows,
)
from envhub.protocol.prelude import VERSION
from envhub.values import actions, codec, spaces

NAME = "Conformance-v0"
NUM_ENVS = 2
SEEDS = [7, 8]
STEPS = 8
CHECK = "check"  # the method that a client tells what it has received
_END_MOVES = (5, 3)  # the step that ends the episode of each env: a termination of env 0, a truncation of env 1
FRAME_BYTES_MAX = 1 << 20  # of a client; its longest message has some 1,000 bytes

_NO_SESSION = Failure("session_lost", "session", "this hub has no such session")

Outcome = tuple[Any, Sequence[bytes]]


class CountingEnvs:
    """Two envs.

    Attributes:
        moves: the number of steps of each env since the last RESET.
    """

    def __init__(self, seeds: Sequence[int | None] = ()) -> None:
        """Make envs that were just reset with these seeds; a seed that is None or missing counts as 0."""
        self.moves = [0] * NUM_ENVS
        self._seeds = [seed or 0 for seed in seeds] or [0] * NUM_ENVS
        self._rewards = [0.0] * NUM_ENVS
        self._ends = [0] * NUM_ENVS
        self._numbers = [0] * NUM_ENVS

    def observations(self, rows: Sequence[int]) -> list[bytes]:
        values = [[self._value(row), self._value(row) + 0.5] for row in rows]
        return [np.array(values, np.float32).tobytes()]

    def step(self, rows: Sequence[int]) -> list[bytes]:
        """Step these rows; returns the observations, the results and, where an env has an info, the rows frame."""
        rewards, terminations, truncations, infos = [], [], [], []
        for row in rows:
            self.moves[row] += 1
            moves = self.moves[row]
            ends = moves == _END_MOVES[row]
            # The step after the end of an episode is a reset, as in Gymnasium's next-step mode.
            reward = 0.0 if moves == _END_MOVES[row] + 1 else moves * (row + 1) / 4
            rewards.append(reward)
            terminations.append(ends and row == 0)
            truncations.append(ends and row == 1)
            self._rewards[row] += reward
            self._ends[row] += ends
            if ends:
                self._numbers[row] += moves
                infos.append((row, codec.encode({"n": moves})))
        results = np.array(rewards).tobytes() + bytes(terminations) + bytes(truncations)
        return [*self.observations(rows), results, *([pack_rows(infos)] if infos else [])]

    def actions_fault(self, rows: Sequence[int], codes: bytes, frames: Sequence[Any]) -> str:
        """The reason why these actions are not the expected ones; empty if they are."""
        if len(codes) != 1 or codes[0] & 0x7F >= len(actions.DTYPES):
            return f"the action codes are {codes.hex()}, one code of a dtype was due, such as 04 (int64)"
        dtype = actions.DTYPES[codes[0] & 0x7F]
        received = [bytes(frame) for frame in frames]
        due = [self._value(row) for row in rows]
        if [*map(len, received)] != [len(rows) * dtype.itemsize]:
            lengths = [*map(len, received)]
            return f"the action frames have {lengths} bytes, [{len(rows) * dtype.itemsize}] were due"
        given = np.frombuffer(received[0], dtype).tolist()
        return "" if given == due else f"the actions of envs {[*rows]} are {given}, {due} were due: {received[0].hex()}"

    def check_fault(self, args: bytes) -> str:
        """The reason why the arguments of ``check`` are not the expected ones; empty if they are."""
        due = [[self._rewards, self._ends, self._numbers], {}]
        try:
            given = codec.decode(args)
            return "" if given == due else f"the arguments of {CHECK} are {given!r:.200}, {due} were due"
        except ValueError as error:  # they cannot be decoded, or are arrays
            return f"the arguments of {CHECK} are no lists of numbers ({error}), {due} were due"

    def _value(self, row: int) -> int:
        return (7 * self._seeds[row] + 101 * row + 13 * self.moves[row]) % 1000


class CountingSession:
    """Replies of a hub with these envs to the requests of one session.

    Attributes:
        wrong: why requests were not those that were due, in order.
    """

    def __init__(self, former_token: bytes, wrong: list[str]) -> None:
        """Begin with the session of ``former_token``, which was just reset with ``SEEDS``; ``wrong`` is added to."""
        self.wrong = wrong
        self._former_token = former_token
        self._envs = CountingEnvs(SEEDS)
        self._sent_rows: list[int] = []  # and not received yet, in the order in which they were sent

    def outcome(self, request: Incoming) -> Outcome | Failure:
        message = request.message
        match request.op:
            case Op.HELLO:
                limits = {"envs_per_session_max": NUM_ENVS, "message_bytes_max": FRAME_BYTES_MAX}
                return Welcome("0", str(VERSION), False, limits), ()
            case Op.LIST:
                return EnvNames([NAME]), ()
            case Op.STATS | Op.HEALTH | Op.STATUS:
                return Table([]), ()
            case Op.MAKE:
                return self._make(message)
            case Op.ATTACH:
                return self._attach(message)
            case Op.OBSERVE:
                return self._observe(message)
            case Op.RESET:
                if len(message.seeds) not in (0, NUM_ENVS):
                    return Failure("refused", "request", f"{len(message.seeds)} seeds for {NUM_ENVS} envs")
                self._envs = CountingEnvs(message.seeds)
                return Done(), self._envs.observations(range(NUM_ENVS))
            case Op.STEP:
                self._note(self._envs.actions_fault(range(NUM_ENVS), message.codes, request.frames))
                return Done(), self._envs.step(range(NUM_ENVS))
            case Op.SEND:
                return self._send(message, request.frames)
            case Op.RECEIVE:
                return self._receive(message)
            case Op.CALL:
                return self._call(message)
            case Op.SET_ATTR:
                return Done(), [pack_rows((row, b"") for row in range(NUM_ENVS))]
            case Op.CLOSE:
                return Done(), ()
        return Failure("refused", "request", f"this hub tests clients and knows no {Op(request.op).name}")

    def _note(self, why: str) -> None:
        if why:
            self.wrong.append(why)

    def _make(self, make: Make) -> Outcome | Failure:
        self._envs = CountingEnvs()
        if make.name != NAME:
            return Failure("unknown_env", "request", f"this hub tests clients, and offers {NAME} only")
        self._note(f"MAKE has num_envs {make.num_envs}, {NUM_ENVS} was due" if make.num_envs != NUM_ENVS else "")
        return made(), ()

    def _attach(self, attach: Attach) -> Outcome | Failure:
        if attach.session != self._former_token:
            return _NO_SESSION
        return made(autoreset_mode="NextStep", observation_mode="same", steps=[1] * NUM_ENVS), ()

    def _observe(self, observe: Observe) -> Outcome | Failure:
        if observe.session != self._former_token:
            return _NO_SESSION
        described = [] if observe.described else made().observation_spaces
        seen = Observed(NUM_ENVS, [1] * NUM_ENVS, [True] * NUM_ENVS, described)
        return seen, self._envs.observations(range(NUM_ENVS))

    def _call(self, call: Call) -> Outcome:
        self._note(f"CALL of {call.name!r:.50} came, {CHECK} was due" if call.name != CHECK else "")
        self._note(self._envs.check_fault(call.args))
        return Done(), [pack_rows((row, codec.encode(True)) for row in range(NUM_ENVS))]

    def _send(self, send: Send, frames: Sequence[Any]) -> Outcome | Failure:
        free = {*range(NUM_ENVS)} - {*self._sent_rows}
        if not send.rows or not {*send.rows} <= free or len({*send.rows}) < len(send.rows):
            self._note(f"SEND names the rows {send.rows}, while {self._sent_rows} are not received")
            return Failure("bad_actions", "request", "these rows cannot be sent now")
        self._note(self._envs.actions_fault(send.rows, send.codes, frames))
        self._sent_rows += send.rows
        return self._receive(Receive(min(send.min_envs, len(self._sent_rows)))) if send.min_envs else (Done(), ())

    def _receive(self, receive: Receive) -> Outcome | Failure:
        """Return the ``min_envs`` rows that were sent first: the others are not done."""
        if not 1 <= receive.min_envs <= len(self._sent_rows):
            self._note(f"RECEIVE waits for {receive.min_envs} rows, while {self._sent_rows} are not received")
            return Failure("refused", "request", "no row was sent")
        rows = sorted(self._sent_rows[: receive.min_envs])
        self._sent_rows = self._sent_rows[receive.min_envs :]
        return Done(), [b"".join(row.to_bytes(8, "little") for row in rows), *self._envs.step(rows)]


def made(**fields: Any) -> Made:
    space, action = gym_spaces.Box(0, 1000, (2,), np.float32), gym_spaces.Discrete(1000)
    described = [codec.encode(spaces.describe(each)) for each in (space, action)]
    return Made(NUM_ENVS, 1, described[:1], described[1], codec.encode({}), window=4, **fields)
