"""The features of sessions that observe them: recordings and replays, as the operator wishes."""

from __future__ import annotations

from collections.abc import Callable

from envhub_server.catalog.env_settings import EnvSettings
from envhub_server.config import HubConfig
from envhub_server.hub.recordings import Recordings
from envhub_server.hub.replay_keeper import ReplayKeeper
from envhub_server.hub.replay_writer import ReplayWriter
from envhub_server.hub.runtime import SessionRuntime
from envhub_server.loop.poller import Poller


class SessionFeatures:
    """Features of one hub's sessions. It owns the recordings that run, and the writer of replays."""

    def __init__(self, config: HubConfig, poller: Poller) -> None:
        folder = config.replay_folder()
        self._recordings = Recordings(poller, config.recordings_memory_max)
        self._replays = None if folder is None else ReplayWriter(folder, poller)

    @property
    def keeps_replays(self) -> bool:
        """True if the operator wants replays of envs that fail."""
        return self._replays is not None

    def open(self) -> None:
        """Begin to write replays."""
        if self._replays is not None:
            self._replays.begin()

    def add(self, runtime: SessionRuntime, settings: EnvSettings) -> None:
        """Have replays of a new session kept and its episodes recorded."""
        make = runtime.state.make
        if self._replays is not None:
            runtime.observe_by(ReplayKeeper(self._replays, runtime.number, runtime.interpreter, make.faults))
        if settings.recorded is not None:
            runtime.observe_by(self._recordings.begin(settings, make, runtime.token.hex()[:8]))

    def close_recordings(self, wait_s: Callable[[], float]) -> None:
        """Wait until all episodes are written, for ``wait_s()`` seconds at most, which is called again and again."""
        self._recordings.close(wait_s)

    def close_replays(self) -> None:
        """Write the replays that are left."""
        if self._replays is not None:
            self._replays.close()
