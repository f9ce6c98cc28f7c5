"""``EnvHub/Remote-v0``: envs of a hub by ``gymnasium.make`` and ``gymnasium.make_vec``.

    gymnasium.make_vec("envhub:EnvHub/Remote-v0", num_envs=64, env_id="ALE/Pong-v5", url="tcp://simbox:5555")

Importing ``envhub`` registers it: at once if Gymnasium is imported, else when Gymnasium is imported. ``envhub`` itself
does not import Gymnasium.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from envhub.errors import RequestRefused

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:  # importlib.abc imports zipfile and tempfile, which would slow down every program
    Loader = MetaPathFinder = object

REMOTE = "EnvHub/Remote-v0"


def register() -> None:
    """Add ``EnvHub/Remote-v0`` to Gymnasium's registry, unless it is there already; imports Gymnasium."""
    import gymnasium

    # An old Gymnasium in a worker does not support it.
    if hasattr(gymnasium, "make_vec") and REMOTE not in gymnasium.registry:
        gymnasium.register(
            REMOTE, entry_point="envhub_client.remote:make", vector_entry_point="envhub_client.remote:make_vec"
        )


def refuse_to_make(**kwargs: Any) -> Any:
    """The entry point of specs that came over the network, whose own entry point the other side chose.

    Raises ``RequestRefused``.
    """
    raise RequestRefused(
        "this spec came from a hub, so that nothing it names is run here: make the env there, by "
        "envhub.make(spec.id, hub=...), or here by its id, gymnasium.make(spec.id)"
    )


def register_with_gymnasium() -> None:
    """Register now if Gymnasium is imported, else when it is imported."""
    if "gymnasium" in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported(MetaPathFinder):
    def __init__(self) -> None:
        self._asking = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != "gymnasium" or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # code reads the package's files by its loader
        self._loader.exec_module(module)
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _WhenImported)]
        register()
