"""Several hubs that are killed, stopped and started again at the addresses they had."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hubs import HERE, ServedHub, free_port, serve, wait_until

import envhub


class SeveralHubs:
    """Hubs that offer the same, each with a folder of its own.

    Attributes:
        hubs: those that serve, or served last.
    """

    def __init__(self, folder: Path, count: int, *arguments: str, names: Sequence[str] = (), cwd: Path = HERE) -> None:
        self._folder, self._arguments, self._cwd = folder, arguments, cwd
        self._names = [("--name", name) for name in names] or [()] * count
        self._running = [contextlib.ExitStack() for _ in range(count)]
        self.hubs: list[ServedHub] = []
        for number in range(count):
            # Not port 0, which the kernel may give to another process while a hub is down.
            binds = [f"tcp://127.0.0.1:{free_port()}", f"ipc://{folder}/hub-{number}/hub.sock"]
            self.hubs.append(self._serve(number, binds))

    def _serve(self, number: int, binds: Sequence[str] | None, arguments: Sequence[str] = ()) -> ServedHub:
        folder = self._folder / f"hub-{number}"
        folder.mkdir(exist_ok=True)
        return self._running[number].enter_context(
            serve(folder, *(arguments or self._arguments), *self._names[number], binds=binds, cwd=self._cwd)
        )

    def addresses(self, *lanes: str) -> list[str]:
        """The hubs' addresses, of each hub by ``"ipc"`` or ``"tcp"``; the last one given is of all others, too."""
        lanes = (*lanes, *lanes[-1:] * len(self.hubs))
        return [hub.ipc if lane == "ipc" else hub.tcp for hub, lane in zip(self.hubs, lanes, strict=False)]

    def kill(self, number: int) -> None:
        """Kill a hub."""
        self.hubs[number].stop(signal.SIGKILL)

    def start(self, number: int, *arguments: str) -> None:
        """Start a hub in the place of one that has ended, with these arguments if any are given."""
        addresses = self.hubs[number].addresses
        self._running[number].close()
        self.hubs[number] = self._serve(number, addresses, arguments)

    def stop(self, number: int) -> None:
        """Stop a hub, as with its machine."""
        self.hubs[number].process.send_signal(signal.SIGSTOP)

    def resume(self, number: int) -> None:
        """Have a hub that was stopped go on."""
        self.hubs[number].process.send_signal(signal.SIGCONT)

    def restore(self) -> None:
        """Have all hubs serve."""
        for number, hub in enumerate(self.hubs):
            if hub.process.poll() is None:
                self.resume(number)
            else:
                self.start(number)

    def sessions(self, number: int) -> int:
        """The number of sessions that a hub has."""
        with envhub.connect(self.hubs[number].ipc) as client:
            return len(client.sessions())

    def end_sessions(self, number: int) -> None:
        """End all sessions of a hub, as its administrator."""
        with envhub.connect(self.hubs[number].ipc) as client:
            for each in client.sessions():
                with contextlib.suppress(envhub.SessionLost):  # it has just ended
                    client.end(each["session"])

    def await_no_sessions(self, timeout: float = 10.0) -> None:
        """See that no hub that serves has a session, within ``timeout`` seconds."""
        for number, hub in enumerate(self.hubs):
            if hub.process.poll() is None:
                assert wait_until(lambda: not self.sessions(number), timeout), f"hub {number}"  # noqa: B023

    def close(self) -> None:
        """End all of them."""
        for hub in self.hubs:
            if hub.process.poll() is None:
                hub.process.send_signal(signal.SIGCONT)
        for running in self._running:
            running.close()


def fixtures(count: int, *arguments: str) -> tuple[Any, Any]:
    """Fixtures ``running`` and ``hubs`` of a module: hubs that serve, without sessions before and after a test."""

    @pytest.fixture(scope="module")
    def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeveralHubs]:
        with several_hubs(tmp_path_factory.mktemp("hubs"), count, *arguments) as hubs:
            yield hubs

    @pytest.fixture
    def hubs(running: SeveralHubs) -> Iterator[SeveralHubs]:
        yield running
        running.restore()
        running.await_no_sessions(60.0)

    return running, hubs


@contextlib.contextmanager
def several_hubs(
    folder: Path, count: int, *arguments: str, names: Sequence[str] = (), cwd: Path = HERE
) -> Iterator[SeveralHubs]:
    """Hubs that offer what ``arguments`` say, with these names if any are given, until the block ends."""
    with contextlib.closing(SeveralHubs(folder, count, *arguments, names=names, cwd=cwd)) as hubs:
        yield hubs
