"""Going on after the end of a session: the envs are made again, on the hub that takes its place."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TypeVar

from envhub import errors
from envhub.env_failure import EnvFailure, failure_info
from envhub.protocol.messages import Made, SetAttr
from envhub.values import spaces
from envhub_client.connection.connection import CONNECT_TIMEOUT_S
from envhub_client.deadline import Deadline
from envhub_client.lanes.base import HubLane
from envhub_client.session.absence import Absence
from envhub_client.session.attributes_set import AttributesSet
from envhub_client.session.description import space_of
from envhub_client.session.maker import SessionMaker
from envhub_client.session.vector_session import SeedsGiven

DEATHS_MAX = 3  # of workers that make the envs again, one after the other; a hub tolerates as many of one worker
RETRY_S = 0.2  # between tries where no hub answers; where one refuses, each pause is twice as long as the last
PAUSE_S_MAX = 5.0
SETTLED_S = 60.0  # a session that ends later had no part in the end of the one before
LOOK_S = 0.25  # between looks, in a pause, at whether the envs are still wanted

Result = TypeVar("Result")
log = logging.getLogger("envhub")


def losses_in_a_row(maker: SessionMaker, loss: errors.EnvHubError) -> int:
    """The number of sessions before the maker's that ended, one soon after the other, while their hub served on."""
    soon = time.monotonic() - maker.adopted_s < SETTLED_S
    return maker.losses if soon and not isinstance(loss, errors.HubLost) else 0


def made_again(
    make: Callable[[Deadline], Result],
    loss: errors.EnvHubError,
    losses: int,
    timeout: float,
    is_wanted: Callable[[], bool] = lambda: True,
    raised: tuple[type[errors.EnvHubError], ...] = (),
) -> Result:
    """The result of ``make``, which is called for ``timeout`` seconds until it returns one, with pauses that grow.

    The first pause comes before the first call, where ``losses`` sessions were lost in a row.

    Raises:
        HubLost: there is none in time, or it is not wanted any more, or making the envs has ended too many workers.
        Exception: one of ``raised``, from ``make``.
    """
    deadline, deaths, refusals = Deadline(timeout), 0, losses
    pause_s = RETRY_S * 2 ** min(losses, 10) if losses else 0.0
    while True:
        pause = Deadline(min(pause_s, PAUSE_S_MAX, deadline.left_s()))
        while is_wanted() and (left_s := pause.left_s()):
            time.sleep(min(left_s, LOOK_S))
        why: errors.EnvHubError
        try:
            return make(deadline)
        except raised:
            raise
        except errors.HubUnreachable as error:
            why, pause_s = error, RETRY_S
        except errors.EnvHubError as error:
            deaths += isinstance(error, errors.WorkerDied)  # the cause need not be one of the envs
            refusals += 1
            why, pause_s = error, RETRY_S * 2 ** min(refusals, 10)
        if deaths == DEATHS_MAX or not is_wanted() or not deadline.left_s():
            text = f"{loss}; and no hub made its envs again within reconnect_timeout={timeout:g} s: {why}"
            raise errors.of_hub(errors.HubLost(text), loss.hub) from why


class SessionRenewal:
    """A ``LaneSource`` that has the envs made again by a thread, with the maker of the session that is over."""

    def __init__(self, maker: SessionMaker, seeds: SeedsGiven) -> None:
        self._maker, self._seeds = maker, seeds
        self._attributes = AttributesSet()
        self._absence: Absence[HubLane] | None = None
        self._stopped = False

    def remember(self, message: SetAttr) -> None:
        """Have this attribute set again in every session to come; as ``AttributesSet.remember``."""
        self._attributes.remember(message)

    def stop(self) -> None:
        """Renew no more: the envs are being closed."""
        self._stopped = True
        if self._absence is not None:
            self._absence.stop()
            self._absence.join()

    @property
    def is_running(self) -> bool:
        """True as long as the thread has not seen that it is stopped; it ends what it makes then."""
        return self._absence is not None and self._absence.is_running

    def make_again(self, loss: errors.EnvHubError) -> Absence[HubLane]:
        """Have the envs made again on the hub that takes the place of the lost one; as ``LaneSource.make_again``."""
        if self._stopped:
            raise loss
        self._absence = Absence(loss, math.inf, self._renewed, lambda absence: None)
        return self._absence

    def _renewed(self, absence: Absence[HubLane]) -> list[HubLane]:
        """The lane of a new session; runs in the thread of the absence.

        Raises:
            HubLost: there was none within ``reconnect_timeout``, or its envs are others.
            AccessDenied: the hub does not let this client in.
        """
        loss = absence.loss
        maker = self._maker
        log.warning("%s; its envs are made again on the hub that takes its place", loss)
        losses = losses_in_a_row(maker, loss)
        if isinstance(loss, errors.RemoteProtocolError):
            maker.end_on_hub()  # it may have no room for both
        lost = failure_info(EnvFailure("hub_lost", f"{loss}; the env was made again", hub=loss.hub))
        num_workers = maker.sizing.num_workers if maker.description.vector else None
        rows = range(maker.description.num_envs)
        self._seeds.lose(rows)
        maker.is_wanted = is_wanted = lambda: not absence.stopped

        def make(deadline: Deadline) -> Made:
            maker.end_all_but(maker.connection)  # of the try before
            timeout = min(CONNECT_TIMEOUT_S, max(1.0, deadline.left_s()))
            return maker.open(timeout, lost, num_workers, self._seeds.first_seeds(rows))

        try:
            timeout = maker.options.reconnect_timeout
            made = made_again(make, loss, losses, timeout, is_wanted, (errors.AccessDenied,))
            self._check_same(made, loss)
            self._attributes.set_again(maker.latest)
            if absence.stopped:
                raise loss
            lane = maker.adopt(made, losses + 1)
        finally:
            maker.end_all_but(maker.connection)
        log.warning("%d envs exist again on %s", made.num_envs, errors.hub_at(maker.connection.address))
        return [lane]

    def _check_same(self, made: Made, loss: errors.EnvHubError) -> None:
        maker, description = self._maker, self._maker.description
        wanted = [description.action_space, description.observation_spaces[0]]
        new = [space_of(blob, made.num_envs, maker.values) for blob in (made.action_space, made.observation_spaces[0])]
        if [*map(spaces.structure, new)] != [*map(spaces.structure, wanted)]:
            raise _with(loss, f"the hub that took its place makes envs of other spaces: {new}, not {wanted}")
        if description.vector and made.num_workers != maker.sizing.num_workers:
            raise _with(loss, "the hub that took its place divides the vector env among other workers")


def _with(loss: errors.EnvHubError, why: str) -> errors.HubLost:
    """The loss, of the same hub, with the reason why there is no other hub."""
    return errors.of_hub(errors.HubLost(f"{loss}; {why}"), loss.hub)
