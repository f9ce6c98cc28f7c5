"""Clients that are wrong in one way, by the rule of the kit that each one breaks."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from conformance.kit.client_cases import UNKNOWN_FIELD
from conformance.kit.counting_envs import NUM_ENVS, SEEDS
from page_client import ClientError, PageClient

from envhub.protocol import messages
from envhub.protocol.client import ClientProtocol, Reply
from envhub.protocol.messages import REPLY, Make, Op, Receive, Reset
from envhub.protocol.prelude import PRELUDE, Frames, Prelude
from envhub.values import codec

AT_ONCE = float("-inf")
FLOAT64 = bytes([11])

WRONG: dict[tuple[str, str], type[PageClient]] = {}


def breaks(case: str, rule: str) -> Any:
    """Register a client, or a half of one, as the one that breaks this rule of this case."""

    def register(kind: type) -> type:
        client = kind if issubclass(kind, PageClient) else type(kind.__name__, (PageClient,), {"half": kind})
        assert (case, rule) not in WRONG
        WRONG[case, rule] = client
        return kind

    return register


def header(frames: Frames) -> dict[str, Any]:
    """The header of a reply; empty for a Done."""
    found: dict[str, Any] = codec.decode(bytes(frames[0][PRELUDE.size :])) if len(frames[0]) > PRELUDE.size else {}
    return found


def addressed(frames: Frames, **fields: Any) -> Frames:
    """The message with these fields in its prelude."""
    changed = Prelude.unpack(frames[0])._replace(**fields)
    return [changed.pack() + frames[0][PRELUDE.size :], *frames[1:]]


class Mistaking(ClientProtocol):
    """Takes messages for the reply to the pending request that are none, by ``mistakes``."""

    def mistakes(self, found: Prelude) -> bool:
        raise NotImplementedError

    def receive(self, frames: Frames, now_s: float) -> Reply | None:
        pending, found = self._pending, Prelude.unpack(frames[0])
        if pending is not None and found.op & REPLY and not pending.held and self.mistakes(found):
            frames = addressed(frames, op=REPLY | pending.op, token=pending.token, seq=pending.seq)
        return super().receive(frames, now_s)


# --- basic ------------------------------------------------------------------------------------------------------------


@breaks("plain", "the first message is a HELLO")
class CountsFromTwo(ClientProtocol):
    def __init__(self, token: bytes) -> None:
        super().__init__(token)
        self._ticket = 1


@breaks("plain", "requests carry the hub's id, one token and rising numbers")
class MakesWithTwo(ClientProtocol):
    def __init__(self, token: bytes) -> None:
        super().__init__(token)
        self._session_seq = 1


@breaks("plain", "the requests and their values are those of the program")
class OtherSeeds(PageClient):
    def reset(self) -> None:
        self._forget_totals()
        self.observe(self.ask(Op.RESET, Reset(seeds=[seed + 1 for seed in SEEDS])).frames[0])


@breaks("plain", "the actions of a Discrete are integers")
class SendsFloats(PageClient):
    def step(self) -> None:
        actions = self._observations[:, 0].astype(np.float64).tobytes()
        frames = self.ask(Op.STEP, messages.Step(FLOAT64), [actions]).frames
        self.observe(frames[0])
        self.take(range(NUM_ENVS), frames[1:])


@breaks("unknown_fields", "an unknown field is ignored")
class KnowsAllFields(ClientProtocol):
    def receive(self, frames: Frames, now_s: float) -> Reply | None:
        if UNKNOWN_FIELD in header(frames):
            raise ClientError("a field that is not known")
        return super().receive(frames, now_s)


@breaks("strangers", "what is no reply to the pending request is dropped")
class TakesLaterReplies(Mistaking):
    def mistakes(self, found: Prelude) -> bool:
        pending = self._pending
        assert pending is not None
        return found.op == REPLY | pending.op and found.seq > pending.seq


class Forgiving(PageClient):
    """Goes on after failures of some codes with what it had."""

    op, code = Op.STEP, ""

    def ask(self, op: Op, message: Any, frames: Any = ()) -> Reply:
        try:
            return super().ask(op, message, frames)
        except ClientError as error:
            if (op, str(error)) != (self.op, f"{op.name}: {self.code}"):
                raise
            return Reply(op, messages.Done(), [self._observations.tobytes(), bytes(10 * NUM_ENVS)])


@breaks("unknown_code", "a failure with an unknown code is an error")
class IgnoresUnknownCodes(Forgiving):
    code = "code_of_a_later_version"


@breaks("short_frame", "a frame of another number of envs is refused")
class FillsUp(PageClient):
    def observe(self, frame: bytes) -> None:
        super().observe(frame.ljust(self._observations.nbytes, b"\0"))


@breaks("refused_make", "a refused MAKE is an error, and is not sent again")
class MakesAgain(PageClient):
    def make(self) -> None:
        try:
            super().make()
        except ClientError:
            self.ask(Op.MAKE, Make(NUM_ENVS, "Conformance-v0"))


@breaks("unsupported_version", "another version is an error")
class IgnoresVersion(Forgiving):
    op, code = Op.HELLO, "unsupported_version"


# --- resilient --------------------------------------------------------------------------------------------------------


class ByState(ClientProtocol):
    """Does something of its own at a HEARTBEAT reply, by ``on_state``."""

    def _heartbeat(self, pending: Any, body: Any) -> None:
        super()._heartbeat(pending, body)
        self.on_state(messages.unpack(messages.HeartbeatReply, body).state, pending)

    def on_state(self, state: str, pending: Any) -> None:
        raise NotImplementedError


@breaks("lost_replies", "a request whose reply was lost is sent again as it was")
class SendsAgainAsAnother(ByState):
    def on_state(self, state: str, pending: Any) -> None:
        if state == "answered":
            self._session_seq += 1
            pending.seq = self._session_seq
            pending.frames = [
                Prelude(*Prelude.unpack(pending.frames[0]))._replace(seq=pending.seq).pack() + b"\x04"
            ] + [*pending.frames[1:]]
            pending.done = Prelude(REPLY | pending.op, self.hub_id, pending.token, pending.seq).pack()


@breaks("lost_replies", "copies of a request are a second apart")
class Floods(ByState):
    _floods = False

    def on_state(self, state: str, pending: Any) -> None:
        self._floods = state == "answered"

    def tick(self, now_s: float) -> list[Frames]:
        sent = super().tick(now_s)
        if self._floods and sent and self._pending is not None:
            self._pending.lost, self._pending.ask_s = True, now_s + 0.05
        return sent


@breaks("lost_request", "a request that was lost with its connection is sent again")
class GivesUpWhatIsUnknown(ByState):
    def on_state(self, state: str, pending: Any) -> None:
        if state == "unknown":
            raise ClientError("the hub does not have the request")


@breaks("cut", "a session goes on over another connection")
class DoesNotGoOn(ByState):
    _was_cut = False

    def disconnected(self, now_s: float) -> None:
        self._was_cut = True
        super().disconnected(now_s)

    def on_state(self, state: str, pending: Any) -> None:
        if state == "running" and self._was_cut:
            raise ClientError("the connection has ended")


@breaks("endless_cuts", "a request that ends 10 connections is given up")
class SendsForEver(ClientProtocol):
    cut_off = None


@breaks("slow_step", "HEARTBEAT asks each second after a request that runs")
class AsksOnce(ByState):
    def on_state(self, state: str, pending: Any) -> None:
        if state == "running":
            pending.ask_s = time.monotonic() + 60.0


@breaks("slow_step", "a request that runs is not sent again")
class SendsWhatRuns(ByState):
    def on_state(self, state: str, pending: Any) -> None:
        if state == "running":
            pending.lost, pending.ask_s = True, AT_ONCE


@breaks("late_reply", "the next request waits for the end of one that was given up")
class DoesNotWait(ClientProtocol):
    held = False

    def request(self, op: Op, message: Any, frames: Any, now_s: float) -> Frames:
        sent = super().request(op, message, frames, now_s)
        if self._pending is not None and self._pending.held:
            self._pending.held, self._sent_seq = False, self._pending.seq
            self._pending.ask_s = AT_ONCE
        return sent


@breaks("late_reply", "the reply to a request that was given up is dropped")
class TakesLateReplies(Mistaking):
    def mistakes(self, found: Prelude) -> bool:
        pending = self._pending
        assert pending is not None
        return pending.op == Op.RESET and found.op == REPLY | Op.STEP


@breaks("goodbye", "a hub that stops is an error")
class IgnoresTheEnd(Forgiving):
    code = "draining"

    class half(ClientProtocol):
        def loss(self, now_s: float) -> str:
            return "" if self.goodbye is not None else super().loss(now_s)


@breaks("restart", "the loss of the hub is an error")
class IgnoresTheLoss(Forgiving):
    code = "session_lost"

    class half(ClientProtocol):
        def receive(self, frames: Frames, now_s: float) -> Reply | None:
            found = Prelude.unpack(frames[0])
            if self.hub_id not in (0, found.hub_id) and self._pending is not None:
                self.hub_id, pending = found.hub_id, self._pending
                pending.frames = addressed(pending.frames, hub_id=self.hub_id)
                pending.lost, pending.ask_s = True, AT_ONCE
                return None
            return super().receive(frames, now_s)


# --- parts and attach -------------------------------------------------------------------------------------------------


@breaks("parts", "rows are sent and received by parts")
class MixesRows(PageClient):
    def take(self, rows: Any, frames: Any) -> None:
        super().take([NUM_ENVS - 1 - row for row in rows] if len(rows) == 1 else rows, frames)


@breaks("foreign_row", "a row that was not sent is refused")
class IgnoresForeignRows(PageClient):
    def receive_rows(self, missing: set[int]) -> list[int]:
        frames = self.ask(Op.RECEIVE, Receive(1)).frames
        rows: list[int] = np.frombuffer(frames[0], np.int64).tolist()
        if not {*rows} <= missing:
            return []
        self._observations[rows] = np.frombuffer(frames[1], np.float32).reshape(-1, 2)
        self.take(rows, frames[2:])
        return rows


@breaks("attach", "a session is taken over")
class DoesNotObserve(PageClient):
    def observe(self, frame: bytes) -> None:
        super().observe(bytes(len(frame)) if self.protocol._session_seq == 0 else frame)


@breaks("refused_attach", "a refused ATTACH is an error, and is not sent again")
class IgnoresRefusedAttach(Forgiving):
    op, code = Op.ATTACH, "session_lost"
