"""The features of sessions that observe them: replays, as the operator wishes."""

from __future__ import annotations

from envhub_server.config import HubConfig
from envhub_server.hub.replay_keeper import ReplayKeeper
from envhub_server.hub.replay_writer import ReplayWriter
from envhub_server.hub.runtime import SessionRuntime
from envhub_server.loop.poller import Poller


class SessionFeatures:
    """Features of one hub's sessions. It owns the writer of replays."""

    def __init__(self, config: HubConfig, poller: Poller) -> None:
        folder = config.replay_folder()
        self._replays = None if folder is None else ReplayWriter(folder, poller)

    @property
    def keeps_replays(self) -> bool:
        """True if the operator wants replays of envs that fail."""
        return self._replays is not None

    def open(self) -> None:
        """Begin to write replays."""
        if self._replays is not None:
            self._replays.begin()

    def add(self, runtime: SessionRuntime) -> None:
        """Have replays of a new session kept."""
        if self._replays is not None:
            faults = runtime.state.make.faults
            runtime.observe_by(ReplayKeeper(self._replays, runtime.number, runtime.interpreter, faults))

    def close_replays(self) -> None:
        """Write the replays that are left."""
        if self._replays is not None:
            self._replays.close()
