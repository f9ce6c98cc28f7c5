"""Rules by which a hub is tested from outside: the protocol frame by frame, and what Gymnasium's vector envs do."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from conformance.kit.raw_peer import RawAnswer, RawPeer
from conformance.kit.verdict import FAILED, NOT_SHOWN, PASSED, Broken, NotShown, Verdict
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

import envhub
from envhub.errors import EnvRaised
from envhub.protocol import messages
from envhub.protocol.messages import (
    REPLY,
    Close,
    HeartbeatReply,
    Made,
    Make,
    Op,
    Question,
    Reset,
    Send,
    Welcome,
    pack_rows,
)
from envhub.protocol.prelude import Prelude
from envhub.values import codec, spaces
from envhub.values.actions import OUT_OF_BAND, pack
from envhub.values.leaf import OBJECT

NUM_ENVS = 3
STEPS = 20
EPISODE_STEPS_MAX = 3000
SEEDS = [*range(NUM_ENVS)]


def examine(address: str, envs: Sequence[str] | None = None) -> Iterator[Verdict]:
    """The verdict by every rule, as it comes; without envs the hub is tested with the first that it offers."""
    if not envs:
        with envhub.connect(address) as client:
            envs = client.envs()[:1]
    for env in envs:
        for rule, check in RULES.items():
            yield verdict(address, env, rule, check)


def verdict(address: str, env: str, rule: str, check: Callable[[str, str], None]) -> Verdict:
    try:
        check(address, env)
    except NotShown as error:
        return Verdict(env, rule, NOT_SHOWN, str(error))
    except Exception as error:  # whatever a hub does to a check is its verdict
        why = str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
        return Verdict(env, rule, FAILED, why)
    return Verdict(env, rule, PASSED)


def require(condition: bool, why: str) -> None:
    if not condition:
        raise Broken(why)


# --- the protocol -----------------------------------------------------------------------------------------------------


class Session(contextlib.AbstractContextManager["Session"]):
    """A session made by hand, with a token of its own."""

    def __init__(self, address: str, env: str) -> None:
        self.peer, self.token, self.seq = RawPeer(address), secrets.token_bytes(16), 0
        try:
            answer = self.ask(Op.MAKE, messages.pack(Make(NUM_ENVS, env)))
            require(answer.failure is None, f"MAKE failed: {answer.failure}")
            self.codes, self.frames, self.sizes = sampled(messages.unpack(Made, answer.body))
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc_info: object) -> None:
        self.ask(Op.CLOSE, messages.pack(Close(terminate=True)))  # also after a failed check
        self.peer.close()

    def ask(self, op: Op, body: bytes, *frames: bytes) -> RawAnswer:
        self.seq += 1
        return self.repeat(op, body, *frames)

    def repeat(self, op: Op, body: bytes, *frames: bytes, seq: int | None = None) -> RawAnswer:
        return self.peer.ask(op, body, self.token, self.seq if seq is None else seq, *frames)

    def step(self) -> RawAnswer:
        return self.ask(Op.STEP, self.codes, *self.frames)


def sampled(made: Made) -> tuple[bytes, list[bytes], list[int]]:
    """Codes and frames of a random step of this session, and the bytes of each observation frame of its replies."""
    action_space, space = (spaces.build(codec.decode(blob)) for blob in (made.action_space, made.observation_spaces[0]))
    batch = batch_space(action_space, made.num_envs).sample()
    packed = pack(spaces.flatten(action_space, batch), spaces.leaves(action_space), made.num_envs)
    frames = [array.tobytes() for array in packed.arrays]
    if packed.out_of_band:
        rows = enumerate(zip(*packed.out_of_band, strict=True))
        frames.append(pack_rows((row, codec.encode(list(parts))) for row, parts in rows))
    return packed.codes, frames, [made.num_envs * leaf.nbytes for leaf in spaces.leaves(space) if leaf != OBJECT]


def check_hello(address: str, env: str) -> None:
    with contextlib.closing(RawPeer(address)) as peer:
        answer = peer.ask(Op.HELLO, messages.pack(messages.Hello()), seq=7)
        require(answer.prelude.op == REPLY | Op.HELLO, "HELLO's reply has another op")
        require(answer.prelude.hub_id != 0, "the hub's id is 0")
        require("message_bytes_max" in messages.unpack(Welcome, answer.body).limits, "it names no message_bytes_max")


def check_noise(address: str, env: str) -> None:
    with contextlib.closing(RawPeer(address)) as peer:
        for frames in ([b""], [b"HUBE" + bytes(100)]):  # the third such message may end the connection
            peer.send(frames)
        peer.send([Prelude(Op.HELLO, 0, bytes(16), 9).pack() + messages.pack(messages.Hello())])
        require(peer.receive().prelude.seq == 9, "a message without a prelude was answered")


def check_refusals(address: str, env: str) -> None:
    with contextlib.closing(RawPeer(address)) as peer:
        refused(peer.ask(99, b""), "malformed", "an unknown op")
        refused(peer.ask(Op.MAKE, b"\xc1", b"m" * 16), "malformed", "a header that is no msgpack")
        refused(peer.ask(Op.STEP, b"\x04", b"t" * 16, 5), "session_lost", "a step of no session")
        peer.send([Prelude(Op.HELLO, 0, bytes(16), 3, version=9).pack()])
        refused(peer.receive(), "unsupported_version", "another version")
        peer.hub_id += 1
        refused(peer.ask(Op.STATS, b"\x80"), "stale_hub", "a request for another hub")


def refused(answer: RawAnswer, code: str, what: str) -> None:
    answered = answer.failure.code if answer.failure else "no failure"
    require(answered == code, f"{what} is answered by {answered}, not {code}")


def check_frames(address: str, env: str) -> None:
    with Session(address, env) as session:
        reset = session.ask(Op.RESET, messages.pack(Reset(seeds=SEEDS)))
        step = session.step()
        for op, answer, wanted in (("RESET", reset, []), ("STEP", step, [10 * NUM_ENVS])):
            wanted = [*session.sizes, *wanted]
            sizes = [len(frame) for frame in answer.frames[: len(wanted)]]
            require(sizes == wanted, f"{op}'s frames have {sizes} bytes, not {wanted}")


def check_exactly_once(address: str, env: str) -> None:
    with Session(address, env) as session:
        session.ask(Op.RESET, messages.pack(Reset(seeds=SEEDS)))
        first = session.step()
        again = session.repeat(Op.STEP, session.codes, *session.frames)
        require(again == first, "a request sent twice is not answered by the same reply")
        refused(session.repeat(Op.STEP, session.codes, *session.frames, seq=1), "bad_seq", "an old seq")
        asked = session.repeat(Op.HEARTBEAT, messages.pack(Question()))
        state = messages.unpack(HeartbeatReply, asked.body).state
        require(state == "answered", f"HEARTBEAT calls an answered request {state}")
        wrong = [*(frame + b"\0" for frame in session.frames[:1]), *session.frames[1:]]
        refused(session.ask(Op.STEP, session.codes, *wrong), "bad_actions", "an action frame that is too long")
        require(session.step().failure is None, "no step is possible after a refused one")
        session.ask(Op.CLOSE, messages.pack(Close()))
        require(session.repeat(Op.CLOSE, messages.pack(Close())).failure is None, "CLOSE sent twice is refused")
        refused(session.step(), "session_lost", "a step after CLOSE")


def check_window(address: str, env: str) -> None:
    with Session(address, env) as session:
        if OUT_OF_BAND in session.codes:
            raise NotShown("its actions do not go in parts")
        session.ask(Op.RESET, messages.pack(Reset(seeds=SEEDS)))
        sent = []
        for row in range(2):
            session.seq += 1
            head = Prelude(Op.SEND, session.peer.hub_id, session.token, session.seq, after=row).pack()
            parts = [
                frame[row * len(frame) // NUM_ENVS : (row + 1) * len(frame) // NUM_ENVS] for frame in session.frames
            ]
            sent.append([head + messages.pack(Send([row], session.codes, 1)), *parts])
        session.peer.send(sent[1])  # which is dropped
        for each in sent:
            session.peer.send(each)
        answers = {each.prelude.seq: each for each in (session.peer.receive(), session.peer.receive())}
        if any(each.failure is not None and each.failure.code == "refused" for each in answers.values()):
            raise NotShown("it is a vector env, whose rows step together")
        rows = [row for each in answers.values() for row in np.frombuffer(b"".join(each.frames[:1]), np.int64).tolist()]
        require(sorted(rows) == [0, 1], f"two SENDs under way brought the rows {rows}")
        session.peer.send(sent[0])
        again = session.peer.receive()
        require(again == answers.get(again.prelude.seq), "a SEND before the last one has another reply if sent again")


# --- what vector envs do ----------------------------------------------------------------------------------------------


def made(address: str, env: str, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> Any:
    envs = envhub.make_vec(env, NUM_ENVS, hub=address, autoreset_mode=mode)
    envs.action_space.seed(1)
    return contextlib.closing(envs)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(np.array_equal(left, right, equal_nan=np.asarray(left).dtype.kind == "f"))


def check_spaces(address: str, env: str) -> None:
    with made(address, env) as envs:
        observations, _ = envs.reset(seed=1)
        for _ in range(STEPS):
            require(envs.observation_space.contains(observations), "an observation is not in its space")
            observations = envs.step(envs.action_space.sample())[0]


def check_seeds(address: str, env: str) -> None:
    with made(address, env) as envs:
        actions = [envs.action_space.sample() for _ in range(STEPS)]
        runs = [[envs.reset(seed=5)[0], *(envs.step(batch)[0] for batch in actions)] for _ in range(2)]
        require(all(map(same, *runs)), "the same seed and actions give other observations")


def check_masks(address: str, env: str) -> None:
    with made(address, env) as envs:
        envs.reset(seed=1)
        before = envs.step(envs.action_space.sample())[0]
        try:
            after, _ = envs.reset(seed=9, options={"reset_mask": np.array([True, False, True])})
        except ValueError as error:
            may_lack_modes(envs, error)
        parts = (spaces.flatten(envs.single_observation_space, batch) for batch in (before, after))
        kept = all(same(left[1], right[1]) for left, right in zip(*parts, strict=True))
        require(kept, "an env left out of the mask has another observation")


def check_next_step(address: str, env: str) -> None:
    with made(address, env) as envs:
        done, _ = until_done(envs)
        _, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())
        quiet = rewards[done].any() or terminations[done].any() or truncations[done].any()
        require(not quiet, "the step after an episode's end has a reward or a flag")
        require("final_obs" not in infos, "next-step mode gives final_obs")


def check_same_step(address: str, env: str) -> None:
    try:
        with made(address, env, AutoresetMode.SAME_STEP) as envs:
            done, infos = until_done(envs)
    except ValueError as error:
        if "is not possible" in str(error):  # a vector env has a mode of its own
            raise NotShown(str(error)) from error
        raise
    require("_final_obs" in infos and "_final_info" in infos, "there is no final_obs or no final_info")
    require(bool((infos["_final_obs"] == done).all()), "_final_obs does not say whose episode ended")
    for final, ended in zip(infos["final_obs"], done, strict=True):
        fits = envs.single_observation_space.contains(final) if ended else final is None
        require(fits, "final_obs does not hold the last observation of each env whose episode ended")


def may_lack_modes(envs: Any, error: ValueError) -> None:
    """A vector env need not heed masks, of which other autoreset modes than its own are made."""
    if envs.vector and isinstance(error.__cause__, EnvRaised):
        raise NotShown(str(error)) from error
    raise error


def until_done(envs: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """Step to the first end of an episode; returns whose it was, and the infos of that step."""
    envs.reset(seed=1)
    for _ in range(EPISODE_STEPS_MAX):
        _, _, terminations, truncations, infos = envs.step(envs.action_space.sample())
        if (done := terminations | truncations).any():
            return done, infos
    raise NotShown(f"no episode ended within {EPISODE_STEPS_MAX} steps")


RULES: dict[str, Callable[[str, str], None]] = {
    "HELLO is answered with an id and limits": check_hello,
    "messages without a prelude are ignored": check_noise,
    "what cannot be executed is refused by its code": check_refusals,
    "frames are those that the spaces say": check_frames,
    "a request is executed once and answered as often as it is sent": check_exactly_once,
    "SENDs run together and in their order": check_window,
    "observations are in their spaces": check_spaces,
    "the same seeds and actions give the same observations": check_seeds,
    "resets can be masked": check_masks,
    "next-step autoreset": check_next_step,
    "same-step autoreset": check_same_step,
}
