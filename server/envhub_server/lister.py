"""The names a hub offers: those of its patterns depend on what is registered, which only a worker finds out."""

from __future__ import annotations

from collections.abc import Callable

from envhub import messages
from envhub_server.channel import ChannelClosed
from envhub_server.hosting import Watch
from envhub_server.registry import Registry
from envhub_server.supervisor import WorkerProcess

Tell = Callable[[list[str]], None]


class Lister:
    """Asks a short-lived worker for the registered ids, once; then it knows them."""

    def __init__(self, watch: Watch, registry: Registry) -> None:
        self._watch = watch
        self._registry = registry
        self._known: list[str] | None = None if registry.has_patterns else registry.exact
        self._asking: list[Tell] = []
        self._worker: WorkerProcess | None = None

    def ask(self, tell: Tell) -> None:
        """Call ``tell`` with the names, now or once they are known.

        Where the worker cannot list them, because a module does not import, ``tell`` gets the names without patterns.
        """
        if self._known is not None:
            tell(self._known)
            return
        self._asking.append(tell)
        if self._worker is None:
            worker = self._worker = WorkerProcess(0)
            self._watch.watch(worker.pidfd, lambda: self._on_exit(worker))
            self._watch.watch(worker.channel.fileno(), lambda: self._read(worker))
            worker.channel.send(messages.ListNames(self._registry.modules))

    def _read(self, worker: WorkerProcess) -> None:
        try:
            while found := worker.channel.receive():
                for message in found:
                    if isinstance(message, messages.EnvNames):
                        self._known = self._registry.offered(message.names)
        except ChannelClosed:
            self._watch.unwatch(worker.channel.fileno())  # everything it sent was read

    def _on_exit(self, worker: WorkerProcess) -> None:
        self._read(worker)
        self._watch.unwatch(worker.channel.fileno())
        self._watch.unwatch(worker.pidfd)
        worker.reap()
        self._worker = None
        asking, self._asking = self._asking, []
        for tell in asking:
            tell(self._registry.exact if self._known is None else self._known)
