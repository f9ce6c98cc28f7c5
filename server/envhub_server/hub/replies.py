"""The replies and notices of a session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from envhub.arena.memory import LARGE
from envhub.protocol import messages
from envhub.protocol.hub import Incoming
from envhub.protocol.messages import Failure, Op
from envhub.protocol.prelude import FRAME_BYTES_MAX, Frames
from envhub_server.hub.holdings import Holdings
from envhub_server.hub.instruction_table import Table, entry
from envhub_server.memory.step_io import Blob, LeafCompressors, row_frames
from envhub_server.processes.worker_events import WorkerStarted
from envhub_server.session import instructions, stimuli
from envhub_server.session.failure_text import logged, slow_to_close
from envhub_server.session.instructions import Instruction
from envhub_server.session.stimuli import Stimulus

INLINE_BYTES_MAX = 4 << 20  # of observations that the loop compresses itself, in some milliseconds
COMPRESSED = stimuli.RowsDone()  # in place of the end of a compression


@dataclass
class Compression:
    """A reply whose observations a thread compresses; until it is sent, nothing else happens to the session."""

    request: Incoming
    answer: instructions.Answer
    frames: Frames
    following: Sequence[Instruction] = ()  # that are carried out after it
    stimuli: list[Stimulus | WorkerStarted] = field(default_factory=list)  # that have come meanwhile
    error: Exception | None = None


class Replies:
    """Answers the requests of one session.

    Attributes:
        compressing: the reply that a thread compresses; what was decided after it is carried out once it is sent.
    """

    def __init__(self, held: Holdings) -> None:
        self._held = held
        method = held.state.make.compression
        self._compressors = LeafCompressors(method) if method else None
        self.compressing: Compression | None = None

    def answer(self, answer: instructions.Answer) -> None:
        """Answer the request, or have a thread compress what it is answered with."""
        held = self._held
        request = held.under_way
        assert request is not None
        frames: list[Any] = []
        if held.memory is not None:
            if answer.arrays:
                infos = held.state.infos.large if held.has_infos else None
                frames = held.memory.frames.batch(request.op is Op.STEP, infos)
                if self._compressors is not None and self._compresses(request, answer, frames, first=0):
                    return
            elif answer.part is not None:
                frames = held.memory.frames.rows(np.array(answer.part, np.int64), answer.rows)
                if self._compressors is not None and self._compresses(request, answer, frames, first=1):
                    return
            elif request.op is Op.CALL:
                frames, why = held.services.unread.results(answer.rows, request.message.apart, held.budget)
                if why:
                    self.fail_request(request, Failure("limit", "hub", why))
                    return
            else:
                frames = row_frames(answer.rows if request.op is not Op.COLLECT else self._collected(answer.rows))
        self.send_answer(request, answer, frames)

    def _collected(self, sent: Sequence[Blob]) -> Sequence[Blob]:
        """These infos that workers have sent, and the wanted ones that are in places which the client cannot read."""
        held = self._held
        assert held.memory is not None and held.under_way is not None
        arena, infos = held.memory.arena, dict(sent)
        for row in held.under_way.message.rows:
            if row < arena.layout.rows and arena.info_template[row] == LARGE:
                infos[row] = bytes(arena.info(row) or b"")  # what was sent is of an earlier step
        return sorted(infos.items())

    def _compresses(self, request: Incoming, answer: instructions.Answer, frames: Frames, first: int) -> bool:
        """Compress the observations, which begin at the frame ``first``; whether a thread does it, and they are late.

        The session's rows are not written meanwhile: a reply of views is given to its client until the next request.
        """
        held = self._held
        assert held.memory is not None and self._compressors is not None
        compressors, place = self._compressors, slice(first, first + len(held.memory.arena.layout.observations))
        thread = held.services.compression
        if thread is None or sum(memoryview(frame).nbytes for frame in frames[place]) <= INLINE_BYTES_MAX:
            frames[place] = compressors.compress(frames[place])
            return False
        reply = Compression(request, answer, frames)

        def work() -> None:
            try:
                frames[place] = compressors.compress(frames[place])
            except Exception as error:
                reply.error = error

        try:
            thread.do(work, lambda: held.report(COMPRESSED))
        except RuntimeError:  # no thread is left
            frames[place] = compressors.compress(frames[place])
            return False
        self.compressing = reply
        return True

    def send_answer(self, request: Incoming, answer: instructions.Answer, frames: Frames) -> None:
        """Send a reply, unless it is too large."""
        held = self._held
        if frames and max(map(len, frames)) > FRAME_BYTES_MAX:
            text = f"infos or results of {max(map(len, frames))} bytes; a reply carries at most {FRAME_BYTES_MAX}"
            self.fail_request(request, Failure("limit", "hub", text))
            return
        message = answer.message
        if type(message) is messages.Made:
            message = replace(message, ticket=held.ticket)
            # Event: The envs of a session are made, or were taken over; `why` is the reason for the number of workers.
            held.log.info("session_ready", num_workers=message.num_workers, why=message.sizing)
        held.services.protocol.answer(request, message, frames)

    def fail(self, fail: instructions.Fail) -> None:
        """Answer the request with a failure."""
        self.fail_request(self._held.under_way, fail.failure)

    def fail_request(self, request: Incoming | None, failure: Failure) -> None:
        """Answer this request with a failure, which is logged if it concerns the session or an env."""
        held = self._held
        assert request is not None
        if failure.scope in ("env", "session"):
            held.log.warning("request_failed", once_per=("session", "code"), **logged(failure))
        held.services.protocol.fail(request, failure)

    def answer_attach(self, _: instructions.AnswerAttach) -> None:
        """Answer the client that takes the session over: its request is the one under way."""
        held = self._held
        memory, attaching, made = held.memory, held.attaching, held.state.made
        assert memory is not None and attaching is not None and made is not None
        request = attaching.request
        held.under_way, held.attaching = request, None
        memory.arena.restore()
        made = replace(made, ticket=held.ticket, steps=memory.arena.done.tolist())
        held.log.info("session_ready", num_workers=made.num_workers, why=made.sizing)
        held.services.protocol.answer(request, made, ())

    def fail_attach(self, fail: instructions.FailAttach) -> None:
        """Tell that client why it does not get the session."""
        held = self._held
        attaching, held.attaching = held.attaching, None
        assert attaching is not None
        self.fail_request(attaching.request, fail.failure)
        if held.token != attaching.request.token:
            held.services.forget(attaching.request.token)

    def goodbye(self, goodbye: instructions.Goodbye) -> None:
        """Tell the client that the hub ends the session."""
        held = self._held
        held.services.protocol.goodbye(held.token, goodbye.why)

    def report_closing(self, closing: instructions.ReportClosing) -> None:
        """Tell the client and the log which envs are slow to close; those that execute the same are told together."""
        held, by_stack = self._held, dict[str, list[int]]()
        for process, stacks, rows in closing.slow:
            by_stack.setdefault(held.pool.stack(process, stacks), []).extend(rows)
        state = held.state
        text = slow_to_close(state.make, by_stack, state.launcher.rules.hide_folders)
        # Event: Envs are slow to close; `note` says which, and what they execute. Their client is told.
        self.notify(instructions.Notify("envs_closing", text))

    def notify(self, notice: instructions.Notify) -> None:
        """Tell the client and the log what no request asked for."""
        held = self._held
        held.log.warning(notice.event, note=notice.text)
        held.services.protocol.notice(held.token, notice.text)


REPLIES: Table[Replies] = dict(
    [
        entry(instructions.Answer, Replies.answer),
        entry(instructions.Fail, Replies.fail),
        entry(instructions.AnswerAttach, Replies.answer_attach),
        entry(instructions.FailAttach, Replies.fail_attach),
        entry(instructions.Goodbye, Replies.goodbye),
        entry(instructions.ReportClosing, Replies.report_closing),
        entry(instructions.Notify, Replies.notify),
    ]
)
