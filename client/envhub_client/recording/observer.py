"""``EpisodeRecording`` copies what a vector env shows into batches, and waits for nothing: it rather drops episodes."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from envhub.errors import raised_by_env
from envhub.process import blocked
from envhub.protocol.messages import Reset
from envhub.transport.address import environment as variables
from envhub.transport.descriptors import new_memory
from envhub.values import codec, spaces
from envhub_client.envs.arguments import Origin, environment
from envhub_client.envs.snapshots import Snapshot
from envhub_client.envs.vector_env import HubVectorEnv, StepObserver, StepReturn
from envhub_client.record_options import Recorded, RecordOptions
from envhub_client.recording.episodes import (
    BATCHES,
    SAME_STEP,
    SIDE_MAX,
    Detail,
    StepBatch,
    StepMark,
    batches_of,
    check_recordable,
    mapped,
    step_of,
)
from envhub_client.recording.process import MESSAGE_BYTES_MAX, claim, give_up, use_normal_priority

START_S = 60.0  # for the process to import what it needs
WRITE_S = 60.0  # for it to write what it has, once the recording is closed
END_S = 5.0  # for it to end then
HANDED_OVER_S = 1.0  # after this long a batch is handed over though it is not full, if the process waits for one
DETAIL_CHARS_MAX = 300
PACKAGES = "envhub-rl", "gymnasium", "numpy", "minari"

# The empty entry comes first in its path: the process must not find a minari.py of the folder in which it starts.
_BOOT = "import sys; sys.path[:] = filter(None, sys.path); from envhub_client.recording.process import main; main({})"

log = logging.getLogger("envhub")


class EpisodeRecording(StepObserver):
    """Writes the episodes of a vector env to disk."""

    def __init__(self, envs: HubVectorEnv, options: RecordOptions, origin: Origin) -> None:
        envs.refuse_reward_axes("a recording")
        if options.film and envs.render_mode != "rgb_array":
            raise ValueError(f'films need render_mode="rgb_array"; these envs have {envs.render_mode!r}')
        self._spaces = envs.single_observation_space, envs.single_action_space
        for space in self._spaces:
            check_recordable(space)
        self._flat_observations, self._flat_actions = map(spaces.is_flat, self._spaces)
        self._options, self._mode = options, envs.autoreset_mode.value
        self._env_ids = options.chosen(envs.num_envs)
        is_all = len(self._env_ids) == envs.num_envs
        self._chosen: Any = slice(None) if is_all else np.array(self._env_ids)  # a slice copies nothing
        self._row_of = {env: row for row, env in enumerate(self._env_ids)}
        self._acted = False  # whether the actions of the step under way are written
        self._missed: np.ndarray | None = None  # episodes that began in steps that were missed just now, by row
        env, kwargs = origin.described()
        folder = claim(Path(options.folder).expanduser().absolute())
        self._setup: dict[str, Any] = {
            "folder": str(folder),
            "spaces": [*map(spaces.describe, self._spaces)],
            "spec": _spec(envs),
            "fps": envs.metadata.get("render_fps"),
            "film": sorted(options.film),
            "frames": [],
            "limits": {name: value for name, value in vars(options).items() if name.endswith(("_max", "_bytes"))},
            "about": {
                "env": env,
                "kwargs": kwargs,
                "hub": envs.address,
                "num_envs": envs.num_envs,
                "autoreset_mode": self._mode,
                "versions": _versions(),
                "env_ids": self._env_ids,
                "every": options.every,
                "only": options.only,
            },
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
        marks[np.array(reset.mask)[self._chosen] if reset.mask else slice(None)] = StepMark.RESET
        if not self._ready():
            self._miss(marks == StepMark.RESET)
            return
        if reset.snapshot:
            self._note_branches(envs, marks)
        elif reset.seeds:
            for row in np.flatnonzero(marks == StepMark.RESET).tolist():
                if (seed := reset.seeds[self._env_ids[row]]) is not None:
                    self._writer.add_detail(row, seed)
        self._write(envs, marks, None, spaces.flatten(self._spaces[0], observations))

    def _note_branches(self, envs: HubVectorEnv, marks: np.ndarray) -> None:
        for row in np.flatnonzero(marks == StepMark.RESET).tolist():
            snapshot, source = envs.restored_from[self._env_ids[row]]
            at = snapshot.env_ids.index(source)
            if snapshot.ended[at]:  # its next step may be the reset that follows
                marks[row] = StepMark.BROKEN_OFF
            else:
                detail = {"snapshot": snapshot.name, "env_id": source, "step": snapshot.steps[at]}
                self._writer.add_detail(row, detail)

    def snapshot_taken(self, snapshot: Snapshot) -> None:
        if not self._writer.opened or not self._ready():
            return
        for row in (self._row_of[env] for env in snapshot.env_ids if env in self._row_of):
            self._writer.add_detail(row, snapshot.name)
        self._write(None, StepMark.STILL, None, ())

    def step_begun(self, actions: Any) -> None:
        self._acted, writer = False, self._writer
        if not self._ready():
            return
        assert writer.batch is not None
        try:
            leaves = [actions] if self._flat_actions else spaces.flatten(self._spaces[1], actions)
            for column, leaf in zip(writer.batch.actions, leaves, strict=True):
                column[writer.at] = np.asarray(leaf)[self._chosen]
        except (ValueError, TypeError, KeyError) as error:  # of a form that envs understand, and their space does not
            log.warning("actions cannot be recorded: %s", error)
        else:
            self._acted = True

    def step_ended(self, envs: HubVectorEnv, result: StepReturn) -> None:
        if not self._writer.records:
            return
        observations, rewards, terminations, truncations, infos = result
        flags = [each[self._chosen] for each in (rewards, terminations, truncations)]
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
                self._writer.add_detail(row, _failure(infos, self._env_ids[row]))
        if self._mode == SAME_STEP and infos:
            self._write_finals(infos, {*np.flatnonzero(flags[1] | flags[2]).tolist()} - {*failed})
        leaves = [observations] if self._flat_observations else spaces.flatten(self._spaces[0], observations)
        self._write(envs, marks, flags, leaves)

    def broken_off(self, error: BaseException | None) -> None:
        if not self._writer.opened or not self._ready():
            return
        raised = None if error is None else raised_by_env(error)
        if raised is not None and raised.env_index in self._row_of:
            self._writer.add_detail(self._row_of[raised.env_index], f"exception: {error!r}"[:DETAIL_CHARS_MAX])
        self._write(None, StepMark.BROKEN_OFF, None, ())

    def close(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        try:
            self._writer.end(self._missed)
        finally:
            self._writer.close()

    def _at_exit(self) -> None:
        """Have everything written that is complete at the end of the program, which does not wait for that."""
        if os.getpid() == self._pid:
            self._writer.end(self._missed)

    def _open(self, envs: HubVectorEnv) -> None:
        films = self._setup["film"]
        if films:
            shape = np.shape(envs.render(films[:1])[0])
            if len(shape) == 3 and shape[2] == 3 and max(shape) <= SIDE_MAX:
                self._setup["frames"] = [len(films), *shape]
            else:
                log.warning("nothing is filmed: frames are to be (height, width, 3), and these are %s", shape)
        step = step_of(self._spaces, len(self._env_ids), self._mode == SAME_STEP, self._setup["frames"])
        self._writer.open(self._setup, step, self._options.queue_bytes)

    def _ready(self) -> bool:
        """True if there is room for a step; steps that were missed before it are noted first."""
        is_ready = self._writer.ready()
        if is_ready and self._missed is not None:
            for row, count in enumerate(self._missed.tolist()):
                self._writer.add_detail(row, count)
            self._write(None, StepMark.MISSED, None, ())
            self._missed = None
            return self._writer.ready()
        return is_ready

    def _miss(self, begun: np.ndarray) -> None:
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
            column[at] = np.asarray(leaf)[self._chosen]
        if envs is not None and self._setup["frames"]:
            batch.frames[at] = envs.render(self._setup["film"])
        self._writer.complete_step()

    def _write_finals(self, infos: Mapping[Any, Any], rows: set[int]) -> None:
        batch = self._writer.batch
        assert batch is not None
        for row in rows:
            env = self._env_ids[row]
            final = infos[env]["final_obs"] if _is_by_env(infos) else infos["final_obs"][env]
            for column, part in zip(batch.finals, spaces.flatten(self._spaces[0], final), strict=True):
                column[self._writer.at, row] = part

    def _failed(self, infos: Mapping[Any, Any]) -> list[int]:
        if _is_by_env(infos):
            return [self._row_of[env] for env in infos if env in self._row_of and infos[env].get("invalid_transition")]
        failed = np.asarray(infos.get("invalid_transition", ()), bool)
        return np.flatnonzero(failed[self._chosen]).tolist() if failed.size else []


class StepWriter:
    """Writes batches for a process, which it starts. The caller fills row ``at`` of ``batch``, and completes it."""

    def __init__(self, folder: Path) -> None:
        self.opened = False  # the process was told what is recorded
        self.records = False  # it takes steps, until it has said that nothing more is recorded
        self.batch: StepBatch | None = None
        self.at = 0
        self.recorded = Recorded(folder)
        self._line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._free = [*range(BATCHES)]
        self._details: list[tuple[int, int, Detail]] = []
        # An interrupt may come between any two lines. A batch whose handing over it broke off is handed over again,
        # with the same number, by which the process knows it.
        self._number, self._index, self._is_full, self._flush_s = -1, 0, False, 0.0
        try:
            with other, blocked():  # it ends once its program has, and everything is written
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT.format(other.fileno())],
                    pass_fds=[other.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**variables(os.environ), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
        except BaseException:
            self._line.close()
            raise

    def open(self, setup: Mapping[str, Any], step: np.dtype[Any], queue_bytes: int) -> None:
        self._steps, nbytes = batches_of(step, queue_bytes)
        memory = new_memory("envhub-recording", nbytes)
        try:
            self._batches = mapped(memory, step, self._steps)
            self.opened = self.records = True
            self._send(b"setup", codec.encode({**setup, "steps": self._steps}, codec.as_repr), [memory])
        finally:
            os.close(memory)
        self.read_answers(START_S)

    def ready(self) -> bool:
        if self._is_full or (self.batch is not None and self.at == self._steps):  # an interrupt came before or in it
            self.hand_over()
        if self.batch is None and self.records:
            self.read_answers()
            if self.records and self._free:
                self._number += 1
                self._index, self.at = self._free.pop(), 0
                self._flush_s = time.monotonic() + HANDED_OVER_S
                self.batch = self._batches[self._index]
        return self.batch is not None

    def add_detail(self, row: int, detail: Detail) -> None:
        self._details.append((self.at, row, detail))

    def complete_step(self) -> None:
        self.at += 1
        if self.at == self._steps:
            self.hand_over()
        elif time.monotonic() > self._flush_s:
            self.read_answers()
            # Only to a process that waits for one: while it gets no CPU, a few steps would take all batches.
            if self.records and len(self._free) == BATCHES - 1:
                self.hand_over()
            self._flush_s = time.monotonic() + HANDED_OVER_S

    def hand_over(self) -> None:
        self._is_full = True
        order = {"number": self._number, "batch": self._index, "steps": self.at}
        self._send(codec.encode(order), codec.encode(self._details))
        self.batch, self._details = None, []
        self._is_full = False

    def read_answers(self, wait_s: float = 0.0) -> None:
        """Take what the process has said; where it has said nothing, wait for up to ``wait_s`` for one answer."""
        while self.records:
            try:
                self._line.settimeout(wait_s)
                message = self._line.recv(MESSAGE_BYTES_MAX)
            except ConnectionResetError:  # it has ended, and had not read everything; what it said before follows
                continue
            except (BlockingIOError, TimeoutError):
                return
            answer = codec.decode(message) if message else None
            if answer is None:
                self._lose("its process has ended")
                return
            counts = (answer[name] for name in Recorded._fields[1:])
            self.recorded, self.records, wait_s = Recorded(self.recorded.folder, *counts), not answer["closed"], 0.0
            if answer["batch"] is not None:
                self._free.append(answer["batch"])
        self.batch = None

    def end(self, missed: np.ndarray | None) -> None:
        """Hand over what is complete, and have the process end; ``missed`` counts, by row, the last episodes."""
        if self.batch is not None and (self.at or self._is_full):
            self.hand_over()
        if self.records and self._process.poll() is None:
            use_normal_priority(self._process.pid)
            with contextlib.suppress(OSError):
                self._line.send(codec.encode({"missed": [] if missed is None else missed.tolist()}))

    def close(self) -> None:
        """Wait until everything is written, which follows ``end``, and say what was not."""
        deadline_s = time.monotonic() + WRITE_S
        try:
            while self.records and (left_s := deadline_s - time.monotonic()) > 0:
                self.read_answers(left_s)
        finally:
            self._line.close()  # at which it ends, if it has not
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self.records:
                self._lose("its process did not end in time")
        if not self.opened:
            self.recorded.folder.rmdir()  # nothing was reset, and nothing is in it
        folder, episodes, nbytes, dropped, ended = self.recorded
        text = "%d episodes (%s bytes) are recorded in %s; %d were dropped%s"
        why = f"; none was recorded after that: {ended}" if ended else ""
        log.log(
            logging.WARNING if dropped or ended else logging.INFO, text, episodes, f"{nbytes:,}", folder, dropped, why
        )

    def _send(self, message: bytes, attached: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message, with what is too large for one behind a descriptor of its own; nothing once it has ended."""
        memory = os.memfd_create("envhub-recording-details")
        try:
            os.pwrite(memory, attached, 0)
            socket.send_fds(self._line, [message], [memory, *descriptors])
        except (BrokenPipeError, ConnectionResetError):
            self.read_answers()
        finally:
            os.close(memory)

    def _lose(self, why: str) -> None:
        """Record nothing more: the process has ended by itself. Count what it has written."""
        self.records, self.batch = False, None
        recorded = self.recorded._replace(ended=why)
        counts = {name: getattr(recorded, name) for name in Recorded._fields[1:]}
        self.recorded = recorded._replace(**give_up(recorded.folder, counts))
        log.warning("nothing more is recorded in %s: %s", recorded.folder, why)


def record(envs: HubVectorEnv, options: RecordOptions, origin: Origin) -> None:
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
    return "failed" if failure is None else f"{failure.cause}: {failure.message}"[:DETAIL_CHARS_MAX]


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):  # of a source tree that is not installed
            versions[name] = version(name)
    return versions


def _spec(envs: HubVectorEnv) -> str:
    """The spec that makes one of the envs again, in JSON; empty if nothing that can be written down makes it."""
    with contextlib.suppress(TypeError, ValueError):
        spec = environment(envs)
        return "" if spec is None else str(spec.to_json())
    return ""
