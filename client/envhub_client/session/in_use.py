"""Use of a session: by one thread at a time."""

from __future__ import annotations

import os
import threading
from typing import Any, NoReturn

from envhub.errors import Forked
from envhub.vector_errors import SessionInUse

_Lock: Any = type(threading.RLock())


class InUse(_Lock):  # type: ignore[misc]
    """A lock, for ``with``, held by the thread that uses a session, which may nest its uses.

    It outlives the connection of the session, which has a lock of its own: the thread that keeps it alive uses it, too.
    """

    def __init__(self) -> None:
        super().__init__()  # for locks that are written in Python, as gevent's are
        self._pid = os.getpid()

    def __enter__(self) -> None:
        if not self.acquire(blocking=False):
            self.refuse()

    def refuse(self) -> NoReturn:
        """Say why another thread has it.

        Raises:
            SessionInUse: it is using the session at this moment.
            Forked: it is a thread of the process that this one was forked from.
        """
        if os.getpid() != self._pid:
            raise Forked("this vector env was made before a fork; make another in the child")
        text = "another thread is using this vector env; give each thread a vector env of its own"
        raise SessionInUse(text, "another thread's")
