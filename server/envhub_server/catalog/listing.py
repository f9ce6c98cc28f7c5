"""The names that a hub offers, found by a worker, since only a worker imports modules with ids and factories."""

from __future__ import annotations

import structlog

from envhub.protocol import messages
from envhub_server.catalog.registry import FactoryNotFound, Registry
from envhub_server.ipc import control
from envhub_server.processes.supervisor import Supervisor
from envhub_server.processes.worker_events import WorkerEvent, WorkerExited, WorkerSaid

LISTING = -1  # in place of a session's number, in events of the worker that lists names

log = structlog.get_logger("envhub.listing")


class Listing:
    """The names, which a short-lived worker finds once.

    Attributes:
        names: that the hub offers; None before they are known.
        asking: whether a worker is finding them.
        refused: the error for the first factory that does not exist.
    """

    def __init__(self, supervisor: Supervisor, registry: Registry) -> None:
        """List the names of the entries in ``registry``."""
        self.names: list[str] | None = None
        self.asking = False
        self.refused: FactoryNotFound | None = None
        self._supervisor = supervisor
        self._registry = registry

    def start(self) -> None:
        """Start the worker.

        Raises:
            OSError: no worker can be started.
        """
        (worker,) = self._supervisor.start(LISTING, [0])
        worker.send(control.ListNames(self._registry.modules, self._registry.factories))
        self.asking = True

    def handle(self, event: WorkerEvent) -> None:
        """Handle an event of the worker; after its exit ``asking`` is False, whether or not the names are known."""
        if isinstance(event, WorkerExited):
            if self.names is None:
                log.warning("names_unknown", why=f"the worker that lists them {event.cause.how}")
            self.asking = False
        if not isinstance(event, WorkerSaid):
            return
        match event.message:
            case control.RowFailed(failure):
                log.warning("module_failed", type=failure.type, why=failure.message)
            case messages.EnvNames(names):
                self.names = self._registry.offered(names)
                for entry in self._registry.unmatched(names):
                    log.warning("env_unknown", env=entry, why="no such id is registered here; clients cannot make it")
                self.asking = False
            case control.FactoryMissing(entry, why):
                self.refused = self.refused or self._registry.not_found(entry, why)
