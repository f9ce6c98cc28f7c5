"""Every request, reply and failure as a frozen dataclass, and their strict form on the wire.

A message is a msgpack map of its fields (PROTOCOL.md lists them). A field that only the client and the worker read
(options, call arguments, infos) is ``bytes``, which the hub passes on without reading. A sender may
leave a field with a default out. A receiver ignores a field that it does not know.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import field
from enum import IntEnum
from functools import lru_cache
from typing import Any, Dict, Iterable, List, Optional, Set, Tuple, Type, TypeVar, Union, cast, get_type_hints

from envhub.frozen import Frozen
from envhub.values import codec

M = TypeVar("M")


class Op(IntEnum):
    """The kind of a message. A reply carries the request's op with ``REPLY`` added, or ``FAILURE`` with it."""

    HELLO = 1
    LIST = 2
    STATS = 3
    HEALTH = 4
    STATUS = 5
    HEARTBEAT = 6
    OBSERVE = 7
    OPERATE = 8
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
    SNAPSHOT = 26
    ATTACH = 27
    PING = 64  # pushed by the hub to learn whether a client is still there
    GOODBYE = 65  # pushed by the hub when it ends a session that its client did not close
    NOTICE = 66  # pushed by the hub, a text for the user of a session
    FAILURE = 127


REPLY = 128
SESSION_OPS = frozenset(op for op in Op if Op.MAKE <= op < Op.PING)
PART_OPS = frozenset([Op.SEND, Op.RECEIVE])
WINDOW_OPS = PART_OPS | {Op.TEMPLATES}  # which a hub takes while others of these run


# --- requests ---------------------------------------------------------------------------------------------------


class Hello(Frozen):
    """The first request on a connection; the hub answers with ``Welcome`` or refuses the version."""

    client: str = ""


class Question(Frozen):
    """A request without fields; ``HEARTBEAT`` asks for the state of request ``seq`` of the prelude's session."""


class Status(Frozen):
    """A question about sessions: those that there are, the last ones that have ended, or their last slow requests."""

    what: str = "sessions"  # or "ended" or "slow"
    session: str = ""  # the name of one; empty for all


class Operate(Frozen):
    """An act on a session or on the hub itself; its action decides which fields it needs."""

    action: str
    id: bytes  # random; copies of one order are carried out once
    session: str = ""  # its name, or its token in hexadecimal digits
    env: int = -1
    why: str = ""  # for the users of what it ends, and for the log
    deadline_s: float = 0.0  # 0 for none


class Observe(Frozen):
    """A request for the last observations of a session; it does not change the session."""

    session: bytes  # its token
    described: bool = False  # whether the client knows the spaces


class ProgramOrigin(Frozen):
    """A client by its own account, which is only shown to people."""

    user: str = ""
    host: str = ""
    pid: int = 0
    program: str = ""
    label: str = ""  # the user's own name for the session


class Attach(Frozen):
    """Take a session over: it continues under the prelude's token, and its former client loses it."""

    session: bytes  # its former token
    compression: str = ""  # as of Make, from now on
    compression_ns: float = 0.0
    origin: ProgramOrigin = ProgramOrigin()


class ProgramEnvironment(Frozen):
    """The environment of the program that owns a private hub, which the hub's workers adopt."""

    sys_path: List[str]
    cwd: str
    environ: Dict[str, str]
    registrations: bytes = b""  # pickle of a list of bytes, each the cloudpickle of one EnvSpec
    authkey: bytes = b""  # the program's key of multiprocessing, if the program uses that
    argv: List[str] = field(default_factory=list)
    flags: List[str] = field(default_factory=list)  # the options of the program's interpreter
    python: str = ""  # the workers' interpreter, with which they adopt only ``cwd``; empty for the hub's own
    rendering: str = ""  # the renderer, as in the table of an env
    levels: bytes = b""  # an encoded map: the program's log levels and warning filters
    generators: List[int] = field(default_factory=list)  # of the states of NumPy's generator and of Python's


class Faults(Frozen):
    """The policies for failing envs, and the times after which an env counts as hanging."""

    on_crash: str = "truncate"  # or "raise" or "restore": when the env's worker ends
    on_timeout: str = "truncate"  # when the env hangs and the hub ends its worker
    on_exception: str = "raise"  # when the env's step raises
    on_invalid: str = "pass"  # when an observation or reward is not finite
    restart_wait_s: float = 5.0  # how long a step waits for envs that are built again
    restarts_max: int = 5  # of one worker, within 60 s
    init_s: float = 300.0  # for building one env, and for its first step
    reset_s: float = 120.0
    step_s: float = 300.0
    call_s: float = 300.0  # of one env
    close_s: float = 60.0  # of one env; the envs of a worker are closed one after another


class Recycle(Frozen):
    """Bounds at which a worker is replaced, at the end of its envs' episodes; 0 for never."""

    episodes: int = 0  # of all its envs together
    age_s: float = 0.0
    memory_bytes: int = 0


class Hosting(Frozen):
    """Settings of a session's workers besides their envs; for None the hub's operator decides."""

    gpus: List[int] = field(default_factory=list)  # devices, dealt to the workers in turn; empty as None
    memory_max: Optional[int] = None  # bytes of each worker; 0 for no limit
    spares: Optional[int] = None  # workers that are built in advance, to replace those that end
    recycle: Recycle = Recycle()  # the client's bounds or the operator's, whichever is reached first
    shares_process: Optional[bool] = None  # whether envs may share a process; False: each has its own


class Make(Frozen):
    """A new session of ``num_envs`` envs: by name, or, if the hub allows it, by pickled factories."""

    num_envs: int
    name: str = ""
    kwargs: bytes = b""
    factories: bytes = b""
    num_workers: Optional[int] = None  # None or 0: the hub decides, by the env's measured cost
    autoreset_mode: str = "NextStep"
    observation_mode: str = "same"
    program_environment: Optional[ProgramEnvironment] = None
    runner: bytes = b""  # private hubs only: cloudpickle of a class or of its name
    wrappers: List[str] = field(default_factory=list)  # entry points, innermost first
    wrapper_kwargs: List[bytes] = field(default_factory=list)
    columns: bool = False  # whether infos may come in columns
    spin_us: Optional[int] = None  # how long a side spins on a word before it parks; None: the hub decides
    pin: bool = False  # whether each worker runs on one CPU only
    compression: str = ""  # of observations, one of those in Welcome
    compression_ns: float = 0.0  # longest time that saving a byte may take; 0 for any
    fresh: bool = False  # whether the session replaces a lost one: the first step of each env is a reset
    faults: Faults = Faults()
    heartbeat_s: float = 0.0  # longest time between signs of life on the client's connection; 0 for no promise
    factories_digest: str = ""  # equal for factories that make the same env; empty for none
    kwargs_each: List[bytes] = field(default_factory=list)  # instead of ``kwargs``, one per env; empty for none
    hosting: Hosting = field(default_factory=Hosting)
    alike: bool = False  # whether all factories make equal envs
    vector: bool = False  # whether each factory makes a vector env; private hubs and factories only
    python: str = ""  # the client's version, such as 3.12; factories are bytecode, and run on this version only
    worker_setup: str = ""  # ``module:function``, called in each worker before its envs are made
    worker_setup_code: bytes = b""  # instead of it, cloudpickle of a callable; only if factories are allowed
    row_offset: int = 0  # index of the session's first env in a larger vector env; the envs are told such indices
    seeds: List[Optional[int]] = field(default_factory=list)  # of each env's first reset, with ``fresh`` or ``lost``
    snapshots: str = ""  # "safe": snapshots may be taken; "unsafe": of envs that cannot be copied exactly, too
    origin: ProgramOrigin = ProgramOrigin()


class Reset(Frozen):
    """Reset the rows of ``mask`` (all if it is empty) with one seed per row and shared options."""

    seeds: List[Optional[int]] = field(default_factory=list)
    mask: List[bool] = field(default_factory=list)
    options: bytes = b""
    options_each: List[bytes] = field(default_factory=list)  # instead of ``options``, one per env; empty for none
    snapshot: str = ""  # name of the one that the rows of ``mask`` were restored from: they show what they had then


class Step(Frozen):
    """One batched step; ``codes`` has, per action leaf, the action code of its frame."""

    codes: bytes


class Collect(Frozen):
    """A request for failures and large infos that the hub holds of these rows, from steps that the client drove."""

    rows: List[int]


class Send(Frozen):
    """Begin a step of these rows, which are a part of the batch; ``codes`` as in ``Step``."""

    rows: List[int]
    codes: bytes
    min_envs: int = 0  # results that it waits for, as a RECEIVE behind it would; 0: it is answered at once


class Receive(Frozen):
    """A request for the results of the sent rows that are done, once there are ``min_envs``, or all of them."""

    min_envs: int


class TemplatesRequest(Frozen):
    """A request for the info templates with these numbers."""

    numbers: List[int]


class Call(Frozen):
    """Call a method of every env, or of those of ``rows``, or read an attribute; PROTOCOL.md describes the fields.

    A ``question`` calls and reads nothing: ``"exists"`` asks if the env has the attribute, ``"wrapped"`` if one of its
    wrappers is of the class ``name``, written ``module:Class``.
    """

    name: str
    args: bytes
    only_kind: bool = False
    skip_unreset: bool = False
    rows: List[int] = field(default_factory=list)  # ascending; empty for all
    question: str = ""
    separate_frames: bool = False
    reset_first: bool = False


class SetAttr(Frozen):
    """Set an attribute of every env, or of those of ``rows``; ``values`` holds one encoded value, or one per env."""

    name: str
    values: List[bytes]
    rows: List[int] = field(default_factory=list)  # ascending; empty for all


class SnapshotRequest(Frozen):
    """Take a snapshot of rows, restore rows from one, or list them; those of ``drop`` are dropped before."""

    # "list", "take", "restore"; or a restore by halves, "prepare" and then "commit", or any other request to end it
    action: str = "list"
    name: str = ""  # of the snapshot; a hub chooses that of a new one
    rows: List[int] = field(default_factory=list)  # ascending; empty for all
    sources: List[int] = field(default_factory=list)  # of "restore": for each row, the row whose state it gets
    drop: List[str] = field(default_factory=list)


class Close(Frozen):
    """End the session: close its envs, each within ``close_s``, or with ``terminate`` kill its workers at once."""

    terminate: bool = False
    why: str = ""  # for people; empty where the program asked for it


# --- replies ----------------------------------------------------------------------------------------------------


class Capacity(Frozen):
    """The resources that a hub could give to further sessions of a client when it answered; it reserves nothing."""

    cpus: int  # that the hub and its workers may use, by affinity and the quota of a cgroup
    cpus_free: int  # an estimate: without one for each worker whose envs are not known to wait
    envs_free: Optional[int]  # by the limits of the hub and of the client's key; None for no limit
    sessions_free: Optional[int]


class Welcome(Frozen):
    """A description of the hub; ``limits`` are in the units that their names end with."""

    hub: str
    version: str
    private: bool
    limits: Dict[str, int]
    host: str = ""
    pid: int = 0
    compressions: List[str] = field(default_factory=list)
    capacity: Optional[Capacity] = None  # None from a hub that does not say
    name: str = ""


class EnvNames(Frozen):
    """The names that ``Make`` accepts."""

    names: List[str]


class Table(Frozen):
    """Counters or descriptions, by name."""

    rows: List[Dict[str, Any]]


class HeartbeatReply(Frozen):
    """The ``state`` of the request: ``unknown`` (send it again), ``running``, or ``answered`` (send it again)."""

    state: str
    phase: str = ""  # of a MAKE that runs
    built: int = 0  # envs so far
    num_envs: int = 0
    importing: str = ""  # the modules that a worker imports before it makes its first env
    starting: str = ""  # the progress of the process that forks workers, until it is ready


class Made(Frozen):
    """The session is ready. Spaces are encoded values in the wire form of ``envhub.values.spaces``."""

    num_envs: int
    num_workers: int
    observation_spaces: List[bytes]  # one, or with observation_mode "different" one per env
    action_space: bytes
    metadata: bytes = b""
    render_mode: Optional[str] = None
    spec: bytes = b""  # the env's EnvSpec, encoded; empty if it has none or it cannot be encoded
    ticket: bytes = b""  # for the hub's side socket, valid once; empty if the hub has none
    autoreset_mode: str = ""  # of Make, in the reply to Attach
    observation_mode: str = ""
    steps: List[int] = field(default_factory=list)  # each row's number of steps and resets, in the reply to Attach
    sizing: str = ""  # the reason for the number of workers, for people
    vector: bool = False  # whether each worker's envs are one vector env, whose rows step together
    window: int = 1  # SEND, RECEIVE and TEMPLATES without a reply have seqs that differ by less


class Observed(Frozen):
    """The last observations of a session: per row, its number of steps and resets, and whether it is in the frames."""

    num_envs: int
    steps: List[int]
    given: List[bool]
    observation_spaces: List[bytes] = field(default_factory=list)  # as in Made; empty if the client knows them


class Shared(Frozen):
    """The reply on the side socket; the descriptors of the arena, the client's bell and every worker's bell follow."""

    info_bytes: int
    workers: int  # row ``r`` belongs to worker ``r % workers``
    spin_us: int


class Templates(Frozen):
    """An encoded example of each wanted template that the session's infos have used."""

    numbers: List[int]
    examples: List[bytes]


class Done(Frozen):
    """The request was executed; its results are in the frames that follow."""


class Notice(Frozen):
    """A text for the user of a session, such as that another number of workers would step its envs faster."""

    text: str


class Failure(Frozen):
    """The reason why a request failed. ``code`` is one of PROTOCOL.md's, ``scope`` is request, env, session or hub."""

    code: str
    scope: str
    message: str
    env_index: Optional[int] = None
    worker: Optional[int] = None
    type: str = ""
    args: bytes = b""  # the exception's arguments, where the codec can carry them
    traceback: str = ""
    log_tail: str = ""
    attributes: bytes = b""  # the exception's attributes, where the codec can carry them
    replay: str = ""  # the name of the file on the hub's machine that runs the env to this failure again


_OFFSETS, _OFFSETS_END = struct.Struct("<QQ"), struct.Struct("<Q8s")
_PLACES_MAGIC = b"ENVHUBFP"


def append_offsets(pickles: bytes, offsets: Iterable[Tuple[int, int]]) -> bytes:
    """Append the place of each env's factory among these pickles; without places they are the pickle of a list."""
    packed = [_OFFSETS.pack(*offset) for offset in offsets]
    return b"".join([pickles, *packed, _OFFSETS_END.pack(len(packed), _PLACES_MAGIC)])


def offset_of(factories: Any, row: int) -> Optional[Tuple[int, int]]:
    """The begin and the end of the pickle of this env's factory; None if all are in one list."""
    count, end = places_of(factories)
    return cast(Tuple[int, int], _OFFSETS.unpack_from(factories, end + _OFFSETS.size * row)) if count else None


def places_of(factories: Any) -> Tuple[int, int]:
    """The number of places that ``append_offsets`` added, and the end of the pickles before them."""
    end = len(factories) - _OFFSETS_END.size
    count, magic = _OFFSETS_END.unpack_from(factories, end) if end >= 0 else (0, b"")
    return (count, end - _OFFSETS.size * count) if magic == _PLACES_MAGIC else (0, len(factories))


_ROW = struct.Struct("<II")
VIEWED_BYTES = 1 << 14


def pack_rows(blobs: Iterable[Tuple[int, Any]]) -> bytes:
    """One frame of ``(row, encoded value)`` pairs: infos, or the results of a call. The hub never decodes them."""
    return b"".join(part for row, blob in blobs for part in (_ROW.pack(row, len(blob)), blob))


def unpack_rows(frame: Any, rows: int) -> List[Tuple[int, bytes]]:
    """The pairs of ``pack_rows``, of rows in ``[0, rows)``, large values as views; raises ``codec.DecodeError``."""
    view, start = memoryview(frame), 0
    pairs: List[Tuple[int, bytes]] = []
    while start < len(view):
        if start + _ROW.size > len(view):
            raise codec.DecodeError("a frame of rows ends in the middle of a row")
        row, length = _ROW.unpack_from(view, start)
        if row >= rows or len(pairs) >= rows:
            raise codec.DecodeError(f"a frame of rows holds more than each of {rows}")
        start += _ROW.size + length
        if start > len(view):
            raise codec.DecodeError("a frame of rows ends in the middle of a row")
        piece = view[start - length : start]
        pairs.append((row, cast(bytes, piece) if length >= VIEWED_BYTES else bytes(piece)))
    return pairs


_EXCHANGES: Dict[int, Tuple[Type[Any], Type[Any]]] = {
    Op.HELLO: (Hello, Welcome),
    Op.LIST: (Question, EnvNames),
    Op.STATS: (Question, Table),
    Op.HEALTH: (Question, Table),
    Op.STATUS: (Status, Table),
    Op.OPERATE: (Operate, Table),
    Op.HEARTBEAT: (Question, HeartbeatReply),
    Op.MAKE: (Make, Made),
    Op.RESET: (Reset, Done),
    Op.CALL: (Call, Done),
    Op.SET_ATTR: (SetAttr, Done),
    Op.SNAPSHOT: (SnapshotRequest, Table),
    Op.CLOSE: (Close, Done),
    Op.COLLECT: (Collect, Done),
    Op.SEND: (Send, Done),
    Op.RECEIVE: (Receive, Done),
    Op.TEMPLATES: (TemplatesRequest, Templates),
    Op.OBSERVE: (Observe, Observed),
    Op.ATTACH: (Attach, Made),
}
REQUESTS: Dict[int, Type[Any]] = {op: request for op, (request, _) in _EXCHANGES.items()}  # STEP is not a map
REPLIES: Dict[int, Type[Any]] = {op: reply for op, (_, reply) in _EXCHANGES.items()}
REPLIES.update({Op.STEP: Done, Op.NOTICE: Notice, Op.FAILURE: Failure})
_hints = lru_cache(maxsize=None)(get_type_hints)


def pack(message: Any) -> bytes:
    return codec.encode(as_map(message))


def as_map(message: Any) -> Dict[str, Any]:
    """A message's fields by name, with nested messages as maps. Unlike ``dataclasses.asdict`` it copies no value."""
    return {name: as_map(value) if isinstance(value, Frozen) else value for name, value in vars(message).items()}


def unpack(kind: Type[M], blob: Any, limits: Optional[codec.HeaderLimits] = codec.KNOWN) -> M:
    """The message of this kind; without ``limits`` as any value is decoded. Raises ``codec.DecodeError``."""
    fields = codec.decode(blob) if limits is None else codec.decode_header(blob, limits)
    if not isinstance(fields, dict):
        raise codec.DecodeError(f"a {kind.__name__} must be a map")
    return build(kind, fields)  # type: ignore[no-any-return]


def build(kind: Any, fields: Dict[str, Any]) -> Any:
    """The message with these fields, each checked against its annotation; raises ``codec.DecodeError``."""
    values: Dict[str, Any] = {}
    for name, hint in _hints(kind).items():
        if name in fields:
            value = fields[name]
            values[name] = value if type(value) is hint else _value(f"{kind.__name__}.{name}", hint, value)
    try:
        return kind(**values)
    except TypeError as error:
        raise codec.DecodeError(f"{kind.__name__}: {error}") from error


_ITEM_TYPES: Dict[Any, Set[type]] = {
    int: {int},
    bytes: {bytes},
    bool: {bool},
    str: {str},
    Optional[int]: {int, type(None)},
}
_NO_TYPES: Set[type] = set()


def _value(where: str, hint: Any, value: Any) -> Any:
    """Check ``value`` against an annotation; an integer is a float, too: some languages have one kind of number."""
    origin = getattr(hint, "__origin__", None)
    if hint is Any:
        return value
    if origin is Union:
        return None if value is None else _value(where, hint.__args__[0], value)
    if origin is list and isinstance(value, list):
        if _ITEM_TYPES.get(hint.__args__[0], _NO_TYPES).issuperset(map(type, value)):
            return value  # without a call for each of its items
        return [_value(where, hint.__args__[0], item) for item in value]
    if origin is dict and isinstance(value, dict):
        return {_value(where, hint.__args__[0], k): _value(where, hint.__args__[1], v) for k, v in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return build(hint, value)
    if origin is None and type(value) is hint:
        return value
    if hint is float and type(value) is int and value.bit_length() <= 64:
        return float(value)
    raise codec.DecodeError(f"{where} must be {getattr(hint, '__name__', hint)}, got {type(value).__name__}")
