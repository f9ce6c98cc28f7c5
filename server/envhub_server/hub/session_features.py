"""The features of sessions that observe them: replays, as the operator wishes."""

from __future__ import annotations

from envhub_server.config import HubConfig
from envhub_server.hub.replay_keeper import ReplayKeeper, ReplayWriter
from envhub_server.hub.runtime import SessionRuntime
from envhub_server.loop import Poller


class SessionFeatures:
    """Features of one hub's sessions. It owns the writer of replays."""

    def __init__(self, config: HubConfig, poller: Poller) -> None:
        self._trace_bytes_max = config.trace_bytes_max
        self._replays: ReplayWriter | None = None
        if config.replays is not None and config.replays_bytes_max and config.trace_bytes_max:
            self._replays = ReplayWriter(config.replays, config.replays_bytes_max, poller)

    @property
    def keeps_replays(self) -> bool:
        """True if the operator wants replays of envs that fail."""
        return self._replays is not None

    def add(self, runtime: SessionRuntime) -> None:
        """Have replays of a new session kept."""
        if self._replays is not None:
            faults, is_vector = runtime.state.make.faults, runtime.state.recipe.settings.vector
            bytes_max = self._trace_bytes_max
            runtime.observe_by(ReplayKeeper(self._replays, runtime.interpreter, faults, is_vector, bytes_max))

    def close_replays(self) -> None:
        """Write the replays that are left."""
        if self._replays is not None:
            self._replays.close()
