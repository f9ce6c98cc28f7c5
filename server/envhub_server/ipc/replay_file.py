"""The file from which a failure of an env is run again: data only, written by a hub and read by ``worker.replayer``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Dict, List, Tuple

from envhub.protocol.messages import as_map
from envhub.protocol.messages import build as message_of
from envhub.values import codec
from envhub_server.ipc import control

SUFFIX = ".replay"
FILE_BYTES_MAX = 1 << 26

# What is sent to workers only: pickles, and what may be secret.
_LEFT_OUT: Dict[str, Any] = {"factories": b"", "registrations": b"", "environ": {}, "authkey": b"", "runner": b""}
_LEFT_OUT.update(argv=[], setup=b"", allow_pickle=False)


@dataclass(frozen=True)
class Replay:
    """The requests of an env until it failed, and how it was made.

    Attributes:
        build, mapped: what its worker was told; without what is no plain data.
        python, variables, ld_library_path: the interpreter of its worker.
        cause, message, exception: as of ``EnvFailure``.
    """

    build: Dict[str, Any]
    mapped: Dict[str, Any]
    lacks: List[str]  # what is missing, because it is no plain data, in words; the env cannot be run again without it
    python: str
    variables: Dict[str, str]
    ld_library_path: List[str]
    versions: Dict[str, str]  # of what is installed there
    cause: str
    message: str
    exception: str
    ended: str  # the signal that ended its process, or its exit status; empty where it did not end
    limits_s: Dict[str, float]  # ``init``, ``reset``, ``step``: how long a call may take
    memory_max: int  # how many bytes of memory its worker was allowed; 0 for no limit
    spec: bytes  # of the env, encoded, for an id that is registered by its program only; empty where it has none
    trace: bytes  # what it was asked until the call that failed, as ``ipc.trace`` gives it

    @property
    def cut(self) -> str:
        """The reason why the trace does not suffice; empty if it does."""
        return str(codec.decode(self.trace)["cut"])

    def orders(self) -> Tuple[control.Build, control.MapArena]:
        """The orders that its worker had; raises ``ValueError``."""
        build = message_of(control.Build, self.build)
        if foreign := [name for name, nothing in _LEFT_OUT.items() if getattr(build, name) != nothing]:
            raise ValueError(f"it holds what no hub writes: {', '.join(foreign)}")
        if not build.rows or (len(build.rows) > 1 and not build.shares):
            raise ValueError("its rows are not those of one env, or vector env")
        return build, message_of(control.MapArena, self.mapped)


def name_of_raised(prefix: str, row: int, number: int) -> str:
    """The name of the replay of an env that raised in the step or reset of this number."""
    return f"{prefix}-env{row}-{number}"


def plain(build: control.Build, row: int, source: bytes) -> Tuple[control.Build, List[str]]:
    """The message for this row, or vector env, without what is no plain data, and what of that is needed, in words."""
    lacks = ["the class that runs the env (worker=)"] if build.runner else []
    lacks += ["what sets up its worker, which has no name (worker_setup=)"] if build.setup else []
    entry, kwargs = build.entry, dict(zip(build.rows, build.kwargs_each)).get(row, build.kwargs)
    if build.factories:
        entry, kwargs = codec.decode(source)
        if not entry:
            shown = kwargs.decode("utf-8", "replace")
            lacks.append(f"the factory of the env, which is in no module that can be imported ({shown})")
    if not (lacks or is_plain(kwargs)):
        lacks.append("the arguments of the env")
    lacks += [
        f"the arguments of the wrapper {wrapper}"
        for wrapper, arguments in zip(build.wrappers, build.wrapper_kwargs)
        if not is_plain(arguments)
    ]
    rows = build.rows if build.shares else [row]
    kept = replace(build, rows=rows, kwargs=kwargs, kwargs_each=[], entry=entry, cpu=None, first_only=False)
    kept = replace(kept, **_LEFT_OUT)
    return (replace(kept, kwargs=b"", wrapper_kwargs=[]) if lacks else kept), lacks


def is_plain(blob: bytes) -> bool:
    try:
        codec.decode(blob) if blob else None
    except codec.DecodeError:
        return False
    return True


def pack(replay: Replay) -> bytes:
    """The bytes of the file; raises ``ValueError``."""
    blob = codec.encode(as_map(replay))
    if len(blob) > FILE_BYTES_MAX:
        raise ValueError(f"{len(blob)} bytes; a file holds at most {FILE_BYTES_MAX}")
    return blob


def unpack(blob: bytes) -> Replay:
    """Read the content of the file; raises ``ValueError``."""
    try:
        replay: Replay = message_of(Replay, codec.decode(blob))
        replay.orders(), replay.cut
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is damaged: {error!r}") from error
    return replay
