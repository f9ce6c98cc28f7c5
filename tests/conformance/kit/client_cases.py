"""The cases by which a client is tested: what happens on the way, and the rules that the client keeps meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from conformance.kit.counting_envs import NAME, NUM_ENVS, SEEDS, STEPS
from conformance.kit.scripted_hub import Heard, Record, Script, header
from conformance.kit.verdict import NotShown

from envhub.protocol import messages
from envhub.protocol.client import CUTS_MAX, HEARTBEAT_S
from envhub.protocol.messages import PART_OPS, Failure, Op, Reset
from envhub.protocol.prelude import PRELUDE, VERSION, Frames, Prelude
from envhub.values import actions, codec

FAULT_STEP = 3  # the step that most scripts interfere with
SLOW_S = 3.5  # the time of a slow step
LATE_S = 2.5  # the time of a step that the client gives up after 1 s
PAUSE_S = 0.5  # the shortest time between two copies of a request on one connection
ANSWER_S = 2.0  # in which a client says something on a new connection
CRASHED = 128  # of exit statuses, the first that shells and programs use for signals
UNKNOWN_PUSH, UNKNOWN_FIELD, UNKNOWN_CODE = 70, "field_of_a_later_version", "code_of_a_later_version"
LEVELS = ("basic", "resilient", "parts", "attach")

Judge = Callable[[Record], str]


@dataclass(frozen=True)
class Case:
    """A run of a client's program.

    Attributes:
        script: makes the script.
        rules: judges by the rule's text; each returns why the client broke the rule, or an empty text. It raises
            ``NotShown`` where the client did not get so far, and ``DecodeError`` for a header that cannot be read.
        level: of PROTOCOL.md.
        program: the program that the client runs.
    """

    script: Callable[[], Script]
    rules: Mapping[str, Judge]
    level: str = "basic"
    program: str = "steps"


# --- what happens -----------------------------------------------------------------------------------------------------


class _Refuse(Script):
    def __init__(self, failure: Failure, op: Op, nth: int = 0) -> None:
        super().__init__(op, nth)
        self._failure = failure

    def refusal(self, heard: Heard) -> Failure | None:
        return self._failure if self.is_at(heard) else None


class _UnknownFields(Script):
    def replies(self, heard: Heard, reply: Frames) -> Sequence[Frames]:
        if len(reply[0]) == PRELUDE.size:
            return [reply]  # a Done has no header
        self.fault = True
        kept = codec.decode(bytes(reply[0][PRELUDE.size :]))
        head = bytes(reply[0][: PRELUDE.size]) + codec.encode({**kept, UNKNOWN_FIELD: [1, {"a": "b"}]})
        return [[head, *reply[1:]]]


class _Strangers(Script):
    """Puts messages around each reply to a step that are no reply to it.

    A push that is not known, a PING, the reply to the next request, one of another session; and the reply once more.
    """

    def replies(self, heard: Heard, reply: Frames) -> Sequence[Frames]:
        if not self.is_at(heard):
            return [reply]
        head, false = Prelude.unpack(reply[0]), [bytes(len(frame)) for frame in reply[1:]]
        return [
            [head._replace(op=UNKNOWN_PUSH).pack() + b"\x80"],
            [Prelude(Op.PING, head.hub_id, bytes(16), 0).pack()],
            [head._replace(seq=head.seq + 1).pack(), *false],
            [head._replace(token=head.token[::-1]).pack(), *false],
            reply,
            reply,
        ]


class _ShortFrame(Script):
    """Takes one env's observation out of a reply."""

    def replies(self, heard: Heard, reply: Frames) -> Sequence[Frames]:
        if len(reply) == 1 or not self.is_at(heard):  # a failure has one frame
            return [reply]
        return [[reply[0], reply[1][: len(reply[1]) // NUM_ENVS], *reply[2:]]]


class _OtherVersion(Script):
    """Reaches a hub of the next version, which is to say, reaches this one with the last."""

    def arrives(self, heard: Heard) -> Sequence[bytes] | None:
        if not self.is_at(heard):
            return heard.message
        other = heard.prelude._replace(version=VERSION + 1)
        return [other.pack() + header(heard), *heard.message[1:]]


class _LoseReplies(Script):
    """Loses the first replies to a request."""

    def __init__(self, op: Op, nth: int, count: int) -> None:
        super().__init__(op, nth)
        self._left = count

    def replies(self, heard: Heard, reply: Frames) -> Sequence[Frames]:
        if not self.is_at(heard) or not self._left:
            return [reply]
        self._left -= 1
        return []


class _LoseRequest(Script):
    """Ends the connection by which a request comes, which does not reach the hub, so often."""

    def __init__(self, op: Op, nth: int, count: float) -> None:
        super().__init__(op, nth)
        self._left, self._cut = count, False

    def arrives(self, heard: Heard) -> Sequence[bytes] | None:
        self._cut = self.is_at(heard) and self._left > 0
        self._left -= self._cut
        return None if self._cut else heard.message

    def cuts(self, heard: Heard) -> bool:
        return self._cut


class _Slow(Script):
    def __init__(self, op: Op, nth: int, seconds: float) -> None:
        super().__init__(op, nth)
        self._seconds = seconds

    def takes_s(self, heard: Heard) -> float:
        return self._seconds if self.is_at(heard) else 0.0


class _CutWhileRunning(_Slow):
    def __init__(self, op: Op, nth: int, seconds: float) -> None:
        super().__init__(op, nth, seconds)
        self._was_cut = False

    def cuts(self, heard: Heard) -> bool:
        cut = self.is_at(heard) and not self._was_cut
        self._was_cut = self._was_cut or cut
        return cut


class _Late(_Slow):
    """Also sends the reply once more, before the reply to the RESET that follows."""

    _reply: Frames | None = None

    def replies(self, heard: Heard, reply: Frames) -> Sequence[Frames]:
        if self.is_at(heard):
            self._reply = reply
        if heard.op == Op.RESET and self._reply is not None:
            return [self._reply, reply]
        return [reply]


class _Stop(Script):
    def stops(self, heard: Heard) -> bool:
        return self.is_at(heard)


class _Restart(Script):
    _ended = False

    def restarts(self, heard: Heard) -> bool:
        ends = self.is_at(heard) and not self._ended
        self._ended = self._ended or ends
        return ends


class _ForeignRow(Script):
    """Names in the second reply with rows that were sent one that is not there."""

    _seen = 0

    def replies(self, heard: Heard, reply: Frames) -> Sequence[Frames]:
        if heard.op not in PART_OPS or len(reply) == 1:  # a failure has one frame
            return [reply]
        self._seen += 1
        if self._seen != 2:
            return [reply]
        self.fault = True
        count = len(reply[1]) // 8
        return [[reply[0], NUM_ENVS.to_bytes(8, "little") * count, *reply[2:]]]


# --- the rules --------------------------------------------------------------------------------------------------------


def _finishes(record: Record) -> str:
    _require_fault(record)
    return _finished(record)


def _finished(record: Record) -> str:
    if not record.heard:
        raise NotShown("nothing came")
    if record.wrong:
        return record.wrong[0]
    if record.limit:
        return record.limit
    if not record.of(Op.CLOSE):
        return f"the program was to go on to CLOSE; the last that came is {_name(record.heard[-1])}"
    if record.status:
        return f"the program was to end with status 0, and ended with {record.status}"
    return ""


def _tells(pending: int = 0) -> Judge:
    """An error ends the program: no further request comes but those that were under way, ``pending`` of them."""

    def judge(record: Record) -> str:
        _require_fault(record)
        later = [heard for heard in record.after_fault() if heard.is_request]
        if len(later) > pending:
            return f"an error was to end the program, and {_name(later[pending])} came after it: {_hex(later[pending])}"
        if record.limit:
            return f"an error was to end the program, and {record.limit}"
        if record.status == 0:
            return "the program was to end with an error, and ended with status 0"
        if record.status is not None and (record.status < 0 or record.status >= CRASHED):
            return f"the program was to end with an error, and crashed with status {record.status}"
        return ""

    return judge


def _says_hello(record: Record) -> str:
    if not record.heard:
        raise NotShown("nothing came")
    first = record.heard[0]
    due = Prelude(Op.HELLO, 0, bytes(16), 1)
    if first.prelude != due:
        return f"the first prelude was to be HELLO with hub id 0, zero token and seq 1: {_hex(first)}"
    messages.unpack(messages.Hello, header(first))
    return ""


def _counts(record: Record) -> str:
    """The requests of the session carry the hub's id, one token, and numbers that rise."""
    requests = record.of(*messages.SESSION_OPS)
    if not requests:
        raise NotShown("no request of a session came")
    if requests[0].op != Op.MAKE or requests[0].prelude.seq != 1:
        return f"the session's first request was to be MAKE with seq 1: {_hex(requests[0])}"
    for before, heard in itertools.pairwise(requests):
        if heard.prelude.token != before.prelude.token:
            return f"{_name(heard)} has another token than {_name(before)}"
        if heard.prelude.seq <= before.prelude.seq:
            return f"{_name(heard)} has seq {heard.prelude.seq}, more than {before.prelude.seq} was due"
    if strangers := [heard for heard in requests if heard.prelude.hub_id != requests[0].prelude.hub_id]:
        return f"{_name(strangers[0])} has another hub id than the reply to HELLO: {_hex(strangers[0])}"
    if len({*requests[0].prelude.token}) < 4:
        return "the token was to be 16 random bytes"
    return ""


def _follows_program(record: Record) -> str:
    ops = [heard.op for heard in record.of(*messages.SESSION_OPS)]
    due = [Op.MAKE, Op.RESET, *[Op.STEP] * STEPS, Op.CALL, Op.CLOSE]
    if ops != due[: len(ops)]:
        return f"{' '.join(op.name for op in due)} was due, {' '.join(map(_op_name, ops))} came"
    if ops != due:
        return _finished(record)
    seeds = messages.unpack(Reset, header(record.of(Op.RESET)[0])).seeds
    if seeds != SEEDS:
        return f"RESET has seeds {seeds}, {SEEDS} was due"
    return _finished(record)


def _acts_in_integers(record: Record) -> str:
    """The actions of a Discrete have an integer dtype: the hub casts nothing."""
    steps = record.of(Op.STEP)
    if not steps:
        raise NotShown("no STEP came")
    for step in steps:
        codes = header(step)
        number = codes[0] & ~actions.PYTHON if len(codes) == 1 else len(actions.DTYPES)
        if number < len(actions.DTYPES) and actions.DTYPES[number].kind not in "iu":
            dtype = actions.DTYPES[number]
            return (
                f"{_name(step)} has the action code {codes.hex()} ({dtype}), one of an integer was due, as 04 (int64)"
            )
    return ""


def _repeats_bytes(op: Op, nth: int) -> Judge:
    """Each copy of a request has the same bytes, and the program goes on."""

    def judge(record: Record) -> str:
        copies = record.copies(op, nth)
        _require_fault(record)
        if different := next((copy for copy in copies if copy.message != copies[0].message), None):
            return f"the same bytes were due again, {_hex(copies[0])}; {_hex(different)} came"
        if len(copies) < 2:
            return f"{_name(copies[0])} was to be sent again, and the next is {_next(record, copies[0])}"
        return _finished(record)

    return judge


def _pauses(op: Op, nth: int) -> Judge:
    def judge(record: Record) -> str:
        copies = record.copies(op, nth)
        if len(copies) < 2:
            raise NotShown(f"{_op_name(op)} {nth} was not sent again")
        pauses_s = [later.at_s - copy.at_s for copy, later in itertools.pairwise(copies)]
        # One may be short: a client asks at once when it learns that a connection was made.
        if sum(pause_s < PAUSE_S for pause_s in pauses_s) > 1:
            shown = ", ".join(f"{pause_s:.2f}" for pause_s in pauses_s[:8])
            return f"copies were to be {HEARTBEAT_S:g} s apart, and {len(copies)} came with pauses of {shown} s"
        return ""

    return judge


def _asks_while_running(record: Record) -> str:
    copies = record.copies(Op.STEP, FAULT_STEP)
    if not copies:
        raise NotShown(f"STEP {FAULT_STEP} did not come")
    key = copies[0].prelude.token, copies[0].prelude.seq
    began_s, ended_s = _running_s(record, copies[0])
    beats = [heard for heard in record.of(Op.HEARTBEAT) if began_s < heard.at_s < ended_s]
    due, most = int(SLOW_S / HEARTBEAT_S) - 1, int(SLOW_S / PAUSE_S)
    if not due <= len(beats) <= most:
        return f"a HEARTBEAT each second was due, at least {due}; {len(beats)} came in {SLOW_S} s"
    if wrong := next((beat for beat in beats if (beat.prelude.token, beat.prelude.seq) != key), None):
        return f"HEARTBEAT was to have the token of STEP {FAULT_STEP} and seq {key[1]}: {_hex(wrong)}"
    return _finished(record)


def _waits_while_running(op: Op, nth: int) -> Judge:
    """No copy of a request comes on its connection while the hub says that it runs."""

    def judge(record: Record) -> str:
        copies = record.copies(op, nth)
        if not copies:
            raise NotShown(f"{_op_name(op)} {nth} did not come")
        _, ended_s = _running_s(record, copies[0])
        again = [copy for copy in copies[1:] if copy.at_s < ended_s]
        return f"{_name(copies[0])} was sent again while the hub said that it was running" if again else ""

    return judge


def _returns(record: Record) -> str:
    _require_fault(record)
    later = record.after_fault()
    before = record.heard[(record.fault or 1) - 1]
    if not later:
        return "the client was to connect again, and nothing came after the connection had ended"
    if later[0].at_s - before.at_s > ANSWER_S:
        waited_s = later[0].at_s - before.at_s
        return f"a message on a new connection was due at once, and the first, {_name(later[0])}, took {waited_s:.1f} s"
    return _finished(record)


def _waits_for_given_up(record: Record) -> str:
    steps, resets = record.copies(Op.STEP, FAULT_STEP), record.of(Op.RESET)
    if not steps or len(resets) < 2:
        raise NotShown(f"STEP {FAULT_STEP} and a RESET after it did not come")
    key = steps[0].prelude.token, steps[0].prelude.seq
    _, ended_s = _running_s(record, steps[0])
    if resets[1].at_s < ended_s:
        early_s = ended_s - resets[1].at_s
        return f"RESET was due once the STEP that was given up had ended, and came {early_s:.1f} s before that"
    asked = [heard for heard in record.of(Op.HEARTBEAT) if (heard.prelude.token, heard.prelude.seq) == key]
    return "" if asked else "HEARTBEAT with the seq of the STEP that was given up was due, and none came"


def _drops_late_reply(record: Record) -> str:
    if len(record.of(Op.RESET)) < 2:
        raise NotShown("no RESET came after the STEP that was given up")
    return _finished(record)


def _gives_up(record: Record) -> str:
    _require_fault(record)
    copies = record.copies(Op.STEP, FAULT_STEP)
    if len(copies) > CUTS_MAX:
        return f"the request was due at most {CUTS_MAX} times, and came {len(copies)} times"
    return _tells(pending=len(copies))(record)


def _require_fault(record: Record) -> None:
    if record.fault is None:
        last = _name(record.heard[-1]) if record.heard else "nothing"
        raise NotShown(f"the client did not get so far: the last that came is {last}")


def _running_s(record: Record, heard: Heard) -> tuple[float, float]:
    """The seconds from and until which the hub ran a request; raises ``NotShown`` if it never did."""
    key = heard.prelude.token, heard.prelude.seq
    if key not in record.running:
        raise NotShown(f"{_name(heard)} came, and the hub did not run it: {_hex(heard)}")
    return record.running[key]


def _next(record: Record, heard: Heard) -> str:
    later = [other for other in record.heard[record.heard.index(heard) + 1 :] if other.op != Op.HEARTBEAT]
    return f"{_name(later[0])}: {_hex(later[0])}" if later else "nothing"


def _op_name(op: int) -> str:
    return Op(op).name if op in Op.__members__.values() else f"op {op}"


def _name(heard: Heard) -> str:
    return f"{_op_name(heard.op)} {heard.nth} (seq {heard.prelude.seq})"


def _hex(heard: Heard) -> str:
    """The first frame of a message without its token, which is a secret of real sessions."""
    first = heard.message[0]
    return f"{first[:16].hex(' ')} (token) {first[32:96].hex(' ')}"


# --- the cases --------------------------------------------------------------------------------------------------------

_NO_ROOM = Failure("limit", "hub", "this hub has no room for another session")
_LATER = Failure(UNKNOWN_CODE, "request", "a later version refuses this")
_GONE = Failure("session_lost", "session", "this hub has no such session")

CASES: Mapping[str, Case] = {
    "plain": Case(
        Script,
        {
            "the first message is a HELLO": _says_hello,
            "requests carry the hub's id, one token and rising numbers": _counts,
            "the requests and their values are those of the program": _follows_program,
            "the actions of a Discrete are integers": _acts_in_integers,
        },
    ),
    "unknown_fields": Case(_UnknownFields, {"an unknown field is ignored": _finishes}),
    "strangers": Case(_Strangers, {"what is no reply to the pending request is dropped": _finishes}),
    "unknown_code": Case(
        lambda: _Refuse(_LATER, Op.STEP, FAULT_STEP), {"a failure with an unknown code is an error": _tells()}
    ),
    "short_frame": Case(
        lambda: _ShortFrame(Op.STEP, FAULT_STEP), {"a frame of another number of envs is refused": _tells()}
    ),
    "refused_make": Case(
        lambda: _Refuse(_NO_ROOM, Op.MAKE), {"a refused MAKE is an error, and is not sent again": _tells()}
    ),
    "unsupported_version": Case(lambda: _OtherVersion(Op.HELLO), {"another version is an error": _tells()}),
    "lost_replies": Case(
        lambda: _LoseReplies(Op.STEP, FAULT_STEP, 3),
        {
            "a request whose reply was lost is sent again as it was": _repeats_bytes(Op.STEP, FAULT_STEP),
            "copies of a request are a second apart": _pauses(Op.STEP, FAULT_STEP),
        },
        "resilient",
    ),
    "lost_request": Case(
        lambda: _LoseRequest(Op.STEP, FAULT_STEP, 1),
        {"a request that was lost with its connection is sent again": _repeats_bytes(Op.STEP, FAULT_STEP)},
        "resilient",
    ),
    "cut": Case(
        lambda: _CutWhileRunning(Op.STEP, FAULT_STEP, 1.5),
        {"a session goes on over another connection": _returns},
        "resilient",
    ),
    "endless_cuts": Case(
        lambda: _LoseRequest(Op.STEP, FAULT_STEP, float("inf")),
        {f"a request that ends {CUTS_MAX} connections is given up": _gives_up},
        "resilient",
    ),
    "slow_step": Case(
        lambda: _Slow(Op.STEP, FAULT_STEP, SLOW_S),
        {
            "HEARTBEAT asks each second after a request that runs": _asks_while_running,
            "a request that runs is not sent again": _waits_while_running(Op.STEP, FAULT_STEP),
        },
        "resilient",
    ),
    "late_reply": Case(
        lambda: _Late(Op.STEP, FAULT_STEP, LATE_S),
        {
            "the next request waits for the end of one that was given up": _waits_for_given_up,
            "the reply to a request that was given up is dropped": _drops_late_reply,
        },
        "resilient",
        "give_up",
    ),
    "goodbye": Case(
        lambda: _Stop(Op.STEP, FAULT_STEP), {"a hub that stops is an error": _tells(pending=1)}, "resilient"
    ),
    "restart": Case(
        lambda: _Restart(Op.STEP, FAULT_STEP), {"the loss of the hub is an error": _tells(pending=1)}, "resilient"
    ),
    "parts": Case(Script, {"rows are sent and received by parts": _finished}, "parts", "parts"),
    "foreign_row": Case(_ForeignRow, {"a row that was not sent is refused": _tells()}, "parts", "parts"),
    "attach": Case(Script, {"a session is taken over": _finished}, "attach", "attach"),
    "refused_attach": Case(
        lambda: _Refuse(_GONE, Op.ATTACH),
        {"a refused ATTACH is an error, and is not sent again": _tells()},
        "attach",
        "attach",
    ),
}

PROGRAMS: Mapping[str, str] = {
    "steps": f"""\
  MAKE     num_envs {NUM_ENVS}, name "{NAME}"
  RESET    seeds {SEEDS}
  STEP     {STEPS} times; the action of each env is the first number of its last observation, as int64
  CALL     check, with three positional arguments, each a list with a number per env: the sums of the rewards,
           how many episodes have ended, and the sums of the number "n" of the infos, all since the last RESET
  CLOSE""",
    "give_up": f"""\
  As steps, but STEP {FAULT_STEP} is given up after 1 s. Then it goes on with RESET, {STEPS} STEPs, CALL and CLOSE.""",
    "parts": """\
  MAKE and RESET as in steps. Then four times: SEND of env 1, SEND of env 0, and RECEIVE with min_envs 1 until both
  have come. Then CALL and CLOSE as in steps.""",
    "attach": """\
  OBSERVE and ATTACH with the token of a session that is there (32 hexadecimal digits, the third argument). Then STEP,
  CALL and CLOSE as in steps; the first actions are of the observations that OBSERVE gave.""",
}
