"""The actor of Ray that keeps a hub of a fleet, and what it says of the hub."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ray

from envhub.fleet.kept_hub import HubFolder, KeptHub, take_priority_of
from envhub.fleet.names import hub_name
from envhub.process import write_no_core_file
from envhub.transport import sockets
from envhub.transport.keys import HubKeys, token_of

CALLS_MAX = 16  # that are answered at one time
FAILURES_MAX = 3  # in a row, after which a hub that never listened is taken for one that cannot
POLL_S = 0.1


@dataclass(frozen=True)
class HubSettings:
    """Settings of each hub of a fleet, as ``Fleet.up`` takes them; none is secret, for Ray keeps them.

    ``config`` is the text of a configuration file of ``envhub serve``, or empty.
    """

    envs: tuple[str, ...] = ()
    config: str = ""
    cpus: float = 1.0
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class FleetHub:
    """State of a hub of a fleet.

    Attributes:
        index: number of the hub in its fleet.
        state: ``placing`` while Ray has no place for it, ``starting``, or ``serving`` if clients can connect.
        address: where it listens, without keys; empty if it does not.
        pid: of its process; 0 without one.
        starts: number of times that its process was started, since its actor was.
        why: how its process ended the last time; empty if it has not.
    """

    index: int
    state: str = "placing"
    address: str = ""
    pid: int = 0
    starts: int = 0
    why: str = ""


class HubAccess(NamedTuple):
    """Addresses of a hub that serves: ``tcp`` has the secret key of the fleet's clients, ``ipc`` is its socket."""

    tcp: str
    ipc: str

    def __repr__(self) -> str:
        return f"HubAccess(ipc={self.ipc!r})"


class HubActor:
    """Keeps a hub on the node to which Ray has brought this actor.

    It makes the hub's keys, and has the clients' secret key in its memory only. When Ray starts the actor again, the
    keys are new ones: clients ask it for them together with the address, which then is another one, too.
    """

    def __init__(self, fleet: str, index: int, settings: HubSettings) -> None:
        write_no_core_file()
        self._name, self._index, self._settings = hub_name(fleet, index), index, settings
        self._folder = HubFolder()
        # The hub has the descriptor, too: its keys and its configuration are those of this folder at each start.
        inside = Path(f"/proc/self/fd/{self._folder.descriptor}")
        self._keys = _make_keys(inside / "keys")
        binds = f"tcp://{_node_address()}:0", f"ipc://{self._folder.path / 'hub.sock'}"
        self._hub = KeptHub(self._arguments(inside), binds, _environment(), [self._folder.descriptor])
        # A hub ends with the thread that started it, so that is none of Ray's, which may end before the actor.
        threading.Thread(target=self._keep, name="hub", daemon=True).start()

    def report(self) -> FleetHub:
        hub, addresses = self._hub, self._hub.addresses
        state, address = ("serving", addresses[0]) if addresses else ("starting", "")
        return FleetHub(self._index, state, address, hub.pid, hub.starts, hub.why)

    def await_serving(self) -> str:
        """Wait until the hub serves; returns why it cannot, with the end of its log, if it ends again and again."""
        while not self._hub.addresses:
            if self._hub.failures >= FAILURES_MAX:
                return "\n".join([f"{self._hub.why}; its log ends with:", *self._hub.lines])
            time.sleep(POLL_S)
        return ""

    def access(self) -> HubAccess | None:
        if not (addresses := self._hub.addresses):
            return None
        tcp, ipc = addresses
        return HubAccess(f"envhub://{token_of(self._keys).reveal_secret()}@{tcp.removeprefix('tcp://')}", ipc)

    def settings(self) -> HubSettings:
        return self._settings

    def drain(self) -> None:
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
            if why := take_priority_of(os.getppid()):
                self._hub.say(why)
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


def _environment() -> dict[str, str]:
    """Return the environment of the hub: this process's, without what Ray adds for its workers."""
    own: Mapping[str, Any] = dict(ray.get_runtime_context().runtime_env).get("env_vars", {})
    added = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT")
    kept = {name: value for name, value in os.environ.items() if name not in added and not name.startswith("RAY_")}
    return {**kept, **{name: str(value) for name, value in own.items()}}
