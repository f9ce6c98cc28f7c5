"""The file from which an env's failure is run again: data only, written by a hub and read by ``worker.replayer``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Dict, List, Optional, Tuple

from envhub.protocol.messages import as_map
from envhub.protocol.messages import build as message_of
from envhub.values import codec
from envhub_server.ipc import control
from envhub_server.ipc.journal import BY_REQUEST, OUT_OF_BAND, History, JournalLayout, checked_note

VERSION = 1
SUFFIX = ".replay"
FILE_BYTES_MAX = 1 << 26
HISTORY_BYTES_MAX = 1 << 25  # of what the env was asked, besides notes: a journal of huge actions has more

# What is sent to workers only: pickles, and what may be secret.
_LEFT_OUT: Dict[str, Any] = {"factories": b"", "registrations": b"", "environ": {}, "authkey": b"", "runner": b""}
_LEFT_OUT.update(argv=[], setup=b"")


@dataclass(frozen=True)
class Replay:
    """Calls of an env until it failed, and its description.

    Attributes:
        build, mapped: what its worker was told; without what is no plain data.
        row: its number in the session; of a vector env, that of its first env.
        source: as ``control.Built.sources`` has it, of an env that was made by a factory of a program.
        lacks: what is missing, because it is no plain data, in words; the env cannot be run again without it.
        interpreter: of the worker: ``python``, its program, ``variables`` by name, and its ``ld_library_path``.
        versions: of what is installed there.
        failure: the fields of ``EnvFailure``.
        limits: ``init``, ``reset``, ``step``: how long a call may take, in seconds.
        memory_max: how many bytes of memory its worker was allowed; 0 for no limit.
        spec: of the env, encoded, for an id that is registered by its program only; empty where it has none.
        failed_at: which call failed; as many as there are calls, if none of them: between them, or in a call that
            is not in the journal, such as ``render``.
        history: what it was asked.
        version: of the format.
        client: the name of its session's client; empty for the hub's own user.
    """

    build: Dict[str, Any]
    mapped: Dict[str, Any]
    row: int
    source: bytes
    lacks: List[str]
    interpreter: Dict[str, Any]
    versions: Dict[str, str]
    failure: Dict[str, Any]
    limits: Dict[str, float]
    failed_at: int
    memory_max: int = 0
    spec: bytes = b""
    history: Dict[str, Any] = field(default_factory=dict)
    version: int = VERSION
    client: str = ""

    def calls(self) -> History:
        """Calls of the env.

        Raises:
            ValueError: the file is damaged.
        """
        notes = [checked_note(note) for note in self.history["notes"]]
        calls: History = message_of(History, {**self.history, "notes": notes})
        return calls

    def orders(self) -> Tuple[control.Build, control.MapArena]:
        """Orders to its worker, for this env only.

        Raises:
            ValueError: the file is damaged.
        """
        return message_of(control.Build, self.build), message_of(control.MapArena, self.mapped)


@dataclass(frozen=True)
class _Interpreter:
    python: str
    variables: Dict[str, str]
    ld_library_path: List[str]


@dataclass(frozen=True)
class _Failure:
    cause: str
    message: str
    exception: str
    signal: str
    exit_status: Optional[int]


def plain(build: control.Build, row: int, source: bytes) -> Tuple[control.Build, List[str]]:
    """The message for this row, or vector env, without what is no plain data, and what of that is needed, in words."""
    lacks = ["the class that runs the env (worker=)"] if build.runner else []
    lacks += ["what sets up its worker, which has no name (worker_setup=)"] if build.setup else []
    kwargs = dict(zip(build.rows, build.kwargs_each)).get(row, build.kwargs)
    entry = build.entry
    if build.factories:
        entry, kwargs = _named(source)
        if not entry:
            shown = f" ({kwargs.decode('utf-8', 'replace')})" if kwargs else ""
            lacks.append(f"the factory of the env, which is in no module that can be imported{shown}")
    if not (lacks or _is_plain(kwargs)):
        lacks.append("the arguments of the env")
    for wrapper, arguments in zip(build.wrappers, build.wrapper_kwargs):
        if not _is_plain(arguments):
            lacks.append(f"the arguments of the wrapper {wrapper}")
    stripped = replace(
        build, kwargs=b"" if lacks else kwargs, kwargs_each=[], entry=entry, allow_pickle=False, **_LEFT_OUT
    )
    if not build.shares:
        stripped = replace(stripped, rows=[row])
    return replace(stripped, wrapper_kwargs=[] if lacks else stripped.wrapper_kwargs, cpu=None, first_only=False), lacks


def without_pickles(history: History) -> Tuple[History, List[str]]:
    """The history without options and actions that are no plain data, and which these are, in words."""
    lacks = set()
    notes = []
    for note in history.notes:
        if note.kind in (OUT_OF_BAND, BY_REQUEST) and not _is_plain(note.options):
            lacks.add("the options of a reset" if note.kind == BY_REQUEST else "an action")
            note = note._replace(options=b"")
        notes.append(note)
    return replace(history, notes=notes), sorted(lacks)


def _named(source: bytes) -> Tuple[str, bytes]:
    if not source:
        return "", b""
    decoded = codec.decode(source)
    whole = (
        isinstance(decoded, list)
        and len(decoded) == 2
        and isinstance(decoded[0], str)
        and isinstance(decoded[1], bytes)
    )
    return (decoded[0], decoded[1]) if whole else ("", b"")


def _is_plain(blob: bytes) -> bool:
    try:
        codec.decode(blob) if blob else None
    except codec.DecodeError:
        return False
    return True


def pack(replay: Replay) -> bytes:
    """The bytes of the file.

    Raises:
        ValueError: they are more than a file holds.
    """
    blob = codec.encode(as_map(replay))
    if len(blob) > FILE_BYTES_MAX:
        raise ValueError(f"{len(blob)} bytes; a file holds at most {FILE_BYTES_MAX}")
    return blob


def unpack(blob: bytes) -> Replay:
    """Read the content of the file.

    Raises:
        ValueError: it is no such file, or of another version.
    """
    try:
        decoded = codec.decode(blob)
        if not isinstance(decoded, dict) or decoded.get("version") != VERSION:
            raise ValueError("this is no replay that this version of EnvHub can read")
        replay: Replay = message_of(Replay, decoded)
        _check(replay)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the replay is damaged: {error!r}") from error
    return replay


def _check(replay: Replay) -> None:
    """Refuse content that no hub writes, above all pickles, which would run code of the file's author.

    Raises:
        ValueError, KeyError, TypeError: there is such a thing.
    """
    build, mapped = replay.orders()
    foreign = [name for name, nothing in _LEFT_OUT.items() if getattr(build, name) != nothing]
    if foreign or build.allow_pickle:
        raise ValueError(f"the replay is not run: it holds what no hub writes: {', '.join(foreign) or 'pickles'}")
    message_of(_Interpreter, replay.interpreter)
    message_of(_Failure, replay.failure)
    history = replay.calls()
    arena = mapped.layout()
    rows = history.rows
    if rows < 1 or (rows > 1 and not build.shares) or len({*build.rows}) != rows or replay.row != build.rows[0]:
        raise ValueError("the replay is damaged: its rows are not those of one env, or vector env")
    layout, calls = JournalLayout(rows, arena.observations, arena.actions), history.calls
    sizes = len(history.kinds), len(history.codes), [len(ring) for ring in history.actions], len(history.digests)
    each = calls * rows
    wanted = each, calls * len(arena.actions), [each * width for width in layout.widths], each * layout.digest_bytes
    if not history.unrepeatable and not (sizes == wanted and 0 <= replay.failed_at <= calls):
        raise ValueError("the replay is damaged: its calls have another number than their actions")
