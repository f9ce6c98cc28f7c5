"""The kit passes a hub that keeps the protocol, and says by which rule another one fails."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance.kit.hub_checks import RULES, examine, verdict
from conformance.kit.raw_peer import RawAnswer, RawPeer
from conformance.kit.verdict import FAILED, NOT_SHOWN, PASSED
from hubs import ServedHub

from envhub.protocol import messages
from envhub.protocol.client import ClientProtocol
from envhub.protocol.messages import REPLY, Failure, Op
from envhub.protocol.prelude import PRELUDE, Frames, Prelude

TESTS = Path(__file__).parents[1]
Reply = Sequence[Any]  # its prelude, its header, and the frames that follow
COUNT = itertools.count()


def observing(change: Callable[[np.ndarray], np.ndarray]) -> Callable[..., Reply]:
    return lambda head, body, first, *more: [head, body, change(np.frombuffer(first, np.float32)).tobytes(), *more]


# Changes of the replies of a right hub to requests of one op with CartPole-v1, by the rule that each breaks.
WRONG: dict[str, tuple[int, Callable[..., Reply]]] = {
    "HELLO is answered with an id and limits": (Op.HELLO, lambda head, *more: [head._replace(hub_id=0), *more]),
    "messages without a prelude are ignored": (
        Op.HELLO,
        lambda head, *more: [head._replace(seq=0 if head.seq == 9 else head.seq), *more],
    ),
    "what cannot be executed is refused by its code": (
        Op.FAILURE,
        lambda head, body: [head, messages.pack(Failure("refused", "request", ""))],
    ),
    "frames are those that the spaces say": (Op.STEP, lambda head, body, first, *more: [head, body, first[:-1], *more]),
    "a request is executed once and answered as often as it is sent": (Op.STEP, observing(lambda _: _ + next(COUNT))),
    "SENDs run together and in their order": (
        Op.SEND,
        lambda head, body, numbers=b"", *more: [head, body, numbers[:-8] + bytes(8), *more],
    ),
    "observations are in their spaces": (Op.STEP, observing(lambda found: found + 100)),
    "the same seeds and actions give the same observations": (Op.RESET, observing(lambda _: _ + next(COUNT) / 1000)),
    "resets can be masked": (Op.RESET, observing(lambda found: found * 0)),
    "next-step autoreset": (
        Op.STEP,
        lambda head, body, first, results, *more: [head, body, first, results[:24] + b"\1" * 6, *more],
    ),
    "same-step autoreset": (Op.STEP, lambda head, body, first, results, *infos: [head, body, first, results]),
}


def results(address: str, envs: Sequence[str] | None = None) -> set[tuple[str, str, str, str]]:
    """What did not pass."""
    verdicts = [*examine(address, envs)]
    assert [each.rule for each in verdicts] == [*RULES] * len(envs or [""])
    return {(each.case, each.rule, each.result, each.why) for each in verdicts if each.result != PASSED}


def test_hub_keeps_the_protocol(hub: ServedHub) -> None:
    not_passed = {each[:3] for each in results(hub.tcp, ["CartPole-v1", "graphs"])}
    assert not_passed == {("graphs", "SENDs run together and in their order", "not shown")}


@pytest.mark.parametrize("rule", WRONG)
def test_wrong_hub_fails_by_the_rule_that_it_breaks(hub: ServedHub, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (op, change), heard, received = WRONG[rule], RawPeer.receive, ClientProtocol.receive

    def hear(peer: RawPeer) -> RawAnswer:
        answer = heard(peer)
        if answer.prelude.op != REPLY | op:
            return answer
        head, body, *frames = change(answer.prelude, answer.body, *answer.frames)
        return RawAnswer(head, body, frames)

    def receive(protocol: ClientProtocol, frames: Frames, now_s: float) -> Any:
        first, *more = map(bytes, frames)
        if (head := Prelude.unpack(first)).op == REPLY | op and op != Op.HELLO:
            head, body, *more = change(head, first[PRELUDE.size :], *more)
            first = head.pack() + body
        return received(protocol, [first, *more], now_s)

    monkeypatch.setattr(RawPeer, "receive", hear)
    monkeypatch.setattr(ClientProtocol, "receive", receive)
    assert verdict(hub.tcp, "CartPole-v1", rule, RULES[rule]).result == FAILED


@pytest.mark.long
@pytest.mark.parametrize("lane", ["ipc", "tcp"])
def test_hub_keeps_the_protocol_with_other_envs(hub: ServedHub, lane: str) -> None:
    found = results(getattr(hub, lane), ["nested", "Blackjack-v1", "counter"])
    assert {(case, result) for case, _, result, _ in found} == {("counter", NOT_SHOWN)}  # whose episodes never end


@pytest.mark.long
def test_command_prints_a_line_for_each_rule(hub: ServedHub) -> None:
    command = [sys.executable, "-m", "conformance.kit", "hub", hub.tcp, "--env", "Nope-v0"]
    ran = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=100)
    lines = ran.stdout.splitlines()
    assert ran.returncode == 1 and len(lines) == len(RULES)
    assert lines[0].startswith("passed     Nope-v0: HELLO") and lines[3].startswith("failed     Nope-v0: frames")
