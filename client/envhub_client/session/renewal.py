"""Going on after the loss of a hub: another session, on the hub that takes its place."""

from __future__ import annotations

import logging
import time

from envhub import errors
from envhub.env_failure import EnvFailure, failure_info
from envhub.protocol.messages import Made, SetAttr
from envhub.values import spaces
from envhub_client.connection.connection import CONNECT_TIMEOUT_S
from envhub_client.deadline import Deadline
from envhub_client.lanes.base import HubLane
from envhub_client.session.attributes_set import AttributesSet
from envhub_client.session.description import space_of
from envhub_client.session.maker import SessionMaker

DEATHS_MAX = 3  # of workers that make the envs again, one after the other; a hub tolerates as many of one worker
RENEW_S = 0.2  # between tries for another session, where a hub refuses at once

log = logging.getLogger("envhub")


class SessionRenewal:
    """A ``LaneSource`` that has the envs made again, by the maker of the session that was lost."""

    def __init__(self, maker: SessionMaker) -> None:
        self._maker = maker
        self._attributes = AttributesSet()
        self._stopped = False

    def remember(self, message: SetAttr) -> None:
        """Have this attribute set again in every session to come; as ``AttributesSet.remember``."""
        self._attributes.remember(message)

    def stop(self) -> None:
        """Renew no more: the envs are being closed."""
        self._stopped = True

    def renew(self, loss: errors.HubLost) -> HubLane:
        """Go on in a new session, on the hub that has taken the place of the lost one.

        Raises:
            HubLost: there was none within ``reconnect_timeout``, or its envs are others.
            Exception: as at the first making.
        """
        if self._stopped:
            raise loss
        maker = self._maker
        log.warning("%s; its envs are made again on the hub that takes its place", loss)
        try:
            made = self._open_again(loss)
            self._check_same(made, loss)
            self._attributes.set_again(maker.latest)
            lane = maker.adopt(made)
        finally:
            maker.end_all_but(maker.connection)
        log.warning("%d envs exist again on %s", made.num_envs, errors.hub_at(maker.connection.address))
        return lane

    def _open_again(self, loss: errors.HubLost) -> Made:
        maker = self._maker
        lost = failure_info(EnvFailure("hub_lost", f"{loss}; the env was made again", hub=loss.hub))
        num_workers = maker.sizing.num_workers if maker.description.vector else None
        timeout = maker.options.reconnect_timeout
        deadline = Deadline(timeout)
        deaths = 0
        while True:
            try:
                return maker.open(min(CONNECT_TIMEOUT_S, max(1.0, deadline.left_s())), lost, num_workers)
            except errors.HubUnreachable as error:
                if deadline.left_s() <= RENEW_S:
                    why = f"no hub made its envs again within reconnect_timeout={timeout:g} s: {error}"
                    raise _with(loss, f"and {why}") from error
            except errors.WorkerDied:  # the cause need not be one of the envs
                deaths += 1
                if deaths == DEATHS_MAX:
                    raise
            maker.end_all_but(maker.connection)
            time.sleep(RENEW_S)

    def _check_same(self, made: Made, loss: errors.HubLost) -> None:
        maker, description = self._maker, self._maker.description
        wanted = [description.action_space, description.observation_spaces[0]]
        new = [space_of(blob, made.num_envs, maker.values) for blob in (made.action_space, made.observation_spaces[0])]
        if [*map(spaces.structure, new)] != [*map(spaces.structure, wanted)]:
            raise _with(loss, f"the hub that took its place makes envs of other spaces: {new}, not {wanted}")
        if description.vector and made.num_workers != maker.sizing.num_workers:
            raise _with(loss, "the hub that took its place divides the vector env among other workers")


def _with(loss: errors.HubLost, why: str) -> errors.HubLost:
    """The loss, of the same hub, with the reason why there is no other hub."""
    return errors.of_hub(errors.HubLost(f"{loss}; {why}"), loss.hub)
