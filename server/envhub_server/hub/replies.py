"""The replies and notices of a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from envhub.arena.memory import LARGE
from envhub.protocol import messages
from envhub.protocol.hub import Incoming
from envhub.protocol.messages import Failure, Op
from envhub.protocol.prelude import FRAME_BYTES_MAX, Frames
from envhub_server.hub.resources import SessionResources
from envhub_server.memory.step_io import Blob, LeafCompressors, row_frames
from envhub_server.session.failure_text import logged, slow_to_close

INLINE_BYTES_MAX = 4 << 20  # of observations that the loop compresses itself, in some milliseconds
COMPRESSED = object()  # the event of the end of a compression


@dataclass
class Compression:
    """A reply whose observations a thread compresses; until it is sent, the session is told nothing."""

    request: Incoming
    message: Any
    frames: Frames
    following: list[Callable[[], None]] = field(default_factory=list)  # messages that are sent after it
    events: list[Any] = field(default_factory=list)  # that have come meanwhile
    error: Exception | None = None


class SessionReplies(SessionResources):
    """The messages to the client of one session, as ``Effects`` describes them.

    Attributes:
        compressing: the reply that a thread compresses; later messages are sent after it.
    """

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        method = self.make.compression
        self._compressors = LeafCompressors(method) if method else None
        self.compressing: Compression | None = None

    def delays(self, effect: Callable[[], None]) -> bool:
        """True if a reply is compressed; the effect then follows it."""
        if self.compressing is None:
            return False
        self.compressing.following.append(effect)
        return True

    def send_compressed(self) -> None:
        """Send the reply that was compressed, and then the messages that wait for it.

        Raises:
            Exception: it could not be compressed.
        """
        reply, self.compressing = self.compressing, None
        assert reply is not None
        self.services.events.extendleft((self.number, each) for each in reversed(reply.events))
        if reply.error is not None:
            raise reply.error
        self._send(reply.request, reply.message, reply.frames)
        for effect in reply.following:
            effect()

    def answer(
        self,
        message: Any,
        arrays: bool = False,
        rows: Sequence[Blob] = (),
        part: tuple[int, ...] | None = None,
    ) -> None:
        request = self.under_way
        assert request is not None
        frames: list[Any] = []
        if self.memory is not None:
            if arrays:
                infos = self.state.infos.large if self.has_infos else None
                frames = self.memory.frames.batch(request.op is Op.STEP, infos)
                if self._compressors is not None and self._compresses(request, message, frames, first=0):
                    return
            elif part is not None:
                frames = self.memory.frames.rows(np.array(part, np.int64), rows)
                if self._compressors is not None and self._compresses(request, message, frames, first=1):
                    return
            elif request.op is Op.CALL:
                frames, why = self.services.unread.results(rows, request.message.separate_frames, self.budget)
                if why:
                    self.fail_request(request, Failure("limit", "hub", why))
                    return
            else:
                frames = row_frames(rows if request.op is not Op.COLLECT else self._collected(rows))
        self._send(request, message, frames)

    def _collected(self, sent: Sequence[Blob]) -> Sequence[Blob]:
        """These infos that workers have sent, and the wanted ones that are in places which the client cannot read."""
        assert self.memory is not None and self.under_way is not None
        arena, infos = self.memory.arena, dict(sent)
        for row in self.under_way.message.rows:
            if row < arena.layout.rows and arena.info_template[row] == LARGE:
                infos[row] = bytes(arena.info(row) or b"")  # what was sent is of an earlier step
        return sorted(infos.items())

    def _compresses(self, request: Incoming, message: Any, frames: Frames, first: int) -> bool:
        """Compress the observations, which begin at the frame ``first``; whether a thread does it, and they are late.

        The session's rows are not written meanwhile: a reply of views is given to its client until the next request.
        """
        assert self.memory is not None and self._compressors is not None
        compressors, place = self._compressors, slice(first, first + len(self.memory.arena.layout.observations))
        thread = self.services.compression
        if thread is None or sum(memoryview(frame).nbytes for frame in frames[place]) <= INLINE_BYTES_MAX:
            frames[place] = compressors.compress(frames[place])
            return False
        reply = Compression(request, message, frames)

        def work() -> None:
            try:
                frames[place] = compressors.compress(frames[place])
            except Exception as error:
                reply.error = error

        try:
            thread.do(work, lambda: self.services.events.append((self.number, COMPRESSED)))
        except RuntimeError:  # no thread is left
            frames[place] = compressors.compress(frames[place])
            return False
        self.compressing = reply
        return True

    def _send(self, request: Incoming, message: Any, frames: Frames) -> None:
        """Send a reply, unless it is too large."""
        if frames and max(map(len, frames)) > FRAME_BYTES_MAX:
            text = f"infos or results of {max(map(len, frames))} bytes; a reply carries at most {FRAME_BYTES_MAX}"
            self.fail_request(request, Failure("limit", "hub", text))
            return
        if type(message) is messages.Made:
            message = replace(message, ticket=self.ticket)
            # Event: The envs of a session are made, or were taken over; `why` is the reason for the number of workers.
            self.log.info("session_ready", num_workers=message.num_workers, why=message.sizing)
        self.services.protocol.answer(request, message, frames)

    def fail(self, failure: Failure) -> None:
        self.fail_request(self.under_way, failure)

    def fail_request(self, request: Incoming | None, failure: Failure) -> None:
        """Answer this request with a failure, which is logged if it concerns the session or an env."""
        assert request is not None
        if failure.scope in ("env", "session"):
            self.log.warning("request_failed", once_per=("session", "code"), **logged(failure))
        self.services.protocol.fail(request, failure)

    def answer_attach(self) -> None:
        if self.delays(self.answer_attach):
            return
        memory, attaching, made = self.memory, self.attaching, self.state.made
        assert memory is not None and attaching is not None and made is not None
        request = attaching.request
        self.under_way, self.attaching = request, None  # its request is the one under way
        memory.arena.restore()
        made = replace(made, ticket=self.ticket, steps=memory.arena.done.tolist())
        self.log.info("session_ready", num_workers=made.num_workers, why=made.sizing)
        self.services.protocol.answer(request, made, ())

    def fail_attach(self, failure: Failure) -> None:
        if not self.delays(partial(self.refuse_attach, failure)):
            self.refuse_attach(failure)

    def refuse_attach(self, failure: Failure) -> None:
        """Refuse the client that attaches, even while a reply is compressed."""
        attaching, self.attaching = self.attaching, None
        assert attaching is not None
        self.fail_request(attaching.request, failure)
        if self.token != attaching.request.token:
            self.services.forget(attaching.request.token)

    def goodbye(self, why: Failure) -> None:
        if not self.delays(partial(self.goodbye, why)):
            self.services.protocol.goodbye(self.token, why)

    def report_closing(self, slow: tuple[tuple[int, int, tuple[int, ...]], ...]) -> None:
        by_stack = dict[str, list[int]]()
        for process, stacks, rows in slow:  # envs that execute the same are told together
            by_stack.setdefault(self.pool.stack(process, stacks), []).extend(rows)
        state = self.state
        text = slow_to_close(state.make, by_stack, state.launcher.rules.hide_folders)
        # Event: Envs are slow to close; `note` says which, and what they execute. Their client is told.
        self.notify("envs_closing", text)

    def notify(self, event: str, text: str) -> None:
        if not self.delays(partial(self.notify, event, text)):
            self.log.warning(event, note=text)
            self.services.protocol.notice(self.token, text)
