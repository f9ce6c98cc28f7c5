"""Runs an env again through its trace up to a failure, in this process; ``bootstrap.py`` starts it.

The env is made and stepped by the code of a worker, in an arena of its own. The program that started this process reads
from a file which call is running and how it ended, for a simulator may end this process.
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
from functools import partial
from typing import Any, Callable, Iterator, Tuple

import numpy as np

from envhub.arena.memory import ENDED, Arena, allocate
from envhub.process import STACKS
from envhub.values import codec, spaces
from envhub.values.gym_api import api
from envhub_server.ipc.control import Build
from envhub_server.ipc.process_marks import private_bytes
from envhub_server.ipc.replay_file import ACTION, CODES, NOTHING, RESET, SET, Replay, entries_in, layout_of, read_replay
from envhub_server.worker.env_batch import EnvBatch
from envhub_server.worker.env_sources import adopt_environment, factories, runner_class, set_up
from envhub_server.worker.gym_compat import adapt, innermost
from envhub_server.worker.native_env import made_by
from envhub_server.worker.row import Row
from envhub_server.worker.row_memory import NotFinite
from envhub_server.worker.trace_writer import action_bytes, bit_generator_of

INFO_BYTES = 2048
MESSAGE_CHARS_MAX = 1024  # of an exception
STATE_BYTES = 1 << 14  # of what the other program reads


# A call of the trace: what it is, the kind of its time limit, and what makes it.
RepeatedCall = Tuple[str, str, Callable[[], Any]]


class Replayer:
    """The env of a replay, and its rows in an arena of its own."""

    def __init__(self, replay: Replay) -> None:
        build, mapped = replay.orders()
        if build.memory_bytes_max:
            resource.setrlimit(resource.RLIMIT_DATA, (build.memory_bytes_max, build.memory_bytes_max))
        sys.path[:] = build.sys_path or sys.path
        if build.cwd:
            os.chdir(build.cwd)
        spec = codec.decode(replay.spec) if replay.spec else None
        if spec is not None and spec.id not in api.registry:  # only its program has registered it
            api.registry[spec.id] = spec
        # The file has no environment variables, because some are secrets: this process's variables apply.
        self.build = build
        self.group = _group(replace(build, sys_path=[]))
        layout = replace(mapped, num_envs=mapped.num_envs if build.batch_workers else 1, info_bytes=INFO_BYTES).layout()
        memory = allocate(layout)
        self._arena = arena = Arena(layout, memory)
        arena.format(1)
        self._mine = self.group.arena_index if isinstance(self.group, EnvBatch) else slice(0, 1)
        observed, acted = (spaces.build(codec.decode(blob)) for blob in (mapped.observation_space, mapped.action_space))
        self.group.attach(arena, observed, acted, lambda message: None, None)
        trace = codec.decode(replay.trace)
        self._first, widths = trace["first"], layout_of(1, True, layout.actions, 0).widths
        rows, rings = len(build.rows), [np.frombuffer(ring, np.uint8) for ring in trace["rings"]]
        shape = rings[0].size // (8 * rows), rows
        self._rings = [ring.reshape(*shape, width) for ring, width in zip(rings, widths)]
        self._entries = [*entries_in(trace["entries"])]

    def calls(self) -> Iterator[RepeatedCall]:
        kinds, entries, number = self._rings[0].view(np.int64)[:, :, 0], self._entries, 0
        codes: list[int] = []
        for at in range(len(kinds) + 1):
            values: Any = ()
            while entries and entries[0][0] <= self._first + at:
                _, kind, *fields = entries.pop(0)
                if kind == ACTION:
                    values = codec.decode(fields[1])
                elif kind == CODES:
                    codes = fields[0]
                elif kind == RESET:
                    yield f"step {number}", "reset", partial(self._reset, number, *fields)
                    number += 1
                else:
                    what = f"{'set_attr' if kind == SET else 'call'} of {fields[1]}"
                    yield what, "call", partial(self._called, kind == SET, *fields)
            if at < len(kinds) and ((kinds[at] != NOTHING) & (kinds[at] <= ENDED)).any():
                kind = "reset" if self.build.autoreset_mode == "NextStep" and (kinds[at] == ENDED).all() else "step"
                yield f"step {number}", kind, partial(self._step, number, at, codes, values)
                number += 1

    def _post(self, number: int) -> None:
        self._arena.request[self._mine], self._arena.done[self._mine] = number, number - 1

    def _reset(self, number: int, pairs: list[list[Any]], options: bytes, generator: bytes) -> None:
        if generator:
            bit_generator_of(self.group.env).state = codec.decode(generator).bit_generator.state
        self._post(number)
        self._arena.needs_reset[self._mine] = 0
        seeds: dict[int, Any] = dict(pairs)
        given = seeds if self.build.batch_workers else dict.fromkeys([0], *seeds.values())
        self.group.reset_by(given, lambda row: codec.decode(options) if options else None)

    def _step(self, number: int, at: int, codes: list[int], values: Any) -> None:
        self._post(number)
        self._arena.needs_reset[self._mine] = self._rings[0][at].view(np.int64)[:, 0]
        arena, rows = self._arena, self._arena.layout.rows
        for leaf, (code, ring) in enumerate(zip(codes, self._rings[1:])):
            arena.action_codes[leaf][self._mine] = code
            nbytes = action_bytes(arena.layout.actions[leaf], code)
            arena.actions[leaf][: rows * nbytes].reshape(rows, nbytes)[self._mine] = ring[at, :, :nbytes]
        self.group.step(values)

    def _called(self, is_set: bool, rows: list[int], name: str, blobs: list[bytes]) -> None:
        targets = self.group.targets(rows if self.build.batch_workers else [0])
        target: Any
        for target, blob in zip(targets, blobs if is_set else blobs * len(targets)):
            value = codec.decode(blob)
            if is_set:
                target.env.set_wrapper_attr(name, value)
            elif callable(method := target.env.get_wrapper_attr(name)):
                method(*value[0], **value[1])


def _group(build: Build) -> Row | EnvBatch:
    adopt_environment(build)
    set_up(build)
    rows = build.rows
    factory = factories(build)[rows[0]]
    if build.batch_workers:
        return EnvBatch(rows, made_by(factory, rows, build), build)
    return Row(0, runner_class(b"")(adapt(factory())), replace(build, row_offset=build.row_offset + rows[0]))


def _debug(debugger: pdb.Pdb, env: Any, kind: str, run: Callable[[], object]) -> bool:
    """Make the call in the debugger, which stops where the env's own method begins; False if the debugger was left."""
    method = getattr(type(innermost(env)), kind, None)
    try:
        file, line = inspect.getsourcefile(method), inspect.getsourcelines(method)[1]  # type: ignore[arg-type]
    except (TypeError, OSError):
        pass  # no Python code: the debugger stops at the call
    else:
        debugger.set_break(debugger.canonic(str(file)), line, temporary=True, funcname=kind)
        debugger.rcLines.append("continue")
    ended = []
    debugger.runcall(lambda: ended.append(run()))
    return bool(ended)


def _run(replay: Replay, report: Callable[..., None], debugger: pdb.Pdb | None) -> str:
    report(name="its making", kind="init")
    replayer = Replayer(replay)
    build, calls = replayer.build, [*replayer.calls()]
    failed = len(calls) - 1
    report(made=True, before=calls[failed][0] if calls else "no call")
    for number, (name, kind, call) in enumerate(calls):
        report(name=name, kind=kind)
        try:
            if number == failed and debugger is not None and replay.cause not in ("exception", "nan"):
                if not _debug(debugger, replayer.group.env, kind, call):
                    return "left"
            else:
                call()
        except BaseException as error:
            policy = build.on_invalid if isinstance(error, NotFinite) else build.on_exception
            if number >= failed or (kind == "step" and policy == "truncate"):
                raise
            traceback.print_exc()  # the env went on after it
            replayer.group.repeat_last()
        if replay.memory_max and private_bytes() > replay.memory_max:
            return "memory"
    return "survived"


def main(path: str, state_descriptor: int, use_pdb: bool) -> None:
    faulthandler.enable()
    faulthandler.register(STACKS, all_threads=True)
    state: dict[str, Any] = {}

    def report(**fields: Any) -> None:
        state.update(fields)
        os.pwrite(state_descriptor, json.dumps(state).encode().ljust(STATE_BYTES), 0)

    try:
        report(end=_run(read_replay(path), report, pdb.Pdb() if use_pdb else None))
    except BaseException as error:
        traceback.print_exc()
        name, message = f"{type(error).__module__}.{type(error).__qualname__}", str(error)[:MESSAGE_CHARS_MAX]
        report(end="nan" if isinstance(error, NotFinite) else "exception", raised=name, message=message)
        if use_pdb:
            pdb.post_mortem(error.__traceback__)
    sys.stdout.flush()
    os._exit(0)  # as a worker does: destructors of simulators may hang
