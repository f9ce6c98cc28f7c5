"""``RecordedVectorEnv``: a vector env whose episodes are written to disk."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import numpy as np
from gymnasium.vector import VectorEnv

from envhub.errors import ConnectionInUse, HubTimeout, raised_by_env
from envhub.protocol.messages import Make
from envhub.recording.options import RecordOptions
from envhub.recording.program_recorder import ProgramRecorder, Recorded, check_packages
from envhub.secret import Secret
from envhub.values import spaces
from envhub.vector_errors import NothingPending, SessionBusy
from envhub_client.envs.exclusive import exclusive
from envhub_client.envs.recoverable import environment
from envhub_client.envs.vector_env import HubVectorEnv, Options, StepReturn
from envhub_client.session.options import SessionOptions

PACKAGES = ("envhub-rl", "gymnasium", "numpy", "minari")

Result = TypeVar("Result")


class RecordedVectorEnv(HubVectorEnv, VectorEnv[Any, Any, np.ndarray]):  # some frameworks look at direct bases only
    """A ``HubVectorEnv`` that writes down what the trainer sees; ``envhub.make_vec(..., record=...)`` makes one.

    ``begin_recording`` has to be called once, before the first reset. Parts of a batch (``send``, ``recv``) are not
    offered. A step whose rewards have axes raises ``ValueError``: a data set of Minari has one number for each step.
    """

    def __init__(self, address: str | Secret[str] | None, make: Make, options: SessionOptions) -> None:
        """Make a session; arguments and errors as for ``HubVectorEnv``. ``options.record`` says what is recorded.

        Raises:
            ModuleNotFoundError: Minari, or PyAV for films, is not installed.
        """
        assert isinstance(options.record, RecordOptions)
        self._record = options.record
        check_packages(bool(self._record.film))
        super().__init__(address, make, options)

    def begin_recording(self, made_by: str, arguments: Sequence[Mapping[str, Any]]) -> None:
        """Begin to record these envs; closes them if that cannot be.

        ``made_by`` and ``arguments``, of each env or of all of them, describe the envs beside their episodes.

        Raises:
            UnsupportedSpace: a space has parts that are no arrays.
            ValueError: the options do not fit the envs, or these have a ``reward_space`` with axes.
            OSError: the folder cannot be written.
        """
        try:
            self.refuse_reward_axes("a recording")
            if self._record.film and self.render_mode != "rgb_array":
                raise ValueError(f'films need render_mode="rgb_array"; these envs have {self.render_mode!r}')
            about = {
                "env": made_by,
                "kwargs": [dict(one) for one in arguments],
                "hub": self.address,
                "num_envs": self.num_envs,
                "autoreset_mode": self.autoreset_mode.value,
                "versions": _versions(),
            }
            spaces_of_one = self.single_observation_space, self.single_action_space
            self._are_flat = [*map(spaces.is_flat, spaces_of_one)]
            mode = self.autoreset_mode.value
            self._recorder = ProgramRecorder(
                self._record, self.num_envs, spaces_of_one, mode, about, _spec(self), self.metadata
            )
        except BaseException:
            self.close(terminate=True)
            raise

    @property
    def recorded(self) -> Recorded:
        """What is recorded so far, and what was dropped."""
        return self._recorder.recorded

    # --- reset --------------------------------------------------------------------------------------------------------

    @exclusive
    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """As ``HubVectorEnv.reset_wait``."""
        return self._noted(self._record_reset, super().reset_wait, timeout)

    @exclusive
    def reset_each(
        self, seed: Sequence[int | None] | None, options: Options, *, masked: bool = False, env_ids: Any = None
    ) -> tuple[Any, dict[int, dict[str, Any]]]:
        """As ``HubVectorEnv.reset_each``."""
        return self._noted(self._record_reset, super().reset_each, seed, options, masked=masked, env_ids=env_ids)

    def _record_reset(self, result: tuple[Any, Any]) -> None:
        frame: tuple[int, ...] = ()
        if self._record.film and not self._recorder.opened:
            frame = np.shape(self.render([*self._record.film][:1])[0])
        reset = self._last_reset
        mask = np.array(reset.mask) if reset.mask else None
        self._recorder.reset(mask, reset.seeds, spaces.flatten(self.single_observation_space, result[0]), frame)
        self._record_frames()

    # --- step ---------------------------------------------------------------------------------------------------------

    @exclusive
    def step_async(self, actions: Any) -> None:
        """As ``HubVectorEnv.step_async``."""
        super().step_async(actions)
        self._recorder.acted([actions] if self._are_flat[1] else spaces.flatten(self.single_action_space, actions))

    @exclusive
    def step_wait(self, timeout: float | None = None) -> StepReturn:
        """As ``HubVectorEnv.step_wait``."""
        return self._noted(self._record_step, super().step_wait, timeout)

    @exclusive
    def step_wait_each(self) -> StepReturn:
        """As ``HubVectorEnv.step_wait_each``."""
        return self._noted(self._record_step, super().step_wait_each)

    @exclusive
    def drop_pending(self) -> None:
        """As ``HubVectorEnv.drop_pending``."""
        self._recorder.broke_off()
        super().drop_pending()

    def _record_step(self, result: StepReturn) -> None:
        observations, rewards, *flags, infos = result
        leaves = [observations] if self._are_flat[0] else spaces.flatten(self.single_observation_space, observations)
        self._recorder.stepped(leaves, [rewards, *flags], infos)
        if self._record.film:
            self._record_frames()

    def _record_frames(self) -> None:
        if due := self._recorder.frames_due:
            self._recorder.add_frames(self.render(due))

    def _noted(self, note: Callable[[Result], None], wait: Callable[..., Result], *args: Any, **named: Any) -> Result:
        """What ``wait`` returns, noted; an error ends the episodes, unless nothing is pending or it can wait again."""
        try:
            result = wait(*args, **named)
            note(result)
        except (HubTimeout, ConnectionInUse, NothingPending, SessionBusy):
            raise
        except BaseException as error:
            raised = raised_by_env(error)
            self._recorder.broke_off(None if raised is None else raised.env_index, f"exception: {error!r}")
            raise
        return result

    # --- what is not recorded -----------------------------------------------------------------------------------------

    def send(self, actions: Any, env_ids: Any = None) -> None:
        """Not offered.

        Raises:
            ValueError: always.
        """
        raise ValueError("parts of a batch are not recorded: step all envs, or make the envs without record=")

    def async_reset(self, seed: int | Sequence[int | None] | None = None, options: Options = None) -> None:
        """Not offered; raises as ``send``."""
        self.send(None)

    @exclusive
    def detach(self) -> str:
        """As ``HubVectorEnv.detach``; the recording ends here."""
        token = super().detach()
        self._recorder.close()
        return token

    @exclusive
    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """As ``HubVectorEnv.close_extras``; first everything that is complete is written."""
        try:
            super().close_extras(timeout, terminate)
        finally:
            if hasattr(self, "_recorder"):
                self._recorder.close()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):  # of a source tree that is not installed
            found[name] = version(name)
    return found


def _spec(envs: HubVectorEnv) -> str:
    """The spec that makes one of the envs again, in JSON; empty if nothing that can be written down makes it."""
    try:
        spec = environment(envs)
        return "" if spec is None else str(spec.to_json())
    except (TypeError, ValueError):
        return ""
