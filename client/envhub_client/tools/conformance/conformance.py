"""Checks of a hub from outside by ``envhub conformance``: the protocol frame by frame, and Gymnasium's contract."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from rich.console import Console
from rich.table import Table
from rich.text import Text

from envhub.errors import RequestRefused
from envhub.protocol import messages
from envhub.protocol.messages import REPLY, Close, HeartbeatReply, Made, Make, Op, Question, Reset, Welcome
from envhub.protocol.prelude import Prelude
from envhub_client.client import connect
from envhub_client.tools.conformance import contract
from envhub_client.tools.conformance.contract import NUM_ENVS, require, sampled
from envhub_client.tools.conformance.raw_peer import ANSWER_TIMEOUT_S, RawAnswer, RawPeer

CONNECT_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Verdict:
    """The result of one check; ``why`` is empty where it passed, and ``skipped`` where it could be made."""

    group: str
    check: str
    env: str
    why: str = ""
    skipped: str = ""

    @property
    def passed(self) -> bool:
        """True if the hub is not known to break this promise."""
        return not self.why


def run(console: Console, address: str, envs: Sequence[str], as_json: bool, timeout: float = ANSWER_TIMEOUT_S) -> bool:
    """Check the hub at ``address``, print a table or JSON, and return whether it passed.

    The arguments are as those of ``envhub conformance``, which describes them.

    Raises:
        HubUnreachable: no hub answered within ``timeout`` seconds, or ``CONNECT_TIMEOUT_S`` if those are fewer.
        RequestRefused: the hub offers no env, or not these.
    """
    connect(address, min(timeout, CONNECT_TIMEOUT_S)).close()  # or it is told soon that no hub is there
    with connect(address, timeout) as client:
        offered, place = client.envs(), client.address  # which has no keys in it
    if not offered:
        raise RequestRefused(f"the hub at {place} offers no env to check it with")
    if missing := set(envs).difference(offered):
        raise RequestRefused(f"the hub at {place} does not offer {', '.join(sorted(missing))}")
    first = "CartPole-v1" if "CartPole-v1" in offered else offered[0]
    verdicts = []
    for verdict in examine(address, envs or [first], timeout):
        verdicts.append(verdict)
        if as_json:
            console.print_json(json.dumps({**asdict(verdict), "passed": verdict.passed}), indent=None)
    if not as_json:
        console.print(_table(place, verdicts))
    return all(verdict.passed for verdict in verdicts)


def examine(address: str, envs: Sequence[str], timeout: float = ANSWER_TIMEOUT_S) -> Iterator[Verdict]:
    """Every check's verdict, as it comes."""
    for env in envs:
        for name, protocol_check in PROTOCOL_CHECKS.items():
            yield _verdict("protocol", name, env, partial(_with_peer, protocol_check, address, env, timeout))
        for name, check in contract.CHECKS.items():
            yield _verdict("contract", name, env, partial(contract.run, check, address, env))


def _verdict(group: str, name: str, env: str, check: Callable[[], None]) -> Verdict:
    try:
        check()
    except contract.NotChecked as error:
        return Verdict(group, name, env, skipped=str(error))
    except contract.Broken as error:
        return Verdict(group, name, env, str(error))
    except Exception as error:  # whatever a hub does to a check is its verdict
        return Verdict(group, name, env, f"{type(error).__name__}: {error}")
    return Verdict(group, name, env)


def _table(address: str, verdicts: Sequence[Verdict]) -> Table:
    failed = sum(not verdict.passed for verdict in verdicts)
    report = Table(title=f"{address}: {len(verdicts) - failed} of {len(verdicts)} checks passed")
    for column in ("group", "env", "check", "result"):
        report.add_column(column, overflow="fold")
    for verdict in verdicts:
        report.add_row(verdict.group, Text(verdict.env), verdict.check, _result(verdict))
    return report


def _result(verdict: Verdict) -> Text:
    if verdict.why:
        return Text(verdict.why, "red")
    return Text(f"not checked: {verdict.skipped}", "yellow") if verdict.skipped else Text("ok", "green")


# --- the protocol -----------------------------------------------------------------------------------------------------


class _Session(contextlib.AbstractContextManager["_Session"]):
    """A session made by hand, with a token of its own."""

    def __init__(self, peer: RawPeer, env: str) -> None:
        self.peer, self.token, self.seq = peer, secrets.token_bytes(16), 0
        answer = self.ask(Op.MAKE, messages.pack(Make(NUM_ENVS, env)))
        require(answer.failure is None, f"MAKE failed: {answer.failure}")
        try:
            self.codes, self.frames, self.sizes = sampled(messages.unpack(Made, answer.body))
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc_info: object) -> None:
        # Also after a failed check: a hub is not left with an unused session.
        self.ask(Op.CLOSE, messages.pack(Close(terminate=True)))

    def ask(self, op: Op, body: bytes, *frames: bytes) -> RawAnswer:
        self.seq += 1
        return self.repeat(op, body, *frames)

    def repeat(self, op: Op, body: bytes, *frames: bytes, seq: int | None = None) -> RawAnswer:
        return self.peer.ask(op, body, self.token, self.seq if seq is None else seq, *frames)

    def step(self) -> RawAnswer:
        return self.ask(Op.STEP, self.codes, *self.frames)


def _check_hello(peer: RawPeer, env: str) -> None:
    answer = peer.ask(Op.HELLO, messages.pack(messages.Hello()), seq=7)
    require(answer.prelude.op == REPLY | Op.HELLO and answer.prelude.seq == 7, "HELLO's reply has another op or seq")
    require(answer.prelude.hub_id != 0, "the hub's id is 0")
    require("message_bytes_max" in messages.unpack(Welcome, answer.body).limits, "Welcome names no message_bytes_max")


def _check_noise(peer: RawPeer, env: str) -> None:
    for frames in ([b""], [b"HUBE" + bytes(100)]):  # the third such message may end the connection
        peer.send(frames)
    answer = peer.ask(Op.HELLO, messages.pack(messages.Hello()), seq=9)
    require(answer.prelude.seq == 9, "a message without a prelude was answered")


def _check_refusals(peer: RawPeer, env: str) -> None:
    _refused(peer.ask(99, b""), "malformed", "an unknown op")
    _refused(peer.ask(Op.MAKE, b"\xc1", b"m" * 16), "malformed", "a header that is no msgpack")
    _refused(peer.ask(Op.STEP, b"\x04", b"t" * 16, 5), "session_lost", "a step of no session")
    peer.send([Prelude(Op.HELLO, 0, bytes(16), 3, major=9).pack()])
    _refused(peer.receive(), "unsupported_version", "another major version")
    peer.hub_id += 1
    _refused(peer.ask(Op.STATS, b"\x80"), "stale_hub", "a request for another hub")


def _refused(answer: RawAnswer, code: str, what: str) -> None:
    answered = answer.failure.code if answer.failure else "no failure"
    require(answered == code, f"{what} is answered by {answered}, not {code}")


def _check_frames(peer: RawPeer, env: str) -> None:
    with _Session(peer, env) as session:
        reset = session.ask(Op.RESET, messages.pack(Reset(seeds=[*range(NUM_ENVS)])))
        sizes = [len(frame) for frame in reset.frames[: len(session.sizes)]]
        require(sizes == session.sizes, f"RESET's frames have {sizes} bytes, not {session.sizes}")
        step = session.step()
        sizes = [len(frame) for frame in step.frames[: len(session.sizes) + 1]]
        wanted = [*session.sizes, 10 * NUM_ENVS]
        require(sizes == wanted, f"STEP's frames have {sizes} bytes, not {wanted}")
        require(step.prelude.token == session.token, "a reply carries another token")


def _check_exactly_once(peer: RawPeer, env: str) -> None:
    with _Session(peer, env) as session:
        session.ask(Op.RESET, messages.pack(Reset(seeds=[*range(NUM_ENVS)])))
        first = session.step()
        again = session.repeat(Op.STEP, session.codes, *session.frames)
        require(again == first, "a request sent twice is not answered by the same reply")
        _refused(session.repeat(Op.STEP, session.codes, *session.frames, seq=1), "bad_seq", "an old seq")
        asked = session.repeat(Op.HEARTBEAT, messages.pack(Question()))
        state = messages.unpack(HeartbeatReply, asked.body).state
        require(state == "answered", f"HEARTBEAT calls an answered request {state}")
        wrong = [*(frame + b"\0" for frame in session.frames[:1]), *session.frames[1:]]
        _refused(session.ask(Op.STEP, session.codes, *wrong), "bad_actions", "an action frame that is too long")
        require(session.step().failure is None, "no step is possible after a refused one")
        session.ask(Op.CLOSE, messages.pack(Close()))
        require(session.repeat(Op.CLOSE, messages.pack(Close())).failure is None, "CLOSE sent twice is refused")
        _refused(session.step(), "session_lost", "a step after CLOSE")


def _with_peer(check: Callable[[RawPeer, str], None], address: str, env: str, timeout: float) -> None:
    with contextlib.closing(RawPeer(address, timeout)) as peer:
        check(peer, env)


PROTOCOL_CHECKS: dict[str, Callable[[RawPeer, str], None]] = {
    "HELLO is answered with an id, versions and limits": _check_hello,
    "messages without a prelude are ignored": _check_noise,
    "what cannot be carried out is refused by its code": _check_refusals,
    "frames are those that the spaces say": _check_frames,
    "a request is carried out once and answered as often as it is sent": _check_exactly_once,
}
