"""The recording of a program that writes the only tape itself, and waits at the end until everything is written."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envhub.errors import UnsupportedSpace
from envhub.recording.folder import amend, claim, recorded_in
from envhub.recording.options import Recorded, RecordOptions
from envhub.recording.recorder import EpisodeRecorder, Selection
from envhub.recording.recorder_handle import RecorderHandle, missing_packages, setup_of, why_unrecordable
from envhub.values import codec, spaces

WRITE_S = 60.0  # for the process that writes to write what it has
END_S = 5.0  # for it to end then

log = logging.getLogger("envhub")


class ProgramRecorder(EpisodeRecorder):
    """Records one vector env.

    Args:
        options: what is recorded.
        num_envs: of the vector env.
        spaces_of_one: of observations and of actions, of one env.
        mode: its autoreset mode.
        about: what is written next to the episodes: env, kwargs, versions.
        spec: of the env, in JSON; empty for none.
        metadata: of the env, which says how many frames of a film a second has.

    Raises:
        UnsupportedSpace: a space has parts that are no arrays.
        ValueError: the options do not fit the envs.
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        options: RecordOptions,
        num_envs: int,
        spaces_of_one: tuple[Any, Any],
        mode: str,
        about: Mapping[str, Any],
        spec: str,
        metadata: Mapping[str, Any],
    ) -> None:
        for space in spaces_of_one:
            if why := why_unrecordable(spaces.leaves(space)):
                raise UnsupportedSpace(f"{space} cannot be recorded: {why}")
        chosen, film = options.chosen(num_envs), sorted(options.film)
        self._folder = claim(Path(options.folder).expanduser().absolute())
        self._handle = RecorderHandle()
        described = [codec.encode(spaces.describe(space)) for space in spaces_of_one]
        setup = setup_of(options, str(self._folder), True, described, {**about, "env_ids": chosen})
        self._handle.set_up({**setup, "spec": spec, "metadata": codec.encode(dict(metadata), codec.as_repr)})
        line = self._handle.add_line(0, chosen, film, options.queue_bytes)
        super().__init__(
            line, Selection(num_envs, chosen, film, options.every), spaces_of_one, mode, options.queue_bytes
        )

    @property
    def recorded(self) -> Recorded:
        """Counts of what is recorded so far."""
        if not self.closed:
            self.tape.read_answers()
        counts = self.tape.counts
        return Recorded(
            self._folder, counts["episodes"], counts["nbytes"], counts["dropped"] + self.dropped, counts["ended"]
        )

    def _lost(self) -> None:
        self._count_written()
        log.warning("nothing more is recorded in %s: %s", self._folder, self.tape.counts["ended"])

    def _count_written(self) -> None:
        """Count what the process that writes has written before it was ended, and write that next to the episodes."""
        with contextlib.suppress(OSError):  # it has not begun
            episodes, nbytes = recorded_in(self._folder)
            counts = self.tape.counts = {**self.tape.counts, "episodes": episodes, "nbytes": nbytes}
            amend(self._folder, {**counts, "dropped": counts["dropped"] + self.dropped})

    def close(self) -> None:
        """Have everything written that is complete, and say what was not."""
        if self._handle.control.fileno() < 0:
            return
        try:
            super().close()
            written = self._wait_until_written()
        finally:
            self._handle.control.close()
            try:
                self._handle.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._handle.process.kill()
                self._handle.process.wait()
            if not self.opened:
                self._folder.rmdir()  # nothing was reset, and nothing is in it
        if not written:
            self.tape.counts["ended"] = self.tape.counts["ended"] or "its process has ended"
            self._count_written()
        recorded = self.recorded
        level = logging.WARNING if recorded.dropped or recorded.ended else logging.INFO
        log.log(
            level,
            "%d episodes (%s bytes) are recorded in %s; %d were dropped%s",
            *(recorded.episodes, f"{recorded.nbytes:,}", recorded.folder, recorded.dropped),
            f"; none was recorded after that: {recorded.ended}" if recorded.ended else "",
        )

    def _wait_until_written(self) -> bool:
        """True if the process that writes has said that it has written everything."""
        end_s = time.monotonic() + WRITE_S
        try:
            self._handle.close()
            while (left_s := end_s - time.monotonic()) > 0:
                self._handle.control.settimeout(left_s)
                answer = self._handle.answer()
                if answer is None:
                    return False
                counts = {"episodes": answer["episodes"], "nbytes": answer["nbytes"]}
                counts["ended"] = answer["ended"] or self.tape.counts["ended"]
                # Its count includes those that were dropped here.
                counts["dropped"] = max(0, answer["dropped"] - self.dropped)
                self.tape.counts = counts
                if answer["closed"]:
                    return True
        except (TimeoutError, BrokenPipeError):
            pass
        return False


def check_packages(films: bool) -> None:
    """Refuse to record without what it needs.

    Raises:
        ModuleNotFoundError: Minari, or PyAV for films, is not installed.
    """
    if why := missing_packages(films):
        raise ModuleNotFoundError(why, name=why.split()[2].rstrip(":"))
