"""What the nemesis acts on: a served hub, a proxy and a relay before it, and a trainer on every lane."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from chaos.chaos_proxy import FAIR, ChaosProxy, Weather, proxy
from chaos.checker import Tally
from chaos.nemesis import EMBEDDED, IPC, RELAY, TCP, Act
from chaos.relay import Mischief, Relay, relay
from chaos.trainer import Task, arguments, heard
from hubs import ServedHub, lives, serve, wait_until, worker_processes

import envhub

TESTS = Path(__file__).parent.parent
FLOOD_PACE_S = 0.002  # within one turn of its loop the hub has to notice that its descriptors run out
FLOOD_CONNECTIONS, LEFT_DESCRIPTORS = 200, 100
HOARD_ENVS, HOARD_ELEMENTS = 64, 250_000  # a quarter of a gigabyte
HOARD_SESSIONS_MAX = 12
START_S = 60.0
GONE_S = 3.0  # one second is promised; the rest is for a machine on which everything happens at once


class TrainerProcess:
    """A trainer in a process of its own, and the next one after it was killed.

    Attributes:
        tally: what all of them saw.
        endings: how their sessions ended.
        kills: how many of them were killed.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._past = Tally()
        self._past_endings: Counter[str] = Counter()
        self.kills = 0
        self._start()

    def _start(self) -> None:
        self._line = ""
        self.process = subprocess.Popen(arguments(self._task), stdout=subprocess.PIPE, text=True, cwd=TESTS)
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, lines: Any) -> None:
        with lines:
            for line in lines:
                if line.endswith("}\n"):
                    self._line = line

    @property
    def tally(self) -> Tally:
        total = Tally()
        total.add(self._past)
        if self._line:
            total.add(heard(self._line)[0])
        return total

    @property
    def endings(self) -> Counter[str]:
        return self._past_endings + (heard(self._line)[1] if self._line else Counter())

    def kill(self) -> None:
        """Kill it, and have another one begin anew."""
        below = _below(self.process.pid)
        self.process.kill()
        self.process.wait()
        self._bury()
        self.kills += 1
        assert wait_until(lambda: not any(map(lives, below)), GONE_S), f"left of a killed trainer: {below}"
        self._start()

    def stop(self) -> None:
        """Have it end, and hear its last words."""
        self.process.terminate()
        try:
            self.process.wait(90)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._bury()

    def _bury(self) -> None:
        self._reader.join(10)
        self._past, self._past_endings, self._line = self.tally, self.endings, ""


class Scene:
    """Everything that is acted on, and the acts.

    Attributes:
        done: how often what was done.
        problems: what the acts found.
    """

    def __init__(self, stack: contextlib.ExitStack, folder: Path, seed: int, tasks: dict[str, Task]) -> None:
        self._stack = stack
        self._folder = folder
        self.done: Counter[str] = Counter()
        self._undo: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._hoarding: threading.Thread | None = None
        self._ending = threading.Event()
        self.problems: list[str] = []
        self._hub_stack = stack.enter_context(contextlib.ExitStack())
        self.hub = self._serve(None)
        self._proxy: ChaosProxy = stack.enter_context(proxy(self.hub.tcp, seed))
        self._relay: Relay = stack.enter_context(relay(self.hub.tcp, seed))
        addresses = {EMBEDDED: None, IPC: self.hub.ipc, TCP: self._proxy.address, RELAY: self._relay.address}
        self.trainers = {
            lane: TrainerProcess(replace(task, hub=addresses[lane], journal=self._journal(lane)))
            for lane, task in tasks.items()
        }

    def _journal(self, lane: str) -> str:
        return "" if lane == EMBEDDED else str(self._folder / f"journal-{lane}")

    def _serve(self, binds: Sequence[str] | None) -> ServedHub:
        offered = ("chain=chaos.chain_env:ChainEnv", "--lease", "20")
        return self._hub_stack.enter_context(serve(self._folder, *offered, binds=binds, cwd=TESTS))

    def await_trainers(self) -> None:
        """See that all of them are on their way."""
        under_way = wait_until(lambda: all(trainer.tally.batches for trainer in self.trainers.values()), START_S)
        assert under_way, f"a trainer did not start within {START_S:g} s; the hub says:\n{self.hub.log[-4000:]}"

    def check(self) -> None:
        """See that nobody has ended who was not told to."""
        for lane, trainer in self.trainers.items():
            assert trainer.process.poll() is None or trainer.tally.wrong, f"the trainer on {lane} has ended"
        assert self.hub.process.poll() is None, f"the hub has ended:\n{self.hub.log[-4000:]}"
        assert not self.problems, self.problems

    # --- acts ---------------------------------------------------------------------------------------------------------

    def act(self, act: Act) -> None:
        """Do it; where there is nobody to do it to, nothing."""
        if getattr(self, "_" + act.what.replace(" ", "_").replace("-", "_"))(act) is not False:
            self.done[act.what] += 1

    def pass_time(self, until_s: float) -> None:
        """Let time pass, and undo what was done for a time that is over."""
        while (now_s := time.monotonic()) < until_s:
            next_s = self._undo[0][0] if self._undo else until_s
            time.sleep(max(0.0, min(until_s, next_s) - now_s))
            self.undo(time.monotonic())

    def undo(self, until_s: float) -> None:
        """Undo what was to last until then at most."""
        while self._undo and self._undo[0][0] <= until_s:
            heapq.heappop(self._undo)[2]()

    def _later(self, seconds: float, undo: Callable[[], None]) -> None:
        heapq.heappush(self._undo, (time.monotonic() + seconds, next(self._order), undo))

    def _workers(self, lane: str) -> list[psutil.Process]:
        parent = self.trainers[EMBEDDED].process.pid if lane == EMBEDDED else self.hub.process.pid
        return sorted(worker_processes(parent), key=lambda worker: worker.pid)

    def _kill_worker(self, act: Act) -> bool | None:
        return self._signal_worker(act, signal.SIGKILL)

    def _stop_worker(self, act: Act) -> bool | None:
        return self._signal_worker(act, signal.SIGSTOP)

    def _signal_worker(self, act: Act, number: int) -> bool | None:
        workers = self._workers(act.lane)
        if not workers:
            return False
        self._signal(workers[act.pick % len(workers)], number, act.seconds)
        return None

    def _signal(self, process: psutil.Process, number: int, seconds: float) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
        if number == signal.SIGSTOP:
            self._later(seconds, lambda: self._signal(process, signal.SIGCONT, 0))

    def _kill_trainer(self, act: Act) -> None:
        self.undo(float("inf"))  # its private hub may be stopped, and could not notice
        self.trainers[act.lane].kill()

    def _stop_trainer(self, act: Act) -> None:
        self._signal(psutil.Process(self.trainers[act.lane].process.pid), signal.SIGSTOP, act.seconds)

    def _kill_hub(self, act: Act) -> bool | None:
        if act.lane == EMBEDDED:
            hub = self._private_hub()
            if hub is None:
                return False
            below = _below(hub.pid)
            hub.kill()
            assert wait_until(lambda: not any(map(lives, below)), GONE_S), f"left of a killed private hub: {below}"
            return None
        below = _below(self.hub.process.pid)
        self.undo(float("inf"))  # a hub that is stopped is killed all the same, but is not to be continued later
        self.hub.stop(signal.SIGKILL)
        assert wait_until(lambda: not any(map(lives, below)), GONE_S), f"left of a killed hub: {below}"
        addresses = self.hub.addresses
        self._hub_stack.close()
        time.sleep(act.seconds)
        self.hub = self._serve(addresses)
        return None

    def _stop_hub(self, act: Act) -> bool | None:
        hub = self._private_hub() if act.lane == EMBEDDED else psutil.Process(self.hub.process.pid)
        if hub is None:
            return False
        self._signal(hub, signal.SIGSTOP, act.seconds)
        return None

    def _private_hub(self) -> psutil.Process | None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.trainers[EMBEDDED].process.pid).children():
                if any("envhub_server.private_hub" in part for part in child.cmdline()):
                    return child
        return None

    def _flood(self, act: Act) -> None:
        """Connections that say nothing."""
        connections = []
        host, _, port = self.hub.tcp.removeprefix("tcp://").rpartition(":")
        for number in range(FLOOD_CONNECTIONS):
            time.sleep(FLOOD_PACE_S)
            with contextlib.suppress(OSError):
                connections.append(socket.socket(socket.AF_INET if number % 2 else socket.AF_UNIX))
                connections[-1].settimeout(0.01)  # a hub that is stopped takes none
                connections[-1].connect((host, int(port)) if number % 2 else self.hub.ipc.removeprefix("ipc://"))
        self._later(act.seconds, lambda: [each.close() for each in connections] and None)

    def _starve(self, act: Act) -> None:
        """Leave the hub fewer descriptors than the connections that come then want."""
        hub = psutil.Process(self.hub.process.pid)
        soft, hard = hub.rlimit(psutil.RLIMIT_NOFILE)
        hub.rlimit(psutil.RLIMIT_NOFILE, (hub.num_fds() + LEFT_DESCRIPTORS, hard))

        def feed() -> None:
            with contextlib.suppress(psutil.NoSuchProcess):
                hub.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))

        self._flood(act)
        self._later(act.seconds, feed)

    def _hoard(self, act: Act) -> bool | None:
        """Make sessions until the hub refuses more memory, which must not be the end of it; meanwhile time passes."""
        if self._hoarding is not None and self._hoarding.is_alive():
            return False
        self._hoarding = threading.Thread(target=self._fill_memory, args=(self.hub,), daemon=True)
        self._hoarding.start()
        return None

    def _fill_memory(self, hub: ServedHub) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(HOARD_SESSIONS_MAX):
                if self._ending.is_set():
                    return
                try:
                    large = {"elements": HOARD_ELEMENTS}
                    envs = envhub.make_vec("chain", HOARD_ENVS, hub=hub.ipc, env_kwargs=large, num_workers=1)
                except (envhub.RequestRefused, envhub.WorkerDied, envhub.HubUnreachable, envhub.SessionLost):
                    return
                stack.callback(envs.close, terminate=True)
            if self.hub is hub:  # else the memory of the one before is free again
                self.problems.append("the hub gave out more memory than it may")

    # --- acts on the network ------------------------------------------------------------------------------------------

    def _cut(self, act: Act) -> None:
        self._proxy.cut()

    def _half_close(self, act: Act) -> None:
        self._proxy.half_close()

    def _truncate(self, act: Act) -> None:
        self._proxy.truncate()

    def _hold(self, act: Act) -> None:
        self._set_weather(Weather(held=True), act.seconds)

    def _lag(self, act: Act) -> None:
        self._set_weather(Weather(latency_s=0.01, jitter_s=0.05), act.seconds)

    def _trickle(self, act: Act) -> None:
        self._set_weather(Weather(piece_bytes=1), act.seconds)

    def _narrow(self, act: Act) -> None:
        self._set_weather(Weather(bytes_per_s=100_000), act.seconds)

    def _set_weather(self, weather: Weather, seconds: float) -> None:
        self._proxy.weather(weather)
        self._later(seconds, lambda: self._proxy.weather(FAIR))

    def _double(self, act: Act) -> None:
        self._set_mischief(Mischief(double=0.3), act.seconds)

    def _delay(self, act: Act) -> None:
        self._set_mischief(Mischief(delay=0.3, double=0.1), act.seconds)

    def _drop(self, act: Act) -> None:
        self._set_mischief(Mischief(drop=0.05, double=0.1, delay=0.1), act.seconds)

    def _set_mischief(self, mischief: Mischief, seconds: float) -> None:
        self._relay.mischief = mischief

        def end() -> None:
            self._relay.mischief = Mischief()

        self._later(seconds, end)

    # --- the end ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Undo everything, let the trainers end, and see that nothing is left."""
        self.undo(float("inf"))
        if self._hoarding is not None:
            self._ending.set()
            self._hoarding.join(60)
        assert not self.problems, self.problems
        for trainer in self.trainers.values():
            trainer.stop()
        below = _below(self.hub.process.pid)
        assert self.hub.stop() == 0, f"the hub did not end well:\n{self.hub.log[-4000:]}"
        assert wait_until(lambda: not any(map(lives, below)), GONE_S), f"left of the hub: {below}"

    def relayed(self) -> Counter[str]:
        """What the relay did to messages."""
        return self._relay.done


def _below(pid: int) -> list[psutil.Process]:
    """The processes below one, and itself."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@contextlib.contextmanager
def scene(folder: Path, seed: int, tasks: dict[str, Task]) -> Iterator[Scene]:
    """A scene, for the block; afterwards nothing of it is left, however the block ended."""
    with contextlib.ExitStack() as stack:
        found = Scene(stack, folder, seed, tasks)
        try:
            yield found
        finally:
            for trainer in found.trainers.values():
                for process in _below(trainer.process.pid):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                trainer.process.wait()
            if found.hub.process.poll() is None:
                os.kill(found.hub.process.pid, signal.SIGCONT)
