"""The departure of a worker that is recycled: it leaves its rows to another worker.

It leaves them between the episodes of its envs, or at once if the hub says so.
"""

from __future__ import annotations

from typing import Sequence

from envhub.arena.memory import FRESH, ONGOING, REPORT_PENDING, Arena
from envhub_server.ipc import control
from envhub_server.ipc.channel import Channel
from envhub_server.worker.bells import Bells
from envhub_server.worker.context import HostedEnvs
from envhub_server.worker.env_batch import RowGroup


class Departure:
    """Decides when a worker leaves its rows.

    Attributes:
        awaited: whether a step may be the last before something is due: ``note_step`` has to follow each one.
        left: the groups that another worker serves now.
    """

    def __init__(self, channel: Channel, envs: HostedEnvs, bells: Bells) -> None:
        self._channel, self._envs, self._bells = channel, envs, bells
        self.awaited = False
        self.left: list[RowGroup] = []
        self._episodes_left = 0  # until EpisodesDone is sent; 0 if the hub does not need it
        self._leaving = self._cutting = False

    def attach(self, arena: Arena) -> None:
        self._arena = arena

    def count_episodes(self, episodes_max: int) -> None:
        self._episodes_left = episodes_max
        self._await()

    def _await(self) -> None:
        self.awaited = self._leaving or self._episodes_left > 0

    def leave(self, leave: control.Leave) -> None:
        self._leaving, self._cutting = True, leave.cut
        self._await()
        self.leave_between_episodes()

    def note_step(self, groups: Sequence[RowGroup]) -> None:
        """Send the hub ``EpisodesDone`` once the envs have reached their number of episodes, and leave if due."""
        if self._episodes_left:
            ended = self._arena.terminations | self._arena.truncations
            self._episodes_left -= sum(int(ended[index]) for group in groups for index in group.indices)
            if self._episodes_left <= 0:
                self._episodes_left = 0
                self._channel.send(control.EpisodesDone())
                self._await()
        self.leave_between_episodes()

    def leave_between_episodes(self) -> None:
        """Leave if that is due and every env's next step is a reset, or the hub wants a truncation."""
        if not self._leaving or not self._bells.serving:
            return  # a result that is written into an arena before its rows have moved there is lost
        needs_reset, indices = self._arena.needs_reset.data, self._envs.indices
        ongoing = [index for index in indices if needs_reset[index] == ONGOING]
        reported = all(needs_reset[index] != REPORT_PENDING for index in indices)
        if reported and (self._cutting or not ongoing):
            for index in indices:
                needs_reset[index] = REPORT_PENDING if index in ongoing else FRESH
            self._bells.unwatch()
            self.left, self._envs.groups, self._leaving = self._envs.groups, [], False
            self._await()
            self._channel.send(control.Left())
