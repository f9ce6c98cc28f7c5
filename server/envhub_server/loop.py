"""The hub's loop waits for these: descriptors, signals and time."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from operator import itemgetter
from queue import SimpleQueue

from envhub.arena.spin import RING

STOPPED_S = 2.0  # later than planned by this much, the hub was stopped and not merely busy
LAG_WINDOW_S = 60.0
LAG_MIN_S = 0.0001  # the shortest lag that callers add


class Clock:
    """Seconds in which this process was not stopped: else, after SIGSTOP, every lease and deadline would be over."""

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self.stopped_s = 0.0  # the seconds for which the process was stopped, in all
        self._lags: deque[tuple[float, float]] = deque()  # time and lag, each lag larger than those after it

    def now_s(self) -> float:
        return self._monotonic_s() - self.stopped_s

    def woke(self, planned_s: float) -> float:
        """The seconds for which the process was stopped in the wait that ends now and was to end by ``planned_s``."""
        late_s = self.now_s() - planned_s
        if late_s >= STOPPED_S:
            self.stopped_s += late_s
            return late_s
        if late_s >= 0:
            self.add_lag(planned_s, late_s)
        return 0.0

    def add_lag(self, at_s: float, lag_s: float) -> None:
        while self._lags and self._lags[-1][1] <= lag_s:
            self._lags.pop()
        self._lags.append((at_s, lag_s))

    def lag_s(self) -> float:
        """The largest lag of the last minute: the hub handled something else, or was woken later than planned."""
        while self._lags and self._lags[0][0] < self.now_s() - LAG_WINDOW_S:
            self._lags.popleft()
        return self._lags[0][1] if self._lags else 0.0


WAKE_S = 1.0  # from one look at the clock to the next while something is overdue later; less than ``clock.STOPPED_S``

Act = Callable[[], None]


class Schedule:
    """The next time of each function, and the time at which the loop has to wake."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at_s: dict[Act, float] = {}  # a bound method is the same function whenever it is named
        self._heap: list[tuple[float, int, Act]] = []  # also has times that were replaced, until they come up
        self._order = itertools.count()
        self.wake_s = math.inf  # when the loop wakes at the latest; infinity where no function has a time

    @property
    def next_s(self) -> float:
        while self._heap and self._at_s.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def set(self, act: Act, at_s: float) -> None:
        """Replace the time at which ``act`` is called; infinity removes it."""
        if at_s == math.inf:
            self._at_s.pop(act, None)
        elif at_s != self._at_s.get(act):
            self._at_s[act] = at_s
            heapq.heappush(self._heap, (at_s, next(self._order), act))
        self._plan()

    def call_expired(self, now_s: float) -> None:
        """Call each function whose time has come, in order of time; its time is removed before."""
        overdue = []
        while self.next_s <= now_s:
            overdue.append(heapq.heappop(self._heap)[2])
            del self._at_s[overdue[-1]]
        for act in overdue:
            act()
        self._plan()

    def _plan(self) -> None:
        """Wake for the first time; earlier, while there is one, to see whether the process was stopped meanwhile."""
        next_s = self.next_s
        self.wake_s = math.inf if next_s == math.inf else min(next_s, self._clock.now_s() + WAKE_S)


Ready = list[tuple[int, int]]  # descriptors, each with the events of epoll

_DESCRIPTOR = itemgetter(0)


class Poller:
    """Descriptors, each with what handles it, and gets its number."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int], object]] = {}
        self._epoll = select.epoll()
        self.wait: Callable[[float | None], Ready] = self._epoll.poll

    def handle(self, ready: Ready) -> None:
        handlers = self._handlers
        wanted = [*map(handlers.get, map(_DESCRIPTOR, ready))]
        for (descriptor, _), handler in zip(ready, wanted, strict=True):
            # An earlier one of this iteration may have closed it, and another may have its number.
            if handler is not None and handlers.get(descriptor) is handler:
                handler(descriptor)

    def wake_on(self, descriptor: int) -> None:
        """End a wait whenever the descriptor is readable; the caller of ``wait`` handles it."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def register(self, descriptor: int, handler: Callable[[int], object], edges: bool = False) -> None:
        """Wait until it is readable; with ``edges`` for new input only, whether or not the old input is read."""
        self._handlers[descriptor] = handler
        self._epoll.register(descriptor, select.EPOLLIN | (select.EPOLLET if edges else 0))

    def want_writable(self, descriptor: int, wanted: bool) -> None:
        """Begin, or cease, to wait also until the descriptor is writable."""
        if descriptor in self._handlers:
            self._epoll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def unregister(self, descriptor: int) -> None:
        if self._handlers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def close(self) -> None:
        self._handlers.clear()
        self._epoll.close()


STOPPING = (signal.SIGTERM, signal.SIGINT)
# They would end a process that does not handle them.
ASKING = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)


@contextlib.contextmanager
def handled(
    poller: Poller, on_named: Callable[[str], None], on_child: Callable[[], None], is_served: bool
) -> Iterator[None]:
    """Within the context, call ``on_named`` with a signal's name, if the hub is served, and ``on_child`` for SIGCHLD.

    A process that got a signal to stop is about to end by itself: after the context it ignores these signals.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    come: set[int] = set()

    def on_signals(_: int) -> None:
        for number in ours.recv(64):
            come.add(number)
            if number == signal.SIGCHLD:
                on_child()
            elif number in (*STOPPING, *ASKING):
                on_named(signal.Signals(number).name)

    numbers = (*STOPPING, *ASKING, signal.SIGCHLD) if is_served else (signal.SIGCHLD,)
    with ours, theirs:
        poller.register(ours.fileno(), on_signals)
        # The descriptor before the handlers, and after them: a signal that only reached a handler would be lost.
        wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        before = [signal.signal(number, lambda *_: None) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, signal.SIG_IGN if number in STOPPING and come & {*STOPPING} else handler)
            signal.set_wakeup_fd(wakeup)
            poller.unregister(ours.fileno())


class BackgroundThread:
    """Does what the loop does not wait for, in turn; ``waiting`` has each work, and what the loop calls then."""

    def __init__(self, poller: Poller, name: str) -> None:
        self._poller, self._name = poller, name
        self.waiting: SimpleQueue[tuple[Act, Act] | None] = SimpleQueue()  # None: the thread ends
        self._lock, self._is_closed = threading.Lock(), False  # the thread rings no bell that is closed
        self._done: deque[Act] = deque()
        self._thread: threading.Thread | None = None
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        poller.register(self._bell, self._report)

    def do(self, work: Act, done: Act) -> None:
        """Do ``work``, which raises nothing, then call ``done`` in the loop. ``RuntimeError``: no thread is left."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread
        self.waiting.put((work, done))

    def _run(self) -> None:
        while (task := self.waiting.get()) is not None and not self._is_closed:
            task[0]()
            with self._lock:
                self._done.append(task[1])
                if not self._is_closed:
                    os.eventfd_write(self._bell, 1)
            del task  # it holds observations or traces, and the next one may never come

    def _report(self, _: int = -1) -> None:
        with contextlib.suppress(BlockingIOError):  # the thread has not rung
            os.eventfd_read(self._bell)
        while self._done:
            self._done.popleft()()

    def finish(self, wait_s: float) -> None:
        """Wait so long for all work, report what is done, and close."""
        self.waiting.put(None)
        if self._thread is not None:
            self._thread.join(wait_s)
        self._report()
        self.close()

    def close(self) -> None:
        """Begin nothing more; nothing is reported any more."""
        self._poller.unregister(self._bell)
        with self._lock:
            self._is_closed = True
            os.close(self._bell)
        self.waiting.put(None)


class Ringer:
    """Rings one process's bells; at most one thread waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs = False
        self._again = -1  # a copy of the bell to ring next; -1 for none

    def ring(self, bell: int) -> None:
        """Ring this eventfd soon; rings that its holder keeps waiting become one."""
        with self._lock:
            copy = os.dup(bell)
            if self._again >= 0:
                os.close(self._again)
            self._again = copy
            if self._runs:
                return
            self._runs = True
        threading.Thread(target=self._run, name="envhub-ringer", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                bell, self._again = self._again, -1
                if bell < 0:
                    self._runs = False
                    return
            with contextlib.suppress(OSError):  # full, and not to be waited for
                os.write(bell, RING)
            os.close(bell)


class Loop:
    """One loop's clock, the functions that it calls at their times, and the descriptors that it waits for."""

    def __init__(self) -> None:
        self.clock, self.poller = Clock(), Poller()
        self.schedule = Schedule(self.clock)
