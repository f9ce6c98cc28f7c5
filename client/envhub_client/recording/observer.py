"""``EpisodeRecording`` sees what a vector env shows, and writes each step as a row of a batch.

A step costs a few copies of arrays and waits for nothing: the process that writes finds out which episodes begin and
end in it. Where that has not given a batch back, steps are missed, and their episodes dropped.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from envhub.errors import raised_by_env
from envhub.protocol.messages import Reset
from envhub.values import spaces
from envhub_client.envs.arguments import Origin, environment
from envhub_client.envs.batch_reader import StepReturn
from envhub_client.envs.vector_env import HubVectorEnv, StepObserver
from envhub_client.record_options import Recorded, RecordOptions
from envhub_client.recording.episodes import SAME_STEP, SIDE_MAX, EpisodeCourse, StepMark, check_recordable, step_of
from envhub_client.recording.process import claim
from envhub_client.recording.step_writer import StepWriter

NOTE_CHARACTERS = 300
PACKAGES = "envhub-rl", "gymnasium", "numpy", "minari"

log = logging.getLogger("envhub")


class EpisodeRecording(StepObserver):
    """Writes the episodes of a vector env to disk."""

    def __init__(self, envs: HubVectorEnv, options: RecordOptions, origin: Origin) -> None:
        """Begin to record these envs, and have them refuse rewards with axes."""
        envs.refuse_reward_axes("a recording")
        if options.film and envs.render_mode != "rgb_array":
            raise ValueError(f'films need render_mode="rgb_array"; these envs have {envs.render_mode!r}')
        self._spaces = envs.single_observation_space, envs.single_action_space
        for space in self._spaces:
            check_recordable(space)
        self._flat_observations, self._flat_actions = map(spaces.is_flat, self._spaces)
        self._options, self._mode = options, envs.autoreset_mode.value
        self._env_ids = options.chosen(envs.num_envs)
        self._chosen = None if len(self._env_ids) == envs.num_envs else np.array(self._env_ids)
        self._row_of = {env: row for row, env in enumerate(self._env_ids)}
        self._courses: dict[int, EpisodeCourse] = {}  # of the envs that are filmed
        self._acted = False  # whether the actions of the step under way are written
        self._missed: np.ndarray | None = None  # episodes that began in steps that were missed just now, by row
        env, kwargs = origin.described()
        folder = claim(Path(options.folder).expanduser().absolute())
        self._setup: dict[str, Any] = {
            "folder": str(folder),
            "spaces": [*map(spaces.describe, self._spaces)],
            "spec": _spec(envs),
            "fps": envs.metadata.get("render_fps"),
            "mode": self._mode,
            "env_ids": self._env_ids,
            "film": sorted(options.film),
            "frames": [],
            "every": options.every,
            "only": options.only,
            "limits": {name: value for name, value in vars(options).items() if name.endswith(("_max", "_bytes"))},
        }
        self._setup["about"] = {
            "env": env,
            "kwargs": kwargs,
            "hub": envs.address,
            "num_envs": envs.num_envs,
            "autoreset_mode": self._mode,
            "versions": _versions(),
            **{name: self._setup[name] for name in ("env_ids", "every", "only")},
        }
        self._writer = StepWriter(folder)
        self._pid, self._closed = os.getpid(), False
        atexit.register(self._at_exit)

    def count(self) -> Recorded:
        self._writer.read_answers()
        return self._writer.recorded

    def check_partial_batches(self) -> None:
        raise ValueError("parts of a batch are not recorded: step all envs, or make the envs without record=")

    def reset_ended(self, envs: HubVectorEnv, reset: Reset, observations: Any) -> None:
        if not self._writer.opened:
            self._open(envs)
        marks = np.full(len(self._env_ids), StepMark.STILL, np.uint8)
        marks[self._of_chosen(np.array(reset.mask)) if reset.mask else slice(None)] = StepMark.RESET
        if not self._ready():
            self._miss(marks == StepMark.RESET)
            return
        if reset.seeds:
            for row in np.flatnonzero(marks == StepMark.RESET).tolist():
                if (seed := reset.seeds[self._env_ids[row]]) is not None:
                    self._writer.note(row, seed)
        self._write(envs, marks, None, spaces.flatten(self._spaces[0], observations))

    def step_begun(self, actions: Any) -> None:
        self._acted, writer = False, self._writer
        if not self._ready():
            return
        assert writer.batch is not None
        try:
            leaves = [actions] if self._flat_actions else spaces.flatten(self._spaces[1], actions)
            for column, leaf in zip(writer.batch.actions, leaves, strict=True):
                column[writer.at] = leaf if self._chosen is None else np.asarray(leaf)[self._chosen]
        except (ValueError, TypeError, KeyError) as error:  # of a form that envs understand, and their space does not
            log.warning("actions cannot be recorded: %s", error)
        else:
            self._acted = True

    def step_ended(self, envs: HubVectorEnv, result: StepReturn) -> None:
        if not self._writer.records:
            return
        observations, rewards, terminations, truncations, infos = result
        flags = [rewards, terminations, truncations]
        if self._chosen is not None:
            flags = [*map(self._of_chosen, flags)]
        failed = self._failed(infos) if infos else []
        if not self._acted:
            begun = flags[1] | flags[2]
            begun[failed] = True
            self._miss(begun & (self._mode != "Disabled"))
            return
        marks: np.ndarray | StepMark = StepMark.STEPPED
        if failed:
            marks = np.zeros(len(self._env_ids), np.uint8)
            marks[failed] = StepMark.FAILED
            for row in failed:
                self._writer.note(row, _failure(infos, self._env_ids[row]))
        if self._mode == SAME_STEP and infos:
            self._write_finals(infos, {*np.flatnonzero(flags[1] | flags[2]).tolist()} - {*failed})
        leaves = [observations] if self._flat_observations else spaces.flatten(self._spaces[0], observations)
        self._write(envs, marks, flags, leaves)

    def broken_off(self, error: BaseException | None) -> None:
        if not self._writer.opened or not self._ready():
            return
        raised = None if error is None else raised_by_env(error)
        if raised is not None and raised.env_index in self._row_of:
            self._writer.note(self._row_of[raised.env_index], f"exception: {error!r}"[:NOTE_CHARACTERS])
        self._write(None, StepMark.BROKEN_OFF, None, ())

    def close(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        try:
            self._writer.end(() if self._missed is None else self._missed.tolist())
        finally:
            self._writer.close()

    def _at_exit(self) -> None:
        """Have everything written that is complete at the end of the program, which does not wait for that."""
        if os.getpid() == self._pid:
            self._writer.end(() if self._missed is None else self._missed.tolist())

    def _open(self, envs: HubVectorEnv) -> None:
        films = self._setup["film"]
        if films:
            shape = np.shape(envs.render(films[:1])[0])
            if len(shape) == 3 and shape[2] == 3 and max(shape) <= SIDE_MAX:
                self._setup["frames"] = [len(films), *shape]
                self._courses = {env: EpisodeCourse(self._mode, self._options.every) for env in films}
            else:
                log.warning("nothing is filmed: frames are to be (height, width, 3), and these are %s", shape)
        step = step_of(self._spaces, len(self._env_ids), self._mode == SAME_STEP, self._setup["frames"])
        self._writer.open(self._setup, step, self._options.queue_bytes)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _ready(self) -> bool:
        """True if there is room for a step; steps that were missed before it are noted first."""
        is_ready = self._writer.ready()
        if is_ready and self._missed is not None:
            for row, count in enumerate(self._missed.tolist()):
                self._writer.note(row, count)
            self._write(None, StepMark.MISSED, None, ())
            for env, course in self._courses.items():
                course.miss(int(self._missed[self._row_of[env]]))
            self._missed = None
            return self._writer.ready()
        return is_ready

    def _miss(self, begun: np.ndarray) -> None:
        """Miss a step with which an episode of these rows begins, or after which it does."""
        if self._writer.records:
            self._missed = begun.astype(int) + (0 if self._missed is None else self._missed)

    def _write(
        self,
        envs: HubVectorEnv | None,
        marks: np.ndarray | StepMark,
        flags: Sequence[np.ndarray] | None,
        leaves: Sequence[Any],
    ) -> None:
        """Write a row, and complete it; without flags it is no step, and without ``envs`` it shows nothing."""
        batch, at = self._writer.batch, self._writer.at
        assert batch is not None
        batch.marks[at] = marks
        batch.rewards[at], batch.terminations[at], batch.truncations[at] = (0, False, False) if flags is None else flags
        for column, leaf in zip(batch.observations, leaves, strict=False):
            column[at] = leaf if self._chosen is None else np.asarray(leaf)[self._chosen]
        courses = {}
        if self._courses:
            courses = {env: self._followed(env, course) for env, course in self._courses.items()}
            due = [env for env, course in courses.items() if course.shows]
            for env, frame in zip(due, envs.render(due) if due and envs is not None else (), strict=False):
                batch.frames[at, [*courses].index(env)] = frame
        self._writer.complete_step()
        self._courses = courses

    def _followed(self, env: int, course: EpisodeCourse) -> EpisodeCourse:
        """The course after the row that is written; a copy, for an interrupt may keep it from being completed."""
        batch, at, row = self._writer.batch, self._writer.at, self._row_of[env]
        assert batch is not None
        followed, mark = copy.copy(course), int(batch.marks[at, row])
        if mark == StepMark.MISSED:
            followed.miss(int(followed.resets_next))
        followed.follow(mark, bool(batch.terminations[at, row] | batch.truncations[at, row]))
        return followed

    def _write_finals(self, infos: Mapping[Any, Any], rows: set[int]) -> None:
        """Write the last observations of episodes that ended in a step that shows the next ones."""
        batch = self._writer.batch
        assert batch is not None
        for row in rows:
            env = self._env_ids[row]
            final = infos[env]["final_obs"] if _is_by_env(infos) else infos["final_obs"][env]
            for column, part in zip(batch.finals, spaces.flatten(self._spaces[0], final), strict=True):
                column[self._writer.at, row] = part

    def _failed(self, infos: Mapping[Any, Any]) -> list[int]:
        if "invalid_transition" in infos:
            rows: list[int] = np.flatnonzero(self._of_chosen(np.asarray(infos["invalid_transition"], bool))).tolist()
            return rows
        if not _is_by_env(infos):
            return []
        return [self._row_of[env] for env in infos if env in self._row_of and infos[env].get("invalid_transition")]

    def _of_chosen(self, batch: np.ndarray) -> np.ndarray:
        return batch if self._chosen is None else batch[self._chosen]


def record(envs: HubVectorEnv, options: RecordOptions, origin: Origin) -> None:
    """Record these envs, which are closed where that cannot be."""
    try:
        recording = EpisodeRecording(envs, options, origin)
        envs.add_observer(recording)
        envs.count_recorded = recording.count
    except BaseException:
        envs.close(terminate=True)
        raise


def check_packages(films: bool) -> None:
    packages = {"minari": "minari", "pyarrow": "pyarrow", "PIL": "Pillow", **({"av": "av"} if films else {})}
    if missing := [name for module, name in packages.items() if find_spec(module) is None]:
        text = f'recording needs {" and ".join(missing)}: pip install "envhub-rl[record]"'
        raise ModuleNotFoundError(text, name=missing[0])


def _is_by_env(infos: Mapping[Any, Any]) -> bool:
    return isinstance(next(iter(infos), ""), int)


def _failure(infos: Mapping[Any, Any], env: int) -> str:
    failure = infos[env].get("env_failure") if _is_by_env(infos) else infos.get("env_failure", {env: None})[env]
    return "failed" if failure is None else f"{failure.cause}: {failure.message}"[:NOTE_CHARACTERS]


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):  # of a source tree that is not installed
            versions[name] = version(name)
    return versions


def _spec(envs: HubVectorEnv) -> str:
    """The spec that makes one of the envs again, in JSON; empty if nothing that can be written down makes it."""
    try:
        spec = environment(envs)
        return "" if spec is None else str(spec.to_json())
    except (TypeError, ValueError):
        return ""
