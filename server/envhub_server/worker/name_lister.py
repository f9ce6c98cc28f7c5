"""Lists what a hub can make: the names in Gymnasium's registry, and what is wrong with factories."""

from __future__ import annotations

import importlib
import signal

from envhub.errors import shortened
from envhub.protocol import messages
from envhub.values.gym_api import registered
from envhub_server.ipc import control
from envhub_server.ipc.channel import Channel
from envhub_server.ipc.packages import remedy_of
from envhub_server.worker import rendering
from envhub_server.worker.context import FailureReports
from envhub_server.worker.env_sources import why_missing

WHY_CHARS_MAX = 300  # of the exception of a module
FACTORIES_S = 60  # time limit for importing the modules of all factories, before a client asks for an env


class NameLister:
    """Lists for one worker, which makes no envs then."""

    def __init__(self, channel: Channel, reports: FailureReports) -> None:
        self._channel, self._reports = channel, reports

    def list(self, wanted: control.ListNames) -> None:
        """Import the modules, send the names, try the factories and the rendering."""
        for module in wanted.modules:
            self._channel.send(control.Building(0, module))
            try:
                importlib.import_module(module)
            except BaseException as error:
                self._reports.send(error, None, "factory_failed")
        self._channel.send(control.Building(0))
        self._channel.send(messages.EnvNames(registered()))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends this process
        signal.alarm(FACTORIES_S)
        for entry in wanted.entries:
            self._channel.send(control.Building(0, entry.partition(":")[0]))
            try:
                missing = why_missing(entry)
            except BaseException as error:
                self._reports.send(error, None, "factory_failed")
                text = shortened(f"{type(error).__name__}: {error}", WHY_CHARS_MAX)
                self._channel.send(control.FactoryFailed(entry, text, remedy_of(error, served=True), missing=False))
            else:
                if missing:
                    package = entry.partition(":")[0].partition(".")[0]
                    is_there = getattr(missing, "name", None) != package
                    self._channel.send(
                        control.FactoryFailed(entry, str(missing), remedy_of(missing, served=True), is_there)
                    )
        self._channel.send(control.Building(0))
        if wanted.rendering:
            self._channel.send(control.RenderingTried(rendering.why_not(wanted.rendering)))
