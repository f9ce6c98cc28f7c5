"""The names a hub offers: those of its patterns depend on what is registered, which only a worker finds out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from envhub import messages
from envhub_server.registry import Registry
from envhub_server.supervisor import Handlers, Supervisor

Tell = Callable[[list[str]], None]


class Lister:
    """Asks a short-lived worker for the registered ids, once; then it knows them."""

    def __init__(self, supervisor: Supervisor, registry: Registry) -> None:
        self._supervisor = supervisor
        self._registry = registry
        self._known: list[str] | None = None if registry.has_patterns else registry.exact
        self._asking: list[Tell] = []

    def ask(self, tell: Tell) -> None:
        """Call ``tell`` with the names, now or once they are known.

        Where the worker cannot list them, because a module does not import, ``tell`` gets the names without patterns.

        Raises:
            OSError: no worker can be started.
        """
        if self._known is not None:
            tell(self._known)
            return
        if not self._asking:
            (worker,) = self._supervisor.start([Handlers(self._on_message, self._on_exit)])
            worker.tell(messages.ListNames(self._registry.modules))
        self._asking.append(tell)

    def _on_message(self, message: Any) -> None:
        if isinstance(message, messages.EnvNames):
            self._known = self._registry.offered(message.names)

    def _on_exit(self, how: str) -> None:
        asking, self._asking = self._asking, []
        for tell in asking:
            tell(self._registry.exact if self._known is None else self._known)
