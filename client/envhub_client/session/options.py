"""The options of a session that are not the env's own."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from envhub.arena.spin import SPIN_US_MAX
from envhub.errors import brief, hidden
from envhub.protocol import messages
from envhub.protocol.prelude import RECONNECT_S
from envhub.protocol.validation import (
    COUNT,
    GPUS_MAX,
    ORIGIN_CHARS_MAX,
    RESTARTS_MAX,
    ROWS_MAX,
    SECONDS_MAX,
    is_function_name,
    is_short_line,
)
from envhub_client.keywords import check, check_choice
from envhub_client.record_options import RecordOptions

Policy = Literal["truncate", "raise"]
CrashPolicy = Literal["truncate", "raise", "restore"]
InvalidPolicy = Literal["truncate", "raise", "pass"]
PRIVATE = ("python", "rendering")  # options for private hubs only
Rendering = Literal["egl", "osmesa"]
ModeName = Literal["NextStep", "SameStep", "Disabled"]  # of an ``AutoresetMode``, its value
ObservationMode = Literal["same", "different", "first", "any"] | tuple[Space[Any], Space[Any]]
InfoMode = Literal["batched", "by_env"]
LaneName = Literal["auto", "wire"]
LANE_VARIABLE = "ENVHUB_LANE"  # the lane of sessions whose options name none
Compression = Literal["auto", "lz4", "zstd"]
HubLossPolicy = Literal["raise", "recreate", "redistribute"]


def _check_seconds(name: str, value: Any, least: float = 0.0) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    check(is_number, name, "a number of seconds", value, TypeError)
    check(least <= value <= SECONDS_MAX, name, f"a number of seconds up to {SECONDS_MAX}", value)  # as NaN is not


def _check_count(name: str, unit: str, value: Any, most: int) -> None:
    check(type(value) is int, name, f"a number of {unit}, an int", value, TypeError)
    check(0 <= value <= most, name, f"a number of {unit} from 0 to {most}", value)


@dataclass(frozen=True)
class FaultOptions:
    """Policies and deadlines, which ``make_vec`` takes as keywords.

    With ``"truncate"`` the env's last observation is returned once more, with reward 0 and ``truncated``; its infos say
    why (``env_failure``, an ``EnvFailure``) and that this is no transition of the env's (``invalid_transition``). The
    env is restarted meanwhile. With ``"raise"`` the step raises; the session goes on with the next one. Times are in
    seconds, and count for each env by itself.

    Attributes:
        on_crash: the policy when an env's process ends; ``"raise"`` raises ``WorkerDied``, and ``"restore"`` truncates
            and begins the next episode at the env's newest snapshot, if it has any.
        on_timeout: the policy when an env does not finish in time. Its process is ended, with all that it started;
            ``"raise"`` raises ``EnvTimeout``.
        on_exception: the policy when an env's ``step`` raises, autoreset included; with ``"truncate"`` it is made again
            in its process. ``reset`` raises in any case.
        on_invalid: the policy when an observation or a reward is not finite; ``"pass"`` as in Gymnasium.
        restart_wait: how long a step waits for an env that is being restarted, before it is truncated again.
        restarts_max: how often the envs of one process are restarted within a minute. ``RestartsExhausted`` after that.
        init_timeout: the time for making an env, and for its first step, in which much is compiled.
        reset_timeout: the time for a reset.
        step_timeout: the time for a step, also where that resets the env.
        call_timeout: the time for a call.
        close_timeout: the time for an env to close. The envs of a process close one after another. A hub that others
            share allows 60 s, or what its operator says.
    """

    on_crash: CrashPolicy = "truncate"
    on_timeout: Policy = "truncate"
    on_exception: Policy = "raise"
    on_invalid: InvalidPolicy = "pass"
    restart_wait: float = 5.0
    restarts_max: int = 5
    init_timeout: float = 300.0
    reset_timeout: float = 120.0
    step_timeout: float = 300.0
    call_timeout: float = 300.0
    close_timeout: float = 60.0

    def __post_init__(self) -> None:
        for name in ("on_crash", "on_timeout", "on_exception", "on_invalid"):
            policies = {"on_invalid": InvalidPolicy, "on_crash": CrashPolicy}.get(name, Policy)
            check_choice(name, getattr(self, name), get_args(policies))
        for name in TIMES:
            _check_seconds(name, getattr(self, name), 0 if name == "restart_wait" else 0.001)
        _check_count("restarts_max", "restarts", self.restarts_max, RESTARTS_MAX)

    def wire(self) -> messages.Faults:
        fields: dict[str, Any] = {name: getattr(self, name) for name in FAULT_FIELDS if name not in TIMES}
        fields.update({name.replace("_timeout", "") + "_s": float(getattr(self, name)) for name in TIMES})
        return messages.Faults(**fields)


FAULT_FIELDS = tuple(field.name for field in dataclasses.fields(FaultOptions))
TIMES = tuple(name for name in FAULT_FIELDS if name.endswith(("_timeout", "_wait")) and not name.startswith("on_"))


@dataclass(frozen=True)
class HostingOptions:
    """Options of workers, which ``make_vec`` takes as keywords; None, or no device, is what the hub's operator says.

    Attributes:
        gpus: numbers of devices, dealt to the workers in turn, by ``CUDA_VISIBLE_DEVICES``, ``MUJOCO_EGL_DEVICE_ID``
            and ``EGL_DEVICE_ID``. A hub that others share allows those that its operator names.
        memory_max: bytes of memory that each worker may have, with what it started, without files and shared memory.
            A worker that has more is ended, with the cause ``memory``. 0 for no limit. A hub that others share allows
            no more than its operator.
        spares: the number of workers that each hub makes ahead, with their envs, for envs that take long. When a
            worker ends, a spare takes its place at once. A hub that others share makes up to 8 of a session.
        recycle: when another worker takes over from one, for envs that leak: after ``{"episodes": 100}`` of its envs
            together, after ``{"age_s": 3600.0}`` seconds, or with more than ``{"memory_bytes": 2 << 30}``, or any of
            them. Without ``num_workers`` every env gets a process of its own then.
        shared_process: True if several of the envs may share a process, which steps cheap envs faster. An env that
            draws from ``numpy.random``, or keeps anything in a module or a library, gives other results there.
        one_per_process: True if each env has a process of its own in any case, for simulators of which a process can
            have only one.
        snapshots: True if snapshots may be taken of the envs, which have a process each then; ``"unsafe"`` also of envs
            that have what a copy of a process lacks or shares.
        python: the interpreter of the workers, for a simulator that needs another: a program, a virtual environment or
            a conda prefix, which has numpy, msgpack and gym or gymnasium. The env is named then. Private hubs only: of
            a hub that others share, its operator says it.
        rendering: the way to draw frames without a screen, ``"egl"`` or ``"osmesa"``: the workers' ``MUJOCO_GL`` and
            ``PYOPENGL_PLATFORM``. Private hubs only, likewise.
        worker_setup: a function that each worker calls once, before it makes its envs: one without arguments, which
            travels by cloudpickle, or the name of one, ``"module:function"``. It sets up what a program has set and
            workers do not have, such as ``np.seterr``; ``client/docs/workers.md`` lists that. A hub that others share
            takes it only where it takes factories.
        label: your own name for what the envs are for, such as ``"ablation 3"``, which the hub's operator sees: at most
            100 printable characters.
    """

    gpus: Sequence[int] = ()
    memory_max: int | None = None
    spares: int | None = None
    recycle: Mapping[str, float] | None = None
    shared_process: bool = False
    one_per_process: bool = False
    snapshots: bool | Literal["unsafe"] = False
    python: str | Path | None = None
    rendering: Rendering | None = None
    worker_setup: str | Callable[[], object] | None = None
    label: str = ""

    def __post_init__(self) -> None:
        is_line = isinstance(self.label, str) and is_short_line(self.label)
        check(is_line, "label", f"a text of at most {ORIGIN_CHARS_MAX} printable characters", self.label)
        gpus, setup = self.gpus, self.worker_setup
        is_list = isinstance(gpus, Sequence) and all(type(each) is int for each in gpus)
        check(is_list, "gpus", "a list of numbers of devices, such as [0, 1]", gpus, TypeError)
        is_known = all(0 <= each < GPUS_MAX for each in gpus)
        check(is_known, "gpus", f"numbers of devices from 0 to {GPUS_MAX - 1}", gpus)
        if self.memory_max is not None:
            _check_count("memory_max", "bytes", self.memory_max, COUNT[1])
        if self.spares is not None:
            _check_count("spares", "workers", self.spares, ROWS_MAX)
        _check_recycle(self.recycle)
        check(isinstance(self.shared_process, bool), "shared_process", "True or False", self.shared_process, TypeError)
        check(
            isinstance(self.one_per_process, bool), "one_per_process", "True or False", self.one_per_process, TypeError
        )
        if self.shared_process and self.one_per_process:
            raise ValueError("shared_process=True and one_per_process=True exclude each other")
        check(self.snapshots in (True, False, "unsafe"), "snapshots", "True, False or 'unsafe'", self.snapshots)
        if self.shared_process and self.snapshots:
            raise ValueError("snapshots are of envs with a process each, and shared_process=True excludes that")
        is_path = isinstance(self.python, (str, Path, type(None)))
        check(is_path, "python", "the path of an interpreter", self.python, TypeError)
        if self.rendering is not None:
            check_choice("rendering", self.rendering, get_args(Rendering))
        if isinstance(setup, str) and not is_function_name(setup):
            raise ValueError(
                f"worker_setup={brief(setup)} is no name of a function, which is written 'module:function'"
            )
        is_function = setup is None or isinstance(setup, str) or callable(setup)
        check(is_function, "worker_setup", "a function, or the name of one, 'module:function'", setup, TypeError)

    def wire(self) -> messages.Hosting:
        recycle: dict[str, Any] = dict(self.recycle or {})
        recycle["age_s"] = float(recycle.get("age_s", 0))
        return messages.Hosting(
            gpus=list(self.gpus),
            memory_max=self.memory_max,
            spares=self.spares,
            recycle=messages.Recycle(**recycle),
            shares_process=False if self.one_per_process or self.snapshots else self.shared_process or None,
        )


def _check_recycle(recycle: object) -> None:
    names = vars(messages.Recycle()).keys()
    if recycle is None:
        return
    is_dict = isinstance(recycle, Mapping) and bool(recycle) and recycle.keys() <= names
    check(is_dict, "recycle", f"a dict with some of {', '.join(names)}", recycle, TypeError)
    for name, value in recycle.items():  # type: ignore[attr-defined]
        if name != "age_s":
            _check_count(f"recycle's {name}", name.partition("_")[2] or name, value, COUNT[1])
        else:
            _check_seconds("recycle's age_s", value)


HOSTING_FIELDS = tuple(field.name for field in dataclasses.fields(HostingOptions))


@dataclass(frozen=True)
class SessionOptions:
    """Options of hosting envs, and of handing over their observations.

    The fields are keywords of ``envhub.make_vec``, which describes them; ``faults`` says what is done about envs that
    fail, ``hosting`` what their workers get. Once they are checked, ``record`` is None or a ``RecordOptions``, and
    ``lane`` is a lane.
    """

    num_workers: int | Literal["auto"] | None = None
    autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP
    observation_mode: ObservationMode = "same"
    copy: bool = True
    lane: LaneName | None = None
    spin_us: int | None = None
    pin: bool = False
    compression: Compression | None = "auto"
    faults: FaultOptions = field(default_factory=FaultOptions)
    reconnect_timeout: float = RECONNECT_S
    on_hub_loss: HubLossPolicy = "raise"
    hosting: HostingOptions = field(default_factory=HostingOptions)
    record: str | Path | RecordOptions | None = None
    info_mode: InfoMode = "batched"
    split: Sequence[int] | None = None
    hub_index: int | None = None

    def __post_init__(self) -> None:
        """Check every field, with Gymnasium's texts where it has them."""
        try:  # the mode or its value
            object.__setattr__(self, "autoreset_mode", AutoresetMode(self.autoreset_mode))
        except ValueError:
            modes = " or ".join(f"{each.value!r} (AutoresetMode.{each.name})" for each in AutoresetMode)
            raise ValueError(f"autoreset_mode must be {modes}, got {brief(self.autoreset_mode)}") from None
        mode = self.observation_mode
        if isinstance(mode, tuple) and len(mode) == 2:
            if not all(isinstance(space, Space) for space in mode):
                raise TypeError(
                    f"Expected both elements of observation_mode to be Spaces, got {type(mode[0])} and {type(mode[1])}"
                )
        elif mode not in ("same", "different", "first", "any"):
            raise ValueError(
                "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation "
                f"space, actual got {hidden(str(mode))}"
            )
        if isinstance(self.record, (str, Path)):
            object.__setattr__(self, "record", RecordOptions(self.record))
        is_record = isinstance(self.record, (RecordOptions, type(None)))
        check(is_record, "record", "a folder, a RecordOptions or None", self.record, TypeError)
        if self.faults.on_crash == "restore" and not self.hosting.snapshots:
            raise ValueError("on_crash='restore' needs snapshots=True")
        check_choice("info_mode", self.info_mode, get_args(InfoMode))
        lane = os.environ.get(LANE_VARIABLE) or "auto" if self.lane is None else self.lane
        check_choice(LANE_VARIABLE if self.lane is None else "lane", lane, get_args(LaneName))
        object.__setattr__(self, "lane", lane)
        check_choice("compression", self.compression, (*get_args(Compression), None))
        workers = cast("object", self.num_workers)
        if isinstance(workers, np.integer):
            workers = int(workers)
            object.__setattr__(self, "num_workers", workers)
        if type(workers) is int and workers == 0:
            raise ValueError(
                "num_workers=0 hosts no env: for envs in this process use gymnasium.vector.SyncVectorEnv, "
                "whose results are equal"
            )
        is_number = workers is None or (type(workers) is int and workers > 0) or str(workers) == "auto"
        check(is_number, "num_workers", "a number from 1, 'auto' or None", workers)
        check(isinstance(self.pin, bool), "pin", "True or False", self.pin, TypeError)
        _check_seconds("reconnect_timeout", self.reconnect_timeout)
        check_choice("on_hub_loss", self.on_hub_loss, get_args(HubLossPolicy))
        is_index = isinstance(self.hub_index, (int, np.integer, type(None)))
        check(is_index, "hub_index", "a whole number or None", self.hub_index, TypeError)
        if self.hub_index is not None and self.split is not None:
            raise ValueError("split divides the envs among several hubs, and hub_index chooses one: give one of them")
        if self.spin_us is not None:
            _check_count("spin_us", "microseconds", self.spin_us, SPIN_US_MAX)
