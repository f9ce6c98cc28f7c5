"""``envhub conformance --client`` passes a client that keeps PROTOCOL.md, and fails one by the rule that it breaks."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import zmq
from envhub_client.tools.conformance.client_cases import CASES, FAULT_STEP, LEVELS
from envhub_client.tools.conformance.client_conformance import FAILED, NOT_SHOWN, PASSED, RuleVerdict, judged
from envhub_client.tools.conformance.counting_envs import NAME, NUM_ENVS, SEEDS
from envhub_client.tools.conformance.scripted_hub import HEARD_MAX, Heard, Record, ScriptedHub
from hubs import free_port
from page_client import PageClient, execute
from wrong_clients import WRONG

from envhub.protocol import messages
from envhub.protocol.messages import Op
from envhub.protocol.prelude import NO_SESSION, Prelude
from envhub.values import codec

CLIENT = Path(__file__).parents[1] / "support/conforming_client.py"
DOCUMENT = Path(__file__).parents[2] / "envhub/protocol/PROTOCOL.md"
CASE_S = 15.0
STALL_S = 0.5  # of the machine, which may make a client fail by a rule about seconds
TRIES = 3
Result = TypeVar("Result")
RULES = [(name, rule) for name, case in CASES.items() for rule in case.rules]


def conformance(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "envhub", "conformance", "--client", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


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


def verdicts_in(ran: subprocess.CompletedProcess[str]) -> dict[tuple[str, str], str]:
    verdicts = [json.loads(line) for line in ran.stdout.splitlines()]
    return {(verdict["case"], verdict["rule"]): f"{verdict['result']} {verdict['why']}".strip() for verdict in verdicts}


def examined(kind: type[PageClient], name: str) -> list[RuleVerdict]:
    """The verdicts on a client of this process in one case."""
    ended, statuses = threading.Event(), []
    case = CASES[name]
    with ScriptedHub("tcp://127.0.0.1:0") as hub:
        arguments = [hub.address, *([hub.former_token.hex()] if case.program == "attach" else [])]

        def run() -> None:
            statuses.append(execute(kind, case.program, arguments, ended))

        thread = threading.Thread(target=run)
        thread.start()
        try:
            record = hub.run(case.script(), lambda: statuses[0] if statuses else None, CASE_S)
        finally:
            ended.set()
            thread.join()
    assert statuses, "the client ended with an error of its own"
    return judged(name, case, record)


def results(kind: type[PageClient], names: Sequence[str] = tuple(CASES)) -> dict[tuple[str, str], RuleVerdict]:
    """The verdicts on a client by all rules of these cases, which run at the same time."""
    with ThreadPoolExecutor(len(names)) as pool:
        found = [verdict for verdicts in pool.map(partial(examined, kind), names) for verdict in verdicts]
    return {(verdict.case, verdict.rule): verdict for verdict in found}


@pytest.mark.long
@pytest.mark.timeout(600)  # for each try about as long as its cases together
def test_client_of_this_repository_passes_all_levels_by_the_command_of_the_document() -> None:
    (example,) = re.findall(r"^```sh\nenvhub conformance --client (.*?)\n```", DOCUMENT.read_text(), re.M | re.S)
    options = shlex.split(example.replace("python client.py", f"{sys.executable} {CLIENT}"))
    passed = dict.fromkeys(RULES, PASSED)
    ran = undisturbed(lambda: conformance("--json", *options), lambda ran: verdicts_in(ran) == passed)
    assert verdicts_in(ran) == passed, ran.stderr
    assert ran.returncode == 0


@pytest.mark.long
def test_client_passes_by_each_rule_and_the_cases_are_of_the_levels() -> None:
    def is_right(found: dict[tuple[str, str], RuleVerdict]) -> bool:
        return [*found] == RULES and {verdict.result for verdict in found.values()} == {PASSED}

    found = undisturbed(lambda: results(PageClient), is_right)
    assert is_right(found), {rule: (verdict.result, verdict.why) for rule, verdict in found.items()}
    assert {case.level for case in CASES.values()} == {*LEVELS}


def test_each_rule_has_a_client_that_breaks_it() -> None:
    assert [*WRONG] == RULES


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES, ids=": ".join)
def test_wrong_client_fails_by_the_rule_that_it_breaks_and_by_no_other(rule: tuple[str, str]) -> None:
    def broken(found: dict[tuple[str, str], RuleVerdict]) -> dict[tuple[str, str], str]:
        return {key: verdict.why for key, verdict in found.items() if verdict.result == FAILED}

    found = undisturbed(lambda: results(WRONG[rule]), lambda found: broken(found).keys() == {rule})
    assert broken(found).keys() == {rule}


def by_hand(program: Callable[[str], object], *options: str) -> tuple[dict[tuple[str, str], str], int]:
    """The verdicts on a client that connects by itself, and the exit status."""
    bind = f"tcp://127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(1) as pool:
        client = pool.submit(program, bind)
        ran = conformance("--json", "--bind", bind, *options)
        client.result()
    return verdicts_in(ran), ran.returncode


@pytest.mark.long
def test_client_that_connects_by_itself_is_tested_and_a_case_without_a_client_is_not_shown() -> None:
    def steps(address: str) -> int:
        return execute(PageClient, "steps", [address], threading.Event())

    verdicts, status = by_hand(steps, "--case", "odd_replies", "--case", "cut", "--timeout", "4")
    assert status == 2
    assert list(verdicts.values()) == [PASSED, "not shown the client did not get so far: the last that came is nothing"]


def flood(address: str, ended: threading.Event) -> None:
    """Send more HELLOs than a case takes, and stay until the case has ended."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.sndhwm = 0, 0
        socket.connect(address)
        for _ in range(HEARD_MAX + 100):
            socket.send(Prelude(Op.HELLO, 0, NO_SESSION, 1).pack() + b"\x80")
        while not ended.is_set():  # what it has not sent yet would be lost with the socket
            if socket.poll(20):
                socket.recv_multipart()


def test_client_that_floods_the_hub_ends_its_case_by_the_limit() -> None:
    case, ended = CASES["unknown_fields"], threading.Event()
    with ScriptedHub("tcp://127.0.0.1:0") as hub, ThreadPoolExecutor(1) as pool:
        client = pool.submit(flood, hub.address, ended)
        try:
            (verdict,) = judged("unknown_fields", case, hub.run(case.script(), None, CASE_S))
        finally:
            ended.set()
        client.result()
    assert (verdict.result, verdict.why) == (
        FAILED,
        f"it sent {HEARD_MAX + 1} messages of {41 * (HEARD_MAX + 1)} bytes together",
    )


def garble(address: str) -> None:
    """Send what no client sends."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(address)
        socket.send(b"HTTP" + bytes(50))
        socket.send(Prelude(Op.HELLO, 0, NO_SESSION, 1).pack() + b"\xc1")
        assert socket.poll(5000)
        hub_id, token = Prelude.unpack(socket.recv()).hub_id, bytes(range(16))
        fields = messages.pack(messages.Make(1, "Conformance-v0"))
        for seq, op, header in [
            (1, Op.MAKE, fields),
            (2, Op.RESET, messages.pack(messages.Reset([1]))),
            (3, Op.STEP, b""),
            (4, Op.CALL, messages.pack(messages.Call("check", codec.encode([[np.zeros(2)] * 3, {}])))),
            (5, Op.SEND, messages.pack(messages.Send([7], b""))),
            (6, Op.SEND, messages.pack(messages.Send([0, 0], b""))),
            (7, Op.RECEIVE, messages.pack(messages.Receive(1))),
            (8, Op.CLOSE, b"\x80"),
        ]:
            socket.send(Prelude(op, hub_id, token, seq).pack() + header)
            assert socket.poll(5000)
            socket.recv_multipart()


def test_client_that_sends_garbage_is_told_what_was_wrong_and_does_not_end_the_hub() -> None:
    case = CASES["plain"]
    with ScriptedHub("tcp://127.0.0.1:0") as hub, ThreadPoolExecutor(1) as pool:
        client = pool.submit(garble, hub.address)
        record = hub.run(case.script(), None, CASE_S)
        client.result()
    begin = [
        "the first frame does not",
        "MAKE has num_envs 1, 2 was",
        "the action codes are ,",
        "the arguments of check are",
    ]
    begin += ["SEND names the rows [7]", "SEND names the rows [0, 0]", "RECEIVE waits for 1 rows, while []"]
    assert [text.startswith(words) for text, words in zip(record.wrong, begin, strict=True)] == [True] * len(begin)
    first, *_ = judged("plain", case, record)
    assert first.result == FAILED and first.why.startswith("a header cannot be read")


def refused(address: str) -> None:
    """Send requests that the hub refuses, STEP 3 because it is another hub's."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(address)
        socket.send(Prelude(Op.HELLO, 0, NO_SESSION, 1).pack() + b"\x80")
        hub_id = Prelude.unpack(socket.recv()).hub_id
        make, reset = messages.pack(messages.Make(NUM_ENVS, NAME)), messages.pack(messages.Reset(SEEDS))
        receive = messages.pack(messages.Receive(1))
        before = [(Op.MAKE, make), (Op.RESET, reset), *[(Op.STEP, b"")] * 2, *[(Op.RECEIVE, receive)] * 2]
        after = [(Op.STEP, b""), (Op.RESET, reset), (Op.CLOSE, b"\x80")]
        for seq, (op, header) in enumerate([*before, *after], 1):
            socket.send(Prelude(op, hub_id ^ (seq == len(before) + 1), bytes(range(16)), seq).pack() + header)
            assert socket.poll(5000)
            socket.recv_multipart()


@pytest.mark.parametrize("name", ["short_frame", "foreign_row", "slow_step", "late_reply"])
def test_client_whose_requests_are_refused_passes_by_no_rule_about_what_they_bring(name: str) -> None:
    with ScriptedHub("tcp://127.0.0.1:0") as hub, ThreadPoolExecutor(1) as pool:
        client = pool.submit(refused, hub.address)
        record = hub.run(CASES[name].script(), None, CASE_S)
        client.result()
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


ENDS = {"os.abort()": "crashed with status -6", "sys.exit(0)": "ended with status 0"}


@pytest.mark.long
@pytest.mark.parametrize("end", ENDS)
def test_program_that_crashes_or_ends_as_if_nothing_had_failed_has_told_of_no_error(end: str) -> None:
    program = f"import os, sys; sys.path.insert(0, {str(CLIENT.parent)!r}); import conforming_client\n"
    program += f"try: conforming_client.steps(sys.argv[2])\nexcept Exception: {end}"
    ran = conformance("--json", "--case", "unknown_code", "--run", shlex.join([sys.executable, "-c", program]))
    (verdict,) = verdicts_in(ran).values()
    assert ran.returncode == 1 and verdict == f"{FAILED} the program was to end with an error, and {ENDS[end]}"
