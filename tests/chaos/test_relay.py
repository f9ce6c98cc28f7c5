"""Requests that a relay repeats, delays and drops run once; attempts of intruders are refused and change nothing."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from chaos.relay import Mischief, relay
from chaos.trainer import Trainer
from conformance.kit.raw_peer import RawPeer
from envhub_server.network.connections import RIGHTS
from envhub_server.network.key_folder import KeyFolder
from hubs import ServedHub, serve
from new_keys import address_of, admitted, keys_in

import envhub
from envhub.protocol import messages
from envhub.protocol.messages import HeartbeatReply, Op
from envhub.protocol.prelude import NO_SESSION

TESTS = Path(__file__).parent.parent
STEPS = 300
SEQS = (1, 2, 1 << 40)  # a session's first number, a used one, and one that follows any
BODIES = {
    Op.STEP: b"\x04",
    Op.RESET: messages.pack(messages.Reset()),
    Op.CALL: messages.pack(messages.Call("render", b"")),
    Op.COLLECT: messages.pack(messages.Collect([])),
    Op.CLOSE: messages.pack(messages.Close(True)),
}


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    return keys_in(tmp_path / "keys")


@pytest.fixture
def hub(tmp_path: Path, keys: KeyFolder) -> Iterator[ServedHub]:
    with serve(tmp_path, "chain=chaos.chain_env:ChainEnv", "--keys", str(keys.path), cwd=TESTS) as served:
        yield served


@pytest.mark.long
@pytest.mark.parametrize(
    "mischief", [Mischief(repeat=1.0, recall=0.5), Mischief(double=0.3, repeat=0.3, delay=0.3, drop=0.01)]
)
def test_requests_run_once_and_are_answered_whatever_becomes_of_messages(hub: ServedHub, mischief: Mischief) -> None:
    with relay(hub.ipc, seed=1) as between:
        between.mischief = mischief
        trainer = Trainer(1, between.address, STEPS, rows=3, parts=0.3)
        trainer.run()
        assert not trainer.tally.wrong, trainer.tally.findings
        assert trainer.tally.acknowledged >= STEPS and not trainer.endings and not trainer.tally.truncations
        assert all(between.done[what] for what in ("repeated", "recalled" if mischief.recall else "delayed"))
    with envhub.connect(hub.ipc) as client:
        found = client.stats()
        assert found["replayed"] >= STEPS / 10 and found["failures"]["bad_seq"]


def test_keys_of_no_right_let_their_clients_touch_the_sessions_of_others(hub: ServedHub, keys: KeyFolder) -> None:
    alice = address_of(admitted(keys, "alice"), hub.tcp)
    eves = [address_of(admitted(keys, f"eve-{right}", right), hub.tcp) for right in RIGHTS]
    with (
        closing(envhub.make_vec("chain", 3, hub=alice, num_workers=2)) as of_alice,
        closing(envhub.make_vec("chain", 3, hub=hub.ipc, num_workers=2)) as own,
    ):
        for envs in (of_alice, own):
            envs.reset()
        for right, address in zip(RIGHTS, eves, strict=True):
            with closing(RawPeer(address)) as eve:
                for envs in (of_alice, own):
                    codes = refused(eve, right, bytes.fromhex(envs.token))
                    assert codes == {"session_lost"} | ({"not_permitted"} if right == "observe" else set())
        for envs in (of_alice, own):
            assert envs.step(np.array([[row, 7] for row in range(3)]))[0][:, 2].tolist() == [2] * 3
        assert "client_lost" not in hub.log and "session_taken_over" not in hub.log


def refused(eve: RawPeer, right: str, token: bytes) -> set[str]:
    """Why a client of this right is refused all that it tries with the session of another one."""
    codes = set()

    def is_refused(op: Op, body: bytes, token: bytes = NO_SESSION, seq: int = 1) -> None:
        failure = eve.ask(op, body, token, seq).failure
        assert failure is not None, (right, op.name, seq)
        codes.add(failure.code)

    for seq in SEQS:
        beat = eve.ask(Op.HEARTBEAT, messages.pack(messages.Question()), token, seq)
        assert messages.unpack(HeartbeatReply, beat.body).state == "unknown"
        for op, body in BODIES.items():
            is_refused(op, body, token, seq)
    if right != "admin":  # who may see and take over all sessions, and use none of another's before that
        is_refused(Op.OBSERVE, messages.pack(messages.Observe(token)))
        is_refused(Op.ATTACH, messages.pack(messages.Attach(token)), secrets.token_bytes(16))
        table = eve.ask(Op.STATUS, messages.pack(messages.Status()))
        assert not messages.unpack(messages.Table, table.body).rows
    if right == "observe":
        is_refused(Op.MAKE, messages.pack(messages.Make(1, "chain")), secrets.token_bytes(16))
    return codes
