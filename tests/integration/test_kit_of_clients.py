"""The kit passes a client that keeps PROTOCOL.md, and says of another one what was wrong."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import zmq
from conformance.kit.client_cases import CASES, FAULT_STEP
from conformance.kit.client_checks import examine, judged
from conformance.kit.counting_envs import NAME, NUM_ENVS, SEEDS
from conformance.kit.scripted_hub import Heard, Record, ScriptedHub
from conformance.kit.verdict import FAILED, NOT_SHOWN, PASSED

from envhub.protocol import messages
from envhub.protocol.messages import Op
from envhub.protocol.prelude import NO_SESSION, Prelude
from envhub.values import codec

TESTS = Path(__file__).parents[1]
CASE_S = 15.0
STALL_S = 0.5  # of the machine, which may make a client fail by a rule about seconds
TRIES = 3
Result = TypeVar("Result")
RULES = [(name, rule) for name, case in CASES.items() for rule in case.rules]


def undisturbed(run: Callable[[], Result], is_right: Callable[[Result], bool]) -> Result:
    """What this returns, where that is wrong and the machine has stalled meanwhile, in one of some tries.

    Some rules are about seconds, and a client that keeps them fails if it, or its hub, has no CPU for so long.
    """
    for _ in range(TRIES):
        with Stalls() as stalls:
            result = run()
        if is_right(result) or stalls.longest_s < STALL_S:
            break
    return result


class Stalls:
    """Sees, within the block, for how long this process has no CPU.

    Attributes:
        longest_s: the longest time.
    """

    def __enter__(self) -> Stalls:
        self.longest_s = 0.0
        self._ended, self._thread = threading.Event(), threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        before_s, ended = time.monotonic(), False
        while not ended:
            ended = self._ended.wait(0.05)
            self.longest_s, before_s = max(self.longest_s, time.monotonic() - before_s), time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def kit(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "conformance.kit", "client", *options]
    return subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=300)


@pytest.mark.long
@pytest.mark.timeout(600)  # for each try about as long as its cases together
def test_client_of_this_repository_keeps_the_protocol() -> None:
    ran = undisturbed(lambda: kit(f"{sys.executable} conformance/kit/programs.py"), lambda ran: ran.returncode == 0)
    assert (ran.returncode, len(ran.stdout.splitlines())) == (0, len(RULES)), ran.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("end", "why"), [("os.abort()", "crashed with status -6"), ("sys.exit(0)", "ended with status 0")]
)
def test_program_that_crashes_or_ends_as_if_nothing_had_failed_has_told_of_no_error(end: str, why: str) -> None:
    program = "import os, sys; from conformance.kit import programs\n"
    program += f"try: programs.steps(sys.argv[2])\nexcept Exception: {end}"
    ran = kit("--case", "unknown_code", f'{sys.executable} -c "{program}"')
    assert ran.returncode == 1 and ran.stdout.endswith(f"the program was to end with an error, and {why}\n")


# Changes of the right client, by the case and the rule that each breaks: one for each kind of rule.
WRONG = {
    ("plain", "the first message is a HELLO"): "begin('_ticket')",
    ("plain", "requests carry the hub's id, one token and rising numbers"): "begin('last_seq')",
    ("plain", "the requests and their values are those of the program"): "programs.SEEDS[:] = 8, 9",
    ("plain", "the actions of a Discrete are integers"): "programs.actions = lambda observations: observations[:, 0]",
    ("unknown_fields", "an unknown field is ignored"): """
build, hints = messages.build, messages._hints
messages.build = lambda kind, fields: build(kind, fields if fields.keys() <= hints(kind).keys() else {})""",
    ("strangers", "what is no reply to the pending request is dropped"): """
received = Half.receive
def receive(self, frames, now_s):
    first, done = bytes(frames[0]), self.pending.done if self.pending and self.hub_id else b""
    return received(self, [done + first[40:] if first[:7] == done[:7] else first, *frames[1:]], now_s)
Half.receive = receive""",
    ("lost_replies", "a request whose reply was lost is sent again as it was"): """
Half.tick = lambda self, now_s: [[*each[:-1], bytes(each[-1]) + b"again"] for each in ticked(self, now_s)]""",
    ("lost_replies", "copies of a request are a second apart"): "client.HEARTBEAT_S = 0.05",
    ("cut", "a session goes on over another connection"): "client.HEARTBEAT_S, Half.connected = 4, print",
    ("endless_cuts", "a request that ends 10 connections is given up"): "client.CUTS_MAX += 1",
    ("slow_step", "HEARTBEAT asks each second after a request that runs"): "client.HEARTBEAT_S = 0.05",
    ("slow_step", "a request that runs is not sent again"): """
Half.tick = lambda self, now_s: ticked(self, now_s) and [self.pending.frames]""",
    (
        "late_reply",
        "the next request waits for the end of one that was given up",
    ): "client._NEVER_HELD = tuple(messages.Op)",
    ("parts", "rows are sent and received by parts"): "programs.actions = lambda observations: observations[:, 1] * 2",
    ("attach", "a session is taken over"): "programs.actions = lambda observations: observations[:, 1] * 2",
}
PROGRAM = """
import sys
from conformance.kit import programs
from envhub.protocol import client, messages
Half, ticked, made = client.ClientProtocol, client.ClientProtocol.tick, client.ClientProtocol.__init__
def begin(counter):
    Half.__init__ = lambda self, *given, **more: made(self, *given, **more) or setattr(self, counter, 1)
"""


@pytest.mark.long
@pytest.mark.parametrize("case, rule", WRONG, ids=lambda text: text.replace(" ", "_"))
def test_wrong_client_fails_by_the_rule_that_it_breaks(case: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    program = f"{PROGRAM}{WRONG[case, rule]}\ngetattr(programs, sys.argv[1])(*sys.argv[2:])"
    with open(os.devnull, "w") as silent, contextlib.redirect_stderr(silent):
        verdicts = {each.rule: each.result for each in examine([sys.executable, "-c", program], [case])}
    assert verdicts[rule] == FAILED


def sends(address: str, requests: Sequence[tuple[Op, bytes]], stale: int = 0) -> None:
    """Send these requests of a session, one of them to another hub, after what no client sends."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(address)
        socket.send(b"HTTP" + bytes(50))
        socket.send(Prelude(Op.HELLO, 0, NO_SESSION, 1).pack() + b"\xc1")
        assert socket.poll(5000)
        hub_id = Prelude.unpack(socket.recv()).hub_id
        for seq, (op, header) in enumerate(requests, 1):
            socket.send(Prelude(op, hub_id ^ (seq == stale), bytes(range(16)), seq).pack() + header)
            assert socket.poll(5000)
            socket.recv_multipart()


def record_of(name: str, requests: Sequence[tuple[Op, bytes]], stale: int = 0) -> Record:
    with ScriptedHub() as hub, ThreadPoolExecutor(1) as pool:
        client = pool.submit(sends, hub.address, requests, stale)
        record = hub.run(CASES[name].script(), lambda: 1 if client.done() else None, CASE_S)
        client.result()
    return record


RESET, RECEIVE = messages.pack(messages.Reset(SEEDS)), messages.pack(messages.Receive(1))


def test_client_that_sends_garbage_is_told_what_was_wrong_and_does_not_end_the_hub() -> None:
    requests = [
        (Op.MAKE, messages.pack(messages.Make(1, NAME))),
        (Op.RESET, RESET),
        (Op.STEP, b""),
        (Op.CALL, messages.pack(messages.Call("check", codec.encode([[np.zeros(2)] * 3, {}])))),
        (Op.SEND, messages.pack(messages.Send([0, 0], b""))),
        (Op.RECEIVE, RECEIVE),
        (Op.CLOSE, b"\x80"),
    ]
    record = record_of("plain", requests)
    begin = ["the first frame does not", "MAKE has num_envs 1, 2 was", "the action codes are ,"]
    begin += ["the arguments of check are", "SEND names the rows [0, 0]", "RECEIVE waits for 1 rows, while []"]
    assert [text.startswith(words) for text, words in zip(record.wrong, begin, strict=True)] == [True] * len(begin)
    first, *_ = judged("plain", CASES["plain"], record)
    assert first.result == FAILED and first.why.startswith("a header cannot be read")


@pytest.mark.parametrize("name", ["short_frame", "foreign_row", "slow_step", "late_reply"])
def test_client_whose_requests_are_refused_passes_by_no_rule_about_what_they_bring(name: str) -> None:
    before = [(Op.MAKE, messages.pack(messages.Make(NUM_ENVS, NAME))), (Op.RESET, RESET)]
    before += [*[(Op.STEP, b"")] * 2, *[(Op.RECEIVE, RECEIVE)] * 2]
    requests = [*before, (Op.STEP, b""), (Op.RESET, RESET), (Op.CLOSE, b"\x80")]
    record = record_of(name, requests, stale=len(before) + 1)
    assert PASSED not in {verdict.result for verdict in judged(name, CASES[name], record)}


def test_rule_is_not_shown_where_nothing_came() -> None:
    for name, case in CASES.items():
        assert {verdict.result for verdict in judged(name, case, Record())} == {NOT_SHOWN}, name


def test_rule_about_a_request_that_the_hub_refused_is_not_shown() -> None:
    prelude = Prelude(Op.STEP, 1, b"a" * 16, 9)
    refused = Heard(1.0, 3, prelude, (prelude.pack() + b"\x04",), FAULT_STEP)
    reset = Heard(2.0, 3, prelude._replace(op=Op.RESET), (prelude.pack(),), 1)
    record = Record([refused, reset, reset], fault=1)
    for name in ("slow_step", "late_reply"):
        first, *_ = judged(name, CASES[name], record)
        assert first.result == NOT_SHOWN and "the hub did not run it" in first.why, name
