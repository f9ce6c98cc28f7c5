"""The control messages between the hub, its zygote and its workers. They never leave the machine.

A control message is a list of two: its class's name, and a map of its fields as in ``envhub.protocol.messages``.
"""

from __future__ import annotations

from dataclasses import field, is_dataclass
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Type

from envhub.arena.layout import Layout
from envhub.frozen import Frozen
from envhub.protocol.messages import EnvNames, Failure, as_map, build
from envhub.values import codec
from envhub.values.leaf import Leaf

INFO_BYTES_MAX = 1 << 20  # limit of a row's info without its observation, unless the hub is private
STACKS_FILE = "envhub-stacks"  # of a worker, in memory: it writes its stacks there, and the hub reads them
FRAME_SIDE_MAX, FRAME_BYTES_MAX = 1 << 13, 1 << 25  # of a frame that is drawn for somebody who looks at an env
INFO_DROPPED = "info_dropped"  # the key of an info that lost its largest entries, since it is larger


class StartWorkers(Frozen):
    """Hub to zygote: fork ``count`` workers; with descriptors of their channels, standard outputs and errors."""

    count: int


class Guard(Frozen):
    """Hub to zygote: these workers run; if the hub is killed, end them and every process that they started."""

    pids: List[int]
    ended: List[int] = field(default_factory=list)  # have ended, and may become the pids of other processes


class Retire(Frozen):
    """Hub to zygote: end, after forking all requested workers; the workers continue."""


class Born(Frozen):
    """Worker to hub, its first message: this process is the worker, and is now a child of the hub."""

    pid: int
    stacks: int = -1  # its descriptor of the file ``STACKS_FILE``; -1 for none
    private_bytes: int = 0  # as far as its page faults tell: memory that it shares with no other process


class NotBorn(Frozen):
    """Zygote to hub, on the channel of a worker that could not be forked."""

    reason: str


class Build(Frozen):
    """Hub to worker: make the envs of ``rows``; by name, or by unpickling ``factories`` (in the worker only)."""

    worker: int
    rows: List[int]
    name: str
    kwargs: bytes
    factories: bytes  # a digest of them; they are in the memory whose descriptor comes with the message
    entry: str
    modules: List[str]
    autoreset_mode: str
    allow_pickle: bool
    python: str = ""  # the version that pickled the factories
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
    first_only: bool = False  # make the first env, send FirstBuilt, and wait for BuildRest
    says_imported: bool = False  # send Imported before the first env is made; if shareable, await ForkZygote
    cpu: Optional[int] = None  # the only CPU to run on
    on_exception: str = "raise"
    on_invalid: str = "pass"
    memory_bytes_max: int = 0  # of the worker's own memory; 0 for no limit
    hide_folders: bool = False  # whether reports of exceptions must not name folders
    kwargs_each: List[bytes] = field(default_factory=list)  # in place of ``kwargs``, one per row; empty for none
    variables: Dict[str, str] = field(default_factory=dict)  # of the environment, besides ``environ``
    batch_workers: int = 0  # how many workers each make their rows as one vector env; 0: each env by itself
    replays: str = ""  # the prefix of the names of its replays; empty for none
    episodes_max: int = 0  # after which the worker sends EpisodesDone; 0 for no limit
    argv: List[str] = field(default_factory=list)  # of the program; empty for EnvHub's name
    levels: bytes = b""  # of messages, as of ``messages.ProgramEnvironment``
    setups: List[str] = field(default_factory=list)  # functions that are called before the envs are made
    setup: bytes = b""  # cloudpickle of one more
    info_bytes_max: int = INFO_BYTES_MAX  # of an info of a hub that is not private, besides the observation in it
    row_offset: int = 0  # index of row 0 in the larger vector env, by which texts name envs
    generators: List[int] = field(default_factory=list)  # as of ``ProgramEnvironment``; empty if they are not known
    incarnation: int = 0  # how often the envs were made before; of a spare another number than of any worker
    snapshots: str = ""  # as of ``messages.Make``


class Built(Frozen):
    """Worker to hub: all envs are built. Spaces are encoded descriptions; the leaves are those of the first env."""

    observation_spaces: List[bytes]  # of the first env, or of every one if they may differ
    action_space: bytes
    observation_leaves: List[List[Any]]  # of fixed size only
    action_leaves: List[List[Any]]
    metadata: bytes
    render_mode: Optional[str]
    spec: bytes
    has_object_leaves: bool = False  # whether observations have object leaves too
    sources: List[bytes] = field(default_factory=list)  # of each row, how its factory is named, see ``env_sources``
    sys_path: List[str] = field(default_factory=list)  # where the worker found it
    cwd: str = ""  # the folder in which it was made
    # The spec of the first env as data only; empty where it is none, and None where it is that of the session's first.
    plain_spec: Optional[bytes] = b""
    may_share_process: bool = False  # whether its envs are fit to share a process, see ``worker.shared_process``
    action_structure: str = ""  # with the observation mode "any": how ``action_space`` nests, and its leaves


class Building(Frozen):
    """Worker to hub, before and after it imports modules of envs, and every half second: how many envs are built."""

    built: int
    importing: str = ""  # the modules that it imports now


class Imported(Frozen):
    """Worker to hub: the code that makes its envs is loaded."""

    shareable: bool = False  # whether other workers can have what it has imported; then it waits for ForkZygote
    files: List[str] = field(default_factory=list)  # of imported modules that are not of installed packages


class ForkZygote(Frozen):
    """Hub to worker: fork a zygote for the session's other workers; with descriptors as of one of StartWorkers."""


class FirstBuilt(Frozen):
    """Worker to hub: its first env is built; the hub derives the number of workers from this."""

    may_share_process: bool  # as of ``Built``, of this env
    private_bytes: int  # memory that this worker shares with no other process
    cheap: bool = False  # whether its steps are known to be very cheap; then it is fit, too


class BuildRest(Frozen):
    """Hub to worker: these are its rows; the first is built, build the others; fields as in ``Build``."""

    rows: List[int]
    kwargs_each: List[bytes] = field(default_factory=list)
    variables: Dict[str, str] = field(default_factory=dict)


class TakeSlot(Frozen):
    """Hub to a spare whose envs are built: become this worker, with these rows; close surplus envs."""

    worker: int
    rows: List[int]
    variables: Dict[str, str] = field(default_factory=dict)
    cpu: Optional[int] = None  # as of ``Build``


class ArenaDescriptors(NamedTuple):
    """The descriptors that come with ``MapArena``, in the order in which they are sent; -1 for one that is missing."""

    memory: int  # the arena
    hub_bell: int  # the pipe by which the hub wakes the worker
    client_bell: int  # the eventfd by which the client wakes the worker
    hub_done_bell: int  # the eventfd by which the worker wakes the hub
    client_done_bell: int  # the eventfd by which the worker wakes the client
    trace: int = -1  # the memory of the trace

    @property
    def sent(self) -> List[int]:
        return [each for each in self if each >= 0]


class MapArena(Frozen):
    """Hub to worker, with ``ArenaDescriptors``: map this arena, and begin a trace."""

    num_envs: int
    observation_leaves: List[List[Any]]
    action_leaves: List[List[Any]]
    info_bytes: int
    observation_space: bytes  # of the session's first env, as the next; those of the worker's envs must match them
    action_space: bytes
    observation_mode: str
    spin_us: int
    trace_bytes_max: int = 0  # per env, see ``trace``; 0 for no trace
    slow_ms: int = 0  # send Slow of what takes as long; 0 for never

    def layout(self) -> Layout:
        leaves = (self.observation_leaves, self.action_leaves)
        observations, actions = (tuple(map(Leaf.from_wire, wires)) for wires in leaves)
        return Layout(self.num_envs, observations, actions, self.info_bytes)


class Mapped(Frozen):
    """Worker to hub: the arena is mapped."""


class Serve(Frozen):
    """Hub to worker: serve your rows from now on, from their present words in the arena."""

    # If another worker served the rows before, ``seeds`` has the seed of each row's first reset. A row whose
    # ``needs_reset`` is ``REPORT_PENDING`` still has to report how that worker ended: it raises ``failure``, or is
    # truncated with ``info``.
    seeds: List[Optional[int]] = field(default_factory=list)
    failure: Optional[Failure] = None
    info: bytes = b""
    objects: List[bytes] = field(default_factory=list)  # object leaves last observed, per row, if any


class EpisodesDone(Frozen):
    """Worker to hub: its envs have ended its number of episodes."""


class Leave(Frozen):
    """Hub to worker: serve no rows any more as soon as all envs are between episodes, and send ``HandedOver`` then."""

    cut: bool = False  # do so at once; the next step of each env that is in an episode is a truncation
    restored: bool = False  # do so at once, and leave the rows' words as they are: the next worker has other ones


class HandedOver(Frozen):
    """Worker to hub: it no longer serves its rows; another worker may."""


class Faulted(Frozen):
    """Worker to hub: an env raised and its row was truncated; the env is built again in the same process."""

    row: int
    message: str
    number: int = 0  # the row's ``request``
    trace: bytes = b""  # of the env up to this, see ``trace``; empty without one
    failure: Dict[str, Any] = field(default_factory=dict)  # as in the row's info


class Suspicious(Frozen):
    """Worker to hub, once per env for each: an observation is not in its space, or an info is dropped."""

    row: int
    what: str


class Slow(Frozen):
    """Worker to hub: a step, a reset or a call took at least ``slow_ms``; at most one in each tenth of a second."""

    verb: str
    rows: List[int]  # of the worker; only the slow ones, where it knows that
    took_ns: int


# What all envs of a process share.
SHARED = ("the random numbers of numpy.random", "the random numbers of random", "os.environ", "the working directory")


class SharedChanged(Frozen):
    """Worker of several envs to hub, once: which of ``SHARED`` their steps have changed."""

    what: List[str]


class SetAttrRows(Frozen):
    """Worker to hub, before the rows' ``done``: an attribute of these rows was set. Hub to the next worker: set it."""

    rows: List[int]
    name: str
    values: List[bytes]  # one per row


class RowInfo(Frozen):
    """Worker to hub, before the row's ``done``: an info, or a result of a call, that is too large for the arena."""

    row: int
    info: bytes
    number: int = 0  # the row's ``request``


class InfoTemplate(Frozen):
    """Worker to hub, before the first such info: an encoded example of the infos of this template, their bytes."""

    number: int
    example: bytes
    nbytes: int = 0


class RowFailed(Frozen):
    """Worker to hub, before the row's ``done``: an env raised."""

    failure: Failure
    number: int = 0  # the row's ``request``; 0 where the worker has no arena yet
    trace: bytes = b""  # as of ``Faulted``; also empty in a call, and where no env was reset or stepped
    invalid: bool = False  # whether the env gave what is not finite


class ListNames(Frozen):
    """Hub to worker: import ``modules``, send the ids in Gymnasium's registry, then what is wrong with factories."""

    modules: List[str]
    entries: List[str] = field(default_factory=list)  # the factories, each as ``module:factory``
    rendering: str = ""  # how to draw, which the worker tries, too; empty for nothing


class RenderingTried(Frozen):
    """Worker to hub: why nothing is drawn by what ``ListNames`` says, and what to do; empty if a context was made."""

    why: str


class FactoryFailed(Frozen):
    """Worker to hub: a factory cannot be made. ``missing`` says that its package is there, and does not have it."""

    entry: str
    why: str
    remedy: str = ""  # after ``why``: where a package is missing and how to install it; empty where none is
    missing: bool = True


class Draw(Frozen):
    """Hub to worker: draw the env of ``row`` by its ``render``, between two of its steps, until ``until_s``."""

    number: int
    row: int
    until_s: float  # on the clock of ``time.monotonic``; later it is not wanted


class Drawn(Frozen):
    """Worker to hub: the frame of this ``Draw``, as bytes of its shape; with a ``problem`` there is none."""

    number: int
    shape: List[int] = field(default_factory=list)  # height, width and channels
    pixels: bytes = b""
    problem: str = ""


class TakeSnapshot(Frozen):
    """Hub to worker, between two requests: fork a snapshot of its env, with this end of the channel to it."""

    name: str
    serial: int  # a number of its own in the session
    unsafe: bool = False  # also if the env has what a copy would not have, or would share
    forks: bool = True  # else the snapshot is the last one of ``kept``, and the requests since then
    kept: List[int] = field(default_factory=list)  # serial numbers of those whose processes live


class SnapshotTaken(Frozen):
    """Worker to hub: the snapshot was taken. With ``problems`` it is none: what cannot be copied, for people."""

    serial: int
    problems: List[str]
    steps: int = 0  # of the episode
    episode: int = 0  # the number of the env's episode, from 1 on
    ended: bool = False  # whether the episode has ended
    base: int = 0  # if it was not forked, the serial number of the one that it is with these requests
    requests: bytes = b""


class ForgetRequests(Frozen):
    """Hub to worker: keep no requests any more, as the session has no process of a snapshot that they follow."""


class RepeatRequests(Frozen):
    """Hub to a restored worker, before it maps the arena: make the requests again that are in the memory with this."""

    name: str


class NotRepeated(Frozen):
    """Worker to hub: they could not be made, or gave another result."""

    why: str  # follows the name of the env


class Try(Frozen):
    """Hub to worker: make the env of ``build``, try it, and end."""

    build: Build
    thorough: bool = False  # find all that ``envhub validate`` says; else reset and step it once


class Trying(Frozen):
    """Worker to hub: what it does with the env from now on."""

    what: str


class Tried(Frozen):
    """Worker to hub, once the env did what was tried."""

    facts: Dict[str, Any]  # see ``worker.trial``


class CloseEnvs(Frozen):
    """Hub to worker: close the envs and end."""


class Closing(Frozen):
    """Worker to hub: the envs of ``rows`` are about to be closed, and those before them are; none if all are."""

    rows: List[int]


# Every message of this module, and the protocol's two that workers send.
CONTROL: Dict[str, Type[Any]] = {
    kind.__name__: kind for kind in [*globals().values(), EnvNames] if isinstance(kind, type) and is_dataclass(kind)
}


def pack(message: object) -> List[bytes]:
    # In pieces, because the bytes that the hub sends to every worker, such as a call's arguments, then exist only once.
    return codec.encode_call(type(message).__name__, as_map(message))


def unpack(blob: Any, limits: codec.HeaderLimits = codec.KNOWN) -> object:
    decoded = codec.decode_header(blob, limits)
    if not (isinstance(decoded, list) and [*map(type, decoded)] == [str, dict]):
        raise codec.DecodeError("not a control message")
    if decoded[0] not in CONTROL:
        raise codec.DecodeError(f"no control message is called {decoded[0][:64]!r}")
    return build(CONTROL[decoded[0]], decoded[1])


BYTES_MAX = 1 << 24  # of all values of a session, each counted once per env
ENTRY_BYTES = 128  # what the entry of one env takes besides its value


class SetAttributes:
    """The last values by name and row, in the order in which the names were set."""

    def __init__(self) -> None:
        self._values: dict[str, dict[int, bytes]] = {}
        self._nbytes = 0

    def has(self, message: SetAttrRows) -> bool:
        values = self._values.get(message.name, {})
        return all(values.get(row) == value for row, value in zip(message.rows, message.values))

    def add(self, message: SetAttrRows) -> bool:
        """Keep a set attribute; return False if there is no room, and then keep nothing of this name."""
        values = self._values.pop(message.name, {})
        self._nbytes -= _nbytes(values)
        values.update(zip(message.rows, message.values))
        if self._nbytes + _nbytes(values) > BYTES_MAX:
            return False
        self._nbytes += _nbytes(values)
        self._values[message.name] = values
        return True

    def again(self, rows: Sequence[int]) -> list[SetAttrRows]:
        """Messages that set it all again on the new envs of these rows."""
        by_name = ((name, [row for row in rows if row in values], values) for name, values in self._values.items())
        return [SetAttrRows(mine, name, [values[row] for row in mine]) for name, mine, values in by_name if mine]


def _nbytes(values: dict[int, bytes]) -> int:
    return sum(map(len, values.values())) + ENTRY_BYTES * len(values)
