"""``RecordedVectorEnv``: a vector env whose episodes are written to disk."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from envhub.recording.options import Recorded, RecordOptions
from envhub_client.envs.episode_recording import EpisodeRecording
from envhub_client.envs.origin import Origin
from envhub_client.envs.vector_env import HubVectorEnv
from envhub_client.session.base import VectorSession


class RecordedVectorEnv(HubVectorEnv, VectorEnv[Any, Any, np.ndarray]):  # some frameworks look at direct bases only
    """A ``HubVectorEnv`` that writes down what the trainer sees; ``envhub.make_vec(..., record=...)`` makes one.

    Parts of a batch (``send``, ``recv``) are not offered. A step whose rewards have axes raises ``ValueError``: a data
    set of Minari has one number for each step.
    """

    def __init__(self, session: VectorSession, origin: Origin, options: RecordOptions) -> None:
        """Use this session, and begin to record its envs; it is closed if that cannot be.

        Raises:
            Exception: as for ``EpisodeRecording``.
        """
        super().__init__(session, origin)
        try:
            self._recording = EpisodeRecording(self, options, origin)
            self.add_observer(self._recording)
        except BaseException:
            self.close(terminate=True)
            raise

    @property
    def recorded(self) -> Recorded:
        """Counts of what is recorded so far, and what was dropped."""
        return self._recording.recorded
