"""Making the rows of a lost hub again, in the background."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from envhub import errors
from envhub.values import spaces
from envhub_client.connection.connection import Connection
from envhub_client.connection.known_hubs import Member
from envhub_client.deadline import Deadline
from envhub_client.federation.absent_lane import AbsentLane
from envhub_client.federation.lane import FederatedLane
from envhub_client.federation.part import HubPart
from envhub_client.federation.parts_opener import OpenHub, PartsOpener, room_for, roomiest
from envhub_client.federation.slices import set_attr_of
from envhub_client.lanes.base import HubLane
from envhub_client.session.absence import Absence
from envhub_client.session.attributes_set import AttributesSet
from envhub_client.session.description import SessionDescription
from envhub_client.session.renewal import losses_in_a_row, made_again
from envhub_client.session.vector_session import SeedsGiven

ANSWER_S = 2.0  # for a hub to say that it is there

log = logging.getLogger("envhub")


class Remaker:
    """A ``Recovery``: makes rows again on the hub that comes back, or on any that has room.

    Attributes:
        patience_s: the seconds for which the rows of other hubs wait for those of a lost one.
        attributes: that were set, for the envs to come.
    """

    def __init__(self, opener: PartsOpener, description: SessionDescription, seeds: SeedsGiven, loose: bool) -> None:
        """Make envs again as ``description`` describes; with ``loose`` observations have leaves of no fixed size."""
        self.patience_s = opener.options.faults.restart_wait
        self._opener = opener
        self._description, self._seeds = description, seeds
        self._loose = loose
        self.attributes = AttributesSet()
        self._absences: list[Absence[HubPart]] = []
        self._stopped = False

    def stop(self) -> None:
        """Make nothing again any more: the envs are being closed."""
        self._stopped = True
        for absence in self._absences:
            absence.stop()
        for absence in self._absences:
            absence.join()

    def absent_lane(self, part: HubPart, loss: errors.EnvHubError, outstanding: np.ndarray) -> AbsentLane:
        """Begin to make the part's rows again, and return a lane for them until then; a mask says which were sent.

        Raises:
            EnvHubError: this loss, where the envs are being closed.
        """
        if self._stopped:
            raise loss
        log.warning("%s; its envs %s are made again", loss, _text(part.rows))
        made = part.lane.made if isinstance(part.lane, AbsentLane) else [part]
        gone = [each.connection for each in made]
        losses = max(losses_in_a_row(each.maker, loss) for each in made)
        self._seeds.lose(part.rows)
        # As many as the rows had; without a number, each hub finds one. A vector env is divided as it was.
        is_fixed = isinstance(self._opener.options.num_workers, int) or self._description.vector
        num_workers = sum(each.maker.sizing.num_workers for each in made) if is_fixed else None
        silence_s = max(connection.protocol.silence_s(time.monotonic()) for connection in gone)
        patience_s = max(0.0, self.patience_s - silence_s)
        if len(part.rows) == self._description.num_envs:  # no row of another hub waits for them
            patience_s = math.inf
        absence = Absence(
            loss,
            patience_s,
            lambda absence: self._made_again(part, absence, gone, num_workers, losses),
            lambda absence: self._opener.end_later(gone, lambda: not absence.stopped),
        )
        self._absences = [each for each in self._absences if not each.has_ended] + [absence]
        return AbsentLane(part.lane, outstanding, self._loose, absence, self._lane_of)

    def _lane_of(self, absence: Absence[HubPart]) -> HubLane:
        parts = absence.parts()
        return parts[0].lane if len(parts) == 1 else FederatedLane(parts, self._loose, copy=True)

    # --- in the thread of an absence ------------------------------------------------------------------------------

    def _made_again(
        self, part: HubPart, absence: Absence[HubPart], gone: Sequence[Connection], num_workers: int | None, losses: int
    ) -> Sequence[HubPart]:
        def make(_: Deadline) -> Sequence[HubPart]:
            failures: list[errors.EnvHubError] = [
                errors.HubUnreachable(f"the name leads to the hub {part.hub} no more")
            ]
            for members in self._choices(part):
                hubs = self._opener.connect(members, ANSWER_S, failures.append)
                try:
                    if any(hub.member.name == part.hub for hub in hubs):  # it may have no room for both
                        with suppress(errors.ConnectionInUse):  # an interrupt may have left it so
                            self._opener.end(gone)
                    if hubs:
                        return self._opened(part, hubs, absence, num_workers)
                except errors.EnvHubError as error:
                    self._opener.end([hub.connection for hub in hubs])
                    failures.append(error)
            raise next((each for each in failures if not isinstance(each, errors.HubUnreachable)), failures[-1])

        timeout = self._opener.options.reconnect_timeout
        parts = made_again(make, absence.loss, losses, timeout, lambda: not absence.stopped)
        for each in parts:
            each.maker.losses = losses + 1
        log.warning("envs %s exist again on %s", _text(part.rows), ", ".join(each.hub for each in parts))
        return [each.moved(-part.rows.start) for each in parts]

    def _choices(self, part: HubPart) -> list[list[Member]]:
        """Hubs that may have the part's rows; the lost one only where no others have them: it may not come back."""
        members = self._opener.hubs()
        others = [member for member in members if member.name != part.hub]
        lost = [member for member in members if member.name == part.hub]
        return [others, lost] if self._opener.options.on_hub_loss == "redistribute" else [lost]

    def _opened(
        self, part: HubPart, hubs: Sequence[OpenHub], absence: Absence[HubPart], num_workers: int | None
    ) -> list[HubPart]:
        count = len(part.rows)
        # The envs of a vector env are one: on one hub, by as many workers.
        on_one = len(hubs) == 1 or self._description.vector or self._opener.options.hub_index is not None
        counts = roomiest(count, hubs) if on_one else room_for(count, hubs)
        parts = self._opener.parts(hubs, counts, part.rows.start, b"", lambda: not absence.stopped, num_workers)
        for each in parts:
            self._check_same(each)
            if self._description.vector and each.maker.sizing.num_workers != num_workers:
                raise errors.RequestRefused(f"the hub {each.hub} divides the vector env among other workers")
            own = partial(set_attr_of, rows=each.rows, num_envs=self._description.num_envs)
            self.attributes.set_again(each.connection, own)
        return parts

    def _check_same(self, part: HubPart) -> None:
        wanted, made = self._description, part.maker.description
        for mine, other in (
            (wanted.action_space, made.action_space),
            (wanted.observation_spaces[0], made.observation_spaces[0]),
        ):
            if spaces.structure(mine) != spaces.structure(other):
                raise errors.RequestRefused(f"the hub {part.hub} makes envs of other spaces: {other}, not {mine}")


def _text(rows: range) -> str:
    return f"{rows.start} to {rows.stop - 1}" if len(rows) > 1 else str(rows.start)
