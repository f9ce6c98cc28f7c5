"""Whatever comes over the wire, the hub answers or ignores it, and an honest client beside does not notice."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from conformance.kit.raw_peer import RawPeer
from hubs import ServedHub

import envhub
from envhub.protocol import messages
from envhub.protocol.messages import REPLY, Close, Failure, Make, Op, Reset


class Raw(RawPeer):
    """A peer that knows to expect failures."""

    def refusal(self, op: int, body: bytes, token: bytes = bytes(16), seq: int = 1, *frames: bytes) -> Failure:
        answer = self.ask(op, body, token, seq, *frames)
        assert answer.failure is not None and answer.prelude.seq == seq
        return answer.failure


@pytest.fixture
def raw(hub: ServedHub) -> Iterator[Raw]:
    peer = Raw(hub.tcp)
    yield peer
    peer.close()


@pytest.fixture(autouse=True)
def _honest(hub: ServedHub) -> Iterator[None]:
    """An honest client that steps before and after, on a hub whose process stays the same."""
    envs = envhub.make_vec("counter", 2, hub=hub.ipc)
    envs.reset()
    envs.step(np.array([1, 1]))
    yield
    assert envs.step(np.array([1, 1]))[0][:, 0].tolist() == [2, 2]
    envs.close()
    assert hub.process.poll() is None


def test_misuse_of_a_session_is_refused_and_the_session_goes_on(raw: Raw) -> None:
    token = b"s" * 16
    made, body, _ = raw.ask(Op.MAKE, messages.pack(Make(2, "counter")), token, 1)
    assert made.op == REPLY | Op.MAKE, body
    assert raw.refusal(Op.STEP, b"\x04", token, 0, bytes(16)).code == "bad_seq"
    assert raw.refusal(Op.STEP, b"", token, 2).code == "bad_actions"
    assert raw.refusal(Op.STEP, b"\x04", token, 3, bytes(15)).code == "bad_actions"
    assert raw.refusal(Op.STEP, b"\x7f", token, 4, bytes(16)).code == "bad_actions"
    assert raw.refusal(Op.STEP, b"\x04\x04", token, 5, bytes(16)).code == "bad_actions"
    assert raw.refusal(Op.RESET, messages.pack(Reset(mask=[True])), token, 6).code == "refused"
    assert raw.refusal(Op.RESET, messages.pack(Reset(seeds=[1, 2, 3])), token, 7).code == "refused"
    assert raw.ask(Op.RESET, messages.pack(Reset()), token, 8)[0].op == REPLY | Op.RESET
    assert raw.ask(Op.STEP, b"\x04", token, 9, bytes(16))[0].op == REPLY | Op.STEP
    assert raw.ask(Op.STEP, b"\x04", token, 9, bytes(16))[0].op == REPLY | Op.STEP  # the same one again
    assert raw.ask(Op.CLOSE, messages.pack(Close()), token, 10)[0].op == REPLY | Op.CLOSE


def test_absurd_wishes_are_refused(raw: Raw) -> None:
    wishes = [
        Make(0, "counter"),
        Make(-5, "counter"),
        Make(10**9, "counter"),
        Make(2, "counter", num_workers=-1),
        Make(2, "counter", num_workers=10**9),
        Make(2, "counter", spin_us=10**6),
        Make(2, "counter", autoreset_mode="Sometimes"),
        Make(2, "counter", factories=b"cos\nsystem\n(S'touch /tmp/pwned'\ntR."),
        Make(2, "../../etc/passwd"),
    ]
    for number, wish in enumerate(wishes):
        failure = raw.refusal(Op.MAKE, messages.pack(wish), bytes([50 + number]) * 16)
        assert failure.code in ("limit", "refused", "not_permitted", "unknown_env"), failure


def test_arguments_with_a_pickle_are_never_unpickled(raw: Raw) -> None:
    import msgpack

    bomb = msgpack.packb({"x": msgpack.ExtType(10, b"cbuiltins\nexit\n(I3\ntR.")})
    assert raw.refusal(Op.MAKE, messages.pack(Make(2, "counter", kwargs=bomb)), b"p" * 16).code == "factory_failed"


def test_private_names_of_an_env_are_neither_called_nor_set(hub: ServedHub, raw: Raw) -> None:
    envs = envhub.make_vec("counter", 2, hub=hub.tcp)
    for ask in (
        lambda: envs.call("__setstate__", {}),
        lambda: envs.get_attr("__dict__"),
        lambda: envs.set_attr("_x", 1),
    ):
        with pytest.raises(envhub.errors.RequestRefused, match="underscore"):
            ask()
    envs.close()
    token = b"u" * 16
    raw.ask(Op.MAKE, messages.pack(Make(2, "counter")), token, 1)
    assert raw.refusal(Op.CALL, messages.pack(messages.Call("__reduce__", b"")), token, 2).code == "not_permitted"
    assert raw.refusal(Op.SET_ATTR, messages.pack(messages.SetAttr("_x", [b"\x01"])), token, 3).code == "not_permitted"
    raw.ask(Op.CLOSE, messages.pack(Close()), token, 4)
