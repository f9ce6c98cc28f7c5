"""The names a hub offers: which of its entries exist depends on what is registered, which only a worker finds out.

So does whether factories exist, since the hub imports none of their modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from envhub.protocol import messages
from envhub_server.catalog.registry import FactoryNotFound, Registry
from envhub_server.ipc import control
from envhub_server.processes.exit_cause import ExitCause
from envhub_server.processes.supervisor import Supervisor
from envhub_server.processes.worker_handle import Handlers

Tell = Callable[[list[str]], None]

log = structlog.get_logger("envhub.lister")


class Listing:
    """Asks a short-lived worker for the registered ids, once; then it knows them."""

    def __init__(self, supervisor: Supervisor, registry: Registry, refuse: Callable[[FactoryNotFound], None]) -> None:
        """Ask for what is in ``registry``, and ``refuse`` each factory in there that does not exist."""
        self._supervisor = supervisor
        self._registry = registry
        self._refuse = refuse
        self._known: list[str] | None = None
        self._asking: list[Tell] | None = None

    def start(self) -> None:
        """Begin to find out, and log entries that name nothing.

        Raises:
            OSError: no worker can be started.
        """
        (worker,) = self._supervisor.start([Handlers(self._on_message, self._on_exit)])
        worker.tell(control.ListNames(self._registry.modules, self._registry.factories))
        self._asking = []

    def ask(self, tell: Tell) -> None:
        """Call ``tell`` with the names, now or once they are known; without them if their worker dies.

        Raises:
            OSError: no worker can be started.
        """
        if self._known is not None:
            tell(self._known)
            return
        if self._asking is None:
            self.start()
        assert self._asking is not None
        self._asking.append(tell)

    def _on_message(self, message: Any) -> None:
        if isinstance(message, control.RowFailed):
            log.warning("module_failed", type=message.failure.type, why=message.failure.message)
        if isinstance(message, messages.EnvNames):
            self._known = self._registry.offered(message.names)
            for entry in self._registry.unmatched(message.names):
                log.warning("env_unknown", env=entry, why="no such id is registered here; clients cannot make it")
            self._tell(self._known)
        if isinstance(message, control.FactoryMissing):
            self._refuse(self._registry.not_found(message.entry, message.why))

    def _on_exit(self, ending: ExitCause) -> None:
        if self._known is None:
            log.warning("names_unknown", why=f"the worker that lists them {ending.how}")
        self._tell(self._known or [])

    def _tell(self, names: list[str]) -> None:
        asking, self._asking = self._asking or [], None
        for tell in asking:
            tell(names)
