"""The control messages between the hub, its zygote and its workers, which never leave the machine.

They have the form of those of ``envhub.protocol.messages``, in a list with their name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Type

from envhub.protocol.messages import EnvNames, Failure, as_map, build
from envhub.values import codec

# Several workers that each start a thread per core make every one of them slower, so each gets one.
ONE_THREAD = dict.fromkeys(
    (
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
        "BLIS_NUM_THREADS",
    ),
    "1",
)


@dataclass(frozen=True)
class StartWorkers:
    """Hub to zygote: fork that many workers. With each one's control channel, standard output and standard error."""

    count: int


@dataclass(frozen=True)
class Guard:
    """Hub to zygote: these workers live; should the hub be killed, end them and all that is theirs."""

    pids: List[int]


@dataclass(frozen=True)
class Reaped:
    """Hub to zygote: this worker lives no more, and its number may become another process's."""

    pid: int


@dataclass(frozen=True)
class Retire:
    """Hub to zygote: end, once what was asked for is forked; workers live on."""


@dataclass(frozen=True)
class Born:
    """Worker to hub, before all else: this process is the worker, and a child of the hub by now."""

    pid: int


@dataclass(frozen=True)
class NotBorn:
    """Zygote to hub, on the channel of a worker that could not be forked."""

    reason: str


@dataclass(frozen=True)
class Build:
    """Hub to worker: make the envs of ``rows``; by name, or by unpickling ``factories`` (in the worker only)."""

    worker: int
    rows: List[int]
    name: str
    kwargs: bytes
    factories: bytes
    entry: str
    modules: List[str]
    autoreset_mode: str
    allow_pickle: bool
    sys_path: List[str] = field(default_factory=list)
    registrations: bytes = b""
    observation_mode: str = "same"
    runner: bytes = b""
    wrappers: List[str] = field(default_factory=list)
    wrapper_kwargs: List[bytes] = field(default_factory=list)
    environ: Dict[str, str] = field(default_factory=dict)
    cwd: str = ""
    authkey: bytes = b""
    columns: bool = False
    first_only: bool = False  # make the first env, say what it is like, and wait for BuildRest
    cpu: Optional[int] = None  # to run on, and on no other
    on_exception: str = "raise"
    on_invalid: str = "pass"


@dataclass(frozen=True)
class Built:
    """Worker to hub: the envs stand. Spaces are encoded descriptions, the leaves are those of the first env."""

    observation_spaces: List[bytes]  # of the first env, or of every one if they may differ
    action_space: bytes
    observation_leaves: List[List[Any]]  # those of fixed size
    action_leaves: List[List[Any]]
    metadata: bytes
    render_mode: Optional[str]
    spec: bytes
    loose: bool = False  # whether observations have leaves of no fixed size, too


@dataclass(frozen=True)
class Building:
    """Worker to hub, now and then: how many of its envs stand."""

    built: int


@dataclass(frozen=True)
class FirstBuilt:
    """Worker to hub: its first env is made, from which the hub sees how many workers suit such envs."""

    in_process: bool  # whether the env is known to compute in its own process
    private_bytes: int  # of memory that this worker shares with no other


@dataclass(frozen=True)
class BuildRest:
    """Hub to worker: its rows are these, of which the first one is made; make the others."""

    rows: List[int]


@dataclass(frozen=True)
class StepTimes:
    """Worker to hub, now and then: what those of its steps took that were timed, resets included."""

    steps: int
    cpu_ns: int
    wait_ns: int
    env_bytes: int = 0  # of the memory that this worker shares with no other, for each of its envs


@dataclass(frozen=True)
class MapArena:
    """Hub to worker, with the descriptors of arena, the hub's and the client's bell for it, and its bells for them.

    The spaces are those of the session's first env, which those of the worker's envs must be equivalent to.
    """

    num_envs: int
    observation_leaves: List[List[Any]]
    action_leaves: List[List[Any]]
    info_bytes: int
    observation_space: bytes
    action_space: bytes
    observation_mode: str
    spin_us: int


@dataclass(frozen=True)
class Mapped:
    """Worker to hub: the arena is mapped, steps may come."""


@dataclass(frozen=True)
class Serve:
    """Hub to worker: the rows are yours from now on, as they stand.

    Where they were another worker's before, ``seeds`` are for the resets that they begin with, one per row, and what
    became of that one is still to be told by those whose ``needs_reset`` says so: a failure to raise, or an info.
    """

    seeds: List[Optional[int]] = field(default_factory=list)
    failure: Optional[Failure] = None
    info: bytes = b""
    moved: bool = False  # they were this worker's before, in another arena
    objects: List[bytes] = field(default_factory=list)  # of observations that they showed last, one per row, if any


@dataclass(frozen=True)
class Faulted:
    """Worker to hub: an env raised where that is a truncation; it is made anew in the same process."""

    row: int
    message: str


@dataclass(frozen=True)
class Suspicious:
    """Worker to hub, once per env: an observation is out of its space."""

    row: int
    what: str


@dataclass(frozen=True)
class ResetRows:
    """Hub to worker: reset these of its rows, and have the others stay as they are."""

    rows: List[int]
    seeds: List[Optional[int]]
    options: bytes


@dataclass(frozen=True)
class StepRows:
    """Hub to worker, in place of a ring: step, with what travels beside the arrays of its rows' actions."""

    beside: bytes


@dataclass(frozen=True)
class CallRows:
    """Hub to worker: call on every env of the worker; otherwise as ``envhub.protocol.messages.Call``."""

    name: str
    args: bytes
    only_kind: bool = False
    skip_unreset: bool = False
    number: int = 0  # of the call, which its answer repeats


@dataclass(frozen=True)
class SetAttrRows:
    """Hub to worker: set an attribute to one value, or, where ``each`` has any, to one per env of the worker."""

    name: str
    value: bytes = b""
    each: List[bytes] = field(default_factory=list)
    number: int = 0  # as of ``CallRows``


@dataclass(frozen=True)
class CallResults:
    """Worker to hub: one encoded result per env of the worker."""

    values: List[bytes]
    number: int = 0  # of the call


@dataclass(frozen=True)
class CallFailed:
    """Worker to hub: an env raised in a call."""

    failure: Failure
    number: int = 0  # of the call


@dataclass(frozen=True)
class RowInfo:
    """Worker to hub: the info of a row, too large for its place in the arena; sent before the row's ``done``."""

    row: int
    info: bytes
    number: int = 0  # the row's ``request``


@dataclass(frozen=True)
class InfoTemplate:
    """Worker to hub: an encoded example of the infos that come in columns by this number; sent before the first."""

    number: int
    example: bytes


@dataclass(frozen=True)
class RowFailed:
    """Worker to hub: an env raised, not in a call; sent before the row's ``done`` if a step or reset was under way."""

    failure: Failure
    number: int = 0  # the row's ``request``; 0 where the worker has no arena yet


@dataclass(frozen=True)
class ListNames:
    """Hub to worker: the ids in Gymnasium's registry once ``modules`` are imported; then, which factories are missing.

    Every factory of ``entries`` is written ``module:factory``.
    """

    modules: List[str]
    entries: List[str] = field(default_factory=list)


@dataclass(frozen=True)
class FactoryMissing:
    """Worker to hub: the module of a factory does not exist, or the factory is not in it."""

    entry: str
    why: str


@dataclass(frozen=True)
class CloseEnvs:
    """Hub to worker: close the envs and end."""


_CONTROL = (
    StartWorkers,
    Guard,
    Reaped,
    Retire,
    Born,
    NotBorn,
    Build,
    Built,
    Building,
    FirstBuilt,
    BuildRest,
    StepTimes,
    MapArena,
    Mapped,
    Serve,
    Faulted,
    Suspicious,
    ResetRows,
    StepRows,
    CallRows,
    SetAttrRows,
    CallResults,
    CallFailed,
    RowInfo,
    InfoTemplate,
    RowFailed,
    ListNames,
    FactoryMissing,
    EnvNames,
    CloseEnvs,
    Failure,
)
CONTROL: Dict[str, Type[Any]] = {kind.__name__: kind for kind in _CONTROL}


def pack(message: Any) -> List[bytes]:
    """A control message with its name, for the channel between hub and worker, in pieces to be sent one by one.

    What the hub passes on to every worker of a session, such as the arguments of a call, exists once in its memory.
    """
    return codec.encode_call(type(message).__name__, as_map(message))


def unpack(blob: Any) -> Any:
    """The control message in ``blob``.

    Raises:
        codec.DecodeError: no known message, or one with wrong fields.
    """
    found = codec.decode_header(blob)
    if not (isinstance(found, list) and len(found) == 2 and isinstance(found[0], str) and isinstance(found[1], dict)):
        raise codec.DecodeError("not a control message")
    if found[0] not in CONTROL:
        raise codec.DecodeError(f"no control message is called {found[0][:64]!r}")
    return build(CONTROL[found[0]], found[1])
