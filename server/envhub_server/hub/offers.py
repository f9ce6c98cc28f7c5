"""The envs that a hub offers: their names, and which of them are ready."""

from __future__ import annotations

import math
from collections.abc import Callable

from envhub.errors import without_folders
from envhub.protocol import messages
from envhub.protocol.hub import HubProtocol, Incoming
from envhub.protocol.messages import Failure
from envhub_server.catalog.env_settings import EnvSettings
from envhub_server.catalog.listing import LOOK_S, Listing
from envhub_server.config import HubConfig
from envhub_server.loop import Loop
from envhub_server.processes.interpreter import InterpreterKey
from envhub_server.processes.supervisor import Supervisor


class Offers:
    """Offers of one hub. It owns the LIST requests that wait for the names."""

    def __init__(
        self,
        config: HubConfig,
        supervisor: Supervisor,
        protocol: HubProtocol,
        loop: Loop,
        on_listed: Callable[[], None],
    ) -> None:
        """Call ``on_listed`` once, when it is known which envs are ready."""
        self.registry = config.registry()  # what can be made
        self.listing = Listing(supervisor, self.registry)  # the names of the envs, and which of them are ready
        self._protocol, self._loop, self._on_listed = protocol, loop, on_listed
        self._is_listed = False  # True once it is known which envs are ready
        self._waiting: list[Incoming] = []  # LIST requests

    # --- names --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.listing.start()
        self._plan_look()

    def answer(self, request: Incoming) -> Failure | None:
        """Answer LIST, now or once the names are known; or return why it cannot be answered."""
        if self.listing.names is not None:
            self._protocol.answer(request, messages.EnvNames(self.listing.names))
            return None
        try:
            if not self.listing.asking:
                self.start()
        except OSError as error:
            return Failure("limit", "hub", f"a worker cannot be started: {error.strerror}")
        self._waiting.append(request)
        return None

    def report(self) -> None:
        """Call ``on_listed`` if it is due, and answer the requests that wait, if the names are known."""
        if self.listing.done and not self._is_listed:
            self._is_listed = True
            self._on_listed()
        if not self.listing.asking:
            waiting, self._waiting = self._waiting, []
            for request in waiting:
                self._protocol.answer(request, messages.EnvNames(self.listing.names or []))

    def _look(self) -> None:
        self.listing.look(self._loop.clock.now_s())
        self._plan_look()

    def _plan_look(self) -> None:
        at_s = self._loop.clock.now_s() + LOOK_S if self.listing.running else math.inf
        self._loop.schedule.set(self._look, at_s)

    # --- readiness ----------------------------------------------------------------------------------------------------

    def refusal(self, name: str, settings: EnvSettings, hides_folders: bool) -> Failure | None:
        """Refuse an env that is not ready, and try it again; None if it is ready, or may be by now."""
        if name in self.listing.unready:
            self._try_again(settings.interpreter)
        if why := self.listing.undrawn.get(settings.interpreter, ""):
            self._try_again(settings.interpreter)
            why = without_folders(why) if hides_folders else why
        if why:
            return Failure("env_unready", "hub", f"{name!r} is not ready: {why}")
        return None

    def _try_again(self, key: InterpreterKey) -> None:
        self.listing.try_again(key)
        self._plan_look()
