"""The envs that a hub offers: their names, and which of them are ready."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from envhub.errors import without_folders
from envhub.protocol import messages
from envhub.protocol.hub import HubProtocol, Incoming
from envhub.protocol.messages import Failure
from envhub_server.catalog.env_settings import EnvSettings
from envhub_server.catalog.listing import LOOK_S, Listing
from envhub_server.catalog.registry import EnvNotFound
from envhub_server.config import HubConfig
from envhub_server.hub.planner import Offer
from envhub_server.loop import Loop
from envhub_server.processes.interpreter import InterpreterKey
from envhub_server.processes.supervisor import Supervisor
from envhub_server.processes.worker_handle import WorkerEvent


class Offers:
    """Offers of one hub. It owns the listing of their names, and the LIST requests that wait for it."""

    def __init__(
        self,
        config: HubConfig,
        supervisor: Supervisor,
        protocol: HubProtocol,
        loop: Loop,
        on_listed: Callable[[], None],
    ) -> None:
        """List nothing yet; ``on_listed`` is called once, when it is known which envs are ready."""
        self._config, self._registry = config, config.registry()
        self._listing = Listing(supervisor, self._registry)
        self._protocol, self._loop, self._on_listed = protocol, loop, on_listed
        self._is_listed = False  # True once it is known which envs are ready
        self._waiting: list[Incoming] = []  # LIST requests

    @property
    def offer(self) -> Offer:
        """The envs as far as they are known."""
        return Offer(self._config, self._registry, self._listing.names)

    @property
    def refused(self) -> EnvNotFound | None:
        """The error for an entry that can never be made, or for a required env that is not ready; None if none is."""
        return self._listing.refused

    @property
    def unready(self) -> Mapping[str, str]:
        """The reason why an env cannot be made, by its name."""
        return self._listing.unready

    @property
    def starting(self) -> Mapping[str, str]:
        """The stage of an interpreter or a module that takes long to start, by the names of its envs."""
        return self._listing.starting

    def example(self) -> str:
        """The name of an env that is ready; empty if none is."""
        return self._listing.example()

    # --- names --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the workers that find the names.

        Raises:
            OSError: no worker can be started.
        """
        self._listing.start()
        self._plan_look()

    def answer(self, request: Incoming) -> Failure | None:
        """Answer LIST, now or once the names are known; or return why it cannot be answered."""
        if self._listing.names is not None:
            self._protocol.answer(request, messages.EnvNames(self._listing.names))
            return None
        try:
            if not self._listing.asking:
                self.start()
        except OSError as error:
            return Failure("limit", "hub", f"a worker cannot be started: {error.strerror}")
        self._waiting.append(request)
        return None

    def handle(self, event: WorkerEvent) -> None:
        """Note what a worker that finds names reports; ``report`` tells of it."""
        self._listing.handle(event)

    def report(self) -> None:
        """Call ``on_listed`` if it is due, and answer the requests that wait, if the names are known."""
        if self._listing.done and not self._is_listed:
            self._is_listed = True
            self._on_listed()
        if not self._listing.asking:
            waiting, self._waiting = self._waiting, []
            for request in waiting:
                self._protocol.answer(request, messages.EnvNames(self._listing.names or []))

    def _look(self) -> None:
        self._listing.look(self._loop.clock.now_s())
        self._plan_look()

    def _plan_look(self) -> None:
        at_s = self._loop.clock.now_s() + LOOK_S if self._listing.running else math.inf
        self._loop.schedule.set(self._look, at_s)

    # --- readiness ----------------------------------------------------------------------------------------------------

    def refusal(self, name: str, settings: EnvSettings, hides_folders: bool) -> Failure | None:
        """Refuse an env that is not ready, and try it again; None if it is ready, or may be by now."""
        if name in self._listing.unready:
            self._try_again(settings.interpreter)
        if why := self._listing.undrawn.get(settings.interpreter, ""):
            self._try_again(settings.interpreter)
            why = without_folders(why) if hides_folders else why
        if why:
            return Failure("env_unready", "hub", f"{name!r} is not ready: {why}")
        return None

    def _try_again(self, key: InterpreterKey) -> None:
        self._listing.try_again(key)
        self._plan_look()
