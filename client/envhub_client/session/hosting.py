"""Settings of a session's workers besides their envs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from envhub.errors import shown
from envhub.protocol import messages
from envhub.protocol.validation import COUNT, GPUS_MAX, ROWS_MAX, SECONDS_MAX, is_function_name

PRIVATE = ("python", "rendering")  # options for private hubs only
Rendering = Literal["egl", "osmesa"]


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
            worker ends, a spare takes its place at once. Where factories or ``env_kwargs`` differ, a spare fits the
            worker that it was made for. A hub that others share makes up to 8 of a session.
        recycle: when another worker takes over from one, for envs that leak: after ``{"episodes": 100}`` of its envs
            together, after ``{"age_s": 3600.0}`` seconds, or with more than ``{"memory_bytes": 2 << 30}``, or any of
            them. A worker of one env is taken over from between two episodes. Of several envs, and with SAME_STEP,
            those that are in an episode are truncated with the cause ``recycle``. Without ``num_workers`` every env
            gets a process of its own then.
        shared_process: True if several of the envs may share a process, which steps cheap envs faster. An env that
            draws from ``numpy.random``, or keeps anything in a module or a library, gives other results there. Changes
            of random numbers, ``os.environ`` and the working directory are warned of once.
        one_per_process: True if each env has a process of its own in any case, for simulators of which a process can
            have only one. Where the second env of a process cannot be made, each gets its own without it, too.
        python: the interpreter of the workers, for a simulator that needs another: a program, a virtual environment or
            a conda prefix, which has numpy, msgpack and gym or gymnasium. The env is named then. Private hubs only: of
            a hub that others share, its operator says it.
        rendering: the way to draw frames without a screen, ``"egl"`` or ``"osmesa"``: the workers' ``MUJOCO_GL`` and
            ``PYOPENGL_PLATFORM``. Private hubs only, likewise.
        worker_setup: a function that each worker calls once, before it makes its envs: one without arguments, which
            travels by cloudpickle, or the name of one, ``"module:function"``. It sets up what a program has set and
            workers do not have, such as ``np.seterr``; ``client/docs/workers.md`` lists that. A hub that others share
            takes it only where it takes factories.
    """

    gpus: Sequence[int] = ()
    memory_max: int | None = None
    spares: int | None = None
    recycle: Mapping[str, float] | None = None
    shared_process: bool = False
    one_per_process: bool = False
    python: str | Path | None = None
    rendering: Rendering | None = None
    worker_setup: str | Callable[[], object] | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            TypeError: a field is of another type.
            ValueError: a number is out of its bounds, or the envs are to share a process and not to share one.
        """
        gpus = self.gpus
        if not isinstance(gpus, Sequence) or not all(type(each) is int for each in gpus):
            raise TypeError(f"gpus must be a list of numbers of devices, such as [0, 1], got {shown(gpus)}")
        if not all(0 <= each < GPUS_MAX for each in gpus):
            raise ValueError(f"gpus must be numbers of devices from 0 to {GPUS_MAX - 1}, got {shown(gpus)}")
        _check_count("memory_max", "bytes", self.memory_max, COUNT[1])
        _check_count("spares", "workers", self.spares, ROWS_MAX)
        _check_recycle(self.recycle)
        for name in ("shared_process", "one_per_process"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {shown(value)}")
        if self.shared_process and self.one_per_process:
            raise ValueError("shared_process=True and one_per_process=True exclude each other")
        if not isinstance(self.python, (str, Path, type(None))):
            raise TypeError(f"python must be the path of an interpreter, got {shown(self.python)}")
        if self.rendering not in (None, *get_args(Rendering)):
            raise ValueError(
                f"rendering must be {' or '.join(map(repr, get_args(Rendering)))}, got {shown(self.rendering)}"
            )
        setup = self.worker_setup
        if isinstance(setup, str) and not is_function_name(setup):
            raise ValueError(
                f"worker_setup={shown(setup)} is no name of a function, which is written 'module:function'"
            )
        if not (setup is None or isinstance(setup, str) or callable(setup)):
            raise TypeError(
                f"worker_setup must be a function, or the name of one, 'module:function'; got {shown(setup)}"
            )

    def wire(self) -> messages.Hosting:
        """The form in which they are sent to a hub."""
        recycle: dict[str, Any] = dict(self.recycle or {})
        recycle["age_s"] = float(recycle.get("age_s", 0))
        return messages.Hosting(
            gpus=list(self.gpus),
            memory_max=self.memory_max,
            spares=self.spares,
            recycle=messages.Recycle(**recycle),
            shares_process=False if self.one_per_process else self.shared_process or None,
        )


def _check_recycle(recycle: object) -> None:
    keys = ", ".join(vars(messages.Recycle()))
    if recycle is None:
        return
    if not isinstance(recycle, Mapping) or not recycle or recycle.keys() - vars(messages.Recycle()).keys():
        raise TypeError(f"recycle must be a dict with some of {keys}, got {shown(recycle)}")
    for name, value in recycle.items():
        if name != "age_s":
            _check_count(f"recycle's {name}", name.partition("_")[2] or name, value, COUNT[1])
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= SECONDS_MAX:
            raise ValueError(f"recycle's age_s must be a number of seconds up to {SECONDS_MAX}, got {shown(value)}")


def _check_count(name: str, unit: str, value: object, most: int) -> None:
    if value is None:
        return
    if type(value) is not int:
        raise TypeError(f"{name} must be a number of {unit}, an int, got {shown(value)}")
    if not 0 <= value <= most:
        raise ValueError(f"{name} must be a number of {unit} from 0 to {most}, got {value}")


FIELDS = tuple(field.name for field in dataclasses.fields(HostingOptions))
