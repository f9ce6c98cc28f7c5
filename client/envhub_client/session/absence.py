"""The time from the loss of a hub until its rows are on a hub again."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from envhub.errors import EnvHubError

Part = TypeVar("Part")
LOOK_S = 0.005  # between looks at whether the envs are made
JOIN_S = 5.0  # for the thread to see that it is stopped, which it does between two tries to reach a hub


class Absence(Generic[Part]):
    """The making of envs again on other sessions, in a thread, while the rows of the other hubs go on.

    Where that fails, the error is raised once, and the next look at this begins the making again.

    Attributes:
        loss: the error that has ended their session.
    """

    def __init__(
        self,
        loss: EnvHubError,
        patience_s: float,
        remake: Callable[[Absence[Part]], Sequence[Part]],
        clear: Callable[[Absence[Part]], None],
    ) -> None:
        """Have the envs made again by ``remake``, which returns parts with rows from 0, at the first look at this.

        Steps wait for that ``patience_s`` seconds in all. ``clear`` is called once the envs are made, or wanted no
        more, and may take long.
        """
        self.loss = loss
        self._until_s = time.monotonic() + patience_s
        self._remake, self._clear = remake, clear
        self._stopped = False
        self._prepare()

    def _prepare(self) -> None:
        """Get ready to make the envs."""
        self._over = threading.Event()
        self._once = threading.Lock()  # an interrupt in ``start`` leaves open whether it has started the thread
        self._parts: Sequence[Part] = ()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="envhub-remake", daemon=True)
        self._was_raised = False  # the error; last: after an interrupt before, this is done once more

    def _started(self) -> threading.Event:
        """The event of the end, once the thread has begun."""
        if self._was_raised and not self._stopped:
            self._thread.join()  # which has set the event, and clears nothing
            self._prepare()
        if self._thread.ident is None and not self._stopped:
            self._thread.start()
        return self._over

    def _run(self) -> None:
        if not self._once.acquire(blocking=False):
            return
        try:
            self._parts = self._remake(self)
        except Exception as error:
            self._error = error
        finally:
            self._over.set()
            if self._error is None or self._stopped:  # else the next making has to end what was there before
                self._clear(self)

    @property
    def over(self) -> bool:
        """True if the rows are on a hub again, or cannot be."""
        return self._started().is_set()

    @property
    def made(self) -> Sequence[Part]:
        """The parts that have the rows now; none until the rows are on a hub again."""
        return self._parts if self._over.is_set() else ()

    @property
    def patience_s(self) -> float:
        """Seconds for which a step still waits."""
        return max(0.0, self._until_s - time.monotonic())

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end, at most so long; True if it has come."""
        over, until_s = self._started(), math.inf if timeout is None else time.monotonic() + timeout
        # An interrupt within ``Event.wait`` would raise that its lock is not held.
        while not over.is_set() and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, LOOK_S))
        return over.is_set()

    def parts(self) -> Sequence[Part]:
        """The parts that have the rows, once it is over.

        Raises:
            HubLost: no hub makes the envs again.
            Exception: as at the first making.
        """
        if self._error is not None:
            self._was_raised = True
            raise self._error
        return self._parts

    @property
    def stopped(self) -> bool:
        """True if the envs are wanted no more."""
        return self._stopped

    @property
    def has_ended(self) -> bool:
        """True if the rows are on a hub again, and what was there before is cleared."""
        return bool(self.made) and not self._thread.is_alive()

    @property
    def is_running(self) -> bool:
        """True as long as the thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Make nothing any more; ``join`` waits for the end of the thread."""
        self._stopped = True
        if self._thread.ident is None:
            self._error = self.loss
            self._over.set()

    def join(self) -> None:
        """Wait for the end of the thread, which was told to stop."""
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)
