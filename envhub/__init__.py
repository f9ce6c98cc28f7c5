"""EnvHub: Gymnasium environments in a hub, one ``VectorEnv`` from this machine or another.

    import envhub

    envs = envhub.make_vec("CartPole-v1", num_envs=64)  # a private hub starts and ends with this program
    envs = envhub.make_vec("CartPole-v1", num_envs=64, hub="tcp://simbox:5555")  # a hub started by `envhub serve`

Gymnasium makes such envs, too, by ``gymnasium.make_vec("envhub:EnvHub/Remote-v0", num_envs=64, env_id=..., url=...)``.

Other modules are imported on first use: a health check needs neither Gymnasium nor a server library, and a worker
under an old Python imports single modules of this package.
"""

import importlib.util
import sys
from functools import partial
from importlib import import_module
from typing import Any, Callable, List

__version__ = "0.1.0"

_HOMES = {
    "ActionChunk": "envhub.action_chunk",
    "AsyncVectorEnv": "envhub_client.envs.async_vector_env",
    "EnvRunner": "envhub_server.worker.row",
    "Client": "envhub_client.client",
    "EnvFailure": "envhub.env_failure",
    "FaultOptions": "envhub_client.session.options",
    "HostingOptions": "envhub_client.session.options",
    "HubEnv": "envhub_client.envs.single_env",
    "HubVectorEnv": "envhub_client.envs.vector_env",
    "MakeKeywords": "envhub_client.option_keywords",
    "RecordOptions": "envhub_client.record_options",
    "SessionOptions": "envhub_client.session.options",
    "Sizing": "envhub_client.session.description",
    "Snapshot": "envhub_client.envs.snapshots",
    "StepObserver": "envhub_client.envs.vector_env",
    "connect": "envhub_client.client",
    "legacy_infos": "envhub_client.frameworks.cleanrl",
    "make": "envhub_client.make",
    "make_vec": "envhub_client.make",
    "serve": "envhub_server.serve",
}
_ERRORS = """
    AccessDenied AddressError ConnectionInUse EnvHubError EnvRaised EnvTimeout Forked HubLost HubTimeout HubUnreachable
    KeysError LocalProtocolError ProtocolError RemoteProtocolError RequestRefused RestartsExhausted SessionLost
    SnapshotLimit SnapshotLost SnapshotRefused SpaceMismatch UnsupportedSpace VersionMismatch WorkerDied
"""
_HOMES.update(dict.fromkeys(_ERRORS.split(), "envhub.errors"))
_HOMES.update(dict.fromkeys(["NothingPending", "SessionBusy", "SessionClosed"], "envhub.vector_errors"))

# Modules that are imported on first use, most of them with their framework.
_MODULES = frozenset(["errors", "fleet", "pettingzoo", "rllib", "sb3", "tianshou", "torchrl"])

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"envhub.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'envhub' has no attribute {name!r}")
    if name == "serve" and sys.platform != "linux":
        from envhub.errors import only_linux

        raise AttributeError(only_linux("envhub.serve"))
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> List[str]:
    return __all__


def _register() -> None:
    import gymnasium

    # An old Gymnasium in a worker does not support it.
    if hasattr(gymnasium, "make_vec") and "EnvHub/Remote-v0" not in gymnasium.registry:
        home = "envhub_client.make"
        gymnasium.register("EnvHub/Remote-v0", f"{home}:make_remote", vector_entry_point=f"{home}:make_vec_remote")


class _WhenImported:
    """A finder of modules that registers ``EnvHub/Remote-v0`` once Gymnasium has been imported."""

    _is_finding = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != "gymnasium" or self._is_finding:
            return None
        self._is_finding = True
        try:
            spec: Any = importlib.util.find_spec(fullname)
        finally:
            self._is_finding = False
        if spec is not None and spec.loader is not None:
            # In the instance: code reads the package's files by its loader.
            spec.loader.exec_module = partial(self._execute, spec.loader, spec.loader.exec_module)
        return spec

    def _execute(self, loader: Any, execute: Callable[[Any], None], module: Any) -> None:
        execute(module)
        del loader.exec_module
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        _register()


if "gymnasium" in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _WhenImported())
