"""A request to several hubs at a time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, NoReturn, TypeVar

from envhub.errors import (
    ConnectionInUse,
    EnvHubError,
    EnvRaised,
    EnvTimeout,
    HubTimeout,
    LocalProtocolError,
    WorkerDied,
    of_hub,
)
from envhub_client.connection.connection import Connection
from envhub_client.connection.failures import SESSION_ENDS
from envhub_client.deadline import Deadline, no_reply
from envhub_client.federation.part import LOOK_S, HubPart
from envhub_client.lanes.base import Lane

Result = TypeVar("Result")
Send = Callable[[HubPart], None]
Wait = Callable[[HubPart, float | None], Result]

ATTEMPTS_MAX = 3  # for one part, each on another hub
_OF_ENVS = EnvRaised, WorkerDied, EnvTimeout  # replies that have come, which can be had again

log = logging.getLogger("envhub")


class JointRequest(Generic[Result]):
    """One request at a time, of which each hub gets its part; all are sent before any reply is waited for.

    Each hub carries out its part exactly once, also where an interrupt comes between two parts or the caller drops the
    request: so all envs have been stepped equally often, whatever happens.
    """

    _send: Send
    _wait: Wait[Result]

    def __init__(
        self,
        lost: Callable[[HubPart, EnvHubError], None],
        dropped: Send = lambda part: None,
        connections: Callable[[HubPart], Sequence[Connection]] = lambda part: [part.connection],
    ) -> None:
        """``lost`` is told of a part whose session is over, ``dropped`` of one whose result does not reach the caller.

        A lost part is sent again unless ``lost`` raises. ``connections`` has none where its rows are on no hub.
        """
        self._lost, self._on_dropped, self._connections = lost, dropped, connections
        self._parts: Sequence[HubPart] = ()
        self._unsent: Sequence[HubPart] = ()
        self._tried: tuple[Lane, tuple[int, ...]] | None = None  # lane that may have the next part, and its progress
        self._errors: dict[HubPart, Exception] = {}  # each of which is the part's result
        self._again: HubPart | None = None  # part that is to be sent to the lane that took a lost one's place
        self._loss: tuple[Lane, EnvHubError] | None = None  # of that part, with the lane that was lost
        self._retracted = 0  # how many results of this request
        self._had = False  # whether ``results`` returned: a further wait would write over what the caller has
        self._dropped = self._is_over = False  # whether the results are not wanted, or have reached the caller

    def begin(self, parts: Sequence[HubPart], send: Send, wait: Wait[Result]) -> None:
        """Send to each hub by ``send``, whose errors ``results`` raises; ``wait`` returns a hub's result, each time."""
        self._send, self._wait, self._unsent, self._tried, self._dropped = send, wait, (), None, False
        self._errors, self._again, self._loss, self._had, self._is_over = {}, None, None, False, False
        self._retracted = 0
        self._parts = self._unsent = parts  # last: from here on the request is carried out, whatever interrupts this
        self._send_rest()

    def _send_rest(self) -> None:
        """Send to each hub, or to the lane that takes its place, unless that was done before an interrupt."""
        while self._unsent:
            part = self._unsent[0]
            before, now = self._tried, (part.lane, part.lane.progress)
            self._tried = now
            try:
                if before is None or before[0] is not now[0] or before == now:
                    try:
                        self._send(part)
                    except SESSION_ENDS as loss:
                        self._lost(part, loss)
                        continue
            except LocalProtocolError:  # the program's own, such as a use in two threads: nothing was sent
                raise
            except Exception as error:  # such as a request that is too large for this hub
                self._errors[part] = error
            self._unsent, self._tried, self._again = self._unsent[1:], None, None

    def _result(self, part: HubPart, timeout: float | None) -> Result:
        for _ in range(ATTEMPTS_MAX):
            try:
                if self._again is part:
                    if self._loss is not None and self._loss[0] is part.lane:  # of an interrupted ``_lost``
                        raise self._loss[1]
                    self._errors.pop(part, None)
                    self._unsent = [part]
                    self._send_rest()
                if part in self._errors:
                    raise self._errors[part]
                return self._wait(part, timeout)
            except SESSION_ENDS as error:
                self._loss = part.lane, error
                self._again = part  # also after an interrupt from here on
                self._lost(part, error)
        assert self._loss is not None
        raise self._loss[1]

    def retract(self, part: HubPart, error: EnvHubError) -> None:
        """Have ``results`` take this error for the result of the part, or raise it where it comes of each attempt."""
        self._retracted += 1
        if self._retracted >= ATTEMPTS_MAX:
            raise error
        self._loss, self._again, self._had = (part.lane, error), part, False

    def results(self, timeout: float | None) -> list[Result]:
        """The result of each hub, in the order of their rows; they can be had again.

        What an interrupt of ``begin`` left to be sent is sent first. Raises the first error in that order, an env's
        once all have ended; or ``HubTimeout`` with the names of the hubs that have not answered.
        """
        if self._unsent:
            self._send_rest()
        deadline = None if timeout is None else Deadline(timeout)
        results: dict[HubPart, Result] = {}
        late: dict[HubPart, HubTimeout] = {}
        for part in self._parts:
            try:
                results[part] = self._result(part, None if deadline is None else deadline.left_s())
            except HubTimeout as error:
                late[part] = error
            except ConnectionInUse:
                raise
            except Exception as error:
                self._errors[part] = error
        if late or self._errors:
            self._raise(late, timeout)
        self._had = True
        return [*results.values()]

    def _raise(self, late: Mapping[HubPart, HubTimeout], timeout: float | None) -> NoReturn:
        """Raise the first error, or that these parts are late; a hub's own error is not waited with."""
        errors = [self._errors[part] for part in self._parts if part in self._errors]
        if late:
            errors = [each for each in errors if isinstance(each, EnvHubError) and not isinstance(each, _OF_ENVS)]
        if errors:
            raise errors[0]
        first = next(iter(late.values()))
        if timeout is None or len(self._parts) == 1:
            raise first
        # One for all of them: each had only what others had left of the time.
        hubs = [each for part in late for each in self._connections(part) or [part.connection]]
        text = no_reply([*dict.fromkeys(each.address for each in hubs)], timeout)
        raise of_hub(HubTimeout(text), first.hub) from next(filter(None, (e.__cause__ for e in late.values())), None)

    @property
    def is_pending(self) -> bool:
        return bool(self._parts)

    def give_up(self) -> None:
        """Have the results of the pending request dropped, once ``settle`` has waited for them."""
        self._dropped = not self._is_over

    @contextlib.contextmanager
    def given_up_at_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # an interrupt, too, leaves no hub without its part of the request
            self.give_up()
            raise

    def settle(self) -> None:
        """Wait until each hub has carried out its part of a request that was dropped; to be called before the next one.

        It does not wait for the only hub of a request, which carries out the next one after it, nor for envs that are
        made again: these begin it no more. After a ``LocalProtocolError`` it is called again.
        """
        if not self._dropped:
            self._is_over = self._had
            return
        is_only = len(self._parts) == 1 and any(
            each is self._parts[0].connection for each in self._connections(self._parts[0])
        )
        if not is_only:
            self._send_rest()
        while self._parts:
            part = self._parts[0]
            try:
                if is_only:
                    part.connection.give_up()
                    part.lane.settle()
                elif not self._had:
                    self._carry_out(part)
                self._on_dropped(part)
            except Exception as error:
                log.debug("dropped with a request that was given up: %s", error)
            self._parts = self._parts[1:]
        self._dropped = False

    def _carry_out(self, part: HubPart) -> None:
        """Wait for this part's result as long as its rows are on a hub."""
        while self._connections(part):
            with contextlib.suppress(HubTimeout):
                self._result(part, LOOK_S)
                return
