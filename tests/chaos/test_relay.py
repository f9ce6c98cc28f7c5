"""Requests that the relay repeats reach the hub and run once; attempts of intruders are refused and change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from chaos.intruder import CONNECTIONS_MAX, meddle
from chaos.relay import Mischief, relay
from chaos.scene import TESTS
from chaos.trainer import Task, Trainer
from envhub_server.network.key_folder import KeyFolder
from envhub_server.network.rights import RIGHTS
from hubs import ServedHub, serve
from new_keys import address_of, admitted

import envhub
from envhub.transport.address import parse

STEPS = 300


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    folder = KeyFolder(tmp_path / "keys")
    folder.make_secret()
    return folder


@pytest.fixture
def hub(tmp_path: Path, keys: KeyFolder) -> Iterator[ServedHub]:
    with serve(tmp_path, "chain=chaos.chain_env:ChainEnv", "--keys", str(keys.path), cwd=TESTS) as served:
        yield served


@pytest.mark.long
def test_requests_that_come_again_after_their_replies_are_answered_and_not_run(hub: ServedHub, keys: KeyFolder) -> None:
    address = parse(address_of(admitted(keys, "alice"), hub.tcp))
    with relay(hub.tcp, seed=1, keys=address.keys) as between:
        between.mischief = Mischief(repeat=1.0, recall=0.5)
        trainer = Trainer(Task(1, STEPS, between.address, rows=3, workers=2, parts=0.3))
        trainer.run()
        assert not trainer.checker.tally.wrong, trainer.checker.tally.findings
        assert trainer.checker.tally.acknowledged >= STEPS and not trainer.endings
        assert between.done["repeated"] >= STEPS / 3 and between.done["recalled"]
    with envhub.connect(hub.ipc) as client:
        found = client.stats()
        assert found["replayed"] >= STEPS / 3 and found["failures"]["bad_seq"]
        assert client.sessions() == []


def test_keys_of_no_right_let_their_clients_touch_the_sessions_of_others(hub: ServedHub, keys: KeyFolder) -> None:
    alice = address_of(admitted(keys, "alice"), hub.tcp)
    tokens = {right: admitted(keys, f"eve-{right}", right, connections_max=CONNECTIONS_MAX) for right in RIGHTS}
    intruders = {right: address_of(token, hub.tcp) for right, token in tokens.items()}
    with (
        closing(envhub.make_vec("chain", 3, hub=alice, num_workers=2)) as of_alice,
        closing(envhub.make_vec("chain", 3, hub=hub.ipc, num_workers=2)) as own,
    ):
        for envs in (of_alice, own):
            envs.reset()
        for number in range(2):
            found = meddle(intruders, lambda: [bytes.fromhex(envs.token) for envs in (of_alice, own)])
            assert found == []
            for envs in (of_alice, own):
                assert envs.step(np.array([[row, 7] for row in range(3)]))[0][:, 2].tolist() == [number + 2] * 3
        assert "client_lost" not in hub.log and "session_taken_over" not in hub.log
