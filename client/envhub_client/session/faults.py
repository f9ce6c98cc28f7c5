"""Options for envs that crash, hang, raise or return invalid results."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from envhub.errors import shown
from envhub.protocol import messages
from envhub.protocol.validation import RESTARTS_MAX, SECONDS_MAX

Policy = Literal["truncate", "raise"]
InvalidPolicy = Literal["truncate", "raise", "pass"]


@dataclass(frozen=True)
class FaultOptions:
    """Policies and deadlines, which ``make_vec`` takes as keywords.

    With ``"truncate"`` the env's last observation is returned once more, with reward 0 and ``truncated``; its infos say
    why (``env_failure``, an ``EnvFailure``) and that this is no transition of the env's (``invalid_transition``). The
    env is restarted meanwhile. With ``"raise"`` the step raises; the session goes on with the next one. Times are in
    seconds, and count for each env by itself.

    Attributes:
        on_crash: the policy when an env's process ends; ``"raise"`` raises ``WorkerDied``.
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

    on_crash: Policy = "truncate"
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
        """Check every field.

        Raises:
            ValueError: no such policy, or no such time or number.
            TypeError: a time or number is none.
        """
        for name in ("on_crash", "on_timeout", "on_exception", "on_invalid"):
            allowed = get_args(InvalidPolicy if name == "on_invalid" else Policy)
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(repr, allowed))}, got {shown(getattr(self, name))}"
                )
        for name in TIMES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number of seconds, got {shown(value)}")
            if not math.isfinite(value) or not (0 if name == "restart_wait" else 0.001) <= value <= SECONDS_MAX:
                raise ValueError(f"{name} must be a number of seconds up to {SECONDS_MAX}, got {shown(value)}")
        if isinstance(self.restarts_max, bool) or not isinstance(self.restarts_max, int):
            raise TypeError(f"restarts_max must be an int, got {shown(self.restarts_max)}")
        if not 0 <= self.restarts_max <= RESTARTS_MAX:
            raise ValueError(f"restarts_max must be between 0 and {RESTARTS_MAX}, got {self.restarts_max}")

    def wire(self) -> messages.Faults:
        """The form in which they are sent to a hub."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in FIELDS if name not in TIMES}
        fields.update({name.replace("_timeout", "") + "_s": float(getattr(self, name)) for name in TIMES})
        return messages.Faults(**fields)


FIELDS = tuple(field.name for field in dataclasses.fields(FaultOptions))
TIMES = tuple(name for name in FIELDS if name.endswith(("_timeout", "_wait")) and not name.startswith("on_"))
