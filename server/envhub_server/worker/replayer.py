"""Runs an env again through all its calls up to a failure, in this process; ``bootstrap.py`` starts it.

The env is made and stepped by the code of a worker, in memory of its own with one row; a vector env with the rows of
its session. The program that started this process reads from a pipe which call is running and how it ended, for a
simulator may end this process.
"""

from __future__ import annotations

import faulthandler
import inspect
import json
import os
import pdb
import resource
import sys
import traceback
from dataclasses import replace
from typing import Any, Callable

import numpy as np

from envhub.arena.memory import Arena, allocate
from envhub.arena.stand_in import ENDED, FRESH, REPORT_PENDING
from envhub.errors import raised_text, shortened, shown
from envhub.job_signals import STACKS
from envhub.regular_file import read_regular_file
from envhub.values import actions, codec, spaces
from envhub.values.gym_api import api
from envhub.values.leaf import OBJECT
from envhub_server.ipc import journal
from envhub_server.ipc.control import Build
from envhub_server.ipc.journal import AGAIN, BY_REQUEST, FIRST, OUT_OF_BAND, Digester, Journal, JournalLayout, Note
from envhub_server.ipc.replay_file import FILE_BYTES_MAX, Replay, unpack
from envhub_server.worker.env_batch import EnvBatch
from envhub_server.worker.env_sources import adopt_environment, factories, runner_class, set_up
from envhub_server.worker.gym_compat import adapt, innermost
from envhub_server.worker.journal_writer import bit_generator_of
from envhub_server.worker.native_env import NativeEnv, Share, made_by
from envhub_server.worker.observation_checks import NotFinite
from envhub_server.worker.row import Row

INFO_BYTES = 2048
UNSEEN_CHARS_MAX = 300  # of why there are no frames

Show = Callable[[Any], None]


class Replayer:
    """The env of a replay, and its rows in an arena of its own."""

    def __init__(self, replay: Replay, report: Callable[[dict[str, Any]], None], show: Show | None) -> None:
        """Make the env; ``report`` takes what happens, and ``show`` each frame, if it is to be rendered.

        Raises:
            BaseException: what the env's constructor raises.
        """
        self._replay, self._report, self._show = replay, report, show
        self._history = replay.calls()
        build, mapped = replay.orders()
        if build.memory_bytes_max:
            resource.setrlimit(resource.RLIMIT_DATA, (build.memory_bytes_max, build.memory_bytes_max))
        if build.sys_path:
            sys.path[:] = build.sys_path
        if build.cwd:
            os.chdir(build.cwd)
        # The file has no environment variables, because some are secrets: this process's variables apply.
        _register(replay.spec)
        build = replace(build, sys_path=[])
        self.group = _group(replay.row, build) if show is None else _shown_group(replay.row, build)
        self._is_batch = bool(build.shares)
        self._rows = mapped.num_envs if self._is_batch else 1
        self._place = self.group.place if isinstance(self.group, EnvBatch) else slice(0, 1)
        arena_layout = replace(mapped, num_envs=self._rows, info_bytes=INFO_BYTES).layout()
        observations, self._leaves = arena_layout.observations, arena_layout.actions
        descriptor = allocate(arena_layout)
        self._arena = Arena(arena_layout, descriptor)
        os.close(descriptor)
        self._arena.format(1)
        observed, acted = (spaces.build(codec.decode(blob)) for blob in (mapped.observation_space, mapped.action_space))
        self.group.attach(self._arena, observed, acted, lambda message: None, None, build.on_invalid != "pass")
        layout = JournalLayout(self._history.rows, observations, self._leaves)
        descriptor = journal.allocate(layout)
        self._journal = Journal(layout, descriptor)
        os.close(descriptor)
        self._digester = Digester(self._journal, self._arena.observations, self._place)
        shape = self._history.calls, self._history.rows
        self._kinds = np.frombuffer(self._history.kinds, np.uint8).reshape(shape)
        self._actions = [
            np.frombuffer(column, np.uint8).reshape(*shape, width)
            for column, width in zip(self._history.actions, layout.widths)
        ]
        self._digests = np.frombuffer(self._history.digests, np.uint8).reshape(*shape, layout.digest_bytes)
        self._notes: dict[int, list[Note]] = {}
        for note in self._history.notes:
            self._notes.setdefault(note.tick, []).append(note)

    def run(self, until: int | None, debugger: pdb.Pdb | None) -> dict[str, Any]:
        """Run every call; report the first difference. Return the outcome.

        Args:
            until: the call to stop before; with a debugger it is run in that.
            debugger: for the call that failed, or the one to stop before; None for none.

        Raises:
            BaseException: what the env raises.
        """
        differs = False
        stop = self._replay.failed_at if until is None and debugger is not None and not self._raises else until
        for number in range(self._history.calls):
            if number == stop and debugger is None:
                return {"stopped": number}
            self._report({"call": number})
            call, observed = self._prepared(number), True
            if number == stop and debugger is not None:
                if not _debug(debugger, self.group.env, self._is_reset(number), call):
                    return {"left": number}
            else:
                observed = self._make(call, number)
            self._film()
            if self._replay.memory_max and _private_bytes() > self._replay.memory_max:
                return {"overrun": number}
            if observed and not differs and self._differs(number):
                differs = True
                self._report({"differs": number})
        self._report({"call": self._history.calls})
        return {"survived": True}

    def _film(self) -> None:
        """Show a frame, if frames are wanted; where the env shows none, say why once, and go on."""
        if self._show is None:
            return
        try:
            self._show(self.group.env)
        except Exception as error:
            traceback.print_exc()
            self._report({"unseen": shortened(raised_text(type(error).__name__, str(error)), UNSEEN_CHARS_MAX)})
            self._show = None

    def _make(self, call: Callable[[], object], number: int) -> bool:
        """Make the call; go on, as the worker did, where it raises and the env was not made again.

        Returns:
            Whether the env gave an observation.

        Raises:
            BaseException: what the env raises, where it did not go on.
        """
        try:
            call()
        except BaseException as error:
            build = self._replay.build
            policy = build["on_invalid"] if isinstance(error, NotFinite) else build["on_exception"]
            is_step = not (self._kinds[number] == journal.RESET).any()
            if number >= self._replay.failed_at or (is_step and policy == "truncate"):
                raise
            self.group.repeat_last()
            return False
        return True

    @property
    def _raises(self) -> bool:
        return self._replay.failure.get("cause") in ("exception", "nan")

    def _is_reset(self, number: int) -> bool:
        kind, mode = self._history.kind(number), self._replay.build["autoreset_mode"]
        ended = kind == ENDED and mode == "NextStep" and not self._is_batch
        return ended or kind in (journal.RESET, journal.AUTORESET, FRESH)

    def _prepared(self, number: int) -> Callable[[], object]:
        """Prepare the call."""
        self._arena.request[self._place], self._arena.done[self._place] = number, number - 1
        if isinstance(self.group, EnvBatch):
            return self._prepared_batch(number, self.group)
        return self._prepared_row(number, self.group)

    def _prepared_batch(self, number: int, batch: EnvBatch) -> Callable[[], object]:
        notes = self._notes.get(number, ())
        if first := {note.position: note.seed for note in notes if note.kind == FIRST}:
            batch.first_seeds = [first.get(position) for position in range(self._history.rows)]
        if (self._kinds[number] == journal.RESET).any():
            asked = [note for note in notes if note.kind == BY_REQUEST]
            seeds = {batch.indices[note.position]: note.seed for note in asked}
            options = asked[0].options
            if first:  # else no row awaited its first reset
                self._arena.needs_reset[self._place] = FRESH
            return lambda: batch.reset_by(seeds, lambda row: codec.decode(options) if options else None)
        self._arena.needs_reset[self._place] = self._kinds[number]
        self._put_actions(number)
        return batch.step

    def _prepared_row(self, number: int, row: Row) -> Callable[[], object]:
        kind = int(self._kinds[number, 0])
        notes = {note.kind: note for note in self._notes.get(number, ())}
        if kind == journal.RESET:
            note = notes[BY_REQUEST]
            self._restore(notes.get(FIRST, note))
            seed = notes[FIRST].seed if FIRST in notes else note.seed
            options = codec.decode(note.options) if note.options else None
            return lambda: row.reset(seed, options)
        if kind == journal.AUTORESET or (kind == ENDED and self._is_reset(number)):
            if AGAIN in notes:
                self._restore(notes[AGAIN])
            return row.autoreset
        if kind == REPORT_PENDING:  # the step told of a failure; the env was not asked anything
            return row.repeat_last
        self._arena.needs_reset[0] = kind
        if kind == FRESH and FIRST in notes:
            self._restore(notes[FIRST])
            row.first_seed = notes[FIRST].seed
        self._put_actions(number)
        values = codec.decode(notes[OUT_OF_BAND].options) if OUT_OF_BAND in notes else ()
        return lambda: row.step(values)

    def _put_actions(self, number: int) -> None:
        leaves = len(self._leaves)
        codes = self._history.codes[number * leaves : (number + 1) * leaves]
        for at, (leaf, code) in enumerate(zip(self._leaves, codes)):
            self._arena.action_codes[at][self._place] = code
            if leaf != OBJECT and code & ~actions.PYTHON < len(actions.DTYPES):
                nbytes = leaf.items * actions.DTYPES[code & ~actions.PYTHON].itemsize
                batch = self._arena.actions[at][: self._rows * nbytes].reshape(self._rows, nbytes)
                batch[self._place] = self._actions[at][number, :, :nbytes]

    def _restore(self, note: Note) -> None:
        """Restore the env's random state before this reset."""
        if note.generator and note.seed is None:
            bit_generator = bit_generator_of(self.group.env)
            if bit_generator is not None:
                bit_generator.state = codec.decode(note.generator).bit_generator.state

    def _differs(self, number: int) -> bool:
        """True if the observation after this call differs from the recorded one; the failed call has none."""
        if number >= min(self._history.digested, self._replay.failed_at):
            return False
        self._digester.digest(0, number & 1)
        kinds = self._kinds[number]
        asked = (kinds != REPORT_PENDING) & (kinds != journal.NOTHING)
        return bool((self._journal.digests[0] != self._digests[number])[asked].any())


def _group(row: int, build: Build) -> Row | EnvBatch:
    """Make the env of this row, or the vector env."""
    adopt_environment(build)
    set_up(build)
    factory, mode = factories(build)[row], build.autoreset_mode
    if build.shares:
        return EnvBatch(build.rows, made_by(factory, Share(build.rows, build.shares), mode), mode, False)
    return Row(0, runner_class(b"")(adapt(factory())), mode, False)


def _shown_group(row: int, build: Build) -> Row | EnvBatch:
    """Make a group as ``_group``, with ``render_mode`` among the arguments if the env takes that."""
    try:
        return _group(row, replace(build, kwargs=_shown(build.kwargs)))
    except TypeError:
        return _group(row, build)


def _register(encoded: bytes) -> None:
    """Register the spec of an env that only its program had registered."""
    spec = codec.decode(encoded) if encoded else None
    if spec is not None and spec.id not in api.registry:
        api.registry[spec.id] = spec


def _shown(kwargs: bytes) -> bytes:
    """The arguments of an env that must render frames."""
    return codec.encode({"render_mode": "rgb_array", **(codec.decode(kwargs) if kwargs else {})})


def _private_bytes() -> int:
    """The resident memory of this process, without files and shared memory."""
    with open("/proc/self/statm", "rb") as file:
        _, resident, shared = file.read().split()[:3]
    return (int(resident) - int(shared)) * resource.getpagesize()


def _debug(debugger: pdb.Pdb, env: Any, is_reset: bool, call: Callable[[], object]) -> bool:
    """Make the call in the debugger, which stops where the env's own ``step`` or ``reset`` begins if that is Python.

    Returns:
        Whether the call has ended, and the debugger was not left before.
    """
    name = "reset" if is_reset else "step"
    method = getattr(type(innermost(env)), name, None)
    try:
        file, line = inspect.getsourcefile(method), inspect.getsourcelines(method)[1]  # type: ignore[arg-type]
    except (TypeError, OSError):
        pass  # no Python code: the debugger stops at the call
    else:
        debugger.set_break(debugger.canonic(str(file)), line, temporary=True, funcname=name)
        debugger.rcLines.append("continue")
    has_ended = False

    def run() -> None:
        nonlocal has_ended
        call()
        has_ended = True

    debugger.runcall(run)
    return has_ended


def main(path: str, report_descriptor: int, until: str, use_pdb: bool, video: bool) -> None:
    """Run the replay in this file; never returns.

    What happens is written to the descriptor, an object of JSON per line; after one with a ``frame`` come its bytes.
    """
    faulthandler.enable()
    faulthandler.register(STACKS, all_threads=True)

    def report(what: dict[str, Any]) -> None:
        os.write(report_descriptor, json.dumps(what).encode() + b"\n")

    def show(env: Any) -> None:
        rendered = env.call("render", (), {})[0] if isinstance(env, NativeEnv) else env.get_wrapper_attr("render")()
        frame = np.ascontiguousarray(rendered, np.uint8)
        if frame.ndim != 3 or frame.shape[2] != 3:
            raise TypeError(f"the env shows no frame in the mode rgb_array, but {shown(rendered, 100)}")
        report({"frame": frame.shape, "fps": float((env.metadata or {}).get("render_fps", 30))})
        data = frame.data.cast("B")
        while data:
            data = data[os.write(report_descriptor, data) :]

    replay = unpack(read_regular_file(path, FILE_BYTES_MAX))
    try:
        replayer = Replayer(replay, report, show if video else None)
    except BaseException:
        traceback.print_exc()
        report({"not_made": traceback.format_exc(limit=0).strip()})
        os._exit(1)
    try:
        report(replayer.run(int(until) if until else None, pdb.Pdb() if use_pdb else None))
    except BaseException as error:
        traceback.print_exc()
        kind = type(error)
        name = f"{kind.__module__}.{kind.__qualname__}"
        report({"raised": name, "message": str(error)[:1024], "invalid": isinstance(error, NotFinite)})
        if use_pdb:
            pdb.post_mortem(error.__traceback__)
    sys.stdout.flush()
    os._exit(0)  # as a worker does: destructors of simulators may hang
