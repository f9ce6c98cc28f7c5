"""The actor of Ray that keeps a hub of a fleet."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from envhub.core_files import write_no_core_file
from envhub.fleet.hub_folder import HubFolder
from envhub.fleet.kept_hub import KeptHub
from envhub.fleet.names import hub_name
from envhub.fleet.priority import take_priority_of
from envhub.fleet.reports import FleetHub, HubAccess, HubState
from envhub.fleet.settings import HubSettings
from envhub.transport import sockets
from envhub.transport.keys import HubKeys, token_of

CALLS_MAX = 16  # that are answered at one time


class HubActor:
    """Keeps a hub on the node to which Ray has brought this actor.

    It makes the hub's keys, and has the clients' secret key in its memory only. When Ray starts the actor again, the
    keys are new ones: clients ask it for them together with the address, which then is another one, too.
    """

    def __init__(self, fleet: str, index: int, settings: HubSettings) -> None:
        write_no_core_file()
        self._name, self._index, self._settings = hub_name(fleet, index), index, settings
        self._node = _node_address()
        self._folder = HubFolder()
        # The hub has the descriptor, too: its keys and its configuration are those of this folder at each start.
        inside = Path(f"/proc/self/fd/{self._folder.descriptor}")
        self._keys = _make_keys(inside / "keys")
        binds = f"tcp://{self._node}:0", f"ipc://{self._folder.path / 'hub.sock'}"
        environ = _environment(_own_variables())
        self._hub = KeptHub(self._arguments(inside), binds, environ, [self._folder.descriptor])
        # A hub ends with the thread that started it, so that is none of Ray's, which may end before the actor.
        threading.Thread(target=self._keep, name="hub", daemon=True).start()

    def report(self) -> FleetHub:
        """Return what the hub does."""
        hub, addresses = self._hub, self._hub.addresses
        state = HubState.SERVING if addresses else hub.state
        address = addresses[0] if addresses else ""
        return FleetHub(self._index, state.value, self._node, address, hub.pid, hub.starts, hub.why, hub.failures)

    def access(self) -> HubAccess | None:
        """Return what a client connects with; None if the hub does not listen now."""
        if not (addresses := self._hub.addresses):
            return None
        tcp, ipc = addresses
        return HubAccess(f"envhub://{token_of(self._keys).reveal_secret()}@{tcp.removeprefix('tcp://')}", ipc)

    def settings(self) -> HubSettings:
        """Return the settings of each hub of the fleet."""
        return self._settings

    def log(self, lines: int) -> list[str]:
        """Return the last lines of the hub's log, the newest last."""
        return self._hub.log(lines)

    def drain(self) -> None:
        """Drain the hub, wait for its end, and leave no file."""
        self._hub.stop()
        self._folder.remove()

    def _arguments(self, folder: Path) -> list[str]:
        settings = self._settings
        arguments = ["--name", self._name, "--keys", str(folder / "keys"), "--cpus", str(max(1, int(settings.cpus)))]
        if settings.config:
            (folder / "hub.toml").write_text(settings.config)
            arguments += ["--config", str(folder / "hub.toml")]
        return [*settings.envs, *arguments]

    def _keep(self) -> None:
        try:
            for line in take_priority_of(os.getppid()):
                self._hub.say(line)
            self._hub.run()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # Ray starts the actor again


def _node_address() -> str:
    """Return the address by which the nodes of the cluster reach this one; one of IPv6 in brackets."""
    node = ray.get_runtime_context().get_node_id()
    host = str(next(each["NodeManagerAddress"] for each in ray.nodes() if each["NodeID"] == node))
    return f"[{host}]" if ":" in host else host


def _make_keys(folder: Path) -> HubKeys:
    """Make the hub's keys and a client's, which has the rights of the hub's own user: programs of Ray run as that."""
    from envhub_server.network.key_folder import KeyFolder

    keys = KeyFolder(folder)
    public, secret = sockets.new_key_pair()
    hub = sockets.public_key(keys.make_secret())
    keys.add("fleet", public, "admin")
    return HubKeys(hub, secret)


def _own_variables() -> dict[str, str]:
    """Return the variables that the fleet's user has set for its hubs."""
    variables: dict[str, Any] = dict(ray.get_runtime_context().runtime_env).get("env_vars", {})
    return {name: str(value) for name, value in variables.items()}


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the hub: this process's, without what Ray adds for its workers."""
    added = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT")
    kept = {name: value for name, value in os.environ.items() if name not in added and not name.startswith("RAY_")}
    return {**kept, **variables}
