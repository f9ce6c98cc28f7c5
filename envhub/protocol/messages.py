"""Every request, reply and failure as a frozen dataclass, and their strict form on the wire.

A message is a msgpack map of its fields (PROTOCOL.md lists them). A field that only the two ends read (options, call
arguments, infos) is ``bytes``: the hub passes it on unread. New fields go last and have defaults, so that an older peer
is understood; a field this side does not know is ignored.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Dict, Iterable, List, Optional, Tuple, Type, TypeVar, Union, cast, get_type_hints

from envhub.values import codec

M = TypeVar("M")


class Op(IntEnum):
    """What a frame asks for, or answers. A reply carries the request's op with ``REPLY`` added, or ``FAILURE``."""

    HELLO = 1
    LIST = 2
    STATS = 3
    HEALTH = 4
    SESSIONS = 5
    HEARTBEAT = 6
    OBSERVE = 7
    MAKE = 16
    RESET = 17
    STEP = 18
    CALL = 19
    SET_ATTR = 20
    CLOSE = 21
    COLLECT = 22
    SEND = 23
    RECEIVE = 24
    TEMPLATES = 25
    HOPS = 26
    ATTACH = 27
    PING = 64  # pushed by the hub to see whether a client is still there; asks for nothing
    GOODBYE = 65  # pushed by the hub when it ends a session that its client did not close
    NOTICE = 66  # pushed by the hub for the user of a session to read
    FAILURE = 127


REPLY = 128
SESSION_OPS = frozenset(op for op in Op if Op.MAKE <= op < Op.PING)


# --- requests ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """The first request on a connection; the hub answers with ``Welcome`` or refuses the version."""

    client: str = ""


@dataclass(frozen=True)
class ListEnvs:
    """Which environment names may be made."""


@dataclass(frozen=True)
class StatsRequest:
    """The hub's counters."""


@dataclass(frozen=True)
class HealthRequest:
    """Whether the hub is up and takes new sessions."""


@dataclass(frozen=True)
class SessionsRequest:
    """One description per session."""


@dataclass(frozen=True)
class HeartbeatRequest:
    """Asks where the request ``seq`` of the prelude's session stands; also tells the hub where to send its reply."""


@dataclass(frozen=True)
class Observe:
    """The last observations of a session, which does not notice."""

    session: bytes  # its token
    described: bool = False  # whether the client knows the spaces


@dataclass(frozen=True)
class Attach:
    """Take a session over, which goes on under the token of the prelude; whoever held it has lost it."""

    session: bytes  # the token it had


@dataclass(frozen=True)
class World:
    """What the workers of a private hub take over from the program that owns it."""

    sys_path: List[str]
    cwd: str
    environ: Dict[str, str]
    registrations: bytes = b""  # Gymnasium's registry as the program has it, see PROTOCOL.md
    authkey: bytes = b""  # by which its multiprocessing trusts its own, where it uses that


@dataclass(frozen=True)
class Faults:
    """What becomes of envs that fail, and after how many seconds one is taken to hang."""

    on_crash: str = "truncate"  # or "raise": when its worker ends
    on_timeout: str = "truncate"  # when it hangs, and its worker is ended for it
    on_exception: str = "raise"  # when its step raises
    on_invalid: str = "pass"  # when an observation or reward is not finite
    restart_wait_s: float = 5.0  # for how long a step waits for envs that are made anew
    restarts_max: int = 5  # of a worker, within a minute
    init_s: float = 300.0  # for making one env, and for its first step
    reset_s: float = 120.0
    step_s: float = 300.0
    call_s: float = 300.0  # of one env
    close_s: float = 5.0  # of all envs together


@dataclass(frozen=True)
class Make:
    """A new session of ``num_envs`` envs: by name, or (private hubs only) by a pickled list of factories."""

    num_envs: int
    name: str = ""
    kwargs: bytes = b""
    factories: bytes = b""
    num_workers: Optional[int] = None  # None, or 0: as many as suit the envs by what is known of them
    autoreset_mode: str = "NextStep"
    observation_mode: str = "same"
    world: Optional[World] = None
    runner: bytes = b""  # cloudpickle of a class or its name, private hubs only
    wrappers: List[str] = field(default_factory=list)  # entry points, innermost first
    wrapper_kwargs: List[bytes] = field(default_factory=list)
    columns: bool = False  # whether infos may come in columns
    spin_us: Optional[int] = None  # for how long those who wait look before they park; None leaves it to the hub
    pin: bool = False  # whether each worker keeps to one CPU
    compression: str = ""  # of observations, one of those in Welcome
    fresh: bool = False  # whether the session takes the place of a lost one: its first step is a reset
    faults: Faults = Faults()
    beat_s: float = 0.0  # how often the client's connection shows a sign of life, as by ZMTP heartbeats; 0 is never
    factories_digest: str = ""  # the same for factories that make the same env, for what is known of it; empty is none
    lost: bytes = b""  # an encoded info: the session takes the place of a lost one, and each env's first step says so


@dataclass(frozen=True)
class Reset:
    """Reset the rows of ``mask`` (all where it is empty) with one seed per row and shared options."""

    seeds: List[Optional[int]] = field(default_factory=list)
    mask: List[bool] = field(default_factory=list)
    options: bytes = b""


@dataclass(frozen=True)
class Step:
    """One batched step; ``codes`` says, per action leaf, in which form the actions stand in their frames."""

    codes: bytes


@dataclass(frozen=True)
class Collect:
    """Tell what steps that the client drove itself left with the hub of these rows: why one failed, or large infos."""

    rows: List[int]


@dataclass(frozen=True)
class Send:
    """Begin a step of these rows, which may be a part of the batch; ``codes`` as in ``Step``."""

    rows: List[int]
    codes: bytes


@dataclass(frozen=True)
class Receive:
    """Tell the outcome of the rows that are done, of those sent, once there are so many."""

    min_envs: int


@dataclass(frozen=True)
class TemplatesRequest:
    """What the infos look like that come in columns by these numbers."""

    numbers: List[int]


@dataclass(frozen=True)
class HopsRequest:
    """When the last step passed the hub and the workers."""


@dataclass(frozen=True)
class Call:
    """Call a method of every env, or read an attribute.

    With ``only_kind`` nothing is called; each env says whether the attribute can be. With ``skip_unreset`` an env that
    was made again after a failure, and not yet reset, is left alone and has an empty result.
    """

    name: str
    args: bytes
    only_kind: bool = False
    skip_unreset: bool = False


@dataclass(frozen=True)
class SetAttr:
    """Set an attribute of every env; ``values`` holds one encoded value, or one per env."""

    name: str
    values: List[bytes]


@dataclass(frozen=True)
class Close:
    """End the session: close its envs within the hub's budget, or with ``terminate`` kill its workers at once."""

    terminate: bool = False


# --- replies ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Welcome:
    """What the hub is; ``limits`` are its own, in the units their names end with."""

    hub: str
    version: str
    private: bool
    limits: Dict[str, int]
    host: str = ""
    pid: int = 0
    compressions: List[str] = field(default_factory=list)


@dataclass(frozen=True)
class EnvNames:
    """Names that ``make`` accepts."""

    names: List[str]


@dataclass(frozen=True)
class Table:
    """Counters or descriptions, by name."""

    rows: List[Dict[str, Any]]


@dataclass(frozen=True)
class HeartbeatReply:
    """``state`` of the asked request: ``unknown`` (send it again), ``running`` or ``answered`` (send it again)."""

    state: str
    phase: str = ""  # of a MAKE that runs
    built: int = 0  # envs so far
    num_envs: int = 0


@dataclass(frozen=True)
class Made:
    """The session is ready. Spaces are encoded values in the wire form of ``envhub.values.spaces``."""

    num_envs: int
    num_workers: int
    observation_spaces: List[bytes]  # one, or with observation_mode "different" one per env
    action_space: bytes
    metadata: bytes = b""
    render_mode: Optional[str] = None
    spec: bytes = b""  # the env's EnvSpec, encoded; empty where it has none that can be carried
    ticket: bytes = b""  # for the hub's side socket, once; empty where it has none
    step_s: Optional[float] = None  # no hub measures it any more
    autoreset_mode: str = ""  # of Make, for who takes the session over
    observation_mode: str = ""
    steps: List[int] = field(default_factory=list)  # then also each row's number of steps and resets so far
    sizing: str = ""  # why it has so many workers, for people


@dataclass(frozen=True)
class Observed:
    """What a session showed last: for each row, how many steps and resets it has had, and whether it is given here."""

    num_envs: int
    steps: List[int]
    given: List[bool]
    observation_spaces: List[bytes] = field(default_factory=list)  # as in Made, unless they are known


@dataclass(frozen=True)
class Shared:
    """What comes through the side socket with the descriptors of arena, client's bell and every worker's bell."""

    info_bytes: int
    workers: int  # of which each has the rows whose remainder is its number
    spin_us: int


@dataclass(frozen=True)
class Templates:
    """An encoded example of each template that was asked for and that the session's infos have used."""

    numbers: List[int]
    examples: List[bytes]


@dataclass(frozen=True)
class Hops:
    """When the last step passed what, in nanoseconds of the hub machine's monotonic clock.

    The hub's four are of the last STEP, 0 where there was none. Of each worker: when it began, and when it ended.
    """

    heard: int
    rung: int
    woke: int
    answered: int
    began: List[int]
    ended: List[int]


@dataclass(frozen=True)
class Done:
    """The request is carried out; what it returns is in the frames that follow."""


@dataclass(frozen=True)
class Notice:
    """What the user of a session is to read, such as that another number of workers would suit its envs better."""

    text: str


@dataclass(frozen=True)
class Failure:
    """Why a request failed. ``code`` is one of PROTOCOL.md's, ``scope`` is request, env, session or hub."""

    code: str
    scope: str
    message: str
    env_index: Optional[int] = None
    worker: Optional[int] = None
    type: str = ""
    args: bytes = b""  # the exception's arguments, where the codec carries them
    traceback: str = ""
    log_tail: str = ""
    attributes: bytes = b""  # the exception's attributes, where the codec carries them


_ROW = struct.Struct("<II")


def pack_rows(blobs: Iterable[Tuple[int, Any]]) -> bytes:
    """One frame of ``(row, encoded value)`` pairs: infos, or the results of a call. The hub never decodes them."""
    return b"".join(part for row, blob in blobs for part in (_ROW.pack(row, len(blob)), blob))


def unpack_rows(frame: Any, rows: int) -> List[Tuple[int, bytes]]:
    """The pairs that ``pack_rows`` joined, of rows in ``[0, rows)`` and each at most once.

    Raises:
        codec.DecodeError: the lengths do not add up, or there is another row.
    """
    view, start = memoryview(frame), 0
    found: List[Tuple[int, bytes]] = []
    while start < len(view):
        if start + _ROW.size > len(view):
            raise codec.DecodeError("a frame of rows ends in the middle of a row")
        row, length = _ROW.unpack_from(view, start)
        if row >= rows or len(found) >= rows:
            raise codec.DecodeError(f"a frame of rows holds more than each of {rows}")
        start += _ROW.size + length
        if start > len(view):
            raise codec.DecodeError("a frame of rows ends in the middle of a row")
        found.append((row, bytes(view[start - length : start])))
    return found


REQUESTS: Dict[int, Type[Any]] = {
    Op.HELLO: Hello,
    Op.LIST: ListEnvs,
    Op.STATS: StatsRequest,
    Op.HEALTH: HealthRequest,
    Op.SESSIONS: SessionsRequest,
    Op.HEARTBEAT: HeartbeatRequest,
    Op.MAKE: Make,
    Op.RESET: Reset,
    Op.CALL: Call,
    Op.SET_ATTR: SetAttr,
    Op.CLOSE: Close,
    Op.COLLECT: Collect,
    Op.SEND: Send,
    Op.RECEIVE: Receive,
    Op.TEMPLATES: TemplatesRequest,
    Op.HOPS: HopsRequest,
    Op.OBSERVE: Observe,
    Op.ATTACH: Attach,
}
REPLIES: Dict[int, Type[Any]] = {
    Op.HELLO: Welcome,
    Op.LIST: EnvNames,
    Op.STATS: Table,
    Op.HEALTH: Table,
    Op.SESSIONS: Table,
    Op.HEARTBEAT: HeartbeatReply,
    Op.MAKE: Made,
    Op.RESET: Done,
    Op.STEP: Done,
    Op.CALL: Done,
    Op.SET_ATTR: Done,
    Op.CLOSE: Done,
    Op.COLLECT: Done,
    Op.SEND: Done,
    Op.RECEIVE: Done,
    Op.TEMPLATES: Templates,
    Op.HOPS: Hops,
    Op.OBSERVE: Observed,
    Op.ATTACH: Made,
    Op.NOTICE: Notice,
    Op.FAILURE: Failure,
}
_HINTS: Dict[Type[Any], Dict[str, Any]] = {}


def pack(message: Any) -> bytes:
    """The msgpack map of a message's fields."""
    return codec.encode(as_map(message))


def as_map(message: Any) -> Dict[str, Any]:
    """A message's fields by name, those of a message in it, too. ``dataclasses.asdict`` copies what is in them."""
    found = {}
    for name, value in vars(message).items():
        found[name] = as_map(value) if dataclasses.is_dataclass(value) else value
    return found


def unpack(kind: Type[M], blob: Any, limits: codec.HeaderLimits = codec.KNOWN) -> M:
    """The message of class ``kind`` that ``blob`` holds, which is no larger than ``limits``.

    Raises:
        codec.DecodeError: not a map, a field is missing, or a field has another type than its annotation.
    """
    found = codec.decode_header(blob, limits)
    if not isinstance(found, dict):
        raise codec.DecodeError(f"a {kind.__name__} must be a map")
    return cast(M, build(kind, found))


def build(kind: Any, found: Dict[str, Any]) -> Any:
    """The message of class ``kind`` with these fields, each checked against its annotation.

    Raises:
        codec.DecodeError: a field is missing, or has another type than its annotation.
    """
    hints = _HINTS.get(kind)
    if hints is None:
        hints = _HINTS[kind] = get_type_hints(kind)
    values = {}
    for name, hint in hints.items():
        if name in found:
            values[name] = _value(f"{kind.__name__}.{name}", hint, found[name])
    try:
        return kind(**values)
    except TypeError as error:
        raise codec.DecodeError(f"{kind.__name__}: {error}") from error


def _value(where: str, hint: Any, value: Any) -> Any:
    """``value`` checked against one annotation: a plain type, Optional, List, Dict, Any, or a dataclass."""
    origin = getattr(hint, "__origin__", None)
    if hint is Any:
        return value
    if origin is Union:
        return None if value is None else _value(where, hint.__args__[0], value)
    if origin is list and isinstance(value, list):
        return [_value(where, hint.__args__[0], item) for item in value]
    if origin is dict and isinstance(value, dict):
        return {_value(where, hint.__args__[0], k): _value(where, hint.__args__[1], v) for k, v in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return build(hint, value)
    if origin is None and type(value) is hint:
        return value
    raise codec.DecodeError(f"{where} must be {getattr(hint, '__name__', hint)}, got {type(value).__name__}")
