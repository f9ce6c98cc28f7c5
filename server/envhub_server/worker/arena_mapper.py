"""Maps the arena of a worker, and opens its trace."""

from __future__ import annotations

import os

from envhub.arena.memory import Arena
from envhub.values import codec, spaces
from envhub.values.info_columns import Writer
from envhub_server.ipc import control
from envhub_server.ipc.channel import MESSAGE_BYTES_MAX
from envhub_server.ipc.trace import layout_of
from envhub_server.worker.bells import Bells
from envhub_server.worker.context import SessionSpaces, WorkerContext
from envhub_server.worker.trace_writer import TraceWriter


class ArenaMapper:
    """Maps the arena for one worker."""

    def __init__(self, context: WorkerContext, bells: Bells) -> None:
        self._channel, self._envs, _, self._reports, self._progress = context
        self._bells = bells

    def map(self, mapped: control.MapArena) -> Arena | None:
        """Map the arena whose descriptor came with the message, for all envs; None if an env does not fit.

        Raises ``ValueError``.
        """
        names = mapped.descriptor_names
        descriptors = control.ArenaDescriptors(**dict(zip(names, self._channel.take_descriptors(len(names)))))
        self._bells.attach(descriptors)
        arena = Arena(mapped.layout(), descriptors.memory)
        os.close(descriptors.memory)
        arena.check()
        if not self._attach(mapped, arena):
            return None
        self._progress.attach(arena, self._envs.groups[0].index)
        if mapped.trace_bytes_max:
            self._open_trace(arena, mapped.trace_bytes_max, descriptors.trace)
        return arena

    def _attach(self, mapped: control.MapArena, arena: Arena) -> bool:
        build, group = self._envs.build, self._envs.groups[0]
        columns = Writer(arena.layout.info_bytes, self._send_template) if build.columns else None
        info_bytes_max = MESSAGE_BYTES_MAX if build.allow_pickle else build.info_bytes_max
        checks = build.on_invalid != "pass", info_bytes_max
        try:
            of_session = [
                spaces.build(codec.decode(blob, build.allow_pickle))
                for blob in (mapped.observation_space, mapped.action_space)
            ]
            self._envs.spaces = SessionSpaces(of_session[0], of_session[1], mapped.observation_mode)
            for group in self._envs.groups:
                self._envs.spaces.check(group.env)
                group.attach(arena, of_session[0], of_session[1], self._channel.send, columns, *checks)
        except BaseException as error:
            self._reports.send(error, group.index, "factory_failed", arena.request.data[group.index])
            return False
        return True

    def _send_template(self, number: int, example: bytes) -> None:
        self._channel.send(control.InfoTemplate(number, example))

    def _open_trace(self, arena: Arena, bytes_max: int, descriptor: int) -> None:
        is_batch = bool(self._envs.build.shares)
        layout = layout_of(len(self._envs.indices), is_batch, arena.layout.actions, bytes_max)
        self._envs.set_trace(TraceWriter(layout, descriptor, arena, self._envs.groups))
        os.close(descriptor)
