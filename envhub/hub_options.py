"""The options of a hub, which ``envhub serve`` takes by the command line and by a file with equal names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from envhub.protocol.messages import Recycle


@dataclass(frozen=True)
class HubOptions:
    """A hub's options besides its envs; where one is None, ``HubConfig`` has the value.

    A field is an option of ``envhub serve``, and a key of its file. The text below is the help of the command line.
    Both take bytes with a unit, too (``envhub_server.byte_count``).

    Parameters
    ----------
    bind
        Where to listen: ``tcp://HOST:PORT`` (port 0 takes a free one) or ``ipc://PATH``; may be given more than once.
    python
        The interpreter of envs that name none of their own: a program, a virtual environment or a conda prefix, of
        Python 3.8 or later with numpy, msgpack and gymnasium or gym. Without it, the hub's own.
    rendering
        The way to draw frames without a screen, for envs that name none: egl (a GPU, or Mesa's drivers for none) or
        osmesa (the CPU). Tried at the start.
    vector
        Take the envs of the command line as vector envs, each of which steps all of its envs in one call: ids with a
        ``vector_entry_point``, or factories that take ``num_envs``. An env's table says it for that env.
    max_envs
        The number of envs that may exist at one time; 4096 by default.
    workers
        The number of workers of a session that asks for none. By default, or with auto, what is known of its env
        decides: the time of its steps before, or whether it computes in its own process. Else every env gets a process.
    lease
        The seconds that a session outlives the loss of its client; 60 by default.
    close_timeout_max
        The most seconds that a client may give its envs to close; 60 by default.
    info_bytes_max
        The bytes of an info, besides the observation in it; 1 MiB by default. A larger one loses its largest entries.
    worker_memory
        The bytes of memory that each worker may have, such as 2GB or 512MiB, so that one session's envs cannot take the
        machine's; 0, the default, for no limit.
    worker_env
        A variable of the environment that workers get, too; may be given more than once. Without it they get only what
        programs need to run, such as PATH and HOME, so that no secret is in a worker.
    keys
        The folder of keys that ``envhub keys`` makes. Every tcp address then admits only their holders, and may be one
        that other machines can reach. Changes of the folder count at once.
    insecure
        Allow an address that other machines can reach, though nothing guards it.
    audit
        A file to which a line of JSON is appended for every connection, refusal, session, takeover and change of keys.
    allow_factories
        Run factories that clients send, for the own user and keys with the right deploy.
    allow_arguments
        Arguments of an env to which any client may give any value: ``ENV=NAME,NAME``, where ENV may be a pattern; may
        be given more than once. Else a key without the right deploy passes numbers, truth values and short plain
        strings.
    verbose_errors
        Name folders of this machine in the errors of envs for all clients, and not for the hub's own user alone.
    gpus
        A device that workers get in turn, by CUDA_VISIBLE_DEVICES and the variables of EGL; may be given more than
        once. Clients choose among them.
    memory_max
        The bytes of memory that each worker may have, with what it started, such as 2GB or 512MiB; one that has more is
        ended, and its envs are truncated. Clients may ask for less. 0, the default, for no limit.
    spares
        The number of workers of each session that are made ahead, so that an env that is lost is back at once; 0 by
        default. Clients may choose another number, up to 8.
    replays
        The folder for the replays of envs that failed, which ``envhub replay`` runs again. By default that of
        ENVHUB_REPLAYS, else ``envhub/replays`` in the user's folder for state.
    replays_max
        The files kept in that folder, 200 by default; older ones are removed, and with 0 none is kept.
    replays_bytes_max
        The bytes of all these files; 256 MiB by default.
    recordings_memory_max
        The bytes of memory that all recordings of sessions, which the file asks for by record, may have together;
        16 GiB by default. Each is taken to have twice its queue_bytes. A session whose recording does not fit is not
        recorded.
    recycle
        When another worker takes over from one, at its envs' episodes' end: after so many EPISODES, seconds of AGE, or
        with more bytes of MEMORY, as ``--recycle.memory-bytes 2GB``. Clients may have it happen earlier.
    """

    bind: list[str] | None = None
    python: str | None = None
    rendering: Literal["egl", "osmesa"] | None = None
    vector: bool | None = None
    max_envs: int | None = None
    workers: int | Literal["auto"] | None = None
    lease: float | None = None
    close_timeout_max: float | None = None
    info_bytes_max: int | None = None
    worker_memory: int | None = None
    worker_env: list[str] | None = None
    keys: Path | None = None
    insecure: bool | None = None
    audit: Path | None = None
    allow_factories: bool | None = None
    allow_arguments: list[str] | None = None
    verbose_errors: bool | None = None
    gpus: list[int] | None = None
    memory_max: int | None = None
    spares: int | None = None
    replays: Path | None = None
    replays_max: int | None = None
    replays_bytes_max: int | None = None
    recordings_memory_max: int | None = None
    recycle: Recycle | None = None
