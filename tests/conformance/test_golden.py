"""The bytes on the wire are those of ``golden.json``: a change of theirs breaks clients in other languages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conformance import golden

from envhub.protocol import messages
from envhub.protocol.client import ClientProtocol
from envhub.protocol.hub import HubProtocol
from envhub.protocol.messages import Op, Step
from envhub.protocol.prelude import PRELUDE
from envhub.values import codec

KEPT = json.loads(Path(golden.__file__).with_suffix(".json").read_text())
MADE = golden.golden()
KINDS = ("request", "reply")


@pytest.mark.parametrize("kind", KEPT)
def test_nothing_was_added_or_dropped_unsaid(kind: str) -> None:
    assert list(MADE) == list(KEPT) and list(MADE[kind]) == list(KEPT[kind])


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in ("session", "steps", "exchanges") for name in KEPT[kind]]
)
def test_frames_are_the_golden_ones(kind: str, name: str) -> None:
    assert MADE[kind][name] == KEPT[kind][name]


@pytest.mark.parametrize("name", KEPT["values"])
def test_values_are_the_golden_ones_and_decode(name: str) -> None:
    assert MADE["values"][name] == KEPT["values"][name]
    assert codec.encode(codec.decode(bytes.fromhex(KEPT["values"][name]))).hex() == KEPT["values"][name]


def test_client_accepts_the_replies_of_the_golden_session() -> None:
    client = ClientProtocol(golden.TOKEN)
    for op in (Op.HELLO, Op.MAKE, Op.RESET, Op.STEP, Op.CLOSE):
        asked, reply = ([bytes.fromhex(frame) for frame in KEPT["session"][f"{op.name} {kind}"]] for kind in KINDS)
        codes = asked[0][PRELUDE.size :]
        message = Step(codes) if op is Op.STEP else messages.unpack(messages.REQUESTS[op], codes)
        sent = client.request(op, message, asked[1:], 0.0)
        assert sent[0][: PRELUDE.size] == asked[0][: PRELUDE.size] and sent[1:] == asked[1:]
        assert client.receive(reply, 0.0) is not None


@pytest.mark.parametrize("name", KEPT["refusals"])
def test_hub_does_with_a_message_what_the_vector_says(name: str) -> None:
    assert MADE["refusals"][name] == KEPT["refusals"][name]
    *frames, does = KEPT["refusals"][name]
    hub = HubProtocol(golden.HUB_ID)
    for request in ("HELLO request", "MAKE request"):
        incoming = hub.receive(b"peer", 1, [bytes.fromhex(frame) for frame in KEPT["session"][request]])
        assert incoming is not None
    hub.answer(incoming, messages.Made(2, 1, [b""], b""))
    hub.outgoing.clear()
    runs = hub.receive(b"peer", 1, [bytes.fromhex(frame) for frame in frames]) is not None
    codes = [messages.unpack(messages.Failure, reply[PRELUDE.size :]).code for _, (reply,) in hub.outgoing]
    assert (runs, codes) == (does == "runs", [] if does in ("runs", "dropped") else [does])


@pytest.mark.parametrize("name", KEPT["bad_values"])
def test_bytes_that_are_no_value_are_refused(name: str) -> None:
    assert MADE["bad_values"][name] == KEPT["bad_values"][name]
    with pytest.raises(codec.DecodeError):
        codec.decode(bytes.fromhex(KEPT["bad_values"][name]))
