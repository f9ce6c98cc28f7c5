"""The options of a session that are not the env's own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from envhub.arena.spin import checked_spin_us
from envhub.errors import shown
from envhub.protocol.prelude import RECONNECT_S
from envhub.protocol.validation import SECONDS_MAX
from envhub.secret import hidden
from envhub.values.compression import METHODS
from envhub_client.record_options import RecordOptions
from envhub_client.session.faults import FaultOptions
from envhub_client.session.hosting import HostingOptions

ModeName = Literal["NextStep", "SameStep", "Disabled"]  # of an ``AutoresetMode``, its value
ObservationMode = Literal["same", "different", "first", "any"] | tuple[Space[Any], Space[Any]]
InfoMode = Literal["batched", "by_env"]
LaneName = Literal["auto", "wire"]
LANE_VARIABLE = "ENVHUB_LANE"  # the lane of sessions whose options name none
Compression = Literal["auto", "lz4", "zstd"]
HubLossPolicy = Literal["raise", "recreate", "redistribute"]


def checked_autoreset_mode(mode: str | AutoresetMode) -> AutoresetMode:
    """The mode of this value, or the mode itself.

    Raises:
        ValueError: there is no such mode; the message names those that exist.
    """
    for each in AutoresetMode:
        if mode in (each, each.value):
            return each
    modes = " or ".join(f"{each.value!r} (AutoresetMode.{each.name})" for each in AutoresetMode)
    raise ValueError(f"autoreset_mode must be {modes}, got {shown(mode)}")


def checked_info_mode(mode: InfoMode) -> InfoMode:
    """The mode itself.

    Raises:
        ValueError: there is no such mode.
    """
    if mode not in get_args(InfoMode):
        raise ValueError(f"info_mode must be 'batched' or 'by_env', got {shown(mode)}")
    return mode


def checked_lane(lane: LaneName | None) -> LaneName:
    """The lane itself; in place of None the one of ``ENVHUB_LANE``, or ``"auto"`` where that is not set.

    Raises:
        ValueError: there is no such lane; the message says where it was named.
    """
    name = lane if lane is not None else os.environ.get(LANE_VARIABLE) or "auto"
    if name not in get_args(LaneName):
        raise ValueError(f"{'lane' if lane is not None else LANE_VARIABLE} must be 'auto' or 'wire', got {shown(name)}")
    return cast("LaneName", name)


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
    compression: Compression | None = None
    faults: FaultOptions = field(default_factory=FaultOptions)
    reconnect_timeout: float = RECONNECT_S
    on_hub_loss: HubLossPolicy = "raise"
    hosting: HostingOptions = field(default_factory=HostingOptions)
    record: str | Path | RecordOptions | None = None
    info_mode: InfoMode = "batched"
    split: Sequence[int] | None = None
    hub_index: int | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError, TypeError: with Gymnasium's texts where it has them.
        """
        object.__setattr__(self, "autoreset_mode", checked_autoreset_mode(self.autoreset_mode))
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
        elif not (self.record is None or isinstance(self.record, RecordOptions)):
            raise TypeError(f"record must be a folder, a RecordOptions or None, got {shown(self.record)}")
        checked_info_mode(self.info_mode)
        object.__setattr__(self, "lane", checked_lane(self.lane))
        if self.compression not in (None, "auto", *METHODS):
            raise ValueError(f"compression must be 'auto', 'lz4', 'zstd' or None, got {shown(self.compression)}")
        workers, seconds = cast("object", self.num_workers), cast("object", self.reconnect_timeout)
        if isinstance(workers, np.integer):
            workers = int(workers)
            object.__setattr__(self, "num_workers", workers)
        if type(workers) is int and workers == 0:
            raise ValueError(
                "num_workers=0 hosts no env: for envs in this process use gymnasium.vector.SyncVectorEnv, "
                "whose results are equal"
            )
        if not (workers is None or (type(workers) is int and workers > 0) or str(workers) == "auto"):
            raise ValueError(f"num_workers must be a number from 1, 'auto' or None, got {shown(workers)}")
        if not isinstance(self.pin, bool):
            raise TypeError(f"pin must be True or False, got {shown(self.pin)}")
        if not isinstance(seconds, Real):
            raise TypeError(f"reconnect_timeout must be a number of seconds, got {shown(seconds)}")
        if not 0 <= self.reconnect_timeout <= SECONDS_MAX:  # NaN, too, is not between them
            raise ValueError(
                f"reconnect_timeout must be between 0 and {SECONDS_MAX} seconds, got {self.reconnect_timeout}"
            )
        if self.on_hub_loss not in get_args(HubLossPolicy):
            raise ValueError(
                f"on_hub_loss must be 'raise', 'recreate' or 'redistribute', got {shown(self.on_hub_loss)}"
            )
        if self.hub_index is not None:
            if not isinstance(cast("object", self.hub_index), (int, np.integer)):
                raise TypeError(f"hub_index must be a whole number or None, got {shown(self.hub_index)}")
            if self.split is not None:
                raise ValueError(
                    "split divides the envs among several hubs, and hub_index chooses one: give one of them"
                )
        if not isinstance(self.spin_us, (int, type(None))) or isinstance(self.spin_us, bool):
            raise TypeError(f"spin_us must be a number of microseconds, an int, or None, got {shown(self.spin_us)}")
        if self.spin_us is not None:
            checked_spin_us(self.spin_us, "spin_us")
