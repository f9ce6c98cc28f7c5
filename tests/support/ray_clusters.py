"""Ray clusters of several nodes in this machine, which want a token."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray._private.authentication_test_utils import reset_auth_token_state
from ray.cluster_utils import Cluster

NODE = {"num_cpus": 2, "object_store_memory": 100 << 20}


@contextlib.contextmanager
def ray_cluster(patch: pytest.MonkeyPatch, nodes: int, head: dict[str, Any], node: dict[str, Any]) -> Iterator[Cluster]:
    """A cluster of a head and further nodes with these options, to which this process is connected in the block."""
    patch.setenv("RAY_AUTH_MODE", "token")
    patch.setenv("RAY_AUTH_TOKEN", os.urandom(32).hex())
    reset_auth_token_state()
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, **head, "include_dashboard": False})
    try:
        for _ in range(nodes):
            cluster.add_node(**NODE, **node)
        patch.setenv("RAY_ADDRESS", cluster.address)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
