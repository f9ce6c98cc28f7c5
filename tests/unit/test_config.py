"""A hub's configuration, as its log tells it."""

from __future__ import annotations

import json
from pathlib import Path

from envhub_server.catalog.registry import EnvSettings
from envhub_server.config import HubConfig, usable_cpus


def test_cpus_are_as_many_as_given_and_no_more_than_may_be_used() -> None:
    assert usable_cpus(1) == 1
    assert usable_cpus(1 << 16) == usable_cpus()


def test_configuration_that_differs_from_the_defaults_is_told_in_types_of_json() -> None:
    config = HubConfig(
        bind=("tcp://127.0.0.1:5555", "ipc:///run/hub.sock"),
        envs=("CartPole-v1",),
        keys=Path("/keys"),
        insecure=True,
        max_envs=3,
        lease=7.0,
        gpus=(0, 1),
        spares=2,
        tables={"arm": EnvSettings(env="Pendulum-v1")},
    )
    assert json.loads(json.dumps(config.said())) == {
        "bind": ["tcp://127.0.0.1:5555", "ipc:///run/hub.sock"],
        "envs": ["CartPole-v1"],
        "keys": "/keys",
        "insecure": True,
        "max_envs": 3,
        "lease": 7.0,
        "gpus": [0, 1],
        "spares": 2,
        "tables": ["arm"],
    }
    assert HubConfig().said() == {}
