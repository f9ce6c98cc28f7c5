"""The keywords of ``envhub.make_vec`` as types, which type checkers and editors know by name.

Written by ``tests/conformance/option_keywords.py``, from the annotations of ``FaultOptions``, ``HostingOptions`` and
``make_vec``, whose docstrings describe them. Type checkers know no other arguments of envs: these go into
``env_kwargs``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from gymnasium.vector import AutoresetMode
from typing_extensions import TypedDict

from envhub_client.keywords import WrapperLike
from envhub_client.record_options import RecordOptions
from envhub_client.session.options import (
    Compression,
    CrashPolicy,
    HubLossPolicy,
    InfoMode,
    InvalidPolicy,
    LaneName,
    ModeName,
    ObservationMode,
    Policy,
    Rendering,
)


class OptionKeywords(TypedDict, total=False):
    """The fields of ``FaultOptions`` and ``HostingOptions``."""

    on_crash: CrashPolicy
    on_timeout: Policy
    on_exception: Policy
    on_invalid: InvalidPolicy
    restart_wait: float
    restarts_max: int
    init_timeout: float
    reset_timeout: float
    step_timeout: float
    call_timeout: float
    close_timeout: float
    gpus: Sequence[int]
    memory_max: int | None
    spares: int | None
    recycle: Mapping[str, float] | None
    shared_process: bool
    one_per_process: bool
    snapshots: bool | Literal["unsafe"]
    python: str | Path | None
    rendering: Rendering | None
    worker_setup: str | Callable[[], object] | None
    label: str


class EnvKeywords(OptionKeywords, total=False):
    """Besides, what ``gymnasium.make`` takes for every env."""

    render_mode: str | None
    max_episode_steps: int | None
    disable_env_checker: bool | None


class SessionKeywords(EnvKeywords, total=False):
    """Keywords of every function that makes envs."""

    num_workers: int | Literal["auto"] | None
    observation_mode: ObservationMode
    copy: bool
    lane: LaneName | None
    spin_us: int | None
    pin: bool
    vector: bool
    compression: Compression | None
    reconnect_timeout: float
    hub_index: int | None
    on_hub_loss: HubLossPolicy
    record: str | Path | RecordOptions | None
    wrappers: Sequence[WrapperLike]


class ClientKeywords(SessionKeywords, total=False):
    """Keywords of ``Client.make_vec``."""

    autoreset_mode: ModeName | AutoresetMode
    info_mode: InfoMode
    env_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None


class MakeKeywords(SessionKeywords, total=False):
    """Keywords of the frameworks' functions."""

    hub: str | Sequence[str] | None
    split: Sequence[int] | None
    env_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None
