"""The options of a hub, with their bounds, defaults and help: the one place for the command line, the file and the hub.

``envhub serve`` takes each from the command line, and from a file with ``_`` for ``-``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, is_dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, List, Literal, Union

from msgspec import Meta

from envhub.errors import ONLY_PROGRAMS_RECORD
from envhub.option_kinds import (
    DISTINCT,
    EPISODES_MAX,
    FILES_MAX,
    Address,
    Arguments,
    Bytes,
    Cpus,
    Envs,
    Gpu,
    HubName,
    Kind,
    Memory,
    Option,
    Program,
    Seconds,
    SomeBytes,
    Spares,
    VariableName,
    Workers,
    bounded,
    kind_of,
    kinds_of,
    options_of,
)
from envhub.transport.address import NO_ANNOUNCEMENTS

MIB = 1 << 20
# What was an option, and the way that is left.
RETIRED = {
    "announce": NO_ANNOUNCEMENTS,
    "audit": "there is no audit file any more: the lines of the hub's log with audit=true say who did what",
    "record": ONLY_PROGRAMS_RECORD,
}


@dataclass(frozen=True)
class RecycleOptions:
    """The table ``recycle``: bounds after which another worker takes over; 0 for never."""

    episodes: Annotated[
        int,
        bounded(0, EPISODES_MAX, "episodes"),
        Meta(
            description="The number of episodes, of all its envs together, after which another worker takes over from "
            "one; 0, the default, for never."
        ),
    ] = 0
    age_s: Annotated[
        Seconds,
        Meta(
            description="The seconds after which another worker takes over from one, as its envs' episodes end; 0, the "
            "default, for never."
        ),
    ] = 0.0
    memory_bytes: Annotated[
        Memory,
        Meta(
            description="The bytes of memory, such as 2GB, above which another worker takes over from one, as its "
            "envs' episodes end; 0, the default, for never."
        ),
    ] = 0


@dataclass(frozen=True, kw_only=True)
class HubOptions:
    """Options of a hub besides its envs. A field is an option of ``envhub serve``, and a key of its file."""

    bind: Annotated[
        tuple[Address, ...],
        DISTINCT,
        Meta(
            description="Where to listen: ``tcp://HOST:PORT`` (port 0 takes a free one) or ``ipc://PATH``; may be "
            "given more than once."
        ),
    ] = ()
    name: Annotated[
        HubName,
        Meta(
            description="The hub's name for its clients and its log, of at most 64 printable characters of ASCII. "
            "Without it, the name of the machine."
        ),
    ] = ""
    python: Annotated[
        Program,
        Meta(
            description="The interpreter of envs that name none of their own: a program, a virtual environment or a "
            "conda prefix, of Python 3.8 or later with numpy, msgpack and gymnasium or gym. Without it, "
            "the hub's own."
        ),
    ] = ""
    rendering: Annotated[
        Literal["egl", "osmesa"] | None,
        Meta(
            description="The way to draw frames without a screen, for envs that name none: egl (a GPU, or Mesa's "
            "drivers for none) or osmesa (the CPU). Tried at the start."
        ),
    ] = None
    vector: Annotated[
        bool,
        Meta(
            description="Take the envs of the command line as vector envs, each of which steps all of its envs in one "
            "call: ids with a ``vector_entry_point``, or factories that take ``num_envs``. An env's table "
            "says it for that env."
        ),
    ] = False
    workers: Annotated[
        Workers | Literal["auto"],
        Meta(
            description="The number of workers of a session that asks for none. By default, or with auto, what is "
            "known of its env decides: the time of its steps before, or whether it computes in its own "
            "process. Else every env gets a process."
        ),
    ] = "auto"
    cpus: Annotated[
        Cpus | None,
        Meta(
            description="The number of CPUs that the hub plans its workers with, if it may use more. By default all "
            "that it may use."
        ),
    ] = None
    worker_memory: Annotated[
        Memory,
        Meta(
            description="The bytes of memory that each worker may allocate, such as 2GB or 512MiB; an env that wants "
            "more gets a MemoryError. 0, the default, for no limit."
        ),
    ] = 0
    worker_env: Annotated[
        tuple[VariableName, ...],
        Meta(
            description="A variable of the environment that workers get, too; may be given more than once. Without it "
            "they get only what programs need to run, such as PATH and HOME, so that no secret is in a "
            "worker."
        ),
    ] = ()
    keys: Annotated[
        Path | None,
        Meta(
            description="The folder of keys that ``envhub keys`` makes. Every tcp address then admits only their "
            "holders, and may be one that other machines can reach. Changes of the folder count at once."
        ),
    ] = None
    insecure: Annotated[
        bool, Meta(description="Allow an address that other machines can reach, though nothing guards it.")
    ] = False
    allow_factories: Annotated[
        bool,
        Meta(description="Run factories that clients send, for the own user and keys with the right deploy."),
    ] = False
    allow_arguments: Annotated[
        tuple[Arguments, ...],
        Meta(
            description="Arguments of an env to which any client may give any value: ``ENV=NAME,NAME``, where ENV may "
            "be a pattern; may be given more than once. Else a key without the right deploy passes "
            "numbers, truth values and short plain strings."
        ),
    ] = ()
    verbose_errors: Annotated[
        bool,
        Meta(
            description="Name folders of this machine in the errors of envs for all clients, and not for the hub's "
            "own user alone."
        ),
    ] = False
    gpus: Annotated[
        tuple[Gpu, ...],
        DISTINCT,
        Meta(
            description="A device that workers get in turn, by CUDA_VISIBLE_DEVICES and the variables of EGL; may be "
            "given more than once. Clients choose among them."
        ),
    ] = ()
    memory_max: Annotated[
        Memory | None,
        Meta(
            description="The bytes of memory that each worker may have, with what it started, such as 2GB or 512MiB; "
            "one that has more is ended, and its envs are truncated. Clients may ask for less. 0, the "
            "default, for no limit."
        ),
    ] = None
    spares: Annotated[
        Spares | None,
        Meta(
            description="The number of workers of each session that are made ahead, so that an env that is lost is "
            "back at once; 0 by default. Clients may choose another number, up to spares_max."
        ),
    ] = None
    recycle: Annotated[
        RecycleOptions,
        Meta(
            description="When another worker takes over from one, at its envs' episodes' end: after EPISODES, "
            "seconds of AGE, or with more bytes of MEMORY, as ``--recycle.memory-bytes 2GB``. Clients may "
            "have it happen earlier."
        ),
    ] = RecycleOptions()

    # --- limits -----------------------------------------------------------------------------------------------------

    sessions_max: Annotated[
        int,
        bounded(1, 1 << 16, "sessions"),
        Meta(description="The number of sessions that may exist at one time."),
    ] = 64
    max_envs: Annotated[Envs, Meta(description="The number of envs that may exist at one time.")] = 4096
    envs_per_session_max: Annotated[Envs, Meta(description="The number of envs that a session may have.")] = 1024
    spares_max: Annotated[
        Spares, Meta(description="The number of spares that a client may ask for, where spares says no larger number.")
    ] = 8
    arena_bytes_max: Annotated[
        SomeBytes,
        Meta(description="The bytes of shared memory of all sessions together, in which observations and actions lie."),
    ] = 2048 * MIB
    message_bytes_max: Annotated[
        int,
        bounded(1 << 16, 1 << 30, "bytes"),
        Meta(
            description="The bytes of one frame that a client sends, such as the actions of a step, and of the "
            "results of a call that travel as one frame."
        ),
    ] = 64 * MIB
    info_bytes_max: Annotated[
        int,
        bounded(1 << 10, 32 << 20, "bytes"),
        Meta(
            description="The bytes of an info, besides the observation in it. A larger one loses its largest entries."
        ),
    ] = MIB
    replays: Annotated[
        Path | None,
        Meta(
            description="The folder for the replays of envs that failed, which ``envhub replay`` runs again. By "
            "default that of ENVHUB_REPLAYS, else ``envhub/replays`` in the user's folder for state."
        ),
    ] = None
    replays_max: Annotated[
        int,
        bounded(0, FILES_MAX, "files"),
        Meta(description="The files kept in that folder; older ones are removed, and with 0 none is kept."),
    ] = 200
    replays_bytes_max: Annotated[Bytes, Meta(description="The bytes of all these files.")] = 256 * MIB

    # --- times ------------------------------------------------------------------------------------------------------

    lease: Annotated[Seconds, Meta(description="The seconds that a session outlives the loss of its client.")] = 60.0
    close_timeout_max: Annotated[
        Seconds, Meta(description="The most seconds that a client may give an env to close.")
    ] = 60.0
    drain_timeout: Annotated[
        Seconds, Meta(description="The seconds for requests to end, once the hub is told to stop.")
    ] = 5.0
    drain_close_timeout: Annotated[
        Seconds, Meta(description="The seconds for envs to close after that; then their workers are killed.")
    ] = 2.0


class Size(str):
    """Text of a number of bytes. A command line's help shows the name of the class for the value."""


def arguments_of(table: Any) -> Any:
    """Return a dataclass with the options of a table for a command line; each is None unless it is given.

    Bytes are texts of the class ``Size``, as they may have a unit.
    """
    arguments = [
        (name, _argument_type(option), field(default=None, metadata={"help": _help(option)}))
        for name, option in options_of(table).items()
    ]
    place = {"__module__": __name__}  # cyclopts takes a class of the module ``types`` for a builtin
    return make_dataclass(f"{table.__name__}Arguments", arguments, frozen=True, namespace=place)


def given(arguments: Any) -> dict[str, Any]:
    """Return the options that a command line has, by name."""
    values = ((name, value) for name, value in vars(arguments).items() if value is not None)
    return {name: given(value) if is_dataclass(value) else value for name, value in values}


def _argument_type(option: Option) -> Any:
    kinds = (*map(_type_of, kinds_of(option.annotation)), None)
    return Union[kinds]


def _type_of(kind: Kind) -> Any:
    if kind.is_table:
        return arguments_of(kind.base)
    if kind.item is not None:
        return List[_type_of(kind_of(kind.item))]  # type: ignore[misc]
    return Size if kind.unit == "bytes" else kind.base


def _help(option: Option) -> str:
    default = option.default_text
    return f"{option.description} {default} by default." if default else option.description


if TYPE_CHECKING:

    class HubArguments:
        """Options of the command line of ``envhub serve``."""

        def __init__(self, **options: object) -> None: ...

else:
    HubArguments = arguments_of(HubOptions)
