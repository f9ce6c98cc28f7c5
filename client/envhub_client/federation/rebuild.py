"""Making the rows of a lost part again, in the background."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial

from envhub import errors
from envhub.protocol.messages import Op, SetAttr
from envhub.values import spaces
from envhub_client.deadline import Deadline
from envhub_client.federation.opener import PartsOpener
from envhub_client.federation.part import HubPart, set_attr_of
from envhub_client.session.description import SessionDescription

DEATHS_MAX = 3  # of workers that make the envs again, one after the other; a hub tolerates as many of one worker
RETRY_S = 0.2  # between tries where no hub answers; where one refuses, each pause is twice as long as the last
PAUSE_S_MAX = 5.0
SETTLED_S = 60.0  # a session that ends later had no part in the end of the one before
WANTED_LOOK_S = 0.25  # between looks, in a pause, at whether the envs are still wanted
LOOK_S = 0.005  # between looks at whether the envs are made
JOIN_S = 5.0  # for the thread to see that it is stopped, which it does between two tries to reach a hub

log = logging.getLogger("envhub")


class OtherEnvs(errors.RequestRefused):
    """A hub makes other envs than those that were lost."""


class Rebuild:
    """The making of a lost part's rows in a thread; its error is raised once, and the next look begins it again."""

    def __init__(
        self,
        loss: errors.EnvHubError,
        patience_s: float,
        make: Callable[[], Sequence[HubPart]],
        clear: Callable[[], None],
    ) -> None:
        """``make`` returns parts from row 0; ``clear`` follows once they are made or unwanted, and may take long."""
        self.loss = loss
        self._until_s = time.monotonic() + patience_s
        self._make, self._clear = make, clear
        self.stopped = False  # once the envs are wanted no more
        self._prepare()

    def _prepare(self) -> None:
        self._over = threading.Event()
        self._once = threading.Lock()  # an interrupt in ``start`` leaves open whether it has started the thread
        self._parts: Sequence[HubPart] = ()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="envhub-rebuild", daemon=True)
        self._was_raised = False  # the error; last: after an interrupt before, this is done once more

    def _started(self) -> threading.Event:
        if self._was_raised and not self.stopped:
            self._thread.join()  # which has set the event, and clears nothing
            self._prepare()
        if self._thread.ident is None and not self.stopped:
            self._thread.start()
        return self._over

    def _run(self) -> None:
        if not self._once.acquire(blocking=False):
            return
        try:
            self._parts = self._make()
        except Exception as error:
            self._error = error
        finally:
            self._over.set()
            if self._error is None or self.stopped:  # else the next making has to end what was there before
                self._clear()

    @property
    def over(self) -> bool:
        """True if the rows are on a hub again, or cannot be."""
        return self._started().is_set()

    @property
    def made(self) -> Sequence[HubPart]:
        """The parts that have the rows now; none until the rows are on a hub again."""
        return self._parts if self._over.is_set() else ()

    @property
    def patience_s(self) -> float:
        return max(0.0, self._until_s - time.monotonic())

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end, at most so long; True if it has come."""
        over, until_s = self._started(), math.inf if timeout is None else time.monotonic() + timeout
        # An interrupt within ``Event.wait`` would raise that its lock is not held.
        while not over.is_set() and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, LOOK_S))
        return over.is_set()

    def parts(self) -> Sequence[HubPart]:
        """The parts that have the rows, once it is over; raises why no hub makes the envs again."""
        if self._error is not None:
            self._was_raised = True
            raise self._error
        return self._parts

    @property
    def has_ended(self) -> bool:
        """True if the rows are on a hub again, and what was there before is cleared."""
        return bool(self.made) and not self._thread.is_alive()

    def stop(self) -> None:
        """Make nothing any more; ``join`` waits for the end of the thread."""
        self.stopped = True
        if self._thread.ident is None:
            self._error = self.loss
            self._over.set()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)


class PartRebuilder:
    """Has the rows of lost parts made again, with the attributes that were set."""

    def __init__(self, opener: PartsOpener, description: SessionDescription) -> None:
        self.is_only_hub = opener.is_only_hub
        # Seconds for which the rows of other hubs wait for those of a lost one.
        self.patience_s = math.inf if opener.is_only_hub else opener.options.faults.restart_wait
        self._opener, self._description = opener, description
        self._attributes: dict[tuple[object, ...], SetAttr] = {}  # by name and rows, in the order of the last ones
        self._rebuilds: list[Rebuild] = []

    def remember(self, message: SetAttr) -> None:
        """Have this attribute set again in all envs to come, after those that were set before."""
        key = message.name, *message.rows
        self._attributes.pop(key, None)
        self._attributes[key] = message

    def stop(self) -> None:
        for rebuild in self._rebuilds:  # before the opener, whose error a rebuild would keep for another try
            rebuild.stop()
        self._opener.stopped = True
        for rebuild in self._rebuilds:
            rebuild.join()

    def rebuild(self, lost: HubPart, gone: Sequence[HubPart], loss: errors.EnvHubError) -> Rebuild:
        """The making of the rows of a lost part in place of the sessions that are gone, which has not begun."""
        if self._opener.stopped:
            raise loss
        log.warning("%s; its envs %s are made again", loss, _text(lost.rows))
        losses = max(losses_in_a_row(each, loss) for each in gone)
        self._opener.seeds.lose(lost.rows)
        # As many as the rows had; without a number, each hub finds one. A vector env is divided as it was.
        is_fixed = isinstance(self._opener.options.num_workers, int) or self._description.vector
        num_workers = sum(each.maker.sizing.num_workers for each in gone) if is_fixed else None
        silence_s = max(each.connection.protocol.silence_s(time.monotonic()) for each in gone)
        patience_s = max(0.0, self.patience_s - silence_s)
        if len(lost.rows) == self._description.num_envs:  # no row of another hub waits for them
            patience_s = math.inf
        loss = copy(loss)  # without its traceback, whose frames hold the vector env
        make = partial(self._made_again, lost, gone, num_workers, losses, loss)
        rebuild = Rebuild(loss, patience_s, make, partial(self._opener.end_later, gone))
        self._rebuilds = [each for each in self._rebuilds if not each.has_ended] + [rebuild]
        return rebuild

    def workers_of(self, part: HubPart) -> int | None:
        """The number of workers of this part, if it has rows of a vector env, which a worker steps in one call."""
        return part.maker.sizing.num_workers if self._description.vector else None

    def _made_again(
        self, lost: HubPart, gone: Sequence[HubPart], num_workers: int | None, losses: int, loss: errors.EnvHubError
    ) -> Sequence[HubPart]:
        def check(part: HubPart) -> None:
            self._check_same(part, num_workers)
            self._set_again(part)

        opener, timeout = self._opener, self._opener.options.reconnect_timeout
        make = partial(opener.open_again, lost, gone, num_workers, check)
        parts = made_again(make, loss, losses, timeout, lambda: not opener.stopped, self.is_only_hub)
        for each in parts:
            each.maker.losses = losses + 1
        log.warning("envs %s exist again on %s", _text(lost.rows), ", ".join(each.hub for each in parts))
        return [each.moved(-lost.rows.start) for each in parts]

    def _check_same(self, part: HubPart, num_workers: int | None) -> None:
        wanted, made, hub = self._description, part.maker.description, errors.hub_at(part.connection.address)
        for mine, other in (
            (wanted.action_space, made.action_space),
            (wanted.observation_spaces[0], made.observation_spaces[0]),
        ):
            if spaces.structure(mine) != spaces.structure(other):
                raise OtherEnvs(f"{hub} makes envs of other spaces: {other}, not {mine}")
        if wanted.vector and part.maker.sizing.num_workers != num_workers:
            raise OtherEnvs(f"{hub} divides the vector env among other workers")

    def _set_again(self, part: HubPart) -> None:
        """Set the attributes of this part's rows again. One that cannot be set is left out, with a warning."""
        for message in [*self._attributes.values()]:  # others may be set meanwhile
            own = set_attr_of(message, part.rows, self._description.num_envs)
            try:
                if own is not None:
                    part.connection.ask(Op.SET_ATTR, own)
            except errors.HubLost:
                raise
            except Exception as error:
                if not isinstance(errors.raised_by_env(error) or error, errors.EnvHubError):
                    raise
                log.warning("the attribute %r cannot be set again: %s", message.name, error)


def losses_in_a_row(part: HubPart, loss: errors.EnvHubError) -> int:
    """The number of sessions before that of the part that ended, one soon after the other, while their hub served."""
    soon = time.monotonic() - part.maker.adopted_s < SETTLED_S
    return part.maker.losses if soon and not isinstance(loss, errors.HubLost) else 0


def made_again(
    make: Callable[[Deadline], Sequence[HubPart]],
    loss: errors.EnvHubError,
    losses: int,
    timeout: float,
    is_wanted: Callable[[], bool],
    is_only_hub: bool,
) -> Sequence[HubPart]:
    """The result of ``make``, which is called for ``timeout`` seconds until it returns one, with pauses that grow.

    The first pause comes before the first call, where ``losses`` sessions were lost in a row. It is given up, with
    ``HubLost``, where too many workers die or it is not wanted any more; the only hub may also deny access.
    """
    deadline, deaths, refusals = Deadline(timeout), 0, losses
    pause_s = RETRY_S * 2 ** min(losses, 10) if losses else 0.0
    while True:
        pause = Deadline(min(pause_s, PAUSE_S_MAX, deadline.left_s()))
        while is_wanted() and (left_s := pause.left_s()):
            time.sleep(min(left_s, WANTED_LOOK_S))
        why: errors.EnvHubError
        try:
            return make(deadline)
        except errors.HubUnreachable as error:
            why, pause_s = error, RETRY_S
        except errors.EnvHubError as error:
            if is_only_hub and isinstance(error, errors.AccessDenied):
                raise
            deaths += isinstance(error, errors.WorkerDied)  # the cause need not be one of the envs
            refusals += 1
            why, pause_s = error, RETRY_S * 2 ** min(refusals, 10)
        if is_only_hub and isinstance(why, OtherEnvs):
            raise errors.of_hub(errors.HubLost(f"{loss}; {why}"), loss.hub) from why
        if deaths == DEATHS_MAX or not is_wanted() or not deadline.left_s():
            text = f"{loss}; and no hub made its envs again within reconnect_timeout={timeout:g} s: {why}"
            raise errors.of_hub(errors.HubLost(text), loss.hub) from why


def _text(rows: range) -> str:
    return f"{rows.start} to {rows.stop - 1}" if len(rows) > 1 else str(rows.start)
