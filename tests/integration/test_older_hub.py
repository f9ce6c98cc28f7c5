"""A hub of an earlier minor version of the protocol: what it does not know is refused by the client, and named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from lying_hub import NUM_ENVS, LyingHub

import envhub

LATER = [{"env_kwargs": [{"a": 1}, {"a": 2}]}, {"gpus": [0]}, {"memory_max": 1 << 30}, {"vector": True}]


@pytest.mark.parametrize("options", LATER, ids=str)
def test_session_with_what_came_later_is_refused(options: dict[str, Any]) -> None:
    refused = pytest.raises(envhub.errors.RequestRefused, match=r"speaks protocol '1\.0'.* came with 1\.2")
    with LyingHub() as hub, refused:
        envhub.make_vec("x", NUM_ENVS, hub=hub.address, lane="wire", **options)


@pytest.mark.parametrize(
    "request_",
    [
        lambda envs: envs.call_some([0], "render"),
        lambda envs: envs.has_attr("render"),
        lambda envs: envs.reset(options=[{}, {"a": 1}]),
    ],
    ids=["call_some", "has_attr", "options"],
)
def test_request_that_came_later_is_refused(request_: Callable[[envhub.HubVectorEnv], Any]) -> None:
    refused = pytest.raises(envhub.errors.RequestRefused, match=r"speaks protocol '1\.0'.* came with 1\.1")
    with LyingHub() as hub, closing(envhub.make_vec("x", NUM_ENVS, hub=hub.address, lane="wire")) as envs:
        envs.reset()
        with refused:
            request_(envs)
        envs.step([0, 0])
