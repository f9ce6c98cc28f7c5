"""The keywords of ``envhub.make_vec`` as types, which type checkers and editors know by name.

Written by ``tests/conformance/option_keywords.py``, from the docstrings and annotations of ``FaultOptions``,
``HostingOptions`` and ``make_vec``. Type checkers know no arguments of envs: these go into ``env_kwargs``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from gymnasium.vector import AutoresetMode
from typing_extensions import TypedDict

from envhub.recording.options import RecordOptions
from envhub_client.session.faults import InvalidPolicy, Policy
from envhub_client.session.hosting import Rendering
from envhub_client.session.options import Compression, HubLossPolicy, InfoMode, LaneName, ModeName, ObservationMode
from envhub_client.wrapper_names import WrapperLike


class FaultKeywords(TypedDict, total=False):
    """The fields of ``FaultOptions``."""

    on_crash: Policy
    """The policy when an env's process ends."""

    on_timeout: Policy
    """The policy when an env does not finish in time. Its process is ended then, with all that it started."""

    on_exception: Policy
    """The policy when an env's ``step`` raises. An exception of ``reset`` is always raised."""

    on_invalid: InvalidPolicy
    """The policy when an observation or a reward is not finite; ``"pass"`` as in Gymnasium."""

    restart_wait: float
    """How long a step waits for an env that is being restarted, before it is truncated again."""

    restarts_max: int
    """How often the envs of one process are restarted within a minute. ``RestartsExhausted`` after that."""

    init_timeout: float
    """The time for making an env, and for its first step, in which much is compiled."""

    reset_timeout: float
    """The time for a reset."""

    step_timeout: float
    """The time for a step, also where that resets the env."""

    call_timeout: float
    """The time for a call."""

    close_timeout: float
    """The time for all envs to close."""


class HostingKeywords(TypedDict, total=False):
    """The fields of ``HostingOptions``."""

    gpus: Sequence[int]
    """Numbers of devices, dealt to the workers in turn: worker ``i`` of a session sees device ``gpus[i % len(gpus)]``,
    by ``CUDA_VISIBLE_DEVICES``, ``MUJOCO_EGL_DEVICE_ID`` and ``EGL_DEVICE_ID``. A worker that is restarted gets the
    same device. A hub that others share allows those that its operator names.
    """

    memory_max: int | None
    """Bytes of memory that each worker may have, with what it started, without files and shared memory. The hub
    measures it five times a second and ends a worker that has more, before the machine is short of memory. Its envs
    are truncated or raise as at a crash, with the cause ``memory``. 0 for no limit. A hub that others share allows
    no more than its operator.
    """

    spares: int | None
    """The number of workers that each hub makes ahead, with their envs, for envs that take long. When a worker ends, a
    spare takes its place at once, and another spare is made. A spare fits any worker with equal envs and the same
    device; where factories or ``env_kwargs`` differ, it fits the worker that it was made for. A hub that others
    share makes up to 8 of a session, or what its operator says.
    """

    recycle: Mapping[str, float] | None
    """When another worker takes over from one, for envs that leak: after ``{"episodes": 100}`` of its envs together,
    after ``{"age_s": 3600.0}`` seconds, or with more than ``{"memory_bytes": 2 << 30}``, or any of them. The other
    worker takes over as soon as all envs of the first are between episodes at once: no env is truncated, and no
    restart is counted. If that takes as many episodes, seconds or bytes again, their episodes are cut by a
    truncation with the cause ``recycle``, whatever ``on_crash`` says. There is one spare, unless ``spares`` says
    otherwise. Without ``num_workers`` every env gets a process of its own then.
    """

    shared_process: bool
    """True if several of the envs may share a process, which steps cheap envs faster. Without it they do only where
    ``num_workers`` says so, or where the env and its wrappers are of packages that are known to keep nothing per
    process. An env that draws from ``numpy.random``, or keeps anything in a module or a library, gives other results
    there. Changes of random numbers, ``os.environ`` and the working directory are warned of once.
    """

    one_per_process: bool
    """True if each env has a process of its own in any case, for simulators of which a process can have only one. Where
    the second env of a process cannot be made, each gets its own without it, too.
    """

    python: str | Path | None
    """The interpreter of the workers, for a simulator that needs another: a program, a virtual environment or a conda
    prefix, which has numpy, msgpack and gym or gymnasium. The env is named then; the workers also import from the
    program's working directory. Private hubs only: of a hub that others share, its operator says it.
    """

    rendering: Rendering | None
    """The way to draw frames without a screen, ``"egl"`` or ``"osmesa"``: the workers' ``MUJOCO_GL`` and
    ``PYOPENGL_PLATFORM``. Private hubs only, likewise.
    """

    worker_setup: str | Callable[[], object] | None
    """A function that each worker calls once, before it makes its envs: one without arguments, which travels by
    cloudpickle, or the name of one, ``"module:function"``, that a worker imports. It sets up what a program has set
    and workers do not have, such as ``np.seterr``; ``client/docs/workers.md`` lists that. Workers that are restarted
    or take over call it, and spares. What it raises is raised as by the making of an env. A hub that others share
    takes what its operator says of the env, and any where it takes factories.
    """


class OptionKeywords(FaultKeywords, HostingKeywords, total=False):
    """The fields of both."""


class SessionKeywords(OptionKeywords, total=False):
    """Keywords of every function that makes envs."""

    num_workers: int | Literal["auto"] | None
    """Processes that host the envs. Without it, or with ``"auto"``, every env gets a process, unless its package is
    known to keep nothing per process, or ``shared_process=True`` says that it does not. Such envs get as many as
    suit what their steps took before. ``envs.sizing`` says how many there are, and why. A number is divided among
    several hubs by their envs, and each has one at least. With 0 the envs are in the program's own process and run
    in the thread that steps them, for debuggers and profilers. Results and errors are the same, but nothing ends an
    env that hangs, and one that crashes ends the program.
    """

    observation_mode: ObservationMode
    """``"same"``, ``"different"`` or ``(batched space, single space)``, as in Gymnasium. With ``"first"`` envs may
    differ in the bounds of their observations and actions, such as in ``n`` of a ``Discrete``: the spaces are the
    first env's then. With ``"any"`` envs also differ in shapes and keys, and an observation need not fit its space.
    Observations are a tuple with each env's own, copied by value, and the space is ``Anything``. So is the action
    space where the envs' have different leaves: actions are a list with each env's own then, and ``send`` is
    refused. ``get_attr("observation_space")`` has each env's own space.
    """

    copy: bool
    """True if returned observations are the caller's own. If not, two buffers alternate, and what a step returned holds
    until the second next step or reset.
    """

    lane: LaneName | None
    """``"auto"`` steps in the workers' own memory where that can be had, on the hub's machine; ``"wire"`` by messages
    only. Without it ``ENVHUB_LANE``; without that ``"auto"``.
    """

    spin_us: int | None
    """The microseconds that a waiting process spins before it parks, 0 to 1000. By default what suits the hub's
    machine, or what ``ENVHUB_SPIN_US`` says in the hub's environment.
    """

    pin: bool
    """True if each worker keeps to one CPU."""

    vector: bool
    """True if ``env`` is a vector env, which steps all of its envs in one call: an id with a ``vector_entry_point``, or
    a function that takes ``num_envs``. One worker holds the batch, or each of ``num_workers`` a share. On a hub that
    others use, its operator says which envs are such.
    """

    compression: Compression | None
    """The compression of observations that come from another machine, for slow links: ``"lz4"``, ``"zstd"``, or
    ``"auto"``, what both sides have (``pip install "envhub-rl[compression]"``) unless the hub is on this machine.
    """

    reconnect_timeout: float
    """The seconds for which a hub that is out of reach is tried, before it is taken for lost."""

    hub_index: int | None
    """The number of the hub that gets all envs, of several in their order and modulo how many they are: programs that
    share a fleet number themselves. Where it is out of reach or drains, the next hub gets them; with
    ``"redistribute"`` also after its loss the hub with most free CPUs.
    """

    on_hub_loss: HubLossPolicy
    """``"raise"`` ``HubLost``, or ``"recreate"``: continue in a new session on the hub that comes back at the same
    address, or on a new private hub. The step under way then returns every env truncated. Of several hubs only the
    lost one's envs are truncated and made again, while the others go on; with ``"redistribute"`` on any of the hubs
    that has room.
    """

    record: str | Path | RecordOptions | None
    """A folder of this machine to which episodes are written as a Minari data set, or ``RecordOptions`` with one (``pip
    install "envhub-rl[record]"``). ``envs.recorded`` says what is written, and what was dropped.
    """

    wrappers: Sequence[WrapperLike]
    """The wrappers of each env of this id, innermost first, which run in the workers: classes that extend
    ``gymnasium.Wrapper``, or names in ``gymnasium.wrappers``. Arguments come as ``("FrameStackObservation",
    {"stack_size": 4})`` or ``functools.partial(TimeLimit, max_episode_steps=50)``. A hub that others use makes
    Gymnasium's own, without those that write files, open windows or import modules.
    """


class ClientKeywords(SessionKeywords, total=False):
    """Keywords of ``Client.make_vec``."""

    autoreset_mode: ModeName | AutoresetMode
    """The mode, as in Gymnasium."""

    info_mode: InfoMode
    """The form of infos: ``"batched"``, an array of all envs for each key, as in Gymnasium, or ``"by_env"``, the dict
    that each env gave, by the number of the env. An env whose info is empty may be left out. Wrappers of vector
    envs, such as ``RecordEpisodeStatistics``, need ``"batched"``.
    """

    env_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None
    """Arguments for the env or the factory, for those whose names are taken by this function; or a list of one dict per
    env, for envs that differ.
    """


class MakeKeywords(SessionKeywords, total=False):
    """Keywords of the frameworks' functions."""

    hub: str | Sequence[str] | None
    """A running hub's address, or the name under which ``envhub login`` keeps it. Without it ``ENVHUB_ADDRESS`` (not
    for factories); without that a private hub, which starts and ends with this program. A list of them,
    ``file:///FOLDER`` for those that are announced in a folder, ``ray://FLEET`` for those of a fleet on Ray, or
    ``dns://NAME:PORT`` for those at the addresses of a name, divides the envs among several hubs.
    """

    split: Sequence[int] | None
    """How many envs each of several hubs gets, in their order. Without it the envs are on as few hubs as have a free
    CPU for each env. Results do not depend on it, except those of ``vector=True``.
    """

    env_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None
    """Arguments for the env or the factory, for those whose names are taken by this function; or a list of one dict per
    env, for envs that differ.
    """
